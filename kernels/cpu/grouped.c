/* Products of weights of 8 or 4 bits that share scales in groups of adjacent columns, with activations that are rounded
 * to 8 bits here.
 *
 * A weight is scale · v - offset, where v is an unsigned number, or with a table the table's entry for a number of 4
 * bits. A row's activations in a group are sx · q with signed q, |q| <= 127, so
 *
 *     y = sum over the groups of  sx · (scale · Σ v · q - offset · Σ q)
 *
 * The sums of a group are integers. The terms are added as float32 in the order of the groups, without fused
 * multiply-adds, so that every CPU gives the same bits. With zero points z, offset = scale · z and the term is
 * sx · (scale · (Σ v · q - z · Σ q)), where the parentheses are exact.
 *
 * Packed weights: rows in groups of 16 lanes; the columns of a group are padded with zeros to `padded_group`. 8 bits:
 * [n / 16][k / 4][16][4], which is also a tile of AMX. 4 bits: [n / 16][k / 8][16][4] bytes, in which the low halves
 * are four columns and the high halves the four after them. Scales and offsets: [n / 16][groups][16], so that they are
 * read in the order of the weights.
 */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <math.h>

#include "product.h"

#if defined(PAGEWIRE_AMX)
#include "tiles.h"
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

enum { AHEAD = 32 }; /* prefetch distance in vectors, see dense.c */

/* The columns of a group as they are packed. */
static inline long padded_group(long group)
{
    return padded(group, group >= 64 ? 64 : 8);
}

static inline long packed_k(const Matrix *w)
{
    return w->k / w->group * padded_group(w->group);
}

static inline long lane_group_bytes(const Matrix *w)
{
    return packed_k(w) * LANES * w->bits / 8;
}

/* Dot products of four columns.
 *
 * `Quad` is a word of 32 bits of 16 rows of the weight, ready for `dot`; PARTS: how many words `dot` takes of the
 * activations of four columns; BIAS: what `quad` subtracts from the weights, in excess of which the sums of the
 * activations are needed. */
#if defined(__AVX512VNNI__)
enum { PARTS = 1, BIAS = 0 };
typedef struct {
    vi part[1];
} Quad;
static inline Quad quad(vu word)
{
    return (Quad){{(vi)word}};
}
static inline vi dot(vi sum, Quad w, const uint32_t *x, long stride)
{
    (void)stride;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.part[0], _mm512_set1_epi32(*x));
}
#elif defined(__AVX2__)
/* Without saturation: columns 0 and 2, then 1 and 3, as numbers of 16 bits. */
enum { PARTS = 2, BIAS = 0 };
typedef struct {
    vi part[2];
} Quad;
static inline Quad quad(vu word)
{
    return (Quad){{(vi)(word & 0x00ff00ff), (vi)(word >> 8 & 0x00ff00ff)}};
}
static inline vi pairs(vi w, uint32_t x)
{
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#else
    union {
        vi all;
        __m256i half[2];
    } v = {w};
    __m256i xs = _mm256_set1_epi32(x);
    v.half[0] = _mm256_madd_epi16(v.half[0], xs);
    v.half[1] = _mm256_madd_epi16(v.half[1], xs);
    return v.all;
#endif
}
static inline vi dot(vi sum, Quad w, const uint32_t *x, long stride)
{
    return sum + pairs(w.part[0], x[0]) + pairs(w.part[1], x[stride]);
}
#elif defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
enum { PARTS = 1 };
typedef struct {
    vi part[1];
} Quad;
typedef union {
    vi all;
    int32x4_t sums[4];
    int8x16_t bytes[4];
    uint8x16_t unsigned_bytes[4];
} Quarters;
#if defined(__ARM_FEATURE_MATMUL_INT8)
enum { BIAS = 0 };
static inline Quad quad(vu word)
{
    return (Quad){{(vi)word}};
}
#else
enum { BIAS = 128 }; /* the instruction multiplies signed numbers only */
static inline Quad quad(vu word)
{
    return (Quad){{(vi)(word ^ 0x80808080u)}};
}
#endif
static inline vi dot(vi sum, Quad w, const uint32_t *x, long stride)
{
    (void)stride;
    Quarters s = {sum}, b = {w.part[0]};
    int8x16_t xs = vreinterpretq_s8_u32(vdupq_n_u32(*x));
    UNROLL for (int i = 0; i < 4; i++)
#if defined(__ARM_FEATURE_MATMUL_INT8)
        s.sums[i] = vusdotq_s32(s.sums[i], b.unsigned_bytes[i], xs);
#else
        s.sums[i] = vdotq_s32(s.sums[i], b.bytes[i], xs);
#endif
    return s.all;
}
#else
enum { PARTS = 1, BIAS = 0 };
typedef struct {
    vi part[1];
} Quad;
static inline Quad quad(vu word)
{
    return (Quad){{(vi)word}};
}
static inline vi dot(vi sum, Quad w, const uint32_t *x, long stride)
{
    (void)stride;
    vi v = w.part[0];
    sum += (v & 255) * ((int32_t)(*x << 24) >> 24);
    sum += (v >> 8 & 255) * ((int32_t)(*x << 16) >> 24);
    sum += (v >> 16 & 255) * ((int32_t)(*x << 8) >> 24);
    return sum + (vi)((vu)v >> 24) * ((int32_t)*x >> 24);
}
#endif

