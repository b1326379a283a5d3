// Whole training iterations of layered nets with two hidden layers or more. Two kernels alternate:
//   update   applies the last iteration's gradients and computes the input drive of this iteration's mini-batch;
//   relax    all T + K steps in one launch. A block owns up to MT tiles of 16 units of one layer for the whole batch,
//            its rows of the weights kept as tensor-core fragments, and exchanges states with the blocks of the
//            neighbouring layers through the L2 cache. All blocks of a launch must be resident at once.
//
// Precision: a float is carried as the sum of two halves (22 bits); products hi*hi + hi*lo + lo*hi are summed in float32.
// Exchange: sixteen bytes hold four units of one sample, and in the last bit of each low half the parity of the round
// they belong to, so that a reader sees by itself whether the data has arrived: there is no barrier between blocks.
//
// Compiled with N0 (<= 16), N1, ..., N4 the sizes of the DEPTH layers that move (0 beyond), H the last of them, WIDEST the most
// tiles of inputs any has, B samples, METHOD 0 EP, 1 BPTT,
// and the switches of neuron.cuh.

#include "neuron.cuh"
#include "vector.cuh"
#include "job.cuh"
#include "input_layer.cuh"

typedef unsigned int u32;

#define THREADS 256
#define WIDE 40                        // up to this many tiles of inputs a block holds three tiles of units, beyond it two
#define WARPS 8
#define SLOTS 4                        // rounds an exchange buffer holds: a writer is never more than two ahead of a reader
#define NT ((B + 7) / 8)               // tiles of eight samples
#define FRAGMENT 192                   // floats of a 16 x 8 tile of sums in shared memory, padded against bank conflicts
#define WEIGHT_SCALE 256.0f            // powers of two that keep the low halves in the range of half precision
#define RATE_SCALE 1024.0f
#define ERROR_SCALE 16384.0f

struct Args {
  Job job;
  float *W[4], *b[4];                            // W[n] (R, N_n, N_{n+1}) between moving layers, b[n] (R, N_n) or null
  uint4 *packets[5];                             // (SLOTS, R, tiles, NT, 32), one after the other in memory
  float *rates[5];                               // (2, R, B, padded): free and last (EP), or (K, R, B, padded): before each step (BPTT)
  float *errors[5];                              // BPTT: (K, R, B, padded)
  float *states[5], *inputs[5];                  // BPTT, energy-based: (K, R, B, padded)
  float *s[5], *t[5];                            // free and last states (R, B, padded)
  int *moved;                                    // (R, T / 16 + 2)
  const int *roles;                              // (blocks of a network, 3): layer, first tile, tiles
  int blocks, first, packet_count, moved_count;  // blocks of a network, first network of this launch
  float lr[4], lrb[4];
};

__device__ __forceinline__ int width(int n) {
  constexpr int sizes[] = {N0, N1, N2, N3, N4};
  int w = sizes[0];
#pragma unroll
  for (int i = 1; i < DEPTH; i++) w = n == i ? sizes[i] : w;
  return w;
}
__device__ __forceinline__ int tiles(int n) { return (width(n) + 15) / 16; }

// Two floats as two pairs of halves, high and low, the first float in the lower half of the word. Returns what is left
// of the first.
__device__ __forceinline__ float split(float x, float y, u32 &hi, u32 &lo) {
  float a, b, c;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(hi) : "f"(y), "f"(x));
  asm("{.reg .b16 p, q; mov.b32 {p, q}, %2; cvt.f32.f16 %0, p; cvt.f32.f16 %1, q;}" : "=f"(a), "=f"(b) : "r"(hi));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(lo) : "f"(y - b), "f"(x - a));
  asm("{.reg .b16 p, q; mov.b32 {p, q}, %1; cvt.f32.f16 %0, p;}" : "=f"(c) : "r"(lo));
  return (x - a) - c;
}

