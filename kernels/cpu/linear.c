/* y = x · wᵀ + bias for float32 activations and weights in the checkpoint's type, bfloat16 or float32.
 *
 * With few rows the time goes into reading the weights, so bfloat16 is widened in registers: exact, and half the bytes.
 * With many rows it goes into multiply-adds. A tile of MR rows × NG groups of 16 columns keeps all sums in registers; a
 * weight is loaded (and widened) once for MR rows, and an activation is broadcast once for NG groups.
 *
 * Packed weights: columns in groups of 16, the last one padded with zeros. float32: [groups][k][16]. bfloat16:
 * [groups][k / 2][16][2], so that one 32-bit lane holds two weights of one column that are adjacent in k; the lower one
 * is widened by a shift, the upper one by a mask.
 */
#include <stdlib.h>

#include "product.h"

/* Prefetch distance, across the end into the next groups: the hardware prefetcher restarts with every group. */
enum { AHEAD = 64 };

enum { MANY = 6 }; /* with more panels than this, weights are widened once for all of them */

static __attribute__((noinline)) void store(const Product *p, long row, long column, vf sum)
{
    if (p->best) {
        keep_best(p->best + row, sum, column, p->n);
        return;
    }
    float *y = p->y + row * p->y_stride + column;
    if (column + LANES <= p->n) {
        if (p->bias)
            sum += *(const vf_any *)(p->bias + column);
        *(vf_any *)y = sum;
    } else {
        for (int l = 0; column + l < p->n; l++)
            y[l] = sum[l] + (p->bias ? p->bias[column + l] : 0);
    }
}

/* Rows [row, row + R) and groups [group, group + G). */
#define TILE(NAME, R, G, BF16)                                                                                         \
    static void NAME(const Product *p, long row, long group)                                                          \
    {                                                                                                                  \
        const float *x = p->x + row * p->k;                                                                            \
        const char *w = p->w + group * p->group_bytes;                                                                 \
        vf sum[R][G] = {{{0}}};                                                                                        \
        for (long k = 0; k < p->k; k += BF16 ? 2 : 1) {                                                                \
            vu pair[G];                                                                                                \
            long ahead = (k + AHEAD < p->k ? k + AHEAD : k + AHEAD + (G - 1) * p->k) * (BF16 ? 32 : 64);               \
            if (R <= 4)                                                                                                \
                UNROLL for (int j = 0; j < G; j++)                                                                     \
                    __builtin_prefetch(w + j * p->group_bytes + ahead);                                                \
            UNROLL for (int j = 0; j < G; j++)                                                                         \
                pair[j] = *(const vu *)(w + j * p->group_bytes + k * (BF16 ? 32 : 64));                                \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < G; j++)                                                                     \
                    sum[i][j] += (vf)(BF16 ? pair[j] << 16 : pair[j]) * x[k * R + i];                                  \
            if (BF16)                                                                                                  \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    UNROLL for (int j = 0; j < G; j++)                                                                 \
                        sum[i][j] += (vf)(pair[j] & 0xffff0000u) * x[k * R + R + i];                                   \
        }                                                                                                              \
        float *y = p->y + row * p->y_stride + group * LANES;                                                           \
        if (!p->best && !p->bias && (group + G) * LANES <= p->n) /* a call would spill all sums */                     \
            UNROLL for (int j = 0; j < G; j++)                                                                         \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    *(vf_any *)(y + i * p->y_stride + j * LANES) = sum[i][j];                                          \
        else                                                                                                           \
            UNROLL for (int j = 0; j < G; j++)                                                                         \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    store(p, row + i, (group + j) * LANES, sum[i][j]);                                                 \
    }

typedef void (*Tile)(const Product *p, long row, long group);

