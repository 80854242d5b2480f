"""What of the cached blocks should go to disk: rules, simulated on a trace with a host tier and a disk below it.

As in ``eviction``, a hit is a block of the longest prefix that is there when its request comes, in either tier. The
second half of the trace counts, on tiers that the first half has filled and for which it has chosen each rule's
setting. What is found on disk alone is read into the host tier, and stays on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.eviction import ALLOWED_POINTS, PERCENT, places_of
from benchmarks.measure import Effort, Row, Target, Unit, row_of
from benchmarks.traces import TracedRequest, count_blocks, count_unique, read_trace
from kvferry.pools.tiers.policies import POLICY_NAMES, EvictionPolicy, make_policy
from kvferry.pools.tiers.reuse_policy import Place

HOST_SHARES: Final = (32, 8)
"""The host tier has room for one of so many different blocks."""

DISK_TIMES: Final = (4, 16)
"""The disk has room for so many times as many."""

OURS: Final = "all"
"""The daemon's rule."""

SLOWLY: Final = (OURS, "evicted")
"""The rules that are compared with every eviction policy; the others with LRU alone, which is quick to simulate."""

WRITTEN: Final = Unit("%", "lower")
"""Of all blocks asked for."""

AFTER_RESTART: Final = 1000
"""Requests that are counted after a restart."""

MOST_WRITTEN: Final = 1.5
"""How many times as much the daemon's rule may write as another one that finds as much."""


