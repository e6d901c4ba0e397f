/* Products of weights of 2 to 6 bits in superblocks of 256 columns, as GGUF files have them (Q2_K to Q6_K), with
 * activations that are rounded to 8 bits here.
 *
 * A superblock of a row has a float16 d, and for each of its groups of 16 or 32 columns an integer scale s. A weight is
 * d · s · (v - zero), or with a minimum m for each group, and a second float16, d · s · v - dmin · m. A row's activations
 * in a superblock are sx · q with signed q, |q| <= 127, so
 *
 *     y = sum over the superblocks of  sx · (d · Σ s · Σ (v - zero) · q - dmin · Σ m · Σ q)
 *
 * All inner sums are integers of 32 bits. The terms are added as float32 in the order of the superblocks, without fused
 * multiply-adds, so that every CPU gives the same bits.
 *
 * Σ q of a group is 64 · high + low, where both are bytes. So minima are four more columns for every four groups: their
 * products with `high` and those with `low`.
 *
 * Packed weights: rows in groups of 16 lanes; [n / 16][superblocks] records of
 *
 *     float16 d [16], dmin [16]
 *     int8 scales [groups][16]
 *     uint8 minima [groups / 4][16][4]          where there are minima
 *     chunks of 32 columns: [8][bits][16][4]    vectors of 64 bytes
 *
 * A chunk's columns are 8 words: four columns of each lane. Its vectors hold two words each in the halves of the bytes,
 * four in pairs of bits, or eight in single bits: 4 bits in four vectors of halves, 2 in two vectors of pairs; 5, 6 and 3
 * bits have a vector of bits or two of pairs for the high bits behind that.
 */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <math.h>

#include "integers.h"
#include "product.h"

enum { COLUMNS = 256, CHUNKS = 8, AHEAD = 24 * 64 }; /* AHEAD: prefetch distance in bytes */
enum { FEW = 4 }; /* as many rows unpack weights in registers; more read bytes, unpacked once for all of them */

/* The lane groups of a tile of R rows. With more than four streams of weights, memory delivers less. */
#define GROUPS(R) ((R) <= 2 ? 2 * WIDE : WIDE)

/* By the number of bits: groups in a superblock, whether they have minima, and what is subtracted otherwise. */
#define SUBS(BITS) ((BITS) == 4 || (BITS) == 5 ? 8 : 16)
#define MINIMA(BITS) ((BITS) == 2 || (BITS) == 4 || (BITS) == 5)
#define ZERO(BITS) ((BITS) == 3 ? 4 : (BITS) == 6 ? 32 : 0)
#define HEAD(BITS) (64 + SUBS(BITS) * LANES * (MINIMA(BITS) ? 2 : 1)) /* bytes of a record before the chunks */
#define RECORD(BITS) (HEAD(BITS) + CHUNKS * (BITS) * 64)
#define LINE(BITS) (COLUMNS + (MINIMA(BITS) ? 2 * SUBS(BITS) : 0)) /* bytes of a row of activations */

static inline long lane_group_bytes(const Matrix *w)
{
    return w->k / COLUMNS * RECORD(w->bits);
}

/* A word of a chunk: the vectors of its lanes begin at `from`. 8 bits: unpacked words. */
static inline __attribute__((always_inline)) nu word_of(int bits, const char *from, int word)
{
#define VECTOR(I) (*(const nu *)(from + (I) * 64))
    if (bits == 8)
        return VECTOR(word);
    int per = bits < 4 ? 4 : 2, low_bits = 8 / per, low_mask = bits < 4 ? 0x03030303 : 0x0f0f0f0f;
    nu low = VECTOR(word / per) >> (word % per * low_bits) & low_mask;
    if (bits == low_bits)
        return low;
    /* The high bits stand at `at` in their byte, and belong at `low_bits`. */
    int is_pair = bits == 6, at = is_pair ? word % 4 * 2 : word;
    nu high = VECTOR(is_pair ? 4 + word / 4 : 8 / per);
    high = at > low_bits ? high >> (at > low_bits ? at - low_bits : 0) : high << (at > low_bits ? 0 : low_bits - at);
    return low | (high & (is_pair ? 0x30303030 : bits == 5 ? 0x10101010 : 0x04040404));
#undef VECTOR
}

