"""SGLang's radix cache and storage controller, with its own threads and its own fixtures, over kvferry's storage."""

from __future__ import annotations

import json
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.sglang.in_process import same
from tests.sglang.servers import EXTRA

CONFIG: Final = "[tiers]\nhost_bytes = 67108864\n"
PAGES: Final = 6
CONFIGURED: Final = {**EXTRA, "prefetch_threshold": 1}
IO: Final = {"layer_first": "direct", "page_first_direct": "direct", "page_first": "kernel"}


class Trees(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]  # SGLang's is Any
    """SGLang's fixtures; each tree that they build is a server of its own, with kvferry as its storage."""

    __test__ = False

    def __init__(self, page_size: int, layout: str, patch: pytest.MonkeyPatch) -> None:
        """``patch`` is for the servers' environment."""
        super().__init__("run")
        self.cfg = CacheConfig(page_size=page_size, num_layers=4, kv_size=page_size * 16, dtype=torch.bfloat16)
        self.layout, self.patch, self.servers = layout, patch, 0
        self.ratio = 2.0

    def run(self, *_: object) -> None:
        """Do nothing: pytest runs its functions."""

    def story(self) -> None:
        """Have one tree store a sequence; empty it; have it and another one load the sequence."""
        sequence = self._make_seq(1, PAGES)
        first, allocator, requests = self._l3_consumer("")
        self._insert(first, allocator, requests, sequence)
        leaf = fixtures.match_prefix(first, sequence).last_device_node
        indices = first.path_device_indices(leaf)
        self._fill_full_kv(allocator, indices, marker=7)
        expected = self._snapshot_full_kv(allocator, indices)
        self._backup_node(first, leaf)
        self._write_path_to_l3(first, leaf)
        self._flush_l3_backups(first)
        other, pages, _ = self._l3_consumer("")
        self.load(other, pages, sequence, expected)
        first.reset()
        allocator.clear()
        self.load(first, allocator, sequence, expected)

    def load(self, tree: Any, allocator: Any, sequence: list[int], expected: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401
        """Check that a tree finds a sequence in the storage, and has its KV then."""
        self._fill_full_kv(allocator, torch.arange(self.cfg.kv_size), marker=0)
        self._consume_prefetch(tree, sequence, CacheRequestHandle("request", 0))
        found = fixtures.match_prefix(tree, sequence)
        assert found.host_hit_length == len(sequence)
        self._load_back_node(tree, found.last_host_node)
        loaded = tree.path_device_indices(fixtures.match_prefix(tree, sequence).last_device_node)
        assert same(self._snapshot_full_kv(allocator, loaded), expected)

    def windows_story(self) -> None:
        """The same of a model with windows: the last ones come back with full attention, or nothing does."""
        window = 2 * self.cfg.page_size
        self.cfg = replace(
            self.cfg,
            components=(ComponentType.FULL, ComponentType.SWA),
            full_attention_layer_ids=(1, 3),
            sliding_window_size=window,
        )
        sequence = self._make_seq(1, PAGES)
        first, allocator, requests = self._l3_consumer("")
        self._insert(first, allocator, requests, sequence)
        leaf = fixtures.match_prefix(first, sequence).last_device_node
        indices = first.path_device_indices(leaf)
        self._fill_full_kv(allocator, indices, marker=7)
        torch.manual_seed(7)
        rows = allocator.full_to_swa_index_mapping[indices][-window:]
        of_windows = self.windows(allocator)
        for layer in of_windows:
            layer[rows] = torch.randn(layer[rows].shape).to(layer.dtype)
        expected = self._snapshot_full_kv(allocator, indices), [layer[rows].clone() for layer in of_windows]
        self._backup_node(first, leaf)
        self._write_path_to_l3(first, leaf)
        self._flush_l3_backups(first)
        other, pages, _ = self._l3_consumer("")
        for layer in self.windows(pages):
            layer[:] = 0
        self.load(other, pages, sequence, expected[0])
        node = fixtures.match_prefix(other, sequence).last_device_node
        rows = pages.full_to_swa_index_mapping[other.path_device_indices(node)][-window:]
        assert (rows > 0).all()
        assert same([layer[rows] for layer in self.windows(pages)], expected[1])
        self.assert_needs(other.swa_kv_pool_host, sequence)

    def states_story(self) -> None:
        """The same of a model with states: that of the whole sequence comes back, or nothing does."""
        self.cfg = replace(
            self.cfg, components=(ComponentType.FULL, ComponentType.MAMBA), full_attention_layer_ids=(1, 3)
        )
        sequence = self._make_seq(1, PAGES)
        first, allocator, requests = self._l3_consumer("")
        self._insert(first, allocator, requests, sequence)
        leaf = fixtures.match_prefix(first, sequence).last_device_node
        indices = first.path_device_indices(leaf)
        self._fill_full_kv(allocator, indices, marker=7)
        torch.manual_seed(7)
        slot = fixtures.node_device_value(first, leaf, ComponentType.MAMBA)
        of_states = self.states(requests)
        for one in of_states:
            one[:, slot] = torch.randn(one[:, slot].shape).to(one.dtype)
        expected = self._snapshot_full_kv(allocator, indices), [one[:, slot].clone() for one in of_states]
        self._backup_node(first, leaf)
        self._write_path_to_l3(first, leaf)
        self._flush_l3_backups(first)
        other, pages, others = self._l3_consumer("")
        for one in self.states(others):
            one[:] = 0
        self.load(other, pages, sequence, expected[0])
        node = fixtures.match_prefix(other, sequence).last_device_node
        slot = fixtures.node_device_value(other, node, ComponentType.MAMBA)
        assert same([one[:, slot] for one in self.states(others)], expected[1])
        self.assert_needs(other.host_pool_group.get_pool(PoolName.MAMBA), sequence)

    def assert_needs(self, host_pool: Any, sequence: list[int]) -> None:  # noqa: ANN401
        """Check that nothing is found of a sequence without what is stored of a host pool."""
        with Client.connect() as client:
            assert client.evict_cached(pool=host_pool.allocator.host.pool.name).blocks > 0
        tree, _, _ = self._l3_consumer("")
        self._consume_prefetch(tree, sequence, CacheRequestHandle("without", 0))
        assert fixtures.match_prefix(tree, sequence).host_hit_length == 0

    @staticmethod
    def states(requests: Any) -> list[torch.Tensor]:  # noqa: ANN401
        """Return the states of all layers, ``(layers, slots, ...)``."""
        cache = requests.mamba_pool.mamba_cache
        return [*cache.conv, cache.temporal]

    @staticmethod
    def windows(allocator: Any) -> list[torch.Tensor]:  # noqa: ANN401
        """Return k and v of each window layer, ``(tokens, ...)``."""
        pool = allocator.get_kvcache().swa_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]

    def buffer_story(self) -> None:
        """Have one tree store a sequence through host memory that is a buffer only, and another one load it."""
        sequence = self._make_seq(1, PAGES)
        _, expected = self._produce_buffer_l3("", sequence, marker=7)
        tree, allocator, _ = self._build_buffer_hicache_fixture("")
        self._fill_full_kv(allocator, torch.arange(self.cfg.kv_size), marker=0)
        self._consume_prefetch(tree, sequence, CacheRequestHandle("request", 0))
        found = fixtures.match_prefix(tree, sequence)
        assert found.device_prefix_len == len(sequence)
        loaded = tree.path_device_indices(found.last_device_node)
        assert same(self._snapshot_full_kv(allocator, loaded), expected)
        host = tree.cache_controller.mem_pool_host
        assert host.available_size() == host.size - self.cfg.page_size  # of page 0 nothing is ever free

    def full_story(self) -> None:
        """Have a tree find as many pages as its host memory has with the padding page: SGLang must not wait for it."""
        pages = self.cfg.kv_size // self.cfg.page_size // 2 + 1
        sequence = self._make_seq(1, pages)
        self._produce_buffer_l3("", sequence)
        self.ratio = 0.5
        tree, _, _ = self._build_buffer_hicache_fixture("")
        assert tree.cache_controller.mem_pool_host.size == pages * self.cfg.page_size
        for length, found in ((pages, 0), (pages - 1, pages - 1)):
            part = sequence[: length * self.cfg.page_size]
            self._consume_prefetch(tree, part, CacheRequestHandle(f"of {length}", 0))
            assert fixtures.match_prefix(tree, part).device_prefix_len == found * self.cfg.page_size

    def attach_story(self) -> None:
        """Take the storage away from a tree and give it back; refuse it to a tree that was made without it."""
        sequence = self._make_seq(1, PAGES)
        expected = self._l3_produce("", sequence, marker=7)
        tree, allocator, _ = self._l3_consumer("")
        assert tree.detach_storage_backend()[0]
        self._consume_prefetch(tree, sequence, CacheRequestHandle("without", 0))
        assert fixtures.match_prefix(tree, sequence).host_hit_length == 0
        for policy in ("timeout", "wait_complete"):  # the second changes it alone
            done, said = tree.attach_storage_backend("dynamic", json.dumps(CONFIGURED), "model", policy)
            assert done, said
        self.load(tree, allocator, sequence, expected)
        assert tree.detach_storage_backend()[0]
        assert tree.detach_storage_backend()[0]
        without = fixtures.build_fixture(self.cfg)[0]
        self._init_hicache(without, storage_backend=None)
        done, said = without.attach_storage_backend("dynamic", json.dumps(CONFIGURED), "model")
        assert not done
        assert "the storage must be chosen when the server starts" in said
        assert not without.enable_storage

    def _init_hicache(
        self,
        cache: Any,  # noqa: ANN401
        *,
        storage_backend: str | None = "kvferry",
        host_memory_mode: str = "cache",
        **_: object,
    ) -> None:
        """Give a tree its controller, as SGLang's fixtures do; whichever storage they name, it is kvferry."""
        self.servers += 1
        self.patch.setenv("KVFERRY_SGLANG_POOL", f"tree-{self.cfg.page_size}-{self.servers}")
        arguments = ServerArgs(
            model_path="dummy",
            served_model_name="model",
            page_size=self.cfg.page_size,
            hicache_io_backend=IO[self.layout],
            hicache_mem_layout=self.layout,
            hicache_ratio=self.ratio,
            hicache_write_policy="write_through",
            hicache_storage_backend=storage_backend and "dynamic",
            hicache_storage_backend_extra_config=storage_backend and json.dumps(CONFIGURED),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_host_memory_mode=host_memory_mode,
        )
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        if storage_backend:
            for entry in cache.cache_controller.mem_pool_host.entries:
                self.addCleanup(entry.host_pool.allocator.host.pool.engine.close)
        self.addCleanup(cache.cache_controller.detach_storage_backend)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0


