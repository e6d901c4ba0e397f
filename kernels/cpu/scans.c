/* The scans of recurrent mixers; scans.h says what each computes.
 *
 * The columns of a state do not depend on each other, so a vector holds columns, and columns are taken in blocks that stay
 * in the L1 cache for some tokens. A column's steps are the same in a block of any width.
 */
#include <math.h>

#include "scans.h"

enum { TOKENS = 16 };                    /* whose inputs are prepared at once */
enum { BLOCK = 4, WIDTH = NATIVE / 4 };  /* registers of a block of columns; columns of a register */
enum { SLOT_INPUTS = SLOT_WEIGHTS, SLOT_SPARE = SLOT_PARTS }; /* no product runs at the same time */

/* log(1 + e^x) within 3 ulp, and NaN of NaN: the greater of x and 0, and log(1 + y) = 2 atanh(y / (2 + y)) of
 * y = e^-|x|, by its series. */
static vf softplus16(vf x)
{
    vf y = exp16(select16(x > 0.0f, -x, x)), z = y / (y + 2.0f), w = z * z;
    vf sum = (vf){0} + 1.0f / 15;
    sum = sum * w + 1.0f / 13;
    sum = sum * w + 1.0f / 11;
    sum = sum * w + 1.0f / 9;
    sum = sum * w + 1.0f / 7;
    sum = sum * w + 1.0f / 5;
    sum = sum * w + 1.0f / 3;
    sum = sum * w + 1.0f;
    return select16(x != x, x, select16(x > 0.0f, x, (vf){0}) + 2.0f * z * sum);
}

/* The inputs of a head at one token. */
typedef struct {
    const float *query, *key, *decay; /* [inner]; of a linear scan decay[0] only */
    float scale;                      /* beta; of a linear scan d */
} Inputs;

static inline __attribute__((always_inline)) void delta_step(int n, float *state, long stride, long inner,
                                                             const Inputs *t, const float *v, float *out)
{
    const float *queries = t->query, *keys = t->key, *decays = t->decay;
    nf sum[BLOCK] = {{0}}, change[BLOCK], result[BLOCK] = {{0}};
    for (long i = 0; i < inner; i++) {
        nf_any *row = (nf_any *)(state + i * stride);
        float decay = decays[i], key = keys[i];
        UNROLL for (int j = 0; j < n; j++) {
            nf s = row[j] * decay;
            row[j] = s;
            sum[j] += s * key;
        }
    }
    UNROLL for (int j = 0; j < n; j++)
        change[j] = (((const nf_any *)v)[j] - sum[j]) * t->scale;
    for (long i = 0; i < inner; i++) {
        nf_any *row = (nf_any *)(state + i * stride);
        float key = keys[i], query = queries[i];
        UNROLL for (int j = 0; j < n; j++) {
            nf s = row[j] + change[j] * key;
            row[j] = s;
            result[j] += s * query;
        }
    }
    UNROLL for (int j = 0; j < n; j++)
        ((nf_any *)out)[j] = result[j];
}

static inline __attribute__((always_inline)) void linear_step(int n, float *state, long stride, long inner,
                                                              const Inputs *t, const float *v, float *out)
{
    const float *queries = t->query, *keys = t->key;
    nf x[BLOCK], result[BLOCK] = {{0}};
    float decay = t->decay[0];
    UNROLL for (int j = 0; j < n; j++)
        x[j] = ((const nf_any *)v)[j];
    for (long i = 0; i < inner; i++) {
        nf_any *row = (nf_any *)(state + i * stride);
        float key = keys[i], query = queries[i];
        UNROLL for (int j = 0; j < n; j++) {
            nf s = row[j] * decay + x[j] * key;
            row[j] = s;
            result[j] += s * query;
        }
    }
    UNROLL for (int j = 0; j < n; j++)
        ((nf_any *)out)[j] = result[j] + x[j] * t->scale;
}

typedef void (*Step)(float *state, long stride, long inner, const Inputs *t, const float *v, float *out);

