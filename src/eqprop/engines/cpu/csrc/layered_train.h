/* Training of layered nets: the mini-batch, the phases of EP, and the counts. */
#ifndef EQPROP_LAYERED_TRAIN_H
#define EQPROP_LAYERED_TRAIN_H

#include "layered_step.h"

/* Shared by the threads. */
typedef struct {
    const Layered *p;
    Tile *tiles;                     /* one per thread */
    real *visible, *drive, *targets; /* (R B) rows */
    real **free, **nudged, **moved;  /* EP: rates after both phases, and their difference; (R B) rows per layer */
    real **trail, **errors;          /* BPTT: rates before each of the K steps, errors passed back; (R, K, B) rows */
    real *error_sum;                 /* BPTT: errors of the last layer, summed over the steps; (R B) rows */
    Notes notes;
} Training;

static void carve_training(Arena *arena, const Layered *p, Training *job) {
    const int64_t samples = p->task.networks * p->task.batch, last = p->depth - 1;
    job->p = p;
    job->tiles = carve(arena, p->task.threads * sizeof(Tile));
    Tile spare;
    for (int64_t i = 0; i < p->task.threads; i++) carve_tile(arena, p, arena->base ? &job->tiles[i] : &spare);
    job->visible = carve(arena, samples * row_of(p->sizes[p->depth]) * sizeof(real));
    job->drive = carve(arena, samples * row_of(p->sizes[last]) * sizeof(real));
    job->targets = carve(arena, samples * row_of(p->sizes[0]) * sizeof(real));
    if (p->task.bptt) {
        carve_layers(arena, p, &job->trail, samples * p->task.K);
        carve_layers(arena, p, &job->errors, samples * p->task.K);
        job->error_sum = carve(arena, samples * row_of(p->sizes[last]) * sizeof(real));
    } else {
        carve_layers(arena, p, &job->free, samples);
        carve_layers(arena, p, &job->nudged, samples);
        carve_layers(arena, p, &job->moved, samples);
    }
    carve_notes(arena, &p->task, &job->notes);
}

/* Gather inputs and targets of this rank's samples of the mini-batch. */
static void gather(const Training *job, const int64_t *order, int64_t first, int64_t last) {
    const Layered *p = job->p;
    const int64_t inputs = p->sizes[p->depth], outputs = p->sizes[0];
    for (int64_t i = first; i < last; i++) {
        real *visible = job->visible + i * row_of(inputs);
        see(p, p->task.images + order[i] * inputs, visible);
        memcpy(job->targets + i * row_of(outputs), p->task.targets + order[i] * outputs, outputs * sizeof(real));
        job->notes.wild[i] = is_wild(visible, inputs);
    }
}

/* The end of the free phase: score the outputs, and return the state if requested. */
static void judge_tile(Training *job, const Tile *tile, int64_t sample, const int64_t *order) {
    const Layered *p = job->p;
    const int64_t row = row_of(p->sizes[0]);
    if (p->state) hand_back(p, tile, sample);
    for (int m = 0; m < tile->samples; m++)
        judge(&p->task, &job->notes, sample + m, tile->states[0] + m * row, tile->targets + m * row, p->sizes[0],
              order[sample + m]);
}

static void keep_residual(Training *job, const Tile *tile, int64_t sample) {
    for (int m = 0; m < tile->samples; m++) job->notes.residual[sample + m] = tile->residual[m];
}

static void put_rows(const Layered *p, const Tile *tile, int64_t n, real *to) {
    memcpy(to, tile->rates[n], tile->samples * row_of(p->sizes[n]) * sizeof(real));
}

/* K nudged steps, `sign` times beta; the first also gives the residual of the free state if requested. */
static void nudge_tile(Training *job, Tile *tile, int64_t sample, double sign, int watch) {
    const Layered *p = job->p;
    const double beta = sign * p->task.beta[tile->network];
    Manner manner = {.parity = -1, .watch = watch, .nudge = (real)(-beta * (p->energy_based ? p->eps : 1.0))};
    for (int64_t k = 0; k < p->task.K; k++) {
        step(p, tile, &manner);
        if (k == 0 && watch) keep_residual(job, tile, sample);
        manner.watch = 0;
    }
}

/* Symmetric EP: back to the free state, kept in `moved` and `free`, and nudged the other way, whose end replaces `free`. */
static void nudge_back(Training *job, Tile *tile, int64_t sample) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++) {
        const int64_t row = row_of(p->sizes[n]), bytes = tile->samples * row * sizeof(real);
        memcpy(tile->states[n], job->moved[n] + sample * row, bytes);
        memcpy(tile->rates[n], job->free[n] + sample * row, bytes);
    }
    nudge_tile(job, tile, sample, -1.0, 0);
    for (int64_t n = 0; n < p->depth; n++) put_rows(p, tile, n, job->free[n] + sample * row_of(p->sizes[n]));
}

/* EP: T free steps, K nudged ones, and the difference between their ends  [eq:delta-ep]; symmetric EP: the difference
   between the ends of two nudged phases. */
static void both_phases(Training *job, Tile *tile, int64_t sample, const int64_t *order) {
    const Layered *p = job->p;
    relax_tile(p, tile, p->task.T);
    for (int64_t n = 0; n < p->depth; n++) {
        const int64_t row = row_of(p->sizes[n]);
        put_rows(p, tile, n, job->free[n] + sample * row);
        if (p->task.symmetric) memcpy(job->moved[n] + sample * row, tile->states[n], tile->samples * row * sizeof(real));
    }
    judge_tile(job, tile, sample, order);
    nudge_tile(job, tile, sample, 1.0, 1);
    for (int64_t n = 0; n < p->depth; n++) put_rows(p, tile, n, job->nudged[n] + sample * row_of(p->sizes[n]));
    if (p->task.symmetric) nudge_back(job, tile, sample);
    for (int64_t n = 0; n < p->depth; n++) {
        const int64_t row = row_of(p->sizes[n]);
        const real *free = job->free[n] + sample * row, *nudged = job->nudged[n] + sample * row;
        real *moved = job->moved[n] + sample * row;
        for (int64_t j = 0; j < tile->samples * row; j += VL) store(moved + j, load(nudged + j) - load(free + j));
        for (int m = 0; m < tile->samples; m++)
            job->notes.wild[sample + m] |= is_wild(nudged + m * row, row) | is_wild(free + m * row, row);
    }
}

#endif
