/* Vectors of the machine's width, and the activation functions on them.

   Uses the vector extensions common to GCC and Clang, so that one source covers AVX-512, AVX2, SSE and NEON.
   Compiled with REAL_DOUBLE it computes in float64, otherwise in float32. */
#ifndef EQPROP_VEC_H
#define EQPROP_VEC_H

#include <stdint.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef REAL_DOUBLE
typedef double real;
typedef int64_t whole;
#else
typedef float real;
typedef int32_t whole;
#endif

#if defined(__AVX512F__)
#define VBYTES 64
#define ACCUMULATORS 24 /* of 32 registers; the rest hold operands */
#elif defined(__AVX__)
#define VBYTES 32
#define ACCUMULATORS 12 /* of 16 registers */
#elif defined(__aarch64__)
#define VBYTES 16
#define ACCUMULATORS 24
#else
#define VBYTES 16
#define ACCUMULATORS 12
#endif

#define VL ((int)(VBYTES / sizeof(real)))
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

typedef real vec __attribute__((vector_size(VBYTES)));
typedef whole lanes __attribute__((vector_size(VBYTES))); /* all ones or all zeros in a lane */
typedef vec vec_in_memory __attribute__((may_alias));
typedef vec vec_anywhere __attribute__((may_alias, aligned(sizeof(real))));
typedef lanes lanes_anywhere __attribute__((may_alias, aligned(sizeof(real))));

INLINE vec load(const real *p) { return *(const vec_in_memory *)p; }
INLINE void store(real *p, vec v) { *(vec_in_memory *)p = v; }
INLINE vec load_anywhere(const real *p) { return *(const vec_anywhere *)p; }
INLINE void store_anywhere(real *p, vec v) { *(vec_anywhere *)p = v; }
INLINE vec all(real x) { return x - (vec){0}; }

/* a b + c, rounded once if the machine can. Automatic contraction is off (-ffp-contract=off): the compiler would fuse some
   products and not others, and results would depend on the tile size. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__) && defined(REAL_DOUBLE)
    return (vec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(REAL_DOUBLE)
    return (vec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__) && defined(REAL_DOUBLE)
    return (vec)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec choose(lanes mask, vec yes, vec no) { return (vec)((mask & (lanes)yes) | (~mask & (lanes)no)); }
INLINE vec magnitude(vec v) { return choose(v < 0, -v, v); }
/* Both keep NaN: a comparison with it is false. */
INLINE vec at_least(vec v, real low) { return choose(v < low, all(low), v); }
INLINE vec at_most(vec v, real high) { return choose(v > high, all(high), v); }

/* The first `count` lanes. */
INLINE lanes below(int64_t count) {
    lanes mask;
    for (int l = 0; l < VL; l++) mask[l] = l < count ? -1 : 0;
    return mask;
}

INLINE int any(lanes mask) {
    whole found = 0;
    for (int l = 0; l < VL; l++) found |= mask[l];
    return found != 0;
}

#ifdef REAL_DOUBLE
#define ROUNDER 6755399441055744.0 /* 1.5 * 2^52: adding it leaves the nearest whole number in the low bits */
#define MANTISSA 52
#define EXPONENT_BIAS 1023
#define EXP_RANGE 700.0
#define LN2_HIGH 0.693147180369123816490
#define LN2_LOW 1.90821492927058770002e-10
#else
#define ROUNDER 12582912.0f /* 1.5 * 2^23 */
#define MANTISSA 23
#define EXPONENT_BIAS 127
#define EXP_RANGE 86.0f
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#endif

#ifdef REAL_DOUBLE /* the Taylor series: its next term is below 1e-17 */
enum { TERMS = 12 };
static const real SERIES[TERMS] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                   1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                   1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5};
#else /* the minimax coefficients of the Cephes library */
enum { TERMS = 6 };
static const real SERIES[TERMS] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                   4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
#endif

/* exp(v) to about one unit in the last place, with v clamped to [-EXP_RANGE, EXP_RANGE]; NaN stays NaN. */
INLINE vec exponential(vec v) {
    v = at_most(at_least(v, -EXP_RANGE), EXP_RANGE);
    const vec shifted = fused(v, all((real)1.44269504088896340736), all((real)ROUNDER));
    const vec n = shifted - (real)ROUNDER;
    const vec f = fused(n, all((real)-LN2_LOW), fused(n, all((real)-LN2_HIGH), v)); /* |f| <= ln(2)/2 */
    vec p = all(SERIES[0]);
    UNROLL for (int i = 1; i < TERMS; i++) p = fused(p, f, all(SERIES[i]));
    p = fused(p * f, f, f) + 1;
    const lanes power = ((lanes)shifted + EXPONENT_BIAS) << MANTISSA; /* the bits of 2^n */
    return p * (vec)power;
}

/* tanh(v) for |v| < 0.625, where 1 - 2/(1 + exp(2v)) would lose digits (Cephes). */
INLINE vec tanh_small(vec v) {
    const vec z = v * v;
#ifdef REAL_DOUBLE
    const vec p = (z * -9.64399179425052238628e-1 + -9.92877231001918586564e1) * z + -1.61468768441708447952e3;
    const vec q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
    return v + v * (z * (p / q));
#else
    vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    return v + v * (z * p);
#endif
}

enum activation { TANH, SIGMOID, HARD_SIGMOID };

/* sigma(v): tanh(v), 1/(1 + exp(2 - 4v)), or v clamped to [0, 1]. */
INLINE vec sigma(const int kind, vec v) {
    if (kind == SIGMOID) return 1 / (1 + exponential(fused(all(-4), v, all(2))));
    if (kind == HARD_SIGMOID) return at_most(at_least(v, 0), 1);
    return choose(magnitude(v) < (real)0.625, tanh_small(v), 1 - 2 / (1 + exponential(2 * v)));
}

/* sigma'(v), where r = sigma(v); for the hard sigmoid, 1 on the closed interval. */
INLINE vec slope(const int kind, vec v, vec r) {
    if (kind == SIGMOID) return 4 * r * (1 - r);
    if (kind == HARD_SIGMOID) return choose((v >= 0) & (v <= 1), all(1), all(0));
    return 1 - r * r;
}

/* sigma''(v), where r = sigma(v). */
INLINE vec curvature(const int kind, vec r) {
    if (kind == SIGMOID) return 16 * r * (1 - r) * (1 - 2 * r);
    if (kind == HARD_SIGMOID) return all(0);
    return -2 * r * (1 - r * r);
}

#endif
