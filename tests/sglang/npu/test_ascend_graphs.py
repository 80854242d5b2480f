"""Block tables of SGLang's attention back end for NPUs, in the daemon's memory and written by it.

The peer is SGLang 0.5.23's own ``AscendAttnBackend`` over the same pool and the same map of tokens:
``sglang/srt/hardware_backend/npu/attention/ascend_backend.py``, ``init_cuda_graph_state`` (741) and
``_apply_cuda_graph_metadata`` (923). Its allocator hands the pages out: ``hardware_backend/npu/allocator_npu.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.hardware_backend.npu.allocator_npu import NPUPagedTokenToKVPoolAllocator
from sglang.srt.hardware_backend.npu.attention.ascend_backend import AscendAttnBackend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvferry.attention.graph_tables import GraphTables
from kvferry.attention.table_layout import table_shape
from kvferry.attention.table_update import TableUpdate
from kvferry.clients import Client
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import graphs
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.sglang.in_process import LAST, chosen, current_pool
from tests.sglang.npu.pools import KINDS, PAGE, TOKENS

KIND = KINDS["mha fia"]
CONTEXT = 5 * PAGE
ROWS = 4
REQUESTS = 6
NPU: Any = torch.get_device_module("npu")


class Decode:
    """Decode's scheduler as far as tables go: SGLang's allocator and map of tokens, and its back end, twice."""

    def __init__(self, sglang: Any, pool: EnginePool) -> None:  # noqa: ANN401  SGLang's class
        self.pool = pool
        self.map = ReqToTokenPool(REQUESTS, CONTEXT + 4, "npu", enable_memory_saver=False)
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
            is_hybrid_swa=False,
            sliding_window_size=None,
            spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
            server_args=SimpleNamespace(dllm_algorithm=None),
        )
        self.theirs, self.ours = AscendAttnBackend(runner), ATTENTION_BACKENDS["ascend"](runner)
        for backend in (self.theirs, self.ours):
            backend.init_cuda_graph_state(ROWS, ROWS)
            for size in range(1, ROWS + 1):  # as captures do
                batch = SimpleNamespace(
                    batch_size=size,
                    forward_mode=ForwardMode.DECODE,
                    seq_lens=torch.zeros(size, dtype=torch.int64, device="npu"),
                    out_cache_loc=torch.zeros(size, dtype=torch.int32, device="npu"),
                    req_pool_indices=torch.zeros(size, dtype=torch.int64, device="npu"),
                    spec_info=None,
                )
                backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.lengths: dict[Any, int] = {}

    def begin(self, row: int, length: int) -> Any:  # noqa: ANN401  a request
        """Return a request of so many tokens, with pages."""
        one = SimpleNamespace(req_pool_idx=row)
        slots = self.allocator.alloc(-(-length // PAGE) * PAGE)
        self.map.req_to_token[row, :length] = slots[:length].int()
        self.lengths[row] = length
        return one

    def end(self, one: Any) -> None:  # noqa: ANN401  a request
        """Give its pages back."""
        row = one.req_pool_idx
        self.allocator.free(self.map.req_to_token[row, : self.lengths[row]].long())

    def prepare(self, requests: Sequence[Any], *, told: bool = True) -> Any:  # noqa: ANN401  SGLang's object, as far as it matters
        """Prepare a step of these requests, as ``ScheduleBatch.prepare_for_decode`` does, ``told`` to the tables."""
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
            req_to_token_pool=self.map,
            token_to_kv_pool_allocator=self.allocator,
            device="npu",
        )
        if told:
            graphs.note_step(None, batch)
        return batch

    def shown(self, backend: Any, batch: Any, rows: int) -> torch.Tensor:  # noqa: ANN401  SGLang's
        """Return what a replay of so many rows finds in the tables, still on the device."""
        backend.init_forward_metadata_out_graph(
            SimpleNamespace(
                batch_size=rows,
                forward_mode=ForwardMode.DECODE,
                seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, rows - len(batch.reqs))),
                seq_lens_cpu=torch.nn.functional.pad(batch.seq_lens_cpu, (0, rows - len(batch.reqs))),
                out_cache_loc=None,
                req_pool_indices=torch.nn.functional.pad(batch.req_pool_indices, (0, rows - len(batch.reqs))),
                spec_info=None,
            )
        )
        tables: torch.Tensor = backend.forward_metadata.block_tables
        return tables.clone()

    def assert_equal(self, batch: Any) -> None:  # noqa: ANN401  SGLang's
        """Check what a replay reads of a batch: in its rows, up to their lengths."""
        ours, theirs = (self.shown(one, batch, ROWS).cpu() for one in (self.ours, self.theirs))
        for row, length in enumerate(batch.seq_lens_cpu.tolist()):
            used = -(-length // PAGE)
            assert torch.equal(ours[row, :used], theirs[row, :used]), (row, length)
            assert not ours[row, used:].any()
        assert self.ours.forward_metadata.seq_lens.tolist() == self.theirs.forward_metadata.seq_lens.tolist()
        assert not ours[len(batch.reqs) :].any()


@pytest.fixture
def decode(daemon: Daemon) -> Iterator[Decode]:
    environment = {
        "KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir), "KVFERRY_SGLANG_POOL": "decode", **KIND.environment
    }  # fmt: skip
    with chosen(environment, speculative_num_draft_tokens=None):
        with current_pool(lambda: None):
            sglang = KIND.make()
        pool = LAST()
        assert pool is not None
        with current_pool(lambda: pool):
            yield Decode(sglang, pool)
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
    for size in range(1, ROWS + 1):
        assert decode.ours.graph_metadata[size].block_tables.data_ptr() == address


def test_the_daemon_is_told_of_steps_that_change_them_alone(decode: Decode, daemon: Daemon) -> None:
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


def test_pages_that_were_freed_are_handed_out_again(decode: Decode) -> None:
    """All pages go round several times, so that the allocator makes its list of free ones anew."""
    kept = decode.begin(1, 1)
    for length in (PAGE - 1, 3 * PAGE, 2 * PAGE + 5, 4 * PAGE - 1, PAGE):
        other = decode.begin(2, length)
        for _ in range(2):
            decode.assert_equal(decode.prepare([other, kept]))
        decode.end(other)
        decode.assert_equal(decode.prepare([kept]))


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


def test_any_change_of_a_batch_is_followed() -> None:
    """Requests come, go, grow and move, and the device is asked for new ones alone."""
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

        lengths = np.array([one["length"] for one in batch], np.int64)
        change = rows.follow(batch, lengths, lambda _: np.array(begun, np.int64), read)  # noqa: B023
        assert asked == [row for row, one in enumerate(batch) if one["length"] > 1 and any(one is each for each in new)]
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
