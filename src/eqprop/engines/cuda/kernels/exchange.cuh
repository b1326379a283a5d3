// Exchange between the blocks of a cluster: states as tensor-core fragments, pushed into the receivers' shared memory, and the
// barriers that count what has arrived.

typedef unsigned int u32;

// A number that is equal in all threads of a warp, in a way the compiler can see: it can then live in a uniform register.
__device__ __forceinline__ int uniform(int v) { return __reduce_max_sync(~0u, v); }
// Keep a number in a register: the compiler would otherwise recompute it in the middle of a step.
__device__ __forceinline__ u32 kept(u32 v) { return __shfl_sync(~0u, v, threadIdx.x % 32); }

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Offset from an address here to the same place in another block of the cluster.
__device__ __forceinline__ u32 way_to(u32 rank, u32 address) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there - address;
}

__device__ __forceinline__ void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  int tries = 0;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    if (++tries > 1 << 22) __trap();             // a neighbour is gone: fail rather than hang the device
  } while (!done);
}

// Stores whose bytes are counted by the receiver's barrier.
__device__ __forceinline__ void push(u32 to, uint2 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               :: "r"(to), "r"(v.x), "r"(v.y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void push(u32 to, uint4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}

__device__ __forceinline__ u32 transposed(u32 v) {
  u32 w;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(w) : "r"(v));
  return w;
}

// Products of signed bytes, summed exactly: sixteen rows by eight columns over sixteen or thirty-two bytes.
__device__ __forceinline__ void mma(int (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Copy sixteen bytes asynchronously from global to shared memory; zeros if there is nothing to copy.
__device__ __forceinline__ void bring(u32 to, const float *from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void brought() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void await_brought() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
