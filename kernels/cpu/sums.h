/* Exchanges between the ranks of one machine; see sums.c. */
#pragma once

typedef struct {
    struct Ranks *ranks;
    int (*gives_up)(void); /* asked each second while another rank does not come, and when it has left: whether to
                              wait no longer */
} Sum;

/* Replaces x by the sum over the ranks, which all call this with equal counts. Returns 0 if it gave up. */
int pagewire_sum(const Sum *a, float *x, long count);

/* Gives each rank a part of its own. x: the parts for all ranks, this one included, in their order; sent: bytes of each.
 * out: the parts that all ranks have for this one, in the ranks' order, `most` bytes in all; got: bytes of each. Only
 * parts for other ranks are sent. All ranks call this. Returns 0 if it gave up. */
int pagewire_all_to_all(const Sum *a, const void *x, const long *sent, void *out, long *got, long most);
