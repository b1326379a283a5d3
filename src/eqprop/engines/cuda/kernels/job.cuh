// Arguments and counts of every training kernel. Compiled with NI inputs (multiple of 4), H units in the adjacent layer, B
// samples per mini-batch.
// The host reads nothing back; the iteration index is in device memory, so that a graph can hold many iterations.

#define HP ((H + 127) / 128 * 128)     // H padded
#define COLUMNS 49                     // float4 columns of the input weights per block
#define SPLITS ((NI / 4 + COLUMNS - 1) / COLUMNS)
#define STATS 4                        // wrong, loss, residual (NaN if anything was not finite), unused

struct Counters { int it, n, start, unused; };   // first iteration of this graph, iterations of this run, index of the run's first

struct Job {
  const float *images, *targets;                 // (N, NI) (N, outputs)
  const long long *labels;                       // (N)
  const int *order;                              // (n, R, B)
  const Counters *counters;
  float *W, *b;                                  // input weights (R, H, NI) and their bias (R, H), or null
  float *drive;                                  // (SPLITS, R, B, HP) partial sums of W x
  float *u;                                      // per-sample gradient of the layer next to the input (R, B, HP)
  float *stats;                                  // (2, R, B, STATS), iterations in turn
  double *tally;                                 // (7, R)
  int R, T, K, alternating, stop;
  float beta, eps, tolerance, lr, lrb;
};

__device__ __forceinline__ float *stats_of(const Job &a, int it, int r) {
  return a.stats + ((size_t)((it & 1) * a.R + r) * B) * STATS;
}

// Whether the iteration before `it` may be applied to network r: everything is finite and the network was not frozen.
// Called by the whole block.
__device__ __forceinline__ bool applies(const Job &a, int it, int r) {
  const int b = threadIdx.x;
  return __syncthreads_and(b < B ? finite(stats_of(a, it - 1, r)[b * STATS + 2]) : a.tally[6 * a.R + r] < 0.0);
}

__device__ __forceinline__ double sum_over_warp(double v) {
#pragma unroll
  for (int q = 16; q; q >>= 1) v += __shfl_xor_sync(~0u, v, q);
  return v;
}

// One warp sums the counts of network r over its B samples in the iteration before `it`, one sample per lane.
__device__ void count(const Job &a, int it, int r, bool ok) {
  const int b = threadIdx.x;
  const float4 s = b < B ? *(const float4 *)(stats_of(a, it - 1, r) + b * STATS) : zero4();
  const double wrong = sum_over_warp(s.x), loss = sum_over_warp(s.y), residual = sum_over_warp(s.z);
  const double unsettled = sum_over_warp(b < B && !(s.z < a.tolerance));
  float worst = s.z;
#pragma unroll
  for (int q = 16; q; q >>= 1) worst = worse(worst, __shfl_xor_sync(~0u, worst, q));
  if (b) return;
  double *t = a.tally + r;
  const int R = a.R;
  t[0] += B;
  t[R] += wrong;
  t[2 * R] += loss;
  t[3 * R] += residual;
  if (!(worst <= t[4 * R])) t[4 * R] = worst;
  t[5 * R] += unsettled;
  if (!ok && t[6 * R] < 0.0) t[6 * R] = a.counters->start + it - 1;
}

extern "C" __global__ void advance(Counters *counters, int by) { counters->it += by; }
