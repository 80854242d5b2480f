"""What the demo tells its engines, what they tell it, and its error.

Only prompts, tokens and times: the KV cache, the first token and completion go through kvferry alone. Times are
seconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec


class DemoError(Exception):
    """The demo failed. The text says why in one line; ``details`` are further lines, such as the end of a log."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details


class Prompt(msgspec.Struct, frozen=True):
    """A prompt to process."""

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that it can need; the last token's K and V are never computed."""
        return pages_of(len(self.tokens) + self.max_new_tokens - 1, page_size)


class Ready(msgspec.Struct, frozen=True):
    """The model is loaded, the pool is mapped."""

    load_s: float


class Prefilled(msgspec.Struct, frozen=True):
    """Prefill engine: the last SEND of a prompt was submitted. Retracting engine: its first token was computed."""

    request_id: str
    prefill_s: float
    sent_at: float
    chunks: int = 1
    reused_pages: int = 0


class Arrived(msgspec.Struct, frozen=True):
    """Decode engine: a prompt's pages have arrived, together with the first token."""

    request_id: str
    arrived_at: float
    moved_bytes: int


class Token(msgspec.Struct, frozen=True):
    """One more token of a request."""

    request_id: str
    token: int


class Retracted(msgspec.Struct, frozen=True):
    """Retracting engine: a request's pages are in the host tier and free again; ``offload_s`` as the daemon reports."""

    request_id: str
    tokens: int
    pages: int
    moved_bytes: int
    offload_s: float


class Restored(msgspec.Struct, frozen=True):
    """Retracting engine: a request was restored; ``other_pages`` of its pages differ from those that it had."""

    request_id: str
    pages: int
    other_pages: int
    moved_bytes: int
    restore_s: float


class Done(msgspec.Struct, frozen=True):
    """A request has all its tokens."""

    request_id: str
    decode_s: float


class Reference(msgspec.Struct, frozen=True):
    """Plain ``generate()`` of a prompt gives these tokens."""

    request_id: str
    tokens: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True):
    """The engine ends with an error."""

    reason: str


Message: TypeAlias = Ready | Prefilled | Arrived | Token | Retracted | Restored | Done | Reference | Failed
Tell: TypeAlias = Callable[[Message], None]


def pages_of(tokens: int, page_size: int) -> int:
    """Return how many pages so many tokens need."""
    return -(-tokens // page_size)
