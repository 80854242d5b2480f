"""No space is no block, and no harm to those that are there: on a real file system that is full, and at a limit."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.pools.tiers.block_file import DiskFailedError, DiskFullError, MissingBlockError
from kvferry.pools.tiers.disk import DiskStore
from kvferry.protocol.errors import ConfigError
from tests.kit.disk_blocks import block, files_under, read

SIZE_BYTES = 1 << 20


@pytest.fixture
def small(tmp_path: Path, require: Callable[[object, str], None]) -> Iterator[Path]:
    """Yield the root of a file system of its own, 1 MiB large and with few files' worth of names."""
    require(os.geteuid() == 0, "root, to mount a small file system")
    root = tmp_path / "small"
    root.mkdir()
    options = f"size={SIZE_BYTES},nr_inodes=40,mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvferry-test", root], check=False)
    require(mounted.returncode == 0, "the right to mount a file system")
    yield root
    left = subprocess.run(["umount", root], check=False, capture_output=True, text=True)
    if left.returncode:  # or it would be in the way of whoever removes the folder
        subprocess.run(["umount", "--lazy", root], check=True)
        pytest.fail(f"something of it was left open: {left.stderr}")


def test_a_full_disk_takes_no_block_and_keeps_the_others(small: Path) -> None:
    with DiskStore(small) as store:
        kept = block(1, page_bytes=200_000)
        kept.write_to(store)
        late = block(2, page_bytes=200_000)
        with pytest.raises(DiskFullError, match="No space left"):
            late.write_to(store)
        assert len(files_under(small)) == 1
        assert read(store, kept) == kept.pages
        with pytest.raises(MissingBlockError):
            read(store, late)
        store.remove(kept.key)
        late.write_to(store)
        assert read(store, late) == late.pages


def test_a_replacement_that_does_not_fit_leaves_what_was_there(small: Path) -> None:
    with DiskStore(small) as store:
        kept = block(1, page_bytes=200_000)
        kept.write_to(store)
        with pytest.raises(DiskFullError):
            kept._replace(pages=[bytes(200_000)] * 3).write_to(store)
        assert read(store, kept) == kept.pages


def test_no_name_left_is_a_full_disk(small: Path) -> None:
    with DiskStore(small) as store:
        assert not all(_is_taken(store, seed) for seed in range(40))
        assert 0 < len(files_under(small)) < 40


def _is_taken(store: DiskStore, seed: int) -> bool:
    try:
        block(seed, page_bytes=10).write_to(store)
    except DiskFullError:
        return False
    return True


def test_a_disk_that_may_only_be_read_is_named(small: Path) -> None:
    wanted = block(1)
    with DiskStore(small) as store:
        wanted.write_to(store)
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(ConfigError, match="cannot be read and written") as error:
        DiskStore(small)
    assert error.value.field == "tiers.disk.path"


@pytest.fixture
def file_limit() -> Iterator[int]:
    """Let no file become larger than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_a_files_size_is_a_full_disk(tmp_path: Path, file_limit: int) -> None:
    with DiskStore(tmp_path) as store:
        with pytest.raises(DiskFullError, match="File too large"):
            block(1, page_bytes=file_limit).write_to(store)
        assert files_under(tmp_path) == []
        block(1, pages=1, page_bytes=file_limit - 4096).write_to(store)
        assert len(files_under(tmp_path)) == 1


def test_no_more_open_files_is_a_failure(tmp_path: Path) -> None:
    wanted = block(1)
    with DiskStore(tmp_path) as store:
        wanted.write_to(store)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            with pytest.raises(DiskFailedError, match="Too many open files"):
                read(store, wanted)
            with pytest.raises(DiskFailedError, match="Too many open files"):
                wanted.write_to(store)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert read(store, wanted) == wanted.pages
        assert store.counts.damaged == 0
