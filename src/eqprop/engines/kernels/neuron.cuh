// The activation and what a step makes of it, shared by every kernel. Compiled with
//   ENERGY 0|1   ACT 0 sigmoid, 1 tanh   CLIP 0|1   OUTPUT_SLOPE 0|1
// r stands for sigma(s); derivatives are taken from r, so that a step costs one exponential a neuron.

__device__ __forceinline__ float exp2_fast(float v) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y;
}

__device__ __forceinline__ float sigma(float v) {
#if ACT == 0
  // 1 / (1 + exp(-4 (v - 1/2)))
  return __fdividef(1.0f, 1.0f + exp2_fast(fmaf(v, -5.770780163555854f, 2.885390081777927f)));
#else
  // tanh v = 1 - 2 / (1 + exp(2 v)); where that loses digits, the odd series
  float e = exp2_fast(2.885390081777927f * v);
  float far = 1.0f - __fdividef(2.0f, 1.0f + e);
  float q = v * v;
  float near = v * fmaf(q, fmaf(q, 0.13333334f, -0.33333334f), 1.0f);
  return fabsf(v) < 0.04f ? near : far;
#endif
}

__device__ __forceinline__ float slope(float r) {
#if ACT == 0
  return 4.0f * r * (1.0f - r);
#else
  return 1.0f - r * r;
#endif
}

__device__ __forceinline__ float curvature(float r) {
#if ACT == 0
  return 4.0f * (1.0f - 2.0f * r) * slope(r);
#else
  return -2.0f * r * slope(r);
#endif
}

__device__ __forceinline__ float clip(float v) {
#if CLIP
  // Written so that a NaN passes through.
  return v < 0.0f ? 0.0f : (v > 1.0f ? 1.0f : v);
#else
  return v;
#endif
}

__device__ __forceinline__ bool inside(float v) {
#if CLIP
  return v >= 0.0f && v <= 1.0f;
#else
  return true;
#endif
}

// max that keeps a NaN, which fmaxf would drop
__device__ __forceinline__ float worse(float a, float b) { return (b > a || b != b) ? b : a; }

// The free step of one neuron before clipping, from its state, its rate and its total input.
__device__ __forceinline__ float unclipped(float s, float r, float input, float eps, bool with_slope) {
#if ENERGY
  return fmaf(eps, (with_slope ? slope(r) : 1.0f) * input, (1.0f - eps) * s);
#else
  return sigma(input);
#endif
}

// What the neighbours see of a state.
__device__ __forceinline__ float rate(float s) {
#if ENERGY
  return sigma(s);
#else
  return s;
#endif
}
