/* Products of packed weights, of every kind: packing of activations, tasks, and what is done with the sums. */
#include <math.h>
#include <stdlib.h>

#include "product.h"

#if defined(PAGEWIRE_AMX)
#include "tiles.h"
#endif

#if defined(PAGEWIRE_AMX)
enum { X_BYTES = 1 << 20 };   /* of activations that stay in the L2 cache while the weights stream through */
enum { BLOCK = 4 };           /* panels at least that use weights before other weights take their place */
enum { W_BYTES = 256 << 10 }; /* of bfloat16 weights beside them */
#else
enum { X_BYTES = 384 << 10 };
enum { BLOCK = 12 };
#endif
enum { MAX_PARTS = 8 };            /* of a stack */
enum { TASK_BYTES = 64 << 10 };   /* of weights that a task reads at least */
enum { PIECE_BYTES = 1 << 20 };   /* of a weight that a task packs; see segment.py */
enum { PACK_NUMBERS = 32 << 10 }; /* with fewer activations, the caller packs them alone */

static const KindOps *ops_of(const Matrix *w)
{
    switch (w->kind) {
    case KIND_F32:
        return &pagewire_f32;
    case KIND_BF16:
        return &pagewire_bf16;
    case KIND_DOT:
        return &pagewire_dot;
    case KIND_GROUPED:
        return &pagewire_grouped;
    case KIND_FP8:
        return &pagewire_fp8;
    case KIND_FP8_F32:
        return &pagewire_fp8_f32;
    case KIND_SUPERBLOCKS:
        return &pagewire_superblocks;
    default:
        abort();
    }
}

/* A product cut into tasks: blocks of panels by ranges of groups. */
typedef struct {
    Product p;
    const KindOps *ops;
    Best *best;
    char *panels;
    long panel_bytes, num_panels, block, size, num_groups, num_ranges, num_threads;
    long first_pack, first_task; /* in the lists of all products */
} Job;

typedef struct {
    const Job *jobs;
    long count;
} Jobs;

static inline long first_row(const Job *job, long panel)
{
    return panel * job->p.m / job->num_panels;
}

/* The job that a task belongs to, by a field that is its first task. */
static const Job *job_of(const Jobs *jobs, long i, int is_pack)
{
    long low = 0, high = jobs->count;
    while (high - low > 1) {
        long middle = (low + high) / 2;
        if ((is_pack ? jobs->jobs[middle].first_pack : jobs->jobs[middle].first_task) <= i)
            low = middle;
        else
            high = middle;
    }
    return jobs->jobs + low;
}

static void pack_task(const void *about, long i)
{
    const Job *job = job_of(about, i, 1);
    i -= job->first_pack;
    long row = first_row(job, i), rows = first_row(job, i + 1) - row;
    job->ops->pack(job->p.w, &job->p.x, row, rows, job->panels + i * job->panel_bytes);
}

/* 16 numbers, of which only the first `left` are there, the others are zero. */
static inline vf some(const float *from, long left)
{
    vf numbers = {0};
    if (left >= LANES)
        return *(const vf_any *)from;
    memcpy(&numbers, from, left * 4);
    return numbers;
}

static inline void put(float *y, vf value, long left)
{
    if (left >= LANES)
        *(vf_any *)y = value;
    else
        memcpy(y, &value, left * 4);
}

/* `finish` of columns that are all there, without a bias. */
static void finish_whole(const Job *job, long row, long rows, long from, long groups, const vf *sums)
{
    float *y = job->p.y + row * job->p.y_stride + (job->p.epilogue == SILU_MUL ? from / 2 : from) * LANES;
    for (long i = 0; i < rows; i++, sums += groups, y += job->p.y_stride) {
        if (job->p.epilogue == SILU_MUL)
            for (long j = 0; j < groups; j += 2)
                *(vf_any *)(y + j / 2 * LANES) = silu16(sums[j]) * sums[j + 1];
        else if (job->p.epilogue == ADD)
            for (long j = 0; j < groups; j++)
                *(vf_any *)(y + j * LANES) += sums[j];
        else
            memcpy(y, sums, groups * sizeof *sums);
    }
}

