/* The copies of native_copies.h against a loop over bytes: random sizes, alignments and rows, each kernel variant that the
   processor has, hashed and not, by copy threads that are waited for, by some that tell, and without, and no byte beside them changes;
   what gates stop, what is withdrawn, and when a copy yields. Ends with status 0, or says what differs. */

#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define PIECE_BYTES (64 << 10)
#define STREAMED_BYTES (16 << 10)
#define SHARE_BYTES (16 << 10)
#define YIELDED_BYTES (256 << 10)

static char loadavg[] = "/tmp/loadavg-XXXXXX";
#define LOADAVG loadavg

static _Thread_local unsigned yields;
static int counted_yield(void);
static int scripted_clock(clockid_t clock, struct timespec *now);
static int scripted_getaffinity(pid_t thread, size_t bytes, cpu_set_t *found);
static int scripted_setaffinity(pid_t thread, size_t bytes, const cpu_set_t *wanted);
#define sched_yield counted_yield
#define sched_getaffinity scripted_getaffinity
#define sched_setaffinity scripted_setaffinity
#define clock_gettime scripted_clock
#include "native_copy_threads.h"
#undef sched_yield
#undef sched_getaffinity
#undef sched_setaffinity
#undef clock_gettime

#ifndef MEMORY_BYTES
#define MEMORY_BYTES (8 << 20)
#endif

enum { MEMORY = MEMORY_BYTES, MOST = 40, FEW = 6, MIB = 1 << 20, THREADS = 3 };

static const Variant *const STREAMS = &VARIANTS[VARIANT_COUNT - 4]; /* in two places */

static uint64_t state = 88172645463325252ULL;

static uint64_t below(uint64_t bound) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % bound;
}

static uint64_t some_size(void) {
    switch (below(8)) {
    case 0: return below(3 * MIB / 2);
    case 1: return below(200 << 10);
    case 2: return 64 * below(40);
    case 3: case 4: return below(20000);
    default: return below(300);
    }
}

/* A hash that shows in which order it is given which bytes: FNV-1a. */
static int reset_fnv(void *one) { return *(uint64_t *)one = 14695981039346656037ULL, 0; }
static int update_fnv(void *one, const void *bytes, size_t count) {
    for (size_t at = 0; at < count; at++) *(uint64_t *)one = (*(uint64_t *)one ^ ((const uint8_t *)bytes)[at]) * 1099511628211ULL;
    return 0;
}
static uint64_t digest_fnv(const void *one) { return *(const uint64_t *)one; }

static void *create_fnv(void) { return malloc(sizeof(uint64_t)); }
static int free_fnv(void *one) { return free(one), 0; }

/* Waits until the descriptor tells of a task that was submitted, and nothing else. */
static void await_ended(CopyThreads *copy_threads, const Task *task) {
    struct pollfd told = {.fd = copy_threads->tells, .events = POLLIN};
    if (poll(&told, 1, -1) != 1 || take_ended(copy_threads) != task || task->next || poll(&told, 1, 0)) abort();
}

