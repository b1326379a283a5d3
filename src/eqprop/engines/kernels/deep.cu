// Whole training iterations of layered nets with two hidden layers or more. Two kernels alternate, for `count` networks from
// `first` on:
//   update   applies the last iteration's gradients and computes the input drive of this iteration's mini-batch;
//   relax    all T + K steps in one launch. A cluster of blocks runs up to eight samples of one network; a warp owns a tile of
//            sixteen units of a layer for all steps, and holds weights of two tiles as tensor-core fragments (see tile.cuh).
//
// Precision. A weight is the sum of two halves, high (in registers) and low (in shared memory). Of a state its neighbours are
// told the differences, as two halves: each keeps a sum of W q over all differences q it was told, and the teller keeps the sum of the
// q, so that what was rounded away is told with the next difference. It is as good as float32 also where the states never settle; with
// one half a difference, or low halves of the weights that come late, a weight update was off by 1e-4 there.
//
// Compiled with N0 (<= 16), N1, ..., N4 (multiples of 4) the sizes of the DEPTH layers that move (0 beyond), H the last of them, B samples in GROUPS
// groups, METHOD 0 EP, 1 BPTT, the switches of neuron.cuh, and the layout: CLUSTER blocks, the outputs shared by the first OUTPUT_WARPS
// warps of the first block and owned by its warp FINISHER, MOST tiles in the widest layer (even), AREA tiles a block can be told of,
// PLACE0..4 where a layer's tiles lie in that area, HEARD0..4 which blocks hear a layer (the first, and 256 times their number),
// PARTIALS, EXTRAS, OUTPUTS, SLOTS where things lie in shared memory (spot.cuh).

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
  const int *roles;                    // (CLUSTER * WARPS, 4): layer (-1: none), pair of tiles, part, which sources it arms
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
// Hidden layers have an even number of tiles, the last of which may be empty.
__device__ __forceinline__ int tiles(int n) { return n ? (width(n) + 31) / 32 * 2 : 1; }
__device__ __forceinline__ int place_of(int n) { return n == 0 ? PLACE0 : n == 1 ? PLACE1 : n == 2 ? PLACE2 : n == 3 ? PLACE3 : PLACE4; }
__device__ __forceinline__ u32 heard_by(int n) { return n == 0 ? HEARD0 : n == 1 ? HEARD1 : n == 2 ? HEARD2 : n == 3 ? HEARD3 : HEARD4; }

// The steps of an iteration: `plain` free ones, then K more, nudged (EP) or recorded for the way back (BPTT, one more for the residual).
struct Course {
  int it, plain, end;
  __device__ __forceinline__ Course(const Job &job, int it) : it(it), plain(METHOD == 1 ? job.T - job.K : job.T), end(plain + job.K) {}
  __device__ __forceinline__ int star() const { return METHOD == 0 ? plain : end; }  // the step that begins at the free state
};

#include "cells.cuh"

