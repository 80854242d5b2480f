"""The models of the tests with real engines, as Hugging Face has them: ``python -m tests.kit.models FOLDER``.

``smollm2-135m`` is the demo's converted model, the others are random. ``tiny-mha`` and ``tiny-gqa`` have heads for two
ranks. ``tiny-mla`` is a MiniCPM3: of SGLang's MLA models it alone always attends to the latent rows. DeepSeek's first
expands them for a prompt with no cached prefix, and on a CPU no attention backend of SGLang has both.
``tiny-deepseek`` is a DeepSeek V3 without experts: of vLLM's MLA models on a CPU, those of its rows alone.
``tiny-gemma``, ``tiny-oss`` and ``tiny-granite`` are a Gemma 3, a gpt-oss and a Granite 4, of several KV cache groups,
``tiny-chunks`` and ``tiny-shared`` a Llama 4 and a Gemma 3n.
``tiny-windows`` is a Spark 2.5, whose windows SGLang keeps in a pool of their own, and ``tiny-sinks`` a MiMo-V2-Flash,
for SGLang's graphs on an NPU; ``tiny-conv`` is an LFM2 and ``tiny-delta`` a Qwen3-Next.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    Qwen3NextConfig,
)

from examples.demo.model import converted_model
from tests.kit.folders import (
    SMOLLM2,
    TINY_ASCEND,
    TINY_CHUNKS,
    TINY_CONV,
    TINY_DEEPSEEK,
    TINY_DELTA,
    TINY_GEMMA,
    TINY_GQA,
    TINY_GRANITE,
    TINY_MHA,
    TINY_MLA,
    TINY_OSS,
    TINY_SHARED,
    TINY_SINKS,
    TINY_WINDOWS,
    WINDOW,
)

SPREAD: Final = 0.2
"""Of the random weights: ten times the usual, so that a token depends on all the tokens before it."""


COMMON: Final[dict[str, Any]] = {
    "vocab_size": 49152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 8192,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def main() -> None:
    """Make all folders."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    demo = converted_model(lambda line: print(line, flush=True))  # noqa: T201  progress
    link = folder / SMOLLM2
    link.unlink(missing_ok=True)
    link.symlink_to(demo)
    mha = LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    gqa = LlamaConfig(**COMMON, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    mla = MiniCPM3Config(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        scale_emb=1,
        scale_depth=1.4,
        dim_model_base=128,
    )
    deepseek = DeepseekV3Config(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=COMMON["num_hidden_layers"],
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    ascend = LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    of_four: dict[str, Any] = {**COMMON, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 256}
    sizes |= {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
    conv = Lfm2Config(**of_four, **sizes, layer_types=["conv", "full_attention"] * 2)
    delta = Qwen3NextConfig(
        **of_four,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    made = {TINY_MHA: mha, TINY_GQA: gqa, TINY_MLA: mla, TINY_DEEPSEEK: deepseek, TINY_ASCEND: ascend}
    made |= {TINY_CONV: conv, TINY_DELTA: delta}
    made |= {TINY_GEMMA: gemma(), TINY_OSS: gpt_oss(), TINY_GRANITE: granite()}
    made |= {TINY_CHUNKS: llama4(), TINY_SHARED: gemma3n()}
    deepseek.moe_layer_freq, delta.full_attention_interval = 1, 4  # SGLang reads them
    for name, config in made.items():
        save_random(config, folder / name)
    save_windows(folder / TINY_WINDOWS)
    save_sinks(folder / TINY_SINKS)
    for name in (*made, TINY_WINDOWS, TINY_SINKS):
        for file in demo.glob("tokenizer*"):
            shutil.copy(file, folder / name)


def gemma() -> Gemma3TextConfig:
    """Return a Gemma 3: vLLM has its layers in three groups."""
    sizes: dict[str, Any] = {**COMMON, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(**sizes, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW, layer_types=types)


def gpt_oss() -> GptOssConfig:
    """Return a gpt-oss: two groups, of windows and of full attention."""
    sizes: dict[str, Any] = {**COMMON, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    types = ["sliding_attention", "full_attention"] * 2
    return GptOssConfig(**{**sizes, **experts}, head_dim=32, sliding_window=WINDOW, layer_types=types)


def llama4() -> Llama4TextConfig:
    """Return a Llama 4 without experts: two groups, of chunks and of full attention."""
    sizes: dict[str, Any] = {**COMMON, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense: dict[str, Any] = {"intermediate_size_mlp": 256, "moe_layers": [], "interleave_moe_layer_step": 0}
    return Llama4TextConfig(
        **sizes, **dense, head_dim=32, num_local_experts=1, attention_chunk_size=WINDOW, no_rope_layers=[1, 0] * 2
    )


def gemma3n() -> Gemma3nTextConfig:
    """Return a Gemma 3n: three groups, two of them of windows, of the first three of its six layers."""
    sizes: dict[str, Any] = {**COMMON, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    more: dict[str, Any] = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": COMMON["vocab_size"]}
    more |= {"altup_num_inputs": 2, "laurel_rank": 16, "num_kv_shared_layers": 3, "tie_word_embeddings": True}
    more |= {"initializer_range": 0.02}  # of tied embeddings larger ones alone would decide which token follows
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3nTextConfig(**{**sizes, **more}, head_dim=32, sliding_window=WINDOW, layer_types=types)


def granite() -> GraniteMoeHybridConfig:
    """Return a Granite 4: a group of attention and one of states."""
    sizes: dict[str, Any] = {**COMMON, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return GraniteMoeHybridConfig(
        **sizes,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
    )


def save_random(config: Any, folder: Path) -> None:  # noqa: ANN401  a model's configuration
    """Save a random model, always the same one, of 13 million weights in fp32."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(16)
    make: Any = AutoModelForCausalLM
    make.from_config(config, dtype=torch.float32).save_pretrained(folder)


def save_windows(folder: Path) -> None:
    """Save a random Spark 2.5, which transformers does not know."""
    hidden, heads, kv_heads, dim = COMMON["hidden_size"], 4, 2, 32
    config = {
        "architectures": ["Spark2_5ForCausalLM"],
        "model_type": "spark2_5",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 4,
        "head_dim": dim,
        "headwise_attn_output_gate": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rms_norm_eps": 1e-6,
    }
    attention = {
        "q_k_v_proj": ((heads + 2 * kv_heads) * dim, hidden),
        "g_proj": (heads, hidden),
        "out_proj": (hidden, heads * dim),
    }
    save_weights(folder, config, [attention] * 4)


def save_sinks(folder: Path) -> None:
    """Save a random MiMo-V2-Flash without experts, under the names that SGLang reads."""
    hidden, heads, kv_heads, wide, narrow = COMMON["hidden_size"], 2, 1, 192, 128
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 4,
        **{f"{of}num_attention_heads": heads for of in ("", "swa_")},
        **{f"{of}num_key_value_heads": kv_heads for of in ("", "swa_")},
        **{f"{of}head_dim": wide for of in ("", "swa_")},
        **{f"{of}v_head_dim": narrow for of in ("", "swa_")},
        **dict.fromkeys(("sliding_window", "sliding_window_size"), WINDOW),
        "hybrid_layer_pattern": [1, 0] * 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "moe_layer_freq": [0] * 4,
        "mlp_layer_types": ["dense"] * 4,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "add_swa_attention_sink_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        "layernorm_epsilon": 1e-6,
    }
    attention = {
        "q_proj": (heads * wide, hidden),
        "k_proj": (kv_heads * wide, hidden),
        "v_proj": (kv_heads * narrow, hidden),
        "o_proj": (hidden, heads * narrow),
    }
    save_weights(
        folder, config, [attention] * 4, {f"model.layers.{one}.self_attn.attention_sink_bias" for one in (0, 2)}
    )


def save_weights(
    folder: Path, config: dict[str, Any], attentions: list[dict[str, tuple[int, int]]], sinks: Iterable[str] = ()
) -> None:
    """Save a random model that transformers cannot make.

    Args:
        folder: where.
        config: more than ``COMMON``.
        attentions: the shapes of each layer's projections.
        sinks: names of vectors of a number for each head.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **config, "torch_dtype": "float32"}))
    hidden, inner = COMMON["hidden_size"], COMMON["intermediate_size"]
    shapes = {"model.embed_tokens": (COMMON["vocab_size"], hidden), "lm_head": (COMMON["vocab_size"], hidden)}
    norms = ["model.norm"]
    for layer, attention in enumerate(attentions):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{block}mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{block}mlp.down_proj"] = hidden, inner
        norms += [f"{block}input_layernorm", f"{block}post_attention_layernorm"]
    chance = torch.Generator().manual_seed(16)
    weights = {f"{name}.weight": torch.randn(shape, generator=chance) * SPREAD for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights |= {name: torch.randn(config["num_attention_heads"], generator=chance) for name in sinks}
    save_file(weights, folder / "model.safetensors")


if __name__ == "__main__":
    main()
