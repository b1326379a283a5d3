// Whole training iterations of layered nets with two hidden layers or more. Two kernels alternate:
//   update   applies the last iteration's gradients and computes the input drive of this iteration's mini-batch;
//   relax    all T + K steps in one launch. A cluster of blocks runs up to eight samples of one network; a warp owns a tile of
//            sixteen units of a layer for all steps, its rows of the weights held as tensor-core fragments (see tile.cuh).
//
// Precision. A weight is the sum of two halves, high (in registers) and low (in shared memory). Of a state its neighbours are
// told the differences: each keeps a sum of W q over all differences q it was told, and the teller keeps the sum of the q, so that
// what was rounded away is told with the next difference. A difference is one half, or two where it is so large that its
// rounding would show: a state is always known to about 2^-25, whatever the dynamics does.
// Errors of backpropagation are told whole, as two halves.
//
// Compiled with N0 (<= 16), N1, ..., N4 (multiples of 4) the sizes of the DEPTH layers that move (0 beyond), H the last of them, B samples in GROUPS
// groups, METHOD 0 EP, 1 BPTT, the switches of neuron.cuh, and the layout: CLUSTER blocks, the outputs shared by the first
// OUTPUT_WARPS warps of block OUTPUT_RANK, MOST tiles in the widest layer (even), AREA tiles a block can be told of, PLACE0..4 where a
// layer's tiles lie in that area, HEARD0..4 which blocks hear a layer (the first, and 256 times their number).

#include "neuron.cuh"
#include "vector.cuh"
#include "job.cuh"
#include "input_layer.cuh"
#include "exchange.cuh"

#define LAYERS 5

