"""Ready-made specs: the pool of one rank of a well-known model.

The parameters are from ``config.json`` in the named repository of the Hugging Face hub: ``num_hidden_layers``,
``num_key_value_heads``, ``head_dim``, ``kv_lora_rank``, ``qk_rope_head_dim``, ``index_head_dim``, ``sliding_window``
and its pattern, ``full_attention_interval``, the ``linear_*`` fields, ``num_nextn_predict_layers``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from kvferry.pools.layouts.mla import PACKED_DTYPE
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError, invalid_field
from kvferry.protocol.manifests import PoolSpec

DEFAULT_PAGE_SIZE = 128
DEFAULT_REQUESTS = 64
EXAMPLE_SCALE = 1.0
"""Placeholder for fixed scales, which come from the checkpoint."""


class Attention(msgspec.Struct, frozen=True):
    """Multi-head or grouped-query attention: number of KV heads and head width."""

    kv_heads: int
    head_dim: int


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention; ``index_head_dim`` if the model has an indexer."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    index_head_dim: int | None = None


class DeltaNet(msgspec.Struct, frozen=True):
    """Gated delta net layers: heads and widths of keys and values, and the size of the convolution kernel."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Return the channels of the convolution: q and k, each with the key heads, and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Every ``full_every``-th layer has full attention, the others the window or the delta net.

    ``scales`` of 8-bit keys and values: ``head`` for fixed ones, one per head of each layer; ``page`` for one per page,
    which travels with the page.
    """

    name: str
    source: str
    layers: int
    attention: Attention | Latent
    window: int | None = None
    delta_net: DeltaNet | None = None
    full_every: int = 1
    draft_layers: int = 0
    dtype: str = "bfloat16"
    scales: Literal["head", "page"] | None = None

    def full_layers(self, stage: range) -> tuple[int, ...]:
        """Return the stage's layers that have full attention."""
        return tuple(layer for layer in stage if (layer + 1) % self.full_every == 0)

    def other_layers(self, stage: range) -> tuple[int, ...]:
        """Return the stage's layers without full attention."""
        return tuple(layer for layer in stage if (layer + 1) % self.full_every)


_QWEN3_NEXT: Final = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_kernel=4)

MODELS: Final[dict[str, ModelFacts]] = {
    one.name: one
    for one in (
        ModelFacts(name="llama-3-8b", source="meta-llama/Meta-Llama-3-8B", layers=32, attention=Attention(8, 128)),
        ModelFacts(name="llama-3-70b", source="meta-llama/Meta-Llama-3-70B", layers=80, attention=Attention(8, 128)),
        ModelFacts(name="qwen3-8b", source="Qwen/Qwen3-8B", layers=36, attention=Attention(8, 128)),
        ModelFacts(name="qwen3-32b", source="Qwen/Qwen3-32B", layers=64, attention=Attention(8, 128)),
        ModelFacts(name="qwen3-30b-a3b", source="Qwen/Qwen3-30B-A3B", layers=48, attention=Attention(4, 128)),
        ModelFacts(name="qwen3-235b-a22b", source="Qwen/Qwen3-235B-A22B", layers=94, attention=Attention(4, 128)),
        ModelFacts(
            name="deepseek-v3",
            source="deepseek-ai/DeepSeek-V3",
            layers=61,
            attention=Latent(512, 64),
            draft_layers=1,
        ),
        ModelFacts(
            name="deepseek-v3.2",
            source="deepseek-ai/DeepSeek-V3.2-Exp",
            layers=61,
            attention=Latent(512, 64, 128),
            draft_layers=1,
        ),
        ModelFacts(name="glm-4.5", source="zai-org/GLM-4.5", layers=92, attention=Attention(8, 128), draft_layers=1),
        ModelFacts(
            name="glm-4.5-air", source="zai-org/GLM-4.5-Air", layers=46, attention=Attention(8, 128), draft_layers=1
        ),
        ModelFacts(name="glm-4.6", source="zai-org/GLM-4.6", layers=92, attention=Attention(8, 128), draft_layers=1),
        ModelFacts(
            name="gemma-3-1b",
            source="google/gemma-3-1b-it",
            layers=26,
            attention=Attention(1, 256),
            window=512,
            full_every=6,
        ),
        ModelFacts(
            name="gemma-3-27b",
            source="google/gemma-3-27b-it",
            layers=62,
            attention=Attention(16, 128),
            window=1024,
            full_every=6,
        ),
        ModelFacts(
            name="qwen3-next-80b-a3b",
            source="Qwen/Qwen3-Next-80B-A3B-Instruct",
            layers=48,
            attention=Attention(2, 256),
            delta_net=_QWEN3_NEXT,
            full_every=4,
        ),
        ModelFacts(
            name="llama-3-8b-int8-head-scales",
            source="meta-llama/Meta-Llama-3-8B",
            layers=32,
            attention=Attention(8, 128),
            dtype="int8",
            scales="head",
        ),
        ModelFacts(
            name="llama-3-8b-int8-page-scales",
            source="meta-llama/Meta-Llama-3-8B",
            layers=32,
            attention=Attention(8, 128),
            dtype="int8",
            scales="page",
        ),
        ModelFacts(name="smollm2-135m", source="HuggingFaceTB/SmolLM2-135M", layers=30, attention=Attention(3, 64)),
    )
}
"""By lower-case name."""


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
    fields: dict[str, Any] = {"tokens": tokens, "page_size": page_size, "dtype": dtype or facts.dtype}
    fields["draft"] = _draft(facts, stage) if draft else None
    if isinstance(facts.attention, Latent):
        fields |= _latent(facts.attention, stage, tp_size, packed, joined=joined)
    elif packed:
        raise InvalidFieldError(f"{facts.name} has no latent attention to pack", field="packed")
    elif joined:
        raise InvalidFieldError(f"{facts.name} has no latent attention to join", field="joined")
    else:
        heads = rank_heads(facts.attention.kv_heads, tp_size, tp_rank)
        fields |= {
            "kv_heads": heads.count,
            "head_start": heads.start,
            "total_heads": heads.total,
            "replicas": heads.replicas,
            "head_dim": facts.attention.head_dim,
        }
        if facts.window is not None:
            fields |= _windows(facts, facts.window, stage, page_size, requests)
        elif facts.delta_net is not None:
            fields |= _states(facts, facts.delta_net, stage, (tp_size, tp_rank), requests)
        else:
            fields |= {"kind": "mha", "layers": len(stage), "first_layer": stage.start}
            fields |= dict.fromkeys(("k_scale", "v_scale"), _scales(facts, heads.count, len(stage)))
    try:  # within the wire's bounds? The numbers come from an operator, not from a decoded message
        spec: PoolSpec = msgspec.convert(fields, PoolSpec)
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    return spec


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


