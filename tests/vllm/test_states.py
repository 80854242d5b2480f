"""Models with states beside attention, Mamba's and gated delta nets', from prefill to decode.

A state is that after the prompt's last token but one; decode computes the last one with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_DELTA, TINY_GRANITE
from tests.vllm.in_process import (
    CHUNK,
    NEVER,
    Asked,
    EngineFailedError,
    Pair,
    Plain,
    blocks_of,
    by_hand,
    engine,
    preempted,
    prompt,
    received,
    running_pair,
    settings,
    stepped,
    stepped_until,
    zeroed,
)
from tests.vllm.servers import BLOCK, REMOTE_DECODE

LENGTHS: Final = (2, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 300)
PROMPTS: Final = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
GROUPS: Final = {TINY_GRANITE: 2, TINY_DELTA: 4}


@pytest.fixture(scope="module", params=[TINY_GRANITE, pytest.param(TINY_DELTA, marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest) -> str:
    """Return a model with states."""
    return str(request.param)


@pytest.fixture(scope="module")
def shared(model: str, kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return two engines, neither of which has a prefix cache."""
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(folder, kept_daemon.runtime_dir, prefill=NEVER, decode=NEVER, model=model) as one:
        yield one


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Return them; after each test nothing of it is left at either side, nor in the daemon."""
    yield shared
    shared.assert_nothing_left()


def assert_tokens(found: list[list[int]], plain: Plain, model: str, *prompts: tuple[int, ...]) -> None:
    """Compare tokens with those of a plain engine.

    In bfloat16 they may differ, as vLLM's own connector's do: a step of one token rounds in another way than a prompt.
    """
    if model == TINY_DELTA:
        assert [len(one) for one in found] == [len(one) for one in plain.tokens(*prompts, model=model)]
    else:
        assert found == plain.tokens(*prompts, model=model)


def test_prefill_first(pair: Pair, plain: Plain, model: str) -> None:
    assert_tokens(pair.handed_on(*PROMPTS), plain, model, *PROMPTS)


def test_decode_has_the_very_states_and_rows(pair: Pair, model: str) -> None:
    """Before it computes: each block that it has of a group is one of prefill's."""
    one = prompt(5 * CHUNK + 3, seed=20)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked(one, params=params))
        pair.decode.call(received, name)
        blocks = pair.decode.call(blocks_of, name)
        there = pages_of(pair.client, "prefill", model)
        here = pages_of(pair.other, "decode", model)
        assert len(there) == len(here) == len(blocks) == GROUPS[model]
        for ids, ours, theirs in zip(blocks, here, there, strict=True):
            found = [ours[block] for block in ids if block]
            assert found
            assert all(any(one) for one in found)
            assert set(found) <= set(theirs)
        pair.decode.wait(name)


def pages_of(client: Client, kind: str, model: str) -> list[list[bytes]]:
    """Return what an engine's pool has in each page, of each group."""
    pools = client.status().pools
    (name,) = [one.pool for one in pools if kind in one.pool and one.model and one.model.name.endswith(model)]
    with contextlib.closing(client.attach_pool(name)) as pool:
        arrays = [pool.array(one.name, "k") for one in pool.manifest.components]
        return [[one.tobytes() for one in array.swapaxes(0, 1)] for array in arrays]


def test_decode_first_while_prefill_computes(pair: Pair, plain: Plain, model: str) -> None:
    one = prompt(5 * CHUNK + 3, seed=10)
    with pair.counts("transfers.receive.ok", 1):
        names, [to_prefill] = pair.awaited(one)
        with by_hand(pair.prefill):
            other = pair.prefill.add(Asked(one, 1, to_prefill))
            pair.prefill.call(stepped, 2)
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(*names)
    assert_tokens([answer.tokens], plain, model, one)


def test_zeroed_blocks_change_the_tokens(pair: Pair, model: str) -> None:
    """The control: decode's tokens depend on what has travelled of each group."""
    for group in range(GROUPS[model]):
        one = prompt(300, seed=30 + group)
        whole = pair.handed_on(one)
        (params,) = pair.prefilled(one)
        with by_hand(pair.decode):
            name = pair.decode.add(Asked(one, params=params))
            pair.decode.call(received, name)
            pair.decode.call(zeroed, name, group)
            (answer,) = pair.decode.wait(name)
        assert [answer.tokens] != whole, group


def test_prefill_and_decode_are_preempted(pair: Pair, plain: Plain, model: str) -> None:
    one = prompt(5 * CHUNK, seed=50)
    with by_hand(pair.prefill):
        name = pair.prefill.add(Asked(one, 1, dict(REMOTE_DECODE)))
        pair.prefill.call(stepped, 2)
        assert pair.prefill.call(preempted) == 1
        (answer,) = pair.prefill.wait(name)
    with by_hand(pair.decode), pair.counts("transfers.receive.ok", 1):
        name = pair.decode.add(Asked(one, params=answer.params))
        pair.decode.call(stepped_until, "RUNNING", name)
        assert pair.decode.call(preempted) == 1
        (answer,) = pair.decode.wait(name)
    assert_tokens([answer.tokens], plain, model, one)


def test_prompts_that_differ_are_computed(pair: Pair, plain: Plain, model: str) -> None:
    (params,) = pair.prefilled(prompt(200, seed=40))
    other = prompt(200, seed=41)
    (answer,) = pair.decode.ask(Asked(other, params=params))
    assert_tokens([answer.tokens], plain, model, other)
    assert any("receive failed" in line for line in pair.decode.log())


@pytest.mark.long
def test_states_with_vllms_prefix_cache_are_refused_by_name(kept_daemon: Daemon, tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailedError, match="say --no-enable-prefix-caching"),
        engine(tmp_path, settings(kept_daemon, "cached"), model=TINY_GRANITE, enable_prefix_caching=True),
    ):
        pass
