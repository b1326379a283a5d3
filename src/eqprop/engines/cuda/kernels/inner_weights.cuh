// A 64 x 64 tile of the weights between two dynamic layers: the sum of outer products, then the update.
#define PAGE (B < 28 ? B : 28)             // samples loaded at a time
#define PORTIONS (METHOD == 0 && B <= 56 ? 2 : (B + 27) / 28)  // portions of the samples; EP has two per phase, so that every worker has one
struct Outer {
  float left[PAGE][64], right[PAGE][64];
};

#define WORKERS 4                          // per block, 64 threads each: every worker sums some of the products from its own pages

__device__ __forceinline__ void await_workmates(int worker) { asm volatile("bar.sync %0, 64;" :: "r"(1 + worker) : "memory"); }

__device__ void update_tile(const Args &a, int r, int n, int row0, int column0, int it) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Job &job = a.job;
  const int tid = threadIdx.x, N = width(n), M = width(n + 1), NP = (N + 15) / 16 * 16, MP = (M + 15) / 16 * 16;
  if (!applies(job, it, r)) return;
  const int worker = tid / 64, id = tid % 64, i0 = id / 8 * 8, j0 = id % 8 * 8;
  Outer *page = (Outer *)memory + 2 * worker;
  float sum[8][8] = {}, bias = 0.f;
  // EP: last rates minus free rates. BPTT: errors with rates, rates with errors, for every step. Each in portions of the samples.
  const int items = (METHOD == 0 ? 2 : 2 * job.K) * PORTIONS;
  auto swapped = [](int item) { return METHOD == 1 && item / PORTIONS & 1; };
  auto first = [](int item) { return item % PORTIONS * B / PORTIONS; };
  auto end = [](int item) { return (item % PORTIONS + 1) * B / PORTIONS; };
  auto request = [&](int item, Outer &to) {
    if (item < items) {
      const float *left = METHOD == 0 || swapped(item) ? a.rates[n] : a.errors[n];
      const float *right = swapped(item) ? a.errors[n + 1] : a.rates[n + 1];
      const size_t sample = ((size_t)(METHOD == 0 ? item / PORTIONS : item / PORTIONS / 2) * job.R + r) * B + first(item);
      for (int e = id; e < (end(item) - first(item)) * 32; e += 64) {
        const int b = e / 32, i = e % 16 * 4;
        const bool isright = e % 32 >= 16;
        const int at = (isright ? column0 : row0) + i, wide = isright ? MP : NP;
        const float *from = (isright ? right : left) + (sample + b) * wide;
        bring(shared_address(isright ? &to.right[b][i] : &to.left[b][i]), at < wide ? from + at : from, at < wide);
      }
    }
    brought();
  };
  request(worker, page[0]);
  for (int item = worker, turn = 0; item < items; item += WORKERS, turn ^= 1) {
    request(item + WORKERS, page[turn ^ 1]);
    await_brought<1>();
    await_workmates(worker);
    const Outer &m = page[turn];
    const int count = end(item) - first(item);
    const float sign = METHOD == 0 && item < PORTIONS ? -1.0f : 1.0f;
#pragma unroll 2
    for (int b = 0; b < count; b++) {
      float x[8], y[8];
      *(float4 *)x = sign * *(const float4 *)&m.left[b][i0], *(float4 *)(x + 4) = sign * *(const float4 *)&m.left[b][i0 + 4];
      *(float4 *)y = *(const float4 *)&m.right[b][j0], *(float4 *)(y + 4) = *(const float4 *)&m.right[b][j0 + 4];
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    }
    if (column0 == 0 && !swapped(item))
      for (int b = 0; b < count; b++) bias += sign * m.left[b][id];
    await_workmates(worker);
  }
  // racecheck cannot follow warps that pass fewer barriers than others.
  if (items % WORKERS && worker >= items % WORKERS) await_workmates(worker), await_workmates(worker);
  // Combine the workers' sums: row by row, sixteen columns of four, then the biases.
  __syncthreads();
  float4 *parts = (float4 *)memory;
  float *biases = (float *)(parts + WORKERS * 64 * 16);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 2; j++) parts[(worker * 64 + i0 + i) * 16 + j0 / 4 + j] = *(float4 *)&sum[i][4 * j];
  biases[tid] = bias;
  __syncthreads();
  const float unit = METHOD == 0 ? -1.0f / job.beta : 1.0f, rate = -a.lr[n] * unit * (1.0f / B);
  const int column = column0 + tid % 16 * 4;
  for (int i = tid / 16; i < 64; i += 16) {
    float4 all = zero4();
    for (int w = 0; w < WORKERS; w++) all = all + parts[(w * 64 + i) * 16 + tid % 16];
    const int row = row0 + i;
    float *w = a.W[n] + ((size_t)r * N + row) * M + column;
    if (row < N && column + 3 < M && M % 4 == 0) {
      *(float4 *)w = fma4(rate, all, *(float4 *)w);
    } else if (row < N) {
      const float v[4] = {all.x, all.y, all.z, all.w};
      for (int j = 0; j < 4; j++)
        if (column + j < M) w[j] += rate * v[j];
    }
  }
  if (column0 == 0 && tid < 64 && row0 + tid < N && a.b[n]) {
    float all = 0.f;
    for (int w = 0; w < WORKERS; w++) all += biases[w * 64 + tid];
    a.b[n][(size_t)r * N + row0 + tid] -= a.lrb[n] * unit * (1.0f / B) * all;
  }
}

// The first blocks of a network hold one tile of the input weights each, the next one tile of the others, the last its counts.
extern "C" __global__ __launch_bounds__(256, 2) void update(Args a, int offset, int first, int count) {
  const Job &job = a.job;
  const int it = job.counters->it + offset, tid = threadIdx.x;
  if (it > job.counters->n) return;
  // The same part of every network in turn, so that long parts start first.
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
