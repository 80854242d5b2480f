"""Memory that peers write: nothing of it is credited while a write may still land in it, and nothing is lost."""

from __future__ import annotations

import asyncio
import weakref
from typing import TypeAlias, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.daemon.transports.mooncake import MooncakeEngine
from kvferry.daemon.transports.network_memory import BounceBuffers, DirectPages, FenceBounds
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import TransferFailedError
from kvferry.protocol.manifests import MhaSpec
from tests.kit.network import ScriptedNetwork

BASE, BOUNCE_BUFFER_BYTES, COUNT = 1 << 20, 4096, 5
A = Incarnation("tcp://192.0.2.1:7801", "a" * 32)
B = A._replace(address="tcp://192.0.2.2:7801")
"""B says A's boot id: what it is credited is its own all the same."""
PAGE_RUNS = ((BASE, 1000), (BASE + 5000, 2000))
PAGES_BYTES = 3000
BOUNDS = FenceBounds(quarantined_bytes=2 * BOUNCE_BUFFER_BYTES, quarantined_s=10.0, drain_timeout_s=3.0, pages_s=5.0)


Credit: TypeAlias = tuple[int, Incarnation, int]
"""The number of what was credited, to whom, and the number of the write credit."""


class NetworkMachine(RuleBasedStateMachine):
    """Against a plain list of what each bounce buffer holds; writes land only where the model says they may."""

    write_credits: Bundle[Credit] = Bundle("write_credits")

    def __init__(self) -> None:
        super().__init__()
        self.network = BounceBuffers(BASE, BOUNCE_BUFFER_BYTES, COUNT, BOUNDS)
        self.now_s = 0.0
        self.states: dict[int, tuple[str, Incarnation, int, float]] = {}
        self.asked_s: float | None = None
        self.fencing = False
        self.next_credit = 0

    def held(self, state: str) -> list[int]:
        return [number for number, held in self.states.items() if held[0] == state]

    @property
    def may_credit(self) -> bool:
        return self.asked_s is None and not self.fencing

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(target=write_credits, peer=st.sampled_from([A, B]), pages=st.booleans())
    def take(self, peer: Incarnation, *, pages: bool) -> MultipleResults[Credit] | Credit:
        """Take a bounce buffer, or pages."""
        self.next_credit += 1
        if pages:
            target, may = self.network.take_pages(peer, self.next_credit, PAGE_RUNS), self.may_credit
        else:
            target = self.network.take(peer, self.next_credit)
            may = self.may_credit and sum(number < COUNT for number in self.states) < COUNT
        assert (target is not None) == may
        if target is None:
            return multiple()
        number = target.number
        assert number not in self.states, "a bounce buffer was credited in which a write may land"
        assert (number >= COUNT) == pages
        assert target.address == BASE + (0 if pages else number * BOUNCE_BUFFER_BYTES)
        assert not pages or target.runs == PAGE_RUNS
        self.states[number] = ("credited", peer, self.next_credit, 0.0)
        return (number, peer, self.next_credit)

    @rule(credit=write_credits, peer=st.sampled_from([A, B]))
    def give_back(self, credit: Credit, peer: Incarnation) -> None:
        """Let any peer report terminal writes, perhaps late."""
        held = self.states.get(credit[0])
        its = held is not None and held[1:3] == (peer, credit[2])
        assert self.network.give_back(credit[0], peer, credit[2]) == its
        if its:
            del self.states[credit[0]]

    @rule(credit=consumes(write_credits), again=st.booleans())
    def quarantine(self, credit: Credit, *, again: bool) -> None:
        """End a write credit without knowing how its writes ended; nobody else can."""
        assert not self.network.quarantine(credit[0], A if credit[1] == B else B, credit[2], self.now_s)
        held = self.states.get(credit[0])
        its = held is not None and held[:3] == ("credited", *credit[1:])
        assert self.network.quarantine(*credit, self.now_s) == its
        if its:
            self.states[credit[0]] = ("quarantined", credit[1], credit[2], self.now_s)
        assert not (again and self.network.quarantine(*credit, self.now_s))

    @rule(peer=st.sampled_from([A, B]))
    def lose_a_peer(self, peer: Incarnation) -> None:
        assert set(self.network.quarantine_peer(peer, self.now_s)) == self.rest(peer)

    def rest(self, *peers: Incarnation) -> set[int]:
        ended = set()
        for number, held in self.states.items():
            if held[0] == "credited" and held[1] in peers:
                self.states[number] = ("quarantined", held[1], held[2], self.now_s)
                ended.add(number)
        return ended

    @rule()
    def ask_for_a_fence(self) -> None:
        if self.fencing:
            assert not self.network.fence_due(self.now_s)
            return
        since = [held[3] for held in self.states.values() if held[0] == "quarantined"]
        of_pages = [self.states[number][3] for number in self.held("quarantined") if number >= COUNT]
        too_much = (
            self.resting_bytes() > 2 * BOUNCE_BUFFER_BYTES
            or any(self.now_s - one > 10.0 for one in since)
            or any(self.now_s - one > 5.0 for one in of_pages)
            or bool(of_pages and not self.held("credited"))
        )
        if not too_much:
            self.asked_s = None
        elif self.asked_s is None:
            self.asked_s = self.now_s
        due = self.asked_s is not None and (not self.held("credited") or self.now_s - self.asked_s >= 3.0)
        assert self.network.fence_due(self.now_s) == due

    def resting_bytes(self) -> int:
        return sum(BOUNCE_BUFFER_BYTES if number < COUNT else PAGES_BYTES for number in self.held("quarantined"))

    @precondition(lambda self: not self.fencing)
    @rule()
    def begin_a_fence(self) -> None:
        assert set(self.network.fence_begins(self.now_s)) == self.rest(A, B)
        self.fencing = True

    @precondition(lambda self: self.fencing)
    @rule()
    def end_a_fence(self) -> None:
        freed = self.held("quarantined")
        assert self.network.fenced() == len(freed)
        for number in freed:
            del self.states[number]
        self.fencing, self.asked_s = False, None

    @invariant()
    def same_as_the_model(self) -> None:
        assert self.network.free == COUNT - sum(number < COUNT for number in self.states)
        assert self.network.credits == len(self.held("credited"))
        since = [held[3] for held in self.states.values() if held[0] == "quarantined"]
        assert self.network.quarantined_bytes == self.resting_bytes()
        assert self.network.quarantined == sum(number < COUNT for number in self.held("quarantined"))
        assert self.network.oldest_quarantine_s(self.now_s) == (self.now_s - min(since) if since else 0.0)


