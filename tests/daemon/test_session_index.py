"""Sessions that one daemon leaves to the next: cut after every write, flipped bits, what must not be believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.control.session_index import (
    SESSION_BYTES,
    SessionIndex,
    SessionRecord,
    format_index,
    index_bytes,
)
from kvferry.pools.records import FORMAT, MAX_NUMBER, UnreadableFileError
from tests.kit.devices import DEVICE
from tests.kit.recording_buffer import Recording, copied, cut_at_every_write

PLACES = 8
BOOT, NEXT = "1" * 32, "2" * 32


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
    return {one.session: one for one in SessionIndex(copied(memory)).begin(NEXT).records}


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
            last = SessionIndex(copied(cut)).last
            assert highest <= last <= max(highest, number), "a number that was given may be given again"
        highest = SessionIndex(memory).last
        assert read(bytearray(memory.data)) == known


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
    assert SessionIndex(copied(memory.data)).last in {2, 3}


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


def test_boots_that_adopt_no_device_are_counted_apart() -> None:
    memory = new_index()
    for boot in range(1, 4):
        index = SessionIndex(memory)
        assert (index.tries, index.device_tries) == (0, boot - 1)
        index.begin(BOOT)
        index.came_up()
    index = SessionIndex(memory)
    index.devices_came_up()
    assert (index.tries, index.device_tries, index.boot_id) == (0, 0, BOOT)


@pytest.mark.parametrize(("at", "wrong"), [(8, FORMAT + 1), (0, 0)])
def test_another_format_or_size_is_not_read(at: int, wrong: int) -> None:
    memory = new_index()
    memory.data[at] = wrong
    with pytest.raises(UnreadableFileError, match=r"format 2, this daemon reads 1|no index"):
        SessionIndex(memory)
    for size in (0, 15, 16, index_bytes(0), index_bytes(1) - 1, index_bytes(1) + 1):
        other = Recording(size)
        other.data[:16] = new_index().data[:16][:size]
        with pytest.raises(UnreadableFileError):
            SessionIndex(other)
