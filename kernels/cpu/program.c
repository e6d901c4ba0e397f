/* Runs a list of operations over the tokens of a step in one call: most of a decoder's pass. An operation reads and
 * writes registers, which are columns of one array for all tokens. */
#include "elements.h"
#include "experts.h"
#include "latent.h"
#include "scans.h"
#include "sums.h"

void pagewire_rotary(float *, long, const float *, const float *, float, const float *, const float *, const int64_t *,
                     long, long, long, long);
void pagewire_write_kv(const float *, long, const float *, long, char *, char *, const int64_t *, long, long, long, long,
                       long, int);

enum { LATENT_BYTES = 64 << 20 };

/* Columns of a register: at offset · capacity + first, rows `stride` apart. */
typedef struct {
    long offset, first, stride;
} Columns;

enum OpKind {
    OP_EMBED,   /* out = rows of the matrix for the ids + shift; where it has none, zeros, or its first if is_whole */
    OP_PRODUCT, /* out = in · matrixᵀ by `epilogue` */
    OP_ROTATE,  /* norms and rotates heads and kv_heads that follow each other, in place; weights or 0 */
    OP_ATTEND,  /* in, in2, in3: queries, keys, values; or queries only, without strides of the others */
    OP_EXPERTS, /* out = or += the experts of in; in2: the router's product; with `sum` the ranks share out the experts */
    OP_MAP,     /* out = one of MapKind of in and in2 */
    OP_NORM,    /* out = norm of groups of in; in2: nothing (no stride), or the mean of the squares of in */
    OP_SQUARES, /* out: `size` columns; the one at `shift` = the squares of in / alpha, the others 0 */
    OP_TURN,    /* rotates heads of in, in place */
    OP_HEAT,    /* multiplies in by a factor of its position, in place */
    OP_POSITIONS, /* out += rows of the matrix for the positions + shift */
    OP_LATENT,  /* in, in2, in3: queries, latents, turned keys */
    OP_SUM,     /* in = its sum over the ranks; in is a whole register */
    OP_MIX,     /* an operation of recurrent mixers, with columns of its own */
    OP_STREAMS, /* out = in + the streams of in2 by the weights of in3 */
    OP_SPREAD,  /* out, of all domains' tokens = in at those of this domain, and 0 at the others */
    OP_KEEP,    /* out = this domain's tokens of in, which has all */
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
    long width, size, heads, kv_heads, dim, dims; /* dims: of OP_STREAMS the number of streams of in2 */
    long table;           /* of OP_ATTEND and OP_LATENT */
    long map, act;        /* of OP_MAP; whether OP_NORM is a layer norm */
    long every, shift;    /* of OP_HEAT; shift: of OP_EMBED, OP_POSITIONS and OP_SQUARES, too */
    long is_whole;        /* of OP_EMBED */
    long is_shared;       /* on the tokens of all domains; OP_SPREAD and OP_KEEP are on both */
    const Matrix *matrix;
    const Experts *experts;
    const Latent *latent;
    const float *weight, *weight2, *cos, *sin; /* weight2: the keys' norm of OP_ROTATE, the biases of OP_NORM */
    const Pages *pages;
    const Sum *sum;
    const Mixer *mixer;
    float eps, alpha, beta, limit;
} Operation;

typedef struct Step {
    const int64_t *ids, *positions; /* [tokens] */
    const int64_t *places;          /* [tokens]: the positions' rows of the tables of cosines and sines */
    const int64_t *slots;           /* [tables][tokens] */
    const int32_t *tables;          /* [tables][rows][table_stride] */
    const int64_t *contexts, *counts; /* [rows] */
    long tokens, rows, table_stride;
    float *work; /* the registers */
    const StateRows *states;
    long capacity; /* tokens for which each register has room */
    long first;    /* where the tokens stand among those of all domains */
    const struct Step *shared; /* the tokens of all domains: `positions` is any number of each; or the step itself */
} Step;

