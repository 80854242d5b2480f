"""Block tables of SGLang's attention back end for NPUs, written by the daemon.

The peer is SGLang 0.5.23's own ``AscendAttnBackend`` over the same pool and the same map of tokens:
``sglang/srt/hardware_backend/npu/attention/ascend_backend.py``, ``init_cuda_graph_state`` (741) and
``_apply_cuda_graph_metadata`` (923). Its allocator hands the pages out: ``hardware_backend/npu/allocator_npu.py``, to
steps that verify as ``mem_cache/allocation_sizing.py`` says.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.hardware_backend.npu.allocator_npu import NPUPagedTokenToKVPoolAllocator
from sglang.srt.hardware_backend.npu.attention.ascend_backend import AscendAttnBackend
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
    page_aligned_decode_alloc_lens,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpecInputType, SpeculativeAlgorithm

from kvferry.attention.graph_tables import GraphTables
from kvferry.attention.table_layout import table_shape
from kvferry.attention.table_update import TableUpdate
from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import graphs, pools
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon, soon
from tests.sglang.in_process import LAST, chosen, current_pool
from tests.sglang.npu.pools import KINDS, PAGE, TOKENS

KIND = KINDS["mha fia"]
OWN = "SGLang writes the graph tables by itself"
WINDOW = PAGE + 4
"""Tokens before its own that one of a window sees."""
DRAFT = 5
"""Tokens to verify."""
CONTEXT = 5 * PAGE
ROWS = 4
REQUESTS = 6
NPU: Any = torch.get_device_module("npu")


def windows() -> Any:  # noqa: ANN401  SGLang's class
    sizes = {"size": TOKENS, "size_swa": TOKENS + 3 * PAGE, "page_size": PAGE, "device": "npu"}
    heads = {"dtype": torch.bfloat16, "head_num": 2, "head_dim": 32}
    layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1]}
    return SWAKVPool(**sizes, **heads, **layers, token_to_kv_pool_class=NPUMHATokenToKVPool)


MAKERS = {"plain": KIND.make, "windows": windows}


def verified(draft_tokens: int) -> Any:  # noqa: ANN401  SGLang's object, as far as it matters
    return SimpleNamespace(spec_input_type=SpecInputType.EAGLE_VERIFY, draft_token_num=draft_tokens)


def capture(backend: Any, draft_tokens: int = 0) -> None:  # noqa: ANN401  SGLang's
    """Have a back end make what it needs for graphs of all sizes."""
    backend.init_cuda_graph_state(ROWS, ROWS * (draft_tokens or 1))
    for size in range(1, ROWS + 1):
        batch = SimpleNamespace(
            batch_size=size,
            forward_mode=ForwardMode.TARGET_VERIFY if draft_tokens else ForwardMode.DECODE,
            seq_lens=torch.zeros(size, dtype=torch.int64, device="npu"),
            out_cache_loc=torch.zeros(size * (draft_tokens or 1), dtype=torch.int64, device="npu"),
            req_pool_indices=torch.zeros(size, dtype=torch.int64, device="npu"),
            spec_info=verified(draft_tokens) if draft_tokens else None,
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


class Decode:
    """Decode's scheduler as far as tables go: SGLang's allocator and map of tokens, and its back end, twice."""

    def __init__(self, sglang: Any, pool: EnginePool, draft_tokens: int = 0) -> None:  # noqa: ANN401  SGLang's class
        self.pool = pool
        self.draft_tokens = draft_tokens
        self.algorithm = SpeculativeAlgorithm.EAGLE if draft_tokens else SpeculativeAlgorithm.NONE
        width = CONTEXT + get_req_to_token_extra_context_len()
        self.map = ReqToTokenPool(REQUESTS, width, "npu", enable_memory_saver=False)
        self.allocator: Any
        self.has_windows = isinstance(sglang, SWAKVPool)
        if self.has_windows:
            sizes = {"size": TOKENS, "size_swa": sglang.size_swa, "page_size": PAGE}
            self.allocator = SWATokenToKVPoolAllocator(
                **sizes, dtype=torch.float16, device="npu", kvcache=sglang, need_sort=True
            )
            self.allocator.swa_attn_allocator.alloc(3 * PAGE)  # a page and its window page have other numbers
        else:
            self.allocator = NPUPagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.float16, "npu", sglang, need_sort=True)
        config = SimpleNamespace(
            dtype=torch.bfloat16,
            attention_arch=AttentionArch.MHA,
            context_len=CONTEXT,
            num_attention_heads=2,
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        )
        runner = SimpleNamespace(
            device="npu",
            is_draft_worker=False,
            page_size=PAGE,
            model_config=config,
            kv_cache_dtype=torch.bfloat16,
            dtype=torch.bfloat16,
            req_to_token_pool=self.map,
            token_to_kv_pool=sglang,
            use_mla_backend=False,
            is_hybrid_swa=self.has_windows,
            sliding_window_size=WINDOW if self.has_windows else None,
            spec_algorithm=self.algorithm,
            server_args=SimpleNamespace(dllm_algorithm=None),
        )
        self.theirs, self.ours, self.second = (
            AscendAttnBackend(runner),
            *map(ATTENTION_BACKENDS["ascend"], [runner] * 2),
        )
        for backend in (self.theirs, self.ours, self.second):
            capture(backend, draft_tokens)
        self.runner = runner
        self.lengths: dict[Any, int] = {}
        self.evicted: dict[Any, int] = {}

    def take(self, length: int) -> Any:  # noqa: ANN401  a tensor
        """Return slots for so many tokens of a new request."""
        none, tokens = torch.zeros(1, dtype=torch.int64), torch.tensor([length])
        slots = self.allocator.alloc_extend(none.to("npu"), none, tokens.to("npu"), tokens, none.to("npu") - 1, length)
        assert slots is not None
        return slots

    def begin(self, row: int, length: int) -> Any:  # noqa: ANN401  a request
        """Return a request of so many tokens, with pages."""
        one = SimpleNamespace(req_pool_idx=row, kv=SimpleNamespace(kv_allocated_len=length, kv_committed_len=length))
        self.map.req_to_token[row, :length] = self.take(length).int()
        self.lengths[row], self.evicted[row] = length, 0
        return one

    def end(self, one: Any) -> None:  # noqa: ANN401  a request
        """Give its pages back."""
        row = one.req_pool_idx
        slots = self.map.req_to_token[row, : max(self.lengths[row], one.kv.kv_allocated_len)].long()
        if not self.has_windows:
            self.allocator.free(slots)
            return
        self.allocator.free_swa_segment(slots[self.evicted[row] :], start_pos=self.evicted[row])
        self.allocator.free_full_segment(slots, start_pos=0)

    def slide(self, row: int) -> None:
        """Give the window pages back that a request has left behind, as SGLang does before a step."""
        start, end = self.evicted[row], max(self.lengths[row] - WINDOW, 0) // PAGE * PAGE
        if end > start:
            self.allocator.free_swa_segment(self.map.req_to_token[row, start:end].long(), start_pos=start)
            self.evicted[row] = end

    def prepare(self, requests: Sequence[Any], *, told: bool = True) -> Any:  # noqa: ANN401  SGLang's object, as far as it matters
        """Prepare a step of these requests, as ``ScheduleBatch.prepare_for_decode`` does, ``told`` to the tables."""
        for one in requests if self.has_windows else ():
            self.slide(one.req_pool_idx)
        rows = torch.tensor([one.req_pool_idx for one in requests])
        before = torch.tensor([self.lengths[one.req_pool_idx] for one in requests])
        last = self.map.req_to_token[rows.to("npu"), (before - 1).to("npu")]
        new = self.allocator.alloc_decode((before + 1).to("npu"), before + 1, last)
        assert new is not None
        self.map.write((rows.to("npu"), before.to("npu")), new)
        for one in requests:
            self.lengths[one.req_pool_idx] += 1
        batch = SimpleNamespace(
            reqs=requests,
            seq_lens_cpu=before + 1,
            seq_lens=(before + 1).to("npu"),
            req_pool_indices=rows.to("npu"),
            out_cache_loc=new.long(),
            req_to_token_pool=self.map,
            token_to_kv_pool_allocator=self.allocator,
            spec_algorithm=self.algorithm,
            device="npu",
        )
        if told:
            graphs.note_step(None, batch)
        return batch

    def prepare_to_verify(self, requests: Sequence[Any], kept: Sequence[int] | None = None) -> Any:  # noqa: ANN401  as above
        """Prepare a step that verifies draft tokens, as ``eagle_prepare_for_decode`` does.

        Args:
            requests: of the step.
            kept: so many tokens of each were kept by the step before, which the scheduler does not know yet; None: that
                is over.
        """
        for one in requests if self.has_windows else ():
            self.slide(one.req_pool_idx)
        rows = torch.tensor([one.req_pool_idx for one in requests])
        before, after, tokens = page_aligned_decode_alloc_lens(
            requests, reserve=get_alloc_reserve_per_decode(), page_size=PAGE
        )
        if tokens:
            last = self.map.req_to_token[rows.to("npu"), (torch.tensor(before) - 1).to("npu")]
            both = torch.tensor([before, after])
            slots = self.allocator.alloc_extend(both[0].to("npu"), both[0], both[1].to("npu"), both[1], last, tokens)
            assert slots is not None
            for one, start, end in zip(requests, before, after, strict=True):
                one.kv.kv_allocated_len = end
                self.map.req_to_token[one.req_pool_idx, start:end], slots = slots[: end - start], slots[end - start :]
        batch = SimpleNamespace(
            reqs=requests,
            seq_lens_cpu=torch.tensor([self.lengths[one.req_pool_idx] for one in requests]),
            req_pool_indices=rows.to("npu"),
            req_to_token_pool=self.map,
            token_to_kv_pool_allocator=self.allocator,
            spec_algorithm=self.algorithm,
            device="npu",
        )
        graphs.note_step(None, batch)
        self.keep(requests, [0] * len(requests) if kept is None else kept)
        batch.seq_lens_cpu = torch.tensor([self.lengths[one.req_pool_idx] for one in requests])
        batch.seq_lens = batch.seq_lens_cpu.to("npu")
        at = batch.seq_lens_cpu[:, None] + torch.arange(self.draft_tokens)
        batch.out_cache_loc = self.map.req_to_token[rows[:, None].to("npu"), at.to("npu")].flatten().long()
        return batch

    def keep(self, requests: Sequence[Any], kept: Sequence[int]) -> None:
        """Note how many of the tokens that were verified each request keeps."""
        for one, count in zip(requests, kept, strict=True):
            self.lengths[one.req_pool_idx] += count
            one.kv.kv_committed_len = self.lengths[one.req_pool_idx]

    def shown(self, backend: Any, batch: Any, rows: int) -> torch.Tensor:  # noqa: ANN401  SGLang's
        """Return what a replay of so many rows finds in the tables, still on the device."""
        more, each = rows - len(batch.reqs), self.draft_tokens or 1
        backend.init_forward_metadata_out_graph(
            SimpleNamespace(
                batch_size=rows,
                forward_mode=ForwardMode.TARGET_VERIFY if self.draft_tokens else ForwardMode.DECODE,
                seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, more)),
                seq_lens_cpu=torch.nn.functional.pad(batch.seq_lens_cpu, (0, more)),
                out_cache_loc=torch.nn.functional.pad(batch.out_cache_loc, (0, more * each)),
                req_pool_indices=torch.nn.functional.pad(batch.req_pool_indices, (0, more)),
                spec_info=verified(self.draft_tokens) if self.draft_tokens else None,
            )
        )
        tables: torch.Tensor = backend.forward_metadata.block_tables
        return tables.clone()

    def assert_equal(self, batch: Any) -> None:  # noqa: ANN401  SGLang's
        """Check what a replay reads of a batch: in its rows, up to their lengths."""
        ours, theirs = (self.shown(one, batch, ROWS).cpu() for one in (self.ours, self.theirs))
        for row, length in enumerate(batch.seq_lens_cpu.tolist()):
            used = end = -(-(length + self.draft_tokens) // PAGE)
            assert torch.equal(ours[row, :used], theirs[row, :used]), (row, length)
            if self.draft_tokens:  # all that SGLang has allocated
                end = -(-batch.reqs[row].kv.kv_allocated_len // PAGE)
                whole = self.map.req_to_token[batch.reqs[row].req_pool_idx, : end * PAGE : PAGE].cpu() // PAGE
                assert torch.equal(ours[row, :end], whole), (row, length)
            assert not ours[row, end:].any()
        assert self.ours.forward_metadata.seq_lens.tolist() == self.theirs.forward_metadata.seq_lens.tolist()
        assert not ours[len(batch.reqs) :].any()
        if self.has_windows:
            self._assert_windows_equal(batch)

    def _assert_windows_equal(self, batch: Any) -> None:  # noqa: ANN401  SGLang's
        """Check what the last replay reads of windows: their pages, the masks, and where it writes."""
        ours, theirs = self.ours.forward_metadata, self.theirs.forward_metadata
        tables = [one.block_tables_swa.cpu() for one in (ours, theirs)]
        for row, length in enumerate(batch.seq_lens_cpu.tolist()):
            first = length if self.draft_tokens else length - 1  # of the tokens that the step computes
            seen = slice(max(first - WINDOW, 0) // PAGE, -(-(length + self.draft_tokens) // PAGE))
            assert torch.equal(tables[0][row, seen], tables[1][row, seen]), (row, length)
            assert bool(tables[0][row, seen].all())
            assert not torch.equal(tables[0][row, seen], ours.block_tables.cpu()[row, seen])
            if not self.draft_tokens:
                assert not tables[0][row, seen.stop :].any()
        assert not tables[0][len(batch.reqs) :].any()
        masks = [one.swa_mask.cpu() for one in (ours, theirs)]
        width = masks[1].shape[-1]
        assert masks[0].shape[-1] == max(ours.block_tables_swa.shape[1] * PAGE, width)
        assert torch.equal(masks[0][..., :width], masks[1])
        assert bool(masks[0][..., width:].all())
        assert ours.swa_out_cache_loc.tolist() == theirs.swa_out_cache_loc.tolist()


@pytest.fixture(params=MAKERS)
def decode(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Decode]:
    with running_decode(daemon, request.param) as made:
        yield made


@contextmanager
def running_decode(daemon: Daemon, name: str, draft_tokens: int = 0, **more: str) -> Iterator[Decode]:
    environment = {
        "KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir), "KVFERRY_SGLANG_POOL": "decode", **KIND.environment, **more
    }  # fmt: skip
    speculation: dict[str, object] = {"speculative_num_draft_tokens": draft_tokens or None, "page_size": PAGE}
    speculation |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3} if draft_tokens else {}
    with chosen(environment, **speculation):
        with current_pool(lambda: None):
            sglang = MAKERS[name]()
        pool = LAST()
        assert pool is not None
        with current_pool(lambda: pool):
            yield Decode(sglang, pool, draft_tokens)
        pool.engine.close()


def updates(daemon: Daemon) -> int:
    with Client.connect(daemon.runtime_dir) as client:
        [one] = client.status().tables
    return one.updates


def test_they_are_the_daemons_and_captured_once(decode: Decode, daemon: Daemon) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        [one] = client.status().tables
    assert (one.device, one.max_batch, one.columns) == ("npu:0", ROWS, -(-(CONTEXT + 4) // PAGE))
    address = decode.ours.graph_metadata["block_tables"].data_ptr()
    requests = [decode.begin(1, CONTEXT - 3), decode.begin(2, 1)]
    for _ in range(3):  # up to exactly the longest context
        decode.assert_equal(decode.prepare(requests))
    in_window = decode.ours.graph_metadata.get("block_tables_swa")
    for size in range(1, ROWS + 1):
        if in_window is not None:
            assert decode.ours.graph_metadata[size].block_tables_swa.data_ptr() == in_window.data_ptr() != address
        assert decode.ours.graph_metadata[size].block_tables.data_ptr() == address


def test_the_daemon_is_told_of_steps_that_change_them_alone(
    decode: Decode, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [decode.begin(1, PAGE - 3), decode.begin(2, 2 * PAGE - 1), decode.begin(3, 5)]
    decode.assert_equal(decode.prepare(requests))
    before, changes = updates(daemon), []
    for _ in range(PAGE):
        decode.assert_equal(decode.prepare(requests))
        changes.append(updates(daemon) - before)
        before += changes[-1]
    assert sum(changes) == 3, "each row begins one page"
    decode.end(requests.pop(0))  # the others move up
    decode.assert_equal(decode.prepare(requests))
    requests.append(decode.begin(1, PAGE))
    decode.assert_equal(decode.prepare(requests))
    assert updates(daemon) - before == 2
    assert OWN not in caplog.text


def test_pages_that_were_freed_are_handed_out_again(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    """All pages go round several times, so that the allocator makes its list of free ones anew."""
    kept = decode.begin(1, 1)
    for length in (PAGE - 1, 3 * PAGE, 2 * PAGE + 5, 4 * PAGE - 1, PAGE):
        other = decode.begin(2, length)
        for _ in range(2):
            decode.assert_equal(decode.prepare([other, kept]))
        decode.end(other)
        decode.assert_equal(decode.prepare([kept]))
    assert OWN not in caplog.text


def test_a_replay_reads_what_was_prepared_for_it(decode: Decode, simulator: Simulator) -> None:
    """The next step's pages are in the tables once the replay that still reads them is done, and not before."""
    model, scheduler = NPU.Stream(), NPU.current_stream()
    decode.pool.compute_stream = model
    requests, found, wanted = [decode.begin(1, PAGE - 1)], [], []

    def step() -> None:
        batch = decode.prepare(requests)
        wanted.append(decode.shown(decode.theirs, batch, 1).cpu())
        model.wait_stream(scheduler)
        with NPU.stream(model):
            found.append(decode.shown(decode.ours, batch, 1))

    step()
    model.synchronize()
    with simulator.held(os.getpid(), model.npu_stream):
        with NPU.stream(model):
            found.append(decode.ours.forward_metadata.block_tables.clone())
        wanted.append(wanted[0])
        step()
    model.synchronize()
    assert bool(wanted[0][0, 1]) is False
    assert bool(wanted[-1][0, 1]) is True
    for one, theirs in zip(found, wanted, strict=True):
        assert torch.equal(one.cpu()[:, : theirs.shape[1]], theirs)


