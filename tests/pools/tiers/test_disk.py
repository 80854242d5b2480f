"""The files of the disk tier: whole or not there."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.tiers import disk
from kvferry.pools.tiers.block_file import LOCK_FILE, DiskFailedError, MissingBlockError, file_bytes
from kvferry.pools.tiers.disk import DiskStore, Fsync
from kvferry.protocol.errors import ConfigError
from tests.kit.disk_blocks import Block, block, files_under, read, written

POLICIES: tuple[Fsync, ...] = ("never", "interval", "block")


@pytest.fixture(params=POLICIES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path, request.param) as store:
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


def test_very_many_pages_take_several_calls(store: DiskStore) -> None:
    wanted = block(1, pages=3000, page_bytes=3)
    wanted.write_to(store)
    assert read(store, wanted) == wanted.pages


def test_a_block_is_read_into_memory_that_others_map(store: DiskStore) -> None:
    wanted = block(2, page_bytes=4096)
    wanted.write_to(store)
    offsets = (8192, 0, 65536)
    with mmap.mmap(-1, 1 << 20) as arena:
        with memoryview(arena) as memory:
            buffers = [memory[at : at + 4096] for at in offsets]
            with store.begin_read(wanted.key, buffers) as reader:
                assert reader.step()
            for one in buffers:
                one.release()
        assert [arena[at : at + 4096] for at in offsets] == wanted.pages


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


def test_an_unfinished_write_leaves_the_block_that_was_there(store: DiskStore) -> None:
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


def test_a_reader_never_sees_half_of_a_replacement(tmp_path: Path) -> None:
    one = block(page_bytes=3000)
    other = one._replace(pages=[bytes([9]) * 3000] * 3)
    seen: list[list[bytes]] = []
    with DiskStore(tmp_path) as store:
        one.write_to(store)
        done = threading.Event()

        def reads() -> None:
            while not done.is_set():
                seen.append(read(store, one))

        thread = threading.Thread(target=reads)
        thread.start()
        for _ in range(100):
            other.write_to(store)
            one.write_to(store)
        done.set()
        thread.join()
    assert seen
    assert all(pages in (one.pages, other.pages) for pages in seen)
    assert store.counts.damaged == 0


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


def test_a_cleaner_of_old_files_lets_no_second_store_in(store: DiskStore) -> None:
    (store.root / LOCK_FILE).unlink()
    with pytest.raises(ConfigError, match="another daemon") as refused:
        DiskStore(store.root)
    assert refused.value.retryable


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


def test_never_asks_for_no_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as store:
        calls = Calls(monkeypatch)
        block().write_to(store)
        assert store.sync_dirty() == 0
        assert [what for what, _ in calls.seen] == ["rename"]


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


def test_the_page_cache_is_not_filled(tmp_path: Path, require: Any) -> None:  # noqa: ANN401 - see conftest
    require(_said_by("stat", "-f", "-c", "%T", tmp_path) != "tmpfs", "a file system that is not all page cache")
    wanted = block(page_bytes=1 << 20)
    with DiskStore(tmp_path, "block") as store:
        wanted.write_to(store)
        assert _cached_bytes(wanted.file_in(store)) == 0
        read(store, wanted)
        assert _cached_bytes(wanted.file_in(store)) == 0


def _cached_bytes(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, as fincore (util-linux) says."""
    return int(_said_by("fincore", "--bytes", "--noheadings", "--output", "RES", path))


def _said_by(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


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


def test_another_daemon_is_named(tmp_path: Path) -> None:
    with DiskStore(tmp_path):
        with pytest.raises(ConfigError, match=rf"another daemon \(pid {os.getpid()} on .+\)") as error:
            DiskStore(tmp_path)
        assert error.value.field == "tiers.disk.path"
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


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.close()
    store.close()