#define BOTH(R)                                                                                                        \
    TILE(tile_##R##_bf16, R, TALL(R), 1)                                                                               \
    TILE(tile_##R##_f32, R, TALL(R), 0)                                                                                \
    TILE(last_##R##_bf16, R, 1, 1)                                                                                     \
    TILE(last_##R##_f32, R, 1, 0)
#define ENTRY(R) {TALL(R), {tile_##R##_f32, tile_##R##_bf16}, {last_##R##_f32, last_##R##_bf16}},
EACH(BOTH)
static const struct {
    long groups;
    Tile tile[2], last[2];
} TILES[] = {EACH(ENTRY)};

void pagewire_sweep(const Product *p, long row, long count, long from, long to, int bf16)
{
    long groups = TILES[count - 1].groups;
    for (; from + groups <= to; from += groups)
        TILES[count - 1].tile[bf16](p, row, from);
    for (; from < to; from++)
        TILES[count - 1].last[bf16](p, row, from);
}

/* Copies a panel's rows together: rows that are 4 kB apart compete for the same lines of the L1 cache. */
static void gather(const float *x, float *panel, long count, long k, long x_stride)
{
    typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
    typedef double v2 __attribute__((vector_size(16))); /* two floats per element */
    long i = 0, fours = k / 4 * 4;
    for (; i + 4 <= count; i += 4) {
        const float *row = x + i * x_stride;
        float *to = panel + i;
        for (long j = 0; j < fours; j += 4, row += 4, to += 4 * count) {
            v4 a = *(const v4 *)row, b = *(const v4 *)(row + x_stride);
            v4 c = *(const v4 *)(row + 2 * x_stride), d = *(const v4 *)(row + 3 * x_stride);
            v2 ab0 = (v2)__builtin_shufflevector(a, b, 0, 4, 1, 5), ab2 = (v2)__builtin_shufflevector(a, b, 2, 6, 3, 7);
            v2 cd0 = (v2)__builtin_shufflevector(c, d, 0, 4, 1, 5), cd2 = (v2)__builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(v4 *)to = (v4)__builtin_shufflevector(ab0, cd0, 0, 2);
            *(v4 *)(to + count) = (v4)__builtin_shufflevector(ab0, cd0, 1, 3);
            *(v4 *)(to + 2 * count) = (v4)__builtin_shufflevector(ab2, cd2, 0, 2);
            *(v4 *)(to + 3 * count) = (v4)__builtin_shufflevector(ab2, cd2, 1, 3);
        }
    }
    for (long row = 0; row < count; row++)
        for (long j = row < i ? fours : 0; j < k; j++)
            panel[j * count + row] = x[row * x_stride + j];
}

/* Widens the bfloat16 weights of groups [from, to), at most WIDE, to float32. For many panels this is faster than in
 * every tile, and they stay cached. The buffer belongs to the thread and is kept; returns 0 if it cannot be allocated.
 */
static const float *widened(const Product *p, long from, long to)
{
    static _Thread_local float *room;
    static _Thread_local long size;
    long needed = WIDE * p->k * LANES;
    if (size < needed) {
        free(room);
        room = aligned_alloc(64, needed * 4);
        size = room ? needed : 0;
    }
    for (long group = from; room && group < to; group++) {
        const vu *pairs = (const vu *)(p->w + group * p->group_bytes);
        vu *out = (vu *)(room + (group - from) * p->k * LANES);
        for (long i = 0; i < p->k / 2; i++) {
            out[2 * i] = pairs[i] << 16;
            out[2 * i + 1] = pairs[i] & 0xffff0000u;
        }
    }
    return room;
}

/* x: m rows of k float32, x_stride apart; panels: m · k float32, unused for one row. Sets x of `p`. */
static void multiply(Product p, const float *x, float *panels, long m, long x_stride, int bf16)
{
    long groups = (p.n + LANES - 1) / LANES, k = p.k;
    long num_panels = (m + MR - 1) / MR;
    long most = X_BYTES / 4 / k / MR; /* panels of MR rows whose activations stay cached */
    if (most < 1)
        most = 1;
    p.x = m == 1 ? x : panels;
    p.group_bytes = k * LANES * (bf16 ? 2 : 4);
    /* Rows are spread evenly over the panels: 13 rows are 7 and 6, not 12 and 1. */
#define ROW(PANEL) ((PANEL)*m / num_panels)
#pragma omp parallel
    {
        long from, to;
        if (m > 1) {
            share(num_panels, 1, &from, &to);
            for (long i = from; i < to; i++)
                gather(x + ROW(i) * x_stride, panels + ROW(i) * k, ROW(i + 1) - ROW(i), k, x_stride);
#pragma omp barrier
        }
        Product mine = p;
        if (p.best)
            mine.best += omp_get_thread_num() * m;
        share(groups, WIDE * 4, &from, &to);
        for (long first = 0; first < num_panels; first += most) {
            long last = first + most < num_panels ? first + most : num_panels;
            /* Groups in the outer loop: their weights are read from memory once for all panels of the block. */
            long step = last - first == 1 ? to - from : WIDE;
            for (long group = from; group < to; group += step) {
                long end = group + step < to ? group + step : to;
                const float *wide = bf16 && last - first > MANY ? widened(&p, group, end) : 0;
                if (wide) {
                    mine.group_bytes = k * LANES * 4;
                    mine.w = (const char *)wide - group * mine.group_bytes;
                }
                for (long i = first; i < last; i++)
                    pagewire_sweep(&mine, ROW(i), ROW(i + 1) - ROW(i), group, end, bf16 && !wide);
                mine.group_bytes = p.group_bytes;
                mine.w = p.w;
            }
        }
    }
}

/* y: [m][n]; the rest as in `multiply`. */
void pagewire_linear(const float *x, const char *w, const float *bias, float *y, float *panels, long m, long n, long k,
                     long x_stride, int bf16)
{
    multiply((Product){.w = w, .bias = bias, .y = y, .n = n, .k = k, .y_stride = n}, x, panels, m, x_stride, bf16);
}

/* Only the greatest number of each row of the product and its column, as in `pagewire_greedy`; best: scratch of
 * [threads][m]. */
void pagewire_linear_greedy(const float *x, const char *w, float *panels, Best *best, int64_t *ids, float *most, long m,
                            long n, long k, long x_stride, int bf16)
{
    long threads = omp_get_max_threads();
    pagewire_clear_best(best, m, threads);
    multiply((Product){.w = w, .best = best, .n = n, .k = k}, x, panels, m, x_stride, bf16);
    pagewire_merge_best(best, ids, most, m, threads);
}

/* w: [n][k] of either type → packed. */
void pagewire_pack(const char *w, char *packed, long n, long k, int bf16)
{
    long words = bf16 ? k / 2 : k; /* 32-bit words per row */
    long groups = (n + LANES - 1) / LANES;
#pragma omp parallel for schedule(static)
    for (long g = 0; g < groups; g++)
        for (long l = 0; l < LANES; l++) {
            uint32_t *out = (uint32_t *)packed + g * words * LANES + l;
            const char *in = w + (g * LANES + l) * words * 4;
            for (long i = 0; i < words; i++)
                out[i * LANES] = g * LANES + l < n ? load_u32(in + 4 * i) : 0;
        }
}

/* Rows of packed weights as float32, for embeddings that share their memory with the head. ids: [m]; y: [m][k]. */
void pagewire_lookup(const char *packed, const int64_t *ids, float *y, long m, long k, int bf16)
{
    long group_bytes = k * LANES * (bf16 ? 2 : 4);
#pragma omp parallel if (m > 16)
    {
        long from, to;
        share(m, 1, &from, &to);
        for (long i = from; i < to; i++) {
            const uint32_t *in = (const uint32_t *)(packed + ids[i] / LANES * group_bytes) + ids[i] % LANES;
            uint32_t *out = (uint32_t *)(y + i * k);
            if (bf16)
                for (long j = 0; j < k / 2; j++) {
                    out[2 * j] = in[j * LANES] << 16;
                    out[2 * j + 1] = in[j * LANES] & 0xffff0000u;
                }
            else
                for (long j = 0; j < k; j++)
                    out[j] = in[j * LANES];
        }
    }
}
