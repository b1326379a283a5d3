/* What every net's job has in common, what is noted of each sample, and how it is counted. */
#ifndef EQPROP_TASK_H
#define EQPROP_TASK_H

#include <math.h>

#include "arena.h"
#include "team.h"
#include "vec.h"

/* Filled in by Python, field by field in this order. Samples are numbered r * batch + b, networks one after another. */
typedef struct {
    int64_t networks, batch, activation;
    int64_t T, K, alternating, settled, bptt, inside; /* inside: the nudge enters sigma's argument */
    int64_t threads, iterations, first, gradients_only;
    double tolerance;
    const double *beta; /* (R): the strength of each network's nudge */
    const real *images, *targets;  /* (N, inputs), (N, outputs) */
    const int64_t *labels, *order; /* (N,), (iterations, R, B) */
    double *tally;                 /* samples, errors, loss, residual, worst, unsettled, bad: (7, R) */
    real *residuals;               /* relaxation: (R, B) */
    int64_t *steps;                /* relaxation: the steps used, (R, B) */
} Task;

enum { SAMPLES, ERRORS, LOSS, RESIDUAL, WORST, UNSETTLED, BAD };

/* From one row of a layer's states to the next: whole cache lines, and one more so that rows do not share their sets. */
static inline int64_t padded(int64_t size) {
    const int64_t line = LINE / (int64_t)sizeof(real);
    return (size + line - 1) / line * line;
}
static inline int64_t row_of(int64_t size) { return padded(size) + LINE / (int64_t)sizeof(real); }
static inline int64_t vectors_of(int64_t size) { return (size + VL - 1) / VL * VL; }

/* Beyond it a number is not trusted to leave every product of a gradient finite; the gradient is then looked at. */
#define TAME ((real)1e9)

static int is_wild(const real *row, int64_t size) {
    lanes found = {0};
    for (int64_t j = 0; j < vectors_of(size); j += VL) found |= ~(magnitude(load(row + j)) <= TAME);
    return any(found);
}

/* What is noted of the samples of an iteration. */
typedef struct {
    double *loss, *residual; /* (R B) */
    int *wrong, *wild;       /* (R B); wild: a number of the sample is not TAME */
    int *spoilt;             /* (threads, R): a gradient is not finite */
} Notes;

static void carve_notes(Arena *arena, const Task *task, Notes *notes) {
    const int64_t samples = task->networks * task->batch;
    notes->loss = carve(arena, samples * sizeof(double));
    notes->residual = carve(arena, samples * sizeof(double));
    notes->wrong = carve(arena, samples * sizeof(int));
    notes->wild = carve(arena, samples * sizeof(int));
    notes->spoilt = carve(arena, task->threads * task->networks * sizeof(int));
}

/* Cost and answer of a sample at the end of its free phase. The first of equal outputs is the answer, and NaN is the
   largest of all, as in torch.argmax. */
static void judge(const Task *task, Notes *notes, int64_t sample, const real *out, const real *target, int64_t outputs,
                  int64_t label) {
    double loss = 0;
    int64_t answer = 0;
    for (int64_t j = 0; j < outputs; j++) {
        const double gap = (double)out[j] - (double)target[j];
        loss += 0.5 * gap * gap;
        if (out[j] > out[answer] || (isnan(out[j]) && !isnan(out[answer]))) answer = j;
    }
    notes->loss[sample] = loss;
    notes->wrong[sample] = answer != task->labels[label];
}

static double gradient_scale(const Task *task, int64_t network) {
    return (task->bptt ? 1.0 : -1.0 / task->beta[network]) / (double)task->batch;
}

/* Whether a parameter is to be trained: its learning rate is a number. */
static int trained(double rate) { return !isnan(rate); }

/* Whether the network's numbers are small enough for its gradients to be finite without a look. */
static int is_tame(const Task *task, const Notes *notes, int64_t network) {
    int wild = task->gradients_only != 0 || fabs(gradient_scale(task, network)) > 1e9;
    for (int64_t b = 0; b < task->batch; b++) wild |= notes->wild[network * task->batch + b];
    return !wild;
}

/* Whether loss and gradients of the network are finite; to be asked after every rank has written its gradients. */
static int is_finite_network(const Task *task, const Notes *notes, int64_t network, const Team *team) {
    for (int64_t b = 0; b < task->batch; b++)
        if (!isfinite((real)notes->loss[network * task->batch + b])) return 0;
    for (int rank = 0; rank < team->size; rank++)
        if (notes->spoilt[rank * task->networks + network]) return 0;
    return 1;
}

static int has_infinite(const real *numbers, int64_t count) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= !isfinite(numbers[i]);
    return found;
}

/* value -= rate * gradient, or only a gradient that is 0 where it is not worth having. */
static void finish_numbers(const Task *task, real *value, real *gradient, int64_t count, double rate, int fine) {
    if (!fine) memset(gradient, 0, count * sizeof(real));
    if (fine && !task->gradients_only)
        for (int64_t i = 0; i < count; i++) value[i] -= (real)rate * gradient[i];
}

/* One thread's duty at the end of an iteration. */
static void count_iteration(const Task *task, const Notes *notes, const Team *team, int64_t iteration) {
    const int64_t R = task->networks;
    for (int64_t r = 0; r < R; r++) {
        double *counts = task->tally + r;
        for (int64_t i = r * task->batch; i < (r + 1) * task->batch; i++) {
            const double residual = notes->residual[i];
            counts[ERRORS * R] += notes->wrong[i];
            counts[LOSS * R] += notes->loss[i];
            counts[RESIDUAL * R] += residual;
            if (residual > counts[WORST * R] || isnan(residual)) counts[WORST * R] = residual;
            counts[UNSETTLED * R] += !(residual < task->tolerance);
        }
        counts[SAMPLES * R] += (double)task->batch;
        if (counts[BAD * R] < 0 && !is_finite_network(task, notes, r, team)) counts[BAD * R] = (double)iteration;
    }
}

#endif
