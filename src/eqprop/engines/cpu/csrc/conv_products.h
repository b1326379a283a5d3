/* Convolution and pooling, and the three products that touch only the windows of the maxima.

   In each pooling zone and channel only one position matters, the first maximum in row order. Its window starts at a
   number of map n + 1, and passing back, gathering or learning there touches one run of numbers per row of the kernel:
   a quarter of the work of a full convolution for zones of four. Zero values are skipped. */
#ifndef EQPROP_CONV_PRODUCTS_H
#define EQPROP_CONV_PRODUCTS_H

#include "conv.h"

enum { CHUNK = 10 }; /* vectors of a run kept in registers */

/* by_input[ky, j][c] = by_row[ky, c][j] = filters[c][ky][j] for the channels [first, last). */
static void pack_filters(const Filters *f, int64_t kernel, const real *filters, real *by_input, real *by_row,
                         int64_t first, int64_t last) {
    const int64_t wide = vectors_of(f->channels);
    for (int64_t ky = 0; ky < kernel; ky++)
        for (int64_t c = first; c < last; c++) {
            const real *run = filters + (c * kernel + ky) * f->run_padded;
            memcpy(by_row + (ky * f->channels + c) * f->run_padded, run, f->run_padded * sizeof(real));
            for (int64_t j = 0; j < f->run; j++) by_input[(ky * f->run + j) * wide + c] = run[j];
        }
}

/* The map with its border of zeros; the map itself without padding. */
static const real *with_border(const Conv *p, const Filters *f, const real *map, real *scratch) {
    if (p->padding == 0) return map;
    memset(scratch, 0, row_of(f->reach) * sizeof(real));
    for (int64_t y = 0; y < f->inner_rows; y++)
        memcpy(scratch + ((y + p->padding) * f->columns + p->padding) * f->below, map + y * f->inner_columns * f->below,
               f->inner_columns * f->below * sizeof(real));
    return scratch;
}

/* map += the interior of a bordered map. */
static void add_inside(const Conv *p, const Filters *f, const real *bordered, real *map) {
    for (int64_t y = 0; y < f->inner_rows; y++) {
        const real *from = bordered + ((y + p->padding) * f->columns + p->padding) * f->below;
        real *to = map + y * f->inner_columns * f->below;
        for (int64_t j = 0; j < f->inner_columns * f->below; j++) to[j] += from[j];
    }
}

/* Maxima of one row of zones, from the responses before pooling, and their positions. */
static void pool_band(const Conv *p, const Filters *f, const real *band, int64_t zone_row, real *values,
                      whole *windows) {
    const int64_t wide = vectors_of(f->channels);
    for (int64_t zone = 0; zone < f->width; zone++)
        for (int64_t c = 0; c < f->channels; c += VL) {
            vec best = all(0);
            lanes where = {0};
            for (int64_t i = 0; i < p->pool * p->pool; i++) {
                const int64_t place = i / p->pool * f->across + zone * p->pool + i % p->pool;
                const vec value = load(band + place * wide + c);
                const lanes here = (whole)(zone_row * p->pool * f->across + place) - (lanes){0};
                const lanes larger = (value > best) | (value != value);
                best = i == 0 ? value : choose(larger, value, best);
                where = i == 0 ? here : (larger & here) | (~larger & where);
            }
            store_anywhere(values + zone * f->channels + c, best);
            *(lanes_anywhere *)(windows + zone * f->channels + c) = where;
        }
}

/* values = P(W * map + b), windows = the positions of the maxima  [defconv]. `map` includes its border. */
static void respond(const Conv *p, const Filters *f, const real *by_input, const int64_t *starts, const real *bias,
                    const real *map, Cell *cell, real *values, whole *windows) {
    const int64_t wide = vectors_of(f->channels), together = p->pool * f->across;
    const Walk walk = {p->kernel, f->run, f->columns * f->below};
    for (int64_t zone_row = 0; zone_row < f->height; zone_row++) {
        for (int64_t i = 0; i < together; i++) cell->starts[i] = map + starts[zone_row * together + i];
        spread_block(together, walk, wide, cell->starts, (Rows){by_input, wide}, 0, (Rows){bias, 0}, cell->band, wide);
        const int64_t offset = zone_row * f->width * f->channels;
        pool_band(p, f, cell->band, zone_row, values + offset, windows + offset);
    }
}

/* The windows of the zones of channel c with nonzero values. */
static int64_t mark(const Filters *f, int64_t c, const real *map, const whole *windows, const int64_t *starts,
                    Mark *marks) {
    int64_t count = 0;
    for (int64_t zone = 0; zone < f->zones; zone++) {
        const real value = map[zone * f->channels + c];
        marks[count] = (Mark){starts[windows[zone * f->channels + c]], value};
        count += value != 0;
    }
    return count;
}

/* The channels with a nonzero maximum at each position. */
static void mark_positions(const Filters *f, const real *map, const whole *windows, Mark *marks, int64_t *counts) {
    memset(counts, 0, f->positions * sizeof(int64_t));
    for (int64_t i = 0, c = 0; i < f->zones * f->channels; i++) {
        const int64_t place = windows[i];
        marks[place * f->channels + counts[place]] = (Mark){c, map[i]};
        counts[place] += map[i] != 0;
        c = c + 1 == f->channels ? 0 : c + 1;
    }
}

