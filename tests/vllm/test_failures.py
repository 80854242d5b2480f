"""What goes wrong is never an engine's end and never wrong text: a daemon that dies, is full, late or not there."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvferry.clients import Client
from kvferry.clients.vllm import configuration
from kvferry.clients.vllm.configuration import check_carried, settings_of
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.tier_messages import CachedBlockStatus
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import TINY_MHA
from tests.vllm.in_process import (
    HOST_TIER,
    NOTHING,
    PROMPTS,
    Asked,
    Engine,
    EngineFailedError,
    Plain,
    Served,
    assert_all_is_free,
    assert_caches,
    begin_anew,
    by_hand,
    cached_blocks,
    engine,
    instance_client,
    is_pinned,
    left,
    metrics,
    prompt_of,
    reset,
    settings,
    stepped_until,
    used_blocks,
    wait_until_back,
)

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
    with (
        kit.daemon(HOST_TIER, keep=request.param) as daemon,
        engine(tmp_path_factory.mktemp("pair"), settings(daemon), model=TINY_MHA) as one,
    ):
        yield Pair(daemon, one, request.param)


# -- the daemon is killed


def test_killed_at_rest(pair: Pair, plain: Plain) -> None:
    one = pair.engine
    assert_caches(one, plain, "before it is killed")
    one.log()
    pair.daemon.kill()
    asked = [prompt_of("while it is dead"), prompt_of("before it is killed")]
    assert [answer.tokens for answer in one.ask(*asked)] == plain.tokens(*asked, model=TINY_MHA)
    one.drain()
    pair.daemon.start()
    wait_until_back(one)
    assert one.call(reset)
    assert_caches(one, plain, "after it was killed")
    with Client.connect(pair.daemon.runtime_dir) as client:
        (pool,) = client.status().pools
        assert (pool.registered_by is None) is pair.is_kept
    assert_all_is_free(pair.daemon, one)


def kill_while_found(daemon: Daemon, one: Engine, asked: str, *, is_loading: bool) -> Any:  # noqa: ANN401  an answer
    """Ask for what is cached, and kill the daemon once it has found it, or loads it; return the answer."""
    one.ask(asked)
    one.drain()
    begin_anew(one)
    one.log()
    with by_hand(one):
        name = one.add(asked)
        assert soon(lambda: is_pinned(daemon))
        with daemon.stopped():
            if is_loading:
                one.call(stepped_until, "WAITING_FOR_REMOTE_KVS")
            daemon.kill()
        daemon.start()
        (answer,) = one.wait(name)
    wait_until_back(one)
    assert_all_is_free(daemon, one)
    return answer


@pytest.mark.parametrize("is_loading", [False, True], ids=["found", "loading"])
def test_killed_while_blocks_are_loaded(pair: Pair, plain: Plain, *, is_loading: bool) -> None:
    asked = prompt_of(f"killed while blocks are loaded: {is_loading}")
    answer = kill_while_found(pair.daemon, pair.engine, asked, is_loading=is_loading)
    assert ([answer.tokens], answer.cached) == (plain.tokens(asked, model=TINY_MHA), 0)
    assert_caches(pair.engine, plain, f"after blocks were loaded: {is_loading}")


def test_killed_while_blocks_are_stored(pair: Pair, plain: Plain) -> None:
    """Blocks are free again once the next daemon is there, and, where none comes, after a time."""
    one = pair.engine
    asked = prompt_of("killed while blocks are stored")
    one.log()
    with by_hand(one):
        name = one.add(asked)
        assert left(pair.daemon) == NOTHING  # it is looked up by then
        with pair.daemon.stopped():
            (answer,) = one.wait(name)
            assert one.call(used_blocks)
            pair.daemon.kill()
    assert [answer.tokens] == plain.tokens(asked, model=TINY_MHA)
    if pair.is_kept:
        pair.daemon.start()
    one.drain()
    assert one.call(used_blocks) == 0
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
        engine(tmp_path, settings(daemon), model=TINY_MHA) as one,
    ):
        one.ask(others)
        one.drain()
        hashes = in_order(cached_blocks(daemon))
        one.ask(asked)
        one.drain()
        begin_anew(one)
        assert soon(lambda: all("disk" in block.tiers for block in cached_blocks(daemon)))
        one.log()
        with by_hand(one):
            name = one.add(asked)
            assert soon(lambda: is_pinned(daemon))
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
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        engine(tmp_path, settings(daemon), model=TINY_MHA, policy="fail") as one,
    ):
        answer = kill_while_found(daemon, one, prompt_of("fails"), is_loading=True)
        assert (answer.ended, answer.tokens) == ("error", [])
        assert_caches(one, plain, "after it failed")


# -- the daemon refuses, or is late


class Refusing(NamedTuple):
    """How a daemon is started, what an engine over it is told, and what that counts then."""

    config: str = HOST_TIER
    told: Mapping[str, Any] = MappingProxyType({})
    counts: tuple[str, ...] = ()


REFUSING = {
    "a tier for a few blocks": Refusing(  # found blocks are evicted, stores refused
        "[tiers]\nhost_bytes = 425984\n", counts=("store_failures", "store_seconds_count", "load_seconds_count")
    ),
    "no tier": Refusing("[tiers]\nhost_bytes = 0\n"),
    "deadlines that nothing keeps": Refusing(told={"cache_s": 0.001}, counts=("store_failures",)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSING)
def test_tokens_are_right_whatever_is_refused(tmp_path: Path, plain: Plain, name: str) -> None:
    config, told, counts = REFUSING[name]
    asked = [*PROMPTS, *(prompt_of(f"much {number}") for number in range(4))]
    with (
        kit.daemon(config, keep=True) as daemon,
        engine(tmp_path, settings(daemon, **told), model=TINY_MHA, disable_log_stats=False) as one,
    ):
        for _ in range(3):
            assert [answer.tokens for answer in one.ask(*asked)] == plain.tokens(*asked, model=TINY_MHA)
            one.drain()
            assert one.call(reset)
        assert_all_is_free(daemon, one)
        found = one.call(metrics)
        assert all(found[f"vllm:kvferry_{count}"] > 0 for count in counts)
        if name == "no tier":
            said = one.log()
            assert len([line for line in said if line.startswith("WARNING")]) <= 2, said


@pytest.mark.long
def test_instance_with_all_leases_finds_nothing_until_it_has_one(tmp_path: Path, plain: Plain) -> None:
    with kit.daemon(HOST_TIER, keep=True) as daemon, engine(tmp_path, settings(daemon), model=TINY_MHA) as one:
        assert_caches(one, plain, "leases")
        block = bytes.fromhex(cached_blocks(daemon)[0].hash)
        with instance_client(daemon, "pool") as same:
            leases = [same.lookup("pool", [block]).lease for _ in range(MAX_LEASES)]
            assert all(leases)
            answers = [one.ask_anew(prompt_of("leases"))]
            for lease in leases:
                same.unpin(lease)
        answers.append(one.ask_anew(prompt_of("leases")))
        assert [answer.tokens for answer in answers] == plain.tokens(prompt_of("leases"), model=TINY_MHA) * 2
        assert [answer.cached > 0 for answer in answers] == [False, True]
        assert left(daemon) == NOTHING


# -- at the start


@pytest.mark.long
def test_engines_that_do_not_start(tmp_path: Path, plain: Plain) -> None:
    """Without a daemon, unless it is not required; with the pool of a living engine; with a wrong configuration."""
    nobody = {"runtime_dir": str(tmp_path / "nobody"), "pool": "pool"}
    with engine(tmp_path, {**nobody, "required": False}, model=TINY_MHA) as one:
        assert [answer.tokens for answer in one.ask(*PROMPTS)] == plain.tokens(*PROMPTS, model=TINY_MHA)
        assert sum("this server runs without it" in line for line in one.log()) == 2  # scheduler and worker
    with kit.daemon(HOST_TIER, keep=True) as daemon, engine(tmp_path, settings(daemon), model=TINY_MHA) as one:
        for told, said in (
            (nobody, "DAEMON_LOST: no daemon at"),
            (settings(daemon), "POOL_EXISTS"),
            (settings(daemon, memory="borrowed"), "Invalid enum value 'borrowed'"),
        ):
            with pytest.raises(EngineFailedError, match=said), engine(tmp_path, told, model=TINY_MHA):
                pytest.fail("it has started")
        assert [answer.tokens for answer in one.ask(*PROMPTS)] == plain.tokens(*PROMPTS, model=TINY_MHA)


def without_one_rank(served: Served) -> tuple[int | None, bool]:
    """Tell the scheduler's side that a rank found no daemon at its start; return what it finds for a request then."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415

    from kvferry.clients.vllm.connector import KvferryConnector  # noqa: PLC0415

    config = copy.deepcopy(served.llm.llm_engine.vllm_config)
    config.kv_transfer_config.kv_connector_extra_config = {"runtime_dir": "/nowhere", "required": False}
    rank = KvferryConnector(config, KVConnectorRole.WORKER, served.scheduler.kv_cache_config)
    connector = served.scheduler.connector
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank.get_handshake_metadata()})
    name = served.add(Asked(PROMPTS[0], params={"do_remote_prefill": True, "transfer_id": "t"}))
    found: tuple[int | None, bool] = connector.get_num_new_matched_tokens(served.request(name), 0)
    return found


