"""A file that is not what was written is a miss, counted, and gone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.tiers.block_file import DamagedBlockError, DiskFailedError, MissingBlockError
from kvferry.pools.tiers.disk import DiskStore
from tests.kit.disk_blocks import Block, block, files_under, read, scanned, written


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path) as store:
        yield store


def _flipped(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def _is_a_miss(store: DiskStore, wanted: Block) -> None:
    damaged = store.counts.damaged
    with pytest.raises(DamagedBlockError):
        read(store, wanted)
    assert store.counts.damaged == damaged + 1
    assert not wanted.file_in(store).exists()
    with pytest.raises(MissingBlockError):
        read(store, wanted)


@given(where=st.floats(0, 1, exclude_max=True), part=st.sampled_from(["header", "padding", "payload"]))
def test_any_flipped_byte_is_a_miss(where: float, part: str) -> None:
    wanted = block(4, page_bytes=3333)
    bounds = {"header": (0, 200), "padding": (200, 4096), "payload": (4096, 4096 + 3 * 3333)}
    first, end = bounds[part]
    with tempfile.TemporaryDirectory() as root, DiskStore(Path(root)) as store:
        wanted.write_to(store)
        _flipped(wanted.file_in(store), first + int(where * (end - first)))
        _is_a_miss(store, wanted)


@pytest.mark.parametrize("position", [0, 8, 12, 16, 20, 60, 100, 4088, 4095, 4096, -1])
def test_a_flipped_byte_at_each_edge_is_a_miss(store: DiskStore, position: int) -> None:
    wanted = block(5)
    wanted.write_to(store)
    _flipped(wanted.file_in(store), position)
    _is_a_miss(store, wanted)


@pytest.mark.parametrize("size_bytes", [0, 1, 19, 4095, 4096, 5000, 4096 + 2999, 4096 + 3001, 8192])
def test_a_file_of_another_length_is_a_miss(store: DiskStore, size_bytes: int) -> None:
    wanted = block(6)
    wanted.write_to(store)
    os.truncate(wanted.file_in(store), size_bytes)
    _is_a_miss(store, wanted)


def test_a_file_that_is_cut_while_it_is_read_is_a_miss(store: DiskStore) -> None:
    wanted = block(7, page_bytes=50_000)
    wanted.write_to(store)
    with store.begin_read(wanted.key, [memoryview(bytearray(50_000)) for _ in range(3)]) as reader:
        reader.step(60_000)
        os.truncate(wanted.file_in(store), 4096 + 70_000)
        reader.step(10_000)
        with pytest.raises(DamagedBlockError, match="ends after"):
            reader.step(60_000)
        with pytest.raises(DiskFailedError):
            reader.step()
    assert not wanted.file_in(store).exists()


def test_a_damaged_last_page_is_never_taken_for_whole(store: DiskStore) -> None:
    wanted = block(8)
    wanted.write_to(store)
    _flipped(wanted.file_in(store), -1)
    with store.begin_read(wanted.key, [memoryview(bytearray(1000)) for _ in range(3)]) as reader:
        with pytest.raises(DamagedBlockError, match="page 2"):
            reader.step()
        with pytest.raises(DiskFailedError):
            reader.step()


def test_another_blocks_file_is_a_miss(store: DiskStore) -> None:
    wanted, other = block(9), block(10)
    other.write_to(store)
    wanted.file_in(store).parent.mkdir(exist_ok=True)
    other.file_in(store).rename(wanted.file_in(store))
    store.remove(other.key)
    _is_a_miss(store, wanted)


def test_pages_of_another_length_are_a_miss(store: DiskStore) -> None:
    wanted = block(11)
    wanted.write_to(store)
    with pytest.raises(DamagedBlockError, match="it has 3 pages of 1000 bytes"):
        read(store, wanted._replace(pages=[bytes(999)] * 3))
    assert files_under(store.root) == []


def test_wrong_checksums_given_are_a_miss_later(store: DiskStore) -> None:
    wanted = block(12)
    written(store, wanted.key, wanted.buffers, [xxhash.xxh3_64_intdigest(b"")] * 3)
    _is_a_miss(store, wanted)


def test_a_replacement_survives_the_damage_of_what_was_before(store: DiskStore) -> None:
    wanted = block(13)
    wanted.write_to(store)
    _flipped(wanted.file_in(store), -1)
    with store.begin_read(wanted.key, [memoryview(bytearray(1000)) for _ in range(3)]) as reader:
        wanted.write_to(store)
        with pytest.raises(DamagedBlockError):
            reader.step()
    assert read(store, wanted) == wanted.pages
    assert not scanned(store), "its own"
