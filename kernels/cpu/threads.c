/* A pool that does not collapse beside other programs. OpenMP's threads wait at the end of every loop until the last of
 * them arrives, so one that the system has descheduled stops all. Here tasks are small and taken as they come, nobody
 * waits for a thread that has taken none, and a thread without work sleeps after SPIN_NS.
 *
 * `ticket` holds the number of the loop and the next task. A thread takes a task by compare-and-swap, which fails if
 * the ticket has changed, so what it has read of the loop before is that loop's. The ticket is closed while the loop's
 * fields change, so that a stale one cannot be used with new fields. (The number returns after 2^32 loops. A thread
 * would have to be descheduled for just as many between two instructions.)
 *
 * All atomic operations are sequentially consistent. No wake-up is lost: a thread counts itself as asleep before the
 * system compares the word with the old value, and others change the word before they look at the count.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "threads.h"

enum { SPIN_NS = 20000, SLICE_NS = 200000, MAX_THREADS = 1024 }; /* docs/performance.md: longer starves other programs */
#define CLOSED 0xffffffffu

static struct {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t done; /* tasks; the caller sleeps on it */
    _Atomic uint32_t is_caller_asleep;
    _Alignas(64) _Atomic uint32_t loops; /* threads that may work sleep on it */
    _Atomic uint32_t num_asleep;         /* of them */
    _Atomic uint32_t limit;              /* threads of the loop; the others sleep on it */
    _Atomic uint32_t n;
    _Atomic(Task) task;
    _Atomic(const void *) about;
    _Atomic long wanted;  /* threads, of callers that have named no number themselves */
    long started, most;   /* threads, with the caller */
    pthread_mutex_t turn; /* one loop at a time */
} pool = {.ticket = CLOSED, .wanted = 1, .limit = 1, .started = 1, .most = MAX_THREADS,
          .turn = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local long thread;  /* its index */
static _Thread_local long threads; /* that its loops have; 0: not known yet */
static _Thread_local int is_inside;
typedef struct {
    void *memory;
    long size;
} Slot;
static _Thread_local Slot scratch[SCRATCH_SLOTS];
static pthread_key_t scratch_key; /* frees a thread's scratch at its end */

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

static void wake(_Atomic uint32_t *word, long count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count < INT_MAX ? count : INT_MAX, 0, 0, 0);
}

/* Spins, then sleeps, until the word has changed; it may return earlier. */
static void await_change(_Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *asleep)
{
    int64_t until = now() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load(word) != value)
                return;
            rest();
        }
    } while (now() < until);
    atomic_fetch_add(asleep, 1);
    sleep_while(word, value);
    atomic_fetch_sub(asleep, 1);
}

/* Takes tasks until there are none. */
static void work(void)
{
    is_inside = 1;
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        uint32_t i = (uint32_t)ticket, n = atomic_load(&pool.n), limit = atomic_load(&pool.limit);
        Task task = atomic_load(&pool.task);
        const void *about = atomic_load(&pool.about);
        if (i == CLOSED || i >= n || thread >= limit)
            break;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1))
            continue;
        task(about, i);
        if (atomic_fetch_add(&pool.done, 1) + 1 == n && atomic_load(&pool.is_caller_asleep))
            wake(&pool.done, 1);
    }
    is_inside = 0;
}

static void *serve(void *index)
{
    thread = (long)index;
    uint32_t seen = 0;
    for (;;) {
        uint32_t limit = atomic_load(&pool.limit), loops = atomic_load(&pool.loops);
        if (thread >= limit) {
            sleep_while(&pool.limit, limit);
        } else if (loops == seen) {
            await_change(&pool.loops, seen, &pool.num_asleep);
        } else {
            seen = loops;
            work();
        }
    }
    return 0;
}

/* As in sched_setattr(2), which older versions of glibc do not declare. */
typedef struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice, deadline, period; /* nanoseconds; `slice` is sched_runtime */
} Scheduling;

/* Asks Linux 6.12 and later for short slices, for this thread and those that it starts: beside another program they are
 * descheduled more often and for a shorter time each, and wake sooner. The other threads wait for one that is
 * descheduled in a task. Their share of the processor stays the same. */
