"""One store process, from its start to its end, used from the control loop.

A request that was sent to the process is answered, or fails once the process has ended; after either, nothing of it
touches the arena any more. Knows nothing of names, nor of when to restart the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from kvferry.daemon.process.signals import ENDING, IGNORED, held_back
from kvferry.daemon.process.writers import opened_for_helper
from kvferry.daemon.tiers.store_process import (
    ARENA,
    INVALID_PARAMS,
    LENGTH,
    MAX_HEADER_BYTES,
    Answer,
    Began,
    Begin,
    FromProcess,
    Get,
    GetBlock,
    Put,
    PutBlock,
    Request,
    framed,
)

MODULE: Final = "kvferry.daemon.tiers.store_process"
GRACE_S: Final = 6.0
"""How long a process may take to leave the store; its own limit is a second shorter."""

_MAX_LINE_BYTES: Final = 4096
_LAST_WORDS: Final = 3
_T = TypeVar("_T")
log = structlog.get_logger(__name__)


class StoreAwayError(Exception):
    """The store is unreachable, for the given reason. Never leaves the remote tier."""


class StoreLink:
    """The link to one store process, see the module. For the control loop."""

    def __init__(self, begin: Begin, arena_fd: int, environment: dict[str, str]) -> None:
        """Prepare; ``open`` starts the process.

        Args:
            begin: the first message to the process.
            arena_fd: a memfd of ``begin.arena_bytes``; passed to the process.
            environment: the process's, whole.
        """
        self._begin = begin
        self._arena_fd = arena_fd
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._output_fd = -1
        self._pidfd = -1
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._output: _Output | None = None
        self._began: asyncio.Future[Began] = asyncio.get_running_loop().create_future()
        self._awaited: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._why = ""
        self.ended = asyncio.Event()
        """Set once the process has ended."""

    def __repr__(self) -> str:
        """Show the process and the number of open requests."""
        pid = self._process.pid if self._process is not None else None
        return f"<StoreLink pid={pid} {'ended' if self.ended.is_set() else 'live'} awaited={len(self._awaited)}>"

    @property
    def pid(self) -> int:
        """Return the process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    async def open(self, timeout_s: float) -> str:
        """Start the process; return its address for other nodes. Call ``end`` in any case.

        Raises:
            StoreAwayError: it could not join the store, or not in time.
        """
        loop = asyncio.get_running_loop()
        try:
            await to_its_end(asyncio.to_thread(self._spawn))
            assert self._process is not None
            self._pidfd = os.pidfd_open(self._process.pid)
            loop.add_reader(self._pidfd, self._on_exit)
            pipe, self._output_fd = os.fdopen(self._output_fd, "rb", buffering=0), -1
            _, self._output = await loop.connect_read_pipe(_Output, pipe)
            reader, self._writer = await asyncio.open_connection(sock=self._channel)
            self._reading = loop.create_task(self._read(reader))
            self._writer.write(framed(self._begin))
            async with asyncio.timeout(timeout_s):
                began = await self._began
        except OSError as error:  # also TimeoutError
            reason = f"it was not ready within {timeout_s} s" if isinstance(error, TimeoutError) else str(error)
            raise StoreAwayError(reason) from error
        if began.error:
            raise StoreAwayError(began.error)
        return began.endpoint

    def next_number(self) -> int:
        """Return a number for a request."""
        return next(self._numbers)

    def ask(self, request: Request) -> asyncio.Future[Answer]:
        """Send a request; return the future of its answer, which is ignored once the future is cancelled.

        The future fails with ``StoreAwayError`` once the process has ended.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.ended.is_set() or self._writer is None:
            answer.set_exception(StoreAwayError(self._why or "the store process has ended"))
        else:
            self._awaited[request.number] = answer
            answer.add_done_callback(lambda done: self._on_answered(request.number, done))
            self._writer.write(framed(request))
        return answer

    def kill(self, why: str) -> None:
        """Kill the process, for this reason; ``ended`` is set once it has ended."""
        if not self.ended.is_set() and self._process is not None:
            self._why = self._why or why
            self._process.kill()

    async def end(self, grace_s: float = 0.0) -> str:
        """End the process after giving it ``grace_s`` to leave the store; return why it ended. Idempotent."""
        if self._pidfd < 0 and not self.ended.is_set():  # it has no pidfd yet
            self._end_unwatched()
        elif grace_s and self._writer is not None and not self.ended.is_set():
            self._writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.ended.wait()
        self.kill("it was asked to end")
        await self.ended.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._channel is not None and self._writer is None:
            self._channel.close()
        if self._output is not None:
            await self._output.closed()
        return self._describe()

    def _spawn(self) -> None:
        """On a worker thread, since starting a process takes milliseconds."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)  # noqa: FBT003  socket's own signature
        self._output_fd, output = os.pipe()
        try:
            command = [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())]
            with held_back(ENDING + IGNORED):  # inherited: signals are for the daemon, which ends it in order
                self._process = subprocess.Popen(  # noqa: S603  no part of it is user input
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    env=self._environment,
                    start_new_session=True,  # so that a terminal's signals do not reach it
                )
            arena_fd = opened_for_helper(self._arena_fd)
            try:
                socket.send_fds(self._channel, [ARENA], [arena_fd])
            finally:
                os.close(arena_fd)
        finally:
            theirs.close()
            os.close(output)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._received(_decoder.decode(await reader.readexactly(size_bytes)))
        except (asyncio.IncompleteReadError, OSError):
            self.kill("")  # it is ending; its exit status tells why
        except (msgspec.MsgspecError, ValueError) as error:
            self.kill(f"it sent an invalid message: {error}")

    def _received(self, message: FromProcess) -> None:
        if isinstance(message, Began):
            if not self._began.done():
                self._began.set_result(message)
            return
        answer = self._awaited.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _on_answered(self, number: int, answer: asyncio.Future[Answer]) -> None:
        self._awaited.pop(number, None)
        if not answer.cancelled():
            answer.exception()  # mark it as retrieved, where nobody waits any more

    def _on_exit(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._set_ended()

    def _end_unwatched(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1
        self._set_ended()

    def _set_ended(self) -> None:
        self.ended.set()
        why = StoreAwayError(self._describe())
        if not self._began.done():
            self._began.set_result(Began(error=str(why)))
        for answer in list(self._awaited.values()):
            if not answer.done():
                answer.set_exception(why)

    def _describe(self) -> str:
        if self._why:
            return self._why
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "it was not started"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        last_lines = "; ".join(self._output.last_words) if self._output is not None else ""
        return f"the store process {how}{': ' if last_lines else ''}{last_lines}"


class _Output(asyncio.Protocol):
    """What the process and Mooncake in it print: logged for debugging, the last lines kept to explain its end."""

    def __init__(self) -> None:
        self.last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._partial_line = b""
        self._closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = self._partial_line[-_MAX_LINE_BYTES:]
        for line in lines:
            text = line[-_MAX_LINE_BYTES:].decode(errors="replace").strip()
            if text:
                self.last_words.append(text)
                log.debug("store process", line=text)

    def connection_lost(self, _: Exception | None) -> None:
        self._closed.set()

    async def closed(self) -> None:
        """Wait until all output has been read."""
        await self._closed.wait()


async def to_its_end(operation: Coroutine[Any, Any, _T]) -> _T:
    """Await ``operation`` to its end, even where the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(operation)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001  the task's own error, raised below
            break
    if cancelled is not None:
        task.exception()  # mark it as retrieved
        raise cancelled
    return task.result()


_decoder: Final = msgspec.msgpack.Decoder(FromProcess)


# -- blocks on their way to and from the store. Blocks that wait for a call slot are batched, gets before puts.
#
# One block per call makes some hundred calls a second, whatever their size; for small blocks that is a tenth of what
# the store can do. A block is settled when nothing of its call is in progress any more. Knows nothing of the blocks'
# meaning.


MAX_CALL_BLOCKS: Final = 128
MAX_CALL_BYTES: Final = 32 << 20
"""A bound on the bytes of a call of several blocks."""


class Moved(NamedTuple):
    """The outcome of a block: Mooncake's status, and the header of a block that was fetched."""

    status: int
    header: bytes = b""


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    block: PutBlock | GetBlock
    size_bytes: int
    header_bytes: int
    moved: asyncio.Future[Moved | None]


class StoreMoves:
    """Batches blocks into calls, see the module. For the control loop."""

    def __init__(self, slots: int, timeout_s: float, link: Callable[[], StoreLink | None]) -> None:
        """Prepare.

        Args:
            slots: concurrent calls.
            timeout_s: a block that waited so long is dropped; a call that takes so long has the process killed.
            link: returns the process to send calls to, or None.
        """
        self._free = slots
        self._timeout_s = timeout_s
        self._link = link
        self._gets: deque[_Waiting] = deque()
        self._puts: deque[_Waiting] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show the numbers of queued blocks and running calls."""
        return f"<StoreMoves gets={len(self._gets)} puts={len(self._puts)} calls={len(self._calls)}>"

    async def move(self, block: PutBlock | GetBlock, size_bytes: int) -> Moved | None:
        """Return the outcome once the block is settled, also where cancelled; None where the store was unreachable."""
        return await to_its_end(self._move(block, size_bytes))

    async def _move(self, block: PutBlock | GetBlock, size_bytes: int) -> Moved | None:
        is_put = isinstance(block, PutBlock)
        header_bytes = len(block.header) if isinstance(block, PutBlock) else block.header_bytes
        waiting = _Waiting(block, size_bytes, header_bytes, asyncio.get_running_loop().create_future())
        queue = self._puts if is_put else self._gets
        queue.append(waiting)
        self._pump()
        await asyncio.wait({waiting.moved}, timeout=self._timeout_s)
        if waiting in queue:
            queue.remove(waiting)
            return None
        return await waiting.moved

    def _pump(self) -> None:
        while self._free and (queue := self._gets or self._puts):
            self._free -= 1
            call = asyncio.create_task(self._call(_take_batch(queue)))
            self._calls.add(call)
            call.add_done_callback(self._on_call_done)

    def _on_call_done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._free += 1
        self._pump()

    async def _call(self, batch: list[_Waiting]) -> None:
        answer = await self._ask(batch)
        for index, waiting in enumerate(batch):
            waiting.moved.set_result(None if answer is None else _moved(answer, index))

    async def _ask(self, batch: list[_Waiting]) -> Answer | None:
        link = self._link()
        if link is None:
            return None
        puts = [one.block for one in batch if isinstance(one.block, PutBlock)]
        gets = [one.block for one in batch if isinstance(one.block, GetBlock)]
        number = link.next_number()
        answer = link.ask(Put(number, puts) if puts else Get(number, gets))
        done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        if not done:
            # The process may still access the arena: only its end rules that out.
            link.kill(f"a call of {len(batch)} blocks took over {self._timeout_s} s")
        try:
            return await answer
        except StoreAwayError:
            return None


def _take_batch(queue: deque[_Waiting]) -> list[_Waiting]:
    """Take the blocks of one call from the queue: at least one."""
    taken = [queue.popleft()]
    size_bytes, header_bytes = taken[0].size_bytes, taken[0].header_bytes
    while queue and len(taken) < MAX_CALL_BLOCKS:
        size_bytes += queue[0].size_bytes
        header_bytes += queue[0].header_bytes
        if size_bytes > MAX_CALL_BYTES or header_bytes > MAX_HEADER_BYTES:
            break
        taken.append(queue.popleft())
    return taken


def _moved(answer: Answer, index: int) -> Moved:
    if index >= len(answer.statuses):
        return Moved(answer.status or INVALID_PARAMS)
    header = answer.headers[index] if index < len(answer.headers) else b""
    return Moved(answer.statuses[index], header)
