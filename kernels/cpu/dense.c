/* Products of float32 activations with weights in float32 or bfloat16, and of bfloat16 activations with bfloat16
 * weights.
 *
 * With few rows the time goes into reading the weights, so bfloat16 is widened in registers: exact, and half the bytes.
 * With many rows it goes into multiply-adds. A tile of R rows × G groups of 16 columns keeps all sums in registers; a
 * weight is loaded (and widened) once for R rows, and an activation is broadcast once for G groups.
 *
 * Packed weights: columns in groups of 16, the last one padded with zeros. float32: [groups][k][16]. bfloat16:
 * [groups][k / 2][16][2] with k padded to a multiple of 32, so that one 32-bit lane holds two weights of one column
 * that are adjacent in k (the lower one is widened by a shift, the upper one by a mask), and 16 lanes of 16 pairs are
 * a tile of AMX.
 *
 * A sum runs over k in ascending order in all cases: one by one for float32 activations; by the instruction for
 * bfloat16 activations (VDPBF16PS: pair by pair; AMX: as in tiles.h, 32 at a time), or one by one where there is none.
 */
#include "dot.h"
#include "product.h"

/* Prefetch distance, across the end into the next groups: the hardware prefetcher restarts with every group. */
enum { AHEAD = 64 };

enum { MANY = 6 }; /* with more panels than this, weights are widened once for all of them */

#define ADD_F32(SUM, W, X, R, I) SUM += (nf)(W) * ((const float *)x)[k * R + I];
#define ADD_EVEN(SUM, W, X, R, I) SUM += (nf)((W) << 16) * ((const float *)x)[2 * k * R + I];
#define ADD_ODD(SUM, W, X, R, I) SUM += (nf)((W) & 0xffff0000u) * ((const float *)x)[2 * k * R + R + I];
#define ADD_DOT(SUM, W, X, R, I) SUM = dot(SUM, W, ((const uint32_t *)x)[k * R + I]);
#define ADD_NONE(SUM, W, X, R, I)

/* One panel of R rows and the groups [0, G) from w on; a step reads one word of 32 bits of each column. Meanwhile `fetch`
 * bytes from `next` on are brought into the L2 cache. */
#define TILE(NAME, R, G, FIRST, SECOND)                                                                                \
    static void NAME(const void *x, const char *w, long words, long group_bytes, const char *next, long fetch,         \
                     vf *out, long out_stride)                                                                         \
    {                                                                                                                  \
        enum { N = G * PARTS };                                                                                        \
        nf sum[R][N] = {{{0}}};                                                                                        \
        const char *middle = next + fetch / 2;                                                                         \
        long pace = (fetch / 2 + words - 1) / words;                                                                   \
        for (long k = 0; k < words; k++) {                                                                             \
            nu word[N];                                                                                                \
            long ahead = (k + AHEAD < words ? k + AHEAD : k + AHEAD + (G - 1) * words) * 64;                           \
            if (R <= 4)                                                                                                \
                UNROLL for (int j = 0; j < G; j++)                                                                     \
                    __builtin_prefetch(w + j * group_bytes + ahead);                                                   \
            else {                                                                                                     \
                __builtin_prefetch(next + k * pace, 0, 2);                                                             \
                __builtin_prefetch(middle + k * pace, 0, 2);                                                           \
            }                                                                                                          \
            UNROLL for (int j = 0; j < N; j++)                                                                         \
                word[j] = *(const nu *)(w + j / PARTS * group_bytes + k * 64 + j % PARTS * NATIVE);                    \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    FIRST(sum[i][j], word[j], x, R, i)                                                                 \
                }                                                                                                      \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    SECOND(sum[i][j], word[j], x, R, i)                                                                \
                }                                                                                                      \
        }                                                                                                              \
        UNROLL for (int i = 0; i < R; i++)                                                                             \
            UNROLL for (int j = 0; j < N; j++)                                                                         \
                ((nf *)(out + i * out_stride))[j] = sum[i][j];                                                         \
    }

typedef void (*Tile)(const void *x, const char *w, long words, long group_bytes, const char *next, long fetch, vf *out,
                     long out_stride);

