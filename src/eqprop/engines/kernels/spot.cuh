// The shared memory of a block, where a thread's neurons are, and how their states are told.

#define WARPS 8
#define THREADS (32 * WARPS)
#define WEIGHT_SCALE 256.0f            // powers of two that keep halves, and what is left of them, in range
#define STATE_SCALE 4096.0f
#define ERROR_SCALE 8192.0f
#define FINE_HALVES 0x38003800u        // two halves of STATE_SCALE * 2^-13: a smaller difference is told as one half
#define AHEAD 1                        // pairs of tiles by which loads run ahead of products

#define LOW_BYTES (WARPS * MOST * 512)
#define LINE_BYTES (MOST * 32 + 16)    // a row of the outputs' weights, shifted against bank conflicts
#define OUTPUT_BYTES ((2 * N0 + 1) * LINE_BYTES)   // high halves, low halves, a row of zeros
#define EXTRA_BYTES (WARPS * 512)      // where there are no outputs: low halves of layer 1's weights to them
#define SIDE_BYTES (OUTPUT_BYTES > EXTRA_BYTES ? OUTPUT_BYTES : EXTRA_BYTES)
#define SLOT_BYTES (AREA * 512)        // high halves of every tile, then low ones
#define UPPER (N0 > 8 ? 4 * (N0 - 8) : 0)          // threads that hold outputs beyond the eighth
#define SHARE_BYTES (256 + 8 * UPPER)  // a warp's share of the outputs' sums
#define PARTS_BYTES (WARPS * 512 + 2 * WARPS * SHARE_BYTES)
#define KEPT 6                         // float4 of a thread that hold the outputs' state between steps
#define LOW_HALF_BYTES (samples * 32)  // what is told of a tile: high halves and its flag, then low halves if that is set
#define HIGH_HALF_BYTES (LOW_HALF_BYTES + 16)
#define FLAG_LANE 28                   // a cluster has at most seven samples: the flag lies where the eighth would begin

__device__ __forceinline__ void as_array(float4 v, float (&w)[4]) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }

// The shared memory of a block.
struct Board {
  unsigned char *base;
  u32 slots, barriers;                 // addresses: told tiles (2 slots), barriers [layer][slot][high, low]
  __device__ __forceinline__ explicit Board(unsigned char *memory) : base(memory) {
    slots = shared_address(memory + LOW_BYTES + SIDE_BYTES);
    barriers = slots + 2 * SLOT_BYTES + PARTS_BYTES + KEPT * 512;
  }
  __device__ __forceinline__ unsigned char *outputs() const { return base + LOW_BYTES; }
  __device__ __forceinline__ unsigned char *extras() const { return base + LOW_BYTES; }
  __device__ __forceinline__ float4 *pair_sums() const { return (float4 *)(base + LOW_BYTES + SIDE_BYTES + 2 * SLOT_BYTES); }
  __device__ __forceinline__ unsigned char *shares() const { return (unsigned char *)pair_sums() + WARPS * 512; }
  __device__ __forceinline__ float4 *kept() const { return (float4 *)(shares() + 2 * WARPS * SHARE_BYTES); }
  __device__ __forceinline__ u32 barrier(int layer, int slot, int low) const { return barriers + ((layer * 2 + slot) * 2 + low) * 8; }
};

