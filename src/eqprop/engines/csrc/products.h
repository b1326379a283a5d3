/* The matrix products of the time loop, for a few samples at a time and weights in the layout the model keeps them in.

   Every number of a result is added up in an order that depends on the shapes alone, never on how many samples share a
   tile or on which thread works: a sample's states come out the same, bit for bit, in any company. */
#ifndef EQPROP_PRODUCTS_H
#define EQPROP_PRODUCTS_H

#include "vec.h"

/* Rows of numbers: `start` of the first, `apart` from one to the next. Rows are aligned and padded to whole vectors. */
typedef struct {
    const real *start;
    int64_t apart;
} Rows;

enum { BLOCK = 64, AHEAD = 8 }; /* rows of weights gone through at a time, and fetched ahead of their use */

/* CALL(M, V) for the tile of M samples by V vectors (or rows) that fills the registers. */
#if ACCUMULATORS == 24
#define MOST_SAMPLES 12
#define BY_SAMPLES(count, CALL)                                                                                        \
    switch (count) {                                                                                                   \
    case 1: CALL(1, 8) break; case 2: CALL(2, 8) break; case 3: CALL(3, 8) break; case 4: CALL(4, 4) break;            \
    case 5: CALL(5, 4) break; case 6: CALL(6, 4) break; case 7: CALL(7, 2) break; case 8: CALL(8, 2) break;            \
    case 9: CALL(9, 2) break; case 10: CALL(10, 2) break; case 11: CALL(11, 2) break; default: CALL(12, 2)             \
    }
#else
#define MOST_SAMPLES 6
#define BY_SAMPLES(count, CALL)                                                                                        \
    switch (count) {                                                                                                   \
    case 1: CALL(1, 8) break; case 2: CALL(2, 4) break; case 3: CALL(3, 4) break; case 4: CALL(4, 2) break;            \
    case 5: CALL(5, 2) break; default: CALL(6, 2)                                                                      \
    }
#endif

/* How many samples of `left` the next tile takes: tiles of about equal size, none over MOST_SAMPLES. */
static inline int tile_of(int64_t left) {
    const int64_t tiles = (left + MOST_SAMPLES - 1) / MOST_SAMPLES;
    return (int)((left + tiles - 1) / tiles);
}

/* out[m][j] = from[m][j] + sum_k a[m][k] w[k][j] for V vectors of j; `from` may be out, or null for zeros. */
INLINE void spread_tile(const int M, const int V, int64_t depth, Rows a, Rows w, Rows from, real *out, int64_t apart) {
    vec sum[MOST_SAMPLES][8];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++)
            sum[m][v] = from.start ? load(from.start + m * from.apart + v * VL) : all(0);
    const real *row = w.start;
    for (int64_t k = 0; k < depth; k++) {
        vec weight[8];
        UNROLL for (int v = 0; v < V; v++) {
            weight[v] = load(row + v * VL);
            __builtin_prefetch(row + v * VL + AHEAD * w.apart);
        }
        UNROLL for (int m = 0; m < M; m++) {
            const vec x = all(a.start[m * a.apart + k]);
            UNROLL for (int v = 0; v < V; v++) sum[m][v] += x * weight[v];
        }
        row += w.apart;
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++) store(out + m * apart + v * VL, sum[m][v]);
}

INLINE Rows right_of(Rows rows, int64_t columns) {
    return (Rows){rows.start ? rows.start + columns : 0, rows.apart};
}
INLINE Rows down(Rows rows, int64_t count) {
    return (Rows){rows.start ? rows.start + count * rows.apart : 0, rows.apart};
}

/* The same for `width` numbers of j, a whole number of vectors, and any number of samples up to MOST_SAMPLES. */
static void spread_block(int samples, int64_t depth, int64_t width, Rows a, Rows w, Rows from, real *out,
                         int64_t apart) {
    int64_t j = 0;
#define CALL(M, V)                                                                                                     \
    for (; j + V * VL <= width; j += V * VL)                                                                           \
        spread_tile(M, V, depth, a, right_of(w, j), right_of(from, j), out + j, apart);
    BY_SAMPLES(samples, CALL)
#undef CALL
    for (; j < width; j += VL) { /* the few vectors at the edge */
        int m = 0;
        for (; m + 4 <= samples; m += 4)
            spread_tile(4, 1, depth, down(a, m), right_of(w, j), right_of(down(from, m), j), out + m * apart + j, apart);
        for (; m < samples; m++)
            spread_tile(1, 1, depth, down(a, m), right_of(w, j), right_of(down(from, m), j), out + m * apart + j, apart);
    }
}

