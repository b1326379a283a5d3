// A convolutional net in the kernels: an image of CI x IH x IW, filters W12 (C1 x CI x KS x KS), pooling by 2 into h1
// (C1 x H1H x H1W), filters W01 (C0 x C1 x KS x KS), pooling by 2 into h0 (C0 x H0H x H0W), weights Wfc to NO outputs s0.
//
// Compiled with these sizes, B samples per mini-batch, METHOD 0 EP, 1 BPTT, ACT 0 sigmoid, 1 tanh, 2 hard sigmoid.
// Maps are always laid out for 64 channels of 4 x 4 zones over 32 channels of 12 x 12; unused entries are zero.

#define THREADS 256
#define TILES 5                        // most tiles of h1 per thread: 8 positions x 2 rows of channels, four units each
#define UNITS (4 * TILES)
#define ZONES 16                       // 4 x 4
#define PLACES 144                     // 12 x 12
#define WIDE 1024                      // units of h0 as laid out
#define WINDOW (KS * KS)
#define STATS 4                        // wrong, loss, residual (NaN if anything was not finite), distinct steps

// Filters in the layout of the products: halves of 2^10 W (which hold |W| below 64; beyond, a network counts as not finite and
// is frozen), low parts then high parts; tap by tap, dx slowest, each a block of
// (4 groups of 8 channels of h1) x (64 channels of h0). The taps dy and dy + 2 are adjacent: see conv_products.cuh.
#define TAP_BYTES 4096
#define HALF_BYTES (25 * TAP_BYTES)
#define WEIGHT_SCALE 1024.0f

// Shared memory of a block.
#define MAP1 (2 * HALF_BYTES)          // changes of h1: (4 groups, 144 places) of 8 channels
#define GROUP1 (PLACES * 16)
#define MAPU (MAP1 + 4 * GROUP1)       // changes of the unpooled h0: (8 groups, 112 places) of 8 channels
#define FRONT 20                       // zeros before each group; rows of 12 places, of which the last four are zero
#define GROUPU ((FRONT + 92) * 16)
#define SMALL (MAPU + 16384)           // MAPU and what follows it also serve to exchange sums
#define SHARED_BYTES (SMALL + 2048)

// Operands of the gradient of W01: two pairs of an unpooled map (8 groups, 64 places) and an h1, high and low parts.
#define PAIR_U (8 * 64 * 16)
#define PAIR_H (4 * GROUP1)
#define PAIR_BYTES (4 * (PAIR_U + PAIR_H))
#define PAIR_SCALE 4096.0f

#define FULL1 (C1 == 32 && H1H == 12 && H1W == 12)   // h1 fills its map

#define PRIVATE 32                     // numbers a thread saves at the end of the free phase, or of each step of BPTT
#define STATE (16 + WIDE + 32 * PLACES)

struct Counters { int it, n, start, unused; };   // first iteration of this graph, iterations of this run, index of the run's first

struct Args {
  const float *images, *targets;                 // (N, CI, IH, IW) (N, NO)
  const long long *labels;                       // (N)
  const int *order;                              // (n, R, B)
  const Counters *counters;
  float *W01, *b0, *W12, *b1, *Wfc, *bfc;        // biases: null if there are none
  unsigned char *packed;                         // (R, 2 HALF_BYTES)
  float *own;                                    // (R B, steps, PRIVATE, THREADS)
  unsigned char *pairs;                          // (R B, steps, PAIR_BYTES)
  float *part;                                   // sums of filter gradients (R, groups, 25, 64, 32)
  float *gfc, *g0, *g12, *gs;                    // per sample: (NO, WIDE) (WIDE) (32, CI WINDOW + 1) (16)
  float *states;                                 // (2, R B, STATE): free and last
  float *stats;                                  // (R, B, STATS)
  double *tally;                                 // (7, R)
  int R, T, K, alternating, stop, steps;
  float beta, tolerance, lr01, lrb0, lr12, lrb1, lrfc, lrbfc;
};

__device__ __forceinline__ float sigma(float v) {
#if ACT == 0
  return 1.0f / (1.0f + expf(fmaf(v, -4.0f, 2.0f)));
#elif ACT == 1
  return tanhf(v);
#else
  return v < 0.0f ? 0.0f : (v > 1.0f ? 1.0f : v);      // keeps NaN
#endif
}

__device__ __forceinline__ float slope(float v) {
#if ACT == 0
  const float r = sigma(v);
  return 4.0f * r * (1.0f - r);
#elif ACT == 1
  const float r = tanhf(v);
  return 1.0f - r * r;
#else
  return v >= 0.0f && v <= 1.0f ? 1.0f : (v != v ? v : 0.0f);
#endif
}

