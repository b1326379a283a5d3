// Arithmetic on four floats at once, and launch helpers for all kernels.

__device__ __forceinline__ float4 operator*(float a, float4 v) { return make_float4(a * v.x, a * v.y, a * v.z, a * v.w); }
__device__ __forceinline__ float4 operator*(float4 a, float4 v) { return make_float4(a.x * v.x, a.y * v.y, a.z * v.z, a.w * v.w); }
__device__ __forceinline__ float4 operator+(float4 a, float4 v) { return make_float4(a.x + v.x, a.y + v.y, a.z + v.z, a.w + v.w); }
__device__ __forceinline__ float4 operator-(float4 a, float4 v) { return make_float4(a.x - v.x, a.y - v.y, a.z - v.z, a.w - v.w); }
__device__ __forceinline__ float4 fma4(float a, float4 v, float4 c) {
  return make_float4(fmaf(a, v.x, c.x), fmaf(a, v.y, c.y), fmaf(a, v.z, c.z), fmaf(a, v.w, c.w));
}
template <class F> __device__ __forceinline__ float4 map4(F f, float4 a) { return make_float4(f(a.x), f(a.y), f(a.z), f(a.w)); }
template <class F> __device__ __forceinline__ float4 map4(F f, float4 a, float4 b) {
  return make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}
template <class F> __device__ __forceinline__ float4 map4(F f, float4 a, float4 b, float4 c) {
  return make_float4(f(a.x, b.x, c.x), f(a.y, b.y, c.y), f(a.z, b.z, c.z), f(a.w, b.w, c.w));
}
__device__ __forceinline__ float worst4(float4 v) { return worse(worse(v.x, v.y), worse(v.z, v.w)); }
__device__ __forceinline__ float4 zero4() { return make_float4(0.f, 0.f, 0.f, 0.f); }
__device__ __forceinline__ bool finite(float v) { return fabsf(v) < __int_as_float(0x7f800000); }
__device__ __forceinline__ bool same(float4 a, float4 b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

// Programmatic dependent launch: a kernel may start before the one it depends on has ended, up to `after_previous`.
__device__ __forceinline__ void after_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
