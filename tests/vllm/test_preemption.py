"""What vLLM's scheduler may do with a request at any moment: blocks that are being read are nobody else's meanwhile.

It must neither crash, nor wait, nor say wrong tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.clients import Client, MhaSpec, ModelIdentity
from kvferry.clients.engine import Engine as Session
from kvferry.clients.vllm.configuration import Configuration, Settings
from kvferry.clients.vllm.scheduler import Scheduler
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_MHA
from tests.vllm.in_process import (
    NOTHING,
    Answer,
    Asked,
    Engine,
    Plain,
    Served,
    aborted,
    aborted_before_it_began,
    assert_all_is_free,
    begin_anew,
    by_hand,
    cached_blocks,
    engine,
    full_group,
    is_pinned,
    left,
    metrics,
    preempted,
    prompt_of,
    settings,
    stepped,
    stepped_until,
    stepped_until_running,
    used_blocks,
)
from tests.vllm.servers import BLOCK

TOKENS = 64
LONG_S = 1.0
"""For which nothing may happen."""


@pytest.fixture(scope="module")
def small(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return an engine with fewer blocks than its requests want."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 25, "max_model_len": 512, "disable_log_stats": False}
    with engine(tmp_path_factory.mktemp("small"), settings(kept_daemon, "small"), model=TINY_MHA, **options) as one:
        yield one


def prompts(name: str, count: int = 5) -> list[str]:
    """Return prompts of five blocks and a bit."""
    return [prompt_of(f"{name} {number}", 5) for number in range(count)]


@contextlib.contextmanager
def preempting(one: Engine) -> Iterator[None]:
    """Check that vLLM has preempted requests meanwhile."""
    before = one.call(metrics)["vllm:num_preemptions"]
    yield
    assert one.call(metrics)["vllm:num_preemptions"] > before


def test_preempted_requests_have_the_same_tokens(kept_daemon: Daemon, small: Engine, plain: Plain) -> None:
    asked = prompts("preempted")
    want = plain.tokens(*asked, tokens=TOKENS, model=TINY_MHA)
    with preempting(small):
        assert [one.tokens for one in small.ask(*asked, tokens=TOKENS)] == want
    with by_hand(small):
        answers = small.call(preempted_all_again_and_again, [Asked(one, 16) for one in asked[:3]])
    assert [one.tokens for one in answers] == [one[:16] for one in want[:3]]
    assert_all_is_free(kept_daemon, small)


def preempted_all_again_and_again(served: Served, asked: list[Asked]) -> list[Answer]:
    """Preempt all requests again and again while they are computed; return their answers."""
    names = [served.add(one) for one in asked]
    for count in range(1, asked[0].tokens, 3):
        served.step_until(lambda: all(one in served.answers for one in names))
        while any(len(served.answers[one].tokens) <= count for one in names):
            served.step()
        served.step_until(lambda: {*served.states().values()} <= {"RUNNING"})
        preempted(served)
    return served.wait(names)


def test_blocks_are_given_to_nobody_while_a_store_reads_them(kept_daemon: Daemon, small: Engine, plain: Plain) -> None:
    """The worker waits for a daemon that stands still in the middle of a store of a preempted request's blocks."""
    asked = prompts("while they are read")
    with by_hand(small), preempting(small):
        names = [small.add(one, tokens=TOKENS) for one in asked]
        small.call(stepped_until_running, 3)
        with kept_daemon.stopped():
            waiting = small.begin(step_until_preempted)
            assert not small.has_answered(LONG_S)
        waiting()
        answers = small.wait(*names)
    assert [one.tokens for one in answers] == plain.tokens(*asked, tokens=TOKENS, model=TINY_MHA)
    assert_all_is_free(kept_daemon, small)


def step_until_preempted(served: Served) -> None:
    """Step until a request was preempted, and once more."""
    served.step_until(lambda: any(one.num_preemptions for one in served.scheduler.requests.values()))
    served.step()


