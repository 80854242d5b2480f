"""What a call was given counts: its arguments may be used for something else as soon as it has returned.

Each call is made twice, with equal arguments: those of the first one are left alone, those of the second one are
overwritten. What the daemon is sent has to be equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvferry.clients import (
    AsyncClient,
    BlockTableEntries,
    Client,
    MhaSpec,
    Tables,
    async_client,
    calls,
    pages,
    sync_client,
)
from kvferry.clients.arguments import device_names
from kvferry.clients.batch import Batch
from kvferry.clients.calls import asked, joined
from kvferry.clients.connection import Reconnected
from kvferry.protocol.base import RequestBody
from kvferry.protocol.codec import Frames, IncomingRequest, decode_request, split
from kvferry.protocol.envelope import Batch as BatchBody
from kvferry.protocol.pool_messages import Allocate, Free
from kvferry.protocol.session_messages import Hello
from kvferry.protocol.settings import CONTROL_SOCKET, SESSION_SOCKET
from kvferry.protocol.table_messages import UpdateTables
from kvferry.protocol.tier_messages import HASH_BYTES, Load, Lookup, Offload, Restore, Store
from kvferry.protocol.transfer_messages import Abandon, Receive, Send
from tests.kit.cutting_proxy import CuttingProxy, cutting_proxy
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE

CONFIG: Final = "[service]\nresume_grace_s = 60.0\n[tiers]\nhost_bytes = 1048576\n"
SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
REQUEST: Final = "ab" * 16
OVERWRITTEN: Final = 77

T = TypeVar("T")


class Arguments:
    """Makes arguments that can be changed, and changes them all."""

    def __init__(self, numbers: Sequence[int], made: str) -> None:
        """``made``: of what ids are."""
        self._numbers = numbers
        self._made = made
        self._changed: list[Callable[[], object]] = []

    def ids(self) -> Any:  # noqa: ANN401  what callers give
        """Return ids, as an array or a list."""
        if self._made == "list":
            return self.several(*self._numbers)
        dtype = np.int32 if self._made == "int32" else np.int64
        array = np.repeat(np.array(self._numbers, dtype), 2)[:: 2 if self._made == "strided" else 1]
        self._changed.append(lambda: array.fill(OVERWRITTEN))
        return array

    def count(self) -> int:
        return len(self.ids())

    def several(self, *members: T) -> list[T]:
        made = list(members)
        self._changed.append(made.clear)
        return made

    def by_row(self) -> dict[int, Any]:
        made = {0: self.ids()}
        self._changed.append(made.clear)
        return made

    def payload(self) -> Any:  # noqa: ANN401  bytes of any kind
        made = bytearray(b"given")
        self._changed.append(lambda: made.__setitem__(slice(None), b"taken"))
        return memoryview(made) if self._made == "strided" else made

    def overwrite(self) -> None:
        for one in self._changed:
            one()


def hashes(made: Arguments) -> list[bytes]:
    return made.several(*(bytes([one]) * HASH_BYTES for one in range(made.count())))


Submit = Callable[[Any, Arguments, Tables], object]
CALLS: Final[Mapping[type[RequestBody], Submit]] = {
    Send: lambda to, made, _: to.send("pool", REQUEST, made.several(pages(made.ids())), payload=made.payload()),
    Receive: lambda to, made, _: to.receive(
        "pool", REQUEST, made.several(pages(made.ids())), source_daemons=made.several("tcp://192.0.2.7:7801")
    ),
    Offload: lambda to, made, _: to.offload("pool", made.several(pages(made.ids()))),
    Restore: lambda to, made, _: to.restore("pool", REQUEST, made.several(pages(made.ids()))),
    Store: lambda to, made, _: to.store("pool", hashes(made), made.ids()),
    Load: lambda to, made, _: to.load("pool", 1, made.ids()),
    Lookup: lambda to, made, _: to.begin(asked(Lookup(pool="pool", hashes=joined(hashes(made))))),
    Free: lambda to, made, _: to.begin(calls.free("pool", made.ids(), "main", None)),
    Allocate: lambda to, made, _: to.begin(calls.allocate_each("pool", made.several(64, 64), "main")),
    Abandon: lambda to, made, _: to.begin(
        asked(Abandon(request_id=REQUEST, direction="send", daemons=made.several("tcp://192.0.2.7:7801")))  # type: ignore[arg-type]
    ),
    UpdateTables: lambda to, made, tables: to.update_tables(
        tables,
        made.ids(),
        entries=BlockTableEntries(made.ids(), made.ids(), made.ids()),
        rows=made.by_row(),
        released=made.ids(),
        bound=made.several(made.ids(), made.ids()),
    ),
}


class Sent(NamedTuple):
    """A request as the daemon is sent it."""

    number: tuple[int, int]
    body: RequestBody
    ids: tuple[tuple[int, ...], ...]


class Wire:
    """What clients send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sent: list[Sent] = []
        self._taken: set[tuple[int, int]] = set()
        for module in (sync_client, async_client):
            monkeypatch.setattr(module, "send_frames", self._noting(module.send_frames))

    def _noting(self, send: Callable[[Any, Frames], None]) -> Callable[[Any, Frames], None]:
        def noted(socket: Any, frames: Frames) -> None:  # noqa: ANN401
            incoming = decode_request([bytes(one) for one in frames])
            assert isinstance(incoming, IncomingRequest)
            body = incoming.request.body
            parts = body.requests if isinstance(body, BatchBody) else (body,)
            for at, (part, ids) in enumerate(zip(parts, split(parts, incoming.ids), strict=True)):
                lists = tuple(tuple(one.tolist()) for one in ids)
                self._sent.append(Sent((incoming.request.message_id, at), part, lists))
            send(socket, frames)

        return noted

    def take(self) -> list[list[Sent]]:
        """Return what was first sent since the last time, each request as often as it was.

        After a cut a client sends again what is unanswered of the time before.
        """
        taken: dict[tuple[int, int], list[Sent]] = {}
        for one in self._sent:
            if not isinstance(one.body, Hello) and one.number not in self._taken:
                taken.setdefault(one.number, []).append(one)
        self._sent = []
        self._taken.update(taken)
        return list(taken.values())


