"""The demo's retracting engine: more requests than its pool can hold, so that they take turns in it.

A scheduler loop like an engine's, with prefill and decode in one. The request that has been running longest is
offloaded if its turn is over and another one waits, or if a running one needs a page and none is free. It continues in
whatever pages it is restored to. A copy blocks nothing but its own request.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Final

import torch

from examples.demo.engine import Engine, arguments, start
from examples.demo.messages import Done, Prefilled, Prompt, Restored, Retracted, Token, notify, read_prompts
from examples.demo.paged_cache import PagedCache, PagedSequence
from examples.demo.pressure import TURN_TOKENS, most_pages
from examples.demo.stages import compute
from kvferry.clients.calls import pages
from kvferry.protocol.client_core import TierOperation
from kvferry.protocol.errors import InternalError
from kvferry.protocol.events import TierDone

QUIET_S: Final = 120.0


class _Request:
    """One prompt: where its K and V are, and its tokens so far.

    Attributes:
        snapshot: where K and V are while the request is retracted; empty before its prefill.
        turn_tokens: how many tokens it has made since it was admitted.
    """

    def __init__(self, prompt: Prompt, sequence: PagedSequence, cache: PagedCache) -> None:
        self.prompt = prompt
        self.sequence = sequence
        self.cache = cache
        self.tokens: list[int] = []
        self.snapshot = ""
        self.started = 0.0
        self.turn_tokens = 0

    @property
    def is_full(self) -> bool:
        """Return whether its next token needs another page."""
        return self.cache.get_seq_length() == self.sequence.capacity

    @property
    def next_pages(self) -> int:
        """Return how many pages it needs for its next token."""
        return -(-(len(self.prompt.tokens) + len(self.tokens)) // self.sequence.page_size)


class RetractEngine:
    """One engine; requests take turns, one token each, so that each is computed as if it were alone."""

    def __init__(self, engine: Engine) -> None:
        self._client = engine.client
        self._model = engine.model
        self._pool = engine.pool.name
        self._page_size = engine.pool.page_size
        self._k = engine.pool.tensor("main", "k")
        self._v = engine.pool.tensor("main", "v")
        self._eos = engine.model.config.eos_token_id
        self._pages = self._free_pages = engine.pool.manifest.pages - 1
        self._waiting: deque[_Request] = deque()
        self._running: deque[_Request] = deque()
        self._offloading: dict[TierOperation, _Request] = {}
        self._restoring: dict[TierOperation, tuple[_Request, list[int]]] = {}
        self._shuffle = random.Random(3)  # noqa: S311  so that no page order is right by accident

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt.

        Raises:
            InternalError: it does not fit into the pool even by itself.
        """
        if most_pages(prompt, self._page_size) > self._pages:
            raise InternalError(f"a prompt of {len(prompt.tokens)} tokens does not fit in {self._pool}")
        sequence = PagedSequence(torch.empty(0, dtype=torch.int64), self._page_size, 0)
        self._waiting.append(_Request(prompt, sequence, PagedCache(self._k, self._v, sequence)))

    def run(self) -> None:
        """Compute until every prompt is done."""
        stepped = True
        while self._waiting or self._running or self._offloading or self._restoring:
            self._collect_done(0.0 if stepped else QUIET_S)
            self._admit()
            stepped = self._step()

    # -- admission and retraction

    def _admit(self) -> None:
        """Admit the longest waiting requests; if pages are short, retract those whose turn is over."""
        while self._waiting:
            request = self._waiting[0]
            wanted = request.next_pages + sum(one.is_full for one in self._running)
            if wanted <= self._free_pages:
                self._enter(self._waiting.popleft())
                continue
            leaving_pages = sum(len(one.sequence.page_ids) for one in self._offloading.values())
            if wanted <= self._free_pages + leaving_pages or not self._retract(TURN_TOKENS):
                return

    def _enter(self, request: _Request) -> None:
        """Compute a prompt, or restore a retracted request into new pages."""
        request.turn_tokens = 0
        if not request.snapshot:
            self._prefill(request)
            return
        ids = self._allocate(len(request.sequence.page_ids))
        lists = [pages(ids, tokens=request.cache.get_seq_length())]
        operation = self._client.restore(self._pool, request.snapshot, lists, drop=True, deadline_s=QUIET_S)
        self._restoring[operation] = request, ids

    def _retract(self, turn_tokens: int = 0) -> bool:
        """Offload the longest running request, if it has made ``turn_tokens`` in its turn, and release its pages."""
        over = [one for one in self._running if one.turn_tokens >= turn_tokens]
        if not over:
            return False
        request = max(over, key=lambda one: one.turn_tokens)
        self._running.remove(request)
        lists = [pages(request.sequence.page_ids.numpy(), tokens=request.cache.get_seq_length())]
        operation = self._client.offload(self._pool, lists, release=True, deadline_s=QUIET_S)
        self._offloading[operation] = request
        return True

    def _collect_done(self, timeout_s: float) -> None:
        """Process completed offloads and restores.

        Raises:
            KvferryError: one has failed.
            InternalError: none was completed within ``timeout_s``, unless that is 0.
        """
        if not self._client.poll(timeout_s) and timeout_s:
            raise InternalError(f"no page moved within {timeout_s:g} s")
        for operation in [one for one in self._offloading if one.is_done]:
            self._offloaded(self._offloading.pop(operation), operation.outcome())
        for operation in [one for one in self._restoring if one.is_done]:
            self._restored(*self._restoring.pop(operation), operation.outcome())

    def _offloaded(self, request: _Request, done: TierDone) -> None:
        count = len(request.sequence.page_ids)
        self._free_pages += count
        request.snapshot = done.snapshot
        self._waiting.append(request)
        notify(
            Retracted(
                request_id=request.prompt.request_id,
                tokens=len(request.tokens),
                pages=count,
                moved_bytes=done.moved_bytes,
                offload_s=_seconds(done),
            )
        )

    def _restored(self, request: _Request, ids: list[int], done: TierDone) -> None:
        others = sum(new != old for new, old in zip(ids, request.sequence.page_ids.tolist(), strict=True))
        request.sequence.move(ids)
        self._running.append(request)
        notify(
            Restored(
                request_id=request.prompt.request_id,
                pages=len(ids),
                other_pages=others,
                moved_bytes=done.moved_bytes,
                restore_s=_seconds(done),
            )
        )

    # -- tokens

    def _prefill(self, request: _Request) -> None:
        began = time.monotonic()
        request.sequence.append(self._allocate(request.next_pages))
        logits = compute(self._model, torch.tensor(request.prompt.tokens), request.cache, 0, only_last=True)
        request.started = time.monotonic()
        notify(
            Prefilled(
                request_id=request.prompt.request_id,
                prefill_s=request.started - began,
                sent_at=request.started,
                chunks=1,
                reused_pages=0,
            )
        )
        self._go_on(request, logits)

    def _step(self) -> bool:
        """Make one token of the first request that has a page for it; return False if none has."""
        for _ in range(len(self._running)):
            request = self._running.popleft()
            if self._has_page(request):
                last = torch.tensor(request.tokens[-1:])
                length = request.cache.get_seq_length()
                self._go_on(request, compute(self._model, last, request.cache, length, only_last=True))
                return True
            self._running.append(request)
        return False

    def _has_page(self, request: _Request) -> bool:
        """Return whether a request has a page for its next token; allocate one if possible, else retract a request."""
        if not request.is_full:
            return True
        if self._free_pages:
            request.sequence.append(self._allocate(1))
            return True
        if not self._offloading:
            self._retract()
        return False

    def _go_on(self, request: _Request, logits: torch.Tensor) -> None:
        """Add the token with the highest logit and report it; queue the request for the next one, or finish it."""
        request.tokens.append(int(logits[-1].argmax()))
        request.turn_tokens += 1
        request_id = request.prompt.request_id
        notify(Token(request_id=request_id, token=request.tokens[-1]))
        if request.tokens[-1] != self._eos and len(request.tokens) < request.prompt.max_new_tokens:
            self._running.append(request)
            return
        notify(Done(request_id=request_id, decode_s=time.monotonic() - request.started))
        self._client.free(self._pool, request.sequence.page_ids.numpy())
        self._free_pages += len(request.sequence.page_ids)

    def _allocate(self, count: int) -> list[int]:
        """Return new pages filled with NaN, so that missing data cannot go unnoticed."""
        ids: list[int] = self._client.allocate(self._pool, count).tolist()
        self._free_pages -= count
        self._shuffle.shuffle(ids)
        self._k[:, ids] = float("nan")
        self._v[:, ids] = float("nan")
        return ids


def _seconds(done: TierDone) -> float:
    """Return how long an operation took, from the request to the last copy."""
    return (done.waited_us + done.moved_us) / 1e6


def main() -> None:
    """Serve the router's prompts until there are no more."""
    engine = start(arguments())
    with engine.client:
        retract = RetractEngine(engine)
        for prompt in read_prompts():
            retract.add(prompt)
        retract.run()


if __name__ == "__main__":
    main()
