/* What the ranks of one machine exchange: sums, copies and parts for each other, through memory that they share.

   The memory holds a Flag for each rank, then two sets of slots; a set has a slot for each rank. In a round each rank
   copies its part of a tensor into its own slot, stores the round's number into its own flag, waits until the flags of
   all ranks have that number, and reads all slots in the order of the ranks. So each rank computes the same sum, with
   the same bits. Rounds use the two sets of slots in turn. One wait in a round is enough: a rank that writes into a set
   has seen that all ranks have begun the round before, so they have read what the set held.

   A slot is written by its own rank only, so its pages are on that rank's NUMA node.

   In an all-to-all a rank's slots carry a stream: how many bytes it has for each rank, and then the parts for the others,
   in their order. Every rank reads all the numbers in the first round, so all know after it how many rounds there are,
   and each copies from the streams what is for it.

   A rank that cannot go on leaves: it sets its flag LEFT rounds before the last round that it has done. Whoever waits for
   it in a later round is told at once. The ranks agree elsewhere that all have left, and begin again with
   round 0 (`collectives.py`).

   A rank that waits first spins for SPIN_NS and lets others have its CPU in between, then it sleeps (futex). It returns
   after WAIT_S so that the caller can look whether the other ranks still exist; the caller then calls again for the same
   round, and the rank sleeps at once. The supervisor takes a rank for hung that uses no CPU time, so a rank that waits
   for long must use next to none. */
#include "sums.h"
#include "vectors.h"
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { COPY, SUM_FLOAT32, SUM_BFLOAT16 };
enum { SPINS = 64, SPIN_NS = 100000, WAIT_S = 1, LEFT = 1 << 30 };

/* On two cache lines of its own, because processors fetch lines in pairs. */
typedef struct {
    uint32_t round;    /* the last round that the rank has begun, modulo 2^32 */
    uint32_t sleepers; /* ranks that sleep until `round` changes */
    char unused[120];
} Flag;

typedef struct Ranks {
    Flag *flags;
    char *slots; /* two sets of `size` slots of `slot_bytes`, which is a multiple of 64 */
    long rank, size, slot_bytes;
    uint32_t round;
    int64_t sent_bytes; /* that the other ranks have read from this one's slots, one after the other */
} Ranks;

static long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* seen: a flag's value, read by a rank that has begun `round`, or is about to. */
static int is_left(uint32_t seen, uint32_t round)
{
    return (int32_t)(seen - round) < -(LEFT / 2);
}

static int is_begun(uint32_t seen, uint32_t round)
{
    return (int32_t)(seen + (is_left(seen, round) ? LEFT : 0) - round) >= 0;
}

static int has_begun(const Flag *flag, uint32_t round)
{
    return is_begun(__atomic_load_n(&flag->round, __ATOMIC_ACQUIRE), round);
}

