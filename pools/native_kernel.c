/* The module native_kernel: lists of copies that come as arrays, and the copies of native_copies.h, without Python's lock
   where they take more than a few microseconds. Everything else is in copy_kernel.py, with a twin in Python. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>

#include "native_copies.h"
#include "native_copy_threads.h"

typedef struct {
    Py_buffer view;
    Copies copies;
} CopyList;

static int open_copies(PyObject *object, CopyList *list) {
    if (PyObject_GetBuffer(object, &list->view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) return -1;
    const Py_buffer *view = &list->view;
    int numbers = view->itemsize == 8 && view->format && strchr("LQ", view->format[0]) && !view->format[1];
    if (!numbers || view->ndim != 2 || (view->shape[1] != 3 && view->shape[1] != 6)) {
        PyBuffer_Release(&list->view);
        PyErr_SetString(PyExc_TypeError, "copies must be (n, 3) or (n, 6) uint64");
        return -1;
    }
    list->copies = (Copies){view->buf, view->strides[0], view->strides[1], (size_t)view->shape[0], view->shape[1] == 6};
    return 0;
}

/* What the calling thread uses, and keeps: see kernel_serve and kernel_give_way. */
static _Thread_local struct {
    PyObject *copy_threads_object, *gate_object;
    CopyThreads *copy_threads; /* NULL: it copies by itself */
    unsigned threads;
} used;

static void keep(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    *place = object;
    Py_INCREF(object);
    Py_XDECREF(before);
}

static void run(Call call) {
    if (call.bytes >= UNLOCKED) {
        Py_BEGIN_ALLOW_THREADS
        if (used.copy_threads)
            do_by_copy_threads(used.copy_threads, &call, used.threads);
        else
            do_call(&call);
        Py_END_ALLOW_THREADS
    } else { /* waits for nobody meanwhile */
        GivingWay usual = giving_way;
        giving_way.gate = NULL;
        do_call(&call);
        giving_way = usual;
    }
    end_call(&call);
}

static PyObject *kernel_copy(PyObject *self, PyObject *argument) {
    CopyList list;
    (void)self;
    if (open_copies(argument, &list) < 0) return NULL;
    run(begin_call(&list.copies, NULL));
    PyBuffer_Release(&list.view);
    Py_RETURN_NONE;
}

static const char STATE[] = "kvferry.hash";

static void free_state(PyObject *capsule) { hash.free(PyCapsule_GetPointer(capsule, STATE)); }

static PyObject *kernel_new_hash(PyObject *self, PyObject *arguments) {
    (void)self, (void)arguments;
    void *state = hash.create ? hash.create() : NULL;
    if (!state) return PyErr_NoMemory();
    hash.reset(state);
    PyObject *capsule = PyCapsule_New(state, STATE, free_state);
    if (!capsule) hash.free(state);
    return capsule;
}

static int open_numbers(PyObject *object, Py_buffer *view, int flags, const char *kinds, const char *what) {
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | flags) < 0) return -1;
    if (view->itemsize == 8 && view->ndim == 1 && view->format && strchr(kinds, view->format[0]) && !view->format[1])
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, what);
    return -1;
}

static int open_table(PyObject *object, Py_buffer *view, int flags) {
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | flags) < 0) return -1;
    if (view->itemsize == 8 && view->ndim == 2 && view->format && strchr("LQ", view->format[0]) && !view->format[1]) return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "a list and its entries must be (n, m) uint64");
    return -1;
}

/* Opens (n,) int64 of any strides, None as no numbers; n is `count`, unless that is unknown yet, -1. */
static int open_pages(PyObject *object, Py_buffer *view, Numbers *numbers, Py_ssize_t *count) {
    *view = (Py_buffer){.obj = NULL}; /* which may be released */
    *numbers = (Numbers){NULL, 0};
    if (object == Py_None) return 0;
    if (open_numbers(object, view, PyBUF_STRIDES, "lq", "pages must be (n,) int64") < 0) return -1;
    *numbers = (Numbers){view->buf, view->strides[0]};
    if (*count < 0) *count = view->shape[0];
    if (*count == view->shape[0]) return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "there are no such segments: both sides have as many pages");
    return -1;
}

