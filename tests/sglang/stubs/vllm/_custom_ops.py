"""vLLM's kernel for rotary position embedding, in torch."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: FBT001  the kernel's own signature
) -> None:
    """Rotate queries and keys in place.

    Args:
        positions: of the tokens, ``(n,)`` int64.
        query: ``(n, heads * head_size)``, of any float.
        key: ``(n, kv_heads * head_size)``; or None.
        head_size: the channels of a head; those after the rotated ones stay.
        cos_sin_cache: ``(positions, rotated)``, the cosines in the first half.
        is_neox: a channel's partner is half of the rotated ones away; otherwise it is its neighbour.
    """
    cosines, sines = cos_sin_cache[positions.flatten()].to(query.dtype)[:, None].chunk(2, dim=-1)
    half = cosines.shape[-1]
    first, second = (slice(half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    for rows in (query, key):
        if rows is None:
            continue
        heads = rows.view(positions.numel(), -1, head_size)
        one, other = heads[..., first].clone(), heads[..., second].clone()
        heads[..., first] = one * cosines - other * sines
        heads[..., second] = other * cosines + one * sines
