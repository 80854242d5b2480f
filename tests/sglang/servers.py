"""Real servers of SGLang and its router, what a plain server says to the prompts of the tests, and what is under way.

Requests are greedy, token ids in, token ids out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from examples.demo.hosts import Host
from kvferry.clients import Client
from kvferry.protocol.ids import HOST
from tests.kit import servers
from tests.kit.devices import DEVICE
from tests.kit.faults import stopped
from tests.kit.folders import MODELS, REPOSITORY, SMOLLM2, TINY_CONV, TINY_DELTA, TINY_WINDOWS
from tests.kit.servers import (
    AT_ONCE,
    LENGTHS,
    SIDES,
    Program,
    Prompt,
    Reply,
    Side,
    Watch,
    at_once,
    free_ports,
    prompt,
    running,
)

Mode: TypeAlias = Literal["plain", "prefill", "decode"]
Pause: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]

SCHEDULER: Final = "sglang::scheduler"
"""How the title of its processes begins."""

SERVED_S: Final = 30.0
"""For a short request, or its error."""

READY: Final = "/readiness"
"""Of the router: it knows a prefill and a decode server that are healthy."""
NEW_TOKENS: Final = 16
_BOTH: Final = (
    *("--dtype", "float32", "--cuda-graph-backend-prefill", "disabled"),
    "--skip-server-warmup",
    "--sleep-on-idle",  # two idle schedulers would take two cores
)
OPTIONS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--cuda-graph-backend-decode", "disabled", "--disable-overlap-schedule", *_BOTH),
)
NPU_OPTIONS: Final = (
    *("--device", "npu", "--attention-backend", "ascend", "--sampling-backend", "pytorch", "--page-size", "128"),
    *("--mem-fraction-static", "0.5", "--max-running-requests", "8", "--cuda-graph-max-bs-decode", "8", *_BOTH),
)
"""Decode's graphs are captured."""
DECODE_OPTIONS: Final = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
STUBS: Final = REPOSITORY / "tests" / "sglang" / "stubs"
"""For what SGLang imports and this environment cannot have."""
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # else a request may meet the end of its connection: only one side hears of it
    "PYTHONDONTWRITEBYTECODE": "",  # each start would compile SGLang anew
    "PYTHONPATH": f"{REPOSITORY / 'src'}:{STUBS}",
}
RANKS: Final = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
"""Cores of the ranks, up to four: there may be more than a machine has NUMA nodes."""
ON_NPU: Final = {
    "ASCEND_USE_FIA": "1",
    "ASCEND_GLOBAL_LOG_LEVEL": "3",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "SGLANG_ENABLE_WAR_BARRIER": "1",  # else its scheduler writes what its model still reads: the simulator says so
    "PYTHONPATH": f"{STUBS / 'npu'}:{ENVIRONMENT['PYTHONPATH']}",
}


class Needs(NamedTuple):
    """What a model's servers are started with beside the usual."""

    options: Sequence[str] = ()
    environment: Mapping[str, str] = {}