/* What becomes of the sums [rows][groups][16] of rows from `row` and groups from `from` on. */
static void finish(const Job *job, long row, long rows, long from, long groups, const vf *sums)
{
    const Matrix *w = job->p.w;
    const float *bias = w->bias;
    if (!job->best && !bias && (from + groups) * LANES <= w->n) {
        finish_whole(job, row, rows, from, groups, sums);
        return;
    }
    for (long i = 0; i < rows; i++, sums += groups) {
        float *y = job->p.y + (row + i) * job->p.y_stride;
        if (job->best) {
            Best *best = job->best + pagewire_thread() * job->p.m + row + i;
            for (long j = 0; j < groups; j++)
                keep_best(best, sums[j], (from + j) * LANES, w->n);
        } else if (job->p.epilogue == SILU_MUL) {
            long n = w->n / 2, column = from / 2 * LANES;
            for (long j = 0; j < groups; j += 2, column += LANES) {
                vf gate = sums[j], up = sums[j + 1];
                if (bias) {
                    gate += some(bias + column, n - column);
                    up += some(bias + n + column, n - column);
                }
                put(y + column, silu16(gate) * up, n - column);
            }
        } else {
            long column = from * LANES;
            for (long j = 0; j < groups; j++, column += LANES) {
                vf value = sums[j];
                if (bias)
                    value += some(bias + column, w->n - column);
                if (job->p.epilogue == ADD)
                    value += some(y + column, w->n - column);
                put(y + column, value, w->n - column);
            }
        }
    }
}

static void product_task(const void *about, long i)
{
    const Job *job = job_of(about, i, 0);
    i -= job->first_task;
    long first = i / job->num_ranges * job->block, last = first + job->block;
    long from = i % job->num_ranges * job->size, to = from + job->size;
    last = last < job->num_panels ? last : job->num_panels;
    to = to < job->num_groups ? to : job->num_groups;
    _Alignas(64) vf sums[MAX_PANEL * MAX_GROUPS];
    int is_ahead = job->ops->sums_ahead && last - first < BLOCK;
    /* Many groups at once: for a tile of few rows, and to write longer pieces of y where weights are there in time. */
    int takes_many = is_ahead ? job->p.m <= 4 : last - first == 1 || job->ops->sums_ahead;
    long step = takes_many ? MAX_GROUPS : job->ops->groups;
#if defined(PAGEWIRE_AMX)
    if (!takes_many && job->ops == &pagewire_dot) /* to write longer pieces of y */
        for (step = MAX_GROUPS; step > 2 && step * job->p.w->k * 2 * LANES > W_BYTES;)
            step /= 2;
#endif
    if (job->p.epilogue == SILU_MUL)
        step = padded(step, 2);
#if defined(PAGEWIRE_AMX)
    tiles_begin();
#endif
    /* Groups in the outer loop: their weights are read from memory once for all panels of the block. */
    for (long group = from; group < to; group += step) {
        long end = group + step < to ? group + step : to;
        long next = end < to ? end : end + (job->num_threads - 1) * job->size; /* the other threads take tasks, too */
        next = next + step < job->num_groups ? next : 0;
        const char *w = job->ops->prepare(job->p.w, group, end, last - first);
        for (long panel = first; panel < last; panel++) {
            long row = first_row(job, panel), rows = first_row(job, panel + 1) - row;
            const char *x = job->panels + panel * job->panel_bytes;
            if (is_ahead)
                job->ops->sums_ahead(job->p.w, x, rows, w, last - first, group, end, sums, panel - first, next);
            else
                job->ops->sums(job->p.w, x, rows, w, last - first, group, end, sums);
            finish(job, row, rows, group, end - group, sums);
        }
    }
#if defined(PAGEWIRE_AMX)
    tiles_end();
#endif
}

