/* Copies of many blocks of host memory at the memory's speed, on one thread.

   A copy of many pages that nobody reads at once is limited by the memory. A plain store first reads the line that it
   is going to replace; a streaming store does not, which saves a third of the traffic. memcpy streams only from many
   megabytes a call on, which a page never has. So blocks are copied here: with streaming stores where a call moves much,
   with the next block's beginning fetched early, and in one place or in two at a time, since processors fetch ahead
   within 4 KiB only. The checksum, XXH3-64, is libxxhash's, and takes each 8 KiB while they are in the first-level cache.

   Which of these ways is the fastest depends on the processor and on the memory: what is 1.8 of memcpy on one is 0.5 on
   another. So the first large calls try each way a few times, and the later ones take the best.

   Knows nothing of Python: native_kernel.c is the module around it. */

#ifndef KVFERRY_NATIVE_COPIES_H
#define KVFERRY_NATIVE_COPIES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    LINE = 64,
    CHUNK = 8 << 10,         /* what is hashed, and then copied, at a time */
    AHEAD = 2 << 10,         /* of the next block, fetched before a short one is copied */
    DISTANCE = 4 << 10,      /* how far ahead lines are fetched within a block */
    GRAIN = 256,             /* what is copied in one place before the other one has its turn */
    LONG = 64 << 10,         /* from here on lines are fetched within a block, and the next block's are not */
    TWO_PLACES = 8 << 10,    /* shorter blocks are copied in one place */
    ROWS = 512,              /* rows of slices, shorter than this, are a class of their own */
    SHORT = 128,             /* shorter rows are left to memcpy */
    STREAMED = 512 << 10,    /* less than this in a call may stay in the caches: somebody reads it soon */
    UNLOCKED = 64 << 10      /* from here on a caller lets others run: less takes some microseconds */
};

typedef struct {
    char *to;
    const char *from;
    size_t bytes;
} Span;

/* -- streaming stores: for each kind, whole lines in one place or in two. `to` is aligned to a line. */

/* Copies `bytes`, a multiple of LINE, and fetches as many at `ahead`. */
typedef void (*CopyLines)(char *to, const char *from, size_t bytes, const char *ahead);

#define FETCH(address) __builtin_prefetch((address), 0, 2)

#define STREAMING(NAME, TARGET, COPY_LINE)                                                                  \
    TARGET static void lines_##NAME(char *to, const char *from, size_t bytes, const char *ahead) {          \
        for (size_t at = 0; at < bytes; at += LINE) {                                                       \
            FETCH(ahead + at);                                                                              \
            COPY_LINE(to + at, from + at);                                                                  \
        }                                                                                                   \
    }                                                                                                       \
    TARGET static void two_##NAME(char *to, const char *from, size_t bytes, const char *ahead) {            \
        size_t half = bytes / 2 / GRAIN * GRAIN;                                                            \
        for (size_t at = 0; at < half; at += GRAIN)                                                         \
            for (size_t place = 0; place <= half; place += half)                                            \
                for (size_t line = place + at; line < place + at + GRAIN; line += LINE) {                   \
                    FETCH(ahead + line);                                                                    \
                    COPY_LINE(to + line, from + line);                                                      \
                }                                                                                           \
        lines_##NAME(to + 2 * half, from + 2 * half, bytes - 2 * half, ahead);                              \
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
STREAMING(avx512, __attribute__((target("avx512f"))), LINE_AVX512)
STREAMING(avx2, __attribute__((target("avx2"))), LINE_AVX2)
STREAMING(sse2, , LINE_SSE2)
static void fence(void) { _mm_sfence(); }
#elif defined(__aarch64__)
#define LINE_STNP(to, from)                                                                     \
    __asm__ volatile("ldp q0, q1, [%1]\n ldp q2, q3, [%1, 32]\n"                                \
                     "stnp q0, q1, [%0]\n stnp q2, q3, [%0, 32]"                                \
                     :                                                                          \
                     : "r"(to), "r"(from)                                                       \
                     : "v0", "v1", "v2", "v3", "memory")
STREAMING(stnp, , LINE_STNP)
static void fence(void) { __asm__ volatile("dmb ishst" ::: "memory"); }
#else
static void fence(void) {}
#endif

typedef struct {
    const char *name;
    CopyLines lines; /* NULL: memcpy */
    CopyLines long_lines;
    const char *needs; /* of the processor; NULL: all have it */
} Way;