__device__ __forceinline__ uint4 look(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ uint2 look2(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
__device__ __forceinline__ u32 look1(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void put(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// A tile of 16 x 16 halves, from the address of a row that each thread gives.
__device__ __forceinline__ uint4 matrix(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row));
  return v;
}

// Where a thread's four neurons are: units g and g + 8 of a tile, samples 2t and 2t + 1 of its cluster (as a float4: g, g, g+8, g+8).
struct Spot {
  const Args &a;
  const Board board;
  const int r, lane, first_sample, samples, n, tile, size;
  int reals = 0, first, last, start;             // blocks that hear this layer, and the one this thread begins with
  u32 to, barrier;                               // where this tile and its barrier lie in slot 0

  __device__ __forceinline__ Spot(const Args &a, const Board &board, int r, int group, int n, int tile, bool owns)
      : a(a), board(board), r(r), lane(threadIdx.x % 32), first_sample(group * B / GROUPS),
        samples((group + 1) * B / GROUPS - group * B / GROUPS), n(n), tile(tile), size(width(n)) {
#pragma unroll
    for (int i = 0; i < 4; i++) reals |= (owns && unit(i) < size && sample(i) < samples) << i;
    const int place = place_of(n) + tile, count = heard_by(n) >> 8;
    first = heard_by(n) & 255, last = first + count;
    start = first + (tile + (lane & 1)) % max(count, 1);
    to = board.slots + place * 256 + lane / 2 * 16, barrier = board.barrier(n, 0, 0);
  }
  __device__ __forceinline__ int unit(int i) const { return tile * 16 + lane / 4 + (i >> 1) * 8; }
  __device__ __forceinline__ int sample(int i) const { return 2 * (lane % 4) + (i & 1); }
  __device__ __forceinline__ bool real(int i) const { return reals >> i & 1; }
  template <class F> __device__ __forceinline__ float4 each(F f) const {
    return make_float4(real(0) ? f(0) : 0.f, real(1) ? f(1) : 0.f, real(2) ? f(2) : 0.f, real(3) ? f(3) : 0.f);
  }
  __device__ __forceinline__ size_t index(int slot, int i) const {
    return (((size_t)slot * a.job.R + r) * B + first_sample + sample(i)) * ((size + 15) / 16 * 16) + unit(i);
  }
  __device__ __forceinline__ void store(float *to, int slot, float4 v) const {
    if (!to) return;
    float w[4];
    as_array(v, w);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (real(i)) to[index(slot, i)] = w[i];
  }
  __device__ __forceinline__ float4 load(const float *from, int slot) const {
    return each([&](int i) { return from[index(slot, i)]; });
  }

  // Two neighbours put their eight bytes together; one of them serves every other block that hears this layer.
  __device__ __forceinline__ uint4 joined(u32 x, u32 y) const {
    x = transposed(x), y = transposed(y);
    const u32 p = __shfl_xor_sync(~0u, x, 1), q = __shfl_xor_sync(~0u, y, 1);
    return lane & 1 ? make_uint4(p, q, x, y) : make_uint4(x, y, p, q);
  }
  // Each begins with another block, so that they are not all served in the same order.
  __device__ __forceinline__ void serve(u32 where, uint4 v, u32 barrier, bool takes_part) const {
    int rank = start;
#pragma unroll 2
    for (int i = first + (lane & 1); i < last; i += 2) {
      const u32 there = way_to(rank, board.slots);
      if (takes_part) push(there + where, v, there + barrier);
      rank += 2;
      if (rank >= last) rank -= last - first;
    }
  }
  __device__ __forceinline__ void serve_high(u32 h0, u32 h1, int slot, bool both) const {
    uint4 v = joined(h0, h1);
    if (lane >= FLAG_LANE) v = make_uint4(both, 0, 0, 0);
    serve(to + slot * SLOT_BYTES, v, barrier + slot * 16, lane < 4 * samples || lane / 2 == FLAG_LANE / 2);
  }
  __device__ __forceinline__ void serve_low(u32 l0, u32 l1, int slot) const {
    serve(to + slot * SLOT_BYTES + AREA * 256, joined(l0, l1), barrier + slot * 16 + 8, lane < 4 * samples);
  }

  // Tells the difference between v and what is known of it. Returns it, zero if there is none.
  __device__ __forceinline__ u32 publish(float4 v, float4 &told, int round) const {
    const int slot = round & 1;
    const float4 x = STATE_SCALE * (v - told);
    const u32 h0 = halves(x.x, x.y), h1 = halves(x.z, x.w);
    const float2 p = floats(h0), q = floats(h1);
    const float4 high = make_float4(p.x, p.y, q.x, q.y);
    const u32 bits = 0x7fff7fffu, carry = 0x80008000u - FINE_HALVES;   // a carry into the sign's place: not smaller than FINE
    const bool both = __any_sync(~0u, (((h0 & bits) + carry) | ((h1 & bits) + carry)) & 0x80008000u);
    told = told + (1.0f / STATE_SCALE) * high;
    serve_high(h0, h1, slot, both);
    if (both) {
      const float4 left = x - high;
      const u32 l0 = halves(left.x, left.y), l1 = halves(left.z, left.w);
      const float2 c = floats(l0), d = floats(l1);
      told = told + (1.0f / STATE_SCALE) * make_float4(c.x, c.y, d.x, d.y);
      serve_low(l0, l1, slot);
    }
    return (h0 | h1) & bits;
  }
  // Tells an error, both halves of it.
  __device__ __forceinline__ void publish_error(float4 v, int round) const {
    const int slot = round & 1;
    const float4 x = ERROR_SCALE * v;
    const u32 h0 = halves(x.x, x.y), h1 = halves(x.z, x.w);
    const float2 p = floats(h0), q = floats(h1);
    serve_high(h0, h1, slot, true);
    serve_low(halves(x.x - p.x, x.y - p.y), halves(x.z - q.x, x.w - q.y), slot);
  }
};
