"""Prefill's chunks go to decode while later layers are computed: SGLang's chunks and radix tree, over its own pool."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.hardware_backend.npu.allocator_npu import NPUPagedTokenToKVPoolAllocator
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from kvferry.clients.layers import LAYERED_BYTES
from kvferry.clients.sglang import layers, pools
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.sglang.in_process import SOON_S, Halves, halves, polled
from tests.sglang.npu.pools import DRAFTS, FIRST_LAYER, KINDS, LAYERS, PAGE, Kind

HEADS, DIM = 32, 256
PAGES: Final = 40
LAYER_BYTES: Final = 2 * PAGE * HEADS * DIM * 2
"""Of a page, K and V."""
KV: Final = torch.randint(1, 99, (LAYERS, 2, PAGES * PAGE, HEADS, DIM)).bfloat16()
"""What a layer computes for a token; the same of all prompts, which begin alike."""
CHUNK: Final = 3
"""Pages of which the daemon copies the layers one by one."""
LONG: Final = CHUNK * PAGE + 5
SHORT: Final = LONG - PAGE
assert (CHUNK - 1) * LAYERS * LAYER_BYTES < LAYERED_BYTES <= CHUNK * LAYERS * LAYER_BYTES
PATIENCE: Final = (1000, 4000, 16000)
"""Round trips to the daemon in which it copies what it may; tried again with more."""
NPU: Any = torch.get_device_module("npu")


class Attention(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """A layer's attention, as far as it writes KV."""

    def __init__(self, pool: Any, held: str = "held_layer") -> None:  # noqa: ANN401  SGLang's class
        self.pool, self.held = pool, held

    def forward_extend(self, _: object, k: Any, v: Any, layer: Any, batch: Any, **__: object) -> None:  # noqa: ANN401
        """Write the batch's KV of a layer, which may have to wait."""
        if layer.layer_id == getattr(batch, self.held):
            NPU.current_stream().wait_event(batch.gate)
        self.pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)