_HYBRID: Final = {"PYTHONPATH": f"{STUBS / 'hybrid'}:{ENVIRONMENT['PYTHONPATH']}"}
NO_PREFIXES: Final = "--disable-radix-cache"
"""SGLang keeps prefixes' states with pages of one token alone."""
_FEW_STATES: Final = (NO_PREFIXES, "--max-mamba-cache-size", "64")
"""SGLang would make as many slots as memory has room for."""
NEEDS: Final = {
    TINY_WINDOWS: Needs((), _HYBRID),
    TINY_CONV: Needs(_FEW_STATES, _HYBRID),
    TINY_DELTA: Needs(
        _FEW_STATES, {**_HYBRID, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    ),  # SGLang rounds a convolution's state to bfloat16 after each chunk: chunks of other sizes give other tokens
}
"""Of hybrid models."""
EXTRA: Final = {
    "backend_name": "kvferry",
    "module_path": "kvferry.clients.sglang.hicache",
    "class_name": "KvferryHiCacheStorage",
    "interface_v1": 1,
}
"""Of HiCache's storage."""
HICACHE_PAGE: Final = 64
RETRACTED: Final = [Prompt(30 + 17 * seed, seed) for seed in range(6)]
"""The prompts of requests that decode retracts: 435 tokens."""
RETRACTED_NEW: Final = 80
"""After each of these."""


class Server(Program):
    """A server of SGLang."""

    def flush(self) -> None:
        """Empty its prefix caches, once it is idle: a look at its health is a request, too."""
        self.wait_for(lambda: self.post("/flush_cache", {}).status == 200, "flush its cache", SERVED_S)


def server(
    folder: Path,
    mode: Mode,
    *,
    model: str = SMOLLM2,
    tokens: int = 4096,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    bootstrap_port: int = 0,
    host: Host | None = None,
) -> Server:
    """Return a server that has not been started.

    Args:
        folder: for its log.
        mode: plain, or one of a pair.
        model: the name of a folder in ``.models``.
        tokens: in its KV pool.
        options: more of SGLang's.
        environment: more than this process's.
        bootstrap_port: prefill's.
        host: where; None: on this machine's network.
    """
    port, nccl_port = free_ports(2)
    needs = NEEDS.get(model, Needs())
    if "--enable-hierarchical-cache" in options:
        needs = needs._replace(options=[one for one in needs.options if one != NO_PREFIXES])
    address = "127.0.0.1" if host is None else host.address
    arguments = ["-m", "sglang.launch_server", "--model-path", os.fspath(MODELS / model)]
    arguments += OPTIONS if DEVICE.name == HOST else NPU_OPTIONS
    arguments += ["--host", address, "--port", str(port), "--nccl-port", str(nccl_port)]
    arguments += ["--max-total-tokens", str(tokens)]
    if mode != "plain":
        arguments += ["--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(bootstrap_port)]
    if mode == "decode":
        arguments += DECODE_OPTIONS
    return Server(
        mode, [*arguments, *needs.options, *options], folder, port,
        environment=_variables(host, {**needs.environment, **(environment or {})}), host=host, up="/model_info",
    )  # fmt: skip


def hicache(layout: str = "layer_first", io: str = "direct", page_size: int = HICACHE_PAGE) -> list[str]:
    """Return the options of a server with HiCache and kvferry as its storage."""
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", str(page_size)),
        *("--hicache-mem-layout", layout, "--hicache-io-backend", io),
        *("--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic", "--enable-cache-report"),
        *("--hicache-storage-backend-extra-config", json.dumps({**EXTRA, "prefetch_threshold": HICACHE_PAGE})),
    ]


def _variables(host: Host | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program on a host, which else asks a route to the Internet for its address."""
    device = {} if DEVICE.name == HOST else ON_NPU
    return {**ENVIRONMENT, **device, **({} if host is None else {"SGLANG_HOST_IP": host.address}), **(more or {})}


def request(ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> dict[str, object]:
    """Return a greedy request's body."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, **more}


class Pair(servers.Pair[Server]):
    """A prefill and a decode server, and SGLang's router in front of them."""

    def __init__(self, prefill: Server, decode: Server, front: Program, bootstrap_port: int) -> None:
        super().__init__(prefill, decode, front)
        self._bootstrap_port = bootstrap_port

    def generate(self, ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> Reply:
        """Ask the router, as clients do."""
        return self.front.post("/generate", request(ids, new, **more))

    def half(self, side: Side, ids: Sequence[int], room: int, new: int = NEW_TOKENS, **more: object) -> Future[Reply]:
        """Send a server its half of a request, as a router does; ``room`` says which halves belong together."""
        where = {"bootstrap_host": self.prefill.address, "bootstrap_port": self._bootstrap_port, "bootstrap_room": room}
        return self.side(side).posted("/generate", request(ids, new, **where, **more))

    @contextlib.contextmanager
    def amid_the_chunks(
        self, watch: RoomWatch, length: int, rid: str, pause: Pause | None = None
    ) -> Iterator[Mapping[Side, Future[Reply]]]:
        """Send both halves of a new prompt, and have prefill compute nothing once some of it has arrived, but not all.

        ``rid`` begins their names; the side is the rest. ``pause``: of prefill; by default its schedulers are stopped.
        """
        while True:
            room = new_room()
            ids = prompt(length, room % 1000)  # which no cache has
            halves = {side: self.half(side, ids, room, rid=f"{rid}{side}") for side in SIDES}
            watch.wait_until(partial(_has_begun, watch, room, halves["prefill"]), "pages arrive")
            with (pause or self._stopped_prefill)():
                if watch.has_some(room):
                    yield halves
                    return
            for half in halves.values():  # it was faster than the look
                assert half.result().tokens

    @contextlib.contextmanager
    def _stopped_prefill(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for pid in self.prefill.processes(SCHEDULER):
                stack.enter_context(stopped(pid))
            yield

    def abort(self, side: Side, rid: str) -> None:
        assert self.side(side).post("/abort_request", {"rid": rid}).status == 200

    def wait_until_served(self, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Return once a request succeeds; fails the test where one hangs, or the tokens are others."""
        replies: list[Reply] = []

        def is_served() -> bool:
            replies.append(self.front.post("/generate", request(ids), SERVED_S))
            assert replies[-1].status, (replies[-1], self.prefill.log_tail(), self.decode.log_tail())
            return replies[-1].status == 200

        self.front.wait_for(is_served, "serve again")
        assert replies[-1].tokens == list(tokens)

    def end_in_order(self) -> None:
        """End both servers as operators do; fails the test where one does not end, or complains."""
        for side in SIDES:
            self.side(side).terminate()
        for side in SIDES:
            self.side(side).wait_until_ended()
            assert "Traceback" not in self.side(side).logged().rpartition("SIGTERM received")[2], self.side(side)


def _has_begun(watch: RoomWatch, room: int, prefill: Future[Reply]) -> bool:
    return watch.has_some(room) or prefill.done()


def new_room() -> int:
    """Return a number for two halves that belong together."""
    return random.randrange(1, 1 << 62)  # noqa: S311  not a secret


class RoomWatch(Watch):
    """What the daemon says of the transfers of SGLang's requests, which it knows by their rooms."""

    def wait_until_opened(self, room: int, side: Side) -> None:
        """Return once a server has opened a request's transfer."""
        self.wait_until_open("send" if side == "prefill" else "receive", f"{room:016x}")

    def has_some(self, room: int) -> bool:
        """Return whether pages of a request are at decode, at most half of them: prefill may be some chunks ahead."""
        return any(0 < 2 * one.arrived <= one.pages for one in self.transfers(f"{room:016x}"))

    def moved_bytes(self) -> int:
        """Return how many bytes have arrived in all."""
        return self.status().counters.get("transfers.moved_bytes", 0)

    def assert_all_is_free(self, pair: Pair) -> None:
        """Check that neither SGLang, which looks by itself when it is idle, nor the daemon keeps pages of requests."""
        self.wait_until_idle()
        self.wait_until(lambda: not any(one.snapshots for one in self.status().tiers), "no snapshot is left")
        pair.assert_healthy()
        for program in (pair.prefill, pair.decode):
            program.flush()
            assert "leak detected" not in program.logged()


@contextlib.contextmanager
def running_pair(
    folder: Path,
    runtime_dirs: tuple[Path, Path] | Path,
    *,
    model: str = SMOLLM2,
    tokens: int = 4096,
    chunk: int = 256,
    options: Sequence[str] = (),
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hosts: tuple[Host | None, Host | None] = (None, None),
) -> Iterator[Pair]:
    """Run a pair and its router.

    Args:
        folder: for the logs.
        runtime_dirs: prefill's daemon's and decode's, or that of both.
        model: the name of a folder in ``.models``.
        tokens: in either's KV pool.
        chunk: so many tokens of a prompt are computed at a time.
        options: more of SGLang's, for both.
        prefill_options: for prefill.
        decode_options: for decode.
        environment: more than this process's.
        hosts: prefill's, with the router and the clients, and decode's.
    """
    theirs = (runtime_dirs, runtime_dirs) if isinstance(runtime_dirs, Path) else runtime_dirs
    bootstrap_port, router_port, prometheus_port = free_ports(3)
    both = [*options, "--disaggregation-transfer-backend", "kvferry"]
    more = {"prefill": ("--chunked-prefill-size", str(chunk), *prefill_options), "decode": decode_options}
    prefill, decode = (
        server(
            folder, side, model=model, tokens=tokens, options=[*both, *more[side]], bootstrap_port=bootstrap_port,
            environment={
                **(environment or {}), "KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir), "KVFERRY_SGLANG_POOL": side
            },
            host=host,
        )
        for side, runtime_dir, host in zip(SIDES, theirs, hosts, strict=True)
    )  # fmt: skip
    arguments = ["-m", "sglang_router.launch_router", "--pd-disaggregation", "--disable-retries"]
    arguments += ["--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url]
    arguments += ["--health-check-interval-secs", "2", "--health-success-threshold", "1", "--disable-circuit-breaker"]
    arguments += ["--log-level", "warn"]
    arguments += ["--host", prefill.address, "--port", str(router_port), "--prometheus-port", str(prometheus_port)]
    router = Program(
        "router", arguments, folder, router_port, environment=_variables(hosts[0]), host=hosts[0], up=READY
    )
    with running(prefill, decode), running(router):
        yield Pair(prefill, decode, router, bootstrap_port)


class Expected(NamedTuple):
    """What a plain server says to the prompts of the tests.

    Attributes:
        answers: the new tokens, and the log-probability of each of them.
        retracted: the new tokens after each of ``RETRACTED``, where the run has long tests.
    """

    answers: dict[Prompt, tuple[list[int], list[float]]]
    retracted: list[list[int]]

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        """Return the new tokens after ``prompt(length, seed)``."""
        return self.answers[Prompt(length, seed)][0]


def ask_plain_server(folder: Path, model: str, *, long: bool) -> Expected:
    """Run a plain server, and return its answers; ``long``: also those that long tests need."""
    wanted = [*(Prompt(length) for length in LENGTHS), *AT_ONCE]
    plain = server(folder, "plain", model=model)
    with running(plain):
        replies = at_once(lambda one: plain.post("/generate", request(prompt(*one), return_logprob=True)), wanted)
        more = RETRACTED if long else []
        retracted = at_once(lambda one: plain.post("/generate", request(prompt(*one), RETRACTED_NEW)), more)
    return Expected(
        {
            one: (reply.tokens, [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]])
            for one, reply in zip(wanted, replies, strict=True)
        },
        [reply.tokens for reply in retracted],
    )


def assert_tokens(pair: Pair, expected: Expected) -> None:
    """Compare all lengths one by one, and those at once."""
    for length in LENGTHS:
        assert pair.generate(prompt(length)).tokens == expected.tokens(length), length
    replies = at_once(lambda one: pair.generate(prompt(*one)), AT_ONCE)
    assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in AT_ONCE]


def assert_pages_count(
    pair: Pair, runtime_dir: Path, expected: Expected, pool: str = "prefill", component: str = "main"
) -> None:
    """Check that zeros in prefill's pages change the tokens: the control of all tests that compare them."""
    ids = prompt(600, seed=99)
    as_it_is = pair.generate(ids).tokens
    assert pair.generate(ids).tokens == as_it_is, "prefill's prefix cache alone changes nothing"
    with Client.connect(runtime_dir) as other:
        attached = other.attach_pool(pool)
        for role in ("k", "v"):
            attached.tensor(component, role)[:, 1:] = 0
        DEVICE.synchronize()
        attached.close()
    assert pair.generate(ids).tokens != as_it_is
    pair.prefill.flush()
    assert pair.generate(ids).tokens == as_it_is
    assert pair.generate(prompt(64)).tokens == expected.tokens(64)


def assert_decodes_memory_counts(pair: Pair, runtime_dir: Path, *components: str) -> None:
    """Check that zeros in decode's memory, while it generates, change the tokens: in each of the components alone.

    The control where prefill keeps no prefix.
    """
    ids, new = prompt(129, seed=7), 400
    as_it_is = pair.generate(ids, new=new).tokens
    assert pair.generate(ids, new=new).tokens == as_it_is
    for component in components:
        room = new_room()
        halves = [pair.half(side, ids, room, new=new) for side in ("decode", "prefill")]
        assert halves[1].result().tokens
        with Client.connect(runtime_dir) as other:
            pool = other.attach_pool("decode")
            for role in {one.role for one in pool.manifest.entries if one.component == component}:
                pool.tensor(component, role)[:] = 0
            pool.close()
        assert halves[0].result().tokens != as_it_is, component
    assert pair.generate(ids, new=new).tokens == as_it_is
