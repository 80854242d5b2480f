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
from typing import Any, Final, NamedTuple

from examples.demo.hosts import Host

UP_S: Final = 240.0
END_S: Final = 30.0
REPLY_S: Final = 120.0
LOOK_EVERY_S: Final = 0.1


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
        """Say what is run by this environment's Python.

        Args:
            name: of the program.
            arguments: Python's.
            folder: for the log.
            port: where it will serve.
            environment: more than this process's.
            host: where it is run, else on this machine's network.
            up: the path that it answers with 200 once it serves.
        """
        self.name, self.port, self.host, self._up = name, port, host, up
        self.address = "127.0.0.1" if host is None else host.address
        self.url = f"http://{self.address}:{port}"
        self.log = folder / f"{name}.log"
        self._command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *arguments]
        self._environment = {**os.environ, **(environment or {})}
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
        """End it as operators do, by SIGTERM, which some look for every few seconds only; do not wait."""
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


class Prompt(NamedTuple):
    """What says which prompt: its number of tokens, and which one of so many."""

    length: int
    seed: int = 0


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids, always the same ones."""
    chance = random.Random(length * 1000 + seed)  # noqa: S311  a test's
    return [chance.randrange(100, 40000) for _ in range(length)]


def at_once(ask: Callable[[Prompt], Reply], prompts: Sequence[Prompt]) -> list[Reply]:
    """Return the answers to prompts that are sent at once."""
    with ThreadPoolExecutor(len(prompts) or 1) as threads:
        return list(threads.map(ask, prompts))
