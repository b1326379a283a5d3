// Whole training iterations of nets with two convolutions and one fully connected readout, in three kernels:
//   relax    one block per (network, sample): the image's drive, all T + K steps, BPTT's backward pass, the sample's gradient
//   gather   the gradient of the filters W01 from the maps stored by `relax`
//   update   all parameters, and the counts
// See conv_net.cuh for the compile-time sizes.

#include "conv_net.cuh"
#include "conv_learn.cuh"
#include "conv_products.cuh"
#include "conv_image.cuh"
#include "conv_step.cuh"

extern "C" __global__ __launch_bounds__(THREADS, 1) void relax(Args a, int offset) {
  // The reduction shows the compiler that all threads take the same branch; otherwise products would be serialised.
  if (__reduce_or_sync(~0u, a.counters->it + offset >= a.counters->n)) return;
  extern __shared__ __align__(128) unsigned char memory[];
  Small &m = *(Small *)(memory + SMALL);
  const Seat seat(threadIdx.x);
  const int tid = threadIdx.x, cell = blockIdx.x, r = cell / B, T = a.T, K = a.K;
  const int sample = a.order[(size_t)(a.counters->it + offset) * a.R * B + cell];
  const unsigned live = seat.live(), zones = seat.live_zones();
  const unsigned base = shared_address(memory);
  for (int i = tid; i < 2 * HALF_BYTES / 16; i += THREADS) copy_16(base + i * 16, a.packed + (size_t)r * 2 * HALF_BYTES + i * 16);

  float total[UNITS], z[16], h0[4], bias[2];
  unsigned lost[UNITS / 2], zlost[8], seen[2];
  Sent sent;
  see(a, memory, seat, live, sample, r, total, seen);
#pragma unroll
  for (int i = 0; i < UNITS; i++) sent.h1[i] = 0.f, lost[i / 2] = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) z[i] = sent.u[i] = 0.f, zlost[i / 2] = 0;
#pragma unroll
  for (int u = 0; u < 4; u++) h0[u] = 0.f;
  float4 *weights = (float4 *)(a.gfc + (size_t)cell * NO * WIDE) + tid;
#pragma unroll 1
  for (int k = 0; k < NO; k++) {
    float w[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int column = ((seat.wide + 8 * (u >> 1)) * H0H + 2 * seat.group + (u & 1)) * H0W + seat.c;
      w[u] = zones >> u & 1 ? a.Wfc[((size_t)r * NO + k) * C0 * H0H * H0W + column] : 0.f;
    }
    weights[k * THREADS] = make_float4(w[0], w[1], w[2], w[3]);
  }
#pragma unroll
  for (int e = 0; e < 2; e++) bias[e] = a.b0 && seat.wide + 8 * e < C0 ? a.b0[r * C0 + seat.wide + 8 * e] : 0.f;
  if (tid < 16) {
    m.s0[tid] = 0.f;
    m.target[tid] = tid < NO ? a.targets[(size_t)sample * NO + tid] : 0.f;
    m.heard[tid] = m.unpooled[tid] = 0;
    m.bias[tid] = tid < NO && a.bfc ? a.bfc[r * NO + tid] : 0.f;
  }
  copies_done();
  show_to_products();
  __syncthreads();

  const int free_steps = METHOD ? T - K : T;
  int used = free_steps;                              // distinct steps; the others only repeat them
  float residual = 0.f;
  int bits = 0;                                  // which changes of h1 are sent
  unsigned where = 0;
  bool started = false;
  int silent = 0;                                // steps since anything was sent
  auto h1 = [&](int i) { return FULL1 || live >> i & 1 ? sigma(total[i]) : 0.f; };
  auto h1_now = [&](int i) { return started ? h1(i) : 0.f; };
  float w[NO][4];
  fetch(w, weights);
  float *own = a.own + (size_t)cell * a.steps * PRIVATE * THREADS + tid;
  unsigned char *pairs = a.pairs + (size_t)cell * a.steps * PAIR_BYTES;
  Care care = free_care();
