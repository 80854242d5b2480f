"""SGLang's radix cache and storage controller, with its own threads and its own fixtures, over kvferry's storage."""

from __future__ import annotations

import json
import unittest
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from tests.daemons import DaemonProcess, running_daemon
from tests.sglang.host_pools import EXTRA

PAGES: Final = 6
IO: Final = {"layer_first": "direct", "page_first_direct": "direct", "page_first": "kernel"}


class Trees(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]  # SGLang's is Any
    """SGLang's fixtures; each tree that they build is a server of its own, with kvferry as its storage."""

    __test__ = False

    def __init__(self, page_size: int, layout: str, patch: pytest.MonkeyPatch) -> None:
        """``patch`` is for the servers' environment."""
        super().__init__("run")
        self.cfg = CacheConfig(page_size=page_size, num_layers=4, kv_size=page_size * 16, dtype=torch.bfloat16)
        self.layout, self.patch, self.servers = layout, patch, 0

    def run(self, *_: object) -> None:
        """Do nothing: pytest runs its functions."""

    def story(self) -> None:
        """Have one tree store a sequence; empty it; have it and another one load the sequence."""
        sequence = self._make_seq(1, PAGES)
        first, allocator, requests = self.tree()
        self._insert(first, allocator, requests, sequence)
        leaf = fixtures.match_prefix(first, sequence).last_device_node
        indices = first.path_device_indices(leaf)
        self._fill_full_kv(allocator, indices, marker=7)
        expected = self._snapshot_full_kv(allocator, indices)
        self._backup_node(first, leaf)
        self._write_path_to_l3(first, leaf)
        self._flush_l3_backups(first)
        other, pages, _ = self.tree()
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
        loaded = self._load_back_node(tree, found.last_host_node)
        for part, wanted in zip(self._snapshot_full_kv(allocator, loaded), expected, strict=True):
            assert torch.equal(part, wanted)

    def tree(self) -> Any:  # noqa: ANN401  SGLang's objects
        """Build a tree, its pools and its controller."""
        self.servers += 1
        self.patch.setenv("KVFERRY_SGLANG_POOL", f"tree-{self.cfg.page_size}-{self.servers}")
        self.patch.setattr(fixtures, "get_device", lambda: "cpu")
        built = fixtures.build_fixture(self.cfg)
        arguments = ServerArgs(
            model_path="dummy",
            served_model_name="model",
            page_size=self.cfg.page_size,
            hicache_io_backend=IO[self.layout],
            hicache_mem_layout=self.layout,
            hicache_ratio=2.0,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps({**EXTRA, "prefetch_threshold": 1}),
            hicache_storage_prefetch_policy="wait_complete",
        )
        set_global_server_args_for_scheduler(arguments)
        cache = built[0]
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        self.addCleanup(cache.cache_controller.mem_pool_host.anchor_entry.host_pool.allocator.host.pool.engine.close)
        self.addCleanup(cache.cache_controller.detach_storage_backend)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        return built


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Return a daemon with a host tier."""
    with running_daemon(tmp_path_factory.mktemp("controller"), "[tiers]\nhost_bytes = 67108864\n") as one:
        yield one


@pytest.mark.parametrize(("page_size", "layout"), [(16, "layer_first"), (64, "page_first"), (1, "page_first_direct")])
def test_what_one_tree_stores_others_load_and_itself_after_a_flush(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, page_size: int, layout: str
) -> None:
    load_plugins()
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", str(daemon.runtime_dir))
    trees = Trees(page_size, layout, monkeypatch)
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, dp_rank=None):
        try:
            trees.story()
        finally:
            trees.doCleanups()
