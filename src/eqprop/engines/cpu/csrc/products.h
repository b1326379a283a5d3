/* The matrix products of the time loop, for a few samples at a time, with weights in the model's own layout.

   The order of summation depends only on the shapes, never on the thread or on how many samples share a tile: a sample's
   states are bit-identical whichever samples run with it. */
#ifndef EQPROP_PRODUCTS_H
#define EQPROP_PRODUCTS_H

#include "vec.h"

/* Rows of numbers: `start` of the first, distance `apart`. Rows are aligned and padded to whole vectors. */
typedef struct {
    const real *start;
    int64_t apart;
} Rows;

enum { BLOCK = 64, AHEAD = 8 }; /* rows of weights processed at a time, and prefetched */

enum { MOST_SAMPLES = 12 }; /* samples that share the time loop */

/* CALL(M, V) for the tile of M samples by V vectors (or rows) that fills the registers, M up to MOST_ROWS. Tall tiles
   read each weight once for many samples, which matters for large matrices; square ones read fewer numbers in total. */
#if ACCUMULATORS == 24 && defined(TALL_TILES)
#define MOST_ROWS 12
#define BY_SAMPLES(count, CALL)                                                                                        \
    switch (count) {                                                                                                   \
    case 1: CALL(1, 8) break; case 2: CALL(2, 4) break; case 3: CALL(3, 4) break; case 4: CALL(4, 4) break;            \
    case 5: CALL(5, 4) break; case 6: CALL(6, 4) break; case 7: CALL(7, 2) break; case 8: CALL(8, 2) break;            \
    case 9: CALL(9, 2) break; case 10: CALL(10, 2) break; case 11: CALL(11, 2) break; default: CALL(12, 2)             \
    }
#elif ACCUMULATORS == 24
#define MOST_ROWS 6
#define BY_SAMPLES(count, CALL)                                                                                        \
    switch (count) {                                                                                                   \
    case 1: CALL(1, 8) break; case 2: CALL(2, 4) break; case 3: CALL(3, 4) break; case 4: CALL(4, 4) break;            \
    case 5: CALL(5, 4) break; default: CALL(6, 4)                                                                      \
    }
#else
#define MOST_ROWS 6
#define BY_SAMPLES(count, CALL)                                                                                        \
    switch (count) {                                                                                                   \
    case 1: CALL(1, 8) break; case 2: CALL(2, 4) break; case 3: CALL(3, 4) break; case 4: CALL(4, 2) break;            \
    case 5: CALL(5, 2) break; default: CALL(6, 2)                                                                      \
    }
#endif

/* Size of the next part of `left` items, for about equal parts of at most `most`. */
static inline int part_of(int64_t left, int64_t most) {
    const int64_t parts = (left + most - 1) / most;
    return (int)((left + parts - 1) / parts);
}

/* Layout of a sample's numbers: `pieces` runs of `length`, their starts `apart`. A row of a layer is one piece; the
   window of a filter has one per row of the image. */
typedef struct {
    int64_t pieces, length, apart;
} Walk;

/* out[m][j] = (keep ? out[m][j] : 0) + sum_k a[m][k] w[k][j] + from[m][j] for V vectors of j; `from` may be null.
   Each piece is summed separately and `from` is added last: small numbers are summed before large ones join. */
INLINE void spread_tile(const int M, const int V, Walk walk, const real *const *a, Rows w, int keep, Rows from,
                        real *out, int64_t apart) {
    const real *row = w.start;
    for (int64_t piece = 0; piece < walk.pieces; piece++) {
        vec sum[MOST_ROWS][8];
        const real *x[MOST_ROWS];
        UNROLL for (int m = 0; m < M; m++) {
            x[m] = a[m] + piece * walk.apart;
            UNROLL for (int v = 0; v < V; v++) sum[m][v] = all(0);
        }
        for (int64_t k = 0; k < walk.length; k++) {
            vec weight[8];
            UNROLL for (int v = 0; v < V; v++) {
                weight[v] = load(row + v * VL);
                __builtin_prefetch(row + v * VL + AHEAD * w.apart);
            }
            UNROLL for (int m = 0; m < M; m++) {
                const vec value = all(x[m][k]);
                UNROLL for (int v = 0; v < V; v++) sum[m][v] = fused(value, weight[v], sum[m][v]);
            }
            row += w.apart;
        }
        const real *last = piece + 1 == walk.pieces ? from.start : 0;
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int v = 0; v < V; v++) {
                real *place = out + m * apart + v * VL;
                if (keep || piece > 0) sum[m][v] += load(place);
                if (last) sum[m][v] += load(last + m * from.apart + v * VL);
                store(place, sum[m][v]);
            }
    }
}

INLINE Rows right_of(Rows rows, int64_t columns) {
    return (Rows){rows.start ? rows.start + columns : 0, rows.apart};
}
INLINE Rows down(Rows rows, int64_t count) {
    return (Rows){rows.start ? rows.start + count * rows.apart : 0, rows.apart};
}

