"""What goes wrong is never an engine's end and never wrong text: a daemon that dies, is full, late or not there."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvferry.clients import Client
from kvferry.clients.vllm import configuration
from kvferry.clients.vllm.configuration import check_carried, settings_of
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.limits import Limits
from kvferry.protocol.tier_messages import CachedBlockStatus
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_MHA
from tests.vllm.cached import HOST_TIER, NOTHING, cached_blocks, instance_client, left, pinned_bytes
from tests.vllm.in_process import (
    BLOCKS,
    PROMPTS,
    STORY,
    Engine,
    EngineFailedError,
    Plain,
    Served,
    begin_anew,
    by_hand,
    engine,
    free_blocks,
    metrics,
    reset,
    wait_until_back,
)

FREE = BLOCKS - 1
MAX_LEASES = 4096
"""Of an instance, in the daemon."""


class Pair(NamedTuple):
    """A daemon and an engine over it. ``is_kept``: the next daemon adopts the engine's pool."""

    daemon: Daemon
    engine: Engine
    is_kept: bool


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["adopted", "not adopted"]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return a daemon that is killed, and an engine."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        kit.daemon(HOST_TIER, keep=request.param) as daemon,
        engine(folder, told(daemon.runtime_dir), model=TINY_MHA) as one,
    ):
        yield Pair(daemon, one, request.param)


def told(runtime_dir: Path, **more: Any) -> dict[str, Any]:  # noqa: ANN401  of Settings
    """Return the connector's configuration."""
    return {"runtime_dir": str(runtime_dir), "pool": "pool", **more}


def prompt_of(name: str, blocks: int = 3) -> str:
    """Return a prompt that no other test has: of so many blocks and a bit."""
    return f"{name}: " + STORY * (2 * blocks)


def assert_caches(one: Engine, plain: Plain, name: str) -> None:
    """Check that an engine stores a prompt and finds it again."""
    asked = prompt_of(name)
    want = plain.tokens(asked, model=TINY_MHA)
    (first,) = one.ask(asked)
    one.drain()
    assert one.call(reset)
    (again,) = one.ask(asked)
    assert [first.tokens, again.tokens] == want * 2
    assert (first.cached, again.cached > 0) == (0, True)


def step_until_loading(served: Served) -> None:
    """Step until a request's blocks are on their way."""
    served.step_until(lambda: "WAITING_FOR_REMOTE_KVS" in served.states().values())


# -- the daemon is killed


def test_killed_at_rest(pair: Pair, plain: Plain) -> None:
    one = pair.engine
    assert_caches(one, plain, "before it is killed")
    one.drain()
    one.log()
    pair.daemon.end()
    asked = [prompt_of("while it is dead"), prompt_of("before it is killed")]
    answers = one.ask(*asked)
    assert [answer.tokens for answer in answers] == plain.tokens(*asked, model=TINY_MHA)
    one.drain()
    pair.daemon.start()
    wait_until_back(one)
    assert one.call(reset)
    assert_caches(one, plain, "after it was killed")
    one.drain()
    with Client.connect(pair.daemon.runtime_dir) as client:
        (pool,) = client.status().pools
        assert (pool.registered_by is None) is pair.is_kept
    assert left(pair.daemon.runtime_dir) == NOTHING


@pytest.mark.parametrize("is_loading", [False, True], ids=["found", "loading"])
def test_killed_while_blocks_are_loaded(pair: Pair, plain: Plain, is_loading: bool) -> None:  # noqa: FBT001
    one = pair.engine
    asked = prompt_of(f"killed while blocks are loaded: {is_loading}")
    one.ask(asked)
    one.drain()
    begin_anew(one)
    one.log()
    with by_hand(one):
        name = one.add(asked)
        assert soon(lambda: pinned_bytes(pair.daemon.runtime_dir) > 0)
        with pair.daemon.stopped():
            if is_loading:
                one.call(step_until_loading)
            pair.daemon.end()
        pair.daemon.start()
        (answer,) = one.wait(name)
    assert ([answer.tokens], answer.cached) == (plain.tokens(asked, model=TINY_MHA), 0)
    one.drain()
    assert one.call(free_blocks) == FREE
    wait_until_back(one)
    assert_caches(one, plain, f"after blocks were loaded: {is_loading}")
    one.drain()
    assert left(pair.daemon.runtime_dir) == NOTHING


def test_killed_while_blocks_are_stored(pair: Pair, plain: Plain) -> None:
    """Blocks are free again once the next daemon is there, and, where none comes, after a time."""
    one = pair.engine
    asked = prompt_of("killed while blocks are stored")
    one.log()
    with by_hand(one):
        name = one.add(asked)
        assert left(pair.daemon.runtime_dir) == NOTHING  # it is looked up by then
        with pair.daemon.stopped():
            (answer,) = one.wait(name)
            assert one.call(free_blocks) < FREE
            pair.daemon.end()
    assert [answer.tokens] == plain.tokens(asked, model=TINY_MHA)
    if pair.is_kept:
        pair.daemon.start()
    one.drain()
    assert one.call(free_blocks) == FREE
    if not pair.is_kept:
        pair.daemon.start()
    wait_until_back(one)
    assert_caches(one, plain, "after blocks were stored")


