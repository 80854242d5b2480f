"""Engines that ride through their daemon's restart: what goes on, what has ended, and what nobody can lose."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from kvferry import clients
from kvferry.clients import AsyncClient, Client, MhaSpec, SharedMemory, calls, new_request_id, pages
from kvferry.clients.connection import Reconnected
from kvferry.protocol import errors
from kvferry.protocol.settings import CONTROL_SOCKET
from tests import kit
from tests.kit.blocking import connected, kinds
from tests.kit.cutting_proxy import cutting_proxy
from tests.kit.daemons import Daemon, soon
from tests.kit.documents import blocks, page

CONFIG: Final = "[service]\nresume_grace_s = 60.0\n[tiers]\nhost_bytes = 1048576\n"
SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
REQUEST: Final = 1
REPLY: Final = 2


@pytest.fixture(scope="module")
def life() -> Iterator[Daemon]:
    with kit.daemon(CONFIG, keep=True) as one:
        yield one


class Told:
    """What a client was told of its daemon's losses, and what it polled meanwhile."""

    def __init__(self) -> None:
        self.events: list[Reconnected] = []
        self.changed: list[Any] = []

    def polls(self, client: Client) -> bool:
        """Poll once; return whether the client has been told."""
        self.changed += client.poll(0)
        return bool(self.events)


@pytest.mark.parametrize(
    ("kind", "number"), [(Client, signal.SIGKILL), (AsyncClient, signal.SIGKILL), (Client, signal.SIGTERM)]
)
def test_an_engine_rides_through(life: Daemon, kind: type[Client | AsyncClient], number: int) -> None:
    told = Told()
    with connected(kind, life.runtime_dir, name="engine", on_reconnect=told.events.append) as client:
        pool = client.create_pool("pool", SPEC)
        memory = SharedMemory(1 << 20)
        k, v = (memory.array((1, 17, 4, 1, 8), "float16") for _ in range(2))
        client.register_pool("own", SPEC, {("main", "k"): k, ("main", "v"): v}, device="host")
        array, ids, before = pool.array("main", "k"), client.allocate("pool", 6), client.boot_id
        array[:, ids] = 7
        address, request_id = array.ctypes.data, new_request_id()
        ring = client.open_events()
        tables = client.create_tables("tables", "pool", max_batch=2, max_context_tokens=16)
        receiving = client.receive("pool", request_id, [pages(ids[:2])])
        sending = client.send("own", new_request_id(), [pages([3])])
        waiting = client.offload("pool", [pages(ids[4:])], after=ring.event())
        assert soon(lambda: client.poll(0) is not None and None not in {receiving.accepted, sending.accepted})
        client.poll(0)
        life.restart(number)
        assert soon(lambda: told.polls(client))
        told.polls(client)

        # all that was under way has ended, once
        [event] = told.events
        assert (event.old_boot_id, event.boot_id) == (before, client.boot_id)
        assert {*told.changed} == {receiving, sending, waiting}
        assert {type(one.error) for one in told.changed} <= {errors.StaleBootError, errors.ShuttingDownError}
        assert (receiving.is_settled, sending.is_settled) == (True, True)
        assert (event.tables, event.rings) == (("tables",), True)
        if number == signal.SIGKILL:
            assert {*event.transfers, *event.operations} == {*told.changed}
            assert len(told.changed) == 3
            assert {one.error.effect for one in told.changed} == {"unknown"}
        with pytest.raises(errors.StaleBootError, match="event ring"):
            ring.event()
        with pytest.raises(errors.UnknownTablesError):
            client.wait(client.update_tables(tables, [4], rows={0: ids[:1]}))

        # all else is there, in place
        assert (event.pools, event.pages) == ((), {})
        assert (pool.array("main", "k").ctypes.data, array[0, ids].min()) == (address, 7)
        k[:, 5] = 3
        sent = client.send("own", request_id, [pages([5, 6])])
        client.wait_finished(client.receive("pool", request_id, [pages(ids[:2])]))
        client.wait_settled(sent)
        assert (array[:, ids[0]] == 3).all()
        assert client.free("pool", ids).freed == 6
        client.delete_pool("pool")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_who_is_idle_meanwhile(life: Daemon, kind: type[Client | AsyncClient]) -> None:
    """A request that ZeroMQ itself brings to the next daemon is done there, once; with a session or without one."""
    with connected(kind, life.runtime_dir) as client, connected(kind, life.runtime_dir, session=False) as looker:
        client.create_pool("idle", SPEC)
        assert looker.ping()
        life.restart()
        assert len(client.allocate("idle", 3)) == 3
        assert [one.free for one in looker.status().pools if one.pool == "idle"] == [13]
        assert client.boot_id == looker.boot_id


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_an_idle_client_begins_first_is_for_the_next_daemon(
    life: Daemon, kind: type[Client | AsyncClient]
) -> None:
    """It has not looked since: sent to the daemon that is gone, a transfer would have ended with it."""
    with connected(kind, life.runtime_dir) as client:
        client.create_pool("begun", SPEC)
        ids, request_id = client.allocate("begun", 4), new_request_id()
        life.kill()
        sent = client.send("begun", request_id, [pages(ids[:2])])
        life.start()
        client.wait_finished(client.receive("begun", request_id, [pages(ids[2:])]))
        client.wait_settled(sent)
        assert client.free("begun", ids).freed == 4
        client.delete_pool("begun")


