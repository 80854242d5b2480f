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
from tests.vllm.in_process import BLOCK, TOKENS, Asked, Plain, by_hand, engine
from tests.vllm.pairs import (
    CHUNK,
    Pair,
    aborted,
    aborted_before_it_began,
    both_given,
    layers_told,
    preempted,
    preemptions_until_ended,
    prompt,
    received,
    running_pair,
    stepped,
    stepped_until,
    used_blocks,
    want,
    zeroed,
)
from tests.vllm.servers import REMOTE_DECODE

LATENT: Final = 512 + 64
"""Of tiny-deepseek: elements of a token's row."""
LENGTHS: Final = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 300)
LAYER_GROUPS: Final = 8
"""Of SmolLM2's 30 layers, four each."""

NEVER: Final = {"hold_s": 3000.0, "receive_s": 3000.0}


@pytest.fixture(scope="module")
def pair(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return two engines without a prefix cache in the daemon; decode keeps prefixes of its own, as vLLM does."""
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(folder, kept_daemon.runtime_dir, prefill=NEVER, decode=NEVER) as one:
        yield one


def test_prefill_first(pair: Pair, plain: Plain) -> None:
    """Its answer says all that decode has to know; a prompt goes as a whole, or in chunks of a step each."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    with pair.counts("transfers.receive.ok", len(prompts)):
        answers = pair.handed_on(*prompts)
    assert [one.tokens for one in answers] == want(plain, *prompts)
    pair.assert_nothing_left()


def test_decode_first_while_prefill_computes(pair: Pair, plain: Plain) -> None:
    """Chunks travel while the next one is computed."""
    one = prompt(5 * CHUNK + 3, seed=10)
    to_prefill, to_decode = both_given()
    with pair.counts("transfers.receive.ok", 1):
        name = pair.decode.add(Asked(one, TOKENS, to_decode))
        assert soon(lambda: pair.receives() == 1), "decode asks before prefill has heard of it"
        with by_hand(pair.prefill):
            other = pair.prefill.add(Asked(one, 1, to_prefill))
            for chunk in range(1, 6):
                pair.prefill.call(stepped)
                assert soon(lambda: pair.arrived_pages() == chunk * CHUNK // BLOCK)  # noqa: B023  called at once
            assert pair.receives() == 1, "decode still waits for the last chunk"
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


def test_layers_travel_while_the_next_ones_are_computed(pair: Pair, plain: Plain) -> None:
    one = prompt(CHUNK + 3, seed=15)
    to_prefill, to_decode = both_given()
    name = pair.decode.add(Asked(one, TOKENS, to_decode))
    with by_hand(pair.prefill):
        other = pair.prefill.add(Asked(one, 1, to_prefill))
        assert pair.prefill.call(layers_told) == (LAYER_GROUPS, 0)
        assert pair.prefill.call(layers_told) == (0, 0), "three tokens are less than pays"
        pair.prefill.wait(other)
    assert [one.tokens for one in pair.decode.wait(name)] == want(plain, one)
    pair.assert_nothing_left()


def test_only_what_decode_lacks_travels(pair: Pair, plain: Plain) -> None:
    one = prompt(6 * BLOCK + 5, seed=20)
    short, shorter = one[: 4 * BLOCK + 1], one[: 4 * BLOCK]
    moved = [pair.moved_bytes()]
    answers = []
    for each in (short, one, shorter):
        answers += pair.handed_on(each)
        moved.append(pair.moved_bytes())
    first, second, third = (after - before for before, after in itertools.pairwise(moved))
    assert second / first == pytest.approx(3 / 5), "blocks travel whole"
    assert third / first == pytest.approx(1 / 5), "of a whole prompt vLLM never has the last block"
    assert [answer.tokens for answer in answers] == want(plain, short, one, shorter)
    pair.assert_nothing_left()


def test_zeroed_blocks_change_the_tokens(pair: Pair, plain: Plain) -> None:
    """The control: decode's tokens depend on the bytes that have travelled."""
    one = prompt(200, seed=30)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked(one, TOKENS, params))
        pair.decode.call(stepped_until, name, "RUNNING")
        pair.decode.call(zeroed, name)
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] != want(plain, one)
    pair.assert_nothing_left()


# -- aborts: at either side, in each state


@pytest.mark.parametrize("chunks", [0, 2])
def test_prefill_is_aborted_while_decode_waits(pair: Pair, plain: Plain, chunks: int) -> None:
    """In vLLM's queue, and in the midst of the prompt: decode computes it at once."""
    one = prompt(5 * CHUNK, seed=40 + chunks)
    to_prefill, to_decode = both_given()
    name = pair.decode.add(Asked(one, TOKENS, to_decode))
    assert soon(lambda: pair.receives() == 1)
    with by_hand(pair.prefill), pair.counts("transfers.receive.peer_cancelled", 1):
        other = pair.prefill.add(Asked(one, 1, to_prefill))
        pair.prefill.call(stepped, chunks)
        pair.prefill.call(aborted, other)
        pair.prefill.call(stepped)
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


