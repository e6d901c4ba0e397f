/* Sums over the ranks of one machine; see sums.c. */
#pragma once

typedef struct {
    struct Ranks *ranks;
    int (*gives_up)(void); /* asked each second while another rank does not come, and when it has left: whether to
                              wait no longer */
} Sum;

/* Replaces x by the sum over the ranks, which all call this with equal counts. Returns 0 if it gave up. */
int pagewire_sum(const Sum *a, float *x, long count);
