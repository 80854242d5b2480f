"""The store process with a scripted store in Mooncake's place: what it answers, and what it never hands on.

And blocks that wait for it together, with a scripted link in its own place.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest

from kvferry.daemon.tiers.store_link import (
    MAX_CALL_BLOCKS,
    MAX_CALL_BYTES,
    Moved,
    StoreAwayError,
    StoreLink,
    StoreMoves,
)
from kvferry.daemon.tiers.store_process import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    LENGTH,
    MASTER_AWAY,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    OBJECT_NOT_FOUND,
    RPC_FAIL,
    RPC_TIMEOUT,
    Answer,
    Begin,
    Exists,
    FromDaemon,
    Get,
    GetBlock,
    Memory,
    Ping,
    Put,
    PutBlock,
    Remove,
    StoreProcess,
    framed,
    pack_ranges,
    receive,
)
from tests.kit.tiers import settle

pytestmark = pytest.mark.anyio
ARENA_BYTES = 1 << 16


class _ScriptedStore:
    """Mooncake's store as far as it is used: ``status`` is what the next calls say; ``asked`` what they were given."""

    def __init__(self) -> None:
        self.status = 0
        self.asked: list[object] = []

    def health_check(self) -> int:
        return self.status

    def batch_is_exist(self, names: list[str]) -> list[int]:
        """See Mooncake: it has what begins with "a"."""
        self.asked.append(names)
        return [self.status or int(name.startswith("a")) for name in names]

    def remove(self, name: str, force: bool, /) -> int:  # noqa: FBT001  Mooncake's own signature
        assert force
        self.asked.append(name)
        return self.status if name.startswith("a") else OBJECT_NOT_FOUND

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.asked.append((names, addresses, sizes))
        return [self.status] * len(names)

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """See Mooncake: what is stored is as long as what is asked for, unless ``status`` says otherwise."""
        self.asked.append((names, addresses, sizes))
        return [self.status or sum(of_one) for of_one in sizes]


class _Daemon:
    def __init__(self, channel: socket.socket, store: _ScriptedStore, memory: Memory) -> None:
        self.store = store
        self.memory = memory
        self._channel = channel

    def ask(self, request: FromDaemon) -> Answer:
        self._channel.sendall(framed(request))
        (size_bytes,) = LENGTH.unpack(self._channel.recv(LENGTH.size, socket.MSG_WAITALL))
        return msgspec.msgpack.decode(self._channel.recv(size_bytes, socket.MSG_WAITALL), type=Answer)


@pytest.fixture
def daemon() -> Iterator[_Daemon]:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, ARENA_BYTES)
    memory, store, (ours, theirs) = Memory(fd, ARENA_BYTES, 1), _ScriptedStore(), socket.socketpair()
    process = StoreProcess(theirs, store, memory, 1)
    serving = threading.Thread(target=process.serve)
    serving.start()
    with theirs, ours:
        yield _Daemon(ours, store, memory)
        ours.shutdown(socket.SHUT_WR)
        serving.join()
        process.finish()
    os.close(fd)


def test_a_ping_says_whether_the_master_answers(daemon: _Daemon) -> None:
    assert daemon.ask(Ping(1)) == Answer(1)
    daemon.store.status = 2
    assert daemon.ask(Ping(2)) == Answer(2, MASTER_AWAY)


def test_nobody_is_asked_for_who_waits_no_more(daemon: _Daemon) -> None:
    assert daemon.ask(Exists(1, time.monotonic() - 1, ["a"])) == Answer(1, RPC_TIMEOUT)
    assert not daemon.store.asked


def test_remove_takes_what_is_not_there_for_removed(daemon: _Daemon) -> None:
    assert daemon.ask(Remove(1, ["a", "b"])) == Answer(1)
    assert daemon.store.asked == ["a", "b"]
    daemon.store.status = RPC_FAIL
    assert daemon.ask(Remove(2, ["b", "a"])) == Answer(2, RPC_FAIL)


def put(name: str, *ranges: tuple[int, int], header: bytes = b"header") -> PutBlock:
    return PutBlock(name, header, pack_ranges(ranges))


def get(name: str, *ranges: tuple[int, int], header_bytes: int = 6) -> GetBlock:
    return GetBlock(name, header_bytes, pack_ranges(ranges))


def test_put_gives_headers_and_ranges_in_order(daemon: _Daemon) -> None:
    blocks = [put("a", (4096, 10), (0, 20)), put("b", (1, 2), header=b"another")]
    assert daemon.ask(Put(1, blocks)) == Answer(1, statuses=[0, 0], headers=[b"", b""])
    arena, headers = daemon.memory.arena_address, daemon.memory.headers_address
    addresses = [[headers, arena + 4096, arena], [headers + 6, arena + 1]]
    assert daemon.store.asked == [(["a", "b"], addresses, [[6, 10, 20], [7, 2]])]
    assert daemon.memory.read_header(0, 13) == b"headeranother"
    daemon.store.status = RPC_FAIL
    assert daemon.ask(Put(2, [put("a", (0, 1))])).statuses == [RPC_FAIL]


def test_get_returns_headers(daemon: _Daemon) -> None:
    daemon.memory.write_header(0, b"headeranother")
    blocks = [get("a", (8, 10)), get("b", (30, 1), header_bytes=7)]
    assert daemon.ask(Get(1, blocks)) == Answer(1, statuses=[0, 0], headers=[b"header", b"another"])
    for status, answered in ((OBJECT_NOT_FOUND, OBJECT_NOT_FOUND), (15, INTERNAL_ERROR), (17, INTERNAL_ERROR)):
        daemon.store.status = status
        assert daemon.ask(Get(2, [get("a", (8, 10))])) == Answer(2, statuses=[answered], headers=[b""])


