/* Runs loops on the pool of threads.c and ends with status 1 and a line on the first fault. `test_threads.py` compiles
 * it, with the thread sanitizer as well. The first argument names a case, the second is a seed. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "threads.h"

enum { MOST = 512, MOST_THREADS = 8 };

#define CHECK(condition, ...)                                                                                           \
    do {                                                                                                                \
        if (!(condition)) {                                                                                             \
            printf("line %d: ", __LINE__);                                                                              \
            printf(__VA_ARGS__);                                                                                        \
            printf("\n");                                                                                               \
            fflush(stdout);                                                                                             \
            _exit(1);                                                                                                   \
        }                                                                                                               \
    } while (0)

static uint64_t draw(uint64_t *seed, uint64_t below)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (*seed >> 33) % below;
}

/* A loop and what its tasks have done. The counts are no atomics: the pool must order them. */
typedef struct {
    long n, threads, spins, depth;
    pid_t process;
    int counts[MOST];
    atomic_int is_used[MOST_THREADS]; /* a task with this index runs */
} Loop;

static void task(const void *about, long i)
{
    Loop *loop = (Loop *)about;
    long thread = pagewire_thread();
    CHECK(getpid() == loop->process, "a loop of the process %d goes on in another one", loop->process);
    CHECK(0 <= i && i < loop->n, "task %ld of %ld", i, loop->n);
    CHECK(0 <= thread && thread < loop->threads, "thread %ld of %ld", thread, loop->threads);
    CHECK(!atomic_exchange(&loop->is_used[thread], 1), "two tasks at once have the thread %ld", thread);
    for (volatile long j = 0; j < loop->spins; j++)
        ;
    loop->counts[i]++;
    if (loop->depth) {
        Loop inner = {.n = i % 5, .threads = pagewire_num_threads(), .depth = loop->depth - 1, .process = getpid()};
        pagewire_run(inner.n, task, &inner);
        for (long j = 0; j < inner.n; j++)
            CHECK(inner.counts[j] == 1, "the inner task %ld ran %d times", j, inner.counts[j]);
        CHECK(pagewire_thread() == thread, "thread %ld is thread %ld after an inner loop", thread, pagewire_thread());
    }
    atomic_store(&loop->is_used[thread], 0);
}

static void run(long n, long spins, long depth)
{
    Loop loop = {.n = n, .threads = pagewire_num_threads(), .spins = spins, .depth = depth, .process = getpid()};
    pagewire_run(n, task, &loop);
    for (long i = 0; i < n; i++)
        CHECK(loop.counts[i] == 1, "task %ld of %ld ran %d times", i, n, loop.counts[i]);
}

/* Loops of random sizes with random numbers of threads. */
static void *once(void *about)
{
    uint64_t seed = (uintptr_t)about;
    for (int i = 0; i < 1500; i++) {
        long threads = 1 + draw(&seed, MOST_THREADS);
        if (draw(&seed, 4) == 0)
            CHECK(pagewire_set_threads(threads) == threads, "not %ld threads", threads);
        run(draw(&seed, draw(&seed, 4) ? 20 : MOST), draw(&seed, 4) ? 0 : draw(&seed, 500), draw(&seed, 5) == 0 ? 2 : 0);
    }
    return 0;
}

static void tiny(void)
{
    pagewire_set_threads(3);
    for (int i = 0; i < 30000; i++)
        run(4, 0, 0);
}

/* Several callers, each with a number of threads that it changes. */
static void callers(uint64_t seed)
{
    pthread_t started[4];
    for (long i = 0; i < 4; i++)
        pthread_create(started + i, 0, once, (void *)(uintptr_t)(seed + i));
    for (long i = 0; i < 4; i++)
        pthread_join(started[i], 0);
}

static atomic_int is_over;

static void *keep_running(void *about)
{
    (void)about;
    while (!atomic_load(&is_over))
        run(30, 100, 0);
    return 0;
}