static void ask_for_short_slices(void)
{
    Scheduling own = {.size = sizeof own};
    if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) || own.policy != 0) /* another policy than SCHED_OTHER */
        return;
    own.slice = SLICE_NS;
    syscall(SYS_sched_setattr, 0, &own, 0); /* where it is not allowed, slices stay as they are */
}

static void start_threads(long count)
{
    if (pool.started == 1)
        ask_for_short_slices();
    count = count < pool.most ? count : pool.most;
    for (; pool.started < count; pool.started++) {
        pthread_t started;
        if (pthread_create(&started, 0, serve, (void *)pool.started)) {
            pool.most = pool.started; /* the system's limit; loops have fewer threads and the same results */
            break;
        }
        pthread_detach(started);
    }
}

/* A thread inside a task has an index of its own; in the loop that it runs alone its index is 0. */
static void run_alone(long n, Task task, const void *about)
{
    long index = thread;
    thread = 0;
    for (long i = 0; i < n; i++)
        task(about, i);
    thread = index;
}

void pagewire_run(long n, Task task, const void *about)
{
    long limit = pagewire_num_threads();
    if (n < 2 || limit == 1) {
        run_alone(n, task, about);
        return;
    }
    if (n >= CLOSED)
        abort();
    pthread_mutex_lock(&pool.turn);
    if (limit > pool.started)
        start_threads(limit);
    uint64_t loop = (atomic_load(&pool.ticket) >> 32) + 1;
    atomic_store(&pool.ticket, loop << 32 | CLOSED);
    atomic_store(&pool.n, (uint32_t)n);
    atomic_store(&pool.task, task);
    atomic_store(&pool.about, about);
    atomic_store(&pool.done, 0);
    int is_other_limit = atomic_load(&pool.limit) != limit;
    if (is_other_limit) {
        atomic_store(&pool.limit, (uint32_t)limit);
        wake(&pool.limit, INT_MAX);
    }
    atomic_store(&pool.ticket, loop << 32);
    atomic_fetch_add(&pool.loops, 1);
    if (atomic_load(&pool.num_asleep))
        wake(&pool.loops, is_other_limit ? INT_MAX : n - 1); /* those that the loop does not have may sleep among them */
    work();
    uint32_t done;
    while ((done = atomic_load(&pool.done)) != (uint32_t)n)
        await_change(&pool.done, done, &pool.is_caller_asleep);
    pthread_mutex_unlock(&pool.turn);
}

long pagewire_num_threads(void)
{
    if (is_inside)
        return 1;
    if (!threads)
        threads = atomic_load(&pool.wanted);
    return threads;
}

long pagewire_thread(void)
{
    return thread;
}

long pagewire_set_threads(long wanted)
{
    wanted = wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted;
    threads = wanted;
    atomic_store(&pool.wanted, wanted);
    return wanted;
}

/* A child has the caller's memory and none of the other threads. They start with its first loop. One that another
 * thread was running is the parent's: its tasks are not taken here. */
static void after_fork(void)
{
    pool.started = 1;
    atomic_store(&pool.ticket, atomic_load(&pool.ticket) | CLOSED);
    pool.turn = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    atomic_store(&pool.num_asleep, 0);
    atomic_store(&pool.is_caller_asleep, 0);
}

static void free_scratch(void *slots)
{
    for (Slot *slot = slots; slot < (Slot *)slots + SCRATCH_SLOTS; slot++) {
        free(slot->memory);
        *slot = (Slot){0};
    }
}

__attribute__((constructor)) static void begin(void)
{
    if (pthread_atfork(0, 0, after_fork) || pthread_key_create(&scratch_key, free_scratch))
        abort();
}

void *pagewire_scratch(int slot, long bytes)
{
    Slot *s = scratch + slot;
    if (s->size < bytes) {
        long more = s->size + s->size / 4; /* sizes often grow a little at a time, as contexts do */
        free(s->memory);
        s->size = ((bytes > more ? bytes : more) + 63) / 64 * 64;
        s->memory = aligned_alloc(64, s->size);
        if (!s->memory || pthread_setspecific(scratch_key, scratch))
            abort();
    }
    return s->memory;
}
