"""Files that are not what was written are a miss and gone; what a store finds after a restart."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.tiers.block_file import (
    ALIGNMENT,
    LOCK_FILE,
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
from tests.kit.disk_blocks import IDENTITY, LAYOUT, Block, block, files_under, read, reopened, scanned, written


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


def _used_at(store: DiskStore, one: Block, second: int) -> None:
    os.utime(one.file_in(store), ns=(0, second * 10**9))


def test_whole_blocks_are_found_those_used_longest_ago_first(store: DiskStore) -> None:
    blocks = [block(seed, pages=seed % 3 + 1, parent=bytes([seed]) * 16 if seed else None) for seed in range(20)]
    for second, one in enumerate(reversed(blocks)):
        one.write_to(store)
        _used_at(store, one, second)
    with reopened(store) as after:
        found = scanned(after)
        assert [one.header.key for one in found] == [one.key for one in reversed(blocks)]
        assert found[0].used_ns == 0
        for got, wanted in zip(reversed(found), blocks, strict=True):
            header = got.header
            assert (header.parent, list(header.digests), header.page_bytes) == (wanted.parent, wanted.digests, 1000)
            assert got.size_bytes == wanted.file_in(after).stat().st_size
            assert read(after, wanted) == wanted.pages
    with reopened(after) as last:
        assert all(one.used_ns > 20 * 10**9 for one in scanned(last)), "what is read counts as used"


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("steps_before", range(0, 14, 3))
def test_a_scan_waits_for_descriptors(store: DiskStore, steps_before: int) -> None:
    """Without any for some steps, wherever in the scan: it finds every block all the same."""
    blocks = [block(seed) for seed in range(5)]
    for one in blocks:
        one.write_to(store)
    with reopened(store) as after:
        steps = after.scan(files_a_step=2)
        found = [one for step in itertools.islice(steps, steps_before) for one in step]
        with no_descriptor_left():
            found += [one for step in itertools.islice(steps, 2) for one in step]
        found += [one for step in steps for one in step]
        assert sorted(one.header.key for one in found) == sorted(one.key for one in blocks)
        assert after.counts.unreadable == 0


def test_writers_and_readers_go_on_while_a_scan_runs(store: DiskStore) -> None:
    old, replaced, removed, new = (block(seed) for seed in range(4))
    for one in (old, replaced, removed):
        one.write_to(store)
    with reopened(store) as after:
        steps = after.scan()
        with after.begin_write(new.key, new.buffers, new.digests) as writer:
            writer.step(100)
            next(steps)
            for _ in range(2):
                next(steps)
            replaced.write_to(after)
            after.remove(removed.key)
            found = [one.header.key for step in steps for one in step]
            assert found == [old.key]
            while not writer.step():
                pass
            writer.finish()
        assert len(files_under(after.root)) == 3
        assert read(after, new) == new.pages
        assert after.counts.leftovers == 0


def test_a_daemon_that_ends_amid_a_write_leaves_no_block(store: DiskStore, tmp_path: Path) -> None:
    block(1).write_to(store)
    wanted, left = block(2, page_bytes=100_000), tmp_path.with_name(f"{tmp_path.name}-left")
    with store.begin_write(wanted.key, wanted.buffers, wanted.digests) as writer:
        writer.step(150_000)
        shutil.copytree(tmp_path, left, ignore=shutil.ignore_patterns(LOCK_FILE))
    assert len(files_under(left)) == 2
    left.chmod(0o700)
    with DiskStore(left) as after:
        assert [found.header.key for found in scanned(after)] == [block(1).key]
        with pytest.raises(MissingBlockError):
            read(after, wanted)
        assert after.counts.leftovers == 1
        assert len(files_under(left)) == 1


def test_damaged_files_are_removed(store: DiskStore) -> None:
    blocks = [block(seed) for seed in range(6)]
    for one in blocks:
        one.write_to(store)
    os.truncate(blocks[5].file_in(store), 8000)
    os.truncate(blocks[0].file_in(store), 5000)
    os.truncate(blocks[1].file_in(store), 0)
    blocks[2].file_in(store).write_bytes(b"x" * 7096)
    whole = blocks[3].file_in(store).read_bytes()
    blocks[3].file_in(store).write_bytes(whole[:300] + b"\1" + whole[301:])
    theirs = block(4, tenant=8).file_in(store)
    theirs.parent.mkdir(parents=True)
    shutil.copy(blocks[4].file_in(store), theirs)
    with reopened(store) as after:
        assert [found.header.key for found in scanned(after)] == [blocks[4].key], "not under another name, too"
        assert after.counts.damaged == 6
        assert len(files_under(after.root)) == 1
        assert after.counts.unreadable == 0


def test_what_is_not_ours_is_left_alone(store: DiskStore) -> None:
    one = block(1)
    one.write_to(store)
    folder = one.file_in(store).parent
    other = "00" if folder.name != "00" else "11"
    foreign = [
        store.root / "README",
        store.root / "lost+found" / "x",
        store.root / "007" / "x",
        folder.parent / "notes.txt",
        folder / "notes.txt",
        folder / (one.key.hash.hex() + ".bak"),
        folder / (other + "0" * 30),
        folder / ("0" * 32 + ".part"),
        folder.parent.parent / "main-0" / "x",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    outside = store.root.parent / f"{store.root.name}-outside"
    shutil.copytree(folder, outside)
    kept = files_under(outside)
    (folder.parent / other).symlink_to(outside)
    (folder / (folder.name + "f" * 30)).symlink_to(one.file_in(store))
    with reopened(store) as after:
        assert [found.header.key for found in scanned(after)] == [one.key]
        assert after.counts.foreign == len(foreign) + 2
        assert (after.counts.damaged, after.counts.leftovers) == (0, 0)
    assert all(path.read_text() == "mine" for path in foreign)
    assert files_under(outside) == kept


def test_what_cannot_be_read_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require: Callable[[object, str], None]
) -> None:
    require(os.geteuid() == 0, "root, to become a user who may not read")
    monkeypatch.chdir(tmp_path)  # that user cannot come here from above
    hidden, unreadable = block(1, tenant=1), block(2, tenant=2)
    with DiskStore(Path()) as store:
        for one in (hidden, unreadable):
            one.write_to(store)
    with DiskStore(Path()) as store:
        for path in (tmp_path, *tmp_path.rglob("*")):
            os.chown(path, 12345, -1)
        hidden.file_in(store).parent.chmod(0)
        unreadable.file_in(store).chmod(0)
        os.seteuid(12345)
        try:
            assert scanned(store) == []
        finally:
            os.seteuid(0)
        assert store.counts.unreadable == 2
        assert store.counts.damaged == 0
    assert len(files_under(tmp_path)) == 2
