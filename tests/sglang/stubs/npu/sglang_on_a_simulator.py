"""In place of operators and Triton kernels that the simulated CANN has not: SGLang's own in torch, as its plugin."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Put them in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for path in ("mem_cache.allocation", "model_executor.forward_batch_info"):
        HookRegistry.register(f"sglang.srt.{path}.support_triton", lambda _: False, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.layernorm.RMSNorm.forward_npu", _native, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.models.llama.LlamaAttention.forward_prepare_npu", _prepare_native, HookType.REPLACE
    )


def _native(layer: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401  SGLang's layer
    return layer.forward_native(*given, **named)


def _prepare_native(attention: Any, positions: Any, hidden_states: Any, forward_batch: object) -> Any:  # noqa: ANN401, ARG001
    return attention.forward_prepare_native(positions, hidden_states)
