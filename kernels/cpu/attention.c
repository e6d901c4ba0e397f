/* Attention over paged keys and values, [blocks][block_size][kv_heads][dim] in float32 or bfloat16; dim is a multiple
 * of 16. All arithmetic is float32: the scores, their maximum, the exponentials and their sum.
 */
#include "product.h"

static inline float sum16(vf x)
{
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline const char *at(const Pages *p, const char *pages, const int32_t *table, long position, long head)
{
    long slot = table[position / p->block_size] * p->block_size + position % p->block_size;
    return pages + (slot * p->kv_heads + head) * p->dim * (p->bf16 ? 2 : 4);
}

/* Turns scores in place into weights that sum to 1. Those outside [from, to) become 0. n: a multiple of 16. */
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

/* Rows of keys are kv_heads apart, so a block is read at once for all heads of a task, and the same part of the next
 * block is prefetched: the hardware prefetcher does not follow from one block to the next. */
/* G queries that share a key head, and the positions [first, last) of one block. scores: [G][stride]. */
#define SHARED(G)                                                                                                      \
    static void scores_##G(const Pages *p, const char *key, const float *q, float *scores, long stride, long first,   \
                           long last)                                                                                 \
    {                                                                                                                  \
        for (long i = first; i < last; i++, key += p->kv_heads * p->dim * (p->bf16 ? 2 : 4)) {                         \
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
    static void values_##G(const Pages *p, const char *value, float *out, const float *weights, long stride,          \
                           long first, long last)                                                                     \
    {                                                                                                                  \
        long next = p->kv_heads * p->dim * (p->bf16 ? 2 : 4);                                                          \
        for (long d = 0; d < p->dim; d += LANES) {                                                                     \
            vf sum[G];                                                                                                 \
            UNROLL for (int g = 0; g < G; g++)                                                                         \
                sum[g] = *(vf_any *)(out + g * p->dim + d);                                                            \
            vf more[G][3] = {{{0}}}; /* four sums hide each other's latency */                                         \
            long i = first;                                                                                            \
            for (; i + 4 <= last; i += 4)                                                                              \
                UNROLL for (int j = 0; j < 4; j++) {                                                                   \
                    vf v = load16(value + (i + j - first) * next, d, p->bf16);                                         \
                    UNROLL for (int g = 0; g < G; g++)                                                                 \
                        *(j ? &more[g][j - 1] : &sum[g]) += v * weights[g * stride + i + j];                           \
                }                                                                                                      \
            for (; i < last; i++) {                                                                                    \
                vf v = load16(value + (i - first) * next, d, p->bf16);                                                 \
                UNROLL for (int g = 0; g < G; g++)                                                                     \
                    sum[g] += v * weights[g * stride + i];                                                             \
            }                                                                                                          \
            UNROLL for (int g = 0; g < G; g++)                                                                         \
                sum[g] += more[g][0] + more[g][1] + more[g][2];                                                        \
            UNROLL for (int g = 0; g < G; g++)                                                                         \
                *(vf_any *)(out + g * p->dim + d) = sum[g];                                                            \
        }                                                                                                              \
    }
SHARED(1)
SHARED(2)
SHARED(4)

/* Folds two vectors into one: adds neighbouring groups of W lanes, a's into the even groups and b's into the odd. */
#define LANE(l, w) ((l) / (w) % 2 * 16 + (l) / (w) / 2 * 2 * (w) + (l) % (w))
#define FOUR(l, w, more) LANE(l, w) + more, LANE((l) + 1, w) + more, LANE((l) + 2, w) + more, LANE((l) + 3, w) + more
#define HALF(a, b, w, more)                                                                                            \
    __builtin_shufflevector(a, b, FOUR(0, w, more), FOUR(4, w, more), FOUR(8, w, more), FOUR(12, w, more))
#define FOLD(a, b, w) (HALF(a, b, w, 0) + HALF(a, b, w, w))

/* As `scores_1`, for 16 positions: one tree sums all their lanes, with a quarter of the shuffles. */
static void scores_16(const Pages *p, const char *key, const float *q, float *scores)
{
    long next = p->kv_heads * p->dim * (p->bf16 ? 2 : 4);
    vf sum[16] = {{0}};
    for (long d = 0; d < p->dim; d += LANES) {
        vf query = *(const vf_any *)(q + d);
        UNROLL for (int i = 0; i < 16; i++)
            sum[i] += query * load16(key + i * next, d, p->bf16);
    }
    UNROLL for (int i = 0; i < 8; i++)
        sum[i] = FOLD(sum[i], sum[i + 8], 8);
    UNROLL for (int i = 0; i < 4; i++)
        sum[i] = FOLD(sum[i], sum[i + 4], 4);
    UNROLL for (int i = 0; i < 2; i++)
        sum[i] = FOLD(sum[i], sum[i + 2], 2);
    *(vf_any *)scores = FOLD(sum[0], sum[1], 1) * p->scale;
}

/* One query of a row and the heads [head, end) of its positions [from, to); see `pagewire_decode`. is_value: the second
 * pass, over values. then: memory that is read afterwards, to be prefetched. */
static void pass(const Pages *p, int is_value, const int32_t *table, long head, long end, const float *q, float *out,
                 float *scores, long stride, long from, long to, const char *then)
{
    long group = p->heads / p->kv_heads, bytes = p->dim * (p->bf16 ? 2 : 4), next = p->kv_heads * bytes;
    const char *pages = is_value ? p->values : p->keys;
    for (long first = from; first < to;) {
        long last = (first / p->block_size + 1) * p->block_size;
        last = last < to ? last : to;
        const char *ahead = last < to ? at(p, pages, table, last, head) : then;
        const char *block = at(p, pages, table, first, head);
        for (long h = head; h < end; h++, block += bytes) {
            if (ahead) { /* one head at a time, during the arithmetic */
                for (const char *line = ahead, *stop = ahead + p->block_size * next; line < stop; line += next)
                    for (long offset = 0; offset < bytes; offset += 64)
                        __builtin_prefetch(line + offset);
                ahead += bytes;
            }
            for (long g = 0; g < group;) {
                long query = h * group + g, left = group - g, row = query - head * group;
                float *s = scores + row * stride;
                if (is_value)
                    (left >= 4 ? values_4 : left >= 2 ? values_2 : values_1)(p, block, out + query * p->dim, s, stride,
                                                                              first, last);
                else if (left == 1 && last - first == 16)
                    scores_16(p, block, q + query * p->dim, s + first);
                else
                    (left >= 4 ? scores_4 : left >= 2 ? scores_2 : scores_1)(p, block, q + query * p->dim, s, stride,
                                                                              first, last);
                g += left >= 4 ? 4 : left >= 2 ? 2 : 1;
            }
        }
        first = last;
    }
}

/* One query per row, which sees the `context` positions of its blocks. query: rows of [heads][dim], query_stride apart;
 * out: [rows][heads][dim]; scores: [threads][heads][score_stride]; score_stride: a multiple of 16, at least the longest
 * context. */
void pagewire_decode(const Pages *p, const float *query, long query_stride, const int32_t *table, long table_stride,
                     const int64_t *context, float *out, float *scores, long score_stride, long rows)
{
    long group = p->heads / p->kv_heads, threads = omp_get_max_threads();
    long parts = rows >= 4 * threads ? 1 : threads < p->kv_heads ? threads : p->kv_heads; /* parts of a row's heads */
#pragma omp parallel for schedule(dynamic, 1)
    for (long task = rows * parts - 1; task >= 0; task--) { /* the longest rows come last: start with them */
        long row = task / parts, part = task % parts, to = context[row];
        long head = part * p->kv_heads / parts, end = (part + 1) * p->kv_heads / parts;
        long from = p->window && to > p->window ? to - p->window : 0, n = (to + LANES - 1) / LANES * LANES;
        float *s = scores + omp_get_thread_num() * p->heads * score_stride;
        float *o = out + row * p->heads * p->dim;
        memset(o + head * group * p->dim, 0, (end - head) * group * p->dim * 4);
        const float *q = query + row * query_stride;
        const int32_t *blocks = table + row * table_stride;
        pass(p, 0, blocks, head, end, q, o, s, score_stride, from, to, at(p, p->values, blocks, from, head));
        for (long i = 0; i < (end - head) * group; i++)
            softmax(s + i * score_stride, from, to, n, p->softcap);
        pass(p, 1, blocks, head, end, q, o, s, score_stride, from, to, 0);
    }
}

/* One head and the queries [begin, end) of a row's `count`, which are the last of its `context` positions. */
static void extend(const Pages *p, const float *query, long query_stride, const int32_t *table, long context, long count,
                   long head, long begin, long end, float *out, float *work)
{
    long dim = p->dim, group = p->heads / p->kv_heads, past = context - count;
    long seen = past + end, n = (seen + LANES - 1) / LANES * LANES; /* positions that any of the queries sees */
    long first_seen = p->window && past + begin + 1 > p->window ? (past + begin + 1 - p->window) / LANES * LANES : 0;
    float *keys = work, *values = keys + n * dim, *panel = values + n * dim, *scores = panel + MR * n;
    float *queries = scores + MR * n, *sums = queries + MR * dim;
    for (long i = first_seen; i < n; i++) { /* packed like weights: keys and valuesᵀ */
        const char *key = i < seen ? at(p, p->keys, table, i, head) : 0;
        const char *value = i < seen ? at(p, p->values, table, i, head) : 0;
        for (long d = 0; d < dim; d += LANES) {
            vf k = key ? load16(key, d, p->bf16) : (vf){0};
            for (int j = 0; j < LANES; j++)
                keys[i / LANES * LANES * dim + (d + j) * LANES + i % LANES] = k[j];
            *(vf *)(values + d * n + i * LANES) = value ? load16(value, d, p->bf16) : (vf){0};
        }
    }
    long tiles = (end - begin + MR - 1) / MR;
    for (long task = 0; task < tiles * group; task++) {
        long tile = task / group, q_head = head * group + task % group;
        long row = begin + tile * (end - begin) / tiles, size = begin + (tile + 1) * (end - begin) / tiles - row;
        long to = past + row + size, from = 0; /* what any query of the tile sees */
        if (p->window && past + row + 1 > p->window)
            from = (past + row + 1 - p->window) / LANES * LANES;
        long width = (to + LANES - 1) / LANES * LANES - from;
        for (long i = 0; i < size; i++)
            for (long d = 0; d < dim; d++)
                queries[d * size + i] = query[(row + i) * query_stride + q_head * dim + d] * p->scale;
        pagewire_dense_sums(queries, size, (char *)(keys + from * dim), dim, dim * LANES * 4, 0, width / LANES,
                            (vf *)scores, 0);
        for (long i = 0; i < size; i++) {
            long stop = past + row + i + 1, start = p->window && stop > p->window ? stop - p->window : 0;
            softmax(scores + i * width, start > from ? start - from : 0, stop - from, width, p->softcap);
            for (long j = 0; j < width; j++)
                panel[j * size + i] = scores[i * width + j];
        }
        pagewire_dense_sums(panel, size, (char *)(values + from * LANES), width, n * LANES * 4, 0, dim / LANES,
                            (vf *)sums, 0);
        for (long i = 0; i < size; i++)
            memcpy(out + ((row + i) * p->heads + q_head) * dim, sums + i * dim, dim * 4);
    }
}

/* Rows with several queries each, the last counts[row] of their contexts[row] positions; a query sees itself and the
 * positions before it. query, out: as above, row after row; work: [num_works][work_stride] for as many threads, each at
 * least (2 · dim + 2 · MR) · n + 2 · MR · dim numbers, where n is the longest context rounded up to 16. */
void pagewire_extend(const Pages *p, const float *query, long query_stride, const int32_t *table, long table_stride,
                     const int64_t *contexts, const int64_t *counts, float *out, float *work, long work_stride,
                     long num_works, long rows)
{
    /* Each head of a row packs its own keys; if there are few heads, their queries are divided among threads too. */
    long threads = omp_get_max_threads() < num_works ? omp_get_max_threads() : num_works;
    long parts = (2 * threads + rows * p->kv_heads - 1) / (rows * p->kv_heads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long task = 0; task < rows * p->kv_heads * parts; task++) {
        long row = task / (p->kv_heads * parts), head = task / parts % p->kv_heads, token = 0;
        for (long i = 0; i < row; i++)
            token += counts[i];
        long begin = task % parts * counts[row] / parts, end = (task % parts + 1) * counts[row] / parts;
        if (begin < end)
            extend(p, query + token * query_stride, query_stride, table + row * table_stride, contexts[row], counts[row],
                   head, begin, end, out + token * p->heads * p->dim, work + omp_get_thread_num() * work_stride);
    }
}

/* Sets the number of threads that share the caller's work; returns their maximum. torch may bring its own OpenMP, whose
 * setting differs from ours. */
int pagewire_threads(int wanted)
{
    omp_set_num_threads(wanted);
    return omp_get_max_threads();
}
