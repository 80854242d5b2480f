"""The prefix cache through a real daemon: what is stored is found, what is loaded is right or said to be gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.clients import Client, pages
from kvferry.protocol.errors import (
    CacheMissError,
    InvalidFieldError,
    KvferryError,
    LayoutMismatchError,
    LengthMismatchError,
    UnknownComponentError,
    UnknownLeaseError,
)
from kvferry.protocol.tier_messages import HASH_BYTES
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry
from tests.kit.pools import HYBRID, MODEL, Filled, arena_of, hashes

pytestmark = pytest.mark.any_device

UNIT = 4096
"""What a block of SPEC takes in the arena."""


@pytest.fixture
def client(connect: Callable[[str], Client]) -> Iterator[Client]:
    """Return a session of an engine; the cache is empty before and after."""
    one = connect("engine")
    one.evict_cached()
    yield one
    one.evict_cached()


@pytest.fixture
def pool(client: Client, name: str) -> Iterator[Filled]:
    """Return a pool of 16 pages."""
    one = Filled(client, name)
    yield one
    one.close()


def test_what_is_stored_is_found_and_loaded(client: Client, pool: Filled) -> None:
    ids = client.allocate(pool.name, 4)[[2, 0, 3, 1]]
    content, names = pool.write(ids, seed=1), hashes(6)
    done = client.wait_done(client.store(pool.name, names[:4], ids))
    assert (done.kind, done.stored, done.present, done.copied_pages) == ("store", 4, 0, 4)
    found = client.lookup(pool.name, names)
    assert (found.blocks, found.host, found.disk, found.remote, found.lease_blocks) == (4, 4, 0, 0, 4)
    others = client.allocate(pool.name, 4)[::-1].copy()
    loaded = client.wait_done(client.load(pool.name, found.lease, others))
    assert (loaded.kind, loaded.loaded) == ("load", 4)
    assert pool.holds(others, content)
    last = client.allocate(pool.name, 1)
    client.wait_done(client.load(pool.name, found.lease, last, first_block=2))
    assert pool.holds(last, [one[:, 2:3] for one in content])
    assert client.unpin(found.lease) == 4


def test_blocks_of_several_pages_and_other_page_spaces(client: Client, name: str) -> None:
    pool = Filled(client, name, HYBRID)
    main, swa = client.allocate(name, 8), client.allocate(name, 2, "swa")
    contents = pool.write(main, 4), pool.write(swa, 5, "swa")
    client.wait_done(client.store(name, hashes(2), main, block_pages=4))
    client.wait_done(client.store(name, hashes(2), swa, space="swa"))
    assert client.lookup(name, hashes(2)).blocks == 0
    by_space = client.lookup(name, hashes(2), block_pages=4), client.lookup(name, hashes(2), space="swa")
    into = client.allocate(name, 8), client.allocate(name, 2, "swa")
    for found, ids in zip(by_space, into, strict=True):
        client.wait_done(client.load(name, found.lease, ids))
    assert pool.holds(into[0], contents[0])
    assert pool.holds(into[1], contents[1], "swa")
    with pytest.raises(UnknownComponentError, match="has no page space 'draft'; it has main, swa"):
        client.lookup(name, hashes(1), space="draft")
    pool.close()


@pytest.mark.host_only
def test_what_makes_no_sense_is_refused(client: Client, pool: Filled, name: str) -> None:
    ids = client.allocate(pool.name, 4)
    client.wait_done(client.store(pool.name, hashes(3), ids[:3]))
    lease = client.lookup(pool.name, hashes(3)).lease
    client.create_pool(f"{name}-hybrid", HYBRID, model=MODEL).close()
    others = client.allocate(f"{name}-hybrid", 3)

    def refused(error: type[KvferryError], match: str, ask: Callable[..., object], *arguments: Any) -> None:  # noqa: ANN401
        with pytest.raises(error, match=match):
            ask(*arguments)

    def store(*arguments: Any) -> None:  # noqa: ANN401
        client.wait_done(client.store(*arguments))

    def load(*arguments: Any) -> None:  # noqa: ANN401
        client.wait_done(client.load(*arguments))

    refused(LengthMismatchError, "need 2 ids, not 3", store, pool.name, hashes(2), ids[:3])
    refused(InvalidFieldError, "occurs twice", client.lookup, pool.name, [b"0" * 16] * 2)
    refused(InvalidFieldError, "not one or more", client.lookup, pool.name, [])
    refused(InvalidFieldError, "3 bytes are no hash of 16", client.lookup, pool.name, [b"0" * 16, b"abc"])
    refused(LengthMismatchError, "the lease has 3 blocks", load, pool.name, lease, ids)
    refused(UnknownLeaseError, "lease", load, pool.name, lease + 1, ids[:1])
    refused(LayoutMismatchError, "has layout", load, f"{name}-hybrid", lease, others)
    with pytest.raises(InvalidFieldError, match="has blocks of another namespace"):
        client.lookup(pool.name, hashes(1), block_pages=2, lease=lease)
    client.unpin(lease)
    refused(UnknownLeaseError, "lease", client.unpin, lease)


@pytest.mark.host_only
def test_a_lease_ends_with_its_load_however_that_ends(daemon: Daemon, client: Client, pool: Filled) -> None:
    marked = pool.write(ids := client.allocate(pool.name, 2), seed=21)
    client.wait_done(client.store(pool.name, hashes(2), ids))
    found = client.lookup(pool.name, hashes(2))
    client.wait_done(client.load(pool.name, found.lease, ids, unpin=True))
    with pytest.raises(UnknownLeaseError):
        client.unpin(found.lease)
    failing = client.lookup(pool.name, hashes(2))
    _flip(daemon, marked[0][0, 1].numpy().tobytes())
    with pytest.raises(CacheMissError):
        client.wait_done(client.load(pool.name, failing.lease, ids, unpin=True))
    assert client.evict_cached().kept == 0


def _until_unpinned(client: Client) -> None:
    """Wait for the daemon to see the end of the other session: ``ping`` lets it look at its sockets."""
    while any(one.name == "reader" for one in client.status().sessions):
        client.ping()


def _flip(daemon: Daemon, content: bytes) -> None:
    """Flip a bit in the middle of these bytes in the host tier."""
    with arena_of(daemon) as memory:
        at = memory.find(content)
        assert at >= 0
        memory[at + len(content) // 2] ^= 1


@pytest.mark.host_only
def test_the_command_line(daemon: Daemon, client: Client, pool: Filled) -> None:
    ids = client.allocate(pool.name, 2)
    client.wait_done(client.store(pool.name, hashes(2), ids))
    snapshot = client.wait_done(client.offload(pool.name, [pages(ids)])).snapshot

    def run(*arguments: str) -> str:
        done = run_kvferry("cache", *arguments, "--runtime-dir", daemon.runtime_dir)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    listed = [json.loads(line) for line in run("list", "--json").splitlines()]
    assert [one["hash"] for one in listed] == [one.hex() for one in hashes(2)]
    assert [line.split()[-1] for line in run("list").splitlines() if hashes(2)[0].hex() in line] == ["-"]
    assert run("pin", hashes(2)[0].hex(), "--pool", pool.name) == "1 blocks pinned\n"
    assert [line.split()[-1] for line in run("list").splitlines() if hashes(2)[0].hex() in line] == ["cache)"]
    assert "1 are pinned and stay" in run("clear", "--pool", pool.name)
    assert run("unpin", hashes(2)[0].hex(), "--identity", listed[0]["identity"]) == "1 blocks unpinned\n"
    assert run("evict", hashes(2)[0].hex(), "--pool", pool.name).startswith("1 blocks dropped")
    assert snapshot in run("snapshots")
    assert run("drop", snapshot) == f"{snapshot} dropped\n"
    wrong = run_kvferry("cache", "evict", "abc", "--pool", pool.name, "--runtime-dir", daemon.runtime_dir)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'abc' is not hexadecimal" in wrong.stderr


@pytest.mark.host_only
def test_watching_prints_a_line_a_change(daemon: Daemon, client: Client, pool: Filled) -> None:
    cursor = client.cache_cursor()
    command = [sys.executable, "-P", "-m", "kvferry.clients.cli.main", "cache", "watch", "--from", str(cursor)]
    with subprocess.Popen([*command, "--runtime-dir", daemon.runtime_dir], stdout=subprocess.PIPE) as watching:
        client.wait_done(client.store(pool.name, hashes(1), client.allocate(pool.name, 1)))
        assert watching.stdout is not None
        shown = json.loads(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
    assert (shown["kind"], shown["hashes"]) == ("stored", [hashes(1)[0].hex()])
    assert len(bytes.fromhex(shown["hashes"][0])) == HASH_BYTES
    assert watching.returncode == 130


def test_blocks_on_disk_survive_a_restart_and_damage_is_a_miss(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    config = f'[tiers]\nhost_bytes = {8 * UNIT}\n[tiers.disk]\npath = "{folder}"\n'
    names = hashes(6)
    with kit.daemon(config) as daemon, Client.connect(daemon.runtime_dir, name="engine") as client:
        pool = Filled(client, name)
        ids = client.allocate(name, 6)
        content = pool.write(ids, seed=10)
        cursor = client.cache_cursor()
        client.wait_done(client.store(name, names, ids))
        _until_on_disk(client, cursor, 6)
        client.wait_done(client.offload(name, [pages(np.concatenate([ids, client.allocate(name, 2)]))]))
        assert client.lookup(name, names, pin=False).disk == 6  # a snapshot took all the memory
        pool.close()
    files = sorted(folder.rglob("*"), key=lambda one: one.name)
    by_name = {one.name.split(".")[0]: one for one in files if one.is_file()}
    damaged = by_name[names[4].hex()]
    bytes_on_disk = bytearray(damaged.read_bytes())
    bytes_on_disk[-80] ^= 1
    damaged.write_bytes(bytes_on_disk)
    with kit.daemon(config) as daemon, Client.connect(daemon.runtime_dir, name="engine") as client:
        pool = Filled(client, name)
        _until_on_disk(client, 1, 6)
        found = client.lookup(name, names)
        assert found.blocks == 6
        others = client.allocate(name, 6)
        operation = client.load(name, found.lease, others)
        with pytest.raises(CacheMissError, match="block 4 of 6 is gone"):
            client.wait_done(operation)
        assert operation.done is not None
        assert operation.done.loaded == 4
        assert pool.holds(others[:4], [one[:, :4] for one in content])
        counters = client.status().counters
        assert counters["tiers.disk.damaged_blocks"] == 1
        assert not damaged.exists()
        assert client.lookup(name, names, pin=False).blocks == 4
        pool.close()


def _until_on_disk(client: Client, cursor: int, count: int) -> None:
    """Wait for the events that say so."""
    while count > 0:
        changes = client.cache_events(cursor, timeout_s=20)
        assert changes.changes, "nothing reached the disk"
        cursor = changes.cursor
        on_disk = [one for one in changes.changes if (one.kind, one.tier) == ("stored", "disk")]
        count -= sum(len(one.hashes) // HASH_BYTES for one in on_disk)


def test_an_engine_that_is_killed_leaves_nothing_behind(daemon: Daemon, client: Client, pool: Filled) -> None:
    client.wait_done(client.store(pool.name, hashes(4), client.allocate(pool.name, 4)))
    script = (
        "import os, sys; from kvferry.clients import Client, pages\n"
        "client = Client.connect(sys.argv[1], name='reader')\n"
        "ids = client.allocate(sys.argv[2], 8)\n"
        "kept = client.wait_done(client.offload(sys.argv[2], [pages(ids)])).snapshot\n"
        "found = client.lookup(sys.argv[2], [bytes.fromhex(one) for one in sys.argv[3:]])\n"
        "client.load(sys.argv[2], found.lease, ids[:4]); client.offload(sys.argv[2], [pages(ids[4:])])\n"
        "client.store(sys.argv[2], [b'9' * 16], ids[4:5])\n"
        "client.wait_accepted(client.restore(sys.argv[2], kept))\n"  # it waits for pages that nobody frees
        "os.kill(os.getpid(), 9)\n"
    )
    names = [one.hex() for one in hashes(4)]
    killed = subprocess.run(
        [sys.executable, "-P", "-c", script, str(daemon.runtime_dir), pool.name, *names], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    _until_unpinned(client)
    while client.status().operations or _free(client, pool.name) < 12:
        client.ping()  # until its operations are over; pytest's own timeout fails what never ends
    assert client.evict_cached(hashes(4), pool=pool.name).kept == 0
    for one in [one for one in client.snapshots() if one.pool == pool.name]:
        client.drop_snapshot(one.snapshot)


def _free(client: Client, name: str) -> int:
    [one] = [one for one in client.status().pools if one.pool == name]
    return one.free
