// Whole training iterations of layered nets with two hidden layers or more. Two kernels alternate, for `count` networks from
// `first` on:
//   update   applies the last iteration's gradients and computes the input drive of this iteration's mini-batch;
//   relax    all T + K steps in one launch. A cluster of blocks runs groups of up to seven samples of one network, TURNS of them in turn,
//            so that what one group tells travels while another is multiplied; a warp owns a tile of sixteen units of a layer for all
//            steps, and holds weights of two tiles as tensor-core fragments (see tile.cuh).
//
// Precision. A weight is told as three bytes relative to the largest of its row, a state as three bytes relative to the largest it can be,
// an error (BPTT) as three bytes relative to a power of two for each sample of a tile. Tensor cores sum products of bytes exactly; of
// the nine products of two numbers the three smallest are left out, 2^-23 of the sum of as many numbers: as good as float32, whether or
// not the states settle, and the same bits for the same states.
//
// Compiled with N0 (<= 16), N1, ..., N4 (multiples of 4) the sizes of the DEPTH layers that move (0 beyond), H the last of them, B samples in GROUPS
// groups, TURNS of them to a cluster, METHOD 0 EP, 1 BPTT, the switches of neuron.cuh, and the layout: CLUSTER blocks, the outputs shared
// by the first OUTPUT_WARPS warps of the first block and owned by its warp FINISHER, MOST tiles in the widest layer (even), AREA tiles a
// block can be told of, PLACE0..4 where a layer's tiles lie in that area, HEARD0..4 which blocks hear a layer (the first, and 256 times
// their number), PARTIALS, EXTRAS, OUTPUTS, SLOTS where things lie in shared memory (spot.cuh).

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
  int *moved;                          // (R * CLUSTERS, moved_count)
  const int *roles;                    // (CLUSTER * WARPS, 4): layer (-1: none), pair of tiles, part, which sources it arms
  int moved_count;
  float lr[4], lrb[4];
  float output_range;                  // no output is larger
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

typedef Cells<false> Hidden;
typedef Cells<true> Outputs;

// Calls `f` for every group in turn, with the cells of the group in the first place.
template <class F> __device__ __forceinline__ void in_turn(Hidden (&cells)[TURNS], Spot &spot, Spot &output_spot, F f) {
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    if (TURNS > 1) spot.look_at(turn), output_spot.look_at(turn);
    f(cells[0]);
    // Registers have no numbers that a loop could count: the cells move up.
    const Hidden done = cells[0];
#pragma unroll
    for (int i = 0; i + 1 < TURNS; i++) cells[i] = cells[i + 1];
    cells[TURNS - 1] = done;
  }
}

