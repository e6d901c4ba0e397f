/* The feed-forward part of a mixture of experts. */
#pragma once
#include "product.h"

typedef struct {
    const Matrix *gate_up, *down; /* [num_experts] of [2 · inner][hidden], gated, and [hidden][inner] */
    long num_experts, top_k, renormalize;
} Experts;

/* The softmax over all experts at the best top_k, best first (of equals the first); with `renormalize` divided by their
 * sum. logits: [m][num_experts]; weights, ids: [m][top_k]. */
void pagewire_route(const float *logits, float *weights, int32_t *ids, long m, long num_experts, long top_k,
                    long renormalize);

/* y = Σ weight · down(silu(gate(x)) · up(x)) over each row's experts; with `adds` it is added to y. x: m rows of
 * hidden, x_stride apart. */
void pagewire_experts(const Experts *e, const float *weights, const int32_t *ids, const float *x, long x_stride,
                      float *y, long y_stride, long m, long adds);