/* best: for the one product of a greedy choice, else 0. */
static void run(const Product *products, long count, Best *best)
{
    long packs = 0, tasks = 0, bytes = 0, numbers = 0, work = 0;
    Job *jobs = malloc(count * sizeof *jobs);
    if (!jobs)
        abort();
    for (long i = 0; i < count; i++)
        work += products[i].w->n * products[i].w->k;
    for (long i = 0; i < count; i++) {
        const Product *p = products + i;
        Job *job = jobs + i;
        *job = (Job){.p = *p, .ops = ops_of(p->w), .best = best, .first_pack = packs, .first_task = tasks};
        long rows = job->ops->panel_rows;
        job->num_panels = (p->m + rows - 1) / rows;
        job->panel_bytes = (job->ops->panel_bytes(p->w, (p->m + job->num_panels - 1) / job->num_panels) + 63) / 64 * 64;
        long most = X_BYTES / job->panel_bytes < BLOCK ? BLOCK : X_BYTES / job->panel_bytes;
        long blocks = (job->num_panels + most - 1) / most; /* of equal size: a small last one would wait for memory */
        job->block = (job->num_panels + blocks - 1) / blocks;
        job->num_threads = pagewire_num_threads();
        job->num_groups = num_groups(p->w->n, p->w->is_gated);
        /* All products share the threads in proportion to their weights. */
        long least = TASK_BYTES / (p->w->k * 32 + 1) + 1;
        job->size = task_size(work / (p->w->k * LANES) + 1, 2 * WIDE, least < job->num_groups ? least : job->num_groups);
        job->num_ranges = (job->num_groups + job->size - 1) / job->size;
        packs += job->num_panels;
        tasks += (job->num_panels + job->block - 1) / job->block * job->num_ranges;
        bytes += job->num_panels * job->panel_bytes;
        numbers += p->m * p->w->k;
    }
    char *panels = pagewire_scratch(SLOT_ACTIVATIONS, bytes);
    for (long i = 0; i < count; i++) {
        jobs[i].panels = panels;
        panels += jobs[i].num_panels * jobs[i].panel_bytes;
    }
    Jobs all = {jobs, count};
    if (numbers < PACK_NUMBERS)
        for (long i = 0; i < packs; i++)
            pack_task(&all, i);
    else
        pagewire_run(packs, pack_task, &all);
    pagewire_run(tasks, product_task, &all);
    free(jobs);
}

void pagewire_products(const Product *products, long count)
{
    if (count)
        run(products, count, 0);
}

typedef struct {
    const float *gate_up;
    float *y;
    long n, y_stride;
} Gate;

static void gate_row(const void *about, long i)
{
    const Gate *a = about;
    const float *gate = a->gate_up + i * 2 * a->n, *up = gate + a->n;
    for (long column = 0; column < a->n; column += LANES) {
        vf value = silu16(some(gate + column, a->n - column)) * some(up + column, a->n - column);
        put(a->y + i * a->y_stride + column, value, a->n - column);
    }
}

/* The products of the parts are one list of tasks, too. */
static void stack_product(const Matrix *w, const float *x, long x_stride, float *y, long y_stride, long m, long epilogue)
{
    Matrix parts[MAX_PARTS];
    Product products[MAX_PARTS];
    float *out = y;
    long stride = y_stride, row = 0;
    if (epilogue == SILU_MUL) {
        out = pagewire_scratch(SLOT_STACK, m * w->n * 4);
        stride = w->n;
    }
    if (w->num_parts > MAX_PARTS)
        abort();
    for (long i = 0; i < w->num_parts; row += parts[i++].n) {
        parts[i] = w->parts[i];
        parts[i].bias = w->bias ? w->bias + row : 0;
        products[i] = (Product){parts + i, {x, 0, x_stride}, out + row, stride, m, epilogue == ADD ? ADD : STORE};
    }
    pagewire_products(products, w->num_parts);
    if (epilogue == SILU_MUL)
        pagewire_run(m, gate_row, &(Gate){out, y, w->n / 2, y_stride});
}

void pagewire_product(const Matrix *w, const float *x, long x_stride, float *y, long y_stride, long m, long epilogue)
{
    if (w->kind == KIND_STACK) {
        if (m)
            stack_product(w, x, x_stride, y, y_stride, m, epilogue);
        return;
    }
    Product p = {w, {x, 0, x_stride}, y, y_stride, m, epilogue};
    if (m)
        run(&p, 1, 0);
}

void pagewire_product_greedy(const Matrix *w, const float *x, long x_stride, int64_t *ids, float *most, long m)
{
    long threads = pagewire_num_threads();
    Best *best = aligned_alloc(64, threads * m * sizeof *best);
    if (!best)
        abort();
    pagewire_clear_best(best, m, threads);
    Product p = {w, {x, 0, x_stride}, 0, 0, m, STORE};
    if (m)
        run(&p, 1, best);
    pagewire_merge_best(best, ids, most, m, threads);
    free(best);
}

