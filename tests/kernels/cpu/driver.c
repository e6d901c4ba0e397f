/* Calls functions of a library in a process of its own, which may be one of another architecture under an emulator, on
 * the memory of the process that asks (tests/remote_kernels.py). Pointers are that process's: a page is fetched from it at its own
 * address when a function first touches it, and what was changed is sent back after the call. So every kernel runs here
 * as it is called there, whatever its arguments point to.
 *
 * driver LIBRARY, then messages of int64 on standard input and output, each beginning with its kind:
 *   in:  CALL ints floats result, the name (64 bytes), ints × int64, floats × float → PAGE requests, then DONE
 *   out: PAGE address → in: 1 and the page's bytes, or 0 if there is none
 *   out: DONE result, of each changed page address and bytes, and 0
 *   out: LOST address: the function touched memory that nobody has; FAILED: there is no such function
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096, MAX_PAGES = 1 << 18, NAME_BYTES = 64, MAX_INTS = 24, MAX_FLOATS = 8 };
enum { CALL = 1, PAGE, DONE, LOST, FAILED };

static char *pages[MAX_PAGES];
static long num_pages;
static int memory; /* a file with each page of the call as it is and as it was; a page is complete before it is mapped */
static volatile int taken;

static void move(int file, void *data, size_t bytes, int is_in)
{
    for (char *at = data; bytes;) {
        ssize_t n = is_in ? read(file, at, bytes) : write(file, at, bytes);
        if (n <= 0)
            _exit(n ? 2 : 0);
        at += n;
        bytes -= n;
    }
}

static int64_t get(void)
{
    int64_t value;
    move(0, &value, sizeof value, 1);
    return value;
}

static void put(int64_t value)
{
    move(1, &value, sizeof value, 0);
}

/* Takes the place of the C library's, whose version for ARM64 clears memory by an instruction (dc zva) that qemu 7.2 does
 * not repeat after the page was fetched. The library finds this one first, since the driver is linked with -rdynamic. */
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void *memset(void *to, int value, size_t bytes)
{
    for (char *at = to; bytes; bytes--)
        *at++ = (char)value;
    return to;
}

/* Maps the page that was touched, unless another thread has done so. */
static void fetch(int signal, siginfo_t *about, void *context)
{
    (void)signal;
    (void)context;
    char *at = (char *)((uintptr_t)about->si_addr & ~(uintptr_t)(PAGE_BYTES - 1));
    while (__atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE))
        ;
    for (long i = 0; i < num_pages; i++)
        if (pages[i] == at)
            goto done;
    char content[PAGE_BYTES];
    put(PAGE);
    put((intptr_t)at);
    if (num_pages == MAX_PAGES || !get()) {
        put(LOST);
        put((intptr_t)about->si_addr);
        _exit(3);
    }
    move(0, content, PAGE_BYTES, 1);
    long offset = 2 * num_pages * PAGE_BYTES;
    if (pwrite(memory, content, PAGE_BYTES, offset) != PAGE_BYTES ||
        pwrite(memory, content, PAGE_BYTES, offset + PAGE_BYTES) != PAGE_BYTES)
        _exit(4);
    if (mmap(at, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, offset) != at)
        _exit(5);
    pages[num_pages++] = at;
done:
    __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
}

/* Sends back what was changed, and forgets all pages. */
static void give_back(void)
{
    char before[PAGE_BYTES];
    for (long i = 0; i < num_pages; i++) {
        if (pread(memory, before, PAGE_BYTES, (2 * i + 1) * PAGE_BYTES) != PAGE_BYTES)
            _exit(6);
        if (memcmp(pages[i], before, PAGE_BYTES)) {
            put((intptr_t)pages[i]);
            move(1, pages[i], PAGE_BYTES, 0);
        }
        munmap(pages[i], PAGE_BYTES);
    }
    put(0);
    num_pages = 0;
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    memory = memfd_create("pages", 0);
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : 0;
    if (!library || memory < 0) {
        fprintf(stderr, "%s\n", library ? "no memory" : dlerror());
        return 1;
    }
    put(DONE); /* ready */
    for (;;) {
        char name[NAME_BYTES];
        int64_t i[MAX_INTS] = {0};
        float f[MAX_FLOATS] = {0};
        if (get() != CALL)
            return 1;
        int64_t ints = get(), floats = get(), has_result = get();
        if (ints > MAX_INTS || floats > MAX_FLOATS)
            return 1;
        move(0, name, sizeof name, 1);
        move(0, i, ints * sizeof *i, 1);
        move(0, f, floats * sizeof *f, 1);
        void *found = dlsym(library, name);
        if (!found) {
            put(FAILED);
            continue;
        }
        /* In the calling conventions of x86-64 and ARM64, integers and floats are counted apart, each in the order of
         * the arguments, every one that does not fit in registers has eight bytes on the stack, and more of them than
         * a function takes do no harm. Floats would have to be in order with integers on the stack; eight never are. */
        int64_t (*call)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, float, float, float, float, float, float, float, float) =
            found;
        int64_t result = call(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13],
                              i[14], i[15], i[16], i[17], i[18], i[19], i[20], i[21], i[22], i[23], f[0], f[1], f[2],
                              f[3], f[4], f[5], f[6], f[7]);
        put(DONE);
        put(has_result ? result : 0);
        give_back();
    }
}
