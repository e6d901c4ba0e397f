/* y = x · wᵀ + bias with 8-bit weights, one scale per column, and activations that are rounded to 8 bits here, one
 * scale per row. A row's result depends on no other row. Sums are integers, so every CPU gives the same result.
 *
 * Packed weights: columns in groups of 16, [groups][k / 4][16][4] int8, k padded with zeros to a multiple of 4. The
 * instructions that multiply four pairs at once (VNNI) need one unsigned operand: 128 is added to the activations, and
 * 128 · Σw of each column, which is precomputed, is subtracted from the sum.
 */
#include <math.h>

#include "product.h"

enum { AHEAD = 32, X_BYTES = 512 << 10 }; /* see dense.c and product.c */

#ifdef __AVX512VNNI__
#include <immintrin.h>
enum { OFFSET = 128 };
static inline vi dot(vi sum, vi w, uint32_t x)
{
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
}
#else
enum { OFFSET = 0 };
static inline vi dot(vi sum, vi w, uint32_t x)
{
    sum += (w << 24 >> 24) * ((int32_t)(x << 24) >> 24);
    sum += (w << 16 >> 24) * ((int32_t)(x << 16) >> 24);
    sum += (w << 8 >> 24) * ((int32_t)(x << 8) >> 24);
    return sum + (w >> 24) * ((int32_t)x >> 24);
}
#endif

typedef struct {
    const uint32_t *x; /* panels of rows, each [k / 4][rows of the panel] of four numbers */
    const float *x_scales;
    const char *w;
    const float *w_scales; /* [n], padded to whole groups, as are the sums */
    const int32_t *w_sums;
    const float *bias;
    float *y;
    Best *best; /* [rows], used instead of y; or 0 */
    long n, words, group_bytes; /* words: k / 4 */
} Int8;

static inline vf scaled(const Int8 *p, long row, long column, vi sum)
{
    vf out = __builtin_convertvector(sum - *(const vi_any *)(p->w_sums + column) * OFFSET, vf);
    return out * (*(const vf_any *)(p->w_scales + column) * p->x_scales[row]);
}

static __attribute__((noinline)) void store(const Int8 *p, long row, long column, vi sum)
{
    vf out = scaled(p, row, column, sum);
    if (p->best) {
        keep_best(p->best + row, out, column, p->n);
        return;
    }
    float *y = p->y + row * p->n + column;
    for (int l = 0; l < LANES && column + l < p->n; l++)
        y[l] = out[l] + (p->bias ? p->bias[column + l] : 0);
}

#define TILE(NAME, R, G)                                                                                               \
    static void NAME(const Int8 *p, long row, long group)                                                              \
    {                                                                                                                  \
        const uint32_t *x = p->x + row * p->words;                                                                     \
        const char *w = p->w + group * p->group_bytes;                                                                 \
        vi sum[R][G] = {{{0}}};                                                                                        \
        for (long k = 0; k < p->words; k++) {                                                                          \
            vi weights[G];                                                                                             \
            long ahead = (k + AHEAD < p->words ? k + AHEAD : k + AHEAD + (G - 1) * p->words) * 64;                     \
            if (R <= 4)                                                                                                \
                UNROLL for (int j = 0; j < G; j++)                                                                     \
                    __builtin_prefetch(w + j * p->group_bytes + ahead);                                                \
            UNROLL for (int j = 0; j < G; j++)                                                                         \
                weights[j] = *(const vi *)(w + j * p->group_bytes + k * 64);                                           \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < G; j++)                                                                     \
                    sum[i][j] = dot(sum[i][j], weights[j], x[k * R + i]);                                              \
        }                                                                                                              \
        float *y = p->y + row * p->n + group * LANES;                                                                  \
        if (!p->best && !p->bias && (group + G) * LANES <= p->n) /* a call would spill all sums */                     \
            UNROLL for (int j = 0; j < G; j++)                                                                         \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    *(vf_any *)(y + i * p->n + j * LANES) = scaled(p, row + i, (group + j) * LANES, sum[i][j]);        \
        else                                                                                                           \
            UNROLL for (int j = 0; j < G; j++)                                                                         \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    store(p, row + i, (group + j) * LANES, sum[i][j]);                                                 \
    }

