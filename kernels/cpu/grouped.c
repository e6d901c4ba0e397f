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

#include "integers.h"
#include "product.h"

#if defined(PAGEWIRE_AMX)
#include "tiles.h"
#endif

/* Prefetch distance in vectors, across the end into the next lane groups as in dense.c. */
enum { AHEAD = 24 };

/* The lane groups of a tile of R rows. With more than four streams of weights, memory delivers less. */
#define GROUPS(R) ((R) <= 4 ? 2 * WIDE : WIDE)

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

enum { USE_8, USE_4, USE_TABLE }; /* weights of 8 bits, of 4 bits, and of 4 bits with a table */

/* The 16 entries of a table, one copy for each 16 bytes of a register. */
static inline nu load_table(const uint8_t *table)
{
    nu out = {0};
    if (table)
        for (int i = 0; i < NATIVE; i += 16)
            memcpy((char *)&out + i, table, 16);
    return out;
}

/* The entries for numbers below 16. */
static inline nu looked_up(nu table, nu numbers)
{
#if defined(__AVX512BW__)
    return (nu)_mm512_shuffle_epi8((__m512i)table, (__m512i)numbers);
#elif defined(__AVX2__)
    return (nu)_mm256_shuffle_epi8((__m256i)table, (__m256i)numbers);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (nu)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)numbers);
#else
    uint8_t bytes[NATIVE], entries[NATIVE];
    memcpy(bytes, &numbers, NATIVE);
    memcpy(entries, &table, NATIVE);
    for (int i = 0; i < NATIVE; i++)
        bytes[i] = entries[bytes[i]];
    memcpy(&numbers, bytes, NATIVE);
    return numbers;
#endif
}

/* The low or the high halves of the bytes, or their entries in the table. */
static inline nu half(int use, nu table, nu both, int is_high)
{
    nu numbers = (is_high ? both >> 4 : both) & 0x0f0f0f0f;
    return use == USE_TABLE ? looked_up(table, numbers) : numbers;
}

/* A register of scales or offsets, from the i-th on. */
static inline nf stored(const void *from, long type, long i)
{
    if (type == STORED_F32)
        return *(const nf_any *)((const char *)from + 4 * i);
    from = (const char *)from + 2 * i;
    return type == STORED_BF16 ? (nf)(widened(from) << 16) : halves(from);
}

static inline ni stored_zeros(const uint8_t *zeros, long i)
{
    typedef uint8_t nb __attribute__((vector_size(NATIVE / 4), aligned(1), may_alias));
#if defined(__AVX512BW__)
    return (ni)_mm512_cvtepu8_epi32((__m128i) * (const nb *)(zeros + i));
#else
    return __builtin_convertvector(*(const nb *)(zeros + i), ni);
#endif
}

/* Scales and offsets of a group of columns, for some lane groups: whole zero points or floats. */
typedef struct {
    nf scales[MAX_GROUPS * PARTS];
    union {
        ni zeros[MAX_GROUPS * PARTS];
        nf offsets[MAX_GROUPS * PARTS];
    };
} Scales;

/* at: the place of the first lane group's scales; stride: from one lane group to the next. */
static __attribute__((noinline)) void load_scales(const Matrix *w, long columns, long at, long stride, Scales *out)
{
    for (long j = 0; j < columns * PARTS; j++) {
        long from = at + j / PARTS * stride + j % PARTS * NATIVE_LANES;
        out->scales[j] = stored(w->scales, w->scale_type, from);
        if (w->offset_type == STORED_ZERO_POINTS)
            out->zeros[j] = stored_zeros(w->offsets, from);
        else if (w->offset_type != STORED_ONE)
            out->offsets[j] = stored(w->offsets, w->offset_type, from);
    }
}

/* The scales and offsets that `load_scales` needs later. */
static inline void prefetch_scales(const Matrix *w, long columns, long at, long stride)
{
    for (long j = 0; j < columns; j++, at += stride) {
        __builtin_prefetch((const char *)w->scales + at * (w->scale_type == STORED_F32 ? 4 : 2));
        __builtin_prefetch((const char *)w->offsets + at * (w->offset_type == STORED_ZERO_POINTS ? 1 : 4));
    }
}

