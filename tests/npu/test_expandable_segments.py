"""Registered tensors that share physical memory: neighbours in a segment which their allocator expands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import msgspec
import pytest
import torch

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.pools.devices import vendor
from kvferry.pools.devices.npu_segments import Units, units_of
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.pool_messages import DeletePool, RegisteredArrays, RegisterPool
from kvferry.protocol.session_stream import TorchShare, share_frames
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.kit.raw_engine import raw_engine

SPEC: Final = MhaSpec(layers=4, tokens=7 * 128, page_size=128, kv_heads=4, head_dim=512, dtype="float16")
"""An array of 4 MiB a layer: of five in a row two are in the same unit of 20 MiB."""
SHAPE: Final = (8, 128, 4, 512)
KEYS: Final = [("main", role, layer) for layer in range(4) for role in ("k", "v")]
ALIGNMENT: Final = 2 << 20
UNIT: Final = 20 << 20


def aligned() -> torch.Tensor:
    """Return an array as vllm-ascend allocates it: from a multiple of 2 MiB on, in a longer allocation."""
    size = 2 * torch.Size(SHAPE).numel()
    raw = torch.zeros(size + ALIGNMENT, dtype=torch.int8, device=DEVICE.name)
    return raw[-raw.data_ptr() % ALIGNMENT :][:size].view(torch.float16).view(SHAPE)


@pytest.fixture
def tensors() -> Iterator[dict[tuple[str, str, int], torch.Tensor]]:
    """Return all layers' arrays, each a tensor, in an expandable segment."""
    with DEVICE.expandable_segments():
        made, elsewhere = {}, []  # where segments of tests before have room left
        for key in KEYS:
            while not units({key: (one := aligned())}):
                elsewhere.append(one)
            made[key] = one
        for number, one in enumerate(made.values()):
            one.copy_(torch.arange(8 * number, 8 * number + 8).view(-1, 1, 1, 1).expand(SHAPE))
        torch.accelerator.synchronize()
        yield made


def units(tensors: dict[tuple[str, str, int], torch.Tensor]) -> list[Units]:
    """Return what each lies on."""
    with DEVICE.accelerator.calling():
        found = [units_of(DEVICE.accelerator.vendor.export(one).handle) for one in tensors.values()]
    return [one for one in found if one is not None]


def test_neighbours_are_registered_and_their_bytes_move(
    client: Client, tensors: dict[tuple[str, str, int], torch.Tensor]
) -> None:
    """Pages of all arrays go out of them and into them; the same memory is registered again after that."""
    on = units(tensors)
    assert len(on) == len(KEYS)
    assert len({handle for one in on for handle in one.handles}) < sum(len(one.handles) for one in on), "none shared"
    copy = client.create_pool("copy", SPEC)
    for name in ("first", "second"):
        client.register_pool(name, SPEC, tensors, device=DEVICE.name)
        theirs = client.allocate("copy", 2)
        for source, target, here, there in (
            (name, "copy", [3, 5], list(theirs)),
            ("copy", name, list(theirs), [6, 7]),
        ):
            request = new_request_id()
            room = client.receive(target, request, [pages(there)])
            client.send(source, request, [pages(here)])
            client.wait_finished(room, 30)
            client.wait_settled(room, 30)
        for (component, role, layer), one in tensors.items():
            number = KEYS.index((component, role, layer))
            want = torch.tensor([8 * number + 3, 8 * number + 5], dtype=torch.float16)
            assert torch.equal(copy.tensor("main", role)[layer, list(theirs), 0, 0, 0].cpu(), want)
            assert torch.equal(one[6:, 5, 1, 7].cpu(), want)
            one[6:] = 0
        torch.accelerator.synchronize()
        client.free("copy", theirs)
        client.delete_pool(name)
    client.delete_pool("copy")


