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
from typing import Final

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
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(MIB))
    return folder


def revision(folder: Path) -> str:
    return weights_revision(str(folder), None, None)


def patch(file: Path, offset: int) -> None:
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


def lora(**settings: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16} | settings))


IN_NO_SAMPLE: Final = 3 * MIB // 10
"""Of beginning, middle and end."""
COUNTS: Final[dict[str, Callable[[Path], object]]] = {
    "a byte": lambda folder: patch(folder / "model.safetensors", IN_NO_SAMPLE),
    "a model's code": lambda folder: (folder / "modeling_own.py").write_text("scale = 2"),
    "a later part of a split file": lambda folder: patch(folder / "model-00002-of-00002.gguf", 0),
    "a byte of an adapter": lambda folder: patch(folder / "adapter_model.safetensors", IN_NO_SAMPLE),
    "a setting of an adapter": lora(lora_alpha=32),
    "one more setting": lora(layers_to_transform=[1]),
}


@pytest.mark.parametrize("what", COUNTS)
def test_all_of_it_counts(model: Path, what: str) -> None:
    lora()(model)
    (model / "adapter_model.safetensors").write_bytes(bytes(MIB))
    parts = [model / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")

    def told() -> str:
        if "adapter" in what or "setting" in what:
            return adapter_revision(str(model))
        return revision(parts[0] if "split" in what else model)

    before = told()
    COUNTS[what](model)
    assert told() != before


def test_equal_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for file in model.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert revision(tmp_path / "snapshot") == revision(model)


def test_a_file_is_hashed_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = until_kept(cache, 2, lambda: revision(model))
    hashed = count_hashes(monkeypatch)
    assert (revision(model), hashed) == (first, [])
    assert {entry.stat().st_mode & 0o777 for entry in cache.iterdir()} == {0o600}
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


def test_a_file_that_changes_meanwhile_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hashlib.file_digest

    def digest(file: FileIO, name: str) -> object:
        patch(model / "model.safetensors", 7)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    with pytest.raises(InvalidFieldError, match=r"model\.safetensors.*changed"):
        revision(model)


def test_an_adapter_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="adapter"):
        adapter_revision(str(tmp_path / "none"))


def test_the_digest_of_a_file_that_changed_only_just_now_is_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another content of it could have the same time."""
    file = model / "model.safetensors"
    monkeypatch.setattr(time, "time_ns", lambda: file.stat().st_ctime_ns)
    assert revision(file)
    assert [entry.stat().st_size for entry in cache.iterdir()] == [0]
