"""Landing slots: no slot is granted while a write may still land in it, and none is lost."""

from __future__ import annotations

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

from kvferry.daemon.landing import FenceBounds, LandingSlots, Slot
from kvferry.protocol.ids import BootId

BASE, SLOT_BYTES, COUNT = 1 << 20, 4096, 5
A, B = BootId("a" * 32), BootId("b" * 32)
PAGES_BYTES = 3000
BOUNDS = FenceBounds(quarantined_bytes=2 * SLOT_BYTES, quarantined_s=10.0, drain_timeout_s=3.0)


def slots(count: int = COUNT) -> LandingSlots:
    return LandingSlots(BASE, SLOT_BYTES, count, BOUNDS)


def taken(landing: LandingSlots, peer: BootId, grant_id: int) -> Slot:
    slot = landing.take(peer, grant_id)
    assert slot is not None
    return slot


def resting(count: int, at_s: float) -> LandingSlots:
    """Return slots of which so many rest since ``at_s``."""
    landing = slots()
    for grant_id in range(count):
        assert landing.quarantine(taken(landing, A, grant_id).number, A, grant_id, at_s)
    return landing


def test_slots_tile_the_region() -> None:
    landing = slots()
    granted = [taken(landing, A, grant_id) for grant_id in range(COUNT)]
    assert [slot.number for slot in granted] == list(range(COUNT))
    assert [slot.address for slot in granted] == [BASE + number * SLOT_BYTES for number in range(COUNT)]
    assert {slot.size_bytes for slot in granted} == {SLOT_BYTES}
    assert landing.take(A, COUNT) is None


def test_a_slot_in_quarantine_is_not_granted_until_the_writes_are_reported_terminal() -> None:
    landing = slots(count=1)
    slot = taken(landing, A, 1)
    assert landing.quarantine(slot.number, A, 1, 5.0)
    assert landing.take(B, 2) is None
    assert (landing.quarantined_bytes, landing.oldest_quarantine_s(7.5)) == (SLOT_BYTES, 2.5)
    assert landing.give_back(slot.number, A, 1)
    assert (landing.quarantined_bytes, landing.oldest_quarantine_s(7.5)) == (0, 0.0)
    assert taken(landing, B, 2) == slot


@pytest.mark.parametrize(("peer", "grant_id"), [(A, 2), (B, 1)])
def test_a_report_of_another_grant_changes_nothing(peer: BootId, grant_id: int) -> None:
    landing = slots()
    slot = taken(landing, A, 1)
    assert not landing.give_back(slot.number, peer, grant_id)
    assert not landing.quarantine(slot.number, peer, grant_id, 0.0)
    assert landing.granted == 1
    landing.quarantine(slot.number, A, 1, 0.0)
    assert not landing.give_back(slot.number, peer, grant_id)
    assert landing.quarantined_bytes == SLOT_BYTES


def test_a_lost_peer_leaves_its_slots_in_quarantine_and_no_others() -> None:
    landing = slots()
    mine = [taken(landing, A, grant_id) for grant_id in range(2)]
    taken(landing, B, 0)
    assert landing.quarantine_peer(A, 1.0) == [slot.number for slot in mine]
    assert (landing.granted, landing.quarantined_bytes) == (1, 2 * SLOT_BYTES)
    assert landing.quarantine_peer(A, 2.0) == []


def test_no_fence_within_the_bounds() -> None:
    assert not resting(2, at_s=0.0).fence_due(10.0)
    assert not slots().fence_due(1e9)


@pytest.mark.parametrize(("count", "now_s"), [(3, 0.0), (1, 10.1)])
def test_too_many_bytes_or_too_great_an_age_ask_for_a_fence(count: int, now_s: float) -> None:
    assert resting(count, at_s=0.0).fence_due(now_s)


def test_a_fence_waits_for_live_grants_and_grants_no_more_meanwhile() -> None:
    landing = slots()
    live = taken(landing, B, 9)
    for grant_id in range(3):
        landing.quarantine(taken(landing, A, grant_id).number, A, grant_id, 0.0)
    assert not landing.fence_due(1.0)
    assert landing.draining
    assert landing.take(B, 10) is None
    assert not landing.fence_due(3.9)
    assert landing.give_back(live.number, B, 9)
    assert landing.fence_due(3.9)


