/* The end of a training iteration of a convolutional net: compute and check the gradients, then update. */
#ifndef EQPROP_CONV_UPDATE_H
#define EQPROP_CONV_UPDATE_H

#include "conv_train.h"

/* The gradient of the weights between flat layer n and the next, for this rank's rows, and of its bias. */
static void flat_gradient(const Training *job, int64_t network, int64_t n, const Team *team, int rank) {
    const Conv *p = job->p;
    const int64_t steps = p->task.bptt ? p->task.K : 1, count = p->task.batch * steps, start = network * count;
    const int64_t row = row_of(size_of(p, n)), next = row_of(size_of(p, n + 1));
    const real *change = p->task.bptt ? job->errors[n] : job->moved[n];
    const real *next_change = p->task.bptt ? job->errors[n + 1] : job->moved[n + 1];
    const real *state = p->task.bptt ? job->trail[n] : job->free[n];
    const real *next_state = p->task.bptt ? job->trail[n + 1] : job->nudged[n + 1];
    const Term terms[] = {{{change + start * row, row}, {next_state + start * next, next}, count},
                          {{state + start * row, row}, {next_change + start * next, next}, count}};
    const real scale = (real)gradient_scale(&p->task, network);
    int64_t first, last;
    share(size_of(p, n), team, rank, &first, &last);
    outer(terms, 2, first, last, vectors_of(size_of(p, n + 1)), 0, scale, gradient_of(p, FLAT_WEIGHT, n, network),
          p->apart[parameter(p, FLAT_WEIGHT, n)]);
    if (p->biased && rank == 0)
        add_rows(terms, 0, size_of(p, n), 0, scale, gradient_of(p, FLAT_BIAS, n, network));
}

/* One sample's contribution to the gradient of filters n: from EP's two final states, or over the K steps of BPTT. The
   windows in the image do not change, so there the states are summed first. */
static void learn_sample(const Training *job, Cell *cell, const Filters *f, int64_t n, int64_t sample, int64_t first,
                         int64_t last, real *gradient) {
    const Conv *p = job->p;
    const int64_t layer = p->flats + n, row = row_of(size_of(p, layer));
    const int64_t *starts = job->packed.starts[n];
    if (n == p->maps - 1) {
        const real *change = (p->task.bptt ? job->error_sum : job->moved[layer]) + sample * row;
        learn(p, f, starts, change, job->visible + sample * row_of(f->reach), job->drive_windows + sample * row, 1, cell->marks,
              first, last, gradient);
        return;
    }
    const int64_t next = row_of(size_of(p, layer + 1)), batch = p->task.batch;
    if (!p->task.bptt) {
        const real *above = with_border(p, f, job->nudged[layer + 1] + sample * next, cell->border);
        learn(p, f, starts, job->nudged[layer] + sample * row, above, job->nudged_windows[n] + sample * row, 1, cell->marks,
              first, last, gradient);
        above = with_border(p, f, job->free[layer + 1] + sample * next, cell->border);
        learn(p, f, starts, job->free[layer] + sample * row, above, job->free_windows[n] + sample * row, -1, cell->marks, first,
              last, gradient);
        return;
    }
    for (int64_t t = 0; t < p->task.K; t++) {
        const int64_t at = sample / batch * (p->task.K - 1) * batch + sample + t * batch;
        const whole *windows = job->trail_windows[n] + at * row;
        const real *map = with_border(p, f, job->trail[layer + 1] + at * next, cell->border);
        learn(p, f, starts, job->errors[layer] + at * row, map, windows, 1, cell->marks, first, last, gradient);
        map = with_border(p, f, job->errors[layer + 1] + at * next, cell->border);
        learn(p, f, starts, job->trail[layer] + at * row, map, windows, 1, cell->marks, first, last, gradient);
    }
}

