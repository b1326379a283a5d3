"use strict";
/* The mathematics of the page, in float64: a net with one hidden layer, EP, BPTT and how far apart they are.
   A state is one array, the n0 outputs first, then the n1 hidden neurons. Names are those of the library. */
const Net = (() => {
  const HOLDS = 0.05,
    ALIGNED = 0.5,
    FAR = 0.75;
  const SETTLED = 1e-6;
  const UNIT = 64 * Number.EPSILON;

  const sigma = (v) => 1 / (1 + Math.exp(2 - 4 * v));
  const slopeOf = (y) => 4 * y * (1 - y);
  const curveOf = (y) => 16 * y * (1 - y) * (1 - 2 * y);

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const pixels = (text) => Float64Array.from(bytes(text), (v) => v / 255);

  function dequantise({ shape, scale, int8 }) {
    const integers = new Int8Array(bytes(int8).buffer);
    return Float64Array.from(integers, (q, k) => q * scale[Math.floor(k / shape[1])]);
  }

  /* site: where the nudge enters a prototypical net, "outside" sigma or "inside". */
  function make(stored, site = "outside") {
    const [n0, n1, n2] = stored.sizes;
    return {
      energyBased: stored.setting === "energy-based",
      eps: stored.eps,
      site,
      n0,
      n1,
      n2,
      W01: dequantise(stored.weights.W01),
      W12: dequantise(stored.weights.W12),
      b0: Float64Array.from(stored.biases.b0),
      b1: Float64Array.from(stored.biases.b1),
    };
  }

  const copy = (net) => ({
    ...net,
    W01: net.W01.slice(),
    W12: net.W12.slice(),
    b0: net.b0.slice(),
    b1: net.b1.slice(),
  });

  const scaleOf = (net) => (net.energyBased ? net.eps : 1);
  const visible = (net, x) => (net.energyBased ? x.map(sigma) : x);
  const activity = (net, s) => (net.energyBased ? s.map(sigma) : s);

  /* b1 + W12 r(x), which no step changes. */
  function drive(net, x) {
    const r = visible(net, x),
      out = net.b1.slice();
    for (let j = 0; j < net.n1; j++) {
      let sum = 0;
      for (let p = 0, k = j * net.n2; p < net.n2; p++, k++) sum += net.W12[k] * r[p];
      out[j] += sum;
    }
    return out;
  }

  function inputs(net, given, r) {
    const { n0, n1, W01, b0 } = net,
      out = new Float64Array(n0 + n1);
    out.set(b0);
    out.set(given, n0);
    for (let i = 0; i < n0; i++) {
      for (let j = 0; j < n1; j++) {
        const w = W01[i * n1 + j];
        out[i] += w * r[n0 + j];
        out[n0 + j] += w * r[i];
      }
    }
    return out;
  }

  /* F(x, s), or with a nudge {beta, y} F(x, s) - beta dl/ds. */
  function step(net, given, s, nudge) {
    const { n0, eps } = net,
      r = activity(net, s),
      total = inputs(net, given, r);
    const push = (i) => nudge.beta * scaleOf(net) * (nudge.y[i] - s[i]);
    if (net.energyBased) {
      const out = s.map((v, n) => (1 - eps) * v + eps * slopeOf(r[n]) * total[n]);
      if (nudge) for (let i = 0; i < n0; i++) out[i] += push(i);
      return out;
    }
    if (nudge && net.site === "inside") for (let i = 0; i < n0; i++) total[i] += push(i);
    const out = total.map(sigma);
    if (nudge && net.site === "outside") for (let i = 0; i < n0; i++) out[i] += push(i);
    return out;
  }

  /* The outputs (parity 0) or the hidden layer (parity 1) alone. */
  function halfStep(net, given, s, parity) {
    const whole = step(net, given, s),
      out = s.slice();
    const [from, to] = parity === 0 ? [0, net.n0] : [net.n0, s.length];
    out.set(whole.subarray(from, to), from);
    return out;
  }

  const apart = (a, b) => a.reduce((most, v, n) => Math.max(most, Math.abs(v - b[n])), 0);
  const residual = (net, given, s, nudge) => apart(step(net, given, s, nudge), s);

  /* All states s_0 ... s_T from zero. */
  function free(net, given, T, schedule = "synchronous") {
    const states = [new Float64Array(net.n0 + net.n1)];
    for (let t = 0; t < T; t++) {
      const s = states[t];
      states.push(
        schedule === "alternating" ? halfStep(net, given, s, (T - 1 - t) % 2) : step(net, given, s),
      );
    }
    return states;
  }

  /* On from a state until it rests, for at most this many steps; the last K + 1 states. */
  function settle(net, given, states, K, most = 1500, rest = 1e-13) {
    const last = states.slice(-K - 1);
    for (let t = 0; t < most; t++) {
      const s = last[last.length - 1],
        next = step(net, given, s);
      last.push(next);
      if (last.length > K + 1) last.shift();
      if (apart(next, s) < rest) return last.map(() => next);
    }
    return last;
  }

  function nudged(net, given, start, y, beta, K) {
    const states = [start];
    for (let t = 0; t < K; t++) states.push(step(net, given, states[t], { beta, y }));
    return states;
  }

  /* One step of a process: neurons, W01, biases; W12 is the hidden biases' row times r(x). */
  const outer = (net, left, right, add) => {
    const { n0, n1 } = net,
      out = new Float64Array(n0 * n1);
    for (let i = 0; i < n0; i++) for (let j = 0; j < n1; j++) out[i * n1 + j] = add(left, right, i, n0 + j);
    return out;
  };

  /* Delta(beta, t), t = 0 ... K-1. */
  function ep(net, states, beta) {
    const unit = 1 / (beta * scaleOf(net)),
      found = [];
    for (let t = 0; t + 1 < states.length; t++) {
      const before = activity(net, states[t]),
        after = activity(net, states[t + 1]);
      found.push({
        neurons: states[t + 1].map((v, n) => (v - states[t][n]) * unit),
        biases: after.map((v, n) => (v - before[n]) / beta),
        W01: outer(net, after, before, (a, b, i, j) => (a[i] * a[j] - b[i] * b[j]) / beta),
      });
    }
    return found;
  }

  /* -nabla(t), t = 0 ... K-1, back along the last K + 1 states of a free phase. */
  function bptt(net, given, states, y, K) {
    const { n0, n1, eps, W01 } = net,
      end = states.length - 1,
      found = [];
    let v = states[end].map((s, n) => (n < n0 ? y[n] - s : 0));
    for (let t = 0; t < K; t++) {
      const s = states[end - 1 - t],
        r = activity(net, s),
        total = inputs(net, given, r);
      const slope = net.energyBased ? r.map(slopeOf) : total.map((a) => slopeOf(sigma(a)));
      const a = v.map((value, n) => (net.energyBased ? eps : 1) * value * slope[n]);
      found.push({ neurons: v, biases: a, W01: outer(net, a, r, (p, q, i, j) => p[i] * q[j] + q[i] * p[j]) });
      const back = new Float64Array(n0 + n1);
      for (let i = 0; i < n0; i++) {
        for (let j = 0; j < n1; j++) {
          back[i] += W01[i * n1 + j] * a[n0 + j];
          back[n0 + j] += W01[i * n1 + j] * a[i];
        }
      }
      v = !net.energyBased
        ? back
        : back.map((b, n) => (1 - eps) * v[n] + eps * v[n] * curveOf(r[n]) * total[n] + slope[n] * b);
    }
    return found;
  }

  /* What rounding leaves of a step of f and of g: f is a difference of states divided by beta, g begins at the pull. */
  function noiseOf(net, x, rest, y, beta) {
    const largest = (all) => all.reduce((most, v) => Math.max(most, Math.abs(v)), 0);
    const size = largest(rest);
    const pull = y.reduce((most, v, i) => Math.max(most, Math.abs(v - rest[i])), 0);
    return {
      f: (UNIT * Math.max(1, size)) / (Math.abs(beta) * scaleOf(net)),
      g: UNIT * pull,
      entering: Math.max(1, size, largest(x)),
    };
  }

  /* Mean over elements of |f - g| / max(|f|, |g|), norms over time; elements that are rounding are left out.
     `weigh(share)` is how many elements one stands for, those whose process times `share` is more than rounding. */
  function distance(f, g, read, from, to, limit, weigh = (share) => (share < 1 ? 1 : 0)) {
    let errors = 0,
      counted = 0,
      dot = 0,
      allF = 0,
      allG = 0;
    for (let n = from; n < to; n++) {
      let ff = 0,
        gg = 0,
        ee = 0;
      for (let t = 0; t < f.length; t++) {
        const a = read(f[t])[n],
          b = read(g[t])[n];
        ff += a * a;
        gg += b * b;
        ee += (a - b) * (a - b);
        dot += a * b;
      }
      allF += ff;
      allG += gg;
      const size = Math.max(ff, gg);
      const share = Math.sqrt(f.length * Math.min(limit.f ** 2 / ff, limit.g ** 2 / gg));
      const weight = size > 0 ? weigh(share) : 0;
      if (weight > 0) errors += weight * Math.sqrt(ee / size);
      counted += weight;
    }
    const lengths = counted ? Math.sqrt(allF * allG) : 0;
    return { rmse: counted ? errors / counted : null, cosine: lengths ? dot / lengths : null };
  }

  /* Every synapse of W12 is a hidden bias's process times a pixel, which drops out of its distance, not of rounding. */
  function compare(net, f, g, r, noise) {
    const { n0, n1 } = net,
      neurons = (p) => p.neurons,
      biases = (p) => p.biases,
      synaptic = { f: noise.f * noise.entering, g: noise.g * noise.entering };
    const pixels = (share) => r.reduce((count, v) => count + (Math.abs(v) > share ? 1 : 0), 0);
    return {
      s0: distance(f, g, neurons, 0, n0, noise),
      s1: distance(f, g, neurons, n0, n0 + n1, noise),
      W01: distance(f, g, (p) => p.W01, 0, n0 * n1, synaptic),
      W12: distance(f, g, biases, n0, n0 + n1, synaptic, pixels),
      b0: distance(f, g, biases, 0, n0, synaptic),
      b1: distance(f, g, biases, n0, n0 + n1, synaptic),
    };
  }

  const synapseRmse = (m) => {
    const there = [m.W01.rmse, m.W12.rmse].filter((v) => v !== null);
    return there.length ? there.reduce((a, b) => a + b) / there.length : null;
  };

  function outcome(metrics) {
    const live = [metrics.W01, metrics.W12].filter((m) => m.rmse !== null);
    if (live.every((m) => m.rmse <= HOLDS)) return "holds";
    const off = live.some((m) => m.cosine === null || m.cosine < ALIGNED || m.rmse > FAR);
    return off ? "fails" : "holds approximately";
  }

  /* Everything about one digit: the free phase, the nudged one, both processes and their distances. */
  function study(net, x, y, { T, K, beta, schedule }) {
    const given = drive(net, x),
      states = free(net, given, T, schedule);
    return around(net, x, given, states, y, K, beta);
  }

  function around(net, x, given, states, y, K, beta) {
    const rest = states[states.length - 1],
      second = nudged(net, given, rest, y, beta, K);
    const f = ep(net, second, beta),
      g = bptt(net, given, states, y, K),
      metrics = compare(net, f, g, visible(net, x), noiseOf(net, x, rest, y, beta));
    return { net, x, given, states, second, ep: f, bptt: g, metrics, rmse: synapseRmse(metrics) };
  }

  /* What limits the match: the change that would bring EP nearest to BPTT. */
  function cause(found, y, K, beta) {
    const { net, x, given, states } = found;
    const rested = settle(net, given, states, Math.max(K, 2)),
      [before, , end] = rested.slice(-3);
    if (residual(net, given, end) > SETTLED)
      return apart(before, end) < SETTLED ? "two-cycle" : "never-settles";
    const again = (n, s, b) => around(n, x, given, s, y, K, b).rmse ?? 0;
    const without = {
      T: again(net, rested, beta),
      beta: again(net, states, beta / 100),
      "nudge-site":
        net.energyBased || net.site === "inside" ? Infinity : again({ ...net, site: "inside" }, states, beta),
    };
    return Object.keys(without).reduce((a, b) => (without[b] < without[a] ? b : a));
  }

  function verdict(found, y, K, beta) {
    const name = found.rmse === null ? "silent" : outcome(found.metrics);
    return { outcome: name, cause: name === "holds" || name === "silent" ? null : cause(found, y, K, beta) };
  }

  /* theta + rate * the sum of EP's updates. */
  function learn(net, x, updates, rate) {
    const out = copy(net),
      r = visible(net, x),
      { n0, n1, n2 } = net;
    for (const { W01, biases } of updates) {
      W01.forEach((v, k) => {
        out.W01[k] += rate * v;
      });
      for (let i = 0; i < n0; i++) out.b0[i] += rate * biases[i];
      for (let j = 0; j < n1; j++) {
        const change = rate * biases[n0 + j];
        out.b1[j] += change;
        for (let p = 0, k = j * n2; p < n2; p++, k++) out.W12[k] += change * r[p];
      }
    }
    return out;
  }

  const loss = (s, y) => y.reduce((sum, v, i) => sum + 0.5 * (s[i] - v) ** 2, 0);
  const oneHot = (digit, n = 10) => Float64Array.from({ length: n }, (_, i) => (i === digit ? 1 : 0));
  const best = (s, n0) => s.subarray(0, n0).reduce((top, v, i, all) => (v > all[top] ? i : top), 0);

  return {
    SETTLED,
    make,
    copy,
    pixels,
    visible,
    drive,
    step,
    free,
    residual,
    study,
    verdict,
    learn,
    loss,
    oneHot,
    best,
  };
})();
