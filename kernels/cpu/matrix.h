/* Packed weights and their products, whatever their type. */
#pragma once
#include <stdint.h>

enum Kind {
    KIND_F32,  /* float32 weights and activations */
    KIND_BF16, /* bfloat16 weights, widened; float32 activations */
    KIND_DOT,  /* bfloat16 weights; activations are rounded to bfloat16 */
    KIND_GROUPED, /* weights of 8 or 4 bits with scales in groups; activations are rounded to 8 bits */
    KIND_FP8, /* float8 weights, unpacked to bfloat16; activations are rounded to bfloat16 */
    KIND_FP8_F32, /* float8 weights, unpacked to float32; float32 activations */
    KIND_SUPERBLOCKS, /* weights of 2 to 6 bits in superblocks; activations are rounded to 8 bits */
    KIND_STACK, /* `parts`, of any other kinds: the rows of the first, then those of the second, and so on */
};

/* How the scales and offsets of a group are stored. */
enum Stored {
    STORED_F32,
    STORED_BF16,
    STORED_F16,
    STORED_ZERO_POINTS, /* offsets: uint8 z, offset = scale · z */
    STORED_ONE,         /* offsets: scale · `zero` for all, and no array */
};

/* A weight [n][k] in its kernel's layout. */
typedef struct Matrix {
    const char *w;
    const void *scales, *offsets;  /* of KIND_GROUPED, see grouped.c; scales of KIND_FP8, see fp8.c */
    const uint8_t *table;          /* [16], or 0 */
    const int32_t *order;          /* [k]: the activation for each column; or 0 */
    const float *bias;             /* [n], or 0 */
    const struct Matrix *parts;    /* of KIND_STACK, without biases, and not gated */
    long n, k, kind, bits, group, num_parts;
    long is_gated; /* rows are gates and ups, which alternate in groups of 16 in the packed weight */
    long scale_type, offset_type, zero; /* of KIND_GROUPED */
} Matrix;

enum Epilogue {
    STORE,    /* y = x · wᵀ + bias */
    ADD,      /* y += x · wᵀ + bias */
    SILU_MUL, /* y = silu(gate) · up, n / 2 columns; only and always of a gated matrix */
};

/* x: m rows of k float32, x_stride apart; y: m rows, y_stride apart. Each row's bits depend on that row alone. */
void pagewire_product(const Matrix *w, const float *x, long x_stride, float *y, long y_stride, long m, long epilogue);

/* The first of the greatest numbers of each row of the product without a bias: its column and value, or -1 and NaN if
 * the row holds a NaN. ids, most: [m]. */
void pagewire_product_greedy(const Matrix *w, const float *x, long x_stride, int64_t *ids, float *most, long m);

/* Rows of the weight as float32. ids: [m]; y: [m][k]. */
void pagewire_lookup(const Matrix *w, const int64_t *ids, float *y, long m);