// The low pair with its last bit as wanted: the nearest such number, given what is left of the first.
__device__ __forceinline__ u32 marked(float left, u32 lo, u32 parity) {
  const bool outwards = (left >= 0.f) == ((lo & 0x8000u) == 0) || (lo & 0x7fffu) == 0;
  return (lo & 1) == parity ? lo : (outwards ? lo + 1 : lo - 1);
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 peek(const uint4 *p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void post(uint4 *p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A block's part of one layer. MT tiles of units, KT tiles of inputs a warp; an owner thread holds four units of one sample.
template <int MT, int KT> struct Part {
  const Args &a;
  const Job &job;
  const int r, n, first, count;
  u32 hi[MT][KT][4];
  uint4 *lo;
  float *sums;
  int buffer = 0;
  bool owns;
  int tile, sample, quarter;

  __device__ Part(const Args &args, int r, int n, int first, int count, unsigned char *memory)
      : a(args), job(args.job), r(r), n(n), first(first), count(count) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    owns = tid < count * B * 4;
    tile = first + (owns ? tid / (4 * B) : 0), sample = tid / 4 % B, quarter = tid % 4;
    lo = (uint4 *)memory + warp * MT * KT * 32 + lane;
    sums = (float *)(memory + WARPS * MT * KT * 512);
    // Rolled, through shared memory: unrolled, the code would be run once and fetched for longer than the data.
    uint4 *high = (uint4 *)sums + warp * MT * KT * 32 + lane;
#pragma unroll 1
    for (int e = 0; e < MT * KT; e++) {
      const int m = e / KT, input = warp + WARPS * (e % KT);
      u32 h[4], l[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int row = (first + m) * 16 + lane / 4 + (q & 1) * 8, k = (lane % 4) * 2 + (q >> 1) * 8;
        split(weight(input, row, k, m < count), weight(input, row, k + 1, m < count), h[q], l[q]);
      }
      high[e * 32] = make_uint4(h[0], h[1], h[2], h[3]);
      lo[e * 32] = make_uint4(l[0], l[1], l[2], l[3]);
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < KT; i++) {
        const uint4 h = high[(m * KT + i) * 32];
        hi[m][i][0] = h.x, hi[m][i][1] = h.y, hi[m][i][2] = h.z, hi[m][i][3] = h.w;
      }
    __syncthreads();
  }

  // Input tiles are numbered through the layer above (nearer the input), then the layer below.
  __device__ int above() const { return n + 1 < DEPTH ? tiles(n + 1) : 0; }
  __device__ int below() const { return n > 0 ? tiles(n - 1) : 0; }

  // Always loads, from the first weight where there is none to load, so that many loads are under way at once.
  __device__ float weight(int input_tile, int row, int k, bool owned) const {
    const int N = width(n), up = above();
    const bool upper = input_tile < up;
    const int M = upper ? width(n + 1) : width(n > 0 ? n - 1 : 0), line = (upper ? input_tile : input_tile - up) * 16 + k;
    const float *W = a.W[upper || n == 0 ? n : n - 1];
    const size_t at = upper ? ((size_t)r * N + row) * M + line : ((size_t)r * M + line) * N + row;
    const bool have = owned && input_tile < up + below() && row < N && line < M;
    const float w = W[have ? at : 0];
    return have ? WEIGHT_SCALE * w : 0.f;
  }

  __device__ void publish(float4 v, float scale, int round) const {
    if (!owns) return;
    uint4 p;
    const u32 parity = (round / SLOTS) & 1;
    p.y = marked(split(v.x * scale, v.y * scale, p.x, p.y), p.y, parity);
    p.w = marked(split(v.z * scale, v.w * scale, p.z, p.w), p.w, parity);
    post(a.packets[n] + (((size_t)(round % SLOTS) * job.R + r) * tiles(n) + tile) * NT * 32 + sample * 4 + quarter, p);
  }

  // The neighbours' values of that round through the weights: sum_k W v, for an owner's four units.
  __device__ float4 gather(int round, float scale) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, up = above(), all = up + below();
    const u32 parity = (round / SLOTS) & 1;
    const uint4 *from[KT];
    uint4 p[KT][NT];
#pragma unroll
    for (int i = 0; i < KT; i++) {
      const int q = warp + WARPS * i;
      const bool upper = q < up;
      const int source = upper ? n + 1 : (n > 0 ? n - 1 : 0), at = upper ? q : q - up;
      from[i] = a.packets[source] + (((size_t)(round % SLOTS) * job.R + r) * tiles(source) + at) * NT * 32 + lane;
    }
    auto fresh = [&](const uint4 &v) { return (((v.y ^ parity) | (v.w ^ parity)) & 1) == 0; };
    auto wanted = [&](int i, int s) { return warp + WARPS * i < all && s * 8 + lane / 4 < B; };
    // One packet a thread is watched until it comes, and only then the others are read: reading all of them over and
    // over would take the cache's bandwidth from those that still write.
    int spins = 0;
    p[0][0] = wanted(0, 0) ? peek(from[0]) : make_uint4(0, parity, 0, parity);
    while (__any_sync(~0u, !fresh(p[0][0]))) {
      if (wanted(0, 0)) p[0][0] = peek(from[0]);
      if (++spins > 1 << 22) __trap();           // a neighbour is gone: better an error than a card that hangs
    }
#pragma unroll
    for (int i = 0; i < KT; i++)
#pragma unroll
      for (int s = 0; s < NT; s++)
        if (i + s) p[i][s] = wanted(i, s) ? peek(from[i] + s * 32) : make_uint4(0, parity, 0, parity);
    float sum[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int s = 0; s < NT; s++) sum[m][s][0] = sum[m][s][1] = sum[m][s][2] = sum[m][s][3] = 0.f;
#pragma unroll
    for (int i = 0; i < KT; i++) {
      if (warp + WARPS * i >= all) continue;
      while (true) {
        bool late = false;
#pragma unroll
        for (int s = 0; s < NT; s++) late = late || !fresh(p[i][s]);
        if (!__any_sync(~0u, late)) break;
#pragma unroll
        for (int j = i; j < KT; j++)
#pragma unroll
          for (int s = 0; s < NT; s++)
            if (!fresh(p[j][s])) p[j][s] = peek(from[j] + s * 32);
        if (++spins > 1 << 22) __trap();
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint4 l = lo[(m * KT + i) * 32];
#pragma unroll
        for (int s = 0; s < NT; s++) mma(sum[m][s], l.x, l.y, l.z, l.w, p[i][s].x, p[i][s].z);
#pragma unroll
        for (int s = 0; s < NT; s++) mma(sum[m][s], hi[m][i][0], hi[m][i][1], hi[m][i][2], hi[m][i][3], p[i][s].y, p[i][s].w);
      }
    }
    // The large products come last: tensor cores cut a sum off at the size it has, and the small ones would be cut with it.
#pragma unroll
    for (int i = 0; i < KT; i++) {
      if (warp + WARPS * i >= all) continue;
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int s = 0; s < NT; s++) mma(sum[m][s], hi[m][i][0], hi[m][i][1], hi[m][i][2], hi[m][i][3], p[i][s].x, p[i][s].z);
    }
    float *page = sums + (size_t)buffer * WARPS * MT * NT * FRAGMENT;
    buffer ^= 1;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int s = 0; s < NT; s++)
        *(float4 *)(page + ((warp * MT + m) * NT + s) * FRAGMENT + lane * 4 + lane / 8 * 16) =
            make_float4(sum[m][s][0], sum[m][s][2], sum[m][s][1], sum[m][s][3]);
    __syncthreads();
    float4 total = zero4();
    if (owns) {
      const int column = sample % 8, at = (8 * quarter + column / 2) * 4 + quarter * 16 + 2 * (column & 1);
      const float *part = page + ((tile - first) * NT + sample / 8) * FRAGMENT + at;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 x = *(const float2 *)(part + w * MT * NT * FRAGMENT), y = *(const float2 *)(part + w * MT * NT * FRAGMENT + 16);
        total = total + make_float4(x.x, y.x, x.y, y.y);
      }
    }
    return (1.0f / (WEIGHT_SCALE * scale)) * total;
  }

  // Four units of a sample in an array (..., R, B, padded): units 2q, 2q+1 and 2q+8, 2q+9 of the tile.
  __device__ size_t place(int slot) const {
    return (((size_t)slot * job.R + r) * B + sample) * ((width(n) + 15) / 16 * 16) + tile * 16 + 2 * quarter;
  }
  __device__ void store(float *to, int slot, float4 v) const {
    if (!owns || !to) return;
    float *p = to + place(slot);
    *(float2 *)p = make_float2(v.x, v.y);
    *(float2 *)(p + 8) = make_float2(v.z, v.w);
  }
  __device__ float4 load(const float *from, int slot) const {
    if (!owns) return zero4();
    const float *p = from + place(slot);
    const float2 x = *(const float2 *)p, y = *(const float2 *)(p + 8);
    return make_float4(x.x, x.y, y.x, y.y);
  }
  __device__ bool real(int i) const { return owns && tile * 16 + 2 * quarter + (i & 1) + (i >> 1) * 8 < width(n); }
  template <class F> __device__ float4 each(F f) const {
    return make_float4(real(0) ? f(0) : 0.f, real(1) ? f(1) : 0.f, real(2) ? f(2) : 0.f, real(3) ? f(3) : 0.f);
  }

  __device__ void run(int it);
};

