"""Models of several KV cache groups: windows or chunks beside full attention, from prefill to decode and in the cache.

Each group has a block table of its own, and needs another part of a prompt: what has come of it is counted, and what is
wiped of any group changes the tokens.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvferry.clients.vllm.groups import groups_of
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_CHUNKS, TINY_GEMMA, TINY_OSS, TINY_SHARED, WINDOW
from tests.vllm.in_process import (
    CHUNK,
    HOST_TIER,
    NEVER,
    OTHER_HOST_TIER,
    Answer,
    Asked,
    Engine,
    Pair,
    Plain,
    aborted,
    assert_all_is_free,
    both_given,
    by_hand,
    cached_blocks,
    engine,
    metrics,
    preempted,
    prompt,
    received,
    running_pair,
    settings,
    stepped,
    stepped_until,
    wait_until_back,
    zeroed,
)
from tests.vllm.servers import BLOCK, REMOTE_DECODE

LENGTHS: Final = (2, BLOCK, BLOCK + 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, WINDOW + BLOCK + 1, 300)
PROMPTS: Final = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
GROUPS: Final = {TINY_GEMMA: 3, TINY_OSS: 2, TINY_CHUNKS: 2, TINY_SHARED: 3}
LONG: Final = WINDOW + 4 * BLOCK + 3
"""Tokens of a prompt whose first blocks no window needs at its end."""
BLOCKS: Final = {TINY_GEMMA: 40, TINY_OSS: 40, TINY_CHUNKS: 28, TINY_SHARED: 40}
"""Of an engine that gives blocks that a window has left to the next request, and preempts."""


FORM: Final[dict[str, Any]] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("spec", "manager"),
    [
        (FullAttentionSpec(**FORM), FullAttentionManager),
        (SlidingWindowSpec(**FORM, sliding_window=WINDOW), SlidingWindowManager),
        (SlidingWindowSpec(**FORM, sliding_window=WINDOW + 7, extra_retained_tokens=3), SlidingWindowManager),
        (ChunkedLocalAttentionSpec(**FORM, attention_chunk_size=WINDOW), ChunkedLocalAttentionManager),
        (ChunkedLocalAttentionSpec(**FORM, attention_chunk_size=WINDOW + 7), ChunkedLocalAttentionManager),
        (MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,)), MambaManager),
    ],
)
def test_a_group_needs_what_vllm_keeps(spec: Any, manager: Any) -> None:  # noqa: ANN401  vLLM's
    """After any number of tokens; of the cache it needs no less."""
    pool = BlockPool(num_gpu_blocks=4, enable_caching=False, hash_block_size=BLOCK)
    kept = manager(spec, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=BLOCK)
    told = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)])
    (group,) = groups_of(told)
    last = group.cached(BLOCK).last
    for tokens in range(1, 20 * BLOCK):
        assert group.first(tokens) == max(0, kept.get_num_skipped_tokens(tokens)) // BLOCK
        if tokens % BLOCK == 0 and last is not None:
            assert tokens // BLOCK - group.first(tokens) <= last <= WINDOW // BLOCK + 2


@pytest.fixture(
    scope="module",
    params=[TINY_GEMMA, *(pytest.param(one, marks=pytest.mark.long) for one in (TINY_OSS, TINY_CHUNKS, TINY_SHARED))],
)
def model(request: pytest.FixtureRequest) -> str:
    """Return a model with windows, or chunks."""
    return str(request.param)


@pytest.fixture(scope="module")
def shared(model: str, kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return two engines without a prefix cache in the daemon; decode keeps prefixes of its own, as vLLM does."""
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(folder, kept_daemon.runtime_dir, prefill=NEVER, decode=NEVER, model=model) as one:
        yield one


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Return them; after each test nothing of it is left at either side, nor in the daemon."""
    yield shared
    shared.assert_nothing_left()


# -- from prefill to decode


def test_prefill_first(pair: Pair, plain: Plain, model: str) -> None:
    """In chunks, and beyond a window."""
    assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS, model=model)


def test_one_token_is_computed_by_decode(pair: Pair, plain: Plain, model: str) -> None:
    """It computes a prompt's last token: nothing is left to be handed on."""
    (answer,) = pair.prefill.ask(Asked((1234,), 1, dict(REMOTE_DECODE)))
    assert answer.params is None
    assert [one.tokens for one in pair.decode.ask((1234,))] == plain.tokens((1234,), model=model)


def test_decode_first_while_prefill_computes(pair: Pair, plain: Plain, model: str) -> None:
    one = prompt(5 * CHUNK + 3, seed=10)
    with pair.counts("transfers.receive.ok", 1):
        names, [to_prefill] = pair.awaited(one)
        with by_hand(pair.prefill):
            other = pair.half_prefilled(one, to_prefill, chunks=5)
            assert pair.receives() == 1, "decode still waits for the last chunk"
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(*names)
    assert [answer.tokens] == plain.tokens(one, model=model)


