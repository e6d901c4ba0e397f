/* Runs a list of operations over the tokens of a step in one call: most of a decoder's pass. An operation reads and
 * writes registers, which are columns of one array for all tokens. */
#include "experts.h"

void pagewire_rms_norm(const float *, const float *, const float *, float, float *, float *, long, long);
void pagewire_rotary(float *, long, const float *, const float *, float, const float *, const float *, const int64_t *,
                     long, long, long, long);
void pagewire_write_kv(const float *, long, const float *, long, char *, char *, const int64_t *, long, long, long, long,
                       int);

/* Columns of a register: at offset · tokens + first, rows `stride` apart. */
typedef struct {
    long offset, first, stride;
} Columns;

enum OpKind {
    OP_EMBED,  /* out = rows of the matrix for the ids */
    OP_NORM,   /* out = RMS norm of in, whole registers */
    OP_PRODUCT, /* out = in · matrixᵀ by `epilogue` */
    OP_ROTATE, /* norms and rotates heads and kv_heads that follow each other, in place; `weight`s or 0 */
    OP_ATTEND, /* in: queries, keys, values, next to each other */
    OP_EXPERTS, /* out = or += the experts of in; in2: the router's product */
    OP_ADD,    /* out += in, whole registers */
};

typedef struct {
    long kind, epilogue;
    Columns in, in2, out;
    long width; /* of a row of OP_NORM, OP_ADD */
    long heads, kv_heads, dim;
    long table; /* of OP_ATTEND */
    const Matrix *matrix;
    const Experts *experts;
    const float *weight, *weight2, *cos, *sin;
    const Pages *pages;
    float eps;
} Operation;

typedef struct {
    const int64_t *ids, *positions; /* [tokens] */
    const int64_t *slots;           /* [tables][tokens] */
    const int32_t *tables;          /* [tables][rows][table_stride] */
    const int64_t *contexts, *counts; /* [rows] */
    long tokens, rows, table_stride;
    float *work; /* the registers */
} Step;

static float *at(const Step *s, Columns c)
{
    return s->work + c.offset * s->tokens + c.first;
}

static void attend(const Operation *o, const Step *s)
{
    const Pages *p = o->pages;
    long stride = o->in.stride, kv = p->kv_heads * p->dim;
    const float *query = at(s, o->in), *key = query + p->heads * p->dim, *value = key + kv;
    const int64_t *slots = s->slots + o->table * s->tokens;
    const int32_t *table = s->tables + o->table * s->rows * s->table_stride;
    pagewire_write_kv(key, stride, value, stride, (char *)p->keys, (char *)p->values, slots, s->tokens, kv,
                      p->block_size, p->page_stride, p->bf16);
    pagewire_attend(p, query, stride, table, s->table_stride, s->contexts, s->counts, at(s, o->out), s->rows);
}

static void mix(const Operation *o, const Step *s)
{
    const Experts *e = o->experts;
    long m = s->tokens;
    float *weights = pagewire_scratch(SLOT_ROUTES, m * e->top_k * 8);
    int32_t *ids = (int32_t *)(weights + m * e->top_k);
    pagewire_route(at(s, o->in2), weights, ids, m, e->num_experts, e->top_k, e->renormalize);
    pagewire_experts(e, weights, ids, at(s, o->in), o->in.stride, at(s, o->out), o->out.stride, m, o->epilogue == ADD);
}

void pagewire_program(const Operation *ops, long count, const Step *s)
{
    long m = s->tokens;
    for (const Operation *o = ops; o < ops + count; o++)
        switch (o->kind) {
        case OP_EMBED:
            pagewire_lookup(o->matrix, s->ids, at(s, o->out), m);
            break;
        case OP_NORM:
            pagewire_rms_norm(at(s, o->in), 0, o->weight, o->eps, 0, at(s, o->out), m, o->width);
            break;
        case OP_PRODUCT:
            pagewire_product(o->matrix, at(s, o->in), o->in.stride, at(s, o->out), o->out.stride, m, o->epilogue);
            break;
        case OP_ROTATE:
            pagewire_rotary(at(s, o->in), o->in.stride, o->weight, o->weight2, o->eps, o->cos, o->sin, s->positions, m,
                            o->heads, o->kv_heads, o->dim);
            break;
        case OP_ATTEND:
            attend(o, s);
            break;
        case OP_EXPERTS:
            mix(o, s);
            break;
        case OP_ADD: {
            const float *x = at(s, o->in);
            float *y = at(s, o->out);
            for (long i = 0; i < m * o->width; i++)
                y[i] += x[i];
            break;
        }
        }
}