@pytest.mark.long
def test_what_waits_does_not_load_by_a_lease_of_the_daemon_before(tmp_path: Path, plain: Plain) -> None:
    """The next daemon may have given others the leases that it counts anew."""
    asked, others = prompt_of("mine, which waits"), prompt_of("another's, found meanwhile")
    (tmp_path / "disk").mkdir()
    with (
        kit.daemon(f'{HOST_TIER}[tiers.disk]\npath = "{tmp_path / "disk"}"\nfsync = "block"\n', keep=True) as daemon,
        engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA) as one,
    ):
        one.ask(others)
        one.drain()
        hashes = in_order(cached_blocks(daemon.runtime_dir))
        one.ask(asked)
        one.drain()
        begin_anew(one)
        assert soon(lambda: all("disk" in block.tiers for block in cached_blocks(daemon.runtime_dir)))
        one.log()
        with by_hand(one):
            name = one.add(asked)
            assert soon(lambda: pinned_bytes(daemon.runtime_dir) > 0)
            daemon.restart(signal.SIGTERM)
            wait_until_back(one)
            with instance_client(daemon, "pool") as same:
                assert all(same.lookup("pool", hashes).blocks == len(hashes) for _ in range(5))
                (answer,) = one.wait(name)
        assert [answer.tokens] == plain.tokens(asked, model=TINY_MHA)


def in_order(blocks: Sequence[CachedBlockStatus]) -> list[bytes]:
    """Return the hashes of a prompt's blocks, each after the one before it."""
    after = {block.parent: block.hash for block in blocks}
    found = [after[""]]
    while found[-1] in after:
        found.append(after[found[-1]])
    return [bytes.fromhex(one) for one in found]


@pytest.mark.long
def test_request_fails_where_the_policy_says_so_and_the_engine_goes_on(tmp_path: Path, plain: Plain) -> None:
    asked = prompt_of("fails")
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA, policy="fail") as one,
    ):
        one.ask(asked)
        one.drain()
        begin_anew(one)
        one.log()
        with by_hand(one):
            name = one.add(asked)
            assert soon(lambda: pinned_bytes(daemon.runtime_dir) > 0)
            with daemon.stopped():
                one.call(step_until_loading)
                daemon.end()
            daemon.start()
            (answer,) = one.wait(name)
        wait_until_back(one)
        assert (answer.ended, answer.tokens) == ("error", [])
        one.drain()
        assert one.call(free_blocks) == FREE
        assert_caches(one, plain, "after it failed")


# -- the daemon refuses, or is late


def assert_right_whatever_is_refused(one: Engine, plain: Plain, runtime_dir: Path) -> None:
    """Ask for much at once, several times, and check the tokens and that nothing stays."""
    asked = [*PROMPTS, *(prompt_of(f"much {number}") for number in range(4))]
    for _ in range(3):
        assert [answer.tokens for answer in one.ask(*asked)] == plain.tokens(*asked, model=TINY_MHA)
        one.drain()
        assert one.call(reset)
    assert left(runtime_dir) == NOTHING
    assert one.call(free_blocks) == FREE


@pytest.mark.long
def test_host_tier_for_a_few_blocks(tmp_path: Path, plain: Plain) -> None:
    """Blocks that were found are evicted, and stores are refused."""
    with (
        kit.daemon("[tiers]\nhost_bytes = 425984\n", keep=True) as daemon,
        engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA) as one,
    ):
        assert_right_whatever_is_refused(one, plain, daemon.runtime_dir)


@pytest.mark.long
def test_no_host_tier(tmp_path: Path, plain: Plain) -> None:
    with (
        kit.daemon("[tiers]\nhost_bytes = 0\n", keep=True) as daemon,
        engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA) as one,
    ):
        assert_right_whatever_is_refused(one, plain, daemon.runtime_dir)
        said = one.log()
        assert len([line for line in said if line.startswith("WARNING")]) <= 2, said


@pytest.mark.long
def test_limits_of_the_daemon(tmp_path: Path, plain: Plain) -> None:
    """It answers BUSY where it is asked for more than two loads or stores at once."""
    limits = Limits(max_kept_session_request_bytes=20_100)
    with (
        kit.daemon(HOST_TIER, tuning=Tuning(limits=limits)) as daemon,
        engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA, disable_log_stats=False) as one,
    ):
        assert_right_whatever_is_refused(one, plain, daemon.runtime_dir)
        counts = one.call(metrics)
        assert counts["vllm:kvferry_store_failures"] > 0
        assert counts["vllm:kvferry_store_seconds_count"] > 0
        assert counts["vllm:kvferry_load_seconds_count"] > 0