#define TILES(R)                                                                                                       \
    TILE(f32_##R, R, TALL(R), ADD_F32, ADD_NONE)                                                                       \
    TILE(f32_last_##R, R, 1, ADD_F32, ADD_NONE)                                                                        \
    TILE(bf16_##R, R, TALL(R), ADD_EVEN, ADD_ODD)                                                                      \
    TILE(bf16_last_##R, R, 1, ADD_EVEN, ADD_ODD)
EACH(TILES)
#ifdef HAS_DOT
#define DOT_TILES(R)                                                                                                   \
    TILE(dot_##R, R, TALL(R), ADD_DOT, ADD_NONE)                                                                       \
    TILE(dot_last_##R, R, 1, ADD_DOT, ADD_NONE)
EACH(DOT_TILES)
#define ENTRY(R) {TALL(R), {f32_##R, bf16_##R, dot_##R}, {f32_last_##R, bf16_last_##R, dot_last_##R}},
#else
#define ENTRY(R) {TALL(R), {f32_##R, bf16_##R}, {f32_last_##R, bf16_last_##R}},
#endif
enum { USE_F32, USE_BF16, USE_DOT };
static const struct {
    long groups;
    Tile tile[3], last[3];
} TILES_OF[] = {EACH(ENTRY)};

/* next, fetch: what all tiles together bring into the cache. */
static void sweep(int use, const void *panel, long rows, const char *w, long words, long group_bytes, long from,
                  long to, vf *out, const char *next, long fetch)
{
    long groups = TILES_OF[rows - 1].groups, stride = to - from;
    fetch /= stride;
    for (; from + groups <= to; from += groups, out += groups, next += groups * fetch)
        TILES_OF[rows - 1].tile[use](panel, w + from * group_bytes, words, group_bytes, next, groups * fetch, out,
                                     stride);
    for (; from < to; from++, out++, next += fetch)
        TILES_OF[rows - 1].last[use](panel, w + from * group_bytes, words, group_bytes, next, fetch, out, stride);
}

void pagewire_dense_sums(const float *panel, long rows, const char *w, long k, long group_bytes, long from, long to,
                         vf *out, int bf16)
{
    sweep(bf16 ? USE_BF16 : USE_F32, panel, rows, w, bf16 ? k / 2 : k, group_bytes, from, to, out, panel, 0);
}

void pagewire_interleave(const float *const *rows, long count, long words, long padded_words, float *out)
{
    typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
    typedef double v2 __attribute__((vector_size(16))); /* two floats per element */
    long i = 0, fours = words / 4 * 4;
    for (; i + 4 <= count; i += 4) {
        const float *a_row = rows[i], *b_row = rows[i + 1], *c_row = rows[i + 2], *d_row = rows[i + 3];
        float *to = out + i;
        for (long j = 0; j < fours; j += 4, to += 4 * count) {
            v4 a = *(const v4 *)(a_row + j), b = *(const v4 *)(b_row + j);
            v4 c = *(const v4 *)(c_row + j), d = *(const v4 *)(d_row + j);
            v2 ab0 = (v2)__builtin_shufflevector(a, b, 0, 4, 1, 5), ab2 = (v2)__builtin_shufflevector(a, b, 2, 6, 3, 7);
            v2 cd0 = (v2)__builtin_shufflevector(c, d, 0, 4, 1, 5), cd2 = (v2)__builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(v4 *)to = (v4)__builtin_shufflevector(ab0, cd0, 0, 2);
            *(v4 *)(to + count) = (v4)__builtin_shufflevector(ab0, cd0, 1, 3);
            *(v4 *)(to + 2 * count) = (v4)__builtin_shufflevector(ab2, cd2, 0, 2);
            *(v4 *)(to + 3 * count) = (v4)__builtin_shufflevector(ab2, cd2, 1, 3);
        }
    }
    for (long row = 0; row < count; row++)
        for (long j = row < i ? fours : 0; j < words; j++)
            out[j * count + row] = rows[row][j];
    memset(out + words * count, 0, (padded_words - words) * count * 4);
}

static void row_pointers(const Activations *a, long first, long rows, const float **out)
{
    for (long i = 0; i < rows; i++)
        out[i] = row_of(a, first + i);
}

/* float32 activations. */

static long f32_panel_bytes(const Matrix *w, long rows)
{
    return rows * padded(w->k, 2) * 4;
}

static void f32_pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    const float *pointers[MR];
    row_pointers(a, first, rows, pointers);
    pagewire_interleave(pointers, rows, w->k, padded(w->k, 2), panel);
}

static const char *f32_prepare(const Matrix *w, long from, long to, long num_panels)
{
    (void)to, (void)num_panels;
    return w->w + from * w->k * 64;
}

static void f32_sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                     long to, vf *out)
{
    (void)num_panels;
    sweep(USE_F32, panel, rows, weights, w->k, w->k * 64, 0, to - from, out, panel, 0);
}

const KindOps pagewire_f32 = {MR, f32_panel_bytes, f32_pack, f32_prepare, f32_sums, WIDE};

/* For many panels it is faster to widen weights once than in every tile, and they stay cached. */
static const char *bf16_prepare(const Matrix *w, long from, long to, long num_panels)
{
    long pairs = padded(w->k, PADDED) / 2;
    const char *packed = w->w + from * pairs * 64;
    if (num_panels <= MANY)
        return packed;
    long used = (w->k + 1) / 2;
    vu *wide = pagewire_scratch(SLOT_WEIGHTS, (to - from) * used * 128);
    for (long group = 0; group < to - from; group++) {
        const vu *in = (const vu *)(packed + group * pairs * 64);
        vu *out = wide + group * used * 2;
        for (long i = 0; i < used; i++) {
            out[2 * i] = in[i] << 16;
            out[2 * i + 1] = in[i] & 0xffff0000u;
        }
    }
    return (const char *)wide;
}

static void bf16_sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                      long to, vf *out)
{
    long used = (w->k + 1) / 2;
    if (num_panels > MANY)
        sweep(USE_F32, panel, rows, weights, 2 * used, used * 128, 0, to - from, out, panel, 0);
    else
        sweep(USE_BF16, panel, rows, weights, used, padded(w->k, PADDED) * 32, 0, to - from, out, panel, 0);
}

const KindOps pagewire_bf16 = {MR, f32_panel_bytes, f32_pack, bf16_prepare, bf16_sums, WIDE};

/* bfloat16 activations. */

/* Rounds a row, padded with zeros to `padded_k`. */
static void round_row(const float *x, long k, long padded_k, char *out)
{
    long i = 0;
    for (; i + LANES <= k; i += LANES)
        round_bf16(*(const vf_any *)(x + i), out + 2 * i);
    for (; i < padded_k; i += LANES) {
        vf rest = {0};
        if (i < k)
            memcpy(&rest, x + i, (k - i) * 4);
        round_bf16(rest, out + 2 * i);
    }
}

static const char *dot_prepare(const Matrix *w, long from, long to, long num_panels)
{
    (void)to, (void)num_panels;
    return w->w + from * padded(w->k, PADDED) * 32;
}

#if defined(PAGEWIRE_AMX)
/* A panel is one or two tiles high: [tiles][k / 32][16 rows][32]. Rows that are not there are zero. */
static long dot_panel_bytes(const Matrix *w, long rows)
{
    return padded(rows, TILE_ROWS) * padded(w->k, PADDED) * 2;
}

static void dot_pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    long kp = padded(w->k, PADDED), whole = w->k / 32;
    for (long i = 0; i < padded(rows, TILE_ROWS); i++) {
        char *to = (char *)panel + i / TILE_ROWS * TILE_ROWS * kp * 2 + i % TILE_ROWS * 64;
        const float *x = i < rows ? row_of(a, first + i) : 0;
        for (long k = 0; k < kp / 32; k++)
            if (!x)
                memset(to + k * TILE_BYTES, 0, 64);
            else
                round_row(x + k * 32, k < whole ? 32 : w->k - k * 32, 32, to + k * TILE_BYTES);
    }
}

static void dot_sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                     long to, vf *out)
{
    (void)num_panels;
    long steps = padded(w->k, PADDED) / 32, stride = (to - from) * 64;
    const char *low = panel, *high = low + steps * TILE_BYTES;
    char *y = (char *)out;
    for (long g = 0; g < to - from; g += 2) {
        const char *b0 = weights + g * steps * TILE_BYTES, *b1 = b0 + steps * TILE_BYTES;
        int has_second = g + 1 < to - from;
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        if (rows > TILE_ROWS && has_second) {
            for (long k = 0; k < steps; k++) {
                tile_load(4, low + k * TILE_BYTES, 64);
                tile_load(6, b0 + k * TILE_BYTES, 64);
                tile_dot_bf16(0, 4, 6);
                tile_load(7, b1 + k * TILE_BYTES, 64);
                tile_dot_bf16(1, 4, 7);
                tile_load(5, high + k * TILE_BYTES, 64);
                tile_dot_bf16(2, 5, 6);
                tile_dot_bf16(3, 5, 7);
            }
        } else {
            for (long k = 0; k < steps; k++) {
                tile_load(4, low + k * TILE_BYTES, 64);
                tile_load(6, b0 + k * TILE_BYTES, 64);
                tile_dot_bf16(0, 4, 6);
                if (has_second) {
                    tile_load(7, b1 + k * TILE_BYTES, 64);
                    tile_dot_bf16(1, 4, 7);
                }
                if (rows > TILE_ROWS) {
                    tile_load(5, high + k * TILE_BYTES, 64);
                    tile_dot_bf16(2, 5, 6);
                }
            }
        }
        tile_store(0, y + g * 64, stride);
        if (has_second)
            tile_store(1, y + (g + 1) * 64, stride);
        if (rows > TILE_ROWS) {
            tile_store(2, y + TILE_ROWS * stride + g * 64, stride);
            if (has_second)
                tile_store(3, y + TILE_ROWS * stride + (g + 1) * 64, stride);
        }
    }
}

const KindOps pagewire_dot = {2 * TILE_ROWS, dot_panel_bytes, dot_pack, dot_prepare, dot_sums, 2};
#else
static void dot_pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    long kp = padded(w->k, PADDED);
#ifdef HAS_DOT
    char *lines = pagewire_scratch(SLOT_WEIGHTS, rows * kp * 2);
    const float *pointers[MR];
    for (long i = 0; i < rows; i++) {
        round_row(row_of(a, first + i), w->k, kp, lines + i * kp * 2);
        pointers[i] = (const float *)(lines + i * kp * 2);
    }
    pagewire_interleave(pointers, rows, kp / 2, kp / 2, panel);
#else
    float *lines = pagewire_scratch(SLOT_WEIGHTS, rows * kp * 6);
    char *halves = (char *)(lines + rows * kp);
    const float *pointers[MR];
    for (long i = 0; i < rows; i++) {
        round_row(row_of(a, first + i), w->k, kp, halves);
        for (long j = 0; j < kp; j += LANES)
            *(vf_any *)(lines + i * kp + j) = load16(halves, j, 1);
        pointers[i] = lines + i * kp;
    }
    pagewire_interleave(pointers, rows, padded(w->k, 2), padded(w->k, 2), panel);
#endif
}

#ifdef HAS_DOT
static long dot_panel_bytes(const Matrix *w, long rows)
{
    return rows * padded(w->k, PADDED) * 2;
}

static void dot_sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                     long to, vf *out)
{
    (void)num_panels;
    long pairs = padded(w->k, PADDED) / 2;
    sweep(USE_DOT, panel, rows, weights, pairs, pairs * 64, 0, to - from, out, panel, 0);
}

static void dot_sums_ahead(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels,
                           long from, long to, vf *out, long index, long next)
{
    long pairs = padded(w->k, PADDED) / 2, part = (to - from) * pairs * 64 / num_panels;
    sweep(USE_DOT, panel, rows, weights, pairs, pairs * 64, 0, to - from, out, w->w + next * pairs * 64 + index * part,
          part);
}

const KindOps pagewire_dot = {MR, dot_panel_bytes, dot_pack, dot_prepare, dot_sums, WIDE, dot_sums_ahead};
#else
const KindOps pagewire_dot = {MR, f32_panel_bytes, dot_pack, bf16_prepare, bf16_sums, WIDE};
#endif
#endif