def test_after_the_drain_timeout_a_fence_waits_no_longer() -> None:
    landing = slots()
    live = taken(landing, B, 9)
    for grant_id in range(3):
        landing.quarantine(taken(landing, A, grant_id).number, A, grant_id, 0.0)
    assert not landing.fence_due(1.0)
    assert landing.fence_due(4.0)
    assert landing.fence_begins(4.0) == [live.number]
    assert not landing.give_back(live.number, B, 10)
    assert landing.fenced() == 4
    assert (landing.free, landing.granted, landing.draining) == (COUNT, 0, False)


def test_draining_ends_when_quarantine_falls_below_its_bounds() -> None:
    landing = slots()
    taken(landing, B, 9)
    numbers = []
    for grant_id in range(3):
        numbers.append(taken(landing, A, grant_id).number)
        landing.quarantine(numbers[-1], A, grant_id, 0.0)
    assert not landing.fence_due(1.0)
    assert landing.give_back(numbers[1], A, 1)
    assert not landing.fence_due(2.0)
    assert landing.take(B, 10) is not None


def test_a_report_from_before_a_fence_does_not_end_a_grant_from_after_it() -> None:
    landing = slots(count=1)
    slot = taken(landing, A, 1)
    landing.fence_begins(0.0)
    landing.fenced()
    assert taken(landing, A, 2) == slot
    assert not landing.give_back(slot.number, A, 1)
    assert landing.granted == 1


def test_a_fence_that_did_not_begin_frees_nothing() -> None:
    with pytest.raises(AssertionError, match="did not begin"):
        resting(3, at_s=0.0).fenced()


def test_during_a_fence_no_other_is_due_and_nothing_is_granted() -> None:
    landing = resting(3, at_s=0.0)
    landing.fence_begins(1.0)
    assert not landing.fence_due(100.0)
    assert landing.draining
    assert landing.take(B, 9) is None


def test_it_shows_its_state() -> None:
    landing = resting(3, at_s=0.0)
    taken(landing, B, 9)
    landing.fence_due(0.0)
    assert repr(landing) == "<LandingSlots free=1 granted=1 quarantined=3 slot_bytes=4096 draining>"


def test_the_integrity_check_finds_a_lost_slot() -> None:
    landing = slots()
    landing.check()
    landing.count += 1  # type: ignore[misc]  # the fault: a slot that is in no state
    with pytest.raises(AssertionError, match="lost or in two states"):
        landing.check()


