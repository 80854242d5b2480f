"""What an engine says of a device's memory and events is compared with the spec and with the driver: a row a claim.

The other half of ``tests/daemon/test_registered_memory.py``, which has the rows of an array's form. The engine here has
real tensors, and lies about them in the messages that the client library would have made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import torch

from kvferry.clients import Client, MhaSpec
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.protocol.base import DeviceEvent, PageList, RequestBody
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.ids import new_request_id
from kvferry.protocol.pool_messages import Allocate, DeletePool, Free, RegisteredArrays, RegisterPool
from kvferry.protocol.session_messages import OpenEvents
from kvferry.protocol.session_stream import Share, SharedEvents, ShareFollows, TorchShare, VmmShare
from kvferry.protocol.transfer_messages import LayerStep, Send
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE
from tests.kit.raw_engine import RawEngine, raw_engine

SPEC: Final = MhaSpec(layers=2, first_layer=4, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16")
SHAPE: Final = (2, 5, 16, 2, 8)
STRIDES: Final = (1280, 256, 16, 8, 1)
SIZE_BYTES: Final = 2 * 5 * 16 * 2 * 8 * 2
OTHER_DEVICE: Final = "npu:1"
EVENTS: Final = 4
POOLS: Final = {"theirs": SPEC}


class Registered(NamedTuple):
    """What an engine registers: k of all layers as one tensor, v as another; and a tensor on another device."""

    arrays: tuple[RegisteredArrays, ...]
    shares: tuple[Share, ...]
    elsewhere: TorchShare

    def with_k(self, **fields: Any) -> Registered:  # noqa: ANN401  an array's fields
        return self._replace(arrays=(msgspec.structs.replace(self.arrays[0], **fields), *self.arrays[1:]))

    def with_share(self, **fields: Any) -> Registered:  # noqa: ANN401  a share's fields
        return self._replace(shares=(msgspec.structs.replace(self.shares[0], **fields), *self.shares[1:]))


class Harness(NamedTuple):
    """A daemon, an engine with two tensors and a pool of the daemon's that it may map, and one that looks."""

    engine: RawEngine
    watcher: Client
    registered: Registered
    runtime_dir: Path
    tensors: tuple[torch.Tensor, ...]
    events: Sequence[object]


class Row(NamedTuple):
    """What is claimed of registered memory, and what comes."""

    claim: str
    said: Callable[[Registered], Registered]
    field: str
    code: str = "INVALID_FIELD"


def share_of(tensor: torch.Tensor, accelerator: Accelerator) -> TorchShare:
    with accelerator.calling():
        return accelerator.vendor.export(tensor)


@pytest.fixture(scope="module")
def harness(daemon: Daemon) -> Iterator[Harness]:
    """Return a harness in which no row leaves anything."""
    other_device = Accelerator(OTHER_DEVICE)
    other_device.open()
    k, v = (torch.zeros(SHAPE, dtype=torch.float16, device=DEVICE.name) for _ in "kv")
    elsewhere = torch.zeros(SHAPE, dtype=torch.float16, device=OTHER_DEVICE)
    arrays = tuple(
        RegisteredArrays(component="main", role=role, shape=SHAPE, strides=STRIDES, dtype="float16")
        for role in ("k", "v")
    )
    shares = tuple(share_of(one, DEVICE.accelerator) for one in (k, v))
    with raw_engine(daemon.runtime_dir) as engine, Client.connect(daemon.runtime_dir, session=False) as watcher:
        engine.ask(Allocate(pool="theirs", count=2))
        with DEVICE.accelerator.calling():
            events = [DEVICE.accelerator.vendor.shared_event() for _ in range(EVENTS)]
        handles = tuple(handle for _, handle in events)
        engine.ask(
            OpenEvents(device=DEVICE.name), registered=ShareFollows(message_id=0, events=SharedEvents(handles=handles))
        )
        yield Harness(
            engine,
            watcher,
            Registered(arrays, shares, share_of(elsewhere, other_device)),
            daemon.runtime_dir,
            (k, v, elsewhere),
            events,
        )


def register(harness: Harness, said: Registered, name: str = "mine") -> None:
    body = RegisterPool(pool=name, spec=SPEC, device=DEVICE.name, arrays=said.arrays)
    harness.engine.ask(body, registered=ShareFollows(message_id=0, shares=said.shares))


def held(harness: Harness) -> object:
    status = harness.watcher.status()
    return (
        [(one.device, one.state, one.pool_bytes) for one in status.devices],
        [(one.pool, one.free, one.busy) for one in status.pools],
        status.transfers,
    )


def k_at(said: Registered) -> TorchShare:
    share = said.shares[0]
    assert isinstance(share, TorchShare)
    return share


def by_layer(said: Registered) -> Registered:
    """Return k as two arrays, a layer each: views of one tensor."""
    k, v = said.arrays
    layers = tuple(msgspec.structs.replace(k, layer=4 + n, shape=SHAPE[1:], strides=STRIDES[1:]) for n in range(2))
    at = k_at(said).offset_bytes
    half = SIZE_BYTES // 2
    shares = tuple(msgspec.structs.replace(k_at(said), offset_bytes=at + n * half) for n in range(2))
    return Registered((*layers, v), (*shares, said.shares[1]), said.elsewhere)


