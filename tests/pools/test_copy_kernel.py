"""The two copy kernels against numpy's slices: every size and alignment, rows, checksums, and what is refused."""

from __future__ import annotations

import itertools
import random
import select
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools import copy_kernel
from kvferry.pools import native_kernel as native
from kvferry.pools.copy_kernel import (
    LIBRARIES,
    SWITCH,
    Copies,
    CopyThreads,
    Gate,
    Hashing,
    Kernel,
    PythonKernel,
    SecondPassKernel,
)
from tests.kit.devices import DEVICE

Memory = npt.NDArray[np.uint8]
Require = Callable[[object, str], None]
UNTOUCHED = 0x5A
LINE = 64
MIB = 1 << 20
SIZES = st.integers(0, 300) | st.integers(0, 20_000) | st.integers(0, 3 * MIB)
ALIGNMENTS = st.integers(0, 4096)
WAIT_S = 30.0
WAYS = st.sampled_from(["plain", "hashed"])
CHECK = Path(__file__).with_name("native_copies_check.c")
HEADERS = Path(copy_kernel.__file__).parent
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-O1", "-g", "-fsanitize=thread", "-DMEMORY_BYTES=1048576")


@pytest.fixture(params=[*native.variants(), "by measurement", "copy threads", "second pass", "python"], scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Return each kernel, the native one with each variant that this processor has, and with three copy threads."""
    if request.param == "python":
        yield PythonKernel()
        return
    native.use(request.param if request.param in native.variants() else None)
    if request.param == "copy threads":
        native.serve(native.new_copy_threads(3, b""), 3)
    yield SecondPassKernel(native) if request.param == "second pass" else native
    native.serve(None, 1)
    native.use(None)


def noise(size: int) -> Memory:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def copies_of(source: Memory, destination: Memory, rows: list[tuple[int, int, int]]) -> Copies:
    at = np.array(rows, np.uint64).reshape(-1, 3)
    at[:, 0] += np.uint64(source.ctypes.data)
    at[:, 1] += np.uint64(destination.ctypes.data)
    return at


BLOCKS = st.lists(st.tuples(ALIGNMENTS, ALIGNMENTS, SIZES, st.just(1), st.just(0), st.just(0)), min_size=1, max_size=6)
LINES = st.integers(0, 80).map(lambda lines: LINE * lines)
ROWS = st.tuples(
    ALIGNMENTS, ALIGNMENTS, st.integers(0, 5000) | LINES, st.integers(1, 20), st.integers(0, 300), LINES
)  # fmt: skip
"""Bytes ahead in the source and in the destination, bytes of a row, rows, and bytes between them on both sides."""


@DEVICE.examples(80)
@given(WAYS, BLOCKS | st.lists(ROWS, min_size=1, max_size=30), st.sampled_from("CF"), st.integers(1, 40))
@example("plain", [(0, 0, 3 * MIB, 1, 0, 0)], "C", 1)
@example("hashed", [(1, 63, 3 * MIB - 1, 1, 0, 0), (0, 64, 65_536, 1, 0, 0)], "F", 1)
@example("plain", [(0, 0, 4 * LINE, 1, 0, 0)] * 3072, "C", 7)
@example("hashed", [(0, 0, 8 * LINE, 128, 512, 0)] * 12, "C", 1)
def test_every_byte_arrives_and_no_other_changes(
    kernel: Kernel, way: str, blocks: list[tuple[int, ...]], order: Literal["C", "F"], per_digest: int
) -> None:
    """Also as much as is streamed, in random order: blocks of one token's page, and slices of larger pages."""
    copies, at = [], [0, LINE]
    for *ahead, size, rows, apart, to_apart in blocks:
        at = [one + more for one, more in zip(at, ahead, strict=True)]
        steps = size + apart, size + to_apart
        copies.append((*at, size, rows, *steps))
        at = [one + rows * step for one, step in zip(at, steps, strict=True)]
    source, destination = noise(at[0] + LINE), np.full(at[1] + 2 * LINE, UNTOUCHED, np.uint8)
    destination = destination[-destination.ctypes.data % LINE :]
    random.Random(len(copies)).shuffle(copies)  # noqa: S311  no secret
    expected, sent = destination.copy(), []
    for start, to, size, rows, step, to_step in copies:
        taken = [source[start + row * step :][:size] for row in range(rows)]
        for row, content in enumerate(taken):
            expected[to + row * to_step :][:size] = content
        sent.append(b"".join(one.tobytes() for one in taken))
    columns = 6 if any(rows > 1 for _, _, _, rows, _, _ in copies) else 3
    given_ = np.array(copies, np.uint64)[:, :columns]
    given_[:, :2] += np.array([source.ctypes.data, destination.ctypes.data], np.uint64)
    given_ = np.asarray(given_, order=order)
    if way == "hashed":
        ends = np.array([*range(per_digest, len(copies), per_digest), len(copies)], np.int64)
        digests = np.zeros(len(ends), np.uint64)
        kernel.copy_hashed(given_, ends, digests, kernel.new_hash())
        parts = [b"".join(sent[start:end]) for start, end in itertools.pairwise([0, *ends])]
        assert digests.tolist() == [xxhash.xxh3_64_intdigest(part) for part in parts]
    else:
        kernel.copy(given_)
    assert (destination == expected).all()


@DEVICE.examples(60)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8), st.data())
def test_a_digest_may_take_several_rows_and_several_calls(
    kernel: Kernel, sizes: list[int], data: st.DataObject
) -> None:
    source = noise(sum(sizes) + 1)
    starts = (np.cumsum(sizes) - sizes).tolist()
    copies = copies_of(source, source, [(start, 0, size) for start, size in zip(starts, sizes, strict=True)])
    copies[:, 1] = 0  # hashed alone
    state, first, found = kernel.new_hash(), 0, []
    while first < len(sizes):
        stop = data.draw(st.integers(first + 1, len(sizes)))
        ends = [stop - first] if stop == len(sizes) else []
        digests = np.zeros(len(ends), np.uint64)
        kernel.copy_hashed(copies[first:stop], np.array(ends, np.int64), digests, state)
        found += digests.tolist()
        first = stop
    assert found == [xxhash.xxh3_64_intdigest(source[: sum(sizes)].tobytes())]


