"""KV-cache parameters of well-known models.

Each is from ``config.json`` in the named repository of the Hugging Face hub: ``num_hidden_layers``,
``num_key_value_heads``, ``head_dim``, ``kv_lora_rank``, ``qk_rope_head_dim``, ``index_head_dim``, ``sliding_window``
and its pattern, ``full_attention_interval``, the ``linear_*`` fields, ``num_nextn_predict_layers``.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec


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
    def channels(self) -> int:
        """Return the channels of the convolution: q and k, each with the key heads, and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


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
