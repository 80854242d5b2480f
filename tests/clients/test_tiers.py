"""Snapshots and the prefix cache through a real daemon: bytes come back, ownership, and damage is a miss."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.clients import CacheGroup, Client, new_request_id, pages, pages_wanted
from kvferry.clients.cli.main import main
from kvferry.protocol import errors
from kvferry.protocol.manifests import DraftSpec
from kvferry.protocol.tier_messages import HASH_BYTES
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.kit.pools import GROUPED, HYBRID, PAGE_BYTES, SPEC, Filled, arena_of, hashes


@pytest.fixture
def pool(client: Client, name: str) -> Filled:
    return Filled(client, name)


@pytest.mark.any_device
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


@pytest.mark.any_device
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
    with pytest.raises(errors.UnknownComponentError, match="swa"):
        client.wait_done(client.offload(name, [pages(back.pages["main"])]))
    pool.close()


@pytest.mark.any_device
def test_a_drafts_layers_go_and_come_back_with_the_models(client: Client, name: str) -> None:
    """Its layers lie on the same pages."""
    pool = Filled(client, name, msgspec.structs.replace(SPEC, draft=DraftSpec(layers=2)))
    ids, others = client.allocate(name, 3), client.allocate(name, 3)
    contents = {one: pool.write(ids, seed, one) for seed, one in enumerate(("main", "draft"))}
    snapshot = client.wait_done(client.offload(name, [pages(ids)])).snapshot
    client.wait_done(client.restore(name, snapshot, [pages(others)], drop=True))
    assert all(pool.holds(others, content, one) for one, content in contents.items())
    pool.close()


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


def test_a_restore_that_waits_for_pages_ends_with_its_pool(
    client: Client, daemon: Daemon, pool: Filled, name: str
) -> None:
    ids = client.allocate(pool.name, 2)
    snapshot = client.wait_done(client.offload(pool.name, [pages(ids)])).snapshot
    with Client.connect(daemon.runtime_dir, name="owner") as owner:
        owner.create_pool(f"{name}-other", SPEC, device=DEVICE.name, lifetime="instance")
        client.allocate(f"{name}-other", 16)  # which the end of the pool's instance does not free
        operation = client.restore(f"{name}-other", snapshot)
        client.wait_accepted(operation)
    with pytest.raises(errors.UnknownPoolError):
        client.wait_done(operation, timeout_s=20)
    client.drop_snapshot(snapshot)


@pytest.mark.any_device
def test_groups_and_lists_with_gaps_are_offloaded_and_restored(client: Client, name: str) -> None:
    pool = Filled(client, name, GROUPED)
    ids = client.allocate(pool.name, 5)[[3, 0, 4, 1, 2]]
    main, group = ids[:3], ids[3:]
    contents = [pool.write(main, seed=1), pool.write(group, seed=2, component="group1")]
    named = [pages(main[:2], first_page=1), pages(main[2:], first_page=5, tokens=3), pages(group, component="group1")]
    snapshot = client.wait_done(client.offload(pool.name, named)).snapshot
    others = client.allocate(pool.name, 6)[::-1].copy()
    with pytest.raises(errors.LengthMismatchError, match="the snapshot has 11 tokens, the list 12"):
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


@pytest.mark.any_device
def test_what_no_list_fills_is_not_what_the_tier_held_before() -> None:
    """A page of one group has nothing in an array that only the other group has: no byte of others' KV, either."""
    spec = msgspec.structs.replace(GROUPED, layers=3, groups=((0, 1), (2,)))
    with kit.daemon("[tiers]\nhost_bytes = 2097152\n") as daemon, Client.connect(daemon.runtime_dir) as client:
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


@pytest.fixture
def _empty(client: Client) -> Iterator[None]:
    client.evict_cached()
    yield
    client.evict_cached()


@pytest.mark.any_device
@pytest.mark.usefixtures("_empty")
def test_blocks_of_several_pages_and_other_groups(client: Client, name: str) -> None:
    pool = Filled(client, name, HYBRID)
    main, swa = client.allocate(name, 8), client.allocate(name, 2, "swa")
    contents = pool.write(main, 4), pool.write(swa, 5, "swa")
    done = client.wait_done(client.store(name, hashes(2), main, block_pages=4))
    assert (done.kind, done.stored, done.present, done.copied_pages) == ("store", 2, 0, 8)
    client.wait_done(client.store(name, hashes(2), swa, group="swa"))
    assert client.lookup(name, hashes(2)).blocks == 0
    groups = [CacheGroup(block_pages=4), CacheGroup(group="swa", last=1)]
    found = client.lookup(name, hashes(3), groups=groups)
    assert (found.blocks, found.host, found.disk, found.remote, found.lease_blocks) == (2, 3, 0, 0, 2)
    into = client.allocate(name, 8), client.allocate(name, 1, "swa")
    client.wait_done(client.load(name, found.lease, into[0]))
    with pytest.raises(errors.InvalidFieldError, match="of 'swa' the lease has the blocks from 1 on"):
        client.wait_done(client.load(name, found.lease, into[1], group="swa"))
    client.wait_done(client.load(name, found.lease, into[1], group="swa", first_block=1))
    assert pool.holds(into[0], contents[0])
    assert pool.holds(into[1], [one[:, 1:] for one in contents[1]], "swa")
    last = into[0][:4]
    loaded = client.wait_done(client.load(name, found.lease, last, first_block=1))
    assert (loaded.kind, loaded.loaded) == ("load", 1)
    assert pool.holds(last, [one[:, 4:] for one in contents[0]])
    assert client.unpin(found.lease) == 2
    with pytest.raises(errors.UnknownComponentError, match="has no group 'draft'; it has main, swa"):
        client.lookup(name, hashes(1), groups=[CacheGroup(group="draft")])
    pool.close()


