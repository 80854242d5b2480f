"""The process that joins the Mooncake Store for a daemon; it ends when the daemon closes its end of their socket.

It is a separate process because Mooncake allows one transfer engine per process, because a call to a store that is gone
may hang, and because a failing store may abort its process. It handles names and ranges of the arena, and knows nothing
of their meaning.

Facts about the store (Mooncake 0.3.13):

- Over TCP it reads and writes memory that is not registered, while everybody who reaches its port may read and write
  registered memory. So the arena is registered only where the protocol requires it.
- A name that exists is not written again, even with other bytes, and the call still counts as a success.
- The master picks the node of a block, by default at random. A block may be gone at any time: evicted when nine tenths
  of the memory are in use, or lost with its node, which the master notices after ten seconds.
- ``close`` takes two seconds, and calls after it crash; unmounting a segment takes milliseconds.

Mooncake's own pair (``mooncake_client`` and ``setup_dummy``) survives a crash of the process too, but does not stand in
for this one: it takes only memory that it has allocated itself, not the sealed arena; while its process hangs every
call holds its thread for 30 seconds, a bound that nothing sets, and ``health_check`` finds no fault; if its process is
replaced quickly, calls fail for good (-600), since the memory is not shared anew; and its process listens, without
authentication, for whoever wants to read or write that memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import resource
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, NoReturn, cast

import msgspec

from kvferry.daemon.process.inspection import forbid_inspection
from kvferry.daemon.process.signals import end_within, ignore_but_for_libraries
from kvferry.daemon.transports.mooncake_native import P2P, MooncakeSettings, check_delivery
from kvferry.protocol.errors import KvferryError

# -- messages between the daemon and its store process: length-prefixed msgpack over a socketpair.
#
# Ranges of the arena are raw int64 pairs (offset, size) in the host's byte order, as both ends are on one host.


ARENA: Final = b"A"
"""What the arena's descriptor comes with, ahead of the first message: it is not inherited, as a process that has just
been started can still be looked into."""

LENGTH: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 256 << 20
MAX_HEADER_BYTES: Final = 1 << 20

# Statuses of answers: Mooncake's own, and ours above 0.
OK: Final = 0
MASTER_AWAY: Final = 1
INTERNAL_ERROR: Final = -1
NO_ROOM: Final = -200
INVALID_PARAMS: Final = -600
OBJECT_NOT_FOUND: Final = -704
TRANSFER_FAILED: Final = -800
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901

Range = tuple[int, int]
"""(offset, size) in bytes of a range of the arena."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One message; ``number`` pairs an answer with its request."""


class Begin(_Message, frozen=True):
    """The first message: which store to join, and how."""

    address: str
    master: str
    protocol: str
    segment_bytes: int
    arena_bytes: int
    threads: int


class Ping(_Message, frozen=True):
    """Ask whether the process is alive and its master answers."""

    number: int


class Exists(_Message, frozen=True):
    """Ask which names the store has; after ``until_s`` by ``time.monotonic()`` nobody waits for the answer any more."""

    number: int
    until_s: float
    names: list[str]


class PutBlock(msgspec.Struct, frozen=True, array_like=True):
    """Store the header followed by these ranges of the arena."""

    name: str
    header: bytes
    ranges: bytes


class GetBlock(msgspec.Struct, frozen=True, array_like=True):
    """Fetch an object of exactly this size: the header is returned, the rest goes to these ranges of the arena."""

    name: str
    header_bytes: int
    ranges: bytes


class Put(_Message, frozen=True):
    """Store blocks in one call; each succeeds or fails on its own."""

    number: int
    blocks: list[PutBlock]


class Get(_Message, frozen=True):
    """Fetch blocks in one call; each succeeds or fails on its own."""

    number: int
    blocks: list[GetBlock]


class Remove(_Message, frozen=True):
    """Delete these names, even while others read them."""

    number: int
    names: list[str]


