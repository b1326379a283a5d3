// A warp's part in what two tiles of a layer hear of their neighbours: the weights it holds, the sums it hands on.

#include "spot.cuh"

// Two warps hold the weights of two tiles to a layer they hear, each to half of it, so that a state brought from shared memory meets
// two tiles. A layer between two hidden ones has four warps: 0 and 1 hear the layer above (nearer the input), 2 and 3 the one below.
// Warps 0 and 1 own a tile each.
struct Part {
  const Board board;
  const int warp, lane, samples, n, part, arms;
  const bool owns, extra;
  const int team;                                // warps that share the tiles
  const int source, from;                        // the layer heard, and where the first tile that meets these weights lies; layer 1
                                                 // hears the outputs besides (extra)
  u32 hi[MOST][4], hi_extra[4];                  // fragments, the two tiles in turn
  u32 low;                                       // where this thread's low halves lie
  int calls = 0, shared_calls = 0;

  __device__ __forceinline__ Part(const Board &board, const Spot &spot, const int *role, int warp)
      : board(board), warp(warp), lane(spot.lane), samples(spot.samples), n(role[0]), part(role[2]), arms(role[3]), owns(role[2] < 2),
        extra(role[0] == 1), team(role[0] >= 2 && role[0] < DEPTH - 1 ? 4 : 2),
        source(role[2] >= 2 || role[0] == DEPTH - 1 ? role[0] - 1 : role[0] + 1),
        from(board.slots + (place_of(source) + (role[2] & 1) * (MOST / 2)) * TILE_BYTES + spot.lane * 16) {
    low = shared_address(board.base) + warp * MOST * 512 + lane * 16;
  }
  __device__ __forceinline__ void load_weights(const Args &a, int r, int pair, int size, unsigned char *scratch);
  __device__ __forceinline__ void arm(int slot) const;
  __device__ __forceinline__ float4 gather(int round, float scale);
  __device__ __forceinline__ void share(int round);
  __device__ __forceinline__ float4 shared_sum(float scale) const;
  __device__ __forceinline__ void wait(int layer, int round) const { barrier_wait(board.barrier(layer, round & 1), (round >> 1) & 1); }
};

__device__ __forceinline__ void split(const float *from, int across, int down, uint4 &h, uint4 &l) {
  const int lane = threadIdx.x % 32;
  u32 hs[4], ls[4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int row = lane / 4 + (q & 1) * 8, k = (lane % 4) * 2 + (q >> 1) * 8;
    const float x = WEIGHT_SCALE * from[row * down + k * across], y = WEIGHT_SCALE * from[row * down + (k + 1) * across];
    hs[q] = halves(x, y);
    const float2 told = floats(hs[q]);
    ls[q] = halves(x - told.x, y - told.y);
  }
  h = make_uint4(hs[0], hs[1], hs[2], hs[3]), l = make_uint4(ls[0], ls[1], ls[2], ls[3]);
}

// The weights of two tiles to one of the other layer at a time are brought into a scratch of this warp, three deep, and split from there.
// The loop is rolled and the fragments move up through the registers: unrolled, the code would be run once and fetched for longer
// than the data.
#define RAW 640                        // floats of two raw tiles: 32 lines of 16 + 4, or 16 of 32 + 4
#define SCRATCH (3 * RAW * 4 + 1024)
__device__ __forceinline__ void Part::load_weights(const Args &a, int r, int pair, int N, unsigned char *scratch) {
  float *raw = (float *)scratch;
  uint4 *staged = (uint4 *)(scratch + 3 * RAW * 4);
  const bool upper = source > n;
  const int M = width(source), k0 = (part & 1) * (MOST / 2) * 16, row0 = pair * 32;
  const float *W = a.W[upper ? n : source] + (size_t)r * N * M;
  // upper: W (N, M), a row of which is a row here; else W (M, N), whose columns are the rows here
  auto request = [&](int c) {
    float *to = raw + c % 3 * RAW;
    for (int e = lane; e < 128; e += 32) {
      const int line = upper ? e / 4 : e / 8, at = (upper ? e % 4 : e % 8) * 4;
      const int row = upper ? row0 + line : k0 + c * 16 + line, column = upper ? k0 + c * 16 + at : row0 + at;
      const int rows = upper ? N : M, columns = upper ? M : N;
      float *p = to + line * (upper ? 20 : 36) + at;
      const bool there = row < rows && column < columns;
      bring(shared_address(p), there ? W + (size_t)row * columns + column : W, there);
    }
    brought();
  };
  request(0);
  if (MOST / 2 > 1) request(1); else brought();
#pragma unroll 1
  for (int c = 0; c < MOST / 2; c++) {
    if (c + 2 < MOST / 2) request(c + 2); else brought();
    await_brought<2>();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 2; m++) {
      uint4 h, l;
      split(raw + c % 3 * RAW + m * 16 * (upper ? 20 : 1), upper ? 1 : 36, upper ? 20 : 1, h, l);
      staged[m * 32 + lane] = h;
      put(low + (2 * c + m) * 512, l);
    }
#pragma unroll
    for (int k = 0; k + 2 < MOST; k++)
#pragma unroll
      for (int q = 0; q < 4; q++) hi[k][q] = hi[k + 2][q];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 h = staged[m * 32 + lane];
      hi[MOST - 2 + m][0] = h.x, hi[MOST - 2 + m][1] = h.y, hi[MOST - 2 + m][2] = h.z, hi[MOST - 2 + m][3] = h.w;
    }
    __syncwarp();
  }
  if (extra) {
    for (int e = lane; e < 256; e += 32) {       // W[0] (N0, N1), columns of which are the rows of the own tile
      const int k = e / 16, row = row0 + part * 16 + e % 16;
      raw[k * 20 + e % 16] = k < N0 && row < N ? a.W[0][((size_t)r * N0 + k) * N + row] : 0.f;
    }
    __syncwarp();
    uint4 h, l;
    split(raw, 20, 1, h, l);
    hi_extra[0] = h.x, hi_extra[1] = h.y, hi_extra[2] = h.z, hi_extra[3] = h.w;
    put(board.extras() + (warp * 32 + lane) * 16, l);
  }
}

