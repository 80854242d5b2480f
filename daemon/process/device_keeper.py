"""The daemon's side of the keeper, the process that has the device memory of its pools, and the fence; see ``keeper``.

A keeper is there because the daemon before left it, because a unit of its own runs it, or because this daemon starts it
with the first device that it opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from kvferry.daemon.process import detached, keeper
from kvferry.daemon.process.access import KEEPER_SOCKET
from kvferry.daemon.process.fd_store import FdStore, HolderStore
from kvferry.daemon.process.threads import on_thread, started_threads

START_S: Final = 5.0
ANSWER_S: Final = 30.0
"""How long the keeper may take to answer: it calls the driver, which allocates."""

FENCE_LOOK_S: Final = 0.01
FENCE_S: Final = 30.0
"""For how long the driver may take a dead daemon apart: on some generations it tries once a second."""

log = structlog.get_logger(__name__)


class KeeperError(Exception):
    """The keeper did not do it; the text says why."""


class DriverRefusedError(KeeperError):
    """The driver refused what the keeper asked of it.

    Attributes:
        error: its number.
    """

    def __init__(self, call: str, error: int) -> None:
        super().__init__(f"{call} failed with error {error} in the keeper")
        self.error = error


class Kept(NamedTuple):
    """Memory that the keeper has."""

    device: int
    size_bytes: int


class Shareable(NamedTuple):
    """By which handle a process that was named imports memory, and its size as allocated."""

    handle: int
    size_bytes: int


class DeviceKeeper:
    """The keeper of a runtime directory. All methods but ``check`` may block, and are for any thread.

    Attributes:
        pid: its process; 0 while there is none.
        found: what it had when this daemon came, by key: of earlier ones.
        lost: why there is none any more, or "".
        when_lost: called once when it is lost, on the thread that notices.
    """

    def __init__(self, directory: Path, grace_s: int, *, may_start: bool) -> None:
        """Use the keeper that listens in a directory; ``may_start``: where none does, ``open`` starts one.

        Raises:
            KeeperError: there is one, and it is of no use; it is left alone.
        """
        self._path = directory / KEEPER_SOCKET
        self._grace_s = grace_s
        self._may_start = may_start
        self._generation = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self.pid = 0
        self.found: dict[str, Kept] = {}
        self.lost = ""
        self.when_lost: Callable[[], object] = lambda: None
        try:
            channel = detached.connected(self._path, START_S)
        except OSError as cause:
            raise KeeperError(f"the keeper does not answer: {cause}") from cause
        if channel is not None:
            self._greet(channel)

    def __repr__(self) -> str:
        """Show its process."""
        return f"<DeviceKeeper {self.pid or self.lost or 'not there'}>"

    def open(self) -> bool:
        """Return whether there is a keeper; start one if that is wanted, and none was lost."""
        with self._lock:
            if self._channel is not None or self.lost:
                return self._channel is not None
            try:
                channel = detached.connected(self._path, START_S)
                if channel is None and self._may_start:
                    detached.start(self._path, keeper.__file__, str(self._grace_s), keeper.ENDS, timeout_s=START_S)
                    channel = detached.connected(self._path, START_S)
                if channel is not None:
                    self._greet(channel)
            except (KeeperError, OSError, subprocess.SubprocessError) as cause:
                self._lose(str(cause))
            return self._channel is not None

    def make(self, device: int, size_bytes: int) -> str:
        """Allocate memory, a multiple of 2 MiB with undefined contents; return its key.

        Raises:
            KeeperError: there is none.
        """
        key = secrets.token_hex(16)
        self._ask(f"MAKE {key} {device} {size_bytes}")
        return key

    def share(self, key: str, process: int) -> Shareable:
        """Let a process, by the driver's number of it, import memory.

        Raises:
            KeeperError: it may not, or the keeper has no such memory.
        """
        return Shareable(*self._numbers(f"SHARE {key} {process}", 2))

    def drop(self, key: str) -> None:
        """Free memory, where there is a keeper; says in the log if that fails."""
        if self.pid:
            with _logged("memory of a device is not freed"):
                self._ask(f"DROP {key}")

    def number(self, device: int) -> int:
        """Return the driver's number of the keeper's process, which uses this device from now on.

        Raises:
            KeeperError: it cannot.
        """
        [number] = self._numbers(f"WHO {device}", 1)
        return number

    def watch(self, device: int, handle: int) -> None:
        """Name memory of this daemon's own, which the keeper may import: gone, it says that this daemon is.

        Raises:
            KeeperError: it will not be watched.
        """
        self._ask(f"CANARY {device} {handle}")

    def is_passed(self) -> bool:
        """Return whether the driver has taken all older daemons apart, as far as the keeper knows them.

        Raises:
            KeeperError: it does not say.
        """
        return self._numbers("FENCE", 1) == [0]

    def leave(self, grace_s: float | None) -> None:
        """Let it keep everything for a daemon within ``grace_s`` of this one's end; None: let it free everything."""
        channel = self._channel
        if channel is None:
            return
        with _logged("the keeper did not do as told"):
            channel.settimeout(START_S)
            self._ask("END" if grace_s is None else f"LEAVE {int(grace_s)}")
        if grace_s is None:
            self.close()

    def close(self) -> None:
        """Close the connection: to the keeper this daemon has ended."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel, self.pid = None, 0

    def check(self) -> None:
        """Look, without waiting, whether its process still is there."""
        if not self._lock.acquire(blocking=False):
            return  # somebody asks it, and will see
        try:
            if self._channel is not None:
                poll = select.poll()
                poll.register(self._channel, select.POLLIN)  # it says nothing by itself
                if poll.poll(0):
                    self._lose("the keeper has ended")
        finally:
            self._lock.release()

    def _numbers(self, request: str, count: int) -> list[int]:
        words = self._ask(request).split()[1:]
        if len(words) != count or not all(word.isdecimal() for word in words):
            raise KeeperError(f"the keeper answers {request.partition(' ')[0]} with {len(words)} words")
        return [int(word) for word in words]

    def _ask(self, request: str) -> str:
        with self._lock:
            if self._channel is None:
                raise KeeperError(self.lost or "there is no keeper")
            try:
                return _exchanged(self._channel, request)
            except OSError as cause:
                self._lose(f"the keeper does not answer: {cause}")
                raise KeeperError(self.lost) from cause

    def _greet(self, channel: socket.socket) -> None:
        """Become the daemon that writes.

        Raises:
            KeeperError: it refuses, or counts devices otherwise than this process.
        """
        try:
            pid = _own_process(channel)
            channel.settimeout(START_S)
            _check_devices(_exchanged(channel, f"HELLO {keeper.VERSION} {self._generation}"))
            self.found = _listed(_exchanged(channel, "LIST"))
            channel.settimeout(ANSWER_S)
        except (KeeperError, OSError, ValueError) as cause:
            channel.close()
            raise KeeperError(f"the keeper is of no use: {cause}") from cause
        self._channel, self.pid = channel, pid

    def _lose(self, cause: str) -> None:
        """Go on without; a late answer would be taken for another one's. Called with the lock."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self.pid, self.lost = None, 0, cause
        log.warning(
            "pools on devices do not outlive this daemon: its end is that of all of them",
            cause=cause,
            remedy="restart it when no engine needs them",
        )
        self.when_lost()


