"""The form of a block's file, which every later version reads; one that is not what was written is a miss, and gone."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.tiers.block_file import (
    ALIGNMENT,
    DamagedBlockError,
    DiskFailedError,
    MissingBlockError,
    NotABlockError,
    announced_bytes,
    decode_header,
    encode_header,
    file_bytes,
    folder_of,
    namespace_of,
    new_header,
)
from kvferry.pools.tiers.disk import DiskStore
from tests.kit.disk_blocks import IDENTITY, LAYOUT, Block, block, files_under, read, scanned, written


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
@example(0, "header")
@example(1 - 1e-9, "padding")
@example(0, "payload")
@example(1 - 1e-9, "payload")
def test_any_flipped_byte_is_a_miss(where: float, part: str) -> None:
    wanted = block(4, page_bytes=3333)
    bounds = {"header": (0, 200), "padding": (200, 4096), "payload": (4096, 4096 + 3 * 3333)}
    first, end = bounds[part]
    with tempfile.TemporaryDirectory() as root, DiskStore(Path(root)) as store:
        wanted.write_to(store)
        _flipped(wanted.file_in(store), first + int(where * (end - first)))
        _is_a_miss(store, wanted)


@pytest.mark.parametrize("size_bytes", [0, 19, 4095, 4096, 4096 + 2999, 4096 + 3001])
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


# -- the header


@pytest.fixture
def encoded() -> bytes:
    key = block(1).key._replace(hash=bytes(range(16)))
    return encode_header(new_header(key, 1000, (1, 2, (1 << 64) - 1), bytes(16)))


def test_the_form_is_what_it_was(encoded: bytes) -> None:
    assert encoded[:20] == b"kvfblock" + struct.pack("<III", 2, ALIGNMENT, 128)
    assert xxhash.xxh3_64_intdigest(encoded) == 14231727065725489589
    assert announced_bytes(encoded) == len(encoded)
    key = block(1).key
    assert str(folder_of(key)) == f"7/{LAYOUT}-{IDENTITY}/main-3/{key.hash.hex()[:2]}"
    assert namespace_of(folder_of(key)) == key.namespace


@pytest.mark.parametrize(
    ("position", "value", "why"),
    [
        (0, b"KVFBLOCK", "does not begin"),
        (8, struct.pack("<I", 1), "format 1, not 2"),
        (12, struct.pack("<I", 0), "a header of 0 bytes"),
        (12, struct.pack("<I", 1 << 30), "a header of"),
        (12, struct.pack("<I", 8192), "truncated"),
        (16, struct.pack("<I", 5), "description"),
        (20, b"\xc0", "description"),
    ],
)
def test_a_header_of_another_form_is_refused_whatever_its_checksum(
    encoded: bytes, position: int, value: bytes, why: str
) -> None:
    odd = (encoded[:position] + value + encoded[position + len(value) :])[:-8]
    with pytest.raises(NotABlockError, match=why):
        decode_header(odd + struct.pack("<Q", xxhash.xxh3_64_intdigest(odd)))


@pytest.mark.parametrize("pages", [1, 400, 4096])
def test_every_header_of_a_namespace_has_one_length(pages: int) -> None:
    key = block(1, pages=pages, page_bytes=1, tenant=(1 << 32) - 1).key
    longest = encode_header(new_header(key, 1 << 62, ((1 << 64) - 1,) * pages, bytes(16), "ä" * 1000))
    assert len(longest) == len(encode_header(new_header(key, 1, (0,) * pages, None)))
    assert len(longest) == file_bytes(key.namespace, 1) - pages
    found = decode_header(longest)
    assert (found.page_bytes, found.model, found.parent) == (1 << 62, "ä" * 256, bytes(16))
    with pytest.raises(NotABlockError, match=f"{pages + 1} digests"):
        decode_header(encode_header(new_header(key, 1000, (1,) * (pages + 1), None)))