class Began(_Message, frozen=True):
    """The answer to ``Begin``: this node's address for others; or, with an error, the process ends."""

    endpoint: str = ""
    error: str = ""


class Answer(_Message, frozen=True):
    """The answer to all other requests.

    Attributes:
        number: the request's.
        status: ``OK``, ``MASTER_AWAY`` for a ``Ping`` while the master does not answer, or Mooncake's error, below 0.
        found: for ``Exists``, one byte per name, 1 where it exists.
        statuses: for ``Put`` and ``Get``, one per block.
        headers: for ``Get``, one per block; empty where it failed.
    """

    number: int
    status: int = 0
    found: bytes = b""
    statuses: list[int] = []
    headers: list[bytes] = []


Request = Ping | Exists | Put | Get | Remove
FromDaemon = Begin | Request
FromProcess = Began | Answer

_encoder: Final = msgspec.msgpack.Encoder()


def framed(message: FromDaemon | FromProcess) -> bytes:
    """Return the message with its length prefix."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def pack_ranges(ranges: Sequence[Range]) -> bytes:
    """Return ranges as raw int64 pairs."""
    return array("q", [number for one in ranges for number in one]).tobytes()


def unpack_ranges(data: bytes) -> tuple[list[int], list[int]]:
    """Return the ranges' offsets and sizes, in bytes."""
    flat = memoryview(data).cast("q").tolist()
    return flat[::2], flat[1::2]


CLOSE_S: Final = 5
"""After this time an alarm ends the process, whatever Mooncake is doing."""


class Memory:
    """The arena, and a header buffer for each thread, by address."""

    def __init__(self, arena_fd: int, arena_bytes: int, threads: int) -> None:
        self.arena_bytes = arena_bytes
        self._arena = mmap.mmap(arena_fd, arena_bytes)
        self._headers = mmap.mmap(-1, threads * MAX_HEADER_BYTES)
        self.arena_address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self.headers_address = ctypes.addressof(ctypes.c_char.from_buffer(self._headers))
        self.headers_bytes = len(self._headers)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # offsets in the headers' memory
        for thread in range(threads):
            self._free.put(thread * MAX_HEADER_BYTES)

    def buffers(
        self, buffer: int, used_bytes: int, header_bytes: int, ranges: bytes
    ) -> tuple[list[int], list[int]] | None:
        """Return addresses and sizes of a block's header and its ranges of the arena; None where one is out of bounds.

        The header lies in the header buffer at offset ``buffer``, after ``used_bytes`` of earlier headers.
        """
        offsets, sizes = unpack_ranges(ranges)
        for offset, size in zip(offsets, sizes, strict=True):
            if offset < 0 or size <= 0 or offset + size > self.arena_bytes:
                return None
        if header_bytes <= 0 or used_bytes + header_bytes > MAX_HEADER_BYTES:
            return None
        addresses = [self.arena_address + offset for offset in offsets]
        return [self.headers_address + buffer + used_bytes, *addresses], [header_bytes, *sizes]

    def take(self) -> int:
        """Return the offset of a free header buffer; return it with ``give``."""
        return self._free.get()

    def give(self, offset: int) -> None:
        """Free a header buffer."""
        self._free.put(offset)

    def write_header(self, offset: int, header: bytes) -> None:
        """Write a header into the memory that Mooncake reads."""
        self._headers[offset : offset + len(header)] = header

    def read_header(self, offset: int, size_bytes: int) -> bytes:
        """Return a header that Mooncake has fetched."""
        return self._headers[offset : offset + size_bytes]