/* The 16 entries of a table, one copy for each register's part. */
typedef struct {
    uint8_t entries[64];
} Table;

static inline Table load_table(const uint8_t *table)
{
    Table out;
    for (int i = 0; i < 64; i++)
        out.entries[i] = table ? table[i % 16] : i % 16;
    return out;
}

/* The entries for 64 numbers below 16. */
static inline vu looked_up(const Table *t, vu numbers)
{
#if defined(__AVX512BW__)
    return (vu)_mm512_shuffle_epi8(_mm512_loadu_si512(t->entries), (__m512i)numbers);
#elif defined(__AVX2__)
    union {
        vu all;
        __m256i half[2];
    } v = {numbers};
    __m256i table = _mm256_loadu_si256((const __m256i *)t->entries);
    v.half[0] = _mm256_shuffle_epi8(table, v.half[0]);
    v.half[1] = _mm256_shuffle_epi8(table, v.half[1]);
    return v.all;
#elif defined(__ARM_NEON) && defined(__aarch64__)
    union {
        vu all;
        uint8x16_t part[4];
    } v = {numbers};
    uint8x16_t table = vld1q_u8(t->entries);
    UNROLL for (int i = 0; i < 4; i++)
        v.part[i] = vqtbl1q_u8(table, v.part[i]);
    return v.all;
#else
    uint8_t bytes[64];
    memcpy(bytes, &numbers, 64);
    for (int i = 0; i < 64; i++)
        bytes[i] = t->entries[bytes[i]];
    memcpy(&numbers, bytes, 64);
    return numbers;
#endif
}

/* 16 scales or offsets from the i-th on. */
static inline vf stored16(const void *from, long type, long i)
{
    if (type != STORED_F16)
        return load16(from, i, type == STORED_BF16);
    typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
    vu half = __builtin_convertvector(*(const vh *)((const char *)from + 2 * i), vu);
    vf size = (vf)((half & 0x7fff) << 13) * 0x1p112f; /* exact, also for subnormal numbers */
    return (vf)((vu)size | (half & 0x8000) << 16);
}

static inline vi zeros16(const uint8_t *zeros, long i)
{
    typedef uint8_t vb __attribute__((vector_size(16), aligned(1), may_alias));
    return __builtin_convertvector(*(const vb *)(zeros + i), vi);
}

/* Rounded activations of some rows: for each group and row the scale, the sum of the numbers, and what is to be
 * subtracted from every sum of products, (zero - BIAS) · that sum. */
typedef struct {
    const uint32_t *x; /* [k / 4][PARTS][rows] */
    const float *scales;
    const int32_t *sums, *zeros; /* each [groups][rows] */
} Panel;

