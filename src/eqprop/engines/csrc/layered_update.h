/* The end of a training iteration: gradients, updates in place, and the counts. */
#ifndef EQPROP_LAYERED_UPDATE_H
#define EQPROP_LAYERED_UPDATE_H

#include "layered_train.h"

/* dL/dW_{n,n+1} of one network as terms left^T right, times `gradient_scale`; returns how many. */
static int gradient_terms(const Training *job, int64_t network, int64_t n, Term *terms) {
    const Layered *p = job->p;
    const int64_t row = row_of(p->sizes[n]), next = row_of(p->sizes[n + 1]), sample = network * p->batch;
    if (n == p->depth - 1) {
        const real *left = p->bptt ? job->error_sum : job->moved[n];
        terms[0] = (Term){{left + sample * row, row}, {job->visible + sample * next, next}, p->batch};
        return 1;
    }
    const int64_t steps = p->bptt ? p->K : 1, first = sample * steps, count = p->batch * steps;
    const real *change = p->bptt ? job->errors[n] : job->moved[n];
    const real *next_change = p->bptt ? job->errors[n + 1] : job->moved[n + 1];
    const real *rate = p->bptt ? job->trail[n] : job->free[n];
    const real *next_rate = p->bptt ? job->trail[n + 1] : job->nudged[n + 1];
    terms[0] = (Term){{change + first * row, row}, {next_rate + first * next, next}, count};
    terms[1] = (Term){{rate + first * row, row}, {next_change + first * next, next}, count};
    return 2;
}

static double gradient_scale(const Layered *p) { return (p->bptt ? 1.0 : -1.0 / p->beta) / (double)p->batch; }

/* into = (keep ? into : 0) + scale * sum of the rows of the term's left side: the gradient of a bias. */
static void add_rows(const Term *term, int64_t first, int64_t last, int keep, real scale, real *into) {
    for (int64_t i = first; i < last; i += VL) {
        vec sum = all(0);
        for (int64_t k = 0; k < term->count; k++) sum += load(term->left.start + k * term->left.apart + i);
        store(into + i, (keep ? load(into + i) : all(0)) + scale * sum);
    }
}

static int trained(double rate) { return !isnan(rate); }

/* The rows of layer n that belong to this rank: whole vectors. */
static void own_rows(const Layered *p, int64_t n, const Team *team, int rank, int64_t *first, int64_t *last) {
    share((p->sizes[n] + VL - 1) / VL, team, rank, first, last);
    *first *= VL;
    *last = *last * VL < p->sizes[n] ? *last * VL : p->sizes[n];
}

/* theta -= rate * gradient without the gradient ever being written down. */
static void update_network(const Training *job, int64_t network, const Team *team, int rank) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++) {
        int64_t first, last;
        own_rows(p, n, team, rank, &first, &last);
        Term terms[2];
        const int count = gradient_terms(job, network, n, terms);
        const double scale = -gradient_scale(p);
        if (trained(p->weight_rates[n]))
            outer(terms, count, first, last, vectors_of(p->sizes[n + 1]), 1, (real)(scale * p->weight_rates[n]),
                  p->weights[n] + network * p->sizes[n] * p->apart[n], p->apart[n]);
        if (p->biases && trained(p->bias_rates[n]))
            add_rows(terms, first, last, 1, (real)(scale * p->bias_rates[n]),
                     p->biases[n] + network * padded(p->sizes[n]));
    }
}

/* The gradients of this rank's rows, written down; returns whether one is not finite. */
static int write_gradients(const Training *job, int64_t network, const Team *team, int rank) {
    const Layered *p = job->p;
    int spoilt = 0;
    for (int64_t n = 0; n < p->depth; n++) {
        int64_t first, last;
        own_rows(p, n, team, rank, &first, &last);
        Term terms[2];
        const int count = gradient_terms(job, network, n, terms);
        const real scale = (real)gradient_scale(p);
        if (trained(p->weight_rates[n])) {
            real *into = p->weight_gradients[n] + network * p->sizes[n] * p->apart[n];
            outer(terms, count, first, last, vectors_of(p->sizes[n + 1]), 0, scale, into, p->apart[n]);
            for (int64_t i = first * p->apart[n]; i < last * p->apart[n]; i++) spoilt |= !isfinite(into[i]);
        }
        if (p->biases && trained(p->bias_rates[n])) {
            real *into = p->bias_gradients[n] + network * padded(p->sizes[n]);
            add_rows(terms, first, last, 0, scale, into);
            for (int64_t i = first; i < last; i++) spoilt |= !isfinite(into[i]);
        }
    }
    return spoilt;
}

