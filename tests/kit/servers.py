"""Real servers of engines for tests: started as operators start them, known to serve, ended in every case.

A server leads a process group, and dies with the tests' process. What it says is in its log, whose end is part of every
error.
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
from types import TracebackType
from typing import Any, Final, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

import pytest

from examples.demo.hosts import Host
from kvferry.clients import Client
from kvferry.protocol.session_messages import StatusReport, TransferStatus
from tests.kit.folders import REPOSITORY

UP_S: Final = 600.0
END_S: Final = 30.0
REPLY_S: Final = 120.0
LOOK_EVERY_S: Final = 0.1
WATCH_S: Final = 30.0
LOWEST_PORT: Final = 10_000

Side: TypeAlias = Literal["prefill", "decode"]
SIDES: Final[tuple[Side, ...]] = ("prefill", "decode")
"""Of a pair; each names its pool, too."""

LENGTHS: Final = (5, 17, 64, 129, 333, 600, 1000)
"""Tokens of prompts: less than a page, all of a page, pages and a part of one, and chunks."""


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
        """Return the new tokens, which SGLang and vLLM name differently; fails the test where the request failed."""
        assert self.status == 200, self
        tokens: list[int] = self.body["output_ids"] if "output_ids" in self.body else self.choice["token_ids"]
        return tokens

    @property
    def choice(self) -> dict[str, Any]:
        """Return the only one of OpenAI's choices; fails the test where there is none."""
        assert len(self.body.get("choices", [])) == 1, self
        choice: dict[str, Any] = self.body["choices"][0]
        return choice

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
        up: str = "/health",
    ) -> None:
        """Say what this environment's Python runs, on a host or on this machine; ``up`` answers 200 once it serves."""
        self.name, self.port, self.host, self._up = name, port, host, up
        self.address = "127.0.0.1" if host is None else host.address
        self.url = f"http://{self.address}:{port}"
        self.log = folder / f"{name}.log"
        self._command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<{self.name} at {self.url}>"

    def start(self) -> None:
        command = self._command if self.host is None else self.host.command(self._command)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait_until_up(self) -> None:
        """Return once it serves; fails the test if it ends, or not in time."""
        self.wait_for(lambda: self.get(self._up).status == 200, f"answer {self._up}", UP_S)

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
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        return self.log.stat().st_size

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(line[:400] for line in self.logged().splitlines()[-lines:])

    def wait_until_ended(self) -> None:
        """Return once its first process has ended; fails the test if it does not in time."""
        assert self._process is not None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired as cause:
            raise ServerError(f"{self.name} did not end within {END_S} s:\n{self.log_tail()}") from cause

    def processes(self, title: str) -> list[int]:
        """Return those of its processes whose command begins so."""
        assert self._process is not None
        found = []
        for one in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                pid = int(one.parent.name)
                if os.getpgid(pid) == self._process.pid and one.read_bytes().startswith(title.encode()):
                    found.append(pid)
        return found

    def kill(self) -> None:
        """Kill all of its processes, and wait for the end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)

    def terminate(self) -> None:
        """End it as operators do, by SIGTERM, which some look for every few seconds only; do not wait."""
        assert self._process is not None
        self._process.terminate()

    def get(self, path: str, timeout_s: float = REPLY_S) -> Reply:
        return self._asked("GET", path, None, timeout_s).result()

    def post(self, path: str, body: Mapping[str, object], timeout_s: float = REPLY_S) -> Reply:
        return self.posted(path, body, timeout_s).result()

    def posted(self, path: str, body: Mapping[str, object], timeout_s: float = REPLY_S) -> Future[Reply]:
        """Send a request, whose answer will be there."""
        return self._asked("POST", path, body, timeout_s)

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
    """Return ports on which nothing listens, and of which connections take none.

    A server listens at its port long after this, and connects to others meanwhile, ranks to each other: one that the
    kernel gave to such a connection would be in use by then.
    """
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(LOWEST_PORT, first_of_connections)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise ServerError(f"fewer than {count} ports below {first_of_connections} are free")


@contextlib.contextmanager
def running(*programs: Program) -> Iterator[None]:
    """Run programs, and kill them."""
    try:
        for program in programs:
            program.start()
        for program in programs:
            program.wait_until_up()
        yield
    finally:
        for program in reversed(programs):
            program.kill()


P = TypeVar("P", bound=Program)


class Pair(Generic[P]):
    """A prefill and a decode server, and in front of them what clients ask: the engine's own router or proxy."""

    def __init__(self, prefill: P, decode: P, front: Program) -> None:
        self.prefill, self.decode, self.front = prefill, decode, front

    def __repr__(self) -> str:
        return f"<Pair {self.prefill} {self.decode} {self.front}>"

    def side(self, side: Side) -> P:
        return self.prefill if side == "prefill" else self.decode

    def restart(self, side: Side) -> None:
        """Start a server that was killed, and return once it serves, and the front knows it again."""
        self.side(side).start()
        self.side(side).wait_until_up()
        self.front.wait_until_up()

    def assert_healthy(self) -> None:
        for side in SIDES:
            assert self.side(side).get("/health").status == 200, self.side(side).log_tail()


