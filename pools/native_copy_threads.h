/* Threads that make the copies of others, and never need Python's lock: so they may run when nobody else wants to, without
   anybody who waits for that lock waiting for them. Several share a large call: each takes some blocks of it at a time. For
   a call's end a thread waits, or it is submitted: then a descriptor tells of it. Who submits, or is told, never waits, not
   even for one that has their lock: it may run far more urgently than they do. */

#ifndef KVFERRY_NATIVE_COPY_THREADS_H
#define KVFERRY_NATIVE_COPY_THREADS_H

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include "native_copies.h"

#ifndef SHARE_BYTES /* tests have smaller ones */
#define SHARE_BYTES (1 << 20)
#define LOADAVG "/proc/loadavg"
#endif

enum {
    SHARE = SHARE_BYTES, /* bytes that a thread takes at a time: what one does more than the others at the end */
    MOST_COPY_THREADS = 64,
    NICE_AT = 16 /* in struct sched_attr */
};

/* One call, in parts. The first part are the rows up to the first end, and those behind the last one: both use the caller's
   hash, which may have seen what came before. The others are whole blocks, and use a hash of their thread's. */
typedef struct Task {
    Call *call;
    GivingWay giving_way;
    size_t next_row, next_end; /* what nobody has begun; row 0 stands for the first part */
    size_t stop_row;
    unsigned at_it, wanted;
    int done;
    void *token; /* stands for a task that was submitted; NULL: somebody waits for it */
    struct Task *next; /* of those that were given, have work left, or have ended */
} Task;

typedef struct {
    size_t first, stop, first_end, stop_end;
} Part;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    uint32_t news; /* changes with all that is given; a futex */
    struct Member *members;
    unsigned count;
    pid_t process; /* a child that was forked has none of its threads */
    int closing;
    Task *first, **end;   /* with work left */
    Task *given, *ended;  /* of those submitted: new, and told of; both without the lock, the latest first */
    unsigned submitted;   /* and not ended */
    int tells;            /* an eventfd */
    char scheduling[64]; /* struct sched_attr of its threads, which begins with its size; 0: as whoever makes it */
} CopyThreads;

typedef struct Member {
    CopyThreads *copy_threads;
    void *hash; /* NULL where no library has one */
    pthread_t thread;
    pid_t id;
    int processor; /* on which it began the part that it is at; -1: at none, or not known */
} Member;

static int is_begun(const Task *task) { return task->next_row >= task->stop_row; }

/* Takes the next part of a task, which has one. Needs the lock. */
static Part take_part(Task *task) {
    const Digests *into = task->call->into;
    Part part = {task->next_row, task->next_row, task->next_end, task->next_end};
    if (task->call->class >= 0) { /* tries all kernel variants, on one thread */
        part.stop = task->stop_row;
    } else if (into && !part.first_end) {
        part.stop = into->count ? (size_t)into->ends[0] : task->stop_row;
        part.stop_end = into->count ? 1 : 0;
    } else {
        for (uint64_t bytes = 0; part.stop < task->stop_row && bytes < SHARE;) {
            size_t stop = into ? (size_t)into->ends[part.stop_end++] : part.stop + 1;
            for (; part.stop < stop; part.stop++) bytes += bytes_of(task->call->copies, part.stop);
        }
    }
    while (into && part.stop_end && part.stop_end < into->count && (size_t)into->ends[part.stop_end] == part.stop)
        part.stop_end++; /* of nothing */
    task->next_row = part.stop, task->next_end = part.stop_end;
    return part;
}

static void do_part(Call *call, Part part, void *own_hash) {
    if (call->class >= 0) {
        do_call(call);
        return;
    }
    if (!call->into) {
        do_rows(call->copies, part.first, part.stop, call->variant, NULL);
        return;
    }
    Digests some = *call->into;
    some.ends += part.first_end, some.digests += part.first_end;
    some.count = part.stop_end - part.first_end, some.ended = 0;
    if (part.first_end) some.state = own_hash;
    do_rows(call->copies, part.first, part.stop, call->variant, &some);
    size_t end = call->into->count ? (size_t)call->into->ends[call->into->count - 1] : call->copies->count;
    if (!part.first_end && end < call->copies->count) do_rows(call->copies, end, call->copies->count, call->variant, &some);
}

