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
from tests.kit.folders import MODELS, SMOLLM2, TINY_MHA
from tests.vllm.in_process import (
    BLOCKS,
    HOST_TIER,
    NOTHING,
    OTHER_HOST_TIER,
    PROMPTS,
    Answer,
    Engine,
    Plain,
    Served,
    assert_all_is_free,
    assert_caches,
    begin_anew,
    by_hand,
    cached_blocks,
    engine,
    instance_client,
    left,
    make_adapter,
    metrics,
    prompt,
    prompt_of,
    received,
    reset,
    settings,
    wait_until_back,
    zeroed,
)
from tests.vllm.servers import BLOCK

CACHED = [128, 128, 0, 128]
"""Tokens of PROMPTS in full blocks."""
BLOCK_BYTES = 2 * 30 * 3 * 64 * BLOCK * 4
"""Of SmolLM2: K and V, layers, heads, elements, tokens, bytes."""
MOST_LEASES = 1000
"""That a daemon of these tests has given."""


@pytest.fixture(scope="module")
def one(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return an engine with a prefix cache."""
    with engine(tmp_path_factory.mktemp("one"), settings(kept_daemon, "one"), disable_log_stats=False) as made:
        yield made


@pytest.fixture(scope="module")
def other(kept_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return another one of the same model, with another number of blocks; its events are collected."""
    more: dict[str, Any] = {
        "num_gpu_blocks_override": BLOCKS // 2,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
    }
    with engine(tmp_path_factory.mktemp("other"), settings(kept_daemon, "other"), **more) as made:
        made.call(collect_events)
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(kept_daemon: Daemon) -> Iterator[None]:
    """Check that after each test nothing is pinned, nor under way."""
    yield
    assert left(kept_daemon) == NOTHING


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached_of(answers: Sequence[Answer]) -> list[int]:
    """Return how many tokens of each prompt were not computed."""
    return [answer.cached for answer in answers]


def stored(one: Engine, asked: str, **more: Any) -> None:  # noqa: ANN401  of Asked
    """Have a prompt computed and stored."""
    one.ask(asked, **more)
    one.drain()


def most(answer: Answer) -> int:
    """Return how many tokens of a prompt can be found: the last one is always computed."""
    return (len(answer.prompt) - 1) // BLOCK * BLOCK


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
    begin_anew(one)
    loaded = one.ask(*PROMPTS)
    assert (tokens_of(loaded), cached_of(loaded)) == (want, CACHED)
    assert_all_is_free(kept_daemon, one)
    after = one.call(metrics)
    said = {name.removeprefix("vllm:kvferry_"): after[name] - before[name] for name in after if ":kvferry_" in name}
    blocks = len(cached_blocks(kept_daemon))
    assert said["store_bytes"] >= blocks * BLOCK_BYTES
    assert said["load_seconds_count"] in {2, 3}  # a common prefix may be there by then
    assert said["load_bytes"] == said["load_seconds_count"] * CACHED[0] // BLOCK * BLOCK_BYTES
    assert (said["load_failures"], said["store_failures"]) == (0, 0)
    assert (said["send_bytes"], said["receive_bytes"]) == (0, 0)
    assert said["load_seconds_sum"] > 0


def test_a_step_of_many_requests_is_one_store(kept_daemon: Daemon, other: Engine, plain: Plain) -> None:
    """Two of the prompts begin alike; each block is stored once, after its parent."""
    begin = prompt(2 * BLOCK, seed=3)
    prompts = [begin + prompt(BLOCK + 1, seed=one) for one in (1, 2)] + [prompt(BLOCK + 9, seed=4), prompt(9, seed=5)]
    want = plain.tokens(*prompts, tokens=2)
    before = {one.hash for one in cached_blocks(kept_daemon)}
    with by_hand(other):
        asked = [other.add(one, tokens=2) for one in prompts]
        assert other.call(stores_begun) == [5]
        assert tokens_of(other.wait(*asked)) == want
    other.drain()
    parents = {one.hash: one.parent for one in cached_blocks(kept_daemon) if one.hash not in before}
    (first,) = {parents.get(one, "") for one in parents.values()} - {""}
    (second,) = (one for one, parent in parents.items() if parent == first)
    assert sorted(parents.values()) == sorted(["", "", first, second, second])
    begin_anew(other)
    answers = other.ask(*prompts, tokens=2)
    assert (tokens_of(answers), cached_of(answers)) == (want, [3 * BLOCK, 3 * BLOCK, BLOCK, 0])


def stores_begun(served: Served) -> list[int]:
    """Do a step; return of how many blocks the daemon was told to store, STORE by STORE."""
    from kvferry.clients.batch import Batch  # noqa: PLC0415  only here there is a torch

    store, begun = Batch.store, list[int]()

    def counted(batch: Batch, pool: str, hashes: Sequence[bytes], *args: Any, **more: Any) -> Any:  # noqa: ANN401
        begun.append(len(hashes))
        return store(batch, pool, hashes, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "store", counted)
        served.step()
    return begun


def test_another_engine_finds_it_also_a_part_of_it(one: Engine, other: Engine, plain: Plain) -> None:
    asked, more = prompt_of("another"), prompt_of("another") + "sang, and nobody knew why. " * 8
    stored(one, asked)
    (found,), (longer,) = other.ask(asked), other.ask(more)
    assert [found.tokens, longer.tokens] == plain.tokens(asked, more)
    assert found.cached == most(found)
    assert 0 < longer.cached < len(longer.prompt) - 2 * BLOCK
    other.drain()


def test_what_is_loaded_is_what_is_computed_with(one: Engine, other: Engine, plain: Plain) -> None:
    """A control: with zeros in place of what was loaded the tokens are others."""
    asked = prompt_of("zeros")
    stored(one, asked)
    with by_hand(other):
        name = other.add(asked)
        other.call(received, name)
        other.call(zeroed, name)
        (answer,) = other.wait(name)
    assert answer.cached == most(answer)
    assert [answer.tokens] != plain.tokens(asked)
    assert [other.ask_anew(asked, skips_cache=True).tokens] == plain.tokens(asked)


def test_salts_do_not_mix_and_who_skips_the_cache_reads_nothing(one: Engine, other: Engine, plain: Plain) -> None:
    asked = prompt_of("salts")
    want = plain.tokens(asked)
    for salt in (None, "a", "b"):
        answers = one.ask(asked, salt=salt)
        assert (tokens_of(answers), cached_of(answers)) == (want, [0])
    one.drain()
    answers = other.ask(asked, skips_cache=True)
    assert (tokens_of(answers), cached_of(answers)) == (want, [0])
    found = other.ask(asked, salt="b")
    assert (tokens_of(found), cached_of(found)) == (want, [most(found[0])])
    assert cached_of(other.ask(asked, salt="c")) == [0]
    other.drain()


# -- what goes


def test_reset_of_the_external_cache_too(kept_daemon: Daemon, one: Engine, plain: Plain) -> None:
    asked = prompt_of("reset")
    stored(one, asked)
    assert cached_blocks(kept_daemon)
    assert one.call(reset, external=True)
    assert cached_blocks(kept_daemon) == []
    again = one.ask(asked)
    assert (tokens_of(again), cached_of(again)) == (plain.tokens(asked), [0])
    one.drain()


def test_lease_that_ends_between_lookup_and_load(kept_daemon: Daemon, one: Engine, other: Engine, plain: Plain) -> None:
    asked = prompt_of("lease")
    stored(one, asked)
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
    added = [event for event in events if event["kind"] == "BlockStored"]
    tokens = answer.prompt + answer.tokens
    count = len(tokens) // BLOCK if len(tokens) % BLOCK else len(tokens) // BLOCK - 1  # the last token has no KV yet
    assert [token for event in added for token in event["token_ids"]] == tokens[: count * BLOCK]
    hashes = [one for event in added for one in event["block_hashes"]]
    assert len(set(hashes)) == count
    assert added[0]["parent_block_hash"] is None
    with Client.connect(kept_daemon.runtime_dir) as client:
        client.evict_cached()
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
    names = ("block_hashes", "parent_block_hash", "token_ids", "medium")
    return [{"kind": type(event).__name__, **{name: getattr(event, name, None) for name in names}} for event in taken]


# -- long: engines that are started for one test


@pytest.fixture
def start(kept_daemon: Daemon, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Return what starts an engine of the small model: with the name of its pool, and vLLM's options."""
    with contextlib.ExitStack() as stack:

        def make(pool: str, model: str | Path = TINY_MHA, *, cache: bool = True, **more: Any) -> Engine:  # noqa: ANN401
            extra = settings(kept_daemon, f"{request.node.name[:40]}-{pool}", cache=cache)
            return stack.enter_context(engine(tmp_path, extra, model=model, **more))

        yield make


def found(one: Engine, asked: str, **more: Any) -> tuple[list[int], bool]:  # noqa: ANN401  of Asked
    """Ask an engine that has nothing itself: return the tokens, and whether any block was found."""
    answer = one.ask_anew(asked, **more)
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
        assert one.ask_anew(asked, adapter=str(adapter), skips_cache=True).tokens == first
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
    before = len(cached_blocks(kept_daemon))
    asked = prompt_of("no cache")
    (want,) = plain.tokens(asked, model=TINY_MHA)
    one = start("one", cache=False)
    assert found(one, asked) == found(one, asked) == (want, False)
    assert len(cached_blocks(kept_daemon)) == before
    assert found(start("other"), asked) == (want, False)
    assert found(one, asked) == (want, False)


@pytest.mark.long
@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_disk_tier(tmp_path: Path, plain: Plain, *, is_damaged: bool) -> None:
    """A daemon that comes back without its host tier finds blocks on the disk; one that is damaged is computed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = f'{HOST_TIER}[tiers.disk]\npath = "{disk}"\nmax_bytes = 1073741824\nfsync = "block"\n'
    with kit.daemon(config, keep=True) as daemon, engine(tmp_path, settings(daemon, "disk")) as one:
        assert_caches(one, plain, "disk", SMOLLM2)
        assert soon(lambda: all("disk" in block.tiers for block in cached_blocks(daemon)))
        one.log()
        daemon.end(signal.SIGTERM)
        if is_damaged:
            damage(disk)
        daemon.configure(config.replace(HOST_TIER, OTHER_HOST_TIER))
        daemon.start()
        wait_until_back(one)
        assert all("host" not in block.tiers for block in cached_blocks(daemon))
        again = one.ask_anew(prompt_of("disk"))
        assert [again.tokens] == plain.tokens(prompt_of("disk"))
        assert again.cached == (0 if is_damaged else most(again))
        assert_all_is_free(daemon, one)


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