class Watch:
    """A session of a daemon, which asks what is under way."""

    def __init__(self, runtime_dir: Path) -> None:
        self._client = Client.connect(runtime_dir, name="watch")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.transfers()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def status(self) -> StatusReport:
        return self._client.status()

    def arrived(self) -> int:
        """Return how many receives have succeeded: a server may compute again what did not arrive."""
        return self.status().counters.get("transfers.receive.ok", 0)

    def connected(self) -> int:
        """Return how many sessions are connected, this one too."""
        return sum(one.connected for one in self.status().sessions)

    def transfers(self, request_id: str = "") -> list[TransferStatus]:
        """Return what is under way, of all requests or of those whose id begins so."""
        return [one for one in self.status().transfers if one.request_id.startswith(request_id)]

    def wait_until_open(self, direction: Literal["send", "receive"], request_id: str = "") -> None:
        self.wait_until(
            lambda: any(one.direction == direction for one in self.transfers(request_id)), f"a {direction} is under way"
        )

    def wait_until_idle(self, within_s: float = WATCH_S) -> None:
        self.wait_until(lambda: not self.transfers(), "nothing is under way", within_s)

    def wait_until(self, condition: Callable[[], bool], what: str, within_s: float = WATCH_S) -> None:
        """Return once a condition is true; fails the test where it is not in time."""
        ends_at = time.monotonic() + within_s
        while not condition():  # each look is a round trip
            if time.monotonic() > ends_at:
                pytest.fail(f"not within {within_s} s: {what}; transfers are {self.transfers()}")
            self._client.poll(0.05)


class Prompt(NamedTuple):
    """What says which prompt: its number of tokens, and which one of so many."""

    length: int
    seed: int = 0


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids, always the same ones."""
    chance = random.Random(length * 1000 + seed)  # noqa: S311  a test's
    return [chance.randrange(100, 40000) for _ in range(length)]


AT_ONCE: Final = [Prompt(40 + 37 * seed, seed) for seed in range(1, 7)]
"""The prompts that are sent at once."""


def at_once(ask: Callable[[Prompt], Reply], prompts: Sequence[Prompt]) -> list[Reply]:
    """Return the answers to prompts that are sent at once."""
    with ThreadPoolExecutor(len(prompts) or 1) as threads:
        return list(threads.map(ask, prompts))


def output_of(*arguments: str | Path) -> list[str]:
    """Run a module of this repository to its end, as a user does, and return its lines."""
    variables = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def assert_demo_is_identical(engine: str, file: Path, new: int = 4) -> None:
    """Run the demo with an engine's servers: all its tokens are a plain server's, and went through the daemon."""
    lines = output_of("examples.demo", "--engine", engine, "--max-new-tokens", str(new), "--json", file)
    assert lines[-1] == f"demo: ok prompts=8 tokens={8 * new} identical=true"
    assert lines[-2].startswith("demo: 8 requests handed over by the daemon")
    requests = json.loads(file.read_bytes())["requests"]
    assert [len(one["tokens"]) for one in requests] == [new] * 8
    assert [one["tokens"] for one in requests] == [one["reference"] for one in requests]
