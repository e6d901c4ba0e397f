/* Operations on rows of activations between the products. All are float32 except the pages. */
#include <math.h>

#include "product.h"

enum { FEW = 4096 }; /* numbers that one thread handles faster than another thread wakes up */

static inline float inverse_rms(const float *x, long n, float eps)
{
    vf sum = {0};
    float rest = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = *(const vf_any *)(x + i);
        sum += v * v;
    }
    for (; i < n; i++)
        rest += x[i] * x[i];
    for (int l = 0; l < LANES; l++)
        rest += sum[l];
    return 1 / sqrtf(rest / n + eps);
}

static inline void scaled(const float *x, float by, const float *weight, float *out, long n)
{
    for (long i = 0; i < n; i++)
        out[i] = x[i] * by * weight[i];
}

/* out = norm(x + residual) · weight, total = x + residual; without a residual, total is not written. All [m][n]. */
void pagewire_rms_norm(const float *x, const float *residual, const float *weight, float eps, float *total, float *out,
                       long m, long n)
{
#pragma omp parallel for schedule(static) if (m * n > FEW)
    for (long i = 0; i < m; i++) {
        const float *in = x + i * n;
        if (residual) {
            for (long j = 0; j < n; j++)
                total[i * n + j] = in[j] + residual[i * n + j];
            in = total + i * n;
        }
        scaled(in, inverse_rms(in, n, eps), weight, out + i * n, n);
    }
}

/* silu(gate) · up. gate_up: [m][2][n]; out: [m][n]. */
void pagewire_silu_mul(const float *gate_up, float *out, long m, long n)
{
#pragma omp parallel for schedule(static) if (m * n > FEW)
    for (long i = 0; i < m; i++) {
        const float *gate = gate_up + 2 * i * n, *up = gate + n;
        float *to = out + i * n;
        long j = 0;
        for (; j + LANES <= n; j += LANES) {
            vf g = *(const vf_any *)(gate + j);
            *(vf_any *)(to + j) = g / (exp16(-g) + 1.0f) * *(const vf_any *)(up + j);
        }
        for (; j < n; j++)
            to[j] = gate[j] / (1 + expf(-gate[j])) * up[j];
    }
}

/* Norms (if q_norm and k_norm are given) and rotates queries and keys in place. states: m rows of
 * [heads + kv_heads][dim], stride apart; cos, sin: [positions][dim], the first half of the sines negated; row i uses
 * entry places[i], or i if there are no places. */
void pagewire_rotary(float *states, long stride, const float *q_norm, const float *k_norm, float eps, const float *cos,
                     const float *sin, const int64_t *places, long m, long heads, long kv_heads, long dim)
{
    long half = dim / 2;
#pragma omp parallel for schedule(static) if (m * heads * dim > FEW)
    for (long i = 0; i < m; i++)
        for (long h = 0; h < heads + kv_heads; h++) {
            float *x = states + i * stride + h * dim;
            const float *norm = h < heads ? q_norm : k_norm;
            const float *c = cos + (places ? places[i] : i) * dim, *s = sin + (places ? places[i] : i) * dim;
            if (norm)
                scaled(x, inverse_rms(x, dim, eps), norm, x, dim);
            for (long d = 0; d < half; d++) {
                float a = x[d], b = x[d + half];
                x[d] = a * c[d] + b * s[d];
                x[d + half] = b * c[d + half] + a * s[d + half];
            }
        }
}

/* Rounds to nearest, ties to even. */
static inline void store_bf16(vf x, char *to)
{
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
    vu bits = (vu)x, half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *(vh *)to = __builtin_convertvector((vu)select16(x != x, (vf)((vu){0} + 0x7fc0), (vf)half), vh);
}

/* Writes m rows of `width` numbers (for bfloat16 pages a multiple of 16) to their slots. The rows are strides apart. */
void pagewire_write_kv(const float *key, long key_stride, const float *value, long value_stride, char *k_pages,
                       char *v_pages, const int64_t *slots, long m, long width, int bf16)
{
#pragma omp parallel for schedule(static) if (m * width > FEW)
    for (long i = 0; i < m; i++)
        for (int part = 0; part < 2; part++) {
            const float *from = part ? value + i * value_stride : key + i * key_stride;
            char *to = (part ? v_pages : k_pages) + slots[i] * width * (bf16 ? 2 : 4);
            if (bf16)
                for (long j = 0; j < width; j += LANES)
                    store_bf16(*(const vf_any *)(from + j), to + 2 * j);
            else
                memcpy(to, from, width * 4);
        }
}

void pagewire_clear_best(Best *best, long m, long threads)
{
    for (long i = 0; i < m * threads; i++)
        best[i] = (Best){(vf){0} - INFINITY};
}

/* Of equal numbers the one with the lowest column wins. */
void pagewire_merge_best(const Best *best, int64_t *ids, float *most, long m, long threads)
{
    for (long i = 0; i < m; i++) {
        int odd = 0;
        ids[i] = 0;
        most[i] = -INFINITY;
        for (long t = 0; t < threads; t++)
            for (int l = 0; l < LANES; l++) {
                const Best *b = best + t * m + i;
                odd |= b->odd[l];
                if (b->most[l] > most[i] || (b->most[l] == most[i] && b->id[l] < ids[i])) {
                    most[i] = b->most[l];
                    ids[i] = b->id[l];
                }
            }
        if (odd) {
            ids[i] = -1;
            most[i] = NAN;
        }
    }
}

/* The first of each row's greatest numbers: its index and value, or -1 and NaN if the row holds a NaN. x: [m][n]. */
void pagewire_greedy(const float *x, int64_t *ids, float *most, long m, long n)
{
#pragma omp parallel for schedule(static) if (m * n > FEW)
    for (long i = 0; i < m; i++) {
        Best best = {(vf){0} - INFINITY};
        vf rest = {0};
        long j = 0;
        for (; j + LANES <= n; j += LANES)
            keep_best(&best, *(const vf_any *)(x + i * n + j), j, n);
        memcpy(&rest, x + i * n + j, (n - j) * 4);
        keep_best(&best, rest, j, n);
        pagewire_merge_best(&best, ids + i, most + i, 1, 1);
    }
}