#define BY_CHUNKS(f, CALL)                                                                                             \
    int64_t j = 0;                                                                                                     \
    for (; j + CHUNK * VL <= vectors_of((f)->run); j += CHUNK * VL) CALL(CHUNK)                                        \
    for (; j + 4 * VL <= vectors_of((f)->run); j += 4 * VL) CALL(4)                                                    \
    for (; j < vectors_of((f)->run); j += VL) CALL(1)

INLINE void scatter_run(const int N, const real *filters, int64_t apart, const Mark *marks, int64_t count, real *out) {
    vec sum[CHUNK];
    UNROLL for (int i = 0; i < N; i++) sum[i] = all(0);
    for (int64_t m = 0; m < count; m++) {
        const real *filter = filters + marks[m].place * apart;
        const vec value = all(marks[m].value);
        UNROLL for (int i = 0; i < N; i++) sum[i] = fused(value, load(filter + i * VL), sum[i]);
    }
    UNROLL for (int i = 0; i < N; i++) store_anywhere(out + i * VL, load_anywhere(out + i * VL) + sum[i]);
}

/* out += W~ * P^-1(map): send every value of map n back to the window of its maximum  [lma2]. Channels with their
   maximum at the same position are summed before they are stored. */
static void scatter(const Conv *p, const Filters *f, const real *by_row, const int64_t *starts, const real *map,
                    const whole *windows, Cell *cell, real *out) {
    mark_positions(f, map, windows, cell->marks, cell->counts);
    for (int64_t ky = 0; ky < p->kernel; ky++) {
        const real *filters = by_row + ky * f->channels * f->run_padded;
        for (int64_t place = 0; place < f->positions; place++) {
            const Mark *marks = cell->marks + place * f->channels;
            const int64_t count = cell->counts[place];
            real *line = out + starts[place] + ky * f->columns * f->below;
            if (count == 0) continue;
#define CALL(N) scatter_run(N, filters + j, f->run_padded, marks, count, line + j);
            BY_CHUNKS(f, CALL)
#undef CALL
        }
    }
}

INLINE void gather_run(const int N, const real *filter, const int64_t *windows, int count, const real *map,
                       vec *parts) {
    vec w[CHUNK];
    UNROLL for (int i = 0; i < N; i++) w[i] = load(filter + i * VL);
    for (int z = 0; z < count; z++) {
        const real *place = map + windows[z];
        vec sum = parts[z];
        UNROLL for (int i = 0; i < N; i++) sum = fused(w[i], load_anywhere(place + i * VL), sum);
        parts[z] = sum;
    }
}

/* out[zone][c] += the response of filter c to `map` at the window of the zone's maximum: the transpose of `scatter`. */
static void gather_windows(const Conv *p, const Filters *f, const real *by_row, const int64_t *starts, const real *map,
                           const whole *windows, real *out) {
    for (int64_t c = 0; c < f->channels; c++)
        for (int64_t zone = 0; zone < f->zones; zone += VL) {
            const int count = f->zones - zone < VL ? (int)(f->zones - zone) : VL;
            vec parts[VL];
            int64_t places[VL];
            for (int z = 0; z < VL; z++) parts[z] = all(0);
            for (int z = 0; z < count; z++) places[z] = starts[windows[(zone + z) * f->channels + c]];
            for (int64_t ky = 0; ky < p->kernel; ky++) {
                const real *filter = by_row + (ky * f->channels + c) * f->run_padded;
                const real *line = map + ky * f->columns * f->below;
#define CALL(N) gather_run(N, filter + j, places, count, line + j, parts);
                BY_CHUNKS(f, CALL)
#undef CALL
            }
            const vec total = sums(parts);
            for (int z = 0; z < count; z++) out[(zone + z) * f->channels + c] += total[z];
        }
}

INLINE void learn_run(const int N, real *gradient, const Mark *marks, int64_t count, const real *map, real sign) {
    vec sum[CHUNK];
    UNROLL for (int i = 0; i < N; i++) sum[i] = load(gradient + i * VL);
    for (int64_t m = 0; m < count; m++) {
        const real *place = map + marks[m].place;
        const vec value = all(sign * marks[m].value);
        UNROLL for (int i = 0; i < N; i++) sum[i] = fused(value, load_anywhere(place + i * VL), sum[i]);
    }
    UNROLL for (int i = 0; i < N; i++) store(gradient + i * VL, sum[i]);
}

/* gradient += sign * P^-1(above) * map for the channels [first, last)  [lma3]. `map` includes its border. */
static void learn(const Conv *p, const Filters *f, const int64_t *starts, const real *above, const real *map,
                  const whole *windows, real sign, Mark *marks, int64_t first, int64_t last, real *gradient) {
    for (int64_t c = first; c < last; c++) {
        const int64_t count = mark(f, c, above, windows, starts, marks);
        for (int64_t ky = 0; ky < p->kernel; ky++) {
            real *into = gradient + (c * p->kernel + ky) * f->run_padded;
            const real *line = map + ky * f->columns * f->below;
#define CALL(N) learn_run(N, into + j, marks, count, line + j, sign);
            BY_CHUNKS(f, CALL)
#undef CALL
        }
    }
}

#endif
