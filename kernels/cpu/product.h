/* Tile sizes of matrix products, and the products of linear.c for use in attention, whose scores and value sums are
 * products as well. */
#pragma once
#include "vectors.h"

#ifdef __AVX512F__
enum { MR = 12 }; /* 12 × 2 sums, 2 weights and 1 activation in 32 registers */
#define WIDE 2
#elif defined(__AVX__)
enum { MR = 6 }; /* a group is two registers: 12 sums of 16 */
#define WIDE 1
#else
enum { MR = 5 };
#define WIDE 1
#endif

enum { X_BYTES = 512 << 10 }; /* of activations that stay in the L2 cache while the weights stream through */

/* Few rows take more groups at once, so that their multiply-adds hide each other's latency. TALL(R) is the number of
 * groups for R rows; the remaining groups at the end are taken one by one. */
#define TALL(R) ((R) == 1 ? 4 * WIDE : (R) <= 4 ? 2 * WIDE : WIDE)

/* DO(1) to DO(MR). */
#ifdef __AVX512F__
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif defined(__AVX__)
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#else
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5)
#endif

/* The greatest number of a row so far and its column, per lane; `odd`: nonzero where a number was NaN. */
typedef struct {
    vf most;
    vi id, odd;
} Best;

/* Adds the numbers of a row from `column` on; the row has n in all. Columns come in ascending order. */
static inline void keep_best(Best *best, vf numbers, long column, long n)
{
    vi id = (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)column;
    vi is_there = id < (vi){0} + (int32_t)n;
    best->odd |= is_there & (numbers != numbers);
    vi is_better = is_there & (numbers > best->most);
    best->most = select16(is_better, numbers, best->most);
    best->id = (is_better & id) | (~is_better & best->id);
}

/* The results of each thread over its columns of m rows, [threads][m]: cleared before, merged afterwards. */
void pagewire_clear_best(Best *best, long m, long threads);
void pagewire_merge_best(const Best *best, int64_t *ids, float *most, long m, long threads);

typedef struct {
    const float *x; /* panels of rows, each [k][rows of the panel] */
    const char *w;  /* packed */
    const float *bias;
    float *y;   /* [rows][y_stride] */
    Best *best; /* [rows], used instead of y; or 0 */
    long n, k, y_stride, group_bytes;
} Product;

/* Rows [row, row + count), at most MR and all in one panel; groups [from, to). */
void pagewire_sweep(const Product *p, long row, long count, long from, long to, int bf16);

/* One layer's keys and values, [blocks][block_size][kv_heads][dim], and the parameters of its attention. */
typedef struct {
    const char *keys, *values;
    long heads, kv_heads, dim, block_size, window; /* window 0: none */
    float scale, softcap;                          /* softcap 0: none */
    int bf16;
} Pages;
