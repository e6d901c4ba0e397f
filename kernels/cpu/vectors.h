/* Shared by all kernels: vectors of 16 floats, which the compiler splits for narrower registers, and threads. */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { LANES = 16 };

typedef float vf __attribute__((vector_size(64), may_alias));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(64), may_alias));
typedef int32_t vi __attribute__((vector_size(64), may_alias));

typedef int32_t vi_any __attribute__((vector_size(64), aligned(4), may_alias));

/* A register of the CPU; PARTS of them are a vector. GCC keeps vectors that are wider than a register in memory, so sums
 * that must stay in registers are written with these. */
#ifdef __AVX512F__
enum { NATIVE = 64 };
#elif defined(__AVX__)
enum { NATIVE = 32 };
#else
enum { NATIVE = 16 };
#endif
enum { PARTS = 64 / NATIVE, NATIVE_LANES = NATIVE / 4 };
typedef float nf __attribute__((vector_size(NATIVE), may_alias));
typedef float nf_any __attribute__((vector_size(NATIVE), aligned(4), may_alias));
typedef uint32_t nu __attribute__((vector_size(NATIVE), may_alias));
typedef int32_t ni __attribute__((vector_size(NATIVE), may_alias));

#define UNROLL _Pragma("GCC unroll 32")

static inline uint32_t load_u32(const void *from)
{
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

/* The i-th number of an array of float32 or bfloat16. */
static inline float number(const char *from, long i, int bf16)
{
    uint16_t half;
    uint32_t bits;
    float value;
    if (bf16) {
        memcpy(&half, from + 2 * i, 2);
        bits = (uint32_t)half << 16;
    } else {
        memcpy(&bits, from + 4 * i, 4);
    }
    memcpy(&value, &bits, 4);
    return value;
}

/* 16 numbers from the i-th on. */
static inline vf load16(const char *from, long i, int bf16)
{
    if (!bf16)
        return *(const vf_any *)(from + 4 * i);
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
    return (vf)(__builtin_convertvector(*(const vh *)(from + 2 * i), vu) << 16);
}

static inline vf select16(vi where, vf then, vf otherwise)
{
    return (vf)((where & (vi)then) | (~where & (vi)otherwise));
}

static inline nf select_native(ni where, nf then, nf otherwise)
{
    return (nf)((where & (ni)then) | (~where & (ni)otherwise));
}

/* The greater of each pair; b where one of them is NaN. */
static inline nf max_native(nf a, nf b)
{
#if defined(__AVX512F__)
    return (nf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (nf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (nf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return select_native(a > b, a, b);
#endif
}

/* The lesser of each pair; b where one of them is NaN. */
static inline nf min_native(nf a, nf b)
{
#if defined(__AVX512F__)
    return (nf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (nf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (nf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return select_native(a < b, a, b);
#endif
}

static inline vf max16(vf a, vf b)
{
    UNROLL for (int i = 0; i < PARTS; i++)
        ((nf *)&a)[i] = max_native(((nf *)&a)[i], ((nf *)&b)[i]);
    return a;
}

/* e^x within 2 ulp for x in [-87, 88], 0 where `seen` is not set. The polynomial is that of Cephes' expf. NaN stays NaN
 * where there is an instruction that scales by a power of two. */
#ifdef __AVX512F__
typedef __mmask16 Lanes;
#else
typedef ni Lanes;
#endif
static inline nf exp_where(Lanes seen, nf x)
{
    nf t = x * 1.44269504f + 12582912.0f; /* 1.5 · 2²³: the low bits of the sum are x / ln 2, rounded */
    nf n = t - 12582912.0f;
    nf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    nf y = (nf){0} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
#ifdef __AVX512F__
    return (nf)_mm512_maskz_scalef_ps(seen, (__m512)y, (__m512)n);
#else
    return (nf)(seen & ((ni)y + ((ni)t << 23)));
#endif
}

/* e^x within 2 ulp; 0 below -87 and for NaN, e^88 above 88. */
static inline nf exp_native(nf x)
{
    nf low = (nf){0} - 87.0f, high = (nf){0} + 88.0f, inside = min_native(max_native(x, low), high);
#ifdef __AVX512F__
    return exp_where(_mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_GT_OQ), inside);
#else
    return exp_where(x > low, inside);
#endif
}

/* The same for x ≤ 88; NaN stays NaN. */
static inline nf exp_below(nf x)
{
#ifdef __AVX512F__
    nf low = (nf){0} - 87.0f;
    return exp_where(_mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLE_UQ), max_native(low, x));
#else
    return select_native(x != x, x, exp_native(x));
#endif
}

static inline vf exp16(vf x)
{
    UNROLL for (int i = 0; i < PARTS; i++)
        ((nf *)&x)[i] = exp_native(((nf *)&x)[i]);
    return x;
}

/* x / (1 + e^-x), one order of operations for every kernel. */
static inline vf silu16(vf x)
{
    return x / (exp16(-x) + 1.0f);
}

/* Rounds to bfloat16, to nearest with ties to even. */
static inline void store_bf16(vf x, char *to)
{
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
    vu bits = (vu)x, half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *(vh *)to = __builtin_convertvector((vu)select16(x != x, (vf)((vu){0} + 0x7fc0), (vf)half), vh);
}
