"""Real servers of SGLang, and its router: started as operators start them, known to serve, ended in every case.

A server leads a process group, and dies with the tests' process. What it says is in its log, whose end is part of every
error. Requests are greedy, token ids in, token ids out.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from examples.demo.hosts import Host
from tests.sglang.folders import MODELS, REPOSITORY, SMOLLM2, STUBS

Mode: TypeAlias = Literal["plain", "prefill", "decode"]
Side: TypeAlias = Literal["prefill", "decode"]

SIDES: Final[tuple[Side, ...]] = ("prefill", "decode")
"""Of a pair; each names its pool, too."""

UP_S: Final = 240.0
END_S: Final = 30.0
REPLY_S: Final = 120.0
SERVED_S: Final = 30.0
"""For a short request, or its error."""

READY: Final = "/readiness"
"""Of the router: it knows a prefill and a decode server that are healthy."""
LOOK_EVERY_S: Final = 0.1
NEW_TOKENS: Final = 16

OPTIONS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--skip-server-warmup", "--disable-overlap-schedule"),
    "--sleep-on-idle",  # two idle schedulers would take two cores
)
DECODE_OPTIONS: Final = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "PYTHONDONTWRITEBYTECODE": "",  # each start would compile SGLang anew
    "PYTHONPATH": f"{REPOSITORY / 'src'}:{STUBS}",
}


class ServerError(AssertionError):
    """A program ended, or did not do in time what it should: says which, and how its log ends."""


class Reply(NamedTuple):
    """The answer to a request.

    Attributes:
        status: of HTTP; 0: there was none.
        body: of JSON; ``error`` says why there is none.
    """

    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        """Return the new tokens; fails the test where the request failed."""
        assert self.status == 200, self
        tokens: list[int] = self.body["output_ids"]
        return tokens

    @property
    def reason(self) -> str:
        """Return why it failed; fails the test where it did not."""
        finish = self.body.get("meta_info", {}).get("finish_reason") or {}
        assert self.status != 200 or finish.get("type") == "abort", self
        return json.dumps(self.body)


class Program:
    """A server, or a router: a process group that serves HTTP.

    Attributes:
        name: says which in errors, and names the log.
        url: where it serves.
        log: of all its lives.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        port: int,
        *,
        environment: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> None:
        """Say what is run by this environment's Python; ``host`` is where, else on this machine's network."""
        self.name, self.port, self.host = name, port, host
        self.address = "127.0.0.1" if host is None else host.address
        self.url = f"http://{self.address}:{port}"
        self.log = folder / f"{name}.log"
        self._command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *arguments]
        where = {} if host is None else {"SGLANG_HOST_IP": host.address}  # else it asks a route to the Internet
        self._environment = {**os.environ, **ENVIRONMENT, **where, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        """Show what runs where."""
        return f"<{self.name} at {self.url}>"

    def start(self) -> None:
        """Start it, and do not wait."""
        command = self._command if self.host is None else self.host.command(self._command)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait_until_up(self, path: str = "/model_info") -> None:
        """Return once it answers this with 200; fails the test if it ends, or not in time."""
        self.wait_for(lambda: self.get(path).status == 200, f"answer {path}", UP_S)

    def wait_for(self, condition: Callable[[], bool], what: str, within_s: float = REPLY_S) -> None:
        """Return once a condition is true; fails the test if the program ends, or not in time."""
        ends_at = time.monotonic() + within_s
        while not condition():
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise ServerError(f"{self.name} ended with {self._process.wait(LOOK_EVERY_S)}:\n{self.log_tail()}")
            if time.monotonic() > ends_at:
                raise ServerError(f"{self.name} did not {what} within {within_s} s:\n{self.log_tail()}")

    def wait_until_logged(self, pattern: str, since: int = 0, times: int = 1) -> None:
        """Return once it has logged this, after so many bytes of its log."""
        self.wait_for(lambda: len(re.findall(pattern, self.logged(since))) >= times, f"log {pattern!r}")

    def logged(self, since: int = 0) -> str:
        """Return what it has logged after so many bytes."""
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        """Return how many bytes it has logged so far."""
        return self.log.stat().st_size

    def log_tail(self, lines: int = 60) -> str:
        """Return the end of its log."""
        return "\n".join(line[:400] for line in self.logged().splitlines()[-lines:])

    def wait_until_ended(self) -> None:
        """Return once its first process has ended; fails the test if it does not in time."""
        assert self._process is not None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired as cause:
            raise ServerError(f"{self.name} did not end within {END_S} s:\n{self.log_tail()}") from cause

    def kill(self) -> None:
        """Kill all of its processes, and wait for the end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)

    def terminate(self) -> None:
        """End it as operators do, by SIGTERM, which it looks for every five seconds; do not wait."""
        assert self._process is not None
        self._process.terminate()

    def get(self, path: str, timeout_s: float = REPLY_S) -> Reply:
        """Ask for a path."""
        return self._asked("GET", path, None, timeout_s).result()

    def post(self, path: str, body: Mapping[str, object], timeout_s: float = REPLY_S) -> Reply:
        """Send a request, and wait for the answer."""
        return self.posted(path, body, timeout_s).result()

    def posted(self, path: str, body: Mapping[str, object], timeout_s: float = REPLY_S) -> Future[Reply]:
        """Send a request, whose answer will be there."""
        return self._asked("POST", path, body, timeout_s)

    def flush(self) -> None:
        """Empty SGLang's prefix caches, once it is idle: a look at its health is a request, too."""
        self.wait_for(lambda: self.post("/flush_cache", {}).status == 200, "flush its cache", SERVED_S)

    def _asked(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Future[Reply]:
        """Ask in a thread of its own, which is on this program's host."""
        threads = ThreadPoolExecutor(1, initializer=None if self.host is None else self.host.enter)
        try:
            return threads.submit(_ask, self.url, method, path, body, timeout_s)
        finally:
            threads.shutdown(wait=False)


def _ask(url: str, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Reply:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=timeout_s)
    try:
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return Reply(0, {"error": repr(error)})
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        found = {"error": text}
    return Reply(answer.status, found if isinstance(found, dict) else {"body": found})


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


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
) -> Program:
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
    return Program(mode, [*arguments, *options], folder, port, environment=environment, host=host)


@contextlib.contextmanager
def running(*programs: Program, up: str = "/model_info") -> Iterator[None]:
    """Run programs, and kill them."""
    try:
        for program in programs:
            program.start()
        for program in programs:
            program.wait_until_up(up)
        yield
    finally:
        for program in reversed(programs):
            program.kill()


class Prompt(NamedTuple):
    """What says which prompt: its number of tokens, and which one of so many."""

    length: int
    seed: int = 0


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids, always the same ones."""
    chance = random.Random(length * 1000 + seed)  # noqa: S311  a test's
    return [chance.randrange(100, 40000) for _ in range(length)]


def request(ids: Sequence[int], new: int = NEW_TOKENS, **more: object) -> dict[str, object]:
    """Return a greedy request's body."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, **more}


class Pair:
    """A prefill and a decode server, and SGLang's router in front of them.

    Attributes:
        prefill, decode, router: the three.
    """

    def __init__(self, prefill: Program, decode: Program, router: Program, bootstrap_port: int) -> None:
        self.prefill, self.decode, self.router = prefill, decode, router
        self._bootstrap_port = bootstrap_port

    def __repr__(self) -> str:
        """Show the three."""
        return f"<Pair {self.prefill} {self.decode} {self.router}>"

    def side(self, side: Side) -> Program:
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
        self.router.wait_until_up(READY)

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
    router = Program("router", arguments, folder, router_port, host=hosts[0])
    with running(prefill, decode), running(router, up=READY):
        yield Pair(prefill, decode, router, bootstrap_port)


def at_once(ask: Callable[[Prompt], Reply], prompts: Sequence[Prompt]) -> list[Reply]:
    """Return the answers to prompts that are sent at once."""
    with ThreadPoolExecutor(len(prompts) or 1) as threads:
        return list(threads.map(ask, prompts))
