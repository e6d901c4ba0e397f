/* The tiles of linear.c, for attention, whose scores and sums over values are products, too. */
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

typedef struct {
    const float *x; /* panels of rows, each [k][rows of the panel] */
    const char *w;  /* packed */
    const float *bias;
    float *y; /* [rows][y_stride] */
    long n, k, y_stride, group_bytes;
} Product;

/* Rows [row, row + count), at most MR and all of one panel; groups [from, to). */
void pagewire_sweep(const Product *p, long row, long count, long from, long to, int bf16);
