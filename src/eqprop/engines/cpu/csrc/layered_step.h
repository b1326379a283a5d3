/* One step of a layered net: the inputs of the layers, then the neurons' response. */
#ifndef EQPROP_LAYERED_STEP_H
#define EQPROP_LAYERED_STEP_H

#include "layered.h"

/* inputs^n = W_{n-1,n}^T signal^{n-1} + W_{n,n+1} signal^{n+1} + from for the active samples. */
static void couple(const Layered *p, const Tile *tile, int64_t n, real *const *signal, Rows from) {
    const int64_t row = row_of(p->sizes[n]);
    real *out = tile->inputs[n];
    if (n > 0) {
        const Rows below = {signal[n - 1], row_of(p->sizes[n - 1])};
        spread(tile->active, p->sizes[n - 1], vectors_of(p->sizes[n]), below, weight_rows(p, n - 1, tile->network), from,
               out, row);
        from = (Rows){out, row};
    }
    if (n + 1 < p->depth) {
        const Rows above = {signal[n + 1], row_of(p->sizes[n + 1])};
        dot(tile->active, vectors_of(p->sizes[n + 1]), p->sizes[n], above, weight_rows(p, n, tile->network), from, out,
            row);
    } else if (n == 0) {
        for (int m = 0; m < tile->active; m++)
            for (int64_t j = 0; j < vectors_of(p->sizes[n]); j += VL)
                store(out + m * row + j, from.start ? load(from.start + m * from.apart + j) : all(0));
    }
}

/* The input that is constant during a phase: the drive of the last layer, the bias of the others. */
static Rows constant_input(const Layered *p, const Tile *tile, int64_t n) {
    if (n == p->depth - 1) return (Rows){tile->drive, row_of(p->sizes[n])};
    return (Rows){bias_row(p, n, tile->network), 0};
}

/* The input padded with zeros: x, or sigma(x) in the energy-based setting. */
static void see(const Layered *p, const real *image, real *visible) {
    const int64_t size = p->sizes[p->depth];
    memcpy(visible, image, size * sizeof(real));
    if (p->energy_based) activate(p->task.activation, visible, visible, size);
}

/* drive = W x + b for samples of one network and the rows [first, last) of W; `first` is vector-aligned. */
static void drive_rows(const Layered *p, int64_t network, const real *visible, real *drive, int64_t samples,
                       int64_t first, int64_t last) {
    const int64_t n = p->depth - 1, from = row_of(p->sizes[n + 1]), to = row_of(p->sizes[n]);
    const Rows w = weight_rows(p, n, network);
    const real *bias = bias_row(p, n, network);
    for (int64_t i = first; i < last; i += VL) {
        const int64_t here = last - i < VL ? last - i : VL;
        dot(samples, vectors_of(p->sizes[n + 1]), here, (Rows){visible, from}, down(w, i), (Rows){bias ? bias + i : 0, 0},
            drive + i, to);
    }
}

/* Set the tile's layers to `start` (rows from `sample`), or to zero. */
static void start_tile(const Layered *p, Tile *tile, const real *const *start, int64_t sample) {
    for (int64_t n = 0; n < p->depth; n++) {
        const int64_t row = row_of(p->sizes[n]), size = p->sizes[n];
        for (int m = 0; m < tile->samples; m++) {
            real *state = tile->states[n] + m * row;
            memset(state, 0, row * sizeof(real));
            if (start) memcpy(state, start[n] + (sample + m) * size, size * sizeof(real));
            if (p->energy_based) activate(p->task.activation, state, tile->rates[n] + m * row, size);
        }
    }
}

/* Options of a step s -> F(x, s). */
typedef struct {
    int parity;            /* 0, 1: only even or only odd layers; -1: all */
    int watch;             /* compute moved and residual, |F(x, s) - s| */
    real nudge;            /* -beta, times eps if energy-based; 0: no nudge */
    Record *records;       /* BPTT: out, `depth` records of this step; may be null */
} Manner;

