"""Clients of both kinds against a real daemon."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from kvferry.clients import AttachedPool, Client, KvferryError, MhaSpec, Transfer, new_request_id, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    DaemonLostError,
    DeadlineError,
    EmptyPagesError,
    InvalidFieldError,
    LayoutMismatchError,
    NotOwnerError,
    OutOfMemoryError,
    PageBusyError,
    PeerCancelledError,
    PoolExistsError,
    PoolFullError,
    PoolInUseError,
    TooLargeError,
    UnknownPoolError,
    UnknownTransferError,
)
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Limits
from kvferry.protocol.transfer_messages import Direction
from tests.daemons import DaemonProcess, running_daemon
from tests.devices import DEVICE

pytestmark = pytest.mark.any_device

SOON_S = 10.0


# -- connecting


def test_hello_says_what_the_daemon_is(client: Client) -> None:
    welcome = client.welcome
    assert welcome is not None
    assert welcome.protocol == 2
    assert {"transfers.local", "transfers.chunks"} <= set(welcome.features)
    assert len(client.boot_id) == 32
    assert "session=" in repr(client)


def test_without_a_session_one_may_look_only(daemon: DaemonProcess) -> None:
    with Client.connect(daemon.runtime_dir, session=False) as looker:
        assert looker.ping() > 0
        assert looker.status().pid == daemon.process.pid
        with pytest.raises(KvferryError, match="NO_SESSION"):
            looker.allocate("any", 1)


def test_status_shows_the_session_and_forgets_it(daemon: DaemonProcess, client: Client, name: str) -> None:
    with Client.connect(daemon.runtime_dir, name=name):
        (shown,) = [one for one in client.status().sessions if one.name == name]
        assert (shown.pid, shown.tenant, shown.connected) == (os.getpid(), os.getuid(), True)
    while any(one.name == name for one in client.status().sessions):
        pass  # each look is a round trip; the end of a session is seen after a few


@pytest.mark.parametrize("session", [False, True])
def test_no_daemon(tmp_path: Path, *, session: bool) -> None:
    with pytest.raises(DaemonLostError, match="no daemon"):
        Client.connect(tmp_path, session=session, timeout_s=0.1)


# -- pools


def test_a_pool_is_created_once_and_found_again(client: Client, other: Client, name: str, spec: MhaSpec) -> None:
    made = client.create_pool(name, spec, device=DEVICE.name)
    found = other.create_pool(name, msgspec.structs.replace(spec, view="fia"), device=DEVICE.name)
    assert found.manifest.layout_digest == made.manifest.layout_digest
    assert made.page_size == 4
    assert (made.manifest.pages, len(made.manifest.entries)) == (17, 4)
    with pytest.raises(PoolExistsError):
        other.create_pool(name, msgspec.structs.replace(spec, tokens=128), device=DEVICE.name)
    with pytest.raises(PoolExistsError):
        other.create_pool(name, msgspec.structs.replace(spec, dtype="bfloat16"), device=DEVICE.name)
    with pytest.raises(InvalidFieldError) as refused:
        other.create_pool(name + "x", msgspec.structs.replace(spec, dtype="float3"), device=DEVICE.name)
    assert refused.value.field == "dtype"


def test_attaching_by_digest(client: Client, name: str, spec: MhaSpec) -> None:
    digest = client.create_pool(name, spec, device=DEVICE.name).manifest.layout_digest
    assert client.attach_pool(name).manifest.layout_digest == digest
    assert client.attach_pool(name, digest).manifest.layout_digest == digest
    with pytest.raises(LayoutMismatchError):
        client.attach_pool(name, "0" * 32)
    with pytest.raises(UnknownPoolError):
        client.attach_pool(name + "x")


def test_a_deleted_pool_is_gone_but_its_mappings_stay(client: Client, name: str, spec: MhaSpec) -> None:
    pool = client.create_pool(name, spec, device=DEVICE.name)
    k = pool.tensor("main", "k")
    k.fill_(7)
    ids = client.allocate(name, 1)
    with pytest.raises(PoolInUseError, match="1 pages"):
        client.delete_pool(name)
    client.free(name, ids)
    client.delete_pool(name)
    for use in (lambda: client.attach_pool(name), lambda: client.allocate(name, 1), lambda: client.delete_pool(name)):
        with pytest.raises(UnknownPoolError):
            use()
    assert bool((k == 7).all())
    pool.close()
    assert not client.create_pool(name, spec, device=DEVICE.name).tensor("main", "k").any(), "a new pool is new memory"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_tensors_share_the_memory(client: Client, other: Client, name: str, spec: MhaSpec, dtype: str) -> None:
    spec = msgspec.structs.replace(spec, dtype=dtype)
    paged = client.create_pool(name, spec, device=DEVICE.name)
    fia = other.create_pool(name, msgspec.structs.replace(spec, view="fia"), device=DEVICE.name)
    k, v = paged.tensor("main", "k"), paged.tensor("main", "v")
    assert (k.shape, v.shape) == ((2, 17, 4, 2, 4), (2, 17, 4, 2, 2))
    assert k.dtype == v.dtype == getattr(torch, dtype)
    ones = torch.ones(2, 4).to(k.dtype).to(k.device)
    k[1, 5, 3] = ones
    v[0, 16, 0] = ones[:, :2]
    assert fia.tensor("main", "k").shape == (2, 68, 1, 2, 4), "each engine has the view that it asked for"
    assert bool((fia.tensor("main", "k")[1, 5 * 4 + 3].float() == 1).all())
    (entry,) = [one for one in fia.manifest.entries if (one.role, one.layer) == ("k", 4)]
    row = fia.entry_tensor(entry)[5 * 4 + 3]
    row[0] = torch.zeros(2, 4).to(k.dtype).to(k.device)
    assert not k.float().any(), "what one writes the other sees"
    assert float(v.float().sum()) == 4


# -- pages


def test_pages_come_and_go(client: Client, other: Client, name: str, spec: MhaSpec) -> None:
    client.create_pool(name, spec, device=DEVICE.name)
    ids = client.allocate(name, 10)
    assert ids.tolist() == list(range(1, 11))
    ids[0] = 1  # they may be written to
    with pytest.raises(PoolFullError, match="7 pages asked for, 6 of 16 free"):
        other.allocate(name, 7)
    with pytest.raises(NotOwnerError):
        other.free(name, ids)
    assert client.free(name, ids[5:]).freed == 5
    assert client.free(name, [1, 2]).freed == 2
    assert other.allocate(name, 7).tolist() == [1, 2, 6, 7, 8, 9, 10]
    with pytest.raises(EmptyPagesError):
        client.free(name, [])


# -- transfers


class TwoEngines(NamedTuple):
    """A prefill and a decode engine, each with a pool and pages."""

    prefill: Client
    decode: Client
    source: AttachedPool
    destination: AttachedPool
    sent: PageIds
    received: PageIds

    def send(self, request_id: str, **options: int | bytes) -> Transfer:
        """SEND all pages."""
        return self.prefill.send(
            self.source.name,
            request_id,
            [pages(self.sent, tokens=10)],
            **options,  # type: ignore[arg-type]
        )

    def receive(self, request_id: str) -> Transfer:
        """RECEIVE into all pages."""
        return self.decode.receive(self.destination.name, request_id, [pages(self.received, tokens=10)])

    def arrived(self) -> bool:
        """Return whether every layer's pages are those that were sent."""
        return all(
            torch.equal(
                self.source.tensor("main", role)[:, self.sent], self.destination.tensor("main", role)[:, self.received]
            )
            for role in ("k", "v")
        )


