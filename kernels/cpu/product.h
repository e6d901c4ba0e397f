/* How products are cut, and what a kind of weights has to provide. `product.c` runs them. */
#pragma once
#include "matrix.h"
#include "threads.h"
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

enum { PADDED = 32 }; /* bfloat16 weights and their activations are padded with zeros to multiples of it, an AMX tile */
/* Of `pagewire_scratch`. */
enum { SLOT_ACTIVATIONS, SLOT_WEIGHTS, SLOT_ATTENTION, SLOT_PARTS, SLOT_EXPERTS, SLOT_STEP, SLOT_STACK, SLOT_CHOICES };

/* Few rows take more groups at once, so that their multiply-adds hide each other's latency. TALL(R) is the number of
 * groups for R rows; the remaining groups at the end are taken one by one. */
#define TALL(R) ((R) <= 4 ? 2 * WIDE : WIDE)

/* DO(1) to DO(MR). */
#ifdef __AVX512F__
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif defined(__AVX__)
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#else
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5)
#endif

static inline long padded(long k, long to)
{
    return (k + to - 1) / to * to;
}

/* The number of groups of 16 columns of a packed weight of n rows. */
static inline long num_groups(long n, long is_gated)
{
    return is_gated ? (n / 2 + LANES - 1) / LANES * 2 : (n + LANES - 1) / LANES;
}

/* The row of the weight that stands in a lane of a packed group; -1 if there is none. */
static inline long row_in(long n, long is_gated, long group, long lane)
{
    long row = (is_gated ? group / 2 : group) * LANES + lane, end = is_gated ? n / 2 : n;
    return row >= end ? -1 : is_gated && group % 2 ? end + row : row;
}

/* Calls pack(about, i) for each of `count` groups of a weight, which take `bytes` bytes packed. Tasks are large: waking a
 * thread for less costs more than it saves, beside a thread that writes what is packed. */
void pagewire_pack_groups(long count, long bytes, Task pack, const void *about);

/* Rows of float32 activations: row i is row index[i] of x, or i without an index. */
typedef struct {
    const float *x;
    const int32_t *index;
    long stride;
} Activations;

static inline const float *row_of(const Activations *a, long i)
{
    return a->x + (a->index ? a->index[i] : i) * a->stride;
}

/* One kind of weights. A panel is some rows of activations, packed for the kind's inner loop; the columns of a weight
 * come in groups of 16. */
typedef struct {
    long panel_rows;                       /* at most */
    long (*panel_bytes)(const Matrix *, long rows);
    void (*pack)(const Matrix *, const Activations *, long first, long rows, void *panel);
    /* Groups [from, to), unpacked in this thread's scratch memory for the panels that follow, or as they are. */
    const char *(*prepare)(const Matrix *, long from, long to, long num_panels);
    /* The sums of a panel: [rows rounded up to panel_rows if that is 32][to - from][16]. w: from `prepare`. */
    void (*sums)(const Matrix *, const void *panel, long rows, const char *w, long num_panels, long from, long to,
                 vf *out);
    long groups; /* how many groups `sums` is called for at once, if there are several panels */
    /* `sums` for few panels, or 0. The index-th panel brings its share of the weights of as many groups from `next` on
     * into the cache: otherwise the first panel would wait for memory, and memory for the others. */
    void (*sums_ahead)(const Matrix *, const void *panel, long rows, const char *w, long num_panels, long from, long to,
                       vf *out, long index, long next);
} KindOps;

extern const KindOps pagewire_f32, pagewire_bf16, pagewire_dot, pagewire_grouped, pagewire_fp8, pagewire_fp8_f32,
    pagewire_superblocks;

/* One row of the weight as float32: y [k]. */
void pagewire_grouped_lookup(const Matrix *w, long row, float *y);
void pagewire_fp8_lookup(const Matrix *w, long row, float *y);
void pagewire_superblocks_lookup(const Matrix *w, long row, float *y);

enum { MAX_PANEL = 32, MAX_GROUPS = 8 };

/* A product of a list; see `pagewire_products`. */
typedef struct {
    const Matrix *w;
    Activations x;
    float *y;
    long y_stride, m, epilogue;
} Product;

/* All of a list of products as one list of tasks. */
void pagewire_products(const Product *products, long count);

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
    /* Threads take columns in any order, so of equal numbers the lower column counts. */
    vi is_better = is_there & ((numbers > best->most) | ((numbers == best->most) & (id < best->id)));
    best->most = select16(is_better, numbers, best->most);
    best->id = (is_better & id) | (~is_better & best->id);
}

/* The results of each thread over its columns of m rows, [threads][m]: cleared before, merged afterwards. */
void pagewire_clear_best(Best *best, long m, long threads);
void pagewire_merge_best(const Best *best, int64_t *ids, float *most, long m, long threads);

/* The sums of `rows` float32 rows, at most MR in a panel [k][rows], with groups [from, to) of float32 weights, or with
 * bf16 of bfloat16 weights: out [rows][to - from]. k: a multiple of 2 for bfloat16. */
void pagewire_dense_sums(const float *panel, long rows, const char *w, long k, long group_bytes, long from, long to,
                         vf *out, int bf16);

/* Copies rows of 32-bit words together: [words][rows]. Rows that are 4 kB apart compete for the same lines of the L1
 * cache. */
void pagewire_interleave(const float *const *rows, long count, long words, long padded_words, float *out);

/* One layer's keys and values, [pages][block_size][kv_heads][dim], and the parameters of its attention. */
typedef struct {
    const char *keys, *values;
    long heads, kv_heads, dim, block_size;
    long window, chunk; /* a query sees the last `window` positions, or those since a multiple of `chunk`; 0: all */
    float scale, softcap;                          /* softcap 0: none */
    int bf16, rounds;                              /* rounds: bfloat16 arithmetic, with a bfloat16 cache only */
    const float *sinks;                            /* [heads]: a logit each that joins the denominator; or 0 */
    long page_stride;                              /* bytes from a page to the next */
    const float *slopes; /* [heads] of ALiBi, or 0: slope · (key's position - query's) · slope_scale joins the score */
    float slope_scale;
    int rounds_slopes; /* instead slope · key's position, both and the product rounded to bfloat16 */
    long value_dim;    /* of values, where they are not of the size of keys; a multiple of 16, or 0 */
} Pages;

/* Attention of all rows of a step; see `attention.c`. */
void pagewire_attend(const Pages *p, const float *query, long query_stride, const int32_t *table, long table_stride,
                     const int64_t *contexts, const int64_t *counts, float *out, long rows);
