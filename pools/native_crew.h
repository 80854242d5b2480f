/* Threads that make the copies of others, and never need Python's lock: so they may run when nobody else wants to, without
   anybody who waits for that lock waiting for them. Several share a large call: each takes some blocks of it at a time. For
   a call's end a thread waits, or it is submitted: then a descriptor tells of it. Who submits, or is told, never waits, not
   even for one that has the crew's lock: it may run far more urgently than they do. */

#ifndef KVFERRY_NATIVE_CREW_H
#define KVFERRY_NATIVE_CREW_H

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
    MOST_IN_CREW = 64,
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
} Crew;

typedef struct Member {
    Crew *crew;
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
    if (task->call->class >= 0) { /* tries all ways, on one thread */
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
        do_rows(call->copies, part.first, part.stop, call->way, NULL);
        return;
    }
    Digests some = *call->into;
    some.ends += part.first_end, some.digests += part.first_end;
    some.count = part.stop_end - part.first_end, some.ended = 0;
    if (part.first_end) some.state = own_hash;
    do_rows(call->copies, part.first, part.stop, call->way, &some);
    size_t end = call->into->count ? (size_t)call->into->ends[call->into->count - 1] : call->copies->count;
    if (!part.first_end && end < call->copies->count) do_rows(call->copies, end, call->copies->count, call->way, &some);
}

/* Returns where the task with work left is that the fewest are at; the first of several. */
static Task **task_to_do(Crew *crew) {
    Task **found = NULL;
    for (Task **at = &crew->first; *at && !(found && !(*found)->at_it); at = &(*at)->next)
        if ((*at)->at_it < (*at)->wanted && (!found || (*at)->at_it < (*found)->at_it)) found = at;
    return found;
}

static void append(Crew *crew, Task *task) {
    task->next = NULL;
    *crew->end = task;
    crew->end = &task->next;
}

static Task *take_out(Crew *crew, Task **at) {
    Task *task = *at;
    *at = task->next;
    if (crew->end == &task->next) crew->end = at;
    return task;
}

