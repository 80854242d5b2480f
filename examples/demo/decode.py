"""The demo's decode engine: posts receive requests for all prompts, and decodes each from its received pages.

A scheduler loop like an engine's: it polls transfers without blocking, then computes one token of one request. Requests
take turns, one token each, so that each is computed as if it were alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from examples.demo.engine import Engine, Pages, Request, Setup, start
from examples.demo.messages import Arrived, Prompt, Tell, pages_of
from kvferry.clients import Transfer, pages
from kvferry.protocol.errors import InternalError

TRANSFER_DEADLINE_S: Final = 1800.0
"""Long enough for prefill to compute all earlier prompts."""
QUIET_S: Final = 120.0


class DecodeEngine:
    """One engine; it receives from ``sources`` pools, of ``source_daemons`` or, without any, of its own daemon."""

    def __init__(self, engine: Engine, *, sources: int = 1, source_daemons: Sequence[str] = ()) -> None:
        self._engine = engine
        self._pages = Pages(engine, seed=2)
        self._sources = sources
        self._source_daemons = tuple(source_daemons)
        self._unreserved_pages = self._pages.count
        self._transfers: dict[Transfer, Request] = {}
        self._decoding: deque[Request] = deque()

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Decode all prompts."""
        backlog = deque(prompts)
        while backlog or self._transfers or self._decoding:
            self._receive_some(backlog)
            self._take_arrivals(0.0 if self._decoding else QUIET_S)
            if self._decoding:
                self._step(self._decoding.popleft())

    def _receive_some(self, backlog: deque[Prompt]) -> None:
        """Receive into new pages, for as many prompts as can also be decoded to the end without waiting for pages."""
        while backlog and backlog[0].most_pages(self._pages.size) <= self._unreserved_pages:
            prompt = backlog.popleft()
            self._unreserved_pages -= prompt.most_pages(self._pages.size)
            length = len(prompt.tokens)
            ids = self._pages.allocate(pages_of(length, self._pages.size))
            transfer = self._engine.client.receive(
                self._pages.pool,
                prompt.request_id,
                [pages(ids, tokens=length)],
                sources=self._sources,
                source_daemons=self._source_daemons,
                deadline_s=TRANSFER_DEADLINE_S,
            )
            self._transfers[transfer] = Request(prompt, self._pages.cache(ids, length))
        if backlog and not self._transfers and not self._decoding:
            raise InternalError(f"a prompt of {len(backlog[0].tokens)} tokens does not fit in {self._pages.pool}")

    def _take_arrivals(self, timeout_s: float) -> None:
        changed = self._engine.client.poll(timeout_s)
        if not changed and timeout_s:
            waiting = [f"{one.request_id} waits for {one.waits_for}" for one in self._engine.client.status().transfers]
            raise InternalError(f"no transfer moved within {timeout_s:g} s: {', '.join(waiting) or 'none is live'}")
        for transfer in changed:
            if transfer.error is not None:
                raise transfer.error
            if isinstance(transfer, Transfer) and transfer.finished and transfer in self._transfers:
                self._begin(self._transfers.pop(transfer), transfer)

    def _begin(self, request: Request, transfer: Transfer) -> None:
        """Take the first token, which came with the pages."""
        finished = transfer.outcome()
        if finished.first_token is None:
            raise InternalError(f"request {finished.request_id} came without its first token")
        request.started = time.monotonic()
        self._engine.tell(Arrived(finished.request_id, request.started, finished.moved_bytes))
        self._go_on(request, finished.first_token)

    def _step(self, request: Request) -> None:
        if request.is_full:
            request.pages.extend(self._pages.allocate(1))
        self._go_on(request, request.next_token(self._engine.model))

    def _go_on(self, request: Request, token: int) -> None:
        """Queue the request for its next token, or finish it."""
        if not request.add(token, self._engine):
            self._decoding.append(request)
            return
        self._pages.free(request.pages)
        self._unreserved_pages += request.prompt.most_pages(self._pages.size)


def run(tell: Tell, setup: Setup, prompts: Sequence[Prompt], sources: int, source_daemons: Sequence[str]) -> None:
    """Be the decode engine."""
    engine = start(tell, setup)
    with engine.client:
        DecodeEngine(engine, sources=sources, source_daemons=source_daemons).run(prompts)
