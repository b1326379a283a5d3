/* One step of a convolutional net, and its free phase, for one sample. */
#ifndef EQPROP_CONV_STEP_H
#define EQPROP_CONV_STEP_H

#include "conv_products.h"

/* Options of a step s -> sigma(dPhi/ds). */
typedef struct {
    int parity;      /* 0, 1: only even or only odd layers; -1: all */
    int watch;       /* compute moved and residual, |F(x, s) - s| */
    real nudge;      /* -beta; 0: no nudge */
    Record *records; /* BPTT: out, records of this step, one per layer; may be null */
} Manner;

static inline int wanted(const Manner *manner, int64_t layer) {
    return manner->parity < 0 || layer % 2 == manner->parity;
}

static const real *by_input_of(const Conv *p, const Cell *cell, int64_t n) {
    const Filters f = filters_of(p, n);
    return cell->packed->by_input[n] + cell->network * p->kernel * f.run * vectors_of(f.channels);
}

static const real *by_row_of(const Conv *p, const Cell *cell, int64_t n) {
    const Filters f = filters_of(p, n);
    return cell->packed->by_row[n] + cell->network * p->kernel * f.channels * f.run_padded;
}

/* The response of map n to the map below, which includes its border. */
static void hear(const Conv *p, Cell *cell, int64_t n, const real *below, real *values, whole *windows) {
    const Filters f = filters_of(p, n);
    respond(p, &f, by_input_of(p, cell, n), cell->packed->starts[n], bias_of(p, FILTER_BIAS, n, cell->network), below,
            cell, values, windows);
}

/* Update the response of map n to map n + 1 unless it is fresh. */
static void refresh(const Conv *p, Cell *cell, int64_t n) {
    if (cell->fresh[n]) return;
    const Filters f = filters_of(p, n);
    const real *below = with_border(p, &f, cell->states[p->flats + n + 1], cell->border);
    hear(p, cell, n, below, cell->responses[p->flats + n], cell->windows[n]);
    cell->fresh[n] = 1;
}

/* inputs += W~ * P^-1(above) into map n + 1. */
static void send_back(const Conv *p, Cell *cell, int64_t n, const real *above, const whole *windows) {
    const Filters f = filters_of(p, n);
    const real *filters = by_row_of(p, cell, n);
    const int64_t *starts = cell->packed->starts[n];
    real *inputs = cell->inputs[p->flats + n + 1];
    if (p->padding == 0) {
        scatter(p, &f, filters, starts, above, windows, cell, inputs);
        return;
    }
    memset(cell->border, 0, row_of(f.reach) * sizeof(real));
    scatter(p, &f, filters, starts, above, windows, cell, cell->border);
    add_inside(p, &f, cell->border, inputs);
}

/* inputs = Wfc^T (signal of the layer nearer the output) + Wfc (signal of the next) + from, for a flat layer or map 0. */
static void couple_flat(const Conv *p, Cell *cell, int64_t layer, real *const *signal, const real *from) {
    const int64_t size = size_of(p, layer);
    real *out = cell->inputs[layer];
    if (layer > 0) {
        spread(1, size_of(p, layer - 1), vectors_of(size), (Rows){signal[layer - 1], 0},
               flat_rows(p, layer - 1, cell->network), (Rows){from, 0}, out, 0);
        from = out;
    }
    if (layer < p->flats)
        dot(1, vectors_of(size_of(p, layer + 1)), size, (Rows){signal[layer + 1], 0},
            flat_rows(p, layer, cell->network), (Rows){from, 0}, out, 0);
}

/* dPhi/ds of a layer. */
static void couple(const Conv *p, Cell *cell, int64_t layer) {
    const int64_t n = layer - p->flats;
    if (n < 0) {
        couple_flat(p, cell, layer, cell->states, bias_of(p, FLAT_BIAS, layer, cell->network));
        return;
    }
    const real *heard = n == p->maps - 1 ? cell->drive : cell->responses[layer];
    if (n == 0) {
        couple_flat(p, cell, layer, cell->states, heard);
        return;
    }
    memset(cell->inputs[layer], 0, row_of(size_of(p, layer)) * sizeof(real));
    send_back(p, cell, n - 1, cell->states[layer - 1], cell->windows[n - 1]);
    for (int64_t j = 0; j < vectors_of(size_of(p, layer)); j += VL)
        store(cell->inputs[layer] + j, load(cell->inputs[layer] + j) + load(heard + j));
}

static void update_layer(const Conv *p, Cell *cell, int64_t layer, const Manner *manner) {
    Neurons q = {.rate = cell->states[layer], .state = cell->states[layer], .input = cell->inputs[layer],
                 .target = cell->target, .nudge = layer == 0 ? manner->nudge : 0, .watch = manner->watch,
                 .inside = (int)p->task.inside};
    if (manner->records) q.record = manner->records[layer];
    update_neurons(p->task.activation, 0, &q, size_of(p, layer), &cell->moved, &cell->residual);
    if (layer > p->flats) cell->fresh[layer - p->flats - 1] = 0;
}

