"""SGLang's servers, their KV by kvferry and by SGLang's own Mooncake backend over TCP: when decode has a request.

A prefill and a decode server of either backend, in turns. Prefill has the prompts in its cache, so that what is left is
the hand-over: the handshake, a pass over the tokens of the last page, the transfer, decode's admission. The model is
random, with the KV of SmolLM2-135M (46 KB a token in fp32) and narrow layers: computing one token hides less than it
would on a CPU with the real one. Between hosts, which are network namespaces, kvferry's daemons use Mooncake's TCP,
too. On this machine two servers, their clients and the daemons share the cores.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import msgspec
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, memcpy, row_of, seconds
from benchmarks.peers.sglang_hooks import LOADED, SENT, TAKEN, TIMES, Note
from benchmarks.processes import free_port, running_daemon
from examples.demo.hosts import Host, hosts
from examples.demo.processes import start_daemon
from tests.kit.folders import MODELS, SMOLLM2
from tests.kit.servers import Program, free_ports, prompt, running
from tests.sglang.servers import ENVIRONMENT, new_room, request, server

ROOT: Final = Path(__file__).parents[1]
LENGTHS: Final = (64, 600, 2500)
AT_ONCE: Final = (1, 8)
PAGE_SIZE: Final = 64
TOKEN_BYTES: Final = 30 * 2 * 3 * 64 * 4  # of K and V: layers, heads, channels, bytes
ONE_HOST: Final = Target(0.5)
TWO_HOSTS: Final = Target(1.0)
HIT: Final = Target(0.5)
STORED_S: Final = 120.0
HICACHE: Final = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--enable-cache-report"),
    *("--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct"),
    *("--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"),
)
KVFERRY_STORAGE: Final = {
    "backend_name": "kvferry",
    "module_path": "kvferry.clients.sglang.hicache",
    "class_name": "KvferryHiCacheStorage",
    "interface_v1": 1,
}
HOST_TIER: Final = f"[tiers]\nhost_bytes = {1 << 30}\n"
FILES: Final = "SGLang's HiCache storage in files, which the page cache has"
MOONCAKE: Final = "SGLang's mooncake backend over TCP, the same servers otherwise"
PEERS: Final = """
[peers]
listen = "tcp://{address}:{port}"
insecure = true
[network]
transport = "mooncake"
"""


def measure(effort: Effort) -> list[Row]:
    """Measure on one host, HiCache's hits, and between two hosts, where this process may make such."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        model = save_model(Path(folder))
        rows = measure_one_host(effort, Path(folder), model)
        rows += measure_hicache(effort, Path(folder), model)
        if os.geteuid() == 0 and not effort.quick:
            rows += measure_two_hosts(effort, Path(folder), model)
        return rows


def measure_one_host(effort: Effort, folder: Path, model: Path) -> list[Row]:
    """Measure both backends on one host: kvferry copies in shared memory."""
    with running_daemon() as runtime_dir, ExitStack() as stack:
        ours, peer = (
            stack.enter_context(running_servers(folder / "one-host", backend, model, runtime_dirs=[runtime_dir] * 2))
            for backend in ("kvferry", "mooncake_tcp")
        )
        return _rows("sglang/one_host", ours, peer, effort, ONE_HOST)


def measure_two_hosts(effort: Effort, folder: Path, model: Path) -> list[Row]:
    """Measure both backends between two hosts: both write with Mooncake over TCP."""
    with hosts(2) as both, ExitStack() as stack:
        runtime_dirs = []
        for host in both:
            own = folder / f"daemon-{host.number}"
            own.mkdir()
            config = PEERS.format(address=host.address, port=free_port())
            stack.enter_context(start_daemon(own.name, own / "run", own, config, host))
            runtime_dirs.append(own / "run")
        ours, peer = (
            stack.enter_context(
                running_servers(folder / "two-hosts", backend, model, runtime_dirs=runtime_dirs, hosts=both)
            )
            for backend in ("kvferry", "mooncake_tcp")
        )
        return _rows("sglang/two_hosts", ours, peer, effort, TWO_HOSTS)


