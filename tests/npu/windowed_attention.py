"""Sliding-window attention in a captured graph, over the window tables: plain operators, and the same on the host.

The lengths are those of the tables, on the device: such a graph needs no update of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvferry.clients import Tables
from tests.npu.paged_attention import HEAD_DIM, HEADS, KV_HEADS, SCALE, Cache, attention

FAR_BELOW = -1e30


class WindowedGraph:
    """A graph of one query a row."""

    def __init__(self, cache: Cache, tables: Tables, rows: int, window: int) -> None:
        self._tables = tables
        device = cache.keys.device
        assert tables.block_tables_swa is not None
        table, lengths = tables.block_tables_swa[:rows], tables.seq_lens[:rows]
        positions = torch.arange(tables.columns * tables.page_size, dtype=torch.int32, device=device)
        self._queries = torch.zeros(rows, HEADS, HEAD_DIM, device=device)
        torch.accelerator.synchronize()
        npu = torch.get_device_module("npu")
        self._graph = npu.NPUGraph()
        with npu.graph(self._graph):
            visible = (positions < lengths[:, None]) & (positions >= lengths[:, None] - window)
            keys, values = (
                one.index_select(0, table.flatten())
                .view(rows, -1, KV_HEADS, HEAD_DIM)
                .repeat_interleave(HEADS // KV_HEADS, 2)
                .permute(0, 2, 1, 3)
                .contiguous()
                .view(rows * HEADS, -1, HEAD_DIM)
                for one in (cache.keys, cache.values)
            )
            scores = torch.bmm(self._queries.view(rows * HEADS, 1, HEAD_DIM), keys.transpose(1, 2)) * SCALE
            seen = torch.where(visible[:, None], scores.view(rows, HEADS, -1), FAR_BELOW)
            weights = torch.softmax(seen, -1).view(rows * HEADS, 1, -1)
            self._out = torch.bmm(weights, values).view(rows, HEADS, HEAD_DIM)

    def replay(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the rows that ``queries`` has, ``(batch, 1, heads, dim)``, on the host."""
        self._queries[: len(queries)].copy_(queries[:, 0])
        self._tables.order()
        self._graph.replay()
        return self._out[: len(queries), None].cpu()


def window_reference(
    cache: Cache,
    queries: torch.Tensor,
    rows: Sequence[tuple[Sequence[int], int]],
    bound: Mapping[int, int],
    window: int,
) -> torch.Tensor:
    """Return what each row's query sees: of full pages and a length, the last ``window`` tokens, in window pages."""
    page_size = cache.host_keys.shape[1]
    out = []
    for query, (pages, length) in zip(queries, rows, strict=True):
        first = max(length - window, 0)
        used = [bound[page] for page in pages[first // page_size : -(-length // page_size)]]
        start = first // page_size * page_size
        keys, values = (one[used].flatten(0, 1)[first - start : length - start] for one in _host(cache))
        out.append(attention(query, keys, values, torch.ones(1, len(keys), dtype=torch.bool)))
    return torch.stack(out)


def _host(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.host_keys, cache.host_values
