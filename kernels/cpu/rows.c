/* Operations on rows of activations between the products. All are float32 except the pages. */
#include "rows.h"

static inline void scaled(const float *x, float by, const float *weight, float *out, long n)
{
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        *(vf_any *)(out + i) = *(const vf_any *)(x + i) * by * *(const vf_any *)(weight + i);
    for (; i < n; i++)
        out[i] = x[i] * by * weight[i];
}

typedef struct {
    float *states;
    long stride;
    const float *q_norm, *k_norm;
    float eps;
    const float *cos, *sin;
    const int64_t *places;
    long heads, kv_heads, dim;
} Rotary;

static void rotary_rows(const void *about, long from, long to)
{
    const Rotary *r = about;
    long dim = r->dim, half = dim / 2;
    for (long i = from; i < to; i++) {
        long place = (r->places ? r->places[i] : i) * dim;
        const float *c = r->cos + place, *s = r->sin + place;
        for (long h = 0; h < r->heads + r->kv_heads; h++) {
            float *x = r->states + i * r->stride + h * dim;
            const float *norm = h < r->heads ? r->q_norm : r->k_norm;
            if (norm)
                scaled(x, inverse_rms(x, dim, r->eps), norm, x, dim);
            long d = 0;
            for (; d + LANES <= half; d += LANES) {
                vf a = *(const vf_any *)(x + d), b = *(const vf_any *)(x + half + d);
                *(vf_any *)(x + d) = a * *(const vf_any *)(c + d) + b * *(const vf_any *)(s + d);
                *(vf_any *)(x + half + d) = b * *(const vf_any *)(c + half + d) + a * *(const vf_any *)(s + half + d);
            }
            for (; d < half; d++) {
                float a = x[d], b = x[d + half];
                x[d] = a * c[d] + b * s[d];
                x[d + half] = b * c[d + half] + a * s[d + half];
            }
        }
    }
}

/* Norms (if q_norm and k_norm are given) and rotates queries and keys in place. states: m rows of
 * [heads + kv_heads][dim], stride apart; cos, sin: [positions][dim], the first half of the sines negated; row i uses
 * entry places[i], or i if there are no places. */
void pagewire_rotary(float *states, long stride, const float *q_norm, const float *k_norm, float eps, const float *cos,
                     const float *sin, const int64_t *places, long m, long heads, long kv_heads, long dim)
{
    Rotary about = {states, stride, q_norm, k_norm, eps, cos, sin, places, heads, kv_heads, dim};
    run_rows(rotary_rows, &about, m, (heads + kv_heads) * dim);
}

typedef struct {
    const float *key, *value;
    long key_stride, value_stride;
    char *k_pages, *v_pages;
    const int64_t *slots;
    long width, value_width, block_size, page_stride;
    int bf16;
} WriteKv;

static void write_kv_rows(const void *about, long first, long last)
{
    const WriteKv *a = about;
    for (long i = first; i < last; i++)
        for (int part = 0; part < 2; part++) {
            const float *from = part ? a->value + i * a->value_stride : a->key + i * a->key_stride;
            long width = part ? a->value_width : a->width;
            char *to = (part ? a->v_pages : a->k_pages) + a->slots[i] / a->block_size * a->page_stride +
                       a->slots[i] % a->block_size * width * (a->bf16 ? 2 : 4);
            if (a->bf16)
                for (long j = 0; j < width; j += LANES)
                    store_bf16(*(const vf_any *)(from + j), to + 2 * j);
            else
                memcpy(to, from, width * 4);
        }
}

/* Writes m keys of `width` numbers and values of `value_width` (for bfloat16 pages multiples of 16) to their slots,
 * page · block_size + offset. The rows are strides apart, and pages page_stride bytes. */
void pagewire_write_kv(const float *key, long key_stride, const float *value, long value_stride, char *k_pages,
                       char *v_pages, const int64_t *slots, long m, long width, long value_width, long block_size,
                       long page_stride, int bf16)
{
    WriteKv about = {key,   value,       key_stride, value_stride, k_pages, v_pages, slots,
                     width, value_width, block_size, page_stride,  bf16};
    run_rows(write_kv_rows, &about, m, width + value_width);
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

typedef struct {
    const float *x;
    int64_t *ids;
    float *most;
    long n;
} Greedy;

static void greedy_rows(const void *about, long from, long to)
{
    const Greedy *a = about;
    long n = a->n;
    for (long i = from; i < to; i++) {
        Best best = {(vf){0} - INFINITY};
        vf rest = {0};
        long j = 0;
        for (; j + LANES <= n; j += LANES)
            keep_best(&best, *(const vf_any *)(a->x + i * n + j), j, n);
        memcpy(&rest, a->x + i * n + j, (n - j) * 4);
        keep_best(&best, rest, j, n);
        pagewire_merge_best(&best, a->ids + i, a->most + i, 1, 1);
    }
}

/* The first of each row's greatest numbers: its index and value, or -1 and NaN if the row holds a NaN. x: [m][n]. */
void pagewire_greedy(const float *x, int64_t *ids, float *most, long m, long n)
{
    run_rows(greedy_rows, &(Greedy){x, ids, most, n}, m, n);
}
