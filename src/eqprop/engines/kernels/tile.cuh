// A warp's tile of a layer: what it hears of its neighbours through the weights it holds.

#include "spot.cuh"

// A layer between two hidden ones has two warps a tile: part 0 hears the layer above (nearer the input) and owns the tile,
// part 1 hears the one below.
struct Tile16 {
  const Board board;
  const int warp, lane, samples, n, arms;
  const bool owns, helped, extra;
  const int source, source_tiles, source_place;  // the layer heard; layer 1 hears the outputs besides (extra)
  u32 hi[MOST][4], hi_extra[4];
  u32 low;                                       // where this thread's low halves lie
  u32 last = 1;                                  // the source's tiles with low halves in the round heard last
  int calls = 0, shared_calls = 0;

  __device__ __forceinline__ Tile16(const Spot &spot, const int *role, int warp)
      : board(spot.board), warp(warp), lane(spot.lane), samples(spot.samples), n(role[0]), arms(role[3]), owns(role[2] == 0),
        helped(role[0] >= 2 && role[0] < DEPTH - 1), extra(role[0] == 1),
        source(role[2] || role[0] == DEPTH - 1 ? role[0] - 1 : role[0] + 1), source_tiles(tiles(source)), source_place(place_of(source)) {
    low = shared_address(board.base) + warp * MOST * 512 + lane * 16;
  }
  __device__ __forceinline__ void load_weights(const Args &a, int r, int tile, int size, unsigned char *scratch);
  __device__ __forceinline__ void arm() const;
  __device__ __forceinline__ void wait(int layer, int round, int low) const { barrier_wait(board.barrier(layer, round & 1, low), (round >> 1) & 1); }
  __device__ __forceinline__ u32 with_low(int count, int place, int round) const;
  __device__ __forceinline__ void rearm(int layer, int count, int round, u32 mask) const;
  template <bool CAREFUL> __device__ __forceinline__ u32 multiply(int round, float (&total)[4], float (&small)[2][4]) const;
  __device__ __forceinline__ void multiply_low(int round, u32 mask, float (&small)[2][4]) const;
  __device__ __forceinline__ float4 gather(int round, float scale);
  __device__ __forceinline__ float4 output_share(int round, float scale) const;
  __device__ __forceinline__ float4 output_sum(float4 share);
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

// Two tiles of inputs at a time are brought into a scratch of this warp, three deep, and split from there. The loop is rolled and the
// fragments move up through the registers: unrolled, the code would be run once and fetched for longer than the data.
#define RAW 640                        // floats of two raw tiles: 16 rows of 32 + 4, or 32 lines of 16 + 4
#define SCRATCH (3 * RAW * 4 + 1024)
__device__ __forceinline__ void Tile16::load_weights(const Args &a, int r, int tile, int N, unsigned char *scratch) {
  float *raw = (float *)scratch;
  uint4 *staged = (uint4 *)(scratch + 3 * RAW * 4);
  const bool upper = source > n;
  const int M = width(source);
  const float *W = a.W[upper ? n : source] + (size_t)r * N * M;
  // upper: W (N, M), a row of which is a row here; else W (M, N), whose columns are the rows here
  auto request = [&](int c) {
    float *to = raw + c % 3 * RAW;
    for (int e = lane; e < 128; e += 32) {
      const int line = upper ? e / 8 : e / 4, at = (upper ? e % 8 : e % 4) * 4;
      const int row = upper ? tile * 16 + line : c * 32 + line, column = upper ? c * 32 + at : tile * 16 + at;
      const int rows = upper ? N : M, columns = upper ? M : N;
      float *p = to + line * (upper ? 36 : 20) + at;
      const bool there = row < rows && column < columns;
      bring(shared_address(p), there ? W + (size_t)row * columns + column : W, there);
    }
    brought();
  };
  request(0);
  request(1);
#pragma unroll 1
  for (int c = 0; c < MOST / 2; c++) {
    if (c + 2 < MOST / 2) request(c + 2); else brought();
    await_brought<2>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint4 h, l;
      split(raw + c % 3 * RAW + j * 16 * (upper ? 1 : 20), upper ? 1 : 20, upper ? 36 : 1, h, l);
      staged[j * 32 + lane] = h;
      put(low + (2 * c + j) * 512, l);
    }
#pragma unroll
    for (int k = 0; k + 2 < MOST; k++)
#pragma unroll
      for (int q = 0; q < 4; q++) hi[k][q] = hi[k + 2][q];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint4 h = staged[j * 32 + lane];
      hi[MOST - 2 + j][0] = h.x, hi[MOST - 2 + j][1] = h.y, hi[MOST - 2 + j][2] = h.z, hi[MOST - 2 + j][3] = h.w;
    }
    __syncwarp();
  }
  if (extra) {
    for (int e = lane; e < 256; e += 32) {       // W[0] (N0, N1), columns of which are the rows here
      const int k = e / 16, row = tile * 16 + e % 16;
      raw[k * 20 + e % 16] = k < N0 && row < N ? a.W[0][((size_t)r * N0 + k) * N + row] : 0.f;
    }
    __syncwarp();
    uint4 h, l;
    split(raw, 20, 1, h, l);
    hi_extra[0] = h.x, hi_extra[1] = h.y, hi_extra[2] = h.z, hi_extra[3] = h.w;
    put(shared_address(board.extras()) + (warp * 32 + lane) * 16, l);
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

__device__ __forceinline__ void Tile16::arm() const {
  if (lane) return;
  for (int slot = 0; slot < 2; slot++) {
    if (arms & 1) barrier_expect(board.barrier(source, slot, 0), source_tiles * HIGH_HALF_BYTES);
    if (arms & 2) barrier_expect(board.barrier(0, slot, 0), HIGH_HALF_BYTES);
  }
}

// The tiles of a layer that have low halves in a round, a bit each.
__device__ __forceinline__ u32 Tile16::with_low(int count, int place, int round) const {
  const u32 at = board.slots + (round & 1) * SLOT_BYTES + (place + lane) * 256 + FLAG_LANE * 8;
  return __ballot_sync(~0u, lane < count && look1(at));
}

// The barriers are made ready for the round after next, which nobody sends before all here have answered.
__device__ __forceinline__ void Tile16::rearm(int layer, int count, int round, u32 mask) const {
  if (lane) return;
  barrier_expect(board.barrier(layer, round & 1, 0), count * HIGH_HALF_BYTES);
  barrier_expect(board.barrier(layer, round & 1, 1), __popc(mask) * LOW_HALF_BYTES);
}

// Both halves of the weights with the high halves of the states. Returns whether there are low ones. Tensor cores cut a sum off at the
// size it has, always towards zero: the small products are summed apart, and of the large ones few; none where differences are large
// (CAREFUL).
template <bool CAREFUL> __device__ __forceinline__ u32 Tile16::multiply(int round, float (&total)[4], float (&small)[2][4]) const {
  const u32 high_at = board.slots + (round & 1) * SLOT_BYTES + source_place * 256 + lane * 8;
  uint2 x[2 * AHEAD + 2];
  uint4 u[2 * AHEAD + 2];
  u32 flags = 0;
  auto fetch = [&](int k) { x[k % (2 * AHEAD + 2)] = look2(high_at + k * 256), u[k % (2 * AHEAD + 2)] = look(low + k * 512); };
#pragma unroll
  for (int k = 0; k < 2 * AHEAD && k < MOST; k++) fetch(k);
  float large[2][4];
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    if (k + 2 * AHEAD < MOST) fetch(k + 2 * AHEAD);
    const uint2 y = x[k % (2 * AHEAD + 2)];
    const uint4 l = u[k % (2 * AHEAD + 2)];
    flags |= y.x;
    if (CAREFUL || k % 8 < 2) large[k & 1][0] = large[k & 1][1] = large[k & 1][2] = large[k & 1][3] = 0.f;
    mma(large[k & 1], hi[k][0], hi[k][1], hi[k][2], hi[k][3], y.x, y.y);
    mma(small[k & 1], l.x, l.y, l.z, l.w, y.x, y.y);
    if (CAREFUL ? k & 1 : k % 8 == 7 || k + 1 == MOST)
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += large[0][i] + large[1][i];
  }
  return __shfl_sync(~0u, flags, FLAG_LANE);
}

