/* Multi-head latent attention (MLA), always in its absorbed form: the cache holds one latent and one turned key for a
 * position, and a query is brought into their space. So a query's bits do not depend on how a prompt is cut into steps.
 *
 * A position of the cache has `width` numbers, a multiple of 16: the latent [rank], the turned key [rope], and zeros. So
 * has a query of a head. `pagewire_attend` with one KV head and with keys that are the values too does the rest: its
 * result begins with the sum of the latents [rank]. */
#pragma once
#include "product.h"

typedef struct {
    const Matrix *keys;   /* [heads] of [rank][nope]: the key rows of kv_b, transposed */
    const Matrix *values; /* [heads] of [value][rank]: its value rows */
    long heads, nope, rope, rank, value, width;
} Latent;

/* q: m rows of [heads][nope + rope], q_stride apart; out: [m][heads][width]. */
void pagewire_absorb(const Latent *a, const float *q, long q_stride, float *out, long m);

/* attended: [m][heads][width]; out: m rows of [heads][value], out_stride apart. */
void pagewire_expand(const Latent *a, const float *attended, float *out, long out_stride, long m);

/* Writes m latents [rank] and turned keys [rope] to their slots, page * block_size + offset. */
void pagewire_write_latent(const Latent *a, const Pages *p, const float *latent, long latent_stride, const float *key,
                           long key_stride, const int64_t *slots, long m);