static PyObject *kernel_list_segments(PyObject *self, PyObject *arguments) {
    PyObject *rows, *table, *objects[3], *found = NULL; /* pages from, to, and how many each stands for */
    Py_buffer list, entries, views[3];
    Numbers pages[3];
    unsigned long long first, from_at, to_at;
    Py_ssize_t every = -1;
    int opened = 0;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OOOOOKKK", &rows, &table, objects, objects + 1, objects + 2, &first, &from_at, &to_at))
        return NULL;
    if (open_table(rows, &list, PyBUF_WRITABLE) < 0) return NULL;
    if (open_table(table, &entries, 0) < 0) goto no_entries;
    for (; opened < 3; opened++)
        if (open_pages(objects[opened], &views[opened], &pages[opened], &every) < 0) goto end;
    size_t count = (size_t)list.shape[0], all = every < 0 ? 0 : (size_t)every * (size_t)entries.shape[0];
    if ((list.shape[1] != 3 && list.shape[1] != 6) || entries.shape[1] != ENTRY || first > all || count > all - first) {
        PyErr_SetString(PyExc_ValueError, "there are no such segments, or no such columns");
        goto end;
    }
    Segments segments = {entries.buf, pages[0], pages[1], pages[2], (size_t)every, from_at, to_at};
    found = PyLong_FromSize_t(list_segments(&segments, first, first + count, list.buf, (int)list.shape[1]));
end:
    while (opened--) PyBuffer_Release(&views[opened]);
    PyBuffer_Release(&entries);
no_entries:
    PyBuffer_Release(&list);
    return found;
}

typedef struct {
    Py_buffer ends, digests;
    Digests into;
} DigestList;

static void close_digests(DigestList *list) { PyBuffer_Release(&list->digests), PyBuffer_Release(&list->ends); }

/* Opens what a call of so many copies is to hash, and into what. */
static int open_digests(PyObject *ends, PyObject *digests, PyObject *capsule, size_t count, DigestList *list) {
    void *state = PyCapsule_GetPointer(capsule, STATE);
    if (!state || open_numbers(ends, &list->ends, 0, "lq", "ends must be (m,) int64") < 0) return -1;
    if (open_numbers(digests, &list->digests, PyBUF_WRITABLE, "LQ", "digests must be (m,) uint64") < 0) {
        PyBuffer_Release(&list->ends);
        return -1;
    }
    const int64_t *at = list->ends.buf;
    list->into = (Digests){at, list->digests.buf, (size_t)list->ends.shape[0], 0, state};
    if (list->digests.shape[0] != list->ends.shape[0])
        PyErr_SetString(PyExc_ValueError, "there must be as many digests as ends");
    for (Py_ssize_t one = 0; one < list->ends.shape[0] && !PyErr_Occurred(); one++)
        if (at[one] < 0 || (size_t)at[one] > count)
            PyErr_SetString(PyExc_ValueError, "an end is behind the last of the copies");
    if (!PyErr_Occurred()) return 0;
    close_digests(list);
    return -1;
}

static PyObject *kernel_copy_hashed(PyObject *self, PyObject *arguments) {
    PyObject *copies, *ends, *digests, *capsule;
    CopyList list;
    DigestList hashed;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OOOO", &copies, &ends, &digests, &capsule)) return NULL;
    if (open_copies(copies, &list) < 0) return NULL;
    if (open_digests(ends, digests, capsule, list.copies.count, &hashed) < 0) {
        PyBuffer_Release(&list.view);
        return NULL;
    }
    run(begin_call(&list.copies, &hashed.into));
    close_digests(&hashed), PyBuffer_Release(&list.view);
    Py_RETURN_NONE;
}

