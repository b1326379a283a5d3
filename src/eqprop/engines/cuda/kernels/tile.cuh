// A warp's part in the input of two tiles of a layer from its neighbours: the weights it holds, the sums it passes on.

#include "spot.cuh"

// Two warps hold the weights of two tiles to a source layer, each to half of it, so that a state loaded from shared memory serves two
// tiles. A layer between two hidden ones has four warps: 0 and 1 receive the layer above (nearer the input), 2 and 3 the one below.
// Warps 0 and 1 own a tile each.
struct Part {
  static constexpr bool of_outputs = false;
  const Board board;
  const Ear ear;
  const int warp, lane, samples, n, part, arms;
  const bool owns, extra;
  const int team;                                // warps that share the tiles
  const int source, tile;                        // the source layer, and the first of its tiles for these weights, in the area;
                                                 // layer 1 also receives the outputs (extra)
  const u32 listens;                             // that tile in the first slot
  u32 hi[2 * CHUNKS][4], mid[2 * CHUNKS][4];     // fragments, the two tiles in turn
  u32 hi_extra[2], mid_extra[2];
  float scale[2][2], scale_extra[2];             // unit of a row's sums
  u32 low;                                       // address of this thread's lo bytes
  int calls = 0;
  int errors_from;                               // the first round of errors

  __device__ __forceinline__ Part(const Board &board, const Spot &spot, const int *role, int warp)
      : board(board), warp(warp), lane(spot.lane), samples(spot.samples), n(role[0]), part(role[2]), arms(role[3]),
        owns(role[2] < 2), extra(role[0] == 1), team(role[0] >= 2 && role[0] < DEPTH - 1 ? 4 : 2),
        source(role[2] >= 2 || role[0] == DEPTH - 1 ? role[0] - 1 : role[0] + 1), tile(place_of(source) + (role[2] & 1) * 2 * CHUNKS),
        listens(uniform(board.slots + tile * TILE_BYTES)) {
    low = shared_address(board.base) + warp * 2 * CHUNKS * 512 + lane * 16;
  }
  __device__ __forceinline__ void load_weights(const Args &a, int r, int pair, int size, unsigned char *scratch);
  template <bool ERRORS> __device__ __forceinline__ float4 hear(const Spot &spot, int round, bool fresh);
  // Arm a barrier for the next round of its slot, which is not sent before all warps here have answered the last one. `which`: 1 the
  // source's, 2 the outputs'.
  __device__ __forceinline__ void arm(int which, int round) const {
    if (lane == 0 && arms & which) barrier_expect(board.barrier(which & 1 ? source : 0, round), (which & 1 ? tiles(source) : 1) * samples * 48);
  }
  __device__ __forceinline__ void arm_exponents(int which, int round) const {
    if (lane == 0 && arms & which) barrier_expect(board.barrier(which & 1 ? source : 0, round) + EXPONENT_BARRIERS, (which & 1 ? tiles(source) : 1) * 8);
  }
};

// A thread's four units of a tile in one row, times the row's scale.
__device__ __forceinline__ Planes split(const float *from, int across, int down, int row, float scale) {
  const int k = threadIdx.x % 4 * 2;
  u32 d[4];
#pragma unroll
  for (int j = 0; j < 4; j++) d[j] = digits(scale * from[row * down + (k + j % 2 + j / 2 * 8) * across]);
  return planes(d[0], d[1], d[2], d[3]);
}
// A key that orders numbers by magnitude, NaN last.
__device__ __forceinline__ u32 size_of(float v) { return __float_as_uint(v) & 0x7fffffff; }
__device__ __forceinline__ float inverse(float most) { return most > 0.f ? LARGEST / most : 0.f; }