/* Children that are made while another thread's loop runs have pools that work. */
static void forks(void)
{
    pthread_t other;
    pagewire_set_threads(3);
    pthread_create(&other, 0, keep_running, 0);
    for (int i = 0; i < 50; i++) {
        run(30, 100, 0);
        pid_t child = fork();
        if (!child) {
            once((void *)(uintptr_t)i);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        CHECK(!status, "child %d ended with %d", i, status);
    }
    atomic_store(&is_over, 1);
    pthread_join(other, 0);
}

static void fill(const void *about, long i)
{
    long bytes = ((const long *)about)[0] + 100 * i;
    char *memory = pagewire_scratch(i % SCRATCH_SLOTS, bytes);
    CHECK((uintptr_t)memory % 64 == 0, "%p is not aligned", memory);
    memset(memory, (int)pagewire_thread() + 1, bytes);
    for (volatile long j = 0; j < 5000; j++)
        ;
    for (long j = 0; j < bytes; j++)
        CHECK(memory[j] == pagewire_thread() + 1, "byte %ld of %ld was written by %d", j, bytes, memory[j]);
}

static void *use_scratch(void *about)
{
    long bytes = (uintptr_t)about;
    memset(pagewire_scratch(0, bytes), 1, bytes);
    memset(pagewire_scratch(1, bytes), 1, bytes);
    return 0;
}

static void scratches(void)
{
    pagewire_set_threads(4);
    for (long bytes = 1; bytes < 50000; bytes = bytes * 3 / 2 + 1)
        pagewire_run(40, fill, &bytes);
    char *before = pagewire_scratch(0, 1000);
    CHECK(pagewire_scratch(0, 500) == before && pagewire_scratch(0, 1000) == before, "memory was not kept");
}

/* A thread that ends gives its scratch memory back. */
static void ended(void)
{
    size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    for (int i = 0; i < 100; i++) {
        pthread_t started;
        pthread_create(&started, 0, use_scratch, (void *)(uintptr_t)(1 << 20));
        pthread_join(started, 0);
    }
    size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
    CHECK(after < before + (2 << 20), "%zu bytes were not freed", after - before);
}

/* Where the system starts few threads, all tasks are done. */
static void few(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    long pages = 0;
    CHECK(fscanf(file, "%ld", &pages) == 1, "no size");
    fclose(file);
    rlim_t most = pages * sysconf(_SC_PAGESIZE) + (24 << 20); /* for two stacks */
    setrlimit(RLIMIT_AS, &(struct rlimit){most, most});
    pagewire_set_threads(MOST_THREADS);
    for (int i = 0; i < 1000; i++)
        run(100, 100, 0);
}

/* Lines of standard input: threads, loops, tasks of each. Each is answered when it is done. */
static void lines(void)
{
    long threads, loops, n;
    while (scanf("%ld %ld %ld", &threads, &loops, &n) == 3) {
        pagewire_set_threads(threads);
        for (long i = 0; i < loops; i++)
            run(n, 2000, 0);
        printf("done\n");
        fflush(stdout);
    }
}

typedef struct {
    long n;
    atomic_long begun;
} Meeting;

static void meet(const void *about, long i)
{
    Meeting *meeting = (Meeting *)about;
    (void)i;
    atomic_fetch_add(&meeting->begun, 1);
    while (atomic_load(&meeting->begun) < meeting->n)
        sched_yield();
}

/* Tasks that wait for each other: every thread that a loop has tasks for must take part, asleep or not. */
static void meetings(uint64_t seed)
{
    for (int i = 0; i < 400; i++) {
        long threads = 2 + draw(&seed, MOST_THREADS - 1);
        pagewire_set_threads(threads);
        Meeting meeting = {.n = draw(&seed, 2) ? threads : 2 + (long)draw(&seed, threads - 1)};
        pagewire_run(meeting.n, meet, &meeting);
        if (draw(&seed, 2))
            run(1, 100000, 0); /* meanwhile the other threads fall asleep */
    }
}

static void nothing(const void *about, long i)
{
    (void)about;
    (void)i;
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    uint64_t seed = count > 2 ? strtoull(arguments[2], 0, 10) : 0;
    if (!strcmp(what, "once"))
        once((void *)(uintptr_t)seed);
    else if (!strcmp(what, "tiny"))
        tiny();
    else if (!strcmp(what, "callers"))
        callers(seed);
    else if (!strcmp(what, "meetings"))
        meetings(seed);
    else if (!strcmp(what, "forks"))
        forks();
    else if (!strcmp(what, "scratches"))
        scratches();
    else if (!strcmp(what, "ended"))
        ended();
    else if (!strcmp(what, "few"))
        few();
    else if (!strcmp(what, "lines"))
        lines();
    else if (!strcmp(what, "too-many")) {
        pagewire_set_threads(2);
        pagewire_run(1L << 32, nothing, 0);
    } else
        return 2;
    return 0;
}