static const char GATE[] = "kvferry.gate";

static void free_gate(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, GATE)); }

static PyObject *kernel_new_gate(PyObject *self, PyObject *arguments) {
    (void)self, (void)arguments;
    Gate *gate = PyMem_Calloc(1, sizeof *gate);
    if (!gate) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(gate, GATE, free_gate);
    if (!capsule) PyMem_Free(gate);
    return capsule;
}

static PyObject *set_gate_of(PyObject *capsule, int shut) {
    Gate *gate = PyCapsule_GetPointer(capsule, GATE);
    if (!gate) return NULL;
    set_gate(gate, shut);
    Py_RETURN_NONE;
}

static PyObject *kernel_shut(PyObject *self, PyObject *argument) { return (void)self, set_gate_of(argument, 1); }

static PyObject *kernel_open(PyObject *self, PyObject *argument) { return (void)self, set_gate_of(argument, 0); }

static PyObject *kernel_standing_at(PyObject *self, PyObject *argument) {
    (void)self;
    Gate *gate = PyCapsule_GetPointer(argument, GATE);
    return gate ? PyLong_FromUnsignedLong(__atomic_load_n(&gate->waiting, __ATOMIC_SEQ_CST)) : NULL;
}

static PyObject *kernel_give_way(PyObject *self, PyObject *arguments) {
    PyObject *capsule;
    double patience_s;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Od", &capsule, &patience_s)) return NULL;
    Gate *gate = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, GATE);
    if (!gate && capsule != Py_None) return NULL;
    keep(&used.gate_object, capsule);
    giving_way.gate = gate;
    giving_way.patience_ns = 1e9 * patience_s;
    Py_RETURN_NONE;
}

static const char COPY_THREADS[] = "kvferry.copy_threads";

/* What was submitted, with what it needs until it has ended. */
typedef struct {
    Task task; /* the first: a task that has ended is this one */
    Call call;
    CopyList list;
    DigestList hashed;
    PyObject *gate, *state; /* at which it may stand, and of its hash */
    int is_hashed;
} Submitted;

/* Returns the token of a task that has ended, and frees all else of it. */
static PyObject *end_submitted(Task *task) {
    Submitted *one = (Submitted *)task;
    PyObject *token = task->token;
    end_call(&one->call);
    if (one->is_hashed) close_digests(&one->hashed);
    PyBuffer_Release(&one->list.view);
    Py_XDECREF(one->gate), Py_XDECREF(one->state);
    PyMem_Free(one);
    return token;
}

static void withdraw_all(CopyThreads *copy_threads) {
    Py_BEGIN_ALLOW_THREADS
    withdraw(copy_threads, NULL);
    Py_END_ALLOW_THREADS
}

static void free_copy_threads_of(PyObject *capsule) {
    CopyThreads *copy_threads = PyCapsule_GetPointer(capsule, COPY_THREADS);
    if (copy_threads->process == getpid()) {
        withdraw_all(copy_threads);
        for (Task *task = take_ended(copy_threads), *next; task; task = next) {
            next = task->next;
            Py_DECREF(end_submitted(task));
        }
    }
    free_copy_threads(copy_threads);
}

/* Returns copy threads of this process; NULL, with an error, where they are none. */
static CopyThreads *own_copy_threads(PyObject *capsule) {
    CopyThreads *copy_threads = PyCapsule_GetPointer(capsule, COPY_THREADS);
    if (!copy_threads || copy_threads->process == getpid()) return copy_threads;
    PyErr_SetString(PyExc_RuntimeError, "a child that was forked has none of its parent's threads");
    return NULL;
}