OUTSIDE = [(-1, 1), (0, 0), (0, -1), (ARENA_BYTES, 1), (1, ARENA_BYTES), (1 << 62, 1 << 62)]


def test_a_range_outside_of_the_arena_and_a_header_that_has_no_room_go_nowhere(daemon: _Daemon) -> None:
    whole = (0, ARENA_BYTES)
    for wrong in OUTSIDE:
        assert daemon.ask(Put(1, [put("a", whole, wrong)])).statuses == [INVALID_PARAMS]
        assert daemon.ask(Get(2, [get("a", whole, wrong)])).statuses == [INVALID_PARAMS]
    for size_bytes in (0, -1, MAX_HEADER_BYTES + 1):
        assert daemon.ask(Get(3, [get("a", whole, header_bytes=size_bytes)])).statuses == [INVALID_PARAMS]
    assert not daemon.store.asked
    # Room for headers is given back, or this would wait for ever. Other blocks of a call go on, but no room is left.
    blocks = [get("a", OUTSIDE[0]), get("b", whole, header_bytes=MAX_HEADER_BYTES), get("c", whole)]
    assert daemon.ask(Get(4, blocks)).statuses == [INVALID_PARAMS, 0, INVALID_PARAMS]


def test_a_message_that_is_too_long_is_not_read_and_an_end_within_one_is_an_end() -> None:
    begin = framed(Begin("127.0.0.1", "127.0.0.1:1", "tcp", 0, mmap.PAGESIZE, 1))
    for cut in (0, 1, LENGTH.size, len(begin) - 1):
        ours, theirs = socket.socketpair()
        with theirs:
            ours.sendall(begin[:cut])
            ours.close()
            assert receive(theirs) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(LENGTH.pack(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ValueError, match="bytes"):
            receive(theirs)


# -- blocks on their way


class _ScriptedLink:
    """A store process that answers when the test says so, and what moves over its one slot."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.calls: deque[tuple[Put | Get, asyncio.Future[Answer]]] = deque()
        self.told_to_die = asyncio.Event()
        self.next_number = itertools.count(1).__next__
        self._moves = StoreMoves(1, timeout_s, lambda: cast("StoreLink", self))

    def ask(self, request: Put | Get) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.calls.append((request, answer))
        return answer

    def kill(self, _why: str) -> None:
        self.told_to_die.set()

    async def begin(self, *blocks: PutBlock | GetBlock, size_bytes: int = 1) -> list[asyncio.Task[Moved | None]]:
        """Let blocks be moved; return once they wait or are under way."""
        tasks = [asyncio.create_task(self._moves.move(block, size_bytes)) for block in blocks]
        await settle()
        return tasks

    async def answer(self, status: int = 0) -> list[str]:
        """End the oldest call so, for each of its blocks; return their names."""
        request, answer = self.calls.popleft()
        count = len(request.blocks)
        answer.set_result(Answer(request.number, statuses=[status] * count, headers=[b"header"] * count))
        await settle()
        return [block.name for block in request.blocks]

    async def answer_all(self) -> list[list[str]]:
        called = []
        while self.calls:
            called.append(await self.answer())
        return called


async def test_what_waits_goes_together_and_gets_first() -> None:
    link = _ScriptedLink()
    tasks = await link.begin(put("first"), put("a"), put("b"), get("c"), get("d"))
    assert await link.answer_all() == [["first"], ["c", "d"], ["a", "b"]]
    assert await asyncio.gather(*tasks) == [Moved(0, b"header")] * 5


async def test_a_call_is_bounded() -> None:
    link = _ScriptedLink()
    for size_bytes in (1, *[MAX_CALL_BYTES // 2] * 3, MAX_CALL_BYTES + 1):
        await link.begin(get("a"), size_bytes=size_bytes)
    assert [len(one) for one in await link.answer_all()] == [1, 2, 1, 1]
    await link.begin(*[get("a")] * (MAX_CALL_BLOCKS + 2), *[get("a", header_bytes=MAX_HEADER_BYTES)] * 2)
    assert [len(one) for one in await link.answer_all()] == [1, MAX_CALL_BLOCKS, 1, 1, 1]


async def test_each_block_has_its_own_end() -> None:
    link = _ScriptedLink()
    first, *tasks = await link.begin(put("first"), get("a"), get("b"), get("c"))
    await link.answer(RPC_FAIL)
    request, answer = link.calls.popleft()
    answer.set_result(Answer(request.number, statuses=[0, OBJECT_NOT_FOUND], headers=[b"x", b""]))
    assert await first == Moved(RPC_FAIL, b"header")
    assert await asyncio.gather(*tasks) == [Moved(0, b"x"), Moved(OBJECT_NOT_FOUND), Moved(INVALID_PARAMS)]


async def test_a_call_that_takes_too_long_ends_the_process_and_what_waits_for_it_is_given_up() -> None:
    link = _ScriptedLink(timeout_s=0.25)
    under_way, waits = await link.begin(get("a"), get("b"))
    assert await waits is None
    await link.told_to_die.wait()
    assert not under_way.done(), "until it has ended it may write"
    link.calls.popleft()[1].set_exception(StoreAwayError("killed"))
    assert await under_way is None
    assert not link.calls, "nobody asks for what was given up"
    (task,) = await link.begin(get("c"))
    await link.answer()
    assert await task == Moved(0, b"header")


async def test_a_caller_that_is_cancelled_returns_when_it_is_settled() -> None:
    link = _ScriptedLink()
    (task,) = await link.begin(get("a"))
    for _ in range(2):
        task.cancel()
        await settle()
        assert not task.done()
    await link.answer()
    with pytest.raises(asyncio.CancelledError):
        await task