/* Signed bytes, widened. */
static inline ni widened_bytes(const char *from)
{
    typedef int8_t nb __attribute__((vector_size(NATIVE / 4), aligned(1), may_alias));
#if defined(__AVX512BW__)
    return (ni)_mm512_cvtepi8_epi32((__m128i) * (const nb *)from); /* GCC 12 makes two halves of a conversion */
#else
    return __builtin_convertvector(*(const nb *)from, ni);
#endif
}

/* Rounded activations of some rows. `starts`: where the sums of a group of columns start, (BIAS - zero) · Σ q, and
 * those of a superblock's minima, BIAS · Σ q of all its columns. */
typedef struct {
    const uint32_t *x;              /* [superblocks][words of a line · WORDS][rows] */
    const float *scales;            /* [superblocks][rows] */
    const int32_t *starts, *minima; /* [superblocks][groups][rows], [superblocks][rows] */
    const char *next;               /* weights that are needed later: `pace` bytes are prefetched for each chunk */
    long pace;
} Panel;

/* Unrolled, a word's shifts are constants; not where that would take the compiler a minute. */
#if defined(DOT_IS_LONG)
#define EACH_WORD _Pragma("GCC unroll 1")
#else
#define EACH_WORD UNROLL
#endif

/* R rows of a panel and G lane groups, whose records begin at `packed`. Of FROM bits: BITS, or 8 if the weights are
 * unpacked at `wide`. */