class LandingMachine(RuleBasedStateMachine):
    """Against a plain list of what each slot holds; writes land only where the model says they may."""

    grants: Bundle[tuple[int, BootId, int]] = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.landing = slots()
        self.now_s = 0.0
        self.states: dict[int, tuple[str, BootId, int, float]] = {}
        self.asked_s: float | None = None
        self.fencing = False
        self.next_grant = 0

    def held(self, state: str) -> list[int]:
        """Return the numbers of the slots in a state."""
        return [number for number, held in self.states.items() if held[0] == state]

    @property
    def may_grant(self) -> bool:
        """Return whether no fence waits or is under way."""
        return self.asked_s is None and not self.fencing

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        """Move the clock."""
        self.now_s += seconds

    @rule(target=grants, peer=st.sampled_from([A, B]))
    def take(self, peer: BootId) -> MultipleResults[tuple[int, BootId, int]] | tuple[int, BootId, int]:
        """Take a slot where the model says that one may be taken."""
        self.next_grant += 1
        slot = self.landing.take(peer, self.next_grant)
        slots_held = sum(number < COUNT for number in self.states)
        assert (slot is not None) == (slots_held < COUNT and self.may_grant)
        if slot is None:
            return multiple()
        assert slot.number not in self.states, "a slot was granted in which a write may land"
        assert slot.address == BASE + slot.number * SLOT_BYTES
        self.states[slot.number] = ("granted", peer, self.next_grant, 0.0)
        return (slot.number, peer, self.next_grant)

    @rule(target=grants, peer=st.sampled_from([A, B]))
    def take_pages(self, peer: BootId) -> MultipleResults[tuple[int, BootId, int]] | tuple[int, BootId, int]:
        """Take pages, of which there are always some."""
        self.next_grant += 1
        number = self.landing.take_pages(peer, self.next_grant, PAGES_BYTES)
        assert (number is not None) == self.may_grant
        if number is None:
            return multiple()
        assert number >= COUNT
        assert number not in self.states
        self.states[number] = ("granted", peer, self.next_grant, 0.0)
        return (number, peer, self.next_grant)

    @rule(grant=grants)
    def give_back(self, grant: tuple[int, BootId, int]) -> None:
        """Report terminal writes, perhaps late."""
        held = self.states.get(grant[0])
        its = held is not None and held[1:3] == grant[1:]
        assert self.landing.give_back(*grant) == its
        if its:
            del self.states[grant[0]]

    @rule(grant=consumes(grants), again=st.booleans())
    def quarantine(self, grant: tuple[int, BootId, int], *, again: bool) -> None:
        """End a grant without knowing how its writes ended."""
        held = self.states.get(grant[0])
        its = held is not None and held[:3] == ("granted", *grant[1:])
        assert self.landing.quarantine(*grant, self.now_s) == its
        if its:
            self.states[grant[0]] = ("resting", grant[1], grant[2], self.now_s)
        assert not (again and self.landing.quarantine(*grant, self.now_s))

    @rule(peer=st.sampled_from([A, B]))
    def lose_a_peer(self, peer: BootId) -> None:
        """End all grants of a peer."""
        assert set(self.landing.quarantine_peer(peer, self.now_s)) == self.rest(peer)

    def rest(self, *peers: BootId) -> set[int]:
        """Let what these peers have been granted rest; return the slots."""
        ended = set()
        for number, held in self.states.items():
            if held[0] == "granted" and held[1] in peers:
                self.states[number] = ("resting", held[1], held[2], self.now_s)
                ended.add(number)
        return ended

    @rule()
    def ask_for_a_fence(self) -> None:
        """Ask as the daemon does now and then, also during a fence."""
        if self.fencing:
            assert not self.landing.fence_due(self.now_s)
            return
        since = [held[3] for held in self.states.values() if held[0] == "resting"]
        too_much = self.resting_bytes() > 2 * SLOT_BYTES or any(self.now_s - one > 10.0 for one in since)
        if not too_much:
            self.asked_s = None
        elif self.asked_s is None:
            self.asked_s = self.now_s
        due = self.asked_s is not None and (not self.held("granted") or self.now_s - self.asked_s >= 3.0)
        assert self.landing.fence_due(self.now_s) == due

    def resting_bytes(self) -> int:
        """Return how much rests."""
        return sum(SLOT_BYTES if number < COUNT else PAGES_BYTES for number in self.held("resting"))

    @precondition(lambda self: not self.fencing)
    @rule()
    def begin_a_fence(self) -> None:
        """End what is granted."""
        assert set(self.landing.fence_begins(self.now_s)) == self.rest(A, B)
        self.fencing = True

    @precondition(lambda self: self.fencing)
    @rule()
    def end_a_fence(self) -> None:
        """Free what rests."""
        freed = self.held("resting")
        assert self.landing.fenced() == len(freed)
        for number in freed:
            del self.states[number]
        self.fencing, self.asked_s = False, None

    @invariant()
    def same_as_the_model(self) -> None:
        """Compare all that can be seen."""
        self.landing.check()
        assert self.landing.free == COUNT - sum(number < COUNT for number in self.states)
        assert self.landing.granted == len(self.held("granted"))
        since = [held[3] for held in self.states.values() if held[0] == "resting"]
        assert self.landing.quarantined_bytes == self.resting_bytes()
        assert self.landing.quarantined == sum(number < COUNT for number in self.held("resting"))
        assert self.landing.oldest_quarantine_s(self.now_s) == (self.now_s - min(since) if since else 0.0)


TestLandingMachine = LandingMachine.TestCase
