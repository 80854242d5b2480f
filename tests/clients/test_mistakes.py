"""Mistakes of somebody who writes an engine: each is a typed error that names the argument and says what to do.

One table for both clients, and one daemon for all. A type checker finds many of them, and is told here not to.
"""

# mypy: disable-error-code="arg-type, unreachable"

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from fractions import Fraction
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvferry import clients
from kvferry.clients import AsyncClient, Client, MhaSpec, block_hashes, new_request_id, pages
from kvferry.protocol import errors
from kvferry.protocol.base import DeviceEvent
from tests.kit.blocking import Blocking, connected
from tests.kit.daemons import Daemon

CONFIG: Final = "[tiers]\nhost_bytes = 1048576\n"
"""A daemon that knows no other pools."""

SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
RID: Final = new_request_id()
ARRAY: Final = np.array([1, 2])
ONE: Final = [pages([1])]
NAMES: Final = (
    {name: getattr(clients, name) for name in clients.__all__}
    | {one.__name__: one for one in (replace, Path, UUID, DeviceEvent)}
    | {"np": np, "torch": torch, "SPEC": SPEC, "RID": RID, "ARRAY": ARRAY, "ONE": ONE}
)
"""What the calls of the table use, beside an engine's own."""


class Engine:
    """An engine with all that a mistake can be made with: the names that the calls of the table use."""

    def __init__(self, stack: ExitStack, runtime_dir: Path, kind: type[Any]) -> None:
        def connect(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  a client
            return stack.enter_context(connected(kind, *arguments, **named))

        self.runtime_dir, self.kind, self.connect = runtime_dir, kind, connect
        self.p = kind.__name__
        self.c = connect(runtime_dir, name=self.p)
        self.closed = connect(runtime_dir)
        self.looker = connect(runtime_dir, session=False)
        other = connect(runtime_dir, name="other")
        self.pool = self.c.create_pool(self.p, SPEC)
        self.c.create_pool(self.p + "-full", replace(SPEC, tokens=8))
        self.c.allocate(self.p + "-full", 2)
        self.ids = self.c.allocate(self.p, 3)
        self.theirs = other.allocate(self.p, 2)
        self.freed = self.c.allocate(self.p, 1)
        self.c.free(self.p, self.freed)
        self.tables, self.deleted = (
            self.c.create_tables(name, self.p, max_batch=2, max_context_tokens=16) for name in "tu"
        )
        self.c.delete_tables(self.deleted)
        self.ring = self.c.open_events()
        self.recorded = self.ring.step(0, 1)
        self.ring.record(self.recorded)
        self.transfer = self.c.receive(self.p, new_request_id(), [pages(self.ids)], deadline_s=600)
        self.their_transfer = other.receive(self.p, new_request_id(), [pages(self.theirs)])
        self.operation = self.c.restore(self.p, "0" * 32, None)
        self.unsent = self.c.batched().offload(self.p, [pages(self.ids)])
        self.taken = self.c.update_tables(self.tables, [])
        self.c.wait(self.taken)
        self.closed.close()

    def run(self, call: str) -> object:
        return eval(call, NAMES | vars(self))  # noqa: S307  our own text


@pytest.fixture(scope="module")
def engines(daemon: Daemon) -> Iterator[dict[type[Any], Engine]]:
    with ExitStack() as stack:
        yield {kind: Engine(stack, daemon.runtime_dir, kind) for kind in (Client, AsyncClient)}


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, engines: dict[type[Any], Engine]) -> Engine:
    return engines[request.param]


