// One step of the net by the threads of a block, and what it stores for the other kernels.

struct Small {
  float s0[16], target[16], error[16], gain[16], bias[16];
  float partial[8][16], residual[8];
  float marked[2][16];                           // the outputs before and after the marked step
  unsigned char heard[16], unpooled[16];         // changes sent by each warp, for h1 and h0; the ninth: whether the outputs recur
};

// The union over all warps, uniform across threads in a way the compiler can see.
__device__ __forceinline__ int told_by_all(const unsigned char *bits, int lane) {
  return __reduce_or_sync(~0u, lane < 9 ? bits[lane] : 0);
}

// Detecting that a free phase has settled. In a silent step neither map sends anything: z, total and what has been sent stay
// unchanged, and only h0 and the output still move, each driven by the other alone. Two silent steps of one silence with the
// same outputs before and after them end in the same state, bit for bit: h0 is computed from the output before the step or, if
// the schedule alternates and this step skips h0, in the step before, which skipped the output and was silent too. If the
// second comes an even number of steps after the first, everything after it is a repetition, since a step depends only on the
// state and, when alternating, on the parity of its index.
// At a fixed point the cycle has two steps. It may be longer if last bits oscillate forever: synchronous steps are two
// independent chains that may settle a last bit apart and appear in turn.
//
// Steps are counted from the start of their silence. Steps 2, 4, 8, ... are marked, and each even step is compared with the
// last marked one before it: sooner or later a cycle of any length is found.
#define AGAIN 8                        // the outputs equal those of the marked step
__device__ __forceinline__ bool same(float a, float b) { return __float_as_int(a) == __float_as_int(b); }
__device__ __forceinline__ bool marks(int silent) { return !(silent & (silent - 1)); }
__device__ __forceinline__ bool repeats(int silent) { return silent > 2 && !(silent & 1); }
__device__ __forceinline__ int round_of(int silent) { return silent - (1 << (31 - __clz(silent - 1))); }

// z += W01 * (change of h1). Sums of large numbers are kept short, one column of taps each; what halves could not hold is sent
// in a second round.
template <class Value>
__device__ __forceinline__ void hear(unsigned char *memory, const Seat &seat, Sent &sent, int bits, float scale, const Care &care,
                                     float (&z)[16], unsigned (&lost)[8], Value value) {
  const unsigned base = shared_address(memory);
  float sum[32], joined[16];
#pragma unroll
  for (int i = 0; i < 32; i++) sum[i] = 0.f;
#pragma unroll 1
  for (int round = 0; round < (bits & REST ? 2 : 1); round++) {
    if (round) {
      __syncthreads();
      tell_h1(memory, seat, sent, scale, care, value);
      show_to_products();
      __syncthreads();
    }
    const bool apart = !round && bits & FAR, low = !round && bits & LOW;
#pragma unroll 1
    for (int dx = 0; dx < (apart ? 5 : 1); dx++) {
      float f[32];
#pragma unroll
      for (int i = 0; i < 32; i++) f[i] = 0.f;
      convolve(f, base, seat.group, {apart ? dx : (low ? 0 : 5), apart ? 5 : 1});
#pragma unroll
      for (int i = 0; i < 32; i++) sum[i] += f[i];
    }
  }
  join_halves(memory, seat, sum, joined);
  const float unit = 1.0f / (WEIGHT_SCALE * scale);
#pragma unroll
  for (int i = 0; i < 16; i += 2) add_exactly(z[i], z[i + 1], lost[i / 2], joined[i] * unit, joined[i + 1] * unit);
}

// total += W01^T (change of the unpooled h0), likewise.
__device__ __forceinline__ void feel(unsigned char *memory, const Seat &seat, Sent &sent, int bits, float scale, const Care &care,
                                     float (&total)[UNITS], unsigned (&lost)[UNITS / 2], const float (&h0)[4], unsigned where) {
  const unsigned base = shared_address(memory);
  float pairs[28];
  Sums s;
#pragma unroll
  for (int i = 0; i < 28; i++) pairs[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 24; i++) s.last[i] = 0.f;  // its sums are short enough
#pragma unroll 1
  for (int round = 0; round < (bits & REST ? 2 : 1); round++) {
    if (round) {
      __syncthreads();
      tell_u(memory, seat, sent, scale, care, h0, where);
      show_to_products();
      __syncthreads();
    }
    const bool apart = !round && bits & FAR, low = !round && bits & LOW;
#pragma unroll 1
    for (int dx = 0; dx < (apart ? 5 : 1); dx++) {
#pragma unroll
      for (int i = 0; i < 28; i++) s.pairs[i] = 0.f;
      transpose(s, base, seat, {apart ? dx : (low ? 0 : 5), apart ? 5 : 1});
#pragma unroll
      for (int i = 0; i < 28; i++) pairs[i] += s.pairs[i];
    }
  }
  Shares shares;
  share_out(shares, pairs, s.last, seat);
  join_shares(memory, seat, shares);
  const float unit = 1.0f / (WEIGHT_SCALE * scale);
#pragma unroll
  for (int i = 0; i < UNITS; i += 2) add_exactly(total[i], total[i + 1], lost[i / 2], shares.own[i] * unit, shares.own[i + 1] * unit);
}

