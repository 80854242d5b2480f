"""Clients whose connections are cut while their daemon lives: every call ends, and what it does is done once."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest

from kvferry.clients import AsyncClient, Client, MhaSpec, async_requests, new_request_id, pages
from kvferry.clients.connection import Reconnected
from kvferry.clients.core.followed import Transfer
from kvferry.protocol.errors import DaemonLostError, SessionLostError
from kvferry.protocol.settings import CONTROL_SOCKET, SESSION_SOCKET
from tests import kit
from tests.kit.blocking import connected, kinds
from tests.kit.cutting_proxy import CuttingProxy, cutting_proxy
from tests.kit.daemons import Daemon, soon
from tests.kit.kvferry_command import COMMAND

CONFIG: Final = "[service]\nresume_grace_s = 60.0\n[tiers]\nhost_bytes = 1048576\n"
SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
MESSAGES: Final = 20
"""That the script sends and gets, at the least."""

SOON_S: Final = 20.0
SYNC: Final = pytest.mark.parametrize("kind", kinds(Client))
ASYNC: Final = pytest.mark.parametrize("kind", kinds(AsyncClient))
BOTH: Final = (CONTROL_SOCKET, SESSION_SOCKET)


@pytest.fixture
def proxy(daemon: Daemon) -> Iterator[CuttingProxy]:
    with cutting_proxy(daemon.runtime_dir) as one:
        yield one


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Client]:
    """Return a client that nothing cuts, and the pools."""
    with Client.connect(daemon.runtime_dir, name="other") as one:
        one.create_pool("source", SPEC)
        one.create_pool("pool", SPEC)
        yield one


@pytest.fixture
def name() -> str:
    """Return a name for a client that is cut: another test's may be kept still, where that failed."""
    return f"cut-{new_request_id()}"


def held(client: Client, name: str) -> tuple[int, int]:
    """Return how many pages and transfers the daemon says that a session has."""
    return next((one.pages, one.transfers) for one in client.status().sessions if one.name == name)


def script(client: Client, other: Client) -> list[Transfer]:
    """Let a client say one of everything; return what it polled."""
    pool = client.create_pool("pool", SPEC)
    ids = client.allocate("pool", 4)
    request_id = new_request_id()
    received = client.receive("pool", request_id, [pages(ids[:2])])
    source = other.allocate("source", 2)
    sent = other.send("source", request_id, [pages(source)], first_token=7)
    assert client.wait_finished(received).first_token == 7
    client.wait_settled(received)
    polled = [one for one in client.poll(0) if isinstance(one, Transfer)]
    ring = client.open_events()
    tables = client.create_tables("tables", "pool", max_batch=2, max_context_tokens=16)
    client.wait(client.update_tables(tables, [4], rows={0: ids[:1]}, after=ring.record_event()))
    assert tables.host_lengths().lengths == [4]
    client.delete_tables(tables)
    with client.batched() as step:
        freed = step.free("pool", ids[2:], after=ring.record_event())
        offloaded = step.offload("pool", [pages(ids[:2])], release=True)
    assert client.wait(freed).freed == 2
    client.wait_done(offloaded)
    client.drop_snapshot(client.wait_accepted(offloaded).snapshot)
    other.wait_settled(sent)
    other.free("source", source)
    pool.close()
    ring.close()
    return polled


CUTS: Final[list[tuple[type[Client | AsyncClient], tuple[str, ...], bool, int]]] = [
    (Client, BOTH, False, 2),
    (AsyncClient, BOTH, True, 2),
    (AsyncClient, BOTH[:1], True, 3),
    (Client, BOTH[1:], True, 3),
]
"""Which connections are cut, before the chunk gets through or after it, and at each how manyth chunk."""
OTHER_KINDS: Final = [(AsyncClient if kind is Client else Client, *cut) for kind, *cut in CUTS]


@pytest.mark.parametrize(
    ("kind", "cut", "forwards", "step"), [*CUTS, *(pytest.param(*cut, marks=pytest.mark.full) for cut in OTHER_KINDS)]
)
def test_a_cut_at_every_chunk(
    proxy: CuttingProxy,
    other: Client,
    kind: type[Client | AsyncClient],
    name: str,
    cut: tuple[str, ...],
    step: int,
    *,
    forwards: bool,
) -> None:
    """Whatever breaks in the midst of whichever message, all is done once."""
    told: list[Reconnected] = []
    chunk = 1
    while True:
        with connected(kind, proxy.runtime_dir, name=name, on_reconnect=told.append) as client:
            before = proxy.cuts
            proxy.cut_at(chunk, *cut, forwards=forwards)
            polled = script(client, other)
            assert len(polled) == 1, "each change once"
            proxy.cut_at(0)
            assert client.ping()  # it has noticed the last cut: the good-bye gets through
            assert held(other, name) == (0, 0)
            if proxy.cuts == before:
                break
        chunk += step
    assert chunk > MESSAGES
    assert told
    assert {one.old_boot_id for one in told} == {one.boot_id for one in told} == {other.boot_id}
    assert soon(lambda: all(one.name != name for one in other.status().sessions))


