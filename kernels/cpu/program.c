/* Runs a list of operations over the tokens of a step in one call: most of a decoder's pass. An operation reads and
 * writes registers, which are columns of one array for all tokens. */
#include "elements.h"
#include "experts.h"
#include "scans.h"

void pagewire_rotary(float *, long, const float *, const float *, float, const float *, const float *, const int64_t *,
                     long, long, long, long);
void pagewire_write_kv(const float *, long, const float *, long, char *, char *, const int64_t *, long, long, long, long,
                       int);

/* Columns of a register: at offset · tokens + first, rows `stride` apart. */
typedef struct {
    long offset, first, stride;
} Columns;

enum OpKind {
    OP_EMBED,   /* out = rows of the matrix for the ids */
    OP_PRODUCT, /* out = in · matrixᵀ by `epilogue` */
    OP_ROTATE,  /* norms and rotates heads and kv_heads that follow each other, in place; weights or 0 */
    OP_ATTEND,  /* in, in2, in3: queries, keys, values */
    OP_EXPERTS, /* out = or += the experts of in; in2: the router's product */
    OP_MAP,     /* out = one of MapKind of in and in2 */
    OP_NORM,    /* out = norm of groups of in */
    OP_TURN,    /* rotates heads of in, in place */
    OP_HEAT,    /* multiplies in by a factor of its position, in place */
    OP_MIX,     /* an operation of recurrent mixers, with columns of its own */
};

enum MixerKind { MIX_CONV, MIX_DELTA, MIX_MAMBA1, MIX_MAMBA2, MIX_LIGHTNING, MIX_NORM };

/* The arguments of one of the functions of scans.h. All begin with views, which become those of the step. */
typedef struct {
    long kind, num_views;
    Columns columns[6];
    union {
        View views[6];
        Conv conv;
        ScanDelta delta;
        ScanMamba1 mamba1;
        ScanMamba2 mamba2;
        ScanLightning lightning;
        GatedNorm norm;
    } about;
} Mixer;

typedef struct {
    long kind, epilogue;
    Columns in, in2, in3, out;
    long width, size, heads, kv_heads, dim, dims;
    long table;           /* of OP_ATTEND */
    long map, act;        /* of OP_MAP; whether OP_NORM is a layer norm */
    long every, shift;    /* of OP_HEAT */
    const Matrix *matrix;
    const Experts *experts;
    const float *weight, *weight2, *cos, *sin; /* weight2: the keys' norm of OP_ROTATE, the biases of OP_NORM */
    const Pages *pages;
    const Mixer *mixer;
    float eps, alpha, beta, limit;
} Operation;

typedef struct {
    const int64_t *ids, *positions; /* [tokens] */
    const int64_t *slots;           /* [tables][tokens] */
    const int32_t *tables;          /* [tables][rows][table_stride] */
    const int64_t *contexts, *counts; /* [rows] */
    long tokens, rows, table_stride;
    float *work; /* the registers */
    const StateRows *states;
} Step;

static float *at(const Step *s, Columns c)
{
    return s->work + c.offset * s->tokens + c.first;
}

static Numbers numbers(const Step *s, Columns c)
{
    return (Numbers){at(s, c), c.stride};
}

static void attend(const Operation *o, const Step *s)
{
    const Pages *p = o->pages;
    const int64_t *slots = s->slots + o->table * s->tokens;
    const int32_t *table = s->tables + o->table * s->rows * s->table_stride;
    pagewire_write_kv(at(s, o->in2), o->in2.stride, at(s, o->in3), o->in3.stride, (char *)p->keys, (char *)p->values,
                      slots, s->tokens, p->kv_heads * p->dim, p->block_size, p->page_stride, p->bf16);
    pagewire_attend(p, at(s, o->in), o->in.stride, table, s->table_stride, s->contexts, s->counts, at(s, o->out),
                    s->rows);
}

static void recur(const Operation *o, const Step *s)
{
    Mixer m = *o->mixer;
    for (long i = 0; i < m.num_views; i++)
        m.about.views[i] = (View){at(s, m.columns[i]), m.columns[i].stride};
    switch (m.kind) {
    case MIX_CONV:
        pagewire_conv(&m.about.conv, s->states);
        break;
    case MIX_DELTA:
        pagewire_scan_delta(&m.about.delta, s->states);
        break;
    case MIX_MAMBA1:
        pagewire_scan_mamba1(&m.about.mamba1, s->states);
        break;
    case MIX_MAMBA2:
        pagewire_scan_mamba2(&m.about.mamba2, s->states);
        break;
    case MIX_LIGHTNING:
        pagewire_scan_lightning(&m.about.lightning, s->states);
        break;
    case MIX_NORM:
        pagewire_gated_norm(&m.about.norm, s->tokens);
        break;
    }
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
        case OP_MAP:
            pagewire_map(&(Map){numbers(s, o->in), numbers(s, o->in2), numbers(s, o->out), o->weight, o->map, o->width,
                                o->act, o->alpha, o->beta, o->limit},
                         m);
            break;
        case OP_NORM:
            pagewire_normalize(&(Normalize){numbers(s, o->in), numbers(s, o->out), o->weight, o->weight2, o->width,
                                            o->size, o->dims, o->act, o->eps},
                               m);
            break;
        case OP_TURN:
            pagewire_turn(&(Turn){numbers(s, o->in), o->cos, o->sin, o->heads, o->dim, o->dims}, s->positions, m);
            break;
        case OP_HEAT:
            pagewire_heat(numbers(s, o->in), o->width, o->alpha, o->every, o->shift, s->positions, m);
            break;
        case OP_MIX:
            recur(o, s);
            break;
        }
}
