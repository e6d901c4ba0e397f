/* The products of attention with R rows of queries × G groups of 16 keys or 16 dimensions, whose sums stay in registers.
 *
 * A score is summed over the dimensions in ascending order, a chunk's part of the output over the keys in ascending
 * order, from zero; then sums · factor + part is one multiply-add. Neither R nor G changes that. With AMX the sums are
 * multiplied first and a tile of products is added to them. A key whose weight is zero changes nothing.
 */
#include "attention.h"

/* Groups for R rows: as many as leave registers for the operands. */
#ifdef __AVX512F__
#define KEY_GROUPS(R) ((R) <= 6 ? 4 : 2)
#define DIM_GROUPS(R) ((R) <= 3 ? 8 : (R) <= 6 ? 4 : 2)
#define FEWER_GROUPS(R) ((R) <= 3 ? 4 : (R) <= 6 ? 2 : 1)
#else
#define KEY_GROUPS(R) ((R) <= 1 ? 4 : (R) <= 3 ? 2 : 1)
#define DIM_GROUPS(R) KEY_GROUPS(R)
#define FEWER_GROUPS(R) 1
#endif

#define X(T, W) ((const T *)x)[(W) * rows + i] /* of the i-th row */
#define ADD_F32(SUM, WORD) SUM += (nf)(WORD) * X(float, w);
#define ADD_EVEN(SUM, WORD) SUM += (nf)((WORD) << 16) * X(float, 2 * w);
#define ADD_ODD(SUM, WORD) SUM += (nf)((WORD) & 0xffff0000u) * X(float, 2 * w + 1);
#define ADD_DOT(SUM, WORD) SUM = dot(SUM, WORD, X(uint32_t, w));
#define ADD_NONE(SUM, WORD)

#define SCORES(NAME, R, G, FIRST, SECOND)                                                                              \
    static void NAME(const void *x, const char *keys, long words, float *out)                                          \
    {                                                                                                                  \
        enum { rows = R, N = G * PARTS };                                                                              \
        nf sum[R][N] = {{{0}}};                                                                                        \
        for (long w = 0; w < words; w++) {                                                                             \
            nu word[N];                                                                                                \
            UNROLL for (int j = 0; j < N; j++)                                                                         \
                word[j] = ((const nu *)keys)[w * CHUNK_GROUPS * PARTS + j];                                            \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    FIRST(sum[i][j], word[j])                                                                          \
                }                                                                                                      \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    SECOND(sum[i][j], word[j])                                                                         \
                }                                                                                                      \
        }                                                                                                              \
        UNROLL for (int i = 0; i < R; i++)                                                                             \
            UNROLL for (int j = 0; j < N; j++)                                                                         \
                ((nf *)out)[i * CHUNK_GROUPS * PARTS + j] = sum[i][j];                                                 \
    }

/* Bfloat16 numbers for one register. */
static inline nf load_wide(const char *from)
{
    typedef uint16_t half __attribute__((vector_size(NATIVE / 2), aligned(2), may_alias));
    return (nf)(__builtin_convertvector(*(const half *)from, nu) << 16);
}

#define LOAD_F32(ROW, J) ((const nf_any *)(ROW))[J]
#define LOAD_WIDE(ROW, J) load_wide((ROW) + (J) * (NATIVE / 2))
#define LOAD_DOT(ROW, J) ((const nu *)(ROW))[J]
#define ADD_FLOAT(SUM, V) SUM += V * ((const float *)weights)[i * CHUNK + k];
#define ADD_PAIR(SUM, V) SUM = dot(SUM, V, ((const uint32_t *)weights)[i * (CHUNK / 2) + k]);

