/* The two products of attention, over one chunk of keys; `attention_products.c` has them, `attention.c` calls them. */
#pragma once
#include "dot.h"
#include "product.h"

enum { CHUNK = 64, CHUNK_GROUPS = CHUNK / LANES };

/* How a product is computed. */
enum Mode {
    MODE_F32,  /* float32 keys and values */
    MODE_WIDE, /* bfloat16 keys and values, widened */
    MODE_DOT,  /* bfloat16 throughout: pairs of bfloat16 queries or softmax weights too */
};

#if defined(PAGEWIRE_AMX) || defined(HAS_DOT)
#define CAN_DOT 1
#else
#define CAN_DOT 0
#endif
#ifdef PAGEWIRE_AMX
enum { DOT_ROWS = 2 * TILE_ROWS }; /* in a tile of queries of MODE_DOT */
#else
enum { DOT_ROWS = MR };
#endif
enum { MAX_TILE = 32 }; /* at least MR and DOT_ROWS */

/* scores[row][key] = queries[row] · keys[key] for the key groups [from, to) of a chunk. keys: [words][CHUNK] words of
 * 32 bits; a word is a float32 or two adjacent bfloat16. queries: [words][rows], float32, in MODE_DOT words; for AMX
 * [rows / 16][words / 16][16 rows][16 words], padded with zeros. scores: [rows][CHUNK], for AMX with padded rows. */
void pagewire_scores(enum Mode mode, const void *queries, long rows, const char *keys, long words, long from, long to,
                     float *scores);

/* sums[row] = sums[row] · factors[row] + Σ weights[row][key] · values[key] for the keys [from, to) of a chunk, in
 * MODE_DOT the pairs of keys. weights: [rows][CHUNK] float32, in MODE_DOT bfloat16. values[key]: dim float32 or
 * bfloat16, in MODE_DOT for a pair of keys dim words of two bfloat16; for AMX values[i] = values[0] + i · dim words.
 * sums: [rows][dim], for AMX with padded rows. */
void pagewire_values(enum Mode mode, const void *weights, long rows, const char *const *values, long from, long to,
                     long dim, float *sums, const float *factors);