def test_prefill_is_aborted_when_all_is_sent_and_nobody_has_come(pair: Pair, plain: Plain) -> None:
    one = prompt(2 * CHUNK, seed=44)
    to_prefill, to_decode = both_given()
    with by_hand(pair.prefill):
        name = pair.prefill.add(Asked(one, 50, to_prefill))
        pair.prefill.call(stepped, 4)
        assert soon(lambda: [each.direction for each in pair.client.status().transfers] == ["send"])
        pair.prefill.call(aborted, name)
    pair.assert_nothing_left()
    (answer,) = pair.decode.ask(Asked(one, TOKENS, to_decode))
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


@pytest.mark.parametrize("state", ["queue", "begins", "received", "running"])
def test_decode_is_aborted_after_prefill(pair: Pair, state: str) -> None:
    """Prefill gets its blocks back at once."""
    one = prompt(2 * CHUNK + 5, seed=50)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(
            Asked((*one, len(state)), TOKENS, params) if state == "queue" else Asked(one, 20, params)
        )
        if state == "begins":
            pair.decode.call(aborted_before_it_began, name)
        elif state == "received":
            pair.decode.call(received, name)
        elif state == "running":
            pair.decode.call(stepped_until, name, "RUNNING")
        pair.decode.call(aborted, name)
    pair.assert_nothing_left()