__device__ __forceinline__ float4 rates_of(float4 s) { return map4([](float q) { return rate(q); }, s); }

// What is told of the free state of the outputs: the four threads of a sample agree on its loss and its largest output.
__device__ void tell(const Job &job, int it, int r, int sample, int quarter, float4 s, float4 target, int label) {
  const float v[4] = {s.x, s.y, s.z, s.w}, y[4] = {target.x, target.y, target.z, target.w};
  float loss = 0.f, top = -__int_as_float(0x7f800000);
  int best = 0;
  for (int i = 0; i < 4; i++) {
    const int k = 2 * quarter + (i & 1) + (i >> 1) * 8;
    if (k >= width(0)) continue;
    loss += 0.5f * (v[i] - y[i]) * (v[i] - y[i]);
    if (v[i] > top) top = v[i], best = k;
  }
  for (int q = 1; q < 4; q <<= 1) {
    loss += __shfl_xor_sync(__activemask(), loss, q);
    const float other = __shfl_xor_sync(__activemask(), top, q);
    const int which = __shfl_xor_sync(__activemask(), best, q);
    if (other > top || (other == top && which < best)) top = other, best = which;
  }
  if (quarter == 0) {
    float *stats = stats_of(job, it, r) + sample * STATS;
    stats[0] = best != label;
    stats[1] = loss;
  }
}