def test_two_pools_may_lie_in_one_unit_but_not_in_the_same_bytes(
    client: Client, tensors: dict[tuple[str, str, int], torch.Tensor]
) -> None:
    """The unit is mapped once, until neither uses it."""
    one_layer = msgspec.structs.replace(SPEC, layers=1)
    on = dict(zip(KEYS, units(tensors), strict=True))
    alike = [(a, b) for a, b in itertools.combinations(KEYS, 2) if on[a] == on[b]]
    first = alike[0]
    beyond = next(key for key in KEYS if set(on[first[0]].handles) < set(on[key].handles))
    apart = next(pair for pair in alike if set(on[first[0]].handles).isdisjoint(on[pair[0]].handles))

    def register(name: str, *keys: tuple[str, str, int]) -> None:
        arrays = {("main", role): tensors[key][None] for role, key in zip(("k", "v"), keys, strict=True)}
        client.register_pool(name, one_layer, arrays, device=DEVICE.name)

    client.register_pool("all", SPEC, tensors, device=DEVICE.name)
    with pytest.raises(InvalidFieldError, match="each page needs bytes of its own"):
        register("again", *first)
    client.delete_pool("all")
    register("first", *first)
    with pytest.raises(KvferryError, match=r"without it: register both at once|registered already"):
        register("second", beyond, apart[0])
    register("second", *apart)
    client.delete_pool("first")
    client.delete_pool("second")
    client.register_pool("all", SPEC, tensors, device=DEVICE.name)
    client.delete_pool("all")


def test_an_engine_that_was_killed_leaves_no_memory(daemon: Daemon, client: Client, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    with Child(simulator) as victim:
        victim.do(VICTIM.format(directory=str(daemon.runtime_dir), device=DEVICE.name))
        assert [one.pool for one in client.status().pools] == ["victims"]
        victim.kill()
    assert soon(lambda: simulator.memory_used(0) == before)
    assert not client.status().pools


VICTIM: Final = """
import torch, torch_npu
from kvferry.clients import Client, MhaSpec
torch.npu.memory._set_allocator_settings("expandable_segments:True")
spec = MhaSpec(layers=4, tokens=7 * 128, page_size=128, kv_heads=4, head_dim=512, dtype="float16")
tensors = {{
    ("main", role, layer): torch.zeros((8, 128, 4, 512), dtype=torch.float16, device="{device}")
    for layer in range(4) for role in ("k", "v")
}}
torch.npu.synchronize()
client = Client.connect("{directory}", name="victim")
client.register_pool("victims", spec, tensors, device="{device}")
"""


def test_what_is_claimed_of_units_is_checked(daemon: Daemon, tensors: dict[tuple[str, str, int], torch.Tensor]) -> None:
    """No claim costs the daemon its device, or is believed."""
    spec = msgspec.structs.replace(SPEC, layers=1)
    k, v = [tensors[key] for key, on in zip(KEYS, units(tensors), strict=True) if len(on.handles) == 1][:2]
    with DEVICE.accelerator.calling():
        shares = tuple(DEVICE.accelerator.vendor.export(one) for one in (k, v))
    arrays = tuple(
        RegisteredArrays(
            component="main", role=role, shape=(1, *SHAPE), strides=(k.numel(), *k.stride()), dtype="float16"
        )
        for role in ("k", "v")
    )
    handle = shares[0].handle
    head, own = handle[:2], int.from_bytes(handle[18:26], "little")

    def claimed(unit_bytes: int, *handles: int) -> bytes:
        return head + b"".join(one.to_bytes(8, "little") for one in (unit_bytes, len(handles), *handles))

    with raw_engine(daemon.runtime_dir) as engine:

        def register(first: TorchShare) -> None:
            (frame,) = share_frames(0, [first, shares[1]])
            engine.ask(RegisterPool(pool="mine", spec=spec, device=DEVICE.name, arrays=arrays), registered=frame)

        for claim, code in (
            (claimed(UNIT, own + 77), "DEVICE_UNAVAILABLE"),
            (claimed(UNIT + ALIGNMENT, own), "DEVICE_UNAVAILABLE"),
            (claimed(UNIT, own, own), "INVALID_FIELD"),
            (claimed(UNIT), "INVALID_FIELD"),
            (claimed(1 << 40, own), "INVALID_FIELD"),
            (handle + b"more", "INVALID_FIELD"),
        ):
            with pytest.raises(KvferryError, match="main/k") as refused:
                register(msgspec.structs.replace(shares[0], handle=claim))
            assert (refused.value.code, refused.value.field) == (code, "main/k.storage"), refused.value
        with pytest.raises(InvalidFieldError, match="that are shared"):
            register(msgspec.structs.replace(shares[0], storage_offset_bytes=UNIT - 1))
        register(shares[0])
        engine.ask(DeletePool(pool="mine"))


def test_a_storage_in_too_many_pieces_is_refused_by_the_library(
    client: Client, tensors: dict[tuple[str, str, int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "MAX_STORAGE_HANDLE_BYTES", 25)
    with pytest.raises(InvalidFieldError, match="expandable_segments:False, or layer by layer"):
        client.register_pool("pieces", SPEC, tensors, device=DEVICE.name)