static PyObject *kernel_submit(PyObject *self, PyObject *arguments) {
    PyObject *capsule, *copies, *token, *ends = NULL, *digests = NULL, *state = NULL;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OOIO|OOO", &capsule, &copies, &threads, &token, &ends, &digests, &state)) return NULL;
    CopyThreads *copy_threads = own_copy_threads(capsule);
    Submitted *one = copy_threads ? PyMem_Calloc(1, sizeof *one) : NULL;
    if (!one) return copy_threads ? PyErr_NoMemory() : NULL;
    if (open_copies(copies, &one->list) < 0) goto refused;
    one->is_hashed = state != NULL;
    if (state && open_digests(ends, digests, state, one->list.copies.count, &one->hashed) < 0) {
        PyBuffer_Release(&one->list.view);
        goto refused;
    }
    Py_INCREF(token);
    Py_XINCREF(one->gate = used.gate_object), Py_XINCREF(one->state = state);
    one->call = begin_call(&one->list.copies, state ? &one->hashed.into : NULL);
    submit(copy_threads, &one->task, &one->call, threads ? threads : 1, token);
    Py_RETURN_NONE;
refused:
    PyMem_Free(one);
    return NULL;
}

static PyObject *kernel_withdraw(PyObject *self, PyObject *arguments) {
    PyObject *capsule, *token;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OO", &capsule, &token)) return NULL;
    CopyThreads *copy_threads = own_copy_threads(capsule);
    if (!copy_threads) return NULL;
    if (token == Py_None)
        withdraw_all(copy_threads);
    else
        withdraw(copy_threads, token);
    Py_RETURN_NONE;
}

static PyObject *kernel_take_ended(PyObject *self, PyObject *capsule) {
    (void)self;
    CopyThreads *copy_threads = own_copy_threads(capsule);
    PyObject *tokens = copy_threads ? PyList_New(0) : NULL;
    if (!tokens) return NULL;
    for (Task *task = take_ended(copy_threads), *next; task; task = next) {
        next = task->next;
        PyObject *token = end_submitted(task);
        if (tokens && PyList_Append(tokens, token) < 0) Py_CLEAR(tokens);
        Py_DECREF(token);
    }
    return tokens;
}

static PyObject *kernel_told_by(PyObject *self, PyObject *capsule) {
    (void)self;
    CopyThreads *copy_threads = own_copy_threads(capsule);
    return copy_threads ? PyLong_FromLong(copy_threads->tells) : NULL;
}

static PyObject *kernel_new_copy_threads(PyObject *self, PyObject *arguments) {
    unsigned count;
    const char *scheduling;
    Py_ssize_t bytes;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Iy#", &count, &scheduling, &bytes)) return NULL;
    if (!count || count > MOST_COPY_THREADS) {
        PyErr_SetString(PyExc_ValueError, "there are some copy threads, and not too many");
        return NULL;
    }
    CopyThreads *copy_threads = new_copy_threads(count, scheduling, (size_t)bytes);
    if (!copy_threads) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(copy_threads, COPY_THREADS, free_copy_threads_of);
    if (!capsule) free_copy_threads(copy_threads);
    return capsule;
}

static PyObject *kernel_serve(PyObject *self, PyObject *arguments) {
    PyObject *capsule;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OI", &capsule, &threads)) return NULL;
    CopyThreads *copy_threads = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, COPY_THREADS);
    if (!copy_threads && capsule != Py_None) return NULL;
    keep(&used.copy_threads_object, capsule);
    used.copy_threads = copy_threads;
    used.threads = threads ? threads : 1;
    Py_RETURN_NONE;
}