struct Args {
  Job job;
  float *W[4], *b[4];                  // W[n] (R, N_n, N_{n+1}) between moving layers, b[n] (R, N_n) or null
  float *rates[LAYERS];                // (2, R, B, padded): free and last (EP), or (K, R, B, padded): before each step (BPTT)
  float *errors[LAYERS];               // BPTT: (K, R, B, padded)
  float *states[LAYERS], *inputs[LAYERS];  // BPTT, energy-based: (K, R, B, padded)
  float *s[LAYERS], *t[LAYERS];        // free and last states (R, B, padded), or null
  int *moved;                          // (R * GROUPS, moved_count)
  const int *roles;                    // (CLUSTER * WARPS, 4): layer (-1: none), tile, part, which sources it arms
  int moved_count;
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
__device__ __forceinline__ int place_of(int n) { return n == 0 ? PLACE0 : n == 1 ? PLACE1 : n == 2 ? PLACE2 : n == 3 ? PLACE3 : PLACE4; }
__device__ __forceinline__ u32 heard_by(int n) { return n == 0 ? HEARD0 : n == 1 ? HEARD1 : n == 2 ? HEARD2 : n == 3 ? HEARD3 : HEARD4; }

#include "tile.cuh"

// The steps of an iteration: `plain` free ones, then K more, nudged (EP) or recorded for the way back (BPTT, one more for the residual).
struct Course {
  int it, plain, end;
  __device__ __forceinline__ Course(const Job &job, int it) : it(it), plain(METHOD == 1 ? job.T - job.K : job.T), end(plain + job.K) {}
  __device__ __forceinline__ int star() const { return METHOD == 0 ? plain : end; }  // the step that begins at the free state
};

// a + b, with what is rounded away carried in `rest`.
__device__ __forceinline__ void add_carrying(float4 &a, float4 &rest, float4 b) {
  const float4 y = b + rest, sum = a + y;
  rest = y - (sum - a);
  a = sum;
}

// The largest of a sample's numbers, or NaN, among its residuals. A column of eight threads holds two samples.
__device__ __forceinline__ void report(const Spot &spot, int it, float4 v) {
  const float q[2] = {worse(v.x, v.z), worse(v.y, v.w)};
  for (int j = 0; j < 2; j++) {
    float worst = q[j];
    for (int x = 4; x < 32; x <<= 1) worst = worse(worst, __shfl_xor_sync(~0u, worst, x));
    if (worst != worst) worst = __int_as_float(0x7fc00000);
    if (spot.lane < 4 && spot.sample(j) < spot.samples)
      atomicMax((int *)(stats_of(spot.a.job, it, spot.r) + (spot.first_sample + spot.sample(j)) * STATS + 2), __float_as_int(worst));
  }
}

// What is counted of the free state of the outputs.
__device__ __forceinline__ void tell(const Spot &spot, int it, float4 s, float4 target) {
  const Job &job = spot.a.job;
  float v[4], y[4];
  as_array(s, v), as_array(target, y);
  for (int j = 0; j < 2; j++) {
    float loss = 0.f, top = -__int_as_float(0x7f800000);
    int best = 0;
    for (int i = j; i < 4; i += 2) {
      if (spot.unit(i) >= N0) continue;
      loss += 0.5f * (v[i] - y[i]) * (v[i] - y[i]);
      if (v[i] > top) top = v[i], best = spot.unit(i);
    }
    for (int q = 4; q < 32; q <<= 1) {
      loss += __shfl_xor_sync(~0u, loss, q);
      const float other = __shfl_xor_sync(~0u, top, q);
      const int which = __shfl_xor_sync(~0u, best, q);
      if (other > top || (other == top && which < best)) top = other, best = which;
    }
    const int b = spot.first_sample + spot.sample(j);
    if (spot.lane < 4 && spot.sample(j) < spot.samples) {
      float *stats = stats_of(job, it, spot.r) + b * STATS;
      stats[0] = best != (int)job.labels[job.order[((size_t)it * job.R + spot.r) * B + b]];
      stats[1] = loss;
    }
  }
}

// Four neurons: what they are, what they hear, what others know of them.
template <bool OUTPUTS> struct Cells {
  float4 s, rates, in, rest, told, target;
  static constexpr bool with_slope = OUTPUT_SLOPE || !OUTPUTS;

  __device__ __forceinline__ void begin(const Spot &spot, int it) {
    const Job &job = spot.a.job;
    const int r = spot.r;
    s = rest = told = target = in = zero4();
    const float *bias = spot.n == DEPTH - 1 ? job.b : spot.a.b[spot.n];
    if (bias) in = spot.each([&](int i) { return bias[(size_t)r * spot.size + spot.unit(i)]; });
    if (!OUTPUTS && spot.n == DEPTH - 1)
      for (int q = 0; q < SPLITS; q++)
        in = in + spot.each([&](int i) {
          return job.drive[((size_t)(q * job.R + r) * B + spot.first_sample + spot.sample(i)) * HP + spot.unit(i)];
        });
    if (OUTPUTS) {
      const int *order = job.order + ((size_t)it * job.R + r) * B + spot.first_sample;
      target = spot.each([&](int i) { return job.targets[(size_t)order[spot.sample(i)] * N0 + spot.unit(i)]; });
    }
    rates = spot.each([](int) { return rate(0.f); });
  }

  // All four are computed, without branches, and those that are not there made zero.
  template <class F> __device__ __forceinline__ static float4 all(const Spot &spot, F f) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = f(i);
    return spot.each([&](int i) { return v[i]; });
  }

  // Step t. Returns whether anything moved.
  __device__ __forceinline__ bool step(const Spot &spot, const Course &course, int t) {
    const Args &a = spot.a;
    const int n = spot.n;
    const float eps = a.job.eps;
    float v[4], q[4], w[4], y[4];
    as_array(s, v), as_array(rates, q), as_array(in, w), as_array(target, y);
    float4 to = all(spot, [&](int i) { return unclipped(v[i], q[i], w[i], eps, with_slope); });
    if (t == course.star()) {
      report(spot, course.it, map4([](float p, float q) { return fabsf(clip(p) - q); }, to, s));
      spot.store(a.s[n], 0, s);
      if (OUTPUTS) tell(spot, course.it, s, target);
    }
#if METHOD == 0
    if (t == course.plain) spot.store(a.rates[n], 0, rates);
    if (OUTPUTS && t >= course.plain) {
      const float pull = a.job.beta * (ENERGY ? eps : 1.0f);
      float x[4];
      as_array(to, x);
      to = all(spot, [&](int i) { return fmaf(pull, y[i] - v[i], x[i]); });
    }
#else
    if (t == course.end) return false;
    if (t >= course.plain) {
      spot.store(a.rates[n], t - course.plain, rates);
      spot.store(a.states[n], t - course.plain, s);
      spot.store(a.inputs[n], t - course.plain, in);
    }
#endif
    to = map4([](float q) { return clip(q); }, to);
    const bool moves = !same(to, s);
    s = to;
    as_array(s, v);
    rates = ENERGY ? all(spot, [&](int i) { return rate(v[i]); }) : s;
    return moves;
  }