__device__ __forceinline__ void run(Part &part, const Spot &spot, const Board &board, int group, int it, bool shares) {
  const Job &job = spot.a.job;
  const Course course(job, it);
  const bool finishes = shares && part.warp == FINISHER;
  const Spot output_spot(spot.a, board, spot.r, group, 0, 0, finishes);
  Cells<false> own;
  int mine = 0, theirs = 1, heard = 0;           // rounds told, rounds the neighbours have told, rounds heard
  own.begin(spot, board, it);
  if (part.owns) own.tell(spot, mine);
  if (finishes) {
    Cells<true> outputs;
    outputs.begin(output_spot, board, it);
    outputs.tell(output_spot, mine);
    outputs.keep(board);
  }
  mine++;
  int *moved = spot.a.moved + (spot.r * GROUPS + group) * spot.a.moved_count;
#pragma unroll 1
  for (int t = 0; t < course.end + METHOD; t++) {
    if (job.stop && t < course.plain && t % 16 == 0 && t && ((volatile int *)moved)[t / 16 - 1] == 0) t = course.plain;
    const bool second = t >= course.plain, together = second || !job.alternating;
    const bool turn = together || ((course.plain - 1 - t) & 1) == (spot.n & 1);
    const bool tells = METHOD == 1 ? t < course.end : t + 1 < course.end;
    if (turn) {
      // The block with the outputs has even layers, as they are one.
      const bool hears = heard < theirs;
      float4 earlier = zero4();
#pragma unroll 1
      for (; heard < theirs; heard++) {
        const float4 sum = part.gather(heard, STATE_SCALE);
        if (shares) part.share(heard);
        own.hear(sum);
        if (finishes && heard + 1 < theirs) earlier = part.shared_sum(STATE_SCALE);
      }
      bool moves = false;
      if (part.owns) {
        moves = own.step(spot, board, course, t);
        if (tells) moves |= own.tell(spot, mine);
      }
      // Layer 1 needs the outputs last.
      if (finishes) {
        Cells<true> outputs;
        outputs.recall(board);
        if (hears) outputs.hear(earlier + part.shared_sum(STATE_SCALE));
        moves |= outputs.step(output_spot, board, course, t);
        if (tells) moves |= outputs.tell(output_spot, mine);
        outputs.keep(board);
      }
      mine++;
      // Two steps are looked at, so that both halves of an alternating pair are; seven more pass before anyone asks.
      if (job.stop && !second && (t % 16 == 7 || t % 16 == 8)) {
        if (__any_sync(~0u, moves) && spot.lane == 0) atomicExch(moved + t / 16, 1);
        __threadfence();
      }
    }
    if (together || !turn) theirs++;
  }
#if METHOD == 1
  own.turn_back(spot, board);
  if (finishes) {
    Cells<true> outputs;
    outputs.recall(board);
    outputs.turn_back(output_spot, board);
    outputs.keep(board);
  }
  mine--;                                        // nothing was told after the last step
#pragma unroll 1
  for (int t = job.K - 1; t >= 0; t--) {
    if (part.owns) {
      const float4 e = own.error(spot, t);
      if (t) spot.publish(e, mine, ERROR_SCALE);
    }
    if (finishes) {
      Cells<true> outputs;
      outputs.recall(board);
      const float4 e = outputs.error(output_spot, t);
      if (t) output_spot.publish(e, mine, ERROR_SCALE);
      outputs.keep(board);
    }
    mine++;
    if (t == 0) break;
    const float4 coupled = part.gather(heard, ERROR_SCALE);
    if (shares) part.share(heard);
    if (part.owns) own.go_back(spot, t, coupled);
    if (finishes) {
      Cells<true> outputs;
      outputs.recall(board);
      outputs.go_back(output_spot, t, part.shared_sum(ERROR_SCALE));
      outputs.keep(board);
    }
    heard++;
  }
#endif
  if (part.owns) own.end(spot, course);
  if (finishes) {
    Cells<true> outputs;
    outputs.recall(board);
    outputs.end(output_spot, course);
  }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset, int first) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int it = a.job.counters->it + offset;
  if (it >= a.job.counters->n) return;
  const int warp = threadIdx.x / 32, rank = cluster_rank(), problem = blockIdx.x / CLUSTER;
  const int r = first + problem / GROUPS, group = problem % GROUPS;
  const Board board(memory);
  const int *role = a.roles + (rank * WARPS + warp) * 4;
  const bool works = role[0] >= 0;
  const Spot spot(a, board, r, group, max(role[0], 0), 2 * role[1] + (role[2] & 1), role[2] < 2);
  Part part(board, spot, role, warp);
  if (rank == 0) load_output_weights(a, board, r);
  if (works) part.load_weights(a, r, role[1], spot.size, memory + PARTIALS + warp * SCRATCH);
  __syncthreads();
  // Tiles beyond a narrow layer are multiplied by zero weights: they must not hold a NaN.
  for (int e = threadIdx.x; e < 2 * SLOT_BYTES / 16; e += THREADS) ((uint4 *)(memory + SLOTS))[e] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 2 * LAYERS) barrier_init(board.barriers + threadIdx.x * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (works) part.arm(0), part.arm(1);
  cluster_sync();
  if (works) run(part, spot, board, group, it, rank == 0 && warp < OUTPUT_WARPS);
  cluster_sync();
}

#include "inner_weights.cuh"
