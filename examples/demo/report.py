"""The demo's output: texts as they stream, timings, bytes, and whether all tokens are identical."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from examples.demo.messages import Arrived, Done, Prefilled, Restored, Retracted, Token

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

    def prefilled(self, line: Prefilled) -> None:
        """Record the prefill of a prompt."""
        request = self.requests[line.request_id]
        request.prefill_ms = line.prefill_s * 1000
        request.chunks, request.reused_pages = line.chunks, line.reused_pages
        self._sent_at[line.request_id] = line.sent_at
        self._set_transfer(line.request_id)
        reused = f", {line.reused_pages} pages reused" if line.reused_pages else ""
        print(f"  {request.number:2} prefilled {request.prompt_tokens} tokens in {line.chunks} chunks{reused}")

    def arrived(self, line: Arrived) -> None:
        """Record the arrival of a prompt's pages."""
        self.requests[line.request_id].moved_bytes = line.moved_bytes
        self._arrived_at[line.request_id] = line.arrived_at
        self._set_transfer(line.request_id)

    def token(self, line: Token) -> None:
        """Record a token, and show the text every few tokens."""
        request = self.requests[line.request_id]
        request.tokens.append(line.token)
        if len(request.tokens) - self._shown.get(line.request_id, 0) >= SHOW_EVERY:
            self._show(line.request_id)

    def retracted(self, line: Retracted) -> None:
        """Record a request's retraction."""
        request = self.requests[line.request_id]
        request.retracted += 1
        request.offload_ms += line.offload_s * 1000
        request.moved_bytes += line.moved_bytes
        print(f"  {request.number:2} <- retracted after {line.tokens} tokens: {line.pages} pages to the host tier")

    def restored(self, line: Restored) -> None:
        """Record a request's restore."""
        request = self.requests[line.request_id]
        request.restored += 1
        request.restore_ms += line.restore_s * 1000
        request.moved_bytes += line.moved_bytes
        print(f"  {request.number:2} -> restored: {line.pages} pages, {line.other_pages} of them other ones")

    def done(self, line: Done) -> None:
        """Record the end of a request, and show the rest of its text."""
        self._show(line.request_id)
        request = self.requests[line.request_id]
        request.decode_ms = line.decode_s * 1000
        request.text = self._text(request.tokens)

    def reference(self, line: Done) -> None:
        """Record the reference's tokens of a request, and compare."""
        request = self.requests[line.request_id]
        request.reference = list(line.tokens)
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

    def _set_transfer(self, request_id: str) -> None:
        """Set the transfer time once both engines' lines are there; either may come first."""
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


def table(totals: Totals) -> Iterator[str]:
    """Yield the lines of the table of all requests."""
    yield " nr  prompt                    tokens  chunks  reused  prefill ms  transfer ms  decode ms  tokens/s      MiB"
    for one in totals.requests:
        rate = (len(one.tokens) - 1) / one.decode_ms * 1000 if one.decode_ms else 0.0
        yield (
            f" {one.number:2}  {one.shows:24}  {one.prompt_tokens:6}  {one.chunks:6}  {one.reused_pages:6}  "
            f"{one.prefill_ms or 0:10.0f}  {one.transfer_ms or 0:11.1f}  {one.decode_ms or 0:9.0f}  {rate:8.1f}  "
            f"{one.moved_bytes / MIB:7.1f}"
        )
    yield (
        f" {totals.moved_bytes / MIB:.1f} MiB handed over, median {totals.transfer_ms_median:.1f} ms from last SEND to "
        f"decode's finished event; {totals.seconds:.0f} s in all"
    )


def retraction_table(totals: Totals) -> Iterator[str]:
    """Yield the lines of the table of a run whose requests had to take turns."""
    yield " nr  prompt                    tokens  prefill ms  decode ms  retracted  offload ms  restore ms      MiB"
    for one in totals.requests:
        yield (
            f" {one.number:2}  {one.shows:24}  {one.prompt_tokens:6}  {one.prefill_ms or 0:10.0f}  "
            f"{one.decode_ms or 0:9.0f}  {one.retracted:9}  {one.offload_ms / max(one.retracted, 1):10.1f}  "
            f"{one.restore_ms / max(one.restored, 1):10.1f}  {one.moved_bytes / MIB:7.1f}"
        )
    yield (
        f" {totals.retracted} times a request was retracted and {totals.restored} times one was restored, each in the "
        f"milliseconds given; {totals.moved_bytes / MIB:.1f} MiB moved; {totals.seconds:.0f} s in all"
    )
