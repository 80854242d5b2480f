"""Traces, and what simulated caches find of them: each rule writes what it says, no policy beats the optimum.

The optimum is checked against every other choice there is, on traces small enough to try them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, takewhile
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import admission, eviction
from benchmarks.eviction import POLICIES, hit_counts, hit_rate
from benchmarks.measure import Effort
from benchmarks.optimum import optimal_hits
from benchmarks.other_policies import OTHERS
from benchmarks.traces import NoTraceError, TracedRequest, bound, count_blocks, count_unique, read_trace
from kvferry.pools.tiers.policies import make_policy


def written(folder: Path, lines: Sequence[Mapping[str, object]]) -> Path:
    file = folder / "one.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return file


Prompts = tuple[tuple[int, ...], ...]
TREE: Final = {0: None, 1: 0, 2: 1, 3: 0, 4: None, 5: 4}
"""Each block's predecessor."""


def prompt_to(block: int | None) -> tuple[int, ...]:
    return () if block is None else (*prompt_to(TREE[block]), block)


PATHS: Final = st.lists(st.sampled_from(sorted(TREE)).map(prompt_to), min_size=1, max_size=6).map(tuple)


def best_by_trying(prompts: Prompts, capacity: int) -> int:
    """Return the most prefix hits over every choice of what to keep after every request."""

    @cache
    def best(number: int, kept: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        hits = len(list(takewhile(kept.__contains__, prompts[number])))
        known = kept.union(prompts[number])
        size = min(capacity, len(known))
        return hits + max(best(number + 1, frozenset(one)) for one in combinations(sorted(known), size))

    return best(0, frozenset())


def as_requests(prompts: Sequence[tuple[int, ...]]) -> list[TracedRequest]:
    return [TracedRequest(0, blocks) for blocks in prompts]


@given(PATHS, st.integers(1, 5))
def test_no_choice_of_what_to_keep_has_more_prefix_hits(prompts: Prompts, capacity: int) -> None:
    assert optimal_hits(as_requests(prompts), capacity) == best_by_trying(prompts, capacity)


def test_a_trace_is_read_up_to_a_count(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"timestamp": 7, "input_length": 600, "hash_ids": [0, 1]},
        {"input_length": 5},
        {"input_length": 6},
    ]
    file = written(tmp_path, lines)
    assert read_trace(file, 2) == [TracedRequest(600, (0, 1)), TracedRequest(5)]
    assert len(read_trace(file)) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"input_length": 5}\nno\n', "trace.jsonl, line 2: "), ('{"input_length": "5"}', "line 1: "), ("", "is empty")],
)
def test_what_is_no_trace_is_said(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(NoTraceError, match=said):
        read_trace(file)


def test_the_bound_is_the_share_of_blocks_that_came_before() -> None:
    requests = as_requests(((0, 1, 2), (0, 1, 3, 4), (5,), (0, 1)))
    assert (count_blocks(requests), count_unique(requests)) == (10, 6)
    assert bound(requests) == pytest.approx(0.4)


def test_sieve_keeps_what_was_hit_once() -> None:
    requests = requests_of([(0,), (0,), (1,), (2,), (0,)])
    assert hit_counts(requests, 2, OTHERS["sieve"][""]()) == [0, 1, 0, 0, 1]
    assert hit_counts(requests, 2, make_policy("lru")) == [0, 1, 0, 0, 0]


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
    requests, middle = requests_of(chains), len(chains) // 2
    make = data.draw(st.sampled_from(list(OTHERS[policy].values())))
    hits = hit_counts(requests, capacity, make())
    assert sum(hits[middle:]) <= optimal_hits(requests, capacity, counted_from=middle)
    room_for_all = hit_counts(requests, count_unique(requests), make())
    assert sum(room_for_all) == pytest.approx(bound(requests) * count_blocks(requests))


def test_a_trace_leaves_rows_and_a_plot(tmp_path: Path) -> None:
    trace = written(tmp_path, [{"input_length": 1, "hash_ids": [0, n]} for n in (1, 2, 1)])
    rows = eviction.measure(trace, Effort(), tmp_path / "out")
    assert {row.name.split("/")[2] for row in rows if "/hit_rate/" in row.name} == {*POLICIES, "belady"}
    plot = (tmp_path / "out" / "hit_rate_one.svg").read_text()
    for name in (*POLICIES, "belady", "never evicts", "Hit rate of one: 3 requests"):
        assert plot.count(f">{name}</text>") == 1


PROMPTS = ((0, 1), (0, 1), (2, 3), (0, 1), (2, 3))
"""For a host tier of two blocks: each prompt has those of the one before go, but the first, which is used again."""


def replay(rule: admission.Rule, *prompts: tuple[int, ...], disk_blocks: int = 8) -> list[admission.Outcome]:
    tiers = admission.TwoTiers(2, disk_blocks, rule)
    return [tiers.request(blocks) for blocks in prompts]


@pytest.mark.parametrize(
    ("rule", "written", "read"),
    [
        (admission.All(), [2, 0, 2, 0, 0], [0, 0, 0, 2, 2]),
        (admission.Evicted(), [0, 0, 2, 2, 0], [0, 0, 0, 2, 2]),
        (admission.Used(), [0, 2, 0, 0, 0], [0, 0, 0, 2, 0]),
        (admission.EvictedUsed(), [0, 0, 2, 0, 0], [0, 0, 0, 2, 0]),
        (admission.SeenBefore(8), [0, 2, 0, 0, 2], [0, 0, 0, 2, 0]),
        (admission.SeenBefore(1), [0, 2, 0, 0, 0], [0, 0, 0, 2, 0]),
        (admission.First(1), [1, 0, 1, 0, 0], [0, 0, 0, 1, 1]),
        (admission.Rule(), [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_each_rule_writes_what_it_says(rule: admission.Rule, written: list[int], read: list[int]) -> None:
    found = replay(rule, *PROMPTS)
    assert [one.written for one in found] == written
    assert [one.read for one in found] == read
    assert [one.hits for one in found] == [0, 2, *read[2:]]


def test_the_second_half_counts_with_the_setting_that_found_most_in_the_first() -> None:
    prompts = tuple(range(40)), tuple(range(40, 80))
    found = admission.outcomes(as_requests(prompts * 3), 40, 160, "lru", admission.rules_for(160))
    assert found["all"] == found["first"] == admission.Outcome(100, 0, 100)
    assert found["used"] == admission.Outcome(0, 0, 0)


def test_after_a_restart_there_is_what_lies_on_disk() -> None:
    requests = as_requests(((0, 1), (2, 3), (0, 1), (2, 3), (0, 1)))
    assert admission.hits_after_restart(requests, 4, 16, admission.All()) == 100
    assert admission.hits_after_restart(requests, 4, 16, admission.Evicted()) == pytest.approx(100 / 3)


def test_a_trace_leaves_rows_of_each_rule_and_size(tmp_path: Path) -> None:
    trace = written(tmp_path, [{"input_length": 1, "hash_ids": [0, n % 7]} for n in range(1, 50)])
    names = {row.name for row in admission.measure(trace, Effort())}
    assert {
        f"trace/admission/{policy}/2+{disk}_blocks/hits" for policy in ("lru", "reuse") for disk in (8, 32)
    } <= names
    assert "trace/admission/lru/2+8_blocks/after_restart" in names