static const Way WAYS[] = {
#if defined(__x86_64__)
    {"avx512", lines_avx512, lines_avx512, "avx512f"},
    {"avx512 in two places", lines_avx512, two_avx512, "avx512f"},
    {"avx2", lines_avx2, lines_avx2, "avx2"},
    {"avx2 in two places", lines_avx2, two_avx2, "avx2"},
    {"sse2", lines_sse2, lines_sse2, NULL},
    {"sse2 in two places", lines_sse2, two_sse2, NULL},
#elif defined(__aarch64__)
    {"stnp", lines_stnp, lines_stnp, NULL},
    {"stnp in two places", lines_stnp, two_stnp, NULL},
#endif
    {"memcpy", NULL, NULL, NULL},
};
enum { WAY_COUNT = sizeof WAYS / sizeof *WAYS };

static int is_supported(const Way *way) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (way->needs && !strcmp(way->needs, "avx512f")) return __builtin_cpu_supports("avx512f");
    if (way->needs && !strcmp(way->needs, "avx2")) return __builtin_cpu_supports("avx2");
#endif
    (void)way;
    return 1;
}

/* Copies one span with streaming stores; the ends, which share a line with others' bytes, with plain ones. `ahead` is
   read next: of a long span NULL, since its own lines are fetched within it. */
static void stream(const Way *way, Span span, const char *ahead) {
    size_t head = -(uintptr_t)span.to & (LINE - 1);
    if (span.bytes < head + LINE) {
        memcpy(span.to, span.from, span.bytes);
        return;
    }
    memcpy(span.to, span.from, head);
    char *to = span.to + head;
    const char *from = span.from + head;
    size_t left = span.bytes - head;
    size_t whole = left & ~(size_t)(LINE - 1);
    (whole < TWO_PLACES ? way->lines : way->long_lines)(to, from, whole, ahead ? ahead : from + DISTANCE);
    memcpy(to + whole, from + whole, left - whole);
}

/* -- which way: calls of one class, by what a block has and whether it is hashed, try each way, and take the best. */

enum { TRIES = 4, SIZES = 4, CLASSES = 2 * SIZES };

static const Way *forced; /* NULL: by measurement */

typedef struct {
    int tries;
    double best; /* nanoseconds a byte, the least that was seen: what disturbs only makes it more */
} Trial;

static Trial trials[CLASSES][WAY_COUNT];

static int class_of(uint64_t mean_bytes, int hashed) {
    int size = mean_bytes < ROWS ? 0 : mean_bytes < TWO_PLACES ? 1 : mean_bytes < LONG ? 2 : 3;
    return hashed ? size + SIZES : size;
}

/* Returns the way that has been tried too seldom, else the best one. Needs the interpreter's lock. */
static const Way *choose(int class) {
    if (forced) return forced;
    const Way *best = NULL, *untried = NULL;
    for (const Way *way = WAYS; way < WAYS + WAY_COUNT; way++) {
        const Trial *trial = &trials[class][way - WAYS];
        if (!is_supported(way)) continue;
        if (trial->tries < TRIES && (!untried || trial->tries < trials[class][untried - WAYS].tries)) untried = way;
        if (!best || trial->best < trials[class][best - WAYS].best) best = way;
    }
    return untried ? untried : best;
}