/* Rounded activations of some rows: for each group and row the scale, the sum of the numbers, and where the sums of
 * products start, (BIAS - zero) · that sum. */
typedef struct {
    const uint32_t *x; /* [k / 4][WORDS][rows] */
    const float *scales;
    const int32_t *sums, *starts; /* each [groups][rows] */
    /* Weights that are needed later: one of `share` equal parts is prefetched from here on. */
    const char *next;
    long share;
} Panel;

/* Adds the terms of one group of columns to `out`: sums [rows][N][NATIVE_LANES]. In a tile, rows and N are constants and
 * the sums stay in registers. */
static inline __attribute__((always_inline)) void add_terms(const Matrix *w, const Panel *p, long rows, long N,
                                                            const Scales *s, long group, ni *sums, vf *out,
                                                            long out_stride)
{
    const int32_t *x_sums = p->sums + group * rows;
    const float *x_scales = p->scales + group * rows;
    if (w->offset_type == STORED_ZERO_POINTS)
        UNROLL for (long j = 0; j < N; j++)
            UNROLL for (long i = 0; i < rows; i++)
                sums[i * N + j] -= s->zeros[j] * x_sums[i];
    UNROLL for (long j = 0; j < N; j++)
        UNROLL for (long i = 0; i < rows; i++)
            sums[i * N + j] = (ni)(__builtin_convertvector(sums[i * N + j], nf) * s->scales[j]);
    if (w->offset_type != STORED_ZERO_POINTS && w->offset_type != STORED_ONE)
        UNROLL for (long i = 0; i < rows; i++)
            UNROLL for (long j = 0; j < N; j++)
                sums[i * N + j] = (ni)((nf)sums[i * N + j] - s->offsets[j] * (float)x_sums[i]);
    UNROLL for (long i = 0; i < rows; i++)
        UNROLL for (long j = 0; j < N; j++)
            sums[i * N + j] = (ni)((nf)sums[i * N + j] * x_scales[i]);
    if (group)
        UNROLL for (long i = 0; i < rows; i++)
            UNROLL for (long j = 0; j < N; j++)
                sums[i * N + j] = (ni)((nf)sums[i * N + j] + ((nf *)(out + i * out_stride))[j]);
    UNROLL for (long i = 0; i < rows; i++)
        UNROLL for (long j = 0; j < N; j++)
            ((nf *)(out + i * out_stride))[j] = (nf)sums[i * N + j];
}

/* R rows of a panel and the lane groups [first, first + G), whose weights begin at `weights`. vectors: of 64 bytes, in
 * a group of columns. */
#define TILE(NAME, R, G, USE)                                                                                          \
    static void NAME(const Matrix *w, const Panel *p, const char *weights, long vectors, long first, vf *out,          \
                     long out_stride)                                                                                  \
    {                                                                                                                  \
        enum { N = G * PARTS };                                                                                        \
        long groups = w->k / w->group, all = groups * vectors, stride = all * 64, at = 0;                              \
        long scales_at = first * groups * LANES;                                                                       \
        long pace = 64 / p->share;                                                                                     \
        const char *next = p->next;                                                                                    \
        const uint32_t *x = p->x;                                                                                      \
        __attribute__((unused)) nu table = load_table(w->table);                                                       \
        if (R <= 4)                                                                                                    \
            prefetch_scales(w, G, scales_at, groups * LANES);                                                          \
        for (long group = 0; group < groups; group++) {                                                                \
            ni sum[R][N];                                                                                              \
            Scales scales;                                                                                             \
            if (R > 4)                                                                                                 \
                load_scales(w, G, scales_at + group * LANES, groups * LANES, &scales);                                 \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++)                                                                     \
                    sum[i][j] = (ni){0} + p->starts[group * R + i];                                                    \
            if (R <= 4 && group + 1 < groups)                                                                          \
                prefetch_scales(w, G, scales_at + (group + 1) * LANES, groups * LANES);                                \
            for (long end = at + vectors; at < end; at++) {                                                            \
                const char *word = weights + at * 64;                                                                  \
                long ahead = (at + AHEAD < all ? AHEAD : AHEAD + (G - 1) * all) * 64;                                  \
                UNROLL for (int j = 0; j < G; j++)                                                                     \
                    if (R <= 4)                                                                                        \
                        __builtin_prefetch(word + j * stride + ahead);                                                 \
                    else                                                                                               \
                        __builtin_prefetch(next + (at * G + j) * pace, 0, 2);                                          \
                UNROLL for (int step = 0; step < (USE == USE_8 ? 1 : 2) * WORDS; step++) {                             \
                    nu q[N];                                                                                           \
                    UNROLL for (int j = 0; j < N; j++) {                                                               \
                        q[j] = *(const nu *)(word + j / PARTS * stride + j % PARTS * NATIVE);                          \
                        q[j] = part(USE == USE_8 ? q[j] : half(USE, table, q[j], step / WORDS), step % WORDS);         \
                    }                                                                                                  \
                    UNROLL for (int i = 0; i < R; i++)                                                                 \
                        UNROLL for (int j = 0; j < N; j++)                                                             \
                            sum[i][j] = dot(sum[i][j], q[j], x[step * R + i]);                                         \
                }                                                                                                      \
                x += (USE == USE_8 ? 1 : 2) * WORDS * R;                                                               \
            }                                                                                                          \
            if (R <= 4) /* they are on their way from memory before */                                                 \
                load_scales(w, G, scales_at + group * LANES, groups * LANES, &scales);                                 \
            add_terms(w, p, R, N, &scales, group, sum[0], out, out_stride);                                            \
        }                                                                                                              \
    }

