"""The demo's retracting engine: more requests than its pool can hold, so that they take turns in it.

A scheduler loop like an engine's, with prefill and decode in one. The request that has been running longest is
offloaded if its turn is over and another one waits, or if a running one needs a page and none is free. It continues in
whatever pages it is restored to. A copy blocks nothing but its own request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from examples.demo.engine import Engine, Pages, Request, Setup, start
from examples.demo.messages import Prefilled, Prompt, Restored, Retracted, Tell, pages_of
from examples.demo.model import compute
from kvferry.clients import TierOperation, pages
from kvferry.protocol.errors import InternalError
from kvferry.protocol.events import TierDone

QUIET_S: Final = 120.0
TURN_TOKENS: Final = 4
"""Tokens that a request makes before it may be retracted for one that waits."""
MIB: Final = 1 << 20


def too_few_pages(prompts: Sequence[Prompt], page_size: int) -> int:
    """Return the size of a pool that fits each prompt alone, but not all of them: about half of what they need."""
    needed = [prompt.most_pages(page_size) for prompt in prompts]
    return max(*needed, sum(needed) // 2)


def tiers_config(prompts: Sequence[Prompt], page_size: int, page_bytes: int) -> str:
    """Return the configuration of a daemon whose host tier holds all of the prompts' pages, as TOML."""
    size_bytes = sum(prompt.most_pages(page_size) for prompt in prompts) * page_bytes
    return f"[tiers]\nhost_bytes = {-(-size_bytes // MIB) * MIB}\n"


class _Request(Request):
    """A request that may have to leave.

    Attributes:
        snapshot: where K and V are while the request is retracted; empty before its prefill.
        turn_tokens: how many tokens it has made since it was admitted.
    """

    snapshot = ""
    turn_tokens = 0

    def next_pages(self, page_size: int) -> int:
        """Return how many pages it needs for its next token."""
        return pages_of(len(self.prompt.tokens) + len(self.tokens), page_size)


