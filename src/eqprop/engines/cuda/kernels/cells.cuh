// The neurons of a thread: their state, their input, and what they send to others.

#include "outputs.cuh"

// The largest residual of each sample, NaN if any is NaN. A column of eight threads holds two samples.
__device__ __forceinline__ void report(const Spot &spot, int it, float4 v) {
  const float q[2] = {worse(v.x, v.z), worse(v.y, v.w)};
  for (int i = 0; i < 2; i++) {
    float worst = q[i];
    for (int x = 4; x < 32; x <<= 1) worst = worse(worst, __shfl_xor_sync(~0u, worst, x));
    if (worst != worst) worst = __int_as_float(0x7fc00000);
    if (spot.lane < 4 && spot.sample(i) < spot.samples)
      atomicMax((int *)(stats_of(spot.a.job, it, spot.r) + (spot.first_sample + spot.sample(i)) * STATS + 2), __float_as_int(worst));
  }
}

// Counts taken from the free state of the outputs.
__device__ __forceinline__ void tell_outcome(const Spot &spot, int it, float4 s, float4 target) {
  const Job &job = spot.a.job;
  float v[4], y[4];
  as_array(s, v), as_array(target, y);
  for (int q = 0; q < 2; q++) {
    float loss = 0.f, top = -__int_as_float(0x7f800000);
    int best = 0;
    for (int i = q; i < 4; i += 2) {
      if (spot.unit(i) >= N0) continue;
      loss += 0.5f * (v[i] - y[i]) * (v[i] - y[i]);
      if (v[i] > top) top = v[i], best = spot.unit(i);
    }
    for (int x = 4; x < 32; x <<= 1) {
      loss += __shfl_xor_sync(~0u, loss, x);
      const float other = __shfl_xor_sync(~0u, top, x);
      const int which = __shfl_xor_sync(~0u, best, x);
      if (other > top || (other == top && which < best)) top = other, best = which;
    }
    const int b = spot.first_sample + spot.sample(q);
    if (spot.lane < 4 && spot.sample(q) < spot.samples) {
      float *stats = stats_of(job, it, spot.r) + b * STATS;
      stats[0] = best != (int)job.labels[job.order[((size_t)it * job.R + spot.r) * B + b]];
      stats[1] = loss;
    }
  }
}