// Load the weights of two tiles to one tile of the other layer at a time into this warp's scratch, RING deep, and split them from there.
// The loop is rolled and the fragments move up through the registers: unrolled, the code would run only once, and fetching it would take
// longer than fetching the data.
#define RAW 640                        // floats of two raw tiles: 32 lines of 16 + 4, or 16 of 32 + 4
#define RING 6
#define SCRATCH (RING * RAW * 4)
__device__ __forceinline__ void Part::load_weights(const Args &a, int r, int pair, int N, unsigned char *scratch) {
  constexpr int COUNT = 2 * CHUNKS;
  float *raw = (float *)scratch;
  const bool upper = source > n;
  const int M = width(source), k0 = (part & 1) * COUNT * 16, row0 = pair * 32;
  const float *W = a.W[upper ? n : source] + (size_t)r * N * M;
  // upper: W (N, M), whose rows are the rows here; else W (M, N), whose columns are the rows here
  auto request = [&](int c) {
    if (c < COUNT) {
      float *to = raw + c % RING * RAW;
      for (int e = lane; e < 128; e += 32) {
        const int line = upper ? e / 4 : e / 8, at = (upper ? e % 4 : e % 8) * 4;
        const int row = upper ? row0 + line : k0 + c * 16 + line, column = upper ? k0 + c * 16 + at : row0 + at;
        const int rows = upper ? N : M, columns = upper ? M : N;
        const bool there = row < rows && column < columns;
        bring(shared_address(to + line * (upper ? 20 : 36) + at), there ? W + (size_t)row * columns + column : W, there);
      }
    }
    brought();
  };
#pragma unroll 1
  for (int c = 0; c < RING - 1; c++) request(c);
  // The largest weight of each row, that of row i in thread i. Reads past the edge are clamped inside: a row's unit may be larger than needed.
  u32 largest_of_row = 0;
  if (upper) {
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
      u32 largest = 0;
#pragma unroll
      for (int k = lane * 4; k < COUNT * 16 + lane * 4; k += 128) {
        const float4 w = *(const float4 *)(W + (size_t)min(row0 + i, N - 1) * M + min(k0 + k, M - 4));
        largest = max(largest, max(max(size_of(w.x), size_of(w.y)), max(size_of(w.z), size_of(w.w))));
      }
      largest = __reduce_max_sync(~0u, largest);
      if (lane == i) largest_of_row = largest;
    }
  } else {
    const float *column = W + min(row0 + lane, N - 1);
#pragma unroll 1
    for (int k = 0; k < COUNT * 16; k += 32) {
      float w[32];
#pragma unroll
      for (int i = 0; i < 32; i++) w[i] = column[(size_t)min(k0 + k + i, M - 1) * N];
#pragma unroll
      for (int i = 0; i < 32; i++) largest_of_row = max(largest_of_row, size_of(w[i]));
    }
  }
  float to_digits[2][2];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float largest = __uint_as_float(__shfl_sync(~0u, largest_of_row, m * 16 + q * 8 + lane / 4));
      scale[m][q] = worth(largest), to_digits[m][q] = inverse(largest);
    }
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
    Planes w[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      request(2 * c + j + RING - 1);
      await_brought<RING - 1>();
      __syncwarp();
      const float *from = raw + (2 * c + j) % RING * RAW;
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int q = 0; q < 2; q++)
          w[m][2 * j + q] = split(from + m * 16 * (upper ? 20 : 1), upper ? 1 : 36, upper ? 20 : 1, lane / 4 + 8 * q, to_digits[m][q]);
      __syncwarp();
    }
#pragma unroll
    for (int k = 0; k + 2 < COUNT; k++)
#pragma unroll
      for (int q = 0; q < 4; q++) hi[k][q] = hi[k + 2][q], mid[k][q] = mid[k + 2][q];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int q = 0; q < 4; q++) hi[COUNT - 2 + m][q] = w[m][q].hi, mid[COUNT - 2 + m][q] = w[m][q].mid;
      put(low + (2 * c + m) * 512, make_uint4(w[m][0].lo, w[m][1].lo, w[m][2].lo, w[m][3].lo));
    }
  }
  await_brought<0>();
  if (extra) {
    u32 largest = 0;
    for (int e = lane; e < 256; e += 32) {       // W[0] (N0, N1), whose columns are the rows of the own tile
      const int k = e / 16, row = row0 + part * 16 + e % 16;
      raw[k * 20 + e % 16] = k < N0 && row < N ? a.W[0][((size_t)r * N0 + k) * N + row] : 0.f;
    }
    __syncwarp();
    for (int k = 0; k < 16; k++) largest = max(largest, size_of(raw[k * 20 + lane % 16]));
    Planes w[2];
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float of_row = __uint_as_float(__shfl_sync(~0u, largest, lane / 4 + 8 * q));
      w[q] = split(raw, 20, 1, lane / 4 + 8 * q, inverse(of_row));
      scale_extra[q] = worth(of_row), hi_extra[q] = w[q].hi, mid_extra[q] = w[q].mid;
    }
    put(board.extras() + (warp * 32 + lane) * 8, make_uint2(w[0].lo, w[1].lo));
  }
}