#define TILE(NAME, R, G, BITS, FROM)                                                                                   \
    static void NAME(const Matrix *w, const Panel *p, const char *packed, const char *wide, vf *out, long out_stride)  \
    {                                                                                                                  \
        enum { N = G * PARTS, PER = 64 / SUBS(BITS), WORD = WORDS * R, HIGH = SUBS(BITS) / 4 };                        \
        long blocks = w->k / COLUMNS, record = FROM == 8 ? RECORD(w->bits) : RECORD(BITS);                             \
        long stride = blocks * record, from_stride = FROM == 8 ? blocks * 4096 : stride;                               \
        const char *next = p->next;                                                                                    \
        const uint32_t *x = p->x;                                                                                      \
        for (long block = 0; block < blocks; block++) {                                                                \
            const char *head = packed + block * record, *from = FROM == 8 ? wide + block * 4096 : head + HEAD(BITS);   \
            const int32_t *start = p->starts + block * SUBS(BITS) * R;                                                 \
            const char *scale = head + 64;                                                                             \
            ni all[R][N], sum[R][N];                                                                                   \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++)                                                                     \
                    all[i][j] = (ni){0};                                                                               \
            if (FROM != 8)                                                                                             \
                for (long at = 0; at < HEAD(BITS); at += 64)                                                           \
                    UNROLL for (int j = 0; j < G; j++)                                                                 \
                        __builtin_prefetch(head + j * stride + at + AHEAD);                                            \
            for (long chunk = 0; chunk < CHUNKS; chunk++, from += FROM * 64, x += 8 * WORD) {                          \
                if (FROM != 8) {                                                                                       \
                    long ahead = from + AHEAD - packed < stride ? AHEAD : AHEAD + (G - 1) * stride;                    \
                    UNROLL for (int j = 0; j < G; j++)                                                                 \
                        UNROLL for (int v = 0; v < FROM; v++)                                                          \
                            __builtin_prefetch(from + j * stride + v * 64 + ahead);                                    \
                } else {                                                                                               \
                    for (long at = 0; at < p->pace; at += 64)                                                          \
                        __builtin_prefetch(next + at, 0, 2);                                                           \
                    next += p->pace;                                                                                   \
                }                                                                                                      \
                EACH_WORD for (int word = 0; word < 8; word++) {                                                       \
                    if (word % PER == 0)                                                                               \
                        UNROLL for (int i = 0; i < R; i++)                                                             \
                            UNROLL for (int j = 0; j < N; j++)                                                         \
                                sum[i][j] = (ni){0} + (MINIMA(BITS) && !BIAS ? 0 : start[word / PER * R + i]);         \
                    nu q[N];                                                                                           \
                    UNROLL for (int j = 0; j < N; j++)                                                                 \
                        q[j] = word_of(FROM, from + j / PARTS * from_stride + j % PARTS * NATIVE, word);               \
                    UNROLL for (int step = 0; step < WORDS; step++)                                                    \
                        UNROLL for (int i = 0; i < R; i++)                                                             \
                            UNROLL for (int j = 0; j < N; j++)                                                         \
                                sum[i][j] = dot(sum[i][j], part(q[j], step), x[(word * WORDS + step) * R + i]);        \
                    if (word % PER == PER - 1) {                                                                       \
                        UNROLL for (int j = 0; j < N; j++) {                                                           \
                            ni scales = widened_bytes(scale + j / PARTS * stride + j % PARTS * NATIVE_LANES);          \
                            UNROLL for (int i = 0; i < R; i++)                                                         \
                                all[i][j] += sum[i][j] * scales;                                                       \
                        }                                                                                              \
                        scale += LANES;                                                                                \
                    }                                                                                                  \
                }                                                                                                      \
                start += 8 / PER * R;                                                                                  \
            }                                                                                                          \
            nf term[R][N];                                                                                             \
            UNROLL for (int j = 0; j < N; j++) {                                                                       \
                nf d = halves(head + j / PARTS * stride + j % PARTS * NATIVE / 2);                                     \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    term[i][j] = __builtin_convertvector(all[i][j], nf) * d;                                           \
            }                                                                                                          \
            if (MINIMA(BITS)) {                                                                                        \
                const char *minima = head + 64 + SUBS(BITS) * LANES;                                                   \
                UNROLL for (int i = 0; i < R; i++)                                                                     \
                    UNROLL for (int j = 0; j < N; j++)                                                                 \
                        sum[i][j] = (ni){0};                                                                           \
                UNROLL for (int word = 0; word < 2 * HIGH; word++) {                                                   \
                    if (word == HIGH)                                                                                  \
                        UNROLL for (int i = 0; i < R; i++)                                                             \
                            UNROLL for (int j = 0; j < N; j++)                                                         \
                                sum[i][j] = (sum[i][j] << 6) + p->minima[block * R + i];                               \
                    UNROLL for (int step = 0; step < WORDS; step++)                                                    \
                        UNROLL for (int j = 0; j < N; j++) {                                                           \
                            nu m = *(const nu *)(minima + word % HIGH * 64 + j / PARTS * stride + j % PARTS * NATIVE); \
                            UNROLL for (int i = 0; i < R; i++)                                                         \
                                sum[i][j] = dot(sum[i][j], part(m, step), x[(word * WORDS + step) * R + i]);           \
                        }                                                                                              \
                }                                                                                                      \
                x += 2 * HIGH * WORD;                                                                                  \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    nf d = halves(head + 32 + j / PARTS * stride + j % PARTS * NATIVE / 2);                            \
                    UNROLL for (int i = 0; i < R; i++)                                                                 \
                        term[i][j] -= __builtin_convertvector(sum[i][j], nf) * d;                                      \
                }                                                                                                      \
            }                                                                                                          \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    nf *to = (nf *)(out + i * out_stride) + j, value = term[i][j] * p->scales[block * R + i];          \
                    if (block)                                                                                         \
                        value += *to;                                                                                  \
                    *to = value;                                                                                       \
                }                                                                                                      \
        }                                                                                                              \
    }

typedef void (*Tile)(const Matrix *, const Panel *, const char *packed, const char *wide, vf *out, long out_stride);

