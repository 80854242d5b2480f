"""Prompts that one engine prefills and another one decodes: the same tokens as plain vLLM's, and what has travelled.

Neither side's deadline passes in a test: what an end is heard of by is never that.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_DEEPSEEK, TINY_MHA
from tests.vllm.in_process import (
    CHUNK,
    NEVER,
    Asked,
    Pair,
    Plain,
    aborted,
    aborted_before_it_began,
    both_given,
    by_hand,
    layers_told,
    metrics,
    preempted,
    prompt,
    received,
    running_pair,
    stepped,
    stepped_until,
    zeroed,
)
from tests.vllm.servers import BLOCK, REMOTE_DECODE

LATENT: Final = 512 + 64
"""Of tiny-deepseek: elements of a token's row."""
LENGTHS: Final = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 300)
PROMPTS: Final = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
LAYER_GROUPS: Final = 8
"""Of SmolLM2's 30 layers, four each."""


@pytest.fixture(scope="module")
def shared(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return two engines without a prefix cache in the daemon; decode keeps prefixes of its own, as vLLM does."""
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(folder, kept_daemon.runtime_dir, prefill=NEVER, decode=NEVER) as one:
        yield one


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Return them; after each test nothing of it is left at either side, nor in the daemon."""
    yield shared
    shared.assert_nothing_left()


def test_prefill_first(pair: Pair, plain: Plain) -> None:
    """Its answer says all that decode has to know; a prompt goes as a whole, or in chunks of a step each."""
    assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS)


def test_decode_first_while_prefill_computes(pair: Pair, plain: Plain) -> None:
    """Chunks travel while the next one is computed: decode asks before prefill has heard of it."""
    one = prompt(5 * CHUNK + 3, seed=10)
    with pair.counts("transfers.receive.ok", 1):
        names, [to_prefill] = pair.awaited(one)
        with by_hand(pair.prefill):
            other = pair.half_prefilled(one, to_prefill, chunks=5)
            assert pair.receives() == 1, "decode still waits for the last chunk"
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(*names)
    assert [answer.tokens] == plain.tokens(one)


def test_layers_travel_while_the_next_ones_are_computed(pair: Pair, plain: Plain) -> None:
    one = prompt(CHUNK + 3, seed=15)
    names, [to_prefill] = pair.awaited(one)
    with by_hand(pair.prefill):
        other = pair.prefill.add(Asked(one, 1, to_prefill))
        assert pair.prefill.call(layers_told) == (LAYER_GROUPS, 0)
        assert pair.prefill.call(layers_told) == (0, 0), "three tokens are less than pays"
        pair.prefill.wait(other)
    assert [one.tokens for one in pair.decode.wait(*names)] == plain.tokens(one)


def test_only_what_decode_lacks_travels(pair: Pair, plain: Plain) -> None:
    one = prompt(6 * BLOCK + 5, seed=20)
    prompts = one[: 4 * BLOCK + 1], one, one[: 4 * BLOCK]
    moved = [pair.counted("transfers.moved_bytes")]
    for each in prompts:
        assert pair.handed_on(each) == plain.tokens(each)
        moved.append(pair.counted("transfers.moved_bytes"))
    first, second, third = (after - before for before, after in itertools.pairwise(moved))
    assert second / first == pytest.approx(3 / 5), "blocks travel whole"
    assert third / first == pytest.approx(1 / 5), "of a whole prompt vLLM never has the last block"


def test_zeroed_blocks_change_the_tokens(pair: Pair, plain: Plain) -> None:
    """The control: decode's tokens depend on the bytes that have travelled."""
    one = prompt(200, seed=30)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked(one, params=params))
        pair.decode.call(stepped_until, "RUNNING", name)
        pair.decode.call(zeroed, name)
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] != plain.tokens(one)


# -- aborts and preemption: at either side, in each state


@pytest.mark.parametrize("happens", [aborted, preempted])
@pytest.mark.parametrize("chunks", [2, pytest.param(0, marks=pytest.mark.long)])
def test_prefill_is_aborted_or_preempted_while_decode_waits(
    pair: Pair,
    plain: Plain,
    chunks: int,
    happens: Any,  # noqa: ANN401  a function
) -> None:
    """In vLLM's queue, and in the midst of the prompt: decode computes it at once."""
    one = prompt(5 * CHUNK, seed=40 + chunks + 10 * (happens is aborted))
    is_heard = happens is aborted or chunks
    with by_hand(pair.prefill), pair.counts("transfers.receive.peer_cancelled", 1 if is_heard else 0):
        names, [to_prefill] = pair.awaited(one)
        other = pair.half_prefilled(one, to_prefill, chunks)
        pair.prefill.call(happens, *([other] if happens is aborted else []))
        pair.prefill.call(stepped)
        if happens is preempted:
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(*names)
    assert [answer.tokens] == plain.tokens(one)