__device__ __forceinline__ void run(Part &part, Spot &spot, const Board &board, int it, bool shares) {
  const Job &job = spot.a.job;
  const Course course(job, it);
  const bool finishes = shares && part.warp == FINISHER;
  Spot output_spot(spot.a, board, spot.r, spot.cluster, 0, 0, finishes);
  Hidden cells[TURNS];
  // What is done with the outputs, whose state is brought for it and put back.
  auto with_outputs = [&](auto f) {
    Outputs outputs;
    outputs.recall(output_spot, board);
    f(outputs);
    outputs.keep(output_spot, board);
  };
  // Rounds told, rounds the neighbours have told, rounds heard. Where states begin with rates that are zero, nobody tells them.
  int mine = 0, theirs = ENERGY, heard = 0;
  in_turn(cells, spot, output_spot, [&](Hidden &own) {
    own.begin(spot, board, it);
    if (ENERGY && part.owns) own.tell(spot, board, 0);
    if (finishes) {
      Outputs outputs;
      outputs.begin(output_spot, board, it);
      if (ENERGY) outputs.tell(output_spot, board, 0);
      outputs.keep(output_spot, board);
    }
  });
  mine += ENERGY;
  int *moved = spot.a.moved + (spot.r * CLUSTERS + spot.cluster) * spot.a.moved_count;
#pragma unroll 1
  for (int t = 0; t < course.end + METHOD; t++) {
    if (job.stop && t < course.plain && t % 16 == 0 && t && ((volatile int *)moved)[t / 16 - 1] == 0) t = course.plain;
    const bool second = t >= course.plain, together = second || !job.alternating;
    const bool turn = together || ((course.plain - 1 - t) & 1) == (spot.n & 1);
    const bool tells = METHOD == 1 ? t < course.end : t + 1 < course.end;
    if (turn) {
      // Where nobody has told anything since, the last round counts once more. The block with the outputs has even layers, as they are one.
      const bool fresh = heard < theirs;
      const int round = fresh ? heard : heard - 1;
      bool moves = false;
      in_turn(cells, spot, output_spot, [&](Hidden &own) {
        float4 coupled = zero4();
        if (round >= 0) {
          if (shares) part.share<false>(spot, round);
          coupled = part.gather<false>(spot, round, fresh);
        }
        if (part.owns) {
          moves |= own.step(spot, board, course, t, coupled);
          if (tells) own.tell(spot, board, mine);
        }
        // Layer 1 needs the outputs last.
        if (finishes) with_outputs([&](Outputs &outputs) {
          moves |= outputs.step(output_spot, board, course, t, round >= 0 ? part.shared_sum() : zero4());
          if (tells) outputs.tell(output_spot, board, mine);
        });
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
  in_turn(cells, spot, output_spot, [&](Hidden &own) {
    own.turn_back(spot, board);
    if (finishes) with_outputs([&](Outputs &outputs) { outputs.turn_back(output_spot, board); });
  });
#pragma unroll 1
  for (int t = job.K - 1; t >= 0; t--) {
    in_turn(cells, spot, output_spot, [&](Hidden &own) {
      if (part.owns) {
        const float4 e = own.error(spot, t);
        if (t) spot.publish_errors(board, e, mine);
      }
      if (finishes) with_outputs([&](Outputs &outputs) {
        const float4 e = outputs.error(output_spot, t);
        if (t) output_spot.publish_errors(board, e, mine);
      });
    });
    mine++;
    if (t == 0) break;
    in_turn(cells, spot, output_spot, [&](Hidden &own) {
      if (shares) part.share<true>(spot, heard);
      const float4 coupled = part.gather<true>(spot, heard, true);
      if (part.owns) own.go_back(spot, t, coupled);
      if (finishes) with_outputs([&](Outputs &outputs) { outputs.go_back(output_spot, t, part.shared_sum()); });
    });
    heard++;
  }
#endif
  in_turn(cells, spot, output_spot, [&](Hidden &own) {
    if (part.owns) own.end(spot, course);
    if (finishes) with_outputs([&](Outputs &outputs) { outputs.end(output_spot, course); });
  });
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset, int first) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int it = a.job.counters->it + offset;
  if (it >= a.job.counters->n) return;
  const int warp = threadIdx.x / 32, rank = cluster_rank(), problem = blockIdx.x / CLUSTER;
  const Board board(memory);
  const int *role = a.roles + (rank * WARPS + warp) * 4;
  const bool works = role[0] >= 0;
  Spot spot(a, board, first + problem / CLUSTERS, problem % CLUSTERS, max(role[0], 0), 2 * role[1] + (role[2] & 1), works && role[2] < 2);
  Part part(board, spot, role, warp);
  if (rank == 0) load_output_weights(a, board, spot.r);
  if (works) part.load_weights(a, spot.r, role[1], spot.size, memory + PARTIALS + warp * SCRATCH);
  __syncthreads();
#if METHOD == 1
  // Tiles beyond a narrow layer are multiplied by zero weights: their exponents must not stand for infinity.
  for (int e = threadIdx.x; e < 2 * TURNS * AREA * 2; e += THREADS) ((u32 *)(memory + SLOTS + 2 * TURNS * SLOT_BYTES + BARRIERS * 8))[e] = 0;
#endif
  for (int e = threadIdx.x; e < BARRIERS; e += THREADS) barrier_init(board.barriers + e * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (works)
    for (int turn = 0; turn < TURNS; turn++) {
      spot.look_at(turn);
      for (int round = 0; round < 2; round++)
        for (int which = 1; which <= 2; which++)
          for (int errors = 0; errors <= METHOD; errors++) part.arm(which, Board::slot(turn, round), spot.samples, errors);
    }
  cluster_sync();
  if (works) run(part, spot, board, it, rank == 0 && warp < OUTPUT_WARPS);
  cluster_sync();
}

#include "inner_weights.cuh"
