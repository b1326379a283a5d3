// The convolution W01 * h1 and its transpose on the tensor cores, by differences: a layer sends its neighbour its change since
// the last time, in halves, and the neighbour adds the products to a running total. What a half cannot hold is sent the next
// time, or at once if it would matter.
//
// Convolution: 64 channels x 64 places; the two warpgroups take 16 channels of h1 each and exchange halves of the sums.
// Transpose: 64 rows are 32 channels for each of two taps, dy and dy + 2, so that the second half of the rows belongs 24
// places further on, three tiles, in the same lane of another warp. The last tap, dy = 4, has no partner: its second half is
// dropped. Warpgroup 0 sums tiles 0 to 6, for the last tap 6 to 11; warpgroup 1 tiles 7 to 13, for the last tap 12 to 17.

#define MOVED 1                        // something is sent
#define LOW 2                          // it is large enough for the low parts of the weights to matter
#define REST 4                         // and for the remainder that halves could not hold
#define FAR 16                         // and for sums to be kept short: the matrix units truncate where float32 rounds
#define FAR_ABOVE 0.0625f
#define STATE_SCALE 16384.0f           // states differ by at most 2
#define ERROR_SCALE 1024.0f

// Thresholds for a difference: to be sent at all, to need the low parts of the weights, to need its remainder sent at once. In
// a free phase what is not sent now is sent later, and all of it fades as the phase settles; the effect of a nudge is small
// itself and is tracked closely.
struct Care { float tell, low, rest; };
#define STILL 5.9604644775390625e-8f   // 2^-24, the last bit of 1
__device__ __forceinline__ Care free_care() { return {STILL, 6.103515625e-5f, 9.765625e-4f}; }          // 2^-14, 2^-10
__device__ __forceinline__ Care nudged_care() { return {0.f, 7.62939453125e-6f, 1.220703125e-4f}; }     // 2^-17, 2^-13

struct Sent { float h1[UNITS], u[16]; };         // u: the four places of each unit

// One number: the half to send, from the value and what has been sent so far.
struct Telling {
  float most = 0.f;
  unsigned any = 0;
  __device__ __forceinline__ unsigned short tell(float v, float &sent, float scale, const Care &care) {
    float d = v - sent;
    d = fabsf(d) <= care.tell ? 0.f : d;
    const unsigned short h = half_of(d * scale);
    sent = fmaf(float_of(h), 1.0f / scale, sent);
    any |= h;
    most = fmaxf(most, fabsf(d));
    return h;
  }
  __device__ __forceinline__ int bits(const Care &care) const {
    if (!(any & 0x7fff)) return 0;
    return MOVED | (most > care.low ? LOW : 0) | (most > care.rest ? REST : 0) | (most > FAR_ABOVE ? FAR : 0);
  }
};

// Write the changes of h1 and record them; returns what the products have to do.
template <class Value>
__device__ __forceinline__ int tell_h1(unsigned char *memory, const Seat &seat, Sent &sent, float scale, const Care &care, Value value) {
  Telling telling;
  unsigned char *to = memory + MAP1 + (seat.row >> 3) * GROUP1 + seat.place(0) * 16 + (seat.row & 7) * 2;
#pragma unroll
  for (int i = 0; i < UNITS; i++)
    if (i < 16 || seat.tiles == 5)
      *(unsigned short *)(to + i / 4 * 128 + (i >> 1 & 1) * GROUP1 + (i & 1) * 16) = telling.tell(value(i), sent.h1[i], scale, care);
  return telling.bits(care);
}

// The same for the unpooled h0: `where` holds two bits per unit, the place of its maximum.
__device__ __forceinline__ int tell_u(unsigned char *memory, const Seat &seat, Sent &sent, float scale, const Care &care,
                                      const float (&h0)[4], unsigned where) {
  Telling telling;
  unsigned char *to = memory + MAPU + 2 * seat.warp * GROUPU + (FRONT + 48 * seat.group + 2 * seat.c) * 16 + (seat.lane >> 2) * 2;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int u = i / 4, k = i % 4;
    const float v = (where >> (2 * u) & 3) == k ? h0[u] : 0.f;
    *(unsigned short *)(to + (u >> 1) * GROUPU + ((u & 1) * 24 + (k >> 1) * 12 + (k & 1)) * 16) =
        telling.tell(v, sent.u[i], scale, care);
  }
  return telling.bits(care);
}

// Restore the zeros around the unpooled map, which exchanges of sums overwrite.
__device__ __forceinline__ void clear_borders(unsigned char *memory) {
  const int per_group = FRONT + 28, all = 8 * per_group + FRONT;
  for (int i = threadIdx.x; i < all; i += THREADS) {
    const int group = i / per_group, k = i % per_group;
    const int place = k < FRONT ? k : FRONT + (k - FRONT) / 4 * 12 + 8 + (k - FRONT) % 4;
    *(uint4 *)(memory + MAPU + group * GROUPU + place * 16) = make_uint4(0, 0, 0, 0);
  }
}

// Columns of taps that a product sums over: 0 to 4 with the low parts of the weights, 5 to 9 with the high parts.
struct Columns {
  int from, step;
  __device__ int dx(int q) const { return q < 5 ? q : q - 5; }
};

// f += the convolution.
__device__ __forceinline__ void convolve(float (&f)[32], unsigned base, int group, Columns columns) {
  const Operand filters(base + group * 2048, 128, 1024), sent(base + MAP1 + group * 2 * GROUP1, 192, GROUP1);
  hold(f);
  products_begin();
#pragma unroll 1
  for (int q = columns.from; q < 10; q += columns.step) {
    const int a = q * (5 * TAP_BYTES / 16), b = columns.dx(q);
#pragma unroll
    for (int slot = 0; slot < 5; slot++) {
      const int dy = slot == 1 ? 2 : slot == 2 ? 1 : slot;
      products_64(f, filters.by(a + slot * (TAP_BYTES / 16)), sent.by(b + dy * 12));
    }
  }
  products_end();
  hold(f);
}

