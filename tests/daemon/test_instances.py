"""Engine instances: sessions of several processes own together, and what they own goes with the last of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.protocol import errors
from kvferry.protocol.session_messages import PoolStatus
from kvferry.protocol.session_stream import SessionOpen
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.pools import MODEL, SPEC, hashes
from tests.kit.raw_engine import raw_engine
from tests.kit.started import Started, started

ALL = SPEC.tokens // SPEC.page_size
PREFILL, DECODE = "prefill", "decode"
PAGES = 6
BLOCKS = 2
CONFIG = "[tiers]\nhost_bytes = 262144\nsnapshot_grace_s = 0.0\n"


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Client]:
    """Return a client of no instance, and leave the cache empty."""
    with kit.engine(daemon, "other") as one:
        yield one
        one.evict_cached()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@contextlib.contextmanager
def engine(daemon: Daemon, part: str, request_id: str, *given: int) -> Iterator[tuple[Started, list[int]]]:
    """Run a part of the instance ``engine-0`` up to where it waits; yield what it says."""
    program = [__file__, part, str(daemon.runtime_dir), "engine-0", request_id, *map(str, given)]
    with started(program) as process:
        assert process.stdout is not None
        try:
            yield process, [int(one) for one in process.stdout.readline().split()]
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def pool_of(client: Client, name: str) -> PoolStatus | None:
    return next((one for one in client.status().pools if one.pool == name), None)


def free_pages(client: Client, name: str) -> int:
    return next(one.free for one in client.status().pools if one.pool == name)


def sessions(client: Client) -> list[str]:
    return [one.name for one in client.status().sessions]


def test_a_worker_dies_and_then_the_scheduler(daemon: Daemon, other: Client) -> None:
    request_id = new_request_id()
    with engine(daemon, "scheduler", request_id) as (scheduler, (lease, *ids)):
        received = other.receive(DECODE, request_id, [pages(other.allocate(DECODE, BLOCKS))])
        with engine(daemon, "worker", request_id, lease, *ids) as (worker, freed):
            assert freed == [1]
            other.wait_settled(received)
            assert received.outcome().pages == BLOCKS
            assert {(one.name, one.instance, one.pages) for one in other.status().sessions if one.instance} == {
                (part, "engine-0", PAGES - 1) for part in ("scheduler", "worker")
            }
            assert len({one.owner for one in other.status().sessions if one.instance}) == 1
            os.kill(worker.pid, signal.SIGKILL)
            assert soon(lambda: "worker" not in sessions(other))
        assert free_pages(other, PREFILL) == ALL - PAGES + 1, "the worker's death takes nothing of its instance"
        assert {one.pinned_by for one in other.cached_blocks()} != {()}
        assert [one.state for one in other.snapshots()] == ["ready"]
        with pytest.raises(errors.PoolFullError, match=r"held by instance 'engine-0' \(session \d+ 'scheduler' of"):
            other.allocate(PREFILL, ALL)
        os.kill(scheduler.pid, signal.SIGKILL)
        assert soon(lambda: "scheduler" not in sessions(other))
    assert soon(lambda: free_pages(other, PREFILL) == ALL)
    assert {one.pinned_by for one in other.cached_blocks()} == {()}
    assert soon(lambda: not list(other.snapshots()))
    assert pool_of(other, DECODE) is None, "its lifetime was the instance's"
    with pytest.raises(errors.UnknownPoolError):
        other.allocate(DECODE, 1)


def test_what_is_anothers_and_what_is_not(daemon: Daemon, other: Client) -> None:
    with (
        kit.engine(daemon, instance="a") as one,
        kit.engine(daemon, instance="a") as same,
        kit.engine(daemon, instance="b") as foreign,
    ):
        one.create_pool(PREFILL, SPEC, model=MODEL)
        ids = one.allocate(PREFILL, 3)
        same.wait_done(same.store(PREFILL, hashes(2), ids[:2]))
        lease = one.lookup(PREFILL, hashes(2)).lease
        for stranger in (foreign, other):
            with pytest.raises(errors.NotOwnerError, match="owned by another instance"):
                stranger.free(PREFILL, ids)
            for move in (stranger.send, stranger.receive):
                with pytest.raises(errors.NotOwnerError):
                    stranger.wait_finished(move(PREFILL, new_request_id(), [pages(ids)]))
            with pytest.raises(errors.NotOwnerError):
                stranger.wait_done(stranger.offload(PREFILL, [pages(ids)]))
            with pytest.raises(errors.UnknownLeaseError):
                stranger.unpin(lease)
        assert same.lookup(PREFILL, hashes(2)[1:], lease=lease).lease == lease
        one.close()
        assert same.free(PREFILL, ids).freed == 3, "the instance lives as long as one of its sessions"
        assert same.unpin(lease) >= 2


def test_another_user_has_pools_of_its_own(daemon: Daemon, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    code = (
        "with Client.connect(sys.argv[1], instance='a') as c:\n"
        "    try: c.attach_pool('prefill')\n"
        "    except KvferryError as e: print(e.code)\n"
        "    c.create_pool('prefill', MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=8, "
        "dtype='float16'))\n"
        "    try: c.free('prefill', [int(sys.argv[2])])\n"
        "    except KvferryError as e: print(e.code)\n"
    )
    with kit.engine(daemon, instance="a") as one:
        one.create_pool(PREFILL, SPEC, model=MODEL)
        ids = one.allocate(PREFILL, 1)
        assert said_by_another_user(daemon, code, str(ids[0])) == "UNKNOWN_POOL\nNOT_OWNER"
        assert one.free(PREFILL, ids).freed == 1


def test_names_that_are_none(daemon: Daemon) -> None:
    for name in ("x" * 129, "a\x00b", "a\nb"):
        with pytest.raises(errors.InvalidFieldError) as refused:
            Client.connect(daemon.runtime_dir, instance=name)
        assert refused.value.field == "instance"
        opening = SessionOpen(protocol_min=4, protocol_max=4, instance=name)
        with pytest.raises(errors.KvferryError) as refused_by_daemon, raw_engine(daemon.runtime_dir, opening=opening):
            pass
        assert refused_by_daemon.value.code == "MALFORMED"


# -- pools that end with their instance


def test_a_pool_that_ends_with_its_instance(daemon: Daemon, other: Client, name: str) -> None:
    with kit.engine(daemon, instance="a") as one:
        one.create_pool(name, SPEC, lifetime="instance")
        with kit.engine(daemon, instance="a") as same:
            same.create_pool(name, SPEC, lifetime="instance")
            found = pool_of(other, name)
            assert found is not None
            assert (found.lifetime, found.ends_with) == ("instance", other.status().sessions[1].owner)
            for lifetime in ("instance", "daemon"):
                with pytest.raises(errors.PoolExistsError, match="ends with instance 'a'") as refused:
                    other.create_pool(name, SPEC, lifetime=lifetime)
                assert refused.value.field == "lifetime"
            attached = other.attach_pool(name)
            ids = other.allocate(name, 2)
        assert pool_of(other, name) is not None
    assert soon(lambda: pool_of(other, name) is None)
    attached.tensor("main", "k")[:, ids[0]] = 1.0  # a mapping that engines have stays
    with pytest.raises(errors.UnknownPoolError):
        other.free(name, ids)
    other.create_pool(name, SPEC)
    assert free_pages(other, name) == ALL
    with pytest.raises(errors.PoolExistsError, match="ends with the daemon, asked for with lifetime 'instance'"):
        other.create_pool(name, SPEC, lifetime="instance")
    other.delete_pool(name)


def test_what_is_in_flight_in_such_a_pool_ends_first(daemon: Daemon, other: Client, name: str) -> None:
    request_id = new_request_id()
    other.create_pool("out", SPEC)
    with kit.engine(daemon) as one:
        one.create_pool(name, SPEC, lifetime="instance")
        received = other.receive(name, request_id, [pages(other.allocate(name, 2))])
        other.ping()
        with pytest.raises(errors.PoolInUseError):
            one.delete_pool(name)
    assert soon(lambda: pool_of(other, name) is None)
    sent = other.send("out", request_id, [pages(other.allocate("out", 2))])
    assert other.wait_finished(received).pages == 2
    other.wait_settled(sent)


def main() -> None:
    """Be a scheduler, which owns pages and a lease, or a worker, which is named them and moves bytes.

    Say on a line what it has, and wait to be killed.
    """
    part, runtime_dir, instance, request_id, *given = sys.argv[1:]
    client = Client.connect(runtime_dir, name=part, instance=instance)
    if part == "scheduler":
        client.create_pool(PREFILL, SPEC, model=MODEL)
        client.create_pool(DECODE, SPEC, model=MODEL, lifetime="instance")
        ids = [int(one) for one in client.allocate(PREFILL, PAGES)]
        client.wait_done(client.store(PREFILL, hashes(BLOCKS), ids[:BLOCKS]))
        said = [client.lookup(PREFILL, hashes(BLOCKS)).lease, *ids]
    else:
        lease, *ids = [int(one) for one in given]
        client.wait_done(client.load(PREFILL, lease, ids[:BLOCKS]))
        sent = client.send(PREFILL, request_id, [pages(ids[:BLOCKS])])
        client.wait_settled(sent)
        client.wait_done(client.offload(PREFILL, [pages(ids[:BLOCKS])]))
        said = [client.free(PREFILL, ids[-1:]).freed]
    print(*said, flush=True)  # noqa: T201  the test waits for it
    signal.pause()


if __name__ == "__main__":
    main()