def test_each_library_has_the_same_hash(kernel: Kernel) -> None:
    """So that nodes agree, and what was stored with another one stays readable."""
    assert not native.load_hash("libno-such-thing.so")
    assert not native.load_hash("libc.so.6"), "it has no such hash"
    content = noise(3 * MIB)
    expected = xxhash.xxh3_64_intdigest(content.tobytes())
    for library in LIBRARIES:
        if native.load_hash(library):
            digests = np.zeros(1, np.uint64)
            one = np.array([[content.ctypes.data, 0, len(content)]], np.uint64)
            kernel.copy_hashed(one, np.ones(1, np.int64), digests, kernel.new_hash())
            assert int(digests[0]) == expected, library
    assert copy_kernel.digest((content.ctypes.data, MIB), (content.ctypes.data + MIB, 2 * MIB)) == expected


COPIES, ENDS, DIGEST = np.zeros((0, 3), np.uint64), np.zeros(1, np.int64), np.zeros(1, np.uint64)


@pytest.mark.parametrize(
    ("error", "said", "call", "arguments"),
    [
        *(
            (TypeError, r"copies must be \(n, 3\) or \(n, 6\) uint64", native.copy, (wrong,))
            for wrong in (np.zeros((2, 4), np.uint64), np.zeros(3, np.uint64), np.zeros((1, 3), np.int64))
        ),
        (TypeError, "ends must be", native.copy_hashed, (COPIES, np.zeros(1, np.int32), DIGEST, native.new_hash())),
        (TypeError, "digests must be", native.copy_hashed, (COPIES, ENDS, np.zeros(1), native.new_hash())),
        (ValueError, "as many", native.copy_hashed, (COPIES, ENDS, np.zeros(2, np.uint64), native.new_hash())),
        *(
            (ValueError, "behind the last of", native.copy_hashed, (COPIES, np.full(1, end), DIGEST, native.new_hash()))
            for end in (-1, 1)
        ),
        (ValueError, "that kernel variant", native.use, ("no such kind",)),
        *(((ValueError, OverflowError), "", native.new_copy_threads, (threads, b"")) for threads in (0, 65, -1)),
        *((ValueError, "PyCapsule", use, ("no copy threads", 1)) for use in (native.serve, native.withdraw)),
        (ValueError, "PyCapsule", native.submit, ("no copy threads", COPIES, 1, 1)),
        *(
            (ValueError, "PyCapsule", use, ("none",))
            for use in (native.told_by, native.take_ended, native.shut_gate, native.open_gate)
        ),
        *(
            (ValueError, "no such columns", native.list_segments, (np.empty((4, columns), np.uint64), *entries))
            for columns, entries in (
                (4, (np.zeros((3, 8), np.uint64), np.zeros(3, np.int64), None, None, 0, 0, 0)),
                (3, (np.zeros((3, 7), np.uint64), np.zeros(3, np.int64), None, None, 0, 0, 0)),
            )
        ),
        (TypeError, "must be", native.list_segments,
         (np.empty((4, 3), np.uint64), np.zeros((3, 8), np.uint64), np.zeros(3), None, None, 0, 0, 0)),
    ],
)  # fmt: skip
def test_what_the_native_kernel_refuses(
    error: type[Exception], said: str, call: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(error, match=said or None):
        call(*arguments)


@pytest.mark.parametrize("way", ["plain", "hashed"])
def test_it_copies_without_the_lock_of_the_interpreter(way: str) -> None:
    source, destination, rounds = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), 50
    copies = copies_of(source, destination, [(0, 0, 4 * MIB)])
    begun, done = threading.Event(), [0]

    def copy_on() -> None:
        begun.set()
        for _ in range(rounds):
            if way == "plain":
                native.copy(copies)
            else:
                copy_kernel.copy_hashed(copies, np.ones(1, np.int64))
            done[0] += 1

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(WAIT_S)  # the other thread keeps the lock until it gives it away
    try:
        thread = threading.Thread(target=copy_on)
        thread.start()
        begun.wait(WAIT_S)
        done_by_now = done[0]
        thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(interval_s)
    assert done_by_now < done[0] == rounds