static void push(Task **tasks, Task *task) {
    task->next = __atomic_load_n(tasks, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(tasks, &task->next, task, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

static Task *take_all(Task **tasks) { return __atomic_exchange_n(tasks, NULL, __ATOMIC_ACQUIRE); }

/* Appends what was given since the last time, in that order. Needs the lock. */
static void take_given(Crew *crew) {
    Task *earliest = NULL;
    for (Task *task = take_all(&crew->given), *next; task; task = next) next = task->next, task->next = earliest, earliest = task;
    for (Task *task = earliest, *next; task; task = next) next = task->next, append(crew, task);
}

/* Wakes one thread, or all, for what was given. */
static void wake(Crew *crew, int all) {
    __atomic_add_fetch(&crew->news, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &crew->news, FUTEX_WAKE_PRIVATE, all ? INT_MAX : 1, NULL, NULL, 0);
}

static void tell(Crew *crew, Task *task) {
    push(&crew->ended, task);
    eventfd_write(crew->tells, 1);
}

/* Tells whoever waits that no byte of a task moves any more; it may be gone then. Needs the lock. */
static void end_task(Crew *crew, Task *task) {
    task->done = 1;
    if (task->token) {
        tell(crew, task);
        __atomic_sub_fetch(&crew->submitted, 1, __ATOMIC_SEQ_CST);
    }
    pthread_cond_broadcast(&crew->done);
}

/* Returns the thread of another member that is at work on the same processor, and waits for that, as this one runs; 0: of
   none. */
static pid_t waiting_beside(Crew *crew, const Member *self) {
    for (unsigned one = 0; self->processor >= 0 && one < crew->count; one++) {
        Member *other = &crew->members[one];
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
   kernel often gives one to all that wake up, without a look at whether the other one is idle, and leaves them there for some
   milliseconds, as long as a copy takes; of more, it finds an idle one. */
static void work_at(Crew *crew, Task **at, Member *self) {
    Task *task = take_out(crew, at);
    Part part = take_part(task);
    task->at_it++;
    if (!is_begun(task)) append(crew, task); /* the others first, next time */
    int processor = self->processor = sched_getcpu();
    pid_t waiting = waiting_beside(crew, self);
    pthread_mutex_unlock(&crew->lock);
    if (waiting) move_from(processor, waiting);
    do_part(task->call, part, self->hash);
    pthread_mutex_lock(&crew->lock);
    self->processor = -1;
    if (!--task->at_it && is_begun(task)) end_task(crew, task);
}

static void *work_in_crew(void *argument) {
    Member *self = argument;
    Crew *crew = self->crew;
    if (*crew->scheduling && syscall(SYS_sched_setattr, 0, crew->scheduling, 0)) { /* it may not: be as nice at least */
        int32_t nice;
        memcpy(&nice, crew->scheduling + NICE_AT, sizeof nice);
        setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice);
    }
    pthread_mutex_lock(&crew->lock);
    self->id = (pid_t)syscall(SYS_gettid);
    while (!crew->closing) {
        uint32_t seen = __atomic_load_n(&crew->news, __ATOMIC_SEQ_CST);
        take_given(crew);
        Task **at = task_to_do(crew);
        if (at) {
            giving_way = (*at)->giving_way;
            work_at(crew, at, self);
        } else {
            pthread_mutex_unlock(&crew->lock);
            syscall(SYS_futex, &crew->news, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            pthread_mutex_lock(&crew->lock);
        }
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

static Task task_of(Call *call, unsigned wanted) {
    const Digests *into = call->into;
    begin_giving_way(&giving_way);
    Task task = {.call = call, .giving_way = giving_way, .wanted = wanted};
    task.stop_row = into && into->count && call->class < 0 ? (size_t)into->ends[into->count - 1] : call->copies->count;
    return task;
}

/* Lets `wanted` threads of a crew make a call, and waits for its end. A caller does not copy beside them: the one that it
   has just woken would often wait for its processor, with another one idle. Does not need the interpreter's lock. */
static void do_by_crew(Crew *crew, Call *call, unsigned wanted) {
    Task task = task_of(call, wanted);
    if (!task.stop_row || crew->process != getpid()) {
        do_call(call);
        return;
    }
    pthread_mutex_lock(&crew->lock);
    append(crew, &task);
    wake(crew, wanted > 1);
    while (!task.done) pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
}

/* Lets `wanted` threads of a crew of this process make a call, and does not wait; `take_ended` returns the task. What has no
   part for them (nothing to copy, or nothing before the first end that is hashed) is made here. */
static void submit(Crew *crew, Task *task, Call *call, unsigned wanted, void *token) {
    *task = task_of(call, wanted);
    task->token = token;
    if (!task->stop_row) {
        do_call(call);
        tell(crew, task);
        return;
    }
    __atomic_add_fetch(&crew->submitted, 1, __ATOMIC_SEQ_CST);
    push(&crew->given, task);
    wake(crew, wanted > 1);
}

/* Returns those submitted that have ended since the last time, as a list. Of none, too, if the last time was early. */
static Task *take_ended(Crew *crew) {
    eventfd_t count;
    eventfd_read(crew->tells, &count);
    return take_all(&crew->ended);
}

/* Ends what was submitted with a token, once the parts under way have ended; NULL: all, and waits for that. */
static void withdraw(Crew *crew, const void *token) {
    pthread_mutex_lock(&crew->lock);
    take_given(crew);
    for (Task **at = &crew->first; *at;) {
        if (!(*at)->token || (token && (*at)->token != token)) {
            at = &(*at)->next;
            continue;
        }
        Task *task = take_out(crew, at);
        task->next_row = task->stop_row;
        if (!task->at_it) end_task(crew, task);
    }
    while (!token && __atomic_load_n(&crew->submitted, __ATOMIC_SEQ_CST)) pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
}

/* Ends the threads of a crew for which nobody waits, and frees it. */
static void free_crew(Crew *crew) {
    if (crew->tells >= 0) close(crew->tells);
    if (crew->process != getpid()) return;
    pthread_mutex_lock(&crew->lock);
    crew->closing = 1;
    pthread_mutex_unlock(&crew->lock);
    wake(crew, 1);
    for (unsigned one = 0; one < crew->count; one++) {
        pthread_join(crew->members[one].thread, NULL);
        if (crew->members[one].hash) hash.free(crew->members[one].hash);
    }
    pthread_cond_destroy(&crew->done), pthread_mutex_destroy(&crew->lock);
    free(crew->members), free(crew);
}

static int add_member(Crew *crew) {
    Member *member = &crew->members[crew->count];
    member->crew = crew;
    member->processor = -1;
    if (hash.create) {
        member->hash = hash.create();
        if (!member->hash) return 0;
        hash.reset(member->hash);
    }
    if (!pthread_create(&member->thread, NULL, work_in_crew, member)) return 1;
    if (member->hash) hash.free(member->hash);
    return 0;
}

/* Returns a crew of so many threads; NULL where there is no memory, or no thread. See `Crew`. */
static Crew *new_crew(unsigned count, const char *scheduling, size_t bytes) {
    Crew *crew = calloc(1, sizeof *crew);
    if (!crew) return NULL;
    crew->end = &crew->first;
    crew->tells = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    crew->process = getpid();
    memcpy(crew->scheduling, scheduling, bytes < sizeof crew->scheduling ? bytes : sizeof crew->scheduling);
    pthread_mutex_init(&crew->lock, NULL), pthread_cond_init(&crew->done, NULL);
    crew->members = calloc(count, sizeof *crew->members);
    while (crew->tells >= 0 && crew->members && crew->count < count && add_member(crew)) crew->count++;
    if (crew->count == count) return crew;
    free_crew(crew);
    return NULL;
}

#endif
