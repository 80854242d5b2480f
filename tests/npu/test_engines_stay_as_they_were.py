"""The client library leaves an engine's thread as it found it, also where it uses another device and where it fails.

Current device, current streams, default dtype and grad mode: whoever finds them changed runs its next kernel on the
wrong device.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import pytest
import torch

from kvferry.clients import AsyncClient, AttachedPool, Client, MhaSpec
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.errors import DeviceUnavailableError, KvferryError
from tests.kit.daemons import Daemon
from tests.npu.conftest import OPENING_S

SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16")
SHAPE: Final = (2, 5, 16, 2, 8)
DEVICES: Final = ("npu:0", "npu:1")
POOLS: Final = {"pool-0": SPEC}

_numbers = itertools.count()


def driver_device() -> int:
    """Return the device that raw calls of this thread go to; below 0 where it has set none."""
    found = ctypes.c_int32(-1)
    ctypes.CDLL("libascendcl.so").aclrtGetDevice(ctypes.byref(found))
    return found.value


class State(NamedTuple):
    """What an engine's thread computes with."""

    device: int
    driver_device: int
    streams: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @classmethod
    def now(cls) -> State:
        streams = tuple(int(torch.accelerator.current_stream(device).stream_id) for device in DEVICES)
        return cls(
            torch.accelerator.current_device_index(),
            driver_device(),
            streams,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )


class Engine(NamedTuple):
    """A thread whose current device is one, and a pool on the other: by turns."""

    client: Client
    device: str
    pool: str
    made: AttachedPool | None = None


@pytest.fixture(scope="module")
def daemon(daemon: Daemon) -> Daemon:
    with Client.connect(daemon.runtime_dir) as client:
        client.create_pool("pool-1", SPEC, device="npu:1", deadline_s=OPENING_S).close()
    return daemon


@pytest.fixture(params=DEVICES)
def engine(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Return an engine on its own streams that computes without gradients, on the other device than its pool's."""
    before, dtype = [torch.accelerator.current_stream(device) for device in DEVICES], torch.get_default_dtype()
    device: str = request.param
    torch.accelerator.set_device_index(1 - int(device[-1]))
    own = [torch.npu.Stream(device=one) for one in DEVICES]  # type: ignore[attr-defined]
    for stream in own:
        _set_stream(stream)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), Client.connect(daemon.runtime_dir, name="engine") as client:
            yield Engine(client, device, f"pool-{device[-1]}")
    finally:
        torch.set_default_dtype(dtype)
        for stream in before:
            _set_stream(stream)
        torch.accelerator.set_device_index(0)


def _set_stream(stream: torch.Stream) -> None:
    with torch.accelerator.device_index(stream.device_index):
        torch.accelerator.set_stream(stream)


def register(engine: Engine) -> None:
    tensors = {("main", role): torch.zeros(SHAPE, dtype=torch.float16, device=engine.device) for role in ("k", "v")}
    name = f"new-{next(_numbers)}"
    engine.client.register_pool(name, SPEC, tensors, device=engine.device)
    engine.client.delete_pool(name)


def open_anew(engine: Engine) -> None:
    """As the first client of a process does."""
    Accelerator(engine.device).open()


def record(engine: Engine) -> None:
    ring = engine.client.open_events(engine.device, events=2)
    ring.record_event()


def use_tables(engine: Engine) -> None:
    client = engine.client
    pool = client.attach_pool(engine.pool)
    tables = client.create_tables("tables", engine.pool, max_batch=4, max_context_tokens=64)
    client.wait(client.update_tables(tables, [1], rows={0: [1]}, after=tables.replayed()))
    tables.order()
    assert tables.block_tables.device == torch.device(engine.device)
    client.delete_tables(tables)
    pool.close()


def attach(engine: Engine) -> None:
    pool = engine.client.attach_pool(engine.pool)
    assert pool.tensor("main", "k").device == torch.device(engine.device)
    pool.close()