def _draft(facts: ModelFacts, stage: range) -> dict[str, Any] | None:
    if not facts.draft_layers:
        raise InvalidFieldError(f"{facts.name} has no draft layers of its own", field="draft")
    if stage.stop < facts.layers:
        return None
    index_head_dim = facts.attention.index_head_dim if isinstance(facts.attention, Latent) else None
    return {"layers": facts.draft_layers, "index_head_dim": index_head_dim}


# -- the fields of each kind of spec, beside those that all have.


def _latent(latent: Latent, stage: range, tp_size: int, packed: str | None, *, joined: bool) -> dict[str, Any]:
    return {
        "kind": "mla",
        "layers": len(stage),
        "first_layer": stage.start,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "index_head_dim": latent.index_head_dim,
        "index_scale": packed is not None and latent.index_head_dim is not None,
        "packed": packed,
        "joined": joined,
        "replicas": tp_size,
        **({"dtype": PACKED_DTYPE} if packed else {}),
    }


def _scales(facts: ModelFacts, heads: int, layers: int) -> str | tuple[tuple[float, ...], ...] | None:
    return ((EXAMPLE_SCALE,) * heads,) * layers if facts.scales == "head" else facts.scales


def _windows(facts: ModelFacts, window: int, stage: range, page_size: int, requests: int) -> dict[str, Any]:
    # A window that starts inside a page touches one page more than its tokens fill.
    pages = -(-window // page_size) + 1
    return {
        "kind": "hybrid_swa",
        "full_layers": facts.full_layers(stage),
        "window_layers": facts.other_layers(stage),
        "window_tokens": requests * pages * page_size,
        "window": window,
    }


def _states(facts: ModelFacts, net: DeltaNet, stage: range, rank: tuple[int, int], requests: int) -> dict[str, Any]:
    tp_size, tp_rank = rank
    if net.key_heads % tp_size or net.value_heads % tp_size:
        raise HeadsIndivisibleError(
            f"{net.key_heads} key and {net.value_heads} value heads of the state over {tp_size} ranks",
            field="tp_size",
        )
    heads = net.value_heads // tp_size
    return {
        "kind": "mamba",
        "state_layers": facts.other_layers(stage),
        "slots": requests,
        "conv_window": net.conv_kernel - 1,
        "conv_channels": sum(net.parts) // tp_size,
        "conv_parts": tuple(part // tp_size for part in net.parts),
        "ssm_shape": (heads, net.key_dim, net.value_dim),
        "state_head_start": tp_rank * heads,
        "state_total_heads": net.value_heads,
        "attention_layers": facts.full_layers(stage),
    }