def test_a_step_that_the_daemon_refuses_is_sglangs_own(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    """And those after it are the daemon's again, whatever SGLang has left in the tables."""
    requests = [decode.begin(1, PAGE), decode.begin(2, 2 * PAGE)]
    decode.assert_equal(decode.prepare(requests))
    twice = decode.begin(3, 2 * PAGE)
    good = decode.map.req_to_token[3].clone()
    decode.map.req_to_token[3, PAGE : 2 * PAGE] = good[:PAGE]
    for logged in (1, 2):
        for _ in range(2):
            batch = decode.prepare([twice, requests[1]])
            ours, theirs = (decode.shown(one, batch, ROWS).cpu() for one in (decode.ours, decode.theirs))
            assert torch.equal(ours[:2, :3], theirs[:2, :3])
            assert caplog.text.count("DUPLICATE_PAGE") == logged, "of steps that fail alike the first is logged"
        decode.assert_equal(decode.prepare([requests[0]]))


def test_the_daemon_writes_anew_what_sglang_has_written_meanwhile(decode: Decode) -> None:
    requests = [decode.begin(1, 2 * PAGE - 3), decode.begin(2, PAGE)]
    decode.assert_equal(decode.prepare(requests))
    decode.assert_equal(decode.prepare([decode.begin(3, 2 * PAGE)], told=False))
    decode.assert_equal(decode.prepare(requests))


def test_pages_that_a_request_got_in_a_step_without_a_graph_are_seen(decode: Decode) -> None:
    requests = [decode.begin(row, PAGE - 8) for row in range(1, 3)]
    decode.assert_equal(decode.prepare(requests))
    decode.prepare([*requests, *(decode.begin(row, 1) for row in range(3, 6))])
    decode.map.req_to_token[1, :PAGE] = decode.take(PAGE).int()  # as a request that was retracted meanwhile
    decode.assert_equal(decode.prepare(requests))


@pytest.mark.parametrize("is_behind", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("name", MAKERS)
def test_steps_that_verify_draft_tokens(
    name: str, daemon: Daemon, caplog: pytest.LogCaptureFixture, *, is_behind: bool
) -> None:
    """However many are kept of them, and whether the scheduler knows that in time or not."""
    random = np.random.default_rng(22778)
    with running_decode(daemon, name, DRAFT) as decode:
        address = decode.ours.graph_metadata["block_tables"].data_ptr()
        requests = [decode.begin(1, PAGE - 3), decode.begin(2, PAGE)]
        sent, changes = updates(daemon), 1  # the first makes them zeros
        allocated: list[tuple[int, int]] = []
        for step in range(12):
            if step == 6:  # the other moves up
                decode.end(requests.pop(0))
            if step == 7:
                requests.append(decode.begin(3, 5))
            kept = random.integers(1, DRAFT + 1, len(requests)).tolist()
            decode.assert_equal(decode.prepare_to_verify(requests, kept if step and is_behind else None))
            if not is_behind:
                decode.keep(requests, kept)
            before, allocated = allocated, [(one.req_pool_idx, one.kv.kv_allocated_len) for one in requests]
            changes += allocated != before
        assert updates(daemon) - sent == changes < 12, "a step that changes none needs no message"
        for size in range(1, ROWS + 1):
            assert decode.ours.graph_metadata[size].block_tables.data_ptr() == address
        assert OWN not in caplog.text


@pytest.mark.parametrize("draft_tokens", [DRAFT, PAGE + 5])
@pytest.mark.parametrize("name", MAKERS)
def test_draft_tokens_at_the_end_of_the_longest_context_are_in_them(
    name: str, draft_tokens: int, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """And no token more: SGLang's map of tokens ends there."""
    with running_decode(daemon, name, draft_tokens) as decode:
        width = decode.map.req_to_token.shape[1]
        assert decode.ours.graph_metadata["block_tables"].shape == (ROWS, -(-width // PAGE))
        request = decode.begin(1, CONTEXT)
        decode.assert_equal(decode.prepare_to_verify([request]))
        assert (request.kv.kv_allocated_len, width) == (
            -(-(CONTEXT + 2 * draft_tokens) // PAGE) * PAGE,
            CONTEXT + 2 * draft_tokens + PAGE - 1,
        )
        decode.assert_equal(decode.prepare_to_verify([request]))
        assert OWN not in caplog.text


@pytest.mark.parametrize("draft_tokens", [0, DRAFT])
def test_a_window_begins_with_the_first_token_that_attention_sees(draft_tokens: int, daemon: Daemon) -> None:
    """That is the last one of a page here: SGLang asks for so many tokens before a token's own (``pre_tokens``)."""
    with running_decode(daemon, "windows", draft_tokens) as decode:
        requests = [decode.begin(1, WINDOW + PAGE - 1)]
        decode.assert_equal((decode.prepare_to_verify if draft_tokens else decode.prepare)(requests))
        assert decode.ours.forward_metadata.block_tables_swa[0, 0].item() != 0


def test_what_a_step_changes_goes_with_its_transfers(daemon: Daemon) -> None:
    with running_decode(daemon, "plain", DRAFT) as decode, Client.connect(daemon.runtime_dir) as watch:
        request, engine = decode.begin(1, PAGE), decode.pool.engine
        decode.assert_equal(decode.prepare_to_verify([request]))
        decode.keep([request], [2 * PAGE])
        before = watch.status().counters["messages.received"]
        with engine.step() as step:
            transfer = step.receive(decode.pool.name, new_request_id(), [pages([7])])
        batch = decode.prepare_to_verify([request])
        shown = decode.shown(decode.ours, batch, 1).cpu()
        assert watch.status().counters["messages.received"] - before == 2, "the step, and the question"
        assert shown.count_nonzero() == request.kv.kv_allocated_len // PAGE
        with engine.client() as client:
            client.cancel(transfer)


def test_of_several_back_ends_the_first_has_the_daemons_tables(decode: Decode) -> None:
    """SGLang has three with two-batch overlap, whose whole batch is the first one's."""
    batch = decode.prepare([decode.begin(1, 2 * PAGE)])
    ours, second = (decode.shown(one, batch, 1).cpu() for one in (decode.ours, decode.second))
    assert torch.equal(ours[:, :3], second[:, :3])
    assert (
        decode.second.graph_metadata["block_tables"].data_ptr() != decode.ours.graph_metadata["block_tables"].data_ptr()
    )


def test_where_the_daemon_makes_no_tables_sglang_writes_its_own(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "current", lambda: copy.copy(decode.pool))  # as a second pool of this process would be
    capture(backend := ATTENTION_BACKENDS["ascend"](decode.runner))
    assert f"{OWN}: TABLES_EXIST" in caplog.text
    batch = decode.prepare([decode.begin(1, 2 * PAGE)])
    ours, theirs = (decode.shown(one, batch, 1).cpu() for one in (backend, decode.theirs))
    assert torch.equal(ours[:, :3], theirs[:, :3])


def test_a_draft_models_are_sglangs_own(decode: Decode) -> None:
    decode.runner.is_draft_worker = True
    assert type(ATTENTION_BACKENDS["ascend"](decode.runner)) is AscendAttnBackend


def test_pages_of_a_list_that_is_a_new_one_since_are_not_known() -> None:
    pages = torch.arange(1, 9)
    assert graphs.FreePages().taken(pages[3:], 2).tolist() == [2, 3]
    assert len(graphs.FreePages().taken(pages[1:], 2)) < 2


@pytest.mark.parametrize("name", MAKERS)
def test_they_go_on_with_the_next_daemon(name: str) -> None:
    """While there is none SGLang writes them itself; the graphs read the same memory all the time."""
    with kit.daemon(keep=True) as life, running_decode(life, name, KVFERRY_SGLANG_MEMORY="engine") as decode:
        address = decode.ours.graph_metadata["block_tables"].data_ptr()
        requests = [decode.begin(1, PAGE), decode.begin(2, 2 * PAGE - 3)]
        decode.assert_equal(decode.prepare(requests))
        for _ in range(2):
            life.kill()
            assert soon(lambda: decode.pool.engine.is_away)
            for _ in range(3):
                decode.assert_equal(decode.prepare(requests))
            life.start()
            assert soon(lambda: not decode.pool.engine.is_away)
            decode.assert_equal(decode.prepare(requests))
            assert updates(life) == 2, "one makes them zeros, and one shows the rows"
        assert decode.ours.graph_metadata["block_tables"].data_ptr() == address


def test_any_change_of_a_batch_is_followed() -> None:
    """Requests come, go, grow and move; the device is asked for new ones, and then for those that grow beside them."""
    random = np.random.default_rng(43)
    shape = table_shape(max_batch=8, max_context_tokens=10 * PAGE, page_size=PAGE)
    rows, tables = graphs.Rows(PAGE, shape.columns), GraphTables(shape, pages=10_000)
    free = iter(range(1, 10_000))
    batch: list[dict[str, Any]] = []
    for _ in range(300):
        batch = [one for one in batch if random.random() > 0.1 and one["length"] < 10 * PAGE]
        if random.random() < 0.1:
            batch.reverse()
        for one in batch:
            one["length"] += 1
            if one["length"] % PAGE == 1:
                one["pages"].append(next(free))
        sizes = random.integers(1, 99, 2).tolist()[: 8 - len(batch)]
        new: list[dict[str, Any]] = [
            {"length": size, "pages": [next(free) for _ in range(-(-size // PAGE))]} for size in sizes
        ]
        batch += new
        begun = [one["pages"][-1] for one in batch if one["length"] % PAGE == 1]
        asked: list[int] = []

        def read(which: graphs.Int64s) -> list[Any]:
            asked.extend(which.tolist())  # noqa: B023  called in this round
            return [np.array(batch[row]["pages"]) for row in which]  # noqa: B023

        is_seen = random.random() < 0.9 or not begun
        counts = np.array([len(one["pages"]) for one in batch], np.int64)
        change = rows.follow(batch, counts, lambda _: np.array(begun if is_seen else begun[1:], np.int64), read)  # noqa: B023
        is_new = [any(one is each for each in new) for one in batch]
        begins = [one["length"] % PAGE == 1 for one in batch]
        unknown = is_new
        if any(is_new) or not is_seen:
            unknown = [each or start for each, start in zip(is_new, begins, strict=True)]
        assert asked == [row for row, one in enumerate(unknown) if one]
        if change is not None:
            at, columns, ids = change.entries
            tables.apply(
                TableUpdate(
                    lengths=rows.counts * PAGE,
                    entry_rows=np.asarray(at),
                    entry_columns=np.asarray(columns),
                    entry_pages=np.asarray(ids),
                    rows=np.array(list(change.rows), np.int64),
                    row_pages=np.array([len(one) for one in change.rows.values()], np.int64),
                    pages=np.concatenate([graphs.NONE, *change.rows.values()]),
                )
            )
        wanted = np.zeros_like(tables.visible.block_tables)
        for row, one in enumerate(batch):
            wanted[row, : len(one["pages"])] = one["pages"]
        assert np.array_equal(tables.visible.block_tables, wanted)