@pytest.mark.parametrize(
    ("asked", "lost", "kind"),
    [
        ("allocate", REQUEST, Client),
        ("allocate", REPLY, AsyncClient),
        ("free", REPLY, Client),
        ("free after", REQUEST, AsyncClient),
        ("batch", REPLY, Client),
    ],
)
def test_no_page_is_lost_in_flight(life: Daemon, asked: str, lost: int, kind: type[Client | AsyncClient]) -> None:
    """A request or its reply is lost with the daemon: afterwards both sides know the same pages."""
    with cutting_proxy(life.runtime_dir) as proxy, Client.connect(life.runtime_dir) as looker:
        with connected(kind, proxy.runtime_dir, name="flight") as client:
            client.create_pool("flight", SPEC)
            ids = client.allocate("flight", 6)
            mark = client.open_events().record_event()
            proxy.stop_at(lost, CONTROL_SOCKET, life.restart)
            if asked == "allocate":
                ids = np.concatenate([ids, client.allocate("flight", 3)])
            elif asked == "free after":
                with pytest.raises(errors.StaleBootError, match="their event is no more") as refused:
                    client.free("flight", ids[:2], after=mark)
                assert refused.value.effect == "absent"
            else:
                with client.batched() as step:
                    freed = step.free("flight", ids[:2])
                    begun = step.send("flight", new_request_id(), [pages(ids[2:])]) if asked == "batch" else None
                assert client.wait(freed).freed == 2
                assert begun is None or isinstance(begun.error, errors.StaleBootError)
                ids = ids[2:]
            assert client.ping()
            assert proxy.cuts == 1
            [its] = [one for one in looker.status().sessions if one.name == "flight"]
            assert its.pages == len(ids)
            assert client.free("flight", ids).freed == its.pages, "exactly these"
        assert soon(lambda: all(one.name != "flight" for one in looker.status().sessions))


def test_what_the_documentation_says_an_engine_does(life: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(life.runtime_dir))
    [code] = blocks(page("engines.md"), "When the daemon restarts")
    calls: list[Any] = []
    names: dict[str, Any] = {name: getattr(clients, name) for name in clients.__all__}
    names |= {"spec": SPEC, "StaleBootError": errors.StaleBootError, "again": calls, "capture_again": calls.append}
    exec(compile(code, "docs", "exec"), names)  # noqa: S102  our own text
    client, ring, ids = names["client"], names["ring"], names["ids"]
    client.create_tables("tables", "decode", max_batch=2, max_context_tokens=16)
    transfer = client.receive("decode", new_request_id(), [pages(ids)])
    held = client.create_tables("more", "decode", max_batch=2, max_context_tokens=16)
    life.restart()

    def stepped() -> bool:
        names["step"]()
        return len(calls) == 2

    assert soon(stepped)
    assert calls == [transfer.key.request_id, "more"]
    assert names["ring"] is not ring
    assert held.name == "more", "tables that nobody has are nobody's loss"
    assert client.owned_pages("decode")["main"].tolist() == ids.tolist()
    client.free("decode", ids)
    client.delete_pool("decode")
    client.close()