#define VALUES(NAME, R, G, TYPE, LOAD, ADD)                                                                            \
    static void NAME(const void *weights, const char *const *values, long offset, long from, long to, long dim,        \
                     float *sums, const float *factors)                                                                \
    {                                                                                                                  \
        enum { N = G * PARTS };                                                                                        \
        nf sum[R][N] = {{{0}}};                                                                                        \
        for (long k = from; k < to; k++) {                                                                             \
            const char *row = values[k] + offset;                                                                      \
            TYPE v[N];                                                                                                 \
            UNROLL for (int j = 0; j < N; j++)                                                                         \
                v[j] = LOAD(row, j);                                                                                   \
            UNROLL for (int i = 0; i < R; i++)                                                                         \
                UNROLL for (int j = 0; j < N; j++) {                                                                   \
                    ADD(sum[i][j], v[j])                                                                               \
                }                                                                                                      \
        }                                                                                                              \
        UNROLL for (int i = 0; i < R; i++)                                                                             \
            UNROLL for (int j = 0; j < N; j++) {                                                                       \
                nf *to_sum = (nf *)(sums + i * dim) + j;                                                               \
                *to_sum = *to_sum * factors[i] + sum[i][j];                                                            \
            }                                                                                                          \
    }

typedef void (*Scores)(const void *x, const char *keys, long words, float *out);
typedef void (*Values)(const void *weights, const char *const *values, long offset, long from, long to, long dim,
                       float *sums, const float *factors);

