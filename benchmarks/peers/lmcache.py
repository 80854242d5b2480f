"""LMCache's server in CPU mode and its own client, each in a process of LMCache's environment: the prefix cache's peer.

``make peers`` makes the environment. The client is the one of LMCache's own server benchmark, which registers its pages
as shared memory, so that the server copies them itself, as our daemon does.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec

from benchmarks.processes import free_port, running

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".peers" / "lmcache"
"""Where ``make peers`` installs it."""

DRIVER = Path(__file__).with_name("lmcache_driver.py")
START_TIMEOUT_S = 240.0
UNTRACKED = {"LMCACHE_TRACK_USAGE": "false"}
Operation = Literal["store", "lookup", "retrieve"]


class LMCacheError(RuntimeError):
    """LMCache does not start, or has failed: says what it said."""


class Shape(NamedTuple):
    """What is stored at a time: ``tokens`` in pages of ``page_size``, of ``layers`` with keys and values in fp16."""

    tokens: int
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tokens."""
        return self.tokens * self.layers * 2 * self.kv_heads * self.head_dim * 2

    def spec(self) -> str:
        """Return LMCache's name for pools with twice as many pages."""
        pages = 2 * self.tokens // self.page_size
        return f"(2,{pages},{self.page_size},{self.kv_heads},{self.head_dim}):float16:{self.layers}"


class LMCache(NamedTuple):
    """An environment with LMCache in it."""

    version: str
    bin_dir: Path


class _Answer(msgspec.Struct):
    ready: bool = False
    ms: float = 0.0
    error: str = ""


class LMCacheClient:
    """LMCache's client; each call is one operation on the N-th request, bytes compared, and returns milliseconds."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        assert self._answer().ready

    def run(self, operation: Operation, number: int) -> float:
        """Return how long the operation took by LMCache's word.

        Raises:
            LMCacheError: it failed, or bytes differ.
        """
        _pipe(self._process.stdin).write(f"{operation} {number}\n".encode())
        _pipe(self._process.stdin).flush()
        return self._answer().ms

    def _answer(self) -> _Answer:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise LMCacheError(f"LMCache's client has ended: {_tail(self._log)}")
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            raise LMCacheError(answer.error)
        return answer


def find(environment: Path = ENVIRONMENT) -> LMCache | None:
    """Return LMCache, or None, with a line that says so, where ``make peers`` was not run."""
    wheel = next(environment.glob("lib/python*/site-packages/lmcache-*.dist-info"), None)
    if wheel is None:
        print("rows against LMCache left out: run `make peers` first", flush=True)
        return None
    return LMCache(wheel.name.removeprefix("lmcache-").removesuffix(".dist-info"), environment / "bin")


@contextmanager
def running_lmcache(peer: LMCache, shape: Shape, memory_gb: int) -> Iterator[LMCacheClient]:
    """Run the server with so much memory, and a client.

    Raises:
        LMCacheError: the server does not start; says the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        log = Path(folder) / "log"
        with running_server(peer, log, memory_gb) as (rpc_url, http_url), log.open("ab") as out:
            client = [
                str(peer.bin_dir / "python"),
                "-P",
                str(DRIVER),
                rpc_url,
                http_url,
                str(shape.tokens),
                shape.spec(),
            ]
            pipe = subprocess.PIPE
            with running(client, stdin=pipe, stdout=pipe, stderr=out, env=os.environ | UNTRACKED) as driver:
                yield LMCacheClient(driver, log)


@contextmanager
def running_server(peer: LMCache, log: Path, memory_gb: int, *options: str) -> Iterator[tuple[str, str]]:
    """Run the server with so much memory; yield the URLs of its own protocol and of HTTP.

    Raises:
        LMCacheError: it does not start; says the end of its log.
    """
    rpc_port, http_port = free_port(), free_port()
    server = [str(peer.bin_dir / "lmcache"), "server", "--host", "127.0.0.1"]
    server += ["--port", str(rpc_port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    server += ["--l1-size-gb", str(memory_gb), "--eviction-policy", "LRU", "--max-workers", "2", *options]
    rpc_url, http_url = f"tcp://127.0.0.1:{rpc_port}", f"http://127.0.0.1:{http_port}"
    with log.open("ab") as out, running(server, stdout=out, stderr=out, env=os.environ | UNTRACKED) as process:
        _wait_until_served(process, http_url, log)
        yield rpc_url, http_url


def _wait_until_served(server: subprocess.Popen[bytes], http_url: str, log: Path) -> None:
    ends_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < ends_at and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{http_url}/healthcheck", timeout=1):  # noqa: S310  our own server
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise LMCacheError(f"LMCache's server does not start: {_tail(log)}")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
