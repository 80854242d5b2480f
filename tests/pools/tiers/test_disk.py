"""The files of the disk tier: whole or not there, a miss where they are not what was written, found after a restart."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.tiers import disk
from kvferry.pools.tiers.block_file import (
    ALIGNMENT,
    LOCK_FILE,
    DamagedBlockError,
    DiskFailedError,
    DiskFullError,
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
from kvferry.pools.tiers.disk import DiskStore, Fsync
from kvferry.protocol.errors import ConfigError
from tests.kit.disk_blocks import IDENTITY, LAYOUT, Block, block, files_under, read, reopened, scanned, written


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path) as store:
        yield store


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def lowest_free_descriptor() -> int:
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


@given(
    pages=st.integers(1, 5),
    page_bytes=st.integers(1, 64 << 10),
    write_step=st.integers(500, 200_000),
    read_step=st.integers(500, 200_000),
    has_parent=st.booleans(),
    gives_digests=st.booleans(),
)
def test_what_is_written_is_read(
    *, pages: int, page_bytes: int, write_step: int, read_step: int, has_parent: bool, gives_digests: bool
) -> None:
    wanted = block(page_bytes, pages, page_bytes, parent=bytes(range(16)) if has_parent else None)
    with tempfile.TemporaryDirectory() as root, DiskStore(Path(root)) as store:
        digests = wanted.digests if gives_digests else []
        with store.begin_write(wanted.key, wanted.buffers, digests, wanted.parent) as writer:
            steps = 1
            while not writer.step(write_step):
                steps += 1
            assert steps == -(-pages * page_bytes // write_step)
            size_bytes = writer.finish()
        got = [bytearray(page_bytes) for _ in range(pages)]
        with store.begin_read(wanted.key, [memoryview(page) for page in got]) as reader:
            while not reader.step(read_step):
                pass
            assert reader.header.parent == wanted.parent
            assert reader.header.digests == tuple(wanted.digests)
        assert got == wanted.pages
        path = wanted.file_in(store)
        assert path.stat().st_size == size_bytes == file_bytes(wanted.key.namespace, page_bytes)


def missed(store: DiskStore, wanted: Block) -> None:
    with pytest.raises(MissingBlockError):
        read(store, wanted)


def test_no_block_or_a_link_or_a_pipe_in_place_of_one_is_a_miss(store: DiskStore) -> None:
    wanted, other = block(1), block(2)
    other.write_to(store)
    path = wanted.file_in(store)
    path.parent.mkdir(exist_ok=True)
    missed(store, wanted)
    path.symlink_to(other.file_in(store))
    missed(store, wanted)
    path.unlink()
    os.mkfifo(path)
    missed(store, wanted)
    assert other.file_in(store).exists()
    assert store.counts.damaged == 0


def test_names_cannot_leave_the_root(store: DiskStore) -> None:
    wanted = block()
    spaces = wanted.key.namespace._replace(group="../x"), wanted.key.namespace._replace(layout_digest="..")
    for odd in (*(wanted.key._replace(namespace=one) for one in spaces), wanted.key._replace(hash=b"short")):
        with pytest.raises(ValueError, match=r"not a valid folder name|a hash"):
            written(store, odd, wanted.buffers, wanted.digests)


@pytest.mark.parametrize("fsync", ["never", "interval", "block"])
def test_an_unfinished_write_leaves_the_block_that_was_there(tmp_path: Path, fsync: Fsync) -> None:
    before = block(page_bytes=500)
    after, longer = before._replace(pages=[bytes(500)] * 3), before._replace(pages=[bytes(700)] * 3)
    with DiskStore(tmp_path, fsync) as store:
        before.write_to(store)
        with store.begin_write(after.key, after.buffers, after.digests) as writer:
            assert writer.step()
            assert read(store, before) == before.pages
            writer.finish()
        assert read(store, after) == after.pages
        assert len(files_under(store.root)) == 1
        assert longer.write_to(store) == longer.file_in(store).stat().st_size


def test_what_is_removed_is_gone_but_for_who_reads_it(store: DiskStore) -> None:
    wanted = block(page_bytes=5000)
    wanted.write_to(store)
    got = [bytearray(5000) for _ in range(3)]
    with store.begin_read(wanted.key, [memoryview(page) for page in got]) as reader:
        reader.step(100)
        store.remove(wanted.key)
        while not reader.step(100):
            pass
    assert got == wanted.pages
    store.remove(wanted.key)
    assert files_under(store.root) == []
    missed(store, wanted)


def test_only_the_daemon_can_read_what_is_kept(store: DiskStore) -> None:
    before = os.umask(0)
    try:
        block().write_to(store)
    finally:
        os.umask(before)
    for one in store.root.rglob("*"):
        assert stat.S_IMODE(one.stat().st_mode) == (0o700 if one.is_dir() else 0o600), one
    assert stat.S_IMODE((store.root / LOCK_FILE).stat().st_mode) == 0o600


class Calls:
    """Notes the calls that make a file durable or give it its name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        for name in ("fdatasync", "fsync"):
            patch.setattr(os, name, self._noting(name, getattr(os, name)))
        rename = Path.rename

        def noted_rename(path: Path, to: Path) -> Path:
            self.seen.append(("rename", to.name))
            return rename(path, to)

        patch.setattr(Path, "rename", noted_rename)

    def _noting(self, name: str, call: Any) -> Any:  # noqa: ANN401 - whatever os has
        def noted(fd: int) -> None:
            self.seen.append((name, Path(f"/proc/self/fd/{fd}").readlink().name))
            call(fd)

        return noted