/* Takes note of how long a call took. Needs the interpreter's lock. */
static void note(int class, const Way *way, double nanoseconds, uint64_t bytes) {
    Trial *trial = &trials[class][way - WAYS];
    double found = nanoseconds / (double)bytes;
    if (trial->tries >= TRIES) return;
    if (!trial->tries || found < trial->best) trial->best = found;
    trial->tries++;
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
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

/* -- lists of copies: rows of three (from, to, bytes), or of six (…, rows, distances between rows on both sides) */

typedef struct {
    const char *numbers; /* uint64 */
    ptrdiff_t row_stride, column_stride;
    size_t count;
    int with_rows;
} Copies;

typedef struct {
    Span span; /* of the first row */
    size_t rows, from_stride, to_stride;
} Block;

static uint64_t column(const Copies *copies, size_t row, int number) {
    uint64_t value;
    const char *at = copies->numbers + (ptrdiff_t)row * copies->row_stride + number * copies->column_stride;
    memcpy(&value, at, sizeof value);
    return value;
}

static Block block_of(const Copies *copies, size_t row) {
    Block block = {{(char *)(uintptr_t)column(copies, row, 1), (const char *)(uintptr_t)column(copies, row, 0),
                    column(copies, row, 2)},
                   1, 0, 0};
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

static Total total_of(const Copies *copies) {
    Total total = {0, 0};
    for (size_t row = 0; row < copies->count; row++) {
        uint64_t rows = copies->with_rows ? column(copies, row, 3) : 1;
        total.bytes += column(copies, row, 2) * rows;
        total.rows += rows;
    }
    return total;
}

static void copy_all(const Copies *copies, const Way *way) {
    for (size_t row = 0; row < copies->count; row++) {
        Block block = block_of(copies, row);
        int short_rows = block.span.bytes < SHORT;
        if (row + 1 < copies->count && block.span.bytes < LONG) {
            const char *next = (const char *)(uintptr_t)column(copies, row + 1, 0);
            uint64_t most = column(copies, row + 1, 2);
            for (size_t at = 0; at < most && at < AHEAD; at += LINE) FETCH(next + at);
        }
        /* Of rows, one some lines on is fetched: what lies between them is others'. */
        size_t ahead = block.rows > 1 && block.span.bytes ? (1 + DISTANCE / block.span.bytes) * block.from_stride : 0;
        for (size_t done = 0; done < block.rows; done++) {
            if (way->lines && !short_rows) {
                stream(way, block.span, ahead && block.span.bytes < LONG ? block.span.from + ahead : NULL);
            } else {
                if (short_rows && ahead) FETCH(block.span.from + ahead), FETCH(block.span.from + ahead + block.span.bytes);
                memcpy(block.span.to, block.span.from, block.span.bytes);
            }
            block.span.from += block.from_stride;
            block.span.to += block.to_stride;
        }
    }
    if (way->lines) fence();
}

/* Hashes one row, and copies it in the same pass, unless it has no destination. */
static void hash_row(void *state, Span span, const Way *way, const char *next) {
    for (size_t at = 0; at < span.bytes; at += CHUNK) {
        size_t bytes = span.bytes - at < CHUNK ? span.bytes - at : CHUNK;
        hash.update(state, span.from + at, bytes);
        if (!span.to) continue;
        Span chunk = {span.to + at, span.from + at, bytes};
        if (way->lines && bytes >= SHORT)
            stream(way, chunk, at + bytes < span.bytes ? chunk.from + bytes : next);
        else
            memcpy(chunk.to, chunk.from, bytes);
    }
}

/* Hashes, and copies, all; a digest, of which there are `count`, is of the rows since the last one up to its end. */
static void hash_all(const Copies *copies, const Way *way, const int64_t *ends, uint64_t *digests, size_t count,
                     void *state) {
    size_t ended = 0;
    for (size_t row = 0; row < copies->count; row++) {
        Block block = block_of(copies, row);
        const char *next = row + 1 < copies->count ? (const char *)(uintptr_t)column(copies, row + 1, 0) : NULL;
        for (size_t done = 0; done < block.rows; done++) {
            hash_row(state, block.span, way, next);
            block.span.from += block.from_stride;
            if (block.span.to) block.span.to += block.to_stride;
        }
        for (; ended < count && ends[ended] == (int64_t)row + 1; ended++) {
            digests[ended] = hash.digest(state);
            hash.reset(state);
        }
    }
    if (way->lines) fence();
}

/* -- calls */

typedef struct {
    Total total;
    const Way *way;
    int class; /* of trials; -1: none */
    double begun_ns;
} Call;

static const Way *const PLAIN = &WAYS[WAY_COUNT - 1];

/* Decides how a call copies: what is small, or is `read_next`, stays in the caches, and what is only hashed is copied in
   no way. */
static Call begin_call(const Copies *copies, int hashed, int read_next) {
    Call call = {total_of(copies), PLAIN, -1, 0};
    if (call.total.bytes < STREAMED || read_next) return call;
    int class = class_of(call.total.bytes / call.total.rows, hashed);
    call.way = choose(class);
    if (!hashed || column(copies, 0, 1)) call.class = class;
    call.begun_ns = now_ns();
    return call;
}

static void end_call(const Call *call) {
    if (call->class >= 0) note(call->class, call->way, now_ns() - call->begun_ns, call->total.bytes);
}

#endif