@pytest.fixture
def engines(client: Client, other: Client, name: str, spec: MhaSpec) -> TwoEngines:
    """Return both engines; the source's pages hold random numbers."""
    source, destination = (
        client.create_pool(name, spec, device=DEVICE.name),
        other.create_pool(name + "-decode", spec, device=DEVICE.name),
    )
    other.allocate(destination.name, 2)
    sent, received = client.allocate(name, 3), other.allocate(destination.name, 3)[::-1].copy()
    for role in ("k", "v"):
        into = source.tensor("main", role)
        into[:, sent] = torch.rand(2, 3, 4, 2, 4 if role == "k" else 2).to(into.device)
    DEVICE.synchronize()
    return TwoEngines(client, other, source, destination, sent, received)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_transfer_in_either_order(engines: TwoEngines, first: str) -> None:
    request_id, payload = new_request_id(), os.urandom(MAX_PAYLOAD_BYTES)
    if first == "send":
        sending = engines.send(request_id, first_token=42, payload=payload)
        assert engines.prefill.poll(SOON_S) == [sending]
        receiving = engines.receive(request_id)
    else:
        receiving = engines.receive(request_id)
        assert engines.decode.poll(SOON_S) == [receiving]
        sending = engines.send(request_id, first_token=42, payload=payload)
    finished = engines.decode.wait_finished(receiving, SOON_S)
    assert engines.arrived()
    assert (finished.first_token, finished.payload) == (42, payload)
    assert (finished.pages, finished.moved_bytes, finished.generation) == (3, 3 * 4 * 2 * (4 + 2) * 4 * 2, 1)
    engines.prefill.wait_settled(sending, SOON_S)
    engines.decode.wait_settled(receiving, SOON_S)
    assert engines.prefill.wait_finished(sending).pages == 3
    assert engines.prefill.free(engines.source.name, engines.sent).deferred == 0


