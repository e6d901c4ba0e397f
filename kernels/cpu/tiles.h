/* The matrix instructions of AMX: eight registers of 16 rows of 64 bytes. With PAGEWIRE_EMULATE_TILES they are plain C
 * with the same bits, so that kernels written for them are tested on every machine.
 *
 * Bits are those of Intel's manual (volume 2, TDPBF16PS, TDPBSUD): a product of bfloat16 keeps two sums an element, of
 * the even and the odd of the 32 columns, adds them, and adds the result to the tile; denormals count as zero, and
 * rounding is to nearest. Integer products are exact. The first operand holds rows of activations, the second
 * weights: row r of it holds columns 2r and 2r + 1 of 16 outputs (bfloat16), or 4r … 4r + 3 (8 bits).
 *
 * Tile numbers are constants.
 */
#pragma once
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_BYTES = 1024 };

#ifdef PAGEWIRE_EMULATE_TILES
#include <math.h>
#include <string.h>

static _Thread_local union {
    float floats[16][16];
    int32_t ints[16][16];
    uint16_t halves[16][32];
    uint8_t bytes[16][64];
    int8_t signed_bytes[16][64];
} emulated[8];

static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}

static inline void tile_zero(int t)
{
    memset(&emulated[t], 0, sizeof emulated[t]);
}

static inline void tile_load(int t, const void *from, long stride)
{
    for (int r = 0; r < 16; r++)
        memcpy(emulated[t].bytes[r], (const char *)from + r * stride, 64);
}

static inline void tile_store(int t, void *to, long stride)
{
    for (int r = 0; r < 16; r++)
        memcpy((char *)to + r * stride, emulated[t].bytes[r], 64);
}

/* 0 for a denormal. */
static inline float tile_flushed(float x)
{
    return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x;
}

static inline float tile_half(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return tile_flushed(x);
}

static inline void tile_dot_bf16(int c, int a, int b)
{
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < 16; k++) {
                even = tile_flushed(
                    fmaf(tile_half(emulated[a].halves[m][2 * k]), tile_half(emulated[b].halves[k][2 * n]), even));
                odd = tile_flushed(fmaf(tile_half(emulated[a].halves[m][2 * k + 1]),
                                        tile_half(emulated[b].halves[k][2 * n + 1]), odd));
            }
            volatile float both = tile_flushed(even + odd); /* no contraction of the two sums */
            emulated[c].floats[m][n] = tile_flushed(tile_flushed(emulated[c].floats[m][n]) + both);
        }
}

/* Signed 8 bits times unsigned 8 bits. */
static inline void tile_dot_su8(int c, int a, int b)
{
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < 64; k++)
                emulated[c].ints[m][n] += emulated[a].signed_bytes[m][k] * emulated[b].bytes[k / 4][4 * n + k % 4];
}
#else
#include <immintrin.h>

/* Lets this thread use the tiles, all of full size. torch's products change the configuration, so every task begins
 * with it. */
static inline void tiles_begin(void)
{
    static const struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64)))
    config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

static inline void tiles_end(void)
{
    _tile_release();
}

#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_dot_bf16(c, a, b) _tile_dpbf16ps(c, a, b)
#define tile_dot_su8(c, a, b) _tile_dpbsud(c, a, b)
#endif
