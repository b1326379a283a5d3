/* Layered nets: the caller's arguments, and the state of a few samples while they relax. */
#ifndef EQPROP_LAYERED_H
#define EQPROP_LAYERED_H

#include "neurons.h"
#include "products.h"

/* Filled in by Python, in this order. Layer 0 is the output; depth counts the dynamic layers. */
typedef struct {
    Task task;
    int64_t depth, energy_based, clip, output_slope;
    double eps;
    const int64_t *sizes;          /* depth + 1, the input last */
    const int64_t *apart;          /* depth: distance between rows of a weight matrix */
    real *const *weights;          /* depth: (R, sizes[n], apart[n]) */
    real *const *biases;           /* depth: (R, padded sizes[n]); null without biases */
    real *const *weight_gradients; /* like weights; written only on request or if something may not be finite */
    real *const *bias_gradients;   /* like biases */
    const double *weight_rates;    /* depth: learning rates; NaN: not trained */
    const double *bias_rates;
    const real *const *start;      /* initial state, (R, B, sizes[n]); null for zeros */
    real *const *state;            /* out: end of the free phase; may be null in training */
} Layered;

/* A few samples of one network while they relax. Arrays have one row per sample. */
typedef struct {
    int samples, active;          /* active: samples that still move; they come first */
    int64_t network;
    real **rates, **states, **inputs; /* per layer; in the prototypical setting states are the rates */
    real *drive;                  /* W x + b of the layer next to the input */
    real *visible, *own_drive;    /* input and drive of a relaxation outside training */
    const real *targets;          /* rows of row_of(sizes[0]) */
    int place[MOST_SAMPLES];      /* the sample in each row */
    int moved[MOST_SAMPLES], quiet[MOST_SAMPLES];
    int64_t steps[MOST_SAMPLES];
    real residual[MOST_SAMPLES];
    real **errors, **signal;      /* BPTT: dL/ds per layer, and the error a step passes back to its neighbours */
    Record *records;              /* BPTT: (K, depth) */
} Tile;

static inline void carve_layers(Arena *arena, const Layered *p, real ***layers, int64_t rows) {
    real **pointers = carve(arena, p->depth * sizeof(real *));
    for (int64_t n = 0; n < p->depth; n++) {
        real *layer = carve(arena, rows * row_of(p->sizes[n]) * sizeof(real));
        if (pointers) pointers[n] = layer;
    }
    *layers = pointers;
}

static void carve_tile(Arena *arena, const Layered *p, Tile *tile) {
    carve_layers(arena, p, &tile->rates, MOST_SAMPLES);
    tile->states = tile->rates;
    if (p->energy_based) carve_layers(arena, p, &tile->states, MOST_SAMPLES);
    carve_layers(arena, p, &tile->inputs, MOST_SAMPLES);
    tile->visible = carve(arena, MOST_SAMPLES * row_of(p->sizes[p->depth]) * sizeof(real));
    tile->own_drive = carve(arena, MOST_SAMPLES * row_of(p->sizes[p->depth - 1]) * sizeof(real));
    if (!p->task.bptt) return;
    carve_layers(arena, p, &tile->errors, MOST_SAMPLES);
    tile->signal = carve(arena, p->depth * sizeof(real *));
    Record *records = carve(arena, p->task.K * p->depth * sizeof(Record));
    for (int64_t i = 0; i < p->task.K * p->depth; i++) {
        const size_t bytes = MOST_SAMPLES * row_of(p->sizes[i % p->depth]) * sizeof(real);
        real *gain = carve(arena, bytes);
        real *leak = p->energy_based ? carve(arena, bytes) : 0;
        real *slope = p->energy_based ? carve(arena, bytes) : 0;
        if (records) records[i] = (Record){gain, leak, slope};
    }
    tile->records = records;
}

/* Copy the tile's state to the caller, starting at row `sample`. */
static void hand_back(const Layered *p, const Tile *tile, int64_t sample) {
    for (int m = 0; m < tile->samples; m++)
        for (int64_t n = 0; n < p->depth; n++)
            memcpy(p->state[n] + (sample + m) * p->sizes[n], tile->states[n] + m * row_of(p->sizes[n]),
                   p->sizes[n] * sizeof(real));
}

static inline Rows weight_rows(const Layered *p, int64_t n, int64_t network) {
    return (Rows){p->weights[n] + network * p->sizes[n] * p->apart[n], p->apart[n]};
}

static inline const real *bias_row(const Layered *p, int64_t n, int64_t network) {
    return p->biases ? p->biases[n] + network * padded(p->sizes[n]) : 0;
}

#endif
