"""Which logical pages a sliding window holds; ``pools.planning.page_ranges`` pairs those of two sides."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.protocol.errors import InvalidFieldError


class PageWindow(NamedTuple):
    """The logical pages ``[first_page, end_page)``; a token at ``position`` is in page ``position // page_size``."""

    first_page: int
    end_page: int

    @property
    def pages(self) -> int:
        """Return the number of pages."""
        return self.end_page - self.first_page


def window_of(prefix_tokens: int, seq_len: int, window: int, page_size: int) -> PageWindow:
    """Return the logical pages of a sliding window of ``window`` tokens at the end of ``seq_len`` tokens.

    ``[floor(max(prefix_tokens, seq_len - window) / page_size), ceil(seq_len / page_size))``: the destination already
    has the tokens before ``prefix_tokens``.

    Raises:
        InvalidFieldError: a negative number, a window or page of 0 tokens, or a prefix longer than the sequence.
    """
    if not 0 <= prefix_tokens <= seq_len:
        raise InvalidFieldError(f"a prefix of {prefix_tokens} tokens of {seq_len}", field="prefix_tokens")
    for field, tokens in (("window", window), ("page_size", page_size)):
        if tokens < 1:
            raise InvalidFieldError(f"{tokens} tokens, but at least 1 is needed", field=field)
    return PageWindow(max(prefix_tokens, seq_len - window) // page_size, -(-seq_len // page_size))
