// The weights next to the input, by far the largest: one pass over them applies the last iteration's gradient and computes
// this iteration's drive. A block of 256 threads holds a tile of ROWS x COLUMNS float4.

#define ROWS 64                        // rows per block
#define MINE (ROWS / 4)                // rows per thread
#define TILES ((H + ROWS - 1) / ROWS)
#define INPUT_BLOCKS (TILES * SPLITS)  // per network
#define GROUP ((B + 3) / 4)            // samples per thread of the drive
#define XS (COLUMNS * 4)

struct Tile {
  float W[ROWS][XS];
  float x[B][XS], x_next[B][XS];
  float du[B][ROWS];
};

__device__ void update_input_tile(const Job &a, int r, int tile, int split, int it) {
  extern __shared__ __align__(16) unsigned char memory[];
  Tile &m = *(Tile *)memory;
  const int tid = threadIdx.x, R = a.R;
  const bool updates = it > 0, drives = it < a.counters->n;
  const int *now = a.order + (size_t)it * R * B, *last = now - (size_t)R * B;
  const int row0 = tile * ROWS, column0 = split * COLUMNS, width = min(COLUMNS, NI / 4 - column0);
  const int c = tid % COLUMNS, rows = tid / COLUMNS * MINE;
  const bool holds = tid < COLUMNS * 4 && c < width;
  float4 w[MINE];
  float *W = a.W + ((size_t)r * H + row0 + rows) * NI + (column0 + c) * 4;
#pragma unroll
  for (int i = 0; i < MINE; i++)
    w[i] = holds && row0 + rows + i < H ? *(const float4 *)(W + (size_t)i * NI) : zero4();
  for (int e = tid; e < B * COLUMNS; e += 256) {
    const int b = e / COLUMNS, q = e % COLUMNS;
    const size_t at = (column0 + q) * 4;
    if (drives) ((float4 *)m.x_next[b])[q] = q < width ? *(const float4 *)(a.images + (size_t)now[r * B + b] * NI + at) : zero4();
    if (updates) ((float4 *)m.x[b])[q] = q < width ? *(const float4 *)(a.images + (size_t)last[r * B + b] * NI + at) : zero4();
  }
  after_previous();
  if (updates)
    for (int e = tid; e < B * ROWS; e += 256) {
      const int b = e / ROWS, i = e % ROWS;
      m.du[b][i] = row0 + i < H ? a.u[(size_t)(r * B + b) * HP + row0 + i] : 0.f;
    }
  const bool ok = updates && applies(a, it, r);
  __syncthreads();
  if (ok && split == 0 && a.b && tid < ROWS && row0 + tid < H) {
    float sum = 0.f;
#pragma unroll 4
    for (int b = 0; b < B; b++) sum += m.du[b][tid];
    a.b[(size_t)r * H + row0 + tid] -= a.lrb * (1.0f / B) * sum;
  }
  if (holds) {
    // The gradient is summed separately and added once, so that W is rounded once.
    if (ok) {
#pragma unroll
      for (int h = 0; h < MINE; h += 8) {
        float4 sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = zero4();
#pragma unroll 2
        for (int b = 0; b < B; b++) {
          const float4 x = ((const float4 *)m.x[b])[c];
          const float4 p = *(const float4 *)&m.du[b][rows + h], q = *(const float4 *)&m.du[b][rows + h + 4];
          sum[0] = fma4(p.x, x, sum[0]);
          sum[1] = fma4(p.y, x, sum[1]);
          sum[2] = fma4(p.z, x, sum[2]);
          sum[3] = fma4(p.w, x, sum[3]);
          sum[4] = fma4(q.x, x, sum[4]);
          sum[5] = fma4(q.y, x, sum[5]);
          sum[6] = fma4(q.z, x, sum[6]);
          sum[7] = fma4(q.w, x, sum[7]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) w[h + i] = fma4(-a.lr * (1.0f / B), sum[i], w[h + i]);
      }
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (ok && row0 + rows + i < H) *(float4 *)(W + (size_t)i * NI) = w[i];
      ((float4 *)m.W[rows + i])[c] = w[i];
    }
  } else if (tid < COLUMNS * 4) {
#pragma unroll
    for (int i = 0; i < MINE; i++) ((float4 *)m.W[rows + i])[c] = zero4();
  }
  if (!drives) return;
  __syncthreads();
  const int half = tid >> 7, lane = tid & 31, group = (tid >> 5) & 3;
  float sum[ROWS / 32][GROUP];
#pragma unroll
  for (int h = 0; h < ROWS / 32; h++)
#pragma unroll
    for (int q = 0; q < GROUP; q++) sum[h][q] = 0.f;
  const int from = half * ((COLUMNS + 1) / 2), to = half ? COLUMNS : (COLUMNS + 1) / 2;
#pragma unroll 2
  for (int q = from; q < to; q++) {
    float4 p[ROWS / 32];
#pragma unroll
    for (int h = 0; h < ROWS / 32; h++) p[h] = ((const float4 *)m.W[lane + 32 * h])[q];
#pragma unroll
    for (int b = 0; b < GROUP; b++) {
      const float4 x = ((const float4 *)m.x_next[min(group * GROUP + b, B - 1)])[q];
#pragma unroll
      for (int h = 0; h < ROWS / 32; h++)
        sum[h][b] = fmaf(p[h].x, x.x, fmaf(p[h].y, x.y, fmaf(p[h].z, x.z, fmaf(p[h].w, x.w, sum[h][b]))));
    }
  }
  __syncthreads();
  float(*part)[ROWS] = m.du;                     // the second half's sums pass through here
#pragma unroll
  for (int b = 0; b < GROUP; b++)
#pragma unroll
    for (int h = 0; h < ROWS / 32; h++)
      if (half && group * GROUP + b < B) part[group * GROUP + b][lane + 32 * h] = sum[h][b];
  __syncthreads();
#pragma unroll
  for (int b = 0; b < GROUP; b++)
#pragma unroll
    for (int h = 0; h < ROWS / 32; h++) {
      const int sample = group * GROUP + b, row = row0 + lane + 32 * h;
      if (half || sample >= B || row >= HP) continue;
      a.drive[((size_t)(split * R + r) * B + sample) * HP + row] = sum[h][b] + part[sample][lane + 32 * h];
    }
}