#define STEPS(KIND)                                                                                                    \
    static void KIND##_block(float *state, long stride, long inner, const Inputs *t, const float *v, float *out)       \
    {                                                                                                                  \
        KIND##_step(BLOCK, state, stride, inner, t, v, out);                                                           \
    }                                                                                                                  \
    static void KIND##_one(float *state, long stride, long inner, const Inputs *t, const float *v, float *out)         \
    {                                                                                                                  \
        KIND##_step(1, state, stride, inner, t, v, out);                                                               \
    }
STEPS(delta)
STEPS(linear)

/* Some tokens through the state of a head, [inner][dim]. v, out: of the first token. */
static void run_columns(Step block, Step one, float *state, long inner, long dim, const Inputs *inputs, long count,
                        View v, View out)
{
    long c = 0;
    for (; c + BLOCK * WIDTH <= dim; c += BLOCK * WIDTH)
        for (long t = 0; t < count; t++)
            block(state + c, dim, inner, inputs + t, v.x + t * v.stride + c, out.x + t * out.stride + c);
    for (; c + WIDTH <= dim; c += WIDTH)
        for (long t = 0; t < count; t++)
            one(state + c, dim, inner, inputs + t, v.x + t * v.stride + c, out.x + t * out.stride + c);
    if (c == dim)
        return;
    long rest = (dim - c) * 4; /* bytes of the last columns, which do not fill a register */
    float *spare = pagewire_scratch(SLOT_SPARE, inner * NATIVE), x[WIDTH] = {0}, y[WIDTH];
    memset(spare, 0, inner * NATIVE);
    for (long i = 0; i < inner; i++)
        memcpy(spare + i * WIDTH, state + i * dim + c, rest);
    for (long t = 0; t < count; t++) {
        memcpy(x, v.x + t * v.stride + c, rest);
        one(spare, WIDTH, inner, inputs + t, x, y);
        memcpy(out.x + t * out.stride + c, y, rest);
    }
    for (long i = 0; i < inner; i++)
        memcpy(state + i * dim + c, spare + i * WIDTH, rest);
}

static inline View part(View v, long token, long column)
{
    return (View){v.x + token * v.stride + column, v.stride};
}

/* out = x * by / |x|. */
static void scale_to_length(const float *x, float by, float *out, long n)
{
    vf squares = {0};
    float sum = 0;
    for (long i = 0; i < n; i += LANES) {
        vf some = load_some(x + i, n - i);
        squares += some * some;
    }
    for (int l = 0; l < LANES; l++)
        sum += squares[l];
    by /= sqrtf(sum + 1e-6f);
    for (long i = 0; i < n; i++)
        out[i] = x[i] * by;
}

static void delta_advance(const void *about, float *state, long first, long count, long head)
{
    const ScanDelta *a = about;
    long n = a->key_dim, key_head = head * a->key_heads / a->value_heads;
    float *memory = pagewire_scratch(SLOT_INPUTS, TOKENS * 3 * n * 4);
    Inputs inputs[TOKENS];
    for (long done = 0; done < count; done += TOKENS) {
        long num = count - done < TOKENS ? count - done : TOKENS;
        for (long t = 0; t < num; t++) {
            long token = first + done + t;
            float *q = memory + t * 3 * n, *k = q + n, *decay = k + n;
            scale_to_length(part(a->q, token, key_head * n).x, 1 / sqrtf(n), q, n);
            scale_to_length(part(a->k, token, key_head * n).x, 1, k, n);
            long at = a->per_channel ? head * n : head, numbers = a->per_channel ? n : 1;
            for (long i = 0; i < numbers; i += LANES) {
                vf raw = load_some(part(a->decay, token, at + i).x, numbers - i);
                raw += load_some(a->dt_bias + at + i, numbers - i);
                store_some(exp_nan16(softplus16(raw) * a->a[head]), decay + i, numbers - i);
            }
            for (long i = numbers; i < n; i++)
                decay[i] = decay[0];
            float beta = sigmoid16((vf){0} + *part(a->beta, token, head).x)[0] * a->beta_scale;
            inputs[t] = (Inputs){q, k, decay, beta};
        }
        long at = head * a->value_dim;
        run_columns(delta_block, delta_one, state, n, a->value_dim, inputs, num, part(a->v, first + done, at),
                    part(a->out, first + done, at));
    }
}

