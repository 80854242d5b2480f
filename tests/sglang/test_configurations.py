"""Pairs of other page sizes, models, ranks, caches, memory and luck: the same tokens as a plain server's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from examples.demo.hosts import check_hosts_possible, hosts
from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import SMOLLM2, TINY_CONV, TINY_DELTA, TINY_MHA, TINY_MLA, TINY_WINDOWS
from tests.kit.servers import AT_ONCE, LENGTHS, Prompt, Reply, at_once, prompt
from tests.sglang.servers import (
    NEW_TOKENS,
    RANKS,
    RETRACTED,
    RETRACTED_NEW,
    Expected,
    Pair,
    RoomWatch,
    assert_tokens,
    request,
    running_pair,
)

pytestmark = pytest.mark.long

PEERS: Final = """
[peers]
listen = "tcp://{address}:7801"
insecure = true
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
    "page-128": Configuration(128),
    "mla-page-64": Configuration(64, TINY_MLA),
    "two-ranks": Configuration(16, TINY_MHA, ("--tp", "2"), environment=RANKS, pools=2),
    "mla-two-ranks": Configuration(1, TINY_MLA, ("--tp", "2"), environment=RANKS, pools=2),
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
    with hosts(2) as (here, there), contextlib.ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(kit.daemon(PEERS.format(address=one.address), prefix=one.command([])))
            for one in (here, there)
        )
        dirs = ours.runtime_dir, theirs.runtime_dir
        with running_pair(tmp_path, dirs, options=["--page-size", "64"], hosts=(here, there)) as pair:
            assert_tokens(pair, expected)
            with Client.connect(dirs[0]) as client, Client.connect(dirs[1]) as other:
                assert client.status().counters["network.sent_bytes"] > 0
                pair.end_in_order()
                assert soon(lambda: not client.status().pools + other.status().pools), "pools end with their servers"


