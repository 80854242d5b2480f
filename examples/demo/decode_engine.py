"""The demo's decode engine: posts receive requests for all prompts, and decodes each from its received pages.

A scheduler loop like an engine's: it polls transfers without blocking, then computes one token of one request.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from examples.demo.engine import Engine, arguments, start
from examples.demo.messages import Arrived, Done, Prompt, Token, notify, read_prompts
from examples.demo.paged_cache import PagedCache, PagedSequence
from kvferry.clients.calls import pages
from kvferry.protocol.client_core import Transfer
from kvferry.protocol.errors import InternalError

TRANSFER_DEADLINE_S: Final = 1800.0
"""Long enough for prefill to compute all earlier prompts."""
QUIET_S: Final = 120.0


class _Request:
    """One prompt: its pages, then its tokens."""

    def __init__(self, prompt: Prompt, sequence: PagedSequence, cache: PagedCache) -> None:
        self.prompt = prompt
        self.sequence = sequence
        self.cache = cache
        self.tokens: list[int] = []
        self.started = 0.0


class DecodeEngine:
    """One engine; requests take turns, one token each, so that each is computed as if it were alone."""

    def __init__(self, engine: Engine, *, sources: int = 1, source_daemons: Sequence[str] = ()) -> None:
        """Receive from ``sources`` pools, of ``source_daemons`` or, if none are given, of this engine's own daemon."""
        self._client = engine.client
        self._model = engine.model
        self._sources = sources
        self._source_daemons = tuple(source_daemons)
        self._pool = engine.pool.name
        self._page_size = engine.pool.page_size
        self._k = engine.pool.tensor("main", "k")
        self._v = engine.pool.tensor("main", "v")
        self._eos = engine.model.config.eos_token_id
        self._unreserved_pages = engine.pool.manifest.pages - 1
        self._backlog: deque[Prompt] = deque()
        self._transfers: dict[Transfer, _Request] = {}
        self._decoding: deque[_Request] = deque()
        self._shuffle = random.Random(2)  # noqa: S311  so that no page order is right by accident

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt, and receive it as soon as there are pages."""
        self._backlog.append(prompt)
        self._receive_all()

    def run(self) -> None:
        """Decode until every prompt is done."""
        while self._backlog or self._transfers or self._decoding:
            self._take_arrivals(0.0 if self._decoding else QUIET_S)
            if self._decoding:
                self._step(self._decoding.popleft())
            self._receive_all()

    def _receive_all(self) -> None:
        """Receive into new pages, for as many prompts as can also be decoded to the end without waiting for pages."""
        while self._backlog and self._most_pages(self._backlog[0]) <= self._unreserved_pages:
            prompt = self._backlog.popleft()
            self._unreserved_pages -= self._most_pages(prompt)
            ids = self._allocate(-(-len(prompt.tokens) // self._page_size))
            transfer = self._receive(prompt, ids)
            sequence = PagedSequence(torch.tensor(ids), self._page_size, len(prompt.tokens))
            self._transfers[transfer] = _Request(prompt, sequence, PagedCache(self._k, self._v, sequence))
        if self._backlog and not self._transfers and not self._decoding:
            raise InternalError(f"a prompt of {len(self._backlog[0].tokens)} tokens does not fit in {self._pool}")

    def _receive(self, prompt: Prompt, ids: list[int]) -> Transfer:
        """Post the receive request of a prompt, into these pages."""
        return self._client.receive(
            self._pool,
            prompt.request_id,
            [pages(ids, tokens=len(prompt.tokens))],
            sources=self._sources,
            source_daemons=self._source_daemons,
            deadline_s=TRANSFER_DEADLINE_S,
        )

    def _most_pages(self, prompt: Prompt) -> int:
        """Return the most pages that a request can need; the last token's K and V are never computed."""
        return -(-(len(prompt.tokens) + prompt.max_new_tokens - 1) // self._page_size)

    def _allocate(self, count: int) -> list[int]:
        """Return new pages filled with NaN, so that missing data cannot go unnoticed."""
        ids: list[int] = self._client.allocate(self._pool, count).tolist()
        self._shuffle.shuffle(ids)
        self._k[:, ids] = float("nan")
        self._v[:, ids] = float("nan")
        return ids

    def _take_arrivals(self, timeout_s: float) -> None:
        changed = self._client.poll(timeout_s)
        if not changed and timeout_s:
            raise InternalError(f"no transfer moved within {timeout_s:g} s")
        for transfer in changed:
            if transfer.error is not None:
                raise transfer.error
            if (
                isinstance(transfer, Transfer)
                and transfer.finished
                and (request := self._transfers.pop(transfer, None))
            ):
                self._begin(request, transfer)

    def _begin(self, request: _Request, transfer: Transfer) -> None:
        finished = transfer.outcome()
        if finished.first_token is None:
            raise InternalError(f"request {finished.request_id} came without its first token")
        request.started = time.monotonic()
        notify(
            Arrived(
                request_id=finished.request_id,
                arrived_at=request.started,
                first_token=finished.first_token,
                moved_bytes=finished.moved_bytes,
            )
        )
        request.tokens.append(finished.first_token)
        self._go_on(request)

    def _step(self, request: _Request) -> None:
        if request.cache.get_seq_length() == request.sequence.capacity:
            request.sequence.append(self._allocate(1))
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([[request.tokens[-1]]]), past_key_values=request.cache, use_cache=True
            ).logits
        request.tokens.append(int(logits[0, -1].argmax()))
        self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        """Report the newest token; queue the request for the next one, or finish it."""
        request_id = request.prompt.request_id
        notify(Token(request_id=request_id, token=request.tokens[-1]))
        if request.tokens[-1] != self._eos and len(request.tokens) < request.prompt.max_new_tokens:
            self._decoding.append(request)
            return
        notify(Done(request_id=request_id, decode_s=time.monotonic() - request.started))
        self._client.free(self._pool, request.sequence.page_ids.numpy())
        self._unreserved_pages += self._most_pages(request.prompt)


def main() -> None:
    """Serve the router's prompts until there are no more."""
    options = arguments()
    engine = start(options)
    with engine.client:
        decode = DecodeEngine(engine, sources=options.sources, source_daemons=options.source_daemon)
        for prompt in read_prompts():
            decode.add(prompt)
        decode.run()


if __name__ == "__main__":
    main()