/* One sample's contribution to a filter's bias: its channel's changes, summed over zones and steps. */
static void learn_bias(const Training *job, const Filters *f, int64_t n, int64_t sample, int64_t first, int64_t last,
                       real *gradient) {
    const Conv *p = job->p;
    const int64_t layer = p->flats + n, row = row_of(size_of(p, layer)), batch = p->task.batch;
    const int summed = n == p->maps - 1, steps = p->task.bptt && !summed ? (int)p->task.K : 1;
    for (int64_t t = 0; t < steps; t++) {
        const int64_t at = steps > 1 ? sample / batch * (p->task.K - 1) * batch + sample + t * batch : sample;
        const real *change = !p->task.bptt ? job->moved[layer] : summed ? job->error_sum : job->errors[layer];
        for (int64_t zone = 0; zone < f->zones; zone++)
            for (int64_t c = first; c < last; c++) gradient[c] += change[at * row + zone * f->channels + c];
    }
}

/* The gradient of filters n and of their biases for this rank's channels. */
static void filter_gradient(const Training *job, Cell *cell, int64_t network, int64_t n, const Team *team, int rank) {
    const Conv *p = job->p;
    const Filters f = filters_of(p, n);
    const int64_t window = p->kernel * f.run_padded;
    const real scale = (real)gradient_scale(&p->task, network);
    real *gradient = gradient_of(p, FILTER, n, network), *bias = p->biased ? gradient_of(p, FILTER_BIAS, n, network) : 0;
    int64_t first, last;
    share(f.channels, team, rank, &first, &last);
    memset(gradient + first * window, 0, (last - first) * window * sizeof(real));
    if (bias) memset(bias + first, 0, (last - first) * sizeof(real));
    for (int64_t b = 0; b < p->task.batch; b++) {
        learn_sample(job, cell, &f, n, network * p->task.batch + b, first, last, gradient);
        if (bias) learn_bias(job, &f, n, network * p->task.batch + b, first, last, bias);
    }
    for (int64_t i = first * window; i < last * window; i++)
        gradient[i] = i % f.run_padded < f.run ? scale * gradient[i] : 0;
    for (int64_t c = first; bias && c < last; c++) bias[c] *= scale;
}

/* The rows of a parameter that this rank checks and updates; a bias is one row. */
static int own_part(const Conv *p, int64_t i, int64_t network, const Team *team, int rank, int64_t *start,
                    int64_t *count) {
    int64_t first, last;
    share(p->rows[i], team, rank, &first, &last);
    *start = (network * p->rows[i] + first) * p->apart[i];
    *count = (last - first) * p->apart[i];
    return trained(p->rates[i]) && *count > 0;
}

/* This rank's part of the updates. A network that is frozen, or whose loss or gradients are not finite, is unchanged. */
static void update_all(Training *job, Team *team, int rank) {
    const Conv *p = job->p;
    const double *bad = p->task.tally + BAD * p->task.networks;
    int64_t start, count;
    for (int64_t r = 0; r < p->task.networks; r++) {
        for (int64_t n = 0; n < p->flats; n++) flat_gradient(job, r, n, team, rank);
        for (int64_t n = 0; n < p->maps; n++) filter_gradient(job, &job->cells[rank], r, n, team, rank);
    }
    barrier(team);
    for (int64_t r = 0; r < p->task.networks; r++) {
        int spoilt = 0;
        for (int64_t i = 0; i < parameters_of(p); i++)
            if (own_part(p, i, r, team, rank, &start, &count)) spoilt |= has_infinite(p->gradients[i] + start, count);
        job->notes.spoilt[rank * p->task.networks + r] = spoilt;
    }
    barrier(team);
    for (int64_t r = 0; r < p->task.networks; r++) {
        const int fine = bad[r] < 0 && is_finite_network(&p->task, &job->notes, r, team);
        for (int64_t i = 0; i < parameters_of(p); i++)
            if (own_part(p, i, r, team, rank, &start, &count))
                finish_numbers(&p->task, p->values[i] + start, p->gradients[i] + start, count, p->rates[i], fine);
    }
    pack_all(p, &job->packed, team, rank);
}

#endif
