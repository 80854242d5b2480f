/* The module native_kernel: lists of copies that come as arrays, and the copies of native_copies.h, without Python's lock
   where they take more than a few microseconds. Everything else is in copy_kernel.py, with a twin in Python. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>

#include "native_copies.h"
#include "native_crew.h"

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
    PyObject *crew_object, *gate_object;
    Crew *crew; /* NULL: it copies by itself */
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
        if (used.crew)
            do_by_crew(used.crew, &call, used.threads);
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
    run(begin_call(&list.copies, NULL, 0));
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

static PyObject *kernel_copy_hashed(PyObject *self, PyObject *arguments, PyObject *named) {
    static char *names[] = {"", "", "", "", "read_next", NULL};
    PyObject *copy_list, *end_list, *digest_list, *capsule;
    CopyList list;
    Py_buffer ends, digests;
    int read_next = 0;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "OOOO|$p", names, &copy_list, &end_list, &digest_list, &capsule,
                                     &read_next))
        return NULL;
    void *state = PyCapsule_GetPointer(capsule, STATE);
    if (!state || open_copies(copy_list, &list) < 0) return NULL;
    if (open_numbers(end_list, &ends, 0, "lq", "ends must be (m,) int64") < 0) goto no_ends;
    if (open_numbers(digest_list, &digests, PyBUF_WRITABLE, "LQ", "digests must be (m,) uint64") < 0) goto no_digests;
    if (digests.shape[0] != ends.shape[0]) {
        PyErr_SetString(PyExc_ValueError, "there must be as many digests as ends");
        goto failed;
    }
    for (Py_ssize_t one = 0; one < ends.shape[0]; one++) {
        int64_t end = ((const int64_t *)ends.buf)[one];
        if (end >= 0 && (size_t)end <= list.copies.count) continue;
        PyErr_SetString(PyExc_ValueError, "an end is behind the last of the copies");
        goto failed;
    }
    Digests into = {.ends = ends.buf, .digests = digests.buf, .count = (size_t)ends.shape[0], .state = state};
    run(begin_call(&list.copies, &into, read_next));
failed:
    PyBuffer_Release(&digests);
no_digests:
    PyBuffer_Release(&ends);
no_ends:
    PyBuffer_Release(&list.view);
    if (PyErr_Occurred()) return NULL;
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

static const char CREW[] = "kvferry.crew";

static void free_crew_of(PyObject *capsule) { free_crew(PyCapsule_GetPointer(capsule, CREW)); }

static PyObject *kernel_new_crew(PyObject *self, PyObject *arguments, PyObject *named) {
    static char *names[] = {"", "", "callers_copy", NULL};
    unsigned count;
    const char *scheduling;
    Py_ssize_t bytes;
    int callers_copy = 0;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "Iy#|$p", names, &count, &scheduling, &bytes, &callers_copy))
        return NULL;
    if (!count || count > MOST_IN_CREW) {
        PyErr_SetString(PyExc_ValueError, "a crew has some threads, and not too many");
        return NULL;
    }
    Crew *crew = new_crew(count, scheduling, (size_t)bytes, callers_copy);
    if (!crew) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(crew, CREW, free_crew_of);
    if (!capsule) free_crew(crew);
    return capsule;
}

static PyObject *kernel_serve(PyObject *self, PyObject *arguments) {
    PyObject *capsule;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OI", &capsule, &threads)) return NULL;
    Crew *crew = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, CREW);
    if (!crew && capsule != Py_None) return NULL;
    keep(&used.crew_object, capsule);
    used.crew = crew;
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

static PyObject *kernel_ways(PyObject *self, PyObject *arguments) {
    (void)self, (void)arguments;
    PyObject *names = PyList_New(0);
    for (const Way *way = WAYS; names && way < WAYS + WAY_COUNT; way++) {
        if (!is_supported(way)) continue;
        PyObject *name = PyUnicode_FromString(way->name);
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
    for (const Way *way = WAYS; way < WAYS + WAY_COUNT; way++) {
        if (PyUnicode_CompareWithASCIIString(argument, way->name) || !is_supported(way)) continue;
        forced = way;
        Py_RETURN_NONE;
    }
    PyErr_SetString(PyExc_ValueError, "this processor does not have that way");
    return NULL;
}

static PyMethodDef methods[] = {
    {"copy", kernel_copy, METH_O, "Copy (n, 3) or (n, 6) uint64."},
    {"copy_hashed", (PyCFunction)(void (*)(void))kernel_copy_hashed, METH_VARARGS | METH_KEYWORDS,
      "Copy, and fill in the digests of the rows up to each end."},
    {"new_hash", kernel_new_hash, METH_NOARGS, "Return the state of a hash."},
    {"new_gate", kernel_new_gate, METH_NOARGS, "Return a gate, which is open."},
    {"shut_gate", kernel_shut, METH_O, "Shut a gate."},
    {"open_gate", kernel_open, METH_O, "Open a gate, and wake who waits at it."},
    {"give_way", kernel_give_way, METH_VARARGS, "Let this thread's copies wait while a gate is shut, so many seconds; None: never."},
    {"new_crew", (PyCFunction)(void (*)(void))kernel_new_crew, METH_VARARGS | METH_KEYWORDS,
      "Return a crew of so many threads, scheduled as a struct sched_attr says."},
    {"serve", kernel_serve, METH_VARARGS, "Let so many threads of a crew make this thread's large copies; None: itself."},
    {"load_hash", kernel_load_hash, METH_O, "Take XXH3-64 from a library; return whether that worked."},
    {"ways", kernel_ways, METH_NOARGS, "Return the ways that this processor has."},
    {"use", kernel_use, METH_O, "Take one way from now on; None: by measurement, anew."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "native_kernel", "See copy_kernel.py.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native_kernel(void) { return PyModule_Create(&module); }
