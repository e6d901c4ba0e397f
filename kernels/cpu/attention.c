/* Attention over paged keys and values, [pages][block_size][kv_heads][dim] in float32 or bfloat16, pages any number of
 * bytes apart; dim is a multiple of 16. Values may have another one, `value_dim`.
 *
 * Every query takes the same steps in the same order, whatever else is computed with it, so its bits depend on nothing
 * but itself and the keys and values that it sees. Positions are cut at multiples of SPLIT and inside a split at
 * multiples of CHUNK. A split has a running maximum, a sum of weights (by 16 lanes) and an output per query ("online"
 * softmax); its chunks are added in ascending order. The splits are merged in ascending order too, whether they were
 * computed in one task or in many. What a query does not see has the weight zero, which changes no bits, so queries
 * that see different positions share a tile. Values that are not finite are the exception, since zero times infinity
 * is no zero; `add_masked` handles them.
 *
 * With a float32 cache, and with a bfloat16 cache unless `rounds`, all arithmetic is float32. With `rounds` queries and
 * weights are rounded to bfloat16 before their products; sums are float32, and the denominator sums rounded weights.
 *
 * A task computes some query heads × tokens of some KV heads of one row, over some splits. The rows of a tile are the
 * queries of one KV head, all heads of one token next to each other. A chunk of keys is transposed once per task, so
 * that a vector holds one dimension of 16 keys.
 */
#include "attention.h"

#include <math.h>
#include <stdatomic.h>

enum { SPLIT = 1024 };
enum { TASK_ROWS = 512 }; /* most queries of a task, unless the group is larger: their sums stay in the L2 cache */
enum { PACK_ROWS = 8 };   /* reading and transposing a key takes about as long as this many queries */
#define LEAST_WORK 1e6    /* of a task: keys · queries · dim, about 20 µs */

/* A part of one row's attention; tasks are made of them. Parts that differ in their splits only share `rest`. */
typedef struct {
    int32_t row, head, end_head; /* KV heads */
    int32_t split, end_split;
    long start;          /* the row's first token in the batch */
    long first, end;     /* tokens of the row */
    float *records;      /* where to leave the results of the splits: [splits][heads][queries][dim + LANES]; or 0 */
    _Atomic int *rest;   /* parts that are not done yet; the last one merges all records */
    long first_split, num_splits; /* of the records */
} Part;

typedef struct {
    const Pages *p;
    const float *query;
    long query_stride;
    const int32_t *table;
    long table_stride;
    const int64_t *contexts, *counts;
    float *out;
    enum Mode mode;
    long value_dim;
    long num_parts;
    const Part *parts;
} Attend;

/* The queries and running results of the heads of a part. A tile begins at a multiple of tile_rows. */
typedef struct {
    long rows, tiles, tile_rows, padded_rows; /* of a head */
    long words, padded_words;                 /* of a key */
    char *queries;                            /* [heads][tiles][tile_rows · padded_words] words */
    float *sums;                              /* [heads][padded_rows][dim] */
    vf *totals;                               /* [heads][padded_rows] */
    float *most;                              /* [heads][padded_rows] */
    float *merged;                            /* [heads][rows][dim + LANES] */
    char *keys;                               /* [padded_words][CHUNK] words */
    char *values;                             /* a chunk of packed values, where they are packed */
    char *masked;                             /* as values, for `add_masked` */
    float *scores;                            /* [tile_rows][CHUNK] */
    uint16_t *weights;                        /* the same in bfloat16 */
    float *spare;                             /* [tile_rows][dim] */
    char *zeros;                              /* a key or value of zeros */
} Work;

static inline long least(long a, long b)
{
    return a < b ? a : b;
}

static inline long greatest(long a, long b)
{
    return a > b ? a : b;
}

static inline long up(long a, long b)
{
    return (a + b - 1) / b;
}

/* out[i] = the greatest of 16 numbers, none of which is NaN, for 16 vectors. */
static inline vf greatest_of_each(const vf *x)
{
#ifdef __AVX512F__
    __m512 a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = _mm512_max_ps(_mm512_shuffle_f32x4((__m512)x[i], (__m512)x[i + 8], 0x44),
                             _mm512_shuffle_f32x4((__m512)x[i], (__m512)x[i + 8], 0xee));
    UNROLL for (int i = 0; i < 4; i++) /* the quarters are of x[i], x[i + 8], x[i + 4], x[i + 12] */
        b[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    UNROLL for (int i = 0; i < 2; i++)
        c[i] = _mm512_max_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    __m512 d = _mm512_max_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    return (vf)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), d);
#else
    vf out;
    for (int i = 0; i < LANES; i++) {
        float most = x[i][0];
        for (int l = 1; l < LANES; l++)
            most = x[i][l] > most ? x[i][l] : most;
        out[i] = most;
    }
    return out;
#endif
}

static inline float sum_of(vf x)
{
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}

