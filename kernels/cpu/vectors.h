/* Shared by all kernels: vectors of 16 floats, which the compiler splits for narrower registers, and threads. */
#pragma once
#include <stdint.h>
#include <string.h>

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

/* The greater of each pair; b where one of them is NaN. */
static inline vf max16(vf a, vf b)
{
    return select16(a > b, a, b);
}

/* e^x within 2 ulp; 0 below -87, e^88 above 88. The polynomial is that of Cephes' expf. */
static inline vf exp16(vf x)
{
    vf low = (vf){0} - 87.0f, high = (vf){0} + 88.0f;
    vi is_low = x <= low;
    x = select16(x > high, high, max16(x, low));
    vf t = x * 1.44269504f + 12582912.0f; /* 1.5 · 2²³: the low bits of the sum are x / ln 2, rounded */
    vf n = t - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = (vf){0} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (vf)(~is_low & ((vi)y + ((vi)t << 23)));
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
