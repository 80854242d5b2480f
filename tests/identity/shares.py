"""What one rank of one stage holds of a model's cache: which part of each array, and the spec of its pool.

The parts are derived from the query heads that a rank computes, not from kvferry's own rule for KV heads; the specs are
made as an engine makes them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec
from tests.identity.models import TinyModel


class Rank(NamedTuple):
    """One rank of a tensor parallelism."""

    size: int
    number: int


class Part(NamedTuple):
    """Some indices along one axis of an array that is not split over ranks."""

    axis: int
    indices: torch.Tensor

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.index_select(self.axis, self.indices)


def part_of(model: TinyModel, rank: Rank, role: str) -> Part:
    if role == "conv":
        assert model.conv is not None
        starts = [sum(model.conv[1][:number]) for number in range(len(model.conv[1]))]
        shares = [
            start + torch.arange(width)[_share(width, rank)] for start, width in zip(starts, model.conv[1], strict=True)
        ]
        return Part(1, torch.cat(shares))
    if role == "ssm":
        assert model.ssm is not None
        return Part(0, torch.arange(model.ssm[0])[_share(model.ssm[0], rank)])
    group = model.query_heads // model.kv_heads
    queries = range(model.query_heads)[_share(model.query_heads, rank)]
    return Part(1, torch.tensor(sorted({query // group for query in queries})))


def whole_shape(model: TinyModel, role: str, tokens: int) -> tuple[int, ...]:
    """Return the shape of an array that is not split: of all heads, and as many tokens as there are."""
    if role == "conv":
        assert model.conv is not None
        return model.conv[0], sum(model.conv[1])
    if role == "ssm":
        assert model.ssm is not None
        return model.ssm
    return tokens, model.kv_heads, {"k": model.dims[0], "v": model.dims[1], "index_k": model.index_dim or 0}[role]


def spec_of(
    model: TinyModel,
    layers: range,
    rank: Rank,
    draft: TinyModel | None,
    pages: int,
    page_size: int,
    view: Literal["paged", "fia"],
) -> PoolSpec:
    """Return the spec of the pool of one rank of one stage; ``pages`` of each space."""
    sizes: dict[str, Any] = {"tokens": pages * page_size, "page_size": page_size, "dtype": "float32"}
    if model.kind == "mla":
        return MlaSpec(
            layers=len(layers),
            first_layer=layers.start,
            kv_lora_rank=model.dims[0],
            qk_rope_head_dim=model.dims[1],
            index_head_dim=model.index_dim,
            replicas=rank.size,
            draft=None if draft is None else DraftSpec(layers=len(draft.main)),
            **sizes,
        )
    heads: dict[str, Any] = {
        **_heads(model, rank),
        "head_dim": model.dims[0],
        "view": view,
        "draft": _draft(draft, rank),
    }
    main, windows, states = (
        tuple(one for one in some if one in layers) for some in (model.main, model.windows, model.states)
    )
    if model.kind == "mha":
        return MhaSpec(layers=len(layers), first_layer=layers.start, **sizes, **heads)
    if model.kind == "hybrid_swa":
        assert model.window is not None
        windowed: dict[str, Any] = {
            "window_tokens": max(pages, -(-model.window // page_size)) * page_size,
            "window": model.window,
        }
        return HybridSwaSpec(full_layers=main, window_layers=windows, **windowed, **sizes, **heads)
    assert model.conv is not None
    assert model.ssm is not None
    held = model.ssm[0] // rank.size
    return MambaSpec(
        state_layers=states,
        attention_layers=main,
        slots=pages,
        conv_window=model.conv[0],
        conv_channels=sum(model.conv[1]) // rank.size,
        conv_parts=tuple(width // rank.size for width in model.conv[1]),
        ssm_shape=(held, *model.ssm[1:]),
        state_head_start=rank.number * held,
        state_total_heads=model.ssm[0],
        **sizes,
        **heads,
    )


def _share(count: int, rank: Rank) -> slice:
    assert count % rank.size == 0, (count, rank)
    each = count // rank.size
    return slice(rank.number * each, (rank.number + 1) * each)


def _heads(model: TinyModel, rank: Rank) -> dict[str, Any]:
    held = rank_heads(model.kv_heads, rank.size, rank.number)
    return {"kv_heads": held.count, "head_start": held.start, "total_heads": model.kv_heads, "replicas": held.replicas}


def _draft(draft: TinyModel | None, rank: Rank) -> DraftSpec | None:
    if draft is None:
        return None
    return DraftSpec(layers=len(draft.main), head_dim=draft.dims[0], **_heads(draft, rank))