def test_prefill_is_aborted_when_all_is_sent_and_nobody_has_come(pair: Pair, plain: Plain) -> None:
    one = prompt(2 * CHUNK, seed=44)
    to_prefill, to_decode = both_given()
    with by_hand(pair.prefill):
        name = pair.prefill.add(Asked(one, 50, to_prefill))
        pair.prefill.call(stepped, 4)
        assert soon(lambda: [each.direction for each in pair.client.status().transfers] == ["send"])
        pair.prefill.call(aborted, name)
    pair.assert_nothing_left()
    assert [answer.tokens for answer in pair.decode.ask(Asked(one, params=to_decode))] == plain.tokens(one)


@pytest.mark.parametrize("state", ["queue", "begins", pytest.param("received", marks=pytest.mark.long), "running"])
def test_decode_is_aborted_after_prefill(pair: Pair, state: str) -> None:
    """Prefill gets its blocks back at once."""
    one = prompt(2 * CHUNK + 5, seed=50)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked((*one, len(state)) if state == "queue" else one, params=params))
        if state == "begins":
            pair.decode.call(aborted_before_it_began, name)
        elif state == "received":
            pair.decode.call(received, name)
        elif state == "running":
            pair.decode.call(stepped_until, "RUNNING", name)
        pair.decode.call(aborted, name)


@pytest.mark.parametrize("chunks", [0, 2])
def test_decode_is_aborted_while_it_waits(pair: Pair, chunks: int) -> None:
    """Before prefill has heard of it, and in the midst of the prompt, of which prefill computes the rest."""
    one = prompt(5 * CHUNK, seed=60 + chunks)
    names, [to_prefill] = pair.awaited(one)
    with by_hand(pair.prefill):
        others = [pair.half_prefilled(one, to_prefill, chunks)] if chunks else []
        pair.decode.call(aborted, *names)
        pair.decode.drain()
        pair.prefill.wait(*others or [pair.prefill.add(Asked(one, 1, to_prefill))])


def test_prefill_is_preempted_in_the_midst_of_a_prompt(pair: Pair, plain: Plain) -> None:
    """It is sent anew, under another id, of which the answer tells."""
    one = prompt(5 * CHUNK, seed=70)
    with by_hand(pair.prefill):
        name = pair.prefill.add(Asked(one, 1, dict(REMOTE_DECODE)))
        pair.prefill.call(stepped, 2)
        assert pair.prefill.call(preempted) == 1
        (answer,) = pair.prefill.wait(name)
    with pair.counts("transfers.receive.ok", 1):
        (answer,) = pair.decode.ask(Asked(one, params=answer.params))
    assert [answer.tokens] == plain.tokens(one)


def test_decode_is_preempted(pair: Pair, plain: Plain) -> None:
    one = prompt(2 * CHUNK, seed=72)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked(one, params=params))
        pair.decode.call(stepped_until, "RUNNING", name)
        assert pair.decode.call(preempted) == 1
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] == plain.tokens(one)


# -- what routers say wrongly

PLACE: Final = {"host": "elsewhere", "place": "", "daemons": ["ipc:///elsewhere.sock"], "boot_id": "0" * 32}
WRONG: Final[dict[str, dict[str, Any]]] = {
    "[transfer_id]: missing": {"transfer_id": None},
    "[kv_transfer_params]: Expected `str` of length <= 256 - at `$.transfer_id`": {"transfer_id": "x" * 300},
    "[handshake]: prefill has another version": {"handshake": 2},
    "[remote_tp_size]: prefill has 2 ranks of tensor parallelism, this engine 1": {"remote_tp_size": 2},
    "[remote_tp_size]: missing": {"remote_pool": "prefill"},
    " - at `$.remote_pool`": {"remote_pool": "a/b"},
    "[kv_transfer_params]: Expected `int` >= 1 - at `$.remote_tp_size`": {"remote_tp_size": 0},
    "[kv_transfer_params]: Object missing required field `place`": {"remote_place": {"host": "elsewhere"}},
    "[peers.listen]: the daemon of the engine at elsewhere has no address": {"remote_place": PLACE},
    "[kv_transfer_params]: Expected `str` matching regex": {"remote_daemons": ["ftp://elsewhere"]},
    "[kv_transfer_params]: Expected `bool`, got `str` - at `$.do_remote_prefill`": {"do_remote_prefill": "perhaps"},
    "[do_remote_decode]: this engine is a kv_consumer": {"do_remote_decode": True},
}