class Fence:
    """Tells when nothing of the daemons before this one can reach a device's memory, or the host's from one, any more.

    Neither a pidfd nor a closed socket does: the driver takes a dead process apart afterwards. For the control loop.
    """

    def __init__(self, keeper: DeviceKeeper | None, count: Callable[[str, int], None]) -> None:
        self._keeper = keeper
        self._count = count
        self._waiting: asyncio.Task[bool] | None = None

    def __repr__(self) -> str:
        """Show whether it is passed."""
        return f"<Fence {'passed' if self.is_passed else 'ahead'}>"

    @property
    def is_passed(self) -> bool:
        """Return whether it is known to be passed."""
        return self._waiting is not None and self._waiting.done() and self._waiting.result()

    async def passed(self) -> bool:
        """Wait for it. Return False if that cannot be known: what a dead daemon may still write rests for good."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(self._wait())
        return await asyncio.shield(self._waiting)

    async def close(self) -> None:
        """Wait no longer."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
            await asyncio.wait([self._waiting])

    async def _wait(self) -> bool:
        asked = self._keeper
        if asked is None or not asked.pid:  # nobody knows of an older daemon
            return not (asked and asked.lost)
        loop, executor = asyncio.get_running_loop(), started_threads(1, "fence")
        began_s = loop.time()
        try:
            async with asyncio.timeout(FENCE_S):
                while not await on_thread(executor, asked.is_passed):  # noqa: ASYNC110  the driver has to be asked
                    await asyncio.sleep(FENCE_LOOK_S)
        except (KeeperError, TimeoutError) as cause:
            why = str(cause) or f"after {FENCE_S:g} s the driver still has memory of it"
            log.warning("nobody knows whether copies of the daemon before have ended", cause=why)
            return False
        finally:
            executor.shutdown(wait=False)
            self._count("adoption.fence_ms", round((loop.time() - began_s) * 1000))
        return True