def test_only_what_decode_lacks_and_windows_reach_travels(pair: Pair, plain: Plain, model: str) -> None:
    one = prompt(LONG + 3 * BLOCK, seed=20)
    moved = []
    for each in (one[:LONG], one):
        before = pair.counted("transfers.moved_bytes")
        assert pair.handed_on(each) == plain.tokens(each, model=model)
        moved.append(pair.counted("transfers.moved_bytes") - before)
    blocks, others = -(-(LONG - 1) // BLOCK), GROUPS[model] - 1
    page = moved[0] / (blocks + others * reached(model, LONG - 1))
    assert page == moved[1] / (3 + 1 + others * reached(model, LONG - 1 + 3 * BLOCK))


def reached(model: str, tokens: int) -> int:
    """Return how many blocks of a window, or a chunk, the token after so many needs."""
    first = tokens // WINDOW * WINDOW if model == TINY_CHUNKS else tokens - WINDOW + 1
    return -(-tokens // BLOCK) - first // BLOCK


def test_zeroed_blocks_change_the_tokens(pair: Pair, plain: Plain, model: str) -> None:
    """The control: decode's tokens depend on what has travelled of each group."""
    for group in range(GROUPS[model]):
        one = prompt(LONG, seed=30 + group)
        (params,) = pair.prefilled(one)
        with by_hand(pair.decode):
            name = pair.decode.add(Asked(one, params=params))
            pair.decode.call(stepped_until, "RUNNING", name)
            pair.decode.call(zeroed, name, group)
            (answer,) = pair.decode.wait(name)
        assert [answer.tokens] != plain.tokens(one, model=model), group


def test_prompts_that_differ_are_computed(pair: Pair, plain: Plain, model: str) -> None:
    """What has come is not used, in no group."""
    (params,) = pair.prefilled(prompt(LONG, seed=40))
    other = prompt(LONG, seed=41)
    (answer,) = pair.decode.ask(Asked(other, params=params))
    assert [answer.tokens] == plain.tokens(other, model=model)
    assert any("receive failed" in line for line in pair.decode.log())


@pytest.mark.parametrize("happens", [aborted, preempted])
def test_prefill_is_aborted_or_preempted_while_decode_waits(
    pair: Pair,
    plain: Plain,
    model: str,
    happens: Any,  # noqa: ANN401  a function
) -> None:
    one = prompt(5 * CHUNK, seed=42 + (happens is aborted))
    with by_hand(pair.prefill), pair.counts("transfers.receive.peer_cancelled", 1):
        names, [to_prefill] = pair.awaited(one)
        other = pair.half_prefilled(one, to_prefill)
        pair.prefill.call(happens, *([other] if happens is aborted else []))
        pair.prefill.call(stepped)
        if happens is preempted:
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(*names)
    assert [answer.tokens] == plain.tokens(one, model=model)


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
    assert [answer.tokens] == plain.tokens(one, model=model)


@pytest.mark.long
def test_engines_with_few_blocks_preempt(kept_daemon: Daemon, plain: Plain, model: str, tmp_path: Path) -> None:
    prompts = [prompt(3 * BLOCK - 1, seed=300 + number) for number in range(6)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 14 * GROUPS[model], "max_model_len": 384}
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=model, disable_log_stats=False, **options) as pair:
        given = [both_given() for _ in prompts]
        names = [pair.decode.add(Asked(one, 50, to)) for one, (_, to) in zip(prompts, given, strict=True)]
        for one, (to, _) in zip(prompts, given, strict=True):
            pair.prefill.add(Asked(one, 1, to))
        answers = pair.decode.wait(*names)
        assert [one.tokens for one in answers] == plain.tokens(*prompts, tokens=50, model=model)
        assert pair.decode.call(metrics)["vllm:num_preemptions"] > 0
        pair.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("registered", "staged"), ("staged", "registered")])
def test_memory_of_the_engine(
    kept_daemon: Daemon, plain: Plain, tmp_path: Path, model: str, prefill: str, decode: str
) -> None:
    memory: dict[str, Any] = {"prefill": {"memory": prefill}, "decode": {"memory": decode}}
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=model, **memory) as pair:
        assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS, model=model)
        pair.assert_nothing_left()


# -- the prefix cache