MISTAKES: Final[tuple[tuple[str, ...], ...]] = (
    # -- page lists and page ids
    ("c.send(p, RID, ids)", "lists[0]", "give [pages(ids)]"),
    ("c.receive(p, RID, pages([1]))", "lists", "give [pages(ids)]"),
    ("c.offload(p, None)", "lists", "None is no list of Pages"),
    ("c.free(p, pages([1]))", "ids", "here give their ids"),
    ("c.free(p, 3)", "ids", "give [id] for one page"),
    ("pages(np.array([1.0]))", "ids", "float64 is no list of integers"),
    ("pages(np.array([2**63], np.uint64))", "ids", "does not fit in a signed 64-bit integer"),
    ("c.load(p, 1, pool)", "ids", "refer to a pool by its name"),
    ("pages([1], tokens=0)", "tokens", ">= 1"),
    ("c.receive(p, RID, [pages_wanted(2)])", "lists[0]", "here give pages(ids)"),
    # -- pools
    ("c.allocate(pool, 1)", "pool", "pool.name"),
    ("c.create_pool(pool, SPEC)", "name", "pool.name"),
    ("c.create_pool('x', {'layers': 1})", "spec", "MhaSpec(...)"),
    ("c.create_pool('x', replace(SPEC, layers='2'))", "spec.layers", "Expected `int`, got `str`"),
    ("c.create_pool('x', replace(SPEC, dtype=torch.float16))", "spec.dtype", "give its name, 'float16'"),
    ("c.create_pool('x', replace(SPEC, dtype='float3'))", "dtype", "float3"),
    ("c.create_pool('my pool', SPEC)", "name", "letters, digits"),
    ("c.create_pool('x', SPEC, device='gpu')", "device", "npu:N or cuda:N"),
    ("c.register_pool('x', SPEC, [torch.zeros(1)], device='npu:0')", "tensors", "(component, role)"),
    ("pool.entry_array('k')", "entry", "'k' is no entry, as manifest.entries"),
    ("pool.array(ARRAY, 'k')", "component", "array([1, 2]) is no text"),
    ("c.register_pool('x', SPEC, {('main', r): 5 for r in 'kv'}, device='npu:0')", "main/k", "not a strided"),
    ("c.allocate('nowhere', 1)", "pool", "who has 'Client', 'Client-full'", "UNKNOWN_POOL"),
    (
        "c.create_pool(p, replace(SPEC, dtype='bfloat16'))",
        "spec",
        "k/0 is float32, asked for bfloat16; ",
        "POOL_EXISTS",
    ),
    ("c.create_pool(p, replace(SPEC, layers=3))", "spec", "main/k/2 is not in the pool", "POOL_EXISTS"),
    ("c.delete_pool(p)", "pool", "2 held by session", "POOL_IN_USE"),
    # -- pages
    ("c.allocate(p + '-full', 1)", "count", f"of process {os.getpid()}, the caller (free pages, ", "POOL_FULL"),
    ("c.allocate(p, 0)", "count", ">= 1"),
    ("c.allocate(p, count=True)", "count", "got `bool`"),
    ("c.allocate(p, 10**5000)", "count", "a int is no"),
    ("c.allocate(p, 1, 'swa')", "space", "it has main", "UNKNOWN_COMPONENT"),
    ("c.free(p, freed)", "pages", "already freed", "NOT_OWNER"),
    ("c.free(p, theirs)", "pages", "owned by another instance", "NOT_OWNER"),
    ("c.free(p, [int(ids[0])] * 2)", "pages", "more than once", "DUPLICATE_PAGE"),
    ("c.free(p, [])", "pages", "no page", "EMPTY_PAGES"),
    ("c.free(p, [0])", "pages", "page 0", "PAGE_OUT_OF_RANGE"),
    ("c.free(p, [1], after=ring)", "after", "ring.record_event()"),
    # -- transfers
    ("c.send(p, UUID(RID), ONE)", "request_id", "request_id.hex"),
    ("c.receive(p, 'abc', ONE)", "request_id", "32 hexadecimal digits in lower case"),
    ("c.send(p, RID, ONE, payload='x')", "payload", "Expected `bytes`, got `str`"),
    ("c.wait_finished(c.send(p, RID, payload=bytes(1 << 17)), 20)", "payload", "takes 65536: create it", "TOO_LARGE"),
    ("c.send(p, RID, ONE, last=1)", "last", "Expected `bool`"),
    ("c.receive(p, RID, ONE, destinations=0)", "destinations", ">= 1"),
    ("c.send(p, RID, ONE, steps=ring)", "steps", "ring.step"),
    ("c.send(p, RID, ONE, steps=[ring.step(0, 0)])", "steps[0].layers", ">= 1"),
    ("c.receive(p, RID, ONE, source_daemons='tcp://h:1')", "source_daemons", "no list of"),
    ("c.receive(p, RID, ONE, source_daemons=['h:1'])", "source_daemons[0]", "tcp://ADDRESS"),
    ("c.wait_finished(c.send(p, RID, [pages(theirs)]), 20)", "lists[0].pages", "owned by another", "NOT_OWNER"),
    ("c.wait_finished(RID)", "transfer", "as send and receive return"),
    ("c.wait_finished(operation)", "transfer", "for wait_done"),
    ("c.wait_finished(their_transfer)", "transfer", "another client's"),
    ("transfer.outcome()", "", "is not finished: call wait_finished", "MISUSE"),
    ("unsent.outcome()", "", "is not done: call wait_done", "MISUSE"),
    ("c.cancel(RID)", "transfer", "is no transfer"),
    ("c.cancel(their_transfer)", "transfer", "another client's"),
    # -- times
    ("c.send(p, RID, ONE, deadline_s=-1)", "deadline_s", "-1 seconds; give from 0"),
    ("c.create_pool('x', SPEC, deadline_s=float('inf'))", "deadline_s", "inf seconds"),
    ("c.store(p, [b'h' * 16], [1], deadline_s=3601)", "deadline_s", "at most 3600"),
    ("c.send(p, RID, ONE, deadline_s=10**400)", "deadline_s", "inf seconds; give from 0"),
    ("c.wait_finished(transfer, -0.5)", "timeout_s", "-0.5 seconds"),
    ("c.cache_events(1, timeout_s='x')", "timeout_s", "'x'"),
    # -- tables and events
    ("c.update_tables('t', [1])", "tables", "as create_tables returns them"),
    ("c.wait(c.update_tables(deleted, []))", "tables", "'u'", "UNKNOWN_TABLES"),
    ("c.update_tables(tables, 5)", "lengths", "5 is no list"),
    ("c.update_tables(tables, [1], rows=ARRAY)", "rows", "mapping of row"),
    ("tables.graph_inputs(operators='x')", "operators", "whole number"),
    ("c.update_tables(tables, [1], rows={0: 4})", "rows[0]", "[id]"),
    ("c.update_tables(tables, [1], entries=([0], [0], [1]))", "entries", "BlockTableEntries(rows, columns, pages)"),
    ("c.update_tables(tables, [1], bound=[1])", "bound", "pair of"),
    ("c.update_tables(tables, [1], extra_tokens=-1)", "extra_tokens", ">= 0"),
    ("c.create_tables('v', p, max_batch=0, max_context_tokens=4)", "max_batch", ">= 1"),
    ("c.wait(tables)", "pending", "is no pending reply"),
    ("c.wait(transfer)", "pending", "wait_finished"),
    ("c.wait(taken)", "pending", "keep what wait returned"),
    ("ring.record(recorded)", "step", "record each step once"),
    ("ring.record(3)", "step", "3 is no step"),
    ("ring.record(DeviceEvent(event=-1, value=1))", "step", "no event -1"),
    ("ring.record(DeviceEvent(event='0', value='1'))", "step.event", "'0' is no whole number"),
    ("c.open_events('gpu:0')", "device", "npu:N or cuda:N"),
    # -- tiers
    ("c.restore(p, operation)", "snapshot", "for wait_done"),
    ("c.wait_done(transfer)", "operation", "for wait_finished"),
    ("c.cancel_operation(3)", "operation", "as offload, restore"),
    ("c.lookup(p, ['0' * 16])", "hashes[0]", "no hash of 16 bytes"),
    ("c.store(p, [bytes(16)], [1], parent='0' * 16)", "parent", "Expected `bytes`, got `str`"),
    ("c.unpin(12345)", "lease", "", "UNKNOWN_LEASE"),
    ("c.evict_cached([bytes(16)])", "identity", "give its pool, or its identity"),
    ("c.evict_cached(pool=p, identity='0' * 32)", "identity", "give one of them"),
    ("block_hashes([1, 2], 0)", "block_tokens", "give 1 or more"),
    ("block_hashes([1], 1, salt='user')", "salt", "salt.encode()"),
    ("pages_from_slots([1], '4')", "page_size", "whole number"),
    # -- clients
    ("c.call('PING')", "call", "'PING' is no Operation, as"),
    ("c.begin(None)", "call", "None is no Operation, as"),
    ("closed.allocate(p, 1)", "", "connect again", "CLIENT_CLOSED"),
    ("closed.poll()", "", "the client was closed", "CLIENT_CLOSED"),
    ("looker.allocate(p, 1)", "secret", "open a session", "NO_SESSION"),
    ("kind(runtime_dir)", "", "connect(runtime_dir, name=...)", "MISUSE"),
    ("connect(5)", "runtime_dir", "5 is no path"),
    ("connect(runtime_dir, session=ARRAY)", "session", "array([1, 2]) is no True or False"),
    ("connect(runtime_dir, name=np.datetime64('2020-01-01'))", "name", "no value that can be sent"),
    ("connect(runtime_dir, devices=['npu:0'])", "devices", "mapping of"),
)  # fmt: skip


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row[0])
def test_a_mistake(engine: Engine, row: tuple[str, ...]) -> None:
    call, field, text, code = row if len(row) == 4 else (*row, "INVALID_FIELD")
    with pytest.raises(errors.KvferryError) as raised:
        engine.run(call)
    error = raised.value
    assert (error.code, error.field) == (code, field), error
    assert text in str(error)
    assert error.remedy


