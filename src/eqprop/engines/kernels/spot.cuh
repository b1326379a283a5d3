// The shared memory of a block, where a thread's neurons are, and how their states are told.

#define WARPS 8
#define THREADS (32 * WARPS)
#define WEIGHT_SCALE 256.0f            // powers of two that keep halves, and what is left of them, in range
#define STATE_SCALE 4096.0f
#define ERROR_SCALE 8192.0f

#define SAMPLES ((B + GROUPS - 1) / GROUPS)        // of a cluster, at most eight
#define TILE_BYTES (SAMPLES * 64)      // what is told of a tile: sixteen numbers a sample, two halves each
#define SLOT_BYTES (AREA * TILE_BYTES)
#define UPPER (N0 > 8 ? 4 * (N0 - 8) : 0)          // threads that hold outputs beyond the eighth
#define SHARE_BYTES (256 + 8 * UPPER)  // four numbers of each thread that holds outputs
#define SHARES ((WARPS - 1) * SHARE_BYTES)         // of all warps but the one that sums them
#define KEPT 5                         // times SHARE_BYTES: the state of the outputs between steps
#define PARTIAL_BYTES 3072             // of two warps: what a team hands each other
#define LINE_BYTES (MOST * 32 + 16)    // a row of the outputs' weights, shifted against bank conflicts
#define OUTPUT_BYTES ((2 * N0 + 1) * LINE_BYTES)   // high halves, low halves, a row of zeros

__device__ __forceinline__ void as_array(float4 v, float (&w)[4]) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }

// The shared memory of a block: low halves of its weights; low halves of layer 1's weights to the outputs (EXTRAS), or the outputs'
// weights, shares of their sums and their state (OUTPUTS), if the block has them; partial sums that warps hand each other
// (PARTIALS); from SLOTS on what it was told, and barriers.
struct Board {
  unsigned char *base;
  u32 slots, barriers;                 // addresses: told tiles (2 slots), barriers [layer][slot]
  __device__ __forceinline__ explicit Board(unsigned char *memory) : base(memory) {
    slots = shared_address(memory + SLOTS);
    barriers = slots + 2 * SLOT_BYTES;
  }
  __device__ __forceinline__ float4 *partials() const { return (float4 *)(base + PARTIALS); }
  __device__ __forceinline__ u32 extras() const { return shared_address(base + EXTRAS); }
  __device__ __forceinline__ unsigned char *outputs() const { return base + OUTPUTS; }
  __device__ __forceinline__ unsigned char *shares(int turn) const { return base + OUTPUTS + OUTPUT_BYTES + turn * SHARES; }
  __device__ __forceinline__ unsigned char *kept(int i) const { return shares(2) + i * SHARE_BYTES; }
  __device__ __forceinline__ u32 barrier(int layer, int slot) const { return barriers + (layer * 2 + slot) * 8; }
};

// Four numbers of a thread of the outputs, of which only some threads have the upper two.
__device__ __forceinline__ void keep(unsigned char *at, float4 v) {
  const int lane = threadIdx.x % 32;
  *(float2 *)(at + lane * 8) = make_float2(v.x, v.y);
  if (lane < UPPER) *(float2 *)(at + 256 + lane * 8) = make_float2(v.z, v.w);
}
__device__ __forceinline__ float4 recall(const unsigned char *at) {
  const int lane = threadIdx.x % 32;
  const float2 p = *(const float2 *)(at + lane * 8), q = lane < UPPER ? *(const float2 *)(at + 256 + lane * 8) : make_float2(0.f, 0.f);
  return make_float4(p.x, p.y, q.x, q.y);
}

__device__ __forceinline__ uint4 look(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
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
  const int r, lane, first_sample, samples, n, tile, size;
  u32 reals = 0;
  int first, last, start;                        // blocks that hear this layer, and the one this warp begins with
  u32 to, barrier, slots;                        // where this tile and its barrier lie in slot 0

  __device__ __forceinline__ Spot(const Args &a, const Board &board, int r, int group, int n, int tile, bool owns)
      : a(a), r(r), lane(threadIdx.x % 32), first_sample(group * B / GROUPS),
        samples((group + 1) * B / GROUPS - group * B / GROUPS), n(n), tile(tile), size(width(n)), slots(board.slots) {
#pragma unroll
    for (int i = 0; i < 4; i++) reals |= (u32)(owns && unit(i) < size && sample(i) < samples) << i;
    const int count = heard_by(n) >> 8;
    first = heard_by(n) & 255, last = first + count, start = first + tile % max(count, 1);
    to = board.slots + (place_of(n) + tile) * TILE_BYTES + lane * 16, barrier = board.barrier(n, 0);
  }
  __device__ __forceinline__ int unit(int i) const { return tile * 16 + lane / 4 + (i >> 1) * 8; }
  __device__ __forceinline__ int sample(int i) const { return 2 * (lane % 4) + (i & 1); }
  __device__ __forceinline__ bool real(int i) const { return reals >> i & 1; }
  template <class F> __device__ __forceinline__ float4 each(F f) const {
    return make_float4(real(0) ? f(0) : 0.f, real(1) ? f(1) : 0.f, real(2) ? f(2) : 0.f, real(3) ? f(3) : 0.f);
  }
  __device__ __forceinline__ float4 only_real(float4 v) const {
    return make_float4(real(0) ? v.x : 0.f, real(1) ? v.y : 0.f, real(2) ? v.z : 0.f, real(3) ? v.w : 0.f);
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

  // Tells four numbers as two halves each to the blocks that hear this layer; returns what they now know.
  __device__ __forceinline__ float4 publish(float4 v, int round, float scale) const {
    const float4 x = scale * v;
    const u32 h0 = halves(x.x, x.y), h1 = halves(x.z, x.w);
    const float2 p = floats(h0), q = floats(h1);
    const float4 high = make_float4(p.x, p.y, q.x, q.y), left = x - high;
    const u32 l0 = halves(left.x, left.y), l1 = halves(left.z, left.w);
    const uint4 packet = make_uint4(transposed(h0), transposed(h1), transposed(l0), transposed(l1));
    const u32 where = to + (round & 1) * SLOT_BYTES, counter = barrier + (round & 1) * 8;
    int rank = start;
    if (lane < 4 * samples)
#pragma unroll 4
      for (int i = first; i < last; i++) {
        const u32 way = way_to(rank, slots);
        push(way + where, packet, way + counter);
        rank = rank + 1 == last ? first : rank + 1;
      }
    const float2 c = floats(l0), d = floats(l1);
    return (1.0f / scale) * (high + make_float4(c.x, c.y, d.x, d.y));
  }
};
