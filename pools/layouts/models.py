"""Ready-made specs: the pool of one rank of a well-known model."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.pools.layouts.mla import PACKED_DTYPE
from kvferry.pools.layouts.model_facts import MODELS, Attention, DeltaNet, Latent, ModelFacts
from kvferry.pools.planning.heads import RankHeads, rank_heads
from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError, invalid_field
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec, Scales

DEFAULT_PAGE_SIZE = 128
DEFAULT_REQUESTS = 64
EXAMPLE_SCALE = 1.0
"""Placeholder for fixed scales, which come from the checkpoint."""


class _Rank(msgspec.Struct, frozen=True, kw_only=True):
    """The rank, its layers and the capacity that a spec is made for."""

    tokens: int
    page_size: int
    requests: int
    dtype: str
    tp_size: int
    tp_rank: int
    stage: range
    draft: DraftSpec | None
    packed: Literal["ds_mla", "ascend"] | None
    joined: bool


def model_spec(  # noqa: PLR0913  an operator may set each of them
    name: str,
    *,
    tokens: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    dtype: str | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    first_layer: int = 0,
    layers: int | None = None,
    requests: int = DEFAULT_REQUESTS,
    draft: bool = False,
    packed: Literal["ds_mla", "ascend"] | None = None,
    joined: bool = False,
) -> PoolSpec:
    """Return the spec of one rank's pool.

    Args:
        name: one of ``MODELS``; case-insensitive.
        tokens: capacity of the full-attention pages in tokens.
        page_size: tokens per page.
        dtype: dtype of keys and values; by default the model's.
        tp_size: number of tensor-parallel ranks.
        tp_rank: this rank.
        first_layer: the pipeline stage's first layer.
        layers: number of layers of the stage; by default all from ``first_layer`` on.
        requests: maximum number of concurrent requests, which sizes windows and states.
        draft: add the model's own draft layers, on the stage with the last layer.
        packed: latent attention in its packed float8 form, the indexer's keys in float8 with scales.
        joined: latent attention with latent and rope of a token in one row.

    Raises:
        InvalidFieldError: no such model, layers, rank or size, or the model has no draft layers or latent attention.
        HeadsIndivisibleError: the model's heads do not divide over the ranks.
    """
    facts = _facts(name)
    stage = _stage(facts, first_layer, layers)
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise InvalidFieldError(f"rank {tp_rank} of {tp_size}", field="tp_rank")
    if page_size < 1:
        raise InvalidFieldError(f"pages of {page_size} tokens", field="page_size")
    rank = _Rank(
        tokens=tokens,
        page_size=page_size,
        requests=requests,
        dtype=dtype or facts.dtype,
        tp_size=tp_size,
        tp_rank=tp_rank,
        stage=stage,
        draft=_draft(facts, stage) if draft else None,
        packed=packed,
        joined=joined,
    )
    return _checked(_spec(facts, rank))


def _checked(spec: PoolSpec) -> PoolSpec:
    """Return the spec if the wire's bounds allow it; its numbers come from an operator, not from a decoded message."""
    try:
        checked: PoolSpec = msgspec.convert(msgspec.to_builtins(spec), PoolSpec)
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    return checked


def _spec(facts: ModelFacts, rank: _Rank) -> PoolSpec:
    if isinstance(facts.attention, Latent):
        return _mla(facts.attention, rank)
    if rank.packed:
        raise InvalidFieldError(f"{facts.name} has no latent attention to pack", field="packed")
    if rank.joined:
        raise InvalidFieldError(f"{facts.name} has no latent attention to join", field="joined")
    heads = rank_heads(facts.attention.kv_heads, rank.tp_size, rank.tp_rank)
    if facts.window is not None:
        return _hybrid_swa(facts, facts.attention, heads, facts.window, rank)
    if facts.delta_net is not None:
        return _mamba(facts, facts.attention, heads, facts.delta_net, rank)
    return _mha(facts, facts.attention, heads, rank)


def _facts(name: str) -> ModelFacts:
    facts = MODELS.get(name.lower())
    if facts is None:
        raise InvalidFieldError(f"no model {name!r}; known: {', '.join(MODELS)}", field="model")
    return facts


