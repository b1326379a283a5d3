// A warp's part in what two tiles of a layer hear of their neighbours: the weights it holds, the sums it hands on.

#include "spot.cuh"

// Two warps hold the weights of two tiles to a layer they hear, each to half of it, so that a state brought from shared memory meets
// two tiles. A layer between two hidden ones has four warps: 0 and 1 hear the layer above (nearer the input), 2 and 3 the one below.
// Warps 0 and 1 own a tile each.
struct Part {
  const Board board;
  const int warp, lane, n, part, arms;
  const bool owns, extra;
  const int team;                                // warps that share the tiles
  const int source, tile;                        // the layer heard, and the first tile of it that meets these weights, in the area;
                                                 // layer 1 hears the outputs besides (extra)
  u32 hi[2 * CHUNKS][4], mid[2 * CHUNKS][4];     // fragments, the two tiles in turn
  u32 hi_extra[2], mid_extra[2];
  float scale[2][2], scale_extra[2];             // what the sums of a row count in
  u32 low;                                       // where this thread's lo bytes lie
  int calls = 0, shared_calls = 0;
  int errors_from;                               // the first round of errors

  __device__ __forceinline__ Part(const Board &board, const Spot &spot, const int *role, int warp)
      : board(board), warp(warp), lane(spot.lane), n(role[0]), part(role[2]), arms(role[3]), owns(role[2] < 2), extra(role[0] == 1),
        team(role[0] >= 2 && role[0] < DEPTH - 1 ? 4 : 2), source(role[2] >= 2 || role[0] == DEPTH - 1 ? role[0] - 1 : role[0] + 1),
        tile(place_of(source) + (role[2] & 1) * 2 * CHUNKS) {
    low = shared_address(board.base) + warp * 2 * CHUNKS * 512 + lane * 16;
  }
  __device__ __forceinline__ void load_weights(const Args &a, int r, int pair, int size, unsigned char *scratch);
  template <bool ERRORS> __device__ __forceinline__ float4 gather(const Spot &spot, int round, bool fresh);
  template <bool ERRORS> __device__ __forceinline__ void share(const Spot &spot, int round);
  __device__ __forceinline__ float4 shared_sum() const;
  template <bool ERRORS> __device__ __forceinline__ void wait(int layer, int turn, int round) const {
    const u32 barrier = board.barrier(layer, Board::slot(turn, round));
    barrier_wait(barrier, (round >> 1) & 1);
    if (ERRORS) barrier_wait(barrier + EXPONENT_BARRIERS, ((round - errors_from) >> 1) & 1);
  }
  // A barrier is made ready for the next round of its slot, which nobody sends before all here have answered the last one.
  __device__ __forceinline__ void arm(int which, int slot, int samples, bool errors) const {
    if (lane || !(arms & which)) return;
    const int layer = which & 1 ? source : 0, count = which & 1 ? tiles(source) : 1;
    const u32 barrier = board.barrier(layer, slot);
    if (errors) barrier_expect(barrier + EXPONENT_BARRIERS, count * 8);
    else barrier_expect(barrier, count * samples * 48);
  }
};

// What the errors of a tile told in that slot count in, for the two samples of this thread.
__device__ __forceinline__ float2 exponents(const Board &board, int slot, int tile) {
  unsigned short both;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(board.exponents + (slot * AREA + tile) * 8 + threadIdx.x % 4 * 2));
  return make_float2(__uint_as_float((u32)(both & 255) << 23), __uint_as_float((u32)(both >> 8) << 23));
}

// Four units of a tile in one row, as a thread has them, times the row's scale.
__device__ __forceinline__ Planes split(const float *from, int across, int down, int row, float scale) {
  const int k = threadIdx.x % 4 * 2;
  u32 d[4];
#pragma unroll
  for (int j = 0; j < 4; j++) d[j] = digits(scale * from[row * down + (k + j % 2 + j / 2 * 8) * across]);
  return planes(d[0], d[1], d[2], d[3]);
}
__device__ __forceinline__ float inverse(float most) { return most > 0.f ? LARGEST / most : 0.f; }