#pragma unroll 1
  for (int t = 0;; t++) {
    if (bits & MOVED) hear(memory, seat, sent, bits, STATE_SCALE, care, z, zlost, h1);
    float value[4];
    where = pool(z, value);
    if (!METHOD && t == T + K) break;
    if (!METHOD && t == T) {
      absorb(sent, h1_now, h0, where);
      care = nudged_care();
    }
    if (t == T) {
      leave_state(a.states + (size_t)cell * STATE, seat, m, h0, h1_now);
      if (tid == 0) {
        int best = 0;
        float loss = 0.f;
        for (int k = 0; k < NO; k++) {
          loss += 0.5f * (m.s0[k] - m.target[k]) * (m.s0[k] - m.target[k]);
          if (m.s0[k] > m.s0[best]) best = k;
        }
        float *stats = stats_of(a, r) + cell % B * STATS;
        stats[0] = best != (int)a.labels[sample];
        stats[1] = loss;
      }
      if (tid < 16) m.error[tid] = METHOD ? m.s0[tid] - m.target[tid] : m.s0[tid];
    }
    const bool keeps = METHOD ? t >= free_steps && t < T : t == T;
    float *note = own + (METHOD ? max(t - free_steps, 0) * PRIVATE * THREADS : 0);
    if (keeps) {
#if METHOD
      leave_h(pairs + (size_t)(t - free_steps) * PAIR_BYTES, seat, 0, h1_now);
      leave_u(pairs + (size_t)(t - free_steps) * PAIR_BYTES, seat, 1, [&](int u, int k) { return (where >> 2 * u & 3) == k ? h0[u] : 0.f; });
      if (tid < 16) note[29 * THREADS] = m.s0[tid];
#else
#pragma unroll
      for (int i = 0; i < UNITS; i++) note[i * THREADS] = h1_now(i);
#endif
#pragma unroll
      for (int u = 0; u < 4; u++) note[(24 + u) * THREADS] = h0[u];
      note[28 * THREADS] = __uint_as_float(where);
    }

    const bool looks = t == T, all = t >= free_steps || !a.alternating;
    const bool even = all || !((free_steps - 1 - t) & 1), odd = all || !even;
    // The output and h1 use the current h0, then h0 moves.
    int tells = even ? tell_u(memory, seat, sent, STATE_SCALE, care, h0, where) : 0;
    clear_borders(memory);
    read_out(m, seat, w, h0);
    const float before[4] = {h0[0], h0[1], h0[2], h0[3]};
    if (odd) {
#pragma unroll
      for (int u = 0; u < 4; u++) {
        float v = value[u] + bias[u >> 1];
#pragma unroll
        for (int k = 0; k < NO; k++) v = fmaf(w[k][u], m.s0[k], v);
        const float s = zones >> u & 1 ? sigma(v) : 0.f;
        if (looks) residual = worse(residual, fabsf(s - h0[u]));
        if (METHOD && keeps) note[(20 + u) * THREADS] = zones >> u & 1 ? slope(v) : 0.f;
        h0[u] = s;
      }
    }
    tells = __reduce_or_sync(~0u, tells);
    if (seat.lane == 0) m.unpooled[4 * seat.group + seat.warp] = tells;
    show_to_products();
    __syncthreads();
    tells = told_by_all(m.unpooled, seat.lane);
    if (seat.group + seat.warp == 0) {
      // The whole warp, to avoid divergence: lanes past the last output compute and discard.
      const int k = seat.lane & 15;
      const bool real = seat.lane < NO;
      const float v = sum_of_warps(m, k) + m.bias[k], old = m.s0[k];
      const float free = even ? sigma(v) : old;
      const float s = !METHOD && t >= T ? fmaf(a.beta, m.target[k] - old, free) : free;
      residual = looks && real ? worse(residual, fabsf(free - old)) : residual;
      if (METHOD && keeps) note[30 * THREADS] = real ? slope(v) : 0.f;
      const bool again = __all_sync(~0u, !real || (same(m.marked[0][k], old) && same(m.marked[1][k], s)));
      if (real) {
        m.s0[k] = s;
        if (marks(silent + 1)) m.marked[0][k] = old, m.marked[1][k] = s;
      }
      if (seat.lane == 0) m.heard[8] = again ? AGAIN : 0;
    }
    bits = 0;
    if (even) {
      if (tells & MOVED) feel(memory, seat, sent, tells, STATE_SCALE, care, total, lost, before, where);
      started = true;
    }
    fetch(w, weights);                           // for the next step, hidden behind what follows
    if (even) {
      if (METHOD && keeps) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) note[i * THREADS] = live >> i & 1 ? slope(total[i]) : 0.f;
      }
      if (looks) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) residual = worse(residual, fabsf(h1(i) - sent.h1[i]));
      }
      bits = tell_h1(memory, seat, sent, STATE_SCALE, care, h1);
    }
    bits = __reduce_or_sync(~0u, bits);
    if (seat.lane == 0) m.heard[4 * seat.group + seat.warp] = bits;
    show_to_products();
    __syncthreads();
    bits = told_by_all(m.heard, seat.lane);
    if (METHOD && t == T) break;
    silent = (bits | tells) & MOVED ? 0 : silent + 1;
    if (bits & AGAIN && repeats(silent) && t < free_steps && used == free_steps) {
      // All further steps of the phase would cycle through the same states: skip whole cycles.
      const int rest = (free_steps - 1 - t) % round_of(silent);
      used = t + 1 + rest;
      if (a.stop) t = free_steps - 1 - rest;
    }
  }

  float moved[UNITS], moved0[4], taught[NO][4], moved_output = 0.f;
