/* Loops over the rows of activations. */
#pragma once
#include <math.h>

#include "product.h"
#include "threads.h"

enum { FEW = 4096 }; /* numbers that one thread handles faster than another takes a task */

/* Runs `rows` over [0, m) in tasks of some rows that hold at least FEW numbers, n each. */
typedef struct {
    void (*rows)(const void *about, long from, long to);
    const void *about;
    long m, size;
} Rows;

static void some_rows(const void *about, long i)
{
    const Rows *r = about;
    long from = i * r->size, to = from + r->size;
    r->rows(r->about, from, to < r->m ? to : r->m);
}

static inline void run_rows(void (*rows)(const void *about, long from, long to), const void *about, long m, long n)
{
    Rows r = {rows, about, m, task_size(m, 1, FEW / (n ? n : 1) + 1)};
    pagewire_run((m + r.size - 1) / r.size, some_rows, &r);
}

static inline float sum_of_squares(const float *x, long n)
{
    vf sum = {0};
    float rest = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = *(const vf_any *)(x + i);
        sum += v * v;
    }
    for (; i < n; i++)
        rest += x[i] * x[i];
    for (int l = 0; l < LANES; l++)
        rest += sum[l];
    return rest;
}

static inline float inverse_rms(const float *x, long n, float eps)
{
    return 1 / sqrtf(sum_of_squares(x, n) / n + eps);
}
