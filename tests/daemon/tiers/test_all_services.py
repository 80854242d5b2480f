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

from kvferry.daemon.dispatch import Call
from kvferry.daemon.tiers.landings import Landed
from kvferry.pools.tiers.index import OPERATOR
from kvferry.protocol.base import PageList
from kvferry.protocol.cache_messages import CacheEvict, CacheEvicted, CachePin, CachePinned, Lookup, Unpin
from kvferry.protocol.errors import DeadlineError, InternalError, KvferryError, raised
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.pool_messages import DeletePool
from kvferry.protocol.requests import ErrorReply
from kvferry.protocol.room_messages import Receive
from kvferry.protocol.tier_messages import CancelWork, DropSnapshot, TierDone
from tests.daemon.tiers.tier_world import POOL, Engine, World, names, new_pool, settle, tiers_config, until
from tests.devices import DEVICE

ANY = st.randoms(use_true_random=False)
HASHES = 10
LANDED = 99
POOL_NAMES = (POOL, "other")
POOLS = st.sampled_from(POOL_NAMES)
OFTEN = st.sampled_from([True, True, False])
T = TypeVar("T")


def room_ended(landed: Landed, error: KvferryError | None) -> list[Finished | Settled]:
    """Return what the book of rooms says of a room's end."""
    info = error.info() if error is not None else None
    about: Any = {"request_id": landed.request_id, "pool": landed.pool.name, "side": "receive", "generation": 1}
    return [Finished(**about, error=info, pages=0, moved_bytes=0, waited_us=0, moved_us=0), Settled(**about)]


def value_of(number: int) -> int:
    """Return the byte that all pages under a hash hold."""
    return number + 1


