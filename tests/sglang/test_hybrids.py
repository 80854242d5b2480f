"""Pairs with windows and states: the same tokens as a plain server's, and others where those are wiped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_CONV, TINY_DELTA, TINY_WINDOWS
from tests.kit.servers import AT_ONCE, LENGTHS
from tests.sglang.servers import (
    RANKS,
    Expected,
    Pair,
    RoomWatch,
    assert_decodes_memory_counts,
    assert_pages_count,
    assert_tokens,
    running_pair,
)


def assert_all_arrives(pair: Pair, watch: RoomWatch, expected: Expected) -> None:
    """Compare the tokens, of prompts in chunks and of several at once, each of which was received."""
    before = watch.arrived()
    assert_tokens(pair, expected)
    assert watch.arrived() - before == len(LENGTHS) + len(AT_ONCE)


def test_windows(answers: Callable[[str], Expected], kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path) -> None:
    expected = answers(TINY_WINDOWS)
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_WINDOWS, options=["--page-size", "16"]) as pair:
        assert_all_arrives(pair, watch, expected)
        assert_pages_count(pair, kept_daemon.runtime_dir, expected, component="swa")
        watch.assert_all_is_free(pair)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "prefill"), [(TINY_CONV, ()), (TINY_DELTA, ("--tp", "2"))], ids=["conv", "delta net, TP 2 to 1"]
)
def test_states(
    model: str,
    prefill: Sequence[str],
    answers: Callable[[str], Expected],
    kept_daemon: Daemon,
    watch: RoomWatch,
    tmp_path: Path,
) -> None:
    expected = answers(model)
    with running_pair(
        tmp_path,
        kept_daemon.runtime_dir,
        model=model,
        options=["--page-size", "16"],
        prefill_options=prefill,
        environment=RANKS if prefill else None,
    ) as pair:
        assert_all_arrives(pair, watch, expected)
        assert_decodes_memory_counts(pair, kept_daemon.runtime_dir, "main", "mamba")
        watch.assert_all_is_free(pair)
