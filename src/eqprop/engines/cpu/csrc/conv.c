/* Convolutional nets on a team of threads: free phases, and whole training iterations.

   Each sample runs all its phases on one thread; for the updates, threads share the channels. */
#include "conv_update.h"

static void train_work(Team *team, int rank, void *argument) {
    Training *job = argument;
    const Conv *p = job->p;
    const int64_t samples = p->task.networks * p->task.batch;
    int64_t first, last;
    share(samples, team, rank, &first, &last);
    pack_all(p, &job->packed, team, rank);
    barrier(team);
    for (int64_t i = 0; i < p->task.iterations; i++) {
        for (int64_t sample = first; sample < last; sample++)
            run_sample(job, &job->cells[rank], sample, p->task.order[i * samples + sample]);
        barrier(team);
        update_all(job, team, rank);
        barrier(team);
        if (rank == 0) count_iteration(&p->task, &job->notes, team, p->task.first + i);
    }
}

/* Run `iterations` training iterations; returns 0, or 1 if out of memory. */
int conv_train(const Conv *p) {
    Arena arena = {0};
    Training job = {0};
    carve_training(&arena, p, &job);
    if (!open_arena(&arena)) return 1;
    carve_training(&arena, p, &job);
    run_team(p->task.threads, train_work, &job);
    free(arena.base);
    return 0;
}

typedef struct {
    const Conv *p;
    Cell *cells; /* one per thread */
    Packed packed;
    real *visible;
    whole *windows;
} Relaxing;

static void carve_relaxing(Arena *arena, const Conv *p, Relaxing *job) {
    job->p = p;
    job->cells = carve_cells(arena, p, &job->packed);
    job->visible = carve(arena, p->task.threads * row_of(filters_of(p, p->maps - 1).reach) * sizeof(real));
    job->windows = carve(arena, p->task.threads * row_of(size_of(p, layers_of(p) - 1)) * sizeof(whole));
}

static void relax_work(Team *team, int rank, void *argument) {
    Relaxing *job = argument;
    const Conv *p = job->p;
    Cell *cell = &job->cells[rank];
    real *visible = job->visible + rank * row_of(filters_of(p, p->maps - 1).reach);
    whole *windows = job->windows + rank * row_of(size_of(p, layers_of(p) - 1));
    pack_all(p, &job->packed, team, rank);
    barrier(team);
    for (int64_t sample = take(team); sample < p->task.networks * p->task.batch; sample = take(team)) {
        int still;
        cell->network = sample / p->task.batch;
        see(p, p->task.images + sample * image_size(p), visible);
        hear(p, cell, p->maps - 1, visible, cell->drive, windows);
        start_cell(p, cell, p->start, sample);
        p->task.steps[sample] = relax_cell(p, cell, p->task.T, &still);
        hand_back(p, cell, sample);
        const Manner look = {.parity = -1, .watch = 1};
        step(p, cell, &look);
        p->task.residuals[sample] = cell->residual;
    }
}

/* Run the free phase of (R, B) samples; returns 0, or 1 if out of memory. */
int conv_relax(const Conv *p) {
    Arena arena = {0};
    Relaxing job = {0};
    carve_relaxing(&arena, p, &job);
    if (!open_arena(&arena)) return 1;
    carve_relaxing(&arena, p, &job);
    run_team(p->task.threads, relax_work, &job);
    free(arena.base);
    return 0;
}
