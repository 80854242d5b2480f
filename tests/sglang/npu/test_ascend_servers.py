"""A prefill and a decode server on a simulated NPU: SGLang's own code for Ascend, pools in the daemon's memory there.

Decode's graphs are captured and replayed. The tokens are a plain server's on the same device; what has arrived is
counted, because decode may compute again what did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_ASCEND, TINY_DEEPSEEK
from tests.kit.servers import AT_ONCE, LENGTHS, SIDES, Side, at_once, prompt
from tests.sglang.servers import RETRACTED, Expected, Pair, RoomWatch, assert_tokens, new_room, running_pair

TOKENS = 2048
LONG = 1200
"""Tokens of a prompt that is under way for several chunks."""
GROWING = 160
"""Tokens of the answers to requests that outgrow decode's pool."""
SOON_S = 120.0


@pytest.fixture(scope="module")
def expected(answers: Callable[[str], Expected]) -> Expected:
    """Return what a plain server on the device answers."""
    return answers(TINY_ASCEND)


@pytest.fixture(scope="module")
def npu_daemon() -> Iterator[Daemon]:
    """Return the daemon of the pair, of which a device's memory does not outlive it."""
    with kit.daemon("[tiers]\nhost_bytes = 67108864\n") as daemon:
        yield daemon


@pytest.fixture
def watch(npu_daemon: Daemon) -> Iterator[RoomWatch]:
    with RoomWatch(npu_daemon.runtime_dir) as one:
        yield one


@pytest.fixture(scope="module")
def pair(
    expected: Expected,  # noqa: ARG001  before, so that three servers never run at once
    npu_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return the pair of all tests here."""
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(folder, npu_daemon.runtime_dir, model=TINY_ASCEND, tokens=TOKENS, chunk=256) as one:
        yield one


def arrived(watch: RoomWatch) -> int:
    return watch.status().counters.get("transfers.receive.ok", 0)


def test_tokens_are_those_of_a_plain_server_and_all_have_arrived(
    pair: Pair, expected: Expected, watch: RoomWatch
) -> None:
    assert [(one.device, one.registered_by) for one in watch.status().pools] == [("npu:0", None)] * 2
    before = arrived(watch)
    assert_tokens(pair, expected)
    assert arrived(watch) - before == len(LENGTHS) + len(AT_ONCE)
    assert "npu graph: True" in pair.decode.logged()


def test_decode_computes_with_the_pages_that_prefill_has_in_the_daemon(
    pair: Pair, expected: Expected, npu_daemon: Daemon
) -> None:
    """The control of the others: zeros in their place change the tokens."""
    ids = prompt(600, seed=99)
    as_it_is = pair.generate(ids).tokens
    assert pair.generate(ids).tokens == as_it_is, "prefill's prefix cache alone changes nothing"
    with Client.connect(npu_daemon.runtime_dir) as other:
        pool = other.attach_pool("prefill")
        for role in ("k", "v"):
            pool.tensor("main", role)[:, 1:] = 0
        torch.accelerator.synchronize()
        pool.close()
    assert pair.generate(ids).tokens != as_it_is
    pair.prefill.flush()
    assert pair.generate(ids).tokens == as_it_is
    assert pair.generate(prompt(64)).tokens == expected.tokens(64)


@pytest.mark.parametrize("side", SIDES)
def test_an_abort_amid_the_chunks_ends_both_halves(
    pair: Pair, expected: Expected, watch: RoomWatch, side: Side
) -> None:
    room = new_room()
    halves = {one: pair.half(one, prompt(LONG, room % 1000), room, rid=f"{one}-{side}") for one in SIDES}
    watch.wait_until_room_arrives(room)
    pair.abort(side, f"{side}-{side}")
    for half in halves.values():
        assert half.result(SOON_S).reason
    watch.wait_until_idle()
    assert pair.generate(prompt(129)).tokens == expected.tokens(129)


def test_a_killed_decode_server_comes_back(pair: Pair, expected: Expected, watch: RoomWatch) -> None:
    room = new_room()
    halves = {one: pair.half(one, prompt(LONG, room % 1000), room) for one in SIDES}
    watch.wait_until_room_arrives(room)
    pair.decode.kill()
    assert halves["prefill"].result(SOON_S).reason
    watch.wait_until_idle()
    pair.restart("decode")
    pair.wait_until_served(prompt(129), expected.tokens(129))
    watch.assert_all_is_free(pair)


def test_latent_attention_in_chunks_and_retracted_requests(
    answers: Callable[[str], Expected], npu_daemon: Daemon, watch: RoomWatch, tmp_path: Path
) -> None:
    """Nine pages are too few for the requests of the second part at once: decode retracts some."""
    latent, before = answers(TINY_DEEPSEEK), arrived(watch)
    options = ("--num-reserved-decode-tokens", "16")
    with running_pair(
        tmp_path, npu_daemon.runtime_dir, model=TINY_DEEPSEEK, tokens=9 * 128, chunk=256, options=options
    ) as both:
        assert_tokens(both, latent)
        assert arrived(watch) - before == len(LENGTHS) + len(AT_ONCE)
        assert "npu graph: True" in both.decode.logged()
        alone = [both.generate(prompt(*one), GROWING).tokens for one in RETRACTED]
        replies = at_once(lambda one: both.generate(prompt(*one), GROWING), RETRACTED)
        assert [reply.tokens for reply in replies] == alone
        both.decode.wait_until_logged("Retract requests|Testing retraction")
        assert "SGLang copies a retracted request's pages by itself" not in both.decode.logged()
        watch.assert_all_is_free(both)


@pytest.mark.long
def test_three_hundred_requests_and_a_killed_daemon_with_registered_memory(expected: Expected, tmp_path: Path) -> None:
    environment = {"KVFERRY_SGLANG_MEMORY": "engine"}
    with (
        kit.daemon() as daemon,
        running_pair(
            tmp_path, daemon.runtime_dir, model=TINY_ASCEND, tokens=TOKENS, chunk=256, environment=environment
        ) as both,
    ):
        with RoomWatch(daemon.runtime_dir) as watch:
            assert all(one.registered_by is not None for one in watch.status().pools)
            for _ in range(300 // len(AT_ONCE)):
                replies = at_once(lambda one: both.generate(prompt(*one)), AT_ONCE)
                assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in AT_ONCE]
            assert arrived(watch) == 300
        daemon.restart()
        both.wait_until_served(prompt(333), expected.tokens(333))
        both.assert_healthy()