TestNetworkMachine = NetworkMachine.TestCase


# -- pages that peers write directly

SPEC = MhaSpec(layers=1, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")


class Pages:
    """A pool, and who is told of changes."""

    def __init__(self) -> None:
        self.engine = ScriptedNetwork()
        self.pages = DirectPages(cast("MooncakeEngine", self.engine))
        self.changed = asyncio.Event()
        self.pages.subscribe(self.changed.set)
        manifest = manifest_of(SPEC)
        region = HostRegion.create("kv", manifest.region_bytes)
        self.pool = Pool(0, "kv", manifest, region)
        self.address, self.mapping = region.address, weakref.ref(region.buffer)

    async def until_changed(self) -> None:
        self.engine.may_register.set()
        await asyncio.wait_for(self.changed.wait(), 10)


@pytest.mark.anyio
async def test_a_pool_is_registered_once_when_it_is_first_wanted() -> None:
    harness = Pages()
    harness.pages.drop(harness.pool)  # it is not known yet
    assert [harness.pages.state(harness.pool) for _ in range(3)] == ["pending"] * 3
    await harness.until_changed()
    assert harness.pages.state(harness.pool) == "ready"
    assert harness.engine.registered == {harness.address: manifest_of(SPEC).region_bytes}


@pytest.mark.anyio
async def test_a_pool_that_cannot_be_registered_is_refused_and_not_asked_for_again() -> None:
    harness = Pages()
    harness.engine.error = TransferFailedError("it overlaps")
    harness.pages.state(harness.pool)
    await harness.until_changed()
    assert [harness.pages.state(harness.pool) for _ in range(2)] == ["refused", "refused"]
    harness.pages.drop(harness.pool)
    await harness.pages.close()
    assert harness.engine.registered == {}


@pytest.mark.anyio
@pytest.mark.parametrize("ready", [True, False], ids=["ready", "being registered"])
async def test_memory_stays_mapped_until_the_engine_has_forgotten_it(*, ready: bool) -> None:
    harness = Pages()
    harness.pages.state(harness.pool)
    if ready:
        await harness.until_changed()
    harness.engine.may_register.clear()
    harness.pages.drop(harness.pool)
    harness.pool.close()
    del harness.pool
    await asyncio.sleep(0)
    assert harness.mapping() is not None
    harness.engine.may_register.set()
    await asyncio.wait_for(harness.engine.forgotten.wait(), 10)
    assert harness.engine.registered == {}
    await harness.pages.close()
    assert harness.mapping() is None