def test_no_mistake_has_left_anything(engine: Engine) -> None:
    """Run last: the engine that has made every mistake works, and has what it had."""
    assert engine.c.ping() > 0
    assert len(engine.c.allocate(engine.p, 11)) == 11, "16 pages, 5 of them taken"


@pytest.mark.anyio
async def test_an_unawaited_call_as_an_argument_is_named(daemon: Daemon) -> None:
    async with AsyncClient.connect(daemon.runtime_dir) as client:
        unawaited = client.allocate("AsyncClient", 1)
        with contextlib.closing(unawaited), pytest.raises(errors.InvalidFieldError, match="await it first") as raised:
            await client.free("AsyncClient", unawaited)
        assert raised.value.field == "ids"


@pytest.mark.parametrize("use", ["c.ping()", "c.create_pool('x', SPEC)", "c.send('p', 'r', [])", "c.boot_id"])
def test_a_client_that_nobody_awaited_is_named(daemon: Daemon, use: str) -> None:
    with contextlib.closing(AsyncClient.connect(daemon.runtime_dir)) as connecting:
        with pytest.raises(errors.MisuseError, match="await it first"):
            eval(use, NAMES | {"c": connecting})  # noqa: S307  our own text
        assert not hasattr(connecting, "no_name_of_a_clients")


