/* Convolutional nets: the caller's arguments, the shapes, and the state of one sample while it relaxes.

   Maps are stored channels last, (height, width, channels), so that channels fill the vectors; Python passes everything
   in that order. Layers are numbered from the output: flat ones, then maps. */
#ifndef EQPROP_CONV_H
#define EQPROP_CONV_H

#include "neurons.h"
#include "products.h"

/* Filled in by Python, in this order. Parameters are ordered: flat weights, filters, flat biases, filter biases. Filters
   are (channels, kernel, run), where a run is the kernel * channels-below numbers of one row of the window, padded to
   cache lines. */
typedef struct {
    Task task;
    int64_t flats, maps, kernel, padding, pool, biased;
    const int64_t *flat_sizes;  /* flats */
    const int64_t *shapes;      /* (maps + 1, 3): channels, height, width; the image last */
    real *const *values;        /* (R, rows, apart) each */
    real *const *gradients;     /* like values */
    const int64_t *rows, *apart;
    const double *rates;        /* learning rates; NaN: not trained */
    const real *const *start;   /* initial state, (R, B, size); null for zeros */
    real *const *state;         /* out: end of the free phase; may be null in training */
} Conv;

/* The filters between maps n and n + 1, and the sizes that follow from them. */
typedef struct {
    int64_t channels, height, width; /* of map n, after pooling */
    int64_t zones;                   /* height * width */
    int64_t below, rows, columns;    /* channels of map n + 1, and its height and width with the border of zeros */
    int64_t inner_rows, inner_columns;
    int64_t run, run_padded;
    int64_t reach;                   /* numbers of map n + 1 with its border */
    int64_t across, positions;       /* window positions per row and in all, without those that pooling drops */
} Filters;

static Filters filters_of(const Conv *p, int64_t n) {
    const int64_t *out = p->shapes + 3 * n, *in = out + 3;
    Filters f = {.channels = out[0], .height = out[1], .width = out[2], .zones = out[1] * out[2], .below = in[0],
                 .rows = in[1] + 2 * p->padding, .columns = in[2] + 2 * p->padding, .inner_rows = in[1],
                 .inner_columns = in[2], .run = p->kernel * in[0]};
    f.run_padded = padded(f.run);
    f.reach = f.rows * f.columns * f.below;
    f.across = f.width * p->pool;
    f.positions = f.across * f.height * p->pool;
    return f;
}

static inline int64_t layers_of(const Conv *p) { return p->flats + p->maps; }

static inline int64_t size_of(const Conv *p, int64_t layer) {
    if (layer < p->flats) return p->flat_sizes[layer];
    const int64_t *shape = p->shapes + 3 * (layer - p->flats);
    return shape[0] * shape[1] * shape[2];
}

enum kind_of_parameter { FLAT_WEIGHT, FILTER, FLAT_BIAS, FILTER_BIAS };

static inline int64_t parameter(const Conv *p, int kind, int64_t n) {
    const int64_t first[] = {0, p->flats, p->flats + p->maps, 2 * p->flats + p->maps};
    return first[kind] + n;
}
static inline int64_t parameters_of(const Conv *p) { return (p->biased ? 2 : 1) * layers_of(p); }

static inline real *value_of(const Conv *p, int kind, int64_t n, int64_t network) {
    const int64_t i = parameter(p, kind, n);
    return p->values[i] + network * p->rows[i] * p->apart[i];
}
static inline real *gradient_of(const Conv *p, int kind, int64_t n, int64_t network) {
    const int64_t i = parameter(p, kind, n);
    return p->gradients[i] + network * p->rows[i] * p->apart[i];
}
static inline const real *bias_of(const Conv *p, int kind, int64_t n, int64_t network) {
    return p->biased ? value_of(p, kind, n, network) : 0;
}
static inline Rows flat_rows(const Conv *p, int64_t n, int64_t network) {
    return (Rows){value_of(p, FLAT_WEIGHT, n, network), p->apart[parameter(p, FLAT_WEIGHT, n)]};
}

/* A nonzero value and its place: the start of its window, or its channel. */
typedef struct {
    int64_t place;
    real value;
} Mark;