// Each warpgroup keeps four rows of places and receives the other's sums for them.
__device__ __forceinline__ void join_halves(unsigned char *memory, const Seat &seat, const float (&f)[32], float (&sum)[16]) {
  float4 *x = (float4 *)(memory + MAPU) + (threadIdx.x & 127);
  const bool upper = seat.group;
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    x[(upper * 4 + i / 4) * 128] = upper ? make_float4(f[i], f[i + 1], f[i + 2], f[i + 3])
                                         : make_float4(f[16 + i], f[17 + i], f[18 + i], f[19 + i]);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const float4 o = x[(!upper * 4 + i / 4) * 128];
    sum[i] = (upper ? f[16 + i] : f[i]) + o.x;
    sum[i + 1] = (upper ? f[17 + i] : f[1 + i]) + o.y;
    sum[i + 2] = (upper ? f[18 + i] : f[2 + i]) + o.z;
    sum[i + 3] = (upper ? f[19 + i] : f[3 + i]) + o.w;
  }
  __syncthreads();
}

// Raw sums of the transpose: for the pairs of taps, and for the last tap.
struct Sums { float pairs[28], last[24]; };

__device__ __forceinline__ void transpose(Sums &s, unsigned base, const Seat &seat, Columns columns) {
  const Operand filters(base, 1024, 128), sent(base + MAPU + (FRONT + seat.group * 56) * 16, 128, GROUPU);
  const Operand told_last(base + MAPU + (FRONT + seat.group * 48) * 16, 128, GROUPU);
  hold(s.pairs);
  hold(s.last);
  products_begin();
#pragma unroll 1
  for (int q = columns.from; q < 10; q += columns.step) {
    const int a = q * (5 * TAP_BYTES / 16), b = -columns.dx(q);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int filter = a + 16 * k, from = b + k * (GROUPU / 8);
      products_56(s.pairs, filters.by(filter), sent.by(from));
      products_48(s.last, filters.by(filter + TAP_BYTES / 4), told_last.by(from));
      products_56(s.pairs, filters.by(filter + TAP_BYTES / 8), sent.by(from - 12));
    }
  }
  products_end();
  hold(s.pairs);
  hold(s.last);
}

// A thread's share of them: for its own tiles, and for tiles of others, exchanged in two rounds.
struct Shares { float own[UNITS], first[UNITS], then[12]; };

__device__ __forceinline__ void share_out(Shares &shares, const float (&sum)[28], const float (&last)[24], const Seat &seat) {
  // Kinds 0 and 2 are the warps of the first taps, 1 and 3 those of the second; see Seat::first for who owns which tile.
  const int kind = seat.kind;
  auto choose = [&](float a, float b, float c, float d) { return kind & 2 ? (kind & 1 ? d : c) : (kind & 1 ? b : a); };
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    shares.own[i] = choose(sum[i], sum[8 + i], i < 16 ? last[8 + i] : 0.f, i < 16 ? sum[i] : 0.f);
    const float lower = (i < 8 ? sum[20 + i] : 0.f) + (i >= 4 ? last[i - 4] : 0.f);
    const float upper = (i < 16 ? sum[12 + i] : 0.f) + (i >= 8 && i < 16 ? last[i - 8] : 0.f);
    shares.first[i] = kind & 2 ? upper : lower;
  }
#pragma unroll
  for (int i = 0; i < 12; i++) shares.then[i] = choose(i < 8 ? last[16 + i] : 0.f, i < 8 ? sum[i] : 0.f, sum[i], sum[16 + i]);
}

// shares.own += the other warps' sums for the tiles of this thread. Reuses the memory of both maps, which have been read.
__device__ __forceinline__ void join_shares(unsigned char *memory, const Seat &seat, Shares &shares) {
  float4 *x = (float4 *)(memory + MAP1) + (seat.warp & 1) * 32 + seat.lane;
  const int kind = seat.kind;
  auto put = [&](int slot, const float *v) { x[slot * 64] = make_float4(v[0], v[1], v[2], v[3]); };
  auto take = [&](int slot, int j) {
    const float4 o = x[slot * 64];
    shares.own[4 * j] += o.x, shares.own[4 * j + 1] += o.y, shares.own[4 * j + 2] += o.z, shares.own[4 * j + 3] += o.w;
  };
  __syncthreads();
  // Slots 0 to 8: `first`, from kind 0 to 1 and from 2 to 3. After them `then`: from 0 to 3, 2 to 1, 1 to 0, 3 to 2.
  const int later = kind == 0 ? 9 : kind == 2 ? 11 : kind == 1 ? 14 : 16;
#pragma unroll
  for (int j = 0; j < 5; j++)
    if (!(kind & 1) && (j < 4 || !seat.group)) put(5 * seat.group + j, shares.first + 4 * j);
#pragma unroll
  for (int j = 0; j < 3; j++)
    if (j < 2 || seat.group) put(later + j, shares.then + 4 * j);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 5; j++)
    if (kind & 1 && (j < 4 || !seat.group)) take(5 * seat.group + j, j);
#pragma unroll
  for (int j = 0; j < 3; j++) {
    if (kind == 3 && j < 2) take(9 + j, j);
    if (kind == 1) take(11 + j, 2 + j);
    if (kind == 0 && j < 2) take(14 + j, 3 + j);
    if (kind == 2) take(16 + j, j);
  }
  __syncthreads();
}