#if METHOD
#pragma unroll
  for (int i = 0; i < UNITS; i++) total[i] = 0.f;
#pragma unroll
  for (int u = 0; u < 4; u++) h0[u] = 0.f;       // dL/dh0 from here on, as total is dL/dh1
#pragma unroll 1
  for (int t = K - 1; t >= 0; t--) {
    float *note = own + t * PRIVATE * THREADS;
    where = __float_as_uint(note[28 * THREADS]);
    // Replace the stored slopes by errors, from which the gradients are summed.
    if (tid < 16) {
      m.gain[tid] = tid < NO ? note[30 * THREADS] * m.error[tid] : 0.f;
      note[30 * THREADS] = m.gain[tid];
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) note[i * THREADS] = total[i] *= note[i * THREADS];
#pragma unroll
    for (int u = 0; u < 4; u++) note[(20 + u) * THREADS] = h0[u] *= note[(20 + u) * THREADS];
    leave_u(pairs + (size_t)t * PAIR_BYTES, seat, 0, [&](int u, int k) { return (where >> 2 * u & 3) == k ? h0[u] : 0.f; });
    leave_h(pairs + (size_t)t * PAIR_BYTES, seat, 1, [&](int i) { return total[i]; });
    if (t == 0) break;
#pragma unroll
    for (int i = 0; i < UNITS; i++) sent.h1[i] = 0.f, lost[i / 2] = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) z[i] = sent.u[i] = 0.f, zlost[i / 2] = 0;
    tell_h1(memory, seat, sent, ERROR_SCALE, nudged_care(), [&](int i) { return total[i]; });
    show_to_products();
    __syncthreads();
    fetch(w, weights);
    hear(memory, seat, sent, MOVED | LOW | REST | FAR, ERROR_SCALE, nudged_care(), z, zlost, [&](int i) { return total[i]; });
    tell_u(memory, seat, sent, ERROR_SCALE, nudged_care(), h0, where);
    clear_borders(memory);
    read_out(m, seat, w, h0);
    show_to_products();
    __syncthreads();
    if (tid < 16) m.error[tid] = sum_of_warps(m, tid);
    float next[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      next[u] = at(z, u, where);
#pragma unroll
      for (int k = 0; k < NO; k++) next[u] = fmaf(w[k][u], m.gain[k], next[u]);
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) total[i] = 0.f;
    feel(memory, seat, sent, MOVED | LOW | REST | FAR, ERROR_SCALE, nudged_care(), total, lost, h0, where);