@pytest.fixture
def made(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], Trees]]:
    """Return what makes trees of a page size and a layout."""
    load_plugins()
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(daemon.runtime_dir))
    monkeypatch.setattr(fixtures, "get_device", lambda: "cpu")
    with ExitStack() as stack:
        stack.enter_context(
            get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, dp_rank=None)
        )

        def make(page_size: int, layout: str) -> Trees:
            trees = Trees(page_size, layout, monkeypatch)
            stack.callback(trees.doCleanups)
            return trees

        yield make


@pytest.mark.parametrize(
    ("story", "page_size", "layout"),
    [
        (Trees.story, 64, "page_first"),
        (Trees.windows_story, 16, "layer_first"),
        (Trees.states_story, 1, "page_first_direct"),
        (Trees.buffer_story, 16, "layer_first"),
        (Trees.full_story, 16, "layer_first"),
        (Trees.attach_story, 16, "layer_first"),
        pytest.param(Trees.story, 16, "layer_first", marks=pytest.mark.long),
        pytest.param(Trees.story, 1, "page_first_direct", marks=pytest.mark.long),
        pytest.param(Trees.buffer_story, 64, "page_first_direct", marks=pytest.mark.long),
    ],
)
def test_what_trees_store_others_load(
    made: Callable[[int, str], Trees], story: Callable[[Trees], None], page_size: int, layout: str
) -> None:
    story(made(page_size, layout))
