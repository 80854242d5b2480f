"""Pairs with windows and states: the same tokens as a plain server's, and others where those are wiped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_CONV, TINY_DELTA, TINY_WINDOWS
from tests.kit.servers import AT_ONCE, LENGTHS, prompt
from tests.sglang.servers import (
    TWO_RANKS,
    Expected,
    Pair,
    RoomWatch,
    assert_pages_count,
    assert_tokens,
    new_room,
    running_pair,
)

NEW = 400
"""Tokens of an answer that is under way for long."""


def assert_all_arrives(pair: Pair, watch: RoomWatch, expected: Expected) -> None:
    """Compare the tokens, of prompts in chunks and of several at once, each of which was received."""
    before = watch.arrived()
    assert_tokens(pair, expected)
    assert watch.arrived() - before == len(LENGTHS) + len(AT_ONCE)


def assert_state_counts(pair: Pair, runtime_dir: Path) -> None:
    """Check that zeros in decode's states, while it generates, change the tokens."""
    ids = prompt(129, seed=7)
    as_it_is = pair.generate(ids, new=NEW).tokens
    assert pair.generate(ids, new=NEW).tokens == as_it_is
    room = new_room()
    halves = [pair.half(side, ids, room, new=NEW) for side in ("decode", "prefill")]
    assert halves[1].result().tokens
    with Client.connect(runtime_dir) as other:
        pool = other.attach_pool("decode")
        roles = {one.role for one in pool.manifest.entries if one.component == "mamba"}
        for role in roles:
            pool.tensor("mamba", role)[:] = 0
        pool.close()
    assert halves[0].result().tokens != as_it_is
    assert pair.generate(ids, new=NEW).tokens == as_it_is


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
        environment=TWO_RANKS if prefill else None,
    ) as pair:
        assert_all_arrives(pair, watch, expected)
        assert_state_counts(pair, kept_daemon.runtime_dir)
        watch.assert_all_is_free(pair)
