"""A pool that one daemon leaves to the next: cut after every write, with flipped bits, what must not be believed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.allocator import NOBODY, OWNER_DTYPE, PageAllocator
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import spaces_of
from kvferry.pools.pool_file import (
    KeptRecord,
    PoolRecord,
    drop_owners,
    end_pool_file,
    manifest_digest,
    owners_in,
    pool_file_bytes,
    read_pool_record,
    write_pool_file,
)
from kvferry.pools.records import UnreadableFileError
from tests.kit.devices import DEVICE
from tests.kit.pool_specs import SWA
from tests.kit.recording_buffer import Recording, copied, cut_at_every_write

SPEC = msgspec.structs.replace(SWA, full_layers=(0,), window_layers=(1,), tokens=1024, window_tokens=512, window=8)
MANIFEST = manifest_of(SPEC)
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
            read_pool_record(copied(cut))
    assert read_pool_record(copied(whole)) == POOL_RECORD
    end_pool_file(memory)
    with pytest.raises(UnreadableFileError, match="deleted"):
        read_pool_record(memory)


KEPT = KeptRecord(device="npu:0", key="0123456789abcdef" * 2, size_bytes=2 << 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "host"}, {"device": "cuda:0"}, {"device": "npu:0\n"}, {"key": ""}, {"key": "g" * 32},
        {"key": "a" * 33}, {"key": "A" * 32}, {"size_bytes": 0}, {"size_bytes": 1 << 51}, {"size_bytes": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_memory_that_a_keeper_has_is_checked(wrong: dict[str, Any]) -> None:
    for kept, is_read in ((KEPT, True), (msgspec.structs.replace(KEPT, **wrong), False)):
        record = msgspec.structs.replace(POOL_RECORD, kept=kept)
        memory = Recording(pool_file_bytes(record, MANIFEST))
        write_pool_file(memory, record)
        if is_read:
            assert read_pool_record(memory) == record
        else:
            with pytest.raises(UnreadableFileError, match="kept"):
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
    read_pool_record(copied(data))
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
@example((5).to_bytes(4, "little") * 9)  # the padding page is nobody's, whoever is said to own it
def test_owners_of_any_bytes(content: bytes) -> None:
    owners = np.frombuffer(bytearray(content), OWNER_DTYPE)
    wanted = [int(one) if one in (5, 9) and at else NOBODY for at, one in enumerate(owners)]
    stray = sum(int(was) != is_now for was, is_now in zip(owners, wanted, strict=True))
    assert drop_owners(owners, [5, 9]) == stray
    assert owners.tolist() == wanted
    PageAllocator(len(owners), owners).check_integrity()
