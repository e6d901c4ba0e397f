/* The instruction that multiplies pairs of bfloat16 and adds them to float32, where there is one. HAS_DOT says so. */
#pragma once
#include "vectors.h"

#if defined(PAGEWIRE_AMX)
#include "tiles.h"
#elif defined(__AVX512BF16__)
#define HAS_DOT 1
static inline nf dot(nf sum, nu w, uint32_t x)
{
    return (nf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#define HAS_DOT 1
static inline nf dot(nf sum, nu w, uint32_t x)
{
    bfloat16x8_t a = vreinterpretq_bf16_u32(vdupq_n_u32(x));
    return (nf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)(w), a);
}
#endif

/* Rounds numbers for a product of bfloat16, in which denormals count as zero where an instruction rounds. */
static inline void round_bf16(vf x, void *to)
{
#ifdef __AVX512BF16__
    _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store_bf16(x, to);
#endif
}
