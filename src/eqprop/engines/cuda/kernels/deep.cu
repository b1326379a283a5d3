// Whole training iterations of layered nets with two or more hidden layers. Two kernels alternate, for `count` networks
// starting at `first`:
//   update   applies the last iteration's gradients and computes the input drive of this iteration's mini-batch;
//   relax    all T + K steps in one launch. A cluster of blocks runs up to seven samples of one network; a warp owns a tile of
//            sixteen units of a layer for all steps, and holds weights of two tiles as tensor-core fragments (see tile.cuh); extra
//            warps compute the outputs (outputs.cuh).
//
// Precision. A weight is three bytes relative to the largest of its row, a state three bytes relative to its bound, an error
// (BPTT) three bytes relative to a power of two per sample of a tile. Tensor cores sum products of bytes exactly; of the nine
// products of two numbers the three smallest are dropped, about 2^-23 of the sum. States are as accurate as float32's, whether
// or not they settle, and equal states give equal bits.
//
// Compiled with N0 (<= 16), N1, ..., N4 (multiples of 4) the sizes of the DEPTH dynamic layers (0 beyond), H the last of them, B samples
// in GROUPS groups, METHOD 0 EP, 1 BPTT, the switches of neuron.cuh, and the layout: CLUSTER blocks, SHARES helpers that share the sums of
// the outputs, MOST tiles in the widest layer (even), AREA tiles a block can receive, PLACE0..4 the first tile of a layer in that area,
// HEARD0..4 the blocks that receive a layer (index of the first + 256 * their number), at most LISTENERS, and the offsets EXTRAS,
// FRAGMENTS, OUTPUTS, PARTIALS, SLOTS in shared memory (spot.cuh).

#include "neuron.cuh"
#include "vector.cuh"
#include "job.cuh"
#include "input_layer.cuh"
#include "exchange.cuh"

#define LAYERS 5
// Registers of a thread that holds weights, and of a helper thread; a block starts with 168 for each.
// Measured: more of the first interleave the products better; too few of the second keep layer 1 waiting.
#define REGISTERS (METHOD == 0 ? 232 : 216)
#define LENT_FROM (METHOD == 0 ? 40 : 72)

struct Args {
  Job job;
  float *W[4], *b[4];                  // W[n] (R, N_n, N_{n+1}) between dynamic layers, b[n] (R, N_n) or null
  float *rates[LAYERS];                // (2, R, B, padded): free and last (EP), or (K, R, B, padded): before each step (BPTT)
  float *errors[LAYERS];               // BPTT: (K, R, B, padded)
  float *states[LAYERS], *inputs[LAYERS];  // BPTT, energy-based: (K, R, B, padded)
  float *s[LAYERS], *t[LAYERS];        // free and last states (R, B, padded), or null
  int *moved;                          // (R * GROUPS, moved_count)
  const int *roles;                    // (CLUSTER, WARPS + HELPERS, 4): layer (-1: none), pair of tiles, part, the barriers it arms; for helpers the
                                       // share of the outputs' sums (-1: none), and the index of its weights in the block
  int moved_count;
  float lr[4], lrb[4];
  float output_range;                  // bound of the outputs
};

__device__ __forceinline__ int width(int n) { return n == 0 ? N0 : n == 1 ? N1 : n == 2 ? N2 : n == 3 ? N3 : N4; }
// Hidden layers have an even number of tiles, the last of which may be empty.
__device__ __forceinline__ int tiles(int n) { return n ? (width(n) + 31) / 32 * 2 : 1; }
__device__ __forceinline__ int place_of(int n) { return n == 0 ? PLACE0 : n == 1 ? PLACE1 : n == 2 ? PLACE2 : n == 3 ? PLACE3 : PLACE4; }
__device__ __forceinline__ u32 heard_by(int n) { return n == 0 ? HEARD0 : n == 1 ? HEARD1 : n == 2 ? HEARD2 : n == 3 ? HEARD3 : HEARD4; }

// The steps of an iteration: `free_steps` free ones, then K more, nudged (EP) or recorded for the backward pass (BPTT, plus one for the residual).
struct Course {
  int it, free_steps, end;
  __device__ __forceinline__ Course(const Job &job, int it) : it(it), free_steps(METHOD == 1 ? job.T - job.K : job.T), end(free_steps + job.K) {}
  __device__ __forceinline__ int star() const { return METHOD == 0 ? free_steps : end; }  // the step that starts from the free state
};

#include "cells.cuh"

