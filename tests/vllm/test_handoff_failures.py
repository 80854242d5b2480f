"""Prompts that do not arrive, whose requests are computed or fail alone; and those of several daemons and hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from examples.demo.hosts import check_hosts_possible, hosts
from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import SMOLLM2, TINY_MHA
from tests.vllm.in_process import (
    CHUNK,
    HOST_TIER,
    NEVER,
    Asked,
    Pair,
    Plain,
    both_given,
    by_hand,
    engine,
    layers_told,
    prompt,
    running_pair,
    set_steps_alone,
    settings,
    through_router,
    wait_until_back,
)
from tests.vllm.servers import BLOCK

SHORT: Final = {"hold_s": 1.0, "receive_s": 1.0}

pytestmark = pytest.mark.long


def test_policy_fail_fails_that_request_alone(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    told = settings(kept_daemon, "decode", cache=False, receive_s=1.0)
    prompts = [prompt(100, seed=number) for number in range(3)]
    want = plain.tokens(*prompts, model=TINY_MHA)
    with engine(tmp_path, told, role="kv_consumer", policy="fail", model=TINY_MHA) as decode:
        refused = {"do_remote_prefill": True, "transfer_id": "refused", "handshake": 2}
        late = {"do_remote_prefill": True, "transfer_id": "never comes"}
        said = zip(prompts, (refused, late, None), strict=True)
        answers = decode.ask(*(Asked(one, params=params) for one, params in said))
        assert [one.ended for one in answers] == ["error", "error", "length"]
        assert answers[2].tokens == want[2]
        decode.drain()
        assert decode.ask(Asked(prompts[0]))[0].tokens == want[0]


def test_deadlines(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    """Of decode that waits for a prefill that never comes; and of prefill, which decode hears of when it comes."""
    first, second = prompt(100, seed=10), prompt(100, seed=11)
    late = {"do_remote_prefill": True, "transfer_id": "never comes"}
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA, prefill=SHORT, decode=SHORT) as pair:
        (params,) = pair.prefilled(second)
        pair.prefill.drain()
        for one, said in ((first, late), (second, params)):
            with pair.counts("transfers.receive.deadline", 1):
                (answer,) = pair.decode.ask(Asked(one, params=said))
            assert [answer.tokens] == plain.tokens(one, model=TINY_MHA)
        pair.assert_nothing_left()


def test_prefill_dies(kept_daemon: Daemon, plain: Plain, tmp_path: Path) -> None:
    """In the midst of one prompt, and after it has sent another one, which arrives all the same."""
    first, second, third = (prompt(5 * CHUNK, seed=number) for number in (20, 21, 22))
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA) as pair:
        (params,) = pair.prefilled(second)
        names, [to_prefill] = pair.awaited(first)
        pair.prefill.call(set_steps_alone, value=False)
        pair.half_prefilled(first, to_prefill)
        pair.prefill.kill()
        answers = pair.decode.wait(*names)
        with pair.counts("transfers.receive.ok", 1):
            answers += pair.decode.ask(Asked(second, params=params))
        with engine(tmp_path, settings(kept_daemon, "prefill"), role="kv_producer", model=TINY_MHA) as anew:
            (said,) = anew.ask(Asked(third, 1, {"do_remote_decode": True}))
            with pair.counts("transfers.receive.ok", 1):
                answers += pair.decode.ask(Asked(third, params=through_router(said)))
            pair._replace(prefill=anew).assert_nothing_left()
        assert [one.tokens for one in answers] == plain.tokens(first, second, third, model=TINY_MHA)


OTHERS: Final[dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "dtype": ({"dtype": "bfloat16"}, ("MODEL_MISMATCH", "-bfloat16-", "-float32-")),
    "model": ({"model": SMOLLM2}, (SMOLLM2, TINY_MHA)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_engines_that_do_not_fit(kept_daemon: Daemon, plain: Plain, tmp_path: Path, other: str) -> None:
    """Whichever side comes first: the log names what both have, and decode computes at once."""
    options, values = OTHERS[other]
    first, second = prompt(150, seed=30), prompt(150, seed=31)
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=TINY_MHA, prefill_options=options) as pair:
        (params,) = pair.prefilled(first)
        to_prefill, to_decode = both_given()
        name = pair.decode.add(Asked(second, params=to_decode))
        pair.prefill.ask(Asked(second, 1, to_prefill))
        answers = pair.decode.wait(name) + pair.decode.ask(Asked(first, params=params))
        assert [one.tokens for one in answers] == plain.tokens(second, first, model=TINY_MHA)
        pair.assert_nothing_left()
        for side in (pair.prefill, pair.decode):
            log = [line for line in side.log() if "failed" in line]
            assert any(all(value in line for value in values) for line in log), log


@contextlib.contextmanager
def anew(pair: Pair, daemon: Daemon) -> Any:  # noqa: ANN401  an iterator
    """Return the pair with clients of the next daemon, once both engines have found it."""
    for side in (pair.prefill, pair.decode):
        wait_until_back(side)
    with contextlib.closing(Client.connect(daemon.runtime_dir)) as client:
        one = pair._replace(client=client, other=client)
        yield one
        one.assert_nothing_left()


def test_the_daemon_is_killed_while_prompts_travel(plain: Plain, tmp_path: Path) -> None:
    """One is sent and was not taken, one is half sent, and decode waits for a third one: all are computed at once."""
    prompts = [prompt(5 * CHUNK, seed=40 + number) for number in range(4)]
    want = plain.tokens(*prompts, model=TINY_MHA)
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, model=TINY_MHA, prefill=NEVER, decode=NEVER) as pair,
    ):
        (params,) = pair.prefilled(prompts[0])
        names, given = pair.awaited(*prompts[1:3])
        with by_hand(pair.prefill):
            half = pair.half_prefilled(prompts[1], given[0])
            daemon.restart()
            pair.prefill.wait(half)
        answers = pair.decode.ask(Asked(prompts[0], params=params)) + pair.decode.wait(*names)
        assert [one.tokens for one in answers] == want[:3]
        with anew(pair, daemon) as again:
            assert again.handed_on(prompts[3]) == want[3:]


def test_the_daemon_is_killed_between_two_layers(plain: Plain, tmp_path: Path) -> None:
    """The step goes on, and decode computes the prompt."""
    prompts = [prompt(CHUNK, seed=50 + number) for number in range(2)]
    with kit.daemon(HOST_TIER, keep=True) as daemon, running_pair(tmp_path, daemon.runtime_dir) as pair:
        names, [to_prefill] = pair.awaited(prompts[0])
        with by_hand(pair.prefill):
            other = pair.prefill.add(Asked(prompts[0], 1, to_prefill))
            told, _ = pair.prefill.call(layers_told, kill=daemon.process.pid)
            assert told > 1
            daemon.process.wait()
            daemon.start()
            pair.prefill.wait(other)
        (answer,) = pair.decode.wait(*names)
        with anew(pair, daemon) as again:
            assert [answer.tokens, *again.handed_on(prompts[1])] == plain.tokens(*prompts)


# -- two daemons, two hosts

PROMPTS: Final = [prompt(length, seed) for seed, length in enumerate((1, BLOCK, BLOCK + 1, 300))]
HALVED: Final = [prompt(5 * CHUNK, seed) for seed in (10, 11)]
PEERS: Final = """
[peers]
listen = "tcp://{address}:7801"
insecure = true
[network]
transport = "mooncake"
"""


@pytest.mark.parametrize("memory", ["of one host", "owned", "registered", "staged"])
def test_two_daemons(plain: Plain, tmp_path: Path, require: Callable[[object, str], None], memory: str) -> None:
    """On one host, and on two; prefill's answer says where its daemon is, or a router that knows."""
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"prefill": NEVER, "decode": NEVER}
        if memory == "of one host":
            daemons = [stack.enter_context(kit.daemon(HOST_TIER)) for _ in range(2)]
        else:
            try:
                check_hosts_possible()
            except PermissionError as error:
                require(None, str(error))
            both = stack.enter_context(hosts(2))
            daemons = [
                stack.enter_context(kit.daemon(PEERS.format(address=one.address), prefix=one.command([])))
                for one in both
            ]
            for side, host in zip(("prefill", "decode"), both, strict=True):
                options |= {side: {"memory": memory, **NEVER}, f"{side}_options": {"host": host}}
        dirs = [one.runtime_dir for one in daemons]
        pair = stack.enter_context(running_pair(tmp_path, dirs, model=TINY_MHA, **options))
        assert pair.handed_on(*PROMPTS) == plain.tokens(*PROMPTS, model=TINY_MHA)
        pair.assert_abort_is_heard(HALVED[0])
        to_prefill, to_decode = both_given()
        with pair.counts("transfers.receive.ok", 1):
            told = {**to_decode, "remote_daemons": list(pair.client.status().addresses)[-1:]}
            name = pair.decode.add(Asked(HALVED[1], params=told))
            assert soon(lambda: pair.receives() == 1)
            pair.prefill.ask(Asked(HALVED[1], 1, to_prefill))
            (answer,) = pair.decode.wait(name)
        assert [answer.tokens] == plain.tokens(HALVED[1], model=TINY_MHA)
        pair.assert_nothing_left()
        assert memory == "of one host" or pair.client.status().counters["network.sent_bytes"] > 0