/* s -> sigma(dPhi/ds), with an optional nudge. */
static void step(const Conv *p, Cell *cell, const Manner *manner) {
    cell->moved = 0, cell->residual = 0;
    for (int64_t n = 0; n + 1 < p->maps; n++)
        if (wanted(manner, p->flats + n) || wanted(manner, p->flats + n + 1)) refresh(p, cell, n);
    for (int64_t layer = 0; layer < layers_of(p); layer++)
        if (wanted(manner, layer)) couple(p, cell, layer);
    for (int64_t layer = 0; layer < layers_of(p); layer++)
        if (wanted(manner, layer)) update_layer(p, cell, layer, manner);
}

static void start_cell(const Conv *p, Cell *cell, const real *const *start, int64_t sample) {
    for (int64_t layer = 0; layer < layers_of(p); layer++) {
        const int64_t size = size_of(p, layer);
        memset(cell->states[layer], 0, row_of(size) * sizeof(real));
        if (start) memcpy(cell->states[layer], start[layer] + sample * size, size * sizeof(real));
    }
    memset(cell->fresh, 0, p->maps * sizeof(int));
}

/* Run T steps of the free phase; with `settled`, stop once no bit changes. Returns the steps used and sets `still` if a
   fixed point was reached. A half-step updates half of the layers, so an alternating sample is at its fixed point only
   after two half-steps in a row without a change. */
static int64_t relax_cell(const Conv *p, Cell *cell, int64_t T, int *still) {
    int quiet = 0;
    *still = 0;
    for (int64_t t = 0; t < T; t++) {
        const int alternating = (int)p->task.alternating;
        const Manner manner = {.parity = alternating ? (int)((T - 1 - t) % 2) : -1, .watch = (int)p->task.settled};
        step(p, cell, &manner);
        if (p->task.settled && !cell->moved && (!alternating || quiet)) {
            *still = 1;
            return t + 1;
        }
        quiet = !cell->moved;
    }
    return T;
}

/* Copy an image with its border, as `respond` needs it. */
static void see(const Conv *p, const real *image, real *visible) {
    const Filters f = filters_of(p, p->maps - 1);
    const real *ready = with_border(p, &f, image, visible);
    if (ready != visible) memcpy(visible, ready, f.reach * sizeof(real));
}

static int64_t image_size(const Conv *p) {
    const int64_t *shape = p->shapes + 3 * p->maps;
    return shape[0] * shape[1] * shape[2];
}

/* Pack the filters of every network for this rank's channels. */
static void pack_all(const Conv *p, const Packed *packed, const Team *team, int rank) {
    for (int64_t network = 0; network < p->task.networks; network++)
        for (int64_t n = 0; n < p->maps; n++) {
            const Filters f = filters_of(p, n);
            int64_t first, last;
            share(f.channels, team, rank, &first, &last);
            pack_filters(&f, p->kernel, value_of(p, FILTER, n, network),
                         packed->by_input[n] + network * p->kernel * f.run * vectors_of(f.channels),
                         packed->by_row[n] + network * p->kernel * f.channels * f.run_padded, first, last);
        }
}

static void carve_packed(Arena *arena, const Conv *p, Packed *packed) {
    packed->by_input = carve(arena, p->maps * sizeof(real *));
    packed->by_row = carve(arena, p->maps * sizeof(real *));
    packed->starts = carve(arena, p->maps * sizeof(int64_t *));
    for (int64_t n = 0; n < p->maps; n++) {
        const Filters f = filters_of(p, n);
        const int64_t copies = p->task.networks * p->kernel;
        real *by_input = carve(arena, copies * f.run * vectors_of(f.channels) * sizeof(real));
        real *by_row = carve(arena, copies * f.channels * f.run_padded * sizeof(real));
        int64_t *starts = carve(arena, f.positions * sizeof(int64_t));
        if (!arena->base) continue;
        for (int64_t i = 0; i < f.positions; i++) starts[i] = (i / f.across * f.columns + i % f.across) * f.below;
        packed->by_input[n] = by_input, packed->by_row[n] = by_row, packed->starts[n] = starts;
    }
}

/* The memory of every thread, and the packed weights that they share. */
static Cell *carve_cells(Arena *arena, const Conv *p, Packed *packed) {
    Cell *cells = carve(arena, p->task.threads * sizeof(Cell)), spare;
    carve_packed(arena, p, packed);
    for (int64_t i = 0; i < p->task.threads; i++) {
        Cell *cell = arena->base ? &cells[i] : &spare;
        carve_cell(arena, p, cell);
        cell->packed = packed;
    }
    return cells;
}

#endif
