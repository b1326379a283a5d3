// Whole training iterations of nets with one hidden layer. Two kernels alternate:
//   update_and_drive   applies the last iteration's gradients to the weights and, in the same pass over them,
//                      computes the input drive of this iteration's mini-batch;
//   relax              one block per (network, sample): all T + K steps and the gradient contribution.
//
// Compiled with H hidden (multiple of 4), NO outputs (<= 16), NI inputs (multiple of 4), B samples per mini-batch, METHOD 0 EP, 1 BPTT,
// NUDGING 0 at beta, 1 symmetric (EP between the ends of two nudged phases, at beta and -beta), 2 at beta with the iteration's sign, and
// the switches of neuron.cuh.

#include "neuron.cuh"
#include "vector.cuh"
#include "job.cuh"
#include "input_layer.cuh"

#define HIDDEN_THREADS (HP / 4)
#define LANES 16                       // threads that share the dot products of two output units, so that a load serves both
#define OUTPUT_THREADS (((NO + 1) / 2 * LANES + 31) / 32 * 32)
#define CHUNK (HP / 4 / LANES)         // float4s of the hidden layer per lane
#define OUTER ((NO * H / 4 + 255) / 256)

struct Args {
  Job job;
  float *W01, *b0;                               // (R, NO, H) (R, NO)
  float *u0, *g01;                               // per-sample gradients (R, B, 16) (R, B, NO, HP)
  float *s1, *s0, *t1, *t0;                      // free and last states (R, B, HP) (R, B, 16)
  float lr01, lrb0;
#if NUDGING == 2                                 // the host's struct always ends with it; a launch copies the kernel's size
  const float *signs;                            // of beta (n, R)
#endif
};

// The two sides of the net within a block: hidden threads own four units and their columns of W01, output lanes own a
// slice of a row of W01. Buffers hold rates and are doubled, so that a step needs one barrier.
struct Shared {
  float4 hidden[2][HP / 4];
  alignas(16) float output[2][16];
  float target[16], free_output[16], free_rate[16];
#if NUDGING == 1
  float plus_rate[16];
#endif
  float residual[32], loss[16];
};

__device__ __forceinline__ float4 from_outputs(const float4 (&w)[NO], const float *from, float4 start) {
  float v[16];
#pragma unroll
  for (int k = 0; k < NO; k += 4) *(float4 *)(v + k) = *(const float4 *)(from + k);
  float4 even = start, odd = zero4();
#pragma unroll
  for (int k = 0; k < NO; k += 2) {
    even = fma4(v[k], w[k], even);
    if (k + 1 < NO) odd = fma4(v[k + 1], w[k + 1], odd);
  }
  return even + odd;
}

// Compile-time flags of a step, and one runtime flag.
struct Yes { static constexpr bool v = true; };
struct No { static constexpr bool v = false; };
struct Sent { bool v; };

__device__ __forceinline__ float4 fma4(float4 a, float4 v, float4 c) {
  return make_float4(fmaf(a.x, v.x, c.x), fmaf(a.y, v.y, c.y), fmaf(a.z, v.z, c.z), fmaf(a.w, v.w, c.w));
}

// Both dot products of a pair; the lower half of the lanes receives the first, the upper half the second.
__device__ __forceinline__ float from_hidden(const float4 (&w)[2][CHUNK], const float4 *v, int lane) {
  float4 p = zero4(), q = zero4();
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    const float4 x = v[i * LANES + lane];
    p = fma4(x, w[0][i], p);
    q = fma4(x, w[1][i], q);
  }
  const float first = (p.x + p.y) + (p.z + p.w), second = (q.x + q.y) + (q.z + q.w);
  const bool upper = lane >= LANES / 2;
  float total = (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, LANES / 2);
#pragma unroll
  for (int o = LANES / 4; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  return total;
}

