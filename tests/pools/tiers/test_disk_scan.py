"""What a store finds after a restart."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.pools.tiers.block_file import LOCK_FILE, MissingBlockError
from kvferry.pools.tiers.disk import DiskStore
from tests.kit.disk_blocks import Block, block, files_under, read, reopened, scanned


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path) as store:
        yield store


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
