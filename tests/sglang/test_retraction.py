"""Decode with too few tokens for its requests retracts some: their pages go to the host tier, and come back.

Which requests run together is not that of a plain server, which has tokens for all of them, but their tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.folders import SMOLLM2, TINY_MLA
from tests.kit.servers import Reply, at_once, prompt
from tests.sglang.expected import RETRACTED, RETRACTED_NEW, Expected
from tests.sglang.servers import NEW_TOKENS, Pair, request, running_pair
from tests.sglang.watch import RoomWatch

pytestmark = pytest.mark.long

TIER: Final = "[tiers]\nhost_bytes = 268435456\n"
NO_TIER: Final = "[tiers]\nhost_bytes = 0\n"
TOKENS: Final = 608
"""Of the prompts 435, and of the answers 480."""
DECODE: Final = ("--num-reserved-decode-tokens", "16", "--page-size", "16")
RETRACTS: Final = "Retract requests|Testing retraction"


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plain(answers: Callable[[str], Expected], model: str) -> list[list[int]]:
    return answers(model).retracted


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with kit.daemon(TIER, keep=True) as one:
        yield one


@pytest.fixture
def watch(daemon: Daemon) -> Iterator[RoomWatch]:
    with RoomWatch(daemon.runtime_dir) as one:
        yield one


@pytest.fixture(scope="module")
def pair(
    plain: list[list[int]],  # noqa: ARG001  before, so that three servers never run at once
    model: str,
    daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("retraction")
    with running_pair(folder, daemon.runtime_dir, model=model, tokens=TOKENS, options=DECODE) as one:
        yield one


def ask_all(pair: Pair) -> list[Reply]:
    return at_once(lambda one: pair.generate(prompt(*one), RETRACTED_NEW), RETRACTED)


@pytest.mark.parametrize("model", [SMOLLM2, TINY_MLA], indirect=True, scope="module")
def test_retracted_requests_answer_the_same(pair: Pair, watch: RoomWatch, plain: list[list[int]]) -> None:
    assert [reply.tokens for reply in ask_all(pair)] == plain
    pair.decode.wait_until_logged(RETRACTS)
    assert "SGLang copies a retracted request's pages by itself" not in pair.decode.logged()
    watch.assert_all_is_free(pair)


@pytest.mark.parametrize("model", [SMOLLM2], indirect=True, scope="module")
def test_daemon_that_restarts_in_between_costs_the_retracted_ones(
    pair: Pair, daemon: Daemon, plain: list[list[int]]
) -> None:
    since = pair.decode.log_size()
    posted = [pair.router.posted("/generate", request(prompt(*one), RETRACTED_NEW)) for one in RETRACTED]
    pair.decode.wait_until_logged(RETRACTS, since)
    daemon.restart()
    replies = [one.result() for one in posted]
    lost = [reply for reply in replies if reply.status != 200]
    assert lost
    assert all("SNAPSHOT_LOST" in reply.reason for reply in lost)
    kept = [(reply.tokens, tokens) for reply, tokens in zip(replies, plain, strict=True) if reply.status == 200]
    assert kept
    assert all(ours == theirs for ours, theirs in kept)
    with RoomWatch(daemon.runtime_dir) as watch:
        watch.assert_all_is_free(pair)


@pytest.mark.parametrize("model", [TINY_MLA], indirect=True, scope="module")
def test_without_a_tier_sglang_copies_by_itself(pair: Pair, daemon: Daemon, plain: list[list[int]]) -> None:
    daemon.configure(NO_TIER)
    daemon.restart()
    try:
        pair.wait_until_served(prompt(*RETRACTED[0]), plain[0][:NEW_TOKENS])
        assert [reply.tokens for reply in ask_all(pair)] == plain
        assert "SGLang copies a retracted request's pages by itself: TIER_OFF" in pair.decode.logged()
        with RoomWatch(daemon.runtime_dir) as watch:
            watch.assert_all_is_free(pair)
    finally:
        daemon.configure(TIER)
        daemon.restart()