def measure_hicache(effort: Effort, folder: Path, model: Path) -> list[Row]:
    """Measure what the storage has after SGLang's own caches were emptied: by kvferry, and in SGLang's files."""
    with running_daemon(HOST_TIER) as runtime_dir, ExitStack() as stack:
        ours = ["dynamic", "--hicache-storage-backend-extra-config", json.dumps(KVFERRY_STORAGE)]
        kvferry, files = (
            stack.enter_context(running_cached(folder / name, storage, model, environment))
            for name, storage, environment in (
                ("hicache-kvferry", ours, {"KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir)}),
                ("hicache-file", ["file"], {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": os.fspath(folder / "files")}),
            )
        )
        rows = []
        for length in LENGTHS[1 : effort.pick(len(LENGTHS), 2)]:
            both: list[list[Hit]] = [[], []]
            for one in (kvferry, files):
                one.store(length)
            for number in range(effort.pick(15, 1) + 1):
                for figures, one in zip(both, (kvferry, files), strict=True):
                    found = one.hit(length)
                    if number:
                        figures.append(found)
            row = partial(row_of, unit=MILLISECONDS, peer_is=FILES, note=_copied(length // PAGE_SIZE * PAGE_SIZE))
            for figure, target in zip(Hit._fields, (HIT, None), strict=True):
                mine, theirs = ([getattr(found, figure) for found in figures] for figures in both)
                name = f"sglang/hicache/{length}_tokens/{figure}"
                rows.append(_said(row(name, ours=mine, peer=theirs, target=target)))
        return rows


class Hit(NamedTuple):
    """A request whose KV the storage has, in milliseconds.

    Attributes:
        load: from the storage into SGLang's host pool.
        first_token: from the request to its token.
    """

    load: float
    first_token: float


class Cached:
    """A server with HiCache and a storage behind it."""

    def __init__(self, program: Program, times: Times) -> None:
        self._program, self._times = program, times

    def store(self, length: int) -> None:
        """Have a prompt computed, and return once the storage has it.

        Raises:
            TimeoutError: it never has.
        """
        ends_at = time.monotonic() + STORED_S
        while self._ask(length) < (length - 1) // PAGE_SIZE * PAGE_SIZE:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the storage does not have {length} tokens: {self._program.log_tail()}")

    def hit(self, length: int) -> Hit:
        """Ask for a prompt that only the storage has."""
        self._flush()
        self._times.take()
        started = time.monotonic()
        found = self._ask(length, flush=False)
        first_token = (time.monotonic() - started) * 1e3
        assert found >= (length - 1) // PAGE_SIZE * PAGE_SIZE, found
        [load_s] = self._times.take()[LOADED].values()
        return Hit(load_s * 1e3, first_token)

    def _ask(self, length: int, *, flush: bool = True) -> int:
        if flush:
            self._flush()
        reply = self._program.post("/generate", request(prompt(length), new=1))
        assert reply.status == HTTPStatus.OK, reply
        return int((reply.body["meta_info"].get("cached_tokens_details") or {}).get("storage") or 0)

    def _flush(self) -> None:
        """Empty SGLang's own caches; it refuses while something is under way."""
        ends_at = time.monotonic() + STORED_S
        while self._program.post("/flush_cache", {}).status != HTTPStatus.OK:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"it does not flush its caches: {self._program.log_tail()}")


class Times:
    """The file of times that hooks in the servers write."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "times"
        self._file.touch()
        self._plugin = _plugin(folder)

    def environment(self) -> dict[str, str]:
        """Return what SGLang's processes need for the hooks."""
        path = [ENVIRONMENT["PYTHONPATH"], os.fspath(ROOT), os.fspath(self._plugin)]
        return {TIMES: os.fspath(self._file), "PYTHONPATH": os.pathsep.join(path)}

    def take(self) -> dict[str, dict[str | int, float]]:
        """Return what was noted since the last time, of each kind, by request."""
        found: dict[str, dict[str | int, float]] = {SENT: {}, TAKEN: {}, LOADED: {}}
        for line in self._file.read_bytes().splitlines():
            note = msgspec.json.decode(line, type=Note)
            found[note.what][note.request] = note.seconds
        self._file.write_bytes(b"")
        return found


class Figures(NamedTuple):
    """The means of a round's requests, in milliseconds.

    Attributes:
        last_chunk: from prefill's having its last chunk to decode's having the request.
        first_token: from the request to its token, which decode says.
        computed: from the request to prefill's having its last chunk.
    """

    last_chunk: float
    first_token: float
    computed: float


class Servers:
    """A prefill and a decode server, whose clients do what a router does."""

    def __init__(self, prefill: Program, decode: Program, bootstrap_port: int, times: Times) -> None:
        self._prefill, self._decode = prefill, decode
        self._where = {"bootstrap_host": prefill.address, "bootstrap_port": bootstrap_port}
        self._times = times

    def round(self, length: int, at_once: int) -> Figures:
        """Send requests at once, the same ones each time; return what they took."""
        rooms = [new_room() for _ in range(at_once)]
        bodies = [
            request(prompt(length, seed), new=1, bootstrap_room=room, **self._where) for seed, room in enumerate(rooms)
        ]
        started = time.monotonic()
        with ThreadPoolExecutor(2 * at_once) as threads:
            asked = [
                [threads.submit(_reply_at_s, side, body) for side in (self._prefill, self._decode)] for body in bodies
            ]
        replies_at_s = [[reply.result() for reply in replies] for replies in asked]
        noted = self._times.take()
        sent, taken = noted[SENT], noted[TAKEN]
        return Figures(
            last_chunk=fmean(taken[room] - sent[room] for room in rooms) * 1e3,
            first_token=fmean(decode - started for _, decode in replies_at_s) * 1e3,
            computed=fmean(sent[room] - started for room in rooms) * 1e3,
        )


@contextmanager
def running_servers(
    folder: Path,
    backend: str,
    model: Path,
    *,
    runtime_dirs: Sequence[Path],
    hosts: Sequence[Host | None] = (None, None),
) -> Iterator[Servers]:
    """Run a pair whose KV goes by this backend, on these hosts, by their daemons."""
    own = folder / backend
    own.mkdir(parents=True)
    times = Times(own)
    [bootstrap_port] = free_ports(1)
    tokens = AT_ONCE[-1] * -(-(LENGTHS[-1] + PAGE_SIZE) // PAGE_SIZE) * PAGE_SIZE
    options = ["--disaggregation-transfer-backend", backend, "--page-size", str(PAGE_SIZE)]
    variables: list[dict[str, str]] = [
        {
            **times.environment(),
            "KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir),
            **({} if host is None else {"SGLANG_HOST_IP": host.address}),
        }
        for runtime_dir, host in zip(runtime_dirs, hosts, strict=True)
    ]
    start = partial(server, own, model=os.fspath(model), tokens=tokens, options=options, bootstrap_port=bootstrap_port)
    prefill = start(mode="prefill", environment=variables[0], host=hosts[0])
    decode = start(mode="decode", environment=variables[1], host=hosts[1])
    with running(prefill, decode):
        yield Servers(prefill, decode, bootstrap_port, times)


@contextmanager
def running_cached(folder: Path, storage: Sequence[str], model: Path, environment: dict[str, str]) -> Iterator[Cached]:
    """Run a server with HiCache and this storage."""
    folder.mkdir(parents=True)
    times = Times(folder)
    options = [*HICACHE, "--page-size", str(PAGE_SIZE), "--hicache-storage-backend", *storage]
    one = server(
        folder, "plain", model=os.fspath(model), options=options, environment={**environment, **times.environment()}
    )
    with running(one):
        yield Cached(one, times)


def _reply_at_s(side: Program, body: dict[str, object]) -> float:
    reply = side.post("/generate", body)
    assert reply.status == HTTPStatus.OK, reply
    return time.monotonic()


def save_model(folder: Path) -> Path:
    """Save a random model with the KV of SmolLM2-135M and layers a third as wide, and return its folder."""
    torch.manual_seed(0)
    made = folder / "model"
    config: Any = LlamaConfig(
        vocab_size=49152, hidden_size=192, intermediate_size=192, num_hidden_layers=30, num_attention_heads=3,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    make: Any = AutoModelForCausalLM
    make.from_config(config, dtype=torch.float32).save_pretrained(made)
    for file in (MODELS / SMOLLM2).glob("tokenizer*"):
        shutil.copy(file, made)
    return made


def _rows(what: str, ours: Servers, peer: Servers, effort: Effort, target: Target) -> list[Row]:
    rows = []
    for length in reversed(LENGTHS[: effort.pick(len(LENGTHS), 1)]):  # the longest touch all of the memory
        for at_once in AT_ONCE:
            rounds = effort.pick(15 if at_once == 1 else 5, 1)  # eight take eight times as long
            both: list[list[Figures]] = [[], []]
            for number in range(rounds + 2):  # the first fills prefill's cache, the second finds it
                for figures, one in zip(both, (ours, peer), strict=True):
                    found = one.round(length, at_once)
                    if number > 1:
                        figures.append(found)
            row = partial(row_of, unit=MILLISECONDS, peer_is=MOONCAKE, target=target)
            name, copied = f"{what}/{length}_tokens/{at_once}_at_once", _copied(length)
            computed = " and ".join(f"{median(found.computed for found in figures):.0f}" for figures in both)
            notes = {"last_chunk": copied, "first_token": f"{computed} ms of it until prefill has computed; {copied}"}
            for figure, note in notes.items():
                mine, theirs = ([getattr(found, figure) for found in figures] for figures in both)
                rows.append(_said(row(f"{name}/{figure}", ours=mine, peer=theirs, note=note)))
    return rows


def _said(row: Row) -> Row:
    """Show a row at once: all of them take minutes."""
    print(f"{row.name}: {row.ours:.1f} and {row.peer:.1f} {row.unit}", file=sys.stderr, flush=True)
    return row


def _copied(tokens: int) -> str:
    """Say how much KV so many tokens have, and how long it takes to copy that at least."""
    size_bytes = -(-tokens // PAGE_SIZE) * PAGE_SIZE * TOKEN_BYTES
    copy = memcpy(size_bytes)
    copy_ms = median(seconds(copy) for _ in range(5)) * 1e3
    return f"{size_bytes / 1e6:.1f} MB a request, which one memcpy copies in {copy_ms:.1f} ms"


def _plugin(folder: Path) -> Path:
    """Make a distribution that has nothing but the entry point by which SGLang finds the hooks."""
    made = folder / "plugin"
    info = made / "kvferry_bench-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nkvferry_bench = benchmarks.peers.sglang_hooks:register\n"
    )
    return made


if __name__ == "__main__":
    print(msgspec.json.encode(measure(msgspec.json.decode(sys.argv[1], type=Effort))).decode())