static void update_layer(const Layered *p, Tile *tile, int64_t n, const Manner *manner) {
    const int64_t row = row_of(p->sizes[n]);
    for (int m = 0; m < tile->active; m++) {
        Neurons q = {.rate = tile->rates[n] + m * row, .state = tile->states[n] + m * row,
                     .input = tile->inputs[n] + m * row, .nudge = n == 0 ? manner->nudge : 0, .eps = (real)p->eps,
                     .clip = (int)p->clip, .sloped = n > 0 || p->output_slope, .watch = manner->watch,
                     .inside = (int)p->task.inside};
        if (q.nudge != 0) q.target = tile->targets + m * row;
        if (manner->records) {
            const Record *r = &manner->records[n];
            q.record.gain = r->gain + m * row;
            if (p->energy_based) q.record.leak = r->leak + m * row, q.record.slope = r->slope + m * row;
        }
        update_neurons(p->task.activation, p->energy_based, &q, p->sizes[n], &tile->moved[m], &tile->residual[m]);
    }
}

/* s -> F(x, s), with an optional nudge, for the active samples. */
static void step(const Layered *p, Tile *tile, const Manner *manner) {
    if (manner->watch)
        for (int m = 0; m < tile->active; m++) tile->moved[m] = 0, tile->residual[m] = 0;
    const int64_t first = manner->parity < 0 ? 0 : manner->parity, stride = manner->parity < 0 ? 1 : 2;
    for (int64_t n = first; n < p->depth; n += stride) couple(p, tile, n, tile->rates, constant_input(p, tile, n));
    for (int64_t n = first; n < p->depth; n += stride) update_layer(p, tile, n, manner);
}

static inline void swap_rows(real *base, int64_t row, int a, int b) {
    for (int64_t j = 0; j < row; j++) {
        const real kept = base[a * row + j];
        base[a * row + j] = base[b * row + j];
        base[b * row + j] = kept;
    }
}

static void swap_samples(const Layered *p, Tile *tile, int a, int b) {
    if (a == b) return;
    for (int64_t n = 0; n < p->depth; n++) {
        swap_rows(tile->rates[n], row_of(p->sizes[n]), a, b);
        if (p->energy_based) swap_rows(tile->states[n], row_of(p->sizes[n]), a, b);
    }
    swap_rows(tile->drive, row_of(p->sizes[p->depth - 1]), a, b);
    const int place = tile->place[a], quiet = tile->quiet[a];
    tile->place[a] = tile->place[b], tile->quiet[a] = tile->quiet[b];
    tile->place[b] = place, tile->quiet[b] = quiet;
}

/* Move rows whose sample did not move behind the active ones. A half-step updates half of the layers, so an alternating
   sample is at its fixed point only after two half-steps in a row without a change. */
static void retire_still(const Layered *p, Tile *tile, int64_t step_number) {
    for (int m = tile->active - 1; m >= 0; m--) {
        const int still = !tile->moved[m] && (!p->task.alternating || tile->quiet[m]);
        tile->quiet[m] = !tile->moved[m];
        if (!still) continue;
        tile->steps[tile->place[m]] = step_number;
        swap_samples(p, tile, m, --tile->active);
    }
}

/* Run T steps of the free phase from the tile's state; with `settled`, a sample stops once no bit changes. Returns whether
   every sample stopped. The rows end in their original order. */
static int relax_tile(const Layered *p, Tile *tile, int64_t T) {
    tile->active = tile->samples;
    for (int m = 0; m < tile->samples; m++) tile->place[m] = m, tile->quiet[m] = 0, tile->steps[m] = T;
    for (int64_t t = 0; t < T && tile->active > 0; t++) {
        const Manner manner = {.parity = p->task.alternating ? (int)((T - 1 - t) % 2) : -1, .watch = (int)p->task.settled};
        step(p, tile, &manner);
        if (p->task.settled) retire_still(p, tile, t + 1);
    }
    const int all_still = tile->active == 0;
    for (int m = 0; m < tile->samples; m++)
        while (tile->place[m] != m) swap_samples(p, tile, m, tile->place[m]);
    tile->active = tile->samples;
    return all_still;
}

#endif