def _stage(facts: ModelFacts, first_layer: int, layers: int | None) -> range:
    end = facts.layers if layers is None else first_layer + layers
    if not 0 <= first_layer < end <= facts.layers:
        raise InvalidFieldError(f"layers {first_layer}:{end} of {facts.layers}", field="layers")
    return range(first_layer, end)


def _draft(facts: ModelFacts, stage: range) -> DraftSpec | None:
    if not facts.draft_layers:
        raise InvalidFieldError(f"{facts.name} has no draft layers of its own", field="draft")
    if stage.stop < facts.layers:
        return None
    index_head_dim = facts.attention.index_head_dim if isinstance(facts.attention, Latent) else None
    return DraftSpec(layers=facts.draft_layers, index_head_dim=index_head_dim)


def _mha(facts: ModelFacts, attention: Attention, heads: RankHeads, rank: _Rank) -> MhaSpec:
    scales = _scales(facts, heads, rank)
    return MhaSpec(
        layers=len(rank.stage),
        first_layer=rank.stage.start,
        tokens=rank.tokens,
        page_size=rank.page_size,
        kv_heads=heads.count,
        head_start=heads.start,
        total_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        dtype=rank.dtype,
        replicas=heads.replicas,
        draft=rank.draft,
        k_scale=scales,
        v_scale=scales,
    )


def _scales(facts: ModelFacts, heads: RankHeads, rank: _Rank) -> Scales | None:
    if facts.scales == "head":
        return ((EXAMPLE_SCALE,) * heads.count,) * len(rank.stage)
    return facts.scales


def _mla(latent: Latent, rank: _Rank) -> MlaSpec:
    return MlaSpec(
        layers=len(rank.stage),
        first_layer=rank.stage.start,
        tokens=rank.tokens,
        page_size=rank.page_size,
        kv_lora_rank=latent.kv_lora_rank,
        qk_rope_head_dim=latent.qk_rope_head_dim,
        index_head_dim=latent.index_head_dim,
        index_scale=rank.packed is not None and latent.index_head_dim is not None,
        dtype=PACKED_DTYPE if rank.packed else rank.dtype,
        packed=rank.packed,
        joined=rank.joined,
        replicas=rank.tp_size,
        draft=rank.draft,
    )


def _hybrid_swa(facts: ModelFacts, attention: Attention, heads: RankHeads, window: int, rank: _Rank) -> HybridSwaSpec:
    # A window that starts inside a page touches one page more than its tokens fill.
    pages = -(-window // rank.page_size) + 1
    return HybridSwaSpec(
        full_layers=facts.full_layers(rank.stage),
        window_layers=facts.other_layers(rank.stage),
        tokens=rank.tokens,
        window_tokens=rank.requests * pages * rank.page_size,
        window=window,
        page_size=rank.page_size,
        kv_heads=heads.count,
        head_start=heads.start,
        total_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        dtype=rank.dtype,
        replicas=heads.replicas,
        draft=rank.draft,
    )


def _mamba(facts: ModelFacts, attention: Attention, heads: RankHeads, net: DeltaNet, rank: _Rank) -> MambaSpec:
    if net.key_heads % rank.tp_size or net.value_heads % rank.tp_size:
        raise HeadsIndivisibleError(
            f"{net.key_heads} key and {net.value_heads} value heads of the state over {rank.tp_size} ranks",
            field="tp_size",
        )
    state_heads = net.value_heads // rank.tp_size
    return MambaSpec(
        state_layers=facts.other_layers(rank.stage),
        slots=rank.requests,
        conv_window=net.conv_kernel - 1,
        conv_channels=net.channels // rank.tp_size,
        ssm_shape=(state_heads, net.key_dim, net.value_dim),
        state_head_start=rank.tp_rank * state_heads,
        state_total_heads=net.value_heads,
        attention_layers=facts.full_layers(rank.stage),
        tokens=rank.tokens,
        page_size=rank.page_size,
        kv_heads=heads.count,
        head_start=heads.start,
        total_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        dtype=rank.dtype,
        replicas=heads.replicas,
        draft=rank.draft,
    )
