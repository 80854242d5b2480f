"""The models of the tests with SGLang, as folders in Hugging Face's format: ``python -m tests.sglang.models FOLDER``.

``smollm2-135m`` is the demo's converted model. ``tiny-mla`` is random, with rows of 64 latent and 16 rotated channels:
MiniCPM3, because of SGLang's MLA models it alone always attends to the latent rows. DeepSeek's first expands them for
a prompt with no cached prefix, and on a CPU no attention backend of SGLang has both.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, MiniCPM3Config

from examples.demo.model import converted_model
from tests.sglang.folders import SMOLLM2, TINY_MLA

SPREAD: Final = 0.2
"""Of the random weights: ten times the usual, so that a token depends on all the tokens before it."""


def main() -> None:
    """Make what is missing of both folders."""
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    demo, tiny = converted_model(lambda line: print(line, flush=True)), folder / TINY_MLA  # noqa: T201  progress
    link = folder / SMOLLM2
    link.unlink(missing_ok=True)
    link.symlink_to(demo)
    shutil.rmtree(tiny, ignore_errors=True)
    save_tiny_mla(tiny)
    for file in demo.glob("tokenizer*"):
        shutil.copy(file, tiny)


def save_tiny_mla(folder: Path) -> None:
    """Save a random model, always the same one, of 13 million weights in fp32."""
    torch.manual_seed(16)
    config: Any = MiniCPM3Config(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=8192,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        scale_emb=1,
        scale_depth=1.4,
        dim_model_base=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    make: Any = AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
