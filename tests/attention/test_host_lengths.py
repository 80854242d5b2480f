"""Host lengths: a reader sees one update's list as a whole, whatever the writer is doing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.host_lengths import HostLengthsReader, HostLengthsWriter, host_lengths_bytes
from kvferry.attention.table_layout import Region
from kvferry.protocol.errors import InternalError, LengthMismatchError


def region_for(max_batch: int) -> Region:
    return np.zeros(host_lengths_bytes(max_batch), np.uint8)


def pair(max_batch: int) -> tuple[HostLengthsWriter, HostLengthsReader]:
    region = region_for(max_batch)
    writer = HostLengthsWriter(region, max_batch)
    region = region.view()
    region.flags.writeable = False
    return writer, HostLengthsReader(region, max_batch)


def test_the_lists_that_graph_updates_take() -> None:
    writer, reader = pair(8)
    assert writer.write(np.array([5, 0, 9]), 4, extra_tokens=3) == 1
    found = reader.read()
    assert (found.sequence, found.lengths, found.replayed_rows, found.extra_tokens) == (1, [5, 0, 9], 4, 3)
    assert found.padded() == [5, 0, 9, 0]
    assert found.for_update() == [8, 0, 12, 0], "neither idle rows nor padding get draft tokens"
    assert [found.for_draft_step(step) for step in (0, 1)] == [[6, 0, 10, 0], [7, 0, 11, 0]]
    assert {type(one) for one in found.for_update()} == {int}


@given(st.lists(st.lists(st.integers(0, 1 << 30), max_size=9), min_size=1, max_size=6))
def test_the_latest_list(lists: list[list[int]]) -> None:
    writer, reader = pair(9)
    assert (reader.read().sequence, reader.read().for_update()) == (0, []), "nothing is written yet"
    for at, lengths in enumerate(lists, 1):
        assert writer.write(np.array(lengths, np.int64), 9) == at
        assert reader.read().lengths == lengths
        assert reader.read().padded() == lengths + [0] * (9 - len(lengths))


def test_the_list_of_an_update_is_found_while_the_next_one_is_written() -> None:
    writer, reader = pair(2)
    for length in (1, 2):
        writer.write(np.array([length]), 1)
    assert (reader.read(lambda: 1).lengths, reader.read(lambda: 2).lengths) == ([1], [2])
    with pytest.raises(InternalError):
        reader.read(lambda: 3)


@given(st.integers(0, 1 << 20), st.integers(0, 255))
def test_a_record_that_is_not_complete_does_not_count(at: int, value: int) -> None:
    """As after a writer's death half-way, or a read while it writes: any byte of the latest record differs."""
    region = region_for(16)
    writer, reader = HostLengthsWriter(region, 16), HostLengthsReader(region, 16)
    writer.write(np.arange(100, 116), 16)
    writer.write(np.arange(200, 216), 16, extra_tokens=2)
    latest = region[: len(region) // 2]
    used = [*range(40), *range(64, 64 + 4 * 16)]
    latest[used[at % len(used)]] ^= value
    assert reader.read().lengths[0] == (100 if value else 200)


def test_what_has_no_record_or_no_room_for_one() -> None:
    with pytest.raises(InternalError, match="no record"):
        HostLengthsReader(region_for(8), 8).read()
    for kind in (HostLengthsReader, HostLengthsWriter):
        with pytest.raises(LengthMismatchError) as caught:
            kind(region_for(8), 100)
        assert caught.value.field == "region"


def test_reading_while_another_thread_writes() -> None:
    region = region_for(256)
    writer, reader = HostLengthsWriter(region, 256), HostLengthsReader(region, 256)
    stop = threading.Event()

    def write() -> None:
        at = 0
        while not stop.is_set():
            at += 1
            writer.write(np.full(1 + at % 256, at), 256)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0
        for _ in range(2000):
            found = reader.read()
            assert set(found.lengths) <= {found.sequence}, "parts of two lists"
            assert len(found.lengths) == (1 + found.sequence % 256 if found.sequence else 0)
            assert found.sequence >= last
            last = found.sequence
    finally:
        stop.set()
        thread.join()
