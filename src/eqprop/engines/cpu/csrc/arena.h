/* One block of scratch memory, laid out twice: first to measure it, then to assign it. */
#ifndef EQPROP_ARENA_H
#define EQPROP_ARENA_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *base; /* null while measuring */
    size_t used;
} Arena;

enum { LINE = 64 };

static inline void *carve(Arena *arena, size_t bytes) {
    void *piece = arena->base ? arena->base + arena->used : 0;
    arena->used += (bytes + LINE - 1) / LINE * LINE;
    return piece;
}

/* Allocate zeroed memory of the measured size; 0 if out of memory. */
static inline int open_arena(Arena *arena) {
    const size_t bytes = (arena->used + LINE) / LINE * LINE;
    arena->base = aligned_alloc(LINE, bytes);
    arena->used = 0;
    if (arena->base) memset(arena->base, 0, bytes);
    return arena->base != 0;
}

#endif