extern "C" __global__ __launch_bounds__(HIDDEN_THREADS + OUTPUT_THREADS) void relax(Args a, int offset) {
  const Job &job = a.job;
  const int it = job.counters->it + offset;
  if (it >= job.counters->n) return;
  extern __shared__ float4 trail[];                     // BPTT: last K states and, if energy-based, their inputs
  __shared__ Shared m;
  const int cell = blockIdx.x, r = cell / B, tid = threadIdx.x;
  const bool hides = tid < HIDDEN_THREADS;
  const int sample = job.order[(size_t)it * job.R * B + cell];
  const int T = job.T, K = job.K;
#if NUDGING == 2
  const float beta = a.signs[(size_t)it * job.R + r] * job.beta;
#else
  const float beta = job.beta;
#endif
  const float eps = job.eps;
  float pull = beta * (ENERGY ? eps : 1.0f);
  const int label = tid == 0 ? (int)job.labels[sample] : 0;  // loaded early, to hide the latency
  if (tid < 16) {
    m.target[tid] = tid < NO ? job.targets[(size_t)sample * NO + tid] : 0.f;
    m.output[0][tid] = m.output[1][tid] = tid < NO ? rate(0.f) : 0.f;
  }
  after_previous();
  release_next();

  // hidden side
  const int j = tid * 4;
  float4 w[NO], drive = zero4(), s = zero4(), in = zero4(), star = zero4();
  // output side
  const int o = tid - HIDDEN_THREADS, lane = o % LANES, pair = o / LANES * 2, k = pair + (lane >= LANES / 2);
  const bool owns = !hides && k < NO, leads = owns && lane % (LANES / 2) == 0;
  const int row = owns ? k : 0;
  float4 v[2][CHUNK];
  float bias = 0.f, z = 0.f, zin = 0.f;
  if (hides) {
#pragma unroll
    for (int q = 0; q < NO; q++) {
      w[q] = j < H ? *(const float4 *)(a.W01 + ((size_t)r * NO + q) * H + j) : zero4();
    }
    if (job.b && j < H) drive = *(const float4 *)(job.b + (size_t)r * H + j);
    for (int q = 0; q < SPLITS && j < H; q++) drive = drive + *(const float4 *)(job.drive + ((size_t)q * job.R * B + cell) * HP + j);
    m.hidden[0][tid] = map4([](float q) { return rate(q); }, s);
  } else {
#pragma unroll
    for (int i = 0; i < 2 * CHUNK; i++) {
      const int c = (i / 2 * LANES + lane) * 4, line = pair + i % 2;
      v[i % 2][i / 2] = c < H && line < NO ? *(const float4 *)(a.W01 + ((size_t)r * NO + line) * H + c) : zero4();
    }
    if (a.b0) bias = a.b0[(size_t)r * NO + row];
  }
  __syncthreads();

  float residual = 0.f;
  // One step from buffer `from` into the other. `nudged` adds the nudge; `mine` is false for the side that an alternating
  // half-step skips; `look` measures the residual. Returns whether this thread's state did not change.
  auto step = [&](int from, auto nudged, auto mine, auto look) -> bool {
    bool still = true;
    if (hides) {
      float4 old = s, rates = zero4();
      if (ENERGY || !mine.v) rates = m.hidden[from][tid];
      if (mine.v) {
        in = from_outputs(w, m.output[from], drive);
        s = map4([&](float q, float rq, float iq) { return clip(unclipped(q, rq, iq, eps, true)); }, s, rates, in);
        rates = map4([](float q) { return rate(q); }, s);
        if (look.v && j < H) residual = worst4(map4([](float p, float q) { return fabsf(p - q); }, s, old));
        still = same(old, s);
      }
      m.hidden[from ^ 1][tid] = rates;
    } else {
      float old = z, rq = 0.f;
      if (ENERGY || !mine.v) rq = m.output[from][row];
      if (mine.v) {
        zin = from_hidden(v, m.hidden[from], lane) + bias;
        float free = unclipped(z, rq, zin, eps, OUTPUT_SLOPE);
        if (look.v && owns) residual = fabsf(clip(free) - old);
        z = clip(nudged.v ? fmaf(pull, m.target[row] - z, free) : free);
        rq = rate(z);
        still = !owns || old == z;
      }
      if (leads) m.output[from ^ 1][k] = rq;
    }
    return still;
  };

  const int free_steps = METHOD == 1 ? T - K : T;
  bool quiet = false;
  int t = 0, at = 0;
  for (; t < free_steps; t++, at ^= 1) {
    bool outputs_turn = ((free_steps - 1 - t) & 1) == 0;
    bool still = job.alternating ? step(at, No{}, Sent{outputs_turn != hides}, No{}) : step(at, No{}, Yes{}, No{});
    // A half-step moves half of the net: an alternating phase may end after two half-steps without a change.
    if (job.stop && (t & 7) >= 6) {
      const bool all = __syncthreads_and(still);
      if ((t & 7) == 7 && all && (!job.alternating || quiet)) { at ^= 1; break; }
      quiet = all;
    } else {
      __syncthreads();
    }
  }

#if METHOD == 1
  // The K differentiated steps, with their states kept.
  float4 *kept = trail, *kept_in = trail + (size_t)K * (HP / 4);
  float *kept0 = (float *)(trail + (size_t)(ENERGY ? 2 : 1) * K * (HP / 4)), *kept0_in = kept0 + K * 16;
  for (t = 0; t < K; t++, at ^= 1) {
    if (hides) kept[t * (HP / 4) + tid] = s;
    else if (leads) kept0[t * 16 + k] = z;
    step(at, No{}, Yes{}, No{});
#if ENERGY
    if (hides) kept_in[t * (HP / 4) + tid] = in;
    else if (leads) kept0_in[t * 16 + k] = zin;
#endif
    __syncthreads();
  }
#endif
  star = s;
  const float z_star = z;
  if (hides && a.s1) *(float4 *)(a.s1 + (size_t)cell * HP + j) = s;
  if (leads) {
    m.free_output[k] = z;
    m.free_rate[k] = rate(z);
    m.loss[k] = 0.5f * (z - m.target[k]) * (z - m.target[k]);
    if (a.s0) a.s0[(size_t)cell * 16 + k] = z;
  }

  float4 u1 = zero4();
  float u0 = 0.f;
  float4 g[NO];
#if METHOD == 0
  const float4 rate_star = map4([](float q) { return rate(q); }, star);
  step(at, Yes{}, Yes{}, Yes{});
  __syncthreads();
  at ^= 1;
  for (t = 1; t < K; t++, at ^= 1) {
    step(at, Yes{}, Yes{}, No{});
    __syncthreads();
  }
#if NUDGING == 1
  // The other end: the free state again, nudged by -beta. Differences come before products.
  const float4 plus = map4([](float q) { return rate(q); }, s);
  const float plus0 = rate(z);
  s = star;
  z = z_star;
  pull = -pull;
  if (hides) m.hidden[at][tid] = rate_star;
  else if (leads) m.plus_rate[k] = plus0, m.output[at][k] = rate(z_star);
  __syncthreads();
  for (t = 0; t < K; t++, at ^= 1) {
    step(at, Yes{}, Yes{}, No{});
    __syncthreads();
  }
  const float unit = -0.5f / beta;
  if (hides) {
    const float4 moved = plus - map4([](float q) { return rate(q); }, s);
    u1 = unit * moved;
#pragma unroll
    for (int q = 0; q < NO; q++) g[q] = unit * ((m.plus_rate[q] - m.output[at][q]) * plus + m.output[at][q] * moved);
  } else {
    u0 = unit * (plus0 - rate(z));
  }
#else
  const float unit = -1.0f / beta;
  if (hides) {
    float4 last = map4([](float q) { return rate(q); }, s);
    u1 = unit * (last - rate_star);
#pragma unroll
    for (int q = 0; q < NO; q++) g[q] = unit * (m.output[at][q] * last - m.free_rate[q] * rate_star);
  } else {
    u0 = unit * (rate(z) - rate(z_star));
  }
#endif
  if (hides && a.t1) *(float4 *)(a.t1 + (size_t)cell * HP + j) = s;
  if (leads && a.t0) a.t0[(size_t)cell * 16 + k] = z;
#else
  // One more step to measure the residual, then the backward pass.
  step(at, No{}, Yes{}, Yes{});
  s = star;
  z = z_star;
  __syncthreads();
  float4 nabla = zero4();
  float nabla0 = z - m.target[row];
#pragma unroll
  for (int q = 0; q < NO; q++) g[q] = zero4();
  float4 after = s;
  float after0 = z;
  for (t = K - 1; t >= 0; t--, at ^= 1) {
    float4 before = zero4(), e = zero4(), c = zero4(), rates = zero4();
    float before0 = kept0[t * 16 + row], c0 = 0.f, e0 = 0.f, rate0 = 0.f;
    if (hides) {
      before = kept[t * (HP / 4) + tid];
      rates = map4([](float q) { return rate(q); }, before);
#if ENERGY
      in = kept_in[t * (HP / 4) + tid];
      c = map4([&](float q, float sq, float iq) {
        return inside(unclipped(sq, sigma(sq), iq, eps, true)) ? q : 0.f; }, nabla, before, in);
      e = map4([&](float q, float rq) { return eps * slope(rq) * q; }, c, rates);
#else
      e = map4([](float q, float y) { return q * slope(y); }, nabla, after);
#endif
      m.hidden[at][tid] = e;
      u1 = u1 + e;
    } else {
      rate0 = rate(before0);
#if ENERGY
      zin = kept0_in[t * 16 + row];
      c0 = inside(unclipped(before0, rate0, zin, eps, OUTPUT_SLOPE)) ? nabla0 : 0.f;
      e0 = eps * (OUTPUT_SLOPE ? slope(rate0) : 1.0f) * c0;
#else
      e0 = nabla0 * slope(after0);
#endif
      if (leads) m.output[at][k] = e0;
      u0 += e0;
    }
    __syncthreads();
    if (hides) {
      const float *eo = m.output[at];
#pragma unroll
      for (int q = 0; q < NO; q++) g[q] = g[q] + (eo[q] * rates) + (rate(kept0[t * 16 + q]) * e);
      float4 coupled = from_outputs(w, eo, zero4());
#if ENERGY
      nabla = map4([&](float q, float rq, float iq) { return ((1.0f - eps) + eps * curvature(rq) * iq) * q; }, c, rates, in)
            + map4([](float rq) { return slope(rq); }, rates) * coupled;
#else
      nabla = coupled;
#endif
      after = before;
    } else {
      float coupled = from_hidden(v, m.hidden[at], lane);
#if ENERGY
      nabla0 = ((1.0f - eps) + (OUTPUT_SLOPE ? eps * curvature(rate0) * zin : 0.f)) * c0 + slope(rate0) * coupled;
#else
      nabla0 = coupled;
#endif
      after0 = before0;
    }
  }
#endif

  // This sample's contribution to the gradients, and its counts.
  bool good = true;
  if (hides) {
    *(float4 *)(job.u + (size_t)cell * HP + j) = u1;
#pragma unroll
    for (int q = 0; q < NO; q++) *(float4 *)(a.g01 + ((size_t)cell * NO + q) * HP + j) = g[q];
    good = finite(worst4(star)) && finite(worst4(map4([](float q) { return fabsf(q); }, u1)));
#pragma unroll
    for (int q = 0; q < NO; q++) good = good && finite((g[q].x + g[q].y) + (g[q].z + g[q].w));
  } else if (leads) {
    a.u0[(size_t)cell * 16 + k] = u0;
    good = finite(u0) && finite(z_star);
  }
#pragma unroll
  for (int q = 16; q; q >>= 1) residual = worse(residual, __shfl_xor_sync(~0u, residual, q));
  if (tid % 32 == 0) m.residual[tid / 32] = residual;
  bool all_good = __syncthreads_and(good);
  if (tid >= 32) return;
  float worst = tid < (HIDDEN_THREADS + OUTPUT_THREADS) / 32 ? m.residual[tid] : 0.f;
  float loss = tid < NO ? m.loss[tid] : 0.f, top = tid < NO ? m.free_output[tid] : -__int_as_float(0x7f800000);
  int best = tid;
#pragma unroll
  for (int q = 16; q; q >>= 1) {
    worst = worse(worst, __shfl_xor_sync(~0u, worst, q));
    loss += __shfl_xor_sync(~0u, loss, q);
    const float other = __shfl_xor_sync(~0u, top, q);
    const int which = __shfl_xor_sync(~0u, best, q);
    if (other > top || (other == top && which < best)) top = other, best = which;
  }
  if (tid) return;
  float *stats = stats_of(job, it, r) + cell % B * STATS;
  stats[0] = best != label;
  stats[1] = loss;
  stats[2] = all_good ? worst : __int_as_float(0x7fc00000);
}