def test_wrong_parameters_are_named_and_the_prompt_computed(pair: Pair, plain: Plain) -> None:
    """And prefill hears at once that decode cannot follow."""
    pair.decode.log()
    good = {"do_remote_prefill": True, "transfer_id": "never"}
    prompts = [prompt(40, seed=80 + number) for number in range(len(WRONG) + 1)]
    (params,) = pair.prefilled(prompts[-1])
    said = [*({**good, **wrong} for wrong in WRONG.values()), {**params, "handshake": 2}]
    answers = pair.decode.ask(*(Asked(one, params=each) for one, each in zip(prompts, said, strict=True)))
    assert [one.tokens for one in answers] == plain.tokens(*prompts)
    log = "\n".join(pair.decode.log())
    assert [text for text in WRONG if text not in log] == [], log


def test_requests_that_are_told_the_same_id(pair: Pair, plain: Plain) -> None:
    """One of each side has it; the others compute."""
    first, second = prompt(40, seed=96), prompt(40, seed=97)  # both are in one step of prefill
    to_prefill, to_decode = both_given()
    names = [pair.decode.add(Asked(one, params=to_decode)) for one in (first, second)]
    assert soon(lambda: pair.receives() == 1)
    with pair.counts("transfers.receive.ok", 1):
        pair.prefill.ask(Asked(first, 1, to_prefill), Asked(second, 1, to_prefill))
        answers = pair.decode.wait(*names)
    assert [one.tokens for one in answers] == plain.tokens(first, second)


@pytest.mark.parametrize("length", [3 * BLOCK, *(pytest.param(one * BLOCK, marks=pytest.mark.long) for one in (2, 5))])
def test_prompts_that_differ_are_computed(pair: Pair, plain: Plain, length: int) -> None:
    """Of the same length, a shorter one, and a longer one than prefill has sent."""
    (params,) = pair.prefilled(prompt(3 * BLOCK, seed=98))
    other = prompt(length, seed=99)
    (answer,) = pair.decode.ask(Asked(other, params=params))
    assert [answer.tokens] == plain.tokens(other)


# -- other pairs


@pytest.mark.long
def test_latents(kept_daemon: Daemon, tmp_path: Path) -> None:
    """MLA: a row of a token for all heads. Decode computes with the very rows that prefill has computed.

    Tokens say nothing here: on a CPU vLLM's own latent attention gives other ones for the same prompt in another batch.
    """
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_DEEPSEEK) as pair:
        for one in PROMPTS:
            before = rows_of(pair.client, "prefill")
            pair.handed_on(one)
            computed = rows_of(pair.client, "prefill") - before
            assert len(computed) == len(one)
            assert len(computed - rows_of(pair.other, "decode")) <= 1  # it computes the last token by itself
        pair.assert_nothing_left()


def rows_of(client: Client, kind: str) -> set[bytes]:
    """Return what an engine's pool has of each token, over all layers."""
    pools = client.status().pools
    (name,) = [one.pool for one in pools if kind in one.pool and one.model and one.model.name.endswith(TINY_DEEPSEEK)]
    with contextlib.closing(client.attach_pool(name)) as pool:
        blocks = pool.array("main", "k")[:, 1:]
        tokens = blocks.reshape(len(blocks), -1, LATENT).swapaxes(0, 1)
        return {row.tobytes() for row in tokens if row.any()}


@pytest.mark.long
def test_prompts_wait_where_the_daemon_has_no_room(plain: Plain, tmp_path: Path) -> None:
    prompts = [prompt(20 + 3 * number, seed=200 + number) for number in range(64)]
    options: dict[str, Any] = {"model": TINY_MHA, "num_gpu_blocks_override": 400}
    with (
        kit.daemon("[limits]\nmax_transfers_per_session = 3\n", keep=True) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, prefill=NEVER, decode=NEVER, **options) as pair,
    ):
        assert pair.handed_on(*prompts) == plain.tokens(*prompts, model=TINY_MHA)
        turned = [one[::-1] for one in prompts]
        with pair.counts("transfers.receive.ok", len(prompts)):
            names, given = pair.awaited(*turned, receives=3)
            pair.prefill.ask(*(Asked(one, 1, to) for one, to in zip(turned, given, strict=True)))
            answers = pair.decode.wait(*names)
        assert [one.tokens for one in answers] == plain.tokens(*turned, model=TINY_MHA)
        assert any("prompts wait" in line for line in pair.decode.log())
        pair.assert_nothing_left()
        names, _ = pair.awaited(*((*one, 5) for one in prompts), receives=3)
        pair.decode.call(aborted, *names)
        pair.assert_nothing_left()