void pagewire_scan_delta(const ScanDelta *a, const StateRows *rows)
{
    pagewire_run_units(delta_advance, a, rows, &a->tiles, a->value_heads, a->key_dim * a->value_dim);
}

static void mamba2_advance(const void *about, float *state, long first, long count, long head)
{
    const ScanMamba2 *a = about;
    long n = a->state_dim, group = head * a->groups / a->heads, at = head * a->head_dim;
    float *memory = pagewire_scratch(SLOT_INPUTS, TOKENS * (n + 1) * 4);
    Inputs inputs[TOKENS];
    for (long done = 0; done < count; done += TOKENS) {
        long num = count - done < TOKENS ? count - done : TOKENS;
        for (long t = 0; t < num; t++) {
            long token = first + done + t;
            float *key = memory + t * (n + 1), *decay = key + n;
            float raw = *part(a->dt, token, head).x + (a->dt_bias ? a->dt_bias[head] : 0);
            float dt = softplus16((vf){0} + raw)[0];
            dt = dt < a->dt_min ? a->dt_min : dt > a->dt_max ? a->dt_max : dt;
            *decay = exp_nan16((vf){0} + dt * a->a[head])[0];
            const float *b = part(a->b, token, group * n).x;
            for (long i = 0; i < n; i++)
                key[i] = dt * b[i];
            inputs[t] = (Inputs){part(a->c, token, group * n).x, key, decay, a->d ? a->d[head] : 0};
        }
        run_columns(linear_block, linear_one, state, n, a->head_dim, inputs, num, part(a->x, first + done, at),
                    part(a->out, first + done, at));
    }
}

void pagewire_scan_mamba2(const ScanMamba2 *a, const StateRows *rows)
{
    pagewire_run_units(mamba2_advance, a, rows, &a->tiles, a->heads, a->state_dim * a->head_dim);
}

static void lightning_advance(const void *about, float *state, long first, long count, long head)
{
    const ScanLightning *a = about;
    long n = a->head_dim, at = head * n;
    Inputs inputs[TOKENS];
    for (long done = 0; done < count; done += TOKENS) {
        long num = count - done < TOKENS ? count - done : TOKENS;
        for (long t = 0; t < num; t++) {
            long token = first + done + t;
            inputs[t] = (Inputs){part(a->q, token, at).x, part(a->k, token, at).x, a->decay + head, 0};
        }
        run_columns(linear_block, linear_one, state, n, n, inputs, num, part(a->v, first + done, at),
                    part(a->out, first + done, at));
    }
}

void pagewire_scan_lightning(const ScanLightning *a, const StateRows *rows)
{
    pagewire_run_units(lightning_advance, a, rows, &a->tiles, a->heads, a->head_dim * a->head_dim);
}

static void mamba1_advance(const void *about, float *state, long first, long count, long group)
{
    const ScanMamba1 *a = about;
    long at = group * LANES, num = a->channels - at < LANES ? a->channels - at : LANES, n = a->state_dim;
    const float *decay = a->a + group * n * LANES;
    vf bias = a->dt_bias ? load_some(a->dt_bias + at, num) : (vf){0};
    vf d = a->d ? load_some(a->d + at, num) : (vf){0};
    for (long token = first; token < first + count; token++) {
        const float *b = part(a->b, token, 0).x, *c = part(a->c, token, 0).x;
        vf x = load_some(part(a->x, token, at).x, num), sum = {0};
        vf dt = softplus16(load_some(part(a->dt, token, at).x, num) + bias);
        for (long i = 0; i < n; i++) {
            vf_any *row = (vf_any *)(state + i * LANES);
            vf s = *row * exp_nan16(*(const vf_any *)(decay + i * LANES) * dt) + dt * b[i] * x;
            *row = s;
            sum += s * c[i];
        }
        store_some(sum + x * d, part(a->out, token, at).x, num);
    }
}

void pagewire_scan_mamba1(const ScanMamba1 *a, const StateRows *rows)
{
    pagewire_run_units(mamba1_advance, a, rows, &a->tiles, (a->channels + LANES - 1) / LANES, a->state_dim * LANES);
}
