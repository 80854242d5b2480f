"""What one daemon leaves to the next: cut after every write, with flipped bits, and what must not be believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, overload

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.allocator import NOBODY, OWNER_DTYPE, PageAllocator
from kvferry.pools.index_file import (
    FORMAT,
    MAX_NUMBER,
    SESSION_BYTES,
    PoolRecord,
    SessionIndex,
    SessionRecord,
    UnreadableFileError,
    drop_owners,
    end_pool_file,
    format_index,
    index_bytes,
    manifest_digest,
    owners_in,
    pool_file_bytes,
    read_pool_record,
    write_pool_file,
)
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import spaces_of
from kvferry.protocol.manifests import HybridSwaSpec
from tests.devices import DEVICE

PLACES = 8
BOOT, NEXT = "1" * 32, "2" * 32
SPEC = HybridSwaSpec(
    full_layers=(0,),
    window_layers=(1,),
    tokens=32,
    window_tokens=16,
    window=8,
    page_size=4,
    kv_heads=1,
    head_dim=8,
    dtype="float16",
)
MANIFEST = manifest_of(SPEC)


class Write(NamedTuple):
    """Bytes that were written at a place."""

    at: int
    data: bytes


class Recording:
    """A buffer that remembers what was written into it, in order."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.writes: list[Write] = []

    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __getitem__(self, key: int | slice, /) -> int | bytes:
        return bytes(self.data[key]) if isinstance(key, slice) else self.data[key]

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        assert key.stop is None or key.stop - (key.start or 0) == len(value), "a write that moves what follows"
        assert (key.start or 0) + len(value) <= len(self.data)
        self.writes.append(Write(key.start or 0, bytes(value)))
        self.data[key] = value


