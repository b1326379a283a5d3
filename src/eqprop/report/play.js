"use strict";
/* What is seen and touched. All numbers come from Net. */
const Play = (() => {
  const stored = JSON.parse(document.getElementById("stored").textContent);
  const $ = (id) => document.getElementById(id);
  const SIDE = 28,
    TURNS = 40;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  const view = {
    kind: "energy-based",
    site: "outside",
    digit: 0,
    i: 0,
    j: 0,
    pixel: 406,
    steps: 0,
    example: null,
    before: null,
  };
  const frames = { shown: 0, work: [] };
  let original,
    net,
    found,
    colours,
    drawing = new Float64Array(SIDE * SIDE),
    x = drawing;

  /* Numbers as people read them. */
  const short = (v) => {
    if (v === null || Number.isNaN(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 0.01 && size < 100) return v.toFixed(size < 1 ? 3 : 2).replace("-", "−");
    const [digits, power] = v.toExponential(1).split("e");
    return `${digits}·10${[...String(Number(power))].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("")}`.replace(
      "-",
      "−",
    );
  };
  const shortBeta = (v) => (v >= 0.1 ? v.toFixed(2) : v.toPrecision(2));

  /* The sliders as numbers. */
  const settings = () => ({
    T: Number($("T").value),
    K: Number($("K").value),
    beta: 10 ** (Number($("beta").value) / 100 - 3),
  });
  const rate = () => 10 ** (Number($("rate").value) / 50 - 2);
  const speed = () => 2 * 100 ** (Number($("speed").value) / 100);
  const target = () => Net.oneHot(view.digit);

  /* Colours. */
  const rgb = (name) => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  };
  function readColours() {
    colours = Object.fromEntries(
      ["rest", "full", "plus", "minus", "zero", "ink", "accent"].map((n) => [n, rgb(`--${n}`)]),
    );
  }
  const mix = (a, b, share) =>
    `rgb(${a.map((v, k) => Math.round(v + (b[k] - v) * Math.min(1, Math.max(0, share)))).join(" ")})`;
  const heat = (v) => mix(colours.rest, colours.full, v);
  const signed = (v) => mix(colours.zero, v < 0 ? colours.minus : colours.plus, Math.abs(v));

  function cells(canvas, values, side, colour, gap = 0, marked = -1) {
    const pen = canvas.getContext("2d"),
      size = canvas.width / side;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    values.forEach((v, n) => {
      pen.fillStyle = colour(v);
      pen.fillRect((n % side) * size, Math.floor(n / side) * size, size - gap, size - gap);
    });
    if (marked >= 0) {
      pen.strokeStyle = mix(colours.ink, colours.ink, 0);
      pen.lineWidth = 2;
      pen.strokeRect(
        (marked % side) * size + 1,
        Math.floor(marked / side) * size + 1,
        size - gap - 2,
        size - gap - 2,
      );
    }
  }

  /* The ten outputs as bars. */
  function makeBars(list, kind) {
    list.innerHTML = Array.from(
      { length: 10 },
      (_, d) =>
        `<li><span>${d}</span><span class="bar ${kind}"><i></i></span><span class="number"></span></li>`,
    ).join("");
  }
  function showBars(list, values, scale = 1) {
    const best = values.reduce((top, v, d) => (v > values[top] ? d : top), 0),
      isSigned = list.querySelector(".signed");
    [...list.children].forEach((line, d) => {
      const bar = line.querySelector("i"),
        share = Math.min(1, Math.max(-1, values[d] / scale));
      bar.style.transform = `scaleX(${isSigned ? share : Math.max(0, share)})`;
      bar.classList.toggle("minus", share < 0);
      line.lastChild.textContent = isSigned ? short(values[d]) : values[d].toFixed(2).replace("-", "−");
      line.classList.toggle("best", !isSigned && d === best);
    });
  }

  /* Charts. */
  const line = (points) =>
    points.map(([a, b], n) => `${n ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");

  /* Text keeps its size; only the picture grows with the page. */
  const heightOf = (svg, width) =>
    Math.round(Math.min(Number(svg.dataset.tallest), Math.max(130, 0.5 * width)));

  function plot(svg, { title, curves, last, cursor = null, low, high, ticks, right = "" }) {
    const width = Math.max(200, Math.round(svg.clientWidth)),
      height = heightOf(svg, width);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const left = 66,
      top = 24,
      foot = height - 18,
      end = width - 8,
      span = high - low || 1;
    const at = (t, v) => [
      left + (end - left) * (t / Math.max(1, last)),
      foot - (foot - top) * ((v - low) / span),
    ];
    const grid = ticks.map(([v, text]) => {
      const y = at(0, v)[1].toFixed(1);
      return `<path class="axis" d="M${left} ${y}H${end}"/><text x="${left - 5}" y="${Number(y) + 4}" text-anchor="end">${text}</text>`;
    });
    const lines = curves.map(
      ({ kind, values }) =>
        `<path class="${kind}" d="${line(values.map((v, t) => at(t, Math.min(high, Math.max(low, v)))))}"/>`,
    );
    const mark =
      cursor === null ? "" : `<path class="cursor" d="M${at(cursor, 0)[0].toFixed(1)} ${top}V${foot}"/>`;
    svg.innerHTML =
      `<text class="title" x="4" y="13">${title}</text><text x="${end}" y="13" text-anchor="end">${right}</text>` +
      grid.join("") +
      lines.join("") +
      mark +
      `<text x="${left}" y="${height - 4}">0</text><text x="${end}" y="${height - 4}" text-anchor="end">${last}</text>` +
      `<text x="${(left + end) / 2}" y="${height - 4}" text-anchor="middle">step t</text>`;
  }

  function range(curves) {
    const all = curves.flatMap((c) => [...c.values]),
      low = Math.min(0, ...all),
      high = Math.max(0, ...all);
    return low === high
      ? { low: -1, high: 1, ticks: [[0, "0"]] }
      : {
          low,
          high,
          ticks: [
            [0, "0"],
            ...[low, high]
              .filter((v) => v !== 0 && Math.abs(v) > 0.2 * (high - low))
              .map((v) => [v, short(v)]),
          ],
        };
  }

  function pair(svg, title, read, metric, name) {
    const curves = [
      { kind: "bptt", values: found.bptt.map(read) },
      { kind: "ep", values: found.ep.map(read) },
    ];
    plot(svg, { title, curves, last: found.ep.length - 1, ...range(curves) });
    svg.setAttribute(
      "aria-label",
      `${name}: EP's updates, dashed, and minus BPTT's gradients, solid, over ${found.ep.length} ` +
        `steps. Their layer's RMSE is ${short(metric.rmse)}.`,
    );
  }

  /* Playing through stored states. */
  const players = [];
  let last = null;
  function player(name, length, show, done = () => {}, begin = () => {}) {
    const id = (part) => $(name ? `${name}-${part}` : part);
    const me = { t: 0, playing: false, part: 0, speed: () => speed() };
    me.to = (t) => {
      me.t = Math.max(0, Math.min(length(), Math.round(t)));
      id("time").max = length();
      id("time").value = me.t;
      showValue(id("time").id, `${me.t} of ${length()}`);
      show(me.t);
    };
    me.play = (on) => {
      if (on && me.t >= length()) me.to(0);
      me.playing = on;
      id("play").textContent = on ? "Pause" : "Play";
      if (on) wake();
    };
    me.start = () => {
      if (calm.matches) {
        me.play(false);
        me.to(length());
        done();
      } else {
        begin();
        me.to(0);
        me.play(true);
      }
    };
    me.advance = (seconds) => {
      me.part += seconds * me.speed();
      const steps = Math.floor(me.part);
      me.part -= steps;
      if (!steps) return;
      me.to(me.t + steps);
      if (me.t >= length()) {
        me.play(false);
        done();
      }
    };
    id("play").onclick = () => me.play(!me.playing);
    id("step").onclick = () => {
      me.play(false);
      me.to(me.t >= length() ? 0 : me.t + 1);
      if (me.t >= length()) done();
    };
    id("replay").onclick = () => {
      me.to(0);
      me.play(true);
    };
    id("time").oninput = (event) => {
      me.play(false);
      me.to(Number(event.target.value));
      if (me.t >= length()) done();
    };
    players.push(me);
    return me;
  }
  function wake() {
    if (last === null) {
      last = performance.now();
      requestAnimationFrame(frame);
    }
  }
  function frame(now) {
    const began = performance.now(),
      seconds = Math.min(0.1, Math.max(0, (now - last) / 1000));
    last = now;
    const running = players.filter((p) => p.playing);
    running.forEach((p) => p.advance(seconds));
    frames.shown++;
    frames.work.push(performance.now() - began);
    if (frames.work.length > 600) frames.work.shift();
    if (running.length) requestAnimationFrame(frame);
    else last = null;
  }

  /* 2: settling. */
  const moves = () => found.moves;
  const end = () => found.states[found.states.length - 1];
  function showFree(t) {
    const s = found.states[t],
      rest = moves()[t];
    cells($("hidden"), s.subarray(net.n0), 8, heat, 2, view.j);
    showBars($("outputs"), s.subarray(0, net.n0));
    $("residual").textContent = short(rest);
    const log = (v) => Math.log10(Math.max(v, 1e-16));
    plot($("residual-chart"), {
      title: "residual",
      last: found.states.length - 1,
      cursor: t,
      low: -16,
      high: 0.5,
      ticks: [
        [0, "1"],
        [-6, "10⁻⁶"],
        [-12, "10⁻¹²"],
      ],
      right: "settled below 10⁻⁶",
      curves: [{ kind: "one", values: moves().map(log) }],
    });
  }
  function saySettled() {
    const s = end(),
      rest = moves()[moves().length - 1],
      digit = Net.best(s, net.n0);
    const how = rest < Net.SETTLED ? "At rest" : `Still moving by ${short(rest)} per step`;
    const empty = drawing.some((v) => v > 0) ? "" : "Nothing is drawn, so the biases alone decide. ";
    say(
      "settled",
      `${empty}${how} after ${found.states.length - 1} steps. The net reads ${digit} (output ${s[digit].toFixed(2)}).`,
    );
    $("hidden").setAttribute(
      "aria-label",
      `Hidden layer: ${s.subarray(net.n0).filter((v) => v > 0.5).length} of 64 neurons above one half`,
    );
    $("residual-chart").setAttribute(
      "aria-label",
      `Residual over ${found.states.length - 1} steps, ending at ${short(rest)}`,
    );
  }
  const settling = player(
    "",
    () => found.states.length - 1,
    showFree,
    saySettled,
    () => say("settled", "Settling …"),
  );

  /* 3: the nudge. */
  function showNudge(t) {
    const start = found.second[0],
      change = found.second[t].map((v, n) => v - start[n]);
    const largest = (from, to) =>
      found.second[found.second.length - 1].reduce(
        (most, v, n) => (n >= from && n < to ? Math.max(most, Math.abs(v - start[n])) : most),
        1e-300,
      );
    const outputs = largest(0, net.n0),
      hidden = largest(net.n0, start.length);
    showBars($("pulled"), change.subarray(0, net.n0), outputs);
    cells(
      $("moved"),
      change.subarray(net.n0).map((v) => v / hidden),
      8,
      signed,
      2,
      view.j,
    );
    $("moved").setAttribute(
      "aria-label",
      `Change of the hidden layer after ${t} nudged steps: ` +
        `${short(change.subarray(net.n0).reduce((m, v) => Math.max(m, Math.abs(v)), 0))} at most`,
    );
    showBuild(t);
  }
  function showBuild(t) {
    const at = view.i * net.n1 + view.j,
      sum = (all) => all.reduce((sums, p) => [...sums, sums[sums.length - 1] + p.W01[at]], [0]);
    const built = sum(found.ep),
      goal = sum(found.bptt),
      curves = [
        { kind: "bptt", values: goal },
        { kind: "ep", values: built.slice(0, t + 1) },
      ];
    plot($("build-chart"), {
      title: `synapse hidden ${view.j} – output ${view.i}: sum of updates`,
      curves,
      last: found.ep.length,
      cursor: t,
      ...range([{ values: goal }, { values: built }]),
      right: "",
    });
    $("build-chart").setAttribute(
      "aria-label",
      `Synapse from hidden neuron ${view.j} to output ${view.i}: after ${t} steps EP's ` +
        `update is ${short(built[t])}; BPTT's over all steps is ${short(goal[goal.length - 1])}`,
    );
  }
  const nudging = player("nudge", () => found.second.length - 1, showNudge);
  nudging.speed = () => speed() / 6;

  /* 4: EP against BPTT. */
  function showComparison() {
    const { i, j, pixel } = view,
      r = Net.visible(net, x),
      m = found.metrics,
      hidden = net.n0 + j;
    pair($("chart-s0"), `output ${i}`, (p) => p.neurons[i], m.s0, `Output neuron ${i}`);
    pair($("chart-s1"), `hidden neuron ${j}`, (p) => p.neurons[hidden], m.s1, `Hidden neuron ${j}`);
    pair(
      $("chart-W01"),
      `synapse hidden ${j} – output ${i}`,
      (p) => p.W01[i * net.n1 + j],
      m.W01,
      `Synapse between hidden ${j} and output ${i}`,
    );
    const place = `row ${Math.floor(pixel / SIDE)}, column ${pixel % SIDE}`;
    pair(
      $("chart-W12"),
      `synapse pixel – hidden ${j}`,
      (p) => p.biases[hidden] * r[pixel],
      m.W12,
      `Synapse between pixel ${place} and hidden ${j}`,
    );
    for (const group of ["s0", "s1", "W01", "W12"]) $(`rmse-${group}`).textContent = short(m[group].rmse);
  }

  let waiting = null;
  function judge() {
    clearTimeout(waiting);
    waiting = setTimeout(judgeNow, 120);
  }
  function judgeNow() {
    clearTimeout(waiting);
    const { K, beta } = settings(),
      v = Net.verdict(found, target(), K, beta);
    found.verdict = v;
    const words = stored.verdicts[v.cause ?? v.outcome].replace(
      "{residual}",
      short(moves()[moves().length - 1]),
    );
    const distance = found.rmse === null ? "" : ` The synapses' RMSE is ${short(found.rmse)}.`;
    const near = v.outcome !== "fails" && found.rmse < stored.near;
    say("verdict", `${v.cause ? `${stored.outcomes[near ? v.outcome : "fails"]} ` : ""}${words}${distance}`);
    $("verdict").classList.toggle("off", v.outcome !== "holds");
    if (!$("python").hidden) $("python").textContent = python();
  }

  /* What is on screen as a script: the digit to 8 bits, the net as it is stored, T, K and beta. */
  function python() {
    const { T, K, beta } = settings(),
      bytes = btoa(String.fromCharCode(...Array.from(x, (v) => Math.round(255 * v)))),
      lines = bytes.match(/.{1,76}/g).map((part) => `    "${part}"`),
      inside = view.site === "inside" ? ', nudge_site="inside"' : "",
      learned = view.steps ? `# The page's net has learned ${view.steps} steps since; this one has not.\n` : "";
    return `import base64, torch, eqprop
from eqprop.report.play import dequantised, stored

pixels = base64.b64decode(
${lines.join("\n")}
)
x = torch.tensor([list(pixels)], dtype=torch.float64) / 255
y = eqprop.data.one_hot(torch.tensor([${view.digit}]), 10).double()
${learned}net = dequantised(stored()["nets"]["${view.kind}"]${inside})
free = eqprop.relax(net, x, ${T})
print("answer", free.state[0].argmax().item(), "residual", free.residual.item())
print(eqprop.gdu.compare(net, eqprop.SquaredError(), x, y, T=${T}, K=${K}, beta=${Number(beta.toPrecision(6))}))
`;
  }
  function togglePython() {
    const shown = $("python").hidden;
    $("python").hidden = !shown;
    $("show-python").setAttribute("aria-expanded", String(shown));
    $("show-python").textContent = shown ? "Hide the Python" : "Show the Python";
    if (shown) $("python").textContent = python();
  }

  /* A slider's position is not its value: show the value, and give it to screen readers. */
  function showValue(slider, text) {
    $(`${slider}-shown`).textContent = text;
    $(slider).setAttribute("aria-valuetext", text);
  }

  /* A status is read aloud when it changes. */
  function say(id, text) {
    if ($(id).textContent !== text) $(id).textContent = text;
  }

  /* Everything anew, after any change. */
  function compute() {
    const { T, K, beta } = settings(),
      y = target();
    found = Net.study(net, x, y, { T, K, beta, schedule: "synchronous" });
    found.moves = found.states
      .slice(1)
      .map((s, t) => s.reduce((m, v, n) => Math.max(m, Math.abs(v - found.states[t][n])), 0));
    found.moves.push(Net.residual(net, found.given, found.states[T]));
    const shown = {
      beta: shortBeta(beta),
      T,
      K,
      rate: short(rate()),
      speed: `${Math.round(speed())} steps/s`,
    };
    for (const [name, text] of Object.entries(shown)) showValue(name, text);
    settling.to(settling.t);
    nudging.to(nudging.t);
    showComparison();
    showLearned();
    judge();
  }

  function showInput() {
    cells($("seen"), x, SIDE, heat, 0);
    const pen = $("paper").getContext("2d");
    cells($("paper"), drawing, SIDE, heat, 0);
    if (document.activeElement === $("paper") && cursor.shown) {
      const size = $("paper").width / SIDE;
      pen.strokeStyle = mix(colours.plus, colours.plus, 0);
      pen.lineWidth = cursor.down ? 4 : 2;
      pen.strokeRect(cursor.x * size - 1, cursor.y * size - 1, size + 2, size + 2);
    }
  }

  /* 1: drawing. */
  const cursor = { x: 14, y: 14, down: false, shown: false };

  function stamp(a, b) {
    for (let row = Math.max(0, Math.floor(b - 2)); row <= Math.min(SIDE - 1, b + 2); row++) {
      for (let column = Math.max(0, Math.floor(a - 2)); column <= Math.min(SIDE - 1, a + 2); column++) {
        const ink = Math.min(1, Math.max(0, 1.75 - Math.hypot(column + 0.5 - a, row + 0.5 - b)));
        const n = row * SIDE + column;
        drawing[n] = Math.max(drawing[n], ink);
      }
    }
  }
  function stroke(from, to) {
    const pieces = Math.max(1, Math.ceil(2 * Math.hypot(to[0] - from[0], to[1] - from[1])));
    for (let k = 0; k <= pieces; k++)
      stamp(from[0] + ((to[0] - from[0]) * k) / pieces, from[1] + ((to[1] - from[1]) * k) / pieces);
  }

  /* As the digits of MNIST are: 20 pixels large, the centre of mass in the middle. */
  function tidied(image) {
    let mass = 0,
      a = 0,
      b = 0,
      left = SIDE,
      right = -1,
      top = SIDE,
      bottom = -1;
    image.forEach((v, n) => {
      const column = n % SIDE,
        row = Math.floor(n / SIDE);
      mass += v;
      a += v * column;
      b += v * row;
      if (v > 0.2) {
        left = Math.min(left, column);
        right = Math.max(right, column);
        top = Math.min(top, row);
        bottom = Math.max(bottom, row);
      }
    });
    if (right < left) return image.slice();
    const scale = Math.min(2, Math.max(0.7, 20 / (Math.max(right - left, bottom - top) + 1)));
    const read = (row, column) =>
      row < 0 || column < 0 || row >= SIDE || column >= SIDE ? 0 : image[row * SIDE + column];
    return Float64Array.from(image, (_, n) => {
      const u = a / mass + ((n % SIDE) - 13.5) / scale,
        v = b / mass + (Math.floor(n / SIDE) - 13.5) / scale;
      const c = Math.floor(u),
        r = Math.floor(v),
        p = u - c,
        q = v - r;
      return (
        (1 - q) * ((1 - p) * read(r, c) + p * read(r, c + 1)) +
        q * ((1 - p) * read(r + 1, c) + p * read(r + 1, c + 1))
      );
    });
  }

  function drawn() {
    if (view.example !== null) mark(null);
    x = tidied(drawing);
    newDigit();
    showInput();
    compute();
  }
  /* What was learned stays learned. */
  function newDigit() {
    view.before = null;
    if (view.steps)
      say(
        "learned",
        `The weights have taken ${view.steps} EP ${view.steps === 1 ? "step" : "steps"} so far.`,
      );
  }
  function finished() {
    drawn();
    if (drawing.some((v) => v > 0)) answer(Net.best(end(), net.n0));
    settling.start();
    choosePixel();
    nudging.play(false);
    nudging.to(0);
  }
  function clear() {
    drawing = new Float64Array(SIDE * SIDE);
    finished();
    say("pen", "Cleared");
  }

  function listenToPen() {
    const paper = $("paper");
    let from = null;
    const place = (event) => {
      const box = paper.getBoundingClientRect();
      return [
        ((event.clientX - box.left) / box.width) * SIDE,
        ((event.clientY - box.top) / box.height) * SIDE,
      ];
    };
    let due = false;
    const later = () => {
      if (due) return;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        if (from) drawn();
      });
    };
    paper.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      event.preventDefault();
      paper.focus({ preventScroll: true });
      cursor.shown = false;
      paper.setPointerCapture(event.pointerId);
      if (view.example !== null) drawing = new Float64Array(SIDE * SIDE);
      from = place(event);
      stroke(from, from);
      later();
    });
    paper.addEventListener("pointermove", (event) => {
      if (!from) return;
      for (const each of event.getCoalescedEvents?.().length ? event.getCoalescedEvents() : [event]) {
        const to = place(each);
        stroke(from, to);
        from = to;
      }
      later();
    });
    const up = () => {
      if (from) {
        from = null;
        finished();
      }
    };
    paper.addEventListener("pointerup", up);
    paper.addEventListener("pointercancel", up);
    paper.addEventListener("keydown", onKey);
    paper.addEventListener("focus", () => {
      cursor.shown = paper.matches(":focus-visible");
      showInput();
    });
    paper.addEventListener("blur", () => {
      if (cursor.down) {
        cursor.down = false;
        finished();
      }
      showInput();
    });
  }

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = ARROWS[event.key];
    if (by) {
      const from = [cursor.x + 0.5, cursor.y + 0.5];
      cursor.x = Math.min(SIDE - 1, Math.max(0, cursor.x + by[0]));
      cursor.y = Math.min(SIDE - 1, Math.max(0, cursor.y + by[1]));
      if (cursor.down) {
        stroke(from, [cursor.x + 0.5, cursor.y + 0.5]);
        drawn();
      }
    } else if (event.key === " " || event.key === "Enter") {
      cursor.down = !cursor.down;
      if (cursor.down && view.example !== null) drawing = new Float64Array(SIDE * SIDE);
      if (cursor.down) {
        stamp(cursor.x + 0.5, cursor.y + 0.5);
        drawn();
      } else finished();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      cursor.down = false;
      clear();
    } else return;
    event.preventDefault();
    cursor.shown = true;
    if (event.key !== "Delete" && event.key !== "Backspace") {
      say("pen", `Pen ${cursor.down ? "down" : "up"}, row ${cursor.y + 1}, column ${cursor.x + 1}`);
    }
    showInput();
  }

  /* Choices. */
  function mark(n) {
    view.example = n;
    [...$("examples").children].forEach((button, k) => button.setAttribute("aria-pressed", String(k === n)));
  }
  function take(n) {
    drawing = Net.pixels(stored.examples[n].uint8);
    x = drawing;
    newDigit();
    mark(n);
    answer(stored.examples[n].label);
    showInput();
    choosePixel();
    settling.start();
    nudging.to(0);
    nudging.play(false);
  }
  function answer(digit) {
    view.digit = view.i = digit;
    $("answers").querySelectorAll("input")[digit].checked = true;
    $("i").value = digit;
    compute();
    chooseHidden();
  }
  /* The hidden neuron whose synapse to the chosen output learns most. */
  function chooseHidden() {
    let most = -1;
    for (let j = 0; j < net.n1; j++) {
      const size = Math.abs(found.bptt.reduce((sum, p) => sum + p.W01[view.i * net.n1 + j], 0));
      if (size > most) {
        most = size;
        view.j = j;
      }
    }
    $("j").value = view.j;
    refresh();
  }
  /* A pixel with ink, near the middle. */
  function choosePixel() {
    const value = (n) => x[n] - 0.02 * Math.hypot((n % SIDE) - 13.5, Math.floor(n / SIDE) - 13.5);
    view.pixel = x.reduce((top, _, n) => (value(n) > value(top) ? n : top), 406);
    $("p-row").value = Math.floor(view.pixel / SIDE);
    $("p-column").value = view.pixel % SIDE;
    showComparison();
  }
  function refresh() {
    showFree(settling.t);
    showNudge(nudging.t);
    showComparison();
  }
  function choose() {
    const within = (id, most) => Math.min(most, Math.max(0, Math.round(Number($(id).value)) || 0));
    view.i = within("i", 9);
    view.j = within("j", 63);
    view.pixel = within("p-row", 27) * SIDE + within("p-column", 27);
    refresh();
  }
  function snap() {
    choose();
    const shown = { i: view.i, j: view.j, "p-row": Math.floor(view.pixel / SIDE), "p-column": view.pixel % SIDE };
    for (const id in shown) $(id).value = shown[id];
  }
  function pickHidden(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const at = (v, from, size) => Math.min(7, Math.max(0, Math.floor(((v - from) / size) * 8)));
    view.j = at(event.clientY, box.top, box.height) * 8 + at(event.clientX, box.left, box.width);
    $("j").value = view.j;
    refresh();
  }

  function useNet(choice) {
    const [kind, site = "outside"] = choice.split(" ");
    Object.assign(view, { kind, site, steps: 0, before: null });
    original = Net.make(stored.nets[kind], site);
    net = Net.copy(original);
    $("reset").disabled = true;
    say("learned", "The weights are as trained.");
  }

  /* 5: learning. */
  function learnStep() {
    const y = target(),
      before = end().slice();
    view.before = before;
    net = Net.learn(net, x, found.ep, rate());
    view.steps++;
    compute();
    const after = end(),
      guess = (s) => Net.best(s, net.n0);
    say(
      "learned",
      `${view.steps} EP ${view.steps === 1 ? "step" : "steps"}. Loss ${short(Net.loss(before, y))} → ${short(Net.loss(after, y))}; ` +
        (guess(before) === guess(after)
          ? `the net reads ${guess(after)}.`
          : `the answer changed from ${guess(before)} to ${guess(after)}.`),
    );
    $("reset").disabled = false;
    settling.play(false);
    settling.to(found.states.length - 1);
    saySettled();
  }
  function showLearned() {
    const after = end(),
      before = view.before ?? after;
    const svg = $("learn-chart"),
      width = Math.max(200, Math.round(svg.clientWidth)),
      each = (width - 16) / 10,
      wide = 0.36 * each;
    const foot = heightOf(svg, width) - 22,
      tall = foot - 34;
    const bar = (x0, v, kind) => {
      const height = Math.min(1.2, Math.max(0, v)) * tall;
      return `<rect class="${kind}" x="${x0.toFixed(1)}" y="${(foot - height).toFixed(1)}" width="${wide.toFixed(1)}" height="${height.toFixed(1)}"/>`;
    };
    svg.setAttribute("viewBox", `0 0 ${width} ${foot + 22}`);
    svg.innerHTML =
      `<text class="title" x="4" y="13">outputs before (grey) and after (colour)</text><path class="axis" d="M8 ${foot}H${width - 8}"/>` +
      Array.from({ length: 10 }, (_, d) => {
        const middle = 8 + (d + 0.5) * each;
        return (
          bar(middle - wide - 1, before[d], "before") +
          bar(middle + 1, after[d], "after") +
          `<text x="${middle.toFixed(1)}" y="${foot + 16}" text-anchor="middle">${d}</text>`
        );
      }).join("");
    svg.setAttribute(
      "aria-label",
      `Outputs before and after learning: output ${view.digit} from ${before[view.digit].toFixed(2)} to ${after[view.digit].toFixed(2)}`,
    );
  }
  function reset() {
    net = Net.copy(original);
    view.steps = 0;
    view.before = null;
    compute();
    $("reset").disabled = true;
    say("learned", "The weights are as trained.");
    $("learn-step").focus();
  }

  /* 6: back and forth. */
  const turns = { states: [], shown: [], given: null };
  const turnsNet = Net.make(stored.nets.prototypical),
    turnsX = Net.pixels(stored.back_and_forth.uint8);
  function chooseSchedule(schedule) {
    turns.given ??= Net.drive(turnsNet, turnsX);
    if (!turns.shown.length) {
      const both = Net.free(turnsNet, turns.given, TURNS),
        a = both[TURNS - 1],
        b = both[TURNS];
      const swing = [...a.keys()].sort((m, n) => Math.abs(b[n] - a[n]) - Math.abs(b[m] - a[m]));
      turns.shown = [...swing.filter((n) => n < 10).slice(0, 1), ...swing.filter((n) => n >= 10).slice(0, 1)];
    }
    turns.schedule = schedule;
    turns.states = Net.free(turnsNet, turns.given, TURNS, schedule);
    turns.residual = Net.residual(turnsNet, turns.given, turns.states[TURNS]);
  }
  function showTurns(t) {
    const s = turns.states[t],
      kinds = ["bptt", "ep"];
    cells($("turns-hidden"), s.subarray(10), 8, heat, 2);
    showBars($("turns-outputs"), s.subarray(0, 10));
    plot($("turns-chart"), {
      title: `output ${turns.shown[0]} (solid), hidden ${turns.shown[1] - 10} (dashed)`,
      curves: turns.shown.map((n, k) => ({
        kind: kinds[k],
        values: turns.states.slice(0, t + 1).map((state) => state[n]),
      })),
      last: TURNS,
      cursor: t,
      low: 0,
      high: 1,
      ticks: [
        [0, "0"],
        [1, "1"],
      ],
    });
  }
  function sayTurns() {
    const moving = turns.residual > Net.SETTLED;
    say(
      "turns-said",
      moving
        ? `All at once: after ${TURNS} steps a neuron still jumps by ${short(turns.residual)} at every step. It goes back and forth for good.`
        : `Layers in turn: at rest after ${TURNS} half-steps, the residual is ${short(turns.residual)}. The net reads ${Net.best(turns.states[TURNS], 10)}.`,
    );
    $("turns-chart").setAttribute(
      "aria-label",
      `An output and a hidden neuron over ${TURNS} steps: ${moving ? "they swing to and fro" : "they come to rest"}`,
    );
  }
  const turning = player(
    "turns",
    () => TURNS,
    showTurns,
    sayTurns,
    () => say("turns-said", "Running …"),
  );
  turning.speed = () => Math.min(speed(), 12);

  /* Set up. */
  function redraw() {
    readColours();
    showInput();
    [...$("examples").children].forEach((button, n) =>
      cells(button.firstChild, Net.pixels(stored.examples[n].uint8), SIDE, heat),
    );
    cells($("turns-seen"), turnsX, SIDE, heat);
    compute();
    turning.to(turning.t);
  }

  function setUp() {
    ["outputs", "turns-outputs"].forEach((id) => makeBars($(id), ""));
    makeBars($("pulled"), "signed");
    $("answers").insertAdjacentHTML(
      "beforeend",
      Array.from(
        { length: 10 },
        (_, d) => `<label><input type="radio" name="answer" value="${d}"><span>${d}</span></label>`,
      ).join(""),
    );
    $("examples").innerHTML = stored.examples
      .map(
        ({ label, index }, n) =>
          `<button type="button" aria-pressed="false" aria-label="Example ${n < 10 ? "" : "that is hard to read, "}${label}" title="MNIST test image ${index}">` +
          `<canvas width="${SIDE}" height="${SIDE}"></canvas></button>`,
      )
      .join("");
    $("examples").onclick = (event) => {
      const button = event.target.closest("button");
      if (button) take([...$("examples").children].indexOf(button));
    };
    $("answers").onchange = (event) => {
      answer(Number(event.target.value));
      nudging.start();
    };
    $("schedules").onchange = (event) => {
      chooseSchedule(event.target.value);
      turning.start();
    };
    $("clear").onclick = clear;
    $("T").oninput = () => {
      $("K").value = Math.min(Number($("K").value), Number($("T").value));
      compute();
      settling.to(found.states.length - 1);
      saySettled();
    };
    $("K").oninput = () => {
      $("T").value = Math.max(Number($("K").value), Number($("T").value));
      compute();
      nudging.to(found.second.length - 1);
    };
    $("beta").oninput = $("rate").oninput = $("speed").oninput = compute;
    for (const id of ["i", "j", "p-row", "p-column"]) Object.assign($(id), { oninput: choose, onchange: snap });
    $("hidden").onclick = $("moved").onclick = pickHidden;
    $("kind").onchange = (event) => {
      useNet(event.target.value);
      compute();
      chooseHidden();
      settling.start();
    };
    $("learn-step").onclick = learnStep;
    $("reset").onclick = reset;
    $("show-python").onclick = togglePython;
    listenToPen();
    let wide = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== wide) {
        wide = innerWidth;
        redraw();
      }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    readColours();
    useNet("energy-based");
    chooseSchedule("synchronous");
    turning.to(0);
    take(stored.examples.length - 2);
    redraw();
    judgeNow();
  }
  setUp();
  return {
    view,
    frames,
    settings,
    judgeNow,
    study: () => found,
    input: () => x,
    net: () => net,
    drawing: () => drawing,
    players: { settling, nudging, turning },
  };
})();
