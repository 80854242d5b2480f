"""Weights are told by their content: every byte of it counts, and is read once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Barrier, Thread

import pytest

from kvferry.clients.model_weights import adapter_revision, weights_revision
from kvferry.protocol.errors import InvalidFieldError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where digests are kept: a folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvferry" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(MIB))
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return an adapter's folder."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "use_rslora": False}))
    (folder / "adapter_model.safetensors").write_bytes(bytes(MIB))
    return folder


def revision(folder: Path) -> str:
    """Return what tells the weights of a folder from others."""
    return weights_revision(str(folder), None, None)


def patch(file: Path, offset: int) -> None:
    """Change one byte of a file."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(b"\x01")


def until_kept(cache: Path, count: int, call: Callable[[], str]) -> str:
    """Call until so many files' digests are kept: those of files that have only just changed are not."""
    ends_at = time.monotonic() + 20
    while True:
        result = call()
        if sum(entry.stat().st_size > 0 for entry in cache.iterdir()) == count:
            return result
        assert time.monotonic() < ends_at


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with every file that is hashed."""
    hashed: list[object] = []
    original = hashlib.file_digest

    def digest(file: FileIO, name: str) -> object:
        hashed.append(file)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return hashed


def test_every_byte_of_a_file_counts(model: Path) -> None:
    before = revision(model)
    patch(model / "model.safetensors", 3 * MIB // 10)  # in no sample of beginning, middle and end
    assert revision(model) != before


def test_equal_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for file in model.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert revision(tmp_path / "snapshot") == revision(model)


def test_code_of_a_model_counts(model: Path) -> None:
    before = revision(model)
    (model / "modeling_own.py").write_text("scale = 2")
    assert revision(model) != before


def test_every_part_of_a_split_file_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = revision(parts[0])
    patch(parts[1], 0)
    assert revision(parts[0]) != before


def test_a_file_is_hashed_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = until_kept(cache, 2, lambda: revision(model))
    hashed = count_hashes(monkeypatch)
    assert (revision(model), hashed) == (first, [])
    patch(model / "model.safetensors", 5)
    assert revision(model) != first
    assert len(hashed) == 1


def test_who_comes_second_waits_for_the_digest(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ranks = model / "model.safetensors", 4
    until_kept(cache, 1, lambda: revision(file))
    for entry in cache.iterdir():
        entry.unlink()
    all_there, hashed, hashing = Barrier(ranks + 1), count_hashes(monkeypatch), hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *told: (all_there.wait(20), hashing(*told))[1])
    lock = fcntl.flock

    def arrive(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            Thread(target=all_there.wait, args=[20]).start()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", arrive)
    with ThreadPoolExecutor(ranks) as threads:
        assert len({*threads.map(revision, [file] * ranks)}) == 1
    assert len(hashed) == 1


def test_a_file_of_equal_size_and_time_is_hashed_again(model: Path, cache: Path) -> None:
    file = model / "model.safetensors"
    before, times = until_kept(cache, 2, lambda: revision(model)), file.stat()
    patch(file, 3 * MIB // 10)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as tar and rsync do
    assert revision(model) != before


@pytest.mark.parametrize("damage", [b"", b"\0" * 80, b"\xff" * 80], ids=["cut", "zeros", "ones"])
def test_a_damaged_entry_is_not_believed(model: Path, cache: Path, damage: bytes) -> None:
    before = until_kept(cache, 2, lambda: revision(model))
    for entry in cache.iterdir():
        entry.write_bytes(damage or entry.read_bytes()[:-1])
    assert revision(model) == before


def test_a_cache_that_others_may_write_is_not_used(model: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert revision(model)
    assert not list(cache.iterdir())


def test_entries_are_their_owners_alone(model: Path, cache: Path) -> None:
    until_kept(cache, 2, lambda: revision(model))
    assert {entry.stat().st_mode & 0o777 for entry in cache.iterdir()} == {0o600}


def test_without_a_cache_the_revision_is_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = revision(model)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert revision(model) == before


def test_a_file_that_changes_meanwhile_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hashlib.file_digest

    def digest(file: FileIO, name: str) -> object:
        patch(model / "model.safetensors", 7)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    with pytest.raises(InvalidFieldError, match=r"model\.safetensors.*changed"):
        revision(model)


@pytest.mark.parametrize(
    "changed", [{"lora_alpha": 32}, {"use_rslora": True}, {"layers_to_transform": [1]}], ids=lambda one: next(iter(one))
)
def test_every_setting_of_an_adapter_counts(adapter: Path, changed: dict[str, object]) -> None:
    before = adapter_revision(str(adapter))
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    assert adapter_revision(str(adapter)) != before


def test_every_byte_of_an_adapter_counts(adapter: Path) -> None:
    before = adapter_revision(str(adapter))
    patch(adapter / "adapter_model.safetensors", 3 * MIB // 10)
    assert adapter_revision(str(adapter)) != before


def test_an_adapter_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="adapter"):
        adapter_revision(str(tmp_path / "none"))