// The first blocks hold one tile of the input weights each, the others a part of a network's output weights.
extern "C" __global__ __launch_bounds__(256, 2) void update_and_drive(Args a, int offset) {
  const Job &job = a.job;
  const int it = job.counters->it + offset, tid = threadIdx.x, inputs = INPUT_BLOCKS * job.R;
  if (it > job.counters->n) return;
  release_next();
  if (blockIdx.x < inputs) {
    const int tile = blockIdx.x / SPLITS;
    return update_input_tile(job, tile / TILES, tile % TILES, blockIdx.x % SPLITS, it);
  }
  if (it == 0) return;
  const int r = (blockIdx.x - inputs) / OUTER, part = (blockIdx.x - inputs) % OUTER;
  after_previous();
  const bool ok = applies(job, it, r);
  const int e = (part * 256 + tid) * 4;
  if (ok && e < NO * H) {
    const float *g = a.g01 + ((size_t)r * B * NO + e / H) * HP + e % H;
    float4 sum = zero4();
#pragma unroll 5
    for (int b = 0; b < B; b++) sum = sum + *(const float4 *)(g + (size_t)b * NO * HP);
    float4 *W = (float4 *)(a.W01 + (size_t)r * NO * H + e);
    *W = fma4(-a.lr01 * (1.0f / B), sum, *W);
  }
  if (part) return;
  if (ok && a.b0 && tid < NO) {
    float sum = 0.f;
#pragma unroll 4
    for (int b = 0; b < B; b++) sum += a.u0[(size_t)(r * B + b) * 16 + tid];
    a.b0[r * NO + tid] -= a.lrb0 * (1.0f / B) * sum;
  }
  if (tid < 32) count(job, it, r, ok);
}
