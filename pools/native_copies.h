/* Copies of many blocks of host memory at the memory's speed, on one thread.

   A copy of many pages that nobody reads at once is limited by the memory. A plain store first reads the line that it
   is going to replace; a streaming store does not, which saves a third of the traffic. memcpy streams only from many
   megabytes a call on, which a page never has. So blocks are copied here: with streaming stores where a call moves much,
   with lines fetched early across the blocks' borders, since processors fetch ahead within 4 KiB only, and in one place
   or in two at a time; what is short, and rows, in loops of their own. Copies are made in any order. The checksum, XXH3-64,
   is libxxhash's, and takes each 8 KiB while they are in the first-level cache.

   Which of these kernel variants is the fastest depends on the processor and on the memory: what is 1.8 of memcpy on one is
   0.5 on another. So the first large call tries each kernel variant a few times, and the later ones take the best.

   Knows nothing of Python: native_kernel.c is the module around it. */

#ifndef KVFERRY_NATIVE_COPIES_H
#define KVFERRY_NATIVE_COPIES_H

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef PIECE_BYTES /* tests have smaller ones */
#define PIECE_BYTES (2 << 20)
#define STREAMED_BYTES (512 << 10)
#define YIELDED_BYTES (1 << 20)
#endif

enum {
    LINE = 64,
    CHUNK = 8 << 10,         /* what is hashed, and then copied, at a time */
    DISTANCE = 4 << 10,      /* how far ahead lines are fetched, within a block and in the ones after it */
    AHEAD = 2 << 10,         /* how much of what is next is fetched before a plain copy */
    GRAIN = 256,             /* what is copied in one place before the other one has its turn */
    FETCHED = 4 << 10,       /* longer blocks are not fetched as a whole */
    TOGETHER = 64,           /* so many that are, are copied before others have their turn */
    GATHERED = 1 << 10,      /* longer blocks are hashed where they are */
    LONG = 16 << 10,         /* shorter blocks are copied in one place */
    ROWS = 512,              /* what is shorter than this is a class of its own for trials, */
    MIDDLE = 8 << 10,        /* and so is what is shorter than this, */
    LARGE = 64 << 10,        /* or than this */
    SHORT = 128,             /* shorter rows are left to memcpy */
    JOINED = 1 << 20,        /* blocks that adjoin become one, up to this */
    PIECE = PIECE_BYTES,     /* of a call, tried by one kernel variant */
    STREAMED = STREAMED_BYTES, /* less than this in a call may stay in the caches: somebody reads it soon */
    UNLOCKED = 64 << 10      /* from here on a caller lets others run: less takes some microseconds */
};

typedef struct {
    char *to;
    const char *from;
    size_t bytes;
} Span;

typedef struct {
    Span span; /* of the first row */
    size_t rows, from_stride, to_stride;
} Block;

/* -- lists of copies: rows of three (from, to, bytes), or of six (…, rows, distances between rows on both sides) */

typedef struct {
    const char *numbers; /* uint64 */
    ptrdiff_t row_stride, column_stride;
    size_t count;
    int with_rows;
} Copies;

static uint64_t column(const Copies *copies, size_t row, int number) {
    uint64_t value;
    const char *at = copies->numbers + (ptrdiff_t)row * copies->row_stride + number * copies->column_stride;
    memcpy(&value, at, sizeof value);
    return value;
}

static Span span_of(const Copies *copies, size_t row) {
    return (Span){(char *)(uintptr_t)column(copies, row, 1), (const char *)(uintptr_t)column(copies, row, 0),
                  column(copies, row, 2)};
}

/* -- lists of segments: a segment is one page of one entry, numbered entry by entry */

enum { ENTRY = 8 }; /* numbers of an entry, in order as below */

typedef struct {
    uint64_t from, from_page, to, to_page; /* address of its page 0, and the distance from page to page, on both sides */
    uint64_t bytes, rows, from_stride, to_stride; /* of a segment, as in a list of copies */
} Entry;

typedef struct {
    const char *numbers; /* int64; NULL: there are none */
    ptrdiff_t stride;
} Numbers;

static uint64_t number_of(Numbers numbers, size_t position, uint64_t usual) {
    int64_t value;
    if (!numbers.numbers) return usual;
    memcpy(&value, numbers.numbers + (ptrdiff_t)position * numbers.stride, sizeof value);
    return (uint64_t)value;
}