class _Machine(RuleBasedStateMachine):
    """One daemon's tiers, and a few engines."""

    engines = Bundle("engines")
    snapshots = Bundle("snapshots")
    leases = Bundle("leases")
    landings = Bundle("landings")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world: World
        self.contents: dict[str, list[int]] = {}
        self.restoring: dict[int, tuple[str, list[int] | None, str]] = {}
        self.loading: dict[int, tuple[list[int], list[int], str]] = {}
        self.lost: set[bytes] = set()
        self.rooms = 0
        self.landed: list[Landed] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def guarded(self, engine: Engine, act: Any) -> Any:  # noqa: ANN401
        """Do it; a refusal is fine, a bug is not."""
        if engine.identity in self.lost:
            return None

        try:
            return self.run(_now(act))
        except InternalError:
            raise
        except KvferryError:
            return None

    @initialize(target=engines, remote=st.booleans(), grains=st.integers(6, 24))
    def begin(self, *, remote: bool, grains: int) -> Any:  # noqa: ANN401
        async def make() -> World:
            config = tiers_config(grains, snapshot_grace_s=0, tenant_bytes=None)
            made = World(config, remote=remote, hasher=_AtOnce())  # no thread: each run is the same
            await made.lower.start()
            for tenant in (1, 2):
                for pool in POOL_NAMES:
                    await new_pool(made, pool, tenant=tenant)
            return made

        self.world = self.run(make())
        if self.world.store is not None:
            self.world.store.holds = True
        return multiple(*(self.connect_as(uid) for uid in (1, 1, 2)))

    def connect_as(self, uid: int) -> Engine:
        return self.run(_now(lambda: self.world.engine(uid)))

    # -- engines

    @rule(target=engines, uid=st.sampled_from([1, 1, 2]))
    def connect(self, uid: int) -> Engine:
        return self.connect_as(uid)

    @rule(engine=consumes(engines))
    def die(self, engine: Engine) -> None:
        self.lost.add(engine.identity)

        self.run(_now(lambda: self.world.lose(engine)))

    def some_pages(self, engine: Engine, count: int, pool: str) -> list[int]:
        """Return pages of the session, new ones if need be; perhaps fewer."""
        allocator = self.world.pool(pool, engine.session.tenant).allocator
        mine = allocator.pages_of(engine.session.session_id).tolist()
        if len(mine) < count and allocator.free_count >= count - len(mine):
            mine += self.run(_now(lambda: engine.allocate(count - len(mine), pool))).tolist()
        return [int(one) for one in mine[:count]]

    @rule(engine=engines, count=st.integers(1, 8), random=ANY, pool=POOLS)
    def free(self, engine: Engine, count: int, random: Any, pool: str) -> None:  # noqa: ANN401
        if engine.identity in self.lost:
            return
        ids = self.some_pages(engine, 15, pool)
        random.shuffle(ids)
        self.run(_now(lambda: engine.free(ids[:count], pool)))

    @rule(uid=st.sampled_from([1, 2]), pool=POOLS)
    def a_pool_is_made_anew(self, uid: int, pool: str) -> None:
        """Delete a pool where that is allowed, and make one of its name: it has other memory."""
        engine = self.run(_now(lambda: self.world.engine(uid)))
        number = self.run(_now(lambda: engine.send(DeletePool(pool=pool))))
        if not isinstance(engine.replies[number][0], ErrorReply):
            self.run(new_pool(self.world, pool, tenant=uid))
        self.run(_now(lambda: self.world.lose(engine)))

    # -- snapshots

    @rule(target=snapshots, engine=engines, count=st.integers(1, 6), release=st.booleans(), pool=POOLS, done=OFTEN)
    def offload(self, engine: Engine, count: int, pool: str, *, release: bool, done: bool) -> Any:  # noqa: ANN401
        if engine.identity in self.lost:
            return multiple()
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
        if engine.identity in self.lost:
            return
        ids = None if allocate else self.some_pages(engine, len(self.contents[snapshot]), pool)
        work = self.guarded(engine, lambda: engine.restore(snapshot, ids, pool, drop=drop))
        if work is not None:
            self.restoring[work] = (snapshot, ids, pool)
            self.copies(done=done)

    @rule(engine=engines, snapshot=snapshots)
    def drop(self, engine: Engine, snapshot: str) -> None:
        self.guarded(engine, lambda: engine.send(DropSnapshot(snapshot=snapshot)))

    @rule(target=landings, engine=engines, count=st.integers(1, 6))
    def land(self, engine: Engine, count: int) -> Any:  # noqa: ANN401
        """Make a pool for a hand-off that lands in the host tier; perhaps its room is refused."""
        self.rooms += 1
        body = Receive(pool=POOL, request_id=f"{self.rooms:032x}", lists=(PageList(pages=count),), land="host")
        call = Call(0, engine.session, body, (), 30.0)
        made = self.guarded(
            engine, lambda: self.world.landings.make(call, body, self.world.pool(POOL, call.session.tenant))
        )
        if made is None:
            return multiple()
        self.landed.append(made)
        return made

    @rule(target=snapshots, landed=consumes(landings), well=st.booleans(), finished=st.booleans())
    def it_has_landed(self, landed: Landed, *, well: bool, finished: bool) -> Any:  # noqa: ANN401
        """Let a room end as the book of rooms does, whether its session lives or not."""
        self.landed.remove(landed)
        if not finished:
            self.run(_now(lambda: self.world.landings.refused(landed, DeadlineError("refused"))))
            return multiple()
        count = landed.ranges[0].ids.size
        ended = room_ended(landed, None if well else DeadlineError("late"))
        if well:
            for entry in landed.pool.manifest.entries:
                memory = self.world.host.region.view()
                memory[entry.base : entry.base + entry.pages * entry.page_bytes] = LANDED
            self.contents[landed.snapshot.name] = [LANDED] * count
        for event in ended:
            self.run(_now(lambda: self.world.landings.heard(landed.session.session_id, event)))  # noqa: B023
        return landed.snapshot.name if well else multiple()

    # -- the cache

    @rule(engine=engines, first=st.sampled_from([0, 0, 1]), count=st.integers(1, 5), pool=POOLS, done=OFTEN)
    def store(self, engine: Engine, first: int, count: int, pool: str, *, done: bool) -> None:
        if engine.identity in self.lost:
            return
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
        first=st.sampled_from([0, 0, 1]),
        count=st.integers(1, 5),
        pin=OFTEN,
        then=st.sampled_from(["load", "answered", ""]),
    )
    def look_up(self, engine: Engine, first: int, count: int, then: str, *, pin: bool) -> Any:  # noqa: ANN401
        if engine.identity in self.lost:
            return multiple()
        numbers = list(range(first, min(HASHES, first + count)))
        body = Lookup(pool=POOL, hashes=b"".join(names(*numbers)), pin=pin)
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
        if engine.identity in self.lost or found is None or isinstance(found, ErrorReply) or not found.lease:
            return
        count = max(1, min(count, found.lease_blocks - skip))
        ids = self.some_pages(engine, count, pool)
        work = self.guarded(engine, lambda: engine.load(found.lease, ids, pool, first_block=skip))
        if work is not None:
            self.loading[work] = (ids, numbers[skip : skip + count], pool)
            self.copies(done=done)

    @rule(lease=leases)
    def unpin(self, lease: Any) -> None:  # noqa: ANN401
        engine, number, _ = lease
        found = engine.replies.get(number, (None,))[0]
        if found is not None and not isinstance(found, ErrorReply) and found.lease:
            self.guarded(engine, lambda: engine.send(Unpin(lease=found.lease)))

    @rule(
        engine=engines,
        first=st.integers(0, 4),
        count=st.integers(1, 5),
        what=st.sampled_from(["evict", "pin", "unpin"]),
    )
    def operate(self, engine: Engine, first: int, count: int, what: str) -> None:
        hashes = b"".join(names(*range(first, first + count)))
        body = CacheEvict(hashes=hashes) if what == "evict" else CachePin(hashes=hashes, pinned=what == "pin")
        self.guarded(engine, lambda: engine.send(body))

    # -- what happens by itself

    def copies(self, *, done: bool) -> None:
        """Let all jobs be done, if they are to be."""
        if done:
            self.run(_now(self.world.copier.finish_all))

    @precondition(lambda self: bool(self.world.copier.under_way))
    @rule(random=ANY, well=st.booleans())
    def a_job_ends(self, random: Any, *, well: bool) -> None:  # noqa: ANN401
        """Let a job be done, or one end that was stopped."""
        copier = self.world.copier
        jobs = [one for one in copier.under_way if well or one in copier.stopped]
        if jobs:
            self.run(_now(lambda: (copier.finish if well else copier.end)(random.choice(jobs))))

    @precondition(lambda self: any(True for _ in self.world.works))
    @rule(random=ANY)
    def a_work_is_late(self, random: Any) -> None:  # noqa: ANN401
        works = list(self.world.works)
        if works:
            self.run(_now(lambda: self.world.works.stop(random.choice(works), DeadlineError("late"))))

    @precondition(lambda self: any(True for _ in self.world.works))
    @rule(engine=engines, random=ANY)
    def cancel(self, engine: Engine, random: Any) -> None:  # noqa: ANN401
        works = [one.number for one in self.world.works if one.session is engine.session]
        if works:
            self.guarded(engine, lambda: engine.send(CancelWork(work=random.choice(works))))

    @precondition(lambda self: self.world.store is not None and bool(self.world.store.waiting))
    @rule(times=st.integers(1, 4))
    def the_store_answers(self, times: int) -> None:
        self.store_answers(times)

    def store_answers(self, times: int) -> None:
        for _ in range(times):
            if self.world.store is not None:
                self.run(_now(self.world.store.let_go))

    @precondition(lambda self: self.world.store is not None)
    @rule(available=st.booleans())
    def the_store_goes_or_comes(self, *, available: bool) -> None:
        if self.world.store is not None:
            self.world.store.available = available

    # -- what has to hold

    def busy(self, engine: Engine, ids: list[int], pool: str) -> bool:
        """Return whether somebody reads or writes pages: their engine may not change them."""
        return self.world.pool(pool, engine.session.tenant).allocator.is_busy(np.asarray(ids))

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        for engine in self.world.engines.values():
            for body, ids in engine.events:
                if isinstance(body, TierDone):
                    self.look_at(engine, body, ids)
            engine.events.clear()

    def look_at(self, engine: Engine, done: TierDone, ids: Any) -> None:  # noqa: ANN401
        """Compare bytes that have just come: nothing has written there since."""
        assert done.error is None or not isinstance(raised(done.error), InternalError), done
        if done.work in self.restoring and done.error is None:
            snapshot, into, pool = self.restoring.pop(done.work)
            found = engine.read(ids[0] if into is None else into, pool)
            assert found == [{one} for one in self.contents[snapshot]], found
        if done.work in self.loading:
            into, numbers, pool = self.loading.pop(done.work)
            found = engine.read(into[: done.loaded], pool)
            assert found == [{value_of(one)} for one in numbers[: done.loaded]], found

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            self.runner.close()
            return
        self.run(self.end())
        self.runner.close()

    async def end(self) -> None:
        """Let everything end, and look at what is left: nothing."""
        world = self.world
        world.copier.finish_all()
        await settle()
        for landed in self.landed:  # as the rooms of a session do that is lost
            for event in room_ended(landed, DeadlineError("late")):
                world.landings.heard(landed.session.session_id, event)
        for engine in list(world.engines.values()):
            world.lose(engine)
        world.copier.finish_all()
        if world.store is not None:
            world.store.holds = False
            while world.store.let_go():
                pass

        def over() -> bool:
            world.copier.finish_all()
            demoting = world.remote is not None and world.remote.waiting
            return not (list(world.works) or world.lower.coming or world.lookups.under_way or demoting)

        await until(over)
        await until(lambda: not any(holder != OPERATOR for holder in world.host.index.pinned_by()))
        await until(lambda: not len(world.service.snapshots))
        for uid in (1, 2):
            operator = world.engine(uid)
            named = b"".join(names(*range(HASHES)))
            unpinned = operator.send(CachePin(hashes=named, pinned=False))
            await until(lambda: unpinned in operator.replies)  # noqa: B023
            operator.reply(unpinned, CachePinned)
            evicted = operator.send(CacheEvict(everything=True))
            await until(lambda: evicted in operator.replies)  # noqa: B023
            assert operator.reply(evicted, CacheEvicted).kept == 0
            world.lose(operator)
        await settle()
        world.check_empty()
        if world.store is not None:
            await until(lambda: not world.lower.leaving)
        await world.close()


class _AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:  # noqa: ANN401
        done: Future[T] = Future()
        done.set_result(work(*arguments, **named))
        return done


async def _now(act: Callable[[], T]) -> T:
    found = act()
    await settle()
    return found


TestAllServices = _Machine.TestCase
TestAllServices.settings = DEVICE.examples(100, stateful_step_count=40)
