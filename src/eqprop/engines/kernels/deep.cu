// Whole training iterations of layered nets with two hidden layers or more. Two kernels alternate, for `count` networks from
// `first` on:
//   update   applies the last iteration's gradients and computes the input drive of this iteration's mini-batch;
//   relax    all T + K steps in one launch. A cluster of blocks runs up to seven samples of one network; a warp owns a tile of
//            sixteen units of a layer for all steps, and holds weights of two tiles as tensor-core fragments (see tile.cuh).
//
// Precision. A weight is three bytes relative to the largest of its row, a state three bytes relative to the largest it can be,
// an error (BPTT) three bytes relative to a power of two for each sample of a tile. Tensor cores sum products of bytes exactly; of
// the nine products of two numbers the three smallest are left out, some 2^-23 of the sum. States are as good as float32's, whether or
// not they settle, and the same states give the same bits.
//
// Compiled with N0 (<= 16), N1, ..., N4 (multiples of 4) the sizes of the DEPTH layers that move (0 beyond), H the last of them, B samples
// in GROUPS groups, METHOD 0 EP, 1 BPTT, the switches of neuron.cuh, and the layout: CLUSTER blocks, SHARES warps that share the sums of
// the outputs, the warp FINISHER of the first block that owns them, MOST tiles in the widest layer (even), AREA tiles a block can be told
// of, PLACE0..4 where a layer's tiles lie in that area, HEARD0..4 which blocks hear a layer (the first, and 256 times their number), at
// most LISTENERS, and EXTRAS, FRAGMENTS, OUTPUTS, PARTIALS, SLOTS where things lie in shared memory (spot.cuh).

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
  const int *roles;                    // (CLUSTER * WARPS, 6): layer (-1: none), pair of tiles, part, which sources it arms; which share of the
                                       // outputs' sums (-1: none), and where in its block its weights for that lie
  int moved_count;
  float lr[4], lrb[4];
  float output_range;                  // no output is larger
};

__device__ __forceinline__ int width(int n) { return n == 0 ? N0 : n == 1 ? N1 : n == 2 ? N2 : n == 3 ? N3 : N4; }
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

