"""Messages between the demo's router and its engines, as JSON lines on standard input and output.

Only prompts, tokens and times: the KV cache, the first token and completion go through kvferry alone. Times are
seconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of every line."""


class Prompt(Line, frozen=True, kw_only=True):
    """Router to engine: a prompt to process. The end of input means that there are no more."""

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int


class Ready(Line, frozen=True, kw_only=True):
    """Engine: the model is loaded, the pool is mapped."""

    load_s: float


class Prefilled(Line, frozen=True, kw_only=True):
    """Prefill engine: the last SEND of a prompt was submitted. Retracting engine: its first token was computed."""

    request_id: str
    prefill_s: float
    sent_at: float
    chunks: int
    reused_pages: int


class Arrived(Line, frozen=True, kw_only=True):
    """Decode engine: a prompt's pages have arrived, together with ``first_token``."""

    request_id: str
    arrived_at: float
    first_token: int
    moved_bytes: int


class Token(Line, frozen=True, kw_only=True):
    """Decode engine: one more token of a request."""

    request_id: str
    token: int


class Retracted(Line, frozen=True, kw_only=True):
    """Retracting engine: a request's pages are in the host tier and free again; ``offload_s`` as the daemon reports."""

    request_id: str
    tokens: int
    pages: int
    moved_bytes: int
    offload_s: float


class Restored(Line, frozen=True, kw_only=True):
    """Retracting engine: a request was restored; ``other_pages`` of its pages differ from those that it had."""

    request_id: str
    pages: int
    other_pages: int
    moved_bytes: int
    restore_s: float


class Done(Line, frozen=True, kw_only=True):
    """Decode engine: a request has all its tokens. Reference engine: the same, with the tokens."""

    request_id: str
    decode_s: float
    tokens: tuple[int, ...] = ()


FromEngine = Ready | Prefilled | Arrived | Token | Retracted | Restored | Done

_prompts = msgspec.json.Decoder(Prompt)
_from_engine = msgspec.json.Decoder(FromEngine)


def encode_line(line: Line) -> bytes:
    """Return the encoded line with its newline."""
    return msgspec.json.encode(line) + b"\n"


def decode_line(line: bytes) -> FromEngine:
    """Return an engine's message; raises msgspec.MsgspecError if the line is not one."""
    decoded: FromEngine = _from_engine.decode(line)
    return decoded


def notify(line: Line) -> None:
    """Write a line to the router."""
    sys.stdout.buffer.write(encode_line(line))
    sys.stdout.buffer.flush()


def read_prompts() -> Iterator[Prompt]:
    """Yield the router's prompts until its end of input."""
    for line in sys.stdin.buffer:
        yield _prompts.decode(line)
