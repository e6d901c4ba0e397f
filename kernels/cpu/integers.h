/* Sums of products of small integers: unsigned weights by activations that are rounded to signed 8 bits. Included by
 * files that are compiled without fused multiply-adds. */
#pragma once
#include "vectors.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* Dot products of four columns.
 *
 * A word of 32 bits has four columns of a row of the weight. WORDS: the steps in which they are multiplied, each with
 * one word of a row of activations; `part`: the weights of a step, as `dot` takes them. BIAS: what `part` subtracts
 * from the weights, so that BIAS · Σ q is to be added to the sums. */
#if defined(__AVX512VNNI__)
enum { WORDS = 1, BIAS = 0 };
static inline nu part(nu word, int step)
{
    (void)step;
    return word;
}
static inline ni dot(ni sum, nu w, uint32_t x)
{
    return (ni)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
}
#elif defined(__AVX512BW__) || defined(__AVX2__) || defined(__SSE2__) && !defined(__AVX__)
/* Without saturation: columns 0 and 2, then 1 and 3, as numbers of 16 bits. */
enum { WORDS = 2, BIAS = 0 };
static inline nu part(nu word, int step)
{
    return (step ? word >> 8 : word) & 0x00ff00ff;
}
static inline ni dot(ni sum, nu w, uint32_t x)
{
#if defined(__AVX512BW__)
    return sum + (ni)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    return sum + (ni)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
    return sum + (ni)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(x));
#endif
}
#elif defined(__ARM_FEATURE_MATMUL_INT8)
enum { WORDS = 1, BIAS = 0 };
static inline nu part(nu word, int step)
{
    (void)step;
    return word;
}
static inline ni dot(ni sum, nu w, uint32_t x)
{
    return (ni)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, vreinterpretq_s8_u32(vdupq_n_u32(x)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
enum { WORDS = 1, BIAS = 128 }; /* the instruction multiplies signed numbers only */
static inline nu part(nu word, int step)
{
    (void)step;
    return word ^ 0x80808080u;
}
static inline ni dot(ni sum, nu w, uint32_t x)
{
    return (ni)vdotq_s32((int32x4_t)sum, (int8x16_t)w, vreinterpretq_s8_u32(vdupq_n_u32(x)));
}
#else
#define DOT_IS_LONG /* many instructions */
enum { WORDS = 1, BIAS = 0 };
static inline nu part(nu word, int step)
{
    (void)step;
    return word;
}
static inline ni dot(ni sum, nu w, uint32_t x)
{
    ni v = (ni)w;
    sum += (v & 255) * ((int32_t)(x << 24) >> 24);
    sum += (v >> 8 & 255) * ((int32_t)(x << 16) >> 24);
    sum += (v >> 16 & 255) * ((int32_t)(x << 8) >> 24);
    return sum + (ni)(w >> 24) * ((int32_t)x >> 24);
}
#endif

/* Numbers of 16 bits, widened. */
static inline nu widened(const void *from)
{
    typedef uint16_t nh __attribute__((vector_size(NATIVE / 2), aligned(2), may_alias));
#if defined(__AVX512BW__)
    return (nu)_mm512_cvtepu16_epi32((__m256i) * (const nh *)from); /* GCC 12 makes two halves of a conversion */
#else
    return __builtin_convertvector(*(const nh *)from, nu);
#endif
}

/* float16 numbers, a register of them. */
static inline nf halves(const void *from)
{
    nu half = widened(from);
    nf size = (nf)((half & 0x7fff) << 13) * 0x1p112f; /* exact, also for subnormal numbers */
    return (nf)((nu)size | (half & 0x8000) << 16);
}

/* Rounds 16 numbers to integers, ties to even. */
static inline vi rounded16(vf x)
{
    return (vi)(x + 12582912.0f) - 0x4b400000; /* 1.5 · 2²³ */
}

/* The greatest and the sum of 16 numbers. */
static inline int32_t most_of(vi x)
{
    UNROLL for (int half = 8; half; half /= 2) {
        vi other = __builtin_shuffle(x, (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} ^ half);
        x = ((x > other) & x) | ((x <= other) & other);
    }
    return x[0];
}

static inline int32_t total_of(vi x)
{
    UNROLL for (int half = 8; half; half /= 2)
        x += __builtin_shuffle(x, (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} ^ half);
    return x[0];
}

/* The bits of the greatest magnitude of a group; those of infinities and NaN are above all others. */
static inline int32_t magnitude(const float *x, long count)
{
    vi most = {0}, rest = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        vi bits = *(const vi_any *)(x + i) & 0x7fffffff, is_more = bits > most;
        most = (is_more & bits) | (~is_more & most);
    }
    memcpy(&rest, x + i, (count - i) * 4);
    rest &= 0x7fffffff;
    vi is_more = rest > most;
    return most_of((is_more & rest) | (~is_more & most));
}

/* Activations as numbers of 16 bits, in the order of `part`: columns 0 and 2, then 1 and 3. */
static inline void to_halves(const int8_t *line, long count, int16_t *out)
{
    for (long k = 0; k < count; k += 4) {
        out[k] = line[k];
        out[k + 1] = line[k + 2];
        out[k + 2] = line[k + 1];
        out[k + 3] = line[k + 3];
    }
}
