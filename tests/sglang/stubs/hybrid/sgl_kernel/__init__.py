"""Those of SGLang's CPU kernels that gated delta nets need, in torch: its wheel is for accelerators only."""

from __future__ import annotations

import contextlib

import torch
from sglang_hybrids_on_cpu import requests
from torch import Tensor
from torch.nn import functional

__version__ = "0.4.10"

if not hasattr(torch.cpu, "device"):
    torch.cpu.device = lambda _=None: contextlib.nullcontext()  # SGLang enters it as a CUDA device


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Return the logarithm of the decay, and the share of the new, (1, tokens, heads) each."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], torch.sigmoid(b.float())[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool = False,  # noqa: ARG001, FBT001, FBT002  SGLang's order
    use_qk_l2norm_in_kernel: bool = True,  # noqa: ARG001, FBT001, FBT002
    initial_state_indices: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None, None]:
    """Compute prompts, (1, tokens, heads, dim) each; ``initial_state`` are all slots, and is updated."""
    assert initial_state_indices is not None
    out = torch.empty_like(v)
    for _number, start, end, slot in requests(cu_seqlens, initial_state_indices, q.shape[1]):
        part = [one[0, start:end] for one in (q, k, v, g, beta)]
        out[0, start:end] = _delta_rule(*part, initial_state[slot])
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: object,
) -> Tensor:
    """Compute the next token of each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a.view(-1, len(A_log)), b.view(-1, len(A_log)), dt_bias)
    return chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, initial_state_source, cu_seqlens, initial_state_indices=initial_state_indices
    )[0]


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slot: Tensor) -> Tensor:
    """Compute one request token by token; its state is (heads, value dim, key dim)."""
    heads = v.shape[1] // q.shape[1]
    q = (functional.normalize(q.float(), dim=-1) * q.shape[-1] ** -0.5).repeat_interleave(heads, 1)
    k = functional.normalize(k.float(), dim=-1).repeat_interleave(heads, 1)
    state, out = slot.float(), torch.empty_like(v)
    for token in range(len(q)):
        state = state * g[token].float().exp()[:, None, None]
        known = torch.einsum("hvk,hk->hv", state, k[token])
        new = (v[token].float() - known) * beta[token].float()[:, None]
        state = state + torch.einsum("hv,hk->hvk", new, k[token])
        out[token] = torch.einsum("hvk,hk->hv", state, q[token])
    slot.copy_(state)
    return out


for _kernel in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