/* Repacked filters, renewed whenever the filters change; one entry per set of filters. */
typedef struct {
    real **by_input; /* (R, kernel, run, channels), for `respond` */
    real **by_row;   /* (R, kernel, channels, run), for `scatter` */
    int64_t **starts; /* start of the window at each position */
} Packed;

/* One sample while it relaxes. */
typedef struct {
    int64_t network;
    const Packed *packed;
    real **states, **inputs;          /* per layer */
    real **responses;                 /* per layer: P(W * h), the input of map n from map n + 1 */
    whole **windows;                  /* positions of the maxima, by zone and channel */
    int *fresh;                       /* whether response and windows are up to date */
    real *drive;                      /* the response to the image */
    const real *target;
    real *band, *border;              /* scratch: a row of zones before pooling, a map with its border of zeros */
    Mark *marks;                      /* scratch: (positions, channels) */
    int64_t *counts;                  /* scratch: (positions) */
    const real **starts;              /* scratch: windows of a row of zones */
    int moved;
    real residual;
    real **errors, **signal;          /* BPTT: dL/ds per layer, and the error a step passes back */
    Record *records;                  /* BPTT: (K, layers) */
} Cell;

static inline void carve_rows(Arena *arena, const Conv *p, real ***layers, int64_t rows) {
    real **pointers = carve(arena, layers_of(p) * sizeof(real *));
    for (int64_t l = 0; l < layers_of(p); l++) {
        real *layer = carve(arena, rows * row_of(size_of(p, l)) * sizeof(real));
        if (pointers) pointers[l] = layer;
    }
    *layers = pointers;
}

/* Rows of window positions for every set of filters. */
static inline void carve_windows(Arena *arena, const Conv *p, whole ***windows, int64_t rows) {
    whole **pointers = carve(arena, p->maps * sizeof(whole *));
    for (int64_t n = 0; n < p->maps; n++) {
        whole *row = carve(arena, rows * row_of(size_of(p, p->flats + n)) * sizeof(whole));
        if (pointers) pointers[n] = row;
    }
    *windows = pointers;
}

static void carve_scratch(Arena *arena, const Conv *p, Cell *cell) {
    int64_t band = 0, reach = 0, places = 0, marks = 0;
    for (int64_t n = 0; n < p->maps; n++) {
        const Filters f = filters_of(p, n);
        const int64_t wide = p->pool * f.across * vectors_of(f.channels), lists = f.positions * (f.channels + 1);
        band = wide > band ? wide : band;
        reach = f.reach > reach ? f.reach : reach;
        places = f.positions > places ? f.positions : places;
        marks = lists > marks ? lists : marks;
    }
    cell->band = carve(arena, band * sizeof(real));
    cell->border = carve(arena, row_of(reach) * sizeof(real));
    cell->marks = carve(arena, marks * sizeof(Mark));
    cell->counts = carve(arena, places * sizeof(int64_t));
    cell->starts = carve(arena, places * sizeof(real *));
}

static void carve_cell(Arena *arena, const Conv *p, Cell *cell) {
    carve_rows(arena, p, &cell->states, 1);
    carve_rows(arena, p, &cell->inputs, 1);
    carve_rows(arena, p, &cell->responses, 1);
    carve_windows(arena, p, &cell->windows, 1);
    cell->fresh = carve(arena, p->maps * sizeof(int));
    cell->drive = carve(arena, row_of(size_of(p, layers_of(p) - 1)) * sizeof(real));
    carve_scratch(arena, p, cell);
    if (!p->task.bptt) return;
    carve_rows(arena, p, &cell->errors, 1);
    cell->signal = carve(arena, layers_of(p) * sizeof(real *));
    Record *records = carve(arena, p->task.K * layers_of(p) * sizeof(Record));
    for (int64_t i = 0; i < p->task.K * layers_of(p); i++) {
        real *gain = carve(arena, row_of(size_of(p, i % layers_of(p))) * sizeof(real));
        if (records) records[i] = (Record){.gain = gain};
    }
    cell->records = records;
}

/* Copy a sample's state to the caller. */
static void hand_back(const Conv *p, const Cell *cell, int64_t sample) {
    for (int64_t layer = 0; layer < layers_of(p); layer++)
        memcpy(p->state[layer] + sample * size_of(p, layer), cell->states[layer], size_of(p, layer) * sizeof(real));
}

#endif
