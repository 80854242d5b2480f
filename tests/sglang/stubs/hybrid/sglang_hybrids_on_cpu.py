"""What SGLang lacks on a CPU for hybrid models, as a plugin of the test environment: in torch, slow and plain.

Its attention in torch writes a window layer's rows at their window slots and reads them at the full ones; here it reads
them where they are. Its convolutions and gated norms are Triton kernels.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LAYERS = "sglang.srt.layers.attention."
_OPS = "sglang.kernels.ops."


def register() -> None:
    """Put it where SGLang looks for its kernels."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for call in ("forward_extend", "forward_decode"):
        HookRegistry.register(
            f"{_LAYERS}torch_native_backend.TorchNativeAttnBackend.{call}", reading_windows, HookType.AROUND
        )
    for path, instead in (
        (f"{_LAYERS}mamba.causal_conv1d._causal_conv1d_fn_triton", convolve),
        (f"{_LAYERS}mamba.causal_conv1d._causal_conv1d_update_triton", convolve_next),
        (f"{_OPS}attention.fla.fused_norm_gate.FusedRMSNormGated.forward", gated_norm),
        (f"{_OPS}elementwise.elementwise.fused_gate_sigmoid_mul_add", add_gated),
    ):
        HookRegistry.register(path, instead, HookType.REPLACE)


def reading_windows(
    original: Callable[..., Tensor],
    backend: Any,  # noqa: ANN401  SGLang's object
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,  # noqa: ANN401  SGLang's object
    *rest: object,
    **more: object,
) -> Tensor:
    """Compute attention; a window layer finds its rows by their window slots."""
    pool, table = backend.token_to_kv_pool, backend.req_to_token_pool
    if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
        return original(backend, q, k, v, layer, *rest, **more)
    slots = pool.full_to_swa_index_mapping[table.req_to_token.long()]
    backend.req_to_token_pool = types.SimpleNamespace(req_to_token=slots)
    try:
        return original(backend, q, k, v, layer, *rest, **more)
    finally:
        backend.req_to_token_pool = table


def requests(bounds: Tensor | None, slots: Tensor, tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, first token, end and slot of each request that has tokens and a slot."""
    ends = [0, tokens] if bounds is None else bounds.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end and int(slots[number]) >= 0:
            yield number, start, end, int(slots[number])


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = "silu",
    **_: object,
) -> Tensor:
    """Convolve prompts' (channels, tokens), each after the (channels, width - 1) in its slot, which it replaces."""
    assert cache_indices is not None
    assert has_initial_state is not None
    assert conv_states is not None
    out, before = torch.empty_like(x), weight.shape[1] - 1
    for number, start, end, slot in requests(query_start_loc, cache_indices, x.shape[1]):
        state = _channels_first(conv_states[slot], before)
        held = state if has_initial_state[number] else torch.zeros_like(state)
        row = torch.cat([held.to(x.dtype), x[:, start:end]], 1)
        done = torch.nn.functional.conv1d(row[None], weight[:, None].to(x.dtype), bias, groups=len(row))[0]
        out[:, start:end] = _activated(done, activation)
        state.copy_(row[:, -before:])
    return out


def convolve_next(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,  # noqa: ARG001  SGLang's order
    conv_state_indices: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Convolve a token of each request, (requests, channels)."""
    assert conv_state_indices is not None
    count = len(x)
    done = convolve(
        x.t().contiguous(), weight, bias, torch.arange(count + 1), conv_state_indices,
        torch.ones(count, dtype=torch.bool), conv_state, activation,
    )  # fmt: skip
    return done.t().contiguous()


def gated_norm(norm: Any, x: Tensor, g: Tensor, *_: object, **__: object) -> Tensor:  # noqa: ANN401  SGLang's object
    """Compute RMSNorm of x, times the activation of g."""
    rows = x.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    gate = torch.sigmoid(g.float()) if norm.activation == "sigmoid" else torch.nn.functional.silu(g.float())
    return (rows * gate).to(x.dtype)


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> Tensor:
    """Add what the shared expert says, times its gate."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float().view(-1, 1))
    return final_hidden_states.add_((gate * shared_output.float()).to(final_hidden_states.dtype))


def _channels_first(state: Tensor, before: int) -> Tensor:
    return state if state.shape[-1] == before else state.t()


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return torch.nn.functional.silu(x) if activation in {"silu", "swish"} else x
