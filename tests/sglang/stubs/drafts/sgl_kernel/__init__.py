"""Those of SGLang's CPU kernels that draft models need, in torch: its wheel is for accelerators only.

A draft is a chain: each step proposes one token (``--speculative-eagle-topk 1``).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__version__ = "0.4.10"

if not hasattr(torch.cpu, "device"):
    torch.cpu.device = lambda _=None: contextlib.nullcontext()  # SGLang enters it as a CUDA device


def copy_all_layer_kv_cache_cpu(arrays: Tensor, widths: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Copy rows within arrays, which are given by address."""
    for at, width in zip(arrays.tolist(), widths.tolist(), strict=True):
        rows = [ctypes.string_at(at + source * width, width) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(at + target * width, row, width)


def assign_req_to_token_pool_cpu(  # SGLang's order
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _columns: int
) -> None:
    """Write slots, one request after another, to its row of the table."""
    first = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[first : first + end - start]
        first += end - start


def assign_extend_cache_locs_cpu(
    requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _columns: int
) -> None:
    """Write each request's slots from ``starts`` to ``ends``, one after another."""
    rows = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([slots[request, start:end] for request, start, end in rows])
    out[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, slots: Tensor, lengths: Tensor, out: Tensor, columns: int, topk: int, steps: int
) -> None:
    """Write each request's slots for the draft's steps, which follow its tokens."""
    assign_extend_cache_locs_cpu(requests, slots, lengths, lengths + topk * steps, out, columns)


def fill_bonus_tokens_cpu(accepted: Tensor, counts: Tensor, out: Tensor, width: int) -> None:
    """Write each request's last accepted token."""
    out.copy_(accepted.view(-1, width).gather(1, counts.long()[:, None] - 1)[:, 0])


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write the slots of accepted tokens, one after another."""
    found = slots[accepted[accepted > -1].long()]
    out[: len(found)] = found


def build_tree_kernel_efficient_cpu(
    _parents: Tensor,
    _scores: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    _steps: int,
    count: int,
    _mode: object,
) -> None:
    """Write the chain of each request's last token and of the draft's, ``count`` in all."""
    assert topk == 1
    order = torch.arange(count)
    mask.copy_((order[:, None] >= order).repeat(len(lengths), 1).flatten())
    positions.copy_((lengths[:, None] + order).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(order + 1 < count, order + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,  # noqa: ARG001
    retrive_next_sibling: Tensor,  # noqa: ARG001
    target_predict: Tensor,
) -> None:
    """Accept each request's tokens for as long as they are what the model predicts."""
    for row, (proposed, predicted, index) in enumerate(zip(candidates, target_predict, retrive_index, strict=True)):
        right = (proposed[1:] == predicted[:-1]).int().cumprod(0)
        count = int(right.sum())
        accept_index[row, : count + 1] = index[: count + 1].to(accept_index.dtype)
        accept_token_num[row] = count
        predicts[index[: count + 1]] = predicted[: count + 1].to(predicts.dtype)


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