def test_request_that_ends_before_its_store_keeps_its_blocks_until_then(
    kept_daemon: Daemon, small: Engine, plain: Plain
) -> None:
    (asked,) = prompts("ends before its store", 1)
    want = plain.tokens(asked, model=TINY_MHA)
    with by_hand(small):
        name = small.add(asked)
        assert left(kept_daemon) == NOTHING  # it is looked up by then
        with kept_daemon.stopped():
            (answer,) = small.wait(name)
            assert [answer.tokens] == want
            assert small.call(used_blocks)
    assert_all_is_free(kept_daemon, small)
    again = small.ask_anew(asked)
    assert ([again.tokens], again.cached > 0) == (want, True)
    assert_all_is_free(kept_daemon, small)


def test_reset_waits_for_what_is_being_stored(kept_daemon: Daemon) -> None:
    """A server whose weights were changed is reset: what was computed with those before must not come back."""
    spec = MhaSpec(layers=30, tokens=64 * BLOCK, page_size=BLOCK, dtype="float32", kv_heads=3, head_dim=64)
    model = ModelIdentity(name="reset", revision="1")
    told = Configuration(Settings(), "reset", "reset", 1, BLOCK, is_producer=True, is_consumer=True)
    session = Session("reset-scheduler", str(kept_daemon.runtime_dir), instance="reset")
    with contextlib.closing(session), Client.connect(kept_daemon.runtime_dir, instance="reset") as worker:
        worker.create_pool("reset", spec, model=model, lifetime="instance")
        ids = worker.allocate("reset", 64)
        scheduler = Scheduler(session, told, [full_group(BLOCK)], BLOCK, "127.0.0.1", None)
        with kept_daemon.stopped():
            storing = worker.store("reset", [bytes([number]) * 16 for number in range(64)], ids)
        worker.wait_accepted(storing)  # else the reset, on a connection of its own, may be there before it
        assert scheduler.clear()
        worker.wait_done(storing)
        assert [one for one in cached_blocks(kept_daemon) if one.model == model.label] == []


@pytest.mark.parametrize("state", ["added", "found", "loading", "running"])
def test_abort(kept_daemon: Daemon, small: Engine, plain: Plain, state: str) -> None:
    (asked,) = prompts(f"aborted when {state}", 1)
    is_cached = state in {"found", "loading"}
    if is_cached:
        small.ask(asked)
        small.drain()
        begin_anew(small)
    with by_hand(small):
        name = small.add(asked)
        assert soon(lambda: is_pinned(kept_daemon) is is_cached)
        with kept_daemon.stopped():
            if state == "loading":
                small.call(stepped_until, "WAITING_FOR_REMOTE_KVS")
            elif state == "running":
                small.call(stepped_until_running, 1)
            small.call(aborted, name)
            small.call(stepped)
        assert_all_is_free(kept_daemon, small)
    (again,) = small.ask(asked)
    assert [again.tokens] == plain.tokens(asked, model=TINY_MHA)
    assert (again.cached > 0) is (is_cached or state == "running")
    assert_all_is_free(kept_daemon, small)


def test_preempted_request_is_aborted_while_its_blocks_come_back(
    kept_daemon: Daemon, small: Engine, plain: Plain
) -> None:
    """It has had blocks that were being stored: vLLM ends if it is told twice that all is over."""
    (asked,) = prompts("aborted while it is loaded again", 1)
    with by_hand(small):
        name = small.add(asked, tokens=TOKENS)
        small.call(stepped_until, "RUNNING", name)
        small.call(stepped, 5)
        assert small.call(preempted) == 1
        small.call(aborted_before_it_began, name)
    assert_all_is_free(kept_daemon, small)
    assert [one.tokens for one in small.ask(asked)] == plain.tokens(asked, model=TINY_MHA)


def test_daemon_that_stands_still_costs_seconds(kept_daemon: Daemon, small: Engine, plain: Plain) -> None:
    """It is not away: its memory must not be written by anybody else. But who only wants to look does not wait."""
    (asked,) = prompts("stands still", 1)
    want = plain.tokens(asked, model=TINY_MHA)
    small.ask_anew(asked)
    begin_anew(small)
    with kept_daemon.stopped():
        (answer,) = small.ask(asked)
        assert ([answer.tokens], answer.cached) == (want, 0)
    assert_all_is_free(kept_daemon, small)
    (answer,) = small.ask(asked)
    assert [answer.tokens] == want