static int check(const Variant *variant, char *from, char *to, char *expected, int hashed, CopyThreads *copy_threads) {
    uint64_t numbers[MOST][6], digests[MOST], wanted[MOST], fnv, mine;
    int64_t ends[MOST];
    int with_rows = !!below(4), are_short = !below(3), aligned = !!below(2);
    size_t count = 1 + below(are_short ? MOST : FEW), digests_count = 0, read = 0, written = 0;
    uint64_t bytes = 0, rows = 0;
    Gate open = {0};
    memset(to, 0x5a, MEMORY);
    memset(expected, 0x5a, MEMORY);
    reset_fnv(&fnv), reset_fnv(&mine);
    for (size_t row = 0; row < count; row++) {
        if (!row || below(2)) bytes = row && below(2) ? bytes + LINE : are_short ? below(1200) : some_size();
        if (aligned || below(2)) bytes -= bytes % LINE; /* whole lines are copied by code of their own */
        if (!row || below(2)) rows = below(30); /* both like the ones before: two blocks may be copied together */
        if (!with_rows || bytes >= 2000) rows = 1;
        uint64_t read_step = bytes + below(600), write_step = bytes + below(600);
        read += below(200), written += below(200);
        if (aligned || below(4)) written += -(uintptr_t)(to + written) % LINE;
        if (aligned || below(4)) write_step += -write_step % LINE;
        if (read + rows * read_step > MEMORY || written + rows * write_step > MEMORY) bytes = rows = 0;
        int nowhere = hashed && !below(are_short ? 20 : 5);
        uint64_t one[6] = {(uintptr_t)(from + read), nowhere ? 0 : (uintptr_t)(to + written), bytes, rows, read_step, write_step};
        memcpy(numbers[row], one, sizeof one);
        for (uint64_t at = 0; at < rows; at++) {
            update_fnv(&mine, from + read + at * read_step, bytes);
            for (uint64_t byte = 0; byte < bytes && !nowhere; byte++)
                expected[written + at * write_step + byte] = from[read + at * read_step + byte];
        }
        if (row + 1 == count || !below(are_short ? 20 : 2)) {
            wanted[digests_count] = mine, ends[digests_count++] = (int64_t)row + 1;
            reset_fnv(&mine);
        }
        read += rows * read_step, written += rows * write_step;
    }
    Copies copies = {(const char *)numbers, sizeof *numbers, sizeof **numbers, count, with_rows};
    Digests into = {ends, digests, digests_count, 0, &fnv};
    forced = variant;
    Call call = begin_call(&copies, hashed ? &into : NULL);
    if (variant) call.variant = variant; /* however few bytes there are */
    unsigned threads = 1 + (unsigned)below(THREADS);
    Task task;
    giving_way.gate = below(3) ? NULL : &open;
    if (copy_threads && below(2)) {
        submit(copy_threads, &task, &call, threads, &call);
        await_ended(copy_threads, &task);
    } else if (copy_threads) {
        do_by_copy_threads(copy_threads, &call, threads);
    } else {
        do_call(&call);
    }
    end_call(&call);
    giving_way.gate = NULL;
    const char *name = variant ? variant->name : "by measurement";
    if (memcmp(to, expected, MEMORY)) return printf("%s: the memory differs\n", name), 1;
    if (hashed && memcmp(digests, wanted, digests_count * sizeof *wanted)) return printf("%s: the digests differ\n", name), 1;
    return 0;
}

/* Each kernel variant is tried, then the one that took the least is taken; after a while all are tried again, and may win.
   */
static int check_trials(void) {
    Trials of = {0};
    const Variant *quick = PLAIN, *slow = &VARIANTS[VARIANT_COUNT - 2], *trying;
    int tried[VARIANT_COUNT] = {0}, failed = best(&of) != PLAIN;
    for (; (trying = untried(&of)); tried[trying - VARIANTS]++) note(&of, trying, trying == quick ? 1 : 2);
    for (const Variant *variant = VARIANTS; variant < VARIANTS + VARIANT_COUNT; variant++)
        failed |= tried[variant - VARIANTS] != (is_supported(variant) ? TRIES : 0);
    failed |= best(&of) != quick;
    of.tried_ns = 1;
    age(&of, AGAIN_NS);
    failed |= untried(&of) != NULL;
    for (double at_ns = 1; best(&of) == quick && at_ns < 1e3 * AGAIN_NS; at_ns += AGAIN_NS) {
        age(&of, at_ns + AGAIN_NS);
        Trials before = of, found = of;
        failed |= !untried(&found);
        while ((trying = untried(&found))) note(&found, trying, trying == slow ? 1.5 : 3);
        merge(&of, &found, &before, at_ns + AGAIN_NS);
        failed |= untried(&of) != NULL;
    }
    failed |= best(&of) != slow;
    if (failed) printf("the best kernel variant is not found\n");
    return failed;
}

typedef struct {
    CopyThreads *copy_threads;
    Gate *gate;
    double patience_ns;
    int hashed, with_rows;
    size_t count;
    uint64_t numbers[64][6];
    int64_t ends[64];
    uint64_t digests[64], fnv;
} Gated;

static void *copy_gated(void *argument) {
    Gated *self = argument;
    Copies copies = {(const char *)self->numbers, sizeof *self->numbers, sizeof **self->numbers, self->count,
                     self->with_rows};
    Digests into = {self->ends, self->digests, self->count, 0, &self->fnv};
    giving_way.gate = self->gate, giving_way.patience_ns = self->patience_ns;
    Call call = begin_call(&copies, self->hashed ? &into : NULL);
    call.class = -1, call.variant = STREAMS;
    if (self->copy_threads)
        do_by_copy_threads(self->copy_threads, &call, 2);
    else
        do_call(&call);
    return NULL;
}

