// A tile of 64 x 64 of the weights between two moving layers: the sum of outer products, then the step.
struct Outer {
  float left[B][64], right[B][64];
};

#define LOADS ((2 * B * 16 + 255) / 256)   // float4s of a page that a thread brings

__device__ void update_tile(const Args &a, int r, int n, int row0, int column0, int it) {
  extern __shared__ __align__(16) unsigned char memory[];
  Outer *page = (Outer *)memory;
  const Job &job = a.job;
  const int tid = threadIdx.x, N = width(n), M = width(n + 1), NP = (N + 15) / 16 * 16, MP = (M + 15) / 16 * 16;
  if (!applies(job, it, r)) return;
  const int i0 = tid / 16 * 4, j0 = tid % 16 * 4;
  float4 sum[4] = {zero4(), zero4(), zero4(), zero4()}, next[LOADS];
  float bias = 0.f;
  const int parts = METHOD == 0 ? 2 : 2 * job.K;
  // EP: last rates minus free rates. BPTT: errors with rates, rates with errors, for every step.
  auto bring = [&](int q) {
    const float *left = METHOD == 0 ? a.rates[n] : (q & 1 ? a.rates[n] : a.errors[n]);
    const float *right = METHOD == 0 ? a.rates[n + 1] : (q & 1 ? a.errors[n + 1] : a.rates[n + 1]);
    const size_t slot = ((size_t)(METHOD == 0 ? q : q >> 1) * job.R + r) * B;
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      const int e = tid + 256 * l, b = e / 32, i = e % 16 * 4;
      const bool isright = e % 32 >= 16;
      const int at = (isright ? column0 : row0) + i, wide = isright ? MP : NP;
      next[l] = b < B && at < wide ? *(const float4 *)((isright ? right : left) + (slot + b) * wide + at) : zero4();
    }
  };
  bring(0);
  for (int q = 0; q < parts; q++) {
    Outer &m = page[q & 1];
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      const int e = tid + 256 * l, b = e / 32, i = e % 16 * 4;
      if (b < B) *(float4 *)(e % 32 >= 16 ? &m.right[b][i] : &m.left[b][i]) = next[l];
    }
    if (q + 1 < parts) bring(q + 1);
    __syncthreads();
    const float sign = METHOD == 0 && q == 0 ? -1.0f : 1.0f;
#pragma unroll 4
    for (int b = 0; b < B; b++) {
      const float4 x = sign * *(const float4 *)&m.left[b][i0], y = *(const float4 *)&m.right[b][j0];
      sum[0] = fma4(x.x, y, sum[0]);
      sum[1] = fma4(x.y, y, sum[1]);
      sum[2] = fma4(x.z, y, sum[2]);
      sum[3] = fma4(x.w, y, sum[3]);
    }
    if (column0 == 0 && tid < 64 && (METHOD == 0 || !(q & 1)))
#pragma unroll 4
      for (int b = 0; b < B; b++) bias += sign * m.left[b][tid];
  }
  const float unit = METHOD == 0 ? -1.0f / job.beta : 1.0f, rate = -a.lr[n] * unit * (1.0f / B);
  for (int i = 0; i < 4; i++) {
    const int row = row0 + i0 + i;
    float *w = a.W[n] + ((size_t)r * N + row) * M + column0 + j0;
    if (row < N && column0 + j0 + 3 < M && M % 4 == 0) {
      *(float4 *)w = fma4(rate, sum[i], *(float4 *)w);
    } else if (row < N) {
      const float v[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
      for (int j = 0; j < 4; j++)
        if (column0 + j0 + j < M) w[j] += rate * v[j];
    }
  }
  if (column0 == 0 && tid < 64 && row0 + tid < N && a.b[n]) a.b[n][(size_t)r * N + row0 + tid] -= a.lrb[n] * unit * (1.0f / B) * bias;
}

// The first blocks of a network hold a tile of the input weights each, the next a tile of the others, the last one its counts.
extern "C" __global__ __launch_bounds__(256, 2) void update(Args a, int offset, int first, int count) {
  const Job &job = a.job;
  const int it = job.counters->it + offset, tid = threadIdx.x;
  if (it > job.counters->n) return;
  // The same part of every network in turn, so that the long ones begin first.
  const int r = first + blockIdx.x % count;
  int block = blockIdx.x / count;
  if (block < INPUT_BLOCKS) return update_input_tile(job, r, block / SPLITS, block % SPLITS, it);
  block -= INPUT_BLOCKS;
  for (int n = 0; n + 1 < DEPTH; n++) {
    const int down = (width(n) + 63) / 64, across = (width(n + 1) + 63) / 64, all = down * across;
    if (block < all) {
      if (it > 0) update_tile(a, r, n, block / across * 64, block % across * 64, it);
      return;
    }
    block -= all;
  }
  for (int e = tid; e < GROUPS * a.moved_count; e += 256) a.moved[r * GROUPS * a.moved_count + e] = 0;
  if (tid < B) stats_of(job, it, r)[tid * STATS + 2] = 0.f;
  if (it == 0) return;
  const bool ok = applies(job, it, r);
  if (tid < 32) ::count(job, it, r, ok);
}
