"""SGLang's real host pools in the daemon's memory, and the storage as SGLang's threads call it: byte by byte."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool, build_mamba_host_pool

from kvferry.clients import Client
from kvferry.clients.sglang import hicache
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.sglang.in_process import LAYOUTS, Kind, Layout, Opened, keys_of, made_storage, opened, same, states_pool
from tests.sglang.servers import EXTRA

CONFIG = "[tiers]\nhost_bytes = 67108864\n"
PAGES = 7
BOTH_MEMORIES = pytest.mark.parametrize("memory", ["daemon", pytest.param("engine", marks=pytest.mark.long)])


def stored(one: Opened, prompt: str, pages: int = PAGES, seed: int = 1) -> list[torch.Tensor]:
    """Fill pages of a host pool, store them as a prompt's, give them back; return what was in them."""
    slots = one.take(pages)
    one.fill(slots, seed)
    content = one.content(slots)
    assert one.storage.batch_set_v1(keys_of(prompt, pages), slots) == [True] * pages
    one.host.free(slots)
    return content


def found(one: Opened, prompt: str) -> int:
    """Return how many pages of a prompt are found."""
    count: int = one.storage.batch_exists(keys_of(prompt, PAGES))
    return count


def assert_loads(one: Opened, prompt: str, content: list[torch.Tensor], pages: int = PAGES) -> None:
    """Check that a prompt's pages come into other pages of a host pool, and that no other page changes."""
    skipped = one.take(2)  # so that they are others than those that it was stored from
    slots = one.take(pages)
    rest = torch.arange(one.host.page_size, one.host.size)
    rest = rest[~torch.isin(rest, slots)]
    one.fill(slots, seed=99)
    before = one.content(rest)
    keys = keys_of(prompt, pages)
    assert one.storage.batch_exists(keys) == pages
    assert one.storage.batch_get_v1(keys, slots) == [True] * pages
    assert same(one.content(slots), content)
    assert same(one.content(rest), before)
    one.host.free(skipped)
    one.host.free(slots)


# -- bytes


@pytest.mark.parametrize(
    ("kind", "layout", "memory"),
    [*((kind, layout, "daemon") for kind in ("mha", "mla") for layout in LAYOUTS), ("mha", "page_first", "engine")],
)
def test_pages_come_back_as_they_were_and_to_another_engine_too(
    daemon: Daemon, name: str, kind: Kind, layout: Layout, memory: str
) -> None:
    which: dict[str, Any] = {"kind": kind, "layout": layout, "memory": memory}
    with opened(daemon.runtime_dir, name, **which) as one:
        content = stored(one, name)
        assert_loads(one, name, content)
        with opened(daemon.runtime_dir, f"{name}-other", pages=40, **which) as other:
            assert_loads(other, name, content)
    with opened(daemon.runtime_dir, f"{name}-later", **which) as later:  # an engine that has begun since
        assert_loads(later, name, content)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 64, 128])
@pytest.mark.parametrize(
    ("kind", "layout"), [("mha", "layer_first"), ("mha", "page_first"), ("mla", "page_first_direct")]
)
def test_page_sizes_and_dtypes(
    daemon: Daemon, name: str, kind: Kind, layout: Layout, page_size: int, dtype: torch.dtype
) -> None:
    with opened(daemon.runtime_dir, name, kind=kind, layout=layout, page_size=page_size, dtype=dtype) as one:
        assert_loads(one, name, stored(one, name))


