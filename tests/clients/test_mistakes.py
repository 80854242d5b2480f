"""Mistakes of somebody who writes an engine: each is a typed error that names the argument and says what to do.

One table for both clients, and one daemon for all. A type checker finds many of them, and is told here not to.
"""

# mypy: disable-error-code="arg-type, unreachable"

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from fractions import Fraction
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from kvferry.clients import (
    AsyncClient,
    BlockTableEntries,
    Client,
    HybridSwaSpec,
    MhaSpec,
    block_hashes,
    new_request_id,
    no_pages,
    pages,
    pages_from_slots,
    pages_wanted,
    slots_from_pages,
)
from kvferry.clients.calls import asked
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import (
    ClientClosedError,
    DuplicatePageError,
    EmptyPagesError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    MisuseError,
    NoSessionError,
    NotOwnerError,
    PageOutOfRangeError,
    PoolExistsError,
    PoolFullError,
    PoolInUseError,
    TooLargeError,
    UnknownComponentError,
    UnknownLeaseError,
    UnknownPoolError,
    UnknownSnapshotError,
    UnknownTablesError,
    UnknownTransferError,
)
from kvferry.protocol.session_messages import Ping
from tests.daemons import DaemonProcess, running_daemon

SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
TINY: Final = msgspec.structs.replace(SPEC, tokens=8)
RID: Final = new_request_id()
SOON_S: Final = 20.0
ARRAY: Final = np.array([1, 2])
replace = msgspec.structs.replace


