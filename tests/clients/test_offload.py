"""Offload and restore through a real daemon: bytes, ownership, refusals, and what ends early."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.clients import Client, new_request_id, pages, pages_wanted
from kvferry.clients.calls import asked
from kvferry.pools.tiers.arena import ALLOCATION_UNIT_BYTES
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    KvferryError,
    LengthMismatchError,
    NotOwnerError,
    PoolFullError,
    UnknownComponentError,
    UnknownSnapshotError,
)
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.transfer_messages import Cancel
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.pools import GROUPED, HYBRID, LARGER, PAGE_BYTES, PAGE_SIZE, SPEC, Filled, arena_of, hashes

pytestmark = pytest.mark.any_device
TIER_BYTES = 2 << 20


@pytest.fixture
def pool(client: Client, name: str) -> Filled:
    """Return a pool of 16 pages."""
    return Filled(client, name)


def test_pages_come_back_in_other_pages(client: Client, pool: Filled) -> None:
    ids = client.allocate(pool.name, 5)[[3, 0, 4, 1]]
    content = pool.write(ids, seed=1)
    operation = client.offload(pool.name, [pages(ids, tokens=14)])
    done = client.wait_done(operation)
    assert (done.kind, done.copied_pages, done.moved_bytes) == ("offload", 4, 4 * PAGE_BYTES)
    assert done.snapshot == operation.snapshot
    pool.write(ids, seed=2)  # they are the engine's again
    others = client.allocate(pool.name, 6)[[5, 1, 2, 0]]
    again = client.wait_done(client.restore(pool.name, operation.snapshot, [pages(others, tokens=14)]))
    assert (again.kind, again.copied_pages, again.moved_bytes) == ("restore", 4, 4 * PAGE_BYTES)
    assert pool.holds(others, content)
    client.drop_snapshot(operation.snapshot)


def test_every_page_space_of_a_hybrid_pool_goes_and_comes(client: Client, name: str) -> None:
    pool = Filled(client, name, HYBRID)
    main, swa = client.allocate(name, 5), client.allocate(name, 3, "swa")
    contents = pool.write(main, 8), pool.write(swa, 9, "swa")
    lists = [pages(main, tokens=18), pages(swa, first_page=2, component="swa")]
    snapshot = client.wait_done(client.offload(name, lists, release=True)).snapshot
    [shown] = [one for one in client.snapshots() if one.snapshot == snapshot]
    assert [(one.component, one.count, one.tokens) for one in shown.lists] == [("main", 5, 18), ("swa", 3, None)]
    assert (shown.tokens, shown.chunks, shown.state) == (18, 8, "ready")
    assert len(shown.checksum) == 32
    back = client.restore(name, snapshot, drop=True)
    client.wait_done(back)
    assert pool.holds(back.pages["main"], contents[0])
    assert pool.holds(back.pages["swa"], contents[1], "swa")
    with pytest.raises(UnknownComponentError, match="swa"):
        client.wait_done(client.offload(name, [pages(back.pages["main"])]))
    pool.close()


@pytest.mark.host_only
def test_what_does_not_fit_is_refused(client: Client, pool: Filled) -> None:
    ids = client.allocate(pool.name, 4)
    snapshot = client.wait_done(client.offload(pool.name, [pages(ids[:3], tokens=10)])).snapshot

    def refused(operation: object) -> type[KvferryError]:
        with pytest.raises(KvferryError) as error:
            client.wait_done(operation)  # type: ignore[arg-type]
        return type(error.value)

    assert refused(client.restore(pool.name, snapshot, [pages(ids)])) is LengthMismatchError
    assert refused(client.restore(pool.name, snapshot, [pages(ids[:3], tokens=11)])) is LengthMismatchError
    assert refused(client.restore(pool.name, snapshot, [pages(np.array([14, 15, 16]))])) is NotOwnerError
    assert refused(client.restore(pool.name, "0" * 32, [pages(ids[:3])])) is UnknownSnapshotError
    assert refused(client.offload(pool.name, [pages(np.array([16]))])) is NotOwnerError
    large = Filled(client, f"{pool.name}-large", LARGER)
    many = client.wait_done(client.offload(large.name, [pages(client.allocate(large.name, 20))])).snapshot
    assert refused(client.restore(pool.name, many)) is PoolFullError
    for one in (snapshot, many):
        client.drop_snapshot(one)
    large.close()
    with pytest.raises(UnknownSnapshotError):
        client.drop_snapshot(snapshot)
    client.free(pool.name, ids)  # nothing holds them
    assert len(client.allocate(pool.name, 16)) == 16


@pytest.mark.host_only
@pytest.mark.parametrize("kind", ["offload", "restore", "store", "load"])
def test_an_operation_waits_for_what_still_uses_its_pages(client: Client, pool: Filled, kind: str) -> None:
    ids = client.allocate(pool.name, 2)
    pool.write(ids, seed=31)
    names = [f"{pool.name:>15}{number}".encode()[-16:] for number in range(3)]
    snapshot = client.wait_done(client.offload(pool.name, [pages(ids)])).snapshot
    client.wait_done(client.store(pool.name, names[:2], ids))
    lease = client.lookup(pool.name, names[:2]).lease
    with client.open_events() as ring:
        point = ring.event()
        asked: dict[str, tuple[Any, ...]] = {
            "offload": (pool.name, [pages(ids)]),
            "restore": (pool.name, snapshot, [pages(ids)]),
            "store": (pool.name, names[2:], ids[:1]),
            "load": (pool.name, lease, ids),
        }
        operation = getattr(client, kind)(*asked[kind], after=point)
        client.ping()  # answered after it, if it were answered
        assert operation.state == "sent"
        ring.record(point)
        client.wait_done(operation)
    client.unpin(lease)
    client.evict_cached(names, pool=pool.name)
    for one in {snapshot, operation.snapshot} - {""}:
        client.drop_snapshot(one)


def test_a_transfer_lands_in_the_host_tier_and_is_restored(client: Client, daemon: Daemon, name: str) -> None:
    with Client.connect(daemon.runtime_dir, name="decode") as decode:
        source, target = Filled(client, f"{name}-prefill"), Filled(decode, f"{name}-decode", LARGER)
        ids = client.allocate(source.name, 6)
        content = source.write(ids, seed=11)
        taken = decode.allocate(target.name, 32)
        request_id = new_request_id()
        transfer = decode.receive(target.name, request_id, [pages_wanted(6, tokens=23)], into="host")
        sent = client.send(source.name, request_id, [pages(ids, tokens=23)], first_token=7)
        done = decode.wait_finished(transfer)
        assert (done.first_token, done.pages) == (7, 6)
        client.wait_settled(sent)
        back = decode.restore(target.name, done.snapshot, drop=True)
        decode.wait_accepted(back)
        decode.free(target.name, taken[10:])
        decode.wait_done(back)
        assert target.holds(back.pages["main"], content)
        decode.wait_settled(transfer)
        assert done.snapshot not in {one.snapshot for one in decode.snapshots()}
        target.close()
        source.close()


@pytest.mark.host_only
def test_another_daemon_gives_up_the_memory_of_a_deleted_pool(client: Client, name: str) -> None:
    pool = Filled(client, name)
    ids, here, request_id = client.allocate(name, 6), client.status().addresses[0], new_request_id()
    with kit.daemon() as there, Client.connect(there.runtime_dir, name="decode") as decode:
        target = Filled(decode, "decode")
        received = decode.allocate("decode", 6)
        transfer = decode.receive("decode", request_id, [pages(received)], source_daemons=[here])
        client.wait_settled(client.send(name, request_id, [pages(ids)]))
        decode.wait_settled(transfer)
        maps = Path(f"/proc/{there.process.pid}/maps")
        assert f":{name} (deleted)" in maps.read_text()
        client.free(name, ids)
        pool.close()
        client.delete_pool(name)
        assert soon(lambda: bool(decode.ping()) and f":{name} (deleted)" not in maps.read_text())
        target.close()


@contextlib.contextmanager
def full_tier() -> Iterator[tuple[Client, Filled, PageIds]]:
    """Run a daemon whose host tier is full of blocks; yield a client, its pool and all of its pages."""
    blocks = TIER_BYTES // ALLOCATION_UNIT_BYTES
    with (
        kit.daemon(f"[tiers]\nhost_bytes = {TIER_BYTES}\n") as daemon,
        Client.connect(daemon.runtime_dir) as client,
    ):
        pool = Filled(client, "pool", msgspec.structs.replace(SPEC, tokens=(blocks + 1) * PAGE_SIZE))
        ids = client.allocate("pool", blocks)
        client.wait_done(client.store("pool", hashes(blocks), ids))
        yield client, pool, ids
        pool.close()


@pytest.mark.host_only
def test_a_transfer_lands_in_a_tier_that_is_full_of_blocks_or_waits_for_room_in_vain() -> None:
    with full_tier() as (client, pool, ids):
        content = pool.write(ids[:100], seed=1)
        request_id, wanted = new_request_id(), [pages_wanted(100)]
        with client.batched() as step:  # so it still waits
            lost = step.receive("pool", request_id, wanted, into="host")
            cancelled = step.begin(asked(Cancel(request_id=request_id, pool="pool", direction="receive", wait=True)))
        client.wait(cancelled)
        with pytest.raises(CancelledError, match="room"):
            client.wait_finished(lost)
        transfer = client.receive("pool", request_id, wanted, into="host")
        client.send("pool", request_id, [pages(ids[:100])])
        client.wait_done(client.restore("pool", client.wait_finished(transfer).snapshot, [pages(ids[100:200])]))
        assert pool.holds(ids[100:200], content)


@pytest.mark.host_only
def test_pages_are_an_operations_own_while_it_waits_for_room() -> None:
    with full_tier() as (client, pool, ids):
        content = pool.write(ids[:200], seed=1)
        with client.batched() as step:  # so both still wait when their pages go back
            stored = step.store("pool", hashes(200, salt=1), ids[:200])
            offloaded = step.offload("pool", [pages(ids[:200])])
            freed = step.free("pool", ids[:200])
        assert client.wait(freed) == Freed(freed=0, deferred=200)
        with pytest.raises(PoolFullError):
            client.allocate("pool", 2)
        snapshot = client.wait_done(offloaded).snapshot
        assert client.wait_done(stored).stored == 200
        others = client.allocate("pool", 200)
        pool.write(others, seed=2)
        client.wait_done(client.restore("pool", snapshot, [pages(others)]))
        assert pool.holds(others, content)
        pool.write(others, seed=3)
        client.wait_done(client.load("pool", client.lookup("pool", hashes(200, salt=1)).lease, others))
        assert pool.holds(others, content)


def test_groups_and_lists_with_gaps_are_offloaded_and_restored(client: Client, name: str) -> None:
    pool = Filled(client, name, GROUPED)
    ids = client.allocate(pool.name, 5)[[3, 0, 4, 1, 2]]
    main, group = ids[:3], ids[3:]
    contents = [pool.write(main, seed=1), pool.write(group, seed=2, component="group1")]
    named = [pages(main[:2], first_page=1), pages(main[2:], first_page=5, tokens=3), pages(group, component="group1")]
    snapshot = client.wait_done(client.offload(pool.name, named)).snapshot
    others = client.allocate(pool.name, 6)[::-1].copy()
    with pytest.raises(LengthMismatchError, match="the snapshot has 11 tokens, the list 12"):
        client.wait_accepted(
            client.restore(pool.name, snapshot, [pages(others[:3], tokens=12), pages(others[3:5], component="group1")])
        )
    whole = [pages(others[:3], tokens=11), pages(others[3:5], component="group1")]
    client.wait_done(client.restore(pool.name, snapshot, whole))
    assert pool.holds(others[:3], contents[0])
    assert pool.holds(others[3:5], contents[1], "group1")
    client.free(pool.name, others)
    back = client.restore(pool.name, snapshot, drop=True)
    client.wait_done(back)
    for component, content in zip(("main", "group1"), contents, strict=True):
        assert pool.holds(back.pages[component], content, component)


def test_groups_and_lists_with_gaps_land_in_the_host_tier(client: Client, name: str) -> None:
    pool = Filled(client, name, GROUPED)
    ids = client.allocate(pool.name, 6)
    contents = [pool.write(ids[:4], seed=3), pool.write(ids[4:], seed=4, component="group1")]
    request_id = new_request_id()
    wanted = [pages_wanted(1, first_page=1), pages_wanted(2, first_page=7, tokens=7)]
    wanted += [pages_wanted(2, component="group1", first_page=6)]
    transfer = client.receive(pool.name, request_id, wanted, into="host")
    sent = [pages(ids[:2], first_page=0), pages(ids[2:4], first_page=7, tokens=7)]
    sent += [pages(ids[4:], first_page=6, component="group1")]
    client.wait_settled(client.send(pool.name, request_id, sent))
    back = client.restore(pool.name, client.wait_finished(transfer).snapshot, drop=True)
    client.wait_done(back)
    assert pool.holds(back.pages["main"], [one[:, 1:] for one in contents[0]])
    assert pool.holds(back.pages["group1"], contents[1], "group1")


@pytest.mark.host_only
def test_what_no_list_fills_is_not_what_the_tier_held_before() -> None:
    """A page of one group has nothing in an array that only the other group has: no byte of others' KV, either."""
    spec = msgspec.structs.replace(GROUPED, layers=3, groups=((0, 1), (2,)))
    with (
        kit.daemon(f"[tiers]\nhost_bytes = {TIER_BYTES}\n") as daemon,
        Client.connect(daemon.runtime_dir) as client,
    ):
        pool = Filled(client, "pool", spec)
        with arena_of(daemon) as memory:
            memory[:] = b"\xab" * len(memory)
        ids = client.allocate("pool", 3)
        contents = [pool.write(ids[:1], seed=1), pool.write(ids[1:], seed=2, component="group1")]
        request_id = new_request_id()
        wanted = [pages_wanted(1), pages_wanted(2, component="group1")]
        transfer = client.receive("pool", request_id, wanted, into="host")
        client.send("pool", request_id, [pages(ids[:1]), pages(ids[1:], component="group1")])
        back = client.restore("pool", client.wait_finished(transfer).snapshot, drop=True)
        client.wait_done(back)
        assert pool.holds(back.pages["main"], contents[0])
        assert pool.holds(back.pages["group1"], contents[1], "group1")
        for role in pool.read(back.pages["group1"]):
            assert not role[1].any()
        pool.close()
