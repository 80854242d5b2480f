"""A random transformer as decoder models are built today: grouped queries, RoPE, RMSNorm, SwiGLU; float32 throughout.

``reference`` computes all of a sequence anew on the host. ``prefill`` and ``DecodeGraph`` keep keys and values in a
pool's pages and run on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from kvferry.clients import AttachedPool, MhaSpec, Tables

VOCABULARY, HIDDEN, MLP, LAYERS = 97, 32, 64, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
PAGE_SIZE: Final = 4
CONTEXT: Final = 64
EPSILON: Final = 1e-6


def spec(pages: int) -> MhaSpec:
    """Return a pool of so many pages for the model."""
    return MhaSpec(
        layers=LAYERS,
        tokens=pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
    )


class Layer(NamedTuple):
    """One layer's weights; matrices are ``(in, out)``."""

    norm: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Model(NamedTuple):
    """The weights, and the turns of RoPE for each position: cos and sin, ``(CONTEXT, 1, HEAD_DIM)``."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def to(self, device: str) -> Model:
        """Return the same model on a device."""
        layers = [Layer(*(one.to(device) for one in layer)) for layer in self.layers]
        rest = (one.to(device) for one in (self.norm, self.head, self.cos, self.sin))
        return Model(self.embedding.to(device), layers, *rest)


def model(seed: int) -> Model:
    """Return a model on the host; the same for the same seed, in every process."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        scaled: torch.Tensor = torch.randn(rows, columns, generator=random) * (1.5 * rows**-0.5)
        return scaled

    layers = [
        Layer(
            norm=1 + 0.3 * torch.randn(HIDDEN, generator=random),
            queries=matrix(HIDDEN, HEADS * HEAD_DIM),
            keys=matrix(HIDDEN, KV_HEADS * HEAD_DIM),
            values=matrix(HIDDEN, KV_HEADS * HEAD_DIM),
            out=matrix(HEADS * HEAD_DIM, HIDDEN),
            mlp_norm=1 + 0.3 * torch.randn(HIDDEN, generator=random),
            gate=matrix(HIDDEN, MLP),
            up=matrix(HIDDEN, MLP),
            down=matrix(MLP, HIDDEN),
        )
        for _ in range(LAYERS)
    ]
    turns = torch.arange(CONTEXT)[:, None] * 100.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = torch.cat([turns, turns], -1)[:, None]
    return Model(
        embedding=torch.randn(VOCABULARY, HIDDEN, generator=random),
        layers=layers,
        norm=1 + 0.3 * torch.randn(HIDDEN, generator=random),
        head=matrix(HIDDEN, VOCABULARY),
        cos=turns.cos(),
        sin=turns.sin(),
    )


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, queries ``(tokens, HEADS, HEAD_DIM)``, keys and values ``(tokens, KV_HEADS, HEAD_DIM)`` to ``(tokens, HEADS *
HEAD_DIM)``."""


def forward(one: Model, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return the logits of each token, ``(tokens, VOCABULARY)``."""
    cos, sin = one.cos.index_select(0, positions), one.sin.index_select(0, positions)
    hidden = one.embedding.index_select(0, tokens)
    for number, layer in enumerate(one.layers):
        normed = _normed(hidden, layer.norm)
        queries = _turned((normed @ layer.queries).view(-1, HEADS, HEAD_DIM), cos, sin)
        keys = _turned((normed @ layer.keys).view(-1, KV_HEADS, HEAD_DIM), cos, sin)
        values = (normed @ layer.values).view(-1, KV_HEADS, HEAD_DIM)
        hidden = hidden + attend(number, queries, keys, values) @ layer.out
        normed = _normed(hidden, layer.mlp_norm)
        hidden = hidden + (torch.nn.functional.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
    return _normed(hidden, one.norm) @ one.head


def reference(one: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after these tokens, ``(VOCABULARY,)``, on the host."""
    return forward(one, torch.tensor(tokens), torch.arange(len(tokens)), _causal(len(tokens), "cpu"))[-1]


def prefill(
    one: Model, pool: AttachedPool, prompt: Sequence[int], slots: torch.Tensor, on_layer: Callable[[int], None]
) -> torch.Tensor:
    """Write a prompt's keys and values into a pool, layer by layer, and return the logits after it, on the device.

    Args:
        one: on the device.
        pool: on the device.
        prompt: ``n`` tokens.
        slots: ``(n,)`` int64, on the device: page * page_size + offset of each token.
        on_layer: called with each layer's number once its writing has been given to the current stream.
    """
    device = str(slots.device)
    dense = _causal(len(prompt), device)

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for role, rows in (("k", keys), ("v", values)):
            pool.tensor("main", role)[layer].view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, rows)
        on_layer(layer)
        return dense(layer, queries, keys, values)

    positions = torch.arange(len(prompt)).to(device)
    return forward(one, torch.tensor(prompt).to(device), positions, attend)[-1]


class DecodeGraph:
    """One decode step, captured for so many rows: writes each row's token, attends over its pages, picks the next.

    Positions and slots follow from the tables on the device; only attention's lengths are the host's.

    Attributes:
        tokens: ``(rows,)`` int64, on the device: what each row goes on with.
        logits: ``(rows, VOCABULARY)``, on the device.
    """

    def __init__(self, one: Model, pool: AttachedPool, tables: Tables, rows: int) -> None:
        device = str(one.head.device)
        self.tables, self.rows = tables, rows
        self.tokens = torch.zeros(rows, dtype=torch.int64).to(device)
        self._cache = {role: pool.tensor("main", role) for role in ("k", "v")}
        self._table, self._lengths = tables.block_tables[:rows], tables.seq_lens[:rows]
        torch.accelerator.synchronize()
        npu = torch.get_device_module("npu")
        self._graph = npu.NPUGraph()
        with npu.graph(self._graph, auto_dispatch_capture=True):
            positions = (self._lengths.to(torch.int64) - 1).clamp_min(0)  # idle rows write to the padding page
            columns = positions // PAGE_SIZE
            pages = self._table.gather(1, columns[:, None])[:, 0].to(torch.int64)
            self._slots = (pages - columns) * PAGE_SIZE + positions
            self.logits = forward(one, self.tokens, positions, self._attend)

    def start(self) -> None:
        """Replay after the tables' last update; returns at once."""
        self.tables.order()
        self.tables.update_graph(self._graph, operators=LAYERS)
        self._graph.replay()

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        k, v = self._cache["k"][layer], self._cache["v"][layer]
        k.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, self._slots, keys)
        v.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, self._slots, values)
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(
            queries,
            k.flatten(2),
            v.flatten(2),
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            input_layout="TND",
            scale=HEAD_DIM**-0.5,
            block_table=self._table,
            block_size=PAGE_SIZE,
            actual_seq_lengths=[row + 1 for row in range(self.rows)],
            actual_seq_lengths_kv=[1] * self.rows,
            sparse_mode=0,
        )
        attended: torch.Tensor = out.view(self.rows, HEADS * HEAD_DIM)
        return attended


def _normed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + EPSILON) * weight


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    rotated = torch.cat([-heads[..., half:], heads[..., :half]], -1)
    return heads * cos + rotated * sin


def _causal(tokens: int, device: str) -> Attend:
    """Return dense attention over so many tokens."""
    hidden = torch.full((tokens, tokens), -math.inf).triu(1).to(device)

    def attend(_layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = HEADS // KV_HEADS
        keys, values = (one.repeat_interleave(group, 1).transpose(0, 1).contiguous() for one in (keys, values))
        scores = torch.bmm(queries.transpose(0, 1).contiguous(), keys.transpose(1, 2).contiguous()) * HEAD_DIM**-0.5
        weights = torch.softmax(scores + hidden, -1)
        return torch.bmm(weights, values).transpose(0, 1).reshape(tokens, HEADS * HEAD_DIM)

    return attend