@pytest.mark.long
def test_engines_with_few_blocks_preempt(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    prompts = [prompt(3 * BLOCK - 1, seed=300 + number) for number in range(6)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_model_len": 384, "disable_log_stats": False}
    with running_pair(tmp_path, kept_daemon.runtime_dir, **options) as pair:
        given = [both_given() for _ in prompts]
        names = [pair.decode.add(Asked(one, 50, to)) for one, (_, to) in zip(prompts, given, strict=True)]
        for one, (to, _) in zip(prompts, given, strict=True):
            pair.prefill.add(Asked(one, 1, to))
        answers = pair.decode.wait(*names)
        assert [one.tokens for one in answers] == plain.tokens(*prompts, tokens=50)
        assert pair.decode.call(metrics)["vllm:num_preemptions"] > 0
        pair.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("registered", "staged"), ("staged", "registered")])
def test_memory_of_the_engine(kept_daemon: Daemon, plain: Plain, tmp_path: Path, prefill: str, decode: str) -> None:
    """That the daemon maps, or of which it has a copy."""
    memory: dict[str, Any] = {"prefill": {"memory": prefill}, "decode": {"memory": decode}}
    with running_pair(tmp_path, kept_daemon.runtime_dir, **memory) as pair:
        assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS)
        pair.assert_nothing_left()


@pytest.mark.long
def test_both_roles_with_the_prefix_cache(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    """What prefill has sent it stores too; each side finds it, and hands on to the other."""
    settings = {"cache": True}
    one, other = prompt(200, seed=400), prompt(200, seed=401)
    options: dict[str, Any] = {"prefill": settings, "decode": settings, "role": "kv_both"}
    with running_pair(tmp_path, kept_daemon.runtime_dir, max_num_batched_tokens=CHUNK, **options) as pair:
        turned = Pair(pair.decode, pair.prefill, pair.other, pair.client, ranks=1)
        assert pair.handed_on(one) + turned.handed_on(other) == plain.tokens(one, other)
        for engine in (pair.prefill, pair.decode):
            assert [answer.tokens for answer in engine.ask(Asked(one), Asked(other))] == plain.tokens(one, other)
        pair.assert_nothing_left()
        assert pair.handed_on((*one, 5)) == plain.tokens((*one, 5))
        (params,) = pair.prefilled((*other, 6))
        with by_hand(pair.decode):
            name = pair.decode.add(Asked((*other, 6), params=params))
            pair.decode.call(stepped_until, "RUNNING", name)
            assert pair.decode.call(preempted) == 1
            (answer,) = pair.decode.wait(name)
        assert [answer.tokens] == plain.tokens((*other, 6))
        pair.assert_nothing_left()


@pytest.mark.long
def test_a_prompt_that_has_not_come_is_computed_in_its_few_blocks(
    kept_daemon: Daemon, plain: Plain, tmp_path: Path
) -> None:
    """It is in the cache by then; vLLM would wait for as many blocks again, before it has it loaded."""
    one = prompt(4 * BLOCK + 5, seed=70)
    options: dict[str, Any] = {"num_gpu_blocks_override": 8, "max_model_len": 6 * BLOCK}
    caches: dict[str, Any] = {"prefill": {**NEVER, "cache": True}, "decode": {**NEVER, "cache": True}}
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA, **caches, **options) as pair:
        pair.prefill.ask(Asked(one, 1))
        pair.prefill.drain()
        with by_hand(pair.prefill), pair.counts("transfers.receive.peer_cancelled", 1):
            names, [to_prefill] = pair.awaited(one)
            pair.prefill.call(aborted, pair.prefill.add(Asked(one, 1, to_prefill)))
            pair.prefill.call(stepped)
            (answer,) = pair.decode.wait(*names)
        assert [answer.tokens] == plain.tokens(one, model=TINY_MHA)
        pair.assert_nothing_left()