class Harness:
    """An engine with all that a mistake can be made with."""

    def __init__(self, runtime_dir: str, kind: type[Any], runner: asyncio.Runner) -> None:
        self.runtime_dir = runtime_dir
        self.kind = kind
        self.runner = runner
        self.p = kind.__name__
        self.client: Any = self.run(lambda _: kind.connect(runtime_dir, name=self.p))
        self.closed: Any = self.run(lambda _: kind.connect(runtime_dir))
        self.looker: Any = self.run(lambda _: kind.connect(runtime_dir, session=False))
        self.other = Client.connect(runtime_dir, name="other")
        self.pool: Any = self.call("create_pool", self.p, SPEC)
        self.call("create_pool", self.p + "-full", TINY)
        self.call("allocate", self.p + "-full", 2)
        self.ids: Any = self.call("allocate", self.p, 3)
        self.theirs = self.other.allocate(self.p, 2)
        self.freed: Any = self.call("allocate", self.p, 1)
        self.call("free", self.p, self.freed)
        self.tables: Any = self.call("create_tables", "t", self.p, max_batch=2, max_context_tokens=16)
        self.deleted: Any = self.call("create_tables", "u", self.p, max_batch=2, max_context_tokens=16)
        self.call("delete_tables", self.deleted)
        self.ring: Any = self.call("open_events")
        self.recorded = self.ring.step(0, 1)
        self.ring.record(self.recorded)
        self.transfer: Any = self.call("receive", self.p, new_request_id(), [pages(self.ids)], deadline_s=600)
        self.their_transfer = self.other.receive(self.p, new_request_id(), [pages(self.theirs)])
        self.operation: Any = self.call("restore", self.p, "0" * 32, None)
        self.taken: Any = self.call("update_tables", self.tables, [])
        self.call("wait", self.taken)
        self.closed.close()

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  whatever it returns
        """Make a call as an engine of this kind does."""
        return self.run(lambda harness: getattr(harness.client, name)(*arguments, **named))

    def run(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401  whatever it returns
        """Call with this harness, and await what is to be awaited."""

        async def awaited() -> Any:  # noqa: ANN401  whatever it returns
            result = call(self)
            if inspect.isasyncgen(result):
                return [one async for one in result]
            return await result if inspect.isawaitable(result) else result

        if self.kind is AsyncClient:
            return self.runner.run(awaited())
        result = call(self)
        return list(result) if inspect.isgenerator(result) else result

    def close(self) -> None:
        """End every session."""
        for one in (self.client, self.looker, self.other):
            one.close()


@pytest.fixture(scope="module")
def own_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Return a daemon with a host tier."""
    with running_daemon(tmp_path_factory.mktemp("mistakes"), "[tiers]\nhost_bytes = 1048576\n") as one:
        yield one


@pytest.fixture(scope="module")
def harnesses(own_daemon: DaemonProcess) -> Iterator[dict[str, Harness]]:
    """Return an engine of either kind."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        made = {one.__name__: Harness(str(own_daemon.runtime_dir), one, runner) for one in (Client, AsyncClient)}
        yield made
        for harness in made.values():
            harness.run(lambda harness: harness.close())


@pytest.fixture(params=["Client", "AsyncClient"])
def harness(request: pytest.FixtureRequest, harnesses: dict[str, Harness]) -> Harness:
    """Return one of them."""
    return harnesses[request.param]


class Mistake(NamedTuple):
    """A call, and what it must raise: the error's class, its field and a part of its text."""

    call: Callable[[Any], Any]
    error: type[KvferryError]
    field: str
    text: str


def wrong(call: Callable[[Any], Any], field: str, text: str) -> Mistake:
    """Return a mistake that is a wrong value of an argument."""
    return Mistake(call, InvalidFieldError, field, text)


MISTAKES: Final[dict[str, Mistake]] = {
    # -- page lists and page ids
    "ids for lists": wrong(lambda w: w.client.send(w.p, RID, w.ids), "lists[0]", "give [pages(ids)]"),
    "a list of ids for lists": wrong(lambda w: w.client.send(w.p, RID, [1, 2]), "lists[0]", "give [pages(ids)]"),
    "one Pages for lists": wrong(lambda w: w.client.receive(w.p, RID, pages([1])), "lists", "give [pages(ids)]"),
    "None for lists": wrong(lambda w: w.client.offload(w.p, None), "lists", "None is no list of Pages"),
    "too many lists": wrong(lambda w: w.client.send(w.p, RID, [pages([1])] * 65), "lists", "length <= 64"),
    "a dict of lists": wrong(lambda w: w.client.restore(w.p, "0" * 32, {"main": [1]}), "lists", "is no list of Pages"),
    "Pages for ids": wrong(lambda w: w.client.free(w.p, pages([1])), "ids", "here give their ids"),
    "nested ids": wrong(lambda _: pages([[1, 2]]), "ids", "is no list of integers"),
    "ragged ids": wrong(lambda _: pages([[1], [2, 3]]), "ids", "is no list of integers"),
    "one id": wrong(lambda w: w.client.free(w.p, 3), "ids", "give [id] for one page"),
    "no ids": wrong(lambda w: w.client.free(w.p, None), "ids", "None is no list of integers"),
    "floats for ids": wrong(lambda _: pages(np.array([1.0])), "ids", "float64 is no list of integers"),
    "words for ids": wrong(lambda w: w.client.store(w.p, [], ["a"]), "ids", "is no list of integers"),
    "an id over 64 bits": wrong(
        lambda _: pages(np.array([2**63], np.uint64)), "ids", "does not fit in a signed 64-bit integer"
    ),
    "a pool for ids": wrong(lambda w: w.client.load(w.p, 1, w.pool), "ids", "refer to a pool by its name"),
    "a component that is none": wrong(lambda _: pages([1], component=3), "component", "Expected `str`"),
    "tokens that are none": wrong(lambda _: pages([1], tokens="4"), "tokens", "got `str`"),
    "no tokens": wrong(lambda _: pages([1], tokens=0), "tokens", ">= 1"),
    "a negative first page": wrong(lambda _: pages([1], first_page=-1), "first_page", ">= 0"),
    "a negative number wanted": wrong(lambda _: pages_wanted(-1), "count", ">= 0"),
    "no_pages of nothing": wrong(lambda _: no_pages(None), "component", "got `None`"),
    "pages_wanted in pages": wrong(
        lambda w: w.client.receive(w.p, RID, [pages_wanted(2)]), "lists[0]", "here give pages(ids)"
    ),
    # -- pools
    "a pool for its name": wrong(lambda w: w.client.allocate(w.pool, 1), "pool", "pool.name"),
    "a pool for a new one's name": wrong(lambda w: w.client.create_pool(w.pool, SPEC), "name", "pool.name"),
    "a pool for a spec": wrong(lambda w: w.client.create_pool("x", w.pool), "spec", "create one from a spec"),
    "a dict for a spec": wrong(lambda w: w.client.create_pool("x", {"layers": 1}), "spec", "MhaSpec(...)"),
    "the class for a spec": wrong(lambda w: w.client.create_pool("x", MhaSpec), "spec", "give one of it, MhaSpec(...)"),
    "a manifest for a spec": wrong(lambda w: w.client.create_pool("x", w.pool.manifest), "spec", "MhaSpec(...)"),
    "a spec's wrong kind": wrong(
        lambda w: w.client.create_pool("x", replace(SPEC, layers="2")), "spec.layers", "Expected `int`, got `str`"
    ),
    "a spec's negative count": wrong(
        lambda w: w.client.create_pool("x", replace(SPEC, kv_heads=-2)), "spec.kv_heads", ">= 1"
    ),
    "a spec's torch dtype": wrong(
        lambda w: w.client.create_pool("x", replace(SPEC, dtype=torch.float16)),
        "spec.dtype",
        "give its name, 'float16'",
    ),
    "a spec's wrong dtype": wrong(
        lambda w: w.client.create_pool("x", replace(SPEC, dtype="float3")), "dtype", "float3"
    ),
    "a spec's wrong view": wrong(lambda w: w.client.create_pool("x", replace(SPEC, view="n")), "spec.view", "'n'"),
    "an empty name": wrong(lambda w: w.client.create_pool("", SPEC), "name", ""),
    "a name with a blank": wrong(lambda w: w.client.create_pool("my pool", SPEC), "name", "letters, digits"),
    "a number for a name": wrong(lambda w: w.client.delete_pool(7), "name", "Expected `str`"),
    "a wrong device": wrong(lambda w: w.client.create_pool("x", SPEC, device="gpu"), "device", "npu:N or cuda:N"),
    "a torch device": wrong(
        lambda w: w.client.create_pool("x", SPEC, device=torch.device("cpu")), "device", "give its name"
    ),
    "a digest that is none": wrong(lambda w: w.client.attach_pool(w.p, 5), "layout_digest", "Expected `str`"),
    "tensors without names": wrong(
        lambda w: w.client.register_pool("x", SPEC, [torch.zeros(1)], device="npu:0"), "tensors", "(component, role)"
    ),
    "a word for an entry": wrong(lambda w: w.pool.entry_array("k"), "entry", "'k' is no entry, as manifest.entries"),
    "a number for an entry": wrong(lambda w: w.pool.entry_tensor(0), "entry", "0 is no entry"),
    "an array for a component": wrong(lambda w: w.pool.array(ARRAY, "k"), "component", "array([1, 2]) is no text"),
    "an array for a tensor's component": wrong(lambda w: w.pool.tensor(ARRAY, "k"), "component", "is no text"),
    "an array for a role": wrong(lambda w: w.pool.array("main", ARRAY), "role", "is no text"),
    "layers of an array": wrong(lambda w: w.pool.layers(ARRAY, "k"), "component", "is no text"),
    "layers of a role that is an array": wrong(lambda w: w.pool.layers("main", ARRAY), "role", "is no text"),
    "tokens of an array": wrong(lambda w: w.pool.page_tokens(ARRAY), "component", "is no text"),
    "the space of an array": wrong(lambda w: w.pool.space_of(ARRAY), "component", "is no text"),
    "numbers for tensors": wrong(
        lambda w: w.client.register_pool("x", SPEC, {("main", "k"): 5, ("main", "v"): 5}, device="npu:0"),
        "main/k",
        "int, not a strided torch.Tensor",
    ),
    "an unknown pool": Mistake(
        lambda w: w.client.allocate("nowhere", 1), UnknownPoolError, "pool", "who has 'Client', 'Client-full'"
    ),
    "another pool of that name": Mistake(
        lambda w: w.client.create_pool(w.p, replace(SPEC, dtype="bfloat16")),
        PoolExistsError,
        "spec",
        "dtype of main/k/0 is float32, asked for bfloat16; ",
    ),
    "a larger pool of that name": Mistake(
        lambda w: w.client.create_pool(w.p, replace(SPEC, tokens=128)),
        PoolExistsError,
        "spec",
        "pages of main/k/0 is 17",
    ),
    "a pool of that name with a draft": Mistake(
        lambda w: w.client.create_pool(w.p, replace(SPEC, layers=3)),
        PoolExistsError,
        "spec",
        "main/k/2 is not in the pool",
    ),
    "deleting what is in use": Mistake(
        lambda w: w.client.delete_pool(w.p), PoolInUseError, "pool", "2 held by session"
    ),
    # -- pages
    "a missing free": Mistake(
        lambda w: w.client.allocate(w.p + "-full", 1),
        PoolFullError,
        "count",
        f"of process {os.getpid()}, the caller (free pages, ask for fewer, or wait; kvferry status shows which",
    ),
    "none to allocate": wrong(lambda w: w.client.allocate(w.p, 0), "count", ">= 1"),
    "a negative number to allocate": wrong(lambda w: w.client.allocate(w.p, -1), "count", ">= 1"),
    "half a page": wrong(lambda w: w.client.allocate(w.p, 1.5), "count", "Expected `int`, got `float`"),
    "a truth for a count": wrong(lambda w: w.client.allocate(w.p, count=True), "count", "got `bool`"),
    "None for a count": wrong(lambda w: w.client.allocate(w.p, None), "count", "got `None`"),
    "too many to count": wrong(lambda w: w.client.allocate(w.p, 2**70), "count", ""),
    "too many to show": wrong(lambda w: w.client.allocate(w.p, 10**5000), "count", "a int is no"),
    "an unknown space": Mistake(
        lambda w: w.client.allocate(w.p, 1, "swa"), UnknownComponentError, "space", "it has main"
    ),
    "freeing twice": Mistake(lambda w: w.client.free(w.p, w.freed), NotOwnerError, "pages", "already freed"),
    "freeing another's": Mistake(
        lambda w: w.client.free(w.p, w.theirs), NotOwnerError, "pages", "owned by another instance"
    ),
    "freeing one twice at once": Mistake(
        lambda w: w.client.free(w.p, [int(w.ids[0])] * 2), DuplicatePageError, "pages", "more than once"
    ),
    "freeing nothing": Mistake(lambda w: w.client.free(w.p, []), EmptyPagesError, "pages", "no page"),
    "freeing the padding page": Mistake(lambda w: w.client.free(w.p, [0]), PageOutOfRangeError, "pages", "page 0"),
    "freeing after a number": wrong(lambda w: w.client.free(w.p, [1], after=3), "after", "ring.record_event()"),
    "freeing after a ring": wrong(lambda w: w.client.free(w.p, [1], after=w.ring), "after", "ring.record_event()"),
    # -- transfers
    "a UUID": wrong(lambda w: w.client.send(w.p, uuid.UUID(RID), [pages([1])]), "request_id", "request_id.hex"),
    "a number for a request": wrong(lambda w: w.client.send(w.p, 17, [pages([1])]), "request_id", "Expected `str`"),
    "a short request id": wrong(
        lambda w: w.client.receive(w.p, "abc", [pages([1])]), "request_id", "32 hexadecimal digits in lower case"
    ),
    "a request id in capitals": wrong(lambda w: w.client.send(w.p, RID.upper(), [pages([1])]), "request_id", "lower"),
    "a list for a request id": wrong(lambda w: w.client.send(w.p, [RID], [pages([1])]), "request_id", "Expected `str`"),
    "a text for a payload": wrong(
        lambda w: w.client.send(w.p, RID, [pages([1])], payload="x"), "payload", "Expected `bytes`, got `str`"
    ),
    "too long a payload": Mistake(
        lambda w: w.client.wait_finished(w.client.send(w.p, RID, payload=bytes(1 << 17)), SOON_S),
        TooLargeError,
        "payload",
        "takes 65536: create it with a larger max_payload_bytes",
    ),
    "a token that is none": wrong(
        lambda w: w.client.send(w.p, RID, [pages([1])], first_token=1.0), "first_token", "got `float`"
    ),
    "a number for last": wrong(lambda w: w.client.send(w.p, RID, [pages([1])], last=1), "last", "Expected `bool`"),
    "no destination": wrong(lambda w: w.client.send(w.p, RID, [pages([1])], destinations=0), "destinations", ">= 1"),
    "a ring for steps": wrong(lambda w: w.client.send(w.p, RID, [pages([1])], steps=w.ring), "steps", "ring.step"),
    "one step for steps": wrong(
        lambda w: w.client.send(w.p, RID, [pages([1])], steps=w.recorded), "steps", "is no list of steps"
    ),
    "a step of no layers": wrong(
        lambda w: w.client.send(w.p, RID, [pages([1])], steps=[w.ring.step(0, 0)]), "steps[0].layers", ">= 1"
    ),
    "an address for addresses": wrong(
        lambda w: w.client.receive(w.p, RID, [pages([1])], source_daemons="tcp://h:1"), "source_daemons", "no list of"
    ),
    "a wrong address": wrong(
        lambda w: w.client.receive(w.p, RID, [pages([1])], source_daemons=["h:1"]), "source_daemons[0]", "tcp://ADDRESS"
    ),
    "a wrong landing": wrong(lambda w: w.client.receive(w.p, RID, [pages([1])], into="disk"), "into", "'disk'"),
    "another's pages": Mistake(
        lambda w: w.client.wait_finished(w.client.send(w.p, RID, [pages(w.theirs)]), SOON_S),
        NotOwnerError,
        "lists[0].pages",
        "owned by another instance",
    ),
    "a component that the pool lacks": Mistake(
        lambda w: w.client.wait_finished(w.client.send(w.p, RID, [pages(w.ids), pages([1], component="swa")]), SOON_S),
        UnknownComponentError,
        "lists[1].component",
        "swa",
    ),
    "waiting for a request id": wrong(lambda w: w.client.wait_finished(RID), "transfer", "as send and receive return"),
    "waiting for None": wrong(lambda w: w.client.wait_settled(None), "transfer", "None is no transfer"),
    "waiting for an operation": wrong(lambda w: w.client.wait_finished(w.operation), "transfer", "for wait_done"),
    "waiting for another's": wrong(lambda w: w.client.wait_finished(w.their_transfer), "transfer", "another client's"),
    "the outcome of what is under way": Mistake(
        lambda w: w.transfer.outcome(), MisuseError, "", "is not finished: call wait_finished"
    ),
    "the outcome of an operation under way": Mistake(
        lambda w: w.client.offload(w.p, [pages(w.ids)]).outcome(), MisuseError, "", "is not done: call wait_done"
    ),
    "cancelling a request id": wrong(lambda w: w.client.cancel(RID), "transfer", "is no transfer"),
    "cancelling another's": wrong(lambda w: w.client.cancel(w.their_transfer), "transfer", "another client's"),
    "a result of no side": wrong(lambda w: w.client.result(w.p, RID, "both"), "direction", "'both'"),
    "a result of nothing": Mistake(lambda w: w.client.result(w.p, RID, "send"), UnknownTransferError, "request_id", ""),
    # -- times
    "a negative deadline": wrong(
        lambda w: w.client.send(w.p, RID, [pages([1])], deadline_s=-1), "deadline_s", "-1 seconds; give from 0"
    ),
    "no number for a deadline": wrong(
        lambda w: w.client.receive(w.p, RID, [pages([1])], deadline_s=math.nan), "deadline_s", "nan seconds"
    ),
    "for ever": wrong(lambda w: w.client.create_pool("x", SPEC, deadline_s=math.inf), "deadline_s", "inf seconds"),
    "a list for a deadline": wrong(lambda w: w.client.offload(w.p, [pages([1])], deadline_s=[]), "deadline_s", "[]"),
    "more than the daemon takes": wrong(
        lambda w: w.client.store(w.p, [b"h" * 16], [1], deadline_s=3601), "deadline_s", "at most 3600"
    ),
    "a text for a deadline": wrong(lambda w: w.client.cancel(w.transfer, deadline_s="5"), "deadline_s", "'5' is no"),
    "a deadline beyond floats": wrong(
        lambda w: w.client.send(w.p, RID, [pages([1])], deadline_s=10**400), "deadline_s", "inf seconds; give from 0"
    ),
    "a deadline far below 0": wrong(
        lambda w: w.client.call(asked(Ping()), deadline_s=-(10**400)), "deadline_s", "-inf"
    ),
    "a time-out beyond floats": wrong(lambda w: w.client.poll(10**400), "timeout_s", "inf seconds"),
    "a text for a margin": wrong(lambda w: w.client.call(asked(Ping()), margin_s="x"), "margin_s", "'x' is no number"),
    "a negative time-out": wrong(lambda w: w.client.wait_finished(w.transfer, -0.5), "timeout_s", "-0.5 seconds"),
    "None for a time-out": wrong(lambda w: w.client.wait_settled(w.transfer, None), "timeout_s", "None is no number"),
    "polling for None": wrong(lambda w: w.client.poll(None), "timeout_s", "None is no number"),
    "waiting for changes, not a time": wrong(lambda w: w.client.cache_events(1, timeout_s="x"), "timeout_s", "'x'"),
    # -- tables and events
    "a name for tables": wrong(lambda w: w.client.update_tables("t", [1]), "tables", "as create_tables returns them"),
    "a name for tables to delete": wrong(lambda w: w.client.delete_tables("t"), "tables", "as create_tables"),
    "deleted tables": Mistake(
        lambda w: w.client.wait(w.client.update_tables(w.deleted, [])), UnknownTablesError, "tables", "'u'"
    ),
    "a length for lengths": wrong(lambda w: w.client.update_tables(w.tables, 5), "lengths", "5 is no list"),
    "a list for rows": wrong(lambda w: w.client.update_tables(w.tables, [1], rows=[[1]]), "rows", "mapping of row"),
    "an array for rows": wrong(lambda w: w.client.update_tables(w.tables, [1], rows=ARRAY), "rows", "mapping of row"),
    "a tensor for rows": wrong(
        lambda w: w.client.update_tables(w.tables, [1], rows=torch.tensor([1, 2])), "rows", "mapping of row"
    ),
    "a word for operators": wrong(lambda w: w.tables.graph_inputs(operators="x"), "operators", "whole number"),
    "a word for a step": wrong(lambda w: w.tables.graph_inputs(draft_step="x"), "draft_step", "whole number"),
    "an array for a step": wrong(lambda w: w.tables.graph_inputs(draft_step=ARRAY), "draft_step", "whole number"),
    "an array for a table": wrong(lambda w: w.tables.array(ARRAY), "name", "is no text"),
    "a word for a row": wrong(lambda w: w.client.update_tables(w.tables, [1], rows={"a": [1]}), "rows", "whole number"),
    "a page for a row's pages": wrong(lambda w: w.client.update_tables(w.tables, [1], rows={0: 4}), "rows[0]", "[id]"),
    "a tuple for cells": wrong(
        lambda w: w.client.update_tables(w.tables, [1], entries=([0], [0], [1])),
        "entries",
        "BlockTableEntries(rows, columns, pages)",
    ),
    "cells of unequal lengths": Mistake(
        lambda w: w.client.update_tables(w.tables, [1], entries=BlockTableEntries([0], [0], [1, 2])),
        LengthMismatchError,
        "entries",
        "1 rows, 1 columns, 2 pages",
    ),
    "bound without window pages": wrong(lambda w: w.client.update_tables(w.tables, [1], bound=[1]), "bound", "pair of"),
    "negative extra tokens": wrong(
        lambda w: w.client.update_tables(w.tables, [1], extra_tokens=-1), "extra_tokens", ">= 0"
    ),
    "tables of a pool object": wrong(
        lambda w: w.client.create_tables("v", w.pool, max_batch=1, max_context_tokens=4), "pool", "pool.name"
    ),
    "tables without rows": wrong(
        lambda w: w.client.create_tables("v", w.p, max_batch=0, max_context_tokens=4), "max_batch", ">= 1"
    ),
    "a batch size for batch sizes": wrong(
        lambda w: w.client.create_tables("v", w.p, max_batch=4, max_context_tokens=4, captured=4), "captured", "no list"
    ),
    "waiting for tables": wrong(lambda w: w.client.wait(w.tables), "pending", "is no pending reply"),
    "waiting for a transfer's reply": wrong(lambda w: w.client.wait(w.transfer), "pending", "wait_finished"),
    "waiting twice": wrong(lambda w: w.client.wait(w.taken), "pending", "keep what wait returned"),
    "looking twice": wrong(lambda w: w.client.is_ready(w.taken), "pending", "keep what wait returned"),
    "recording twice": wrong(lambda w: w.ring.record(w.recorded), "step", "record each step once"),
    "recording a layer": wrong(lambda w: w.ring.record(3), "step", "3 is no step"),
    "recording words": wrong(
        lambda w: w.ring.record(DeviceEvent(event="0", value="1")), "step.event", "'0' is no whole number"
    ),
    "recording the word for a value": wrong(
        lambda w: w.ring.record(DeviceEvent(event=0, value="1")), "step.value", "'1' is no whole number"
    ),
    "a ring of no device": wrong(lambda w: w.client.open_events("gpu:0"), "device", "npu:N or cuda:N"),
    "a ring of no events": wrong(lambda w: w.client.open_events("npu:0", events=0), "events", "give 1 or more"),
    # -- tiers
    "restoring an operation": wrong(lambda w: w.client.restore(w.p, w.operation), "snapshot", "for wait_done"),
    "restoring nothing": wrong(lambda w: w.client.restore(w.p, None), "snapshot", "got `None`"),
    "an unknown snapshot": Mistake(lambda w: w.client.drop_snapshot("0" * 32), UnknownSnapshotError, "snapshot", ""),
    "waiting for a transfer's work": wrong(lambda w: w.client.wait_done(w.transfer), "operation", "for wait_finished"),
    "cancelling an operation's number": wrong(
        lambda w: w.client.cancel_operation(3), "operation", "as offload, restore"
    ),
    "a hash for hashes": wrong(lambda w: w.client.lookup(w.p, bytes(16)), "hashes", "no list of hashes"),
    "words for hashes": wrong(lambda w: w.client.lookup(w.p, ["0" * 16]), "hashes[0]", "no hash of 16 bytes"),
    "hashes of 32 bytes": wrong(lambda w: w.client.lookup(w.p, [bytes(32)]), "hashes[0]", "32 bytes are no hash of 16"),
    "a parent that is a word": wrong(
        lambda w: w.client.store(w.p, [bytes(16)], [1], parent="0" * 16), "parent", "Expected `bytes`, got `str`"
    ),
    "blocks of no page": wrong(lambda w: w.client.lookup(w.p, [bytes(16)], block_pages=0), "block_pages", ">= 1"),
    "what was found for a lease": wrong(lambda w: w.client.load(w.p, "7", [1]), "lease", "Expected `int`"),
    "an unknown lease": Mistake(lambda w: w.client.unpin(12345), UnknownLeaseError, "lease", ""),
    "pinning by a word": wrong(lambda w: w.client.pin_cached("abc"), "hashes", "no list of hashes"),
    "evicting a number": wrong(lambda w: w.client.evict_cached(0), "hashes", "0 is no list of hashes"),
    "no block to hash": wrong(lambda _: block_hashes([1, 2], 0), "block_tokens", "give 1 or more"),
    "half a block": wrong(lambda _: block_hashes([1, 2], 1.5), "block_tokens", "whole number"),
    "words to hash": wrong(lambda _: block_hashes("abc", 1), "tokens", "no list of integers"),
    "a salt that is a word": wrong(lambda _: block_hashes([1], 1, salt="user"), "salt", "salt.encode()"),
    "a parent that is a number": wrong(lambda _: block_hashes([1, 2], 1, parent=5), "parent", "5 is not a hash"),
    "a parent that is no hash": wrong(lambda _: block_hashes([1], 1, parent="0" * 16), "parent", "not a hash"),
    "slots of pages of a word": wrong(lambda _: pages_from_slots([1], "4"), "page_size", "whole number"),
    "slots that are words": wrong(lambda _: pages_from_slots(["a"], 4), "slots", "no list of integers"),
    "tokens that are no number": wrong(lambda _: slots_from_pages([1], 4, None), "tokens", "whole number"),
    # -- clients
    "a word for an operation": wrong(lambda w: w.client.call("PING"), "call", "'PING' is no Operation, as"),
    "a message for an operation": wrong(lambda w: w.client.call(Ping()), "call", "Ping() is no Operation, as"),
    "beginning nothing": wrong(lambda w: w.client.begin(None), "call", "None is no Operation, as"),
    "after close": Mistake(lambda w: w.closed.allocate(w.p, 1), ClientClosedError, "", "connect again"),
    "sending after close": Mistake(
        lambda w: w.closed.send(w.p, RID, [pages([1])]), ClientClosedError, "", "the client was closed"
    ),
    "polling after close": Mistake(lambda w: w.closed.poll(), ClientClosedError, "", "the client was closed"),
    "without a session": Mistake(lambda w: w.looker.allocate(w.p, 1), NoSessionError, "secret", "open a session"),
    "events without a session": Mistake(lambda w: w.looker.open_events(), NoSessionError, "secret", "session"),
    "no connect": Mistake(lambda w: w.kind(w.runtime_dir), MisuseError, "", "connect(runtime_dir, name=...)"),
    "no connect, by name": Mistake(lambda w: w.kind(name="x"), MisuseError, "", "connect(runtime_dir, name=...)"),
    "a number for a folder": wrong(lambda w: w.kind.connect(5), "runtime_dir", "5 is no path"),
    "a folder with a NUL": wrong(lambda w: w.kind.connect("a\0b"), "runtime_dir", "is no path"),
    "a folder with half a character": wrong(lambda w: w.kind.connect("\ud800"), "runtime_dir", "is no path"),
    "an array for a session": wrong(
        lambda w: w.kind.connect(w.runtime_dir, session=ARRAY), "session", "array([1, 2]) is no True or False"
    ),
    "a date for a client's name": wrong(
        lambda w: w.kind.connect(w.runtime_dir, name=np.datetime64("2020-01-01")), "name", "no value that can be sent"
    ),
    "a number for a client's name": wrong(lambda w: w.kind.connect(w.runtime_dir, name=5), "name", "Expected `str`"),
    "a list of devices": wrong(lambda w: w.kind.connect(w.runtime_dir, devices=["npu:0"]), "devices", "mapping of"),
    "devices by number": wrong(lambda w: w.kind.connect(w.runtime_dir, devices={3: 0}), "devices", "pair of names"),
    "no time to connect": wrong(lambda w: w.kind.connect(w.runtime_dir, timeout_s=-1), "timeout_s", "-1 seconds"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(harness: Harness, name: str) -> None:
    mistake = MISTAKES[name]
    with pytest.raises(KvferryError) as raised:
        harness.run(mistake.call)
    error = raised.value
    assert type(error) is mistake.error, error
    assert error.field == mistake.field, error
    assert mistake.text in str(error)
    assert error.remedy


def test_no_mistake_has_left_anything(harness: Harness) -> None:
    """Run last: the engine that has made every mistake works, and has what it had."""
    assert harness.call("ping") > 0
    assert len(harness.call("allocate", harness.p, 11)) == 11, "16 pages, 5 of them taken"


def test_an_unawaited_call_as_an_argument_is_named(harnesses: dict[str, Harness]) -> None:
    async def call() -> None:
        client = harnesses["AsyncClient"].client
        unawaited = client.allocate("AsyncClient", 1)
        try:
            with pytest.raises(InvalidFieldError, match="await it first") as raised:
                await client.free("AsyncClient", unawaited)
            assert raised.value.field == "ids"
        finally:
            unawaited.close()

    harnesses["AsyncClient"].runner.run(call())


UNAWAITED: Final[dict[str, Callable[[Any], object]]] = {
    "a call": lambda c: c.ping(),
    "a call with arguments": lambda c: c.create_pool("x", SPEC),
    "a call that returns at once": lambda c: c.update_tables(None, []),
    "a send": lambda c: c.send("p", "r", []),
    "a send by names": lambda c: c.send(pool="p", request_id="r", lists=[]),
    "what the daemon said": lambda c: c.welcome,
    "a property": lambda c: c.boot_id,
}


@pytest.mark.parametrize("name", UNAWAITED)
def test_a_client_that_nobody_awaited_is_named(own_daemon: DaemonProcess, name: str) -> None:
    connecting = AsyncClient.connect(own_daemon.runtime_dir)
    try:
        with pytest.raises(MisuseError, match="await it first"):
            UNAWAITED[name](connecting)
        assert not hasattr(connecting, "no_name_of_a_clients")
    finally:
        connecting.close()


AWAITED: Final[dict[str, Callable[[Any], Any]]] = {
    "await": lambda c: c,
    "a task": asyncio.ensure_future,
    "async with": lambda c: c.__aenter__(),
}


@pytest.mark.parametrize("first", AWAITED)
@pytest.mark.parametrize("second", AWAITED)
def test_a_connection_is_awaited_once(
    harnesses: dict[str, Harness], own_daemon: DaemonProcess, first: str, second: str
) -> None:
    async def connect() -> None:
        connecting = AsyncClient.connect(own_daemon.runtime_dir)
        async with await AWAITED[first](connecting) as client:
            with pytest.raises(MisuseError, match="already awaited: keep the client"):
                await AWAITED[second](connecting)
            assert await client.ping() > 0

    harnesses["AsyncClient"].runner.run(connect())


def test_the_wrong_kind_of_with(harnesses: dict[str, Harness], own_daemon: DaemonProcess) -> None:
    async def enter() -> None:
        with Client.connect(own_daemon.runtime_dir) as client, pytest.raises(MisuseError, match="by `with`"):
            async with client:
                pass
        with pytest.raises(MisuseError, match="async with AsyncClient"), AsyncClient.connect(own_daemon.runtime_dir):
            pass
        connected = await AsyncClient.connect(own_daemon.runtime_dir)
        with pytest.raises(MisuseError, match="async with AsyncClient"), connected:
            pass
        async with AsyncClient.connect(own_daemon.runtime_dir) as entered:
            assert await entered.ping() > 0
        with pytest.raises(ClientClosedError):
            await entered.ping()
        made = await asyncio.create_task(AsyncClient.connect(own_daemon.runtime_dir))
        made.close()

    harnesses["AsyncClient"].runner.run(enter())


def test_numbers_of_numpy_and_torch_are_numbers(harness: Harness) -> None:
    name = harness.p + "-numpy"
    spec = replace(SPEC, layers=np.int64(2), tokens=np.uint32(64), kv_heads=torch.tensor(2), dtype=np.str_("float32"))
    pool = harness.call("create_pool", name, spec, deadline_s=np.float32(20))
    assert pool.manifest.pages == 17
    ids = harness.call("allocate", name, np.int32(4))
    listed = pages(torch.from_numpy(ids), first_page=np.uint8(0), tokens=np.int64(16))
    sent = harness.call(
        "send",
        name,
        new_request_id(),
        [listed],
        first_token=np.int64(7),
        payload=bytearray(b"x"),
        last=np.bool_(True),  # noqa: FBT003  numpy's own
        destinations=np.int16(1),
        deadline_s=np.int64(20),
    )
    assert not harness.call("cancel", sent).was_finished
    assert sent in harness.call("poll", np.float64(0))
    assert len(block_hashes(torch.arange(8), np.int64(4))) == 2
    assert harness.call("free", name, ids.astype(np.uint64)).freed == 4
    harness.call("delete_pool", name)
    session = np.bool_(True)  # noqa: FBT003  as an engine may give it
    named = harness.run(lambda harness: harness.kind.connect(harness.runtime_dir, name=np.str_("n"), session=session))
    assert "n" in {one.name for one in harness.call("status").sessions}
    harness.run(lambda _: named.close())


SECONDS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "call": lambda w, time_s: w.client.call(asked(Ping()), deadline_s=time_s, margin_s=time_s),
    "begin": lambda w, time_s: w.client.wait(w.client.begin(asked(Ping()), deadline_s=time_s)),
    "create_pool": lambda w, time_s: w.client.create_pool(w.p, SPEC, deadline_s=time_s),
    "open_events": lambda w, time_s: w.client.open_events(deadline_s=time_s),
    "cache_events": lambda w, time_s: w.client.cache_events(1, timeout_s=time_s * 0),
    "update_tables": lambda w, time_s: w.client.wait(w.client.update_tables(w.tables, [], deadline_s=time_s)),
    "poll": lambda w, time_s: w.client.poll(time_s * 0),
}


@pytest.mark.parametrize("seconds", [Decimal("20.5"), Fraction(41, 2), 20])
@pytest.mark.parametrize("name", SECONDS)
def test_a_time_is_any_number(harness: Harness, name: str, seconds: object) -> None:
    harness.run(lambda harness: SECONDS[name](harness, seconds))


COPIES: Final[dict[str, Callable[[object], object]]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "an old pickle": lambda one: pickle.dumps(one, 0),
    "what spawn does": ForkingPickler.dumps,
}


@pytest.mark.parametrize("what", ["client", "closed", "pool", "ring", "tables"])
@pytest.mark.parametrize("how", COPIES)
def test_what_belongs_to_a_process_is_not_copied(harness: Harness, what: str, how: str) -> None:
    one = getattr(harness, what)
    with pytest.raises(MisuseError, match=f"{type(one).__name__} belongs to .*: pass .* connect and attach there"):
        COPIES[how](one)


def test_a_hybrid_pool_names_the_space_that_is_full(harness: Harness) -> None:
    name = harness.p + "-hybrid"
    spec = HybridSwaSpec(
        full_layers=(0,), window_layers=(1,), tokens=16, window_tokens=8, window=4, page_size=4, kv_heads=1, head_dim=4,
        dtype="float32",
    )  # fmt: skip
    harness.call("create_pool", name, spec)
    with pytest.raises(PoolFullError, match="3 pages asked for, 2 of 2 free"):
        harness.call("allocate", name, 3, "swa")
    harness.call("delete_pool", name)