/* A thread whose gate is shut copies nothing until it has been open for a moment; out of patience, it goes on. */
static int check_gate(char *from, char *to, CopyThreads *copy_threads, int hashed) {
    static const struct {
        size_t count, rows, bytes;
    } SHAPES[] = {{4, 1, 100000}, {4, 100, 1024}, {64, 1, 1024}};
    int failed = 0;
    for (int one_of = 0; one_of < 6; one_of++) {
        int patient = one_of % 2;
        size_t count = SHAPES[one_of / 2].count, rows = SHAPES[one_of / 2].rows, bytes = SHAPES[one_of / 2].bytes;
        Gate gate = {0};
        Gated one = {copy_threads, &gate, patient ? 1e18 : 1e6, hashed, rows > 1, count, {{0}}, {0}, {0}, 0};
        double opened_ns = 0;
        pthread_t thread;
        reset_fnv(&one.fnv);
        for (size_t row = 0; row < count; row++) {
            size_t at = row * rows * bytes;
            uint64_t numbers[6] = {(uintptr_t)(from + at), (uintptr_t)(to + at), bytes, rows, bytes, bytes};
            memcpy(one.numbers[row], numbers, sizeof numbers);
            one.ends[row] = (int64_t)row + 1;
        }
        memset(to, 0x5a, count * rows * bytes);
        set_gate(&gate, 1);
        if (pthread_create(&thread, NULL, copy_gated, &one)) return printf("no thread\n"), 1;
        if (patient) {
            while (!read_now(&gate.waiting)) sched_yield();
            for (size_t at = 0; at < count * rows * bytes; at++) failed |= to[at] != 0x5a;
            opened_ns = now_ns();
            set_gate(&gate, 0);
        }
        pthread_join(thread, NULL);
        failed |= patient && now_ns() - opened_ns < PAUSE_NS;
        failed |= !!memcmp(to, from, count * rows * bytes);
    }
    if (failed) printf("a gate does not hold, or does not open\n");
    return failed;
}

/* What is withdrawn ends once what threads are at has, and nothing of it moves later; its end is told of as any other. */
static int check_withdrawn(char *from, char *to, CopyThreads *copy_threads) {
    enum { TASKS = THREADS + 2, ROWS = 3, LAST = TASKS - 1, TASK_BYTES = ROWS * SHARE_BYTES };
    static uint64_t numbers[TASKS][ROWS][3];
    Copies copies[TASKS];
    Call calls[TASKS];
    Task tasks[TASKS];
    int failed = 0;
    for (int all = 0; all < 2; all++) {
        Gate gate = {0};
        giving_way.gate = &gate, giving_way.patience_ns = 1e18;
        set_gate(&gate, 1);
        memset(to, 0x5a, TASKS * TASK_BYTES);
        for (int one = 0; one < TASKS; one++) {
            for (int row = 0; row < ROWS; row++) {
                size_t at = (size_t)one * TASK_BYTES + (size_t)row * SHARE_BYTES;
                uint64_t block[3] = {(uintptr_t)(from + at), (uintptr_t)(to + at), SHARE_BYTES};
                memcpy(numbers[one][row], block, sizeof block);
            }
            copies[one] = (Copies){(const char *)numbers[one], sizeof **numbers, sizeof ***numbers, ROWS, 0};
            calls[one] = begin_call(&copies[one], NULL);
            calls[one].class = -1;
            submit(copy_threads, &tasks[one], &calls[one], 1, &calls[one]);
        }
        giving_way.gate = NULL;
        while (read_now(&gate.waiting) < copy_threads->count) sched_yield(); /* each is at the first row of another one */
        withdraw(copy_threads, &calls[LAST]);
        withdraw(copy_threads, &calls[0]);
        failed |= take_ended(copy_threads) != &tasks[LAST];
        set_gate(&gate, 0);
        if (all) withdraw(copy_threads, NULL);
        for (int ended = 1; ended < TASKS;)
            for (Task *task = take_ended(copy_threads), *next; task; task = next, ended++)
                next = task->next, failed |= task->at_it;
        for (int one = 0; one < TASKS; one++) {
            size_t first = (size_t)one * TASK_BYTES, copied = one == LAST ? 0 : !one ? SHARE_BYTES : TASK_BYTES;
            if (one && all) copied = one < (int)copy_threads->count ? SHARE_BYTES : 0; /* more, if a thread was before it */
            failed |= !!memcmp(to + first, from + first, copied);
            for (size_t at = copied; at < TASK_BYTES && (!one || one == LAST); at++) failed |= to[first + at] != 0x5a;
        }
    }
    if (failed) printf("what is withdrawn does not end as it should\n");
    return failed;
}

