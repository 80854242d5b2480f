"""Stands between sockets and breaks what goes through, as networks do: cut, silent, late.

A proxy runs on a thread of its own, so that tests of processes and of event loops can use it; a control has worked when
it returns. It knows nothing of what is said: a test names the bytes at which something is to happen. Descriptors go
through with the bytes that they came with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

from tests.kit.faults import connected

Way = Literal["out", "back"]
"""From whom dialled to whom is listened for, and back."""
WAYS: Final[tuple[Way, ...]] = ("out", "back")

PATIENCE_S: Final = 20.0
READ_BYTES: Final = 65_536
MAX_FDS: Final = 4
_Result = TypeVar("_Result")


class _Mark(NamedTuple):
    """Bytes at which a proxy holds everything up."""

    data: bytes
    passes: bool
    seen: threading.Event


class Through:
    """One connection through the proxy: its route, both its sockets, and the tasks that pass on."""

    def __init__(self, route: str, *sockets: socket.socket) -> None:
        self.route = route
        self.sockets = sockets
        self.tasks: list[asyncio.Task[None]] = []
        self.tail = b""

    def read(self, way: Way) -> tuple[bytes, list[int]]:
        """Return what has come, and its descriptors.

        Raises:
            BlockingIOError: nothing has.
            OSError: the connection is no more.
        """
        data, fds, _, _ = socket.recv_fds(self.sockets[WAYS.index(way)], READ_BYTES, MAX_FDS)
        return data, fds

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for one in self.sockets:
            loop.remove_reader(one)
            loop.remove_writer(one)  # before the number may be another socket's
            one.close()


class Proxy:
    """Routes from listening sockets to who they stand for. All routes share one fate."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._open = asyncio.Event()
        self._refuses = False
        self._resets = 0
        self._delay_s = 0.0
        self._marks: list[_Mark] = []
        self._through: set[Through] = set()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._run(self._set_open())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    # -- routes

    def route_unix(self, path: Path, name: str = "") -> None:
        """Take the place of who listens at a Unix socket, whose file is moved aside; who connects later comes here."""
        aside = path.with_name(f"{path.name}.aside")
        mode = path.stat().st_mode & 0o777
        path.rename(aside)
        self.listen_unix(path, aside, name, mode)

    def listen_unix(self, path: Path, to: Path, name: str = "", mode: int = 0o600) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(os.fspath(path))
        path.chmod(mode)
        listener.listen(16)
        listener.settimeout(0)
        self._listeners.append(listener)
        self._call(lambda: self._spawn(self._accept(listener, to, name)))

    # -- controls

    def cut(self) -> None:
        """End every connection at once and every new one."""

        def now() -> None:
            self._refuses = True
            self._reset()

        self._call(now)

    def black_hole(self) -> None:
        """Let nothing through any more, without a word to anybody: connections stay open, new ones are accepted."""
        self._call(self._open.clear)

    def heal(self) -> None:
        """Let through what comes, and first what was held up."""

        def now() -> None:
            self._refuses = False
            self._open.set()

        self._call(now)

    def drop_connections(self, *routes: str) -> None:
        """End every connection of these routes, or of all, at once; new ones are served, if any are."""
        self._call(lambda: self._reset(*routes))

    def delay(self, seconds: float) -> None:
        """Let everything be so late from now on, in its order."""

        def now() -> None:
            self._delay_s = seconds

        self._call(now)

    def hold_at(self, data: bytes, *, passes: bool) -> Callable[[float], bool]:
        """Become a black hole at the first piece with these bytes on its way out; it still ``passes`` or does not.

        Returns:
            A function that waits for it, for so many seconds, and returns whether it has come.
        """
        mark = _Mark(data, passes, threading.Event())

        def now() -> None:
            for one in self._through:
                one.tail = b""  # what came before does not count
            self._marks.append(mark)

        self._call(now)
        return mark.seen.wait

    def unmark(self) -> None:
        self._call(self._marks.clear)

    @property
    def connections(self) -> int:
        return self._call(lambda: len(self._through))

    # -- on the loop

    async def _set_open(self) -> None:
        self._open.set()

    async def _accept(self, listener: socket.socket, to: Path, name: str) -> None:
        while True:
            near, _ = await self._loop.sock_accept(listener)
            if self._refuses:
                Through(name, near).close()
                continue
            resets = self._resets
            try:
                far = await asyncio.to_thread(connected, to)
            except OSError:
                near.close()
                continue
            through = Through(name, near, far)
            if resets != self._resets:
                through.close()
                continue
            for one in (near, far):
                one.settimeout(0)
            self._through.add(through)
            through.tasks += [self._spawn(self._pass_on(through, way)) for way in WAYS]

    async def _pass_on(self, through: Through, way: Way) -> None:
        with contextlib.suppress(OSError):  # either side is gone, or it was cut
            while True:
                try:
                    data, fds = through.read(way)
                except BlockingIOError:
                    await self._readable(through.sockets[WAYS.index(way)])
                    continue
                if not data:
                    break
                await self.forward(through, way, data, fds)
        await self._open.wait()  # a black hole swallows the end, too
        self.end(through)

    async def _readable(self, one: socket.socket) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(one, ready.set)
        try:
            await ready.wait()
        finally:
            if one.fileno() >= 0:
                self._loop.remove_reader(one)

    async def forward(self, through: Through, way: Way, data: bytes, fds: list[int]) -> None:
        to = through.sockets[1 - WAYS.index(way)]
        mark = self._mark_in(through, data) if way == "out" else None
        try:
            if mark is not None and not mark.passes:
                self._reach(mark)
            await self._open.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
                await self._open.wait()
            sent = socket.send_fds(to, [data], fds) if fds else 0
            await self._loop.sock_sendall(to, data[sent:])
        finally:
            for fd in fds:
                os.close(fd)
        if mark is not None and mark.passes:
            self._reach(mark)

    def end(self, through: Through) -> None:
        if through in self._through:
            self._through.discard(through)
            through.close()

    def _mark_in(self, through: Through, data: bytes) -> _Mark | None:
        seen = through.tail + data
        through.tail = seen[-256:]
        mark = next((one for one in self._marks if one.data in seen), None)
        if mark is not None:
            self._marks.remove(mark)
            through.tail = b""
        return mark

    def _reach(self, mark: _Mark) -> None:
        self._open.clear()
        mark.seen.set()

    def _reset(self, *routes: str) -> None:
        self._resets += 1
        gone = {one for one in self._through if not routes or one.route in routes}
        self._through -= gone
        for one in gone:
            one.close()
            for task in one.tasks:
                task.cancel()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self) -> None:
        self._reset()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await self._loop.shutdown_default_executor()

    # -- from other threads

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def _call(self, what: Callable[[], _Result]) -> _Result:
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(what())
            except Exception as error:  # noqa: BLE001  whoever waits raises it
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(PATIENCE_S)