// The high halves of the weights with the low halves of the states.
__device__ __forceinline__ void Tile16::multiply_low(int round, u32 mask, float (&small)[2][4]) const {
  const u32 at = board.slots + (round & 1) * SLOT_BYTES + (AREA + source_place) * 256 + lane * 8;
  wait(source, round, 1);
  uint2 x[2 * AHEAD];
  auto fetch = [&](int k) {
    const uint2 y = look2(at + k * 256);
    x[k % (2 * AHEAD)] = mask >> k & 1 ? y : make_uint2(0, 0);   // what is left there from another round is not meant
  };
#pragma unroll
  for (int k = 0; k < 2 * AHEAD && k < MOST; k++) fetch(k);
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    const uint2 y = x[k % (2 * AHEAD)];
    mma(small[k & 1], hi[k][0], hi[k][1], hi[k][2], hi[k][3], y.x, y.y);
    if (k + 2 * AHEAD < MOST) fetch(k + 2 * AHEAD);
  }
}

__device__ __forceinline__ float4 summed(const float (&total)[4], const float (&small)[2][4], float scale) {
  return (1.0f / (WEIGHT_SCALE * scale)) * make_float4(total[0] + (small[0][0] + small[1][0]), total[1] + (small[0][1] + small[1][1]),
                                                       total[2] + (small[0][2] + small[1][2]), total[3] + (small[0][3] + small[1][3]));
}