static _Thread_local time_t away_s, passed_s; /* for which the processor is others' each time that it is yielded, and was */
static _Thread_local int is_scripted; /* else time passes, also while this thread has no processor */

static int counted_yield(void) {
    yields++;
    passed_s += away_s;
    return 0;
}

static int scripted_clock(clockid_t clock, struct timespec *now) {
    if (!is_scripted) return clock_gettime(clock, now);
    *now = (struct timespec){1 + passed_s, 0};
    return 0;
}

/* What gives way yields its processor each time that YIELDED bytes are copied, also of one row, or of rows that are copied
   together, but not while it may keep it, which is bounded; nothing else does. */
static int check_yields(const Variant *variant, char *from, char *to, int hashed) {
    enum { BLOCKS = 16, MANY = 1024, BYTES = YIELDED / 4 };
    uint64_t numbers[MANY][6], digests[MANY], fnv;
    int64_t ends[MANY];
    static const struct {
        int gives_way;
        size_t blocks, rows;
        time_t away_s;
        unsigned least, most;
    } CASES[] = {{0, BLOCKS, 1, 0, 0, 0}, {1, BLOCKS, 1, 0, 4, 4}, {1, 1, 1, 0, 4, 4}, {1, BLOCKS, 1, 3600, 1, 1},
                 {1, BLOCKS, 64, 0, 4, 4}, {1, 4, 256, 0, 4, 4}, {1, 2, 1024, 0, 4, 4},
                 {1, MANY, 1, 0, 3, 4}, {1, MANY / 4, 1, 0, 3, 4}};
    int failed = 0;
    is_scripted = 1;
    for (size_t at = 0; at < sizeof CASES / sizeof *CASES; at++) {
        size_t blocks = CASES[at].blocks, rows = CASES[at].rows, bytes = BLOCKS * BYTES / blocks / rows;
        for (size_t row = 0; row < blocks; row++) {
            size_t at_byte = row * rows * bytes;
            uint64_t block[6] = {(uintptr_t)(from + at_byte), (uintptr_t)(to + at_byte), bytes, rows, bytes, bytes};
            memcpy(numbers[row], block, sizeof block);
            ends[row] = (int64_t)row + 1;
        }
        Gate gate = {0};
        Copies copies = {(const char *)numbers, sizeof *numbers, sizeof **numbers, blocks, rows > 1};
        Digests into = {ends, digests, blocks, 0, &fnv};
        Call call = begin_call(&copies, hashed ? &into : NULL);
        call.class = -1, call.variant = variant;
        reset_fnv(&fnv);
        memset(&yielding, 0, sizeof yielding);
        memset(to, 0x5a, BLOCKS * BYTES);
        yields = 0, away_s = CASES[at].away_s;
        giving_way.gate = CASES[at].gives_way ? &gate : NULL, giving_way.waited_ns = 0;
        do_call(&call);
        double kept_ns = yielding.again_ns - now_ns();
        giving_way.gate = NULL, passed_s = 0;
        int is_right = yields >= CASES[at].least && yields <= CASES[at].most && kept_ns <= MOST_KEPT_NS;
        is_right &= !memcmp(to, from, BLOCKS * BYTES);
        if (is_right && giving_way.waited_ns >= 1e9 * (double)(yields * away_s)) continue;
        printf("case %zu, %shashed: %u yields, %.0f ns, %.0f kept\n", at, hashed ? "" : "not ", yields, giving_way.waited_ns,
               kept_ns);
        failed = 1;
    }
    is_scripted = 0;
    return failed;
}

static unsigned cpuset = 3, mask = 3, masks_set[3]; /* of a thread of the test's; of the first processors */
static int times_set;

static int scripted_getaffinity(pid_t thread, size_t bytes, cpu_set_t *found) {
    (void)thread;
    memset(found, 0, bytes);
    memcpy(found, &mask, sizeof mask);
    return 0;
}

