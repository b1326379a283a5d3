// The activation and the step of a neuron, shared by all kernels. Compiled with
//   ENERGY 0|1   ACT 0 sigmoid, 1 tanh   CLIP 0|1   OUTPUT_SLOPE 0|1   QUICK 1: the sigmoid from the special-function unit,
//   accurate to 3e-7, where it is in the dependent chain of every step; 0: the library's
// r stands for sigma(s); derivatives are computed from r, so that a step costs one exponential per neuron.

__device__ __forceinline__ float exp2_fast(float v) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y;
}

__device__ __forceinline__ float reciprocal(float v) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y;
}

__device__ __forceinline__ float sigma(float v) {
  // 1 / (1 + exp(-4 (v - 1/2))), or tanh
#if ACT == 0 && QUICK
  return reciprocal(1.0f + exp2_fast(fmaf(v, -5.770780163555854f, 2.885390081777927f)));
#elif ACT == 0
  // The quotient by Newton's iteration: as accurate as a division, without its branches. Keeps NaN.
  const float e = fmaf(v, -4.0f, 2.0f), d = 1.0f + expf(e > 80.0f ? 80.0f : e), r = reciprocal(d);
  return fmaf(r, fmaf(-d, r, 1.0f), r);
#else
  return tanhf(v);
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
  // Written so that NaN is kept.
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

// max that keeps NaN, which fmaxf would drop
__device__ __forceinline__ float worse(float a, float b) { return (b > a || b != b) ? b : a; }

// The free step of one neuron before clipping, from its state, its rate and its total input.
__device__ __forceinline__ float unclipped(float s, float r, float input, float eps, bool with_slope) {
#if ENERGY
  return fmaf(eps, (with_slope ? slope(r) : 1.0f) * input, (1.0f - eps) * s);
#else
  return sigma(input);
#endif
}

// The rate that neighbours receive from a state.
__device__ __forceinline__ float rate(float s) {
#if ENERGY
  return sigma(s);
#else
  return s;
#endif
}
