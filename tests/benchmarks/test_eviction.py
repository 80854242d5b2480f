"""The simulated cache: hits are those of a prefix, what a request has found stays, and no policy beats the optimum."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.eviction import POLICIES, SimulatedCache, hit_counts, hit_rate, measure
from benchmarks.measure import Effort
from benchmarks.optimum import optimal_hits
from benchmarks.other_policies import OTHERS
from benchmarks.traces import TracedRequest, bound, count_blocks, count_unique
from kvferry.pools.tiers.policies import make_policy


def test_sieve_keeps_what_was_hit_once() -> None:
    requests = requests_of([(0,), (0,), (1,), (2,), (0,)])
    assert hit_counts(requests, 2, OTHERS["sieve"][""]()) == [0, 1, 0, 0, 1]
    assert hit_counts(requests, 2, make_policy("lru")) == [0, 1, 0, 0, 0]


def test_a_block_whose_predecessor_is_gone_is_no_hit() -> None:
    cache = SimulatedCache(2, make_policy("lru"))
    assert [cache.request(blocks) for blocks in ((0, 1), (1,), (2,), (0, 1))] == [0, 1, 0, 0]


CHAIN: Final = st.lists(st.integers(0, 2), min_size=1, max_size=4)
"""A way down a tree; a block is where one has come."""


def requests_of(chains: Sequence[Sequence[int]]) -> list[TracedRequest]:
    numbers: dict[tuple[int, ...], int] = {}
    prompts = [[tuple(chain[: end + 1]) for end in range(len(chain))] for chain in chains]
    return [TracedRequest(0, tuple(numbers.setdefault(way, len(numbers)) for way in one)) for one in prompts]


@given(st.lists(CHAIN, min_size=1, max_size=40), st.integers(4, 20), st.sampled_from(POLICIES))
def test_no_policy_beats_the_optimum_and_room_for_all_gives_the_bound(
    chains: Sequence[Sequence[int]], capacity: int, policy: str
) -> None:
    requests = requests_of(chains)
    assert hit_rate(requests, capacity, policy) * count_blocks(requests) <= optimal_hits(requests, capacity) + 1e-9
    assert hit_rate(requests, count_unique(requests), policy) == pytest.approx(bound(requests))


@given(st.lists(CHAIN, min_size=1, max_size=40), st.integers(4, 20), st.sampled_from(sorted(OTHERS)), st.data())
def test_none_of_the_other_policies_does_either(
    chains: Sequence[Sequence[int]], capacity: int, policy: str, data: st.DataObject
) -> None:
    requests = requests_of(chains)
    make = data.draw(st.sampled_from(list(OTHERS[policy].values())))
    middle = len(requests) // 2
    hits = hit_counts(requests, capacity, make())
    assert sum(hits[middle:]) <= optimal_hits(requests, capacity, counted_from=middle)
    assert sum(hit_counts(requests, count_unique(requests), make())) == pytest.approx(
        bound(requests) * count_blocks(requests)
    )


def test_a_trace_leaves_rows_and_a_plot(tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text("".join(json.dumps({"input_length": 1, "hash_ids": [0, n]}) + "\n" for n in (1, 2, 1)))
    rows = measure(trace, Effort(), tmp_path / "out")
    assert {row.name.split("/")[2] for row in rows if "/hit_rate/" in row.name} == {*POLICIES, "belady"}
    plot = (tmp_path / "out" / "hit_rate_one.svg").read_text()
    for name in (*POLICIES, "belady", "never evicts", "Hit rate of one: 3 requests"):
        assert plot.count(f">{name}</text>") == 1