// The outputs' weights as rows of halves.
__device__ __forceinline__ void load_output_weights(const Args &a, const Board &board, int r) {
  constexpr int columns = MOST * 16;
  unsigned char *to = board.outputs();
#pragma unroll 8
  for (int e = threadIdx.x; e < (N0 + 1) * columns; e += THREADS) {
    const int row = e / columns, k = e % columns;
    const float w = row < N0 && k < N1 ? WEIGHT_SCALE * a.W[0][((size_t)r * N0 + row) * N1 + k] : 0.f;
    const u32 high = halves(w, 0.f), low = halves(w - floats(high).x, 0.f);
    *(unsigned short *)(to + (row < N0 ? row : 2 * N0) * LINE_BYTES + k * 2) = (unsigned short)high;
    if (row < N0) *(unsigned short *)(to + (N0 + row) * LINE_BYTES + k * 2) = (unsigned short)low;
  }
}

// A barrier is made ready for the next round of its slot, which nobody sends before all here have answered the last one.
__device__ __forceinline__ void Part::arm(int slot) const {
  if (lane) return;
  if (arms & 1) barrier_expect(board.barrier(source, slot), tiles(source) * samples * 64);
  if (arms & 2) barrier_expect(board.barrier(0, slot), samples * 64);
}

// What the neighbours told in that round through the weights, sum_k W q, for the own tile. Tensor cores cut a sum off at the size it
// has, always towards zero: small products are summed apart (in deeper nets each kind by itself), and of the large
// ones only four.
__device__ __forceinline__ float4 Part::gather(int round, float scale) {
  constexpr int RING = 3, HALF = MOST / 2;
  const u32 slot = (round & 1) * SLOT_BYTES, at = from + slot;
  float total[2][4] = {}, large[2][4] = {}, small[2][4] = {}, rest[2][4] = {};
  uint4 x[RING], u[RING][2];
  auto fetch = [&](int k) {
    u[k % RING][0] = look(low + 2 * k * 512), u[k % RING][1] = look(low + (2 * k + 1) * 512);
    x[k % RING] = look(at + k * TILE_BYTES);
  };
  u[0][0] = look(low), u[0][1] = look(low + 512);
  wait(source, round);
  x[0] = look(at);
#pragma unroll
  for (int k = 1; k < RING - 1 && k < HALF; k++) fetch(k);
#pragma unroll
  for (int k = 0; k < HALF; k++) {
    if (k + RING - 1 < HALF) fetch(k + RING - 1);
    const uint4 y = x[k % RING];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 l = u[k % RING][m];
      const u32(&h)[4] = hi[2 * k + m];
      mma(large[m], h[0], h[1], h[2], h[3], y.x, y.y);
      mma(small[m], l.x, l.y, l.z, l.w, y.x, y.y);
      mma(DEPTH > 3 ? rest[m] : small[m], h[0], h[1], h[2], h[3], y.z, y.w);
      if (k % 4 == 3 || k + 1 == HALF)
#pragma unroll
        for (int i = 0; i < 4; i++) total[m][i] += large[m][i], large[m][i] = 0.f;
    }
  }
  if (arms & 1 && lane == 0) barrier_expect(board.barrier(source, round & 1), tiles(source) * samples * 64);
  // Each hands on what it has for the tiles that others own; warps 2 and 3 go on, and cannot be more than one round ahead.
  const int turn = calls++ & 1, pair = (warp & -team) / 2, id = 1 + pair * 2 + turn;
  float4 *sums = board.partials() + (pair * PARTIAL_BYTES / 512 + turn * 2 * (team - 1)) * 32 + lane;
  float4 sum = zero4();