def open_keeper(directory: Path, store: FdStore, grace_s: int) -> DeviceKeeper | None:
    """Return the keeper of a runtime directory, which is locked; None: pools on devices end with this daemon.

    Only what keeps their records makes a keeper useful: without, one that is there frees everything.
    """
    try:
        found = DeviceKeeper(directory, grace_s, may_start=isinstance(store, HolderStore))
    except KeeperError as cause:
        log.warning(
            "pools on devices do not outlive this daemon",
            cause=str(cause),
            remedy="end that process (keeper.py), and start this daemon again",
        )
        return None
    if store.where:
        return found
    found.leave(None)
    return None


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except KeeperError as cause:
        log.warning(what, cause=str(cause))


def _own_process(channel: socket.socket) -> int:
    """Return the process at the other end.

    Raises:
        KeeperError: it is another user's.
    """
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
        raise KeeperError("it is another user's")
    return int.from_bytes(credentials[:4], sys.byteorder)


def _check_devices(welcome: str) -> None:
    """Check that the keeper counts devices as this process does.

    Raises:
        KeeperError: it does not.
    """
    visible = welcome.partition(f"OK {keeper.VERSION} ")[2]
    if visible != os.environ.get(keeper.VISIBLE_DEVICES, ""):
        raise KeeperError(f"it runs with {keeper.VISIBLE_DEVICES}={visible!r}, and this daemon does not")


def _exchanged(channel: socket.socket, request: str) -> str:
    """Return the answer to a request.

    Raises:
        KeeperError: it is a refusal.
        OSError: there is none.
    """
    channel.send(request.encode())
    answer = channel.recv(keeper.MAX_ANSWER_BYTES).decode(errors="replace")
    if not answer:
        raise BrokenPipeError(errno.EPIPE, "it has ended")
    return _checked(answer)


def _listed(answer: str) -> dict[str, Kept]:
    lines = [line.split() for line in _checked(answer).splitlines()[1:]]
    return {key: Kept(int(device), int(size_bytes)) for key, device, size_bytes in lines}


def _checked(answer: str) -> str:
    kind, _, rest = answer.partition(" ")
    if kind.partition("\n")[0] == "OK":
        return answer
    call, _, error = rest.partition(" ")
    if kind == "FAILED" and error.isdecimal():
        raise DriverRefusedError(call, int(error))
    raise KeeperError(f"the keeper says: {rest or answer}")