#pragma unroll
    for (int u = 0; u < 4; u++) h0[u] = next[u];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < UNITS; i++) moved[i] = 0.f;
#pragma unroll
  for (int u = 0; u < 4; u++) {
    moved0[u] = 0.f;
#pragma unroll
    for (int k = 0; k < NO; k++) taught[k][u] = 0.f;
  }
#pragma unroll 1
  for (int t = 0; t < K; t++) {
    const float *note = own + t * PRIVATE * THREADS, *outputs = note - tid;
#pragma unroll
    for (int i = 0; i < UNITS; i++) moved[i] += note[i * THREADS];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const float e = note[(20 + u) * THREADS], h = note[(24 + u) * THREADS];
      moved0[u] += e;
#pragma unroll
      for (int k = 0; k < NO; k++)
        taught[k][u] = fmaf(outputs[30 * THREADS + k], h, fmaf(outputs[29 * THREADS + k], e, taught[k][u]));
    }
    if (tid < 16) moved_output += note[30 * THREADS];
  }
#else
  leave_state(a.states + ((size_t)a.R * B + cell) * STATE, seat, m, h0, h1);
  const unsigned free_where = __float_as_uint(own[28 * THREADS]);
  float free0[4];
#pragma unroll
  for (int u = 0; u < 4; u++) free0[u] = own[(24 + u) * THREADS];
  auto unpooled = [&](int u, int k) { return (where >> 2 * u & 3) == k ? h0[u] : 0.f; };
  auto unpooled_free = [&](int u, int k) { return (free_where >> 2 * u & 3) == k ? free0[u] : 0.f; };
#pragma unroll
  for (int i = 0; i < UNITS; i++) moved[i] = h1(i) - own[i * THREADS];
  leave_h(pairs, seat, 0, h1);
  leave_u(pairs, seat, 0, [&](int u, int k) { return unpooled(u, k) - unpooled_free(u, k); });
  leave_u(pairs, seat, 1, unpooled_free);
  leave_h(pairs, seat, 1, [&](int i) { return moved[i]; });
#pragma unroll
  for (int u = 0; u < 4; u++) {
    moved0[u] = h0[u] - free0[u];
#pragma unroll
    for (int k = 0; k < NO; k++) taught[k][u] = fmaf(m.s0[k] - m.error[k], h0[u], m.error[k] * moved0[u]);
  }
  if (tid < 16) moved_output = m.s0[tid] - m.error[tid];
#endif

  // This sample's gradient, and whether all of it is finite.
  float size = fabsf(moved_output);
  if (tid < 16) a.gs[cell * 16 + tid] = moved_output;
#pragma unroll
  for (int u = 0; u < 4; u++) {
    a.g0[(size_t)cell * WIDE + seat.zone(u)] = moved0[u];
    size += fabsf(moved0[u]);
#pragma unroll
    for (int k = 0; k < NO; k++) {
      a.gfc[((size_t)cell * NO + k) * WIDE + seat.zone(u)] = taught[k][u];
      size += fabsf(taught[k][u]);
    }
  }
#pragma unroll
  for (int i = 0; i < UNITS; i++) size += fabsf(moved[i]);
#pragma unroll
  for (int q = 16; q; q >>= 1) residual = worse(residual, __shfl_xor_sync(~0u, residual, q));
  if (seat.lane == 0) m.residual[4 * seat.group + seat.warp] = residual;
  const bool good = __syncthreads_and(finite(size));
  if (tid == 0) {
    for (int q = 1; q < 8; q++) residual = worse(residual, m.residual[q]);
    stats_of(a, r)[cell % B * STATS + 2] = good ? residual : __int_as_float(0x7fc00000);
    stats_of(a, r)[cell % B * STATS + 3] = used;
  }
  learn_image(a, memory, seat, sample, cell, moved, seen);
}