class Prefill(SchedulerDisaggregationPrefillMixin):  # type: ignore[misc]  # SGLang has no types
    """A prefill scheduler without a model."""

    disaggregation_mode = DisaggregationMode.PREFILL
    enable_staging = enable_overlap = False
    kv_checksum_computer = None

    def __init__(self, both: Halves) -> None:
        self.both = both
        self.req_to_token_pool = ReqToTokenPool(8, PAGES * PAGE, "npu", enable_memory_saver=False)
        self.token_to_kv_pool_allocator = NPUPagedTokenToKVPoolAllocator(
            PAGES * PAGE, PAGE, torch.bfloat16, "npu", both.sglang, need_sort=True
        )
        self.tree_cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=PAGE,
            )
        )
        self.disagg_prefill_pending_chunk_rids: set[str] = set()
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=both.prefill)
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda _: None)
        self.attention, self.drafting = Attention(both.sglang), Attention(both.draft, "held_draft_layer")
        self.batches: list[Any] = []
        self.model, self.gate = NPU.Stream(), NPU.Stream()
        told = {"sliding_window_size": None, "enable_overlap": True, "forward_stream": self.model}
        pools.note_scheduler(None, SimpleNamespace(**told))

    @property
    def free(self) -> int:
        """Return how many pages are free."""
        return int(self.token_to_kv_pool_allocator.available_size()) // PAGE

    def take(self, pages: int) -> Any:  # noqa: ANN401  a tensor
        """Return the slots of as many pages."""
        slots = self.token_to_kv_pool_allocator.alloc(pages * PAGE)
        assert slots is not None
        return slots

    def begin(self, tokens: int) -> Any:  # noqa: ANN401  SGLang's class
        """Return a request that has its pages, and whose decode waits with its own."""
        req = Req(f"{tokens}", "", array("q", range(tokens)), SamplingParams())
        req.init_next_round_input(self.tree_cache)
        req.lock = self.tree_cache.lock(req.last_node)
        count, room = -(-tokens // PAGE), self.both.new_room()
        row = self.req_to_token_pool.alloc([req])[0]
        own = [self.tree_cache.path_device_indices(req.last_node), self.take(count - req.prefix_len // PAGE)]
        self.req_to_token_pool.req_to_token[row, :tokens] = torch.cat(own)[:tokens].int()
        req.disagg_kv_sender, req.receiver = self.both.sender(room, count), self.both.receiver(room)
        req.metadata_buffer_index, req.pending_bootstrap = 0, False
        req.theirs = (self.take(count)[::PAGE] // PAGE).long()
        req.receiver.send_metadata(req.theirs.cpu().numpy(), 1)
        assert polled(req.disagg_kv_sender, KVPoll.WaitingForInput)
        return req

    def compute(self, *reqs: Any, tokens: int, held_layer: int = 0, **changed: object) -> None:  # noqa: ANN401
        """Compute requests up to so many tokens; while ``gate`` is held only the layers before that one."""
        for req in reqs:
            req.extend_end = tokens
        batch = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.EXTEND, hicache_consumer_index=-1)
        batch.tbo_parent_token_range, batch.held_layer, batch.gate = None, FIRST_LAYER + held_layer, NPU.Event()
        batch.held_draft_layer = None
        vars(batch).update(changed)
        layers.run_batch(Prefill.run, self, batch)

    def run(self, batch: Any) -> None:  # noqa: ANN401  SGLang's class
        """Compute a batch, as SGLang's ``run_batch`` does."""
        table = self.req_to_token_pool.req_to_token
        for req in batch.reqs:  # as SGLang's does
            self.maybe_send_cached_prefix_chunk(req, allow_send=batch.hicache_consumer_index < 0)
        own = [table[one.kv.req_pool_idx, one.prefix_len : one.extend_end] for one in batch.reqs]
        values = torch.cat([KV[:, :, one.prefix_len : one.extend_end] for one in batch.reqs], 2).to("npu")
        batch.out_cache_loc, batch.values = torch.cat(own), values
        self.batches.append(batch)  # what the model's stream uses is kept
        batch.gate.record(self.gate)
        self.model.wait_stream(NPU.current_stream())
        with NPU.stream(self.model):
            for number, (k, v) in enumerate(values, FIRST_LAYER):
                self.attention.forward(None, k, v, SimpleNamespace(layer_id=number), batch)
            for number in range(self.both.draft.layer_num if self.both.draft else 0):
                self.drafting.forward(None, *values[0], SimpleNamespace(layer_id=number), batch)

    def give_time(self, pings: int) -> None:
        """Let the daemon do what it may."""
        with self.both.pool.engine.client() as client:
            for _ in range(pings):
                client.ping()

    def arrived(self, req: Any, tokens: int) -> list[bool]:  # noqa: ANN401  SGLang's class
        """Return of each layer whether decode has it of the first tokens."""
        k, v = (self.both.pool.tensor(role) for role in ("k", "v"))
        found = [torch.stack([one[layer][req.theirs] for one in (k, v)]).cpu() for layer in range(LAYERS)]
        return [torch.equal(one.flatten(1, 2)[:, :tokens], kv[:, :tokens]) for one, kv in zip(found, KV, strict=True)]

    def sent(self, req: Any) -> bool:  # noqa: ANN401  SGLang's class
        """Send what is left of a request: whether decode then has all."""
        self.checkpoint_disagg_prefill(req)
        self.send_kv_chunk(req, last_chunk=True)
        assert polled(req.disagg_kv_sender, KVPoll.Success)
        assert polled(req.receiver, KVPoll.Success)
        NPU.current_stream().wait_stream(self.model)
        return all(self.arrived(req, len(req.origin_input_ids)))


def opened(runtime_dir: Path, *drafts: Kind, **environment: str) -> AbstractContextManager[Halves]:
    more = {"head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM, "size": PAGES * PAGE}
    kinds = [kind._replace(given={**kind.given, **more}) for kind in (KINDS["mha fia"], *drafts)]
    makers, told = [kind.make for kind in kinds], {**kinds[0].environment, **environment}
    return halves(runtime_dir, *makers, KVFERRY_SGLANG_POOL="pool", **told)


@pytest.fixture
def prefill(daemon: Daemon) -> Iterator[Prefill]:
    with opened(daemon.runtime_dir) as both:
        one = Prefill(both)
        yield one
        NPU.current_stream().wait_stream(one.model)  # before anybody has the memory of its batches
        both.pool.engine.close()


@pytest.fixture
def gate(prefill: Prefill, simulator: Simulator) -> Iterator[Simulator]:
    """Hold the layers behind the held one."""
    with simulator.held(os.getpid(), prefill.gate.npu_stream):
        yield simulator


def layers_ahead(prefill: Prefill, simulator: Simulator, expected: int, held_layer: int, **changed: object) -> bool:
    """Return whether so many layers, the first ones, arrive while later ones are held; an abort makes that final."""
    there: list[bool] = []
    for pings in PATIENCE:
        with simulator.held(os.getpid(), prefill.gate.npu_stream):
            req = prefill.begin(LONG)
            prefill.compute(req, tokens=LONG, held_layer=held_layer, **changed)
            prefill.give_time(pings)
            req.disagg_kv_sender.abort()
            assert polled(req.receiver, KVPoll.Failed)
            there = prefill.arrived(req, CHUNK * PAGE)
        if sum(there) >= expected:
            break
    return there == [layer < expected for layer in range(LAYERS)]


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_layers_are_in_decodes_pages_before_later_ones_are_computed(
    prefill: Prefill, simulator: Simulator, layer: int
) -> None:
    assert layers_ahead(prefill, simulator, layer, layer)


def test_two_parts_of_a_batch_in_turns_are_sent_after_the_last_layer(prefill: Prefill, simulator: Simulator) -> None:
    assert layers_ahead(prefill, simulator, 0, LAYERS - 1, tbo_parent_token_range=(0, LONG))


def test_a_draft_models_layers_go_with_the_models_last(daemon: Daemon, simulator: Simulator) -> None:
    """They are numbered from 0, and this one has more than the model."""
    count = FIRST_LAYER + LAYERS + 2
    one_layer = DRAFTS["mha fia"]
    draft = one_layer._replace(given={**one_layer.given, "layer_num": count, "end_layer": count - 1})
    with opened(daemon.runtime_dir, draft) as both:
        prefill = Prefill(both)
        held = {"held_layer": LAYERS, "held_draft_layer": count - 1}
        assert layers_ahead(prefill, simulator, LAYERS - 1, **held)
        req = prefill.begin(LONG)
        prefill.compute(req, tokens=LONG)
        assert prefill.sent(req)
        for role, expected in zip(("k", "v"), KV[0], strict=True):
            rows = both.pool.tensor(role, "draft")[:, req.theirs].cpu().flatten(1, 2)[:, :LONG]
            assert torch.equal(rows, expected[:LONG].expand_as(rows))
        NPU.current_stream().wait_stream(prefill.model)
        both.pool.engine.close()


def test_all_layers_arrive_once_they_are_computed(prefill: Prefill, gate: Simulator) -> None:
    req = prefill.begin(LONG)
    prefill.compute(req, tokens=LONG, held_layer=1)
    assert req.start_send_idx == CHUNK * PAGE
    prefill.give_time(PATIENCE[0])
    assert req.receiver.poll() == KVPoll.Transferring
    gate.release()
    assert prefill.sent(req)


@pytest.mark.parametrize(
    ("tokens", "changed"),
    [(SHORT, {}), (LONG, {"hicache_consumer_index": 0}), (LONG, {"forward_mode": ForwardMode.SPLIT_PREFILL})],
    ids=["short", "loaded from the host", "computed in several calls"],
)
def test_other_chunks_go_as_a_whole(prefill: Prefill, tokens: int, changed: dict[str, Any]) -> None:
    req = prefill.begin(tokens)
    prefill.compute(req, tokens=tokens, **changed)
    assert req.start_send_idx == 0
    assert prefill.sent(req)


def test_chunks_and_a_cached_prefix(prefill: Prefill) -> None:
    """Two chunks, of which one ends within a page; then a prompt that begins with them, and ends with its page."""
    total, more = LONG + CHUNK * PAGE, (3 * CHUNK + 1) * PAGE
    req = prefill.begin(total)
    prefill.compute(req, tokens=LONG)
    prefill.checkpoint_disagg_prefill(req)
    prefill.send_kv_chunk(req)
    prefill.compute(req, tokens=total)
    assert req.start_send_idx == 2 * CHUNK * PAGE
    assert prefill.sent(req)
    other = prefill.begin(more)
    assert other.prefix_len == 2 * CHUNK * PAGE
    prefill.compute(other, tokens=more)
    assert other.start_send_idx == 3 * CHUNK * PAGE
    assert prefill.sent(other)


def test_pages_that_the_tree_has_twice_are_free_once_they_are_sent(prefill: Prefill, gate: Simulator) -> None:
    one, other = reqs = [prefill.begin(LONG), prefill.begin(LONG)]
    prefill.compute(*reqs, tokens=LONG, held_layer=1)
    prefill.checkpoint_disagg_prefill(one)
    before = prefill.free
    prefill.checkpoint_disagg_prefill(other)
    assert prefill.free == before, "a SEND still reads them"
    gate.release()
    assert prefill.sent(one)
    assert prefill.sent(other)
    assert prefill.free == before + CHUNK


def test_an_abort_amid_the_layers_gives_pages_back(prefill: Prefill, gate: Simulator) -> None:
    one, other = reqs = [prefill.begin(LONG), prefill.begin(LONG)]
    prefill.compute(*reqs, tokens=LONG, held_layer=1)
    for req in reqs:
        prefill.checkpoint_disagg_prefill(req)
    before = prefill.free
    other.disagg_kv_sender.abort()
    assert prefill.free == before + CHUNK
    assert polled(other.receiver, KVPoll.Failed)
    gate.release()
    assert prefill.sent(one)


def test_a_daemon_that_dies_amid_the_layers_fails_the_request_alone(simulator: Simulator) -> None:
    """The memory is registered, and outlives it; the next daemon copies layer by layer again."""
    with kit.daemon() as daemon, opened(daemon.runtime_dir, KVFERRY_SGLANG_MEMORY="engine") as both:
        prefill, boot_id = Prefill(both), both.pool.engine.boot_id
        one, other = reqs = [prefill.begin(LONG), prefill.begin(LONG)]
        with simulator.held(os.getpid(), prefill.gate.npu_stream):
            prefill.compute(*reqs, tokens=LONG, held_layer=1)
            for req in reqs:
                prefill.checkpoint_disagg_prefill(req)
            before = prefill.free
            daemon.restart()
            assert polled(one.disagg_kv_sender, KVPoll.Failed)
            assert polled(other.disagg_kv_sender, KVPoll.Failed)
            assert prefill.free == before + CHUNK
        ends_at = time.monotonic() + SOON_S
        while both.pool.engine.boot_id in {"", boot_id}:
            both.pool.engine.wait_for_news(0.1)
            assert time.monotonic() < ends_at
        again = prefill.begin(LONG + CHUNK * PAGE)
        prefill.compute(again, tokens=LONG + CHUNK * PAGE)
        assert again.start_send_idx == 2 * CHUNK * PAGE
        assert prefill.sent(again)
        both.pool.engine.close()