class RetractEngine:
    """One engine; requests take turns, one token each, so that each is computed as if it were alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages = Pages(engine, seed=3)
        self._free_pages = self._pages.count
        self._waiting: deque[_Request] = deque()
        self._running: deque[_Request] = deque()
        self._offloading: dict[TierOperation, _Request] = {}
        self._restoring: dict[TierOperation, tuple[_Request, list[int]]] = {}

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Compute all prompts.

        Raises:
            InternalError: one of them does not fit into the pool even by itself.
        """
        for prompt in prompts:
            if prompt.most_pages(self._pages.size) > self._pages.count:
                raise InternalError(f"a prompt of {len(prompt.tokens)} tokens does not fit in {self._pages.pool}")
            self._waiting.append(_Request(prompt, self._pages.cache([], 0)))
        stepped = True
        while self._waiting or self._running or self._offloading or self._restoring:
            self._collect_done(0.0 if stepped else QUIET_S)
            self._admit()
            stepped = self._step()

    # -- admission and retraction

    def _admit(self) -> None:
        """Admit the longest waiting requests; if pages are short, retract those whose turn is over."""
        while self._waiting:
            wanted = self._waiting[0].next_pages(self._pages.size) + sum(one.is_full for one in self._running)
            if wanted <= self._free_pages:
                self._enter(self._waiting.popleft())
                continue
            leaving_pages = sum(len(one.pages) for one in self._offloading.values())
            if wanted <= self._free_pages + leaving_pages or not self._retract(TURN_TOKENS):
                return

    def _enter(self, request: _Request) -> None:
        """Compute a prompt, or restore a retracted request into new pages."""
        request.turn_tokens = 0
        if not request.snapshot:
            self._prefill(request)
            return
        ids = self._allocate(len(request.pages))
        lists = [pages(ids, tokens=request.cache.get_seq_length())]
        operation = self._engine.client.restore(
            self._pages.pool, request.snapshot, lists, drop=True, deadline_s=QUIET_S
        )
        self._restoring[operation] = request, ids

    def _retract(self, turn_tokens: int = 0) -> bool:
        """Offload the longest running request, if it has made ``turn_tokens`` in its turn, and release its pages."""
        over = [one for one in self._running if one.turn_tokens >= turn_tokens]
        if not over:
            return False
        request = max(over, key=lambda one: one.turn_tokens)
        self._running.remove(request)
        lists = [pages(request.pages, tokens=request.cache.get_seq_length())]
        operation = self._engine.client.offload(self._pages.pool, lists, release=True, deadline_s=QUIET_S)
        self._offloading[operation] = request
        return True

    def _collect_done(self, timeout_s: float) -> None:
        """Process completed offloads and restores.

        Raises:
            KvferryError: one has failed.
            InternalError: none was completed within ``timeout_s``, unless that is 0.
        """
        if not self._engine.client.poll(timeout_s) and timeout_s:
            raise InternalError(f"no page moved within {timeout_s:g} s")
        for operation in [one for one in self._offloading if one.is_done]:
            self._offloaded(self._offloading.pop(operation), operation.outcome())
        for operation in [one for one in self._restoring if one.is_done]:
            self._restored(*self._restoring.pop(operation), operation.outcome())

    def _offloaded(self, request: _Request, done: TierDone) -> None:
        count = len(request.pages)
        self._free_pages += count
        request.snapshot = done.snapshot
        self._waiting.append(request)
        request_id, tokens = request.prompt.request_id, len(request.tokens)
        self._engine.tell(Retracted(request_id, tokens, count, done.moved_bytes, offload_s=_seconds(done)))

    def _restored(self, request: _Request, ids: list[int], done: TierDone) -> None:
        others = sum(new != old for new, old in zip(ids, request.pages, strict=True))
        request.pages[:] = ids
        self._running.append(request)
        request_id = request.prompt.request_id
        self._engine.tell(Restored(request_id, len(ids), others, done.moved_bytes, restore_s=_seconds(done)))

    # -- tokens

    def _prefill(self, request: _Request) -> None:
        began = time.monotonic()
        request.pages.extend(self._allocate(request.next_pages(self._pages.size)))
        logits = compute(self._engine.model, torch.tensor(request.prompt.tokens), request.cache)
        request.started = time.monotonic()
        self._engine.tell(Prefilled(request.prompt.request_id, request.started - began, sent_at=request.started))
        self._go_on(request, int(logits[-1].argmax()))

    def _step(self) -> bool:
        """Make one token of the first request that has a page for it; return False if none has."""
        for _ in range(len(self._running)):
            request = self._running.popleft()
            if self._has_page(request):
                self._go_on(request, request.next_token(self._engine.model))
                return True
            self._running.append(request)
        return False

    def _has_page(self, request: _Request) -> bool:
        """Return whether a request has a page for its next token; allocate one if possible, else retract a request."""
        if not request.is_full:
            return True
        if self._free_pages:
            request.pages.extend(self._allocate(1))
            return True
        if not self._offloading:
            self._retract()
        return False

    def _go_on(self, request: _Request, token: int) -> None:
        """Queue the request for its next token, or finish it."""
        request.turn_tokens += 1
        if not request.add(token, self._engine):
            self._running.append(request)
            return
        self._pages.free(request.pages)
        self._free_pages += len(request.pages)

    def _allocate(self, count: int) -> list[int]:
        self._free_pages -= count
        return self._pages.allocate(count)


def _seconds(done: TierDone) -> float:
    """Return how long an operation took, from the request to the last copy."""
    return (done.waited_us + done.moved_us) / 1e6


def run(tell: Tell, setup: Setup, prompts: Sequence[Prompt]) -> None:
    """Be the retracting engine."""
    engine = start(tell, setup)
    with engine.client:
        RetractEngine(engine).run(prompts)
