/* Products of float8 e4m3 weights, unpacked a few groups of 16 rows at a time, and then the products of dense.c: as
 * bfloat16 with activations rounded to bfloat16, or as float32 with float32 activations.
 *
 * Packed weights: rows in groups of 16 lanes, [n / 16][k / 2][16][2] with k padded with zeros to a multiple of 32.
 * Scales: float32 [n / 16][⌈k / group⌉][16], one for each row and block of `group` columns. An unpacked weight is
 * value · scale, computed in float32 and rounded once.
 */
#include "product.h"

#if defined(PAGEWIRE_AMX)
#include "tiles.h"
enum { DOT_ROWS = 2 * TILE_ROWS, DOT_GROUPS = 2 };
#else
enum { DOT_ROWS = MR, DOT_GROUPS = WIDE };
#endif

/* 16 numbers of e4m3, in the low bytes. Exponents are 120 less than those of float32; without the leading one, in
 * subnormal numbers, the value is a difference. */
static inline vf e4m3(vu code)
{
    vu bits = (code & 127) << 20;
    vf normal = (vf)(bits + (120u << 23)), subnormal = (vf)(bits + (121u << 23)) - 0x1p-6f;
    vf size = select16((code & 0x78) == 0, subnormal, normal);
    size = select16((code & 127) == 127, (vf)((vu){0} + 0x7fc00000u), size);
    return (vf)((vu)size | (code & 128) << 24);
}

static inline vu bf16_bits(vf x)
{
    vu bits = (vu)x, half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (vu)select16(x != x, (vf)((vu){0} + 0x7fc0), (vf)half);
}

static inline long blocks(const Matrix *w)
{
    return (w->k + w->group - 1) / w->group;
}

/* Calls BODY for each pair of columns [0, `end`) of the lane groups [from, to): `even` and `odd` are the numbers of
 * columns 2i and 2i + 1, which are one vector's halves. A block may begin with an odd column. */
#define EACH_PAIR(END, BODY)                                                                                           \
    for (long g = from; g < to; g++) {                                                                                 \
        typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));                                   \
        const char *in = w->w + g * pairs * 32;                                                                        \
        const float *scales = (const float *)w->scales + g * blocks(w) * LANES;                                        \
        for (long i = 0; i < (END); i++) {                                                                             \
            vu codes = __builtin_convertvector(*(const vh *)(in + i * 32), vu);                                        \
            long second = 2 * i + 1 < w->k ? 2 * i + 1 : w->k - 1;                                                     \
            vf even = e4m3(codes & 255) * *(const vf_any *)(scales + 2 * i / w->group * LANES);                        \
            vf odd = e4m3(codes >> 8) * *(const vf_any *)(scales + second / w->group * LANES);                         \
            BODY                                                                                                       \
        }                                                                                                              \
    }

static const char *bf16_prepare(const Matrix *w, long from, long to, long num_panels)
{
    (void)num_panels;
    long pairs = padded(w->k, PADDED) / 2, used = (w->k + 1) / 2;
    vu *out = pagewire_scratch(SLOT_WEIGHTS, (to - from) * pairs * 64);
    memset(out, 0, used < pairs ? (to - from) * pairs * 64 : 0);
    EACH_PAIR(used, out[(g - from) * pairs + i] = bf16_bits(even) | bf16_bits(odd) << 16;)
    return (const char *)out;
}

static const char *f32_prepare(const Matrix *w, long from, long to, long num_panels)
{
    (void)num_panels;
    long pairs = padded(w->k, PADDED) / 2;
    vf *out = pagewire_scratch(SLOT_WEIGHTS, (to - from) * (w->k + 1) * 64);
    EACH_PAIR((w->k + 1) / 2, {
        vf *to_pair = out + (g - from) * w->k + 2 * i;
        to_pair[0] = even;
        if (2 * i + 1 < w->k)
            to_pair[1] = odd;
    })
    return (const char *)out;
}

static long dot_bytes(const Matrix *w, long rows)
{
    return pagewire_dot.panel_bytes(w, rows);
}

static void dot_pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    pagewire_dot.pack(w, a, first, rows, panel);
}

/* One panel: more could mean that weights were widened beforehand. */
static void dot_sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                     long to, vf *out)
{
    (void)num_panels;
    pagewire_dot.sums(w, panel, rows, weights, 1, from, to, out);
}

static long f32_bytes(const Matrix *w, long rows)
{
    return pagewire_f32.panel_bytes(w, rows);
}

static void f32_pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    pagewire_f32.pack(w, a, first, rows, panel);
}

static void f32_sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                     long to, vf *out)
{
    pagewire_f32.sums(w, panel, rows, weights, num_panels, from, to, out);
}

const KindOps pagewire_fp8 = {DOT_ROWS, dot_bytes, dot_pack, bf16_prepare, dot_sums, DOT_GROUPS};
const KindOps pagewire_fp8_f32 = {MR, f32_bytes, f32_pack, f32_prepare, f32_sums, WIDE};

void pagewire_fp8_lookup(const Matrix *w, long row, float *y)
{
    long lane = row % LANES, half = w->n / 2, lane_group = row / LANES;
    if (w->is_gated) {
        lane_group = row % half / LANES * 2 + row / half;
        lane = row % half % LANES;
    }
    const uint8_t *in = (const uint8_t *)w->w + lane_group * padded(w->k, PADDED) * LANES + 2 * lane;
    const float *scales = (const float *)w->scales + lane_group * blocks(w) * LANES + lane;
    for (long k = 0; k < w->k; k++) {
        vu code = {in[k / 2 * 32 + k % 2]};
        y[k] = e4m3(code)[0] * scales[k / w->group * LANES];
        if (w->kind == KIND_FP8) {
            uint32_t bits = bf16_bits((vf){y[k]})[0] << 16;
            memcpy(y + k, &bits, 4);
        }
    }
}

typedef struct {
    const uint8_t *values;
    char *packed;
    long n, k, is_gated, first;
} Pack;

static void pack_lane_group(const void *about, long index)
{
    const Pack *a = about;
    long pairs = padded(a->k, PADDED) / 2;
    for (long l = 0; l < LANES; l++) {
        long row = row_in(a->n, a->is_gated, a->first + index, l);
        const uint8_t *in = a->values + row * a->k;
        char *out = a->packed + index * pairs * 32 + 2 * l;
        for (long i = 0; i < pairs; i++, out += 32) {
            uint8_t pair[2] = {0};
            if (row >= 0 && 2 * i < a->k)
                memcpy(pair, in + 2 * i, 2 * i + 1 < a->k ? 2 : 1);
            memcpy(out, pair, 2);
        }
    }
}

/* values: [n][k] of e4m3 → lane groups [first, last) of the packed weight. */
void pagewire_fp8_pack(const uint8_t *values, char *packed, long n, long k, long is_gated, long first, long last)
{
    pagewire_pack_groups(last - first, LANES * padded(k, PADDED), pack_lane_group,
                         &(Pack){values, packed, n, k, is_gated, first});
}
