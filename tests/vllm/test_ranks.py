"""Prompts between engines of several ranks, of as many at both sides or not: the same tokens as one rank's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_GEMMA, TINY_GQA, TINY_MHA
from tests.vllm.in_process import (
    CHUNK,
    HOST_TIER,
    NEVER,
    Asked,
    Plain,
    aborted,
    both_given,
    by_hand,
    engine,
    prompt,
    running_pair,
)
from tests.vllm.servers import BLOCK

pytestmark = pytest.mark.long

PROMPTS: Final = [prompt(length, seed) for seed, length in enumerate((1, BLOCK, BLOCK + 1, 300))]
"""Of one token, of a block, and of no multiple of any block size."""
HALVED: Final = [prompt(5 * CHUNK, seed) for seed in (10, 11, 12)]
WIPED: Final = [prompt(200, seed) for seed in range(20, 24)]


def ranks(count: int) -> dict[str, Any]:
    """Return the options of an engine of so many ranks."""
    return {"tensor_parallel_size": count, "distributed_executor_backend": "mp"} if count > 1 else {}


def test_two_ranks(kept_daemon: Daemon, tmp_path: Path) -> None:
    """Prompts arrive whichever side comes first, and after an abort; the sums of ranks are others than one rank's."""
    told = {"model": TINY_GQA, **ranks(2)}
    with engine(tmp_path, enable_prefix_caching=False, **told) as alone:
        want = [one.tokens for one in alone.ask(*(Asked(one) for one in (*PROMPTS, *HALVED[:2])))]
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, prefill=NEVER, decode=NEVER, model=TINY_GQA, **ranks(2)
    ) as pair:
        tokens = pair.handed_on(*PROMPTS)
        for one, is_aborted in zip(HALVED[:2], (False, True), strict=True):
            to_prefill, to_decode = both_given()
            name = pair.decode.add(Asked(one, params=to_decode))
            assert soon(lambda: pair.receives() == 2)
            with by_hand(pair.prefill), pair.counts("transfers.receive.ok", 0 if is_aborted else 2):
                other = pair.half_prefilled(one, to_prefill)
                if is_aborted:
                    pair.prefill.call(aborted, other)
                    pair.prefill.drain()
                else:
                    pair.prefill.wait(other)
                tokens += [answer.tokens for answer in pair.decode.wait(name)]
        assert tokens == want
        pair.assert_abort_is_heard(HALVED[2])
        assert sum(one.pool.endswith(("-tp0", "-tp1")) for one in pair.client.status().pools) == 4


class Ranks(NamedTuple):
    """How many ranks both sides have, of which model, and how many daemons.

    ``wiped``: groups of prefill's ranks that hold the same heads.
    """

    model: str
    prefill: int
    decode: int
    wiped: tuple[tuple[int, ...], ...]
    daemons: int = 1


UNEQUAL: Final = {
    "2 to 1": Ranks(TINY_GQA, 2, 1, ((0,), (1,))),
    "1 to 2": Ranks(TINY_GQA, 1, 2, ((0,),)),
    "more ranks than heads, 4 to 1": Ranks(TINY_MHA, 4, 1, ((0, 1), (2, 3))),
    "more ranks than heads, 1 to 4": Ranks(TINY_MHA, 1, 4, ((0,),)),
    "2 to 1, two daemons": Ranks(TINY_GQA, 2, 1, ((0,), (1,)), 2),
    "1 to 2, two daemons": Ranks(TINY_GQA, 1, 2, ((0,),), 2),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_ranks(plain: Plain, tmp_path: Path, name: str) -> None:
    """Each rank of decode gets its heads, whose bytes its tokens depend on; an abort is heard by all ranks."""
    one = UNEQUAL[name]
    sides: dict[str, Any] = {"prefill_options": ranks(one.prefill), "decode_options": ranks(one.decode)}
    with contextlib.ExitStack() as stack:
        dirs = [stack.enter_context(kit.daemon(HOST_TIER)).runtime_dir for _ in range(one.daemons)]
        dirs = [dirs[0], dirs[-1]]
        pair = stack.enter_context(running_pair(tmp_path, dirs, model=one.model, prefill=NEVER, decode=NEVER, **sides))
        assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS, model=one.model)
        assert pair.handed_on((*PROMPTS[-1], 5)) == plain.tokens((*PROMPTS[-1], 5), model=one.model)
        pair.assert_nothing_left()
        pair.assert_abort_is_heard(HALVED[0])
        for group, other in zip(one.wiped, WIPED, strict=False):
            (params,) = pair.prefilled(other)
            wipe(pair.client, params["remote_pool"], one.prefill, group)
            with pair.counts("transfers.receive.ok", one.decode):
                (answer,) = pair.decode.ask(Asked(other, params=params))
            assert [answer.tokens] != plain.tokens(other, model=one.model)
        pair.assert_nothing_left()