template <int MT, int KT> __device__ void Part<MT, KT>::run(int it) {
  const int T = job.T, K = job.K, plain = METHOD == 1 ? T - K : T;
  const float eps = job.eps, pull = job.beta * (ENERGY ? eps : 1.0f);
  const bool with_slope = OUTPUT_SLOPE || n > 0;
  float4 base = zero4(), target = zero4();
  int label = 0;
  if (owns) {
    const int unit = tile * 16 + 2 * quarter;
    const float *bias = n == DEPTH - 1 ? job.b : a.b[n];
    auto index = [&](int i) { return unit + (i & 1) + (i >> 1) * 8; };
    if (bias) base = each([&](int i) { return bias[(size_t)r * width(n) + index(i)]; });
    if (n == DEPTH - 1)
      for (int q = 0; q < SPLITS; q++)
        base = base + each([&](int i) { return job.drive[((size_t)(q * job.R + r) * B + sample) * HP + index(i)]; });
    if (n == 0) {
      const int row = job.order[((size_t)it * job.R + r) * B + sample];
      target = each([&](int i) { return job.targets[(size_t)row * width(0) + index(i)]; });
      label = (int)job.labels[row];
    }
  }
  float4 s = zero4(), in = zero4();
  int mine = 0, theirs = 1;
  float4 rates = each([](int) { return rate(0.f); });
  publish(rates, RATE_SCALE, mine++);

  auto free_step = [&](float4 total) {
    in = total + base;
    const float v[4] = {s.x, s.y, s.z, s.w}, q[4] = {rates.x, rates.y, rates.z, rates.w}, w[4] = {in.x, in.y, in.z, in.w};
    return each([&](int i) { return unclipped(v[i], q[i], w[i], eps, with_slope); });
  };
  auto clipped = [](float4 v) { return map4([](float q) { return clip(q); }, v); };
  auto move = [&](float4 to) {
    s = to;
    rates = each([&](int i) { const float v[4] = {s.x, s.y, s.z, s.w}; return rate(v[i]); });
    publish(rates, RATE_SCALE, mine++);
  };

  for (int t = 0; t < plain; t++) {
    if (job.stop && t % 16 == 0 && t && ((volatile int *)a.moved)[r * a.moved_count + t / 16 - 1] == 0) break;
    const bool turn = !job.alternating || ((plain - 1 - t) & 1) == (n & 1);
    if (turn) {
      const float4 to = clipped(free_step(gather(theirs - 1, RATE_SCALE)));
      // Two steps are looked at, so that both halves of an alternating pair are; eight more pass before anyone asks.
      if (job.stop && (t % 16 == 7 || t % 16 == 8)) {
        if (__any_sync(~0u, owns && !same(to, s)) && threadIdx.x % 32 == 0) atomicExch(a.moved + r * a.moved_count + t / 16, 1);
        __threadfence();
      }
      move(to);
    }
    if (!job.alternating || !turn) theirs++;
  }
#if METHOD == 1
  for (int t = 0; t < K; t++, theirs++) {
    store(a.rates[n], t, rates);
    store(a.states[n], t, s);
    const float4 to = clipped(free_step(gather(theirs - 1, RATE_SCALE)));
    store(a.inputs[n], t, in);
    move(to);
  }
#endif
  store(a.s[n], 0, s);
  if (owns && n == 0) tell(job, it, r, sample, quarter, s, target, label);
  const float4 star = s, rates_star = rates;
  auto distance = [&](float4 to) {
    const float v[4] = {to.x, to.y, to.z, to.w}, q[4] = {star.x, star.y, star.z, star.w};
    return worst4(each([&](int i) { return fabsf(v[i] - q[i]); }));
  };
  float residual = 0.f;
  float4 u = zero4();
#if METHOD == 0
  for (int t = 0; t < K; t++, theirs++) {
    float4 to = free_step(gather(theirs - 1, RATE_SCALE));
    if (t == 0) residual = distance(clipped(to));
    if (n == 0) to = each([&](int i) {
        const float v[4] = {to.x, to.y, to.z, to.w}, q[4] = {s.x, s.y, s.z, s.w}, y[4] = {target.x, target.y, target.z, target.w};
        return fmaf(pull, y[i] - q[i], v[i]); });
    move(clipped(to));
  }
  store(a.rates[n], 0, rates_star);
  store(a.rates[n], 1, rates);
  store(a.t[n], 0, s);
  u = (-1.0f / job.beta) * (rates - rates_star);
#else
  residual = distance(clipped(free_step(gather(theirs - 1, RATE_SCALE))));
  float4 nabla = n == 0 ? s - target : zero4();
  float4 after = s;
  for (int t = K - 1; t >= 0; t--) {
    const float4 r4 = load(a.rates[n], t);
    float4 c = nabla, e;
#if ENERGY
    const float4 s4 = load(a.states[n], t), in4 = load(a.inputs[n], t);
    {
      const float v[4] = {s4.x, s4.y, s4.z, s4.w}, q[4] = {r4.x, r4.y, r4.z, r4.w}, w[4] = {in4.x, in4.y, in4.z, in4.w};
      const float g[4] = {nabla.x, nabla.y, nabla.z, nabla.w};
      c = each([&](int i) { return inside(unclipped(v[i], q[i], w[i], eps, with_slope)) ? g[i] : 0.f; });
    }
    const float4 bend = map4([&](float q) { return with_slope ? slope(q) : 1.0f; }, r4);
    e = eps * (bend * c);
#else
    e = nabla * map4([](float y) { return slope(y); }, after);
#endif
    store(a.errors[n], t, e);
    u = u + e;
    if (t == 0) break;
    publish(e, ERROR_SCALE, mine++);
    const float4 coupled = gather(theirs++, ERROR_SCALE);
#if ENERGY
    const float4 curve = map4([&](float q, float w) { return (1.0f - eps) + (with_slope ? eps * curvature(q) * w : 0.f); }, r4, in4);
    nabla = curve * c + map4([](float q) { return slope(q); }, r4) * coupled;
#else
    nabla = coupled;
#endif
    after = r4;
  }
#endif
  if (!owns) return;
  if (n == DEPTH - 1) {
    const float v[4] = {u.x, u.y, u.z, u.w};
    for (int i = 0; i < 4; i++)
      if (real(i)) job.u[(size_t)(r * B + sample) * HP + tile * 16 + 2 * quarter + (i & 1) + (i >> 1) * 8] = v[i];
  }
  const float sum = ((u.x + u.y) + (u.z + u.w)) + ((s.x + s.y) + (s.z + s.w));
  if (!finite(sum)) residual = __int_as_float(0x7fc00000);
  atomicMax((int *)(stats_of(job, it, r) + sample * STATS + 2), __float_as_int(residual));
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int it = a.job.counters->it + offset;
  if (it >= a.job.counters->n) return;
  const int *role = a.roles + blockIdx.x % a.blocks * 3, r = a.first + blockIdx.x / a.blocks, n = role[0];
  const int inputs = (n + 1 < DEPTH ? tiles(n + 1) : 0) + (n > 0 ? tiles(n - 1) : 0);
  if (inputs <= WIDE) {
    Part<3, WIDE / WARPS> part(a, r, n, role[1], role[2], memory);
    part.run(it);
  }
#if WIDEST > WIDE
  else {
    Part<2, (WIDEST + WARPS - 1) / WARPS> part(a, r, n, role[1], role[2], memory);
    part.run(it);
  }
#endif
}

