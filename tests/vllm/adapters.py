"""LoRAs of the small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def make_adapter(folder: Path, seed: int, **more: Any) -> None:  # noqa: ANN401  of its configuration
    """Make a LoRA of the small model, or another one in its place."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 64, **more}
    config["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_"
            weights[f"{prefix}A.weight"] = torch.randn(8, 128, generator=random)
            weights[f"{prefix}B.weight"] = torch.randn(rows, 8, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