def test_stored_means_on_the_disk_with_the_policy_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = block()
    name = wanted.key.hash.hex()
    with DiskStore(tmp_path, "block") as store:
        calls = Calls(monkeypatch)
        wanted.write_to(store)
        made, (synced, renamed, listed) = calls.seen[:-3], calls.seen[-3:]
        assert [what for what, _ in made] == ["fsync"] * 4  # each new folder, in the one above it
        assert made[0][1] == tmp_path.name
        assert (synced[0], synced[1].startswith(name)) == ("fdatasync", True)
        assert (renamed, listed) == (("rename", name), ("fsync", name[:2]))
        assert store.sync_dirty() == 0
        assert len(calls.seen) == 7


def test_an_interval_writes_out_what_came_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block(seed) for seed in range(5)]
    with DiskStore(tmp_path, "interval") as store:
        for one in blocks:
            one.write_to(store)
        store.remove(blocks[0].key)
        blocks[1].file_in(store).unlink()
        calls = Calls(monkeypatch)
        assert store.sync_dirty(max_files=3) == 1
        assert [what for what, _ in calls.seen] == ["fdatasync"] * 2
        assert store.sync_dirty() == 0
        assert [name for what, name in calls.seen if what == "fdatasync"] == [one.key.hash.hex() for one in blocks[2:]]
        assert len({name for what, name in calls.seen if what == "fsync"}) == 4 + len(
            {one.key.hash[0] for one in blocks}
        )
        calls.seen.clear()
        assert store.sync_dirty() == 0
        assert calls.seen == []


def _fails(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_what_the_disk_did_not_take_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    wanted = block()
    with DiskStore(tmp_path, "block") as store:
        wanted.write_to(store)
        monkeypatch.setattr(os, call, _fails)
        with pytest.raises(DiskFailedError, match="Input/output error"):
            wanted._replace(pages=[bytes(1000)] * 3).write_to(store)
        monkeypatch.undo()
        assert len(files_under(tmp_path)) == (1 if call == "fdatasync" else 0)


def test_what_an_interval_cannot_open_is_written_out_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path, "interval") as store:
        written = [block(seed=1), block(seed=2)]
        for one in written:
            one.write_to(store)
        monkeypatch.setattr(os, "open", _fails)
        with pytest.raises(DiskFailedError):
            store.sync_dirty()
        monkeypatch.undo()
        assert len(files_under(tmp_path)) == len(written)
        assert store.take_removed() == []
        assert store.sync_dirty(max_files=1) == 1, "both wait still, and one is left"
        monkeypatch.setattr(os, "fdatasync", _fails)  # what cannot be written out is not kept
        with pytest.raises(DiskFailedError):
            store.sync_dirty()
        [removed] = store.take_removed()
        assert removed in {one.key for one in written}
        assert store.take_removed() == []
        assert store.sync_dirty() == 0
        assert len(files_under(tmp_path)) == 1