// The weights of two tiles to one of the other layer at a time are brought into a scratch of this warp, three deep, and split from there.
// The loop is rolled and the fragments move up through the registers: unrolled, the code would be run once and fetched for longer
// than the data.
#define RAW 640                        // floats of two raw tiles: 32 lines of 16 + 4, or 16 of 32 + 4
#define SCRATCH (3 * RAW * 4)
__device__ __forceinline__ void Part::load_weights(const Args &a, int r, int pair, int N, unsigned char *scratch) {
  constexpr int COUNT = 2 * CHUNKS;
  float *raw = (float *)scratch;
  const bool upper = source > n;
  const int M = width(source), k0 = (part & 1) * COUNT * 16, row0 = pair * 32;
  const float *W = a.W[upper ? n : source] + (size_t)r * N * M;
  // upper: W (N, M), a row of which is a row here; else W (M, N), whose columns are the rows here
  auto request = [&](int c) {
    if (c < COUNT) {
      float *to = raw + c % 3 * RAW;
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
  request(0), request(1);
  // The largest weight of each row, that of row i in thread i.
  float most = 0.f;
  if (upper) {
#pragma unroll 4
    for (int i = 0; i < 32; i++) {
      float largest = 0.f;
#pragma unroll
      for (int k = lane * 4; k < COUNT * 16; k += 128) {
        const float4 w = row0 + i < N && k0 + k < M ? *(const float4 *)(W + (size_t)(row0 + i) * M + k0 + k) : zero4();
        largest = worse(largest, worst4(map4([](float v) { return fabsf(v); }, w)));
      }
#pragma unroll
      for (int x = 1; x < 32; x <<= 1) largest = worse(largest, __shfl_xor_sync(~0u, largest, x));
      if (lane == i) most = largest;
    }
  } else {
#pragma unroll 16
    for (int k = 0; k < COUNT * 16; k++)
      if (row0 + lane < N && k0 + k < M) most = worse(most, fabsf(W[(size_t)(k0 + k) * N + row0 + lane]));
  }
  float to_digits[2][2];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float largest = __shfl_sync(~0u, most, m * 16 + q * 8 + lane / 4);
      scale[m][q] = largest * UNIT, to_digits[m][q] = inverse(largest);
    }
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
    Planes w[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      request(2 * c + j + 2);
      await_brought<2>();
      __syncwarp();
      const float *from = raw + (2 * c + j) % 3 * RAW;
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
  if (extra) {
    float largest = 0.f;
    for (int e = lane; e < 256; e += 32) {       // W[0] (N0, N1), columns of which are the rows of the own tile
      const int k = e / 16, row = row0 + part * 16 + e % 16;
      raw[k * 20 + e % 16] = k < N0 && row < N ? a.W[0][((size_t)r * N0 + k) * N + row] : 0.f;
    }
    __syncwarp();
    for (int k = 0; k < 16; k++) largest = worse(largest, fabsf(raw[k * 20 + lane % 16]));
    Planes w[2];
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float of_row = __shfl_sync(~0u, largest, lane / 4 + 8 * q);
      w[q] = split(raw, 20, 1, lane / 4 + 8 * q, inverse(of_row));
      scale_extra[q] = of_row * UNIT, hi_extra[q] = w[q].hi, mid_extra[q] = w[q].mid;
    }
    put(board.extras() + (warp * 32 + lane) * 8, make_uint2(w[0].lo, w[1].lo));
  }
}

// The outputs' weights as rows of bytes, those of a tile in the order in which a thread's neurons are told. A warp takes every eighth row.
__device__ __forceinline__ void load_output_weights(const Args &a, const Board &board, int r) {
  unsigned char *to = board.outputs();
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < 16; row += WARPS) {
    const float *from = a.W[0] + ((size_t)r * N0 + row) * N1;
    float most = 0.f;
    if (row < N0)
      for (int k = lane; k < N1; k += 32) most = worse(most, fabsf(from[k]));
#pragma unroll
    for (int x = 1; x < 32; x <<= 1) most = worse(most, __shfl_xor_sync(~0u, most, x));
    if (lane == 0) board.output_scales()[row] = most * UNIT;
    if (row >= N0) continue;
    const float scale = inverse(most);
#pragma unroll 4
    for (int k = lane; k < MOST * 16; k += 32) {
      const u32 d = digits(k < N1 ? scale * from[k] : 0.f);
      unsigned char *p = to + row * LINE_BYTES + k / 16 * 16 + place_in_tile(k % 16);
      p[0] = d >> 16, p[N0 * LINE_BYTES] = d >> 8, p[2 * N0 * LINE_BYTES] = d;
    }
  }
  for (int e = threadIdx.x; e < LINE_BYTES / 4; e += THREADS) ((u32 *)(to + 3 * N0 * LINE_BYTES))[e] = 0;
}