@pytest.mark.parametrize("chunks", [0, 2])
def test_decode_is_aborted_while_it_waits(pair: Pair, chunks: int) -> None:
    """Before prefill has heard of it, and in the midst of the prompt, of which prefill computes the rest."""
    one = prompt(5 * CHUNK, seed=60 + chunks)
    to_prefill, to_decode = both_given()
    name = pair.decode.add(Asked(one, TOKENS, to_decode))
    assert soon(lambda: pair.receives() == 1)
    with by_hand(pair.prefill):
        names = [pair.prefill.add(Asked(one, 1, to_prefill))] if chunks else []
        pair.prefill.call(stepped, chunks)
        assert soon(lambda: pair.arrived_pages() == chunks * CHUNK // BLOCK)
        pair.decode.call(aborted, name)
        pair.decode.drain()
        pair.prefill.wait(*names or [pair.prefill.add(Asked(one, 1, to_prefill))])
    pair.assert_nothing_left()


# -- preemption


def test_prefill_is_preempted_in_the_midst_of_a_prompt(pair: Pair, plain: Plain) -> None:
    """It is sent anew, under another id, of which the answer tells."""
    one = prompt(5 * CHUNK, seed=70)
    with by_hand(pair.prefill):
        name = pair.prefill.add(Asked(one, 1, dict(REMOTE_DECODE)))
        pair.prefill.call(stepped, 2)
        assert pair.prefill.call(preempted) == 1
        (answer,) = pair.prefill.wait(name)
    with pair.counts("transfers.receive.ok", 1):
        (answer,) = pair.decode.ask(Asked(one, TOKENS, answer.params))
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


def test_prefill_is_preempted_while_decode_waits(pair: Pair, plain: Plain) -> None:
    one = prompt(5 * CHUNK, seed=71)
    to_prefill, to_decode = both_given()
    name = pair.decode.add(Asked(one, TOKENS, to_decode))
    with by_hand(pair.prefill):
        other = pair.prefill.add(Asked(one, 1, to_prefill))
        pair.prefill.call(stepped, 2)
        assert soon(lambda: pair.arrived_pages() == 2 * CHUNK // BLOCK)
        assert pair.prefill.call(preempted) == 1
        pair.prefill.wait(other)
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


def test_decode_is_preempted(pair: Pair, plain: Plain) -> None:
    one = prompt(2 * CHUNK, seed=72)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        name = pair.decode.add(Asked(one, TOKENS, params))
        pair.decode.call(stepped_until, name, "RUNNING")
        assert pair.decode.call(preempted) == 1
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


def test_aborted_while_its_blocks_are_loaded_again(kept_daemon: Daemon, tmp_path: Path) -> None:
    """It has had blocks that were being stored, and was preempted: vLLM ends if it is told twice that all is over."""
    settings = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "cache"}
    with engine(tmp_path, settings, model=TINY_MHA) as one, by_hand(one):
        name = one.add(Asked(prompt(200, seed=73), 50))
        one.call(stepped_until, name, "RUNNING")
        one.call(stepped, 5)
        assert one.call(preempted) == 1
        one.call(aborted_before_it_began, name)
        one.drain()
        assert one.call(used_blocks) == 0
        (answer,) = one.ask(Asked(prompt(200, seed=73), 5))
        assert answer.ended == "length"


# -- what routers say wrongly

PLACE: Final = {"host": "elsewhere", "place": "", "daemons": ["ipc:///elsewhere.sock"], "boot_id": "0" * 32}
WRONG: Final[dict[str, dict[str, Any]]] = {
    "[transfer_id]: missing": {"transfer_id": None},
    "[kv_transfer_params]: Expected `str | null`, got `int` - at `$.transfer_id`": {"transfer_id": 5},
    "[kv_transfer_params]: Expected `str` of length >= 1 - at `$.transfer_id`": {"transfer_id": ""},
    "[kv_transfer_params]: Expected `str` of length <= 256 - at `$.transfer_id`": {"transfer_id": "x" * 300},
    "[handshake]: prefill has another version": {"handshake": 3},
    "[remote_tp_size]: prefill has 2 ranks": {"remote_tp_size": 2},
    "[kv_transfer_params]: Expected `int` >= 1 - at `$.remote_tp_size`": {"remote_tp_size": 0},
    "[kv_transfer_params]: Object missing required field `place`": {"remote_place": {"host": "elsewhere"}},
    "[peers.listen]: the daemon of the engine at elsewhere has no address": {"remote_place": PLACE},
    "[kv_transfer_params]: Expected `str` matching regex": {"remote_daemons": ["ftp://elsewhere"]},
    "[kv_transfer_params]: Expected `bool`, got `str` - at `$.do_remote_prefill`": {"do_remote_prefill": "perhaps"},
    "[do_remote_decode]: this engine is a kv_consumer": {"do_remote_decode": True},
}


def test_wrong_parameters_are_named_and_the_prompt_computed(pair: Pair, plain: Plain) -> None:
    pair.decode.log()
    good = {"do_remote_prefill": True, "transfer_id": "never"}
    prompts = [prompt(40, seed=80 + number) for number in range(len(WRONG))]
    told = [Asked(one, TOKENS, {**good, **wrong}) for one, wrong in zip(prompts, WRONG.values(), strict=True)]
    answers = pair.decode.ask(*told)
    assert [one.tokens for one in answers] == want(plain, *prompts)
    log = "\n".join(pair.decode.log())
    assert [text for text in WRONG if text not in log] == [], log
    pair.assert_nothing_left()


def test_prefill_hears_at_once_that_decode_cannot_follow(pair: Pair, plain: Plain) -> None:
    one = prompt(50, seed=95)
    (params,) = pair.prefilled(one)
    (answer,) = pair.decode.ask(Asked(one, TOKENS, {**params, "handshake": 3}))
    assert [answer.tokens] == want(plain, one)
    pair.assert_nothing_left()


def test_requests_that_are_told_the_same_id(pair: Pair, plain: Plain) -> None:
    """One of each side has it; the others compute."""
    first, second = prompt(40, seed=96), prompt(40, seed=97)  # both are in one step of prefill
    to_prefill, to_decode = both_given()
    names = [pair.decode.add(Asked(one, TOKENS, to_decode)) for one in (first, second)]
    assert soon(lambda: pair.receives() == 1)
    with pair.counts("transfers.receive.ok", 1):
        pair.prefill.ask(Asked(first, 1, to_prefill), Asked(second, 1, to_prefill))
        answers = pair.decode.wait(*names)
    assert [one.tokens for one in answers] == want(plain, first, second)
    pair.assert_nothing_left()


@pytest.mark.parametrize("length", [3 * BLOCK, 2 * BLOCK, 5 * BLOCK])
def test_prompts_that_differ_are_computed(pair: Pair, plain: Plain, length: int) -> None:
    """Of the same length, a shorter one, and a longer one than prefill has sent."""
    (params,) = pair.prefilled(prompt(3 * BLOCK, seed=98))
    other = prompt(length, seed=99)
    (answer,) = pair.decode.ask(Asked(other, TOKENS, params))
    assert [answer.tokens] == want(plain, other)
    pair.assert_nothing_left()


# -- other pairs


def test_latents(kept_daemon: Daemon, tmp_path: Path) -> None:
    """MLA: a row of a token for all heads. Decode computes with the very rows that prefill has computed.

    Tokens say nothing here: on a CPU vLLM's own latent attention gives other ones for the same prompt in another batch.
    """
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_DEEPSEEK) as pair:
        for seed, length in enumerate(LENGTHS):
            before = rows_of(pair.client, "prefill")
            with pair.counts("transfers.receive.ok", 1):
                pair.handed_on(prompt(length, seed))
            computed = rows_of(pair.client, "prefill") - before
            assert len(computed) == length
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
def test_many_at_once(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    prompts = [prompt(20 + 3 * number, seed=100 + number) for number in range(64)]
    turned = [one[::-1] for one in prompts]
    given = [both_given() for _ in prompts]
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA, num_gpu_blocks_override=400) as pair:
        with pair.counts("transfers.receive.ok", 2 * len(prompts)):
            answers = pair.handed_on(*prompts)
            names = [pair.decode.add(Asked(one, TOKENS, to)) for one, (_, to) in zip(turned, given, strict=True)]
            pair.prefill.ask(*(Asked(one, 1, to) for one, (to, _) in zip(turned, given, strict=True)))
            answers += pair.decode.wait(*names)
        assert [one.tokens for one in answers] == want(plain, *prompts, *turned, model=TINY_MHA)
        pair.assert_nothing_left()


