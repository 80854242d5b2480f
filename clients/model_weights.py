"""Identifies a model's or an adapter's weights by their content, wherever they lie.

Every byte counts, and is read once: the user's cache folder keeps a digest for each file of weights. It is valid while
the file's device, inode, size and both times are the same. Processes that start at once share the work: the second one
at a file waits for its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from kvferry.protocol.errors import InvalidFieldError

WEIGHTS: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".py"}
"""Suffixes of the files on which the KV of a model depends; a repository's own code is such a file."""

CONFIGS: Final = {"config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "adapter_config.json"}

MOST_THREADS: Final = 8
"""A thread hashes as fast as a disk reads, or nearly so."""

_STATE: Final = struct.Struct("<QQqqq")
_DIGEST_BYTES: Final = 32
_CHECK_BYTES: Final = 8
_SECOND_NS: Final = 1_000_000_000
_CLOCK_NS: Final = 100_000_000
"""Two changes that are closer together may have the same time: the kernel's clock for files ticks each 1 to 10 ms."""


def weights_revision(model_path: str, revision: str | None, download_dir: str | None) -> str:
    """Return what tells these weights from others, wherever they lie.

    Of files it is a digest of their names and contents. Of a repository it is the commit of its files here, else its
    name and revision as told.

    Raises:
        InvalidFieldError: a file cannot be read, or changes while it is read.
    """
    path = Path(model_path)
    if path.exists():
        return _content(path, "model_path")
    config = _in_hub(model_path, "config.json", revision, download_dir)
    return config.parent.name if config else _joined([model_path.encode(), (revision or "").encode()])


def adapter_revision(path: str) -> str:
    """Return what tells an adapter from others: a digest of its weights and of all of its configuration.

    Args:
        path: its folder, or the name of a repository whose files are here.

    Raises:
        InvalidFieldError: it is not here, a file cannot be read, or changes while it is read.
    """
    folder = Path(path)
    if not folder.exists():
        config = _in_hub(path, "adapter_config.json", None, None)
        if config is None:
            raise InvalidFieldError(f"the adapter {path!r} is not on this host", field="adapter")
        folder = config.parent
    return _content(folder, "adapter")


def _in_hub(name: str, file: str, revision: str | None, cache_dir: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  of the engine

    with contextlib.suppress(ValueError):  # no name of a repository
        found = try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision)
        if isinstance(found, str):
            return Path(found)
    return None


def _content(path: Path, field: str) -> str:
    try:
        files = _files(path)
        with _cache_folder() as cache, ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
            digests = threads.map(partial(_file_digest, cache=cache, field=field), files)
            return _joined(
                part for file, digest in zip(files, digests, strict=True) for part in (file.name.encode(), digest)
            )
    except OSError as error:
        raise InvalidFieldError(f"{path} cannot be read: {error}", field=field) from error


def _files(path: Path) -> list[Path]:
    """Return a folder's files of weights, or a file with the others of its split."""
    if path.is_dir():
        return sorted(
            file for file in path.iterdir() if (file.suffix in WEIGHTS or file.name in CONFIGS) and file.is_file()
        )
    split = re.sub(r"\d{5}(?=-of-\d{5})", "", path.name)
    if split == path.name:
        return [path]
    return sorted(file for file in path.parent.iterdir() if re.sub(r"\d{5}(?=-of-\d{5})", "", file.name) == split)


def _joined(parts: Iterator[bytes] | list[bytes]) -> str:
    """Return a digest of parts, each with its length: no two lists give the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _file_digest(file: Path, *, cache: int | None, field: str) -> bytes:
    with file.open("rb", buffering=0) as opened:
        state = _state(opened.fileno())
        with _entry(cache, state) as entry:
            if entry is not None and (known := _kept(entry, state)) is not None:
                return known
            began_ns = time.time_ns()
            digest = hashlib.file_digest(opened, "sha256").digest()
            if _state(opened.fileno()) != state:
                raise InvalidFieldError(f"{file} changed while it was read: wait until it is written", field=field)
            if entry is not None and _is_told_by_time(state, began_ns):
                _keep(entry, state, digest)
            return digest


def _state(fd: int) -> bytes:
    found = os.fstat(fd)
    return _STATE.pack(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _is_told_by_time(state: bytes, began_ns: int) -> bool:
    """Return whether another content of the file would have another time.

    It would not where it changed only just now, and where times are of whole seconds: images that were made to be
    reproducible, and object stores, give the same inode and time to other content.
    """
    changed_ns: int = _STATE.unpack(state)[-1]
    return changed_ns % _SECOND_NS != 0 and changed_ns < began_ns - _CLOCK_NS


# -- what is kept


@contextlib.contextmanager
def _cache_folder() -> Iterator[int | None]:
    """Open the user's cache; None where there is none that only the user can write: files are hashed each time then."""
    fd = None
    with contextlib.suppress(OSError, RuntimeError):  # no home
        told = Path(os.environ.get("XDG_CACHE_HOME") or "")
        path = (told if told.is_absolute() else Path.home() / ".cache") / "kvferry" / "weights"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield fd if fd is not None and _is_own(fd) else None
    finally:
        if fd is not None:
            os.close(fd)


def _is_own(fd: int) -> bool:
    found = os.fstat(fd)
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def _entry(cache: int | None, state: bytes) -> Iterator[int | None]:
    """Open and lock what is kept of a file; one for each inode, so that it does not grow with every change."""
    fd = None
    if cache is not None:
        with contextlib.suppress(OSError):
            device, inode, *_ = _STATE.unpack(state)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(f"{device:x}-{inode:x}", flags, 0o600, dir_fd=cache)
            fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield fd
    finally:
        if fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # also of a fork that has it open
            os.close(fd)


def _kept(entry: int, state: bytes) -> bytes | None:
    with contextlib.suppress(OSError):
        kept = os.pread(entry, 4096, 0)
        digest = kept[len(state) : -_CHECK_BYTES]
        if _is_own(entry) and len(digest) == _DIGEST_BYTES and kept == _sealed(state, digest):
            return digest
    return None


def _keep(entry: int, state: bytes, digest: bytes) -> None:
    with contextlib.suppress(OSError):  # what is written in part has no seal
        os.ftruncate(entry, 0)
        os.pwrite(entry, _sealed(state, digest), 0)


def _sealed(state: bytes, digest: bytes) -> bytes:
    content = state + digest
    return content + hashlib.sha256(content).digest()[:_CHECK_BYTES]
