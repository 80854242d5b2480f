/* Threads that make the copies of others, and never need Python's lock: so they may run when nobody else wants to, without
   anybody who waits for that lock waiting for them. Several share a large call: each takes some blocks of it at a time. */

#ifndef KVFERRY_NATIVE_CREW_H
#define KVFERRY_NATIVE_CREW_H

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
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
    struct Task *next;
} Task;

typedef struct {
    size_t first, stop, first_end, stop_end;
} Part;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct Member *members;
    unsigned count;
    pid_t process; /* a child that was forked has none of its threads */
    int closing;
    int callers_copy; /* what one thread makes, and is not hashed: theirs are as urgent as the threads here */
    Task *first;
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

/* Returns the task with work left that the fewest are at; the first of several. */
static Task *task_to_do(const Crew *crew) {
    Task *found = NULL;
    for (Task *task = crew->first; task; task = task->next)
        if (!is_begun(task) && task->at_it < task->wanted && (!found || task->at_it < found->at_it)) found = task;
    return found;
}

static void append(Crew *crew, Task *task) {
    Task **at = &crew->first;
    while (*at) at = &(*at)->next;
    task->next = NULL;
    *at = task;
}

static void take_out(Crew *crew, const Task *task) {
    Task **at = &crew->first;
    while (*at != task) at = &(*at)->next;
    *at = task->next;
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
static void work_at(Crew *crew, Task *task, Member *self) {
    Part part = take_part(task);
    task->at_it++;
    take_out(crew, task); /* the others first, next time */
    append(crew, task);
    int processor = self->processor = sched_getcpu();
    pid_t waiting = waiting_beside(crew, self);
    pthread_mutex_unlock(&crew->lock);
    if (waiting) move_from(processor, waiting);
    do_part(task->call, part, self->hash);
    pthread_mutex_lock(&crew->lock);
    self->processor = -1;
    if (--task->at_it || !is_begun(task)) return;
    take_out(crew, task);
    task->done = 1;
    pthread_cond_broadcast(&crew->done);
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
        Task *task = task_to_do(crew);
        if (task) {
            giving_way = task->giving_way;
            work_at(crew, task, self);
        } else {
            pthread_cond_wait(&crew->work, &crew->lock);
        }
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* Lets `wanted` threads, of a crew if they are several or callers do not copy, make a call, and waits for its end. A caller
   does not copy beside them: the one that it has just woken would often wait for its processor, with another one idle. Does
   not need the interpreter's lock. */
static void do_by_crew(Crew *crew, Call *call, unsigned wanted) {
    const Digests *into = call->into;
    begin_giving_way(&giving_way);
    Task task = {.call = call, .giving_way = giving_way, .wanted = wanted};
    task.stop_row = into && into->count && call->class < 0 ? (size_t)into->ends[into->count - 1] : call->copies->count;
    int is_alone = crew->callers_copy && !into && (wanted == 1 || call->class >= 0 || call->bytes <= SHARE);
    if (!task.stop_row || is_alone || crew->process != getpid()) {
        do_call(call);
        return;
    }
    pthread_mutex_lock(&crew->lock);
    append(crew, &task);
    if (wanted > 1)
        pthread_cond_broadcast(&crew->work);
    else
        pthread_cond_signal(&crew->work);
    while (!task.done) pthread_cond_wait(&crew->done, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
}

/* Ends the threads of a crew for which nobody waits, and frees it. */
static void free_crew(Crew *crew) {
    if (crew->process != getpid()) return;
    pthread_mutex_lock(&crew->lock);
    crew->closing = 1;
    pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
    for (unsigned one = 0; one < crew->count; one++) {
        pthread_join(crew->members[one].thread, NULL);
        if (crew->members[one].hash) hash.free(crew->members[one].hash);
    }
    pthread_cond_destroy(&crew->work), pthread_cond_destroy(&crew->done), pthread_mutex_destroy(&crew->lock);
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
static Crew *new_crew(unsigned count, const char *scheduling, size_t bytes, int callers_copy) {
    Crew *crew = calloc(1, sizeof *crew);
    if (!crew) return NULL;
    crew->callers_copy = callers_copy;
    crew->process = getpid();
    memcpy(crew->scheduling, scheduling, bytes < sizeof crew->scheduling ? bytes : sizeof crew->scheduling);
    pthread_mutex_init(&crew->lock, NULL), pthread_cond_init(&crew->work, NULL), pthread_cond_init(&crew->done, NULL);
    crew->members = calloc(count, sizeof *crew->members);
    while (crew->members && crew->count < count && add_member(crew)) crew->count++;
    if (crew->count == count) return crew;
    free_crew(crew);
    return NULL;
}

#endif