@pytest.mark.long
def test_prompts_wait_where_the_daemon_has_no_room(plain: Plain, tmp_path: Path) -> None:
    prompts = [prompt(70 + number, seed=200 + number) for number in range(16)]
    with (
        kit.daemon("[limits]\nmax_transfers_per_session = 3\n", keep=True) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, prefill=NEVER, decode=NEVER, num_gpu_blocks_override=200) as pair,
    ):
        given = [both_given() for _ in prompts]
        with pair.counts("transfers.receive.ok", len(prompts)):
            names = [pair.decode.add(Asked(one, TOKENS, to)) for one, (_, to) in zip(prompts, given, strict=True)]
            assert soon(lambda: pair.receives() == 3)
            pair.prefill.ask(*(Asked(one, 1, to) for one, (to, _) in zip(prompts, given, strict=True)))
            answers = pair.decode.wait(*names)
        assert [one.tokens for one in answers] == want(plain, *prompts)
        assert any("prompts wait" in line for line in pair.decode.log())
        pair.assert_nothing_left()
        names = [pair.decode.add(Asked(one[::-1], TOKENS, to)) for one, (_, to) in zip(prompts, given, strict=True)]
        assert soon(lambda: pair.receives() == 3)
        pair.decode.call(aborted, *names)
        pair.assert_nothing_left()


@pytest.mark.long
def test_engines_with_few_blocks_preempt(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    prompts = [prompt(3 * BLOCK - 1, seed=300 + number) for number in range(6)]
    with running_pair(tmp_path, kept_daemon.runtime_dir, num_gpu_blocks_override=14, max_model_len=384) as pair:
        given = [both_given() for _ in prompts]
        with by_hand(pair.decode):
            names = [pair.decode.add(Asked(one, 50, to)) for one, (_, to) in zip(prompts, given, strict=True)]
            for one, (to, _) in zip(prompts, given, strict=True):
                pair.prefill.add(Asked(one, 1, to))
            assert pair.decode.call(preemptions_until_ended, names) > 0
            answers = pair.decode.wait(*names)
        assert [one.tokens for one in answers] == want(plain, *prompts, tokens=50)
        pair.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("memory", ["registered", "staged"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_memory_of_the_engine(kept_daemon: Daemon, plain: Plain, tmp_path: Path, memory: str, side: str) -> None:
    """That the daemon maps, or of which it has a copy; the other side's is the daemon's."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    settings: dict[str, Any] = {side: {"memory": memory}}
    with running_pair(tmp_path, kept_daemon.runtime_dir, **settings) as pair:
        with pair.counts("transfers.receive.ok", len(prompts)):
            answers = pair.handed_on(*prompts)
        assert [one.tokens for one in answers] == want(plain, *prompts)
        pair.assert_nothing_left()


@pytest.mark.long
def test_both_roles_with_the_prefix_cache(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    """What prefill has sent it stores too; each side finds it, and hands on to the other."""
    settings = {"cache": True}
    one, other = prompt(200, seed=400), prompt(200, seed=401)
    with running_pair(
        tmp_path,
        kept_daemon.runtime_dir,
        prefill=settings,
        decode=settings,
        role="kv_both",
        max_num_batched_tokens=CHUNK,
    ) as pair:
        answers = pair.handed_on(one)
        turned = Pair(pair.decode, pair.prefill, pair.other, pair.client)
        answers += turned.handed_on(other)
        for engine in (pair.prefill, pair.decode):
            assert engine.ask(Asked(one), Asked(other)) is not None
            engine.drain()
        pair.assert_nothing_left()
        with pair.counts("transfers.receive.ok", 1):
            answers += pair.handed_on((*one, 5))
        assert [each.tokens for each in answers] == want(plain, one, other, (*one, 5))
        (params,) = pair.prefilled((*other, 6))
        with by_hand(pair.decode):
            name = pair.decode.add(Asked((*other, 6), TOKENS, params))
            pair.decode.call(stepped_until, name, "RUNNING")
            assert pair.decode.call(preempted) == 1
            (answer,) = pair.decode.wait(name)
        assert [answer.tokens] == want(plain, (*other, 6))
        pair.assert_nothing_left()