FORKS = """
import os, sys, numpy as np
from kvferry.pools import copy_kernel
copy_threads = copy_kernel.new_copy_threads(2, b"")
source, destination = np.ones(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8)
child = os.fork()
if not child:
    give = lambda: copy_threads.submit(np.zeros((0, 3), np.uint64), 1, 1)
    for call in (give, copy_threads.fileno, copy_threads.take_ended, copy_threads.withdraw_all):
        try:
            call()
        except RuntimeError as error:
            assert "forked" in str(error)
        else:
            sys.exit("a child has its parent's copy threads")
with copy_threads.serving():
    copy_threads.serve(2)
    copy_kernel.copy(np.array([[source.ctypes.data, destination.ctypes.data, source.nbytes]], np.uint64))
assert destination.all()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_that_was_forked_copies_without_its_parents_copy_threads_and_ends() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=WAIT_S)


@pytest.fixture
def _one_variant() -> Iterator[None]:
    """Copy by one kernel variant, so that no thread tries all of them and so takes all of a call at once."""
    native.use("memcpy")
    yield
    native.use(None)


@pytest.mark.usefixtures("_one_variant")
@pytest.mark.parametrize("how", ["withdrawn", "all withdrawn", "forgotten"])
def test_what_is_withdrawn_ends_with_the_part_that_a_thread_is_at(how: str) -> None:
    copy_threads, gate = CopyThreads(native, native.new_copy_threads(1, b"")), Gate()
    source, destination = noise(8 * MIB), np.zeros(8 * MIB, np.uint8)
    copies = copies_of(source, destination, [(at, at, MIB) for at in range(0, 8 * MIB, MIB)])
    kept, token = weakref.ref(copies), object()
    gate.shut()
    with gate.giving_way(WAIT_S):
        copy_threads.submit(copies, 1, token)
    del copies
    if how == "withdrawn":
        copy_threads.withdraw(object())  # of nothing
        copy_threads.withdraw(token)
    opener = threading.Thread(target=gate.open)
    opener.start()
    if how == "forgotten":
        del copy_threads
    else:
        if how == "withdrawn":
            assert select.select([copy_threads], [], [], WAIT_S)[0]
        else:
            copy_threads.withdraw_all()
        assert copy_threads.take_ended() == [token]
    opener.join()
    assert kept() is None
    assert how != "withdrawn" or not destination[MIB:].any()


@pytest.mark.usefixtures("_one_variant")
def test_what_is_hashed_keeps_its_hash_and_rows_behind_the_last_end_arrive_too() -> None:
    copy_threads = CopyThreads(native, native.new_copy_threads(2, b""))
    source, destination, token = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), object()
    for wrong in (np.zeros((1, 4), np.uint64), np.zeros((1, 3), np.uint64)):  # refused, and nothing of it is kept
        before = sys.getrefcount(token)
        with pytest.raises((TypeError, ValueError)):
            copy_threads.submit(wrong, 1, token, Hashing(np.full(1, 2), np.zeros(1, np.uint64), native.new_hash()))
        assert sys.getrefcount(token) == before
    copies = copies_of(source, destination, [(at, at, MIB) for at in range(0, 4 * MIB, MIB)])
    for end in (4, 0):
        digests, state = np.zeros(1, np.uint64), native.new_hash()
        copy_threads.submit(copies, 2, destination, Hashing(np.full(1, end), digests, state))
        before = sys.getrefcount(state)
        assert select.select([copy_threads], [], [], WAIT_S)[0]
        assert copy_threads.take_ended()[0] is destination
        assert sys.getrefcount(state) == before - 1, "it was kept"
        assert np.array_equal(source, destination)
        assert not end or int(digests[0]) == xxhash.xxh3_64_intdigest(source.tobytes())
        destination[:] = 0


@pytest.mark.parametrize(
    ("compiler", "flags", "emulator"),
    [
        pytest.param("gcc", SANITIZED, (), id="sanitizers"),
        pytest.param("gcc", RACES, (), id="races", marks=pytest.mark.full),
        pytest.param(
            "aarch64-linux-gnu-gcc", ("-O3", "-static"), ("qemu-aarch64",), id="aarch64", marks=pytest.mark.full
        ),
    ],
)
def test_every_way_alone(
    compiler: str, flags: tuple[str, ...], emulator: tuple[str, ...], tmp_path: Path, require: Require
) -> None:
    """The C code without Python: it touches only what is its own, and another processor does the same."""
    require(all(map(shutil.which, (compiler, *emulator))), f"{' and '.join((compiler, *emulator))}")
    program = tmp_path / "check"
    subprocess.run(
        [compiler, *flags, "-Wno-unused-function", "-pthread", f"-I{HEADERS}", CHECK, "-o", program], check=True
    )
    rounds = "30" if DEVICE.full else "4"
    flags = flags if DEVICE.full else (*flags, "-DMEMORY_BYTES=1048576")
    told = subprocess.run([*emulator, program, rounds], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.rstrip().endswith(": ok")


@pytest.mark.parametrize(
    ("before", "environment", "said"),
    [
        ("", {SWITCH: "python"}, f"False it is switched off by {SWITCH}=python"),
        (
            "from kvferry.pools import native_kernel; del native_kernel.list_segments",
            {},
            "False it is that of an older",
        ),
    ],
)
def test_the_native_kernel_is_not_used(before: str, environment: dict[str, str], said: str) -> None:
    code = f"{before}\nfrom kvferry.pools import copy_kernel as c; print(c.DESCRIPTION.native, c.DESCRIPTION.why_not)"
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.startswith(said)


# -- lists of segments

NUMBERS = st.integers(0, 50)


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int] | None], tuple[int, int], tuple[int, int]]:
    """Draw entries, the pages of both sides and how many each stands for, the segments, and what is added."""
    entries = draw(st.lists(st.lists(NUMBERS, min_size=8, max_size=8), min_size=1, max_size=4))
    pages = draw(st.integers(1, 6))
    ids: list[list[int] | None] = [draw(st.lists(NUMBERS, min_size=pages, max_size=pages)) for _ in range(2)]
    if draw(st.booleans()):
        ids[draw(st.integers(0, 1))] = None
    ids.append(draw(st.none() | st.lists(NUMBERS, min_size=pages, max_size=pages)))
    first = draw(st.integers(0, len(entries) * pages))
    at = draw(st.integers(-100, 100)), draw(st.integers(-100, 100))
    return entries, ids, (first, draw(st.integers(first, len(entries) * pages))), at


@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("kernel", [native, PythonKernel()], ids=["native", "python"])
@given(case=segments())
@example(case=([[7, 4, 9, 4, 4, 1, 4, 4]], [[3, 4, 5, 9], None, None], (0, 4), (0, 0)))
@example(case=([[7, 4, 9, 4, 4, 1, 4, 4]] * 3, [[3, 4], [8, 9], None], (1, 6), (-40, 2)))
def test_segments_are_listed_entry_by_entry(
    kernel: Kernel,
    case: tuple[list[list[int]], list[list[int] | None], tuple[int, int], tuple[int, int]],
    with_rows: bool,  # noqa: FBT001
) -> None:
    entries, ids, (first, stop), at = case
    from_ids, to_ids, counts = (None if one is None else np.array(one, np.int64) for one in ids)
    memory = np.full((stop - first + 1, 6 if with_rows else 3), UNTOUCHED, np.uint64)
    copies = memory[:-1]
    rows = kernel.list_segments(copies, np.array(entries, np.uint64), from_ids, to_ids, counts, first, *at)
    assert (memory[-1] == UNTOUCHED).all(), "nothing is written behind the list"
    expected = []
    for number in range(first, stop):
        entry, page = divmod(number, len(ids[0] or ids[1] or []))
        its = entries[entry]
        pages = [page if one is None else one[page] for one in ids[:2]]
        addresses = [(at[side] + its[2 * side] + its[2 * side + 1] * pages[side]) % (1 << 64) for side in range(2)]
        size = its[4] * (ids[2][page] if ids[2] else 1)
        expected.append([*addresses, size, *(its[5:] if with_rows else ())])
    if with_rows or ids[2]:
        assert copies.tolist() == expected
        assert rows == len(expected)
        return
    joined: list[list[int]] = []
    for source, destination, size in expected:
        if joined and [sum(joined[-1][::2]), sum(joined[-1][1:])] == [source, destination]:
            joined[-1][2] += size
        else:
            joined.append([source, destination, size])
    assert copies[:rows].tolist() == joined


@pytest.mark.parametrize("kernel", [native, PythonKernel()], ids=["native", "python"])
@pytest.mark.parametrize(
    ("ids", "first"), [(3, 6), (3, 1 << 40), (2, 0), (None, 0)], ids=["behind the last", "afar", "of one side", "none"]
)
def test_segments_that_there_are_none_of_are_refused(kernel: Kernel, ids: int | None, first: int) -> None:
    copies, entries = np.empty((4, 3), np.uint64), np.zeros((3, 8), np.uint64)
    from_ids, to_ids = (None, None) if ids is None else (np.zeros(3, np.int64), np.zeros(ids, np.int64))
    with pytest.raises(ValueError, match="there are no such segments"):
        kernel.list_segments(copies, entries, from_ids, to_ids, None, first, 0, 0)
    with pytest.raises(ValueError, match="there are no such segments"):
        kernel.list_segments(copies, entries, np.zeros(3, np.int64), None, np.zeros(2, np.int64), 0, 0, 0)