// What the neighbours told in that round through the weights: sum_k W q, in a thread's four places.
__device__ __forceinline__ float4 Tile16::gather(int round, float scale) {
  wait(source, round, 0);
  float small[2][4] = {}, total[4] = {};
  const u32 flags = last ? multiply<true>(round, total, small) : multiply<false>(round, total, small);
  last = flags ? with_low(source_tiles, source_place, round) : 0;
  if (arms & 1) rearm(source, source_tiles, round, last);
  if (last) multiply_low(round, last, small);
  if (extra) {
    const u32 from = board.slots + (round & 1) * SLOT_BYTES + PLACE0 * 256 + lane * 8;
    const uint4 u = look(shared_address(board.extras()) + (warp * 32 + lane) * 16);
    wait(0, round, 0);
    const uint2 x = look2(from);
    const u32 both = __shfl_sync(~0u, x.x, FLAG_LANE);
    float large[4] = {};
    mma(large, hi_extra[0], hi_extra[1], hi_extra[2], hi_extra[3], x.x, x.y);
    mma(small[0], u.x, u.y, u.z, u.w, x.x, x.y);
    if (arms & 2) rearm(0, 1, round, both);
    if (both) {
      wait(0, round, 1);
      const uint2 y = look2(from + AREA * 256);
      mma(small[1], hi_extra[0], hi_extra[1], hi_extra[2], hi_extra[3], y.x, y.y);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] += large[i];
  }
  float4 sum = summed(total, small, scale);
  // Two warps of a tile: the second leaves its sums and goes on. It cannot be more than one round ahead.
  if (!owns || helped) {
    const int turn = calls++ & 1, id = 1 + warp / 2 * 2 + turn;
    float4 *at = board.pair_sums() + (warp / 2 * 2 + turn) * 32 + lane;
    if (!owns) {
      *at = sum;
      asm volatile("bar.arrive %0, 64;" :: "r"(id) : "memory");
    } else {
      asm volatile("bar.sync %0, 64;" :: "r"(id) : "memory");
      sum = sum + *at;
    }
  }
  return sum;
}

// The warps of the block with the outputs share the products of these: every OUTPUT_WARPS-th tile of layer 1.
__device__ __forceinline__ float4 Tile16::output_share(int round, float scale) const {
  constexpr int all = (N1 + 15) / 16, mine = (all + OUTPUT_WARPS - 1) / OUTPUT_WARPS;
  if (source != 1) wait(1, round, 0);
  const u32 mask = source == 1 ? last : with_low(all, PLACE1, round);
  const u32 high_at = board.slots + (round & 1) * SLOT_BYTES + PLACE1 * 256 + lane * 8, low_at = high_at + AREA * 256;
  const int row = lane % 16;
  const u32 at = shared_address(board.outputs()) + lane / 16 * 16, zeros = at + 2 * N0 * LINE_BYTES;
  const u32 high_row = row < N0 ? at + row * LINE_BYTES : zeros, low_row = row < N0 ? at + (N0 + row) * LINE_BYTES : zeros;
  float small[2][4] = {}, total[4] = {};
  uint2 x[mine];
  uint4 h[mine], l[mine];
  // A warp without a tile left takes the first, times zero.
#pragma unroll
  for (int j = 0; j < mine; j++) {
    const int k = warp + j * OUTPUT_WARPS < all ? warp + j * OUTPUT_WARPS : 0;
    x[j] = look2(high_at + k * 256), h[j] = matrix(high_row + k * 32), l[j] = matrix(low_row + k * 32);
  }
#pragma unroll
  for (int j = 0; j < mine; j++) {
    if (warp + j * OUTPUT_WARPS >= all) x[j] = make_uint2(0, 0);
    float large[4] = {};
    mma(large, h[j].x, h[j].y, h[j].z, h[j].w, x[j].x, x[j].y);
    mma(small[j & 1], l[j].x, l[j].y, l[j].z, l[j].w, x[j].x, x[j].y);
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] += large[i];
  }
  if (mask) {
    wait(1, round, 1);
    for (int k = warp; k < all; k += OUTPUT_WARPS) {
      if (!(mask >> k & 1)) continue;
      const uint2 y = look2(low_at + k * 256);
      const uint4 g = matrix(high_row + k * 32);
      mma(small[0], g.x, g.y, g.z, g.w, y.x, y.y);
    }
  }
  return summed(total, small, scale);
}

// The shares together, in the block's first warp.
__device__ __forceinline__ float4 Tile16::output_sum(float4 share) {
  const int turn = shared_calls++ & 1;
  unsigned char *shares = board.shares() + turn * WARPS * SHARE_BYTES;
  if (warp) {
    unsigned char *to = shares + warp * SHARE_BYTES + lane * 8;
    *(float2 *)to = make_float2(share.x, share.y);
    if (lane < UPPER) *(float2 *)(to + 256) = make_float2(share.z, share.w);
  }
  asm volatile("bar.sync %0, %1;" :: "n"(1 + WARPS), "n"(32 * OUTPUT_WARPS) : "memory");
  if (warp) return zero4();
#pragma unroll
  for (int w = 1; w < OUTPUT_WARPS; w++) {
    const float2 x = *(float2 *)(shares + w * SHARE_BYTES + lane * 8);
    const float2 y = lane < UPPER ? *(float2 *)(shares + w * SHARE_BYTES + 256 + lane * 8) : make_float2(0.f, 0.f);
    share = share + make_float4(x.x, x.y, y.x, y.y);
  }
  return share;
}