// The neighbours' states of that round through the weights, sum_k W x, for the own tile. `fresh`: the round has not been received before.
template <bool ERRORS> __device__ __forceinline__ float4 Part::hear(const Spot &spot, int round, bool fresh) {
  const u32 slot = listens + (round & 1) * SLOT_BYTES;
  Sums sums[2];
  float v[2][4] = {};                            // errors: the sums of each tile, in their units
  uint4 u[2][2];
  Planes x[2][2];
  auto fetch_low = [&](int k) { u[k & 1][0] = look4(low + 2 * k * 512), u[k & 1][1] = look4(low + (2 * k + 1) * 512); };
  auto fetch = [&](int k) { x[k & 1][0] = ear.hear(slot, 2 * k), x[k & 1][1] = ear.hear(slot, 2 * k + 1); };
  fetch_low(0);
  board.wait<ERRORS>(source, round, errors_from);
  fetch(0);
#pragma unroll
  for (int k = 0; k < CHUNKS; k++) {
    if (k + 1 < CHUNKS) fetch_low(k + 1), fetch(k + 1);
    const Planes p = x[k & 1][0], q = x[k & 1][1];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 l = u[k & 1][m];
      const u32(&h)[4] = hi[2 * k + m];
      const u32(&c)[4] = mid[2 * k + m];
      if (!ERRORS) sums[m].add(h, c, l, p, q);
      else {
        board.add_scaled(v[m], round, tile + 2 * k, make_uint2(h[0], h[1]), make_uint2(c[0], c[1]), make_uint2(l.x, l.y), p);
        board.add_scaled(v[m], round, tile + 2 * k + 1, make_uint2(h[2], h[3]), make_uint2(c[2], c[3]), make_uint2(l.z, l.w), q);
      }
    }
  }
  if (fresh) arm(1, round);
  if (ERRORS) arm_exponents(1, round);
  // Pass on the sums for tiles that others own, in two alternating slots: before one is overwritten, all have synchronised once more.
  const int turn = calls++ & 1, pair = (warp & -team) / 2, id = 1 + pair * 2 + turn;
  float4 *handed = board.partials() + (pair * PARTIAL_BYTES / 512 + turn * 2 * (team - 1)) * 32 + lane;
  float4 sum = zero4();
#pragma unroll
  for (int m = 0; m < 2; m++) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = scale[m][i >> 1] * (ERRORS ? v[m][i] : sums[m][i]);
    const float4 mine = make_float4(w[0], w[1], w[2], w[3]);
    if (part == m) sum = mine;
    else handed[(m * (team - 1) + (part < 2 ? 0 : part - 1)) * 32] = mine;
  }
  if (team == 2) asm volatile("bar.sync %0, 64;" :: "r"(id) : "memory");
  else asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory");
  if (!owns) return sum;
  sum = sum + handed[part * (team - 1) * 32];
  if (team == 4) sum = sum + (handed[(part * 3 + 1) * 32] + handed[(part * 3 + 2) * 32]);
  if (extra) {
    const uint2 l = look2(board.extras() + (warp * 32 + lane) * 8);
    board.wait<ERRORS>(0, round, errors_from);
    Sums outputs;
    outputs.add(make_uint2(hi_extra[0], hi_extra[1]), make_uint2(mid_extra[0], mid_extra[1]), l, ear.hear(board.slot(round), PLACE0));
    const float range = spot.a.output_range;
    const float2 size = ERRORS ? board.exponents_of(round, PLACE0) : make_float2(range, range);
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; i++) e[i] = (i & 1 ? size.y : size.x) * scale_extra[i >> 1] * outputs[i];
    sum = sum + make_float4(e[0], e[1], e[2], e[3]);
    if (fresh) arm(2, round);
    if (ERRORS) arm_exponents(2, round);
  }
  return sum;
}
