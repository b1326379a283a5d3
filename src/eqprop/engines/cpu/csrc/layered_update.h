/* The end of a training iteration: gradients, and updates in place. */
#ifndef EQPROP_LAYERED_UPDATE_H
#define EQPROP_LAYERED_UPDATE_H

#include "layered_train.h"

/* dL/dW_{n,n+1} of one network as terms left^T right, times `gradient_scale`; returns how many. */
static int gradient_terms(const Training *job, int64_t network, int64_t n, Term *terms) {
    const Layered *p = job->p;
    const int64_t row = row_of(p->sizes[n]), next = row_of(p->sizes[n + 1]), sample = network * p->task.batch;
    if (n == p->depth - 1) {
        const real *left = p->task.bptt ? job->error_sum : job->moved[n];
        terms[0] = (Term){{left + sample * row, row}, {job->visible + sample * next, next}, p->task.batch};
        return 1;
    }
    const int64_t steps = p->task.bptt ? p->task.K : 1, first = sample * steps, count = p->task.batch * steps;
    const real *change = p->task.bptt ? job->errors[n] : job->moved[n];
    const real *next_change = p->task.bptt ? job->errors[n + 1] : job->moved[n + 1];
    const real *rate = p->task.bptt ? job->trail[n] : job->free[n];
    const real *next_rate = p->task.bptt ? job->trail[n + 1] : job->nudged[n + 1];
    terms[0] = (Term){{change + first * row, row}, {next_rate + first * next, next}, count};
    terms[1] = (Term){{rate + first * row, row}, {next_change + first * next, next}, count};
    return 2;
}

/* This rank's rows of layer n, in whole vectors. */
static void own_rows(const Layered *p, int64_t n, const Team *team, int rank, int64_t *first, int64_t *last) {
    share((p->sizes[n] + VL - 1) / VL, team, rank, first, last);
    *first *= VL;
    *last = *last * VL < p->sizes[n] ? *last * VL : p->sizes[n];
}

/* theta -= rate * gradient, without storing the gradient. */
static void update_network(const Training *job, int64_t network, const Team *team, int rank) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++) {
        int64_t first, last;
        own_rows(p, n, team, rank, &first, &last);
        Term terms[2];
        const int count = gradient_terms(job, network, n, terms);
        const double scale = -gradient_scale(&p->task, network);
        if (trained(p->weight_rates[n]))
            outer(terms, count, first, last, vectors_of(p->sizes[n + 1]), 1, (real)(scale * p->weight_rates[n]),
                  p->weights[n] + network * p->sizes[n] * p->apart[n], p->apart[n]);
        if (p->biases && trained(p->bias_rates[n]))
            add_rows(terms, first, last, 1, (real)(scale * p->bias_rates[n]),
                     p->biases[n] + network * padded(p->sizes[n]));
    }
}

/* Store the gradients of this rank's rows; returns whether any is not finite. */
static int write_gradients(const Training *job, int64_t network, const Team *team, int rank) {
    const Layered *p = job->p;
    const int calm = is_calm(&p->task, &job->notes, network);
    int spoilt = 0;
    for (int64_t n = 0; n < p->depth; n++) {
        int64_t first, last;
        own_rows(p, n, team, rank, &first, &last);
        Term terms[2];
        const int count = gradient_terms(job, network, n, terms);
        const real scale = (real)gradient_scale(&p->task, network);
        if (trained(p->weight_rates[n])) {
            real *into = p->weight_gradients[n] + network * p->sizes[n] * p->apart[n];
            outer(terms, count, first, last, vectors_of(p->sizes[n + 1]), 0, scale, into, p->apart[n]);
            if (!calm) spoilt |= has_infinite(into + first * p->apart[n], (last - first) * p->apart[n]);
        }
        if (p->biases && trained(p->bias_rates[n])) {
            real *into = p->bias_gradients[n] + network * padded(p->sizes[n]);
            add_rows(terms, first, last, 0, scale, into);
            if (!calm) spoilt |= has_infinite(into + first, last - first);
        }
    }
    return spoilt;
}

static void finish_gradients(const Training *job, int64_t network, const Team *team, int rank, int fine) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++) {
        int64_t first, last;
        own_rows(p, n, team, rank, &first, &last);
        if (first >= last) continue;
        const int64_t matrix = (network * p->sizes[n] + first) * p->apart[n];
        const int64_t row = network * padded(p->sizes[n]) + first;
        if (trained(p->weight_rates[n]))
            finish_numbers(&p->task, p->weights[n] + matrix, p->weight_gradients[n] + matrix,
                           (last - first) * p->apart[n], p->weight_rates[n], fine);
        if (p->biases && trained(p->bias_rates[n]))
            finish_numbers(&p->task, p->biases[n] + row, p->bias_gradients[n] + row, last - first, p->bias_rates[n],
                           fine);
    }
}

/* This rank's part of the updates. A network that is frozen, or whose loss or gradients are not finite, is unchanged. */
static void update_all(Training *job, Team *team, int rank) {
    const Layered *p = job->p;
    const double *bad = p->task.tally + BAD * p->task.networks;
    int looks = 0;
    for (int64_t r = 0; r < p->task.networks; r++) {
        const int tame = is_tame(&p->task, &job->notes, r);
        job->notes.spoilt[rank * p->task.networks + r] = 0;
        if (tame && bad[r] < 0) update_network(job, r, team, rank);
        if (!tame) job->notes.spoilt[rank * p->task.networks + r] = write_gradients(job, r, team, rank);
        looks |= !tame;
    }
    if (!looks) return;
    barrier(team);
    for (int64_t r = 0; r < p->task.networks; r++)
        if (!is_tame(&p->task, &job->notes, r))
            finish_gradients(job, r, team, rank, bad[r] < 0 && is_finite_network(&p->task, &job->notes, r, team));
}

#endif