def test_chunks_of_a_prompt(engines: TwoEngines) -> None:
    request_id, sent = new_request_id(), engines.sent
    receiving = engines.receive(request_id)
    chunk = engines.prefill.send(engines.source.name, request_id, [pages(sent[:1], tokens=4)], last=False)
    assert chunk is engines.prefill.send(
        engines.source.name, request_id, [pages(sent[1:2], first_page=1, tokens=4)], last=False
    )
    assert chunk is engines.prefill.send(
        engines.source.name, request_id, [pages(sent[2:], first_page=2, tokens=2)], first_token=3
    )
    assert engines.decode.wait_finished(receiving, SOON_S).first_token == 3
    assert engines.prefill.wait_finished(chunk, SOON_S).pages == 3
    assert engines.arrived()


def test_a_refused_chunk_may_be_corrected(engines: TwoEngines) -> None:
    request_id, sent = new_request_id(), engines.sent
    receiving = engines.receive(request_id)
    sending = engines.prefill.send(engines.source.name, request_id, [pages(sent[:1], tokens=4)], last=False)
    engines.prefill.send(engines.source.name, request_id, [pages(sent[1:], first_page=2, tokens=6)])
    with pytest.raises(KvferryError, match="PAGE_GAP"):
        engines.prefill.wait_finished(sending, SOON_S)
    assert not sending.is_settled
    engines.prefill.send(engines.source.name, request_id, [pages(sent[1:], first_page=1, tokens=6)])
    engines.prefill.wait_finished(sending, SOON_S)
    engines.decode.wait_finished(receiving, SOON_S)
    assert engines.arrived()


def test_a_prefix_that_decode_has_is_not_sent_again(engines: TwoEngines) -> None:
    request_id = new_request_id()
    before = engines.destination.tensor("main", "k")[:, engines.received[0]].clone()
    receiving = engines.decode.receive(
        engines.destination.name, request_id, [pages(engines.received[1:], first_page=1, tokens=6)]
    )
    engines.send(request_id)
    assert engines.decode.wait_finished(receiving, SOON_S).skipped_source_pages == 1
    assert torch.equal(engines.destination.tensor("main", "k")[:, engines.received[0]], before)