typedef void (*Tile)(const Int8 *p, long row, long group);
#define BOTH(R)                                                                                                        \
    TILE(tile_##R, R, TALL(R))                                                                                         \
    TILE(last_##R, R, 1)
#define ENTRY(R) {TALL(R), tile_##R, last_##R},
EACH(BOTH)
static const struct {
    long groups;
    Tile tile, last;
} TILES[] = {EACH(ENTRY)};

static void sweep(const Int8 *p, long row, long count, long from, long to)
{
    long groups = TILES[count - 1].groups;
    for (; from + groups <= to; from += groups)
        TILES[count - 1].tile(p, row, from);
    for (; from < to; from++)
        TILES[count - 1].last(p, row, from);
}

/* Rounds 16 numbers x · 127 / most to integers, ties to even. */
static inline vi rounded16(vf x, float most)
{
    return (vi)(x * 127.0f / most + 12582912.0f) - 0x4b400000; /* 1.5 · 2²³ */
}

/* Quantizes one row to 8 bits plus the offset, in words `stride` apart, padded with zeros; `sum` is that of the 8-bit
 * numbers. Returns the row's scale, or NaN if a number is not finite. */
static inline float quantize(const char *x, int bf16, int offset, uint32_t *out, long k, long stride, int32_t *sum)
{
    typedef int8_t v16 __attribute__((vector_size(16)));
    vf most16 = {0}, any = {0}, rest = {0};
    vi sum16 = {0};
    long whole = k / LANES * LANES;
    for (long i = whole; i < k; i++)
        rest[i - whole] = number(x, i, bf16);
    for (long i = 0; i <= whole; i += LANES) {
        vf v = i < whole ? load16(x, i, bf16) : rest;
        any += v * 0.0f; /* NaN also for infinities */
        most16 = max16((vf)((vi)v & 0x7fffffff), most16);
    }
    float most = 0, odd = 0;
    for (int l = 0; l < LANES; l++) {
        most = most16[l] > most ? most16[l] : most;
        odd += any[l];
    }
    int is_plain = odd == 0 && most > 0;
    for (long i = 0; i < k; i += LANES) {
        vi q = is_plain ? rounded16(i < whole ? load16(x, i, bf16) : rest, most) : (vi){0};
        sum16 += q;
        v16 bytes = __builtin_convertvector(q + offset, v16);
        uint32_t words[4];
        memcpy(words, &bytes, 16);
        for (long j = 0; j < 4 && i + 4 * j < k; j++)
            out[(i / 4 + j) * stride] = words[j];
    }
    *sum = 0;
    for (int l = 0; l < LANES; l++)
        *sum += sum16[l];
    return odd == 0 ? most / 127 : NAN;
}

/* x: m rows of k float32, x_stride apart; work: m · (k / 4, rounded up) + m numbers of 32 bits. Sets x and x_scales of
 * `p`. */
static void multiply(Int8 p, const float *x, uint32_t *work, long m, long k, long x_stride)
{
    long words = (k + 3) / 4, groups = (p.n + LANES - 1) / LANES;
    long num_panels = (m + MR - 1) / MR;
    long most = X_BYTES / 4 / words / MR;
    float *x_scales = (float *)(work + m * words);
    if (most < 1)
        most = 1;
    p.x = work;
    p.x_scales = x_scales;
    p.words = words;
    p.group_bytes = words * 64;
#define ROW(PANEL) ((PANEL)*m / num_panels)
#pragma omp parallel
    {
        long from, to;
        share(num_panels, 1, &from, &to);
        for (long i = from; i < to; i++)
            for (long row = ROW(i); row < ROW(i + 1); row++) {
                int32_t unused;
                x_scales[row] = quantize((const char *)(x + row * x_stride), 0, OFFSET,
                                         work + ROW(i) * words + row - ROW(i), k, ROW(i + 1) - ROW(i), &unused);
            }
#pragma omp barrier
        Int8 mine = p;
        if (p.best)
            mine.best += omp_get_thread_num() * m;
        share(groups, WIDE * 4, &from, &to);
        for (long first = 0; first < num_panels; first += most) {
            long last = first + most < num_panels ? first + most : num_panels;
            long step = last - first == 1 ? to - from : WIDE;
            for (long group = from; group < to; group += step)
                for (long i = first; i < last; i++)
                    sweep(&mine, ROW(i), ROW(i + 1) - ROW(i), group, group + step < to ? group + step : to);
        }
    }
}

/* w_scales, w_sums: [n], padded to whole groups; y: [m][n]; the rest as in `multiply`. */
void pagewire_linear_int8(const float *x, const char *w, const float *w_scales, const int32_t *w_sums,
                          const float *bias, float *y, uint32_t *work, long m, long n, long k, long x_stride)
{
    multiply((Int8){.w = w, .w_scales = w_scales, .w_sums = w_sums, .bias = bias, .y = y, .n = n}, x, work, m, k,
             x_stride);
}

/* As `pagewire_linear_greedy`. */
void pagewire_linear_greedy_int8(const float *x, const char *w, const float *w_scales, const int32_t *w_sums,
                                 uint32_t *work, Best *best, int64_t *ids, float *most, long m, long n, long k,
                                 long x_stride)
{
    long threads = omp_get_max_threads();
    pagewire_clear_best(best, m, threads);
    multiply((Int8){.w = w, .w_scales = w_scales, .w_sums = w_sums, .best = best, .n = n}, x, work, m, k, x_stride);
    pagewire_merge_best(best, ids, most, m, threads);
}

/* w: [n][k] bfloat16 or float32 → packed, scales [n] = max |w| / 127 and sums [n], padded to whole groups. */
void pagewire_pack_int8(const char *w, char *packed, float *scales, int32_t *sums, long n, long k, int bf16)
{
    long words = (k + 3) / 4, groups = (n + LANES - 1) / LANES;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < groups * LANES; row++) {
        uint32_t *out = (uint32_t *)packed + row / LANES * words * LANES + row % LANES;
        if (row < n) {
            scales[row] = quantize(w + row * k * (bf16 ? 2 : 4), bf16, 0, out, k, LANES, sums + row);
        } else {
            scales[row] = sums[row] = 0;
            for (long i = 0; i < words; i++)
                out[i * LANES] = 0;
        }
    }
}

/* Rows of packed weights as float32. ids: [m]; y: [m][k]. */
void pagewire_lookup_int8(const char *packed, const float *scales, const int64_t *ids, float *y, long m, long k)
{
    long words = (k + 3) / 4;
    for (long i = 0; i < m; i++) {
        const int8_t *in = (const int8_t *)packed + ids[i] / LANES * words * 64 + ids[i] % LANES * 4;
        for (long j = 0; j < k; j++)
            y[i * k + j] = in[j / 4 * 64 + j % 4] * scales[ids[i]];
    }
}