  // The way back: `in` holds the gradient of the state (nabla), `rest` the state after the step, `told` the sum of the errors.
  __device__ __forceinline__ void turn_back() {
    rest = s;
    in = OUTPUTS ? s - target : zero4();
    told = zero4();
  }
  // The error of step t; what passes the clip stays in `in`.
  __device__ __forceinline__ float4 error(const Spot &spot, int t) {
    const Args &a = spot.a;
    float4 e;
#if ENERGY
    const float eps = a.job.eps;
    const float4 r4 = spot.load(a.rates[spot.n], t);
    float v[4], q[4], w[4], g[4];
    as_array(spot.load(a.states[spot.n], t), v), as_array(r4, q), as_array(spot.load(a.inputs[spot.n], t), w), as_array(in, g);
    in = all(spot, [&](int i) { return inside(unclipped(v[i], q[i], w[i], eps, with_slope)) ? g[i] : 0.f; });
    e = eps * (map4([&](float q) { return with_slope ? slope(q) : 1.0f; }, r4) * in);
#else
    e = in * map4([](float y) { return slope(y); }, rest);
#endif
    spot.store(a.errors[spot.n], t, e);
    told = told + e;
    return e;
  }
  __device__ __forceinline__ void go_back(const Spot &spot, int t, float4 coupled) {
    const float4 r4 = spot.load(spot.a.rates[spot.n], t);
#if ENERGY
    const float eps = spot.a.job.eps;
    const float4 in4 = spot.load(spot.a.inputs[spot.n], t);
    const float4 curve = map4([&](float q, float w) { return (1.0f - eps) + (with_slope ? eps * curvature(q) * w : 0.f); }, r4, in4);
    in = curve * in + map4([](float q) { return slope(q); }, r4) * coupled;
#else
    in = coupled;
#endif
    rest = r4;
  }

  // The gradient of the layer next to the input, and whether everything is finite.
  __device__ __forceinline__ void end(const Spot &spot, const Course &course) {
    const Job &job = spot.a.job;
#if METHOD == 0
    spot.store(spot.a.rates[spot.n], 1, rates);
    spot.store(spot.a.t[spot.n], 0, s);
    const float4 u = (-1.0f / job.beta) * (rates - spot.load(spot.a.rates[spot.n], 0));
#else
    const float4 u = told;
#endif
    report(spot, course.it, map4([](float p, float q) { return finite(p + q) ? 0.f : __int_as_float(0x7fc00000); }, u, s));
    if (OUTPUTS || spot.n < DEPTH - 1) return;
    float v[4];
    as_array(u, v);
    for (int i = 0; i < 4; i++)
      if (spot.real(i)) job.u[(size_t)(spot.r * B + spot.first_sample + spot.sample(i)) * HP + spot.unit(i)] = v[i];
  }

  __device__ __forceinline__ void keep(const Board &board) const {
    float4 *to = board.kept() + threadIdx.x % 32;
    to[0] = s, to[32] = rates, to[64] = in, to[96] = rest, to[128] = told, to[160] = target;
  }
  __device__ __forceinline__ void recall(const Board &board) {
    const float4 *from = board.kept() + threadIdx.x % 32;
    s = from[0], rates = from[32], in = from[64], rest = from[96], told = from[128], target = from[160];
  }
};

