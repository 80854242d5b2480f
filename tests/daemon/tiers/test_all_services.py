"""All services of the tiers, in any order of requests, copies, answers of the store and deaths: nothing is left over.

Sessions of two users do whatever comes to their mind; bytes say where they come from, so what comes back is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvferry.daemon.control.dispatch import Call
from kvferry.daemon.services import leases, prefix_cache
from kvferry.daemon.services.receive_to_host import HostReceive
from kvferry.daemon.tiers import host_tier
from kvferry.pools.tiers.index import OPERATOR
from kvferry.protocol.base import ErrorReply, PageList
from kvferry.protocol.errors import DeadlineError, InternalError, KvferryError, raised
from kvferry.protocol.events import Finished, Settled, TierDone
from kvferry.protocol.pool_messages import DeletePool
from kvferry.protocol.tier_messages import CacheEvict, CachePin, CachePinned, DropSnapshot, Found, Lookup
from kvferry.protocol.transfer_messages import Receive
from tests.kit.devices import DEVICE
from tests.kit.tiers import POOL, Engine, Harness, hashes, names, new_pool, settle, tiers_config, until

ANY = st.randoms(use_true_random=False)
HASHES = 10
WRITTEN = 99
POOL_NAMES = (POOL, "other")
POOLS = st.sampled_from(POOL_NAMES)
OFTEN = st.sampled_from([True, True, False])
FIRST, COUNT = st.sampled_from([0, 0, 1]), st.integers(1, 5)
T = TypeVar("T")


def transfer_ended(host_receive: HostReceive, error: KvferryError | None) -> list[Finished | Settled]:
    """Return what the book of transfers says of a transfer's end."""
    info = error.info() if error is not None else None
    named = {"request_id": host_receive.request_id, "pool": host_receive.pool.name}
    about: Any = {**named, "direction": "receive", "generation": 1}
    return [Finished(**about, error=info, pages=0, moved_bytes=0, waited_us=0, moved_us=0), Settled(**about)]


def value_of(number: int) -> int:
    """Return the byte that all pages under a hash hold."""
    return number + 1


