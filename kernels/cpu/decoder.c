/* All layers of a decoder in one call: the operations of `engine.models.decoder.Body` by the same functions in the same
 * order, so that both give the same bits. It saves the time between the operations: about a hundred calls per layer
 * from Python, which is most of a small model's step.
 */
#include "experts.h"

void pagewire_rms_norm(const float *, const float *, const float *, float, float *, float *, long, long);
void pagewire_rotary(float *, long, const float *, const float *, float, const float *, const float *, const int64_t *,
                     long, long, long, long);
void pagewire_write_kv(const float *, long, const float *, long, char *, char *, const int64_t *, long, long, long, long,
                       int);

typedef struct {
    Matrix qkv, o, gate_up, down;
    Matrix router;
    const Experts *experts; /* instead of gate_up and down; or 0 */
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    Pages pages;
} Layer;

typedef struct {
    Matrix embed;
    const Layer *layers;
    const float *norm, *cos, *sin;
    long num_layers, hidden;
    float eps;
} Decoder;

typedef struct {
    const int64_t *ids, *positions, *slots; /* [tokens] */
    const int32_t *table;
    const int64_t *contexts, *counts; /* [rows] */
    long tokens, rows, table_stride;
    float *work; /* tokens · (2 · hidden + qkv.n + heads · dim + the widest of a feed-forward part) */
} Step;

/* out: [tokens][hidden], after the last norm. */
void pagewire_decoder(const Decoder *d, const Step *s, float *out)
{
    const Pages *shape = &d->layers[0].pages;
    long m = s->tokens, h = d->hidden, dim = shape->dim, heads = shape->heads, kv_heads = shape->kv_heads;
    long stride = (heads + 2 * kv_heads) * dim, attended_stride = heads * dim;
    float *residual = s->work, *normed = residual + m * h, *states = normed + m * h;
    float *attended = states + m * stride, *gated = attended + m * attended_stride;

    pagewire_lookup(&d->embed, s->ids, residual, m);
    for (long i = 0; i < d->num_layers; i++) {
        const Layer *l = d->layers + i;
        const Pages *p = &l->pages;
        pagewire_rms_norm(residual, 0, l->input_norm, d->eps, 0, normed, m, h);
        pagewire_product(&l->qkv, normed, h, states, stride, m, STORE);
        pagewire_rotary(states, stride, l->q_norm, l->k_norm, d->eps, d->cos, d->sin, s->positions, m, heads, kv_heads,
                        dim);
        const float *key = states + attended_stride, *value = key + kv_heads * dim;
        pagewire_write_kv(key, stride, value, stride, (char *)p->keys, (char *)p->values, s->slots, m, kv_heads * dim,
                          p->block_size, p->page_stride, p->bf16);
        pagewire_attend(p, states, stride, s->table, s->table_stride, s->contexts, s->counts, attended, s->rows);
        pagewire_product(&l->o, attended, attended_stride, residual, h, m, ADD);
        pagewire_rms_norm(residual, 0, l->post_norm, d->eps, 0, normed, m, h);
        if (l->experts) {
            const Experts *e = l->experts;
            float *weights = gated + m * e->num_experts;
            int32_t *ids = (int32_t *)(weights + m * e->top_k);
            pagewire_product(&l->router, normed, h, gated, e->num_experts, m, STORE);
            pagewire_route(gated, weights, ids, m, e->num_experts, e->top_k, e->renormalize);
            pagewire_experts(e, weights, ids, normed, h, residual, h, m, 1);
        } else {
            pagewire_product(&l->gate_up, normed, h, gated, l->down.k, m, SILU_MUL);
            pagewire_product(&l->down, gated, l->down.k, residual, h, m, ADD);
        }
    }
    pagewire_rms_norm(residual, 0, d->norm, d->eps, 0, out, m, h);
}
