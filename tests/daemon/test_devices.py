"""Devices of a host that has none: who asks for one is told what is missing, and no engine harms the daemon."""

from __future__ import annotations

import pytest

from kvferry.clients import Client, calls
from kvferry.daemon.process.devices import Devices
from kvferry.protocol import errors
from kvferry.protocol.config.schema import DevicesConfig
from kvferry.protocol.manifests import MhaSpec
from kvferry.protocol.pool_messages import RegisteredArrays, RegisterPool
from kvferry.protocol.session_stream import ShareFollows, TorchShare
from tests.kit.daemons import Daemon
from tests.kit.raw_engine import raw_engine

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
MISSING = "npu:7"
SHARE = TorchShare(
    handle=bytes(64), storage_bytes=1 << 20, storage_offset_bytes=0, ref_counter=b"none", ref_counter_offset=0,
    event=bytes(64), event_sync=False,
)  # fmt: skip


def test_a_device_that_is_not_there_is_named_with_the_reason() -> None:
    name = "npu:999"
    lost: list[str] = []
    devices = Devices(DevicesConfig(), lambda name, _error: lost.append(name))
    devices.check(1e9)
    assert (devices.in_use, list(devices.status())) == (False, [])
    details = set()
    for ask in (devices.open, lambda one: devices.allocate(one, 1 << 20), lambda one: devices.register(one, [], 1)):
        with pytest.raises(errors.DeviceUnavailableError) as refused:
            ask(name)
        assert refused.value.field == "device"
        details.add(refused.value.detail)
    (shown,) = devices.status()
    assert (shown.device, shown.pool_bytes) == (name, 0)
    assert {shown.state} == {f"unavailable: {detail}" for detail in details}
    assert not devices.lost, "it can be asked for again"
    assert lost == []


def test_a_daemon_without_devices_says_why_and_goes_on(daemon: Daemon, client: Client) -> None:
    with pytest.raises(errors.DeviceUnavailableError) as refused:
        client.create_pool("on-device", SPEC, device=MISSING)
    assert "kvferry doctor" in refused.value.remedy
    assert not list(daemon.runtime_dir.glob("device-pools*")), "no word of pools on the host"
    with pytest.raises(errors.UnknownPoolError):
        client.attach_pool("on-device")
    (shown,) = client.status().devices
    assert shown.device == MISSING
    assert shown.state.startswith("unavailable: ")
    assert client.create_pool("on-device", SPEC).device == "host", "the name is free still"
    for name in ("", "npu", "npu:-1", "npu:1000", "gpu:0", "NPU:0", "host:0", "npu:0\n"):
        with pytest.raises(errors.InvalidFieldError) as no_name:
            client.create_pool("named", SPEC, device=name)
        assert no_name.value.field == "device"


def test_all_that_an_engine_said_before_a_message_is_taken(daemon: Daemon) -> None:
    count = 200  # far more than is read at a time
    arrays = tuple(RegisteredArrays(component="main", role="k", layer=number) for number in range(count))
    call = calls.asked(RegisterPool(pool="registered", spec=SPEC, device="npu:0", arrays=arrays))
    with raw_engine(daemon.runtime_dir) as engine:
        for _ in range(5):
            with pytest.raises(errors.KvferryError) as refused:
                engine.call(call, lambda number: [ShareFollows(message_id=number, shares=(SHARE,))] * count)
            assert "shares came" not in refused.value.detail
