"""Hit rates of a trace's blocks, simulated: each eviction policy and the optimum at several sizes, and a plot of them.

A hit is a block of the longest prefix that is there when its request comes; the rate is hits over all blocks asked
for. What a request has found stays while the rest of it is stored, as a lease keeps it. The daemon's own policies
have no settings; those it is compared with get theirs from the first half of the trace. The comparison counts the
second half alone, which nothing was chosen by, on caches that the first half has filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count, islice, repeat, takewhile
from pathlib import Path

from benchmarks.measure import Effort, Row, Target, Unit, row_of
from benchmarks.optimum import optimal_hits
from benchmarks.other_policies import OTHERS
from benchmarks.traces import TracedRequest, bound, count_blocks, count_unique, read_trace
from kvferry.pools.tiers.policies import POLICY_NAMES, EvictionPolicy, make_policy
from kvferry.pools.tiers.reuse_policy import Place
from kvferry.protocol.config.schema import TiersConfig
from kvferry.protocol.tier_messages import HASH_BYTES

POLICIES = POLICY_NAMES
DEFAULT = TiersConfig().policy
COMPARED_SIZES = 6
"""How many sizes are compared on the second half: the largest ones but that which holds all."""

ALLOWED_POINTS = 0.3
"""By how much the default may miss the best of the others."""

OPTIMUM = "belady"
"""What no policy can better: see ``optimum``."""

PERCENT = Unit("%", "higher")
BOUND_IS = "a cache that never evicts"
SMALLEST_SHARE = 128
"""The smallest cache has one of so many different blocks; each other one is twice the one before."""


def measure(trace: Path, effort: Effort, output: Path) -> list[Row]:
    """Simulate every policy at every size; leave the plot as ``hit_rate_TRACE.svg`` in the folder ``output``."""
    requests = read_trace(trace, effort.pick(1 << 40, 100))
    sizes = cache_sizes(requests)
    best = bound(requests)
    found = {name: [hit_counts(requests, size, make_policy(name)) for size in sizes] for name in POLICIES}
    rates = {name: [sum(hits) / count_blocks(requests) for hits in counts] for name, counts in found.items()}
    rates[OPTIMUM] = [optimal_hits(requests, size) / count_blocks(requests) for size in sizes]
    output.mkdir(parents=True, exist_ok=True)
    draw(
        output / f"hit_rate_{trace.stem}.svg", f"Hit rate of {trace.stem}: {len(requests)} requests", sizes, rates, best
    )
    return [
        row_of(f"trace/hit_rate/{name}/{size}_blocks", PERCENT, [100 * rate], [100 * best], peer_is=BOUND_IS)
        for name, found in rates.items()
        for size, rate in zip(sizes, found, strict=True)
    ] + compare_held_out(requests, {name: dict(zip(sizes, counts, strict=True)) for name, counts in found.items()})


def compare_held_out(requests: Sequence[TracedRequest], own: Mapping[str, Mapping[int, Sequence[int]]]) -> list[Row]:
    """Compare the default with the best of all others, and with the optimum, on the second half of the requests.

    ``own``: what each policy of the daemon hits at each size, for every request.
    """
    middle = len(requests) // 2
    asked = count_blocks(requests[middle:])
    rows = []
    for size in list(own[DEFAULT])[-COMPARED_SIZES - 1 : -1]:
        ours = sum(own[DEFAULT][size][middle:])
        others = {name: sum(counts[size][middle:]) for name, counts in own.items() if name != DEFAULT}
        others |= {name: tuned_hits(requests, size, settings) for name, settings in OTHERS.items()}
        best = max(others, key=others.__getitem__)
        optimum = optimal_hits(requests, size, counted_from=middle)
        for what, hits, peer_is in (
            ("best_other", others[best], f"the best of {len(others)} others: {best}"),
            (OPTIMUM, optimum, "the optimum, which knows what comes"),
        ):
            if ours and hits:
                figures = [100 * ours / asked], [100 * hits / asked]
                target = Target(1 - ALLOWED_POINTS / figures[1][0]) if what == "best_other" else None
                note = ", ".join(f"{name} {100 * hits / asked:.2f}" for name, hits in others.items())
                rows.append(
                    row_of(
                        f"trace/held_out/{size}_blocks/{what}",
                        PERCENT,
                        *figures,
                        peer_is=peer_is,
                        target=target,
                        note=note,
                    )
                )
    return rows


def tuned_hits(
    requests: Sequence[TracedRequest], size: int, settings: Mapping[str, Callable[[], EvictionPolicy[int]]]
) -> int:
    """Return the hits in the second half, with the setting that has most of them in the first."""
    middle = len(requests) // 2
    found = [hit_counts(requests, size, make()) for make in settings.values()]
    return sum(max(found, key=lambda hits: sum(hits[:middle]))[middle:])


def draw(file: Path, title: str, sizes: Sequence[int], rates: Mapping[str, Sequence[float]], best: float) -> None:
    """Draw each policy's hit rates over the cache's size, and what a cache that never evicts has."""
    import matplotlib as mpl  # noqa: PLC0415  only a trace is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for name, found in rates.items():
            axes.plot(sizes, [100 * rate for rate in found], marker="o", label=name)
        axes.axhline(100 * best, linestyle="--", color="grey", label="never evicts")
        axes.set(title=title, xlabel="cache size, blocks", ylabel="hit rate, %", xscale="log")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, axis="y")
        axes.legend()
        figure.savefig(file)


def cache_sizes(requests: Sequence[TracedRequest]) -> list[int]:
    """Return the sizes to try, in blocks, smallest first: no smaller than the longest prompt, the last holds all."""
    unique = count_unique(requests)
    longest = max(len(request.hash_ids) for request in requests)
    shares = takewhile(lambda share: share <= SMALLEST_SHARE, (2**power for power in count()))
    return sorted({max(unique // share, longest) for share in shares})


def hit_rate(requests: Sequence[TracedRequest], capacity_blocks: int, policy: str) -> float:
    """Return the share of all blocks that a cache with this policy has when they are asked for."""
    return sum(hit_counts(requests, capacity_blocks, make_policy(policy))) / count_blocks(requests)


def hit_counts(requests: Sequence[TracedRequest], capacity_blocks: int, policy: EvictionPolicy[int]) -> list[int]:
    """Return how many blocks of each request a cache with this policy has when they are asked for."""
    cache = SimulatedCache(capacity_blocks, policy)
    return [cache.request(one.hash_ids) for one in requests]


def places_of(blocks: Sequence[int]) -> dict[int, Place]:
    """Return the place of each block of a prompt, with hashes as the replay through a daemon has them."""
    hashes = [block.to_bytes(HASH_BYTES, "little") for block in blocks]
    places = map(Place, repeat(None), hashes, [None, *hashes], count())
    return dict(zip(blocks, places, strict=True))


class SimulatedCache:
    """What is where, without any bytes: lookup, load and store of one request after another."""

    def __init__(self, capacity_blocks: int, policy: EvictionPolicy[int]) -> None:
        self._capacity_blocks = capacity_blocks
        self._policy = policy
        self._cached: set[int] = set()

    def request(self, blocks: Sequence[int]) -> int:
        """Ask for a prompt's blocks, then store those that are missing; return how many of the prefix were there.

        The last ones are used first, as in the daemon: the end of a prefix should go before its beginning.
        """
        assert len(blocks) <= self._capacity_blocks, "a prompt that does not fit"
        found = list(takewhile(self._cached.__contains__, blocks))
        for block in reversed(found):
            self._policy.hit(block)
        rest = blocks[len(found) :]
        present = [block for block in rest if block in self._cached]
        missing = [block for block in rest if block not in self._cached]
        for block in reversed(present):
            self._policy.hit(block)
        self._make_room(len(missing), kept=set(blocks))
        places = places_of(blocks)
        for block in reversed(missing):
            self._policy.add(block, places[block])
            self._cached.add(block)
        return len(found)

    def _make_room(self, count: int, kept: AbstractSet[int]) -> None:
        surplus = len(self._cached) + count - self._capacity_blocks
        victims = (one for one in self._policy.victims() if one not in kept)
        for block in islice(victims, max(0, surplus)):
            self._policy.remove(block)
            self._cached.remove(block)