template <bool OF_OUTPUTS> struct Cells {
  float4 s, base;                                // base: the constant input, bias and drive
  float4 target;                                 // of outputs
#if ENERGY
  float4 r;
  __device__ __forceinline__ float4 &rates() { return r; }
#else
  __device__ __forceinline__ float4 &rates() { return s; }
#endif
#if METHOD == 1
  float4 sent;                                   // backward pass: the sum of the errors
#endif
  static constexpr bool with_slope = OUTPUT_SLOPE || !OF_OUTPUTS;

  __device__ __forceinline__ void begin(const Spot &spot, int it) {
    const Job &job = spot.a.job;
    const int r = spot.r;
    const float *bias = spot.n == DEPTH - 1 ? job.b : spot.a.b[spot.n];
    s = base = zero4();
    if (bias) base = spot.each([&](int i) { return bias[(size_t)r * spot.size + spot.unit(i)]; });
    if (!OF_OUTPUTS && spot.n == DEPTH - 1)
      for (int q = 0; q < SPLITS; q++)
        base = base + spot.each([&](int i) {
          return job.drive[((size_t)(q * job.R + r) * B + spot.first_sample + spot.sample(i)) * HP + spot.unit(i)];
        });
    const int *order = job.order + ((size_t)it * job.R + r) * B + spot.first_sample;
    if (OF_OUTPUTS)
      target = spot.each([&](int i) { return job.targets[(size_t)order[spot.sample(i)] * N0 + spot.unit(i)]; });
    rates() = spot.each([](int) { return rate(0.f); });
  }

  __device__ __forceinline__ void tell(const Spot &spot, const Board &board, int round) {
    const float scale = OF_OUTPUTS ? LARGEST / spot.a.output_range : (float)LARGEST;
    spot.template publish<OF_OUTPUTS, ACT == 0 && !OF_OUTPUTS>(board, rates(), make_float2(scale, scale), round);
  }

  // Step t, with the neighbours' input. Returns whether anything moved, if requested.
  __device__ __forceinline__ bool step(const Spot &spot, const Course &course, int t, float4 coupled) {
    const Args &a = spot.a;
    const int n = spot.n;
    const float eps = a.job.eps;
    const float4 in = base + coupled;
    float4 to = map4([&](float s, float r, float in) { return unclipped(s, r, in, eps, with_slope); }, s, rates(), in);
    if (t >= course.free_steps) {
      if (t == course.star()) {
        report(spot, course.it, spot.only_real(map4([](float p, float q) { return fabsf(clip(p) - q); }, to, s)));
        spot.store(a.s[n], 0, s);
        if (OF_OUTPUTS) tell_outcome(spot, course.it, s, target);
      }
#if METHOD == 0
      if (t == course.free_steps) spot.store(a.rates[n], 0, rates());
      const float pull = a.job.beta * (ENERGY ? eps : 1.0f);
      if (OF_OUTPUTS) to = map4([&](float to, float y, float s) { return fmaf(pull, y - s, to); }, to, target, s);
#else
      if (t == course.end) return false;
      spot.store(a.rates[n], t - course.free_steps, rates());
      spot.store(a.states[n], t - course.free_steps, s);
      spot.store(a.inputs[n], t - course.free_steps, in);
#endif
    }
    to = map4([](float q) { return clip(q); }, to);
    const bool moves = a.job.stop && !same(spot.only_real(to), spot.only_real(s));
    s = to;
    if (ENERGY) rates() = map4([](float q) { return rate(q); }, s);
    return moves;
  }

#if METHOD == 1
  // Backward pass: `base` holds the gradient of the state (nabla), `s` the state after the step.
  __device__ __forceinline__ void turn_back(const Spot &spot) {
    base = OF_OUTPUTS ? spot.only_real(s - target) : zero4();
    sent = zero4();
  }
  // The error of step t; the part that passes the clip stays in `base`.
  __device__ __forceinline__ float4 error(const Spot &spot, int t) {
    const Args &a = spot.a;
    float4 e;
#if ENERGY
    const float eps = a.job.eps;
    const float4 r4 = spot.load(a.rates[spot.n], t), s4 = spot.load(a.states[spot.n], t), in4 = spot.load(a.inputs[spot.n], t);
    const float4 free = map4([&](float s, float r, float in) { return unclipped(s, r, in, eps, with_slope); }, s4, r4, in4);
    base = map4([](float v, float g) { return inside(v) ? g : 0.f; }, free, base);
    e = eps * (map4([](float q) { return with_slope ? slope(q) : 1.0f; }, r4) * base);
#else
    e = base * map4([](float y) { return slope(y); }, s);
#endif
    e = spot.only_real(e);
    spot.store(a.errors[spot.n], t, e);
    sent = sent + e;
    return e;
  }
  __device__ __forceinline__ void go_back(const Spot &spot, int t, float4 coupled) {
    const float4 r4 = spot.load(spot.a.rates[spot.n], t);
#if ENERGY
    const float eps = spot.a.job.eps;
    const float4 in4 = spot.load(spot.a.inputs[spot.n], t);
    const float4 curve = map4([&](float q, float w) { return (1.0f - eps) + (with_slope ? eps * curvature(q) * w : 0.f); }, r4, in4);
    base = curve * base + map4([](float q) { return slope(q); }, r4) * coupled;
#else
    base = coupled;
    s = r4;
#endif
  }
#endif

  // The gradient of the layer next to the input, and whether everything is finite.
  __device__ __forceinline__ void end(const Spot &spot, const Course &course) {
    const Job &job = spot.a.job;
#if METHOD == 0
    spot.store(spot.a.rates[spot.n], 1, rates());
    spot.store(spot.a.t[spot.n], 0, s);
    const float4 u = (-1.0f / job.beta) * (spot.only_real(rates()) - spot.load(spot.a.rates[spot.n], 0));
#else
    const float4 u = sent;
#endif
    report(spot, course.it, map4([](float p, float q) { return finite(p + q) ? 0.f : __int_as_float(0x7fc00000); }, u, spot.only_real(s)));
    if (OF_OUTPUTS || spot.n < DEPTH - 1) return;
    float v[4];
    as_array(u, v);
    for (int i = 0; i < 4; i++)
      if (spot.real(i)) job.u[(size_t)(spot.r * B + spot.first_sample + spot.sample(i)) * HP + spot.unit(i)] = v[i];
  }
};