static int scripted_setaffinity(pid_t thread, size_t bytes, const cpu_set_t *wanted) {
    (void)bytes;
    unsigned first;
    memcpy(&first, wanted, sizeof first);
    if (thread != 7) return 0;
    if (times_set < 3) masks_set[times_set] = first;
    return times_set++, mask = first & cpuset, 0;
}

/* Returns whether a copy thread that has nothing to do is said to be on a processor. */
static int check_rest(const CopyThreads *copy_threads) {
    for (unsigned one = 0; copy_threads && one < copy_threads->count; one++)
        if (copy_threads->members[one].processor >= 0) return printf("a member rests on a processor\n"), 1;
    return 0;
}

/* Who runs beside another who is at work moves that one to the other processor, and then lets it be where it might before.
   */
static int check_processors(void) {
    Member members[] = {{.processor = 0, .id = 1}, {.processor = -1, .id = 2}, {.processor = 2, .id = 3}, {.processor = 1, .id = 4}};
    CopyThreads copy_threads = {.members = members, .count = 4};
    int is_right = !waiting_beside(&copy_threads, members);
    members[0].processor = -1;
    is_right &= !waiting_beside(&copy_threads, members);
    members[0].processor = members[1].processor = 1;
    is_right &= waiting_beside(&copy_threads, members) == 2 && waiting_beside(&copy_threads, members) == 4;
    is_right &= !waiting_beside(&copy_threads, members);
    is_right &= count_runnable() == INT_MAX;
    int file = mkstemp(loadavg);
    static const struct {
        int runnable;
        unsigned cpuset, mask, set[3];
        int times;
    } CASES[] = {{2, 3, 3, {1, -1U}, 2}, {2, 7, 3, {1, -1U, 3}, 3}, {3, 3, 3, {0}, 0},
                 {2, 7, 7, {0}, 0},      {2, 2, 2, {0}, 0},         {2, 5, 5, {0}, 0}};
    for (int at = 0; at < 6; at++) {
        is_right &= dprintf(file, "0.52 0.58 0.59 %d/467 3036\n", CASES[at].runnable) > 0 && !lseek(file, 0, SEEK_SET);
        cpuset = CASES[at].cpuset, mask = CASES[at].mask, times_set = 0;
        move_from(1, 7);
        is_right &= times_set == CASES[at].times && mask == CASES[at].mask;
        is_right &= !memcmp(masks_set, CASES[at].set, (size_t)times_set * sizeof *masks_set);
    }
    close(file), unlink(loadavg);
    if (!is_right) printf("processors are not shared out\n");
    return !is_right;
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 100, failed = 0, variants = 0;
    char *from = aligned_alloc(4096, MEMORY), *to = aligned_alloc(4096, MEMORY), *expected = malloc(MEMORY);
    for (size_t at = 0; at < MEMORY; at++) from[at] = (char)below(256);
    hash = (Hash){create_fnv, free_fnv, reset_fnv, update_fnv, digest_fnv};
    CopyThreads *copy_threads[] = {NULL, new_copy_threads(1, "", 0), new_copy_threads(THREADS, "", 0)};
    for (int one = 0; one < 3; one++) failed |= check_rest(copy_threads[one]);
    for (const Variant *variant = VARIANTS; variant < VARIANTS + VARIANT_COUNT; variant++) {
        if (!is_supported(variant)) continue;
        variants++;
        for (int round = 0; round < rounds && !failed; round++)
            failed = check(variant, from, to, expected, round % 2, copy_threads[round / 2 % 3]);
    }
    for (int round = 0; round < rounds && !failed; round++) {
        if (round % 10 == 0) memset(trials, 0, sizeof trials); /* tried anew */
        failed = check(NULL, from, to, expected, round % 2, copy_threads[round / 2 % 3]);
    }
    for (int one = 0; one < 3; one++) failed |= check_rest(copy_threads[one]);
    failed |= check_processors() | check_trials();
    for (int one = 0; one < 4; one++) failed |= check_yields(one / 2 ? PLAIN : STREAMS, from, to, one % 2);
    for (int one = 0; one < 3; one++) {
        failed |= check_gate(from, to, copy_threads[one], 0) | check_gate(from, to, copy_threads[one], 1);
        if (!one) continue;
        failed |= check_withdrawn(from, to, copy_threads[one]);
        free_copy_threads(copy_threads[one]);
    }
    free(from), free(to), free(expected);
    printf("%d kernel variants, %d rounds each: %s\n", variants, rounds, failed ? "failed" : "ok");
    return failed;
}
