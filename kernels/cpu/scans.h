/* The operations of recurrent mixers: depthwise convolution, the scans, and the gated norm. All numbers are float32.
 *
 * A scan takes one position after another, and its sums over a state's inner dimension run in index order. So the bits of
 * a position depend on the state before it and on its own inputs, and not on how a sequence is cut into steps, on the
 * other rows of a step, or on the number of threads.
 */
#pragma once
#include "product.h"

/* The rows of a step, and the pages in which their states lie. The states of one row lie in `pages` pages of memory,
 * which need not be adjacent; a page number below zero stands for zeros to read and for nothing to write. Pages that are
 * written belong to one row; pages that are read may serve several rows, and a row may read the pages that it writes. */
typedef struct {
    char *memory;                /* equal pages */
    const int64_t *counts;       /* [rows]: tokens; a step's tokens are packed, row after row */
    const int32_t *read;         /* [rows][pages]: the state before a row's first token */
    const int32_t *written;      /* [rows][pages]: where the state goes after its last token */
    const int64_t *keep_rows;    /* [keeps], ascending: the row whose state is kept in the midst of the step */
    const int64_t *keep_counts;  /* [keeps], ascending within a row: after how many of the row's tokens */
    const int32_t *keep_pages;   /* [keeps][pages]: where it is kept */
    long page_bytes, rows, pages, keeps;
} StateRows;

/* Where the states of one layer lie in a row's pages. The state of a unit (a head, a group of 16 channels, or all of a
 * convolution) is contiguous, and `per_tile` units follow each other in a tile. Tile i begins at byte offsets[i] of the
 * row's page number shelves[i]. */
typedef struct {
    const int32_t *shelves;
    const int64_t *offsets; /* multiples of 4 */
    long per_tile;
} Tiles;

/* Columns of activations: the first token's, and the numbers between tokens. */
typedef struct {
    float *x;
    long stride;
} View;

enum { ACT_NONE, ACT_SILU, ACT_SIGMOID };

/* out[t] = act(sum over j of weight[j] * x[t - taps + 1 + j] + bias). State: the last taps - 1 rows of x, the oldest
 * first, [taps - 1][channels], one unit. `out` must not overlap x. */
typedef struct {
    View x, out;         /* [channels] */
    const float *weight; /* [taps][channels] */
    const float *bias;   /* [channels], or 0 */
    long channels, taps, act;
    Tiles tiles;
} Conv;

/* The gated delta rule. For each value head, with q and k divided by their length (and q by the root of key_dim), b =
 * beta_scale * sigmoid(beta) and g = exp(a * softplus(decay + dt_bias)), for a head or for each of its keys:
 *   S = g * S;  S += k x (b * (v - k S));  out = q S.      State: [key_dim][value_dim] for each value head. */
typedef struct {
    View q, k;            /* [key_heads][key_dim]; value_heads / key_heads adjacent value heads share a key head */
    View v, out;          /* [value_heads][value_dim] */
    View beta;            /* [value_heads] */
    View decay;           /* [value_heads], or with per_channel [value_heads][key_dim] */
    const float *a;       /* [value_heads]: -exp(A_log) */
    const float *dt_bias; /* as decay */
    long key_heads, value_heads, key_dim, value_dim, per_channel;
    Tiles tiles;
    float beta_scale;
} ScanDelta;

/* Mamba 1. For each channel, with dt = softplus(dt + dt_bias):
 *   S[n] = exp(a[n] * dt) * S[n] + dt * b[n] * x;  out = sum over n of S[n] * c[n] + d * x.
 * Channels come in groups of 16, the last one padded. State: [state_dim][16] for each group. */
typedef struct {
    View x, dt, out;      /* [channels] */
    View b, c;            /* [state_dim] */
    const float *a;       /* [groups][state_dim][16]: -exp(A_log), padded with anything finite */
    const float *dt_bias; /* [channels], or 0 */
    const float *d;       /* [channels], or 0 */
    long channels, state_dim;
    Tiles tiles;
} ScanMamba1;

/* Mamba 2. For each head, with dt = softplus(dt + dt_bias) between dt_min and dt_max:
 *   S = exp(a * dt) * S + (dt * b) x x;  out = c S + d * x.      State: [state_dim][head_dim] for each head. */
typedef struct {
    View x, out;          /* [heads][head_dim] */
    View b, c;            /* [groups][state_dim]; heads / groups adjacent heads share a group */
    View dt;              /* [heads] */
    const float *a;       /* [heads]: -exp(A_log) */
    const float *dt_bias; /* [heads], or 0 */
    const float *d;       /* [heads], or 0 */
    long heads, head_dim, state_dim, groups;
    float dt_min, dt_max;
    Tiles tiles;
} ScanMamba2;

/* Lightning attention. For each head: S = decay * S + k x v;  out = q S.      State: [head_dim][head_dim] for each. */
typedef struct {
    View q, k, v, out;  /* [heads][head_dim] */
    const float *decay; /* [heads] */
    long heads, head_dim;
    Tiles tiles;
} ScanLightning;

/* out = norm(x) * act(z), or with gate_first norm(x * act(z)): x / sqrt(mean of squares + eps) * weight over groups of
 * `size` numbers. The weight of num_weights numbers is repeated; with none there is no norm. `out` may be x or z. */
typedef struct {
    View x, z, out; /* [width] */
    const float *weight;
    long num_weights, width, size, act, gate_first;
    float eps;
} GatedNorm;

void pagewire_conv(const Conv *a, const StateRows *rows);
void pagewire_scan_delta(const ScanDelta *a, const StateRows *rows);
void pagewire_scan_mamba1(const ScanMamba1 *a, const StateRows *rows);
void pagewire_scan_mamba2(const ScanMamba2 *a, const StateRows *rows);
void pagewire_scan_lightning(const ScanLightning *a, const StateRows *rows);
void pagewire_gated_norm(const GatedNorm *a, long m);

/* Runs `advance` for some units of all rows: it takes `count` tokens of the step, from `first` on, through the state of a
 * unit, in place. */
typedef void (*Advance)(const void *about, float *state, long first, long count, long unit);
void pagewire_run_units(Advance advance, const void *about, const StateRows *rows, const Tiles *tiles, long units,
                        long unit_floats);

/* Where a unit's state lies in a row's pages; 0 if it lies nowhere. */
static inline float *state_at(const StateRows *r, const Tiles *t, const int32_t *pages, long unit, long unit_floats)
{
    long tile = unit / t->per_tile, page = pages[t->shelves[tile]];
    return page < 0 ? 0
                    : (float *)(r->memory + page * r->page_bytes + t->offsets[tile] + unit % t->per_tile * unit_floats * 4);
}

/* Up to 16 numbers, the others 0. */
static inline vf load_some(const float *from, long n)
{
    vf x = {0};
    if (n >= LANES)
        return *(const vf_any *)from;
    memcpy(&x, from, n * 4);
    return x;
}

static inline void store_some(vf x, float *to, long n)
{
    if (n >= LANES)
        *(vf_any *)to = x;
    else
        memcpy(to, &x, n * 4);
}

/* e^x, and NaN of NaN. */
static inline vf exp_nan16(vf x)
{
    return select16(x != x, x, exp16(x));
}

static inline vf sigmoid16(vf x)
{
    return 1.0f / (exp_nan16(-x) + 1.0f);
}

static inline vf act16(vf x, long act)
{
    return act == ACT_SILU ? silu16(x) : act == ACT_SIGMOID ? sigmoid16(x) : x;
}
