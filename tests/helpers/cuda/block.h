/* Runs a block of CUDA threads on one processor: each thread is a fibre that gives way at barriers and shuffles.
 * It shows what a kernel computes, not how fast, and not what happens where threads race: fibres take turns. */
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#include <ucontext.h>

struct Dim { int x = 0; };
static Dim threadIdx, blockIdx;

struct float4 { float x, y, z, w; };             // not aligned: kernels read it from local arrays, which registers hold on a GPU
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float __int_as_float(int bits) { float v; std::memcpy(&v, &bits, 4); return v; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

namespace block {

static const size_t STACK = 128 * 1024;

enum State { RUNS, AT_BARRIER, AT_SHUFFLE, ENDED };

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  State state = RUNS;
  bool vote = true;
  uint64_t slot[2] = {0, 0};                     // what it shows its warp, in turns: one lane may be a shuffle ahead
  int shuffles = 0;
};

static std::vector<Fibre> fibres;
static std::vector<char> dynamic;                // dynamic shared memory
static ucontext_t host;
static int current;
static bool agreed;
static std::function<void()> body;

static void enter() {
  body();
  fibres[current].state = ENDED;
  swapcontext(&fibres[current].context, &host);
}

static void give_way(State state) {
  fibres[current].state = state;
  swapcontext(&fibres[current].context, &host);
}

static bool all(int first, int last, State state) {
  bool some = false;
  for (int i = first; i < last; i++) {
    if (fibres[i].state != state && fibres[i].state != ENDED) return false;
    some |= fibres[i].state == state;
  }
  return some;
}

static void wake(int first, int last) {
  for (int i = first; i < last; i++)
    if (fibres[i].state != ENDED) fibres[i].state = RUNS;
}

/* Whether every thread came to its end; false if they wait for each other for ever. */
static bool run(int number, int threads, size_t shared, std::function<void()> kernel) {
  body = kernel;
  dynamic.assign(shared + 16, 0x5a);
  if (fibres.size() != (size_t)threads) fibres = std::vector<Fibre>(threads);
  for (auto &f : fibres) {
    f.state = RUNS;
    f.shuffles = 0;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = &host;
    makecontext(&f.context, enter, 0);
  }
  for (;;) {
    bool moved = false;
    for (current = 0; current < threads; current++) {
      if (fibres[current].state != RUNS) continue;
      moved = true;
      threadIdx.x = current;
      blockIdx.x = number;
      swapcontext(&host, &fibres[current].context);
    }
    for (int warp = 0; warp < threads; warp += 32)
      if (all(warp, min(warp + 32, threads), AT_SHUFFLE)) wake(warp, min(warp + 32, threads)), moved = true;
    if (all(0, threads, AT_BARRIER)) {
      agreed = true;
      for (auto &f : fibres)
        if (f.state == AT_BARRIER) agreed = agreed && f.vote;
      wake(0, threads);
      moved = true;
    }
    if (all(0, threads, ENDED)) return true;
    if (!moved) return false;
  }
}

static void *dynamic_memory() { return (void *)(((uintptr_t)dynamic.data() + 15) / 16 * 16); }

}  // namespace block

static int __syncthreads_and(int vote) {
  block::fibres[block::current].vote = vote;
  block::give_way(block::AT_BARRIER);
  return block::agreed;
}

static void __syncthreads() { __syncthreads_and(1); }

template <class Value> static Value __shfl_xor_sync(unsigned, Value v, int other) {
  const int me = block::current, turn = block::fibres[me].shuffles++ & 1;
  std::memcpy(&block::fibres[me].slot[turn], &v, sizeof v);
  block::give_way(block::AT_SHUFFLE);
  Value found;
  std::memcpy(&found, &block::fibres[me ^ other].slot[turn], sizeof v);
  return found;
}
