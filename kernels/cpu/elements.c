/* Operations on each number, or each group of adjacent numbers, of some columns of activations. */
#include "elements.h"
#include "rows.h"

static inline vf sigmoid16(vf x)
{
    return 1.0f / (exp16(-x) + 1.0f);
}

static inline vf clamped(vf x, float low, float high)
{
    vf least = (vf){0} + low, most = (vf){0} + high;
    x = select16(x < least, least, x);
    return select16(x > most, most, x);
}

/* The error function, at most 5e-7 off: the rational approximation of Eigen, and exactly 1 beyond 3.925, where it is 1 in
 * float32. */
static inline vf erf16(vf x)
{
    static const float above[] = {2.77068142495902e-08f,  -2.10102402082508e-06f, -5.69250639462346e-05f,
                                  -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f};
    static const float below[] = {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f,
                                  -1.42647390514189e-02f};
    vf z = clamped(x, -4, 4), square = z * z;
    vf p = (vf){0} - 2.72614225801306e-10f, q = (vf){0} - 1.45660718464996e-05f;
    for (int i = 0; i < 6; i++)
        p = p * square + above[i];
    for (int i = 0; i < 4; i++)
        q = q * square + below[i];
    z = z * p / q;
    z = select16(x > 3.925f, (vf){0} + 1.0f, z);
    return select16(x < -3.925f, (vf){0} - 1.0f, z);
}

static inline vf act16(vf x, long act)
{
    switch (act) {
    case ACT_SILU16:
        return silu16(x);
    case ACT_SIGMOID16:
        return sigmoid16(x);
    case ACT_GELU_TANH: /* x / 2 · (1 + tanh(z / 2)) = x / (1 + e^-z) */
        return x / (exp16(x * (x * x * 0.044715f + 1.0f) * -1.5957691216f) + 1.0f);
    case ACT_QUICK_GELU:
        return x / (exp16(x * -1.702f) + 1.0f);
    case ACT_GELU:
        return x * 0.5f * (erf16(x * 0.70710678f) + 1.0f);
    case ACT_RELU:
        return select16(x < 0, (vf){0}, x);
    case ACT_RELU2:
        x = select16(x < 0, (vf){0}, x);
        return x * x;
    case ACT_TANH:
        for (int l = 0; l < LANES; l++)
            x[l] = tanhf(x[l]);
        return x;
    }
    return x;
}

/* The numbers from the i-th on; zeros after the n-th. */
static inline vf some(const float *x, long i, long n)
{
    if (i + LANES <= n)
        return *(const vf_any *)(x + i);
    vf v = {0};
    memcpy(&v, x + i, (n - i) * 4);
    return v;
}

static inline void put_some(float *y, long i, long n, vf v)
{
    memcpy(y + i, &v, (i + LANES <= n ? LANES : n - i) * 4);
}

static inline float *row(Numbers x, long i)
{
    return x.x + i * x.stride;
}

/* The mean of a row and `deviations` standard deviations. */
static float threshold(const float *x, long n, float deviations)
{
    double sum = 0, squares = 0;
    for (long i = 0; i < n; i++)
        sum += x[i];
    for (long i = 0; i < n; i++)
        squares += (x[i] - sum / n) * (x[i] - sum / n);
    return (float)(sum / n + deviations * sqrt(squares / n));
}

