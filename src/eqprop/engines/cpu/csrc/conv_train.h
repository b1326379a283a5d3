/* Training of convolutional nets: the phases of one sample, EP and BPTT. */
#ifndef EQPROP_CONV_TRAIN_H
#define EQPROP_CONV_TRAIN_H

#include "conv_step.h"

/* Shared by the threads. Rows of EP are indexed by sample, those of BPTT by (R, K, B). */
typedef struct {
    const Conv *p;
    Cell *cells;                            /* one per thread */
    Packed packed;
    real *visible, *targets;                /* (R B) rows: bordered images, and targets */
    whole *drive_windows;                   /* (R B) rows */
    real **free, **nudged, **moved;         /* EP: states after both phases, and their difference, per layer */
    whole **free_windows, **nudged_windows; /* EP: per set of filters */
    real **trail, **errors;                 /* BPTT: state before each of the K steps, and the error it passes back */
    whole **trail_windows;
    real *error_sum;                        /* BPTT: errors of the last map, summed over the steps; (R B) rows */
    Notes notes;
} Training;

static void carve_training(Arena *arena, const Conv *p, Training *job) {
    const int64_t samples = p->task.networks * p->task.batch, last = row_of(size_of(p, layers_of(p) - 1));
    job->p = p;
    job->cells = carve_cells(arena, p, &job->packed);
    job->visible = carve(arena, samples * row_of(filters_of(p, p->maps - 1).reach) * sizeof(real));
    job->targets = carve(arena, samples * row_of(p->flat_sizes[0]) * sizeof(real));
    job->drive_windows = carve(arena, samples * last * sizeof(whole));
    if (p->task.bptt) {
        carve_rows(arena, p, &job->trail, samples * p->task.K);
        carve_rows(arena, p, &job->errors, samples * p->task.K);
        carve_windows(arena, p, &job->trail_windows, samples * p->task.K);
        job->error_sum = carve(arena, samples * last * sizeof(real));
    } else {
        carve_rows(arena, p, &job->free, samples);
        carve_rows(arena, p, &job->nudged, samples);
        carve_rows(arena, p, &job->moved, samples);
        carve_windows(arena, p, &job->free_windows, samples);
        carve_windows(arena, p, &job->nudged_windows, samples);
    }
    carve_notes(arena, &p->task, &job->notes);
}

static void put_states(const Conv *p, const Cell *cell, real *const *rows, int64_t row) {
    for (int64_t layer = 0; layer < layers_of(p); layer++) {
        const int64_t length = row_of(size_of(p, layer));
        memcpy(rows[layer] + row * length, cell->states[layer], length * sizeof(real));
    }
}

static void put_windows(const Conv *p, const Cell *cell, whole *const *rows, int64_t row) {
    for (int64_t n = 0; n + 1 < p->maps; n++) {
        const int64_t length = row_of(size_of(p, p->flats + n));
        memcpy(rows[n] + row * length, cell->windows[n], length * sizeof(whole));
    }
}

static int states_are_wild(const Conv *p, const Cell *cell) {
    int wild = 0;
    for (int64_t layer = 0; layer < layers_of(p); layer++) wild |= is_wild(cell->states[layer], size_of(p, layer));
    return wild;
}

/* Score the outputs, and return the state if requested. */
static void end_free_phase(Training *job, const Cell *cell, int64_t sample, int64_t label) {
    const Conv *p = job->p;
    judge(&p->task, &job->notes, sample, cell->states[0], cell->target, p->flat_sizes[0], label);
    job->notes.wild[sample] |= states_are_wild(p, cell);
    if (p->state) hand_back(p, cell, sample);
}

/* K nudged steps, `sign` times beta, and their end; the first also gives the residual of the free state if requested. */
static void nudge_cell(Training *job, Cell *cell, int64_t sample, double sign, int watch, real *const *states,
                       whole *const *windows) {
    const Conv *p = job->p;
    Manner manner = {.parity = -1, .watch = watch, .nudge = (real)(-sign * p->task.beta[cell->network])};
    for (int64_t k = 0; k < p->task.K; k++) {
        step(p, cell, &manner);
        if (k == 0 && watch) job->notes.residual[sample] = cell->residual;
        manner.watch = 0;
    }
    put_states(p, cell, states, sample);
    job->notes.wild[sample] |= states_are_wild(p, cell);
    for (int64_t n = 0; n + 1 < p->maps; n++) refresh(p, cell, n);
    put_windows(p, cell, windows, sample);
}

/* Back to the free state. */
static void return_cell(const Training *job, Cell *cell, int64_t sample) {
    const Conv *p = job->p;
    for (int64_t layer = 0; layer < layers_of(p); layer++) {
        const int64_t length = row_of(size_of(p, layer));
        memcpy(cell->states[layer], job->free[layer] + sample * length, length * sizeof(real));
    }
    memset(cell->fresh, 0, p->maps * sizeof(int));
}

/* EP: T free steps, K nudged ones, and the difference between their ends  [eq:delta-ep]; symmetric EP: the difference
   between the ends of two nudged phases, the second in the place of the free one. */
