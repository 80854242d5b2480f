"""Small models with random weights, one of each kind of cache: what they are made of, and what they cache.

Facts only: neither torch nor transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["mha", "mla", "hybrid_swa", "mamba"]

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8,
    "max_position_embeddings": 512, "initializer_range": 0.3, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: Final[Mapping[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: Final[Mapping[str, Any]] = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip


class TinyModel(NamedTuple):
    """One model: the kind of pool it needs, and which of its layers have paged attention, windows, and states."""

    kind: Kind
    about: str
    library_class: str  # in transformers, without the ForCausalLM
    config: Mapping[str, Any]
    kv_heads: int  # of the whole model; 1 where latents are cached
    dims: tuple[int, int]  # of k and of v
    main: tuple[int, ...]
    windows: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    window: int | None = None  # in tokens
    index_dim: int | None = None
    conv: tuple[int, tuple[int, ...]] | None = None  # window, and the widths of what is side by side in its channels
    ssm: tuple[int, ...] | None = None  # heads first

    @property
    def layers(self) -> int:
        return len(self.main) + len(self.windows) + len(self.states)

    @property
    def query_heads(self) -> int:
        """Return the number of query heads: what tensor parallelism divides."""
        return int(self.config["num_attention_heads"])


def _gqa(name: str, about: str, layers: int, kv_heads: int) -> TinyModel:
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": 12}
    return TinyModel("mha", about, name, {**_COMMON, **sizes}, kv_heads, (12, 12), tuple(range(layers)))


def _windows(window: int) -> TinyModel:
    sorts = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = {
        **_COMMON, "num_hidden_layers": len(sorts), "num_key_value_heads": 4, "head_dim": 12,
        "query_pre_attn_scalar": 12, "sliding_window": window, "layer_types": sorts,
    }  # fmt: skip
    about = f"GQA, 4 KV heads; window of {window} tokens in 4 of 6 layers"
    return TinyModel("hybrid_swa", about, "Gemma3", config, 4, (12, 12), (2, 5), windows=(0, 1, 3, 4), window=window)


def _delta_net() -> TinyModel:
    config = {
        **_COMMON, **_EXPERTS, "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    states = (0, 1, 2, 4, 5, 6)
    about = "gated delta net in 6 of 8 layers, GQA with 2 KV heads in the others"
    return TinyModel(
        "mamba", about, "Qwen3Next", config, 2, (16, 16), (3, 7), states=states, conv=(4, (16, 16, 24)), ssm=(4, 8, 6)
    )


def _mamba() -> TinyModel:
    config = {
        **_COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    about = "Mamba in 2 of 4 layers, GQA with 2 KV heads in the others"
    return TinyModel("mamba", about, "Jamba", config, 2, (8, 8), (1, 3), states=(0, 2), conv=(4, (128,)), ssm=(128, 8))


def _mla(name: str, about: str, layers: int, index_dim: int | None = None, **more: object) -> TinyModel:
    config = {**_COMMON, **_LATENT, "num_hidden_layers": layers, "num_key_value_heads": 8, **more}
    return TinyModel("mla", about, name, config, 1, (24, 8), tuple(range(layers)), index_dim=index_dim)


MODELS: Final[Mapping[str, TinyModel]] = {
    "llama": _gqa("Llama", "GQA, 4 KV heads, 15 layers", 15, 4),
    "qwen3": _gqa("Qwen3", "GQA, 2 KV heads, 4 layers", 4, 2),
    "gemma3": _windows(16),
    "qwen3-next": _delta_net(),
    "jamba": _mamba(),
    "deepseek-v3": _mla("DeepseekV3", "MLA, 4 layers", 4),
    "deepseek-v3.2": _mla(
        "DeepseekV32", "MLA with an indexer, 3 layers", 3, 16, index_head_dim=16, index_n_heads=4, index_topk=8
    ),
    "draft-llama": _gqa("Llama", "GQA, 2 KV heads, 2 layers", 2, 2),
    "draft-deepseek": _mla("DeepseekV3", "MLA, 1 layer", 1),
}
"""The models by name."""

DRAFTS: Final[Mapping[Kind, str]] = {
    "mha": "draft-llama", "hybrid_swa": "draft-llama", "mamba": "draft-llama", "mla": "draft-deepseek"
}  # fmt: skip
"""The draft model beside each kind."""
