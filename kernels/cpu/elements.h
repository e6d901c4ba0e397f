/* Operations on each number, or each group of adjacent numbers, of some columns of activations. A result may lie where
 * an argument does. */
#pragma once
#include <stdint.h>

/* Columns of activations: the first row's, and the numbers between rows. */
typedef struct {
    float *x;
    long stride;
} Numbers;

enum { ACT_SILU16, ACT_SIGMOID16, ACT_GELU_TANH, ACT_QUICK_GELU, ACT_GELU, ACT_RELU, ACT_RELU2, ACT_TANH, ACT_IDENTITY };

enum MapKind {
    MAP_ADD,         /* alpha · x + beta · y */
    MAP_SCALE,       /* x · alpha */
    MAP_WEIGHT,      /* x · weight */
    MAP_ACT,         /* act(x) */
    MAP_GLU,         /* act(x · alpha) · y */
    MAP_GLU_CLAMPED, /* (y + 1) · x · sigmoid(alpha · x), x at most limit and y within ± limit */
    MAP_MULTIPLY,    /* x · act(y) */
    MAP_MULTIPLY_GROUPS, /* x · act(y), where each column of y is for `size` columns of x */
    MAP_CLIP,        /* x within ± limit */
    MAP_SPARSE,      /* x - (the row's mean + alpha · its standard deviation), at least 0 */
    MAP_XIELU,       /* alpha · x² + x / 2 for x > 0, else beta · (e^x - 1 - x) + x / 2 */
    MAP_MATCH,       /* x · the row's root mean square of y / that of x, whose square is at least `limit` */
};

typedef struct {
    Numbers x, y, out;
    const float *weight; /* [width] */
    long kind, width, size, act;
    float alpha, beta, limit;
} Map;

void pagewire_map(const Map *a, long m);

/* The RMS norm or layer norm of groups of `size` adjacent columns; weights and biases for a group, or for all. */
typedef struct {
    Numbers x, out;
    const float *weight, *bias; /* [num_weights], or 0 */
    long width, size, num_weights, is_layer;
    float eps;
    Numbers mean; /* of the squares of each row, one column for all groups; without a stride: that of each group */
} Normalize;

void pagewire_normalize(const Normalize *a, long m);

/* Stream k of `out` = stream k of x + the sum over p of (weight[k][p] + shift) · stream p of y. A stream is `size`
 * columns; weights: for each row [num][num_others]. `out` may be x if y is not. */
typedef struct {
    Numbers x, y, weights, out;
    long size, num, num_others;
    float shift;
} MixStreams;

void pagewire_mix_streams(const MixStreams *a, long m);
/* out[place] = the sum of the squares of a row / count; the other columns of `num` are 0. */
typedef struct {
    Numbers x, out;
    long width, num, place;
    float count;
} MeanSquares;

void pagewire_mean_squares(const MeanSquares *a, long m);

/* Rotates the first `dims` columns of each head. cos, sin: [positions][dims], the first half of the sines negated. */
typedef struct {
    Numbers x;
    const float *cos, *sin;
    long heads, dim, dims;
} Turn;

void pagewire_turn(const Turn *a, const int64_t *positions, long m);

/* x · (1 + scale · log(1 + ⌊(position + shift) / every⌋)) */
void pagewire_heat(Numbers x, long width, float scale, long every, long shift, const int64_t *positions, long m);