static PyObject *kernel_load_hash(PyObject *self, PyObject *argument) {
    (void)self;
    PyObject *path = NULL;
    if (!PyUnicode_FSConverter(argument, &path)) return NULL;
    void *library = dlopen(PyBytes_AsString(path), RTLD_NOW | RTLD_LOCAL);
    Py_DECREF(path);
    if (!library) Py_RETURN_FALSE;
    /* Some builds of libxxhash for x86 choose the widest instructions at run time, under names of their own. */
    void *update = dlsym(library, "XXH3_64bits_update_dispatch");
    if (!update) update = dlsym(library, "XXH3_64bits_update");
    Hash found;
    *(void **)&found.update = update;
    *(void **)&found.create = dlsym(library, "XXH3_createState");
    *(void **)&found.free = dlsym(library, "XXH3_freeState");
    *(void **)&found.reset = dlsym(library, "XXH3_64bits_reset");
    *(void **)&found.digest = dlsym(library, "XXH3_64bits_digest");
    if (!found.create || !found.free || !found.reset || !found.update || !found.digest) {
        dlclose(library);
        Py_RETURN_FALSE;
    }
    hash = found; /* stays loaded, like any module */
    Py_RETURN_TRUE;
}

static PyObject *kernel_variants(PyObject *self, PyObject *arguments) {
    (void)self, (void)arguments;
    PyObject *names = PyList_New(0);
    for (const Variant *variant = VARIANTS; names && variant < VARIANTS + VARIANT_COUNT; variant++) {
        if (!is_supported(variant)) continue;
        PyObject *name = PyUnicode_FromString(variant->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *kernel_use(PyObject *self, PyObject *argument) {
    (void)self;
    if (argument == Py_None) {
        forced = NULL;
        memset(trials, 0, sizeof trials);
        Py_RETURN_NONE;
    }
    for (const Variant *variant = VARIANTS; variant < VARIANTS + VARIANT_COUNT; variant++) {
        if (PyUnicode_CompareWithASCIIString(argument, variant->name) || !is_supported(variant)) continue;
        forced = variant;
        Py_RETURN_NONE;
    }
    PyErr_SetString(PyExc_ValueError, "this processor does not have that kernel variant");
    return NULL;
}

static PyMethodDef methods[] = {
    {"copy", kernel_copy, METH_O, "Copy (n, 3) or (n, 6) uint64."},
    {"copy_hashed", kernel_copy_hashed, METH_VARARGS,
      "Copy, and fill in the digests of the rows up to each end."},
    {"list_segments", kernel_list_segments, METH_VARARGS, "Fill in the copies of segments; return how many rows those are."},
    {"new_hash", kernel_new_hash, METH_NOARGS, "Return the state of a hash."},
    {"new_gate", kernel_new_gate, METH_NOARGS, "Return a gate, which is open."},
    {"shut_gate", kernel_shut, METH_O, "Shut a gate."},
    {"open_gate", kernel_open, METH_O, "Open a gate, and wake who waits at it."},
    {"standing_at", kernel_standing_at, METH_O, "Return how many threads stand still at a gate."},
    {"give_way", kernel_give_way, METH_VARARGS, "Let this thread's copies wait while a gate is shut, so many seconds; None: never."},
    {"new_copy_threads", kernel_new_copy_threads, METH_VARARGS, "Return so many copy threads, scheduled as sched_attr says."},
    {"submit", kernel_submit, METH_VARARGS, "Let so many copy threads copy, and return; a token stands for that."},
    {"told_by", kernel_told_by, METH_O, "Return the descriptor that may be read when something submitted has ended."},
    {"take_ended", kernel_take_ended, METH_O, "Return the tokens of what was submitted and has ended since the last time."},
    {"withdraw", kernel_withdraw, METH_VARARGS, "End what was submitted with a token; None: all, and wait for that."},
    {"serve", kernel_serve, METH_VARARGS, "Let so many copy threads make this thread's large copies; None: itself."},
    {"load_hash", kernel_load_hash, METH_O, "Take XXH3-64 from a library; return whether that worked."},
    {"variants", kernel_variants, METH_NOARGS, "Return the kernel variants that this processor has."},
    {"use", kernel_use, METH_O, "Take one kernel variant from now on; None: by measurement, anew."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "native_kernel", "See copy_kernel.py.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native_kernel(void) { return PyModule_Create(&module); }