@pytest.mark.parametrize("memory", ["daemon", "engine"])
def test_the_host_pool_is_the_daemons_and_sglang_never_has_its_page_0(daemon: Daemon, name: str, memory: str) -> None:
    with opened(daemon.runtime_dir, name, memory=memory, page_size=16, pages=24) as one:
        pool = one.host.allocator.host.pool
        assert [one.host.k_buffer[0].data_ptr(), one.host.v_buffer[0].data_ptr()] == [*pool.lists.data_ptrs][::3]
        for _ in range(2):
            slots = one.take(24)
            assert one.host.alloc(16) is None
            assert sorted(set((slots // 16).tolist())) == list(range(1, 25))
            one.host.clear()


# -- what is found


def test_a_gap_ends_a_prefix(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name) as one:
        content = stored(one, name)
        keys = keys_of(name, PAGES)
        gapped = [*keys[:3], "e" * 64, *keys[3:]]
        assert (one.storage.batch_exists(gapped), one.storage.batch_exists(gapped[3:])) == (3, 0)
        assert (one.storage.exists(keys[5]), one.storage.exists("f" * 64)) == (True, False)
        slots = one.take(len(gapped))
        one.fill(slots, seed=5)
        untouched = one.content(slots[3 * one.host.page_size :])
        assert one.storage.batch_get_v1(gapped, slots) == [True] * 3 + [False] * (len(gapped) - 3)
        tokens = 3 * one.host.page_size
        assert same([part[:tokens] for part in one.content(slots)], [part[:tokens] for part in content])
        assert same(one.content(slots[tokens:]), untouched)


def test_windows_are_stored_beside_full_attention_under_the_same_keys(daemon: Daemon, name: str) -> None:
    keys = keys_of("windows", PAGES)

    def trailing(count: int) -> list[PoolTransfer]:
        return [PoolTransfer(name=PoolName.SWA, keys=keys[:count], hit_policy=PoolHitPolicy.TRAILING_PAGES)]

    with opened(daemon.runtime_dir, name) as one:
        content = stored(one, "windows")
        beside = Opened(one.device, build_kv_host_pool(kv_pool=one.device, page_size=16, pool_label="swa"), one.storage)
        one.storage.register_mem_host_pool_v2(beside.host, PoolName.SWA)
        assert one.storage.batch_exists_v2(keys, trailing(2)).kv_hit_pages == 0, "of full attention there is all"
        slots = beside.take(3)
        beside.fill(slots, seed=2)
        of_windows = beside.content(slots)
        transfer = PoolTransfer(name=PoolName.SWA, host_indices=slots, keys=keys[2:5])
        extra = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
        assert one.storage.batch_set_v2([transfer], extra) == {PoolName.SWA: [True] * 3}
        for count, pages in ((2, 5), (3, 5), (4, 0)):
            found = one.storage.batch_exists_v2(keys, trailing(count))
            assert (found.kv_hit_pages, found.restorable_prefix_pages) == (pages, [pages] if pages else [])
            hits = {PoolName.KV: PAGES, PoolName.SWA: pages} if pages else {PoolName.KV: PAGES}
            assert found.extra_pool_hit_pages == hits
        into = beside.take(3)
        beside.fill(into, seed=99)
        transfer = PoolTransfer(name=PoolName.SWA, host_indices=into, keys=keys[2:5])
        assert one.storage.batch_get_v2([transfer]) == {PoolName.SWA: [True] * 3}
        assert same(beside.content(into), of_windows)
        assert_loads(one, "windows", content)
        one.storage.clear()
        assert one.storage.batch_get_v2([transfer]) == {PoolName.SWA: [False] * 3}
        beside.host.allocator.host.pool.engine.close()


@contextmanager
def states_beside(one: Opened, **shape: object) -> Iterator[Any]:
    """Open a host pool of states beside that of full attention."""
    pool = states_pool(shape=shape).mamba_pool
    (info,) = pool.get_device_pool_infos()
    host = build_mamba_host_pool(pool, info, host_size=0, layout="page_first_direct")
    one.storage.register_mem_host_pool_v2(host, PoolName.MAMBA)
    yield host
    host.allocator.host.pool.engine.close()


def of_states(keys: list[str], slots: torch.Tensor) -> PoolTransfer:
    return PoolTransfer(name=PoolName.MAMBA, host_indices=slots, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("mha", {}), ("mha", {"temporal": (0, 0, 0)}), ("mha", {"conv": [(0, 0)]}), ("mla", {})],
    ids=["both", "conv", "ssm", "beside latents"],
)
def test_states_are_stored_beside_full_attention_under_their_prefixs_key(
    daemon: Daemon, name: str, kind: Kind, shape: dict[str, Any]
) -> None:
    keys = keys_of(name, PAGES)
    which: dict[str, Any] = {"kind": kind, "layout": "page_first_direct"}
    with opened(daemon.runtime_dir, name, **which) as one, states_beside(one, **shape) as host:
        content = stored(one, name)
        last = [of_states(["any"], torch.empty(0))]
        assert one.storage.batch_exists_v2(keys, last).kv_hit_pages == 0
        slots = host.alloc(host.size - 1)
        assert host.alloc(1) is None
        assert sorted(slots.tolist()) == [*range(1, host.size)], "slot 0 is padding"
        for buffer in host.kv_buffer:
            buffer[:] = torch.randn(buffer.shape).to(buffer.dtype)
        states = [buffer[slots[:2]].clone() for buffer in host.kv_buffer]
        for number, key in enumerate((keys[2], keys[4])):
            assert one.storage.batch_set_v2([of_states([key], slots[number : number + 1])]) == {PoolName.MAMBA: [True]}
        for length, found in ((PAGES, 5), (4, 3), (2, 0)):
            assert one.storage.batch_exists_v2(keys[:length], last).kv_hit_pages == found
        rest = [buffer[slots[2:]].clone() for buffer in host.kv_buffer]
        for number, key in enumerate((keys[4], keys[2])):
            assert one.storage.batch_get_v2([of_states([key], slots[number : number + 1])]) == {PoolName.MAMBA: [True]}
        assert same([buffer[slots[:2]].flip(0) for buffer in host.kv_buffer], states)
        assert same([buffer[slots[2:]] for buffer in host.kv_buffer], rest)
        assert one.storage.batch_get_v2([of_states([keys[3]], slots[:1])]) == {PoolName.MAMBA: [False]}
        assert_loads(one, name, content)


def test_what_windows_lack_may_leave_states_without_theirs(daemon: Daemon, name: str) -> None:
    """Only a length at which both have what they need is found."""
    keys = keys_of(name, PAGES)
    with opened(daemon.runtime_dir, name, layout="page_first_direct") as one, states_beside(one) as host:
        stored(one, name)
        windows = Opened(
            one.device, build_kv_host_pool(kv_pool=one.device, page_size=16, pool_label="swa"), one.storage
        )
        one.storage.register_mem_host_pool_v2(windows.host, PoolName.SWA)
        slots, slot = windows.take(2), host.alloc(1)
        trailing = PoolTransfer(name=PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        both = [of_states(["any"], slot), trailing]
        for state, of_window, found in ((keys[4], keys[2:4], 0), (keys[1], keys[0:2], 2)):
            one.storage.batch_set_v2([of_states([state], slot)])
            one.storage.batch_set_v2([PoolTransfer(name=PoolName.SWA, host_indices=slots, keys=of_window)])
            assert one.storage.batch_exists_v2(keys, both).kv_hit_pages == found
        windows.host.allocator.host.pool.engine.close()


def test_several_convolutions_a_layer_are_refused_by_name(daemon: Daemon, name: str) -> None:
    with (
        opened(daemon.runtime_dir, name, layout="page_first_direct") as one,
        pytest.raises(InvalidFieldError, match="does not carry 2 convolutions a layer in the host pool"),
        states_beside(one, conv=[(6, 3), (8, 3)]),
    ):
        pass


def test_blocks_know_what_comes_before_them(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name) as one, Client.connect(daemon.runtime_dir) as client:
        keys, slots = keys_of(name, 4), one.take(4)
        assert all(one.storage.batch_set_v1(keys[:2], slots[:32], HiCacheStorageExtraInfo(prefix_keys=None)))
        assert all(one.storage.batch_set_v1(keys[2:], slots[32:], HiCacheStorageExtraInfo(prefix_keys=keys[:2])))
        parents = {block.hash: block.parent for block in client.cached_blocks()}
        assert [parents[key[:32]] for key in keys] == ["", *(key[:32] for key in keys[:3])]


OTHERS: dict[str, dict[str, Any]] = {
    "name": {"served_model_name": "another"},
    "path": {"model_path": "nobody/another"},
    "cache dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "quantization": {"quantization": "fp8"},
    "overrides": {"json_model_override_args": '{"rope_theta": 5}'},
    "dtype": {"dtype": torch.bfloat16},
    "layout": {"layout": "page_first"},
    "page size": {"page_size": 32},
    "rank": {"rank": 1, "ranks": 2},
}


@pytest.mark.parametrize(
    "other", [pytest.param(one, marks=[] if one == "rank" else pytest.mark.long) for one in OTHERS]
)
def test_another_model_finds_nothing(daemon: Daemon, name: str, other: str) -> None:
    with opened(daemon.runtime_dir, name) as one:
        stored(one, name)
        with opened(daemon.runtime_dir, f"{name}-other", **OTHERS[other]) as theirs:
            assert found(theirs, name) == 0
            assert theirs.storage.batch_get_v1(keys_of(name, 2), theirs.take(2)) == [False, False]
        with opened(daemon.runtime_dir, f"{name}-same") as same_model:
            assert found(same_model, name) == PAGES


def test_ranks_of_latents_share(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name, kind="mla", rank=0, ranks=2) as one:
        content = stored(one, name)
        with opened(daemon.runtime_dir, name, kind="mla", rank=1, ranks=2) as other:
            assert_loads(other, name, content)


@pytest.mark.parametrize("option", ["model_path", *hicache.FILES])
def test_a_file_in_the_place_of_another_is_another(daemon: Daemon, name: str, tmp_path: Path, option: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    told: dict[str, Any] = {option: str(tmp_path if option == "model_path" else file)}
    file.write_bytes(bytes(1 << 20))
    with opened(daemon.runtime_dir, name, **told) as one:
        stored(one, name)
    for content, pages in ((bytes(1 << 19) + b"tuned" + bytes((1 << 19) - 5), 0), (bytes(1 << 20), PAGES)):
        file.write_bytes(content)
        with opened(daemon.runtime_dir, name, **told) as one:
            assert found(one, name) == pages


def test_clear_drops_this_models_blocks_alone(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name) as one, opened(daemon.runtime_dir, f"{name}-other", revision="2") as other:
        stored(one, f"{name}-a")
        content = stored(other, f"{name}-b")
        one.storage.clear()
        assert found(one, f"{name}-a") == 0
        assert_loads(other, f"{name}-b", content)


def test_more_keys_than_a_message_holds(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name) as one:
        stored(one, name)
        assert one.storage.batch_exists(keys_of(name, PAGES) + keys_of("never", 70000)) == PAGES


def test_what_was_moved_is_counted_where_sglang_asks_for_it(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name, config={"enable_storage_metrics": True}) as one:
        assert_loads(one, name, stored(one, name))
        moved = one.storage.get_stats()
        assert (moved.backup_pgs, moved.prefetch_pgs) == ([PAGES], [PAGES])
        assert min(*moved.backup_bandwidth, *moved.prefetch_bandwidth) > 0
        assert one.storage.get_stats().backup_pgs == []


def test_nothing_stays_pinned(daemon: Daemon, name: str) -> None:
    with opened(daemon.runtime_dir, name) as one, Client.connect(daemon.runtime_dir) as client:
        assert_loads(one, name, stored(one, name))
        assert one.storage.batch_get_v1(keys_of(name, PAGES), one.take(PAGES)[16:]) == [False] * PAGES
        assert not [block for block in client.cached_blocks() if block.pinned_by]


def test_two_threads_store_and_load_at_once(daemon: Daemon, name: str) -> None:
    """As SGLang's backup and prefetch threads do; each prompt is loaded once it was stored."""
    with opened(daemon.runtime_dir, name, pages=64) as one:
        prompts = [f"{name}-{number}" for number in range(20)]
        contents: dict[str, list[torch.Tensor]] = {}
        there = {prompt: threading.Event() for prompt in prompts}
        right: list[str] = []

        def back_up() -> None:
            for number, prompt in enumerate(prompts):
                contents[prompt] = stored(one, prompt, seed=number)
                there[prompt].set()

        def prefetch() -> None:
            for prompt in prompts:
                assert there[prompt].wait(30)
                slots = one.take(PAGES)
                got = one.storage.batch_get_v1(keys_of(prompt, PAGES), slots)
                if got == [True] * PAGES and same(one.content(slots), contents[prompt]):
                    right.append(prompt)
                one.host.free(slots)

        threads = [threading.Thread(target=run) for run in (back_up, prefetch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert right == prompts


# -- what is refused


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ({"layout": "page_head"}, "layout page_head"),
        ({"extra": {**EXTRA, "interface_v1": 0}}, "interface_v1"),
        ({"config": {"pp_size": 2}}, "pp_size 2"),
        ({"config": {"attn_cp_size": 2}}, "attn_cp_size 2"),
        ({"config": {"should_split_heads": True}}, "heads split"),
        ({"memory": "somebody"}, "KVFERRY_SGLANG_MEMORY"),
    ],
    ids=str,
)
def test_what_is_not_carried_is_named(daemon: Daemon, name: str, which: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidFieldError, match=says), opened(daemon.runtime_dir, name, **which):
        pass


def test_pools_that_are_not_the_daemons_kv_are_refused(daemon: Daemon, name: str) -> None:
    other = {**EXTRA, "class_name": "Another"}  # which has a host pool of its own
    with pytest.raises(AttributeError, match="Another"), opened(daemon.runtime_dir, name, extra=other):
        pass
    with opened(daemon.runtime_dir, name) as one:
        with pytest.raises(InvalidFieldError, match="'draft' host pool"):
            one.storage.register_mem_host_pool_v2(one.host, "draft")
        one.host.kv_buffer = one.host.kv_buffer.clone()
        with pytest.raises(InvalidFieldError, match="not in the daemon's memory"):
            made_storage(one.host, is_mla=False, extra=EXTRA)


def test_no_daemon_and_no_host_tier_are_errors_at_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(KvferryError, match="daemon"), opened(tmp_path, name):
        pass
    with (
        kit.daemon("[tiers]\nhost_bytes = 0\n") as bare,
        pytest.raises(KvferryError, match="host_bytes"),
        opened(bare.runtime_dir, name),
    ):
        pass


# -- failures


def test_wrong_lists_of_slots_are_misses_and_said_once(
    daemon: Daemon, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(daemon.runtime_dir, name) as one, caplog.at_level(logging.WARNING, "kvferry"):
        keys, slots = keys_of(name, 2), one.take(2)
        for wrong in (slots[:16], slots[1:], torch.arange(0, 32), slots.flip(0), slots + 1000):
            assert one.storage.batch_set_v1(keys, wrong) == [False, False]
            assert one.storage.batch_set_v1(keys, wrong) == [False, False]
        assert one.storage.batch_exists(keys) == 0
        said = [record.message for record in caplog.records if "store failed" in record.message]
        assert len(said) == len(set(said)) <= 4


@pytest.mark.long
def test_a_full_tier_is_a_miss(name: str) -> None:
    with kit.daemon("[tiers]\nhost_bytes = 65536\n") as small, opened(small.runtime_dir, name) as one:
        assert one.storage.batch_set_v1(keys_of(name, 20), one.take(20)) == [False] * 20
        assert one.storage.batch_exists(keys_of(name, 20)) == 0


@pytest.mark.long
def test_a_daemon_that_stands_still_holds_up_a_question_for_seconds(name: str) -> None:
    with kit.daemon(CONFIG) as still, opened(still.runtime_dir, name) as one:
        content = stored(one, name)
        with still.stopped():
            began = time.monotonic()
            assert found(one, name) == 0
            assert time.monotonic() - began < 10
        assert soon(lambda: found(one, name) == PAGES)
        assert_loads(one, name, content)


def with_disk(folder: Path) -> str:
    """Return the configuration of a daemon with a disk tier in a folder of its own."""
    (folder / "disk").mkdir(mode=0o700)
    return f"{CONFIG}[tiers.disk]\npath = '{folder}/disk'\nmax_bytes = 67108864\n"


def is_on_disk(daemon: Daemon) -> bool:
    with Client.connect(daemon.runtime_dir) as client:
        return all("disk" in block.tiers for block in client.cached_blocks())


@BOTH_MEMORIES
def test_a_killed_daemon_is_a_miss_and_comes_back(tmp_path: Path, name: str, memory: str) -> None:
    """What lies on disk is found again, but for a damaged block; the host pool is the same memory.

    The next daemon's host tier has another size, and so begins empty.
    """
    config = with_disk(tmp_path)
    with (
        kit.daemon(config, keep=True) as life,
        opened(life.runtime_dir, name, memory=memory) as one,
    ):
        content = stored(one, name)
        assert soon(lambda: is_on_disk(life))
        address = one.host.kv_buffer.data_ptr()
        life.kill()
        assert_misses(one, name)
        life.configure(config.replace("host_bytes = 67108864", "host_bytes = 67112960"))
        life.start()
        assert soon(lambda: is_back(one, life.runtime_dir))
        assert soon(lambda: found(one, name) == PAGES)  # the disk is listed meanwhile
        keys = keys_of(name, PAGES)
        (damaged,) = (file for file in (tmp_path / "disk").rglob("*") if keys[4][:32] in file.name)
        bits = bytearray(damaged.read_bytes())
        bits[-1] ^= 1
        damaged.write_bytes(bits)
        slots = one.take(PAGES)
        assert one.storage.batch_get_v1(keys, slots) == [True] * 4 + [False] * (PAGES - 4)
        tokens = 4 * one.host.page_size
        assert same([part[:tokens] for part in one.content(slots)], [part[:tokens] for part in content])
        assert one.storage.batch_exists(keys) == 4
        one.host.free(slots)
        assert one.host.kv_buffer.data_ptr() == address
        assert_loads(one, f"{name}-new", stored(one, f"{name}-new", seed=6))


@BOTH_MEMORIES
def test_a_daemon_that_adopts_nothing(name: str, memory: str) -> None:
    """Registered memory is the next one's; memory of the daemon's own stays the host pool's, without a storage."""
    with kit.daemon(CONFIG) as first, opened(first.runtime_dir, name, memory=memory) as one:
        stored(one, name)
        slots = one.take(PAGES)
        one.fill(slots, seed=4)
        content = one.content(slots)
        first.kill()
        assert_misses(one, name)
        first.start()
        if memory == "daemon":
            assert soon(lambda: one.host.allocator.host.pool.engine.lost is not None)
            assert_misses(one, name)
            assert same(one.content(slots), content)
        else:
            assert soon(lambda: all(one.storage.batch_set_v1(keys_of(name, PAGES), slots)))
            one.host.free(slots)
            assert_loads(one, name, content)


@pytest.mark.long
@pytest.mark.parametrize(("call", "memory"), [("store", "daemon"), ("load", "daemon"), ("load", "engine")])
def test_a_daemon_that_is_killed_in_the_midst_of_it(name: str, memory: str, call: str) -> None:
    """The call ends, by a miss or with all of it; the next daemon has no block that is not whole."""
    pages = 128
    with (
        kit.daemon(CONFIG, keep=True) as life,
        opened(life.runtime_dir, name, memory=memory, pages=400, page_size=64) as one,
    ):
        content = stored(one, name, pages)
        slots = one.take(pages)
        one.fill(slots, seed=3)
        others, ended = one.content(slots), threading.Event()
        results: list[list[bool]] = []

        def go_on() -> None:
            while not ended.is_set():
                if call == "store":
                    results.append(one.storage.batch_set_v1(keys_of(f"{name}-{len(results)}", pages), slots))
                else:
                    results.append(one.storage.batch_get_v1(keys_of(name, pages), slots))
                if not all(results[-1]):
                    return

        thread = threading.Thread(target=go_on)
        thread.start()
        assert soon(lambda: len(results) > 2)
        life.restart()
        ended.set()
        thread.join(30)
        assert not thread.is_alive()
        loaded = results[-1].count(True) * 64
        if call == "load":
            assert same([part[:loaded] for part in one.content(slots)], [part[:loaded] for part in content])
        else:
            assert same(one.content(slots), others)
        assert soon(lambda: is_back(one, life.runtime_dir))
        assert soon(lambda: all(one.storage.batch_set_v1(keys_of(f"{name}-after", pages), slots)))  # registered again
        content = one.content(slots)
        one.host.free(slots)
        assert_loads(one, f"{name}-after", content, pages)


def is_back(one: Opened, runtime_dir: Path) -> bool:
    """Return whether a server's session is with the daemon that runs now."""
    with Client.connect(runtime_dir, session=False) as client:
        assert client.ping()
        return bool(one.host.allocator.host.pool.engine.boot_id == client.boot_id)


def assert_misses(one: Opened, prompt: str) -> None:
    """Check that nothing is found, loaded or stored, at once and without an exception."""
    keys, slots = keys_of(prompt, PAGES), one.take(PAGES)
    assert soon(lambda: one.host.allocator.host.pool.engine.is_away)
    began = time.monotonic()
    assert one.storage.batch_exists(keys) == 0
    assert one.storage.batch_get_v1(keys, slots) == [False] * PAGES
    assert one.storage.batch_set_v1(keys, slots) == [False] * PAGES
    assert time.monotonic() - began < 1.0
    one.host.free(slots)