/* The same for the numbers [j, end) of up to MOST_ROWS samples. */
static void spread_panel(int samples, Walk walk, int64_t j, int64_t end, const real *const *a, Rows w, int keep,
                         Rows from, real *out, int64_t apart) {
#define CALL(M, V)                                                                                                     \
    for (; j + V * VL <= end; j += V * VL)                                                                             \
        spread_tile(M, V, walk, a, right_of(w, j), keep, right_of(from, j), out + j, apart);
    BY_SAMPLES(samples, CALL)
#undef CALL
    for (; j < end; j += VL) { /* the few vectors at the edge */
        int m = 0;
        for (; m + 3 <= samples; m += 3)
            spread_tile(3, 1, walk, a + m, right_of(w, j), keep, right_of(down(from, m), j), out + m * apart + j, apart);
        for (; m < samples; m++)
            spread_tile(1, 1, walk, a + m, right_of(w, j), keep, right_of(down(from, m), j), out + m * apart + j, apart);
    }
}

/* The same for `width` numbers, a whole number of vectors, and any number of samples: all samples use a panel of weights
   while it is in cache. */
static void spread_block(int64_t samples, Walk walk, int64_t width, const real *const *a, Rows w, int keep, Rows from,
                         real *out, int64_t apart) {
    const int64_t panel = (samples == 1 ? 8 : 4) * VL;
    for (int64_t j = 0; j < width; j += panel)
        for (int64_t m = 0; m < samples;) {
            const int count = part_of(samples - m, MOST_ROWS);
            spread_panel(count, walk, j, j + panel < width ? j + panel : width, a + m, w, keep, down(from, m),
                         out + m * apart, apart);
            m += count;
        }
}

/* out = a W + from, that is W^T a for each sample: `width` numbers (whole vectors) from `depth` rows of w. It processes w
   in blocks of rows, which the processor prefetches better than whole columns. */
static void spread(int samples, int64_t depth, int64_t width, Rows a, Rows w, Rows from, real *out, int64_t apart) {
    for (int64_t k = 0; k < depth; k += BLOCK) {
        const int64_t here = depth - k < BLOCK ? depth - k : BLOCK;
        const real *starts[MOST_SAMPLES];
        for (int m = 0; m < samples; m++) starts[m] = a.start + m * a.apart + k;
        const Rows last = k + BLOCK < depth ? (Rows){0, 0} : from;
        spread_block(samples, (Walk){1, here, 0}, width, starts, down(w, k), k > 0, last, out, apart);
    }
}

/* The lane sums of VL vectors as one vector: neighbours are added log2(VL) times. */
INLINE vec fold(vec a, vec b) {
    lanes even, odd;
    for (int l = 0; l < VL; l++) even[l] = 2 * l, odd[l] = 2 * l + 1;
#ifdef __clang__
    vec x, y;
    UNROLL for (int l = 0; l < VL; l++) {
        x[l] = l < VL / 2 ? a[2 * l] : b[2 * l - VL];
        y[l] = l < VL / 2 ? a[2 * l + 1] : b[2 * l + 1 - VL];
    }
    return x + y;
#else
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#endif
}

INLINE vec sums(const vec *parts) {
    vec t[VL];
    UNROLL for (int i = 0; i < VL; i++) t[i] = parts[i];
    UNROLL for (int half = VL / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) t[i] = fold(t[2 * i], t[2 * i + 1]);
    return t[0];
}

