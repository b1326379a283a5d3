// The filters next to the image. They change once per iteration: their pooled response is computed at its start, and their
// gradient at its end from the change of h1.

// h1's drive P(W12 * x + b1) into `total`, and two bits per unit for the place of the maximum. Uses the maps' memory.
__device__ __forceinline__ void see(const Args &a, unsigned char *memory, const Seat &seat, unsigned live, int sample, int r,
                                    float (&total)[UNITS], unsigned (&where)[2]) {
  float *x = (float *)(memory + MAP1), *w = x + CI * IH * IW;
  for (int i = threadIdx.x; i < CI * IH * IW; i += THREADS) x[i] = a.images[(size_t)sample * CI * IH * IW + i];
  for (int i = threadIdx.x; i < C1 * CI * WINDOW; i += THREADS) w[i] = a.W12[(size_t)r * C1 * CI * WINDOW + i];
  __syncthreads();
  where[0] = where[1] = 0;
#pragma unroll
  for (int i = 0; i < UNITS; i++) total[i] = 0.f;
#pragma unroll 1
  for (int e = 0; e < 2; e++) {
    const int channel = seat.row + 8 * e;
    if (channel >= C1) continue;
    const float bias = a.b1 ? a.b1[(size_t)r * C1 + channel] : 0.f;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      if ((i >> 1 & 1) != e || !(live >> i & 1)) continue;
      const int p = seat.place(i / 4) + (i & 1);
      const float *corner = x + p / 12 * 2 * IW + p % 12 * 2;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
      for (int c = 0; c < CI; c++)
#pragma unroll
        for (int y = 0; y <= KS; y++) {
          float line[KS + 1];
#pragma unroll
          for (int q = 0; q <= KS; q++) line[q] = corner[(c * IH + y) * IW + q];
          const float *filter = w + (channel * CI + c) * WINDOW;
#pragma unroll
          for (int dx = 0; dx < KS; dx++) {
            if (y < KS) {
              const float v = filter[y * KS + dx];
              sum[0] = fmaf(v, line[dx], sum[0]);
              sum[1] = fmaf(v, line[dx + 1], sum[1]);
            }
            if (y > 0) {
              const float v = filter[(y - 1) * KS + dx];
              sum[2] = fmaf(v, line[dx], sum[2]);
              sum[3] = fmaf(v, line[dx + 1], sum[3]);
            }
          }
        }
      int best = 0;
#pragma unroll
      for (int k = 1; k < 4; k++)
        if (sum[k] > sum[0] || sum[k] != sum[k]) sum[0] = sum[k], best = k;
      total[i] = sum[0] + bias;
      where[i / 16] |= best << (2 * (i % 16));
    }
  }
  __syncthreads();
}

// g12 of this sample: P^-1(moved) * x and, last, the sum over places, from the change of each unit of h1. Uses the weights'
// memory, which is no longer needed.
__device__ __forceinline__ void learn_image(const Args &a, unsigned char *memory, const Seat &seat, int sample, int cell,
                                            const float (&moved)[UNITS], const unsigned (&where)[2]) {
  float *x = (float *)memory, *sums = x + CI * IH * IW;
  for (int i = threadIdx.x; i < CI * IH * IW; i += THREADS) x[i] = a.images[(size_t)sample * CI * IH * IW + i];
  __syncthreads();
  const int wide = CI * WINDOW + 1;
#pragma unroll 1
  for (int e = 0; e < 2; e++) {
    float *to = sums + (seat.kind * 32 + seat.row + 8 * e) * wide;
#pragma unroll 1
    for (int c = 0; c < CI; c++) {
      float sum[WINDOW + 1];
#pragma unroll
      for (int q = 0; q <= WINDOW; q++) sum[q] = 0.f;
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        if ((i >> 1 & 1) != e || moved[i] == 0.f) continue;
        const int p = seat.place(i / 4) + (i & 1), k = where[i / 16] >> (2 * (i % 16)) & 3;
        const float *from = x + (c * IH + p / 12 * 2 + (k >> 1)) * IW + p % 12 * 2 + (k & 1);
#pragma unroll
        for (int q = 0; q < WINDOW; q++) sum[q] = fmaf(moved[i], from[q / KS * IW + q % KS], sum[q]);
        sum[WINDOW] += moved[i];
      }
#pragma unroll
      for (int q = 0; q <= WINDOW; q++) {
        sum[q] += __shfl_xor_sync(~0u, sum[q], 1);
        sum[q] += __shfl_xor_sync(~0u, sum[q], 2);
        if (seat.c == 0 && (q < WINDOW || c == 0)) to[q < WINDOW ? c * WINDOW + q : CI * WINDOW] = sum[q];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * wide; i += THREADS)
    a.g12[(size_t)cell * 32 * wide + i] = (sums[i] + sums[32 * wide + i]) + (sums[2 * 32 * wide + i] + sums[3 * 32 * wide + i]);
}