static float *at(const Step *s, Columns c)
{
    return s->work + c.offset * s->capacity + c.first;
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
    if (o->in2.stride)
        pagewire_write_kv(at(s, o->in2), o->in2.stride, at(s, o->in3), o->in3.stride, (char *)p->keys,
                          (char *)p->values, slots, s->tokens, p->kv_heads * p->dim, p->kv_heads * p->value_dim,
                          p->block_size, p->page_stride, p->bf16);
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

/* Heads are taken some at a time, so that many tokens in the wide space of latents do not fill the memory. */
static void attend_latent(const Operation *o, const Step *s)
{
    const Latent *a = o->latent;
    const int64_t *slots = s->slots + o->table * s->tokens;
    const int32_t *table = s->tables + o->table * s->rows * s->table_stride;
    long m = s->tokens, num = LATENT_BYTES / (8 * m * a->width);
    num = num < 1 ? 1 : num < a->heads ? num : a->heads;
    float *query = pagewire_scratch(SLOT_STEP, 8 * num * m * a->width), *attended = query + num * m * a->width;
    pagewire_write_latent(a, o->pages, at(s, o->in2), o->in2.stride, at(s, o->in3), o->in3.stride, slots, m);
    for (long h = 0; h < a->heads; h += num) {
        Latent some = *a;
        Pages pages = *o->pages;
        some.keys += h;
        some.values += h;
        some.heads = pages.heads = num < a->heads - h ? num : a->heads - h;
        pagewire_absorb(&some, at(s, o->in) + h * (a->nope + a->rope), o->in.stride, query, m);
        pagewire_attend(&pages, query, some.heads * a->width, table, s->table_stride, s->contexts, s->counts, attended,
                        s->rows);
        pagewire_expand(&some, attended, at(s, o->out) + h * a->value, o->out.stride, m);
    }
}

/* Returns 0 if it gave up waiting for another rank. */
static int mix(const Operation *o, const Step *s)
{
    const Experts *e = o->experts;
    long m = s->tokens, top_k = e->router.top_k, adds = o->epilogue == ADD;
    float *weights = pagewire_scratch(SLOT_STEP, m * top_k * 8);
    int32_t *ids = (int32_t *)(weights + m * top_k);
    pagewire_route(&e->router, at(s, o->in2), o->in2.stride, weights, ids, m);
    if (o->sum)
        return pagewire_share_experts(e, o->sum, weights, ids, s->positions, at(s, o->in), o->in.stride, at(s, o->out),
                                      o->out.stride, m, s->shared->tokens, adds);
    pagewire_place(e, ids, s->positions, m);
    pagewire_experts(e, weights, ids, at(s, o->in), o->in.stride, at(s, o->out), o->out.stride, m, adds);
    return 1;
}

static void mix_streams(const Operation *o, const Step *s)
{
    long num = o->width / o->size;
    pagewire_mix_streams(&(MixStreams){numbers(s, o->in), numbers(s, o->in2), numbers(s, o->in3), numbers(s, o->out),
                                       o->size, num, o->dims, o->alpha},
                         s->tokens);
}

/* The rows of the matrix for ids + shift, [m][k]; for ids that it has no row for zeros, or its first if is_whole.
 * places: memory for m ids. */
static void look_up(const Operation *o, const int64_t *ids, int64_t *places, float *out, long m)
{
    long n = o->matrix->n, k = o->matrix->k;
    for (long i = 0; i < m; i++)
        places[i] = ids[i] + o->shift >= 0 && ids[i] + o->shift < n ? ids[i] + o->shift : 0;
    pagewire_lookup(o->matrix, places, out, m);
    for (long i = 0; i < m && !o->is_whole; i++)
        if (places[i] != ids[i] + o->shift)
            memset(out + i * k, 0, k * 4);
}

static void add_positions(const Operation *o, const Step *s)
{
    long m = s->tokens, k = o->matrix->k;
    int64_t *places = pagewire_scratch(SLOT_STEP, m * (8 + 4 * k));
    Numbers rows = {(float *)(places + m), k}, out = numbers(s, o->out);
    look_up(o, s->positions, places, rows.x, m);
    pagewire_map(&(Map){.x = out, .y = rows, .out = out, .kind = MAP_ADD, .width = k, .alpha = 1, .beta = 1}, m);
}

static void copy_rows(Numbers in, Numbers out, long width, long m)
{
    for (long i = 0; i < m; i++)
        memcpy(out.x + i * out.stride, in.x + i * in.stride, width * 4);
}

static void spread(const Operation *o, const Step *s)
{
    Numbers in = numbers(s, o->in), out = numbers(s, o->out);
    for (long i = 0; i < s->shared->tokens; i++)
        memset(out.x + i * out.stride, 0, o->width * 4);
    out.x += s->first * out.stride;
    copy_rows(in, out, o->width, s->tokens);
}

static void keep(const Operation *o, const Step *s)
{
    Numbers in = numbers(s, o->in);
    in.x += s->first * in.stride;
    copy_rows(in, numbers(s, o->out), o->width, s->tokens);
}

/* Ends early if an exchange between the ranks does; the caller knows that from `gives_up`. */
void pagewire_program(const Operation *ops, long count, const Step *own)
{
    for (const Operation *o = ops; o < ops + count; o++) {
        const Step *s = o->is_shared ? own->shared : own;
        long m = s->tokens;
        if (!m && o->kind != OP_SPREAD && !(o->kind == OP_EXPERTS && o->sum))
            continue; /* a domain without tokens takes part in what is shared */
        switch (o->kind) {
        case OP_EMBED:
            look_up(o, s->ids, pagewire_scratch(SLOT_STEP, m * 8), at(s, o->out), m);
            break;
        case OP_PRODUCT:
            pagewire_product(o->matrix, at(s, o->in), o->in.stride, at(s, o->out), o->out.stride, m, o->epilogue);
            break;
        case OP_ROTATE:
            pagewire_rotary(at(s, o->in), o->in.stride, o->weight, o->weight2, o->eps, o->cos, o->sin, s->places, m,
                            o->heads, o->kv_heads, o->dim);
            break;
        case OP_ATTEND:
            attend(o, s);
            break;
        case OP_EXPERTS:
            if (!mix(o, s))
                return;
            break;
        case OP_MAP:
            pagewire_map(&(Map){numbers(s, o->in), numbers(s, o->in2), numbers(s, o->out), o->weight, o->map, o->width,
                                o->size, o->act, o->alpha, o->beta, o->limit},
                         m);
            break;
        case OP_NORM:
            pagewire_normalize(&(Normalize){numbers(s, o->in), numbers(s, o->out), o->weight, o->weight2, o->width,
                                            o->size, o->dims, o->act, o->eps, numbers(s, o->in2)},
                               m);
            break;
        case OP_SQUARES:
            pagewire_mean_squares(&(MeanSquares){numbers(s, o->in), numbers(s, o->out), o->width, o->size, o->shift,
                                                  o->alpha},
                                  m);
            break;
        case OP_TURN:
            pagewire_turn(&(Turn){numbers(s, o->in), o->cos, o->sin, o->heads, o->dim, o->dims}, s->places, m);
            break;
        case OP_HEAT:
            pagewire_heat(numbers(s, o->in), o->width, o->alpha, o->every, o->shift, s->positions, m);
            break;
        case OP_MIX:
            recur(o, s);
            break;
        case OP_STREAMS:
            mix_streams(o, s);
            break;
        case OP_POSITIONS:
            add_positions(o, s);
            break;
        case OP_LATENT:
            attend_latent(o, s);
            break;
        case OP_SUM:
            if (!pagewire_sum(o->sum, at(s, o->in), m * o->width))
                return;
            break;
        case OP_SPREAD:
            spread(o, s);
            break;
        case OP_KEEP:
            keep(o, s);
            break;
        }
    }
}