/* What the scores of a tile's queries grow by: for key k of a chunk slopes[row] · (firsts[row] + k). */
typedef struct {
    float slopes[MAX_TILE];
    int firsts[MAX_TILE];
} Bias;

/* The first position that the query at `position` sees. */
static inline long first_seen(const Pages *p, long position)
{
    if (p->chunk)
        return position - position % p->chunk;
    return p->window ? greatest(0, position + 1 - p->window) : 0;
}

/* The numbers as bfloat16 in the upper half of a word, to nearest with ties to even. */
static inline vu rounded16(vf x)
{
    vu bits = (vu)x;
    return (vu)select16(x != x, (vf)((vu){0} + 0x7fc00000u), (vf)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u));
}

static inline vf softcapped(vf x, float cap)
{
    vf capped = cap - 2 * cap / (exp16(x * (2 / cap)) + 1.0f); /* cap · tanh(x / cap) */
    return select16(x != x, x, capped);
}

/* What ALiBi adds to the scores of the keys from `first` on. */
static inline vf bias16(const Pages *p, float slope, vi first)
{
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf position = __builtin_convertvector(first + lane, vf);
    if (p->rounds_slopes)
        position = (vf)rounded16(position);
    vf bias = position * slope;
    return (p->rounds_slopes ? (vf)rounded16(bias) : bias) * p->slope_scale;
}

/* The weights e^x of one register of scores, and their bfloat16 to `halves` if it is not 0. NaN stays NaN. */
static inline nf weights_of(nf x, int rounds, uint16_t *halves)
{
    nf e = exp_below(x);
    if (!rounds)
        return e;
#ifdef __AVX512BF16__
    __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)e);
    if (halves)
        _mm256_store_si256((__m256i *)halves, half);
    return (nf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    nu bits = (nu)e;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    e = select_native(e != e, (nf)((nu){0} + 0x7fc00000u), (nf)bits);
    typedef uint16_t vh __attribute__((vector_size(NATIVE / 2), may_alias));
    if (halves)
        *(vh *)halves = __builtin_convertvector((nu)e >> 16, vh);
    return e;
#endif
}

/* Turns a query's scores of the groups [from, to) into weights, left in bfloat16 in `halves` if it `stores` them there,
 * and else in place of the scores. Returns their sum by lanes. */
static inline __attribute__((always_inline)) vf weigh(nf *row, long from, long to, float scale, float base,
                                                      const int rounds, const int stores, uint16_t *halves)
{
    vf sum = {0};
    for (long g = from; g < to; g++)
        UNROLL for (int j = 0; j < PARTS; j++) {
            nf *score = row + g * PARTS + j;
            nf e = weights_of(*score * scale - base, rounds, stores ? halves + g * LANES + j * (LANES / PARTS) : 0);
            if (!stores)
                *score = e;
            ((nf *)&sum)[j] += e;
        }
    return sum;
}

/* Turns the scores of a tile into weights and updates the queries' maxima and sums of weights. Query i sees the keys
 * [low[i], high[i]) of the chunk, or all keys if low is 0; only the groups [from, to) are read and written, with AMX the
 * others become zero. weights: where to leave them in bfloat16, or 0. factors: what the sums so far have to be
 * multiplied with. A NaN among the scores makes weights and sums NaN, but not the maximum.
 *
 * A weight is e^(score · scale - maximum) with one rounding of the exponent where the scale is positive and there is
 * neither a soft cap nor a bias; the maximum is that of the scores, times the scale. */
static void soften(const Pages *p, int rounds, long rows, long from, long to, const int *low, const int *high,
                   const Bias *bias, float *scores, uint16_t *weights, float *most, vf *totals,
                   float *factors)
{
    const vf none = (vf){0} - INFINITY;
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    _Alignas(64) float bases[MAX_TILE];
    vf top_of[LANES];
    int is_late = p->softcap <= 0 && p->scale > 0 && !p->slopes; /* the scale is multiplied late */
    float scale = is_late ? p->scale : 1;
    for (long begin = 0; begin < rows; begin += LANES) {
        long end = least(rows - begin, LANES);
        for (long i = 0; i < end; i++) {
            vf *row = (vf *)(scores + (begin + i) * CHUNK), top = none;
            int sees_all = !low || (low[begin + i] <= from * LANES && high[begin + i] >= to * LANES);
            if (is_late && sees_all)
                for (long g = from; g < to; g++)
                    top = max16(row[g], top);
            else
                for (long g = from; g < to; g++) {
                    vf s = row[g];
                    if (!is_late)
                        s *= p->scale;
                    if (p->softcap > 0)
                        s = softcapped(s, p->softcap);
                    if (p->slopes)
                        s += bias16(p, bias->slopes[begin + i], (vi){0} + (int32_t)(bias->firsts[begin + i] + g * LANES));
                    if (!sees_all) {
                        vi key = lane + (int32_t)(g * LANES);
                        s = select16((key >= low[begin + i]) & (key < high[begin + i]), s, none);
                    }
                    row[g] = s;
                    top = max16(s, top);
                }
            top_of[i] = top;
        }
        for (long i = end; i < LANES; i++)
            top_of[i] = none;
        vf old = *(vf *)(most + begin), new = max16(greatest_of_each(top_of) * scale, old);
        vf base = select16(new == none, (vf){0}, new); /* where nothing is seen yet */
        *(vf *)(most + begin) = new;
        *(vf *)(bases + begin) = base;
        *(vf *)(factors + begin) = exp16(old - base);
    }
    for (long i = 0; i < rows; i++) {
        nf *row = (nf *)(scores + i * CHUNK);
        uint16_t *halves = weights ? weights + i * CHUNK : 0;
        vf sum = !rounds    ? weigh(row, from, to, scale, bases[i], 0, 0, 0)
                 : !weights ? weigh(row, from, to, scale, bases[i], 1, 0, 0)
                            : weigh(row, from, to, scale, bases[i], 1, 1, halves);
        totals[i] = totals[i] * factors[i] + sum;
#ifdef PAGEWIRE_AMX
        if (weights) { /* a tile takes 32 keys */
            memset(weights + i * CHUNK, 0, from * LANES * 2);
            memset(weights + i * CHUNK + to * LANES, 0, (CHUNK_GROUPS - to) * LANES * 2);
        }
#endif
    }
}