#define TERMS(OFFSET)                                                                                                  \
    for (long j = 0; j < columns; j++) {                                                                               \
        long at = ((first + j) * groups + group) * LANES;                                                              \
        vf scale = stored16(w->scales, w->scale_type, at), offset = {0};                                               \
        vi zero = {0};                                                                                                 \
        if (OFFSET == STORED_ZERO_POINTS)                                                                              \
            zero = zeros16(w->offsets, at);                                                                            \
        else if (OFFSET != STORED_ONE)                                                                                 \
            offset = stored16(w->offsets, w->offset_type, at);                                                         \
        for (long i = 0; i < rows; i++) {                                                                              \
            vi sum = sums[i * columns + j] - p->zeros[group * rows + i];                                               \
            if (OFFSET == STORED_ZERO_POINTS)                                                                          \
                sum -= zero * p->sums[group * rows + i];                                                               \
            vf term = __builtin_convertvector(sum, vf) * scale;                                                        \
            if (OFFSET != STORED_ZERO_POINTS && OFFSET != STORED_ONE)                                                  \
                term -= offset * (float)p->sums[group * rows + i];                                                     \
            term *= p->scales[group * rows + i];                                                                       \
            vf *to = out + i * out_stride + j;                                                                         \
            if (group)                                                                                                 \
                term += *to;                                                                                           \
            *to = term;                                                                                                \
        }                                                                                                              \
    }

/* Adds the terms of one group of columns: sums [rows][columns][16] of the lane groups from `first` on. */
static __attribute__((noinline)) void add_terms(const Matrix *w, const Panel *p, long rows, long columns, long first,
                                                long group, const vi *sums, vf *out, long out_stride)
{
    long groups = w->k / w->group;
    if (w->offset_type == STORED_ONE) {
        TERMS(STORED_ONE)
    } else if (w->offset_type == STORED_ZERO_POINTS) {
        TERMS(STORED_ZERO_POINTS)
    } else {
        TERMS(STORED_F32)
    }
}

#define STEP_8(R, G)                                                                                                   \
    Quad low[G];                                                                                                       \
    UNROLL for (int j = 0; j < G; j++)                                                                                 \
        low[j] = quad(*(const vu *)(weights + j * stride + at * 64));                                                  \
    UNROLL for (int i = 0; i < R; i++)                                                                                 \
        UNROLL for (int j = 0; j < G; j++)                                                                             \
            sum[i][j] = dot(sum[i][j], low[j], x + i, R);                                                              \
    x += PARTS * R;

#define STEP_4(R, G)                                                                                                   \
    Quad low[G], high[G];                                                                                              \
    UNROLL for (int j = 0; j < G; j++) {                                                                               \
        vu both = *(const vu *)(weights + j * stride + at * 64);                                                       \
        low[j] = quad(both & 0x0f0f0f0f);                                                                              \
        high[j] = quad(both >> 4 & 0x0f0f0f0f);                                                                        \
    }                                                                                                                  \
    BOTH_QUADS(R, G)

#define STEP_TABLE(R, G)                                                                                               \
    Quad low[G], high[G];                                                                                              \
    UNROLL for (int j = 0; j < G; j++) {                                                                               \
        vu both = *(const vu *)(weights + j * stride + at * 64);                                                       \
        low[j] = quad(looked_up(&table, both & 0x0f0f0f0f));                                                           \
        high[j] = quad(looked_up(&table, both >> 4 & 0x0f0f0f0f));                                                     \
    }                                                                                                                  \
    BOTH_QUADS(R, G)

#define BOTH_QUADS(R, G)                                                                                               \
    UNROLL for (int i = 0; i < R; i++)                                                                                 \
        UNROLL for (int j = 0; j < G; j++)                                                                             \
            sum[i][j] = dot(sum[i][j], low[j], x + i, R);                                                              \
    x += PARTS * R;                                                                                                    \
    UNROLL for (int i = 0; i < R; i++)                                                                                 \
        UNROLL for (int j = 0; j < G; j++)                                                                             \
            sum[i][j] = dot(sum[i][j], high[j], x + i, R);                                                             \
    x += PARTS * R;

/* R rows of a panel and the lane groups [first, first + G), whose weights begin at `weights`. vectors: of 64 bytes, in
 * a group of columns. */