@pytest.mark.long
def test_deadlines_that_nothing_keeps(tmp_path: Path, plain: Plain) -> None:
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        engine(tmp_path, told(daemon.runtime_dir, cache_s=0.001), model=TINY_MHA, disable_log_stats=False) as one,
    ):
        assert_right_whatever_is_refused(one, plain, daemon.runtime_dir)
        assert one.call(metrics)["vllm:kvferry_store_failures"] > 0


@pytest.mark.long
def test_instance_with_all_leases_finds_nothing_until_it_has_one(tmp_path: Path, plain: Plain) -> None:
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA) as one,
    ):
        assert_caches(one, plain, "leases")
        one.drain()
        block = bytes.fromhex(cached_blocks(daemon.runtime_dir)[0].hash)
        with instance_client(daemon, "pool") as same:
            leases = [same.lookup("pool", [block]).lease for _ in range(MAX_LEASES)]
            assert all(leases)
            assert one.call(reset)
            (answer,) = one.ask(prompt_of("leases"))
            assert ([answer.tokens], answer.cached) == (plain.tokens(prompt_of("leases"), model=TINY_MHA), 0)
            for lease in leases:
                same.unpin(lease)
        one.drain()
        assert one.call(reset)
        (answer,) = one.ask(prompt_of("leases"))
        assert ([answer.tokens], answer.cached > 0) == (plain.tokens(prompt_of("leases"), model=TINY_MHA), True)
        one.drain()
        assert left(daemon.runtime_dir) == NOTHING


# -- at the start


@pytest.mark.long
def test_no_daemon_at_the_start(tmp_path: Path, plain: Plain) -> None:
    nobody = told(tmp_path / "nobody")
    with (
        pytest.raises(EngineFailedError, match="DAEMON_LOST: no daemon at"),
        engine(tmp_path, nobody, model=TINY_MHA),
    ):
        pytest.fail("it has started")
    with engine(tmp_path, {**nobody, "required": False}, model=TINY_MHA) as one:
        assert [answer.tokens for answer in one.ask(*PROMPTS)] == plain.tokens(*PROMPTS, model=TINY_MHA)
        assert sum("this server runs without it" in line for line in one.log()) == 2  # scheduler and worker


@pytest.mark.long
def test_pool_of_a_living_engine_is_nobody_elses(tmp_path: Path, plain: Plain) -> None:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(kit.daemon(HOST_TIER, keep=True))
        one = stack.enter_context(engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA))
        with (
            pytest.raises(EngineFailedError, match="POOL_EXISTS"),
            engine(tmp_path, told(daemon.runtime_dir), model=TINY_MHA),
        ):
            pytest.fail("it has started")
        assert [answer.tokens for answer in one.ask(*PROMPTS)] == plain.tokens(*PROMPTS, model=TINY_MHA)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"memroy": "owned"}, "unknown field `memroy`; the keys are runtime_dir, pool, memory"),
        ({"memory": "borrowed"}, "Invalid enum value 'borrowed' - at `$.memory`"),
        ({"pool": "a/b"}, "at `$.pool`"),
        ({"cache": "yes"}, "Expected `bool`, got `str` - at `$.cache`"),
        ({"hold_s": 0}, "Expected `float` > 0.0 - at `$.hold_s`"),
        ({"cache_s": float("nan")}, "at `$.cache_s`"),
    ],
)
def test_wrong_configuration_is_refused_by_name(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidFieldError) as error:
        settings_of(extra)
    assert "kv_connector_extra_config: " in str(error.value)
    assert said in str(error.value)


def options(**parts: SimpleNamespace | None) -> Any:  # noqa: ANN401  of vLLM's configuration, what is looked at
    """Return a configuration that is carried, but for these parts."""
    usual = {"parallel_config": SimpleNamespace(), "speculative_config": None}
    return SimpleNamespace(**{**usual, "scheduler_config": SimpleNamespace(async_scheduling=True), **parts})


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_without_a_model_are_carried(method: str) -> None:
    check_carried(options(speculative_config=SimpleNamespace(method=method)))


@pytest.mark.parametrize(
    "option",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"],
)
def test_options_that_are_not_carried_are_refused_by_name(option: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"does not carry {option} 2 yet") as error:
        check_carried(options(parallel_config=SimpleNamespace(**{option: 2})))
    assert error.value.field == option


def test_draft_models_are_refused_by_name() -> None:
    with pytest.raises(InvalidFieldError, match=r"a draft model \(eagle\)"):
        check_carried(options(speculative_config=SimpleNamespace(method="eagle")))


def test_async_scheduling_is_refused_where_vllm_frees_blocks_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight would write blocks that another request's load fills: so does 0.23."""
    assert configuration.keeps_freed_blocks(), "0.32 does not"
    monkeypatch.setattr(configuration, "keeps_freed_blocks", lambda: False)
    check_carried(options(scheduler_config=SimpleNamespace(async_scheduling=False)))
    with pytest.raises(InvalidFieldError, match="async scheduling with this release of vLLM"):
        check_carried(options())