/* Words [at, at + 16) of 16 rows, of which only the first 8 are there if is_half: 16 rows of 16 words, CHUNK apart. */
static inline void transpose(const char *const *rows, long at, int is_half, char *to)
{
#ifdef __AVX512F__
    typedef double vd __attribute__((vector_size(64), may_alias));
    vf a[16], b[16];
    vd c[16], d[4];
    if (is_half)
        UNROLL for (int i = 0; i < 16; i++)
            a[i] = (vf)_mm512_castsi512_ps(_mm512_zextsi256_si512(_mm256_loadu_si256((const void *)(rows[i] + at * 4))));
    else
        UNROLL for (int i = 0; i < 16; i++)
            a[i] = *(const vf_any *)(rows[i] + at * 4);
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            vd x = (vd)b[i + j], y = (vd)b[i + 2 + j];
            c[i + 2 * j] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
            c[i + 2 * j + 1] = __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
        }
    UNROLL for (int w = 0; w < 4; w++) {
        d[0] = __builtin_shufflevector(c[w], c[w + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        d[1] = __builtin_shufflevector(c[w], c[w + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        d[2] = __builtin_shufflevector(c[w + 8], c[w + 12], 0, 1, 2, 3, 8, 9, 10, 11);
        d[3] = __builtin_shufflevector(c[w + 8], c[w + 12], 4, 5, 6, 7, 12, 13, 14, 15);
        UNROLL for (int h = 0; h < 2; h++) {
            vd x = d[h], y = d[h + 2];
            *(vd *)(to + (8 * h + w) * CHUNK * 4) = __builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13);
            *(vd *)(to + (8 * h + 4 + w) * CHUNK * 4) = __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15);
        }
    }
#else
    typedef float v4 __attribute__((vector_size(16), may_alias));
    typedef float v4_any __attribute__((vector_size(16), aligned(2), may_alias));
    typedef double v2 __attribute__((vector_size(16)));
    for (int w = 0; w < 16; w += 4)
        UNROLL for (int i = 0; i < 16; i += 4) {
            v4 a[4] = {{0}};
            if (!(is_half && w >= 8))
                UNROLL for (int j = 0; j < 4; j++)
                    a[j] = *(const v4_any *)(rows[i + j] + (at + w) * 4);
            v2 b0 = (v2)__builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
            v2 b1 = (v2)__builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
            v2 c0 = (v2)__builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
            v2 c1 = (v2)__builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
            char *out = to + w * CHUNK * 4 + i * 4;
            *(v4 *)out = (v4)__builtin_shufflevector(b0, c0, 0, 2);
            *(v4 *)(out + CHUNK * 4) = (v4)__builtin_shufflevector(b0, c0, 1, 3);
            *(v4 *)(out + 2 * CHUNK * 4) = (v4)__builtin_shufflevector(b1, c1, 0, 2);
            *(v4 *)(out + 3 * CHUNK * 4) = (v4)__builtin_shufflevector(b1, c1, 1, 3);
        }
#endif
}

/* Where a chunk's keys and values lie in the cache, from the first byte of each on; negative where no query of the part
 * sees them. */
typedef struct {
    long keys[CHUNK], values[CHUNK];
} Places;

/* What to prefetch: the chunk after the present one, for all heads of the part, in the order in which it lies in memory,
 * which is faster than the order in which it is used. The hardware's prefetchers do not follow a block table. Only for
 * bfloat16: float32 keys are long enough for the hardware, and prefetching cost up to a tenth (Zen 5). */
typedef struct {
    const Pages *p;
    const Places *places; /* 0: nothing */
    long offset[2], bytes[2]; /* of a position's keys, and of its values */
    long unit, due;       /* keys and values so far; lines that are to be prefetched by now */
} Ahead;

enum { LINE = 64 };

static inline void prefetch(Ahead *ahead, long lines)
{
    if (!ahead->places)
        return;
    for (ahead->due += lines; ahead->due > 0 && ahead->unit < 2 * CHUNK; ahead->unit++) {
        long is_value = ahead->unit % 2, bytes = ahead->bytes[is_value];
        long place = (is_value ? ahead->places->values : ahead->places->keys)[ahead->unit / 2];
        if (place < 0)
            continue;
        const char *from = (is_value ? ahead->p->values : ahead->p->keys) + place + ahead->offset[is_value];
        for (long i = 0; i < bytes; i += LINE)
            __builtin_prefetch(from + i);
        ahead->due -= (bytes + LINE - 1) / LINE;
    }
}

/* The groups [from, to) of a chunk's keys, transposed. lines: to prefetch for 16 keys × 16 words. */
static void pack_keys(const char *const *rows, long words, long from, long to, char *keys, Ahead *ahead, long lines)
{
    for (long g = from; g < to; g++)
        for (long w = 0; w < words; w += 16) {
            prefetch(ahead, lines);
            transpose(rows + g * LANES, w, words - w < 16, keys + (w * CHUNK + g * LANES) * 4);
        }
}

/* A chunk's values in the layout of `pagewire_values`; float32 in all modes but MODE_DOT. */
static void pack_values(enum Mode mode, const char *const *rows, long dim, char *values, Ahead *ahead)
{
    if (mode == MODE_DOT)
        for (long i = 0; i < CHUNK; i += 2, values += dim * 4) {
            prefetch(ahead, dim / LANES); /* as many bytes as are read here */
            const char *a = rows[i], *b = rows[i + 1];
            long d = 0;
#ifdef __AVX512BW__
            typedef uint16_t vh __attribute__((vector_size(64), aligned(2), may_alias));
            for (; d + 32 <= dim; d += 32) {
                vh x = *(const vh *)(a + 2 * d), y = *(const vh *)(b + 2 * d);
                *(vh *)(values + 4 * d) =
                    __builtin_shufflevector(x, y, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41,
                                            10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
                *(vh *)(values + 4 * d + 64) =
                    __builtin_shufflevector(x, y, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                            25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
            }
#endif
            for (; d < dim; d += LANES)
                *(vu *)(values + 4 * d) = (vu)load16(a, d, 1) >> 16 | (vu)load16(b, d, 1);
        }
    else
        for (long i = 0; i < CHUNK; i++)
            for (long d = 0; d < dim; d += LANES, values += 64)
                *(vf *)values = load16(rows[i], d, mode == MODE_WIDE);
}

static int are_finite(const char *const *rows, long dim, int bf16)
{
    vi odd = {0};
    for (long i = 0; i < CHUNK; i++)
        for (long d = 0; d < dim; d += LANES)
            odd |= ((vi)load16(rows[i], d, bf16) & 0x7f800000) == 0x7f800000;
    int any = 0;
    for (int l = 0; l < LANES; l++)
        any |= odd[l];
    return !any;
}

/* A tile's queries in the layout of `pagewire_scores`. */
static void pack_queries(const Attend *a, const Part *t, const Work *w, long head, long first, long rows, char *to)
{
    const Pages *p = a->p;
    long group = p->heads / p->kv_heads, dim = p->dim;
    const float *pointers[MAX_TILE];
    _Alignas(64) char line[MAX_TILE * dim * 4];
    for (long i = 0; i < rows; i++) {
        long token = t->start + t->first + (first + i) / group;
        const float *q = a->query + token * a->query_stride + (head * group + (first + i) % group) * dim;
        pointers[i] = q;
        if (p->bf16 && p->rounds) {
            char *rounded = line + i * dim * 4;
            for (long d = 0; d < dim; d += LANES)
                if (a->mode == MODE_DOT)
                    round_bf16(*(const vf_any *)(q + d), rounded + 2 * d);
                else
                    *(vu *)(rounded + 4 * d) = rounded16(*(const vf_any *)(q + d));
            pointers[i] = (const float *)rounded;
        }
    }
#ifdef PAGEWIRE_AMX
    if (a->mode == MODE_DOT) {
        memset(to, 0, up(rows, TILE_ROWS) * w->padded_words * 64);
        for (long i = 0; i < rows; i++)
            for (long k = 0; k < w->words; k += 16) {
                char *tile = to + (i / TILE_ROWS * w->padded_words / 16 + k / 16) * TILE_BYTES;
                memcpy(tile + i % TILE_ROWS * 64, pointers[i] + k, least(16, w->words - k) * 4);
            }
        return;
    }
#endif
    long words = a->mode == MODE_DOT ? w->words : dim;
    pagewire_interleave(pointers, rows, words, words, (float *)to);
}

/* `pagewire_values` for queries that see different keys of a chunk with values that are not finite: one by one, with
 * zeros in place of what a query does not see. */
static void add_masked(const Attend *a, const Work *w, long rows, const int *low, const int *high, long from, long to,
                       const char *const *raw, const void *weights, float *sums, const float *factors)
{
    long dim = a->value_dim, bytes = a->mode == MODE_DOT ? 2 : 4;
    for (long i = 0; i < rows; i++) {
        const char *seen[CHUNK], *packed[CHUNK];
        for (long k = 0; k < CHUNK; k++)
            seen[k] = k >= low[i] && k < high[i] ? raw[k] : w->zeros;
        pack_values(a->mode, seen, dim, w->masked, &(Ahead){0});
        for (long k = 0; k < CHUNK; k++)
            packed[k] = w->masked + k * dim * 4;
        memcpy(w->spare, sums + i * dim, dim * 4);
        pagewire_values(a->mode == MODE_DOT ? MODE_DOT : MODE_F32, (const char *)weights + i * CHUNK * bytes, 1, packed,
                        from, to, dim, w->spare, factors + i);
        memcpy(sums + i * dim, w->spare, dim * 4);
    }
}

/* Merges the result of a later split into that of the earlier ones. Both are [dim] sums, the maximum, the total. */
static __attribute__((noinline)) void merge(float *to, const float *from, long dim)
{
    float most = to[dim] > from[dim] ? to[dim] : from[dim], base = most == -INFINITY ? 0 : most;
    vf factors = exp16((vf){to[dim] - base, from[dim] - base});
    float mine = factors[0], theirs = factors[1];
    for (long d = 0; d < dim; d += LANES)
        *(vf_any *)(to + d) = *(vf_any *)(to + d) * mine + *(const vf_any *)(from + d) * theirs;
    to[dim] = most;
    to[dim + 1] = to[dim + 1] * mine + from[dim + 1] * theirs;
}

static void clear(float *record, long dim)
{
    memset(record, 0, (dim + 2) * 4);
    record[dim] = -INFINITY;
}

/* Divides by the total, with the sink's part of it. */
static __attribute__((noinline)) void finish(const Pages *p, const float *record, long dim, long head, float *out)
{
    float most = record[dim], total = record[dim + 1], factor = 1;
    if (p->sinks) {
        float sink = p->sinks[head], base = most > sink ? most : sink;
        vf e = exp16((vf){most - base, sink - base});
        factor = e[0];
        total = total * factor + e[1];
    }
    factor = factor / total;
    for (long d = 0; d < dim; d += LANES) /* + 0: no negative zeros, whose sign may depend on what is not seen */
        *(vf_any *)(out + d) = *(const vf_any *)(record + d) * factor + 0.0f;
}

static float *output(const Attend *a, const Part *t, long head, long query, long *query_head)
{
    long group = a->p->heads / a->p->kv_heads;
    *query_head = head * group + query % group;
    return a->out + ((t->start + t->first + query / group) * a->p->heads + *query_head) * a->value_dim;
}

/* The keys of a part: what its first query sees first, and its last one last. */
static void seen(const Attend *a, const Part *t, long *from, long *to)
{
    long past = a->contexts[t->row] - a->counts[t->row];
    *to = past + t->end;
    *from = first_seen(a->p, past + t->first);
}

static void merge_records(const Attend *a, const Part *t)
{
    const Pages *p = a->p;
    long rows = (t->end - t->first) * (p->heads / p->kv_heads), heads = t->end_head - t->head;
    long dim = a->value_dim, width = dim + LANES, query_head;
    for (long h = 0; h < heads; h++)
        for (long i = 0; i < rows; i++) {
            float record[width];
            clear(record, dim);
            for (long s = 0; s < t->num_splits; s++)
                merge(record, t->records + ((s * heads + h) * rows + i) * width, dim);
            float *out = output(a, t, t->head + h, i, &query_head);
            finish(p, record, dim, query_head, out);
        }
}

static char *take(char **memory, long bytes)
{
    char *taken = *memory;
    *memory += padded(bytes, 64);
    return taken;
}

static void locate(const Attend *a, const Part *t, long chunk, Places *places)
{
    const Pages *p = a->p;
    const int32_t *table = a->table + t->row * a->table_stride;
    long from, to, number = p->kv_heads * (p->bf16 ? 2 : 4); /* bytes of a position for each number of a head */
    seen(a, t, &from, &to);
    for (long k = 0; k < CHUNK; k++)
        places->keys[k] = places->values[k] = -1;
    for (long k = greatest(chunk, from), end = least(chunk + CHUNK, to); k < end;) {
        long offset = k % p->block_size, page = table[k / p->block_size] * p->page_stride;
        for (; offset < p->block_size && k < end; offset++, k++) {
            places->keys[k - chunk] = page + offset * number * p->dim;
            places->values[k - chunk] = page + offset * number * a->value_dim;
        }
    }
}

/* One chunk of one head of a part, for all its queries. position: of its first key. */
static void chunk(const Attend *a, const Part *t, const Work *w, long h, long position, const Places *places,
                  Ahead *ahead)
{
    const Pages *p = a->p;
    long group = p->heads / p->kv_heads, dim = a->value_dim, past = a->contexts[t->row] - a->counts[t->row], from, to;
    int rounds = p->bf16 && p->rounds;
    seen(a, t, &from, &to);
    from = from > position ? (from - position) / LANES : 0;
    to = least(up(to - position, LANES), CHUNK_GROUPS);
    const char *keys[CHUNK], *values[CHUNK];
    for (long k = 0; k < CHUNK; k++) {
        long head = t->head + h, is_seen = places->keys[k] >= 0;
        keys[k] = is_seen ? p->keys + places->keys[k] + head * w->words * 4 : w->zeros;
        values[k] = is_seen ? p->values + places->values[k] + head * dim * (p->bf16 ? 2 : 4) : w->zeros;
    }
    /* Where values are packed too, each fetches as much as it reads. */
    pack_keys(keys, w->words, from, to, w->keys, ahead, a->mode == MODE_DOT ? LANES : 2 * LANES);
    enum Mode mode = a->mode;
    const char *rows[CHUNK], *const *packed = values;
    if (mode == MODE_DOT || w->tiles > 1) {
        pack_values(mode, values, dim, w->values, ahead);
        for (long k = 0; k < CHUNK; k++)
            rows[k] = w->values + k * dim * 4;
        packed = rows;
        mode = mode == MODE_DOT ? MODE_DOT : MODE_F32;
    }
    int is_known = 0, is_finite = 1;
    for (long tile = 0; tile < w->tiles; tile++) {
        long begin = tile * w->rows / w->tiles, num = (tile + 1) * w->rows / w->tiles - begin;
        long place = h * w->padded_rows + tile * w->tile_rows, lowest = CHUNK, highest = 0;
        int low[MAX_TILE], high[MAX_TILE], differ = 0;
        Bias bias;
        long first_end = past + t->first + begin / group + 1, last_end = past + t->first + (begin + num - 1) / group + 1;
        int sees_all = first_end >= position + CHUNK && first_seen(p, last_end - 1) <= position;
        if (sees_all) {
            lowest = 0;
            highest = CHUNK;
        }
        for (long i = 0; i < num && !sees_all; i++) {
            long end = past + t->first + (begin + i) / group + 1;
            low[i] = greatest(0, least(first_seen(p, end - 1) - position, CHUNK));
            high[i] = greatest(0, least(end - position, CHUNK));
            if (low[i] < high[i]) {
                lowest = least(lowest, low[i]);
                highest = greatest(highest, high[i]);
            }
            differ |= low[i] != low[0] || high[i] != high[0];
        }
        if (lowest >= highest)
            continue;
        for (long i = 0; i < num && p->slopes; i++) {
            bias.slopes[i] = p->slopes[(t->head + h) * group + (begin + i) % group];
            bias.firsts[i] = position - (p->rounds_slopes ? 0 : past + t->first + (begin + i) / group);
        }
        long first = lowest / LANES, last = up(highest, LANES);
        _Alignas(64) float factors[MAX_TILE];
        const char *queries = w->queries + (h * w->tiles + tile) * w->tile_rows * w->padded_words * 4;
        float *sums = w->sums + place * dim;
        uint16_t *weights = mode == MODE_DOT ? w->weights : 0;
        pagewire_scores(a->mode, queries, num, w->keys, w->words, first, last, w->scores);
        soften(p, rounds, num, first, last, sees_all ? 0 : low, high, &bias, w->scores, weights, w->most + place,
               w->totals + place, factors);
        long unit = mode == MODE_DOT ? 2 : 1;
        const void *used = weights ? (const void *)weights : w->scores;
        if (differ && !is_known) {
            is_finite = are_finite(values, dim, p->bf16);
            is_known = 1;
        }
        if (differ && !is_finite)
            add_masked(a, w, num, low, high, lowest / unit, up(highest, unit), values, used, sums, factors);
        else
            pagewire_values(mode, used, num, packed, lowest / unit, up(highest, unit), dim, sums, factors);
    }
}

static void run_part(const void *about, long i)
{
    const Attend *a = about;
    const Pages *p = a->p;
    const Part *t = a->parts + (a->num_parts - 1 - i); /* the longest rows come last: start with them */
    const enum Mode mode = a->mode;
    long group = p->heads / p->kv_heads, dim = a->value_dim, heads = t->end_head - t->head, size = p->bf16 ? 2 : 4;
    long from, to, width = dim + LANES, longest = greatest(p->dim, dim);
    seen(a, t, &from, &to);
    int is_merged = t->end_split - t->split > 1 || t->records;
    Work w = {.rows = (t->end - t->first) * group, .words = p->dim * size / 4};
    w.padded_words = padded(mode == MODE_DOT ? w.words : p->dim, 16);
    w.tile_rows = mode == MODE_DOT ? DOT_ROWS : MR;
    w.tiles = up(w.rows, w.tile_rows);
    w.tile_rows = padded(w.tile_rows, LANES); /* so that vectors of maxima are aligned */
    w.padded_rows = w.tiles * w.tile_rows;
    for (int is_sized = 0; is_sized < 2; is_sized++) { /* first counts the bytes, then takes them */
        char *base = is_sized ? w.queries : 0, *memory = base;
        w.queries = take(&memory, heads * w.padded_rows * w.padded_words * 4);
        w.sums = (float *)take(&memory, heads * w.padded_rows * dim * 4);
        w.totals = (vf *)take(&memory, heads * w.padded_rows * sizeof(vf));
        w.most = (float *)take(&memory, heads * w.padded_rows * 4);
        w.merged = (float *)take(&memory, is_merged ? heads * w.rows * width * 4 : 0);
        w.keys = take(&memory, padded(w.words, 16) * CHUNK * 4);
        w.values = take(&memory, CHUNK * dim * 4);
        w.masked = take(&memory, CHUNK * dim * 4);
        w.scores = (float *)take(&memory, w.tile_rows * CHUNK * 4);
        w.weights = (uint16_t *)take(&memory, w.tile_rows * CHUNK * 2);
        w.spare = (float *)take(&memory, w.tile_rows * dim * 4);
        w.zeros = take(&memory, longest * 4);
        if (!is_sized)
            w.queries = pagewire_scratch(SLOT_ATTENTION, memory - (char *)0);
    }
    memset(w.zeros, 0, longest * 4);
#ifdef PAGEWIRE_AMX
    if (mode == MODE_DOT)
        tiles_begin();
#endif
    for (long h = 0; h < heads; h++)
        for (long tile = 0; tile < w.tiles; tile++) {
            long begin = tile * w.rows / w.tiles, num = (tile + 1) * w.rows / w.tiles - begin;
            pack_queries(a, t, &w, t->head + h, begin, num,
                         w.queries + (h * w.tiles + tile) * w.tile_rows * w.padded_words * 4);
        }
    if (is_merged && !t->records)
        for (long j = 0; j < heads * w.rows; j++)
            clear(w.merged + j * width, dim);

    Places places[2]; /* of the chunks with even and odd numbers */
    long begin = greatest(t->split * SPLIT, from / CHUNK * CHUNK);
    locate(a, t, begin, &places[begin / CHUNK % 2]);
    for (long split = t->split; split < t->end_split; split++) {
        memset(w.sums, 0, heads * w.padded_rows * dim * 4);
        memset(w.totals, 0, heads * w.padded_rows * sizeof(vf));
        for (long j = 0; j < heads * w.padded_rows; j++)
            w.most[j] = -INFINITY;
        long stop = least((split + 1) * SPLIT, to);
        for (long c = greatest(split * SPLIT, from / CHUNK * CHUNK); c < stop; c += CHUNK) {
            Places *now = &places[c / CHUNK % 2], *next = &places[(c / CHUNK + 1) % 2];
            int is_last = c + CHUNK >= least(to, t->end_split * SPLIT);
            if (!is_last)
                locate(a, t, c + CHUNK, next);
            Ahead ahead = {p,
                           is_last || !p->bf16 ? 0 : next,
                           {t->head * p->dim * size, t->head * dim * size},
                           {heads * p->dim * size, heads * dim * size},
                           0,
                           0};
            for (long h = 0; h < heads; h++)
                chunk(a, t, &w, h, c, now, &ahead);
        }
        for (long h = 0; h < heads; h++)
            for (long j = 0; j < w.rows; j++) {
                long tile = ((j + 1) * w.tiles - 1) / w.rows; /* the tile of query j */
                long place = h * w.padded_rows + tile * w.tile_rows + j - tile * w.rows / w.tiles, query_head;
                float alone[width], *record = alone;
                if (t->records)
                    record = t->records + (((split - t->first_split) * heads + h) * w.rows + j) * width;
                memcpy(record, w.sums + place * dim, dim * 4);
                record[dim] = w.most[place];
                record[dim + 1] = sum_of(w.totals[place]);
                if (is_merged && !t->records)
                    merge(record = w.merged + (h * w.rows + j) * width, alone, dim);
                if (!t->records && split == t->end_split - 1) {
                    float *out = output(a, t, t->head + h, j, &query_head);
                    finish(p, record, dim, query_head, out);
                }
            }
    }
#ifdef PAGEWIRE_AMX
    if (mode == MODE_DOT)
        tiles_end();
#endif
    if (t->records && atomic_fetch_sub(t->rest, 1) == 1)
        merge_records(a, t);
}

static double work_of(const Attend *a, long row)
{
    double group = a->p->heads / a->p->kv_heads, count = a->counts[row], keys = a->contexts[row] - count / 2;
    if (a->p->window || a->p->chunk)
        keys = least(keys, greatest(a->p->window, a->p->chunk) + count);
    return a->p->kv_heads * a->p->dim * keys * (count * group + PACK_ROWS);
}

/* Memory that the parts of a step share; counted first, then used. */
typedef struct {
    Part *parts;
    long num_parts, num_records, num_rests;
    float *records;
    _Atomic int *rests;
} Plan;

/* Cuts a row, whose first token is `start`, into `wanted` parts or somewhat more. Many queries are cut by heads, tokens
 * and at last keys; few by keys first, so that a task reads whole rows of the cache. */
static void plan_row(const Attend *a, long row, long start, long wanted, Plan *plan)
{
    const Pages *p = a->p;
    long group = p->heads / p->kv_heads, count = a->counts[row], queries = count * group;
    long by_tokens = up(queries, TASK_ROWS), by_heads, is_many = queries >= 2 * MR;
    by_tokens = least(count, by_tokens);
    if (is_many) {
        by_heads = p->kv_heads;
        by_tokens = greatest(by_tokens, least(up(wanted, by_heads), least(count, queries / (2 * MR))));
    } else {
        by_heads = up(p->kv_heads, greatest(1, TASK_ROWS / queries));
    }
    for (long i = 0; i < by_tokens; i++) {
        Part t = {.row = row, .start = start, .first = i * count / by_tokens, .end = (i + 1) * count / by_tokens};
        long from, to;
        seen(a, &t, &from, &to);
        t.first_split = from / SPLIT;
        t.num_splits = up(to, SPLIT) - t.first_split;
        long by_keys = least(t.num_splits, is_many ? up(wanted, by_heads * by_tokens) : wanted);
        long parts = is_many ? by_heads : greatest(by_heads, least(p->kv_heads, up(wanted, by_keys)));
        for (long h = 0; h < parts; h++) {
            t.head = h * p->kv_heads / parts;
            t.end_head = (h + 1) * p->kv_heads / parts;
            t.records = 0;
            t.rest = 0;
            if (by_keys > 1) {
                t.records = plan->records + plan->num_records;
                t.rest = plan->rests + plan->num_rests++;
                if (plan->parts)
                    atomic_init(t.rest, by_keys);
                plan->num_records +=
                    t.num_splits * (t.end_head - t.head) * (t.end - t.first) * group * (a->value_dim + LANES);
            }
            for (long k = 0; k < by_keys; k++, plan->num_parts++) {
                t.split = t.first_split + k * t.num_splits / by_keys;
                t.end_split = t.first_split + (k + 1) * t.num_splits / by_keys;
                if (plan->parts)
                    plan->parts[plan->num_parts] = t;
            }
        }
    }
}

static void plan_rows(const Attend *a, long rows, double task, Plan *plan)
{
    plan->num_parts = plan->num_records = plan->num_rests = 0;
    for (long row = 0, start = 0; row < rows; start += a->counts[row++])
        if (a->counts[row] > 0)
            plan_row(a, row, start, 1 + (long)(work_of(a, row) / task), plan);
}

/* The last counts[row] of each row's contexts[row] positions are its queries; each sees itself and the positions before
 * it as far as `window` or `chunk` reach. query: tokens of [heads][dim], row after row, query_stride apart; out:
 * [tokens][heads][value_dim]; table: [rows][table_stride] blocks. */
void pagewire_attend(const Pages *p, const float *query, long query_stride, const int32_t *table, long table_stride,
                     const int64_t *contexts, const int64_t *counts, float *out, long rows)
{
    enum Mode mode = !p->bf16 ? MODE_F32 : p->rounds && CAN_DOT ? MODE_DOT : MODE_WIDE;
    long value_dim = p->value_dim ? p->value_dim : p->dim;
    Attend a = {p, query, query_stride, table, table_stride, contexts, counts, out, mode, value_dim};
    double work = 0;
    for (long row = 0; row < rows; row++)
        work += work_of(&a, row);
    double task = work / (6 * pagewire_num_threads());
    task = task < LEAST_WORK ? LEAST_WORK : task;
    if (work < 2 * LEAST_WORK || pagewire_num_threads() == 1)
        task = work + 1; /* no more parts than memory demands */
    Plan plan = {0};
    plan_rows(&a, rows, task, &plan);
    long parts = padded(plan.num_parts * sizeof(Part), 64), rests = padded(plan.num_rests * sizeof(int), 64);
    char *memory = pagewire_scratch(SLOT_PARTS, parts + rests + plan.num_records * 4 + 64);
    plan.parts = (Part *)memory;
    plan.rests = (_Atomic int *)(memory + parts);
    plan.records = (float *)(memory + parts + rests);
    plan_rows(&a, rows, task, &plan);
    a.parts = plan.parts;
    a.num_parts = plan.num_parts;
    if (work < 2 * LEAST_WORK)
        for (long i = 0; i < a.num_parts; i++)
            run_part(&a, i);
    else
        pagewire_run(a.num_parts, run_part, &a);
}