def measure(trace: Path, effort: Effort) -> list[Row]:
    """Compare the daemon's rule with the others at each size, by hits, by blocks written, and after a restart."""
    requests = read_trace(trace, effort.pick(1 << 40, 100))
    longest = max(len(request.hash_ids) for request in requests)
    rows = []
    for share in HOST_SHARES[: effort.pick(2, 1)]:
        host_blocks = max(count_unique(requests) // share, longest)
        for times in DISK_TIMES[: effort.pick(2, 1)]:
            sizes = host_blocks, host_blocks * times
            for policy in POLICY_NAMES:
                rules = rules_for(sizes[1])
                names = rules if policy == "lru" else SLOWLY
                found = outcomes(requests, *sizes, policy, {name: rules[name] for name in names})
                rows += compare_rules(f"trace/admission/{policy}/{sizes[0]}+{sizes[1]}_blocks", found)
            kept, lost = (hits_after_restart(requests, *sizes, rule) for rule in (All(), Evicted()))
            if kept and lost:
                name = f"trace/admission/lru/{sizes[0]}+{sizes[1]}_blocks/after_restart"
                rows.append(row_of(name, PERCENT, [kept], [lost], peer_is="what the rule 'evicted' leaves on disk"))
    return rows


def outcomes(
    requests: Sequence[TracedRequest],
    host_blocks: int,
    disk_blocks: int,
    policy: str,
    rules: Mapping[str, Sequence[Callable[[], Rule]]],
) -> dict[str, Outcome]:
    """Return what each rule comes to in the second half, in % of all blocks asked for there.

    Of its settings each rule has the one that has most hits in the first half.
    """
    middle = len(requests) // 2
    asked = count_blocks(requests[middle:])
    found = {}
    for name, settings in rules.items():
        tried = []
        for make in settings:
            tiers = TwoTiers(host_blocks, disk_blocks, make(), policy)
            each = [tiers.request(one.hash_ids) for one in requests]
            tried.append((sum(one.hits for one in each[:middle]), each[middle:]))
        counted = max(tried, key=itemgetter(0))[1]
        found[name] = Outcome(*(100 * sum(counts) / asked for counts in zip(*counted, strict=True)))
    return found


def hits_after_restart(requests: Sequence[TracedRequest], host_blocks: int, disk_blocks: int, rule: Rule) -> float:
    """Return the hits, in %, of the first requests after the first half, with a host tier that is empty there."""
    middle = len(requests) // 2
    tiers = TwoTiers(host_blocks, disk_blocks, rule)
    for one in requests[:middle]:
        tiers.request(one.hash_ids)
    tiers.restart()
    after = requests[middle : middle + AFTER_RESTART]
    return 100 * sum(tiers.request(one.hash_ids).hits for one in after) / count_blocks(after)


def compare_rules(name: str, found: Mapping[str, Outcome]) -> list[Row]:
    """Return the rows of one size: hits beside the best other rule, and what is written beside the thriftiest."""
    ours = found[OURS]
    others = {rule: one for rule, one in found.items() if rule != OURS}
    best = max(others, key=lambda rule: others[rule].hits)
    as_good = [rule for rule, one in found.items() if one.hits >= ours.hits - ALLOWED_POINTS]
    thrifty = min(as_good, key=lambda rule: found[rule].written)
    note = ", ".join(f"{rule} {one.hits:.2f} ({one.written:.2f} {one.read:.2f})" for rule, one in found.items())
    rows = []
    if ours.hits and (hits := others[best].hits):
        rows.append(
            row_of(
                f"{name}/hits",
                PERCENT,
                [ours.hits],
                [hits],
                peer_is=f"the best other rule: {best}",
                target=Target(1 - ALLOWED_POINTS / hits),
                note=f"hits (written, read): {note}",
            )
        )
    if written := found[thrifty].written:
        rows.append(
            row_of(
                f"{name}/written",
                WRITTEN,
                [ours.written],
                [written],
                peer_is=f"what writes least for as many hits: {thrifty}",
                target=Target(MOST_WRITTEN),
            )
        )
    return rows


class Rule:
    """Says when a block that is not on disk is written there. This one never does."""

    def stored(self, block: int, depth: int) -> bool:  # noqa: ARG002
        """Return whether to write a block that neither tier had; ``depth``: how many are before it in its prompt."""
        return False

    def used(self, block: int) -> bool:  # noqa: ARG002
        """Return whether to write a block that was found in the host tier."""
        return False

    def evicted(self, block: int) -> bool:  # noqa: ARG002
        """Return whether to write a block that leaves the host tier."""
        return False


class All(Rule):
    """Writes each block as soon as it is stored."""

    def stored(self, block: int, depth: int) -> bool:  # noqa: ARG002, D102
        return True


class Evicted(Rule):
    """Writes what the host tier evicts."""

    def evicted(self, block: int) -> bool:  # noqa: ARG002, D102
        return True


class Used(Rule):
    """Writes what is used again while it is in the host tier."""

    def used(self, block: int) -> bool:  # noqa: ARG002, D102
        return True


class EvictedUsed(Rule):
    """Writes what the host tier evicts, if it was used again while it was there."""

    def __init__(self) -> None:
        self._used: set[int] = set()

    def used(self, block: int) -> bool:  # noqa: D102
        self._used.add(block)
        return False

    def evicted(self, block: int) -> bool:  # noqa: D102
        was_used = block in self._used
        self._used.discard(block)
        return was_used


class SeenBefore(Used):
    """Writes at its second sight what is used again, or stored again while its hash is still remembered."""

    def __init__(self, remembered: int) -> None:
        """Remember the hashes of so many blocks: those that were stored last."""
        self._remembered = remembered
        self._seen: OrderedDict[int, None] = OrderedDict()

    def stored(self, block: int, depth: int) -> bool:  # noqa: ARG002, D102
        seen = block in self._seen
        self._seen[block] = None
        self._seen.move_to_end(block)
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return seen


class First(Rule):
    """Writes the first blocks of each prompt as soon as they are stored."""

    def __init__(self, count: int) -> None:
        self._count = count

    def stored(self, block: int, depth: int) -> bool:  # noqa: ARG002, D102
        return depth < self._count


def rules_for(disk_blocks: int) -> dict[str, list[Callable[[], Rule]]]:
    """Return what makes each rule, once for each of its settings."""
    return {
        OURS: [All],
        "evicted": [Evicted],
        "used": [Used],
        "evicted_used": [EvictedUsed],
        "seen_before": [partial(SeenBefore, max(1, disk_blocks * times // 4)) for times in (1, 4, 16)],
        "first": [partial(First, count) for count in (16, 32, 64)],
    }


class Outcome(NamedTuple):
    """Blocks that were found, written to disk and read from it: counts, or shares of those asked for."""

    hits: float
    written: float
    read: float


class TwoTiers:
    """What is where, without any bytes: lookup, load and store of one request after another."""

    def __init__(self, host_blocks: int, disk_blocks: int, rule: Rule, policy: str = "lru") -> None:
        self._rule = rule
        self._new_host = partial(_Tier, host_blocks, policy)
        self._host = self._new_host()
        self._disk = _Tier(disk_blocks, policy)

    def request(self, blocks: Sequence[int]) -> Outcome:
        """Ask for a prompt's blocks, then store those that neither tier has."""
        host, disk, rule = self._host, self._disk, self._rule
        places = places_of(blocks)
        found = list(takewhile(lambda one: one in host.places or one in disk.places, blocks))
        new = [one for one in blocks[len(found) :] if one not in host.places and one not in disk.places]
        to_read = [one for one in found if one not in host.places]
        to_write = [one for one in found if one in host.places and rule.used(one)]
        to_write += [one for one in new if rule.stored(one, places[one].depth)]
        disk.use(found)
        host.use(blocks)
        evicted = host.add({one: places[one] for one in (*to_read, *new)}, kept=places.keys())
        to_demote = {one: place for one, place in evicted.items() if rule.evicted(one)}
        written = {one: place for one, place in to_demote.items() if one not in disk.places}
        written |= {one: places[one] for one in to_write if one not in disk.places}
        disk.add(written)
        return Outcome(len(found), len(written), len(to_read))

    def restart(self) -> None:
        """Lose what is in the host tier."""
        self._host = self._new_host()


class _Tier:
    """The blocks of a tier. The last ones of a prompt are used first, as their end should go before their beginning."""

    def __init__(self, capacity_blocks: int, policy: str) -> None:
        self._capacity_blocks = capacity_blocks
        self._policy: EvictionPolicy[int] = make_policy(policy)
        self.places: dict[int, Place] = {}

    def use(self, blocks: Sequence[int]) -> None:
        """Record a use of those that are here."""
        for block in reversed(blocks):
            if block in self.places:
                self._policy.hit(block)

    def add(self, blocks: dict[int, Place], kept: AbstractSet[int] = frozenset()) -> dict[int, Place]:
        """Add blocks; return those that had to go for them, which are none of ``kept``."""
        assert max(len(blocks), len(kept)) <= self._capacity_blocks, "more than can ever fit"
        surplus = max(0, len(self.places) + len(blocks) - self._capacity_blocks)
        evicted = {}
        for block in islice((one for one in self._policy.victims() if one not in kept), surplus):
            self._policy.remove(block)
            evicted[block] = self.places.pop(block)
        for block in reversed(blocks):
            self._policy.add(block, blocks[block])
        self.places.update(blocks)
        return evicted
