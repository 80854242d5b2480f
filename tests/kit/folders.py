"""Where the tests with real engines find what the Makefile has made."""

from __future__ import annotations

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
MODELS: Final = REPOSITORY / ".models"

SMOLLM2: Final = "smollm2-135m"
"""MHA: 30 layers, 3 KV heads of 64."""
TINY_MHA: Final = "tiny-mha"
"""MHA: 3 layers, 2 KV heads of 32."""
TINY_GQA: Final = "tiny-gqa"
"""MHA: 3 layers, 4 KV heads of 32, 8 heads: for two ranks."""
TINY_MLA: Final = "tiny-mla"
"""MLA: 3 layers, rows of 64 + 16. For SGLang."""
TINY_DEEPSEEK: Final = "tiny-deepseek"
"""MLA: 3 layers, rows of 512 + 64. For vLLM, and SGLang on an NPU."""
TINY_ASCEND: Final = "tiny-ascend"
"""MHA: 3 layers, 2 KV heads of 128, as Ascend's kernels want them. For SGLang on an NPU."""
TINY_WINDOWS: Final = "tiny-windows"
"""MHA: 4 layers, 2 KV heads of 32, every other one of a window of 96 tokens. For SGLang."""
TINY_SINKS: Final = "tiny-sinks"
"""MHA: 4 layers, a KV head of 192 (K) and 128 (V), every other one of a window, with sinks. For SGLang on an NPU."""
WINDOW: Final = 96
"""Tokens of a sliding window of these models."""
TINY_GEMMA: Final = "tiny-gemma"
"""A Gemma 3: 6 layers of MHA, 2 KV heads of 32, four of them of a window of 96 tokens. For vLLM."""
TINY_OSS: Final = "tiny-oss"
"""A gpt-oss: 4 layers of MHA with sinks, 2 KV heads of 32, two of them of a window of 96 tokens. For vLLM."""
TINY_CHUNKS: Final = "tiny-chunks"
"""A Llama 4 without experts: 4 layers of MHA, 2 KV heads of 32, two of them of chunks of 96 tokens. For vLLM."""
TINY_SHARED: Final = "tiny-shared"
"""A Gemma 3n: 6 layers of MHA, 2 KV heads of 32, of which the last three read the first ones' cache. For vLLM."""
TINY_GRANITE: Final = "tiny-granite"
"""A Granite 4: 2 layers of MHA, 2 KV heads of 32, and 2 of states of Mamba 2. For vLLM."""
TINY_CONV: Final = "tiny-conv"
"""2 layers of MHA, 2 KV heads of 32, and 2 of a convolution's state. For SGLang."""
TINY_DELTA: Final = "tiny-delta"
"""A layer of MHA, 2 KV heads of 64, and 3 of a gated delta net's states. For SGLang and vLLM."""
