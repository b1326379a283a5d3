/* BPTT through the last K steps, by hand.

   A forward step is s' = clip(u), u = (1 - eps) s + eps sigma'(s) input(r), r = sigma(s), in the energy-based setting, and
   s' = sigma(input(s)) in the prototypical one. With g' = dL/ds', each layer passes back e = gain g', and
       dL/ds^n = leak g'^n + slope (W_{n-1,n}^T e^{n-1} + W_{n,n+1} e^{n+1}),
       dL/dW_{n,n+1} = sum over steps of e^n r^{n+1}^T + r^n e^{n+1}^T,
   without the leak and with slope 1 in the prototypical setting  [eq:bptt-state, eq:bptt-param]. */
#ifndef EQPROP_LAYERED_BPTT_H
#define EQPROP_LAYERED_BPTT_H

#include "layered_train.h"

/* Row of the tile's first sample at step t in the trail, which is (R, K, B). */
static int64_t trail_row(const Layered *p, const Tile *tile, int64_t sample, int64_t t) {
    return (tile->network * p->task.K + t) * p->task.batch + sample - tile->network * p->task.batch;
}

/* Record the last K steps. At a fixed point, one record serves all steps. */
static void run_recorded(Training *job, Tile *tile, int64_t sample, int still) {
    const Layered *p = job->p;
    for (int64_t t = 0; t < p->task.K; t++) {
        for (int64_t n = 0; n < p->depth; n++)
            put_rows(p, tile, n, job->trail[n] + trail_row(p, tile, sample, t) * row_of(p->sizes[n]));
        if (still && t > 0) continue;
        const Manner manner = {.parity = -1, .records = tile->records + t * p->depth};
        step(p, tile, &manner);
    }
}

/* Store e = gain dL/ds' of every layer at step t in the shared rows; the last layer's is also added to its sum. */
static void pass_back(Training *job, Tile *tile, int64_t sample, int64_t t, const Record *records) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++) {
        const int64_t row = row_of(p->sizes[n]);
        real *signal = job->errors[n] + trail_row(p, tile, sample, t) * row;
        real *sum = n == p->depth - 1 ? job->error_sum + sample * row : 0;
        for (int64_t j = 0; j < tile->samples * row; j += VL) {
            const vec e = load(records[n].gain + j) * load(tile->errors[n] + j);
            store(signal + j, e);
            if (sum) store(sum + j, load(sum + j) + e);
        }
        for (int m = 0; m < tile->samples; m++) job->notes.wild[sample + m] |= is_wild(signal + m * row, row);
        tile->signal[n] = signal;
    }
}

/* dL/ds of every layer one step earlier. */
static void step_back(const Layered *p, Tile *tile, const Record *records) {
    for (int64_t n = 0; n < p->depth; n++) couple(p, tile, n, tile->signal, (Rows){0, 0});
    for (int64_t n = 0; n < p->depth; n++) {
        const int64_t row = row_of(p->sizes[n]);
        for (int m = 0; m < tile->samples; m++)
            for (int64_t j = m * row; j < m * row + vectors_of(p->sizes[n]); j += VL) {
                vec error = load(tile->inputs[n] + j);
                if (p->energy_based)
                    error = load(records[n].leak + j) * load(tile->errors[n] + j) + load(records[n].slope + j) * error;
                store(tile->errors[n] + j, error);
            }
    }
}

/* dL/ds at the end: s0 - y at the output, zero elsewhere. */
static void begin_back(Training *job, Tile *tile, int64_t sample) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++)
        memset(tile->errors[n], 0, tile->samples * row_of(p->sizes[n]) * sizeof(real));
    for (int64_t j = 0; j < tile->samples * row_of(p->sizes[0]); j += VL)
        store(tile->errors[0] + j, load(tile->states[0] + j) - load(tile->targets + j));
    const int64_t row = row_of(p->sizes[p->depth - 1]);
    memset(job->error_sum + sample * row, 0, tile->samples * row * sizeof(real));
}

/* BPTT: T - K free steps, K recorded ones, and back through them. */
static void unroll(Training *job, Tile *tile, int64_t sample, const int64_t *order) {
    const Layered *p = job->p;
    const int still = relax_tile(p, tile, p->task.T - p->task.K);
    run_recorded(job, tile, sample, still);
    judge_tile(job, tile, sample, order);
    begin_back(job, tile, sample);
    for (int64_t n = 0; n < p->depth; n++)
        for (int m = 0; m < tile->samples; m++)
            job->notes.wild[sample + m] |= is_wild(tile->rates[n] + m * row_of(p->sizes[n]), row_of(p->sizes[n]));
    const Manner look = {.parity = -1, .watch = 1};
    step(p, tile, &look);
    keep_residual(job, tile, sample);
    for (int64_t t = p->task.K - 1; t >= 0; t--) {
        const Record *records = tile->records + (still ? 0 : t) * p->depth;
        pass_back(job, tile, sample, t, records);
        if (t > 0) step_back(p, tile, records);
    }
}

#endif