class _Machine(RuleBasedStateMachine):
    """One daemon's tiers, and a few engines."""

    engines = Bundle("engines")
    snapshots = Bundle("snapshots")
    leases = Bundle("leases")
    host_receives = Bundle("host_receives")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.patch = pytest.MonkeyPatch()
        self.harness: Harness
        self.contents: dict[str, list[int]] = {}
        self.restoring: dict[int, tuple[str, list[int] | None, str]] = {}
        self.loading: dict[int, tuple[list[int], list[int], str]] = {}
        self.lost: set[bytes] = set()
        self.transfers = 0
        self.host_receive: list[HostReceive] = []

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(operation)

    def now(self, act: Callable[[], T]) -> T:
        """Do it, and let the loop do all that follows."""

        async def acted() -> T:
            found = act()
            await settle()
            return found

        return self.run(acted())

    def guarded(self, engine: Engine, act: Any) -> Any:  # noqa: ANN401
        """Do it; a refusal is fine, a bug is not."""
        if engine.identity in self.lost:
            return None
        try:
            return self.now(act)
        except InternalError:
            raise
        except KvferryError:
            return None

    @initialize(target=engines, remote=st.booleans(), units=st.integers(6, 24), at_once=st.sampled_from([1, 32]))
    def begin(self, *, remote: bool, units: int, at_once: int) -> Any:  # noqa: ANN401
        """Begin with nothing; what needs room waits for it where only one block is evicted at once, and so on."""
        self.patch.setattr(host_tier, "EVICTED_AT_ONCE", at_once)
        self.patch.setattr(prefix_cache, "BLOCKS_AT_ONCE", at_once)
        self.patch.setattr(leases, "UNPINNED_AT_ONCE", at_once)

        async def make() -> Harness:
            config = tiers_config(units, snapshot_grace_s=0)
            made = Harness(config, remote=remote, hasher=_AtOnce())  # no thread: each run is the same
            await made.lower.start()
            for tenant in (1, 2):
                for pool in POOL_NAMES:
                    await new_pool(made, pool, tenant=tenant)
            return made

        self.harness = self.run(make())
        if self.harness.remote is not None:
            self.harness.store.holds = True
        return multiple(*(self.connect_as(uid) for uid in (1, 1, 2)))

    def connect_as(self, uid: int) -> Engine:
        return self.now(lambda: self.harness.engine(uid))

    # -- engines

    @rule(target=engines, uid=st.sampled_from([1, 1, 2]))
    def connect(self, uid: int) -> Engine:
        return self.connect_as(uid)

    @rule(engine=consumes(engines))
    def die(self, engine: Engine) -> None:
        self.lost.add(engine.identity)
        self.now(lambda: self.harness.lose(engine))

    def some_pages(self, engine: Engine, count: int, pool: str) -> list[int]:
        """Return pages of the session, new ones if need be; perhaps fewer."""
        allocator = self.harness.pool(pool, engine.session.tenant).allocator
        mine = allocator.pages_of(engine.session.session_id).tolist()
        if len(mine) < count and allocator.free_count >= count - len(mine):
            mine += self.now(lambda: engine.allocate(count - len(mine), pool)).tolist()
        return [int(one) for one in mine[:count]]

    @rule(engine=engines, count=st.integers(1, 8), random=ANY, pool=POOLS)
    def free(self, engine: Engine, count: int, random: Any, pool: str) -> None:  # noqa: ANN401
        ids = self.some_pages(engine, 15, pool)
        random.shuffle(ids)
        self.now(lambda: engine.free(ids[:count], pool))

    @rule(uid=st.sampled_from([1, 2]), pool=POOLS)
    def a_pool_is_made_anew(self, uid: int, pool: str) -> None:
        """Delete a pool where that is allowed, and make one of its name: it has other memory."""
        engine = self.now(lambda: self.harness.engine(uid))
        number = self.now(lambda: engine.send(DeletePool(pool=pool)))
        if not isinstance(engine.replies[number][0], ErrorReply):
            self.run(new_pool(self.harness, pool, tenant=uid))
        self.now(lambda: self.harness.lose(engine))

    # -- snapshots

    @rule(target=snapshots, engine=engines, count=st.integers(1, 6), release=st.booleans(), pool=POOLS, done=OFTEN)
    def offload(self, engine: Engine, count: int, pool: str, *, release: bool, done: bool) -> Any:  # noqa: ANN401
        ids = self.some_pages(engine, count, pool)
        if not ids or self.busy(engine, ids, pool):
            return multiple()
        values = [101 + one for one in range(len(ids))]
        for one, value in zip(ids, values, strict=True):
            engine.write([one], value, pool)
        made = self.guarded(engine, lambda: engine.offload(ids, pool, release=release))
        if made is None:
            return multiple()
        self.contents[made.snapshot] = values
        self.copies(done=done)
        return made.snapshot

    @rule(engine=engines, snapshot=snapshots, allocate=st.booleans(), drop=st.booleans(), pool=POOLS, done=OFTEN)
    def restore(self, engine: Engine, snapshot: str, pool: str, *, allocate: bool, drop: bool, done: bool) -> None:
        ids = None if allocate else self.some_pages(engine, len(self.contents[snapshot]), pool)
        operation = self.guarded(engine, lambda: engine.restore(snapshot, ids, pool, drop=drop))
        if operation is not None:
            self.restoring[operation] = (snapshot, ids, pool)
            self.copies(done=done)

    @rule(engine=engines, snapshot=snapshots)
    def drop(self, engine: Engine, snapshot: str) -> None:
        self.guarded(engine, lambda: engine.send(DropSnapshot(snapshot=snapshot)))

    @rule(target=host_receives, engine=engines, count=st.integers(1, 6))
    def into(self, engine: Engine, count: int) -> Any:  # noqa: ANN401
        """Make a pool for a transfer that lands in the host tier; perhaps its transfer is refused."""
        self.transfers += 1
        body = Receive(pool=POOL, request_id=f"{self.transfers:032x}", lists=(PageList(pages=count),), into="host")
        call, pool = Call(0, engine.session, body, (), 30.0), self.harness.pool(POOL, engine.session.tenant)
        host_receives = self.harness.host_receives
        made = self.guarded(engine, lambda: host_receives.make(call, body, host_receives.plan(body, pool)))
        if made is None:
            return multiple()
        self.host_receive.append(made)
        return made

    @rule(target=snapshots, host_receive=consumes(host_receives), well=st.booleans(), finished=st.booleans())
    def it_has_landed(self, host_receive: HostReceive, *, well: bool, finished: bool) -> Any:  # noqa: ANN401
        """Let a transfer end as the book of transfers does, whether its session lives or not."""
        self.host_receive.remove(host_receive)
        if not finished:
            self.now(lambda: self.harness.host_receives.refused(host_receive, DeadlineError("refused")))
            return multiple()
        count = host_receive.ranges[0].ids.size
        ended = transfer_ended(host_receive, None if well else DeadlineError("late"))
        if well:
            for entry in host_receive.pool.manifest.entries:
                memory = self.harness.host.region.view()
                memory[entry.base : entry.base + entry.pages * entry.page_bytes] = WRITTEN
            self.contents[host_receive.snapshot.name] = [WRITTEN] * count
        for event in ended:
            self.now(lambda: self.harness.host_receives.on_event(host_receive.session.session_id, event))  # noqa: B023
        return host_receive.snapshot.name if well else multiple()

    # -- the cache

    @rule(engine=engines, first=FIRST, count=COUNT, pool=POOLS, done=OFTEN)
    def store(self, engine: Engine, first: int, count: int, pool: str, *, done: bool) -> None:
        numbers = list(range(first, min(HASHES, first + count)))
        ids = self.some_pages(engine, len(numbers), pool)
        if len(ids) < len(numbers) or self.busy(engine, ids, pool):
            return
        for one, number in zip(ids, numbers, strict=True):
            engine.write([one], value_of(number), pool)
        self.guarded(engine, lambda: engine.store(names(*numbers), ids, pool))
        self.copies(done=done)

    @rule(
        target=leases,
        engine=engines,
        first=FIRST,
        count=COUNT,
        pin=OFTEN,
        then=st.sampled_from(["load", "answered", ""]),
    )
    def look_up(self, engine: Engine, first: int, count: int, then: str, *, pin: bool) -> Any:  # noqa: ANN401
        numbers = list(range(first, min(HASHES, first + count)))
        body = Lookup(pool=POOL, hashes=hashes(*numbers), pin=pin)
        number = self.guarded(engine, lambda: engine.send(body))
        if then == "answered":
            self.store_answers(3)
        lease = (engine, number, numbers)
        if then:
            self.load(lease, 0, count, POOL, done=False)
        return lease

    @rule(lease=leases, skip=st.integers(0, 2), count=st.integers(1, 4), pool=POOLS, done=OFTEN)
    def load(self, lease: Any, skip: int, count: int, pool: str, *, done: bool) -> None:  # noqa: ANN401
        engine, number, numbers = lease
        found = engine.replies.get(number, (None,))[0]
        if engine.identity in self.lost or not isinstance(found, Found) or not found.lease:
            return
        count = max(1, min(count, found.lease_blocks - skip))
        ids = self.some_pages(engine, count, pool)
        operation = self.guarded(engine, lambda: engine.load(found.lease, ids, pool, first_block=skip))
        if operation is not None:
            self.loading[operation] = (ids, numbers[skip : skip + count], pool)
            self.copies(done=done)

    @rule(lease=leases)
    def unpin(self, lease: Any) -> None:  # noqa: ANN401
        engine, number, _ = lease
        found = engine.replies.get(number, (None,))[0]
        if isinstance(found, Found) and found.lease:
            self.guarded(engine, lambda: engine.unpin(found.lease))

    @rule(engine=engines, first=st.integers(0, 4), count=COUNT, what=st.sampled_from(["evict", "pin", "unpin"]))
    def operate(self, engine: Engine, first: int, count: int, what: str) -> None:
        which = hashes(*range(first, first + count))
        evict, pin = CacheEvict(hashes=which, pool=POOL), CachePin(hashes=which, pinned=what == "pin", pool=POOL)
        self.guarded(engine, lambda: engine.send(evict if what == "evict" else pin))

    # -- what happens by itself

    def copies(self, *, done: bool) -> None:
        """Let all jobs be done, if they are to be."""
        if done:
            self.now(self.harness.copier.finish_all)

    @precondition(lambda self: bool(self.harness.copier.under_way))
    @rule(random=ANY, well=st.booleans())
    def a_job_ends(self, random: Any, *, well: bool) -> None:  # noqa: ANN401
        """Let a job be done, or one end that was stopped."""
        copier = self.harness.copier
        jobs = [one for one in copier.under_way if well or one in copier.stopped]
        if jobs:
            self.now(lambda: (copier.finish if well else copier.end)(random.choice(jobs)))

    @precondition(lambda self: any(True for _ in self.harness.operations))
    @rule(random=ANY)
    def a_operation_is_late(self, random: Any) -> None:  # noqa: ANN401
        operation = random.choice(list(self.harness.operations))
        self.now(lambda: self.harness.operations.stop(operation, DeadlineError("late")))

    @precondition(lambda self: any(True for _ in self.harness.operations))
    @rule(engine=engines, random=ANY)
    def cancel(self, engine: Engine, random: Any) -> None:  # noqa: ANN401
        operations = [one.number for one in self.harness.operations if one.session is engine.session]
        if operations:
            self.guarded(engine, lambda: engine.cancel(random.choice(operations)))

    @precondition(lambda self: self.harness.remote is not None and bool(self.harness.store.waiting))
    @rule(times=st.integers(1, 4))
    def the_store_answers(self, times: int) -> None:
        self.store_answers(times)

    def store_answers(self, times: int) -> None:
        for _ in range(times):
            if self.harness.remote is not None:
                self.now(self.harness.store.let_go)

    @precondition(lambda self: self.harness.remote is not None)
    @rule(available=st.booleans())
    def the_store_goes_or_comes(self, *, available: bool) -> None:
        self.harness.store.available = available

    # -- what has to hold

    def busy(self, engine: Engine, ids: list[int], pool: str) -> bool:
        """Return whether somebody reads or writes pages: their engine may not change them."""
        return self.harness.pool(pool, engine.session.tenant).allocator.is_busy(np.asarray(ids))

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.check()
        for engine in self.harness.engines.values():
            for body, ids in engine.events:
                if isinstance(body, TierDone):
                    self.look_at(engine, body, ids)
            engine.events.clear()

    def look_at(self, engine: Engine, done: TierDone, ids: Any) -> None:  # noqa: ANN401
        """Compare bytes that have just come: nothing has written there since."""
        assert done.error is None or not isinstance(raised(done.error), InternalError), done
        if done.operation in self.restoring and done.error is None:
            snapshot, into, pool = self.restoring.pop(done.operation)
            found = engine.read(ids[0] if into is None else into, pool)
            assert found == [{one} for one in self.contents[snapshot]], found
        if done.operation in self.loading:
            into, numbers, pool = self.loading.pop(done.operation)
            found = engine.read(into[: done.loaded], pool)
            assert found == [{value_of(one)} for one in numbers[: done.loaded]], found

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.run(self.end())
        self.runner.close()
        self.patch.undo()

    async def end(self) -> None:
        """Let everything end, and look at what is left: nothing."""
        harness = self.harness
        await harness.finish()
        for host_receive in self.host_receive:  # as the transfers of a session do that is lost
            for event in transfer_ended(host_receive, DeadlineError("late")):
                harness.host_receives.on_event(host_receive.session.session_id, event)
        for engine in list(harness.engines.values()):
            harness.lose(engine)
        await harness.let_store_answer()

        def over() -> bool:
            harness.copier.finish_all()
            demoting = harness.remote is not None and harness.remote.waiting
            return not (list(harness.operations) or harness.lower.promotions or harness.cache.lookups or demoting)

        await until(over)
        await until(lambda: not any(holder != OPERATOR for holder in harness.host.index.pinned_by()))
        await until(lambda: not len(harness.service.snapshots))
        for uid in (1, 2):
            operator = harness.engine(uid)
            body = CachePin(hashes=hashes(*range(HASHES)), pinned=False, pool=POOL)
            await operator.answer(body, CachePinned)
            assert (await operator.evict()).kept == 0
            harness.lose(operator)
        await settle()
        harness.check_empty()
        if harness.remote is not None:
            await until(lambda: not harness.lower.removals)
        await harness.close()


class _AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, operation: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:  # noqa: ANN401
        done: Future[T] = Future()
        done.set_result(operation(*arguments, **named))
        return done


TestAllServices = _Machine.TestCase
TestAllServices.settings = DEVICE.examples(100, stateful_step_count=40)
