/* The feed-forward part of a mixture of experts. The products of all chosen experts are one list of tasks, and experts
 * that no token has chosen are not read.
 *
 * A token's bits depend on no other token: products are row by row, and its experts are added best first.
 */
#include <math.h>
#include <stdlib.h>

#include "experts.h"

typedef struct {
    const float *logits;
    float *weights;
    int32_t *ids;
    long num_experts, top_k, renormalize;
} Route;

static void route_row(const void *about, long row)
{
    const Route *a = about;
    const float *logits = a->logits + row * a->num_experts;
    float *weights = a->weights + row * a->top_k, most = -INFINITY, sum = 0, chosen = 0;
    int32_t *ids = a->ids + row * a->top_k;
    for (long i = 0; i < a->num_experts; i++)
        most = logits[i] > most ? logits[i] : most;
    for (long i = 0; i < a->num_experts; i++)
        sum += expf(logits[i] - most);
    for (long choice = 0; choice < a->top_k; choice++) {
        long best = -1;
        for (long i = 0; i < a->num_experts; i++) {
            int is_taken = 0;
            for (long before = 0; before < choice; before++)
                is_taken |= ids[before] == i;
            if (!is_taken && (best < 0 || logits[i] > logits[best]))
                best = i;
        }
        ids[choice] = (int32_t)best;
        weights[choice] = expf(logits[best] - most) / sum;
        chosen += weights[choice];
    }
    for (long choice = 0; a->renormalize && choice < a->top_k; choice++)
        weights[choice] /= chosen;
}

void pagewire_route(const float *logits, float *weights, int32_t *ids, long m, long num_experts, long top_k,
                    long renormalize)
{
    Route about = {logits, weights, ids, num_experts, top_k, renormalize};
    for (long row = 0; row < m; row++)
        route_row(&about, row);
}

typedef struct {
    const float *parts, *weights;
    const int32_t *places; /* of a token's choices in `parts` */
    float *y;
    long y_stride, hidden, top_k, adds;
} Combine;

static void combine_row(const void *about, long row)
{
    const Combine *a = about;
    float *y = a->y + row * a->y_stride, *total = pagewire_scratch(SLOT_WEIGHTS, a->hidden * 4);
    for (long choice = 0; choice < a->top_k; choice++) {
        const float *part = a->parts + a->places[row * a->top_k + choice] * a->hidden;
        float weight = a->weights[row * a->top_k + choice];
        for (long i = 0; i < a->hidden; i++)
            total[i] = choice ? total[i] + part[i] * weight : part[i] * weight;
    }
    for (long i = 0; i < a->hidden; i++)
        y[i] = a->adds ? y[i] + total[i] : total[i];
}

void pagewire_experts(const Experts *e, const float *weights, const int32_t *ids, const float *x, long x_stride,
                      float *y, long y_stride, long m, long adds)
{
    long hidden = e->down[0].n, inner = e->down[0].k, num = m * e->top_k, count = 0;
    long floats = num * (inner + hidden), ints = 2 * num + e->num_experts + 1;
    float *gated = pagewire_scratch(SLOT_EXPERTS, floats * 4 + ints * 4 + 2 * e->num_experts * sizeof(Product));
    float *parts = gated + num * inner;
    int32_t *tokens = (int32_t *)(parts + num * hidden), *places = tokens + num, *first = places + num;
    Product *gate_up = (Product *)(((uintptr_t)(first + e->num_experts + 1) + 7) / 8 * 8), *down = gate_up + e->num_experts;

    /* A token and one of its experts are an assignment; these are sorted by expert. */
    memset(first, 0, (e->num_experts + 1) * sizeof *first);
    for (long i = 0; i < num; i++)
        first[ids[i] + 1]++;
    for (long i = 0; i < e->num_experts; i++) {
        long rows = first[i + 1], from = first[i];
        first[i + 1] += first[i];
        if (!rows)
            continue;
        gate_up[count] = (Product){&e->gate_up[i], {x, tokens + from, x_stride}, gated + from * inner, inner, rows, SILU_MUL};
        down[count++] = (Product){&e->down[i], {gated + from * inner, 0, inner}, parts + from * hidden, hidden, rows, STORE};
    }
    for (long i = 0; i < num; i++) {
        places[i] = first[ids[i]]++;
        tokens[places[i]] = (int32_t)(i / e->top_k);
    }
    pagewire_products(gate_up, count);
    pagewire_products(down, count);
    pagewire_run(m, combine_row, &(Combine){parts, weights, places, y, y_stride, hidden, e->top_k, adds});
}
