"""Blocks that are being read are nobody else's: preempted requests, requests that end before their stores, aborts."""

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
from tests.vllm.cached import NOTHING, cached_blocks, left, pinned_bytes
from tests.vllm.in_process import (
    BLOCK,
    STORY,
    Engine,
    Plain,
    Served,
    abort,
    begin_anew,
    by_hand,
    engine,
    free_blocks,
    metrics,
    reset,
)

FREE = 24
"""Blocks of the engine, its null block aside."""
TOKENS = 64
LONG_S = 1.0
"""For which nothing may happen."""


@pytest.fixture(scope="module")
def small(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return an engine with fewer blocks than its requests want."""
    told = {"runtime_dir": str(kept_daemon.runtime_dir), "pool": "small"}
    folder = tmp_path_factory.mktemp("small")
    options: dict[str, Any] = {"num_gpu_blocks_override": FREE + 1, "max_model_len": 512, "disable_log_stats": False}
    with engine(folder, told, model=TINY_MHA, **options) as one:
        yield one


def prompts(name: str, count: int = 5) -> list[str]:
    """Return prompts of five blocks and a bit."""
    return [f"{name} {number}: " + STORY * 9 for number in range(count)]


def preemptions(one: Engine) -> float:
    """Return how many there were so far."""
    return one.call(metrics)["vllm:num_preemptions"]


def assert_all_is_free(daemon: Daemon, one: Engine) -> None:
    """Check that neither the engine nor the daemon holds anything once all is over."""
    one.drain()
    assert left(daemon.runtime_dir) == NOTHING
    assert one.call(free_blocks) == FREE


def test_preempted_requests_have_the_same_tokens(kept_daemon: Daemon, small: Engine, plain: Plain) -> None:
    asked = prompts("preempted")
    before = preemptions(small)
    answers = small.ask(*asked, tokens=TOKENS)
    assert [one.tokens for one in answers] == plain.tokens(*asked, tokens=TOKENS, model=TINY_MHA)
    assert preemptions(small) > before
    assert_all_is_free(kept_daemon, small)


def test_blocks_are_given_to_nobody_while_a_store_reads_them(kept_daemon: Daemon, small: Engine, plain: Plain) -> None:
    """The worker waits for a daemon that stands still in the middle of a store of a preempted request's blocks."""
    asked = prompts("while they are read")
    before = preemptions(small)
    with by_hand(small):
        names = [small.add(one, tokens=TOKENS) for one in asked]
        small.call(step_until_running, 3)
        with kept_daemon.stopped():
            waiting = small.begin(step_until_preempted)
            assert not small.has_answered(LONG_S)
        waiting()
    answers = small.wait(*names)
    assert [one.tokens for one in answers] == plain.tokens(*asked, tokens=TOKENS, model=TINY_MHA)
    assert preemptions(small) > before
    assert_all_is_free(kept_daemon, small)


def step_until_running(served: Served, count: int) -> None:
    """Step until so many requests are running."""
    served.step_until(lambda: len(served.scheduler.running) >= count)


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
        assert left(kept_daemon.runtime_dir) == NOTHING  # it is looked up by then
        with kept_daemon.stopped():
            (answer,) = small.wait(name)
            assert [answer.tokens] == want
            assert small.call(free_blocks) < FREE
    assert_all_is_free(kept_daemon, small)
    assert small.call(reset)
    (again,) = small.ask(asked)
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
        scheduler = Scheduler(session, told, "127.0.0.1", None)
        with kept_daemon.stopped():
            storing = worker.store("reset", [bytes([number]) * 16 for number in range(64)], ids)
        worker.wait_accepted(storing)  # else the reset, on a connection of its own, may be there before it
        assert scheduler.clear()
        worker.wait_done(storing)
        assert [one for one in cached_blocks(kept_daemon.runtime_dir) if one.model == model.label] == []


@pytest.mark.parametrize("state", ["added", "found", "loading", "running"])
def test_abort(kept_daemon: Daemon, small: Engine, plain: Plain, state: str) -> None:
    (asked,) = prompts(f"aborted when {state}", 1)
    want = plain.tokens(asked, model=TINY_MHA)
    is_cached = state in {"found", "loading"}
    if is_cached:
        small.ask(asked)
        small.drain()
        begin_anew(small)
    with by_hand(small):
        name = small.add(asked)
        assert soon(lambda: (pinned_bytes(kept_daemon.runtime_dir) > 0) is is_cached)
        with kept_daemon.stopped():
            if state == "loading":
                small.call(step_until_loading)
            elif state == "running":
                small.call(step_until_running, 1)
            small.call(abort, name)
            small.call(Served.step)
        assert_all_is_free(kept_daemon, small)
    (again,) = small.ask(asked)
    assert ([again.tokens], again.cached > 0) == (want, is_cached or state == "running")
    assert_all_is_free(kept_daemon, small)


def step_until_loading(served: Served) -> None:
    """Step until a request's blocks are on their way."""
    served.step_until(lambda: "WAITING_FOR_REMOTE_KVS" in served.states().values())


def test_daemon_that_stands_still_costs_seconds(kept_daemon: Daemon, small: Engine, plain: Plain) -> None:
    """It is not away: its memory must not be written by anybody else. But who only wants to look does not wait."""
    (asked,) = prompts("stands still", 1)
    want = plain.tokens(asked, model=TINY_MHA)
    small.ask(asked)
    small.drain()
    assert small.call(reset)
    with kept_daemon.stopped():
        (answer,) = small.ask(asked)
        assert ([answer.tokens], answer.cached) == (want, 0)
    assert_all_is_free(kept_daemon, small)