@pytest.fixture(scope="module")
def one(model: str, kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return an engine with a prefix cache and few blocks."""
    more: dict[str, Any] = {
        "num_gpu_blocks_override": BLOCKS[model],
        "max_model_len": 512,
        "max_num_batched_tokens": CHUNK,
    }
    more |= {"disable_log_stats": False}
    with engine(tmp_path_factory.mktemp("one"), settings(kept_daemon, "one"), model=model, **more) as made:
        yield made


@pytest.fixture(scope="module")
def other(model: str, kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return another one, with more blocks."""
    with engine(tmp_path_factory.mktemp("other"), settings(kept_daemon, "other"), model=model) as made:
        yield made


def most(answer: Answer) -> int:
    """Return how many tokens of a prompt can be found: the last one is always computed."""
    return (len(answer.prompt) - 1) // BLOCK * BLOCK


def test_another_engine_finds_it_also_a_part_of_it(
    kept_daemon: Daemon, one: Engine, other: Engine, plain: Plain, model: str
) -> None:
    """Of a prefix that ends earlier, windows need other blocks: all are stored."""
    asked = prompt(LONG, seed=60)
    (first,) = one.ask(asked)
    one.drain()
    for each in (asked[: 2 * BLOCK + 5], (*asked[: WINDOW + 2 * BLOCK], *prompt(50, seed=61)), asked):
        found = other.ask_anew(each)
        assert [found.tokens] == plain.tokens(each, model=model)
        assert found.cached == (WINDOW + 2 * BLOCK if len(each) > LONG - BLOCK and each != asked else most(found))
    (again,) = other.ask(asked)
    assert (first.tokens, again.cached) == (again.tokens, most(again)), "vLLM's own cache has what was loaded"
    for engine_of in (one, other):
        assert_all_is_free(kept_daemon, engine_of)


def test_what_is_loaded_is_what_is_computed_with(one: Engine, other: Engine, plain: Plain, model: str) -> None:
    for group in range(GROUPS[model]):
        asked = prompt(LONG, seed=70 + group)
        one.ask(asked)
        one.drain()
        with by_hand(other):
            name = other.add(asked)
            other.call(received, name)
            other.call(zeroed, name, group)
            (answer,) = other.wait(name)
        assert answer.cached == most(answer), group
        assert [answer.tokens] != plain.tokens(asked, model=model), group
    other.drain()


def test_blocks_that_a_window_leaves_are_given_to_nobody_while_they_are_stored(
    kept_daemon: Daemon, one: Engine, other: Engine, plain: Plain, model: str
) -> None:
    """The request goes on, and another one wants blocks, while the daemon stands still."""
    asked, more = prompt(10 * BLOCK, seed=80), prompt(10 * BLOCK, seed=81)
    one.drain()
    with by_hand(one):
        name = one.add(asked)
        one.call(stepped, 2)
        with kept_daemon.stopped():
            one.call(stepped, 3)
            last = one.add(more)
            one.call(stepped, 5)
        answers = one.wait(name, last)
    assert [answer.tokens for answer in answers] == plain.tokens(asked, more, model=model)
    assert_all_is_free(kept_daemon, one)
    found = other.ask_anew(asked)
    assert [found.tokens] == plain.tokens(asked, model=model)
    assert found.cached == most(found)


def test_preempted_requests_have_the_same_tokens(kept_daemon: Daemon, one: Engine, plain: Plain, model: str) -> None:
    """They want more blocks than there are."""
    asked = [prompt(LONG, seed=90 + number) for number in range(5)]
    before = one.call(metrics)["vllm:num_preemptions"]
    assert [answer.tokens for answer in one.ask(*asked, tokens=100)] == plain.tokens(*asked, tokens=100, model=model)
    assert one.call(metrics)["vllm:num_preemptions"] > before
    assert_all_is_free(kept_daemon, one)


@pytest.mark.long
def test_disk_tier(tmp_path: Path, plain: Plain, model: str) -> None:
    """A daemon that comes back without its host tier finds blocks of each group on the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = f'{HOST_TIER}[tiers.disk]\npath = "{disk}"\nmax_bytes = 1073741824\nfsync = "block"\n'
    asked = prompt(LONG, seed=95)
    with kit.daemon(config, keep=True) as daemon, engine(tmp_path, settings(daemon, "disk"), model=model) as only:
        only.ask(asked)
        only.drain()
        assert soon(lambda: all("disk" in block.tiers for block in cached_blocks(daemon)))
        assert len({block.group for block in cached_blocks(daemon)}) == GROUPS[model]
        only.log()
        daemon.end(signal.SIGTERM)
        daemon.configure(config.replace(HOST_TIER, OTHER_HOST_TIER))
        daemon.start()
        wait_until_back(only)
        assert all("host" not in block.tiers for block in cached_blocks(daemon))
        again = only.ask_anew(asked)
        assert [again.tokens] == plain.tokens(asked, model=model)
        assert again.cached == most(again)
        assert_all_is_free(daemon, only)