class Sizes(NamedTuple):
    """Tokens of a block of both sides; ``apart``: on two daemons, two ranks to one."""

    prefill: int
    decode: int
    apart: bool = False


SIZES: Final = {
    "32 to 64": Sizes(32, 64),
    "64 to 32": Sizes(64, 32),
    "96 to 64, two ranks to one, two daemons": Sizes(96, 64, apart=True),
}


@pytest.mark.parametrize("name", SIZES)
def test_block_sizes_that_differ(plain: Plain, tmp_path: Path, name: str) -> None:
    """Prompts that are no multiple of either, in chunks and with a prefix at decode."""
    prefill, decode, apart = SIZES[name]
    sides: dict[str, Any] = {
        "prefill_options": {"block_size": prefill, **ranks(2 if apart else 1)},
        "decode_options": {"block_size": decode},
    }
    with contextlib.ExitStack() as stack:
        dirs = [stack.enter_context(kit.daemon(HOST_TIER)).runtime_dir for _ in range(1 + apart)]
        dirs = [dirs[0], dirs[-1]]
        pair = stack.enter_context(running_pair(tmp_path, dirs, model=TINY_GQA, prefill=NEVER, decode=NEVER, **sides))
        longer = (*PROMPTS[-1], *prompt(70, seed=30))
        assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS, model=TINY_GQA)
        assert pair.handed_on(longer) == plain.tokens(longer, model=TINY_GQA)
        (params,) = pair.prefilled(WIPED[0])
        wipe(pair.client, params["remote_pool"], params["remote_tp_size"], (0,))
        with pair.counts("transfers.receive.ok", 1):
            (answer,) = pair.decode.ask(Asked(WIPED[0], params=params))
        assert [answer.tokens] != plain.tokens(WIPED[0], model=TINY_GQA)
        pair.assert_nothing_left()


def test_block_sizes_that_differ_beside_windows(plain: Plain, tmp_path: Path) -> None:
    """From larger blocks: those of a window's beginning have what decode's smaller ones have, and more."""
    sides: dict[str, Any] = {"prefill_options": {"block_size": 2 * BLOCK}, "decode_options": {"block_size": BLOCK}}
    prompts = [prompt(length, seed=length) for length in range(300, 300 + 4 * BLOCK, BLOCK // 2)]
    with (
        kit.daemon(HOST_TIER) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, model=TINY_GEMMA, prefill=NEVER, decode=NEVER, **sides) as pair,
    ):
        assert pair.handed_on(*prompts) == plain.tokens(*prompts, model=TINY_GEMMA)
        (params,) = pair.prefilled(WIPED[0])
        wipe(pair.client, params["remote_pool"], 1, (0,))
        (answer,) = pair.decode.ask(Asked(WIPED[0], params=params))
        assert [answer.tokens] != plain.tokens(WIPED[0], model=TINY_GEMMA)
        pair.assert_nothing_left()


def test_a_window_that_begins_inside_of_decodes_larger_block_is_computed_again(plain: Plain, tmp_path: Path) -> None:
    sides: dict[str, Any] = {"prefill_options": {"block_size": BLOCK}, "decode_options": {"block_size": 2 * BLOCK}}
    with (
        kit.daemon(HOST_TIER) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, model=TINY_GEMMA, prefill=NEVER, decode=NEVER, **sides) as pair,
    ):
        arrived, lines = pair.counted("transfers.receive.ok"), []
        lengths = range(300, 300 + 4 * BLOCK, BLOCK // 2)
        for length in lengths:
            one = prompt(length, seed=length)
            (params,) = pair.prefilled(one)
            (answer,) = pair.decode.ask(Asked(one, params=params))
            assert [answer.tokens] == plain.tokens(one, model=TINY_GEMMA)
            lines += pair.decode.log()
        assert 0 < pair.counted("transfers.receive.ok") - arrived < len(lengths)
        assert any("receive failed" in line and "has no sender" in line for line in lines)
        pair.assert_nothing_left()


def wipe(client: Client, pool: str, size: int, group: tuple[int, ...]) -> None:
    """Write zeros to all blocks of ranks."""
    for rank in group:
        with contextlib.closing(client.attach_pool(pool if size == 1 else f"{pool}-tp{rank}")) as its:
            its.array("main", "k")[:] = 0