typedef struct {
    const Entry *entries;
    Numbers from_ids, to_ids; /* the pages, usually numbered in order */
    Numbers counts;           /* how many pages each stands for, itself and those after it; usually one */
    size_t pages;
    uint64_t from_at, to_at; /* added to all addresses */
} Segments;

/* Whether a copy of three numbers goes on where the last one of a list ends; none gets longer than JOINED. */
static int goes_on(const uint64_t *last, uint64_t from, uint64_t to, uint64_t bytes) {
    return last[0] + last[2] == from && last[1] + last[2] == to && last[2] + bytes <= JOINED;
}

/* Writes the copies of segments [first, stop) to a list of three or six columns, and returns how many rows those are: of
   three columns, single pages that adjoin on both sides share one. */
static size_t list_segments(const Segments *of, size_t first, size_t stop, uint64_t *list, int columns) {
    uint64_t *row = list;
    int joins = columns == 3 && !of->counts.numbers;
    while (first < stop) {
        const Entry *entry = of->entries + first / of->pages;
        size_t page = first % of->pages, last = of->pages - page < stop - first ? of->pages : page + stop - first;
        for (first += last - page; page < last; page++) {
            uint64_t from = of->from_at + entry->from + entry->from_page * number_of(of->from_ids, page, page);
            uint64_t to = of->to_at + entry->to + entry->to_page * number_of(of->to_ids, page, page);
            if (joins && row != list && goes_on(row - 3, from, to, entry->bytes)) {
                row[-1] += entry->bytes;
                continue;
            }
            row[0] = from, row[1] = to, row[2] = entry->bytes * number_of(of->counts, page, 1);
            if (columns == 6) row[3] = entry->rows, row[4] = entry->from_stride, row[5] = entry->to_stride;
            row += columns;
        }
    }
    return (size_t)(row - list) / (size_t)columns;
}

/* -- streaming stores: for each kind, whole lines in one place or in two, and whole rows. `to` is aligned to a line. */

/* Copies `bytes`, a multiple of LINE, and fetches as many at `ahead`; in two places, which lie `apart`, does the same in
   both in turns. */
typedef void (*CopyLines)(char *to, const char *from, size_t bytes, const char *ahead, size_t apart);

/* Copies `count` blocks of one shape, a row of each in turns, and fetches what is `later` rows later: of the block, then
   of what is read after it. */
typedef void (*CopyRows)(const Block *blocks, const char *const *next, size_t count, size_t later);

static const char *row_of(const Block *block, size_t row, const char *next) {
    return row < block->rows ? block->span.from + row * block->from_stride
                             : next + (row - block->rows) * block->from_stride;
}

/* Copies short blocks of whole lines, and fetches what comes `later` blocks later, up to the first that is another one, or
   `stop`; returns which. */
typedef size_t (*CopyShort)(const Copies *copies, size_t row, size_t stop, size_t later);

static int is_short(Span span) {
    return span.bytes <= FETCHED && !(((uintptr_t)span.to | span.bytes) & (LINE - 1));
}

/* Where what is fetched goes: into the second-level cache, which has the most fetches under way; or past it, where the
   processor can do that, so that what others have in the caches stays there. */
enum { INTO_CACHE = 2, PAST_CACHE = 0 };

#define FETCH(address, where) __builtin_prefetch((address), 0, (where))

/* Fetches what is read next, unless that is not known. */
static void fetch(const char *from, size_t bytes) {
    for (size_t at = 0; from && at < bytes; at += LINE) FETCH(from + at, INTO_CACHE);
}