// What the neighbours told in that round through the weights, sum_k W x, for the own tile. `fresh`: it has not been heard before.
template <bool ERRORS> __device__ __forceinline__ float4 Part::gather(const Spot &spot, int round, bool fresh) {
  const int slot = Board::slot(spot.turn, round), column = min(lane, 4 * SAMPLES - 1);
  const u32 at = board.slots + slot * SLOT_BYTES + tile * TILE_BYTES, pairs = at + column * 8, singles = at + 32 * SAMPLES + column * 4;
  float v[2][4] = {};
  uint4 u[2][2];
  uint2 x[2][2];
  u32 y[2][2];
  auto fetch_low = [&](int k) { u[k & 1][0] = look4(low + 2 * k * 512), u[k & 1][1] = look4(low + (2 * k + 1) * 512); };
  auto fetch = [&](int k) {
#pragma unroll
    for (int j = 0; j < 2; j++)
      x[k & 1][j] = look2(pairs + (2 * k + j) * TILE_BYTES), y[k & 1][j] = look(singles + (2 * k + j) * TILE_BYTES);
  };
  fetch_low(0);
  wait<ERRORS>(source, spot.turn, round);
  fetch(0);
  int top[2][4] = {}, middle[2][4] = {}, bottom[2][4] = {};
#pragma unroll
  for (int k = 0; k < CHUNKS; k++) {
    if (k + 1 < CHUNKS) fetch_low(k + 1), fetch(k + 1);
    const uint2 p = x[k & 1][0], q = x[k & 1][1];
    const u32 s = y[k & 1][0], t = y[k & 1][1];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 l = u[k & 1][m];
      const u32(&h)[4] = hi[2 * k + m];
      const u32(&c)[4] = mid[2 * k + m];
      if (!ERRORS) {
        mma(top[m], h[0], h[1], h[2], h[3], p.x, q.x);
        mma(middle[m], h[0], h[1], h[2], h[3], p.y, q.y);
        mma(bottom[m], h[0], h[1], h[2], h[3], s, t);
        mma(middle[m], c[0], c[1], c[2], c[3], p.x, q.x);
        mma(bottom[m], c[0], c[1], c[2], c[3], p.y, q.y);
        mma(bottom[m], l.x, l.y, l.z, l.w, p.x, q.x);
      } else {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint2 z = j ? q : p;
          const u32 w = j ? t : s, l0 = j ? l.z : l.x, l1 = j ? l.w : l.y;
          int high[4] = {}, between[4] = {}, below[4] = {};
          mma(high, h[2 * j], h[2 * j + 1], z.x);
          mma(between, h[2 * j], h[2 * j + 1], z.y);
          mma(below, h[2 * j], h[2 * j + 1], w);
          mma(between, c[2 * j], c[2 * j + 1], z.x);
          mma(below, c[2 * j], c[2 * j + 1], z.y);
          mma(below, l0, l1, z.x);
          const float2 size = exponents(board, slot, tile + 2 * k + j);
#pragma unroll
          for (int i = 0; i < 4; i++) v[m][i] = fmaf(i & 1 ? size.y : size.x, joined(high[i], between[i], below[i]), v[m][i]);
        }
      }
    }
  }
  if (fresh) arm(1, slot, spot.samples, false);
  if (ERRORS) arm(1, slot, spot.samples, true);
  // Each hands on what it has for the tiles that others own. Warps 2 and 3 go on; where groups take turns they could get ahead.
  const int turn = calls++ & 1, pair = (warp & -team) / 2, id = 1 + pair * 2 + turn;
  float4 *sums = board.partials() + (pair * PARTIAL_BYTES / 512 + turn * 2 * (team - 1)) * 32 + lane;
  float4 sum = zero4();