typedef struct {
    Task pack;
    const void *about;
    long count, size;
} Groups;

static void pack_groups(const void *about, long task)
{
    const Groups *a = about;
    long first = task * a->size, last = first + a->size < a->count ? first + a->size : a->count;
    for (long i = first; i < last; i++)
        a->pack(a->about, i);
}

void pagewire_pack_groups(long count, long bytes, Task pack, const void *about)
{
    long size = bytes < PIECE_BYTES ? PIECE_BYTES / bytes : 1;
    pagewire_run((count + size - 1) / size, pack_groups, &(Groups){pack, about, count, size});
}

typedef struct {
    const char *w;
    char *packed;
    long n, k, is_gated;
    int bf16;
    long first;
} Pack;

static void pack_group(const void *about, long i)
{
    const Pack *a = about;
    long group = a->first + i;
    long k = a->k, words = a->bf16 ? padded(k, PADDED) / 2 : k, whole = a->bf16 ? k / 2 : k;
    uint32_t *out = (uint32_t *)a->packed + i * words * LANES;
    const char *in[LANES];
    int is_full = 1;
    for (long l = 0; l < LANES; l++) {
        long row = row_in(a->n, a->is_gated, group, l);
        is_full &= row >= 0;
        in[l] = row < 0 ? 0 : a->w + row * k * (a->bf16 ? 2 : 4);
    }
    for (long i = 0; is_full && i < whole; i++) /* nearly all */
        for (long l = 0; l < LANES; l++)
            memcpy(out + i * LANES + l, in[l] + 4 * i, 4);
    for (long i = is_full ? whole : 0; i < words; i++)
        for (long l = 0; l < LANES; l++) {
            uint32_t word = 0;
            if (in[l])
                memcpy(&word, in[l] + 4 * i, i < whole ? 4 : i == whole && k % 2 ? 2 : 0);
            out[i * LANES + l] = word;
        }
}

/* w: [n][k] of float32 or bfloat16 → groups [first, last) of the packed weight: [groups][words][16], see dense.c. */
void pagewire_pack(const char *w, char *packed, long n, long k, long is_gated, int bf16, long first, long last)
{
    long bytes = LANES * (bf16 ? 2 * padded(k, PADDED) : 4 * k);
    pagewire_pack_groups(last - first, bytes, pack_group, &(Pack){w, packed, n, k, is_gated, bf16, first});
}

typedef struct {
    const Matrix *w;
    const int64_t *ids;
    float *y;
} Lookup;

static void lookup_row(const void *about, long i)
{
    const Lookup *a = about;
    if (a->w->kind == KIND_GROUPED) {
        pagewire_grouped_lookup(a->w, a->ids[i], a->y + i * a->w->k);
        return;
    }
    if (a->w->kind == KIND_SUPERBLOCKS) {
        pagewire_superblocks_lookup(a->w, a->ids[i], a->y + i * a->w->k);
        return;
    }
    if (a->w->kind == KIND_FP8 || a->w->kind == KIND_FP8_F32) {
        pagewire_fp8_lookup(a->w, a->ids[i], a->y + i * a->w->k);
        return;
    }
    long k = a->w->k, words = a->w->kind == KIND_F32 ? k : padded(k, PADDED) / 2;
    const uint32_t *in = (const uint32_t *)a->w->w + a->ids[i] / LANES * words * LANES + a->ids[i] % LANES;
    uint32_t *out = (uint32_t *)(a->y + i * k);
    for (long j = 0; j < k; j++)
        if (a->w->kind == KIND_F32)
            out[j] = in[j * LANES];
        else
            out[j] = j % 2 ? in[j / 2 * LANES] & 0xffff0000u : in[j / 2 * LANES] << 16;
}

void pagewire_lookup(const Matrix *w, const int64_t *ids, float *y, long m)
{
    Lookup about = {w, ids, y};
    if (m > 16)
        pagewire_run(m, lookup_row, &about);
    else
        for (long i = 0; i < m; i++)
            lookup_row(&about, i);
}
