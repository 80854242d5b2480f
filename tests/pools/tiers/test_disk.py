"""The files of the disk tier: whole or not there."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.tiers import disk
from kvferry.pools.tiers.block_file import LOCK_FILE, DiskFailedError, DiskFullError, MissingBlockError, file_bytes
from kvferry.pools.tiers.disk import DiskStore, Fsync
from kvferry.protocol.errors import ConfigError
from tests.kit.disk_blocks import Block, block, files_under, read, written


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path) as store:
        yield store


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
    spaces = wanted.key.namespace._replace(space="../x"), wanted.key.namespace._replace(layout_digest="..")
    for odd in (*(wanted.key._replace(namespace=one) for one in spaces), wanted.key._replace(hash=b"short")):
        with pytest.raises(ValueError, match=r"not a valid folder name|a hash"):
            written(store, odd, wanted.buffers, wanted.digests)


@pytest.mark.parametrize("fsync", ["never", "interval", "block"])
def test_an_unfinished_write_leaves_the_block_that_was_there(tmp_path: Path, fsync: Fsync) -> None:
    with DiskStore(tmp_path, fsync) as store:
        check_unfinished_write(store)


def check_unfinished_write(store: DiskStore) -> None:
    before = block(page_bytes=500)
    after = before._replace(pages=[bytes(500)] * 3)
    before.write_to(store)
    with store.begin_write(after.key, after.buffers, after.digests) as writer:
        assert writer.step()
        assert read(store, before) == before.pages
        writer.finish()
    assert read(store, after) == after.pages
    assert len(files_under(store.root)) == 1
    longer = before._replace(pages=[bytes(700)] * 3)
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
    with pytest.raises(MissingBlockError):
        read(store, wanted)


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


def test_what_an_interval_cannot_write_out_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path, "interval") as store:
        block().write_to(store)
        monkeypatch.setattr(os, "fdatasync", _fails)
        with pytest.raises(DiskFailedError):
            store.sync_dirty()
        assert files_under(tmp_path) == []
        assert store.take_removed() == [block().key]
        assert store.take_removed() == []
        assert store.sync_dirty() == 0


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
        assert store.sync_dirty() == 0


def test_a_block_that_has_its_name_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as store:
        monkeypatch.setattr(os, "dup", _fails)  # no descriptor is left to drop it from the page cache by
        block().write_to(store)
        assert len(files_under(tmp_path)) == 1


def test_an_error_of_the_disk_while_reading_is_no_damage(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = block()
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
    with DiskStore(tmp_path):
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


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


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