typedef void (*Tile)(const Matrix *, const Panel *, const char *weights, long vectors, long first, vf *out,
                     long out_stride);
#define TILES(R)                                                                                                       \
    TILE(eight_##R, R, GROUPS(R), USE_8)                                                                               \
    TILE(eight_last_##R, R, 1, USE_8)                                                                                  \
    TILE(four_##R, R, GROUPS(R), USE_4)                                                                                \
    TILE(four_last_##R, R, 1, USE_4)                                                                                   \
    TILE(table_##R, R, GROUPS(R), USE_TABLE)                                                                           \
    TILE(table_last_##R, R, 1, USE_TABLE)
EACH(TILES)
#define ENTRY(R)                                                                                                       \
    {GROUPS(R), {eight_##R, four_##R, table_##R}, {eight_last_##R, four_last_##R, table_last_##R}},
static const struct {
    long groups;
    Tile tile[3], last[3];
} TILES_OF[] = {EACH(ENTRY)};

static void sweep(const Matrix *w, Panel p, long rows, const char *weights, long bits, long first, long count, vf *out,
                  long out_stride)
{
    long groups = TILES_OF[rows - 1].groups, vectors = padded_group(w->group) * bits / 32;
    long stride = w->k / w->group * vectors * 64;
    int use = bits == 8 ? USE_8 : w->table ? USE_TABLE : USE_4;
    for (long i = 0, size; i < count; i += size) {
        int is_last = i + groups > count;
        size = is_last ? 1 : groups;
        Tile tile = is_last ? TILES_OF[rows - 1].last[use] : TILES_OF[rows - 1].tile[use];
        tile(w, &p, weights + i * stride, vectors, first + i, out + i, out_stride);
        p.next += size * stride / p.share;
    }
}

/* Weights of 4 bits in the layout of 8 bits: `count` lane groups. */
static void unpack(const Matrix *w, const char *from, long count, char *out)
{
    nu table = load_table(w->table);
    long vectors = count * lane_group_bytes(w) / 64;
    int use = w->table ? USE_TABLE : USE_4;
    for (long i = 0; i < vectors * PARTS; i++) {
        nu both = ((const nu *)from)[i];
        nu *to = (nu *)out + i / PARTS * 2 * PARTS + i % PARTS;
        to[0] = half(use, table, both, 0);
        to[PARTS] = half(use, table, both, 1);
    }
}

/* Panels. All but the scales and sums comes first; a panel is cut into parts of at most MR rows, or it is one or two
 * tiles of AMX high. */
#if defined(PAGEWIRE_AMX)
enum { PANEL_ROWS = 2 * TILE_ROWS, FEW = 4, MANY = 1 };
#else
enum { PANEL_ROWS = MR, FEW = MR, MANY = WORDS == 1 ? INT32_MAX : 2 };
#endif
/* FEW: as many rows are not multiplied by tiles. MANY: with more panels, 4 bits are unpacked once for all of them; where
 * one instruction multiplies four columns, unpacking in registers hides behind it. */

static inline int uses_tiles(const Matrix *w, long rows)
{
    return rows > FEW && padded_group(w->group) % 64 == 0;
}

static inline long numbers_bytes(const Matrix *w, long rows)
{
    long lines = rows * packed_k(w) * WORDS, tiles = padded(rows, 16) * packed_k(w);
    return rows > FEW && tiles > lines ? tiles : lines;
}

static long panel_bytes(const Matrix *w, long rows)
{
    return padded(numbers_bytes(w, rows), 64) + rows * w->k / w->group * 12 + 4;
}

/* The index of a panel in its product, rounded, since panels may differ by one row. It only decides what is
 * prefetched. */
static inline int32_t *index_of(const Matrix *w, void *panel, long rows)
{
    return (int32_t *)((char *)panel + panel_bytes(w, rows)) - 1;
}

static inline Panel open_panel(const Matrix *w, const char *panel, long rows, long first, long count)
{
    long groups = w->k / w->group;
    const char *about = panel + padded(numbers_bytes(w, rows), 64) + first * groups * 12;
    return (Panel){(const uint32_t *)(panel + first * packed_k(w) * WORDS), (const float *)about,
                   (const int32_t *)(about + count * groups * 4), (const int32_t *)(about + count * groups * 8)};
}

/* Rounds a row to [k] of 8 bits, its groups padded with zeros: x · (127 / most) in each group. Groups whose numbers are
 * all smaller than 1e-30 count as zero. A row with a number that is not finite has scales of NaN. `stride`: of the
 * scales and sums. line: 16 bytes longer than the row. */
static void round_row(const Matrix *w, const float *x, int8_t *line, float *scales, int32_t *sums, int32_t *starts,
                      long stride)
{
    typedef int8_t v16 __attribute__((vector_size(16), aligned(1), may_alias));
    long groups = w->k / w->group, padded_columns = padded_group(w->group);
    int32_t start = BIAS - (w->offset_type == STORED_ONE ? (int32_t)w->zero : 0), greatest = 0;
    for (long g = 0; g < groups; g++) {
        int32_t most = magnitude(x + g * w->group, w->group);
        greatest = most > greatest ? most : greatest;
        memcpy(scales + g * stride, &most, 4);
    }
    if (greatest >= 0x7f800000) {
        memset(line, 0, packed_k(w));
        for (long g = 0; g < groups; g++) {
            scales[g * stride] = NAN;
            sums[g * stride] = starts[g * stride] = 0;
        }
        return;
    }
    for (long g = 0; g < groups; g++, x += w->group, line += padded_columns) {
        float most = scales[g * stride], inverse = most > 1e-30f ? 127.0f / most : 0;
        vi sum = {0};
        long i = 0;
        for (; i + LANES <= w->group; i += LANES) {
            vi q = rounded16(*(const vf_any *)(x + i) * inverse);
            sum += q;
            *(v16 *)(line + i) = __builtin_convertvector(q, v16);
        }
        if (i < padded_columns) {
            vf rest = {0};
            memcpy(&rest, x + i, (w->group - i) * 4);
            vi q = rounded16(rest * inverse);
            sum += q;
            memset(line + i, 0, padded_columns - i);
            *(v16 *)(line + i) = __builtin_convertvector(q, v16);
        }
        scales[g * stride] = most / 127.0f;
        sums[g * stride] = total_of(sum);
        starts[g * stride] = sums[g * stride] * start;
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
    char *scratch = pagewire_scratch(SLOT_WEIGHTS, padded(w->k * 4, 64) + line_bytes + MR * kp * WORDS);
    float *buffer = (float *)scratch;
    int8_t *line = (int8_t *)(scratch + padded(w->k * 4, 64));
#if defined(PAGEWIRE_AMX)
    if (uses_tiles(w, rows)) {
        Panel p = open_panel(w, panel, rows, 0, rows);
        for (long i = 0; i < padded(rows, TILE_ROWS); i++) {
            if (i < rows)
                round_row(w, in_order(w, row_of(a, first + i), buffer), line, (float *)p.scales + i,
                          (int32_t *)p.sums + i, (int32_t *)p.starts + i, rows);
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
    *index_of(w, panel, rows) = (first + rows / 2) / rows;
    long parts = (rows + MR - 1) / MR;
    for (long part = 0; part < parts; part++) {
        long from = part * rows / parts, count = (part + 1) * rows / parts - from;
        Panel p = open_panel(w, panel, rows, from, count);
        const float *pointers[MR];
        for (long i = 0; i < count; i++) {
            round_row(w, in_order(w, row_of(a, first + from + i), buffer), line, (float *)p.scales + i,
                      (int32_t *)p.sums + i, (int32_t *)p.starts + i, count);
            int8_t *words = (int8_t *)lines + i * kp * WORDS;
            pointers[i] = (const float *)words;
            if (WORDS == 1)
                memcpy(words, line, kp);
            else
                to_halves(line, kp, (int16_t *)words);
        }
        pagewire_interleave(pointers, count, kp / 4 * WORDS, kp / 4 * WORDS, (float *)p.x);
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
    _Alignas(64) ni sums[PANEL_ROWS * 2 * PARTS];
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
        for (long i = 0; i < rows * count * PARTS; i++)
            sums[i] += p->starts[group * rows + i / (count * PARTS)];
        Scales scales;
        load_scales(w, count, (first * groups + group) * LANES, groups * LANES, &scales);
        add_terms(w, p, rows, count * PARTS, &scales, group, sums, out, out_stride);
    }
}
#endif

static void sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                 long to, vf *out)
{
    long bits = num_panels > MANY ? 8 : w->bits, stride = to - from;
#if defined(PAGEWIRE_AMX)
    if (uses_tiles(w, rows)) {
        /* The sums start with BIAS · Σq for `dot`, which tiles do not need. They are there only with VNNI. */
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
    /* Each panel of a block fetches its share of the lane groups that follow; one alone those of its next tile. */
    long bytes = stride * lane_group_bytes(w), index = *index_of(w, (void *)panel, rows) % num_panels;
    const char *next = weights + GROUPS(MR) * lane_group_bytes(w);
    if (num_panels > 1)
        next = w->w + to * lane_group_bytes(w) + index * bytes / num_panels;
    long parts = (rows + MR - 1) / MR;
    for (long part = 0; part < parts; part++) {
        long row = part * rows / parts, count = (part + 1) * rows / parts - row;
        Panel p = open_panel(w, panel, rows, row, count);
        p.next = next, p.share = num_panels;
        sweep(w, p, count, weights, bits, from, stride, out + row * stride, stride);
    }
}

const KindOps pagewire_grouped = {PANEL_ROWS, panel_bytes, pack, prepare, sums, MAX_GROUPS};

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
        long at = (lane_group * groups + g) * LANES + lane / NATIVE_LANES * NATIVE_LANES, i_lane = lane % NATIVE_LANES;
        float scale = stored(w->scales, w->scale_type, at)[i_lane], offset = 0;
        int zero = w->offset_type == STORED_ONE ? (int)w->zero : 0;
        if (w->offset_type == STORED_ZERO_POINTS)
            zero = ((const uint8_t *)w->offsets)[at + i_lane];
        else if (w->offset_type != STORED_ONE)
            offset = stored(w->offsets, w->offset_type, at)[i_lane];
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
    long n, k, group, bits, is_gated, first;
} Pack;

static void pack_lane_group(const void *about, long index)
{
    const Pack *a = about;
    long lane_group = a->first + index;
    long groups = a->k / a->group, columns = padded_group(a->group), step = a->bits == 8 ? 4 : 8;
    char *out = a->packed + index * groups * columns * LANES * a->bits / 8;
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

/* numbers: [n][k] uint8 → lane groups [first, last) of the packed weight. */
void pagewire_grouped_pack(const uint8_t *numbers, char *packed, long n, long k, long group, long bits, long is_gated,
                           long first, long last)
{
    long bytes = k / group * padded_group(group) * LANES * bits / 8;
    Pack about = {numbers, packed, n, k, group, bits, is_gated, first};
    pagewire_pack_groups(last - first, bytes, pack_lane_group, &about);
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