__device__ __forceinline__ void run(Part &part, const Spot &spot, const Board &board, int group, int it, bool finishes) {
  const Job &job = spot.a.job;
  const Course course(job, it);
  const Spot output_spot(spot.a, board, spot.r, group, 0, 0, finishes);
  Cells<false> own;
  // What is done with the outputs, whose state is brought for it and put back.
  auto with_outputs = [&](auto f) {
    Cells<true> outputs;
    outputs.recall(board);
    f(outputs);
    outputs.keep(board);
  };
  // Rounds told, rounds the neighbours have told, rounds heard. Rates that begin at zero need not be told.
  int mine = ENERGY, theirs = ENERGY, heard = 0;
  own.begin(spot, board, it);
  if (ENERGY && part.owns) own.tell(spot, board, 0);
  if (finishes) {
    Cells<true> outputs;
    outputs.begin(output_spot, board, it);
    if (ENERGY) outputs.tell(output_spot, board, 0);
    outputs.keep(board);
  }
  int *moved = spot.a.moved + (spot.r * GROUPS + group) * spot.a.moved_count;
#pragma unroll 1
  for (int t = 0; t < course.end + METHOD; t++) {
    if (job.stop && t < course.plain && t % 16 == 0 && t && ((volatile int *)moved)[t / 16 - 1] == 0) t = course.plain;
    const bool second = t >= course.plain, together = second || !job.alternating;
    const bool turn = together || ((course.plain - 1 - t) & 1) == (spot.n & 1);
    const bool tells = METHOD == 1 ? t < course.end : t + 1 < course.end;
    if (turn) {
      // Where nobody has told anything since, the last round counts once more. Blocks with outputs to sum have even layers, as they are one.
      const bool fresh = heard < theirs;
      const int round = fresh ? heard : heard - 1;
      float4 coupled = zero4();
      bool moves = false;
      if (round >= 0) {
        part.share<false>(round);
        coupled = part.gather<false>(spot, round, fresh);
      }
      if (part.owns) {
        moves = own.step(spot, board, course, t, coupled);
        if (tells) own.tell(spot, board, mine);
      }
      // Layer 1 needs the outputs last.
      if (finishes) with_outputs([&](Cells<true> &outputs) {
        moves |= outputs.step(output_spot, board, course, t, round >= 0 ? part.shared_sum() : zero4());
        if (tells) outputs.tell(output_spot, board, mine);
      });
      heard += fresh, mine += tells;
      // Two steps are looked at, so that both halves of an alternating pair are; seven more pass before anyone asks.
      if (job.stop && !second && (t % 16 == 7 || t % 16 == 8)) {
        if (__any_sync(~0u, moves) && spot.lane == 0) atomicExch(moved + t / 16, 1);
        __threadfence();
      }
    }
    if ((together || !turn) && tells) theirs++;
  }
#if METHOD == 1
  part.errors_from = heard;
  own.turn_back(spot, board);
  if (finishes) with_outputs([&](Cells<true> &outputs) { outputs.turn_back(output_spot, board); });
#pragma unroll 1
  for (int t = job.K - 1; t >= 0; t--) {
    if (part.owns) {
      const float4 e = own.error(spot, t);
      if (t) spot.publish_errors<false>(board, e, mine);
    }
    if (finishes) with_outputs([&](Cells<true> &outputs) {
      const float4 e = outputs.error(output_spot, t);
      if (t) output_spot.publish_errors<true>(board, e, mine);
    });
    mine++;
    if (t == 0) break;
    part.share<true>(heard);
    const float4 coupled = part.gather<true>(spot, heard, true);
    if (part.owns) own.go_back(spot, t, coupled);
    if (finishes) with_outputs([&](Cells<true> &outputs) { outputs.go_back(output_spot, t, part.shared_sum()); });
    heard++;
  }
#endif
  if (part.owns) own.end(spot, course);
  if (finishes) with_outputs([&](Cells<true> &outputs) { outputs.end(output_spot, course); });
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset, int first) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int it = a.job.counters->it + offset;
  if (it >= a.job.counters->n) return;
  const int warp = threadIdx.x / 32, rank = cluster_rank(), problem = blockIdx.x / CLUSTER;
  const int r = first + problem / GROUPS, group = problem % GROUPS;
  const Board board(memory);
  const int *role = a.roles + (rank * WARPS + warp) * 6;
  const bool works = role[0] >= 0, finishes = rank == 0 && warp == FINISHER;
  const Spot spot(a, board, r, group, max(role[0], 0), 2 * role[1] + (role[2] & 1), works && role[2] < 2);
  Part part(board, spot, role, warp);
  unsigned char *scratch = memory + PARTIALS + warp * SCRATCH;
  if (part.nth >= 0) part.load_output_weights(a, r, scratch);
  if (works) part.load_weights(a, r, role[1], spot.size, scratch);
  __syncthreads();
#if METHOD == 1
  // Tiles beyond a narrow layer are multiplied by zero weights: their exponents must not stand for infinity.
  for (int e = threadIdx.x; e < 2 * AREA * 2; e += THREADS) ((u32 *)(memory + SLOTS + 2 * SLOT_BYTES + BARRIERS * 8))[e] = 0;
#endif
  if (threadIdx.x < BARRIERS) barrier_init(board.barriers + threadIdx.x * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (works)
    for (int round = 0; round < 2; round++) {
      part.arm(1, round), part.arm(2, round);
      if (METHOD == 1) part.arm_exponents(1, round), part.arm_exponents(2, round);
      if (finishes) part.arm_shares(round);
    }
  cluster_sync();
  if (works) run(part, spot, board, group, it, finishes);
  cluster_sync();
}

#include "inner_weights.cuh"
