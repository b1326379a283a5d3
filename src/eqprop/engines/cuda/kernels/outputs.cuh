// The outputs: helpers in the blocks that receive layer 1 share the sums of its input to the outputs. Each block that receives the outputs
// has one helper with a full copy of them, so that they need not be sent, and all copies write the same values to device memory. Other warps
// run the hidden layers meanwhile: layer 1 needs the outputs last.

#include "tile.cuh"

#define OUTPUT_SCRATCH (16 * 36 * 4)

struct Outputs {
  static constexpr bool of_outputs = true;
  const Board board;
  const Ear ear;
  const int lane, nth, place;                    // the share (-1: none), and the index of its weights in this block
  const bool owns;
  float scale[2];                                // unit of a row's sums
  int calls = 0;
  int errors_from;                               // the first round of errors

  __device__ __forceinline__ Outputs(const Board &board, const int *role, bool owns)
      : board(board), lane(threadIdx.x % 32), nth(role[0]), place(role[1]), owns(owns) {}
  __device__ __forceinline__ void load_weights(const Args &a, int r, unsigned char *scratch);
  template <bool ERRORS> __device__ __forceinline__ void share(int round, int buffer);
  __device__ __forceinline__ float4 sum(int call) const;
  __device__ __forceinline__ void arm(int buffer) const {
    if (lane == 0) barrier_expect(board.share_barrier(buffer), SHARES * SHARE_BYTES);
  }
  template <bool ERRORS> __device__ __forceinline__ float4 hear(const Spot &spot, int round, bool fresh) {
    const int call = calls++;
    if (nth >= 0) share<ERRORS>(round, call & 1);
    return owns ? sum(call) : zero4();
  }
};

// The outputs' weights to the pairs of tiles of layer 1 in this warp's share: every SHARES-th.
__device__ __forceinline__ void Outputs::load_weights(const Args &a, int r, unsigned char *scratch) {
  float *raw = (float *)scratch;
  u32 largest = 0;                               // of row i in thread i
  for (int i = 0; i < SHARE_CHUNKS; i++)
#pragma unroll
    for (int row = 0; row < N0; row++) {
      const int k = (nth + i * SHARES) * 32 + lane;
      const u32 of_row = __reduce_max_sync(~0u, k < N1 ? size_of(a.W[0][((size_t)r * N0 + row) * N1 + k]) : 0);
      if (lane == row) largest = max(largest, of_row);
    }
  float to_digits[2];
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const float of_row = __uint_as_float(__shfl_sync(~0u, largest, lane / 4 + 8 * q));
    scale[q] = worth(of_row), to_digits[q] = inverse(of_row);
  }
  for (int i = 0; i < SHARE_CHUNKS; i++) {
    const int k = (nth + i * SHARES) * 32 + lane;
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 16; row++) raw[row * 36 + lane] = row < N0 && k < N1 ? a.W[0][((size_t)r * N0 + row) * N1 + k] : 0.f;
    __syncwarp();
    Planes w[4];
#pragma unroll
    for (int q = 0; q < 4; q++) w[q] = split(raw + q / 2 * 16, 1, 36, lane / 4 + q % 2 * 8, to_digits[q % 2]);
    const u32 at = board.fragments(place) + i * FRAGMENT_BYTES + lane * 16;
    put(at, make_uint4(w[0].hi, w[1].hi, w[2].hi, w[3].hi));
    put(at + 512, make_uint4(w[0].mid, w[1].mid, w[2].mid, w[3].mid));
    put(at + 1024, make_uint4(w[0].lo, w[1].lo, w[2].lo, w[3].lo));
  }
  __syncwarp();
}

// Send this warp's share of the sums to the blocks that receive the outputs.
// A share has two slots: before one is overwritten, layer 1 has answered what the outputs sent after reading it.
template <bool ERRORS> __device__ __forceinline__ void Outputs::share(int round, int buffer) {
  const u32 slot = board.slot(round) + PLACE1 * TILE_BYTES;
  const u32 weights = board.fragments(place) + lane * 16;
  board.wait<ERRORS>(1, round, errors_from);
  Sums sums;
  float v[4] = {};
#pragma unroll
  for (int i = 0; i < SHARE_CHUNKS; i++) {
    const int k = nth + i * SHARES;
    if (k * 32 >= N1) break;
    const uint4 h4 = look4(weights + i * FRAGMENT_BYTES), c4 = look4(weights + i * FRAGMENT_BYTES + 512), l = look4(weights + i * FRAGMENT_BYTES + 1024);
    const u32 h[4] = {h4.x, h4.y, h4.z, h4.w}, c[4] = {c4.x, c4.y, c4.z, c4.w};
    const Planes p = ear.hear(slot, 2 * k), q = ear.hear(slot, 2 * k + 1);
    if (!ERRORS) sums.add(h, c, l, p, q);
    else {
      board.add_scaled(v, round, PLACE1 + 2 * k, make_uint2(h[0], h[1]), make_uint2(c[0], c[1]), make_uint2(l.x, l.y), p);
      board.add_scaled(v, round, PLACE1 + 2 * k + 1, make_uint2(h[2], h[3]), make_uint2(c[2], c[3]), make_uint2(l.z, l.w), q);
    }
  }
  u32 word[4];
#pragma unroll
  for (int e = 0; e < 4; e++) word[e] = __float_as_uint(scale[e / 2] * (ERRORS ? v[e] : sums[e]));
  // Two threads with four samples of two units each take one unit.
  const bool upper = lane & 1;
  const u32 p = __shfl_xor_sync(~0u, upper ? word[0] : word[2], 1), q = __shfl_xor_sync(~0u, upper ? word[1] : word[3], 1);
  const uint4 packet = upper ? make_uint4(p, q, word[2], word[3]) : make_uint4(word[0], word[1], p, q);
  const u32 to = shared_address(board.share(buffer, nth)) + (upper ? 256 : 0) + lane / 2 * 16, counter = board.share_barrier(buffer);
  if (!upper || lane < UPPER)
#pragma unroll
    for (int i = 0; i < HEARD0 >> 8; i++) {
      const u32 way = way_to((HEARD0 & 255) + i, board.slots);
      push(way + to, packet, way + counter);
    }
}

// Sum the shares.
__device__ __forceinline__ float4 Outputs::sum(int call) const {
  const int buffer = call & 1;
  barrier_wait(board.share_barrier(buffer), (call >> 1) & 1);
  float4 sum = zero4();
#pragma unroll 4
  for (int i = 0; i < SHARES; i++) {
    const unsigned char *from = board.share(buffer, i) + lane * 8;
    const float2 p = *(const float2 *)from, q = lane < UPPER ? *(const float2 *)(from + 256) : make_float2(0.f, 0.f);
    sum = sum + make_float4(p.x, p.y, q.x, q.y);
  }
  arm(buffer);
  return sum;
}
