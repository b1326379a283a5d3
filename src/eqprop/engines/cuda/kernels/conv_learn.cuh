// The end of an iteration: the gradient of W01 from the pairs of maps stored by the relaxation, then all updates.

#include "conv_wgmma.cuh"

#define GATHERED 2                     // samples whose gradients of W01 one block sums
#define GROUPS ((B + GATHERED - 1) / GATHERED)
#define LEARNERS 128                   // threads per block

__device__ __forceinline__ void copy_16(unsigned to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// part[r, group, dx, :] = sum over samples and steps of P^-1(u) * h for the taps of one column; one block per (network, group, dx).
extern "C" __global__ __launch_bounds__(LEARNERS) void gather(Args a, int offset) {
  if (a.counters->it + offset >= a.counters->n) return;
  extern __shared__ __align__(128) unsigned char memory[];
  const int dx = blockIdx.x % 5, group = blockIdx.x / 5 % GROUPS, r = blockIdx.x / 5 / GROUPS;
  if (dx >= KS) return;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const unsigned base = shared_address(memory);
  const Operand u(base + 4 * PAIR_H, 1024, 128), h(base + dx * 16, GROUP1, 192);
  float sum[5][16];
#pragma unroll
  for (int i = 0; i < 80; i++) sum[i / 16][i % 16] = 0.f;
  const int last = min(B, (group + 1) * GATHERED);
#pragma unroll 1
  for (int s = group * GATHERED; s < last; s++)
#pragma unroll 1
    for (int t = 0; t < a.steps; t++) {
      const unsigned char *from = a.pairs + ((size_t)(r * B + s) * a.steps + t) * PAIR_BYTES;
      for (int i = tid; i < PAIR_BYTES / 16; i += LEARNERS) copy_16(base + i * 16, from + i * 16);
      copies_done();
      show_to_products();
      __syncthreads();
#pragma unroll
      for (int dy = 0; dy < KS; dy++) {
        float d[16];
#pragma unroll
        for (int i = 0; i < 16; i++) d[i] = 0.f;
        hold(d);
        products_begin();
        // low x high, high x low, high x high, for the first pair and the second: small terms first
#pragma unroll
        for (int q = 0; q < 6; q++) {
          const int pair = q & 1, low_u = q < 2, low_h = q >= 2 && q < 4;
#pragma unroll
          for (int k = 0; k < 4; k++)
            products_32(d, u.by((2 * pair + low_u) * (PAIR_U / 16) + k * 16), h.by((2 * pair + low_h) * (PAIR_H / 16) + dy * 12 + k * 24));
        }
        products_end();
        hold(d);
#pragma unroll
        for (int i = 0; i < 16; i++) sum[dy][i] += d[i];
      }
      __syncthreads();
    }
  float *to = a.part + ((size_t)(r * GROUPS + group) * 25 + dx * 5) * 2048 + (16 * warp + (lane >> 2)) * 32 + 2 * (lane & 3);
#pragma unroll
  for (int dy = 0; dy < KS; dy++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      *(float2 *)(to + dy * 2048 + 8 * i) = make_float2(sum[dy][4 * i], sum[dy][4 * i + 1]);
      *(float2 *)(to + dy * 2048 + 256 + 8 * i) = make_float2(sum[dy][4 * i + 2], sum[dy][4 * i + 3]);
    }
}

__device__ __forceinline__ void pack_weight(unsigned char *packed, int channel, int below, int dy, int dx, float w) {
  const int slot = dy == 1 ? 2 : dy == 2 ? 1 : dy;
  unsigned char *to = packed + (dx * 5 + slot) * TAP_BYTES + (below >> 3) * 1024 + channel * 16 + (below & 7) * 2;
  const unsigned short high = half_of(w * WEIGHT_SCALE);
  *(unsigned short *)(to + HALF_BYTES) = high;
  *(unsigned short *)to = half_of(fmaf(w, WEIGHT_SCALE, -float_of(high)));
}

// The filters W01 in the layout of the relaxation; everything else in `packed` is zero.
extern "C" __global__ void pack(Args a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, r = i / (C0 * C1 * WINDOW), e = i % (C0 * C1 * WINDOW);
  if (r >= a.R) return;
  const int tap = e % WINDOW, below = e / WINDOW % C1, channel = e / WINDOW / C1;
  pack_weight(a.packed + (size_t)r * 2 * HALF_BYTES, channel, below, tap / KS, tap % KS, a.W01[i]);
}

// Blocks of 256 threads per network: W01 by channel pairs and column, Wfc, then the image's filters and the biases.
#define W01_BLOCKS ((C0 * C1 * KS + 255) / 256)
#define WFC_BLOCKS ((NO * C0 * H0H * H0W + 255) / 256)
#define IMAGE_BLOCKS ((C1 * CI * WINDOW + C1 + C0 + NO + 255) / 256)
#define UPDATE_BLOCKS (W01_BLOCKS + WFC_BLOCKS + IMAGE_BLOCKS)

__device__ void update_filters(const Args &a, int r, int e) {
  const int below = e % C1, channel = e / C1 % C0, dx = e / C1 / C0;
  const float unit = -a.lr01 / (PAIR_SCALE * PAIR_SCALE * B);
#pragma unroll
  for (int dy = 0; dy < KS; dy++) {
    const float *from = a.part + ((size_t)r * GROUPS * 25 + dx * 5 + dy) * 2048 + channel * 32 + below;
    float sum = 0.f;
#pragma unroll 10
    for (int g = 0; g < GROUPS; g++) sum += from[(size_t)g * 25 * 2048];
    float *w = a.W01 + (((size_t)r * C0 + channel) * C1 + below) * WINDOW + dy * KS + dx;
    *w = fmaf(unit, sum, *w);
    pack_weight(a.packed + (size_t)r * 2 * HALF_BYTES, channel, below, dy, dx, *w);
  }
}

// w -= lr/B times the sum of `from` over samples, which are `apart` numbers apart, each a sum of RUN numbers.
template <int RUN> __device__ __forceinline__ void descend(float *w, float lr, const float *from, int apart) {
  float sum = 0.f;
#pragma unroll 10
  for (int b = 0; b < B; b++) {
    float one = 0.f;
#pragma unroll
    for (int i = 0; i < RUN; i++) one += from[(size_t)b * apart + i];
    sum += one;
  }
  *w -= lr * (1.0f / B) * sum;
}

__device__ void update_small(const Args &a, int r, int e) {
  const int wide = CI * WINDOW + 1, cell = r * B;
  if (e < C1 * CI * WINDOW)
    return descend<1>(a.W12 + (size_t)r * C1 * CI * WINDOW + e, a.lr12,
                   a.g12 + (size_t)cell * 32 * wide + e / (CI * WINDOW) * wide + e % (CI * WINDOW), 32 * wide);
  e -= C1 * CI * WINDOW;
  if (e < C1) {
    if (a.b1) descend<1>(a.b1 + r * C1 + e, a.lrb1, a.g12 + (size_t)cell * 32 * wide + e * wide + CI * WINDOW, 32 * wide);
    return;
  }
  e -= C1;
  if (e < C0) {
    if (a.b0) descend<ZONES>(a.b0 + r * C0 + e, a.lrb0, a.g0 + (size_t)cell * WIDE + e * ZONES, WIDE);
    return;
  }
  e -= C0;
  if (e < NO && a.bfc) descend<1>(a.bfc + r * NO + e, a.lrbfc, a.gs + (size_t)cell * 16 + e, 16);
}

extern "C" __global__ __launch_bounds__(256) void update(Args a, int offset) {
  const int it = a.counters->it + offset, r = blockIdx.x / UPDATE_BLOCKS, block = blockIdx.x % UPDATE_BLOCKS;
  if (it >= a.counters->n) return;
  const bool ok = applies(a, r);
  int e = block * 256 + threadIdx.x;
  if (block < W01_BLOCKS) {
    if (ok && e < C0 * C1 * KS) update_filters(a, r, e);
    return;
  }
  e -= W01_BLOCKS * 256;
  if (block < W01_BLOCKS + WFC_BLOCKS) {
    const int units = C0 * H0H * H0W, unit = e % units, k = e / units, zone = unit % (H0H * H0W);
    if (ok && e < NO * units)
      descend<1>(a.Wfc + (size_t)r * NO * units + e, a.lrfc,
              a.gfc + ((size_t)r * B * NO + k) * WIDE + unit / (H0H * H0W) * ZONES + zone / H0W * 4 + zone % H0W, NO * WIDE);
    return;
  }
  e -= WFC_BLOCKS * 256;
  if (ok) update_small(a, r, e);
  if (block == UPDATE_BLOCKS - 1 && threadIdx.x == 0) count(a, it, r, ok);
}
