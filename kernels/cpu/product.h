/* Sizes of the tiles that products are made of, and those of linear.c for attention, whose scores and sums over values
 * are products, too. */
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

enum { X_BYTES = 512 << 10 }; /* of activations that stay in the second-level cache while the weights pass by */

/* Few rows take more groups at once: their multiply-adds hide each other's latency. TALL gives the groups for so many
 * rows; one group is for what is left at the end. */
#define TALL(R) ((R) == 1 ? 4 * WIDE : (R) <= 4 ? 2 * WIDE : WIDE)

/* DO(1) to DO(MR). */
#ifdef __AVX512F__
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif defined(__AVX__)
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#else
#define EACH(DO) DO(1) DO(2) DO(3) DO(4) DO(5)
#endif

typedef struct {
    const float *x; /* panels of rows, each [k][rows of the panel] */
    const char *w;  /* packed */
    const float *bias;
    float *y; /* [rows][y_stride] */
    long n, k, y_stride, group_bytes;
} Product;

/* Rows [row, row + count), at most MR and all of one panel; groups [from, to). */
void pagewire_sweep(const Product *p, long row, long count, long from, long to, int bf16);

/* One layer's keys and values, [blocks][block_size][kv_heads][dim], and how it attends to them. */
typedef struct {
    const char *keys, *values;
    long heads, kv_heads, dim, block_size, window; /* window 0: none */
    float scale, softcap;                          /* softcap 0: none */
    int bf16;
} Pages;
