"""Ranks and stages of MiniMax's pools that differ: keys and values go by heads, an indexer's keys as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch

from tests.kit.daemons import Daemon
from tests.sglang.in_process import PAGE, sparse_pool
from tests.sglang.test_ranks import FROM, SPLIT, TO, TOKENS, TOPOLOGIES, WHOLE, Place, Rank, sides

DIM: Final = 8
INDEX_DIM: Final = 16
SPARSE: Final = (3, 4, 6, 9, 11, 14)
"""Layers with an index: some of each stage's."""
SOURCE: Final = [np.array(FROM)] * 2
DESTINATION: Final = [np.array(TO)] * 2
"""As SGLang lists the pages of the index, and those of the other layers' keys and values."""


class Content(NamedTuple):
    """A prompt's KV, (2, layers, pages, slots, heads, dim), and an indexer's keys, (layers, pages, slots, 1, dim)."""

    main: torch.Tensor
    keys: torch.Tensor


def pool_of(place: Place) -> Any:  # noqa: ANN401  SGLang's class
    layers = {"dense_layer_ids": [one for one in range(*WHOLE) if one not in SPARSE], "sparse_layer_ids": [*SPARSE]}
    return sparse_pool(
        **layers,
        disable_value_sparse_layer_ids=[*SPARSE],
        size=TOKENS,
        head_num=place.heads.stop - place.heads.start,
        head_dim=DIM,
        idx_head_dim=INDEX_DIM,
        start_layer=place.layers.start,
        end_layer=place.layers.stop,
    )


def parts(rank: Rank, content: Content) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of SGLang's by pages, (layers, pages, slots, heads, dim), and what belongs in it."""
    layers, pool = rank.place.layers, rank.sglang
    tensors = pool.main_pool.k_buffer_tensor, pool.main_pool.v_buffer_tensor, pool.index_k_pool.k_buffer_tensor
    main = content.main[:, layers.start : layers.stop, :, :, rank.place.heads]
    index = content.keys[[one for one in SPARSE if one in layers]]
    for tensor, part in zip(tensors, (*main, index), strict=True):
        yield tensor.view(len(part), -1, PAGE, *part.shape[3:]), part.to(tensor.dtype)


def write(ranks: list[Rank], content: Content) -> None:
    for rank in ranks:
        for pages, part in parts(rank, content):
            pages[:, FROM] = part.to(pages.device)


def have(ranks: list[Rank], content: Content) -> list[bool]:
    """Return whether each rank has its part of a prompt."""
    return [all(torch.equal(pages[:, TO].cpu(), part) for pages, part in parts(rank, content)) for rank in ranks]


@pytest.mark.parametrize("topology", SPLIT)
def test_every_rank_and_stage_of_decode_gets_its_layers_heads_and_index(
    daemon: Daemon, name: str, topology: str
) -> None:
    one, chance = TOPOLOGIES[topology], torch.Generator().manual_seed(1)
    content = Content(
        torch.rand((2, *WHOLE, len(FROM), PAGE, one.heads, DIM), generator=chance),
        torch.rand((*WHOLE, len(FROM), PAGE, 1, INDEX_DIM), generator=chance),
    )
    with sides(daemon, name, one, pool_of) as both:
        write(both.prefill, content)
        assert not any(have(both.decode, content))
        transfer = partial(both.transfer, SOURCE, DESTINATION)
        transfer()
        assert all(have(both.decode, content))
        for part in content._fields:
            write(both.prefill, content._replace(**{part: torch.zeros_like(getattr(content, part))}))
            transfer()
            assert not any(have(both.decode, content)), f"its {part} counts"