#define STREAMING(NAME, TARGET, COPY_LINE, WHERE)                                                                       \
    TARGET static void lines_##NAME(char *to, const char *from, size_t bytes, const char *ahead, size_t apart) {       \
        (void)apart;                                                                                                   \
        for (size_t at = 0; at < bytes; at += LINE) {                                                                  \
            FETCH(ahead + at, WHERE);                                                                                  \
            COPY_LINE(to + at, from + at);                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void two_##NAME(char *to, const char *from, size_t bytes, const char *ahead, size_t apart) {         \
        for (size_t at = 0; at < bytes; at += GRAIN)                                                                   \
            for (size_t place = 0; place <= apart; place += apart)                                                     \
                for (size_t line = place + at; line < place + at + GRAIN; line += LINE) {                              \
                    FETCH(ahead + line, WHERE);                                                                        \
                    COPY_LINE(to + line, from + line);                                                                 \
                }                                                                                                      \
    }                                                                                                                  \
    TARGET static void rows_##NAME(const Block *blocks, const char *const *next, size_t count, size_t later) {         \
        size_t bytes = blocks->span.bytes;                                                                             \
        for (size_t row = 0; row < blocks->rows; row++) {                                                              \
            for (size_t one = 0; one < count; one++) {                                                                 \
                const char *ahead = row_of(blocks + one, row + later, next[one]);                                      \
                for (size_t at = 0; at < bytes; at += LINE) FETCH(ahead + at, WHERE);                                  \
            }                                                                                                          \
            for (size_t one = 0; one < count; one++) {                                                                 \
                char *to = blocks[one].span.to + row * blocks[one].to_stride;                                          \
                const char *from = blocks[one].span.from + row * blocks[one].from_stride;                              \
                for (size_t at = 0; at < bytes; at += LINE) COPY_LINE(to + at, from + at);                             \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static size_t short_##NAME(const Copies *copies, size_t row, size_t stop, size_t later) {                   \
        size_t last = copies->count - 1;                                                                               \
        for (; row < stop; row++) {                                                                                    \
            Span span = span_of(copies, row), ahead = span_of(copies, row + later < last ? row + later : last);        \
            if (!is_short(span)) break;                                                                                \
            for (size_t at = 0; at < ahead.bytes && at < FETCHED; at += LINE) FETCH(ahead.from + at, WHERE);           \
            for (size_t at = 0; at < span.bytes; at += LINE) COPY_LINE(span.to + at, span.from + at);                  \
        }                                                                                                              \
        return row;                                                                                                    \
    }

#if defined(__x86_64__)
#define LINE_AVX512(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512(from))
#define LINE_AVX2(to, from)                                                                     \
    do {                                                                                        \
        __m256i first = _mm256_loadu_si256((const void *)(from));                               \
        __m256i second = _mm256_loadu_si256((const void *)((from) + 32));                       \
        _mm256_stream_si256((void *)(to), first);                                               \
        _mm256_stream_si256((void *)((to) + 32), second);                                       \
    } while (0)
#define LINE_SSE2(to, from)                                                                     \
    for (size_t part_of_line = 0; part_of_line < LINE; part_of_line += 16)                      \
    _mm_stream_si128((void *)((to) + part_of_line), _mm_loadu_si128((const void *)((from) + part_of_line)))
STREAMING(avx512, __attribute__((target("avx512f"))), LINE_AVX512, INTO_CACHE)
STREAMING(avx512_past, __attribute__((target("avx512f"))), LINE_AVX512, PAST_CACHE)
STREAMING(avx2, __attribute__((target("avx2"))), LINE_AVX2, INTO_CACHE)
STREAMING(avx2_past, __attribute__((target("avx2"))), LINE_AVX2, PAST_CACHE)
STREAMING(sse2, , LINE_SSE2, INTO_CACHE)
STREAMING(sse2_past, , LINE_SSE2, PAST_CACHE)
static void fence(void) { _mm_sfence(); }
#elif defined(__aarch64__)
#define LINE_STNP(to, from)                                                                     \
    __asm__ volatile("ldp q0, q1, [%1]\n ldp q2, q3, [%1, 32]\n"                                \
                     "stnp q0, q1, [%0]\n stnp q2, q3, [%0, 32]"                                \
                     :                                                                          \
                     : "r"(to), "r"(from)                                                       \
                     : "v0", "v1", "v2", "v3", "memory")
STREAMING(stnp, , LINE_STNP, INTO_CACHE)
STREAMING(stnp_past, , LINE_STNP, PAST_CACHE)
static void fence(void) { __asm__ volatile("dmb ishst" ::: "memory"); }
#else
static void fence(void) {}
#endif

typedef struct {
    const char *name;
    CopyLines lines;    /* NULL: memcpy */
    CopyLines two;      /* for long blocks; NULL: in one place, and blocks of rows one after the other */
    CopyRows rows;      /* of whole, aligned lines; with `two`, of two blocks at a time */
    CopyShort shorts;   /* the same for blocks of one row */
    const char *needs;  /* of the processor; NULL: all have it */
} Variant;

#define ONE(NAME, IN, TWO, NEEDS) {NAME, lines_##IN, TWO, rows_##IN, short_##IN, NEEDS}
#define BOTH(NAME, NEEDS)                                                                \
    ONE(#NAME, NAME, NULL, NEEDS),                                                       \
    ONE(#NAME " in two places", NAME, two_##NAME, NEEDS),                                \
    ONE(#NAME " past the cache", NAME##_past, NULL, NEEDS),                              \
    ONE(#NAME " in two places past the cache", NAME##_past, two_##NAME##_past, NEEDS)

static const Variant VARIANTS[] = {
#if defined(__x86_64__)
    BOTH(avx512, "avx512f"),
    BOTH(avx2, "avx2"),
    BOTH(sse2, NULL),
#elif defined(__aarch64__)
    BOTH(stnp, NULL),
#endif
    {"memcpy", NULL, NULL, NULL, NULL, NULL},
};
enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };

static int is_supported(const Variant *variant) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (variant->needs && !strcmp(variant->needs, "avx512f")) return __builtin_cpu_supports("avx512f");
    if (variant->needs && !strcmp(variant->needs, "avx2")) return __builtin_cpu_supports("avx2");
#endif
    (void)variant;
    return 1;
}

/* Copies one span with streaming stores; the ends, which share a line with others' bytes, with plain ones. Fetched is what
   comes `distance` later: of this span, then of `next`, which is copied after it (NULL: not known). */
static void stream(const Variant *variant, Span span, size_t distance, const char *next) {
    size_t head = -(uintptr_t)span.to & (LINE - 1);
    if (span.bytes < head + LINE) {
        memcpy(span.to, span.from, span.bytes);
        return;
    }
    memcpy(span.to, span.from, head);
    char *to = span.to + head;
    const char *from = span.from + head;
    size_t left = span.bytes - head;
    size_t apart = variant->two && left >= LONG ? left / 2 / GRAIN * GRAIN : 0;
    size_t whole = apart ? apart : left & ~(size_t)(LINE - 1);
    size_t within = distance && whole > distance ? whole - distance : 0;
    CopyLines copy = apart ? variant->two : variant->lines;
    copy(to, from, within, from + distance, apart);
    copy(to + within, from + within, whole - within, next ? next : from + within, apart);
    if (apart) {
        size_t done = 2 * apart;
        whole = (left - done) & ~(size_t)(LINE - 1);
        variant->lines(to + done, from + done, whole, from + done, 0);
        whole += done;
    }
    memcpy(to + whole, from + whole, left - whole);
}

/* -- which kernel variant: calls of one class, by what a block or row has, how rows lie and whether all is hashed, try each
   kernel variant, and take the best.

   Tried are pieces of a call, each by another kernel variant, so that one large call knows. What is found is forgotten
   little by little, and tried anew, since a moment in which others used the memory must not decide for ever. */

enum { BLOCKS, GATHERED_ROWS, SCATTERED_ROWS, KINDS };
enum { TRIES = 3, SIZES = 4, CLASSES = 2 * KINDS * SIZES };

static const double AGAIN_NS = 60e9, OLDER_IS_WORSE = 1.05;

static const Variant *forced; /* NULL: by measurement */

typedef struct {
    int tries;
    double best; /* nanoseconds a byte, the least that was seen: what disturbs only makes it more; 0: never tried */
} Trial;

typedef struct {
    Trial variants[VARIANT_COUNT];
    double tried_ns; /* when the last piece was tried */
} Trials;

static Trials trials[CLASSES]; /* read and written with the interpreter's lock */

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

/* Returns the class of a list of `rows` in all. What is gathered from rows far apart may be copied best by a kernel variant
   that is half as fast as another one where rows are scattered. */
static int class_of(const Copies *copies, uint64_t bytes, uint64_t rows, int hashed) {
    uint64_t mean = bytes / rows;
    int size = mean < ROWS ? 0 : mean < MIDDLE ? 1 : mean < LARGE ? 2 : 3;
    int kind = !copies->with_rows ? BLOCKS : column(copies, 0, 4) > column(copies, 0, 5) ? GATHERED_ROWS : SCATTERED_ROWS;
    return (hashed ? KINDS + kind : kind) * SIZES + size;
}

/* Returns the kernel variant that has been tried the least, and too seldom; NULL where each was tried often enough. */
static const Variant *untried(const Trials *of) {
    const Variant *least = NULL;
    for (const Variant *variant = VARIANTS; variant < VARIANTS + VARIANT_COUNT; variant++) {
        int tries = of->variants[variant - VARIANTS].tries;
        if (!is_supported(variant) || tries >= TRIES) continue;
        if (!least || tries < of->variants[least - VARIANTS].tries) least = variant;
    }
    return least;
}

static const Variant *best(const Trials *of) {
    const Variant *found = NULL;
    for (const Variant *variant = VARIANTS; variant < VARIANTS + VARIANT_COUNT; variant++) {
        double taken = of->variants[variant - VARIANTS].best;
        if (taken > 0 && (!found || taken < of->variants[found - VARIANTS].best)) found = variant;
    }
    return found ? found : VARIANTS + VARIANT_COUNT - 1;
}

static void note(Trials *of, const Variant *variant, double ns_a_byte) {
    Trial *trial = &of->variants[variant - VARIANTS];
    if (!(trial->best > 0) || ns_a_byte < trial->best) trial->best = ns_a_byte;
    trial->tries++;
}

/* Adds what a call has found, that began with `before`, to what is known now. */
static void merge(Trials *into, const Trials *found, const Trials *before, double at_ns) {
    for (int variant = 0; variant < VARIANT_COUNT; variant++) {
        const Trial *one = &found->variants[variant];
        if (one->tries == before->variants[variant].tries) continue;
        into->variants[variant].tries += one->tries - before->variants[variant].tries;
        double *best_of_all = &into->variants[variant].best;
        if (!(*best_of_all > 0) || one->best < *best_of_all) *best_of_all = one->best;
        into->tried_ns = at_ns;
    }
}

/* Lets everything be tried anew once a while has passed. */
static void age(Trials *of, double at_ns) {
    if (untried(of) || at_ns - of->tried_ns < AGAIN_NS) return;
    for (int variant = 0; variant < VARIANT_COUNT; variant++) {
        of->variants[variant].tries = 0;
        of->variants[variant].best *= OLDER_IS_WORSE;
    }
}

/* -- giving way: between two rows, some short ones, or pieces of long ones, such a thread stops while its gate is shut,
   and lets others have its processor. The kernel lets who was preempted, or wakes up having had its share, wait for a
   tick of its clock otherwise, which may take 4 ms, even for a thread in the background. */

typedef struct {
    uint32_t shut, waiting;
} Gate;

static const double LONG_NS = 1e18; /* what the kernel takes */
enum {
    SPIN_NS = 20000,   /* what is copied at once is over sooner than a thread sleeps and wakes up */
    PAUSE_NS = 100000, /* who has waited for a transfer wakes up as it ends, and would wait again, for a processor */
    YIELDED = YIELDED_BYTES, /* after so much, some 100 us, others may have the processor */
    KEPT = 4, /* it is not yielded again for a fourth of the time that others had it: some may never sleep */
    MOST_KEPT_NS = 100000000 /* nor for longer than this: the whole process may have been stopped */
};

typedef struct {
    Gate *gate; /* NULL: gives way to nobody */
    double patience_ns, until_ns, waited_ns;
} GivingWay;

static _Thread_local GivingWay giving_way;

static uint32_t read_now(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* Waits until the gate is open; having slept for it, a moment longer, in which it may be shut again. */
static void wait_at(Gate *gate) {
    static const struct timespec pause = {0, PAUSE_NS};
    double began_ns = now_ns(), at_ns = began_ns;
    for (; read_now(&gate->shut) && at_ns < giving_way.until_ns; at_ns = now_ns()) {
        if (at_ns - began_ns < SPIN_NS) continue;
        double left_ns = giving_way.until_ns - at_ns < LONG_NS ? giving_way.until_ns - at_ns : LONG_NS;
        time_t seconds = (time_t)(left_ns / 1e9);
        struct timespec left = {seconds, (long)(left_ns - 1e9 * (double)seconds)};
        __atomic_add_fetch(&gate->waiting, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &gate->shut, FUTEX_WAIT_PRIVATE, 1, &left, NULL, 0);
        __atomic_sub_fetch(&gate->waiting, 1, __ATOMIC_SEQ_CST);
        if (!read_now(&gate->shut)) nanosleep(&pause, NULL);
    }
    giving_way.waited_ns += at_ns - began_ns;
}

/* Begins a call, which waits for so long at most. */
static void begin_giving_way(GivingWay *way) {
    if (way->gate) way->until_ns = now_ns() + way->patience_ns;
}

static _Thread_local struct {
    uint64_t bytes; /* since the last time */
    double again_ns;
} yielding;

static void let_others_run(void) {
    yielding.bytes = 0;
    double left_ns = now_ns();
    if (left_ns < yielding.again_ns) return;
    sched_yield();
    double back_ns = now_ns(), kept_ns = (back_ns - left_ns) / KEPT;
    yielding.again_ns = back_ns + (kept_ns < MOST_KEPT_NS ? kept_ns : MOST_KEPT_NS);
    giving_way.waited_ns += back_ns - left_ns;
}

/* Gives way, if the thread does, before so many bytes. */
static void give_way(uint64_t bytes) {
    if (!giving_way.gate) return;
    if (read_now(&giving_way.gate->shut)) wait_at(giving_way.gate);
    yielding.bytes += bytes;
    if (yielding.bytes >= YIELDED) let_others_run();
}

static void set_gate(Gate *gate, int shut) {
    __atomic_store_n(&gate->shut, (uint32_t)shut, __ATOMIC_SEQ_CST);
    if (!shut && __atomic_load_n(&gate->waiting, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &gate->shut, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* -- the hash, from a library that is loaded at run time */

typedef struct {
    void *(*create)(void);
    int (*free)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *bytes, size_t count);
    uint64_t (*digest)(const void *state);
} Hash;

static Hash hash;

static Block block_of(const Copies *copies, size_t row) {
    Block block = {span_of(copies, row), 1, 0, 0};
    if (copies->with_rows) {
        block.rows = column(copies, row, 3);
        block.from_stride = column(copies, row, 4);
        block.to_stride = column(copies, row, 5);
    }
    return block;
}

typedef struct {
    uint64_t bytes, rows;
} Total;

static uint64_t bytes_of(const Copies *copies, size_t row) {
    return column(copies, row, 2) * (copies->with_rows ? column(copies, row, 3) : 1);
}

static Total total_of(const Copies *copies) {
    Total total = {0, 0};
    for (size_t row = 0; row < copies->count; row++) {
        total.bytes += bytes_of(copies, row);
        total.rows += copies->with_rows ? column(copies, row, 3) : 1;
    }
    return total;
}

/* Returns where a row is read; NULL behind the last one. */
static const char *start_of(const Copies *copies, size_t row) {
    return row < copies->count ? (const char *)(uintptr_t)column(copies, row, 0) : NULL;
}

/* Returns how many blocks of so many bytes, or rows of a block, later than one what comes DISTANCE later begins. */
static size_t later_by(size_t bytes) { return bytes ? 1 + DISTANCE / bytes : 1; }

/* Copies a row, in pieces of `most`, before each of which it gives way. */
static void copy_row(Span row, size_t most, const Variant *variant, const char *next) {
    while (row.bytes) {
        Span piece = {row.to, row.from, row.bytes < most ? row.bytes : most};
        row = (Span){row.to + piece.bytes, row.from + piece.bytes, row.bytes - piece.bytes};
        const char *ahead = row.bytes ? row.from : next;
        if (most < SIZE_MAX) give_way(piece.bytes);
        if (variant->lines && piece.bytes >= SHORT) {
            stream(variant, piece, DISTANCE, ahead);
        } else {
            fetch(ahead, piece.bytes < AHEAD ? piece.bytes : AHEAD);
            memcpy(piece.to, piece.from, piece.bytes);
        }
    }
}

/* Returns whether a block is of short rows of whole lines, all aligned. */
static int has_aligned_rows(const Block *block) {
    size_t together = (uintptr_t)block->span.to | block->to_stride | block->span.bytes;
    return block->rows > 1 && block->span.bytes < LONG && !(together & (LINE - 1));
}

/* Copies blocks of aligned rows from one of a list on, two at a time where they are alike and the kernel variant is in two
   places; returns which one is something else. */
static size_t copy_aligned(const Copies *copies, size_t row, size_t stop, size_t most, const Variant *variant) {
    for (size_t count; row < stop; row += count) {
        Block blocks[2] = {block_of(copies, row)};
        size_t bytes = blocks->span.bytes;
        if (!has_aligned_rows(blocks) || bytes * blocks->rows > most / 2) break;
        count = 1;
        if (variant->two && row + 1 < stop) {
            blocks[1] = block_of(copies, row + 1);
            count += has_aligned_rows(blocks + 1) && blocks[1].rows == blocks->rows && blocks[1].span.bytes == bytes;
        }
        const char *next[2];
        for (size_t one = 0; one < count; one++) {
            next[one] = start_of(copies, row + count + one);
            if (!next[one]) next[one] = blocks[one].span.from;
        }
        give_way(count * bytes * blocks->rows);
        variant->rows(blocks, next, count, later_by(bytes));
    }
    return row;
}

/* Copies short blocks from one of a list on; returns which one is something else. */
static size_t copy_short(const Copies *copies, size_t row, size_t stop, const Variant *variant) {
    for (size_t part = row; row == part && row < stop;) {
        give_way(0);
        part = stop - row < TOGETHER ? stop : row + TOGETHER;
        size_t after = variant->shorts(copies, row, part, later_by(column(copies, row, 2)));
        if (giving_way.gate)
            for (; row < after; row++) yielding.bytes += column(copies, row, 2); /* what is next yields for them */
        row = after;
    }
    return row;
}

static void copy_rows(const Copies *copies, size_t first, size_t stop, const Variant *variant) {
    size_t most = giving_way.gate ? YIELDED : SIZE_MAX;
    for (size_t row = first; row < stop; row++) {
        if (variant->lines) {
            row = copies->with_rows ? copy_aligned(copies, row, stop, most, variant) : copy_short(copies, row, stop, variant);
            if (row == stop) break;
        }
        Block block = block_of(copies, row);
        size_t later = later_by(block.span.bytes);
        const char *next = start_of(copies, row + later);
        for (size_t done = 0; done < block.rows; done++) {
            if (block.rows > 1) next = block.span.from + later * block.from_stride;
            copy_row(block.span, most, variant, next);
            block.span.from += block.from_stride;
            block.span.to += block.to_stride;
        }
    }
    if (variant->lines) fence();
}

typedef struct {
    const int64_t *ends;
    uint64_t *digests;
    size_t count, ended;
    void *state;
} Digests;

/* Hashes one row, and copies it in the same pass, unless it has no destination. */
static void hash_row(void *state, Span span, const Variant *variant, const char *next) {
    for (size_t at = 0; at < span.bytes; at += CHUNK) {
        size_t bytes = span.bytes - at < CHUNK ? span.bytes - at : CHUNK;
        give_way(bytes);
        hash.update(state, span.from + at, bytes);
        if (!span.to) continue;
        Span chunk = {span.to + at, span.from + at, bytes};
        const char *ahead = at + bytes < span.bytes ? chunk.from + bytes : next;
        if (variant->lines && bytes >= SHORT) {
            stream(variant, chunk, 0, ahead);
        } else {
            fetch(ahead, bytes < AHEAD ? bytes : AHEAD);
            memcpy(chunk.to, chunk.from, bytes);
        }
    }
}

/* Hashes short blocks from one of a list on up to the end of a digest, CHUNK at most, and copies them: a hash takes a few
   hundred bytes hardly sooner than thousands, so they are put side by side first. Returns where what it took ends. */
static size_t hash_short(const Copies *copies, size_t row, size_t stop, const Variant *variant, const Digests *into) {
    _Alignas(LINE) char together[CHUNK];
    size_t first = row, bytes = 0, later = later_by(column(copies, row, 2)), last = copies->count - 1;
    if (into->ended < into->count && (size_t)into->ends[into->ended] < stop) stop = (size_t)into->ends[into->ended];
    for (; row < stop; row++) {
        Span span = span_of(copies, row);
        if (!span.to || !is_short(span) || span.bytes > GATHERED || bytes + span.bytes > CHUNK) break;
        fetch((const char *)(uintptr_t)column(copies, row + later < last ? row + later : last, 0), span.bytes);
        memcpy(together + bytes, span.from, span.bytes);
        bytes += span.bytes;
    }
    if (row == first) return row;
    give_way(bytes);
    hash.update(into->state, together, bytes);
    for (size_t at = 0; first < row; first++) {
        Span span = span_of(copies, first);
        if (variant->lines)
            variant->lines(span.to, together + at, span.bytes, together + at, 0);
        else
            memcpy(span.to, together + at, span.bytes);
        at += span.bytes;
    }
    return row;
}

static void hash_block(void *state, const Copies *copies, size_t row, const Variant *variant) {
    Block block = block_of(copies, row);
    size_t later = later_by(block.span.bytes);
    const char *next = start_of(copies, row + later);
    for (size_t done = 0; done < block.rows; done++) {
        if (block.rows > 1) next = block.span.from + later * block.from_stride;
        hash_row(state, block.span, variant, next);
        block.span.from += block.from_stride;
        if (block.span.to) block.span.to += block.to_stride;
    }
}

/* Hashes, and copies, rows; a digest is of the rows since the last one up to its end. */
static void hash_rows(const Copies *copies, size_t first, size_t stop, const Variant *variant, Digests *into) {
    for (size_t row = first, after; row < stop; row = after) {
        after = copies->with_rows ? row : hash_short(copies, row, stop, variant, into);
        if (after == row) hash_block(into->state, copies, row, variant), after++;
        for (; into->ended < into->count && into->ends[into->ended] == (int64_t)after; into->ended++) {
            into->digests[into->ended] = hash.digest(into->state);
            hash.reset(into->state);
        }
    }
    if (variant->lines) fence();
}

/* -- calls */

typedef struct {
    const Copies *copies;
    Digests *into; /* NULL: not hashed */
    uint64_t bytes;
    int class; /* of trials; -1: copied by one kernel variant, which is not tried */
    const Variant *variant;
    Trials before, found;
} Call;

static const Variant *const PLAIN = &VARIANTS[VARIANT_COUNT - 1];

/* Decides how a call copies: what is small stays in the caches, and what is only hashed is copied by none. Needs the
   interpreter's lock. */
static Call begin_call(const Copies *copies, Digests *into) {
    Total total = total_of(copies);
    Call call = {.copies = copies, .into = into, .bytes = total.bytes, .class = -1, .variant = PLAIN};
    if (total.bytes < STREAMED) return call;
    int class = class_of(copies, total.bytes, total.rows, into != NULL);
    age(&trials[class], now_ns());
    call.variant = forced ? forced : best(&trials[class]);
    if (forced || !column(copies, 0, 1) || !untried(&trials[class])) return call;
    call.class = class;
    call.before = call.found = trials[class];
    return call;
}

static void do_rows(const Copies *copies, size_t first, size_t stop, const Variant *variant, Digests *into) {
    if (into)
        hash_rows(copies, first, stop, variant, into);
    else
        copy_rows(copies, first, stop, variant);
}

/* Copies. Does not need the interpreter's lock. */
static void do_call(Call *call) {
    begin_giving_way(&giving_way);
    size_t done = 0, count = call->copies->count;
    const Variant *trying;
    while (done < count && call->class >= 0 && (trying = untried(&call->found))) {
        size_t first = done;
        uint64_t bytes = 0;
        for (; done < count && bytes < PIECE; done++) bytes += bytes_of(call->copies, done);
        double begun_ns = now_ns() - giving_way.waited_ns;
        do_rows(call->copies, first, done, trying, call->into);
        if (bytes >= STREAMED)
            note(&call->found, trying, (now_ns() - giving_way.waited_ns - begun_ns) / (double)bytes);
    }
    if (done == count) return;
    do_rows(call->copies, done, count, call->class < 0 ? call->variant : best(&call->found), call->into);
}

/* Takes note of what was found. Needs the interpreter's lock. */
static void end_call(const Call *call) {
    if (call->class >= 0) merge(&trials[call->class], &call->found, &call->before, now_ns());
}

#endif