/* Returns where the task with work left is that the fewest are at; the first of several. */
static Task **task_to_do(CopyThreads *copy_threads) {
    Task **found = NULL;
    for (Task **at = &copy_threads->first; *at && !(found && !(*found)->at_it); at = &(*at)->next)
        if ((*at)->at_it < (*at)->wanted && (!found || (*at)->at_it < (*found)->at_it)) found = at;
    return found;
}

static void append(CopyThreads *copy_threads, Task *task) {
    task->next = NULL;
    *copy_threads->end = task;
    copy_threads->end = &task->next;
}

static Task *take_out(CopyThreads *copy_threads, Task **at) {
    Task *task = *at;
    *at = task->next;
    if (copy_threads->end == &task->next) copy_threads->end = at;
    return task;
}

static void push(Task **tasks, Task *task) {
    task->next = __atomic_load_n(tasks, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(tasks, &task->next, task, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

static Task *take_all(Task **tasks) { return __atomic_exchange_n(tasks, NULL, __ATOMIC_ACQUIRE); }

/* Appends what was given since the last time, in that order. Needs the lock. */
static void take_given(CopyThreads *copy_threads) {
    Task *earliest = NULL;
    for (Task *task = take_all(&copy_threads->given), *next; task; task = next)
        next = task->next, task->next = earliest, earliest = task;
    for (Task *task = earliest, *next; task; task = next) next = task->next, append(copy_threads, task);
}

/* Wakes one thread, or all, for what was given. */
static void wake(CopyThreads *copy_threads, int all) {
    __atomic_add_fetch(&copy_threads->news, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &copy_threads->news, FUTEX_WAKE_PRIVATE, all ? INT_MAX : 1, NULL, NULL, 0);
}

static void tell(CopyThreads *copy_threads, Task *task) {
    push(&copy_threads->ended, task);
    eventfd_write(copy_threads->tells, 1);
}

/* Tells whoever waits that no byte of a task moves any more; it may be gone then. Needs the lock. */
static void end_task(CopyThreads *copy_threads, Task *task) {
    task->done = 1;
    if (task->token) {
        tell(copy_threads, task);
        __atomic_sub_fetch(&copy_threads->submitted, 1, __ATOMIC_SEQ_CST);
    }
    pthread_cond_broadcast(&copy_threads->done);
}

/* Returns the thread of another member that is at work on the same processor, and waits for that, as this one runs; 0: of
   none. */
static pid_t waiting_beside(CopyThreads *copy_threads, const Member *self) {
    for (unsigned one = 0; self->processor >= 0 && one < copy_threads->count; one++) {
        Member *other = &copy_threads->members[one];
        if (other == self || other->processor != self->processor) continue;
        other->processor = -1; /* until its next part */
        return other->id;
    }
    return 0;
}

/* Returns how many threads of all processes run, or wait for a processor; INT_MAX where that is not known. */
static int count_runnable(void) {
    char text[128];
    int file = open(LOADAVG, O_RDONLY | O_CLOEXEC), runnable;
    if (file < 0) return INT_MAX;
    ssize_t count = read(file, text, sizeof text - 1);
    close(file);
    text[count > 0 ? count : 0] = 0;
    return sscanf(text, "%*f %*f %*f %d", &runnable) == 1 ? runnable : INT_MAX;
}

/* Lets a thread that waits for one of two processors go on on the other one, if nothing but it and who calls this is
   runnable: then that one is idle. Afterwards it may be where it might before: if
   that was all that its cpuset has, so it stays as the cpuset changes. */
static void move_from(int processor, pid_t thread) {
    cpu_set_t had, other, all;
    if (count_runnable() > 2) return;
    if (sched_getaffinity(thread, sizeof had, &had) || CPU_COUNT(&had) != 2 || !CPU_ISSET(processor, &had)) return;
    other = had;
    CPU_CLR(processor, &other);
    if (sched_setaffinity(thread, sizeof other, &other)) return;
    memset(&all, 0xff, sizeof all);
    if (sched_setaffinity(thread, sizeof all, &all) || sched_getaffinity(thread, sizeof all, &all) || !CPU_EQUAL(&all, &had))
        sched_setaffinity(thread, sizeof had, &had);
}

/* Does the next part of a task. Needs the lock, and is without it meanwhile. Of two processors that were busy of late, the
   kernel often gives one to all that wake up, without a look at whether the other one is idle, and leaves them there for
   some milliseconds, as long as a copy takes; of more, it finds an idle one. */
static void work_at(CopyThreads *copy_threads, Task **at, Member *self) {
    Task *task = take_out(copy_threads, at);
    Part part = take_part(task);
    task->at_it++;
    if (!is_begun(task)) append(copy_threads, task); /* the others first, next time */
    int processor = self->processor = sched_getcpu();
    pid_t waiting = waiting_beside(copy_threads, self);
    pthread_mutex_unlock(&copy_threads->lock);
    if (waiting) move_from(processor, waiting);
    do_part(task->call, part, self->hash);
    pthread_mutex_lock(&copy_threads->lock);
    self->processor = -1;
    if (!--task->at_it && is_begun(task)) end_task(copy_threads, task);
}

static void *work_as_copy_thread(void *argument) {
    Member *self = argument;
    CopyThreads *copy_threads = self->copy_threads;
    if (*copy_threads->scheduling && syscall(SYS_sched_setattr, 0, copy_threads->scheduling, 0)) { /* be as nice at least */
        int32_t nice;
        memcpy(&nice, copy_threads->scheduling + NICE_AT, sizeof nice);
        setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice);
    }
    pthread_mutex_lock(&copy_threads->lock);
    self->id = (pid_t)syscall(SYS_gettid);
    while (!copy_threads->closing) {
        uint32_t seen = __atomic_load_n(&copy_threads->news, __ATOMIC_SEQ_CST);
        take_given(copy_threads);
        Task **at = task_to_do(copy_threads);
        if (at) {
            giving_way = (*at)->giving_way;
            work_at(copy_threads, at, self);
        } else {
            pthread_mutex_unlock(&copy_threads->lock);
            syscall(SYS_futex, &copy_threads->news, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            pthread_mutex_lock(&copy_threads->lock);
        }
    }
    pthread_mutex_unlock(&copy_threads->lock);
    return NULL;
}

static Task task_of(Call *call, unsigned wanted) {
    const Digests *into = call->into;
    begin_giving_way(&giving_way);
    Task task = {.call = call, .giving_way = giving_way, .wanted = wanted};
    task.stop_row = into && into->count && call->class < 0 ? (size_t)into->ends[into->count - 1] : call->copies->count;
    return task;
}

/* Lets `wanted` copy threads make a call, and waits for its end. A caller does not copy beside them: the one that it
   has just woken would often wait for its processor, with another one idle. Does not need the interpreter's lock. */
static void do_by_copy_threads(CopyThreads *copy_threads, Call *call, unsigned wanted) {
    Task task = task_of(call, wanted);
    if (!task.stop_row || copy_threads->process != getpid()) {
        do_call(call);
        return;
    }
    pthread_mutex_lock(&copy_threads->lock);
    append(copy_threads, &task);
    wake(copy_threads, wanted > 1);
    while (!task.done) pthread_cond_wait(&copy_threads->done, &copy_threads->lock);
    pthread_mutex_unlock(&copy_threads->lock);
}

/* Lets `wanted` copy threads of this process make a call, and does not wait; `take_ended` returns the task. What has no
   part for them (nothing to copy, or nothing before the first end that is hashed) is made here. */
static void submit(CopyThreads *copy_threads, Task *task, Call *call, unsigned wanted, void *token) {
    *task = task_of(call, wanted);
    task->token = token;
    if (!task->stop_row) {
        do_call(call);
        tell(copy_threads, task);
        return;
    }
    __atomic_add_fetch(&copy_threads->submitted, 1, __ATOMIC_SEQ_CST);
    push(&copy_threads->given, task);
    wake(copy_threads, wanted > 1);
}

/* Returns those submitted that have ended since the last time, as a list. Of none, too, if the last time was early. */
static Task *take_ended(CopyThreads *copy_threads) {
    eventfd_t count;
    eventfd_read(copy_threads->tells, &count);
    return take_all(&copy_threads->ended);
}

/* Ends what was submitted with a token, once the parts under way have ended; NULL: all, and waits for that. */
static void withdraw(CopyThreads *copy_threads, const void *token) {
    pthread_mutex_lock(&copy_threads->lock);
    take_given(copy_threads);
    for (Task **at = &copy_threads->first; *at;) {
        if (!(*at)->token || (token && (*at)->token != token)) {
            at = &(*at)->next;
            continue;
        }
        Task *task = take_out(copy_threads, at);
        task->next_row = task->stop_row;
        if (!task->at_it) end_task(copy_threads, task);
    }
    while (!token && __atomic_load_n(&copy_threads->submitted, __ATOMIC_SEQ_CST))
        pthread_cond_wait(&copy_threads->done, &copy_threads->lock);
    pthread_mutex_unlock(&copy_threads->lock);
}

/* Ends copy threads for which nobody waits, and frees their state. */
static void free_copy_threads(CopyThreads *copy_threads) {
    if (copy_threads->tells >= 0) close(copy_threads->tells);
    if (copy_threads->process != getpid()) return;
    pthread_mutex_lock(&copy_threads->lock);
    copy_threads->closing = 1;
    pthread_mutex_unlock(&copy_threads->lock);
    wake(copy_threads, 1);
    for (unsigned one = 0; one < copy_threads->count; one++) {
        pthread_join(copy_threads->members[one].thread, NULL);
        if (copy_threads->members[one].hash) hash.free(copy_threads->members[one].hash);
    }
    pthread_cond_destroy(&copy_threads->done), pthread_mutex_destroy(&copy_threads->lock);
    free(copy_threads->members), free(copy_threads);
}

static int add_member(CopyThreads *copy_threads) {
    Member *member = &copy_threads->members[copy_threads->count];
    member->copy_threads = copy_threads;
    member->processor = -1;
    if (hash.create) {
        member->hash = hash.create();
        if (!member->hash) return 0;
        hash.reset(member->hash);
    }
    if (!pthread_create(&member->thread, NULL, work_as_copy_thread, member)) return 1;
    if (member->hash) hash.free(member->hash);
    return 0;
}

/* Returns so many copy threads; NULL where there is no memory, or no thread. See `CopyThreads`. */
static CopyThreads *new_copy_threads(unsigned count, const char *scheduling, size_t bytes) {
    CopyThreads *copy_threads = calloc(1, sizeof *copy_threads);
    if (!copy_threads) return NULL;
    copy_threads->end = &copy_threads->first;
    copy_threads->tells = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    copy_threads->process = getpid();
    size_t most = sizeof copy_threads->scheduling;
    memcpy(copy_threads->scheduling, scheduling, bytes < most ? bytes : most);
    pthread_mutex_init(&copy_threads->lock, NULL), pthread_cond_init(&copy_threads->done, NULL);
    copy_threads->members = calloc(count, sizeof *copy_threads->members);
    while (copy_threads->tells >= 0 && copy_threads->members && copy_threads->count < count && add_member(copy_threads))
        copy_threads->count++;
    if (copy_threads->count == count) return copy_threads;
    free_copy_threads(copy_threads);
    return NULL;
}

#endif