class Engine(NamedTuple):
    """A client and what it talks through."""

    client: Any
    runner: asyncio.Runner
    tables: Tables
    proxy: CuttingProxy
    told: list[Reconnected]
    wire: Wire

    def once(self, condition: Callable[[], bool], call: Callable[[], object]) -> None:
        """Let the client take what comes until the condition holds; call then, before it takes anything more."""

        async def awaited() -> None:
            while not condition():
                await self.client.poll(0)
            call()

        if isinstance(self.client, AsyncClient):
            self.runner.run(awaited())
            return
        while not condition():
            self.client.poll(0.001)
        call()


@pytest.fixture(scope="module", params=[Client, AsyncClient], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Engine]:
    """Return an engine with a client of each kind, which can be cut off."""
    told: list[Reconnected] = []
    kind: type[Client | AsyncClient] = request.param
    with (
        cutting_proxy(daemon.runtime_dir) as proxy,
        asyncio.Runner() as runner,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):

        async def begun() -> tuple[AsyncClient, Tables]:
            client = await AsyncClient.connect(proxy.runtime_dir, on_reconnect=told.append)
            await client.create_pool("pool", SPEC)
            return client, await client.create_tables("tables", "pool", max_batch=2, max_context_tokens=16)

        client: Client | AsyncClient
        if kind is AsyncClient:
            client, tables = runner.run(begun())
        else:
            client = Client.connect(proxy.runtime_dir, on_reconnect=told.append)
            client.create_pool("pool", SPEC)
            tables = client.create_tables("tables", "pool", max_batch=2, max_context_tokens=16)
        wire = Wire(monkeypatch)
        yield Engine(client, runner, tables, proxy, told, wire)
        client.close()


def all_twice(to: Client | AsyncClient | Batch, numbers: Sequence[int], made: str, tables: Tables) -> None:
    """Make each call, and again with arguments that are overwritten."""
    for submit in CALLS.values():
        submit(to, Arguments(numbers, made), tables)
        arguments = Arguments(numbers, made)
        submit(to, arguments, tables)
        arguments.overwrite()


def assert_taken(sent: list[list[Sent]], *, times: int = 1) -> None:
    """Check that the daemon was sent what the calls were given, each so often."""
    bodies = [one[0].body for one in sent]
    assert [type(one) for one in bodies] == [kind for kind in CALLS for _ in range(2)]
    for left, overwritten in zip(sent[::2], sent[1::2], strict=True):
        assert len(left) == len(overwritten) == times
        for one in (*left, *overwritten):
            assert (one.body, one.ids) == (left[0].body, left[0].ids)


@pytest.mark.parametrize("situation", ["batched", "away", "cut"])
@DEVICE.examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    numbers=st.lists(st.integers(0, 1 << 30), min_size=2, max_size=2),
    made=st.sampled_from(["int64", "int32", "strided", "list"]),
)
def test_arguments_are_taken(engine: Engine, situation: str, numbers: list[int], made: str) -> None:
    client, known = engine.client, len(engine.told)

    def submit() -> None:
        if situation == "batched":
            with client.batched() as step:
                all_twice(step, numbers, made, engine.tables)
        else:
            all_twice(client, numbers, made, engine.tables)

    if situation == "away":
        engine.proxy.cut(CONTROL_SOCKET, SESSION_SOCKET)
    elif situation == "cut":
        engine.proxy.cut_at(1, CONTROL_SOCKET, SESSION_SOCKET, forwards=False)
    engine.once(lambda: client.is_away == (situation == "away"), submit)
    engine.once(lambda: situation == "batched" or len(engine.told) > known, lambda: None)
    assert_taken(engine.wire.take(), times=2 if situation == "cut" else 1)


def test_what_pages_was_given() -> None:
    ids = np.array([1, 2])
    one = pages(ids)
    ids[:] = 5
    assert calls.page_lists([one])[1] == (np.array([1, 2]).tobytes(),)


def test_what_connect_was_given() -> None:
    given_names = {"npu:3": "npu:0"}
    names = device_names(given_names)
    given_names.clear()
    assert names == {"npu:3": "npu:0"}
