// The shared memory of a block, the location of a thread's neurons, and how their states are sent.

#include "digits.cuh"

#define WARPS 8
#define HELPERS 4                      // extra warps, in the blocks that receive layer 1: they compute the outputs (outputs.cuh)
#define THREADS (32 * (WARPS + HELPERS))

#define SAMPLES ((B + GROUPS - 1) / GROUPS)        // per group, at most seven
#define CHUNKS ((MOST + 3) / 4)        // pairs of tiles a warp receives
#define TILE_BYTES (SAMPLES * 48)      // message of a tile: sixteen numbers per sample, three bytes each
#define SLOT_BYTES (AREA * TILE_BYTES)
#define UPPER (N0 > 8 ? 4 * (N0 - 8) : 0)          // threads that hold outputs beyond the eighth
#define SHARE_BYTES (256 + 8 * UPPER)  // four numbers per thread that holds outputs
#define SHARE_CHUNKS (((N1 + 31) / 32 + SHARES - 1) / SHARES)      // pairs of tiles of layer 1 in a share of the outputs' sums
#define FRAGMENT_BYTES 1536            // sixteen rows of weights to a pair of tiles, three planes
#define PARTIAL_BYTES 3072             // exchanged between two warps of a team
// Whether all hidden layers have the same number of receivers.
#define EQUALLY_HEARD ((HEARD1 ^ HEARD2) < 256 && (N3 == 0 || (HEARD1 ^ HEARD3) < 256) && (N4 == 0 || (HEARD1 ^ HEARD4) < 256))
#define BARRIERS ((1 + METHOD) * LAYERS * 2 + 2)
#define EXPONENT_BARRIERS (LAYERS * 2 * 8)         // offset of the barriers for exponents from those for bytes

__device__ __forceinline__ void as_array(float4 v, float (&w)[4]) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }

// The shared memory of a block: lo bytes of its weights; lo bytes of layer 1's weights to the outputs (EXTRAS), or weights of the outputs to
// parts of layer 1 (FRAGMENTS) or, in blocks that receive them, the shares of their sums (OUTPUTS); partial sums exchanged between
// warps (PARTIALS); from SLOTS on the received states of two rounds, barriers, and the exponents of errors.
struct Board {
  unsigned char *base;
  u32 slots, barriers, exponents;
  __device__ __forceinline__ explicit Board(unsigned char *memory) : base(memory) {
    slots = shared_address(memory + SLOTS);
    barriers = slots + 2 * SLOT_BYTES, exponents = barriers + BARRIERS * 8;
  }
  __device__ __forceinline__ float4 *partials() const { return (float4 *)(base + PARTIALS); }
  __device__ __forceinline__ u32 extras() const { return shared_address(base + EXTRAS); }
  __device__ __forceinline__ u32 fragments(int place) const { return shared_address(base + FRAGMENTS) + place * SHARE_CHUNKS * FRAGMENT_BYTES; }
  __device__ __forceinline__ unsigned char *share(int buffer, int nth) const { return base + OUTPUTS + (buffer * SHARES + nth) * SHARE_BYTES; }
  __device__ __forceinline__ u32 slot(int round) const { return slots + (round & 1) * SLOT_BYTES; }
  // Barriers of a layer's bytes in a round, and of the outputs' shares.
  __device__ __forceinline__ u32 barrier(int layer, int round) const { return barriers + (layer * 2 + (round & 1)) * 8; }
  __device__ __forceinline__ u32 share_barrier(int buffer) const { return barriers + (BARRIERS - 2 + buffer) * 8; }
  template <bool ERRORS> __device__ __forceinline__ void wait(int layer, int round, int errors_from) const {
    barrier_wait(barrier(layer, round), (round >> 1) & 1);
    if (ERRORS) barrier_wait(barrier(layer, round) + EXPONENT_BARRIERS, ((round - errors_from) >> 1) & 1);
  }
  // Units of the errors that a tile sent in that round, for the two samples of this thread.
  __device__ __forceinline__ float2 exponents_of(int round, int tile) const {
    unsigned short both;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(exponents + ((round & 1) * AREA + tile) * 8 + threadIdx.x % 4 * 2));
    return make_float2(__uint_as_float((u32)(both & 255) << 23), __uint_as_float((u32)(both >> 8) << 23));
  }
  __device__ __forceinline__ void add_scaled(float (&v)[4], int round, int tile, uint2 hi, uint2 mid, uint2 lo, Planes x) const {
    Sums sums;
    sums.add(hi, mid, lo, x);
    const float2 size = exponents_of(round, tile);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = fmaf(i & 1 ? size.y : size.x, sums[i], v[i]);
  }
};