@pytest.mark.parametrize(
    ("kind", "call"), [(AsyncClient, "attach_pool"), (Client, "open_events"), (AsyncClient, "create_tables")]
)
def test_descriptors_that_are_lost_come_again(
    proxy: CuttingProxy, other: Client, kind: type[Client | AsyncClient], name: str, call: str
) -> None:
    """A cut between them and the reply, which is kept: the reply that comes again comes alone."""
    with connected(kind, proxy.runtime_dir, name=name) as client:
        client.create_pool("pool", SPEC)
        before = proxy.cuts
        proxy.stop_at(1, SESSION_SOCKET, lambda: None)
        if call == "attach_pool":
            assert client.attach_pool("pool").array("main", "k").shape
        elif call == "open_events":
            with client.open_events() as ring:
                assert not ring.counters.any()
        else:
            tables = client.create_tables("tables", "pool", max_batch=2, max_context_tokens=16)
            assert not tables.array("block_tables").any()
            client.delete_tables(tables)
        assert proxy.cuts == before + 1
        assert other.ping()


@pytest.mark.parametrize("mapping", ["attached_pool", pytest.param("memory_for", marks=pytest.mark.full)])
def test_a_loss_while_memory_is_mapped_or_made(
    proxy: CuttingProxy, other: Client, name: str, mapping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop finds the loss, and a new connection, while a thread maps a pool or makes the memory of tables."""
    back = threading.Event()
    where = f"kvferry.clients.async_requests.{mapping}"
    maps = getattr(async_requests, mapping)

    def late(*arguments: object) -> object:
        proxy.cut(*BOTH)
        assert back.wait(SOON_S)
        return maps(*arguments)

    with connected(AsyncClient, proxy.runtime_dir, name=name, on_reconnect=lambda _: back.set()) as client:
        client.create_pool("pool", SPEC)
        monkeypatch.setattr(where, late)
        if mapping == "attached_pool":
            assert client.attach_pool("pool").array("main", "k").shape
        else:
            tables = client.create_tables("tables", "pool", max_batch=2, max_context_tokens=16)
            assert not tables.array("block_tables").any()
            client.delete_tables(tables)
        assert back.is_set()
        assert other.ping()


@SYNC
def test_a_closed_client_is_not_kept(
    proxy: CuttingProxy, other: Client, kind: type[Client | AsyncClient], name: str
) -> None:
    """Though its good-bye finds no connection."""
    with connected(kind, proxy.runtime_dir, name=name):
        proxy.cut(*BOTH)
        assert soon(lambda: not next(one.connected for one in other.status().sessions if one.name == name))
    assert soon(lambda: all(one.name != name for one in other.status().sessions))


@SYNC
def test_no_daemon_within_the_grace(kind: type[Client | AsyncClient]) -> None:
    """Everything ends by the same error, and what was mapped stays."""
    hasty = kit.daemon("[service]\nresume_grace_s = 0.3\n")
    with hasty as daemon, connected(kind, daemon.runtime_dir) as client:
        pool = client.create_pool("pool", SPEC)
        k = pool.array("main", "k")
        k[:] = 3
        transfer = client.receive("pool", new_request_id(), [pages(client.allocate("pool", 2))])
        assert soon(lambda: client.poll(0) == [transfer])
        waiting = client.offload("pool", [pages(client.allocate("pool", 1))], after=client.open_events().event())
        daemon.kill()
        started = time.monotonic()
        with pytest.raises(DaemonLostError, match=r"within 0.3 s \(limits.resume_grace_ms\)"):
            client.allocate("pool", 1)
        assert time.monotonic() - started >= 0.3
        for call in (
            lambda: client.poll(0),
            lambda: client.wait_finished(transfer),
            lambda: client.wait_settled(transfer),
            lambda: client.send("pool", new_request_id(), [pages([1])]),
        ):
            with pytest.raises(DaemonLostError, match="no daemon came back"):
                call()
        assert isinstance(transfer.error, DaemonLostError)
        assert isinstance(waiting.error, DaemonLostError)
        assert (transfer.is_settled, waiting.is_done) == (False, True), "whether it settled nobody can say"
        assert (k == 3).all()


@ASYNC
def test_a_daemon_that_begins_anew(kind: type[Client | AsyncClient]) -> None:
    """It knows nothing of the session, whose pages and pools are gone."""
    with kit.daemon(CONFIG) as one, connected(kind, one.runtime_dir) as client:
        k = client.create_pool("pool", SPEC).array("main", "k")
        k[:] = 3
        transfer = client.receive("pool", new_request_id(), [pages(client.allocate("pool", 2))])
        assert soon(lambda: client.poll(0) == [transfer])
        one.restart()
        for call in (lambda: client.poll(SOON_S), client.ping, lambda: client.allocate("pool", 1)):
            with pytest.raises(SessionLostError, match="cannot be resumed"):
                call()
        assert isinstance(transfer.error, SessionLostError)
        assert (k == 3).all()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["probe", "ATTACH_POOL", '{"pool": "none"}'], "UNKNOWN_POOL"),
        pytest.param(["status"], " serving, up for", marks=pytest.mark.full),
    ],
)
def test_a_command_waits_for_the_daemon(words: list[str], expected: str) -> None:
    with kit.daemon(CONFIG) as first:
        first.kill()
        command = [str(COMMAND), *words, "--wait", "60", "--runtime-dir", str(first.runtime_dir)]
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        assert "waiting for a daemon, at most 60 s" in waiting.stderr.readline()
        first.start()
        printed, complaint = waiting.communicate(timeout=60)
    assert complaint == ""
    assert expected in printed
