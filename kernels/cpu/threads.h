/* The pool of threads that all kernels share. */
#pragma once
#include <stdint.h>

typedef void (*Task)(const void *about, long i);

/* Calls task(about, i) for every i in [0, n), n < 2^32 - 1, and returns when all are done. The caller works too, and
 * threads take tasks as they come, so one that the system has descheduled delays no task but its own. Callers take
 * turns. A call from within a task of a loop with several threads runs in that thread alone. */
void pagewire_run(long n, Task task, const void *about);

/* Sets the number of threads, with the caller, of all later loops of the calling thread, and of threads that have not
 * asked or run a loop yet. Returns it, between 1 and 1,024. Threads start when a loop needs them; if the system
 * lets fewer start, those do all tasks. */
long pagewire_set_threads(long wanted);

/* The number of threads of the caller's loops. It does not change while other threads set theirs, so memory for each
 * of them can be sized by it. */
long pagewire_num_threads(void);

/* The index of the calling thread in its innermost loop, 0 … threads - 1. */
long pagewire_thread(void);

enum { SCRATCH_SLOTS = 8 };

/* Memory of the calling thread, aligned to 64 bytes, whose contents are lost at the next call with the same slot. It
 * grows to the largest size asked for and is freed when the thread ends: a pool's thread never ends, since the next
 * step needs the same memory again. Ends the process if there is none, since a kernel has no way to fail. */
void *pagewire_scratch(int slot, long bytes);

/* The size of a task: `total` in about six tasks a thread, a multiple of `step` and at least `least`. */
static inline long task_size(long total, long step, long least)
{
    long tasks = 6 * pagewire_num_threads(), size = (total + tasks - 1) / tasks;
    size = size < least ? least : size;
    return (size + step - 1) / step * step;
}