static void begin(Flag *flag, uint32_t round)
{
    __atomic_store_n(&flag->round, round, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&flag->sleepers, __ATOMIC_SEQ_CST)) /* a sleeper is counted before it looks at `round` */
        syscall(SYS_futex, &flag->round, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

static void sleep_until_changed(Flag *flag, uint32_t round)
{
#ifdef __linux__
    struct timespec most = {WAIT_S, 0};
    __atomic_add_fetch(&flag->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(&flag->round, __ATOMIC_SEQ_CST);
    if (!is_begun(seen, round) && !is_left(seen, round))
        syscall(SYS_futex, &flag->round, FUTEX_WAIT, seen, &most, NULL, 0);
    __atomic_sub_fetch(&flag->sleepers, 1, __ATOMIC_SEQ_CST);
#else
    struct timespec pause = {0, SPIN_NS};
    nanosleep(&pause, NULL);
#endif
}

/* Whether the rank has begun the round; if not, it has left, WAIT_S have passed, or a signal has come. */
static int wait_for(Flag *flag, uint32_t round, int may_spin)
{
    long started = now_ns();
    while (may_spin && now_ns() - started < SPIN_NS) {
        for (int i = 0; i < SPINS; i++) {
            if (has_begun(flag, round))
                return 1;
            pause_cpu();
        }
        sched_yield(); /* the other rank may be waiting for this CPU */
    }
    if (!has_begun(flag, round))
        sleep_until_changed(flag, round);
    return has_begun(flag, round);
}

/* Rounded to nearest, ties to even; a NaN stays one. */
static uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* out[i] = slot 0's i-th number + slot 1's + …, added in this order in float32. Slots may be read beyond `count`. */
static void add(const Ranks *ranks, const char *slots, char *out, long count, int bf16)
{
    for (long i = 0; i < count; i += LANES) {
        vf sum = load16(slots, i, bf16);
        for (long rank = 1; rank < ranks->size; rank++)
            sum += load16(slots + rank * ranks->slot_bytes, i, bf16);
        long num = count - i < LANES ? count - i : LANES;
        if (bf16) {
            for (long j = 0; j < num; j++) {
                uint16_t half = to_bfloat16(sum[j]);
                memcpy(out + 2 * (i + j), &half, 2);
            }
        } else if (num == LANES) {
            *(vf_any *)(out + 4 * i) = sum;
        } else {
            memcpy(out + 4 * i, &sum, 4 * num);
        }
    }
}

/* The slots of the next round. */
static char *next_slots(const Ranks *ranks)
{
    return ranks->slots + ((ranks->round & 1) * ranks->size) * ranks->slot_bytes;
}

/* After this rank has written its slot: whether all ranks have. If not, another one has not come yet or has left.
 * is_again: an earlier call for this round has returned 0. */
static int meet(Ranks *ranks, int is_again)
{
    uint32_t round = ranks->round + 1;
    if (!is_again)
        begin(ranks->flags + ranks->rank, round);
    for (long rank = 0; rank < ranks->size; rank++)
        if (!wait_for(ranks->flags + rank, round, !is_again))
            return 0;
    return 1;
}

/* One round. x: this rank's `bytes`, at most a slot. out: for COPY the bytes of all ranks, `stride` bytes apart; else
   their sum, and it may be x. is_again: an earlier call for this round has returned 0. Returns 1 when the round is
   done, 0 if another rank has not begun it yet or has left. */
int pagewire_exchange(Ranks *ranks, const void *x, void *out, long bytes, long stride, int kind, int is_again)
{
    char *slots = next_slots(ranks);
    if (!is_again)
        memcpy(slots + ranks->rank * ranks->slot_bytes, x, bytes);
    if (!meet(ranks, is_again))
        return 0;
    if (kind == COPY)
        for (long rank = 0; rank < ranks->size; rank++)
            memcpy((char *)out + rank * stride, slots + rank * ranks->slot_bytes, bytes);
    else
        add(ranks, slots, out, bytes / (kind == SUM_BFLOAT16 ? 2 : 4), kind == SUM_BFLOAT16);
    ranks->round++;
    ranks->sent_bytes += bytes * (ranks->size - 1);
    return 1;
}

void pagewire_leave(Ranks *ranks)
{
    begin(ranks->flags + ranks->rank, ranks->round - LEFT);
}

/* Whether another rank has left without having begun the next round. */
int pagewire_others_left(const Ranks *ranks)
{
    uint32_t round = ranks->round + 1;
    for (long rank = 0; rank < ranks->size; rank++) {
        uint32_t seen = __atomic_load_n(&ranks->flags[rank].round, __ATOMIC_ACQUIRE);
        if (rank != ranks->rank && is_left(seen, round) && !is_begun(seen, round))
            return 1;
    }
    return 0;
}

/* After all ranks have left, and before any of them begins a round. */
void pagewire_come_back(Ranks *ranks)
{
    ranks->round = 0;
    begin(ranks->flags + ranks->rank, 0);
}

int pagewire_sum(const Sum *a, float *x, long count)
{
    long most = a->ranks->slot_bytes / 4;
    for (long i = 0; i < count; i += most) {
        long bytes = 4 * (count - i < most ? count - i : most), is_again = 0;
        while (!pagewire_exchange(a->ranks, x + i, x + i, bytes, 0, SUM_FLOAT32, is_again)) {
            is_again = 1;
            if (a->gives_up())
                return 0;
        }
    }
    return 1;
}

/* Bytes [from, to) of a stream. */
typedef struct {
    long from, to;
} Range;

static Range common(Range a, Range b)
{
    return (Range){a.from > b.from ? a.from : b.from, a.to < b.to ? a.to : b.to};
}

/* Copies the bytes of a stream that are in both ranges; x and y hold those of theirs. */
static void copy_common(char *y, Range of_y, const char *x, Range of_x)
{
    Range both = common(of_x, of_y);
    if (both.to > both.from)
        memcpy(y + both.from - of_y.from, x + both.from - of_x.from, both.to - both.from);
}

/* Writes what a round takes of this rank's stream. */
static void write_stream(const Ranks *ranks, char *slot, Range round, const char *x, const long *sent)
{
    Range at = {0, ranks->size * sizeof *sent};
    copy_common(slot, round, (const char *)sent, at);
    for (long rank = 0; rank < ranks->size; x += sent[rank++])
        if (rank != ranks->rank) {
            at = (Range){at.to, at.to + sent[rank]};
            copy_common(slot, round, x, at);
        }
}

int pagewire_all_to_all(const Sum *a, const void *x, const long *sent, void *out, long *got, long most)
{
    Ranks *ranks = a->ranks;
    long size = ranks->size, own = ranks->rank, slot_bytes = ranks->slot_bytes, longest = 1;
    Range parts[size]; /* in each rank's stream, that for this rank */
    for (long first = 0; first < longest; first += slot_bytes) {
        Range round = {first, first + slot_bytes};
        char *slots = next_slots(ranks), *to = out;
        write_stream(ranks, slots + own * slot_bytes, round, x, sent);
        for (int is_again = 0; !meet(ranks, is_again); is_again = 1)
            if (a->gives_up())
                return 0;
        for (long rank = 0, all = 0; rank < size && !first; rank++) {
            const long *counts = (const long *)(slots + rank * slot_bytes);
            long end = size * sizeof *counts;
            for (long other = 0; other < size; other++) {
                if (other == own)
                    parts[rank] = (Range){end, end + counts[own]};
                end += other == rank ? 0 : counts[other];
            }
            longest = end > longest ? end : longest;
            all += got[rank] = counts[own];
            if (all > most)
                abort();
        }
        for (long rank = 0; rank < size; to += got[rank++])
            if (rank != own)
                copy_common(to, parts[rank], slots + rank * slot_bytes, round);
        ranks->round++;
    }
    char *to = out;
    const char *from = x;
    for (long rank = 0; rank < size; rank++) {
        if (rank < own)
            from += sent[rank], to += got[rank];
        ranks->sent_bytes += rank == own ? 0 : sent[rank] + size * (long)sizeof *sent;
    }
    memcpy(to, from, sent[own]);
    return 1;
}
