"""Prompts between engines of two ranks, of two daemons on one host, and of two hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from examples.demo.hosts import Host, check_hosts_possible, hosts
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_GQA, TINY_MHA
from tests.vllm.cached import HOST_TIER
from tests.vllm.in_process import BLOCK, TOKENS, Asked, Plain, by_hand, engine
from tests.vllm.pairs import CHUNK, Pair, aborted, both_given, prompt, running_pair, stepped, want

LENGTHS: Final = (1, BLOCK, BLOCK + 1, 300)
NEVER: Final = {"hold_s": 3000.0, "receive_s": 3000.0}
TWO_RANKS: Final[dict[str, Any]] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PEERS: Final = """
[peers]
listen = "tcp://{address}:7801"
[network]
transport = "mooncake"
"""

pytestmark = pytest.mark.long


PROMPTS: Final = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
HALVED: Final = [prompt(5 * CHUNK, seed) for seed in (10, 11, 12)]


def assert_handed_on(pair: Pair, expected: Mapping[tuple[int, ...], list[int]], ranks: int) -> None:
    """Assert that prompts arrive whichever side comes first; and what becomes of aborts at either side."""
    with pair.counts("transfers.receive.ok", ranks * len(PROMPTS)):
        answers = pair.handed_on(*PROMPTS)
    assert [one.tokens for one in answers] == [expected[one] for one in PROMPTS]
    with pair.counts("transfers.receive.ok", ranks):
        answers = halfway(pair, HALVED[0], lambda _: None)
    answers += halfway(pair, HALVED[1], lambda name: pair.prefill.call(aborted, name))
    assert [one.tokens for one in answers] == [expected[one] for one in HALVED[:2]]
    (params,) = pair.prefilled(HALVED[2])
    with by_hand(pair.decode):
        pair.decode.call(aborted, pair.decode.add(Asked(HALVED[2], TOKENS, params)))
    pair.assert_nothing_left()


def halfway(pair: Pair, one: tuple[int, ...], happens: Callable[[str], object]) -> list[Any]:
    """Have decode wait for a prompt, of which half is computed when something happens; return its answer."""
    to_prefill, to_decode = both_given()
    name = pair.decode.add(Asked(one, TOKENS, to_decode))
    assert soon(lambda: pair.receives() > 0)
    with by_hand(pair.prefill):
        other = pair.prefill.add(Asked(one, 1, to_prefill))
        pair.prefill.call(stepped, 2)
        assert soon(lambda: pair.arrived_pages() > 0)
        happens(other)
    return pair.decode.wait(name)


def test_two_ranks(kept_daemon: Daemon, tmp_path: Path) -> None:
    """Their sums are others than one rank's."""
    told = [*PROMPTS, *HALVED]
    with engine(tmp_path, model=TINY_GQA, enable_prefix_caching=False, **TWO_RANKS) as alone:
        answers = alone.ask(*(Asked(one, TOKENS) for one in told))
    expected = {one: answer.tokens for one, answer in zip(told, answers, strict=True)}
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, model=TINY_GQA, prefill=NEVER, decode=NEVER, **TWO_RANKS
    ) as pair:
        assert_handed_on(pair, expected, ranks=2)
        assert sum(one.pool.endswith(("-tp0", "-tp1")) for one in pair.client.status().pools) == 4


def test_two_daemons_on_one_host(plain: Plain, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    with (
        kit.daemon(HOST_TIER) as one,
        kit.daemon(HOST_TIER) as other,
        running_pair(
            tmp_path, (one.runtime_dir, other.runtime_dir), model=TINY_MHA, prefill=NEVER, decode=NEVER
        ) as pair,
    ):
        assert_handed_on_through_prefill(pair, plain)


def assert_handed_on_through_prefill(pair: Pair, plain: Plain) -> None:
    """Assert that prompts arrive at another daemon, of which prefill's answer says where its own is."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    with pair.counts("transfers.receive.ok", len(prompts)):
        answers = pair.handed_on(*prompts)
    assert [one.tokens for one in answers] == want(plain, *prompts, model=TINY_MHA)
    one, other = prompt(5 * CHUNK, 20), prompt(5 * CHUNK, 21)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode):
        pair.decode.call(aborted, pair.decode.add(Asked(one, TOKENS, params)))
    pair.assert_nothing_left()
    addresses = list(pair.client.status().addresses)
    to_prefill, to_decode = both_given()
    with pair.counts("transfers.receive.ok", 1):
        name = pair.decode.add(Asked(other, TOKENS, {**to_decode, "remote_daemons": addresses[-1:]}))
        assert soon(lambda: pair.receives() == 1)
        pair.prefill.ask(Asked(other, 1, to_prefill))
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] == want(plain, other, model=TINY_MHA)
    pair.assert_nothing_left()


@pytest.mark.parametrize("memory", ["owned", "registered", "staged"])
def test_two_hosts(plain: Plain, tmp_path: Path, require: Callable[[object, str], None], memory: str) -> None:
    try:
        check_hosts_possible()
    except PermissionError as error:
        require(None, str(error))
    with hosts(2) as (here, there), contextlib.ExitStack() as stack:
        places = [stack.enter_context(daemon_on(host, tmp_path)) for host in (here, there)]
        pair = stack.enter_context(
            running_pair(
                tmp_path,
                places,
                model=TINY_MHA,
                prefill={"memory": memory, **NEVER},
                decode={"memory": memory, **NEVER},
                prefill_options={"host": here},
                decode_options={"host": there},
            )
        )
        assert_handed_on_through_prefill(pair, plain)
        assert pair.client.status().counters["network.sent_bytes"] > 0


@contextlib.contextmanager
def daemon_on(host: Host, folder: Path) -> Iterator[Path]:
    """Run a daemon on a host; return its runtime directory."""
    mine = folder / f"host{host.number}"
    mine.mkdir()
    with kit.daemon(PEERS.format(address=host.address), prefix=host.command([])) as daemon:
        yield daemon.runtime_dir
