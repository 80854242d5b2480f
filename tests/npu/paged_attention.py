"""Paged attention in a captured graph, over graph tables and a pool's pages, and the same in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvferry.clients import AttachedPool, Tables

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5


class Cache(NamedTuple):
    """Keys and values of one layer, on the device and as the host knows them: ``(pages, page_size, heads, dim)``."""

    keys: torch.Tensor
    values: torch.Tensor
    host_keys: torch.Tensor
    host_values: torch.Tensor

    @classmethod
    def random(cls, pool: AttachedPool, seed: int = 0) -> Cache:
        """Fill a pool's first layer, the padding page too."""
        random = torch.Generator().manual_seed(seed)
        keys, values = pool.tensor("main", "k")[0], pool.tensor("main", "v")[0]
        host = [torch.randn(keys.shape, generator=random) for _ in range(2)]
        keys.copy_(host[0])
        values.copy_(host[1])
        return cls(keys, values, *host)


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return ``(queries, heads, dim)``; keys and values ``(tokens, kv heads, dim)``, visible ``(queries, tokens)``."""
    keys, values = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", queries, keys) * SCALE
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, values)


def reference(
    cache: Cache, queries: torch.Tensor, pages: Sequence[Sequence[int]], lengths: Sequence[int]
) -> torch.Tensor:
    """Return what each row's queries, its last tokens, see of its pages, ``(rows, queries, heads, dim)``."""
    page_size = cache.host_keys.shape[1]
    out = []
    for row, ids, length in zip(queries, pages, lengths, strict=True):
        used = list(ids)[: -(-length // page_size)]
        keys, values = (one[used].flatten(0, 1)[:length] for one in (cache.host_keys, cache.host_values))
        last = torch.arange(length - len(row), length)
        out.append(attention(row, keys, values, torch.arange(length) <= last[:, None]))
    return torch.stack(out)


class CapturedAttention:
    """A graph of one captured batch size: so many rows of so many queries each.

    Attributes:
        queries: ``(rows, queries, heads, dim)``, on the device; written before a replay.
    """

    def __init__(self, cache: Cache, tables: Tables, rows: int, queries: int = 1, operators: int = 1) -> None:
        """Capture it; ``operators``: how many attentions, each of the outputs of the one before."""
        self._tables = tables
        self._operators = operators
        self._rows = rows
        device = cache.keys.device
        self.queries = torch.zeros(rows, queries, HEADS, HEAD_DIM, device=device)
        table = tables.block_tables[:rows]
        # As vllm-ascend calls it: causal among a row's queries, which are its last tokens.
        several: dict[str, Any] = {"sparse_mode": 0}
        if queries > 1:
            hidden = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)
            several = {"sparse_mode": 3, "atten_mask": hidden}
        torch.accelerator.synchronize()
        npu = torch.get_device_module("npu")
        self._graph = npu.NPUGraph()
        with npu.graph(self._graph, auto_dispatch_capture=True):
            self._out = self.queries.view(rows * queries, HEADS, HEAD_DIM)
            for _ in range(operators):
                self._out, _ = torch.ops.npu.npu_fused_infer_attention_score(
                    self._out, cache.keys.flatten(2), cache.values.flatten(2),
                    num_heads=HEADS, num_key_value_heads=KV_HEADS, input_layout="TND", scale=SCALE,
                    block_table=table, block_size=tables.page_size,
                    actual_seq_lengths=[queries * (row + 1) for row in range(rows)],
                    actual_seq_lengths_kv=[queries] * rows, **several,
                )  # fmt: skip

    def start(self, *, draft_step: int | None = None) -> None:
        """Replay with the tables' last update; returns before the device has done anything."""
        self._tables.order()
        self._tables.update_graph(self._graph, draft_step=draft_step, operators=self._operators)
        self._graph.replay()

    def clone(self) -> torch.Tensor:
        """Return a copy, on the device, of the last replay's outputs."""
        out: torch.Tensor = self._out.clone()
        return out.view(self._rows, -1, HEADS, HEAD_DIM)

    def replay(self, queries: torch.Tensor, *, draft_step: int | None = None) -> torch.Tensor:
        """Return the outputs of the rows that ``queries`` has, ``(batch, queries, heads, dim)``, on the host."""
        self.queries[: len(queries)].copy_(queries)
        self.start(draft_step=draft_step)
        return self.out(len(queries))

    def out(self, batch: int) -> torch.Tensor:
        out: torch.Tensor = self._out.view(self._rows, -1, HEADS, HEAD_DIM)
        return out[:batch].cpu()
