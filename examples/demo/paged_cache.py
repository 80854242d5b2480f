"""A transformers cache that keeps K and V only in the pages of a kvferry pool."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class PagedSequence:
    """One request's pages, and thereby the slot of each of its tokens.

    Attributes:
        page_ids: the request's pages in logical order. More can be appended; others, holding the same tokens, can take
            their place.
        page_size: tokens of a page.
        length: tokens written before the first forward pass.
    """

    def __init__(self, page_ids: list[int], page_size: int, length: int) -> None:
        self.page_ids = page_ids
        self.page_size = page_size
        self.length = length

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the pages can hold."""
        return len(self.page_ids) * self.page_size

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Return the token slots of positions ``start`` to ``stop``: page * page_size + offset, ``(n,)`` int64.

        Raises:
            ValueError: the pages do not hold that many tokens.
        """
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens do not fit in {len(self.page_ids)} pages of {self.page_size}")
        positions = torch.arange(start, stop)
        return torch.tensor(self.page_ids)[positions // self.page_size] * self.page_size + positions % self.page_size


class PagedLayer(DynamicLayer):
    """One layer's K and V, read and written in place."""

    is_sliding = False

    def __init__(self, k_pages: torch.Tensor, v_pages: torch.Tensor, sequence: PagedSequence) -> None:
        """Use one layer of a pool: ``(pages, page_size, heads, dim)`` each."""
        super().__init__()
        self.is_initialized = True
        self._k = k_pages.flatten(0, 1)
        self._v = v_pages.flatten(0, 1)
        self._sequence = sequence
        self._length = sequence.length

    def lazy_initialization(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401  transformers' own signature
        """Do nothing: the pool's memory exists."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,  # noqa: ANN401  transformers' own signature
        **_kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens ``(1, heads, n, dim)`` to their pages; return all tokens, gathered from the pages."""
        stop = self._length + key_states.shape[2]
        new = self._sequence.slots(self._length, stop)
        self._k[new] = key_states[0].transpose(0, 1)
        self._v[new] = value_states[0].transpose(0, 1)
        self._length = stop
        every = self._sequence.slots(0, stop)
        return _gathered(self._k, every), _gathered(self._v, every)

    def get_seq_length(self) -> int:
        """Return the tokens written so far."""
        return self._length


class PagedCache(Cache):
    """All layers of one request."""

    def __init__(self, k_pool: torch.Tensor, v_pool: torch.Tensor, sequence: PagedSequence) -> None:
        """Use a pool: ``(layers, pages, page_size, heads, dim)`` each."""
        self.sequence = sequence
        layers: list[Any] = [PagedLayer(k, v, sequence) for k, v in zip(k_pool, v_pool, strict=True)]
        super().__init__(layers=layers)


def _gathered(tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the slots' tokens as ``(1, heads, n, dim)``."""
    return tokens[slots].transpose(0, 1).contiguous()[None]
