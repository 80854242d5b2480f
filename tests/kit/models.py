"""The models of the tests with real engines, as Hugging Face has them: ``python -m tests.kit.models FOLDER``.

``smollm2-135m`` is the demo's converted model, the others are random. ``tiny-mha`` and ``tiny-gqa`` have heads for two
ranks. ``tiny-mla`` is a MiniCPM3: of SGLang's MLA models it alone always attends to the latent rows. DeepSeek's first
expands them for a prompt with no cached prefix, and on a CPU no attention backend of SGLang has both.
``tiny-deepseek`` is a DeepSeek V3 without experts: of vLLM's MLA models on a CPU, those of its rows alone.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MiniCPM3Config

from examples.demo.model import converted_model
from tests.kit.folders import SMOLLM2, TINY_ASCEND, TINY_DEEPSEEK, TINY_GQA, TINY_MHA, TINY_MLA

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
    made = {TINY_MHA: mha, TINY_GQA: gqa, TINY_MLA: mla, TINY_DEEPSEEK: deepseek, TINY_ASCEND: ascend}
    deepseek.moe_layer_freq = 1  # SGLang reads it
    for name, config in made.items():
        save_random(config, folder / name)
        for file in demo.glob("tokenizer*"):
            shutil.copy(file, folder / name)


def save_random(config: Any, folder: Path) -> None:  # noqa: ANN401  a model's configuration
    """Save a random model, always the same one, of 13 million weights in fp32."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(16)
    make: Any = AutoModelForCausalLM
    make.from_config(config, dtype=torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    main()
