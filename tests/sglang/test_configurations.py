"""Pairs of other page sizes, models, ranks and caches: the same tokens as a plain server's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from examples.demo.hosts import check_hosts_possible, hosts
from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import SMOLLM2, TINY_MHA, TINY_MLA
from tests.kit.servers import at_once, prompt
from tests.sglang.expected import AT_ONCE, LENGTHS, NEW, Expected
from tests.sglang.servers import Pair, running_pair

pytestmark = pytest.mark.long

RADIX: Final = ("--disaggregation-decode-enable-radix-cache",)
TWO_RANKS: Final = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""More ranks than a machine has NUMA nodes."""

PEERS: Final = """
[peers]
listen = "tcp://{address}:7801"
[network]
transport = "mooncake"
"""


class Configuration(NamedTuple):
    """How both servers are started; ``pools`` is how many each has."""

    page_size: int
    model: str = SMOLLM2
    options: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    pools: int = 1


CONFIGURATIONS: Final = {
    "page-1": Configuration(1),
    "page-64": Configuration(64),
    "page-128": Configuration(128),
    "mla-page-1": Configuration(1, TINY_MLA),
    "mla-page-64": Configuration(64, TINY_MLA),
    "two-ranks": Configuration(16, TINY_MHA, ("--tp", "2"), environment=TWO_RANKS, pools=2),
    "mla-two-ranks": Configuration(16, TINY_MLA, ("--tp", "2"), environment=TWO_RANKS, pools=2),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_are_those_of_a_plain_server(
    name: str, answers: Callable[[str], Expected], kept_daemon: Daemon, tmp_path: Path
) -> None:
    one = CONFIGURATIONS[name]
    expected = answers(one.model)
    options = ["--page-size", str(one.page_size), *one.options]
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, model=one.model, options=options, environment=one.environment
    ) as pair:
        assert_tokens(pair, expected)
        with Client.connect(kept_daemon.runtime_dir) as client:
            assert soon(lambda: len(client.status().pools) == 2 * one.pools), "pools of those before end with them"


def test_two_daemons_on_two_hosts(expected: Expected, tmp_path: Path, require: Callable[[object, str], None]) -> None:
    try:
        check_hosts_possible()
    except PermissionError as error:
        require(None, str(error))
    with hosts(2) as (here, there):
        folders = [tmp_path / "here", tmp_path / "there"]
        for folder in folders:
            folder.mkdir()
        with (
            kit.daemon(PEERS.format(address=here.address), prefix=here.command([])) as ours,
            kit.daemon(PEERS.format(address=there.address), prefix=there.command([])) as theirs,
            running_pair(
                tmp_path,
                (ours.runtime_dir, theirs.runtime_dir),
                options=["--page-size", "64"],
                hosts=(here, there),
            ) as pair,
        ):
            assert_tokens(pair, expected)
            with Client.connect(ours.runtime_dir) as client, Client.connect(theirs.runtime_dir) as other:
                assert client.status().counters["network.sent_bytes"] > 0
                pair.end_in_order()
                assert soon(lambda: not client.status().pools + other.status().pools), "pools end with their servers"


@pytest.fixture(scope="module")
def radix(
    expected: Expected,  # noqa: ARG001  before, so that three servers never run at once
    kept_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return a pair whose decode server keeps prefixes."""
    folder = tmp_path_factory.mktemp("radix")
    with running_pair(folder, kept_daemon.runtime_dir, options=["--page-size", "16"], decode_options=RADIX) as pair:
        yield pair


def test_tokens_with_prefixes_kept_by_decode(radix: Pair, expected: Expected) -> None:
    assert_tokens(radix, expected)


@pytest.mark.parametrize("length", [129, 333, 600, 64])
def test_tokens_of_a_prompt_of_which_decode_has_all_whole_pages(radix: Pair, expected: Expected, length: int) -> None:
    """64 and what follows it are multiples of a page: there is no page to transfer then, only the first token."""
    for _ in range(3):
        assert radix.generate(prompt(length)).tokens == expected.tokens(length)


def test_tokens_of_a_prompt_of_which_decode_has_a_prefix(radix: Pair, expected: Expected) -> None:
    for length in (600, 1000):
        head = prompt(length)
        assert radix.generate(head[: length // 2], new=1).tokens
        assert radix.generate(head).tokens == expected.tokens(length)


def test_logprobs_are_those_of_a_plain_server(radix: Pair, expected: Expected) -> None:
    for length in LENGTHS:
        reply = radix.generate(prompt(length), return_logprob=True)
        got = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
        assert got == pytest.approx(expected.answer(length).logprobs, abs=1e-3)
        assert len(got) == NEW


def assert_tokens(pair: Pair, expected: Expected) -> None:
    """Compare all lengths one by one, and those at once."""
    for length in LENGTHS:
        assert pair.generate(prompt(length)).tokens == expected.tokens(length), length
    replies = at_once(lambda one: pair.generate(prompt(*one)), AT_ONCE)
    assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in AT_ONCE]