// A tile of 64 x 64 of the weights between two moving layers: the sum of outer products, then the step.
struct Outer {
  float left[B][64], right[B][64];
};

#define LOADS ((2 * B * 16 + 255) / 256)   // float4s of a page that a thread brings

__device__ void update_tile(const Args &a, int r, int n, int row0, int column0, int it) {
  extern __shared__ __align__(16) unsigned char memory[];
  Outer *page = (Outer *)memory;
  const Job &job = a.job;
  const int tid = threadIdx.x, N = width(n), M = width(n + 1), NP = (N + 15) / 16 * 16, MP = (M + 15) / 16 * 16;
  if (!applies(job, it, r)) return;
  const int i0 = tid / 16 * 4, j0 = tid % 16 * 4;
  float4 sum[4] = {zero4(), zero4(), zero4(), zero4()}, next[LOADS];
  float bias = 0.f;
  const int parts = METHOD == 0 ? 2 : 2 * job.K;
  // EP: last rates minus free rates. BPTT: errors with rates, rates with errors, for every step.
  auto bring = [&](int q) {
    const float *left = METHOD == 0 ? a.rates[n] : (q & 1 ? a.rates[n] : a.errors[n]);
    const float *right = METHOD == 0 ? a.rates[n + 1] : (q & 1 ? a.errors[n + 1] : a.rates[n + 1]);
    const size_t slot = ((size_t)(METHOD == 0 ? q : q >> 1) * job.R + r) * B;
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      const int e = tid + 256 * l, b = e / 32, i = e % 16 * 4;
      const bool isright = e % 32 >= 16;
      const int at = (isright ? column0 : row0) + i, wide = isright ? MP : NP;
      next[l] = b < B && at < wide ? *(const float4 *)((isright ? right : left) + (slot + b) * wide + at) : zero4();
    }
  };
  bring(0);
  for (int q = 0; q < parts; q++) {
    Outer &m = page[q & 1];
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      const int e = tid + 256 * l, b = e / 32, i = e % 16 * 4;
      if (b < B) *(float4 *)(e % 32 >= 16 ? &m.right[b][i] : &m.left[b][i]) = next[l];
    }
    if (q + 1 < parts) bring(q + 1);
    __syncthreads();
    const float sign = METHOD == 0 && q == 0 ? -1.0f : 1.0f;