// Changes too small to be sent are never sent in the nudged phase, where they would be mistaken for the nudge's effect.
template <class Value>
__device__ __forceinline__ void absorb(Sent &sent, Value h1, const float (&h0)[4], unsigned where) {
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const float v = h1(i);
    if (fabsf(v - sent.h1[i]) <= STILL) sent.h1[i] = v;
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float v = (where >> (i / 4 * 2) & 3) == i % 4 ? h0[i / 4] : 0.f;
    if (fabsf(v - sent.u[i]) <= STILL) sent.u[i] = v;
  }
}

// The maximum of each zone, the first in row order, and its place.
__device__ __forceinline__ unsigned pool(const float (&z)[16], float (&value)[4]) {
  unsigned where = 0;
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const int e = u >> 1, p = u & 1;
    value[u] = z[8 * p + 2 * e];
    unsigned k = 0;
#pragma unroll
    for (int q = 1; q < 4; q++) {
      const float v = z[8 * p + 4 * (q >> 1) + 2 * e + (q & 1)];
      if (v > value[u] || v != v) value[u] = v, k = q;
    }
    where |= k << (2 * u);
  }
  return where;
}

__device__ __forceinline__ float at(const float (&z)[16], int u, unsigned where) {
  const int e = u >> 1, p = u & 1, k = where >> (2 * u) & 3;
  const float top = k & 1 ? z[8 * p + 2 * e + 1] : z[8 * p + 2 * e];
  const float bottom = k & 1 ? z[8 * p + 4 + 2 * e + 1] : z[8 * p + 4 + 2 * e];
  return k & 2 ? bottom : top;
}

// The weights Wfc of a thread's four units of h0, kept in device memory because the products need the registers.
__device__ __forceinline__ void fetch(float (&w)[NO][4], const float4 *from) {
#pragma unroll
  for (int k = 0; k < NO; k++)
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(w[k][0]), "=f"(w[k][1]), "=f"(w[k][2]), "=f"(w[k][3])
                 : "l"(from + k * THREADS));
}

// Each half of the lanes keeps half of the 2 HALF sums.
template <int HALF> __device__ __forceinline__ void fold(float (&v)[16], int lane) {
  const bool upper = lane & (2 * HALF);
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float sent = upper ? v[i] : v[i + HALF], kept = upper ? v[i + HALF] : v[i];
    v[i] = kept + __shfl_xor_sync(~0u, sent, 2 * HALF);
  }
}

// Write each warp's part of Wfc h0 to shared memory.
__device__ __forceinline__ void read_out(Small &m, const Seat &seat, const float (&w)[NO][4], const float (&h0)[4]) {
  float v[16];
#pragma unroll
  for (int k = 0; k < 16; k++) v[k] = 0.f;
#pragma unroll
  for (int k = 0; k < NO; k++) v[k] = (w[k][0] * h0[0] + w[k][1] * h0[1]) + (w[k][2] * h0[2] + w[k][3] * h0[3]);
  fold<8>(v, seat.lane);
  fold<4>(v, seat.lane);
  fold<2>(v, seat.lane);
  fold<1>(v, seat.lane);
  v[0] += __shfl_xor_sync(~0u, v[0], 1);
  if (!(seat.lane & 1)) m.partial[4 * seat.group + seat.warp][seat.lane >> 1] = v[0];
}

__device__ __forceinline__ float sum_of_warps(const Small &m, int k) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < 8; w++) sum += m.partial[w][k];
  return sum;
}

__device__ __forceinline__ void put_parts(unsigned char *to, size_t low, float v) {
  const unsigned short high = half_of(v * PAIR_SCALE);
  *(unsigned short *)to = high;
  *(unsigned short *)(to + low) = half_of(fmaf(v, PAIR_SCALE, -float_of(high)));
}

// Store the maps of pair 0 or 1 for `gather`.
template <class Value> __device__ __forceinline__ void leave_h(unsigned char *pairs, const Seat &seat, int pair, Value value) {
#pragma unroll
  for (int i = 0; i < UNITS; i++)
    if (i / 4 < seat.tiles)
      put_parts(pairs + 2 * pair * PAIR_H + ((seat.row >> 3) + (i >> 1 & 1)) * GROUP1 + (seat.place(i / 4) + (i & 1)) * 16 + (seat.row & 7) * 2,
                PAIR_H, value(i));
}
template <class Value> __device__ __forceinline__ void leave_u(unsigned char *pairs, const Seat &seat, int pair, Value value) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int u = i / 4, k = i % 4, place = (4 * seat.group + 2 * (u & 1) + (k >> 1)) * 8 + 2 * seat.c + (k & 1);
    put_parts(pairs + 4 * PAIR_H + 2 * pair * PAIR_U + ((2 * seat.warp + (u >> 1)) * 64 + place) * 16 + (seat.lane >> 2) * 2, PAIR_U,
              value(u, k));
  }
}

template <class Value>
__device__ void leave_state(float *to, const Seat &seat, const Small &m, const float (&h0)[4], Value h1) {
  if (threadIdx.x < 16) to[threadIdx.x] = m.s0[threadIdx.x];
#pragma unroll
  for (int u = 0; u < 4; u++) to[16 + seat.zone(u)] = h0[u];
#pragma unroll
  for (int i = 0; i < UNITS; i++)
    if (i / 4 < seat.tiles) to[16 + WIDE + (seat.row + 8 * (i >> 1 & 1)) * PLACES + seat.place(i / 4) + (i & 1)] = h1(i);
}