def cut_at_every_write(before: bytes, writes: list[Write]) -> Iterator[bytearray]:
    """Yield the memory after each prefix of the writes, and where a long write had come half of its way."""
    data = bytearray(before)
    yield bytearray(data)
    for at, one in writes:
        for length in {len(one) // 2, len(one)} if len(one) > 8 else {len(one)}:
            data[at : at + length] = one[:length]
            yield bytearray(data)


def record(number: int, *, turn: int = 0, name: str = "engine", uid: int = 1) -> SessionRecord:
    """Return the record of a session that is an instance of its own."""
    return SessionRecord(
        session=number,
        owner=number,
        uid=uid,
        gid=uid,
        pid=100 + number,
        started=number,
        name=name,
        instance="",
        secret=number.to_bytes(16, "big"),
        turn=turn,
    )


def new_index() -> Recording:
    memory = Recording(index_bytes(PLACES))
    format_index(memory)
    return memory


def read(memory: bytearray) -> dict[int, SessionRecord]:
    """Return the sessions that the next daemon finds, by number."""
    copy = Recording(len(memory))
    copy.data[:] = memory
    return {one.session: one for one in SessionIndex(copy).begin(NEXT).records}


PUT, REMOVE, GIVE = "put", "remove", "give"
HISTORIES = st.lists(st.tuples(st.sampled_from([PUT, REMOVE]), st.integers(1, 4), st.text(max_size=40)), max_size=12)


@DEVICE.examples(60)
@given(HISTORIES)
def test_every_prefix_of_the_writes_is_the_state_before_or_after(history: list[tuple[str, int, str]]) -> None:
    memory = new_index()
    index = SessionIndex(memory)
    index.begin(BOOT)
    known: dict[int, SessionRecord] = {}
    highest = 0
    for turn, (what, number, name) in enumerate(history):
        before, snapshot = dict(known), bytes(memory.data)
        memory.writes.clear()
        if what == PUT:
            index.give(number)
            known[number] = record(number, turn=turn, name=name)
            assert index.put(known[number])
        else:
            index.remove(number)
            known.pop(number, None)
        for cut in cut_at_every_write(snapshot, memory.writes):
            assert read(cut) in (before, known)
            last = SessionIndex(_of(cut)).last
            assert highest <= last <= max(highest, number), "a number that was given may be given again"
        highest = SessionIndex(memory).last
        assert read(bytearray(memory.data)) == known


def _of(data: bytearray) -> Recording:
    copy = Recording(len(data))
    copy.data[:] = data
    return copy


def test_a_boot_that_was_cut_off_changes_no_session() -> None:
    memory = new_index()
    index = SessionIndex(memory)
    index.begin(BOOT)
    for number in (3, 1, 2):
        assert index.put(record(number))
    assert index.boot_id == BOOT
    before = bytes(memory.data)
    memory.writes.clear()
    assert [one.session for one in SessionIndex(memory).begin(NEXT).records] == [1, 2, 3]
    for cut in cut_at_every_write(before, memory.writes):
        assert sorted(read(cut)) == [1, 2, 3]
    assert SessionIndex(memory).boot_id == NEXT


def test_boots_that_do_not_come_up_are_counted() -> None:
    memory = new_index()
    index = SessionIndex(memory)
    for tries in (1, 2):
        index.begin(BOOT)
        assert index.tries == tries
    index.came_up()
    assert (index.tries, index.boot_id) == (0, BOOT)
    memory.data[48 + 16] ^= 1  # the boot's record: nothing is known of it
    assert (index.tries, index.boot_id) == (0, "")


@DEVICE.examples(150)
@given(st.integers(0, 8 * (3 * SESSION_BYTES + 256) - 1))
def test_a_flipped_bit_loses_at_most_one_session(bit: int) -> None:
    memory = new_index()
    index = SessionIndex(memory)
    index.begin(BOOT)
    every = {number: record(number) for number in (1, 2, 3)}
    for number, one in every.items():
        index.give(number)
        index.put(one)
    memory.data[bit // 8] ^= 1 << bit % 8
    try:
        found = read(memory.data)
    except UnreadableFileError:
        assert bit // 8 < 16, "the file's first words"
        return
    assert found.items() <= every.items()
    assert len(found) >= 2
    assert SessionIndex(_of(memory.data)).last in {2, 3}


@DEVICE.examples(60)
@given(st.binary(min_size=0, max_size=4 * SESSION_BYTES))
def test_anything_else_is_no_index(content: bytes) -> None:
    memory = new_index()
    memory.data[16 : 16 + len(content)] = content
    index = SessionIndex(memory)
    assert not index.begin(NEXT).records
    assert 0 <= index.last <= MAX_NUMBER
    assert index.put(record(1)), "it can be used all the same"
    assert read(memory.data) == {1: record(1)}


def test_the_later_one_of_two_records_holds() -> None:
    memory = new_index()
    index = SessionIndex(memory)
    index.begin(BOOT)
    index.put(record(1, turn=1))
    (place,) = [at for at in range(PLACES) if memory.data[256 + at * SESSION_BYTES + 8]]
    old = bytes(memory.data[256 + place * SESSION_BYTES :][:SESSION_BYTES])
    index.put(record(1, turn=2))
    memory.data[256 + place * SESSION_BYTES :][:SESSION_BYTES] = old
    for at in (5, place):  # beside the new one, in one order and in the other
        both = bytearray(memory.data)
        both[256 + at * SESSION_BYTES : 256 + (at + 1) * SESSION_BYTES] = old
        assert read(both) == {1: record(1, turn=2)}


def test_what_is_too_long_or_too_many_is_refused() -> None:
    index = SessionIndex(new_index())
    index.begin(BOOT)
    assert index.put(record(1, name="\U0001f600" * 128)), "the longest name there is"
    for number in range(2, PLACES + 1):
        assert index.put(record(number))
    assert not index.put(record(PLACES + 1))
    index.remove(1)
    assert index.put(record(PLACES + 1))


@pytest.mark.parametrize(("at", "wrong"), [(8, FORMAT + 1), (0, 0)])
def test_another_format_is_not_read(at: int, wrong: int) -> None:
    memory = new_index()
    memory.data[at] = wrong
    with pytest.raises(UnreadableFileError, match=r"format 2, this daemon reads 1|no index"):
        SessionIndex(memory)


@pytest.mark.parametrize("size", [0, 15, 16, index_bytes(0), index_bytes(1) - 1, index_bytes(1) + 1])
def test_another_size_is_not_read(size: int) -> None:
    memory = Recording(size)
    memory.data[:16] = new_index().data[:16][:size]
    with pytest.raises(UnreadableFileError):
        SessionIndex(memory)


# -- a pool's file

POOL_RECORD = PoolRecord(name="pool", tenant=7, spec=SPEC, memory=99, manifest=manifest_digest(MANIFEST))


def new_file() -> Recording:
    memory = Recording(pool_file_bytes(POOL_RECORD, MANIFEST))
    write_pool_file(memory, POOL_RECORD)
    return memory


def test_a_pool_is_there_when_its_file_is_complete_and_until_it_is_deleted() -> None:
    memory = new_file()
    *partial, whole = cut_at_every_write(bytes(len(memory)), memory.writes)
    for cut in partial:
        with pytest.raises(UnreadableFileError):
            read_pool_record(_of(cut))
    assert read_pool_record(_of(whole)) == POOL_RECORD
    end_pool_file(memory)
    with pytest.raises(UnreadableFileError, match="deleted"):
        read_pool_record(memory)


@DEVICE.examples(150)
@given(st.data())
def test_a_flipped_bit_in_a_pools_record_is_seen(data: st.DataObject) -> None:
    memory = new_file()
    first = np.frombuffer(memory.data, np.uint8)
    starts = [int(one.ctypes.data) - int(first.ctypes.data) for one in owners_in(first, MANIFEST).values()]
    del first
    bit = data.draw(st.integers(0, 8 * min(starts) - 1))
    memory.data[bit // 8] ^= 1 << bit % 8
    try:
        found = read_pool_record(memory)
    except UnreadableFileError:
        return
    assert found == POOL_RECORD, "in the padding"
    assert set(owners_in(np.frombuffer(memory.data, np.uint8), MANIFEST)) == set(spaces_of(MANIFEST))


STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from([1, 2, 3]), st.integers(1, 4)), max_size=20)


@DEVICE.examples(60)
@given(STEPS, st.sets(st.sampled_from([1, 2, 3])))
def test_pages_are_whose_they_were_after_any_word_was_written(
    steps: list[tuple[bool, int, int]], live: set[int]
) -> None:
    """The oracle has the pages that were answered; the one request that is cut off may be done in part."""
    memory = new_file()
    space, pages = next(iter(spaces_of(MANIFEST).items()))
    allocator = PageAllocator(pages, owners_in(np.frombuffer(memory.data, np.uint8), MANIFEST)[space])
    answered: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    for is_allocate, owner, count in steps:
        before = bytes(memory.data)
        its = set(answered[owner])
        if is_allocate and count <= allocator.free_count:
            answered[owner] |= {int(one) for one in allocator.allocate(owner, count)}
        elif not is_allocate and its:
            ids = np.array(sorted(its)[:count])
            allocator.free(owner, ids)
            answered[owner] -= {int(one) for one in ids}
        words = [at for at in range(0, len(before) - 3, 4) if before[at : at + 4] != memory.data[at : at + 4]]
        cut = bytearray(before)
        for at in words:
            cut[at : at + 4] = memory.data[at : at + 4]
            _check_adopted(bytearray(cut), space, answered | {owner: its & answered[owner]}, live)
    _check_adopted(bytearray(memory.data), space, answered, live, exact=True)


def _check_adopted(
    data: bytearray, space: str, answered: dict[int, set[int]], live: set[int], *, exact: bool = False
) -> None:
    read_pool_record(_of(data))
    owners = owners_in(np.frombuffer(data, np.uint8), MANIFEST)[space]
    drop_owners(owners, live)
    allocator = PageAllocator(len(owners), owners)
    allocator.check_integrity()
    assert set(allocator.pages_by_owner()) <= live
    for owner in live:
        found = {int(one) for one in allocator.pages_of(owner)}
        assert found == answered[owner] if exact else found >= answered[owner]


@DEVICE.examples(60)
@given(st.binary(min_size=36, max_size=36))
def test_owners_of_any_bytes(content: bytes) -> None:
    owners = np.frombuffer(bytearray(content), OWNER_DTYPE)
    wanted = [int(one) if one in (5, 9) and at else NOBODY for at, one in enumerate(owners)]
    stray = sum(int(was) != is_now for was, is_now in zip(owners, wanted, strict=True))
    assert drop_owners(owners, [5, 9]) == stray
    assert owners.tolist() == wanted
    PageAllocator(len(owners), owners).check_integrity()