ROWS: Final = [
    Row("a page too many", lambda r: r.with_k(shape=(2, 6, 16, 2, 8)), "main/k.shape"),
    Row("a layer of another form", lambda r: by_layer(r).with_k(shape=(4, 16, 2, 8)), "main/k/4.shape"),
    Row("a share too few", lambda r: r._replace(shares=r.shares[:1]), "arrays"),
    Row("a share too many", lambda r: r._replace(shares=r.shares + r.shares[:1]), "arrays"),
    Row(
        "a storage that ends before",
        lambda r: r.with_share(storage_bytes=k_at(r).offset_bytes + SIZE_BYTES - 1),
        "main/k.storage",
    ),
    Row("an array behind its storage", lambda r: r.with_share(offset_bytes=k_at(r).storage_bytes), "main/k.storage"),
    Row(
        "an array between two elements", lambda r: r.with_share(offset_bytes=1, storage_bytes=1 << 20), "main/k.storage"
    ),
    Row("more memory than the driver has", lambda r: r.with_share(storage_bytes=1 << 40), "main/k.storage"),
    Row("memory behind what the driver has", lambda r: r.with_share(storage_offset_bytes=1 << 32), "main/k.device"),
    Row("another device's memory", lambda r: r._replace(shares=(r.elsewhere, r.shares[1])), "main/k.device"),
    Row("one memory for two roles", lambda r: r._replace(shares=r.shares[:1] * 2), "main/v.storage"),
    Row(
        "one memory for two layers", lambda r: by_layer(r)._replace(shares=(r.shares[0], *r.shares)), "main/k/5.storage"
    ),
    Row(
        "memory of a driver's handle",
        lambda r: r._replace(shares=(VmmShare(handle=1, size_bytes=2 << 20), r.shares[1])),
        "main/k.share",
    ),
    Row("memory that nobody has", lambda r: r.with_share(handle=bytes(64)), "main/k.storage", "DEVICE_UNAVAILABLE"),
    Row("an empty storage", lambda r: r.with_share(storage_bytes=0), "main/k.storage"),
    Row("a counter that torch has not", lambda r: r.with_share(ref_counter_offset=1 << 40), "main/k.storage"),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.claim for row in ROWS])
def test_a_claim_of_registered_memory_is_checked(harness: Harness, row: Row) -> None:
    before = held(harness)
    with pytest.raises(KvferryError) as refused:
        register(harness, row.said(harness.registered))
    assert (refused.value.code, refused.value.field) == (row.code, row.field), refused.value
    assert held(harness) == before


def test_handles_that_are_no_events_cost_nobody_the_device(harness: Harness) -> None:
    before = held(harness)
    for handles, said in (((bytes(64), os.urandom(64)), "no such event"), ((bytes(63),), "of 63 bytes; 64 are needed")):
        events = ShareFollows(message_id=0, events=SharedEvents(handles=handles))
        with raw_engine(harness.runtime_dir) as other, pytest.raises(InvalidFieldError, match=said):
            other.ask(OpenEvents(device=DEVICE.name), registered=events)
    assert held(harness) == before


def test_what_is_right_is_taken_in_both_forms_and_registered_once(harness: Harness) -> None:
    before = held(harness)
    assert len({k_at(harness.registered).handle, harness.registered.shares[1].handle}) == 1, "small: of one segment"
    for said in (harness.registered, by_layer(harness.registered), harness.registered):
        register(harness, said)
        with pytest.raises(InvalidFieldError, match="each page needs bytes of its own") as refused:
            register(harness, said, "mine-again")
        assert refused.value.field.endswith(".storage")
        harness.engine.ask(DeletePool(pool="mine"))
    assert held(harness) == before


def test_the_library_names_what_is_not_the_engines_to_register(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, (k, v, elsewhere) = held(harness), harness.tensors
    with Client.connect(harness.runtime_dir, name="polite") as client:
        pool = client.attach_pool("theirs")
        for wrong, said, field in (
            (elsewhere, "main/v is on npu:1, not on npu:0", "device"),
            (pool.tensor("main", "v"), "not from torch's allocator", "storage"),
            (v, "private format 29", "format"),
        ):
            monkeypatch.setattr("torch_npu.get_npu_format", lambda one: 29 if one is v else 2)
            with pytest.raises(InvalidFieldError, match=said) as refused:
                client.register_pool("polite", SPEC, {("main", "k"): k, ("main", "v"): wrong}, device=DEVICE.name)
            assert refused.value.field == f"main/v.{field}"
        monkeypatch.undo()
        del wrong
        pool.close()
        client.register_pool("polite", SPEC, {("main", "k"): k, ("main", "v"): v}, device=DEVICE.name)
        client.delete_pool("polite")
    assert held(harness) == before


EVENT_ROWS: Final[dict[str, RequestBody]] = {
    "steps": Send(
        request_id=new_request_id(),
        pool="theirs",
        lists=(PageList(pages=1),),
        steps=(LayerStep(first_layer=4, layers=2, event=EVENTS, value=1),),
    ),
    "after.event": Free(pool="theirs", pages=1, after=DeviceEvent(event=EVENTS, value=1)),
}


@pytest.mark.parametrize("field", EVENT_ROWS)
def test_an_event_beyond_the_ring_is_refused(harness: Harness, field: str) -> None:
    before = held(harness)
    with pytest.raises(InvalidFieldError) as refused:
        harness.engine.ask(EVENT_ROWS[field], [1])
    assert refused.value.field == field
    assert held(harness) == before