#define TILE(NAME, R, G, STEP)                                                                                         \
    static void NAME(const Matrix *w, const Panel *p, const char *weights, long vectors, long first, vf *out,          \
                     long out_stride)                                                                                  \
    {                                                                                                                  \
        long groups = w->k / w->group, all = groups * vectors, stride = all * 64, at = 0;                              \
        const uint32_t *x = p->x;                                                                                      \
        __attribute__((unused)) Table table = load_table(w->table);                                                    \
        for (long group = 0; group < groups; group++) {                                                                \
            vi sum[R][G] = {{{0}}};                                                                                    \
            for (long end = at + vectors; at < end; at++) {                                                            \
                long ahead = (at + AHEAD < all ? at + AHEAD : at + AHEAD + (G - 1) * all) * 64;                        \
                if (R <= 4)                                                                                            \
                    UNROLL for (int j = 0; j < G; j++)                                                                 \
                        __builtin_prefetch(weights + j * stride + ahead);                                              \
                STEP(R, G)                                                                                             \
            }                                                                                                          \
            add_terms(w, p, R, G, first, group, sum[0], out, out_stride);                                              \
        }                                                                                                              \
    }

typedef void (*Tile)(const Matrix *, const Panel *, const char *weights, long vectors, long first, vf *out,
                     long out_stride);