/* parts[m][r] = sum_k a[m][k] w[r][k] per lane, for R rows of w starting at `first`. */
INLINE void dot_tile(const int M, const int R, int64_t depth, Rows a, Rows w, vec (*parts)[VL], int first) {
    vec sum[4][MOST_ROWS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m] = all(0);
    for (int64_t k = 0; k < depth; k += VL) {
        vec weight[4];
        UNROLL for (int r = 0; r < R; r++) {
            weight[r] = load(w.start + r * w.apart + k);
            __builtin_prefetch(w.start + (r + R) * w.apart + k);
        }
        UNROLL for (int m = 0; m < M; m++) {
            const vec x = load(a.start + m * a.apart + k);
            UNROLL for (int r = 0; r < R; r++) sum[r][m] = fused(x, weight[r], sum[r][m]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) parts[m][first + r] = sum[r][m];
}

enum { FEW = VBYTES / sizeof(real) < 4 ? VBYTES / sizeof(real) : 4 };

/* The same for up to FEW rows of w and up to MOST_ROWS samples. */
static void dot_few(int samples, int rows, int64_t depth, Rows a, Rows w, vec (*parts)[VL], int first) {
    int r = 0;
#define CALL(M, R)                                                                                                     \
    for (; r + (R < FEW ? R : FEW) <= rows; r += R < FEW ? R : FEW)                                                    \
        dot_tile(M, R < FEW ? R : FEW, depth, a, down(w, r), parts, first + r);
    BY_SAMPLES(samples, CALL)
#undef CALL
    for (; r < rows; r++) { /* the few rows at the edge */
        int m = 0;
        for (; m + 3 <= samples; m += 3) dot_tile(3, 1, depth, down(a, m), down(w, r), parts + m, first + r);
        for (; m < samples; m++) dot_tile(1, 1, depth, down(a, m), down(w, r), parts + m, first + r);
    }
}

/* The same for one vector of rows and up to MOST_SAMPLES samples: all samples use a few rows while they are in cache. */
static void dot_block(int samples, int64_t depth, int rows, Rows a, Rows w, vec (*parts)[VL]) {
    for (int r = 0; r < rows; r += FEW)
        for (int m = 0; m < samples;) {
            const int count = part_of(samples - m, MOST_ROWS);
            dot_few(count, rows - r < FEW ? rows - r : FEW, depth, down(a, m), down(w, r), parts + m, r);
            m += count;
        }
    for (int r = rows; r < VL; r++)
        for (int m = 0; m < samples; m++) parts[m][r] = all(0);
}

/* out = from + W a for each sample: `rows` numbers, each over `depth` columns (whole vectors) of w. */
static void dot(int64_t samples, int64_t depth, int64_t rows, Rows a, Rows w, Rows from, real *out, int64_t apart) {
    vec parts[MOST_SAMPLES][VL];
    for (int64_t i = 0; i < rows; i += VL)
        for (int64_t m = 0; m < samples;) {
            const int count = part_of(samples - m, MOST_SAMPLES);
            dot_block(count, depth, rows - i < VL ? (int)(rows - i) : VL, down(a, m), down(w, i), parts);
            for (int c = 0; c < count; c++) {
                const vec base = from.start ? load(from.start + (m + c) * from.apart + i) : all(0);
                store(out + (m + c) * apart + i, sums(parts[c]) + base);
            }
            m += count;
        }
}

/* One term of an update: sum over `count` rows of left^T right. */
typedef struct {
    Rows left, right;
    int64_t count;
} Term;

/* into[m][j] = (keep ? into[m][j] : 0) + scale * sum over the terms of left[k][m] right[k][j], M rows, V vectors of j. */
INLINE void outer_tile(const int M, const int V, const Term *terms, int count, int64_t i, int64_t j, int keep,
                       real scale, real *into, int64_t apart) {
    vec sum[MOST_ROWS][4];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++) sum[m][v] = all(0);
    for (int term = 0; term < count; term++) {
        const real *left = terms[term].left.start + i, *right = terms[term].right.start + j;
        for (int64_t k = 0; k < terms[term].count; k++) {
            vec x[4];
            UNROLL for (int v = 0; v < V; v++) x[v] = load(right + v * VL);
            UNROLL for (int m = 0; m < M; m++) {
                const vec c = all(left[m]);
                UNROLL for (int v = 0; v < V; v++) sum[m][v] = fused(c, x[v], sum[m][v]);
            }
            left += terms[term].left.apart;
            right += terms[term].right.apart;
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++) {
            real *place = into + (i + m) * apart + j + v * VL;
            store(place, (keep ? load(place) : all(0)) + scale * sum[m][v]);
        }
}

INLINE void outer_column(const int V, const Term *terms, int count, int64_t first, int64_t last, int64_t j, int keep,
                         real scale, real *into, int64_t apart) {
    int64_t i = first;
    for (; i + 6 <= last; i += 6) outer_tile(6, V, terms, count, i, j, keep, scale, into, apart);
    for (; i + 2 <= last; i += 2) outer_tile(2, V, terms, count, i, j, keep, scale, into, apart);
    for (; i < last; i++) outer_tile(1, V, terms, count, i, j, keep, scale, into, apart);
}

/* into = (keep ? into : 0) + scale * sum of the terms, for the rows [first, last) and `width` columns. */
static void outer(const Term *terms, int count, int64_t first, int64_t last, int64_t width, int keep, real scale,
                  real *into, int64_t apart) {
    int64_t j = 0;
    enum { V = ACCUMULATORS / 6 };
    for (; j + V * VL <= width; j += V * VL) outer_column(V, terms, count, first, last, j, keep, scale, into, apart);
    for (; j < width; j += VL) outer_column(1, terms, count, first, last, j, keep, scale, into, apart);
}

/* into = (keep ? into : 0) + scale * sum of the rows of the term's left side: the gradient of a bias. */
static void add_rows(const Term *term, int64_t first, int64_t last, int keep, real scale, real *into) {
    for (int64_t i = first; i < last; i += VL) {
        vec sum = all(0);
        for (int64_t k = 0; k < term->count; k++) sum += load(term->left.start + k * term->left.apart + i);
        store(into + i, (keep ? load(into + i) : all(0)) + scale * sum);
    }
}

#endif
