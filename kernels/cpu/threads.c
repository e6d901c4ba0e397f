/* A pool that does not collapse beside other programs. OpenMP's threads spin at the end of every loop until the last of
 * them arrives, so one that the system has descheduled stops all. Here tasks are small and taken as they come, nobody
 * waits for a thread that has taken none, and a thread without work sleeps after SPIN_NS.
 *
 * `ticket` holds the number of the loop and the next task. A thread takes a task by compare-and-swap, which fails if
 * the loop is over; what it has read of the loop is therefore that loop's. The ticket is closed while the loop's fields
 * change, so that a stale one cannot be used with new fields.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "threads.h"

enum { SPIN_NS = 50000, MAX_THREADS = 1024 };
#define CLOSED 0xffffffffu

static struct {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t done; /* tasks; a futex for the caller */
    _Atomic uint32_t is_caller_asleep;
    _Alignas(64) _Atomic uint32_t loops; /* a futex for the others */
    _Atomic uint32_t num_asleep;
    _Atomic uint32_t n;
    _Atomic(Task) task;
    _Atomic(const void *) about;
    _Alignas(64) _Atomic long threads; /* that may work */
    long started;
    pthread_mutex_t turn; /* one loop at a time */
} pool = {.ticket = CLOSED, .threads = 1, .started = 1, .turn = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local long thread;
static _Thread_local int is_inside;
static _Thread_local struct {
    void *memory;
    long size;
} scratch[SCRATCH_SLOTS];

static inline void rest(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

/* Takes tasks until there are none. */
static void work(void)
{
    is_inside = 1;
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        uint32_t i = (uint32_t)ticket, n = atomic_load(&pool.n);
        Task task = atomic_load(&pool.task);
        const void *about = atomic_load(&pool.about);
        if (i == CLOSED || i >= n)
            break;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1))
            continue;
        task(about, i);
        if (atomic_fetch_add(&pool.done, 1) + 1 == n && atomic_load(&pool.is_caller_asleep))
            wake(&pool.done);
    }
    is_inside = 0;
}

static void *serve(void *index)
{
    thread = (long)index;
    uint32_t seen = 0;
    for (;;) {
        int64_t until = now() + SPIN_NS;
        while (atomic_load(&pool.loops) == seen || thread >= atomic_load(&pool.threads)) {
            for (int i = 0; i < 32; i++)
                rest();
            if (now() > until) {
                atomic_fetch_add(&pool.num_asleep, 1);
                uint32_t loops = atomic_load(&pool.loops);
                if (loops == seen || thread >= atomic_load(&pool.threads))
                    sleep_while(&pool.loops, loops);
                atomic_fetch_sub(&pool.num_asleep, 1);
                until = now() + SPIN_NS;
            }
        }
        seen = atomic_load(&pool.loops);
        work();
    }
    return 0;
}

void pagewire_run(long n, Task task, const void *about)
{
    if (n == 1 || is_inside || atomic_load(&pool.threads) == 1) {
        for (long i = 0; i < n; i++)
            task(about, i);
        return;
    }
    if (n <= 0)
        return;
    pthread_mutex_lock(&pool.turn);
    uint64_t loop = (atomic_load(&pool.ticket) >> 32) + 1;
    atomic_store(&pool.ticket, loop << 32 | CLOSED);
    atomic_store(&pool.n, (uint32_t)n);
    atomic_store(&pool.task, task);
    atomic_store(&pool.about, about);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, loop << 32);
    atomic_fetch_add(&pool.loops, 1);
    if (atomic_load(&pool.num_asleep))
        wake(&pool.loops);
    work();
    int64_t until = now() + SPIN_NS;
    uint32_t done;
    while ((done = atomic_load(&pool.done)) != (uint32_t)n) {
        for (int i = 0; i < 32; i++)
            rest();
        if (now() > until) {
            atomic_store(&pool.is_caller_asleep, 1);
            if ((done = atomic_load(&pool.done)) != (uint32_t)n)
                sleep_while(&pool.done, done);
            atomic_store(&pool.is_caller_asleep, 0);
            until = now() + SPIN_NS;
        }
    }
    pthread_mutex_unlock(&pool.turn);
}

long pagewire_num_threads(void)
{
    return is_inside ? 1 : atomic_load(&pool.threads);
}

long pagewire_thread(void)
{
    return thread;
}

/* Sets the number of threads, with the caller; as many as the system lets start. Returns it. */
long pagewire_set_threads(long wanted)
{
    if (wanted == atomic_load(&pool.threads))
        return wanted;
    pthread_mutex_lock(&pool.turn);
    wanted = wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted;
    for (; pool.started < wanted; pool.started++) {
        pthread_t started;
        if (pthread_create(&started, 0, serve, (void *)pool.started))
            break;
        pthread_detach(started);
    }
    wanted = wanted < pool.started ? wanted : pool.started;
    atomic_store(&pool.threads, wanted);
    pthread_mutex_unlock(&pool.turn);
    return wanted;
}

void *pagewire_scratch(int slot, long bytes)
{
    if (scratch[slot].size < bytes) {
        free(scratch[slot].memory);
        scratch[slot].size = (bytes + 63) / 64 * 64;
        scratch[slot].memory = aligned_alloc(64, scratch[slot].size);
        if (!scratch[slot].memory)
            abort();
    }
    return scratch[slot].memory;
}