#pragma unroll
  for (int m = 0; m < 2; m++) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = scale[m][i >> 1] * (ERRORS ? v[m][i] : joined(top[m][i], middle[m][i], bottom[m][i]));
    const float4 mine = make_float4(w[0], w[1], w[2], w[3]);
    if (part == m) sum = mine;
    else sums[(m * (team - 1) + (part < 2 ? 0 : part - 1)) * 32] = mine;
  }
  if (!owns) {
    if (TURNS > 1) asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory");
    else asm volatile("bar.arrive %0, 128;" :: "r"(id) : "memory");
    return sum;
  }
  if (team == 2) asm volatile("bar.sync %0, 64;" :: "r"(id) : "memory");
  else asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory");
  sum = sum + sums[part * (team - 1) * 32];
  if (team == 4) sum = sum + (sums[(part * 3 + 1) * 32] + sums[(part * 3 + 2) * 32]);
  if (extra) {
    const uint2 l = look2(board.extras() + (warp * 32 + lane) * 8);
    const u32 outputs = board.slots + slot * SLOT_BYTES + PLACE0 * TILE_BYTES;
    wait<ERRORS>(0, spot.turn, round);
    const uint2 z = look2(outputs + column * 8);
    const u32 w = look(outputs + 32 * SAMPLES + column * 4);
    int high[4] = {}, between[4] = {}, below[4] = {};
    mma(high, hi_extra[0], hi_extra[1], z.x);
    mma(between, hi_extra[0], hi_extra[1], z.y);
    mma(below, hi_extra[0], hi_extra[1], w);
    mma(between, mid_extra[0], mid_extra[1], z.x);
    mma(below, mid_extra[0], mid_extra[1], z.y);
    mma(below, l.x, l.y, z.x);
    const float range = spot.a.output_range;
    const float2 size = ERRORS ? exponents(board, slot, PLACE0) : make_float2(range, range);
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; i++) e[i] = (i & 1 ? size.y : size.x) * scale_extra[i >> 1] * joined(high[i], between[i], below[i]);
    sum = sum + make_float4(e[0], e[1], e[2], e[3]);
    if (fresh) arm(2, slot, spot.samples, false);
    if (ERRORS) arm(2, slot, spot.samples, true);
  }
  return sum;
}

