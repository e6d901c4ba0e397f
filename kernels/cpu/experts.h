/* The feed-forward part of a mixture of experts. */
#pragma once
#include "product.h"
#include "sums.h"

/* How the scores of experts follow from the router's product, and the weights from the scores. */
enum Score {
    SCORE_SOFTMAX, /* over all experts */
    SCORE_SIGMOID,
    SCORE_CHOSEN,  /* the product itself; weights are e^score, to be divided by their sum */
    SCORE_NEAR,    /* the product itself; a weight is the softmax over those within 2 · jitter that are not chosen yet */
};

/* The top_k best are chosen by score + correction, first the top_groups best groups of experts. Then weights are divided
 * by their sum and multiplied by `scale` and the expert's own scale. */
typedef struct {
    const float *correction, *expert_scale; /* [num], or 0 */
    long num, top_k, score, groups, top_groups;
    long by_two; /* a group's score is the sum of its two best, else its best */
    long renormalize, adds_floor; /* the sum is sum + floor, else at least the floor */
    float floor, scale, jitter;
} Router;

typedef struct {
    const Matrix *gate_up, *down; /* [num_experts] of [2 · inner or inner][in] and [out][inner] */
    Router router;
    long num_experts;  /* that have matrices; the router's others return their input */
    long scales_input; /* weights are multiplied with inputs, not with results */
    long map, act;     /* where gate_up is not gated: of `Map`, from its product to the input of down */
    float alpha, limit;
    float zero_scale;  /* of the inputs that the router's others return */
    const int32_t *places; /* of each of the router's experts: slot, turn, turns; 0: the slots are the router's experts */
    int64_t *load;         /* [num_experts]: how many assignments each slot has had */
    const int32_t *holders; /* of each of the router's experts, 1 + 2 · num_ranks numbers: how many ranks have it, and the
                               rank and slot of each; 0 ranks: it has no matrices */
    long num_ranks;
} Experts;

/* Each row's experts and their weights, best first (of equals the first). logits: m rows of num, stride apart; weights,
 * ids: [m][top_k]. */
void pagewire_route(const Router *a, const float *logits, long stride, float *weights, int32_t *ids, long m);

/* Turns the ids of experts into the slots of this rank's matrices: the slot where positions mod turns is the turn, and
 * else -1, for another rank computes it. Slots from num_experts on are the router's others. ids: [m][top_k]; positions:
 * [m], of the rows in their sequences. */
void pagewire_place(const Experts *e, int32_t *ids, const int64_t *positions, long m);

/* y = Σ weight · down(act(gate(x)) · up(x)) over each row's slots, without those that are -1; with `adds` it is added to
 * y. x: m rows, x_stride apart. */
void pagewire_experts(const Experts *e, const float *weights, const int32_t *ids, const float *x, long x_stride,
                      float *y, long y_stride, long m, long adds);

/* The same for ranks that have tokens of their own and share out the experts, each of which a rank has in one of its slots.
 * weights, ids: of pagewire_route. positions: [m]; the ranks that have the same expert take turns by it. most: tokens of
 * all ranks. All ranks call this; m may be 0. Returns 0 if it gave up waiting for another rank. */
int pagewire_share_experts(const Experts *e, const Sum *ranks, const float *weights, const int32_t *ids,
                           const int64_t *positions, const float *x, long x_stride, float *y, long y_stride, long m,
                           long most, long adds);