enum { USE_8, USE_4, USE_TABLE };
#define TILES(R)                                                                                                       \
    TILE(eight_##R, R, TALL(R), STEP_8)                                                                                \
    TILE(eight_last_##R, R, 1, STEP_8)                                                                                 \
    TILE(four_##R, R, TALL(R), STEP_4)                                                                                 \
    TILE(four_last_##R, R, 1, STEP_4)                                                                                  \
    TILE(table_##R, R, TALL(R), STEP_TABLE)                                                                            \
    TILE(table_last_##R, R, 1, STEP_TABLE)
EACH(TILES)
#define ENTRY(R)                                                                                                       \
    {TALL(R), {eight_##R, four_##R, table_##R}, {eight_last_##R, four_last_##R, table_last_##R}},
static const struct {
    long groups;
    Tile tile[3], last[3];
} TILES_OF[] = {EACH(ENTRY)};

static void sweep(const Matrix *w, const Panel *p, long rows, const char *weights, long bits, long first, long count,
                  vf *out, long out_stride)
{
    long groups = TILES_OF[rows - 1].groups, vectors = padded_group(w->group) * bits / 32, i = 0;
    long stride = w->k / w->group * vectors * 64;
    int use = bits == 8 ? USE_8 : w->table ? USE_TABLE : USE_4;
    for (; i + groups <= count; i += groups)
        TILES_OF[rows - 1].tile[use](w, p, weights + i * stride, vectors, first + i, out + i, out_stride);
    for (; i < count; i++)
        TILES_OF[rows - 1].last[use](w, p, weights + i * stride, vectors, first + i, out + i, out_stride);
}

/* Weights of 4 bits in the layout of 8 bits: `count` lane groups. */
static void unpack(const Matrix *w, const char *from, long count, char *out)
{
    Table table = load_table(w->table);
    long vectors = count * lane_group_bytes(w) / 64;
    for (long i = 0; i < vectors; i++) {
        vu both = *(const vu *)(from + i * 64), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
        *(vu *)(out + 2 * i * 64) = w->table ? looked_up(&table, low) : low;
        *(vu *)(out + (2 * i + 1) * 64) = w->table ? looked_up(&table, high) : high;
    }
}

/* Panels. All but the scales and sums comes first; a panel is cut into parts of at most MR rows, or it is one or two
 * tiles of AMX high. */
#if defined(PAGEWIRE_AMX)
enum { PANEL_ROWS = 2 * TILE_ROWS, FEW = 4, MANY = 1 };
#else
enum { PANEL_ROWS = MR, FEW = MR, MANY = 2 };
#endif
/* FEW: as many rows are not multiplied by tiles. MANY: with more panels, 4 bits are unpacked once for all of them. */

static inline int uses_tiles(const Matrix *w, long rows)
{
    return rows > FEW && padded_group(w->group) % 64 == 0;
}

static inline long numbers_bytes(const Matrix *w, long rows)
{
    long lines = rows * packed_k(w) * PARTS, tiles = padded(rows, 16) * packed_k(w);
    return rows > FEW && tiles > lines ? tiles : lines;
}

static long panel_bytes(const Matrix *w, long rows)
{
    return padded(numbers_bytes(w, rows), 64) + rows * w->k / w->group * 12;
}

static inline Panel open_panel(const Matrix *w, const char *panel, long rows, long first, long count)
{
    long groups = w->k / w->group;
    const char *about = panel + padded(numbers_bytes(w, rows), 64) + first * groups * 12;
    return (Panel){(const uint32_t *)(panel + first * packed_k(w) * PARTS), (const float *)about,
                   (const int32_t *)(about + count * groups * 4), (const int32_t *)(about + count * groups * 8)};
}

/* Rounds 16 numbers to integers, ties to even. */
static inline vi rounded16(vf x)
{
    return (vi)(x + 12582912.0f) - 0x4b400000; /* 1.5 · 2²³ */
}

/* Rounds a row to [k] of 8 bits, its groups padded with zeros: x · (127 / most) in each group. Groups whose numbers are
 * all smaller than 1e-30 count as zero. A row with a number that is not finite has scales of NaN. `stride`: of the
 * scales and sums. line: 16 bytes longer than the row. */
static void round_row(const Matrix *w, const float *x, int8_t *line, float *scales, int32_t *sums, int32_t *zeros,
                      long stride)
{
    typedef int8_t v16 __attribute__((vector_size(16), aligned(1), may_alias));
    long groups = w->k / w->group, padded_columns = padded_group(w->group);
    memset(line, 0, packed_k(w));
    vf odd16 = {0};
    long whole = w->k / LANES * LANES;
    for (long i = 0; i < whole; i += LANES)
        odd16 += *(const vf_any *)(x + i) * 0.0f; /* NaN also for infinities */
    float odd = 0;
    for (long i = whole; i < w->k; i++)
        odd += x[i] * 0.0f;
    for (int l = 0; l < LANES; l++)
        odd += odd16[l];
    if (odd != 0) {
        for (long g = 0; g < groups; g++) {
            scales[g * stride] = NAN;
            sums[g * stride] = zeros[g * stride] = 0;
        }
        return;
    }
    for (long g = 0; g < groups; g++, x += w->group, line += padded_columns) {
        vf most16 = {0}, rest = {0};
        vi sum16 = {0};
        whole = w->group / LANES * LANES;
        memcpy(&rest, x + whole, (w->group - whole) * 4);
        for (long i = 0; i < whole; i += LANES)
            most16 = max16((vf)(*(const vi_any *)(x + i) & 0x7fffffff), most16);
        most16 = max16((vf)((vi)rest & 0x7fffffff), most16);
        float most = 0;
        for (int l = 0; l < LANES; l++)
            most = most16[l] > most ? most16[l] : most;
        float inverse = most > 1e-30f ? 127.0f / most : 0;
        for (long i = 0; i < w->group; i += LANES) {
            vf numbers = rest;
            if (i < whole)
                numbers = *(const vf_any *)(x + i);
            vi q = rounded16(numbers * inverse);
            sum16 += q;
            *(v16 *)(line + i) = __builtin_convertvector(q, v16);
        }
        int32_t sum = 0;
        for (int l = 0; l < LANES; l++)
            sum += sum16[l];
        scales[g * stride] = most / 127.0f;
        sums[g * stride] = sum;
        zeros[g * stride] = sum * ((w->offset_type == STORED_ONE ? (int32_t)w->zero : 0) - BIAS);
    }
}

/* The row's numbers in the order of the weight's columns. */
static const float *in_order(const Matrix *w, const float *x, float *buffer)
{
    if (!w->order)
        return x;
    for (long i = 0; i < w->k; i++)
        buffer[i] = x[w->order[i]];
    return buffer;
}

static void pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    long kp = packed_k(w), line_bytes = padded(kp + LANES, 64);
    char *scratch = pagewire_scratch(SLOT_WEIGHTS, padded(w->k * 4, 64) + line_bytes + MR * kp * PARTS);
    float *buffer = (float *)scratch;
    int8_t *line = (int8_t *)(scratch + padded(w->k * 4, 64));
#if defined(PAGEWIRE_AMX)
    if (uses_tiles(w, rows)) {
        Panel p = open_panel(w, panel, rows, 0, rows);
        for (long i = 0; i < padded(rows, TILE_ROWS); i++) {
            if (i < rows)
                round_row(w, in_order(w, row_of(a, first + i), buffer), line, (float *)p.scales + i,
                          (int32_t *)p.sums + i, (int32_t *)p.zeros + i, rows);
            else
                memset(line, 0, kp);
            char *to = (char *)panel + i / TILE_ROWS * TILE_ROWS * kp + i % TILE_ROWS * 64;
            for (long k = 0; k < kp / 64; k++)
                memcpy(to + k * TILE_BYTES, line + k * 64, 64);
        }
        return;
    }
#endif
    char *lines = (char *)line + line_bytes;
    long parts = (rows + MR - 1) / MR;
    for (long part = 0; part < parts; part++) {
        long from = part * rows / parts, count = (part + 1) * rows / parts - from;
        Panel p = open_panel(w, panel, rows, from, count);
        const float *pointers[MR];
        for (long i = 0; i < count; i++) {
            round_row(w, in_order(w, row_of(a, first + from + i), buffer), line, (float *)p.scales + i,
                      (int32_t *)p.sums + i, (int32_t *)p.zeros + i, count);
            int8_t *words = (int8_t *)lines + i * kp * PARTS;
            pointers[i] = (const float *)words;
            if (PARTS == 1) {
                memcpy(words, line, kp);
            } else {
                int16_t *halves = (int16_t *)words;
                for (long k = 0; k < kp; k += 4) {
                    halves[k] = line[k];
                    halves[k + 1] = line[k + 2];
                    halves[k + 2] = line[k + 1];
                    halves[k + 3] = line[k + 3];
                }
            }
        }
        pagewire_interleave(pointers, count, kp / 4 * PARTS, kp / 4 * PARTS, (float *)p.x);
    }
}

static const char *prepare(const Matrix *w, long from, long to, long num_panels)
{
    const char *packed = w->w + from * lane_group_bytes(w);
    if (w->bits == 8 || num_panels <= MANY)
        return packed;
    char *wide = pagewire_scratch(SLOT_WEIGHTS, 2 * (to - from) * lane_group_bytes(w));
    unpack(w, packed, to - from, wide);
    return wide;
}

#if defined(PAGEWIRE_AMX)
/* Up to 32 rows and two lane groups, of 8 bits. */
static void tiles_sums(const Matrix *w, const Panel *p, const char *panel, long rows, const char *weights, long first,
                       long count, vf *out, long out_stride)
{
    long steps = packed_k(w) / 64, in_group = padded_group(w->group) / 64, groups = w->k / w->group;
    const char *low = panel, *high = low + steps * TILE_BYTES;
    const char *b0 = weights, *b1 = b0 + steps * TILE_BYTES;
    _Alignas(64) vi sums[PANEL_ROWS * 2];
    char *y = (char *)sums;
    long stride = count * 64;
    for (long group = 0; group < groups; group++) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (long k = group * in_group; k < (group + 1) * in_group; k++) {
            tile_load(4, low + k * TILE_BYTES, 64);
            tile_load(6, b0 + k * TILE_BYTES, 64);
            tile_dot_su8(0, 4, 6);
            if (count > 1) {
                tile_load(7, b1 + k * TILE_BYTES, 64);
                tile_dot_su8(1, 4, 7);
            }
            if (rows > TILE_ROWS) {
                tile_load(5, high + k * TILE_BYTES, 64);
                tile_dot_su8(2, 5, 6);
                if (count > 1)
                    tile_dot_su8(3, 5, 7);
            }
        }
        tile_store(0, y, stride);
        if (count > 1)
            tile_store(1, y + 64, stride);
        if (rows > TILE_ROWS) {
            tile_store(2, y + TILE_ROWS * stride, stride);
            if (count > 1)
                tile_store(3, y + TILE_ROWS * stride + 64, stride);
        }
        add_terms(w, p, rows, count, first, group, sums, out, out_stride);
    }
}
#endif

static void sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                 long to, vf *out)
{
    long bits = num_panels > MANY ? 8 : w->bits, stride = to - from;
#if defined(PAGEWIRE_AMX)
    if (uses_tiles(w, rows)) {
        /* The panel subtracts BIAS · Σq for `dot`, which tiles do not need. They are there only with VNNI. */
        _Static_assert(BIAS == 0, "tiles and signed dot products");
        Panel p = open_panel(w, panel, rows, 0, rows);
        long bytes = packed_k(w) * LANES;
        char *wide = bits == 8 ? 0 : pagewire_scratch(SLOT_WEIGHTS, 2 * bytes);
        for (long g = 0; g < stride; g += 2) {
            long count = stride - g < 2 ? 1 : 2;
            const char *b = weights + g * bytes * bits / 8;
            if (bits == 4) {
                unpack(w, b, count, wide);
                b = wide;
            }
            tiles_sums(w, &p, panel, rows, b, from + g, count, out + g, stride);
        }
        return;
    }
#endif
    long parts = (rows + MR - 1) / MR;
    for (long part = 0; part < parts; part++) {
        long row = part * rows / parts, count = (part + 1) * rows / parts - row;
        Panel p = open_panel(w, panel, rows, row, count);
        sweep(w, &p, count, weights, bits, from, stride, out + row * stride, stride);
    }
}

const KindOps pagewire_grouped = {PANEL_ROWS, panel_bytes, pack, prepare, sums, 2};

void pagewire_grouped_lookup(const Matrix *w, long row, float *y)
{
    long groups = w->k / w->group, columns = padded_group(w->group), half = w->n / 2;
    long lane_group = row / LANES, lane = row % LANES;
    if (w->is_gated) {
        long in_half = row % half;
        lane_group = in_half / LANES * 2 + row / half, lane = in_half % LANES;
    }
    const uint8_t *in = (const uint8_t *)w->w + lane_group * lane_group_bytes(w) + lane * 4;
    for (long g = 0; g < groups; g++) {
        long at = (lane_group * groups + g) * LANES;
        float scale = stored16(w->scales, w->scale_type, at)[lane], offset = 0;
        int zero = w->offset_type == STORED_ONE ? (int)w->zero : 0;
        if (w->offset_type == STORED_ZERO_POINTS)
            zero = ((const uint8_t *)w->offsets)[at + lane];
        else if (w->offset_type != STORED_ONE)
            offset = stored16(w->offsets, w->offset_type, at)[lane];
        for (long i = 0; i < w->group; i++) {
            long k = g * columns + i, column = g * w->group + i;
            int value = w->bits == 8 ? in[k / 4 * 64 + k % 4] : in[k / 8 * 64 + k % 4] >> (k % 8 / 4 * 4) & 15;
            value = w->table ? w->table[value] : value;
            y[w->order ? w->order[column] : column] = (float)(value - zero) * scale - offset;
        }
    }
}

typedef struct {
    const uint8_t *numbers;
    char *packed;
    long n, k, group, bits, is_gated;
} Pack;

static void pack_lane_group(const void *about, long lane_group)
{
    const Pack *a = about;
    long groups = a->k / a->group, columns = padded_group(a->group), step = a->bits == 8 ? 4 : 8;
    char *out = a->packed + lane_group * groups * columns * LANES * a->bits / 8;
    for (long l = 0; l < LANES; l++) {
        long row = row_in(a->n, a->is_gated, lane_group, l);
        const uint8_t *in = a->numbers + row * a->k;
        char *to = out + l * 4;
        for (long g = 0; g < groups; g++, in += a->group)
            for (long i = 0; i < columns; i += step, to += 64) {
                uint32_t words[2] = {0};
                long count = a->group - i < step ? a->group - i : step;
                if (row >= 0 && count > 0)
                    memcpy(words, in + i, count);
                words[0] |= words[1] << 4;
                memcpy(to, words, 4);
            }
    }
}

/* numbers: [n][k] uint8 → packed. */
void pagewire_grouped_pack(const uint8_t *numbers, char *packed, long n, long k, long group, long bits, long is_gated)
{
    pagewire_run(num_groups(n, is_gated), pack_lane_group, &(Pack){numbers, packed, n, k, group, bits, is_gated});
}

typedef struct {
    const char *w;
    uint8_t *numbers;
    float *scales, *zeros;
    long n, k, group, bits, rows;
    int bf16;
} Quantize;

static inline float sum_of(vf x)
{
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += x[l];
    return sum;
}

/* Rounds a number to bfloat16. */
static inline float to_bf16(float x)
{
    char half[32];
    store_bf16((vf){x}, half);
    return number(half, 0, 1);
}

/* The vectors of a group, the last one padded with zeros: numbers v · inverse + zero as bytes, and the sum of the
 * squares of their errors. */
static float round_group(const vf *x, long vectors, float scale, float inverse, float zero, float highest, uint8_t *out)
{
    typedef uint8_t v16 __attribute__((vector_size(16), aligned(1), may_alias));
    vf errors = {0};
    for (long i = 0; i < vectors; i++) {
        vf q = x[i] * inverse + 12582912.0f - 12582912.0f + zero;
        q = max16(q, (vf){0});
        q = select16(q > highest, (vf){0} + highest, q);
        vf error = x[i] - (q - zero) * scale;
        errors += error * error;
        *(v16 *)(out + i * LANES) = __builtin_convertvector(__builtin_convertvector(q, vi), v16);
    }
    return sum_of(errors);
}

static void quantize_rows(const void *about, long task)
{
    const Quantize *a = about;
    long first = task * a->rows, last = first + a->rows < a->n ? first + a->rows : a->n;
    long vectors = (a->group + LANES - 1) / LANES, groups = a->k / a->group;
    vf *x = pagewire_scratch(SLOT_WEIGHTS, vectors * LANES * 6);
    uint8_t *best = (uint8_t *)(x + vectors), *trial = best + vectors * LANES;
    for (long row = first; row < last; row++)
        for (long g = 0; g < groups; g++) {
            long from = row * a->k + g * a->group;
            vf low16 = {0}, high16 = {0}, odd16 = {0};
            for (long i = 0; i < vectors; i++) {
                vf v = {0};
                if ((i + 1) * LANES <= a->group)
                    v = load16(a->w, from + i * LANES, a->bf16);
                else
                    for (long j = i * LANES; j < a->group; j++)
                        v[j - i * LANES] = number(a->w, from + j, a->bf16);
                x[i] = v;
                odd16 += v * 0.0f; /* NaN also for infinities */
                high16 = max16(v, high16);
                low16 = max16(-v, low16);
            }
            float high = 0, low = 0, scale = 0, zero = 0; /* low: of the least number, without its sign */
            for (int l = 0; l < LANES; l++) {
                high = high16[l] > high ? high16[l] : high;
                low = low16[l] > low ? low16[l] : low;
            }
            if (a->bits == 8) {
                float most = high > low ? high : low;
                scale = most / 127.0f, zero = 128;
                round_group(x, vectors, scale, most > 1e-30f ? 127.0f / most : 0, zero, 255, best);
            } else {
                float least = INFINITY;
                for (int i = 0; i < 5; i++) {
                    float part = 1.0f - 0.0625f * (float)i, step = to_bf16((high + low) * part / 15.0f);
                    float inverse = step > 1e-30f ? 1.0f / step : 0;
                    float middle = low * part * inverse + 12582912.0f - 12582912.0f;
                    middle = middle > 15 ? 15 : middle;
                    float error = round_group(x, vectors, step, inverse, middle, 15, trial);
                    if (error < least || i == 0) {
                        least = error, scale = step, zero = middle;
                        memcpy(best, trial, vectors * LANES);
                    }
                }
            }
            memcpy(a->numbers + from, best, a->group);
            a->scales[g * a->n + row] = sum_of(odd16) == 0 ? scale : NAN;
            a->zeros[g * a->n + row] = zero;
        }
}

/* `grouped_weight.quantize`. w: [n][k] → numbers [n][k], scales and zeros [k / group][n]. */
void pagewire_grouped_quantize(const char *w, int bf16, long n, long k, long group, long bits, uint8_t *numbers,
                               float *scales, float *zeros)
{
    long rows = task_size(n, 1, 1 + 16384 / k);
    pagewire_run((n + rows - 1) / rows, quantize_rows,
                 &(Quantize){w, numbers, scales, zeros, n, k, group, bits, rows, bf16});
}