// The warps of one block but the FINISHER share the products of the outputs, two tiles of layer 1 at a time. There are two shares of a
// warp, each written when the FINISHER has read what it held before.
#define FULL 9
#define EMPTY 11
template <bool ERRORS> __device__ __forceinline__ void Part::share(const Spot &spot, int round) {
  constexpr int all = (N1 + 31) / 32, mine = (all + OUTPUT_WARPS - 2) / (OUTPUT_WARPS - 1);
  const int buffer = shared_calls & 1, nth = warp - (warp > FINISHER), slot = Board::slot(spot.turn, round);
  const bool used = shared_calls++ >= 2;
  if (warp == FINISHER) return;
  const int column = min(lane, 4 * SAMPLES - 1);
  const u32 at = board.slots + slot * SLOT_BYTES + PLACE1 * TILE_BYTES, pairs = at + column * 8, singles = at + 32 * SAMPLES + column * 4;
  const u32 rows = shared_address(board.outputs()) + lane / 16 * 16, zeros = rows + 3 * N0 * LINE_BYTES;
  const bool real = lane % 16 < N0;
  const u32 first = real ? rows + lane % 16 * LINE_BYTES : zeros, next = real ? N0 * LINE_BYTES : 0;
  if (source != 1) wait<ERRORS>(1, spot.turn, round);
  float v[4] = {};
  int high[4] = {}, between[4] = {}, below[4] = {};
#pragma unroll
  for (int i = 0; i < mine; i++) {
    const int k = nth + i * (OUTPUT_WARPS - 1);
    if (k >= all) break;
    const uint4 h = matrix(first + k * 32), c = matrix(first + next + k * 32), l = matrix(first + 2 * next + k * 32);
    const uint2 p = look2(pairs + 2 * k * TILE_BYTES), q = look2(pairs + (2 * k + 1) * TILE_BYTES);
    const u32 s = look(singles + 2 * k * TILE_BYTES), t = look(singles + (2 * k + 1) * TILE_BYTES);
    if (!ERRORS) {
      mma(high, h.x, h.y, h.z, h.w, p.x, q.x);
      mma(between, h.x, h.y, h.z, h.w, p.y, q.y);
      mma(below, h.x, h.y, h.z, h.w, s, t);
      mma(between, c.x, c.y, c.z, c.w, p.x, q.x);
      mma(below, c.x, c.y, c.z, c.w, p.y, q.y);
      mma(below, l.x, l.y, l.z, l.w, p.x, q.x);
    } else {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint2 z = j ? q : p;
        int a[4] = {}, b[4] = {}, d[4] = {};
        mma(a, j ? h.z : h.x, j ? h.w : h.y, z.x);
        mma(b, j ? h.z : h.x, j ? h.w : h.y, z.y);
        mma(d, j ? h.z : h.x, j ? h.w : h.y, j ? t : s);
        mma(b, j ? c.z : c.x, j ? c.w : c.y, z.x);
        mma(d, j ? c.z : c.x, j ? c.w : c.y, z.y);
        mma(d, j ? l.z : l.x, j ? l.w : l.y, z.x);
        const float2 size = exponents(board, slot, PLACE1 + 2 * k + j);
#pragma unroll
        for (int e = 0; e < 4; e++) v[e] = fmaf(e & 1 ? size.y : size.x, joined(a[e], b[e], d[e]), v[e]);
      }
    }
  }
  const float *scales = board.output_scales() + lane / 4;
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = scales[e / 2 * 8] * (ERRORS ? v[e] : joined(high[e], between[e], below[e]));
  if (used) asm volatile("bar.sync %0, %1;" :: "r"(EMPTY + buffer), "n"(32 * OUTPUT_WARPS) : "memory");
  keep(board.shares(buffer) + nth * SHARE_BYTES, make_float4(v[0], v[1], v[2], v[3]));
  asm volatile("bar.arrive %0, %1;" :: "r"(FULL + buffer), "n"(32 * OUTPUT_WARPS) : "memory");
}

// The shares together, in the warp FINISHER, which owns the outputs.
__device__ __forceinline__ float4 Part::shared_sum() const {
  const int buffer = (shared_calls - 1) & 1;
  asm volatile("bar.sync %0, %1;" :: "r"(FULL + buffer), "n"(32 * OUTPUT_WARPS) : "memory");
  float4 sum = zero4();
#pragma unroll
  for (int w = 0; w < OUTPUT_WARPS - 1; w++) sum = sum + recall(board.shares(buffer) + w * SHARE_BYTES);
  asm volatile("bar.arrive %0, %1;" :: "r"(EMPTY + buffer), "n"(32 * OUTPUT_WARPS) : "memory");
  return sum;
}