def test_a_payload_that_is_too_large(engines: TwoEngines) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        engines.send(new_request_id(), payload=bytes(LARGEST_PAYLOAD_BYTES + 1))
    assert refused.value.field == "payload"
    sending = engines.send(new_request_id(), payload=bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(TooLargeError, match=f"takes {MAX_PAYLOAD_BYTES}"):
        engines.prefill.wait_finished(sending, SOON_S)


def test_a_pool_says_how_large_its_payloads_may_be(client: Client, name: str, spec: MhaSpec) -> None:
    size, most = 1 << 20, Limits().largest_payload_bytes
    for pool in (name, f"{name}-receive"):
        client.create_pool(pool, spec, device=DEVICE.name, max_payload_bytes=size)
    with pytest.raises(PoolExistsError, match=f"at most {size} bytes, asked for 65536") as exists:
        client.create_pool(name, spec, device=DEVICE.name)
    assert exists.value.field == "max_payload_bytes"
    with pytest.raises(TooLargeError, match=r"half of limits\.max_frame_bytes"):
        client.create_pool(f"{name}-x", spec, device=DEVICE.name, max_payload_bytes=most + 1)
    shown = {one.pool: one.max_payload_bytes for one in client.status().pools}
    assert shown[name] == shown[f"{name}-receive"] == size
    request_id, payload = new_request_id(), os.urandom(size)
    receiving = client.receive(f"{name}-receive", request_id)
    client.send(name, request_id, payload=payload)
    assert client.wait_finished(receiving, SOON_S).payload == payload


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("side", ["send", "receive"])
def test_cancelling(engines: TwoEngines, side: str, *, wait: bool) -> None:
    request_id = new_request_id()
    mine, engine, peer = (
        (engines.send(request_id), engines.prefill, engines.decode)
        if side == "send"
        else (engines.receive(request_id), engines.decode, engines.prefill)
    )
    cancelled = engine.cancel(mine, wait=wait)
    assert (cancelled.was_finished, cancelled.settled) == (False, True)
    assert {one.busy for one in engine.status().pools if one.pool == mine.key.pool} == {0}
    engine.wait_settled(mine, SOON_S)
    with pytest.raises(CancelledError):
        engine.wait_finished(mine, SOON_S)
    assert not peer.poll(0)
    with pytest.raises(UnknownTransferError):
        engine.cancel(mine)


def test_the_peer_hears_of_a_cancel(engines: TwoEngines) -> None:
    request_id = new_request_id()
    receiving = engines.receive(request_id)
    sending = engines.prefill.send(engines.source.name, request_id, [pages(engines.sent[:1], tokens=4)], last=False)
    assert engines.prefill.poll(SOON_S) == [sending]
    engines.prefill.cancel(sending)
    with pytest.raises(PeerCancelledError):
        engines.decode.wait_finished(receiving, SOON_S)
    engines.decode.wait_settled(receiving, SOON_S)


@pytest.mark.parametrize("wake", [True, False])
def test_a_sender_hears_who_waits_before_it_computes(engines: TwoEngines, *, wake: bool) -> None:
    request_id, pool = new_request_id(), engines.source.name
    sending = engines.prefill.send(pool, request_id, last=False, wake_on_match=wake)
    assert engines.prefill.poll(SOON_S) == [sending]
    assert sending.matched == engines.prefill.result(pool, request_id, "send").matched == 0
    receiving = engines.receive(request_id)
    assert engines.decode.poll(SOON_S) == [receiving]
    assert receiving.matched == 1
    assert engines.prefill.result(pool, request_id, "send").matched == 1  # its event has come before
    assert sending.matched == 1
    assert engines.prefill.poll(0) == ([sending] if wake else [])
    assert engines.send(request_id, first_token=3) is sending
    assert engines.decode.wait_finished(receiving, SOON_S).first_token == 3
    engines.prefill.wait_settled(sending, SOON_S)
    assert engines.arrived()


@pytest.mark.parametrize("gone", ["send", "receive"])
def test_a_half_that_never_comes(engines: TwoEngines, gone: Direction) -> None:
    request_id = new_request_id()
    waiting, engine, other = (
        (engines.receive(request_id), engines.decode, engines.prefill)
        if gone == "send"
        else (engines.send(request_id), engines.prefill, engines.decode)
    )
    assert engine.poll(SOON_S) == [waiting]
    assert other.abandon(request_id, gone, reason="aborted by its client").failed == 1
    with pytest.raises(PeerCancelledError, match="the peer abandoned the request: aborted by its client"):
        engine.wait_finished(waiting, SOON_S)
    with pytest.raises(InvalidFieldError) as refused:
        other.abandon(request_id, gone, daemons=["somewhere"])
    assert refused.value.field == "daemons[0]"


def test_results_can_be_asked_for(engines: TwoEngines) -> None:
    request_id, pool = new_request_id(), engines.destination.name
    with pytest.raises(UnknownTransferError):
        engines.decode.result(pool, request_id, "receive")
    receiving = engines.receive(request_id)
    assert engines.decode.result(pool, request_id, "receive").state == "open"
    engines.prefill.wait_settled(engines.send(request_id), SOON_S)
    result = engines.decode.result(pool, request_id, "receive")
    assert (result.state, result.finished) == ("settled", receiving.finished)
    with pytest.raises(UnknownTransferError):
        engines.decode.result(pool, request_id, "receive")  # its events were acknowledged by the request before


def test_a_deadline_is_the_daemons(engines: TwoEngines) -> None:
    receiving = engines.decode.receive(
        engines.destination.name, new_request_id(), [pages(engines.received)], deadline_s=0.02
    )
    with pytest.raises(DeadlineError, match="no SEND yet"):
        engines.decode.wait_finished(receiving, SOON_S)


def test_waiting_has_a_deadline_of_its_own(engines: TwoEngines) -> None:
    receiving = engines.receive(new_request_id())
    for wait in (engines.decode.wait_finished, engines.decode.wait_settled):
        with pytest.raises(DeadlineError, match="did not come within"):
            wait(receiving, 0.01)
    assert not receiving.is_finished


def test_pages_in_flight_are_busy(engines: TwoEngines) -> None:
    receiving = engines.receive(new_request_id())
    again = engines.receive(new_request_id())
    with pytest.raises(PageBusyError) as refused:
        engines.decode.wait_finished(again, SOON_S)
    assert refused.value.retryable
    freed = engines.decode.free(engines.destination.name, engines.received)
    assert (freed.freed, freed.deferred) == (0, 3)
    engines.decode.cancel(receiving)
    assert engines.decode.allocate(engines.destination.name, 14).tolist()[:3] == sorted(engines.received.tolist())


# -- polling


def test_poll_tells_each_change_once(engines: TwoEngines) -> None:
    request_id = new_request_id()
    assert engines.decode.poll() == []
    receiving = engines.receive(request_id)
    assert engines.decode.poll(SOON_S) == [receiving]
    assert receiving.state == "open"
    assert engines.decode.poll() == []
    engines.prefill.wait_settled(engines.send(request_id), SOON_S)
    seen: list[str] = []
    while str(receiving.state) != "settled":
        assert set(engines.decode.poll(SOON_S)) == {receiving}
        seen.append(receiving.state)
    assert seen in (["settled"], ["finished", "settled"])
    assert engines.decode.poll() == []


def test_poll_0_does_not_wait_even_for_a_daemon_that_stands_still(tmp_path: Path, spec: MhaSpec) -> None:
    with running_daemon(tmp_path) as own, Client.connect(own.runtime_dir) as client:
        client.create_pool("decode", spec, device=DEVICE.name)
        ids = client.allocate("decode", 1)
        own.process.send_signal(signal.SIGSTOP)
        try:
            client.receive("decode", new_request_id(), [pages(ids)])
            for _ in range(1000):
                assert client.poll(0) == []
        finally:
            own.process.send_signal(signal.SIGCONT)
        assert [one.state for one in client.poll(SOON_S)] == ["open"]


# -- the daemon goes


def test_every_wait_ends_at_once_when_the_daemon_is_killed(tmp_path: Path, spec: MhaSpec) -> None:
    calls: dict[str, Callable[[Client, Transfer], object]] = {
        "ping": lambda client, _: client.ping(),
        "status": lambda client, _: client.status(),
        "create": lambda client, _: client.create_pool("other", spec, device=DEVICE.name),
        "attach": lambda client, _: client.attach_pool("decode"),
        "delete": lambda client, _: client.delete_pool("decode"),
        "allocate": lambda client, _: client.allocate("decode", 1),
        "free": lambda client, _: client.free("decode", [1]),
        "cancel": lambda client, transfer: client.cancel(transfer),
        "result": lambda client, transfer: client.result("decode", transfer.key.request_id, "receive"),
        "wait_finished": lambda client, transfer: client.wait_finished(transfer),
        "wait_settled": lambda client, transfer: client.wait_settled(transfer),
        "poll": lambda client, _: client.poll(30),
    }
    raised: dict[str, BaseException] = {}

    def wait(name: str, client: Client, transfer: Transfer) -> None:
        try:
            calls[name](client, transfer)
        except BaseException as error:  # noqa: BLE001  the test looks at it
            raised[name] = error

    with running_daemon(tmp_path) as own:
        clients, transfers = {}, {}
        for name in calls:
            clients[name] = client = Client.connect(own.runtime_dir, name=name)
            client.create_pool("decode", spec, device=DEVICE.name)
            transfers[name] = client.receive("decode", new_request_id(), [pages(client.allocate("decode", 1))])
            assert client.poll(SOON_S) == [transfers[name]]
        own.process.send_signal(signal.SIGSTOP)  # nobody gets a reply any more
        threads = [threading.Thread(target=wait, args=(name, clients[name], transfers[name])) for name in calls]
        for thread in threads:
            thread.start()
        own.kill()
        for thread in threads:
            thread.join(SOON_S)
        assert {name: type(error) for name, error in raised.items()} == dict.fromkeys(calls, DaemonLostError)
        for client in clients.values():
            with pytest.raises(DaemonLostError):
                client.poll(0)
            client.close()


def test_the_memory_stays_when_the_daemon_is_killed(tmp_path: Path, spec: MhaSpec) -> None:
    with running_daemon(tmp_path) as own, Client.connect(own.runtime_dir) as client:
        k = client.create_pool("decode", spec, device=DEVICE.name).tensor("main", "k")
        k.fill_(3)
        own.kill()
        with pytest.raises(DaemonLostError):
            client.ping()
        assert bool((k == 3).all())


# -- what goes wrong here


def test_an_engine_that_never_polls_keeps_the_latest_changes(
    engines: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.clients.submissions.CHANGES_KEPT", 2)
    begun = [engines.decode.receive(engines.destination.name, new_request_id(), [pages([one])]) for one in range(3, 6)]
    engines.decode.status()  # answered after them
    assert engines.decode.poll(SOON_S) == begun[1:]


@pytest.mark.host_only
def test_tables_that_cannot_be_mapped_are_given_up(client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create_pool(name, MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32"))

    def fail(*_: object) -> None:
        raise OutOfMemoryError("no address space")

    with monkeypatch.context() as patch:
        for module in ("sync_requests", "async_requests"):
            patch.setattr(f"kvferry.clients.{module}.mapped_tables", fail)
        with pytest.raises(OutOfMemoryError):
            client.create_tables("t", name, max_batch=1, max_context_tokens=16)
    client.delete_tables(client.create_tables("t", name, max_batch=1, max_context_tokens=16))
