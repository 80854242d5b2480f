"""The demo's prefill engine: computes prompts chunk by chunk and sends each chunk's pages while it computes the next.

Full pages are kept as a prefix cache: a prompt that begins like one before sends the same pages again and computes
only the rest.
"""

from __future__ import annotations

import random
import time

import torch

from kvferry.clients.demo.engine import Engine, arguments, start
from kvferry.clients.demo.messages import Prefilled, Prompt, read_prompts, tell
from kvferry.clients.demo.paged_cache import PagedCache, PagedSequence
from kvferry.clients.operations import pages
from kvferry.protocol.client_core import HandOff
from kvferry.protocol.errors import PoolFullError

CHUNK_PAGES = 2
DEADLINE_S = 120.0


class PrefillEngine:
    """One engine; prompts one after another."""

    def __init__(self, engine: Engine) -> None:
        self._client = engine.client
        self._model = engine.model
        self._pool = engine.pool.name
        self._page_size = engine.pool.page_size
        self._k = engine.pool.tensor("main", "k")
        self._v = engine.pool.tensor("main", "v")
        self._prefix: dict[tuple[int, ...], int] = {}
        self._in_flight: dict[HandOff, list[int]] = {}
        self._shuffle = random.Random(1)  # noqa: S311  an order that nothing can be right by accident in

    def prefill(self, prompt: Prompt) -> None:
        """Compute a prompt and send it; returns when its last chunk is on its way."""
        started = time.monotonic()
        reused = self._reusable(prompt.tokens)
        ids = reused + self._allocate(-(-len(prompt.tokens) // self._page_size) - len(reused), keep=reused)
        sequence = PagedSequence(torch.tensor(ids), self._page_size, len(reused) * self._page_size)
        cache = PagedCache(self._k, self._v, sequence)
        sent_pages, chunks = 0, 0
        step = CHUNK_PAGES * self._page_size
        hand_off = None
        for begin in range(sequence.length, len(prompt.tokens), step):
            tokens = prompt.tokens[begin : begin + step]
            with torch.inference_mode():
                logits = self._model(
                    torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1
                ).logits
            end = begin + len(tokens)
            last = end == len(prompt.tokens)
            end_page = -(-end // self._page_size)
            hand_off = self._client.send(
                self._pool,
                prompt.request_id,
                [pages(ids[sent_pages:end_page], first_page=sent_pages, tokens=end - sent_pages * self._page_size)],
                last=last,
                first_token=int(logits[0, -1].argmax()) if last else None,
                deadline_s=DEADLINE_S,
            )
            sent_pages, chunks = end_page, chunks + 1
            self._collect(0.0)
        if hand_off is not None:
            self._in_flight[hand_off] = self._keep_full_pages(prompt.tokens, ids)
        now = time.monotonic()
        tell(
            Prefilled(
                request_id=prompt.request_id,
                prefill_s=now - started,
                sent_at=now,
                chunks=chunks,
                reused_pages=len(reused),
            )
        )

    def finish(self) -> None:
        """Wait until every hand-off has settled."""
        while self._in_flight:
            self._collect(DEADLINE_S)

    def _reusable(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the cached pages of the prompt's prefix; at least one token is left to compute."""
        found: list[int] = []
        for end in range(self._page_size, len(tokens), self._page_size):
            page = self._prefix.get(tokens[:end])
            if page is None:
                break
            found.append(page)
        return found

    def _keep_full_pages(self, tokens: tuple[int, ...], ids: list[int]) -> list[int]:
        """Enter the prompt's full pages into the prefix cache; return the pages that are nobody's then."""
        spare = []
        for number, page in enumerate(ids):
            end = (number + 1) * self._page_size
            if end > len(tokens) or self._prefix.setdefault(tokens[:end], page) != page:
                spare.append(page)
        return spare

    def _allocate(self, count: int, *, keep: list[int]) -> list[int]:
        """Return fresh pages; where there are none, give the prefix cache up but for ``keep``, then wait."""
        while True:
            try:
                ids: list[int] = self._client.allocate(self._pool, count).tolist()
            except PoolFullError:
                if not self._evict(keep):
                    if not self._in_flight:
                        raise
                    self._collect(DEADLINE_S)
            else:
                self._shuffle.shuffle(ids)
                return ids

    def _evict(self, keep: list[int]) -> bool:
        """Free the cached pages but for ``keep``; the daemon frees those in flight when they settle."""
        evicted = {tokens: page for tokens, page in self._prefix.items() if page not in keep}
        if evicted:
            self._client.free(self._pool, list(evicted.values()))
        for tokens in evicted:
            del self._prefix[tokens]
        return bool(evicted)

    def _collect(self, timeout_s: float) -> None:
        """Free the pages of hand-offs that have settled; a failed one ends the engine."""
        for hand_off in self._client.poll(timeout_s):
            if hand_off.error is not None:
                raise hand_off.error
        for hand_off in [one for one in self._in_flight if one.is_settled]:
            spare = self._in_flight.pop(hand_off)
            if spare:
                self._client.free(self._pool, spare)


def main() -> None:
    """Serve the router's prompts until there are no more."""
    engine = start(arguments())
    with engine.client:
        prefill = PrefillEngine(engine)
        for prompt in read_prompts():
            prefill.prefill(prompt)
        prefill.finish()


if __name__ == "__main__":
    main()
