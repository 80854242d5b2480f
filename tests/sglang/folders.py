"""Where the tests with SGLang find what the Makefile has made."""

from __future__ import annotations

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
MODELS: Final = REPOSITORY / ".models"
STUBS: Final = Path(__file__).with_name("stubs")
"""For what SGLang imports and this environment cannot have."""

SMOLLM2: Final = "smollm2-135m"
"""MHA: 30 layers, 3 KV heads of 64."""
TINY_MHA: Final = "tiny-mha"
"""MHA: 3 layers, 2 KV heads of 32."""
TINY_MLA: Final = "tiny-mla"
"""MLA: 3 layers, rows of 64 + 16."""
