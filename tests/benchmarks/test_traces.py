"""Traces are read line by line, and their blocks counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.traces import NoTraceError, TracedRequest, bound, count_blocks, count_unique, read_trace


def test_a_trace_is_read_up_to_a_count(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 7, "input_length": 600, "hash_ids": [0, 1]}, {"input_length": 5}, {"input_length": 6}]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
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
    requests = [TracedRequest(0, blocks) for blocks in ((0, 1, 2), (0, 1, 3, 4), (5,), (0, 1))]
    assert (count_blocks(requests), count_unique(requests)) == (10, 6)
    assert bound(requests) == pytest.approx(0.4)
