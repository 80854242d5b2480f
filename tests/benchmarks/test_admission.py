"""The simulated tiers: what each rule writes and when, and what is found again for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.admission import (
    All,
    Evicted,
    EvictedUsed,
    First,
    Outcome,
    Rule,
    SeenBefore,
    TwoTiers,
    Used,
    hits_after_restart,
    measure,
    outcomes,
    rules_for,
)
from benchmarks.measure import Effort
from benchmarks.traces import TracedRequest

PROMPTS = ((0, 1), (0, 1), (2, 3), (0, 1), (2, 3))
"""For a host tier of two blocks: each prompt has those of the one before go, but the first, which is used again."""


def replay(rule: Rule, *prompts: tuple[int, ...], disk_blocks: int = 8) -> list[Outcome]:
    tiers = TwoTiers(2, disk_blocks, rule)
    return [tiers.request(blocks) for blocks in prompts]


@pytest.mark.parametrize(
    ("rule", "written", "read"),
    [
        (All(), [2, 0, 2, 0, 0], [0, 0, 0, 2, 2]),
        (Evicted(), [0, 0, 2, 2, 0], [0, 0, 0, 2, 2]),
        (Used(), [0, 2, 0, 0, 0], [0, 0, 0, 2, 0]),
        (EvictedUsed(), [0, 0, 2, 0, 0], [0, 0, 0, 2, 0]),
        (SeenBefore(8), [0, 2, 0, 0, 2], [0, 0, 0, 2, 0]),
        (SeenBefore(1), [0, 2, 0, 0, 0], [0, 0, 0, 2, 0]),
        (First(1), [1, 0, 1, 0, 0], [0, 0, 0, 1, 1]),
        (Rule(), [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_each_rule_writes_what_it_says(rule: Rule, written: list[int], read: list[int]) -> None:
    found = replay(rule, *PROMPTS)
    assert [one.written for one in found] == written
    assert [one.read for one in found] == read
    assert [one.hits for one in found] == [0, 2, *read[2:]]


def test_a_full_disk_loses_what_was_used_longest_ago_and_what_is_in_the_host_tier_stays_there() -> None:
    found = replay(All(), (0, 1), (0, 1), (2,), (3,), (2,), (0,), disk_blocks=2)
    assert [one.hits for one in found] == [0, 2, 0, 0, 1, 0]
    assert [one.written for one in found] == [2, 0, 1, 1, 0, 1]
    assert [one.read for one in found] == [0, 0, 0, 0, 0, 0]


def test_the_second_half_counts_with_the_setting_that_found_most_in_the_first() -> None:
    prompts = tuple(range(40)), tuple(range(40, 80))
    found = outcomes([TracedRequest(0, blocks) for blocks in prompts * 3], 40, 160, "lru", rules_for(160))
    assert found["all"] == found["first"] == Outcome(100, 0, 100)
    assert found["used"] == Outcome(0, 0, 0)


def test_after_a_restart_there_is_what_lies_on_disk() -> None:
    requests = [TracedRequest(0, blocks) for blocks in ((0, 1), (2, 3), (0, 1), (2, 3), (0, 1))]
    assert hits_after_restart(requests, 4, 16, All()) == 100
    assert hits_after_restart(requests, 4, 16, Evicted()) == pytest.approx(100 / 3)


def test_a_trace_leaves_rows_of_each_size(tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text("".join(json.dumps({"input_length": 1, "hash_ids": [0, n % 7]}) + "\n" for n in range(1, 50)))
    names = {row.name for row in measure(trace, Effort())}
    assert {
        f"trace/admission/{policy}/2+{disk}_blocks/hits" for policy in ("lru", "reuse") for disk in (8, 32)
    } <= names
    assert "trace/admission/lru/2+8_blocks/after_restart" in names