static void both_phases(Training *job, Cell *cell, int64_t sample, int64_t label) {
    const Conv *p = job->p;
    int still;
    relax_cell(p, cell, p->task.T, &still);
    put_states(p, cell, job->free, sample);
    end_free_phase(job, cell, sample, label);
    for (int64_t n = 0; n + 1 < p->maps; n++) refresh(p, cell, n);
    put_windows(p, cell, job->free_windows, sample);
    nudge_cell(job, cell, sample, 1.0, 1, job->nudged, job->nudged_windows);
    if (p->task.symmetric) {
        return_cell(job, cell, sample);
        nudge_cell(job, cell, sample, -1.0, 0, job->free, job->free_windows);
    }
    for (int64_t layer = 0; layer < layers_of(p); layer++) {
        const int64_t row = row_of(size_of(p, layer));
        for (int64_t j = 0; j < row; j += VL)
            store(job->moved[layer] + sample * row + j,
                  load(job->nudged[layer] + sample * row + j) - load(job->free[layer] + sample * row + j));
    }
}

/* BPTT: store e = gain dL/ds' of every layer at one step; the last map's is also added to its sum over the steps. */
static void pass_back(Training *job, Cell *cell, int64_t sample, int64_t row, const Record *records) {
    const Conv *p = job->p;
    for (int64_t layer = 0; layer < layers_of(p); layer++) {
        const int64_t length = row_of(size_of(p, layer));
        real *signal = job->errors[layer] + row * length;
        real *sum = layer == layers_of(p) - 1 ? job->error_sum + sample * length : 0;
        for (int64_t j = 0; j < vectors_of(size_of(p, layer)); j += VL) {
            const vec e = load(records[layer].gain + j) * load(cell->errors[layer] + j);
            store(signal + j, choose(below(size_of(p, layer) - j), e, all(0)));
            if (sum) store(sum + j, load(sum + j) + load(signal + j));
        }
        job->notes.wild[sample] |= is_wild(signal, size_of(p, layer));
        cell->signal[layer] = signal;
    }
}

/* dL/ds of every layer one step earlier: the transpose of `couple`, with the recorded maxima. */
static void step_back(const Conv *p, Cell *cell, whole *const *windows, int64_t row) {
    for (int64_t layer = 0; layer < layers_of(p); layer++) {
        const int64_t n = layer - p->flats;
        if (n <= 0) couple_flat(p, cell, layer, cell->signal, 0);
        else memset(cell->inputs[layer], 0, row_of(size_of(p, layer)) * sizeof(real));
        if (n >= 1)
            send_back(p, cell, n - 1, cell->signal[layer - 1], windows[n - 1] + row * row_of(size_of(p, layer - 1)));
        if (n >= 0 && n + 1 < p->maps) {
            const Filters f = filters_of(p, n);
            gather_windows(p, &f, by_row_of(p, cell, n), cell->packed->starts[n],
                           with_border(p, &f, cell->signal[layer + 1], cell->border),
                           windows[n] + row * row_of(size_of(p, layer)), cell->inputs[layer]);
        }
    }
    for (int64_t layer = 0; layer < layers_of(p); layer++)
        memcpy(cell->errors[layer], cell->inputs[layer], row_of(size_of(p, layer)) * sizeof(real));
}

/* BPTT: T - K free steps, K recorded ones, and back through them. At a fixed point, one record serves all steps. */
static void unroll(Training *job, Cell *cell, int64_t sample, int64_t label) {
    const Conv *p = job->p;
    const int64_t K = p->task.K, batch = p->task.batch, first = cell->network * (K - 1) * batch + sample;
    int still;
    relax_cell(p, cell, p->task.T - K, &still);
    for (int64_t t = 0; t < K; t++) {
        put_states(p, cell, job->trail, first + t * batch);
        for (int64_t n = 0; n + 1 < p->maps; n++) refresh(p, cell, n);
        put_windows(p, cell, job->trail_windows, first + t * batch);
        if (still && t > 0) continue;
        const Manner manner = {.parity = -1, .records = cell->records + t * layers_of(p)};
        step(p, cell, &manner);
    }
    end_free_phase(job, cell, sample, label);
    for (int64_t layer = 0; layer < layers_of(p); layer++)
        memset(cell->errors[layer], 0, row_of(size_of(p, layer)) * sizeof(real));
    for (int64_t j = 0; j < p->flat_sizes[0]; j++) cell->errors[0][j] = cell->states[0][j] - cell->target[j];
    const int64_t last = row_of(size_of(p, layers_of(p) - 1));
    memset(job->error_sum + sample * last, 0, last * sizeof(real));
    const Manner look = {.parity = -1, .watch = 1};
    step(p, cell, &look);
    job->notes.residual[sample] = cell->residual;
    for (int64_t t = K - 1; t >= 0; t--) {
        pass_back(job, cell, sample, first + t * batch, cell->records + (still ? 0 : t) * layers_of(p));
        if (t > 0) step_back(p, cell, job->trail_windows, first + t * batch);
    }
}

/* Run the phases of one sample of the mini-batch. */
static void run_sample(Training *job, Cell *cell, int64_t sample, int64_t image) {
    const Conv *p = job->p;
    const int64_t reach = filters_of(p, p->maps - 1).reach, outputs = p->flat_sizes[0];
    real *visible = job->visible + sample * row_of(reach), *target = job->targets + sample * row_of(outputs);
    see(p, p->task.images + image * image_size(p), visible);
    memcpy(target, p->task.targets + image * outputs, outputs * sizeof(real));
    job->notes.wild[sample] = is_wild(visible, reach);
    cell->network = sample / p->task.batch;
    cell->target = target;
    hear(p, cell, p->maps - 1, visible, cell->drive,
         job->drive_windows + sample * row_of(size_of(p, layers_of(p) - 1)));
    start_cell(p, cell, p->start, sample);
    if (p->task.bptt) unroll(job, cell, sample, image);
    else both_phases(job, cell, sample, image);
}

#endif