__device__ __forceinline__ uint4 look4(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ uint2 look2(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
__device__ __forceinline__ u32 look(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void put(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void put(u32 at, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" :: "r"(at), "r"(v.x), "r"(v.y) : "memory");
}

// Tiles as a thread reads them: four units of one sample, whose planes are three lines of sixteen bytes, with the word of thread t at
// index t ^ plane.
struct Ear {
  u32 hi, mid, lo;
  __device__ __forceinline__ Ear() {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const u32 sample = min(lane / 4, SAMPLES - 1) * 48;         // beyond the last sample: any
    hi = kept(sample + t * 4), mid = kept(sample + 16 + (t ^ 1) * 4), lo = kept(sample + 32 + (t ^ 2) * 4);
  }
  __device__ __forceinline__ Planes hear(u32 slot, int tile) const {
    slot += tile * TILE_BYTES;
    return {look(hi + slot), look(mid + slot), look(lo + slot)};
  }
};

// Location of a thread's four neurons: units g and g + 8 of a tile, samples 2t and 2t + 1 of its cluster (as a float4: g, g, g+8, g+8).
struct Spot {
  const Args &a;
  const int r, lane, first_sample, samples, n, tile, size;
  u32 reals = 0;
  int first, last, start;                        // blocks that receive this layer, and the one this warp starts with
  u32 to, slots;                                 // offset of this tile in a slot, and the slots here

  __device__ __forceinline__ Spot(const Args &a, const Board &board, int r, int group, int n, int tile, bool owns, int heard)
      : a(a), r(r), lane(threadIdx.x % 32), first_sample(group * B / GROUPS),
        samples((group + 1) * B / GROUPS - group * B / GROUPS), n(n), tile(tile), size(width(n)), slots(board.slots) {
#pragma unroll
    for (int i = 0; i < 4; i++) reals |= (u32)(owns && unit(i) < size && sample(i) < samples) << i;
    // Stagger the order, so that warps do not all start with the same block.
    const int count = heard >> 8;
    first = heard & 255, last = first + count, start = first + (tile + tile / 8) % max(count, 1);
    to = (place_of(n) + tile) * TILE_BYTES;
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

  // Send four numbers, each times its sample's scale, to the blocks that receive this layer. UNIT: they are from 0 to 1, with scale LARGEST.
  template <bool OF_OUTPUTS, bool UNIT> __device__ __forceinline__ void publish(const Board &board, float4 v, float2 scale, int round) const {
    const int t = lane % 4, listeners = OF_OUTPUTS ? 1 : EQUALLY_HEARD ? HEARD1 >> 8 : last - first;
    constexpr int MOST_LISTENERS = OF_OUTPUTS ? 1 : LISTENERS;
    const u32 where = board.slot(round) - slots + to + lane / 4 * 48 + t * 16, counter = board.barrier(n, round) - slots;
    u32 place[MOST_LISTENERS], count[MOST_LISTENERS];
    int rank = start;
#pragma unroll
    for (int i = 0; i < MOST_LISTENERS; i++) {
      const u32 base = slots + way_to(rank, slots);
      place[i] = base + where, count[i] = base + counter;
      rank = rank + 1 == last ? first : rank + 1;
      // The compiler would schedule this last, when everything waits for it.
      asm volatile("" : "+r"(place[i]), "+r"(count[i]));
    }
    auto split = [](float v, float scale) { return UNIT ? digits_of_unit(v) : digits(v * scale); };
    const u32 p = split(v.x, scale.x), q = split(v.y, scale.y), r = split(v.z, scale.x), s = split(v.w, scale.y);
    // From two samples of two units per thread to one sample of four.
    const u32 upper = transposed(bytes(p, q, 0x6521)), lower = transposed(bytes(r, s, 0x6521));
    const u32 last_bytes = transposed(bytes(bytes(p, r, 0x0040), bytes(q, s, 0x0040), 0x5410));
    const u32 plane[3] = {bytes(upper, lower, 0x7531), bytes(upper, lower, 0x6420), bytes(last_bytes, last_bytes, 0x3120)};
    // Sixteen bytes at a time are fastest: of four threads with the same sample, three take one plane each. Thread t gets the word of thread
    // t ^ i for index i (see Ear).
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int theirs = t ^ i;
      const u32 send = theirs == 0 ? plane[0] : theirs == 1 ? plane[1] : plane[2];
      word[i] = i ? __shfl_xor_sync(~0u, send, i) : send;
    }
    const uint4 packet = make_uint4(word[0], word[1], word[2], word[3]);
    // Use a compile-time count where possible: a conditional store costs a branch.
    if (t < 3 && lane < 4 * samples)
#pragma unroll
      for (int i = 0; i < MOST_LISTENERS; i++)
        if (i < listeners) push(place[i], packet, count[i]);
  }

#if METHOD == 1
  // Send errors, which can have any size, as multiples of a power of two per sample of a tile.
  template <bool OF_OUTPUTS> __device__ __forceinline__ void publish_errors(const Board &board, float4 v, int round) const {
    u32 most[2] = {__float_as_uint(fmaxf(fabsf(v.x), fabsf(v.z))), __float_as_uint(fmaxf(fabsf(v.y), fabsf(v.w)))};
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], x));
      // The exponent of the next power of two, clamped so that it and its inverse are normal numbers.
      most[i] = min(max((most[i] + 0x7fffff) >> 23, 30u), 220u);
      scale[i] = LARGEST * __uint_as_float((254 - most[i]) << 23);
    }
    publish<OF_OUTPUTS, false>(board, v, make_float2(scale[0], scale[1]), round);
    const u32 mine = most[0] | most[1] << 8;
    const uint2 all = make_uint2(__shfl_sync(~0u, mine, 0) | __shfl_sync(~0u, mine, 1) << 16, __shfl_sync(~0u, mine, 2) | __shfl_sync(~0u, mine, 3) << 16);
    if (first + lane < last) {
      const u32 way = way_to(first + lane, slots);
      push(way + board.exponents + ((round & 1) * AREA + place_of(n) + tile) * 8, all, way + board.barrier(n, round) + EXPONENT_BARRIERS);
    }
  }
#endif
};
