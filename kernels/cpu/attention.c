/* Attention over paged keys and values, [blocks][block_size][kv_heads][dim] in float32 or bfloat16; dim is a multiple
 * of 16. Everything is computed in float32: scores, their maximum, then exponentials and their sum.
 */
#include "product.h"

typedef struct {
    const char *keys, *values;
    long heads, kv_heads, dim, block_size, window; /* window 0: none */
    float scale, softcap;                          /* softcap 0: none */
    int bf16;
} Pages;

static inline float sum16(vf x)
{
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline vf load16(const char *from, long i, int bf16)
{
    if (!bf16)
        return *(const vf_any *)(from + 4 * i);
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
    return (vf)(__builtin_convertvector(*(const vh *)(from + 2 * i), vu) << 16);
}

static inline const char *at(const Pages *p, const char *pages, const int32_t *table, long position, long head)
{
    long slot = table[position / p->block_size] * p->block_size + position % p->block_size;
    return pages + (slot * p->kv_heads + head) * p->dim * (p->bf16 ? 2 : 4);
}

/* Scores in place to weights that sum to 1. Those outside [from, to) of the n, a multiple of 16, become 0. */
static void softmax(float *scores, long from, long to, long n, float softcap)
{
    if (softcap > 0)
        for (long i = from; i < to; i++)
            scores[i] = softcap * __builtin_tanhf(scores[i] / softcap);
    for (long i = 0; i < from; i++)
        scores[i] = -__builtin_inff();
    for (long i = to; i < n; i++)
        scores[i] = -__builtin_inff();
    vf most = *(vf_any *)scores, sum = {0};
    for (long i = LANES; i < n; i += LANES)
        most = max16(*(vf_any *)(scores + i), most);
    float top = most[0];
    for (int l = 1; l < LANES; l++)
        top = most[l] > top ? most[l] : top;
    for (long i = 0; i < n; i += LANES) {
        vf e = exp16(*(vf_any *)(scores + i) - top);
        *(vf_any *)(scores + i) = e;
        sum += e;
    }
    vf inverse = (vf){0} + 1 / sum16(sum);
    for (long i = 0; i < n; i += LANES)
        *(vf_any *)(scores + i) *= inverse;
}

/* The keys of a head against the G queries that share it; scores: [G][stride]. The same place of the next block is
 * fetched ahead, because the hardware does not follow from one block to the next. */
#define SCORES(NAME, G)                                                                                               \
    static void NAME(const Pages *p, const int32_t *table, long head, const float *q, float *scores, long stride,     \
                     long from, long to)                                                                              \
    {                                                                                                                  \
        for (long i = from; i < to; i++) {                                                                             \
            const char *key = at(p, p->keys, table, i, head);                                                          \
            if (i + p->block_size < to)                                                                                \
                fetch(p, at(p, p->keys, table, i + p->block_size, head));                                              \
            vf sum[G] = {{0}};                                                                                         \
            for (long d = 0; d < p->dim; d += LANES) {                                                                 \
                vf k = load16(key, d, p->bf16);                                                                        \
                UNROLL for (int g = 0; g < G; g++)                                                                     \
                    sum[g] += k * *(const vf_any *)(q + g * p->dim + d);                                               \
            }                                                                                                          \
            UNROLL for (int g = 0; g < G; g++)                                                                         \
                scores[g * stride + i] = sum16(sum[g]) * p->scale;                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME##_values(const Pages *p, const int32_t *table, long head, float *out, const float *weights,      \
                              long stride, long from, long to)                                                        \
    {                                                                                                                  \
        for (long g = 0; g < G * p->dim; g += LANES)                                                                   \
            *(vf_any *)(out + g) = (vf){0};                                                                            \
        for (long first = from; first < to;) {                                                                         \
            long last = (first / p->block_size + 1) * p->block_size;                                                   \
            last = last < to ? last : to;                                                                              \
            const char *value = at(p, p->values, table, first, head);                                                  \
            long next = p->kv_heads * p->dim * (p->bf16 ? 2 : 4);                                                      \
            if (last < to)                                                                                             \
                for (long i = 0; i < last - first; i++)                                                                \
                    fetch(p, at(p, p->values, table, last, head) + i * next);                                          \
            for (long d = 0; d < p->dim; d += LANES) {                                                                 \
                vf sum[G];                                                                                             \
                UNROLL for (int g = 0; g < G; g++)                                                                     \
                    sum[g] = *(vf_any *)(out + g * p->dim + d);                                                        \
                for (long i = first; i < last; i++) {                                                                  \
                    vf v = load16(value + (i - first) * next, d, p->bf16);                                             \
                    UNROLL for (int g = 0; g < G; g++)                                                                 \
                        sum[g] += v * weights[g * stride + i];                                                         \
                }                                                                                                      \
                UNROLL for (int g = 0; g < G; g++)                                                                     \
                    *(vf_any *)(out + g * p->dim + d) = sum[g];                                                        \
            }                                                                                                          \
            first = last;                                                                                              \
        }                                                                                                              \
    }

static inline void fetch(const Pages *p, const char *row)
{
    for (long i = 0; i < p->dim * (p->bf16 ? 2 : 4); i += 64)
        __builtin_prefetch(row + i);
}

SCORES(shared_by_1, 1)
SCORES(shared_by_2, 2)
SCORES(shared_by_4, 4)

/* One query a row, which sees the `context` positions of its blocks. query: rows of [heads][dim], query_stride apart;
 * out: [rows][heads][dim]; scores: [threads][4][score_stride], score_stride a multiple of 16 and no less than any
 * context. */
void pagewire_decode(const Pages *p, const float *query, long query_stride, const int32_t *table, long table_stride,
                     const int64_t *context, float *out, float *scores, long score_stride, long rows)
{
    long group = p->heads / p->kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (long task = rows * p->kv_heads - 1; task >= 0; task--) { /* the longest come last in the step: begin there */
        long row = task / p->kv_heads, head = task % p->kv_heads, to = context[row];
        long from = p->window && to > p->window ? to - p->window : 0, n = (to + LANES - 1) / LANES * LANES;
        const int32_t *blocks = table + row * table_stride;
        float *s = scores + omp_get_thread_num() * 4 * score_stride;
        for (long done = 0; done < group;) {
            long g = group - done >= 4 ? 4 : group - done >= 2 ? 2 : 1;
            const float *q = query + row * query_stride + (head * group + done) * p->dim;
            float *o = out + (row * p->heads + head * group + done) * p->dim;
            (g == 4 ? shared_by_4 : g == 2 ? shared_by_2 : shared_by_1)(p, blocks, head, q, s, score_stride, from, to);
            for (long i = 0; i < g; i++)
                softmax(s + i * score_stride, from, to, n, p->softcap);
            (g == 4 ? shared_by_4_values
             : g == 2 ? shared_by_2_values
                      : shared_by_1_values)(p, blocks, head, o, s, score_stride, from, to);
            done += g;
        }
    }
}

/* `count` queries of one row, the last of its `context` positions, each of which sees itself and what comes before it.
 * query, out as above. work: [2][n][dim] for a head's keys and values, n = context in multiples of 16, and then
 * [threads][MR][2 · n + 2 · dim]. */
void pagewire_extend(const Pages *p, const float *query, long query_stride, const int32_t *table, long context,
                     long count, float *out, float *work)
{
    long n = (context + LANES - 1) / LANES * LANES, dim = p->dim, group = p->heads / p->kv_heads;
    long past = context - count, tiles = (count + MR - 1) / MR;
    long first_seen = p->window && past + 1 > p->window ? (past + 1 - p->window) / LANES * LANES : 0;
    float *keys = work, *values = work + n * dim;
#pragma omp parallel
    {
        float *panel = work + 2 * n * dim + omp_get_thread_num() * MR * (2 * n + 2 * dim);
        float *scores = panel + MR * n, *queries = scores + MR * n, *sums = queries + MR * dim;
        for (long head = 0; head < p->kv_heads; head++) {
#pragma omp for schedule(static)
            for (long first = first_seen; first < n; first += LANES) /* packed as weights are: keys and valuesᵀ */
                for (long l = 0; l < LANES; l++) {
                    long i = first + l;
                    const char *key = i < context ? at(p, p->keys, table, i, head) : 0;
                    const char *value = i < context ? at(p, p->values, table, i, head) : 0;
                    for (long d = 0; d < dim; d += LANES) {
                        vf k = key ? load16(key, d, p->bf16) : (vf){0};
                        for (int j = 0; j < LANES; j++)
                            keys[(first * dim) + (d + j) * LANES + l] = k[j];
                        *(vf *)(values + d * n + i * LANES) = value ? load16(value, d, p->bf16) : (vf){0};
                    }
                }
#pragma omp for schedule(dynamic, 1)
            for (long task = tiles * group - 1; task >= 0; task--) {
                long tile = task / group, q_head = head * group + task % group;
                long row = tile * count / tiles, size = (tile + 1) * count / tiles - row;
                long to = past + row + size, from = 0; /* what any query of the tile sees */
                if (p->window && past + row + 1 > p->window)
                    from = (past + row + 1 - p->window) / LANES * LANES;
                long groups = (to + LANES - 1) / LANES, width = groups * LANES - from;
                for (long i = 0; i < size; i++)
                    for (long d = 0; d < dim; d++)
                        queries[d * size + i] = query[(row + i) * query_stride + q_head * dim + d] * p->scale;
                Product score = {queries, (char *)(keys + from * dim), 0, scores, width, dim, width, dim * LANES * 4};
                pagewire_sweep(&score, 0, size, 0, width / LANES, 0);
                for (long i = 0; i < size; i++) {
                    long end = past + row + i + 1, begin = p->window && end > p->window ? end - p->window : 0;
                    softmax(scores + i * width, begin > from ? begin - from : 0, end - from, width, p->softcap);
                    for (long j = 0; j < width; j++)
                        panel[j * size + i] = scores[i * width + j];
                }
                Product sum = {panel, (char *)(values + from * LANES), 0, sums, dim, width, dim, n * LANES * 4};
                pagewire_sweep(&sum, 0, size, 0, dim / LANES, 0);
                for (long i = 0; i < size; i++)
                    memcpy(out + ((row + i) * p->heads + q_head) * dim, sums + i * dim, dim * 4);
            }
        }
    }
}
