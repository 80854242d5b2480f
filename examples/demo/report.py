"""The demo's output: texts as they stream, timings, bytes, and whether all tokens are identical."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from examples.demo.messages import Arrived, Done, Message, Prefilled, Reference, Restored, Retracted, Token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOW_EVERY = 8
MIB = 1 << 20


class RequestFigures(msgspec.Struct, kw_only=True):
    """One request; times are None until they are known, except for the totals of its offloads and restores."""

    number: int
    shows: str
    prompt_tokens: int
    chunks: int = 0
    reused_pages: int = 0
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    decode_ms: float | None = None
    moved_bytes: int = 0
    retracted: int = 0
    restored: int = 0
    offload_ms: float = 0.0
    restore_ms: float = 0.0
    tokens: list[int] = msgspec.field(default_factory=list)
    reference: list[int] = msgspec.field(default_factory=list)
    text: str = ""

    @property
    def identical(self) -> bool:
        """Return whether the decoded tokens are those of the reference."""
        return bool(self.tokens) and self.tokens == self.reference


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, as ``--json`` writes it. ``ok`` also requires retractions in a run that should have some."""

    ok: bool
    prompts: int
    tokens: int
    identical: bool
    retracted: int
    restored: int
    moved_bytes: int
    transfer_ms_median: float
    seconds: float
    requests: list[RequestFigures]


class Report:
    """Collects the figures and prints progress."""

    def __init__(
        self, requests: Mapping[str, RequestFigures], tokenizer: PreTrainedTokenizerBase, *, retracts: bool = False
    ) -> None:
        """Report on these requests; ``retracts``: some of them must be retracted and restored."""
        self.requests = requests
        self._retracts = retracts
        self._tokenizer = tokenizer
        self._sent_at: dict[str, float] = {}
        self._arrived_at: dict[str, float] = {}
        self._shown: dict[str, int] = {}

    def take(self, message: Message) -> None:  # noqa: C901  a case a message
        """Record what an engine tells, and print it."""
        if not hasattr(message, "request_id"):
            return
        request = self.requests[message.request_id]
        match message:
            case Prefilled(request_id, prefill_s, sent_at, chunks, reused_pages):
                request.prefill_ms, request.chunks, request.reused_pages = prefill_s * 1000, chunks, reused_pages
                self._sent_at[request_id] = sent_at
                self._set_transfer(request_id)
                reused = f", {reused_pages} pages reused" if reused_pages else ""
                print(f"  {request.number:2} prefilled {request.prompt_tokens} tokens in {chunks} chunks{reused}")
            case Arrived(request_id, arrived_at, moved_bytes):
                request.moved_bytes = moved_bytes
                self._arrived_at[request_id] = arrived_at
                self._set_transfer(request_id)
            case Token(request_id, token):
                request.tokens.append(token)
                if len(request.tokens) - self._shown.get(request_id, 0) >= SHOW_EVERY:
                    self._show(request_id)
            case Retracted(_, tokens, pages, moved_bytes, offload_s):
                request.retracted += 1
                request.offload_ms += offload_s * 1000
                request.moved_bytes += moved_bytes
                print(f"  {request.number:2} <- retracted after {tokens} tokens: {pages} pages to the host tier")
            case Restored(_, pages, other_pages, moved_bytes, restore_s):
                request.restored += 1
                request.restore_ms += restore_s * 1000
                request.moved_bytes += moved_bytes
                print(f"  {request.number:2} -> restored: {pages} pages, {other_pages} of them other ones")
            case Done(request_id, decode_s):
                self._show(request_id)
                request.decode_ms = decode_s * 1000
                request.text = self._text(request.tokens)
            case Reference(_, tokens):
                request.reference = list(tokens)
                if request.identical:
                    print(f"  {request.number:2} identical, {len(request.tokens)} tokens")
                else:
                    print(f"  {request.number:2} DIFFERENT: {request.tokens} decoded, {request.reference} expected")

    def totals(self, seconds: float) -> Totals:
        """Return the figures of the whole run."""
        requests = sorted(self.requests.values(), key=lambda one: one.number)
        identical = all(one.identical for one in requests)
        retracted, restored = (sum(getattr(one, what) for one in requests) for what in ("retracted", "restored"))
        return Totals(
            ok=identical and retracted == restored and (retracted > 0) == self._retracts,
            prompts=len(requests),
            tokens=sum(len(one.tokens) for one in requests),
            identical=identical,
            retracted=retracted,
            restored=restored,
            moved_bytes=sum(one.moved_bytes for one in requests),
            transfer_ms_median=statistics.median(one.transfer_ms or 0.0 for one in requests),
            seconds=round(seconds, 3),
            requests=requests,
        )

    def table(self, totals: Totals) -> Iterator[str]:
        """Yield the lines of the table of all requests."""
        yield from _aligned(_turns(totals) if self._retracts else _transfers(totals))
        moved = f"{totals.moved_bytes / MIB:.1f} MiB"
        if self._retracts:
            yield (
                f" {totals.retracted} times a request was retracted and {totals.restored} times one was restored, each "
                f"in the milliseconds given; {moved} moved; {totals.seconds:.0f} s in all"
            )
        else:
            yield (
                f" {moved} handed over, median {totals.transfer_ms_median:.1f} ms from last SEND to decode's finished "
                f"event; {totals.seconds:.0f} s in all"
            )

    def _set_transfer(self, request_id: str) -> None:
        """Set the transfer time once both engines' messages are there; either may come first."""
        if request_id in self._sent_at and request_id in self._arrived_at:
            elapsed_s = self._arrived_at[request_id] - self._sent_at[request_id]
            self.requests[request_id].transfer_ms = max(0.0, elapsed_s * 1000)

    def _show(self, request_id: str) -> None:
        request = self.requests[request_id]
        before = self._text(request.tokens[: self._shown.get(request_id, 0)])
        self._shown[request_id] = len(request.tokens)
        more = self._text(request.tokens)[len(before) :]
        if more:
            print(f"  {request.number:2} | {more!r}", flush=True)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def say(text: str) -> None:
    """Print a line about the demo itself."""
    print(f"demo: {text}", flush=True)