/* out = from + a W, that is W^T a of each sample: `width` numbers (whole vectors) from `depth` rows of w. It goes
   through w a block of rows at a time, which the processor reads ahead better than columns from top to bottom. */
static void spread(int samples, int64_t depth, int64_t width, Rows a, Rows w, Rows from, real *out, int64_t apart) {
    for (int64_t k = 0; k < depth; k += BLOCK) {
        const int64_t here = depth - k < BLOCK ? depth - k : BLOCK;
        spread_block(samples, here, width, (Rows){a.start + k, a.apart}, (Rows){w.start + k * w.apart, w.apart}, from,
                     out, apart);
        from = (Rows){out, apart};
    }
}

/* The sums of the lanes of VL vectors as one vector: neighbours are added, log2(VL) times. */
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

/* parts[m][r] = lane by lane, sum_k a[m][k] w[r][k] for R rows of w, from `first` on. */
INLINE void dot_tile(const int M, const int R, int64_t depth, Rows a, Rows w, vec (*parts)[VL], int first) {
    vec sum[8][MOST_SAMPLES];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m] = all(0);
    for (int64_t k = 0; k < depth; k += VL) {
        vec weight[8];
        UNROLL for (int r = 0; r < R; r++) {
            weight[r] = load(w.start + r * w.apart + k);
            __builtin_prefetch(w.start + (r + R) * w.apart + k);
        }
        UNROLL for (int m = 0; m < M; m++) {
            const vec x = load(a.start + m * a.apart + k);
            UNROLL for (int r = 0; r < R; r++) sum[r][m] += x * weight[r];
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) parts[m][first + r] = sum[r][m];
}

/* out = from + W a of each sample: `rows` numbers, each over `depth` columns (whole vectors) of w. */
static void dot(int samples, int64_t depth, int64_t rows, Rows a, Rows w, Rows from, real *out, int64_t apart) {
    vec parts[MOST_SAMPLES][VL];
    for (int64_t i = 0; i < rows; i += VL) {
        const int here = rows - i < VL ? (int)(rows - i) : VL;
        int r = 0;
#define CALL(M, R)                                                                                                     \
    for (; r + (R < VL ? R : VL) <= here; r += R < VL ? R : VL)                                                        \
        dot_tile(M, R < VL ? R : VL, depth, a, down(w, i + r), parts, r);
        BY_SAMPLES(samples, CALL)
#undef CALL
        for (; r < here; r++) { /* the few rows at the edge */
            int m = 0;
            for (; m + 4 <= samples; m += 4) dot_tile(4, 1, depth, down(a, m), down(w, i + r), parts + m, r);
            for (; m < samples; m++) dot_tile(1, 1, depth, down(a, m), down(w, i + r), parts + m, r);
        }
        for (; r < VL; r++)
            for (int m = 0; m < samples; m++) parts[m][r] = all(0);
        for (int m = 0; m < samples; m++) {
            const vec base = from.start ? load(from.start + m * from.apart + i) : all(0);
            store(out + m * apart + i, base + sums(parts[m]));
        }
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
    vec sum[MOST_SAMPLES][2];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < V; v++) sum[m][v] = all(0);
    for (int term = 0; term < count; term++) {
        const real *left = terms[term].left.start + i, *right = terms[term].right.start + j;
        for (int64_t k = 0; k < terms[term].count; k++) {
            vec x[2];
            UNROLL for (int v = 0; v < V; v++) x[v] = load(right + v * VL);
            UNROLL for (int m = 0; m < M; m++) {
                const vec c = all(left[m]);
                UNROLL for (int v = 0; v < V; v++) sum[m][v] += c * x[v];
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
    for (; i + MOST_SAMPLES <= last; i += MOST_SAMPLES)
        outer_tile(MOST_SAMPLES, V, terms, count, i, j, keep, scale, into, apart);
    for (; i + 4 <= last; i += 4) outer_tile(4, V, terms, count, i, j, keep, scale, into, apart);
    for (; i < last; i++) outer_tile(1, V, terms, count, i, j, keep, scale, into, apart);
}

/* into = (keep ? into : 0) + scale * sum of the terms, for the rows [first, last) and `width` columns. */
static void outer(const Term *terms, int count, int64_t first, int64_t last, int64_t width, int keep, real scale,
                  real *into, int64_t apart) {
    int64_t j = 0;
    for (; j + 2 * VL <= width; j += 2 * VL) outer_column(2, terms, count, first, last, j, keep, scale, into, apart);
    for (; j < width; j += VL) outer_column(1, terms, count, first, last, j, keep, scale, into, apart);
}

#endif