__device__ __forceinline__ bool finite(float v) { return fabsf(v) < __int_as_float(0x7f800000); }
// max that keeps NaN, which fmaxf would drop
__device__ __forceinline__ float worse(float a, float b) { return (b > a || b != b) ? b : a; }

__device__ __forceinline__ unsigned short half_of(float v) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return h;
}
__device__ __forceinline__ float float_of(unsigned short h) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
  return v;
}

// The totals of a pair += v and w, with the rounding error kept in two short floats: it is at most half a last bit, for which
// eight bits are plenty.
__device__ __forceinline__ void add_exactly(float &first, float &second, unsigned &lost, float v, float w) {
  v += __uint_as_float(lost << 16);
  w += __uint_as_float(lost & 0xffff0000u);
  const float p = first + v, q = second + w;
  v -= p - first;
  w -= q - second;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(lost) : "f"(w), "f"(v));
  first = p;
  second = q;
}

// The units of a thread. In h1: up to five tiles of 8 places for the channels `row` and row + 8, in each tile the places
// 2c and 2c + 1; unit 4 j + 2 e + k is place k of tile j and channel row + 8 e. In h0: the zones (2 w, c) and (2 w + 1, c), w
// the warpgroup, of the channels `wide` and wide + 8; unit 2 e + p is zone row p of channel wide + 8 e.
struct Seat {
  int group, warp, lane, c, kind, row, wide, first, tiles;
  __device__ explicit Seat(int tid) {
    group = __reduce_or_sync(~0u, tid >> 7);
    warp = __reduce_or_sync(~0u, (tid >> 5) & 3);
    lane = tid & 31;
    c = lane & 3;
    kind = 2 * group + (warp >> 1);
    row = 16 * (warp & 1) + (lane >> 2);
    wide = 16 * warp + (lane >> 2);
    first = kind == 0 ? 0 : kind == 1 ? 5 : kind == 2 ? 14 : 10;
    tiles = group ? 4 : 5;
  }
  __device__ int place(int j) const { return 8 * (first + j) + 2 * c; }
  // Bit masks of the units of h1 and h0 that are part of the net.
  __device__ unsigned live() const {
    unsigned bits = 0;
    for (int j = 0; j < tiles; j++)
      for (int r = 0; r < 4; r++) {
        const int p = place(j) + (r & 1);
        if (p / 12 < H1H && p % 12 < H1W && row + 8 * (r >> 1) < C1) bits |= 1u << (4 * j + r);
      }
    return bits;
  }
  __device__ unsigned live_zones() const {
    unsigned bits = 0;
    for (int u = 0; u < 4; u++)
      if (2 * group + (u & 1) < H0H && c < H0W && wide + 8 * (u >> 1) < C0) bits |= 1u << u;
    return bits;
  }
  __device__ int zone(int u) const { return (wide + 8 * (u >> 1)) * ZONES + (2 * group + (u & 1)) * 4 + c; }
};

__device__ __forceinline__ float *stats_of(const Args &a, int r) { return a.stats + (size_t)r * B * STATS; }

// Whether this iteration may be applied to network r: everything is finite and the network was not frozen. Called by the whole
// block.
__device__ __forceinline__ bool applies(const Args &a, int r) {
  bool good = a.tally[6 * a.R + r] < 0.0;
  for (int b = threadIdx.x; b < B; b += blockDim.x) good = good && finite(stats_of(a, r)[b * STATS + 2]);
  return __syncthreads_and(good);
}

// One thread sums the counts of network r over its samples.
__device__ void count(const Args &a, int it, int r, bool ok) {
  double wrong = 0.0, loss = 0.0, residual = 0.0, unsettled = 0.0, *t = a.tally + r;
  float worst = 0.f;
  const int R = a.R;
  for (int b = 0; b < B; b++) {
    const float *s = stats_of(a, r) + b * STATS;
    wrong += s[0];
    loss += s[1];
    residual += s[2];
    worst = worse(worst, s[2]);
    unsettled += !(s[2] < a.tolerance);
  }
  t[0] += B;
  t[R] += wrong;
  t[2 * R] += loss;
  t[3 * R] += residual;
  if (!(worst <= t[4 * R])) t[4 * R] = worst;
  t[5 * R] += unsettled;
  if (!ok && t[6 * R] < 0.0) t[6 * R] = a.counters->start + it;
}

extern "C" __global__ void advance(Counters *counters, int by) { counters->it += by; }