def test_a_block_that_has_its_name_is_stored_and_an_error_while_reading_is_no_damage(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = block()
    monkeypatch.setattr(os, "dup", _fails)  # no descriptor is left to drop it from the page cache by
    wanted.write_to(store)
    monkeypatch.setattr(os, "preadv", _fails)
    with pytest.raises(DiskFailedError):
        read(store, wanted)
    monkeypatch.undo()
    assert read(store, wanted) == wanted.pages


def test_files_written_lately_are_held_open_and_no_more(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        blocks = [block(seed, pages=1, page_bytes=10) for seed in range(disk.COOLING_FILES + 5)]
        for one in blocks:
            one.write_to(store)
        assert len(_open_under(tmp_path)) == disk.COOLING_FILES + 1  # and the lock
        store.remove(blocks[-1].key)
        blocks[-2].write_to(store)
        open_files = _open_under(tmp_path)
        assert len(open_files) == disk.COOLING_FILES
        assert not [one for one in open_files if one.name.endswith("(deleted)")]
    assert _open_under(tmp_path) == []


def _open_under(root: Path) -> list[Path]:
    links = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            links.append(one.readlink())
        except FileNotFoundError:
            continue  # the listing's own
    return [link for link in links if root in link.parents]


def test_another_daemon_is_kept_out_also_where_a_cleaner_of_old_files_was(tmp_path: Path) -> None:
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    with DiskStore(link):
        for _ in range(2):
            with pytest.raises(ConfigError, match="another daemon") as error:
                DiskStore(tmp_path)
            assert (error.value.field, error.value.retryable) == ("tiers.disk.path", True)
            (tmp_path / LOCK_FILE).unlink(missing_ok=True)
    with DiskStore(tmp_path):
        pass


def test_a_root_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, why in (("missing", "No such file"), ("file", "not a directory"), ("open", "written by others")):
        with pytest.raises(ConfigError, match=why) as error:
            DiskStore(tmp_path / name)
        assert error.value.field == "tiers.disk.path"
        assert error.value.retryable is (name == "missing"), "what it is on may be mounted yet"


# -- files that are not what was written


def flipped(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def is_a_miss(store: DiskStore, wanted: Block) -> None:
    damaged = store.counts.damaged
    with pytest.raises(DamagedBlockError):
        read(store, wanted)
    assert store.counts.damaged == damaged + 1
    assert not wanted.file_in(store).exists()
    missed(store, wanted)


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
        flipped(wanted.file_in(store), first + int(where * (end - first)))
        is_a_miss(store, wanted)


def in_place_of(store: DiskStore, wanted: Block, other: Block) -> None:
    other.write_to(store)
    path = wanted.file_in(store)
    path.parent.mkdir(parents=True, exist_ok=True)
    other.file_in(store).rename(path)


def cut_to(size_bytes: int) -> Callable[[DiskStore, Path], None]:
    return lambda _, path: os.truncate(path, size_bytes)


WANTED = block(6)
DAMAGE: dict[str, Callable[[DiskStore, Path], object]] = {
    **{f"{size} bytes": cut_to(size) for size in (0, 19, 4095, 4096, 4096 + 2999, 4096 + 3001, 8000)},
    "no header": lambda _, path: path.write_bytes(b"x" * 7096),
    "a header's byte": lambda _, path: flipped(path, 100),
    "padding": lambda _, path: flipped(path, 300),
    "another block's file": lambda store, _: in_place_of(store, WANTED, block(10)),
    "another tenant's file": lambda store, _: in_place_of(store, WANTED, block(6, tenant=8)),
}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_is_not_what_was_written_is_a_miss_and_gone(store: DiskStore, how: str, *, scan: bool) -> None:
    block(1).write_to(store)
    WANTED.write_to(store)
    DAMAGE[how](store, WANTED.file_in(store))
    if not scan:
        is_a_miss(store, WANTED)
        return
    with reopened(store) as after:
        assert [found.header.key for found in scanned(after)] == [block(1).key]
        assert (after.counts.damaged, after.counts.unreadable) == (1, 0)
        assert len(files_under(after.root)) == 1


def test_other_pages_and_wrong_checksums_are_a_miss(store: DiskStore) -> None:
    wanted = block(11)
    wanted.write_to(store)
    with pytest.raises(DamagedBlockError, match="it has 3 pages of 1000 bytes"):
        read(store, wanted._replace(pages=[bytes(999)] * 3))
    assert files_under(store.root) == []
    written(store, wanted.key, wanted.buffers, [xxhash.xxh3_64_intdigest(b"")] * 3)
    is_a_miss(store, wanted)


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


def test_a_replacement_survives_the_damage_of_what_was_before(store: DiskStore) -> None:
    wanted = block(13)
    wanted.write_to(store)
    flipped(wanted.file_in(store), -1)
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


# -- what a store finds after a restart


def test_whole_blocks_are_found_those_used_longest_ago_first(store: DiskStore) -> None:
    blocks = [block(seed, pages=seed % 3 + 1, parent=bytes([seed]) * 16 if seed else None) for seed in range(20)]
    for second, one in enumerate(reversed(blocks)):
        one.write_to(store)
        os.utime(one.file_in(store), ns=(0, second * 10**9))
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


@pytest.mark.parametrize("steps_before", range(0, 14, 3))
def test_a_scan_waits_for_descriptors(store: DiskStore, steps_before: int) -> None:
    """Without any for some steps, wherever in the scan: it finds every block all the same."""
    blocks = [block(seed) for seed in range(5)]
    for one in blocks:
        one.write_to(store)
    with reopened(store) as after:
        steps = after.scan(files_a_step=2)
        found = [one for step in itertools.islice(steps, steps_before) for one in step]
        with limited(resource.RLIMIT_NOFILE, lowest_free_descriptor()):
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


# -- no space is no block, and no harm to those that are there: on a real file system that is full, and at a limit


@pytest.fixture
def small(tmp_path: Path, require: Callable[[object, str], None]) -> Iterator[Path]:
    """Yield the root of a file system of its own, 1 MiB large."""
    require(os.geteuid() == 0, "root, to mount a small file system")
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "kvferry-test", root], check=False)
    require(mounted.returncode == 0, "the right to mount a file system")
    yield root
    left = subprocess.run(["umount", root], check=False, capture_output=True, text=True)
    if left.returncode:  # or it would be in the way of whoever removes the folder
        subprocess.run(["umount", "--lazy", root], check=True)
        pytest.fail(f"something of it was left open: {left.stderr}")


def test_a_full_disk_takes_no_block_and_keeps_the_others(small: Path) -> None:
    kept, late = block(1, page_bytes=200_000), block(2, page_bytes=200_000)
    with DiskStore(small) as store:
        kept.write_to(store)
        for one in (late, kept._replace(pages=[bytes(200_000)] * 3)):
            with pytest.raises(DiskFullError, match="No space left"):
                one.write_to(store)
        assert len(files_under(small)) == 1
        assert read(store, kept) == kept.pages
        missed(store, late)
        store.remove(kept.key)
        late.write_to(store)
        assert read(store, late) == late.pages
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(ConfigError, match="cannot be read and written"):
        DiskStore(small)


def test_a_limit_on_a_files_size_is_a_full_disk_and_one_on_open_files_a_failure(store: DiskStore) -> None:
    wanted = block(1, pages=1, page_bytes=100_000 - 4096)
    with limited(resource.RLIMIT_FSIZE, 100_000):
        with pytest.raises(DiskFullError, match="File too large"):
            block(1, page_bytes=100_000).write_to(store)
        assert files_under(store.root) == []
        wanted.write_to(store)
    with limited(resource.RLIMIT_NOFILE, 3):
        with pytest.raises(DiskFailedError, match="Too many open files"):
            read(store, wanted)
        with pytest.raises(DiskFailedError, match="Too many open files"):
            wanted.write_to(store)
    assert read(store, wanted) == wanted.pages
    assert store.counts.damaged == 0