class StoreProcess:
    """Answers the daemon's requests. Lookups have a thread of their own, so that moving blocks does not delay them."""

    def __init__(self, channel: socket.socket, store: Any, memory: Memory, threads: int) -> None:  # noqa: ANN401 no types
        self._channel = channel
        self._store = store
        self._memory = memory
        self._writing = threading.Lock()
        self._lookups = ThreadPoolExecutor(1, "lookup")
        self._transfers = ThreadPoolExecutor(threads, "transfer")

    def serve(self) -> None:
        """Serve requests until the daemon closes its end."""
        while (request := receive(self._channel)) is not None:
            if isinstance(request, Begin):
                raise TypeError("a second Begin")
            if isinstance(request, Ping):
                status = MASTER_AWAY if self._store.health_check() else 0
                self.send(Answer(request.number, status))
            else:
                pool = self._transfers if isinstance(request, Put | Get) else self._lookups
                pool.submit(self._serve_request, request)

    def finish(self) -> None:
        """Wait for running calls; drop queued ones."""
        self._transfers.shutdown(cancel_futures=True)
        self._lookups.shutdown(cancel_futures=True)

    def send(self, message: FromProcess) -> None:
        """Send a message to the daemon, if it is still there."""
        with self._writing:
            try:
                self._channel.sendall(framed(message))
            except OSError:
                return

    def _serve_request(self, request: Request) -> None:
        try:
            self.send(self._answer(request))
        except Exception as error:  # noqa: BLE001 whatever Mooncake's bindings raise, the daemon awaits an answer
            sys.stderr.write(f"{type(request).__name__} failed: {error!r}\n")
            self.send(Answer(request.number, INVALID_PARAMS))

    def _answer(self, request: Request) -> Answer:
        match request:
            case Exists(number, until_s, names):
                if time.monotonic() > until_s:
                    return Answer(number, RPC_TIMEOUT)
                found = self._store.batch_is_exist(names)
                failed = min(found, default=0)
                return Answer(number, min(failed, 0), found=b"" if failed < 0 else bytes(found))
            case Remove(number, names):
                statuses = [self._store.remove(name, True) for name in names]
                return Answer(number, min((s for s in statuses if s != OBJECT_NOT_FOUND), default=0))
            case Put(number, blocks):
                return self._answer_move(number, [(one, len(one.header)) for one in blocks])
            case Get(number, blocks):
                return self._answer_move(number, [(one, one.header_bytes) for one in blocks])
            case _:
                raise TypeError(f"no answer for {type(request).__name__}")

    def _answer_move(self, number: int, blocks: Sequence[tuple[PutBlock | GetBlock, int]]) -> Answer:
        buffer = self._memory.take()
        try:
            statuses = [INVALID_PARAMS] * len(blocks)
            headers = [b""] * len(blocks)
            moves: list[_Move] = []
            used_bytes = 0
            for index, (block, header_bytes) in enumerate(blocks):
                buffers = self._memory.buffers(buffer, used_bytes, header_bytes, block.ranges)
                if buffers is not None:
                    moves.append(_Move(index, block, buffer + used_bytes, *buffers))
                    used_bytes += header_bytes
            for move, status in zip(moves, self._move(moves), strict=True):
                statuses[move.block_index] = status
                if status == OK and isinstance(move.block, GetBlock):
                    headers[move.block_index] = self._memory.read_header(move.offset, move.sizes[0])
            return Answer(number, statuses=statuses, headers=headers)
        finally:
            self._memory.give(buffer)

    def _move(self, moves: Sequence[_Move]) -> list[int]:
        """Return each move's status. All moves are of one kind."""
        if not moves:
            return []
        names = [move.block.name for move in moves]
        addresses, sizes = [move.addresses for move in moves], [move.sizes for move in moves]
        if isinstance(moves[0].block, PutBlock):
            for move in moves:
                assert isinstance(move.block, PutBlock)
                self._memory.write_header(move.offset, move.block.header)
            return [int(status) for status in self._store.batch_put_from_multi_buffers(names, addresses, sizes)]
        # Mooncake fails where an object is larger or smaller than asked for, so only whole blocks arrive.
        fetched = self._store.batch_get_into_multi_buffers(names, addresses, sizes)
        return [
            OK if got == sum(asked) else min(int(got), INTERNAL_ERROR)
            for got, asked in zip(fetched, sizes, strict=True)
        ]