@pytest.mark.parametrize(
    ("model", "page_size"), [(SMOLLM2, 16), (TINY_WINDOWS, 16), (TINY_DELTA, 1)], ids=["mha", "windows", "states"]
)
def test_prefixes_kept_by_decode(
    model: str,
    page_size: int,
    answers: Callable[[str], Expected],
    kept_daemon: Daemon,
    watch: RoomWatch,
    tmp_path: Path,
) -> None:
    """Where decode has all whole pages of a prompt, there is no page to transfer, only the first token.

    Beside it the last window or the state. SGLang keeps states with pages of one token alone. Checksums, if asked for,
    are of what is transferred.
    """
    expected = answers(model)
    options = ["--page-size", str(page_size), "--max-running-requests", "8", "--disaggregation-enable-kv-checksum"]
    radix = ("--disaggregation-decode-enable-radix-cache",)
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=model, options=options, decode_options=radix) as pair:
        assert_tokens(pair, expected)
        for length in (64, 129, 333):
            assert [pair.generate(prompt(length)).tokens for _ in range(2)] == [expected.tokens(length)] * 2
        pair.decode.flush()
        for length in (600, 1000):
            assert pair.generate(prompt(length)[: length // 2], new=1).tokens
            assert pair.generate(prompt(length)).tokens == expected.tokens(length)
        for length in LENGTHS:
            reply = pair.generate(prompt(length), return_logprob=True)
            got = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
            assert got == pytest.approx(expected.answers[Prompt(length)][1], abs=1e-3)
            assert len(got) == NEW_TOKENS
        ids = [*prompt(600), *prompt(200, seed=3)]  # SGLang takes no prefix that ends in the last window
        tokens, moved = zip(*(after(pair, watch, before, ids) for before in ([], ids[:600])), strict=True)
        assert tokens[0] == tokens[1]
        with Client.connect(kept_daemon.runtime_dir) as client:
            entries = client.attach_pool("decode").manifest.entries
        a_page = sum(one.page_bytes for one in entries if one.component == "main")
        assert moved[0] - moved[1] == 600 // page_size * a_page


def after(pair: Pair, watch: RoomWatch, before: list[int], ids: list[int]) -> tuple[list[int], int]:
    """Return the tokens after a prompt before which decode has had only this, and how many bytes of it have moved."""
    pair.decode.flush()
    if before:
        pair.generate(before, new=1)
    since = watch.moved_bytes()
    tokens = pair.generate(ids).tokens
    return tokens, watch.moved_bytes() - since


# -- decode with too few tokens for its requests retracts some: their pages go to the host tier, and come back

TIER: Final = "[tiers]\nhost_bytes = 268435456\n"
OTHER_TIER: Final = "[tiers]\nhost_bytes = 134217728\n"
TOKENS: Final = 608
"""Of the prompts 435, and of the answers 480."""
RETRACTS: Final = "Retract requests|Testing retraction"


@contextlib.contextmanager
def retracting(daemon: Daemon, folder: Path, model: str) -> Iterator[Pair]:
    """Run a pair whose decode retracts; in the end nothing of its requests may be left."""
    options = ("--num-reserved-decode-tokens", "16", "--page-size", "16")
    with running_pair(folder, daemon.runtime_dir, model=model, tokens=TOKENS, options=options) as pair:
        yield pair
        with RoomWatch(daemon.runtime_dir) as watch:
            watch.assert_all_is_free(pair)


def ask_all(pair: Pair) -> list[list[int]]:
    return [one.tokens for one in at_once(lambda one: pair.generate(prompt(*one), RETRACTED_NEW), RETRACTED)]


def test_a_daemon_that_restarts_without_its_snapshots_costs_the_retracted_requests(
    answers: Callable[[str], Expected], tmp_path: Path
) -> None:
    plain = answers(SMOLLM2).retracted
    with kit.daemon(TIER, keep=True) as daemon, retracting(daemon, tmp_path, SMOLLM2) as pair:
        assert ask_all(pair) == plain
        pair.decode.wait_until_logged(RETRACTS)
        assert "SGLang copies a retracted request's pages by itself" not in pair.decode.logged()
        since = pair.decode.log_size()
        posted = [pair.front.posted("/generate", request(prompt(*one), RETRACTED_NEW)) for one in RETRACTED]
        pair.decode.wait_until_logged(RETRACTS, since)
        daemon.configure(OTHER_TIER)
        daemon.restart()
        replies = [one.result() for one in posted]
        lost = [reply for reply in replies if reply.status != 200]
        assert 0 < len(lost) < len(replies)
        assert all("SNAPSHOT_LOST" in reply.reason for reply in lost)
        for reply, tokens in zip(replies, plain, strict=True):
            assert reply.status != 200 or reply.tokens == tokens


@pytest.mark.parametrize("model", [TINY_WINDOWS, TINY_CONV, TINY_DELTA])
def test_windows_and_states_come_back_from_the_host_tier(
    model: str, answers: Callable[[str], Expected], tmp_path: Path
) -> None:
    plain = answers(model).retracted
    with kit.daemon(TIER, keep=True) as daemon, retracting(daemon, tmp_path, model) as pair:
        assert ask_all(pair) == plain
        pair.decode.wait_until_logged(RETRACTS)
        assert "SGLang copies a retracted request's pages by itself" not in pair.decode.logged()


def test_without_a_tier_sglang_copies_retracted_requests_by_itself(
    answers: Callable[[str], Expected], tmp_path: Path
) -> None:
    plain = answers(TINY_MLA).retracted
    with kit.daemon(TIER, keep=True) as daemon, retracting(daemon, tmp_path, TINY_MLA) as pair:
        assert ask_all(pair) == plain
        pair.decode.wait_until_logged(RETRACTS)
        daemon.configure("[tiers]\nhost_bytes = 0\n")
        daemon.restart()
        pair.wait_until_served(prompt(*RETRACTED[0]), plain[0][:NEW_TOKENS])
        assert ask_all(pair) == plain
        assert "SGLang copies a retracted request's pages by itself: TIER_OFF" in pair.decode.logged()


# -- failures that SGLang injects: it calls a transfer failed that is not, or computes a prompt again


def ask_rounds(pair: Pair, rounds: int) -> list[tuple[Prompt, Reply]]:
    """Return the replies to the prompts of all rounds, those of one at once."""
    found: list[tuple[Prompt, Reply]] = []
    for _ in range(rounds):
        found += zip(AT_ONCE, at_once(lambda one: pair.generate(prompt(*one)), AT_ONCE), strict=True)
    return found


def test_injected_failures_harm_only_their_requests(
    expected: Expected, kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path
) -> None:
    """SGLang uses a failed request's pages at once: only a half that has ended before leaves the others' tokens."""
    environment = {"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.003"}  # of each look: there are hundreds a request
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, options=["--page-size", "16"], chunk=64, environment=environment
    ) as pair:
        replies = ask_rounds(pair, 5)
        failed = [reply for _, reply in replies if reply.status != 200]
        assert 0 < len(failed) < len(replies)
        assert all(reply.reason for reply in failed)
        for one, reply in replies:
            assert reply.status != 200 or reply.tokens == expected.tokens(*one)
        watch.assert_all_is_free(pair)


def test_prompts_that_are_computed_again_answer_the_same(
    expected: Expected, kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path
) -> None:
    environment = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}
    options = ["--page-size", "16", "--optimistic-prefill-attempts", "3"]
    with running_pair(tmp_path, kept_daemon.runtime_dir, options=options, environment=environment) as pair:
        for one, reply in ask_rounds(pair, 2):
            assert reply.tokens == expected.tokens(*one)
        pair.prefill.wait_until_logged("optimistic prefill yielded")
        watch.assert_all_is_free(pair)


# -- a daemon that ends with its pools


@pytest.mark.parametrize("memory", ["engine", "daemon"])
def test_memory_of_the_engine_outlives_the_daemon_and_servers_end_without_the_daemons(
    expected: Expected, tmp_path: Path, memory: str
) -> None:
    environment = {"KVFERRY_SGLANG_MEMORY": memory}
    with kit.daemon() as daemon, running_pair(tmp_path, daemon.runtime_dir, environment=environment) as pair:
        assert pair.generate(prompt(600)).tokens == expected.tokens(600)
        daemon.restart()
        if memory == "daemon":
            for server in (pair.prefill, pair.decode):
                server.wait_until_ended()
                assert "POOL_LOST" in server.logged()
            return
        pair.wait_until_served(prompt(600), expected.tokens(600))
        assert pair.generate(prompt(333)).tokens == expected.tokens(333)
        pair.assert_healthy()
        with Client.connect(daemon.runtime_dir) as client:
            assert len(client.status().pools) == 2
            pair.end_in_order()
            assert soon(lambda: not client.status().pools)
