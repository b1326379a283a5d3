/* Shared by all nets: the task, the notes per sample, and the counts. */
#ifndef EQPROP_TASK_H
#define EQPROP_TASK_H

#include <math.h>

#include "arena.h"
#include "team.h"
#include "vec.h"

/* Filled in by Python, in this order. Sample b of network r has index r * batch + b. */
typedef struct {
    int64_t networks, batch, activation;
    int64_t T, K, alternating, settled, bptt, inside; /* inside: the nudge enters sigma's argument */
    int64_t symmetric;                                /* EP nudged by beta and by -beta, one contrasted with the other */
    int64_t threads, iterations, first, gradients_only;
    double tolerance;
    const double *beta; /* (R): signed nudge strength per network */
    const real *images, *targets;  /* (N, inputs), (N, outputs) */
    const int64_t *labels, *order; /* (N,), (iterations, R, B) */
    double *tally;                 /* samples, errors, loss, residual, worst, unsettled, bad: (7, R) */
    real *residuals;               /* relaxation: (R, B); training: of the last iteration, or null */
    int64_t *steps;                /* relaxation: steps used, (R, B) */
} Task;

enum { SAMPLES, ERRORS, LOSS, RESIDUAL, WORST, UNSETTLED, BAD };

/* Distance between rows of a layer's states: whole cache lines, plus one so that rows do not share cache sets. */
static inline int64_t padded(int64_t size) {
    const int64_t line = LINE / (int64_t)sizeof(real);
    return (size + line - 1) / line * line;
}
static inline int64_t row_of(int64_t size) { return padded(size) + LINE / (int64_t)sizeof(real); }
static inline int64_t vectors_of(int64_t size) { return (size + VL - 1) / VL * VL; }

/* With numbers beyond this, products in a gradient may overflow, so the gradient is checked. */
#define TAME ((real)1e9)

static int is_wild(const real *row, int64_t size) {
    lanes found = {0};
    for (int64_t j = 0; j < vectors_of(size); j += VL) found |= ~(magnitude(load(row + j)) <= TAME);
    return any(found);
}

/* Notes on the samples of an iteration. */
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

/* Cost and prediction of a sample at the end of its free phase. As in torch.argmax, the first of equal outputs wins, and
   NaN counts as largest. */
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
    const double phases = task->symmetric ? 2.0 : 1.0;
    return (task->bptt ? 1.0 : -1.0 / (phases * task->beta[network])) / (double)task->batch;
}

/* Whether a parameter is trained: its learning rate is not NaN. */
static int trained(double rate) { return !isnan(rate); }

/* Whether the network's numbers are small enough to guarantee finite gradients. */
static int is_calm(const Task *task, const Notes *notes, int64_t network) {
    int wild = fabs(gradient_scale(task, network)) > 1e9;
    for (int64_t b = 0; b < task->batch; b++) wild |= notes->wild[network * task->batch + b];
    return !wild;
}

/* Whether the weights can be updated at once, without storing and looking at the gradients. */
static int is_tame(const Task *task, const Notes *notes, int64_t network) {
    return !task->gradients_only && is_calm(task, notes, network);
}

/* Whether the network's loss and gradients are finite. Call it after all ranks have written their gradients. */
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

/* value -= rate * gradient; zeroes the gradient instead if the network is not `fine`. */
static void finish_numbers(const Task *task, real *value, real *gradient, int64_t count, double rate, int fine) {
    if (!fine) memset(gradient, 0, count * sizeof(real));
    if (fine && !task->gradients_only)
        for (int64_t i = 0; i < count; i++) value[i] -= (real)rate * gradient[i];
}

/* Count an iteration at its end; called by one thread. */
static void count_iteration(const Task *task, const Notes *notes, const Team *team, int64_t iteration) {
    const int64_t R = task->networks;
    for (int64_t r = 0; r < R; r++) {
        double *counts = task->tally + r;
        for (int64_t i = r * task->batch; i < (r + 1) * task->batch; i++) {
            const double residual = notes->residual[i];
            if (task->residuals) task->residuals[i] = (real)residual;
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
