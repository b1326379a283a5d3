/* Layered nets on a team of threads: free phases, and whole training iterations.

   Threads share the samples during the phases, where samples are independent, and the rows of the weights for the drive
   and the updates. This takes four barriers per iteration and none in the time loop. */
#define TALL_TILES
#include "layered_bptt.h"
#include "layered_relax.h"
#include "layered_update.h"

/* Run the phases of this rank's samples [first, last), a few samples of one network at a time. */
static void run_phases(Training *job, Tile *tile, int64_t first, int64_t last, const int64_t *order) {
    const Layered *p = job->p;
    while (first < last) {
        tile->network = first / p->task.batch;
        const int64_t end = (tile->network + 1) * p->task.batch;
        tile->samples = part_of((end < last ? end : last) - first, MOST_SAMPLES);
        tile->active = tile->samples;
        tile->drive = job->drive + first * row_of(p->sizes[p->depth - 1]);
        tile->targets = job->targets + first * row_of(p->sizes[0]);
        start_tile(p, tile, p->start, first);
        if (p->task.bptt) unroll(job, tile, first, order);
        else both_phases(job, tile, first, order);
        first += tile->samples;
    }
}

static void train_work(Team *team, int rank, void *argument) {
    Training *job = argument;
    const Layered *p = job->p;
    const int64_t samples = p->task.networks * p->task.batch, last = p->depth - 1;
    int64_t first_sample, last_sample, first_row, last_row;
    share(samples, team, rank, &first_sample, &last_sample);
    own_rows(p, last, team, rank, &first_row, &last_row);
    for (int64_t i = 0; i < p->task.iterations; i++) {
        const int64_t *order = p->task.order + i * samples;
        gather(job, order, first_sample, last_sample);
        barrier(team);
        for (int64_t r = 0; r < p->task.networks; r++)
            drive_rows(p, r, job->visible + r * p->task.batch * row_of(p->sizes[p->depth]),
                       job->drive + r * p->task.batch * row_of(p->sizes[last]), p->task.batch, first_row, last_row);
        barrier(team);
        run_phases(job, &job->tiles[rank], first_sample, last_sample, order);
        barrier(team);
        update_all(job, team, rank);
        barrier(team);
        if (rank == 0) count_iteration(&p->task, &job->notes, team, p->task.first + i);
    }
}

/* Run `iterations` training iterations; returns 0, or 1 if out of memory. */
int layered_train(const Layered *p) {
    Arena arena = {0};
    Training job = {0};
    carve_training(&arena, p, &job);
    if (!open_arena(&arena)) return 1;
    carve_training(&arena, p, &job);
    run_team(p->task.threads, train_work, &job);
    free(arena.base);
    return 0;
}

/* Run the free phase of (R, B) samples; returns 0, or 1 if out of memory. */
int layered_relax(const Layered *p) {
    Arena arena = {0};
    Relaxing job = {0};
    carve_relaxing(&arena, p, &job);
    if (!open_arena(&arena)) return 1;
    carve_relaxing(&arena, p, &job);
    run_team(p->task.threads, relax_work, &job);
    free(arena.base);
    return 0;
}
