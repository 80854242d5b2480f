"""One prefill and one decode server by one daemon, vLLM's own proxy in front: the same tokens as a plain server's.

All tests share the servers, whatever was aborted or killed before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import pytest

from tests.kit.daemons import Daemon
from tests.kit.servers import (
    AT_ONCE,
    LENGTHS,
    SIDES,
    Prompt,
    Reply,
    Side,
    Watch,
    assert_demo_is_identical,
    at_once,
    prompt,
)
from tests.vllm.in_process import Asked, Plain
from tests.vllm.servers import NEW_TOKENS, REMOTE_DECODE, Pair, left_alone, request, running_pair

LONG: Final = 2000
"""Tokens of a prompt that is under way for many chunks."""

MANY: Final = 3500
"""Tokens that take minutes to generate."""

SOON_S: Final = 30.0
"""Within which a request has ended that cannot go on."""
LONG_S: Final = 90.0
"""Within which a long prompt is computed, by one server after the other."""

HOLD_S: Final = 20.0
"""How long prefill keeps what nobody asks for."""

Expected = Callable[[Prompt], list[int]]


@pytest.fixture(scope="module")
def expected(plain: Plain) -> Expected:
    """Return what tells the new tokens that vLLM without a connector answers to a prompt of the tests."""
    wanted = [*(Prompt(length) for length in LENGTHS), *AT_ONCE]
    answers = plain.tokens(*(Asked(tuple(prompt(*one))) for one in wanted), tokens=NEW_TOKENS)
    return dict(zip(wanted, answers, strict=True)).__getitem__


@pytest.fixture(scope="module")
def pair(
    expected: Expected,  # noqa: ARG001  before, so that no more than the pair computes
    kept_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return the pair of all tests here."""
    folder = tmp_path_factory.mktemp("pair")
    settings = {"hold_s": HOLD_S}
    with running_pair(folder, kept_daemon.runtime_dir, chunk=256, settings=settings, policy="recompute") as one:
        yield one


@pytest.fixture
def watch(kept_daemon: Daemon) -> Iterator[Watch]:
    with Watch(kept_daemon.runtime_dir) as one:
        yield one


@pytest.fixture
def well(pair: Pair, expected: Expected, kept_daemon: Daemon) -> Iterator[Pair]:
    """Return the pair, which must be healthy after the test, too, with nothing under way, and hand over a prompt."""
    yield pair
    pair.assert_healthy()
    with Watch(kept_daemon.runtime_dir) as watch:
        watch.wait_until_idle()

        def is_handed_over() -> bool:
            before = watch.arrived()
            assert pair.generate(prompt(129)).tokens == expected(Prompt(129)), pair.decode.log_tail()
            return watch.arrived() > before

        pair.front.wait_for(is_handed_over, "hand over again")


def test_tokens_are_those_of_a_plain_server(pair: Pair, expected: Expected, watch: Watch) -> None:
    before = watch.arrived()
    for length in LENGTHS:
        assert pair.generate(prompt(length)).tokens == expected(Prompt(length)), length
    replies = at_once(lambda one: pair.generate(prompt(*one)), AT_ONCE)
    assert [reply.tokens for reply in replies] == [expected(one) for one in AT_ONCE]
    assert watch.arrived() == before + len(LENGTHS) + len(AT_ONCE), "decode has computed some alone"


def test_both_pools_are_in_the_status(pair: Pair, kept_daemon: Daemon) -> None:
    command = [sys.executable, "-m", "kvferry.clients.cli.main", "status", "--json", "--runtime-dir"]
    done = subprocess.run([*command, os.fspath(kept_daemon.runtime_dir)], capture_output=True, text=True, check=True)
    status = json.loads(done.stdout)
    assert {one["pool"] for one in status["pools"]} == set(SIDES), (done.stdout, pair)
    assert {"prefill-owned", "decode-owned"} <= {one["name"] for one in status["sessions"]}


def test_curl_has_a_chat_streamed(pair: Pair, watch: Watch) -> None:
    before = watch.arrived()
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
    whole = pair.prefill.post("/v1/chat/completions", body).choice["message"]["content"]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    command = ["curl", "--silent", "--show-error", "--max-time", "60", f"{pair.front.url}/v1/chat/completions"]
    command += ["--header", "Content-Type: application/json", "--data", json.dumps(streamed)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    *events, done, end = [line.removeprefix("data: ") for line in lines]
    assert (done, end) == ("[DONE]", "")
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole
    assert watch.arrived() == before + 1


def test_a_client_that_goes_amid_the_chunks(well: Pair, watch: Watch) -> None:
    with left_alone(well.prefill, request(prompt(LONG), 1, kv_transfer_params=REMOTE_DECODE)):
        watch.wait_until_open("send")
    watch.wait_until_idle()


def test_a_daemon_killed_amid_the_chunks(well: Pair, kept_daemon: Daemon, expected: Expected, watch: Watch) -> None:
    """The servers stay, and compute alone meanwhile: the daemon after it adopts their pools."""
    under_way = amid_chunks(well, watch, seed=3)
    kept_daemon.kill()
    under_way.result(LONG_S)  # an answer or an error: nothing hangs
    assert well.generate(prompt(129)).tokens == expected(Prompt(129))
    well.assert_healthy()
    kept_daemon.start()


@pytest.mark.long
def test_a_client_of_the_proxy_that_goes_amid_the_chunks(well: Pair, watch: Watch) -> None:
    """The proxy has prefill end, and never asks decode: nobody but the clock says so."""
    with left_alone(well.front, request(prompt(LONG, seed=1), 600)):
        watch.wait_until_open("send")
    watch.wait_until_idle(HOLD_S + SOON_S)


@pytest.mark.long
def test_a_client_that_goes_while_decode_generates(well: Pair, watch: Watch) -> None:
    before = watch.arrived()
    with left_alone(well.front, request(prompt(129, seed=2), MANY, stream=True)):
        watch.wait_until(lambda: watch.arrived() > before and running(well, "decode") > 0, "decode generates")
    well.decode.wait_for(lambda: is_alone(well), "end what nobody reads", SOON_S)


@pytest.mark.long
@pytest.mark.parametrize("side", SIDES)
def test_a_server_killed_amid_the_chunks_comes_back(well: Pair, watch: Watch, side: Side) -> None:
    other: Side = "decode" if side == "prefill" else "prefill"
    under_way = amid_chunks(well, watch, seed=4 + SIDES.index(side))
    well.side(side).kill()
    assert under_way.result(LONG_S).status != 200
    assert well.side(other).get("/health").status == 200
    watch.wait_until_idle(HOLD_S + SOON_S)
    well.restart(side)


def running(pair: Pair, side: Side) -> int:
    """Return how many requests a server runs."""
    text = pair.side(side).get("/metrics").body["error"]
    [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return int(float(line.rpartition(" ")[2]))


def is_alone(pair: Pair) -> bool:
    """Return whether decode runs nothing once a request has been answered: without one it would not say so."""
    assert pair.decode.generate(prompt(5), 1).tokens
    return running(pair, "decode") == 0


def amid_chunks(pair: Pair, watch: Watch, seed: int) -> Future[Reply]:
    """Send a long request to the proxy, and return once prefill sends it."""
    reply = pair.generating(prompt(LONG, seed))
    watch.wait_until_open("send")
    return reply


@pytest.mark.long
def test_the_demo_is_identical_and_its_kv_went_through_the_daemon(tmp_path: Path) -> None:
    assert_demo_is_identical("vllm", tmp_path / "figures.json")