@pytest.mark.anyio
async def test_a_connection_is_awaited_once(daemon: Daemon) -> None:
    awaited: list[Callable[[Any], Any]] = [lambda one: one, asyncio.ensure_future, lambda one: one.__aenter__()]
    for first, second in zip(awaited, awaited[1:] + awaited[:1], strict=True):
        connecting = AsyncClient.connect(daemon.runtime_dir)
        async with await first(connecting) as client:
            with pytest.raises(errors.MisuseError, match="already awaited: keep the client"):
                await second(connecting)
            assert await client.ping() > 0
        with pytest.raises(errors.ClientClosedError):
            await client.ping()


@pytest.mark.anyio
async def test_an_asynchronous_client_is_entered_by_async_with(daemon: Daemon) -> None:
    connecting = AsyncClient.connect(daemon.runtime_dir)
    made = await asyncio.create_task(AsyncClient.connect(daemon.runtime_dir))
    for one in (connecting, made):
        with pytest.raises(errors.MisuseError, match="async with AsyncClient"), one:
            pass
    made.close()


def test_a_synchronous_client_is_entered_by_with(daemon: Daemon) -> None:
    async def enter(client: Client) -> None:
        async with client:
            pass

    with Client.connect(daemon.runtime_dir) as client, pytest.raises(errors.MisuseError, match="by `with`"):
        asyncio.run(enter(client))


def test_numbers_of_numpy_and_torch_are_numbers(engine: Engine) -> None:
    name, client, true = engine.p + "-numpy", engine.c, np.bool_(True)  # noqa: FBT003  numpy's own
    spec = replace(SPEC, layers=np.int64(2), tokens=np.uint32(64), kv_heads=torch.tensor(2), dtype=np.str_("float32"))
    assert client.create_pool(name, spec, deadline_s=Decimal("20.5")).manifest.pages == 17
    ids = client.allocate(name, np.int32(4))
    listed = pages(torch.from_numpy(ids), first_page=np.uint8(0), tokens=np.int64(16))
    numbers = {"first_token": np.int64(7), "deadline_s": Fraction(41, 2), "last": true}
    received = client.receive(name, new_request_id(), sources=np.int16(1), destinations=np.int16(1))
    assert not client.cancel(received).was_finished
    sent = client.send(name, new_request_id(), [listed], payload=bytearray(b"x"), **numbers)
    assert not client.cancel(sent).was_finished
    assert sent in client.poll(np.float64(0))
    assert len(block_hashes(torch.arange(8), np.int64(4))) == 2
    assert client.free(name, ids.astype(np.uint64)).freed == 4
    client.delete_pool(name)
    named = engine.connect(engine.runtime_dir, name=np.str_("n"), session=true)
    assert "n" in {one.name for one in client.status().sessions}
    named.close()


@pytest.mark.parametrize("what", ["c", "closed", "pool", "ring", "tables"])
def test_what_belongs_to_a_process_is_not_copied(engine: Engine, what: str) -> None:
    one = getattr(engine, what)
    one = one.itself if isinstance(one, Blocking) else one
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: pickle.dumps(one, 0), ForkingPickler.dumps):
        with pytest.raises(
            errors.MisuseError, match=f"{type(one).__name__} belongs to .*: pass .* connect and attach there"
        ):
            copied(one)