def test_all_ranks_or_none(kept_daemon: Daemon, tmp_path: Path) -> None:
    """A scheduler that had work done by a rank that has no daemon would wait for its answer for ever."""
    told = settings(kept_daemon, "skewed", required=False)
    with engine(tmp_path, told, model=TINY_MHA) as one, by_hand(one):
        assert one.call(without_one_rank) == (0, False)
        one.drain()
        assert any("runs without it" in line for line in one.log())


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"memroy": "owned"}, "unknown field `memroy`; the keys are runtime_dir, pool, memory"),
        ({"memory": "borrowed"}, "Invalid enum value 'borrowed' - at `$.memory`"),
        ({"pool": "a/b"}, "at `$.pool`"),
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


@pytest.mark.parametrize(
    ("part", "option", "value", "says"),
    [
        *(
            ("parallel_config", option, 2, f"does not carry {option} 2 yet")
            for option in (
                "pipeline_parallel_size",
                "decode_context_parallel_size",
                "prefill_context_parallel_size",
                "nnodes",
            )
        ),
        ("speculative_config", "method", "medusa", r"a draft model \(medusa\)"),
    ],
)
def test_options_that_are_not_carried_are_refused_by_name(part: str, option: str, value: object, says: str) -> None:
    for method in ("ngram", "suffix"):  # drafts without a model are carried
        check_carried(options(speculative_config=SimpleNamespace(method=method)))
    with pytest.raises(InvalidFieldError, match=says):
        check_carried(options(**{part: SimpleNamespace(**{option: value})}))


def test_drafts_that_are_not_carried_are_refused_by_name() -> None:
    """The rows of several MTP modules at a prompt's end depend on drafts that nobody has verified (vllm #55055)."""
    for method in ("eagle", "eagle3", "mtp", "draft_model"):
        told = options(speculative_config=SimpleNamespace(method=method))
        told.num_prefill_lookahead_tokens = 1
        check_carried(told)
        told.num_prefill_lookahead_tokens = 3
        with pytest.raises(InvalidFieldError, match="an MTP of several modules, which reads 3 tokens ahead"):
            check_carried(told)
        del told.num_prefill_lookahead_tokens
        with pytest.raises(InvalidFieldError, match=rf"a draft model \({method}\) with this release of vLLM"):
            check_carried(told)


def test_async_scheduling_is_refused_where_vllm_frees_blocks_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight would write blocks that another request's load fills: so does 0.23."""
    assert configuration.keeps_freed_blocks(), "0.32 does not"
    monkeypatch.setattr(configuration, "keeps_freed_blocks", lambda: False)
    check_carried(options(scheduler_config=SimpleNamespace(async_scheduling=False)))
    with pytest.raises(InvalidFieldError, match="async scheduling with this release of vLLM"):
        check_carried(options())
