/* A free phase outside training: idle threads take tiles of samples. */
#ifndef EQPROP_LAYERED_RELAX_H
#define EQPROP_LAYERED_RELAX_H

#include "layered_step.h"

typedef struct {
    const Layered *p;
    Tile *tiles; /* one per thread */
} Relaxing;

static void carve_relaxing(Arena *arena, const Layered *p, Relaxing *job) {
    job->p = p;
    job->tiles = carve(arena, p->task.threads * sizeof(Tile));
    Tile spare;
    for (int64_t i = 0; i < p->task.threads; i++) carve_tile(arena, p, arena->base ? &job->tiles[i] : &spare);
}

static void relax_samples(const Layered *p, Tile *tile, int64_t sample) {
    const int64_t inputs = p->sizes[p->depth], last = p->depth - 1;
    for (int m = 0; m < tile->samples; m++)
        see(p, p->task.images + (sample + m) * inputs, tile->visible + m * row_of(inputs));
    tile->drive = tile->own_drive;
    drive_rows(p, tile->network, tile->visible, tile->drive, tile->samples, 0, p->sizes[last]);
    start_tile(p, tile, p->start, sample);
    relax_tile(p, tile, p->task.T);
    hand_back(p, tile, sample);
    for (int m = 0; m < tile->samples; m++) p->task.steps[sample + m] = tile->steps[m];
    const Manner look = {.parity = -1, .watch = 1};
    step(p, tile, &look);
    for (int m = 0; m < tile->samples; m++) p->task.residuals[sample + m] = tile->residual[m];
}

static void relax_work(Team *team, int rank, void *argument) {
    Relaxing *job = argument;
    const Layered *p = job->p;
    Tile *tile = &job->tiles[rank];
    const int64_t tiles = (p->task.batch + MOST_SAMPLES - 1) / MOST_SAMPLES;
    for (int64_t task = take(team); task < tiles * p->task.networks; task = take(team)) {
        const int64_t first = p->task.batch * (task % tiles) / tiles, last = p->task.batch * (task % tiles + 1) / tiles;
        tile->network = task / tiles;
        tile->samples = (int)(last - first);
        relax_samples(p, tile, tile->network * p->task.batch + first);
    }
}

#endif
