"""One prefill and one decode server by one daemon, SGLang's router in front: the same tokens as a plain server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemons import RestartedDaemon
from tests.sglang.expected import LENGTHS, Expected, at_once
from tests.sglang.servers import Pair, in_parallel, prompt, running_pair


@pytest.fixture(scope="module")
def pair(
    expected: Expected,  # noqa: ARG001  before, so that three servers never run at once
    kept_daemon: RestartedDaemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return the pair of all tests here."""
    with running_pair(tmp_path_factory.mktemp("pair"), kept_daemon.runtime_dir, options=["--page-size", "16"]) as one:
        yield one


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_a_plain_server(pair: Pair, expected: Expected, length: int) -> None:
    assert pair.generate(prompt(length)).tokens == expected.tokens(length)


def test_tokens_of_requests_at_once(pair: Pair, expected: Expected) -> None:
    replies = in_parallel([lambda one=one: pair.generate(prompt(*one)) for one in at_once()])
    assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in at_once()]