__device__ __forceinline__ void run(Tile16 &tile, const Spot &spot, int group, int it, bool shares) {
  const Job &job = spot.a.job;
  const Board &board = spot.board;
  const Course course(job, it);
  const bool first = shares && tile.warp == 0;
  const Spot output_spot(spot.a, board, spot.r, group, 0, 0, true);
  Cells<false> own;
  auto outputs = [&](auto f) {
    Cells<true> cells;
    cells.recall(board);
    f(cells);
    cells.keep(board);
  };
  int mine = 0, theirs = 1, heard = 0;           // rounds told, rounds the neighbours have told, rounds heard
  own.begin(spot, it);
  if (tile.owns) spot.publish(own.rates, own.told, mine);
  if (first) outputs([&](Cells<true> &c) {
      c.begin(output_spot, it);
      output_spot.publish(c.rates, c.told, mine);
    });
  mine++;
  int *moved = spot.a.moved + (spot.r * GROUPS + group) * spot.a.moved_count;
  for (int t = 0; t < course.end + METHOD; t++) {
    if (job.stop && t < course.plain && t % 16 == 0 && t && ((volatile int *)moved)[t / 16 - 1] == 0) t = course.plain;
    const bool second = t >= course.plain, turn = second || !job.alternating || ((course.plain - 1 - t) & 1) == (spot.n & 1);
    const bool tells = METHOD == 1 ? t < course.end : t + 1 < course.end;
    if (turn) {
      // The outputs' share comes before anything is told: what is sent holds up later loads.
      float4 sum = zero4();
      for (; heard < theirs; heard++) {
        add_carrying(own.in, own.rest, tile.gather(heard, STATE_SCALE));
        if (shares) sum = sum + tile.output_share(heard, STATE_SCALE);
      }
      if (shares) sum = tile.output_sum(sum);
      u32 moves = tile.owns && own.step(spot, course, t);
      if (tile.owns && tells) moves |= spot.publish(own.rates, own.told, mine);
      // Layer 1 needs the outputs last.
      if (first) outputs([&](Cells<true> &c) {
          add_carrying(c.in, c.rest, sum);
          moves |= c.step(output_spot, course, t);
          if (tells) moves |= output_spot.publish(c.rates, c.told, mine);
        });
      mine++;
      // Two steps are looked at, so that both halves of an alternating pair are; seven more pass before anyone asks.
      if (job.stop && !second && (t % 16 == 7 || t % 16 == 8)) {
        if (__any_sync(~0u, moves) && spot.lane == 0) atomicExch(moved + t / 16, 1);
        __threadfence();
      }
    }
    if (second || !job.alternating || !turn) theirs++;
  }
#if METHOD == 1
  own.turn_back();
  if (first) outputs([](Cells<true> &c) { c.turn_back(); });
  mine--;                                        // nothing was told after the last step
  for (int t = job.K - 1; t >= 0; t--) {
    if (tile.owns) {
      const float4 e = own.error(spot, t);
      if (t) spot.publish_error(e, mine);
    }
    if (first) outputs([&](Cells<true> &c) {
        const float4 e = c.error(output_spot, t);
        if (t) output_spot.publish_error(e, mine);
      });
    mine++;
    if (t == 0) break;
    tile.last = ~0u;
    const float4 coupled = tile.gather(heard, ERROR_SCALE);
    if (tile.owns) own.go_back(spot, t, coupled);
    if (shares) {
      const float4 sum = tile.output_sum(tile.output_share(heard, ERROR_SCALE));
      if (first) outputs([&](Cells<true> &c) { c.go_back(output_spot, t, sum); });
    }
    heard++;
  }
#endif
  if (tile.owns) own.end(spot, course);
  if (first) outputs([&](Cells<true> &c) { c.end(output_spot, course); });
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int it = a.job.counters->it + offset;
  if (it >= a.job.counters->n) return;
  const int warp = threadIdx.x / 32, rank = cluster_rank(), problem = blockIdx.x / CLUSTER, r = problem / GROUPS, group = problem % GROUPS;
  const Board board(memory);
  const int *role = a.roles + (rank * WARPS + warp) * 4;
  const bool works = role[0] >= 0;
  const Spot spot(a, board, r, group, max(role[0], 0), role[1], role[2] == 0);
  Tile16 tile(spot, role, warp);
  if (rank == OUTPUT_RANK) load_output_weights(a, board, r);
  if (works) tile.load_weights(a, r, spot.tile, spot.size, memory + LOW_BYTES + SIDE_BYTES + warp * SCRATCH);
  __syncthreads();
  // Tiles beyond a narrow layer are multiplied by zero weights: they must not hold a NaN.
  for (int e = threadIdx.x; e < 2 * SLOT_BYTES / 16; e += THREADS) ((uint4 *)(memory + LOW_BYTES + SIDE_BYTES))[e] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 4 * LAYERS) barrier_init(board.barriers + threadIdx.x * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (works) tile.arm();
  cluster_sync();
  if (works) run(tile, spot, group, it, rank == OUTPUT_RANK && warp < OUTPUT_WARPS);
  cluster_sync();
}

#include "inner_weights.cuh"
