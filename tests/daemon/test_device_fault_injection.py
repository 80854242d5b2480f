"""Faults around devices and engines' events that need no device to be seen: late, chatty and forgetful engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.clients import Client, calls, new_request_id, pages
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    DeviceUnavailableError,
    InvalidFieldError,
    KvferryError,
    TooLargeError,
)
from kvferry.protocol.manifests import MhaSpec
from kvferry.protocol.pool_messages import RegisteredArrays, RegisterPool
from kvferry.protocol.session_messages import OpenEvents
from kvferry.protocol.session_stream import ShareFollows, TorchShare
from tests.daemons import DaemonProcess, running_daemon
from tests.raw_engine import raw_engine

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
SHARE = TorchShare(
    handle=bytes(64),
    storage_bytes=1 << 20,
    storage_offset_bytes=0,
    ref_counter=b"none",
    ref_counter_offset=0,
    event=bytes(64),
    event_sync=False,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Run a daemon for all tests."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as one:
        yield one


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    """Return a client with a pool on the host."""
    with Client.connect(daemon.runtime_dir) as one:
        one.create_pool("host", SPEC)
        yield one


def test_a_receive_that_waits_for_its_event_can_be_cancelled(client: Client) -> None:
    ring, ids, request_id = client.open_events(), client.allocate("host", 2), new_request_id()
    later = ring.event()
    transfer = client.receive("host", request_id, [pages(ids)], after=later)
    assert not client.cancel(transfer).was_finished
    with pytest.raises(CancelledError):
        client.wait_finished(transfer)
    client.free("host", ids)
    ring.record(later)
    client.ping()
    assert client.status().transfers == ()  # nobody made a transfer in pages that are free


def test_requests_whose_deadline_has_passed_make_room_for_others(client: Client) -> None:
    ring, ids = client.open_events(), client.allocate("host", 1)
    never, soon = ring.event(), ring.event()
    for _ in range(1100):  # more than may be held
        pending = client.begin(calls.free("host", ids, "main", never), deadline_s=0.001)
        with pytest.raises(DeadlineError):
            client.wait(pending)
    held = client.begin(calls.free("host", ids, "main", soon))
    ring.record(soon)
    assert client.wait(held).freed == 1


def test_all_that_an_engine_said_before_a_message_is_taken(daemon: DaemonProcess) -> None:
    count = 200  # far more than is read at a time
    arrays = tuple(RegisteredArrays(component="main", role="k", layer=number) for number in range(count))

    def said(message_id: int) -> list[ShareFollows]:
        return [ShareFollows(message_id=message_id, shares=(SHARE,)) for _ in range(count)]

    with raw_engine(daemon.runtime_dir) as engine:
        for _ in range(5):
            with pytest.raises(KvferryError) as refused:
                engine.call(
                    calls.asked(RegisterPool(pool="registered", spec=SPEC, device="npu:0", arrays=arrays)), said
                )
            assert "shares came" not in refused.value.detail


def test_tables_have_a_bound(client: Client) -> None:
    with pytest.raises(TooLargeError) as refused:
        client.create_tables("large", "host", max_batch=65_536, max_context_tokens=1 << 15)
    assert refused.value.field == "max_batch"
    client.create_tables("small", "host", max_batch=4, max_context_tokens=64)


def test_a_pool_that_is_asked_for_without_a_device_is_refused_and_nothing_is_left(client: Client) -> None:
    for _ in range(2):
        with pytest.raises(DeviceUnavailableError):
            client.create_pool("device", SPEC, device="npu:0", deadline_s=60)
    client.create_pool("device", SPEC)
    client.delete_pool("device")


def test_a_ring_on_the_host_is_not_taken_for_one_on_a_device(client: Client) -> None:
    client.open_events()
    again = client.open_events()
    again.record_event()
    with pytest.raises(InvalidFieldError):
        client.call(calls.asked(OpenEvents(device="npu:0")))