#pragma unroll
  for (int m = 0; m < 2; m++) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = total[m][i] + (small[m][i] + rest[m][i]);
    const float4 mine = make_float4(v[0], v[1], v[2], v[3]);
    if (part == m) sum = mine;
    else sums[(m * (team - 1) + (part < 2 ? 0 : part - 1)) * 32] = mine;
  }
  if (!owns) {
    asm volatile("bar.arrive %0, 128;" :: "r"(id) : "memory");
    return sum;
  }
  uint4 l;
  if (extra) l = look(board.extras() + (warp * 32 + lane) * 16);
  if (team == 2) asm volatile("bar.sync %0, 64;" :: "r"(id) : "memory");
  else asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory");
  sum = sum + sums[part * (team - 1) * 32];
  if (team == 4) sum = sum + (sums[(part * 3 + 1) * 32] + sums[(part * 3 + 2) * 32]);
  if (extra) {
    wait(0, round);
    const uint4 y = look(board.slots + slot + PLACE0 * TILE_BYTES + lane * 16);
    float v[4] = {}, w[4] = {};
    mma(w, l.x, l.y, l.z, l.w, y.x, y.y);
    mma(v, hi_extra[0], hi_extra[1], hi_extra[2], hi_extra[3], y.x, y.y);
    mma(w, hi_extra[0], hi_extra[1], hi_extra[2], hi_extra[3], y.z, y.w);
    sum = sum + make_float4(v[0] + w[0], v[1] + w[1], v[2] + w[2], v[3] + w[3]);
    if (arms & 2 && lane == 0) barrier_expect(board.barrier(0, round & 1), samples * 64);
  }
  return (1.0f / WEIGHT_SCALE / scale) * sum;
}

// The warps of one block but the FINISHER share the products of the outputs, tile by tile of layer 1. A share is written anew two
// rounds later, when layer 1 has answered what the outputs told after they were summed; the racecheck of compute-sanitizer does
// not follow barriers from block to block and calls that a hazard.
__device__ __forceinline__ void Part::share(int round) {
  constexpr int all = (N1 + 15) / 16, mine = (all + OUTPUT_WARPS - 2) / (OUTPUT_WARPS - 1);
  const int turn = shared_calls++ & 1, nth = warp - (warp > FINISHER);
  if (warp == FINISHER) return;
  const u32 at = board.slots + (round & 1) * SLOT_BYTES + PLACE1 * TILE_BYTES + lane * 16;
  const u32 rows = shared_address(board.outputs()) + lane / 16 * 16, zeros = rows + 2 * N0 * LINE_BYTES;
  const u32 high = lane % 16 < N0 ? rows + lane % 16 * LINE_BYTES : zeros, low = lane % 16 < N0 ? high + N0 * LINE_BYTES : zeros;
  if (source != 1) wait(1, round);
  float v[2][4] = {}, w[2][4] = {};
#pragma unroll
  for (int i = 0; i < mine; i++) {
    const int k = nth + i * (OUTPUT_WARPS - 1);
    if (k >= all) break;
    const uint4 y = look(at + k * TILE_BYTES), h = matrix(high + k * 32), l = matrix(low + k * 32);
    mma(v[i & 1], h.x, h.y, h.z, h.w, y.x, y.y);
    mma(w[0], l.x, l.y, l.z, l.w, y.x, y.y);
    mma(w[1], h.x, h.y, h.z, h.w, y.z, y.w);
  }
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] = (v[0][i] + v[1][i]) + (w[0][i] + w[1][i]);
  keep(board.shares(turn) + nth * SHARE_BYTES, make_float4(s[0], s[1], s[2], s[3]));
  asm volatile("bar.arrive %0, %1;" :: "r"(9 + turn), "n"(32 * OUTPUT_WARPS) : "memory");
}

// The shares together, in the warp FINISHER, which owns the outputs.
__device__ __forceinline__ float4 Part::shared_sum(float scale) const {
  const int turn = (shared_calls - 1) & 1;
  asm volatile("bar.sync %0, %1;" :: "r"(9 + turn), "n"(32 * OUTPUT_WARPS) : "memory");
  float4 sum = zero4();
#pragma unroll
  for (int w = 0; w < OUTPUT_WARPS - 1; w++) sum = sum + recall(board.shares(turn) + w * SHARE_BYTES);
  return (1.0f / WEIGHT_SCALE / scale) * sum;
}