#define KERNELS_OF(KIND, R, FIRST, SECOND, TYPE, LOAD, ADD)                                                            \
    SCORES(KIND##_scores_##R, R, KEY_GROUPS(R), FIRST, SECOND)                                                         \
    SCORES(KIND##_score_##R, R, 1, FIRST, SECOND)                                                                      \
    VALUES(KIND##_values_##R, R, DIM_GROUPS(R), TYPE, LOAD, ADD)                                                       \
    VALUES(KIND##_fewer_##R, R, FEWER_GROUPS(R), TYPE, LOAD, ADD)                                                      \
    VALUES(KIND##_value_##R, R, 1, TYPE, LOAD, ADD)
#define KERNELS(R)                                                                                                     \
    KERNELS_OF(f32, R, ADD_F32, ADD_NONE, nf, LOAD_F32, ADD_FLOAT)                                                     \
    KERNELS_OF(wide, R, ADD_EVEN, ADD_ODD, nf, LOAD_WIDE, ADD_FLOAT)
EACH(KERNELS)
#ifdef HAS_DOT
#define DOT_KERNELS(R) KERNELS_OF(dot, R, ADD_DOT, ADD_NONE, nu, LOAD_DOT, ADD_PAIR)
EACH(DOT_KERNELS)
#endif

typedef struct {
    Scores many_keys, one_group;
    Values many_dims, fewer_dims, one_dim;
} Kernel;
#define ENTRY(KIND, R) {KIND##_scores_##R, KIND##_score_##R, KIND##_values_##R, KIND##_fewer_##R, KIND##_value_##R},
#define F32_ENTRY(R) ENTRY(f32, R)
#define WIDE_ENTRY(R) ENTRY(wide, R)
#define DOT_ENTRY(R) ENTRY(dot, R)
static const Kernel KERNEL[][MR] = {
    {EACH(F32_ENTRY)},
    {EACH(WIDE_ENTRY)},
#ifdef HAS_DOT
    {EACH(DOT_ENTRY)},
#endif
};

#ifdef PAGEWIRE_AMX
static void tile_scores(const char *queries, long rows, const char *keys, long words, long from, long to, float *scores)
{
    enum { LINE = CHUNK * 4 };
    long steps = (words + 15) / 16;
    const char *high = queries + steps * TILE_BYTES;
    for (long g = from; g < to; g += 2) {
        int has_second = g + 1 < to;
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (long k = 0; k < steps; k++) {
            const char *key = keys + k * 16 * LINE + g * 64;
            tile_load(4, queries + k * TILE_BYTES, 64);
            tile_load(6, key, LINE);
            tile_dot_bf16(0, 4, 6);
            if (has_second) {
                tile_load(7, key + 64, LINE);
                tile_dot_bf16(1, 4, 7);
            }
            if (rows > TILE_ROWS) {
                tile_load(5, high + k * TILE_BYTES, 64);
                tile_dot_bf16(2, 5, 6);
                if (has_second)
                    tile_dot_bf16(3, 5, 7);
            }
        }
        float *out = scores + g * LANES;
        tile_store(0, out, LINE);
        if (has_second)
            tile_store(1, out + LANES, LINE);
        if (rows > TILE_ROWS) {
            tile_store(2, out + TILE_ROWS * CHUNK, LINE);
            if (has_second)
                tile_store(3, out + TILE_ROWS * CHUNK + LANES, LINE);
        }
    }
}

static void tile_values(const char *weights, long rows, const char *values, long from, long to, long dim, float *sums,
                        const float *factors)
{
    for (long i = 0; i < rows; i++)
        if (factors[i] != 1)
            for (long d = 0; d < dim; d += LANES)
                *(vf *)(sums + i * dim + d) *= factors[i];
    for (long d = 0; d < dim; d += 2 * LANES) {
        int has_second = d + LANES < dim;
        float *out = sums + d, *high = out + TILE_ROWS * dim;
        tile_load(0, out, dim * 4);
        if (has_second)
            tile_load(1, out + LANES, dim * 4);
        if (rows > TILE_ROWS) {
            tile_load(2, high, dim * 4);
            if (has_second)
                tile_load(3, high + LANES, dim * 4);
        }
        for (long k = from / 16 * 16; k < to; k += 16) {
            const char *value = values + (k * dim + d) * 4, *weight = weights + k * 4;
            tile_load(4, weight, CHUNK * 2);
            tile_load(6, value, dim * 4);
            tile_dot_bf16(0, 4, 6);
            if (has_second) {
                tile_load(7, value + 64, dim * 4);
                tile_dot_bf16(1, 4, 7);
            }
            if (rows > TILE_ROWS) {
                tile_load(5, weight + TILE_ROWS * CHUNK * 2, CHUNK * 2);
                tile_dot_bf16(2, 5, 6);
                if (has_second)
                    tile_dot_bf16(3, 5, 7);
            }
        }
        tile_store(0, out, dim * 4);
        if (has_second)
            tile_store(1, out + LANES, dim * 4);
        if (rows > TILE_ROWS) {
            tile_store(2, high, dim * 4);
            if (has_second)
                tile_store(3, high + LANES, dim * 4);
        }
    }
}
#endif

void pagewire_scores(enum Mode mode, const void *queries, long rows, const char *keys, long words, long from, long to,
                     float *scores)
{
#ifdef PAGEWIRE_AMX
    if (mode == MODE_DOT) {
        tile_scores(queries, rows, keys, words, from, to, scores);
        return;
    }
#endif
    const Kernel *kernel = &KERNEL[mode][rows - 1];
    for (long many = KEY_GROUPS(rows); from + many <= to; from += many)
        kernel->many_keys(queries, keys + from * 64, words, scores + from * LANES);
    for (; from < to; from++)
        kernel->one_group(queries, keys + from * 64, words, scores + from * LANES);
}

void pagewire_values(enum Mode mode, const void *weights, long rows, const char *const *values, long from, long to,
                     long dim, float *sums, const float *factors)
{
#ifdef PAGEWIRE_AMX
    if (mode == MODE_DOT) {
        tile_values(weights, rows, values[0], from, to, dim, sums, factors);
        return;
    }
#endif
    const Kernel *kernel = &KERNEL[mode][rows - 1];
    long bytes = mode == MODE_WIDE ? 2 : 4, d = 0; /* of a number or a pair */
    for (long many = DIM_GROUPS(rows) * LANES; d + many <= dim; d += many)
        kernel->many_dims(weights, values, d * bytes, from, to, dim, sums + d, factors);
    for (long many = FEWER_GROUPS(rows) * LANES; d + many <= dim; d += many)
        kernel->fewer_dims(weights, values, d * bytes, from, to, dim, sums + d, factors);
    for (; d < dim; d += LANES)
        kernel->one_dim(weights, values, d * bytes, from, to, dim, sums + d, factors);
}