#pragma unroll 4
    for (int b = 0; b < B; b++) {
      const float4 x = sign * *(const float4 *)&m.left[b][i0], y = *(const float4 *)&m.right[b][j0];
      sum[0] = fma4(x.x, y, sum[0]);
      sum[1] = fma4(x.y, y, sum[1]);
      sum[2] = fma4(x.z, y, sum[2]);
      sum[3] = fma4(x.w, y, sum[3]);
    }
    if (column0 == 0 && tid < 64 && (METHOD == 0 || !(q & 1)))
#pragma unroll 4
      for (int b = 0; b < B; b++) bias += sign * m.left[b][tid];
  }
  const float unit = METHOD == 0 ? -1.0f / job.beta : 1.0f, rate = -a.lr[n] * unit * (1.0f / B);
  for (int i = 0; i < 4; i++) {
    const int row = row0 + i0 + i;
    float *w = a.W[n] + ((size_t)r * N + row) * M + column0 + j0;
    if (row < N && column0 + j0 + 3 < M && M % 4 == 0) {
      *(float4 *)w = fma4(rate, sum[i], *(float4 *)w);
    } else if (row < N) {
      const float v[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
      for (int j = 0; j < 4; j++)
        if (column0 + j0 + j < M) w[j] += rate * v[j];
    }
  }
  if (column0 == 0 && tid < 64 && row0 + tid < N && a.b[n]) a.b[n][(size_t)r * N + row0 + tid] -= a.lrb[n] * unit * (1.0f / B) * bias;
}