class _Move(NamedTuple):
    """One block of a call, with the addresses of its header and its bytes."""

    block_index: int
    block: PutBlock | GetBlock
    offset: int
    addresses: list[int]
    sizes: list[int]


def receive(channel: socket.socket) -> FromDaemon | None:
    """Return the daemon's next message; None once it has closed its end."""
    head = _receive_exactly(channel, LENGTH.size)
    if head is None:
        return None
    (size_bytes,) = LENGTH.unpack(head)
    if size_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size_bytes} bytes")
    body = _receive_exactly(channel, size_bytes)
    return None if body is None else cast("FromDaemon", _decoder.decode(body))


def open_store(begin: Begin) -> Any:  # noqa: ANN401 Mooncake has no types
    """Return Mooncake's store after joining, without any memory of this node yet.

    Raises:
        ImportError: Mooncake, or a library that it needs, is missing.
        OSError: joining failed.
    """
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 an optional dependency that maps 40 MB

    store = MooncakeDistributedStore()
    own_buffer_bytes = 0
    status = store.setup(begin.address, P2P, 0, own_buffer_bytes, begin.protocol, "", begin.master)
    if status:
        raise OSError(f"Mooncake's store did not start at {begin.address} with master {begin.master}: {status}")
    return store


def give_memory(store: Any, begin: Begin, memory: Memory) -> list[str]:  # noqa: ANN401
    """Mount this node's segments, and register the arena where the protocol requires it; return the segments' names.

    Raises:
        OSError: the store refused the memory.
    """
    if begin.protocol != "tcp":
        for address, size_bytes in (
            (memory.arena_address, memory.arena_bytes),
            (memory.headers_address, memory.headers_bytes),
        ):
            if status := store.register_buffer(address, size_bytes):
                raise OSError(f"Mooncake's store did not register {size_bytes} bytes: {status}")
    if not begin.segment_bytes:
        return []
    mounted = store.allocate_and_mount_segment(begin.segment_bytes, begin.protocol)
    if mounted["ret"]:
        raise OSError(f"Mooncake's store did not mount {begin.segment_bytes} bytes: {mounted['ret']}")
    segments: list[str] = mounted["segment_ids"]
    return segments


def main(socket_fd: int) -> NoReturn:
    """Serve until the daemon's end of the socket closes."""
    forbid_inspection()  # before there is anything to see
    ignore_but_for_libraries()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # users' content does not belong in core files
    channel = socket.socket(fileno=socket_fd)
    _, fds, _, _ = socket.recv_fds(channel, len(ARENA), 1, socket.MSG_CMSG_CLOEXEC)
    begin = receive(channel)
    if not fds or not isinstance(begin, Begin):
        os._exit(2)
    memory = Memory(fds[0], begin.arena_bytes, begin.threads)
    try:
        check_delivery(MooncakeSettings(section="tiers.remote", address=begin.address, protocol=begin.protocol))
        store = open_store(begin)
        segments = give_memory(store, begin, memory)
    except (ImportError, OSError, KvferryError) as error:
        channel.sendall(framed(Began(error=str(error))))
        os._exit(1)
    process = StoreProcess(channel, store, memory, begin.threads)
    process.send(Began(endpoint=store.get_hostname()))
    process.serve()
    end_within(CLOSE_S)
    process.finish()
    if segments:
        store.unmount_and_free_segment(segments)  # so that other nodes do not ask for its blocks
    os._exit(0)  # skips close, which takes two seconds, and destructors


def _receive_exactly(channel: socket.socket, size_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < size_bytes:
        received = channel.recv(min(size_bytes - len(data), 1 << 20))
        if not received:
            return None
        data += received
    return bytes(data)


_decoder: Final = msgspec.msgpack.Decoder(FromDaemon)

if __name__ == "__main__":
    main(int(sys.argv[1]))
