// Warpgroup matrix products of halves in shared memory, D (64 x N, float) += A (64 x 16) B (16 x N).
//
// Operands are stored in cells of eight rows of sixteen bytes, 128 contiguous bytes. `across` is the distance in bytes between
// cells along M or N, `along` that along K. An operand is "turned" if the eight numbers of a row run along M or N instead of
// K. A cell may start at any multiple of sixteen bytes: a convolution is a shift of the address.

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// An operand: its address, uniform across threads (the reduction shows this to the compiler, which then keeps it where the
// matrix unit reads it), and the two distances. Moving it by multiples of sixteen bytes is one addition.
struct Operand {
  unsigned low, high;
  __device__ __forceinline__ Operand(unsigned address, unsigned across, unsigned along)
      : low(__reduce_or_sync(~0u, (address >> 4) | (along >> 4) << 16)), high(across >> 4) {}
  __device__ __forceinline__ unsigned long long by(int pieces) const { return (unsigned long long)high << 32 | (low + pieces); }
};

// Keep the compiler from moving code that produces or uses the sums across this point.
template <int D> __device__ __forceinline__ void hold(float (&d)[D]) {
#pragma unroll
  for (int i = 0; i < D; i++) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// After this and a barrier, the products see ordinary writes to shared memory.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// Neither operand turned: the convolution.
__device__ __forceinline__ void products_64(float (&d)[32], unsigned long long a, unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
               "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
               : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16),
                 FOUR(d, 20), FOUR(d, 24), FOUR(d, 28)
               : "l"(a), "l"(b));
}

// A turned: the transposed convolution.
__device__ __forceinline__ void products_56(float (&d)[28], unsigned long long a, unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n56k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
               "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
               "}, %28, %29, p, 1, 1, 1, 0;\n}\n"
               : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16),
                 FOUR(d, 20), FOUR(d, 24)
               : "l"(a), "l"(b));
}

__device__ __forceinline__ void products_48(float (&d)[24], unsigned long long a, unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
               "%18, %19, %20, %21, %22, %23"
               "}, %24, %25, p, 1, 1, 1, 0;\n}\n"
               : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16),
                 FOUR(d, 20)
               : "l"(a), "l"(b));
}

// Both turned: the gradient of the filters.
__device__ __forceinline__ void products_32(float (&d)[16], unsigned long long a, unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
               "}, %16, %17, p, 1, 1, 1, 1;\n}\n"
               : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12)
               : "l"(a), "l"(b));
}