// All steps of a warp's neurons, or its part of them: Part (tile.cuh) or Outputs.
template <class Team> __device__ __forceinline__ void run(Team &team, const Spot &spot, const Board &board, int group, int it) {
  constexpr bool OF_OUTPUTS = Team::of_outputs;
  const Job &job = spot.a.job;
  const Course course(job, it);
  Cells<OF_OUTPUTS> own;
  // Rounds sent, rounds the neighbours have sent, rounds received. Rates that start at zero need not be sent.
  int mine = ENERGY, theirs = ENERGY, heard = 0;
  own.begin(spot, it);
  if (ENERGY && team.owns) own.tell(spot, board, 0);
  int *moved = spot.a.moved + (spot.r * GROUPS + group) * spot.a.moved_count;
#pragma unroll 1
  for (int t = 0; t < course.end + METHOD; t++) {
    if (job.stop && t < course.free_steps && t % 16 == 0 && t && ((volatile int *)moved)[t / 16 - 1] == 0) t = course.free_steps;
    const bool second = t >= course.free_steps, together = second || !job.alternating;
    const bool turn = together || ((course.free_steps - 1 - t) & 1) == (spot.n & 1);
    const bool tells = METHOD == 1 ? t < course.end : t + 1 < course.end;
    if (turn) {
      // If nothing was sent since, the last round is used again.
      const bool fresh = heard < theirs;
      const int round = fresh ? heard : heard - 1;
      float4 coupled = zero4();
      bool moves = false;
      if (round >= 0) coupled = team.template hear<false>(spot, round, fresh);
      if (team.owns) {
        moves = own.step(spot, course, t, coupled);
        if (tells) own.tell(spot, board, mine);
      }
      heard += fresh, mine += tells;
      // Check two steps, to cover both halves of an alternating pair; the result is read seven steps later.
      if (job.stop && !second && (t % 16 == 7 || t % 16 == 8)) {
        if (__any_sync(~0u, moves) && spot.lane == 0) atomicExch(moved + t / 16, 1);
        __threadfence();
      }
    }
    if ((together || !turn) && tells) theirs++;
  }
#if METHOD == 1
  team.errors_from = heard;
  own.turn_back(spot);
#pragma unroll 1
  for (int t = job.K - 1; t >= 0; t--) {
    if (team.owns) {
      const float4 e = own.error(spot, t);
      if (t) spot.publish_errors<OF_OUTPUTS>(board, e, mine);
    }
    mine++;
    if (t == 0) break;
    const float4 coupled = team.template hear<true>(spot, heard, true);
    if (team.owns) own.go_back(spot, t, coupled);
    heard++;
  }
#endif
  if (team.owns) own.end(spot, course);
}

// The barriers reuse the scratch for loading weights: by now all warps have loaded theirs.
__device__ __forceinline__ void begin_exchange(const Board &board) {
  __syncthreads();
#if METHOD == 1
  // Tiles beyond a narrow layer are multiplied by zero weights: their exponents must not encode infinity.
  for (int e = threadIdx.x; e < 2 * AREA * 2; e += THREADS) ((u32 *)(board.base + SLOTS + 2 * SLOT_BYTES + BARRIERS * 8))[e] = 0;
#endif
  if (threadIdx.x < BARRIERS) barrier_init(board.barriers + threadIdx.x * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset, int first) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int it = a.job.counters->it + offset;
  if (it >= a.job.counters->n) return;
  const int warp = uniform(threadIdx.x / 32), rank = cluster_rank(), problem = blockIdx.x / CLUSTER;
  const int r = first + problem / GROUPS, group = problem % GROUPS;
  const Board board(memory);
  const int4 read = ((const int4 *)a.roles)[rank * (WARPS + HELPERS) + warp];
  const int role[4] = {uniform(read.x), uniform(read.y), uniform(read.z), uniform(read.w)};
  // Give registers of the helpers to the warps that hold weights.
  if (warp < WARPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    const bool works = role[0] >= 0;
    const Spot spot(a, board, r, group, max(role[0], 0), 2 * role[1] + (role[2] & 1), works && role[2] < 2, heard_by(max(role[0], 0)));
    Part part(board, spot, role, warp);
    if (works) part.load_weights(a, r, role[1], spot.size, memory + PARTIALS + warp * SCRATCH);
    begin_exchange(board);
    if (works)
      for (int round = 0; round < 2; round++) {
        part.arm(1, round), part.arm(2, round);
        if (METHOD == 1) part.arm_exponents(1, round), part.arm_exponents(2, round);
      }
    cluster_sync();
    if (works) run(part, spot, board, group, it);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(LENT_FROM));
    // The owner of the outputs sends them within its own block.
    const bool owns = warp == WARPS && rank - (HEARD0 & 255) < HEARD0 >> 8 && rank >= (HEARD0 & 255);
    const Spot spot(a, board, r, group, 0, 0, owns, rank + 256);
    Outputs outputs(board, role, owns);
    if (outputs.nth >= 0) outputs.load_weights(a, r, memory + PARTIALS + WARPS * SCRATCH + (warp - WARPS) * OUTPUT_SCRATCH);
    begin_exchange(board);
    if (owns) outputs.arm(0), outputs.arm(1);
    cluster_sync();
    if (!owns && outputs.nth < 0) return;        // the others do not wait for threads that have exited
    run(outputs, spot, board, group, it);
  }
  cluster_sync();
}

#include "inner_weights.cuh"