@pytest.mark.any_device
@pytest.mark.usefixtures("_empty")
def test_one_hash_names_a_block_of_each_group_of_layers(client: Client, name: str) -> None:
    pool = Filled(client, name, GROUPED)
    ids = client.allocate(name, 10)
    main, group = ids[:3], ids[3:5]
    contents = pool.write(main, 4), pool.write(group, 5, "group1")
    client.wait_done(client.store(name, hashes(3), main))
    client.wait_done(client.store(name, hashes(3)[1:], group, group="group1", parent=hashes(1)[0]))
    groups = [CacheGroup(), CacheGroup(group="group1", last=2)]
    found = client.lookup(name, hashes(4), groups=groups)
    assert (found.blocks, found.host) == (3, 5)
    into, other = ids[5:8], ids[8:]
    assert not pool.holds(into, contents[0])
    assert not pool.holds(other, contents[1], "group1")
    client.wait_done(client.load(name, found.lease, into))
    client.wait_done(client.load(name, found.lease, other, group="group1", first_block=1, unpin=True))
    assert pool.holds(into, contents[0])
    assert pool.holds(other, contents[1], "group1")
    assert {(one.group, one.hash) for one in client.cached_blocks()} == {
        *[("main", one.hex()) for one in hashes(3)],
        *[("group1", one.hex()) for one in hashes(3)[1:]],
    }
    told = [(one.group, one.hashes, one.parent) for one in client.cache_events(client.cache_cursor() - 2).changes]
    assert told == [("main", b"".join(hashes(3)), b""), ("group1", b"".join(hashes(3)[1:]), hashes(1)[0])]
    assert client.evict_cached(hashes(3)[2:], pool=name).blocks == 2, "of both groups"
    assert client.lookup(name, hashes(3), groups=groups).blocks == 0
    pool.close()


@pytest.mark.usefixtures("_empty")
def test_the_command_line(daemon: Daemon, client: Client, pool: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (one.hex() for one in hashes(2))
    ids = client.allocate(pool.name, 2)
    client.wait_done(client.store(pool.name, hashes(2), ids))
    snapshot = client.wait_done(client.offload(pool.name, [pages(ids)])).snapshot

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["cache", *arguments, "--runtime-dir", str(daemon.runtime_dir)]) == status
        return "".join(capsys.readouterr())

    def last_words() -> list[str]:
        return [line.split()[-1] for line in run("list").splitlines() if first in line]

    listed = [json.loads(line) for line in run("list", "--json").splitlines()]
    assert [one["hash"] for one in listed] == [first, second]
    assert last_words() == ["-"]
    assert run("pin", first, "--pool", pool.name) == "1 blocks pinned\n"
    assert last_words() == ["cache)"]
    assert "1 are pinned and stay" in run("clear", "--pool", pool.name)
    assert run("unpin", first, "--identity", listed[0]["identity"]) == "1 blocks unpinned\n"
    assert run("evict", first, "--pool", pool.name).startswith("1 blocks dropped")
    assert snapshot in run("snapshots")
    assert run("drop", snapshot) == f"{snapshot} dropped\n"
    assert "'abc' is not hexadecimal" in run("evict", "abc", "--pool", pool.name, status=2)


@pytest.mark.full
@pytest.mark.usefixtures("_empty")
def test_following_the_caches_events_prints_a_line_a_change(daemon: Daemon, client: Client, pool: Filled) -> None:
    cursor = client.cache_cursor()
    command = [sys.executable, "-P", "-m", "kvferry.clients.cli.main", "events", "--cache", "--from", str(cursor)]
    command += ["--follow", "--json", "--runtime-dir", str(daemon.runtime_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as watching:
        client.wait_done(client.store(pool.name, hashes(1), client.allocate(pool.name, 1)))
        assert watching.stdout is not None
        shown = json.loads(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
    assert (shown["kind"], shown["hashes"]) == ("stored", [hashes(1)[0].hex()])
    assert len(bytes.fromhex(shown["hashes"][0])) == HASH_BYTES
    assert shown["cursor"] > cursor
    assert watching.returncode == 130
