"""Devices of a host that has none: who asks for one is told what is missing, and the daemon goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.daemon.devices import Devices
from kvferry.protocol.config.schema import Config, DevicesConfig
from kvferry.protocol.errors import DeviceLostError, DeviceUnavailableError, InvalidFieldError, UnknownPoolError
from tests.daemons import running_daemon

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
MISSING = "npu:7"


@pytest.fixture
def devices() -> Devices:
    """Return the devices of a daemon, none of which was asked for."""
    return Devices(DevicesConfig(), _unexpected)


def _unexpected(name: str, error: DeviceLostError) -> None:
    raise AssertionError((name, error))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Return a client of a daemon on this host."""
    with running_daemon(tmp_path_factory.mktemp("devices")) as daemon, Client.connect(daemon.runtime_dir) as one:
        yield one


def test_nothing_is_touched_before_somebody_asks(devices: Devices) -> None:
    assert not devices.in_use
    assert not devices.lost
    assert list(devices.status()) == []
    devices.check(1e9)
    assert repr(devices) == "<Devices >"


@pytest.mark.parametrize("name", ["npu:999", "cuda:999"])
def test_a_device_that_is_not_there_is_named_with_the_reason(devices: Devices, name: str) -> None:
    details = set()
    for ask in (devices.open, lambda one: devices.allocate(one, 1 << 20), lambda one: devices.register(one, [], 1)):
        with pytest.raises(DeviceUnavailableError) as refused:
            ask(name)
        assert refused.value.field == "device"
        details.add(refused.value.detail)
    (shown,) = devices.status()
    assert (shown.device, shown.pool_bytes) == (name, 0)
    assert {shown.state} == {f"unavailable: {detail}" for detail in details}
    assert not devices.lost, "it can be asked for again"


def test_a_daemon_without_devices_says_why_and_goes_on(client: Client) -> None:
    with pytest.raises(DeviceUnavailableError) as refused:
        client.create_pool("on-device", SPEC, device=MISSING)
    assert "kvferry doctor" in refused.value.remedy
    with pytest.raises(UnknownPoolError):
        client.attach_pool("on-device")
    status = client.status()
    (shown,) = status.devices
    assert shown.device == MISSING
    assert shown.state.startswith("unavailable: ")
    assert client.create_pool("on-device", SPEC).device == "host", "the name is free still"


@pytest.mark.parametrize("name", ["", "npu", "npu:", "npu:-1", "npu:1000", "gpu:0", "NPU:0", "host:0", "npu:0\n"])
def test_what_is_no_devices_name(client: Client, name: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        client.create_pool("named", SPEC, device=name)
    assert refused.value.field == "device"


@pytest.mark.parametrize(
    "wrong", ['{"max_fraction": 0}', '{"max_fraction": 1.1}', '{"stuck_after_s": 0}', '{"max": 1}']
)
def test_a_configuration_that_makes_no_sense(wrong: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(f'{{"devices": {wrong}}}', type=Config)


def test_the_runtime_directory_holds_no_word_of_pools_on_the_host(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, Client.connect(daemon.runtime_dir) as client:
        client.create_pool("plain", SPEC)
        assert not list(daemon.runtime_dir.glob("device-pools*"))
