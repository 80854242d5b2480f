"""In place of operators and Triton kernels that the simulated CANN has not: SGLang's own in torch, as its plugin."""

from __future__ import annotations

from typing import Any, Final

KEPT: Final[list[object]] = []
"""Libraries of operators, which end with their objects."""


def register() -> None:
    """Put them in place."""
    import torch  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    operators = torch.library.Library("npu", "FRAGMENT")
    operators.define("batch_matmul_transpose(Tensor first, Tensor second, Tensor(a!) out) -> ()")
    operators.impl("batch_matmul_transpose", _batch_matmul_transpose, "PrivateUse1")
    KEPT.append(operators)
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


def _batch_matmul_transpose(first: Any, second: Any, out: Any) -> None:  # noqa: ANN401  tensors
    """Multiply (tokens, heads, size) by (heads, size, width)."""
    out.copy_((first.transpose(0, 1) @ second).transpose(0, 1))
