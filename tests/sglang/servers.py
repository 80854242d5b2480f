"""Real servers of SGLang, and its router.

Requests are greedy, token ids in, token ids out.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, TypeAlias

from examples.demo.hosts import Host
from tests.kit.folders import MODELS, REPOSITORY, SMOLLM2
from tests.kit.servers import Program, Reply, free_ports, running

Mode: TypeAlias = Literal["plain", "prefill", "decode"]
Side: TypeAlias = Literal["prefill", "decode"]

SIDES: Final[tuple[Side, ...]] = ("prefill", "decode")
"""Of a pair; each names its pool, too."""

SERVED_S: Final = 30.0
"""For a short request, or its error."""

READY: Final = "/readiness"
"""Of the router: it knows a prefill and a decode server that are healthy."""
NEW_TOKENS: Final = 16
OPTIONS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--skip-server-warmup", "--disable-overlap-schedule"),
    "--sleep-on-idle",  # two idle schedulers would take two cores
)
DECODE_OPTIONS: Final = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
STUBS: Final = REPOSITORY / "tests" / "sglang" / "stubs"
"""For what SGLang imports and this environment cannot have."""
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "PYTHONDONTWRITEBYTECODE": "",  # each start would compile SGLang anew
    "PYTHONPATH": f"{REPOSITORY / 'src'}:{STUBS}",
}


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
    address = "127.0.0.1" if host is None else host.address
    arguments = ["-m", "sglang.launch_server", "--model-path", os.fspath(MODELS / model), *OPTIONS]
    arguments += ["--host", address, "--port", str(port), "--nccl-port", str(nccl_port)]
    arguments += ["--max-total-tokens", str(tokens)]
    if mode != "plain":
        arguments += ["--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(bootstrap_port)]
    if mode == "decode":
        arguments += DECODE_OPTIONS
    return Server(
        mode, [*arguments, *options], folder, port,
        environment=_variables(host, environment), host=host, up="/model_info",
    )  # fmt: skip


def _variables(host: Host | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program on a host, which else asks a route to the Internet for its address."""
    return {**ENVIRONMENT, **({} if host is None else {"SGLANG_HOST_IP": host.address}), **(more or {})}


def request(ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> dict[str, object]:
    """Return a greedy request's body."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, **more}


class Pair:
    """A prefill and a decode server, and SGLang's router in front of them.

    Attributes:
        prefill, decode, router: the three.
    """

    def __init__(self, prefill: Server, decode: Server, router: Program, bootstrap_port: int) -> None:
        self.prefill, self.decode, self.router = prefill, decode, router
        self._bootstrap_port = bootstrap_port

    def __repr__(self) -> str:
        """Show the three."""
        return f"<Pair {self.prefill} {self.decode} {self.router}>"

    def side(self, side: Side) -> Server:
        """Return one of the two servers."""
        return self.prefill if side == "prefill" else self.decode

    def generate(self, ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> Reply:
        """Ask the router, as clients do."""
        return self.router.post("/generate", request(ids, new, **more))

    def half(self, side: Side, ids: Sequence[int], room: int, new: int = NEW_TOKENS, **more: object) -> Future[Reply]:
        """Send a server its half of a request, as a router does; ``room`` says which halves belong together."""
        where = {"bootstrap_host": self.prefill.address, "bootstrap_port": self._bootstrap_port, "bootstrap_room": room}
        return self.side(side).posted("/generate", request(ids, new, **where, **more))

    def abort(self, side: Side, rid: str) -> None:
        """Abort a request at one of the two."""
        assert self.side(side).post("/abort_request", {"rid": rid}).status == 200

    def restart(self, side: Side) -> None:
        """Start a server that was killed, and return once the router knows it again."""
        self.side(side).start()
        self.side(side).wait_until_up()
        self.router.wait_until_up()

    def wait_until_served(self, ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Return once a request succeeds; fails the test where one hangs, or the tokens are others."""
        replies: list[Reply] = []

        def is_served() -> bool:
            replies.append(self.router.post("/generate", request(ids), SERVED_S))
            assert replies[-1].status, (replies[-1], self.prefill.log_tail(), self.decode.log_tail())
            return replies[-1].status == 200

        self.router.wait_for(is_served, "serve again")
        assert replies[-1].tokens == list(tokens)

    def assert_healthy(self) -> None:
        """Check that both servers say that they are."""
        both = self.prefill, self.decode
        with ThreadPoolExecutor(len(both)) as threads:  # each takes a second to answer
            replies = list(threads.map(lambda program: program.get("/health"), both))
        for program, reply in zip(both, replies, strict=True):
            assert reply.status == 200, (program, reply, program.log_tail())

    def end_in_order(self) -> None:
        """End both servers as operators do; fails the test where one does not end, or complains."""
        both = self.prefill, self.decode
        for program in both:
            program.terminate()
        for program in both:
            program.wait_until_ended()
            assert "Traceback" not in program.logged().rpartition("SIGTERM received")[2], program.log_tail()


def new_room() -> int:
    """Return a number for two halves that belong together."""
    return random.randrange(1, 1 << 62)  # noqa: S311  not a secret


@contextlib.contextmanager
def running_pair(
    folder: Path,
    runtime_dirs: tuple[Path, Path] | Path,
    *,
    model: str = SMOLLM2,
    tokens: int = 4096,
    chunk: int = 256,
    options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hosts: tuple[Host | None, Host | None] = (None, None),
    backend: str = "kvferry",
) -> Iterator[Pair]:
    """Run a pair and its router.

    Args:
        folder: for the logs.
        runtime_dirs: prefill's daemon's and decode's, or that of both.
        model: the name of a folder in ``.models``.
        tokens: in either's KV pool.
        chunk: so many tokens of a prompt are computed at a time.
        options: more of SGLang's, for both.
        decode_options: for decode.
        environment: more than this process's.
        hosts: prefill's, with the router and the clients, and decode's.
        backend: by which KV is transferred.
    """
    theirs = (runtime_dirs, runtime_dirs) if isinstance(runtime_dirs, Path) else runtime_dirs
    bootstrap_port, router_port, prometheus_port = free_ports(3)
    both = [*options, "--disaggregation-transfer-backend", backend]
    variables = [
        {**(environment or {}), "KVFERRY_RUNTIME_DIR": os.fspath(one), "KVFERRY_SGLANG_POOL": side}
        for one, side in zip(theirs, SIDES, strict=True)
    ]
    prefill = server(
        folder, "prefill", model=model, tokens=tokens, options=[*both, "--chunked-prefill-size", str(chunk)],
        environment=variables[0], bootstrap_port=bootstrap_port, host=hosts[0],
    )  # fmt: skip
    decode = server(
        folder, "decode", model=model, tokens=tokens, options=[*both, *decode_options],
        environment=variables[1], bootstrap_port=bootstrap_port, host=hosts[1],
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
