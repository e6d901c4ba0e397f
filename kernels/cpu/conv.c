/* The depthwise causal convolution of recurrent mixers, and their gated norm; scans.h says what they compute. */
#include <math.h>

#include "scans.h"

enum { SLOT_PAST = SLOT_ATTENTION }; /* no attention runs at the same time */
enum { FEW = 8192 };                 /* numbers that one thread handles faster than another takes a task */

typedef struct {
    const Conv *conv;
    const StateRows *rows;
    const long *starts;
    long width, row_tasks; /* channels of a task; tasks of a row */
} RunConv;

/* The inputs that a state after `count` tokens holds. past: the rows before the first token. */
static void write_state(const Conv *a, const float *past, long start, long count, long from, long num, float *state)
{
    for (long j = 0; state && j < a->taps - 1; j++) {
        long token = count - (a->taps - 1) + j;
        const float *x = token < 0 ? past + (token + a->taps - 1) * num : a->x.x + (start + token) * a->x.stride + from;
        memcpy(state + j * a->channels + from, x, num * 4);
    }
}

static void conv_channels(const void *about, long i)
{
    const RunConv *run = about;
    const Conv *a = run->conv;
    const StateRows *r = run->rows;
    long row = i / run->row_tasks, from = i % run->row_tasks * run->width, num = a->channels - from;
    long taps = a->taps, start = run->starts[row], count = r->counts[row], floats = (taps - 1) * a->channels;
    num = num < run->width ? num : run->width;
    const float *read = state_at(r, &a->tiles, r->read + row * r->pages, 0, floats);
    float *past = pagewire_scratch(SLOT_PAST, taps * num * 4); /* a copy, since the state may be written in place */
    for (long j = 0; j < taps - 1; j++)
        if (read)
            memcpy(past + j * num, read + j * a->channels + from, num * 4);
        else
            memset(past + j * num, 0, num * 4);
    for (long token = 0; token < count; token++)
        for (long c = 0; c < num; c += LANES) {
            vf sum = {0};
            for (long j = 0; j < taps; j++) {
                long of = token - (taps - 1) + j;
                const float *x = of < 0 ? past + (of + taps - 1) * num : a->x.x + (start + of) * a->x.stride + from;
                sum += load_some(a->weight + j * a->channels + from + c, num - c) * load_some(x + c, num - c);
            }
            if (a->bias)
                sum += load_some(a->bias + from + c, num - c);
            store_some(act16(sum, a->act), a->out.x + (start + token) * a->out.stride + from + c, num - c);
        }
    for (long k = 0; k < r->keeps; k++)
        if (r->keep_rows[k] == row)
            write_state(a, past, start, r->keep_counts[k], from, num,
                        state_at(r, &a->tiles, r->keep_pages + k * r->pages, 0, floats));
    write_state(a, past, start, count, from, num, state_at(r, &a->tiles, r->written + row * r->pages, 0, floats));
}

void pagewire_conv(const Conv *a, const StateRows *rows)
{
    if (!rows->rows)
        return;
    long starts[rows->rows], tokens = 0, most = 1;
    for (long row = 0; row < rows->rows; row++) {
        starts[row] = tokens;
        tokens += rows->counts[row];
        most = rows->counts[row] > most ? rows->counts[row] : most;
    }
    long width = padded(FEW / most + 1, 4 * LANES);
    RunConv run = {a, rows, starts, width < a->channels ? width : a->channels};
    run.row_tasks = (a->channels + run.width - 1) / run.width;
    long tasks = rows->rows * run.row_tasks;
    if (tokens * a->channels < 2 * FEW)
        for (long i = 0; i < tasks; i++)
            conv_channels(&run, i);
    else
        pagewire_run(tasks, conv_channels, &run);
}

typedef struct {
    const GatedNorm *norm;
    long m, size; /* tokens of a task */
} RunNorm;

static void norm_group(const GatedNorm *a, const float *x, const float *z, const float *weight, float *out)
{
    long n = a->size;
    vf squares = {0};
    float sum = 0, by = 1;
    for (long i = 0; i < n && a->weight; i += LANES) {
        vf some = load_some(x + i, n - i);
        if (a->gate_first)
            some *= act16(load_some(z + i, n - i), a->act);
        squares += some * some;
    }
    for (int l = 0; l < LANES; l++)
        sum += squares[l];
    if (a->weight)
        by = 1 / sqrtf(sum / n + a->eps);
    for (long i = 0; i < n; i += LANES) {
        vf one = (vf){0} + 1.0f, gate = act16(load_some(z + i, n - i), a->act), some = load_some(x + i, n - i);
        vf scale = a->weight ? load_some(weight + i, n - i) : one;
        some = a->gate_first ? some * gate * by * scale : some * by * scale * gate;
        store_some(some, out + i, n - i);
    }
}

static void norm_tokens(const void *about, long i)
{
    const RunNorm *run = about;
    const GatedNorm *a = run->norm;
    long end = (i + 1) * run->size;
    end = end < run->m ? end : run->m;
    for (long t = i * run->size; t < end; t++)
        for (long c = 0; c < a->width; c += a->size)
            norm_group(a, a->x.x + t * a->x.stride + c, a->z.x + t * a->z.stride + c,
                       a->weight + (a->weight ? c % a->num_weights : 0), a->out.x + t * a->out.stride + c);
}

void pagewire_gated_norm(const GatedNorm *a, long m)
{
    RunNorm run = {a, m, task_size(m, 1, FEW / a->width + 1)};
    pagewire_run((m + run.size - 1) / run.size, norm_tokens, &run);
}
