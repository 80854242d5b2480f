"""LMCache's server and client are run where ``make peers`` puts them, driven, and their bytes compared.

What runs here only stands in for them: same commands, classes and methods, and a cache that is one dictionary.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from benchmarks.measure import Effort
from benchmarks.peers.lmcache import LMCacheError, Shape, find, running_lmcache
from benchmarks.prefix_cache import Engine, against_lmcache, pools
from benchmarks.processes import running_daemon
from kvferry.clients import Client

VERSION: Final = "9.8.7"
SHAPE: Final = Shape(tokens=512, page_size=16, layers=2, kv_heads=1, head_dim=4)
SERVER: Final = """
import http.server
import sys

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "server" and options["--l1-size-gb"] == "1", sys.argv


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthcheck" else 404)
        self.end_headers()


http.server.HTTPServer((options["--http-host"], int(options["--http-port"])), Handler).serve_forever()
"""
CONFIG: Final = """
from types import SimpleNamespace as BenchConfig
"""
CLIENT: Final = """
from types import SimpleNamespace

import numpy as np


class Tensor(np.ndarray):
    def clone(self):
        return self.copy()

    def zero_(self):
        self[:] = 0

    def copy_(self, other):
        self[:] = other


class ServerBenchClient:
    def __init__(self, config, log):
        assert (config.num_tokens, config.kvcache_shape_spec) == (512, "(2,64,16,1,4):float16:2")
        self.log = log
        self.cached = {}

    def start(self):
        print("a log line, which is no answer")
        noise = [np.random.default_rng(n).random((2, 64, 16, 1, 4)).view(Tensor) for n in range(2)]
        self._workers = [SimpleNamespace(kv_caches=dict(enumerate(noise)))]

    def create_request(self, number, request_id, kind):
        return SimpleNamespace(number=number, num_full_tokens=512, total_chunks=2, block_offset=3, num_blocks=32)

    def lookup(self, request):
        chunks = 2 if request.number in self.cached else 0
        return SimpleNamespace(succeeded=True, hit_chunks=chunks, latency_ms=1.5, error=None)

    def _moved(self, operation):
        return SimpleNamespace(succeeded=True, operation=operation, latency_ms=2.5)

    def store(self, request, start, tokens):
        self.cached[request.number] = [one[:, 3:35].copy() for one in self._workers[0].kv_caches.values()]
        return self._moved("store")

    def retrieve(self, request, start, tokens):
        for one, cached in zip(self._workers[0].kv_caches.values(), self.cached[request.number]):
            one[:, 3:35] = cached
        return self._moved("retrieve")

    def end_session(self, request):
        pass

    def close(self):
        pass
"""


def write_environment(folder: Path, *, client: str = CLIENT, server: str = SERVER) -> Path:
    """Write an environment as ``make peers`` leaves it."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / f"lmcache-{VERSION}.dist-info").mkdir(parents=True)
    bench = packages / "lmcache" / "cli" / "commands" / "bench" / "server_bench"
    bench.mkdir(parents=True)
    (bench / "config.py").write_text(CONFIG)
    (bench / "client.py").write_text(client)
    (folder / "server.py").write_text(server)
    (folder / "bin").mkdir()
    commands = {"python": f'env PYTHONPATH={packages} {sys.executable} "$@"'}
    commands["lmcache"] = f'{sys.executable} {folder / "server.py"} "$@"'
    for name, command in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\nexec {command}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def test_without_the_environment_a_line_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(tmp_path) is None
    assert capsys.readouterr().out == "rows against LMCache left out: run `make peers` first\n"


def test_its_client_is_driven(tmp_path: Path) -> None:
    peer = find(write_environment(tmp_path))
    assert peer is not None
    assert peer.version == VERSION
    with running_lmcache(peer, SHAPE, 1) as client:
        assert client.run("store", 0) == 2.5
        assert client.run("lookup", 0) == 1.5
        assert client.run("retrieve", 0) == 2.5
        with pytest.raises(LMCacheError, match="0 chunks were found, not 2"):
            client.run("retrieve", 1)
        assert client.run("store", 1) == 2.5


def test_other_bytes_than_were_stored_are_an_error(tmp_path: Path) -> None:
    forgetful = CLIENT.replace("one[:, 3:35] = cached", "one[:, 4:35] = cached[:, 1:]")
    peer = find(write_environment(tmp_path, client=forgetful))
    assert peer is not None
    with running_lmcache(peer, SHAPE, 1) as client:
        client.run("store", 0)
        with pytest.raises(LMCacheError, match="a retrieved page is not what was stored"):
            client.run("retrieve", 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    peer = find(write_environment(tmp_path, server="raise OSError('no memory for a cache')"))
    assert peer is not None
    with pytest.raises(LMCacheError, match="no memory for a cache"), running_lmcache(peer, SHAPE, 1):
        pass


def test_a_client_that_does_not_start_says_why(tmp_path: Path) -> None:
    peer = find(write_environment(tmp_path, client="raise OSError('no shared memory')"))
    assert peer is not None
    with pytest.raises(LMCacheError, match="no shared memory"), running_lmcache(peer, SHAPE, 1):
        pass


def test_our_cache_is_compared_with_its(tmp_path: Path) -> None:
    peer = find(write_environment(tmp_path))
    assert peer is not None
    with (
        running_daemon() as runtime_dir,
        Client.connect(runtime_dir) as client,
        pools(client, SHAPE) as pair,
        running_lmcache(peer, SHAPE, 1) as theirs,
    ):
        rows = against_lmcache(Engine(pair, SHAPE), theirs, "a dictionary", Effort(quick=True))
    assert [row.name for row in rows] == [f"prefix_cache/{one}/against_lmcache" for one in ("store", "lookup", "load")]
    assert [row.peer for row in rows] == [2.5, 1.5, 2.5]
    assert all(row.limit for row in rows)
    assert all(row.ours > 0 for row in rows)