def create(engine: Engine) -> None:
    name = f"new-{next(_numbers)}"
    engine.client.create_pool(name, SPEC, device=engine.device).close()
    engine.client.delete_pool(name)


USES: Final = (create, attach, register, record, use_tables)


@pytest.mark.parametrize("use", USES)
def test_an_engine_stays_as_it_was(engine: Engine, use: Callable[[Engine], None]) -> None:
    before = State.now()
    assert (before.device, before.dtype, before.grad) == (1 - int(engine.device[-1]), torch.bfloat16, False)
    use(engine)
    assert State.now() == before
    assert torch.zeros(1, device="npu").device.index == before.device, "its next kernel is on its own device"


def failing(*_arguments: object, **_more: object) -> Any:  # noqa: ANN401  whatever it stands for
    raise RuntimeError("no more of these")


def refusing(*_arguments: object) -> Any:  # noqa: ANN401  whatever it stands for
    raise DeviceUnavailableError("the shared memory cannot be imported", field="share")


@pytest.mark.parametrize(
    ("name", "instead", "use"),
    [
        ("Stream", failing, open_anew),
        ("map", refusing, attach),
        ("map", refusing, use_tables),
        ("export", refusing, use_tables),
        ("write_value", failing, use_tables),
        ("wait_value", failing, use_tables),
        ("map", failing, attach),
        ("export", refusing, register),
        ("shared_event", failing, record),
    ],
)
def test_an_engine_stays_as_it_was_where_that_fails(
    daemon: Daemon,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    instead: Callable[..., Any],
    use: Callable[[Engine], None],
) -> None:
    before = State.now()
    monkeypatch.setattr(torch.npu if name == "Stream" else NpuVendor, name, instead)  # type: ignore[attr-defined]
    with pytest.raises(KvferryError):
        use(engine)
    monkeypatch.undo()
    assert State.now() == before
    elsewhere = Client.connect(daemon.runtime_dir, devices={engine.device: "npu:9"})
    with elsewhere, pytest.raises(DeviceUnavailableError):
        elsewhere.attach_pool(engine.pool)
    assert State.now() == before


def test_what_is_recorded_by_default_is_the_stream_of_the_rings_own_device(engine: Engine) -> None:
    ring = engine.client.open_events(engine.device, events=2)
    pool = engine.client.attach_pool(engine.pool)
    ids = engine.client.allocate(engine.pool, 1)
    pool.tensor("main", "k")[:, ids] = 1  # on the pool's device, whose stream is not this thread's current device's
    assert engine.client.free(engine.pool, ids, after=ring.record_event()).freed == 1


def test_the_async_client_leaves_a_loops_thread_as_it_was(daemon: Daemon, engine: Engine) -> None:
    async def use() -> None:
        async with await AsyncClient.connect(daemon.runtime_dir) as client:
            before = State.now()
            pool = await client.attach_pool(engine.pool)
            (await client.open_events(engine.device, events=2)).record_event()
            pool.close()
            assert State.now() == before

    asyncio.run(use())


def test_a_thread_without_a_device_opens_the_one_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    set_device = torch.accelerator.set_device_index

    def noted(index: int) -> None:
        opened.append(index)
        set_device(index)

    def use() -> int:
        one = Accelerator("npu:1")
        one.open()
        with one.calling():
            assert driver_device() == 1
        return torch.accelerator.current_device_index()

    monkeypatch.setattr(torch.accelerator, "set_device_index", noted)
    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(use).result() == 0
    assert set(opened) == {1}, "device 0 is current by default only, and a context on it costs memory"


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1), (1, 1, 0), (0, 0, 1)])
def test_raw_calls_go_to_the_device_that_is_meant(order: tuple[int, ...]) -> None:
    devices = [Accelerator(device) for device in DEVICES]

    def use(number: int) -> int:
        devices[number].open()
        with devices[number].calling():
            return driver_device()

    with ThreadPoolExecutor(1) as fresh:
        assert tuple(fresh.map(use, order)) == order