def outcome(totals: Totals, *, ok: bool) -> str:
    """Return the last line of a run."""
    identical = str(totals.identical).lower()
    return f"{'ok' if ok else 'failed'} prompts={totals.prompts} tokens={totals.tokens} identical={identical}"


def _transfers(totals: Totals) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the table of handed over requests."""
    yield "nr", "prompt", "tokens", "chunks", "reused", "prefill ms", "transfer ms", "decode ms", "tokens/s", "MiB"
    for one in totals.requests:
        rate = (len(one.tokens) - 1) / one.decode_ms * 1000 if one.decode_ms else 0.0
        yield (
            *(str(value) for value in (one.number, one.shows, one.prompt_tokens, one.chunks, one.reused_pages)),
            f"{one.prefill_ms or 0:.0f}",
            f"{one.transfer_ms or 0:.1f}",
            f"{one.decode_ms or 0:.0f}",
            f"{rate:.1f}",
            f"{one.moved_bytes / MIB:.1f}",
        )


def _turns(totals: Totals) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the table of requests that had to take turns."""
    yield "nr", "prompt", "tokens", "prefill ms", "decode ms", "retracted", "offload ms", "restore ms", "MiB"
    for one in totals.requests:
        yield (
            *(str(value) for value in (one.number, one.shows, one.prompt_tokens)),
            f"{one.prefill_ms or 0:.0f}",
            f"{one.decode_ms or 0:.0f}",
            f"{one.retracted}",
            f"{one.offload_ms / max(one.retracted, 1):.1f}",
            f"{one.restore_ms / max(one.restored, 1):.1f}",
            f"{one.moved_bytes / MIB:.1f}",
        )


def _aligned(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows as lines: texts to the left, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = (
            f"{cell:{'<' if at == 1 else '>'}{width}}" for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f" {'  '.join(cells)}"