@pytest.mark.parametrize("asked", ["restore", "allocate"])
def test_pages_of_what_nobody_heard_of_go_back(life: Daemon, asked: str) -> None:
    """A session whose first pages of a pool come by a RESTORE, or an ALLOCATE given up, whose reply is lost.

    The RESTORE is asked for again, and has other pages then.
    """
    with (
        cutting_proxy(life.runtime_dir) as proxy,
        Client.connect(life.runtime_dir) as looker,
        Client.connect(proxy.runtime_dir, name=asked) as client,
    ):
        looker.create_pool("unheard", SPEC)
        ids = looker.allocate("unheard", 3)
        kept = looker.offload("unheard", [pages(ids)])
        looker.wait_done(kept)
        proxy.stop_at(REPLY, CONTROL_SOCKET, life.restart)
        if asked == "allocate":
            with pytest.raises(errors.DeadlineError):  # the restart takes longer
                client.call(calls.allocate("unheard", 2, "main"), deadline_s=0.01, margin_s=0.0)
        else:
            again = client.restore("unheard", kept.snapshot)
            client.wait_done(again)
            assert [one.pages for one in looker.status().sessions if one.name == asked] == [3]
            client.free("unheard", again.pages["main"])
        assert client.ping()
        assert [one.pages for one in looker.status().sessions if one.name == asked] == [0]
        looker.free("unheard", ids)
        looker.delete_pool("unheard")


def test_who_only_allocates_hears_that_its_pages_are_gone(life: Daemon) -> None:
    """Of a pool that the next daemon does not have, whose memory another process maps."""
    told = Told()
    with (
        Client.connect(life.runtime_dir, name="worker") as worker,
        Client.connect(life.runtime_dir, name="scheduler", on_reconnect=told.events.append) as scheduler,
    ):
        worker.create_pool("gone", SPEC)
        ids = scheduler.allocate("gone", 5)
        life.kill()
        with life.store() as store:
            held = store.take()
            store.remove([name for name in held if name.endswith(".record")])
            for fd in held.values():
                os.close(fd)
        life.start()
        assert soon(lambda: told.polls(scheduler))
        [event] = told.events
        assert [(where, its.tolist()) for where, its in event.pages.items()] == [(("gone", "main"), ids.tolist())]
        life.restart()
        assert soon(lambda: (scheduler.poll(0), len(told.events) == 2)[1])
        assert told.events[1].pages == {}, "once"


@pytest.mark.parametrize("kind", kinds(AsyncClient))
def test_who_stands_still_for_too_long_hears_of_it(kind: type[Client | AsyncClient]) -> None:
    """By polling alone; what it asks before it has heard is not done with pages that are another's by then."""
    with (
        kit.daemon("[service]\nresume_grace_s = 0.2\n", keep=True) as life,
        connected(kind, life.runtime_dir, name="still") as polls,
        connected(kind, life.runtime_dir, name="still") as asks,
        connected(kind, life.runtime_dir, name="still") as sends,
    ):
        polls.create_pool("pool", SPEC)
        still = (polls, asks, sends)
        _, asked, sent = (one.allocate("pool", 3) for one in still)
        life.restart()
        with Client.connect(life.runtime_dir) as other:
            assert soon(lambda: not any(one.name == "still" for one in other.status().sessions))
            other.allocate("pool", 16)
            with pytest.raises(errors.SessionLostError):
                asks.free("pool", asked)
            sending = sends.send("pool", new_request_id(), [pages(sent)])

            def hears(client: Client) -> bool:
                with contextlib.suppress(errors.SessionLostError):
                    client.poll(0)
                    return False
                return True

            assert soon(lambda: hears(polls))
            assert soon(lambda: hears(sends))
            assert isinstance(sending.error, errors.SessionLostError)
            assert not other.status().transfers
            assert len(other.owned_pages("pool")["main"]) == 16


def test_a_pool_that_was_made_again_before_the_restart_is_lost_to_its_whole_instance(life: Daemon) -> None:
    with (
        Client.connect(life.runtime_dir, name="worker", instance="engine") as worker,
        Client.connect(life.runtime_dir, name="scheduler", instance="engine") as scheduler,
        Client.connect(life.runtime_dir) as other,
    ):
        worker.create_pool("again", SPEC)
        other.delete_pool("again")
        other.create_pool("again", SPEC)
        life.restart()
        for client in (worker, scheduler, other):
            client.status()  # which waits until it has gone on, and has said what it maps
        with pytest.raises(errors.PoolLostError):
            worker.allocate("again", 1)
        with pytest.raises(errors.PoolLostError, match="'worker' of process"):
            scheduler.allocate("again", 1)
        worker.attach_pool("again")
        scheduler.free("again", scheduler.allocate("again", 1))
        other.delete_pool("again")