/* Of few rows, by the number of bits. */
#define FEW_ROWS(R)                                                                                                    \
    TILE(two_##R, R, GROUPS(R), 2, 2)                                                                                  \
    TILE(two_last_##R, R, 1, 2, 2)                                                                                     \
    TILE(three_##R, R, GROUPS(R), 3, 3)                                                                                \
    TILE(three_last_##R, R, 1, 3, 3)                                                                                   \
    TILE(four_##R, R, GROUPS(R), 4, 4)                                                                                 \
    TILE(four_last_##R, R, 1, 4, 4)                                                                                    \
    TILE(five_##R, R, GROUPS(R), 5, 5)                                                                                 \
    TILE(five_last_##R, R, 1, 5, 5)                                                                                    \
    TILE(six_##R, R, GROUPS(R), 6, 6)                                                                                  \
    TILE(six_last_##R, R, 1, 6, 6)
FEW_ROWS(1) FEW_ROWS(2) FEW_ROWS(3) FEW_ROWS(4)
#define FEW_ENTRY(R)                                                                                                   \
    {{two_##R, two_last_##R}, {three_##R, three_last_##R}, {four_##R, four_last_##R}, {five_##R, five_last_##R},       \
     {six_##R, six_last_##R}}
static const Tile FEW_TILES[FEW][5][2] = {FEW_ENTRY(1), FEW_ENTRY(2), FEW_ENTRY(3), FEW_ENTRY(4)};

/* Of unpacked weights: 8 groups with minima, and 16 with and without. */
#define MANY_ROWS(R)                                                                                                   \
    TILE(wide8_##R, R, WIDE, 4, 8)                                                                                     \
    TILE(wide8_last_##R, R, 1, 4, 8)                                                                                   \
    TILE(wide16_##R, R, WIDE, 6, 8)                                                                                    \
    TILE(wide16_last_##R, R, 1, 6, 8)                                                                                  \
    TILE(wide16_minima_##R, R, WIDE, 2, 8)                                                                             \
    TILE(wide16_minima_last_##R, R, 1, 2, 8)
EACH(MANY_ROWS)
#define MANY_ENTRY(R)                                                                                                  \
    {{wide8_##R, wide8_last_##R},                                                                                      \
     {wide16_##R, wide16_last_##R},                                                                                    \
     {wide16_minima_##R, wide16_minima_last_##R}},
static const Tile MANY_TILES[MR][3][2] = {EACH(MANY_ENTRY)};

/* The chunks of `count` lane groups as bytes: [lane groups][superblocks][64 words][16][4]. */
#define UNPACK(BITS)                                                                                                   \
    static void unpack_##BITS(const Matrix *w, const char *packed, long count, char *wide)                             \
    {                                                                                                                  \
        for (long left = count * (w->k / COLUMNS); left; left--, packed += RECORD(BITS)) {                             \
            const char *from = packed + HEAD(BITS);                                                                    \
            for (long chunk = 0; chunk < CHUNKS; chunk++, from += BITS * 64, wide += 512)                              \
                UNROLL for (int word = 0; word < 8; word++)                                                            \
                    UNROLL for (int j = 0; j < PARTS; j++)                                                             \
                        *(nu *)(wide + word * 64 + j * NATIVE) = word_of(BITS, from + j * NATIVE, word);               \
        }                                                                                                              \
    }
UNPACK(2) UNPACK(3) UNPACK(4) UNPACK(5) UNPACK(6)

static char *unpack(const Matrix *w, const char *packed, long count)
{
    static void (*const of_bits[])(const Matrix *, const char *, long, char *) = {unpack_2, unpack_3, unpack_4, unpack_5,
                                                                                  unpack_6};
    char *wide = pagewire_scratch(SLOT_WEIGHTS, count * w->k * LANES);
    of_bits[w->bits - 2](w, packed, count, wide);
    return wide;
}

/* Panels: lines, then the numbers of `Panel` by superblock, and where it stands among the panels. */
static inline long line_words(const Matrix *w)
{
    return w->k / COLUMNS * (LINE(w->bits) / 4 * WORDS);
}

static inline long panel_numbers(const Matrix *w)
{
    return w->k / COLUMNS * (2 + SUBS(w->bits));
}

static long panel_bytes(const Matrix *w, long rows)
{
    return rows * (line_words(w) + panel_numbers(w)) * 4 + 4;
}

static inline Panel open_panel(const Matrix *w, const char *panel, long rows)
{
    long blocks = w->k / COLUMNS;
    const int32_t *about = (const int32_t *)panel + rows * line_words(w);
    return (Panel){(const uint32_t *)panel, (const float *)about, about + 2 * blocks * rows, about + blocks * rows, 0, 0};
}

/* The index of a panel in its product, rounded, since panels may differ by one row. It only decides what is
 * prefetched. */
static inline int32_t *index_of(const Matrix *w, const char *panel, long rows)
{
    return (int32_t *)(panel + panel_bytes(w, rows)) - 1;
}

/* Rounds a row: x · (127 / most) in each superblock. Superblocks whose numbers are all smaller than 1e-30 count as
 * zero. A row with a number that is not finite has scales of NaN. `stride`: of the scales and starts. */
static void round_row(const Matrix *w, const float *x, int8_t *line, float *scales, int32_t *starts, int32_t *minima,
                      long stride)
{
    typedef int8_t v16 __attribute__((vector_size(16), aligned(1), may_alias));
    long blocks = w->k / COLUMNS, subs = SUBS(w->bits), size = COLUMNS / subs;
    int is_finite = magnitude(x, w->k) < 0x7f800000;
    for (long b = 0; b < blocks; b++, x += COLUMNS, line += LINE(w->bits)) {
        int32_t bits = magnitude(x, COLUMNS), total = 0;
        float most, inverse;
        memcpy(&most, &bits, 4);
        inverse = is_finite && most > 1e-30f ? 127.0f / most : 0;
        for (long s = 0; s < subs; s++) {
            vi sum = {0};
            for (long i = s * size; i < (s + 1) * size; i += LANES) {
                vi q = is_finite ? rounded16(*(const vf_any *)(x + i) * inverse) : (vi){0};
                sum += q;
                *(v16 *)(line + i) = __builtin_convertvector(q, v16);
            }
            int32_t all = total_of(sum);
            total += all;
            starts[(b * subs + s) * stride] = (BIAS - ZERO(w->bits)) * all;
            if (MINIMA(w->bits)) {
                line[COLUMNS + s] = (int8_t)(all >> 6);
                line[COLUMNS + subs + s] = (int8_t)(all & 63);
            }
        }
        scales[b * stride] = is_finite ? most / 127.0f : NAN;
        minima[b * stride] = BIAS * total;
    }
}

static void pack(const Matrix *w, const Activations *a, long first, long rows, void *panel)
{
    long bytes = w->k / COLUMNS * LINE(w->bits);
    int8_t *line = pagewire_scratch(SLOT_WEIGHTS, padded(bytes, 64) + rows * bytes * WORDS);
    char *lines = (char *)line + padded(bytes, 64);
    Panel p = open_panel(w, panel, rows);
    const float *pointers[MR];
    for (long i = 0; i < rows; i++) {
        round_row(w, row_of(a, first + i), line, (float *)p.scales + i, (int32_t *)p.starts + i, (int32_t *)p.minima + i,
                  rows);
        int8_t *words = (int8_t *)lines + i * bytes * WORDS;
        pointers[i] = (const float *)words;
        if (WORDS == 1)
            memcpy(words, line, bytes);
        else
            to_halves(line, bytes, (int16_t *)words);
    }
    pagewire_interleave(pointers, rows, line_words(w), line_words(w), panel);
    *index_of(w, panel, rows) = (int32_t)((first + rows / 2) / rows);
}

static const char *prepare(const Matrix *w, long from, long to, long num_panels)
{
    const char *packed = w->w + from * lane_group_bytes(w);
    return num_panels == 1 ? packed : unpack(w, packed, to - from);
}

static void sums(const Matrix *w, const void *panel, long rows, const char *weights, long num_panels, long from,
                 long to, vf *out)
{
    long stride = to - from, bytes = lane_group_bytes(w), is_few = num_panels == 1 && rows <= FEW;
    long groups = is_few ? GROUPS(rows) : WIDE;
    const char *packed = w->w + from * bytes;
    const Tile *tiles = is_few ? FEW_TILES[rows - 1][w->bits - 2]
                               : MANY_TILES[rows - 1][MINIMA(w->bits) ? (SUBS(w->bits) == 8 ? 0 : 2) : 1];
    Panel p = open_panel(w, panel, rows);
    /* The panels of a block fetch a share each of the lane groups that follow; one alone fetches all. */
    long index = *index_of(w, panel, rows) % num_panels;
    p.next = packed + stride * bytes + index * (stride * bytes / num_panels);
    for (long i = 0, size; i < stride; i += size) {
        int is_last = i + groups > stride;
        size = is_last ? 1 : groups;
        const char *wide = weights + i * w->k * LANES;
        if (num_panels == 1 && !is_few) {
            wide = unpack(w, packed + i * bytes, size);
            p.next = packed + (i + size) * bytes;
        }
        p.pace = size * bytes / (w->k / 32) / num_panels;
        tiles[is_last](w, &p, packed + i * bytes, wide, out + i, stride);
        p.next += size * bytes / num_panels;
    }
}

const KindOps pagewire_superblocks = {MR, panel_bytes, pack, prepare, sums, WIDE};

/* One row of a superblock as a GGUF file has it: its numbers, scales and minima, and where its float16 numbers are. */
typedef struct {
    uint8_t numbers[COLUMNS], minima[16];
    int8_t scales[16];
    long d, dmin; /* dmin: -1 if there is none */
} Row;

/* The i-th of numbers of `bits` bits: of each run of bytes all lowest bits first, then all next ones. */
static inline int spread(const uint8_t *from, long run, int bits, long i)
{
    long per = 8 / bits;
    return from[i / (run * per) * run + i % run] >> (i / run % per * bits) & ((1 << bits) - 1);
}

static inline __attribute__((always_inline)) void read_row(int bits, const uint8_t *in, Row *row)
{
    if (bits == 4 || bits == 5) {
        row->d = 0, row->dmin = 2;
        for (int i = 0; i < 4; i++) {
            row->scales[i] = in[4 + i] & 63;
            row->minima[i] = in[8 + i] & 63;
            row->scales[i + 4] = (in[12 + i] & 15) | (in[4 + i] >> 2 & 48);
            row->minima[i + 4] = (in[12 + i] >> 4) | (in[8 + i] >> 2 & 48);
        }
        for (long i = 0; i < COLUMNS; i++)
            row->numbers[i] = bits == 4 ? spread(in + 16, 32, 4, i)
                                        : spread(in + 48, 32, 4, i) | spread(in + 16, 32, 1, i) << 4;
    } else if (bits == 6) {
        row->d = 208, row->dmin = -1;
        memcpy(row->scales, in + 192, 16);
        for (long i = 0; i < COLUMNS; i++)
            row->numbers[i] = spread(in, 64, 4, i) | spread(in + 128, 32, 2, i) << 4;
    } else if (bits == 2) {
        row->d = 80, row->dmin = 82;
        for (int i = 0; i < 16; i++)
            row->scales[i] = in[i] & 15, row->minima[i] = in[i] >> 4;
        for (long i = 0; i < COLUMNS; i++)
            row->numbers[i] = spread(in + 16, 32, 2, i);
    } else {
        row->d = 108, row->dmin = -1;
        for (int i = 0; i < 16; i++)
            row->scales[i] = (int8_t)((spread(in + 96, 8, 4, i) | spread(in + 104, 4, 2, i) << 4) - 32);
        for (long i = 0; i < COLUMNS; i++)
            row->numbers[i] = spread(in + 32, 32, 2, i) | spread(in, 32, 1, i) << 2;
    }
}

typedef struct {
    const uint8_t *blocks;
    char *packed;
    long n, k, is_gated;
} Pack;

static inline long block_bytes(long bits)
{
    return bits == 2 ? 84 : bits == 3 ? 110 : bits == 4 ? 144 : bits == 5 ? 176 : 210;
}

/* Packs the 8 words of a chunk, [8][16], into its vectors. */
static inline __attribute__((always_inline)) void pack_chunk(int bits, const vu *words, vu *out)
{
    long low = bits < 4 ? 2 : 4, per = 8 / low;
    for (long v = 0; v < low; v++) {
        out[v] = (vu){0};
        for (long i = 0; i < per; i++)
            out[v] |= (words[v * per + i] & (bits < 4 ? 0x03030303 : 0x0f0f0f0f)) << (i * low);
    }
    if (bits == 6) {
        for (long v = 0; v < 2; v++) {
            out[4 + v] = (vu){0};
            for (long i = 0; i < 4; i++)
                out[4 + v] |= (words[v * 4 + i] >> 4 & 0x03030303) << (i * 2);
        }
    } else if (bits == 3 || bits == 5) {
        out[low] = (vu){0};
        for (long i = 0; i < 8; i++)
            out[low] |= (words[i] >> low & 0x01010101) << i;
    }
}

#define PACK(BITS)                                                                                                     \
    static void pack_lane_group_##BITS(const void *about, long lane_group)                                             \
    {                                                                                                                  \
        const Pack *a = about;                                                                                         \
        long blocks = a->k / COLUMNS;                                                                                  \
        char *out = a->packed + lane_group * blocks * RECORD(BITS);                                                    \
        vu words[COLUMNS / 4];                                                                                         \
        for (long block = 0; block < blocks; block++, out += RECORD(BITS)) {                                           \
            memset(out, 0, HEAD(BITS));                                                                                \
            for (long l = 0; l < LANES; l++) {                                                                         \
                long row = row_in(a->n, a->is_gated, lane_group, l);                                                   \
                Row r = {0};                                                                                           \
                if (row >= 0) {                                                                                        \
                    const uint8_t *in = a->blocks + (row * blocks + block) * block_bytes(BITS);                        \
                    read_row(BITS, in, &r);                                                                            \
                    memcpy(out + l * 2, in + r.d, 2);                                                                  \
                    if (MINIMA(BITS))                                                                                  \
                        memcpy(out + 32 + l * 2, in + r.dmin, 2);                                                      \
                }                                                                                                      \
                for (long s = 0; s < SUBS(BITS); s++) {                                                                \
                    out[64 + s * LANES + l] = r.scales[s];                                                             \
                    if (MINIMA(BITS))                                                                                  \
                        out[64 + SUBS(BITS) * LANES + s / 4 * 64 + l * 4 + s % 4] = (char)r.minima[s];                 \
                }                                                                                                      \
                for (long i = 0; i < COLUMNS / 4; i++)                                                                 \
                    memcpy((uint32_t *)(words + i) + l, r.numbers + i * 4, 4);                                         \
            }                                                                                                          \
            for (long chunk = 0; chunk < CHUNKS; chunk++)                                                              \
                pack_chunk(BITS, words + chunk * 8, (vu *)(out + HEAD(BITS)) + chunk * BITS);                          \
        }                                                                                                              \
    }
PACK(2) PACK(3) PACK(4) PACK(5) PACK(6)

/* blocks: [n][k / 256] superblocks as a GGUF file has them → packed. */
void pagewire_superblocks_pack(const uint8_t *blocks, char *packed, long n, long k, long bits, long is_gated)
{
    static const Task of_bits[] = {pack_lane_group_2, pack_lane_group_3, pack_lane_group_4, pack_lane_group_5,
                                   pack_lane_group_6};
    pagewire_run(num_groups(n, is_gated), of_bits[bits - 2], &(Pack){blocks, packed, n, k, is_gated});
}

void pagewire_superblocks_lookup(const Matrix *w, long row, float *y)
{
    long bits = w->bits, half = w->n / 2, lane_group = row / LANES, lane = row % LANES, subs = SUBS(bits);
    if (w->is_gated) {
        long in_half = row % half;
        lane_group = in_half / LANES * 2 + row / half, lane = in_half % LANES;
    }
    const char *head = w->w + lane_group * lane_group_bytes(w);
    char *wide = unpack(w, head, 1);
    for (long block = 0; block < w->k / COLUMNS; block++, head += RECORD(bits), wide += 4096) {
        long at = lane / NATIVE_LANES * NATIVE_LANES;
        float d = halves(head + at * 2)[lane - at], dmin = halves(head + 32 + at * 2)[lane - at];
        for (long i = 0; i < COLUMNS; i++) {
            long sub = i / (COLUMNS / subs);
            float scale = d * (float)((const int8_t *)head)[64 + sub * LANES + lane];
            float value = (float)(((const uint8_t *)wide)[i / 4 * 64 + lane * 4 + i % 4] - ZERO(bits));
            float offset = 0;
            if (MINIMA(bits))
                offset = dmin * (float)((const uint8_t *)head)[64 + subs * LANES + sub / 4 * 64 + lane * 4 + sub % 4];
            *y++ = value * scale - offset;
        }
    }
}