static double mean_square(const float *x, long n)
{
    double sum = 0;
    for (long i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum / n;
}

/* What makes the root mean square of x that of y. */
static float matching(const float *x, const float *y, long n, float floor)
{
    double own = mean_square(x, n);
    return (float)sqrt(mean_square(y, n) / (own > floor ? own : floor));
}

static void map_rows(const void *about, long from, long to)
{
    const Map *a = about;
    for (long r = from; r < to; r++) {
        const float *x = row(a->x, r), *y = a->y.x ? row(a->y, r) : 0;
        float *out = row(a->out, r), least = a->kind == MAP_SPARSE ? threshold(x, a->width, a->alpha) : 0;
        float by = a->kind == MAP_MATCH ? matching(x, y, a->width, a->limit) : a->alpha;
        for (long i = 0; i < a->width; i += LANES) {
            vf v = some(x, i, a->width), w = {0};
            switch (a->kind) {
            case MAP_ADD:
                v = v * a->alpha + some(y, i, a->width) * a->beta;
                break;
            case MAP_SCALE:
            case MAP_MATCH:
                v *= by;
                break;
            case MAP_WEIGHT:
                v *= some(a->weight, i, a->width);
                break;
            case MAP_ACT:
                v = act16(v, a->act);
                break;
            case MAP_GLU:
                v = act16(v * a->alpha, a->act) * some(y, i, a->width);
                break;
            case MAP_GLU_CLAMPED:
                v = clamped(v, -INFINITY, a->limit);
                w = clamped(some(y, i, a->width), -a->limit, a->limit);
                v = (w + 1.0f) * v * sigmoid16(v * a->alpha);
                break;
            case MAP_MULTIPLY:
                v *= act16(some(y, i, a->width), a->act);
                break;
            case MAP_MULTIPLY_GROUPS:
                for (int l = 0; l < LANES && i + l < a->width; l++)
                    w[l] = y[(i + l) / a->size];
                v *= act16(w, a->act);
                break;
            case MAP_CLIP:
                v = clamped(v, -a->limit, a->limit);
                break;
            case MAP_SPARSE:
                v = select16(v < least, (vf){0}, v - least);
                break;
            case MAP_XIELU: /* the least of e^x - 1 that transformers computes is that of -1e-6 */
                w = (exp16(clamped(v, -INFINITY, -1e-6f)) - 1.0f - v) * a->beta;
                v = select16(v > 0, v * v * a->alpha, w) + v * 0.5f;
                break;
            }
            put_some(out, i, a->width, v);
        }
    }
}

void pagewire_map(const Map *a, long m)
{
    run_rows(map_rows, a, m, a->width);
}

static void mix_rows(const void *about, long from, long to)
{
    const MixStreams *a = about;
    for (long r = from; r < to; r++)
        for (long k = 0; k < a->num; k++) {
            const float *x = row(a->x, r) + k * a->size, *weights = row(a->weights, r) + k * a->num_others;
            float *out = row(a->out, r) + k * a->size;
            for (long i = 0; i < a->size; i += LANES) {
                vf v = some(x, i, a->size);
                for (long p = 0; p < a->num_others; p++)
                    v += some(row(a->y, r) + p * a->size, i, a->size) * (weights[p] + a->shift);
                put_some(out, i, a->size, v);
            }
        }
}

void pagewire_mix_streams(const MixStreams *a, long m)
{
    run_rows(mix_rows, a, m, a->num * a->num_others * a->size);
}

/* The mean of n numbers, or of the squares of their differences from `mean`, summed in double precision. */
static double mean_of(const float *x, long n, float mean, int is_squared)
{
    typedef double vd __attribute__((vector_size(LANES * 8)));
    vd sums = {0};
    double sum = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vd v = __builtin_convertvector(*(const vf_any *)(x + i), vd) - mean;
        sums += is_squared ? v * v : v;
    }
    for (; i < n; i++)
        sum += is_squared ? ((double)x[i] - mean) * ((double)x[i] - mean) : (double)x[i] - mean;
    for (int l = 0; l < LANES; l++)
        sum += sums[l];
    return sum / n;
}

static void normalize_rows(const void *about, long from, long to)
{
    const Normalize *a = about;
    long size = a->size;
    for (long r = from; r < to; r++)
        for (long g = 0; g < a->width; g += size) {
            const float *x = row(a->x, r) + g;
            float *out = row(a->out, r) + g;
            const float *weight = a->weight ? a->weight + (a->num_weights > size ? g : 0) : 0;
            const float *bias = a->bias ? a->bias + (a->num_weights > size ? g : 0) : 0;
            float mean = 0, by;
            if (a->is_layer) {
                mean = (float)mean_of(x, size, 0, 0);
                by = 1 / sqrtf((float)mean_of(x, size, mean, 1) + a->eps);
            } else {
                by = a->mean.stride ? 1 / sqrtf(*row(a->mean, r) + a->eps) : inverse_rms(x, size, a->eps);
            }
            for (long i = 0; i < size; i += LANES) {
                vf v = (some(x, i, size) - mean) * by;
                if (weight)
                    v *= some(weight, i, size);
                if (bias)
                    v += some(bias, i, size);
                put_some(out, i, size, v);
            }
        }
}

void pagewire_normalize(const Normalize *a, long m)
{
    run_rows(normalize_rows, a, m, a->width);
}

static void mean_squares_rows(const void *about, long from, long to)
{
    const MeanSquares *a = about;
    for (long r = from; r < to; r++) {
        memset(row(a->out, r), 0, a->num * 4);
        row(a->out, r)[a->place] = sum_of_squares(row(a->x, r), a->width) / a->count;
    }
}

void pagewire_mean_squares(const MeanSquares *a, long m)
{
    run_rows(mean_squares_rows, a, m, a->width);
}

typedef struct {
    const Turn *turn;
    const int64_t *positions;
} Turning;

static void turn_rows(const void *about, long from, long to)
{
    const Turn *a = ((const Turning *)about)->turn;
    const int64_t *positions = ((const Turning *)about)->positions;
    long half = a->dims / 2;
    for (long r = from; r < to; r++) {
        const float *c = a->cos + positions[r] * a->dims, *s = a->sin + positions[r] * a->dims;
        for (long h = 0; h < a->heads; h++) {
            float *x = row(a->x, r) + h * a->dim;
            for (long d = 0; d < half; d++) {
                float low = x[d], high = x[d + half];
                x[d] = low * c[d] + high * s[d];
                x[d + half] = high * c[d + half] + low * s[d + half];
            }
        }
    }
}

void pagewire_turn(const Turn *a, const int64_t *positions, long m)
{
    run_rows(turn_rows, &(Turning){a, positions}, m, a->heads * a->dim);
}

void pagewire_heat(Numbers x, long width, float scale, long every, long shift, const int64_t *positions, long m)
{
    for (long r = 0; r < m; r++) {
        float by = 1 + scale * log1pf(floorf((float)(positions[r] + shift) / (float)every));
        for (long i = 0; i < width; i++)
            row(x, r)[i] *= by;
    }
}
