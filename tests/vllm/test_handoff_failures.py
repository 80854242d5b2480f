"""Prompts that do not arrive: their requests are computed, or fail alone, as vLLM's policy says; the engines go on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import SMOLLM2, TINY_MHA
from tests.vllm.cached import HOST_TIER
from tests.vllm.in_process import (
    BLOCK,
    TOKENS,
    Asked,
    Plain,
    by_hand,
    engine,
    set_steps_alone,
    wait_until_back,
)
from tests.vllm.pairs import CHUNK, both_given, layers_told, prompt, running_pair, stepped, through_router, want

SHORT: Final = {"hold_s": 1.0, "receive_s": 1.0}
ASKED: Final = {"do_remote_decode": True}

pytestmark = pytest.mark.long


def test_policy_fail_fails_that_request_alone(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    settings = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "decode", "cache": False, "receive_s": 1.0}
    prompts = [prompt(100, seed=number) for number in range(3)]
    with engine(tmp_path, settings, role="kv_consumer", policy="fail", model=TINY_MHA) as decode:
        refused = {"do_remote_prefill": True, "transfer_id": "refused", "handshake": 3}
        late = {"do_remote_prefill": True, "transfer_id": "never comes"}
        answers = decode.ask(
            Asked(prompts[0], TOKENS, refused), Asked(prompts[1], TOKENS, late), Asked(prompts[2], TOKENS)
        )
        assert [one.ended for one in answers] == ["error", "error", "length"]
        assert [answers[2].tokens] == want(plain, prompts[2], model=TINY_MHA)
        decode.drain()
        assert decode.ask(Asked(prompts[0], TOKENS))[0].tokens == want(plain, prompts[0], model=TINY_MHA)[0]


def test_deadlines(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    """Of decode that waits for a prefill that never comes; and of prefill, which decode hears of when it comes."""
    first, second = prompt(100, seed=10), prompt(100, seed=11)
    late = {"do_remote_prefill": True, "transfer_id": "never comes"}
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA, prefill=SHORT, decode=SHORT) as pair:
        (params,) = pair.prefilled(second)
        with pair.counts("transfers.receive.deadline", 1):
            (answer,) = pair.decode.ask(Asked(first, TOKENS, late))
        assert [answer.tokens] == want(plain, first, model=TINY_MHA)
        pair.prefill.drain()
        with pair.counts("transfers.receive.deadline", 1):  # prefill's, of which decode is told
            (answer,) = pair.decode.ask(Asked(second, TOKENS, params))
        assert [answer.tokens] == want(plain, second, model=TINY_MHA)
        pair.assert_nothing_left()


def test_prefill_dies(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    """In the midst of one prompt, and after it has sent another one, which arrives all the same."""
    first, second, third = (prompt(5 * CHUNK, seed=number) for number in (20, 21, 22))
    to_prefill, to_decode = both_given()
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA) as pair:
        (params,) = pair.prefilled(second)
        name = pair.decode.add(Asked(first, TOKENS, to_decode))
        pair.prefill.call(set_steps_alone, value=False)
        pair.prefill.add(Asked(first, 1, to_prefill))
        pair.prefill.call(stepped, 2)
        assert soon(lambda: pair.arrived_pages() == 2 * CHUNK // BLOCK)
        pair.prefill.kill()
        (answer,) = pair.decode.wait(name)
        assert [answer.tokens] == want(plain, first, model=TINY_MHA)
        with pair.counts("transfers.receive.ok", 1):
            (answer,) = pair.decode.ask(Asked(second, TOKENS, params))
        assert [answer.tokens] == want(plain, second, model=TINY_MHA)
        settings = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "prefill"}
        with engine(tmp_path, settings, role="kv_producer", model=TINY_MHA) as anew:
            (said,) = anew.ask(Asked(third, 1, ASKED))
            with pair.counts("transfers.receive.ok", 1):
                (answer,) = pair.decode.ask(Asked(third, TOKENS, through_router(said)))
            assert [answer.tokens] == want(plain, third, model=TINY_MHA)
            pair._replace(prefill=anew).assert_nothing_left()


OTHERS: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "block-size": ({"block_size": 64}, ("64", "32")),
    "dtype": ({"dtype": "bfloat16"}, ("MODEL_MISMATCH", "-bfloat16-", "-float32-")),
    "model": ({"model": SMOLLM2}, (SMOLLM2, TINY_MHA)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_engines_that_do_not_fit(kept_daemon: Daemon, plain: Plain, tmp_path: Path, other: str) -> None:
    """Whichever side comes first: the log names what both have, and decode computes at once."""
    options, values = OTHERS[other]
    first, second = prompt(150, seed=30), prompt(150, seed=31)
    to_prefill, to_decode = both_given()
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA, prefill_options=options) as pair:
        (params,) = pair.prefilled(first)
        name = pair.decode.add(Asked(second, TOKENS, to_decode))
        pair.prefill.ask(Asked(second, 1, to_prefill))
        answers = pair.decode.wait(name) + pair.decode.ask(Asked(first, TOKENS, params))
        assert [one.tokens for one in answers] == want(plain, second, first, model=TINY_MHA)
        pair.assert_nothing_left()
        for side in (pair.prefill, pair.decode):
            log = [line for line in side.log() if "failed" in line]
            assert any(all(value in line for value in values) for line in log), log


def test_the_daemon_is_killed_while_prompts_travel(plain: Plain, tmp_path: Path) -> None:
    """One is sent and was not taken, one is half sent, and decode waits for a third one: all are computed at once."""
    prompts = [prompt(5 * CHUNK, seed=40 + number) for number in range(4)]
    given = [both_given() for _ in prompts]
    never = {"hold_s": 3000.0, "receive_s": 3000.0}
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, model=TINY_MHA, prefill=never, decode=never) as pair,
    ):
        (params,) = pair.prefilled(prompts[0])
        names = [pair.decode.add(Asked(prompts[number], TOKENS, given[number][1])) for number in (1, 2)]
        assert soon(lambda: pair.receives() == 2)
        with by_hand(pair.prefill):
            half = pair.prefill.add(Asked(prompts[1], 1, given[1][0]))
            pair.prefill.call(stepped, 2)
            assert soon(lambda: pair.arrived_pages() == 2 * CHUNK // BLOCK)
            daemon.restart()
            pair.prefill.wait(half)
        answers = pair.decode.ask(Asked(prompts[0], TOKENS, params)) + pair.decode.wait(*names)
        assert [one.tokens for one in answers] == want(plain, *prompts[:3], model=TINY_MHA)
        with contextlib.closing(Client.connect(daemon.runtime_dir)) as client:
            anew = pair._replace(client=client, other=client)
            anew.assert_nothing_left()
            for side in (pair.prefill, pair.decode):
                wait_until_back(side)
            with anew.counts("transfers.receive.ok", 1):
                (answer,) = anew.handed_on(prompts[3])
            assert [answer.tokens] == want(plain, prompts[3], model=TINY_MHA)
            anew.assert_nothing_left()


def test_the_daemon_is_killed_between_two_layers(plain: Plain, tmp_path: Path) -> None:
    """The step goes on, and decode computes the prompt."""
    prompts = [prompt(CHUNK, seed=50 + number) for number in range(2)]
    to_prefill, to_decode = both_given()
    with kit.daemon(HOST_TIER, keep=True) as daemon, running_pair(tmp_path, daemon.runtime_dir) as pair:
        name = pair.decode.add(Asked(prompts[0], TOKENS, to_decode))
        with by_hand(pair.prefill):
            other = pair.prefill.add(Asked(prompts[0], 1, to_prefill))
            told, _ = pair.prefill.call(layers_told, kill=daemon.process.pid)
            assert told > 1
            daemon.process.wait()
            daemon.start()
            pair.prefill.wait(other)
        answers = pair.decode.wait(name)
        with contextlib.closing(Client.connect(daemon.runtime_dir)) as client:
            anew = pair._replace(client=client, other=client)
            for side in (pair.prefill, pair.decode):
                wait_until_back(side)
            with anew.counts("transfers.receive.ok", 1):
                answers += anew.handed_on(prompts[1])
            anew.assert_nothing_left()
    assert [one.tokens for one in answers] == want(plain, *prompts)