// The first blocks hold a tile of the input weights each, the next a tile of the others, the last one a network's counts.
extern "C" __global__ __launch_bounds__(256, 2) void update(Args a, int offset) {
  const Job &job = a.job;
  const int it = job.counters->it + offset, tid = threadIdx.x, R = job.R;
  if (it > job.counters->n) return;
  int block = blockIdx.x;
  // Every packet is marked as one of an odd round, so that round 0 is seen to be new.
  for (int e = block * 256 + tid; e < a.packet_count; e += gridDim.x * 256) a.packets[0][e] = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (block < INPUT_BLOCKS * R) {
    const int tile = block / SPLITS;
    return update_input_tile(job, tile / TILES, tile % TILES, block % SPLITS, it);
  }
  block -= INPUT_BLOCKS * R;
  for (int n = 0; n + 1 < DEPTH; n++) {
    const int down = (width(n) + 63) / 64, across = (width(n + 1) + 63) / 64, all = down * across * R;
    if (block < all) {
      if (it > 0) update_tile(a, block / (down * across), n, block / across % down * 64, block % across * 64, it);
      return;
    }
    block -= all;
  }
  const int r = block;
  for (int e = tid; e < a.moved_count; e += 256) a.moved[r * a.moved_count + e] = 0;
  if (tid < B) stats_of(job, it, r)[tid * STATS + 2] = 0.f;
  if (it == 0) return;
  const bool ok = applies(job, it, r);
  if (tid < 32) count(job, it, r, ok);
}
