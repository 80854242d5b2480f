"""kvferry as the prefix cache of real engines: what is found again, by whom, and what never is.

In order: each test has a prompt of its own, and asks for it first.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvferry.clients import Client
from kvferry.protocol.errors import KvferryError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import MODELS, TINY_MHA
from tests.vllm.adapters import make_adapter
from tests.vllm.cached import HOST_TIER, NOTHING, cached_blocks, forget_cached, instance_client, left
from tests.vllm.in_process import (
    BLOCK,
    BLOCKS,
    PROMPTS,
    STORY,
    Answer,
    Engine,
    Plain,
    Served,
    by_hand,
    engine,
    metrics,
    reset,
    wait_until_back,
)

CACHED = [128, 128, 0, 128]
"""Tokens of PROMPTS in full blocks."""
BLOCK_BYTES = 2 * 30 * 3 * 64 * BLOCK * 4
"""Of SmolLM2: K and V, layers, heads, elements, tokens, bytes."""
MOST_LEASES = 1000
"""That a daemon of these tests has given."""


def told(daemon: Daemon, pool: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  of Settings
    """Return the connector's configuration."""
    return {"runtime_dir": str(daemon.runtime_dir), "pool": pool, **more}


@pytest.fixture(scope="module")
def one(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return an engine with a prefix cache."""
    with engine(tmp_path_factory.mktemp("one"), told(kept_daemon, "one"), disable_log_stats=False) as made:
        yield made


@pytest.fixture(scope="module")
def other(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return another one of the same model, with another number of blocks; its events are collected."""
    more: dict[str, Any] = {
        "num_gpu_blocks_override": BLOCKS // 2,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
    }
    with engine(tmp_path_factory.mktemp("other"), told(kept_daemon, "other"), **more) as made:
        made.call(collect_events)
        yield made


def prompt_of(name: str, blocks: int = 3) -> str:
    """Return a prompt that no other test has: of so many blocks and a bit."""
    return f"{name}: " + STORY * (2 * blocks)


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    """Return what was generated."""
    return [answer.tokens for answer in answers]


def cached_of(answers: Sequence[Answer]) -> list[int]:
    """Return how many tokens of each prompt were not computed."""
    return [answer.cached for answer in answers]


def blocks_of(answer: Answer) -> int:
    """Return how many full blocks of a prompt can be found: its last token is always computed."""
    return (len(answer.prompt) - 1) // BLOCK


# -- what is found


def test_same_tokens_at_first_from_vllms_own_cache_and_from_the_daemons(
    kept_daemon: Daemon, one: Engine, plain: Plain
) -> None:
    want = plain.tokens(*PROMPTS)
    before = one.call(metrics)
    first, local = one.ask(*PROMPTS), one.ask(*PROMPTS)
    assert tokens_of(first) == tokens_of(local) == want
    assert cached_of(local) == CACHED
    one.drain()
    assert one.call(reset)
    one.ask("A step, before which the weights are looked at.", tokens=1)
    loaded = one.ask(*PROMPTS)
    assert (tokens_of(loaded), cached_of(loaded)) == (want, CACHED)
    one.drain()
    assert left(kept_daemon.runtime_dir) == NOTHING
    after = one.call(metrics)
    said = {name.removeprefix("vllm:kvferry_"): after[name] - before[name] for name in after if ":kvferry_" in name}
    stored = len(cached_blocks(kept_daemon.runtime_dir))
    assert said["store_bytes"] >= stored * BLOCK_BYTES
    assert said["load_bytes"] == sum(CACHED) // BLOCK * BLOCK_BYTES
    assert (said["load_seconds_count"], said["load_failures"], said["store_failures"]) == (3, 0, 0)
    assert (said["send_bytes"], said["receive_bytes"]) == (0, 0)
    assert said["load_seconds_sum"] > 0


def test_another_engine_finds_it_also_a_part_of_it(
    kept_daemon: Daemon, one: Engine, other: Engine, plain: Plain
) -> None:
    stored, more = prompt_of("another"), prompt_of("another") + "sang, and nobody knew why. " * 8
    one.ask(stored)
    one.drain()
    found, longer = other.ask(stored), other.ask(more)
    assert tokens_of(found) + tokens_of(longer) == plain.tokens(stored, more)
    assert cached_of(found) == [blocks_of(found[0]) * BLOCK]
    assert 0 < longer[0].cached < len(longer[0].prompt) - 2 * BLOCK
    other.drain()
    assert left(kept_daemon.runtime_dir) == NOTHING


def test_what_is_loaded_is_what_is_computed_with(one: Engine, other: Engine, plain: Plain) -> None:
    """A control: with zeros in place of what was loaded the tokens are others."""
    asked = prompt_of("zeros")
    one.ask(asked)
    one.drain()
    with by_hand(other):
        name = other.add(asked)
        other.call(step_until_loaded)
        other.call(zero)
        (answer,) = other.wait(name)
    assert answer.cached == blocks_of(answer) * BLOCK
    assert [answer.tokens] != plain.tokens(asked)
    assert other.call(reset)
    forget = other.ask(asked, skips_cache=True)
    assert tokens_of(forget) == plain.tokens(asked)


def step_until_loaded(served: Served) -> None:
    """Step until a request's blocks have come, before it is computed."""
    served.step_until(lambda: bool(served.scheduler.finished_recving_kv_req_ids))


def zero(served: Served) -> None:
    """Have zeros in all of vLLM's KV memory."""
    for layer in served.runner.kv_caches:
        layer.zero_()


# -- what is not mixed


def test_salts_do_not_mix(one: Engine, other: Engine, plain: Plain) -> None:
    asked = prompt_of("salts")
    want = plain.tokens(asked)
    for salt in (None, "a", "b"):
        answers = one.ask(asked, salt=salt)
        assert (tokens_of(answers), cached_of(answers)) == (want, [0])
    one.drain()
    found = other.ask(asked, salt="b")
    assert (tokens_of(found), cached_of(found)) == (want, [blocks_of(found[0]) * BLOCK])
    assert cached_of(other.ask(asked, salt="c")) == [0]
    other.drain()


def test_requests_that_skip_the_cache_read_nothing(
    kept_daemon: Daemon, one: Engine, other: Engine, plain: Plain
) -> None:
    asked = prompt_of("skips")
    one.ask(asked)
    one.drain()
    answers = other.ask(asked, skips_cache=True)
    assert (tokens_of(answers), cached_of(answers)) == (plain.tokens(asked), [0])
    other.drain()
    assert left(kept_daemon.runtime_dir) == NOTHING


# -- what goes


def test_reset_of_the_external_cache_too(kept_daemon: Daemon, one: Engine, plain: Plain) -> None:
    asked = prompt_of("reset")
    one.ask(asked)
    one.drain()
    assert cached_blocks(kept_daemon.runtime_dir)
    assert one.call(reset, external=True)
    assert cached_blocks(kept_daemon.runtime_dir) == []
    again = one.ask(asked)
    assert (tokens_of(again), cached_of(again)) == (plain.tokens(asked), [0])
    one.drain()


def test_lease_that_ends_between_lookup_and_load(kept_daemon: Daemon, one: Engine, other: Engine, plain: Plain) -> None:
    asked = prompt_of("lease")
    one.ask(asked)
    one.drain()
    with by_hand(other), Client.connect(kept_daemon.runtime_dir) as client:
        name = other.add(asked)  # looked up when it is added
        assert soon(lambda: any(tier.pinned_bytes for tier in client.status().tiers))
        client.evict_cached()
        assert sum(len(block.pinned_by) for block in client.cached_blocks())  # else there is nothing to be lost
        with instance_client(kept_daemon, "other") as same:
            lease = newest_lease(same, "other")
            for number in range(lease - MOST_LEASES, lease + 1):
                with contextlib.suppress(KvferryError):
                    same.unpin(number)
        client.evict_cached()
        assert not list(client.cached_blocks())
        (answer,) = other.wait(name)
    assert [answer.tokens] == plain.tokens(asked)
    said = other.log()
    assert [line for line in said if line.startswith("WARNING kvferry: load failed for")], said
    other.drain()
    assert left(kept_daemon.runtime_dir) == NOTHING


def newest_lease(client: Client, pool: str) -> int:
    """Return the number of the lease that was given last: they are counted, from wherever the daemon began."""
    cached = [bytes.fromhex(one.hash) for one in client.cached_blocks()]
    lease = next(found.lease for one in cached if (found := client.lookup(pool, [one])).lease)
    client.unpin(lease)
    return lease


def test_events_say_what_is_stored_and_what_is_gone(kept_daemon: Daemon, other: Engine) -> None:
    asked = prompt_of("events")
    other.call(taken_events)
    (answer,) = other.ask(asked)
    other.drain()
    other.ask("A step.", tokens=1)
    events = [event for event in other.call(taken_events) if event["medium"] == "KVFERRY"]
    stored = [event for event in events if event["kind"] == "BlockStored"]
    tokens = answer.prompt + answer.tokens
    count = len(tokens) // BLOCK if len(tokens) % BLOCK else len(tokens) // BLOCK - 1  # the last token has no KV yet
    assert [token for event in stored for token in event["token_ids"]] == tokens[: count * BLOCK]
    hashes = [one for event in stored for one in event["block_hashes"]]
    assert len(set(hashes)) == count
    assert stored[0]["parent_block_hash"] is None
    forget_cached(kept_daemon.runtime_dir)
    gone: list[Any] = []

    def is_gone() -> bool:
        other.ask("A step.", tokens=1)
        gone.extend(event for event in other.call(taken_events) if event["kind"] == "BlockRemoved")
        return set(hashes) <= {one for event in gone if event["medium"] == "KVFERRY" for one in event["block_hashes"]}

    assert soon(is_gone)


def collect_events(served: Served) -> None:
    """Keep the events that a router would hear."""
    served.scheduler.kv_event_publisher.publish = served.events.append


def taken_events(served: Served) -> list[dict[str, Any]]:
    """Return them, once."""
    taken = [event for batch in served.events for event in batch.events]
    served.events.clear()
    return [
        {
            "kind": type(event).__name__,
            **{
                name: getattr(event, name, None)
                for name in ("block_hashes", "parent_block_hash", "token_ids", "medium")
            },
        }
        for event in taken
    ]


# -- long: engines that are started for one test


@pytest.fixture
def start(kept_daemon: Daemon, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Return what starts an engine of the small model: with the name of its pool, and vLLM's options."""
    with contextlib.ExitStack() as stack:

        def make(pool: str, model: str | Path = TINY_MHA, *, cache: bool = True, **more: Any) -> Engine:  # noqa: ANN401
            extra = told(kept_daemon, f"{request.node.name[:40]}-{pool}", cache=cache)
            return stack.enter_context(engine(tmp_path, extra, model=model, **more))

        yield make


def found(one: Engine, asked: str, **more: Any) -> tuple[list[int], bool]:  # noqa: ANN401  of Asked
    """Ask an engine that has nothing itself: return the tokens, and whether any block was found."""
    assert one.call(reset)
    (answer,) = one.ask(asked, **more)
    one.drain()
    return answer.tokens, answer.cached > 0


@pytest.mark.long
def test_weights_do_not_mix_under_one_name(start: Callable[..., Engine], plain: Plain, tmp_path: Path) -> None:
    models = [tmp_path / "same", tmp_path / "changed"]
    for folder in models:
        shutil.copytree(MODELS / TINY_MHA, folder)
    weights = {name: one.flip(0) for name, one in load_file(models[1] / "model.safetensors").items()}
    save_file(weights, models[1] / "model.safetensors", {"format": "pt"})
    asked = prompt_of("weights")
    want = [plain.tokens(asked, model=one)[0] for one in (MODELS / TINY_MHA, *models)]
    assert want[0] == want[1] != want[2]
    served = {"served_model_name": "one-name"}
    assert found(start("first", **served), asked) == (want[0], False)
    assert found(start("changed", models[1], **served), asked) == (want[2], False)
    assert found(start("same", models[0], **served), asked) == (want[0], True)
    assert found(start("renamed", models[0], served_model_name="another"), asked) == (want[0], False)


@pytest.mark.long
def test_adapters_do_not_mix(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Nor do other weights under the same name and path; what is computed without a cache says what is right."""
    options = {"enable_lora": True, "max_lora_rank": 8}
    one, other = start("one", **options), start("other", **options)
    asked, adapter = prompt_of("adapters"), tmp_path / "adapter"
    said = []
    for seed in (1, 2):
        make_adapter(adapter, seed)
        first, was_found = found(other, asked, adapter=str(adapter))
        assert not was_found
        assert one.call(reset)
        (right,) = one.ask(asked, adapter=str(adapter), skips_cache=True)
        one.drain()
        assert first == right.tokens
        assert found(one, asked, adapter=str(adapter)) == (first, True)
        said.append(first)
    base, was_found = found(one, asked)
    assert not was_found
    assert len({tuple(tokens) for tokens in (*said, base)}) == 3


@pytest.mark.long
def test_random_hashes_are_said_and_mix_nothing(start: Callable[..., Engine], plain: Plain) -> None:
    asked = prompt_of("hashes")
    (want,) = plain.tokens(asked, model=TINY_MHA)
    random: dict[str, Any] = {"prefix_caching_hash_algo": "xxhash", "environment": {"PYTHONHASHSEED": None}}
    one, other = start("one", **random), start("other", **random)
    assert found(one, asked) == found(other, asked) == (want, False)
    assert found(one, asked) == (want, True)
    assert sum("set PYTHONHASHSEED to the same value" in line for line in one.log()) == 1
    fixed: dict[str, Any] = {**random, "environment": {"PYTHONHASHSEED": "1"}}
    third, fourth = start("third", **fixed), start("fourth", **fixed)
    assert found(third, asked) == (want, False)
    assert found(fourth, asked) == (want, True)
    assert not any("PYTHONHASHSEED" in line for line in [*third.log(), *fourth.log()])


@pytest.mark.long
def test_no_cache_stores_and_finds_nothing(kept_daemon: Daemon, start: Callable[..., Engine], plain: Plain) -> None:
    forget_cached(kept_daemon.runtime_dir)
    asked = prompt_of("no cache")
    (want,) = plain.tokens(asked, model=TINY_MHA)
    one = start("one", cache=False)
    assert found(one, asked) == found(one, asked) == (want, False)
    assert cached_blocks(kept_daemon.runtime_dir) == []
    assert found(start("other"), asked) == (want, False)
    assert found(one, asked) == (want, False)


@pytest.mark.long
@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_disk_tier(tmp_path: Path, plain: Plain, is_damaged: bool) -> None:  # noqa: FBT001
    """A daemon that comes back without its host tier finds blocks on the disk; one that is damaged is computed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = f'{HOST_TIER}[tiers.disk]\npath = "{disk}"\nmax_bytes = 1073741824\nfsync = "block"\n'
    asked = prompt_of("disk")
    want = plain.tokens(asked)
    with kit.daemon(config, keep=True) as daemon, engine(tmp_path, told(daemon, "disk")) as one:
        (first,) = one.ask(asked)
        one.drain()
        blocks = blocks_of(first)
        assert soon(lambda: all("disk" in block.tiers for block in cached_blocks(daemon.runtime_dir)))
        one.log()
        daemon.end(signal.SIGTERM)
        if is_damaged:
            damage(disk)
        daemon.start()
        wait_until_back(one)
        assert all("host" not in block.tiers for block in cached_blocks(daemon.runtime_dir))
        assert one.call(reset)
        (again,) = one.ask(asked)
        assert [first.tokens, again.tokens] == want * 2
        assert again.cached == (0 if is_damaged else blocks * BLOCK)
        one.drain()
        assert left(daemon.runtime_dir) == NOTHING


def damage(folder: Path) -> None:
    """Change a byte in every page of the files of blocks."""
    for file in folder.rglob("*"):
        size = file.stat().st_size if file.is_file() else 0
        if size > BLOCK_BYTES // 2:
            with file.open("r+b") as opened:
                for start in range(BLOCK_BYTES // 3, size, BLOCK_BYTES // 2):
                    opened.seek(start)
                    byte = opened.read(1)
                    opened.seek(start)
                    opened.write(bytes([byte[0] ^ 1]))
