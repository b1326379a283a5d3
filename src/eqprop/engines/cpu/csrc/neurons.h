/* The neurons' response to their input, one row (one sample) at a time. */
#ifndef EQPROP_NEURONS_H
#define EQPROP_NEURONS_H

#include "task.h"

/* out = sigma(row), with zero padding. */
static void activate(int64_t kind, const real *row, real *out, int64_t size) {
    for (int64_t j = 0; j < vectors_of(size); j += VL) {
        vec v = load(row + j);
        switch (kind) {
        case TANH: v = sigma(TANH, v); break;
        case SIGMOID: v = sigma(SIGMOID, v); break;
        default: v = sigma(HARD_SIGMOID, v);
        }
        store(out + j, choose(below(size - j), v, all(0)));
    }
}

/* What a backward step needs from its forward step, rows of one layer each. */
typedef struct {
    real *gain;  /* d(next state) / d(total input), including the clip */
    real *leak;  /* energy-based: d(next state) / d(state) through the neuron itself */
    real *slope; /* energy-based: d(rate) / d(state) */
} Record;

/* One layer's neurons: rows and options. */
typedef struct {
    real *rate, *state;
    const real *input, *target;
    real nudge, eps;
    int clip, sloped, watch, inside; /* inside: prototypical, sigma(input + push) instead of sigma(input) + push */
    Record record;
} Neurons;

/* Both set `gap` to F(x, s) - s, without the nudge. */
INLINE void update_prototypical(const int kind, const Neurons *q, int64_t j, vec *gap) {
    const vec input = load(q->input + j), old = load(q->rate + j);
    vec next = sigma(kind, input);
    if (q->record.gain) store(q->record.gain + j, slope(kind, input, next));
    *gap = magnitude(next - old);
    if (q->nudge != 0) {
        const vec push = q->nudge * (old - load(q->target + j));
        next = q->inside ? sigma(kind, input + push) : next + push;
    }
    store(q->rate + j, next);
}

INLINE void update_energy_based(const int kind, const Neurons *q, int64_t j, vec *gap) {
    const vec input = load(q->input + j), old = load(q->state + j), rate = load(q->rate + j);
    const vec steep = slope(kind, old, rate);
    const vec force = q->sloped ? input * steep : input;
    vec next = (1 - q->eps) * old + q->eps * force;
    if (q->record.gain) {
        const vec inside = q->clip ? choose((next >= 0) & (next <= 1), all(1), all(0)) : all(1);
        const vec bend = q->sloped ? q->eps * (curvature(kind, rate) * input) : all(0);
        store(q->record.gain + j, inside * (q->sloped ? q->eps * steep : all(q->eps)));
        store(q->record.leak + j, inside * ((1 - q->eps) + bend));
        store(q->record.slope + j, steep);
    }
    *gap = magnitude((q->clip ? at_most(at_least(next, 0), 1) : next) - old);
    if (q->nudge != 0) next += q->nudge * (old - load(q->target + j));
    if (q->clip) next = at_most(at_least(next, 0), 1);
    store(q->state + j, next);
    store(q->rate + j, sigma(kind, next));
}

INLINE void update_row(const int kind, const int energy_based, const Neurons *q, int64_t size, int *moved,
                       real *residual) {
    vec furthest = all(0);
    lanes any_moved = {0}, any_nan = {0};
    for (int64_t j = 0; j < vectors_of(size); j += VL) {
        vec gap;
        if (energy_based) update_energy_based(kind, q, j, &gap);
        else update_prototypical(kind, q, j, &gap);
        if (j + VL > size) { /* exclude the padding from all sums */
            const lanes inside = below(size - j);
            gap = choose(inside, gap, all(0));
            store(q->rate + j, choose(inside, load(q->rate + j), all(0)));
        }
        any_moved |= ~(gap <= 0);
        any_nan |= gap != gap;
        furthest = choose(gap > furthest, gap, furthest);
    }
    if (!q->watch) return;
    *moved |= any(any_moved);
    for (int l = 0; l < VL; l++)
        if (furthest[l] > *residual) *residual = furthest[l];
    if (any(any_nan)) *residual = (real)NAN;
}

static void update_neurons(int64_t kind, int64_t energy_based, const Neurons *q, int64_t size, int *moved,
                           real *residual) {
#define CASE(KIND)                                                                                                     \
    case KIND:                                                                                                         \
        if (energy_based) update_row(KIND, 1, q, size, moved, residual);                                               \
        else update_row(KIND, 0, q, size, moved, residual);                                                            \
        break;
    switch (kind) { CASE(TANH) CASE(SIGMOID) CASE(HARD_SIGMOID) }
#undef CASE
}

#endif