/* value -= rate * gradient; without a gradient worth having, gradient = 0. */
static void finish_numbers(real *value, real *gradient, int64_t first, int64_t last, double rate, int fine, int apply) {
    if (!fine) memset(gradient + first, 0, (last - first) * sizeof(real));
    if (fine && apply)
        for (int64_t i = first; i < last; i++) value[i] -= (real)rate * gradient[i];
}

static void finish_gradients(const Training *job, int64_t network, const Team *team, int rank, int fine) {
    const Layered *p = job->p;
    for (int64_t n = 0; n < p->depth; n++) {
        int64_t first, last;
        own_rows(p, n, team, rank, &first, &last);
        const int64_t matrix = network * p->sizes[n] * p->apart[n], row = network * padded(p->sizes[n]);
        if (trained(p->weight_rates[n]) && first < last)
            finish_numbers(p->weights[n] + matrix, p->weight_gradients[n] + matrix, first * p->apart[n],
                           last * p->apart[n], p->weight_rates[n], fine, !p->gradients_only);
        if (p->biases && trained(p->bias_rates[n]) && first < last)
            finish_numbers(p->biases[n] + row, p->bias_gradients[n] + row, first, last, p->bias_rates[n], fine,
                           !p->gradients_only);
    }
}

/* Whether the network's numbers are small enough for its gradients to be finite without a look. */
static int is_tame(const Training *job, int64_t network) {
    const Layered *p = job->p;
    int wild = p->gradients_only != 0 || fabs(gradient_scale(p)) > 1e9;
    for (int64_t b = 0; b < p->batch; b++) wild |= job->wild[network * p->batch + b];
    return !wild;
}

/* Whether loss and gradients of the network are finite; to be asked after every rank has written its gradients. */
static int is_finite_network(const Training *job, int64_t network, const Team *team) {
    const Layered *p = job->p;
    for (int64_t b = 0; b < p->batch; b++)
        if (!isfinite((real)job->loss[network * p->batch + b])) return 0;
    for (int rank = 0; rank < team->size; rank++)
        if (job->spoilt[rank * p->networks + network]) return 0;
    return 1;
}

/* Everybody's part of the updates. A network that is frozen, or whose loss or gradients are not finite, stays as it is. */
static void update_all(Training *job, Team *team, int rank) {
    const Layered *p = job->p;
    const double *bad = p->tally + BAD * p->networks;
    int looks = 0;
    for (int64_t r = 0; r < p->networks; r++) {
        const int tame = is_tame(job, r);
        job->spoilt[rank * p->networks + r] = 0;
        if (tame && bad[r] < 0) update_network(job, r, team, rank);
        if (!tame) job->spoilt[rank * p->networks + r] = write_gradients(job, r, team, rank);
        looks |= !tame;
    }
    if (!looks) return;
    barrier(team);
    for (int64_t r = 0; r < p->networks; r++)
        if (!is_tame(job, r))
            finish_gradients(job, r, team, rank, bad[r] < 0 && is_finite_network(job, r, team));
}

/* One thread's duty after everybody is done. */
static void count_iteration(Training *job, const Team *team, int64_t iteration) {
    const Layered *p = job->p;
    const int64_t R = p->networks;
    for (int64_t r = 0; r < R; r++) {
        double *counts = p->tally + r;
        for (int64_t i = r * p->batch; i < (r + 1) * p->batch; i++) {
            const double residual = job->residual[i];
            counts[ERRORS * R] += job->wrong[i];
            counts[LOSS * R] += job->loss[i];
            counts[RESIDUAL * R] += residual;
            if (residual > counts[WORST * R] || isnan(residual)) counts[WORST * R] = residual;
            counts[UNSETTLED * R] += !(residual < p->tolerance);
        }
        counts[SAMPLES * R] += (double)p->batch;
        if (counts[BAD * R] < 0 && !is_finite_network(job, r, team)) counts[BAD * R] = (double)iteration;
    }
}

#endif
