"""The demo's prefill engine: computes prompts chunk by chunk, and sends each chunk's pages while it computes the next.

Full pages are kept as a prefix cache: a prompt with the same prefix as an earlier one sends the same pages again and
computes only the rest. The engine may be one pipeline stage: it then receives hidden states from the previous stage,
sends its own to the next one, and all stages reuse the same pages. The last stage computes the first token.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import Final

import torch

from examples.demo.engine import Engine, arguments, start
from examples.demo.messages import Prefilled, Prompt, notify, read_prompts
from examples.demo.paged_cache import PagedCache, PagedSequence
from examples.demo.stage_channel import StageChannel, accept, connect, listen, parsed
from examples.demo.stages import compute
from kvferry.clients.calls import pages
from kvferry.protocol.client_core import Transfer
from kvferry.protocol.errors import PoolFullError

CHUNK_PAGES: Final = 2
TRANSFER_DEADLINE_S: Final = 1800.0
"""Long enough for decode to have free pages, however many prompts are ahead."""
LOOK_S: Final = 1.0


class PrefillEngine:
    """One engine; it processes prompts one by one, all stages in the same order."""

    def __init__(
        self, engine: Engine, *, before: StageChannel | None = None, after: StageChannel | None = None
    ) -> None:
        """Compute with an engine that has a whole model, or a stage with others ``before`` or ``after`` it."""
        self._client = engine.client
        self._model = engine.model
        self._before = before
        self._after = after
        self._pool = engine.pool.name
        self._page_size = engine.pool.page_size
        self._k = engine.pool.tensor("main", "k")
        self._v = engine.pool.tensor("main", "v")
        self._prefix: dict[tuple[int, ...], int] = {}
        self._in_flight: dict[Transfer, list[int]] = {}
        self._shuffle = random.Random(1)  # noqa: S311  so that no page order is right by accident

    def prefill(self, prompt: Prompt) -> None:
        """Compute a prompt and send it; return when its last chunk is submitted."""
        started = time.monotonic()
        reused = self._agreed(prompt.request_id, self._reusable(prompt.tokens))
        ids = reused + self._allocate(-(-len(prompt.tokens) // self._page_size) - len(reused), keep=reused)
        sequence = PagedSequence(torch.tensor(ids), self._page_size, len(reused) * self._page_size)
        cache = PagedCache(self._k, self._v, sequence)
        begins = range(sequence.length, len(prompt.tokens), CHUNK_PAGES * self._page_size)
        sent_pages = 0
        for begin in begins:
            self._collect()
            tokens = prompt.tokens[begin : begin + begins.step]
            output = self._compute(prompt.request_id, tokens, cache, begin)
            end = begin + len(tokens)
            last = end == len(prompt.tokens)
            first_token = int(output[-1].argmax()) if last and not self._after else None
            now = time.monotonic()
            transfer = self._send(prompt.request_id, ids, sent_pages, end, last=last, first_token=first_token)
            sent_pages = end // self._page_size
            if last:
                self._in_flight[transfer] = self._keep_full_pages(prompt.tokens, ids)
            if first_token is not None:
                notify(
                    Prefilled(
                        request_id=prompt.request_id,
                        prefill_s=now - started,
                        sent_at=now,
                        chunks=len(begins),
                        reused_pages=len(reused),
                    )
                )

    def finish(self) -> None:
        """Wait until every transfer has settled, then free the cached pages."""
        while self._in_flight:
            self._collect(LOOK_S)
        self._evict(keep=[])

    def _agreed(self, request_id: str, reusable: list[int]) -> list[int]:
        """Return the reusable pages that all stages have: if one computes a page, all later ones must."""
        count = min(self._before.proposed(request_id), len(reusable)) if self._before else len(reusable)
        if self._after:
            count = self._after.propose(request_id, count)
        if self._before:
            self._before.agree(request_id, count)
        return reusable[:count]

    def _compute(self, request_id: str, tokens: tuple[int, ...], cache: PagedCache, begin: int) -> torch.Tensor:
        """Return the last token's logits ``(1, vocabulary)``, or the hidden states sent to the next stage."""
        inputs = self._before.receive(request_id, begin, len(tokens)) if self._before else torch.tensor(tokens)
        output = compute(self._model, inputs, cache, begin, only_last=self._after is None)
        if self._after:
            self._after.send(request_id, begin, output)
        return output

    def _send(
        self, request_id: str, ids: list[int], first_page: int, end: int, *, last: bool, first_token: int | None
    ) -> Transfer:
        """Send the pages from ``first_page`` up to token ``end``."""
        chunk = ids[first_page : -(-end // self._page_size)]
        return self._client.send(
            self._pool,
            request_id,
            [pages(chunk, first_page=first_page, tokens=end - first_page * self._page_size)],
            last=last,
            first_token=first_token,
            deadline_s=TRANSFER_DEADLINE_S,
        )

    def _reusable(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the cached pages of the prompt's prefix; leaves at least one token to compute."""
        found: list[int] = []
        for end in range(self._page_size, len(tokens), self._page_size):
            page = self._prefix.get(tokens[:end])
            if page is None:
                break
            found.append(page)
        return found

    def _keep_full_pages(self, tokens: tuple[int, ...], ids: list[int]) -> list[int]:
        """Add the prompt's full pages to the prefix cache; return the pages that are not cached, to be freed."""
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
                    self._collect(LOOK_S)
            else:
                self._shuffle.shuffle(ids)
                return ids

    def _evict(self, keep: list[int]) -> bool:
        """Free the cached pages except ``keep``; the daemon frees those in flight when they settle."""
        evicted = {tokens: page for tokens, page in self._prefix.items() if page not in keep}
        if evicted:
            self._client.free(self._pool, list(evicted.values()))
        for tokens in evicted:
            del self._prefix[tokens]
        return bool(evicted)

    def _collect(self, timeout_s: float = 0.0) -> None:
        """Free the pages of settled transfers; raise the error of a failed one."""
        for transfer in self._client.poll(timeout_s):
            if transfer.error is not None:
                raise transfer.error
        for transfer in [one for one in self._in_flight if one.is_settled]:
            spare = self._in_flight.pop(transfer)
            if spare:
                self._client.free(self._pool, spare)


def main() -> None:
    """Serve the router's prompts until there are no more."""
    options = arguments()
    with contextlib.ExitStack() as stack:
        # Before the model is loaded: the previous stage may be ready first.
        listener = stack.enter_context(listen(*parsed(options.listen))) if options.listen else None
        engine = start(options)
        stack.enter_context(engine.client)
        before = stack.enter_context(accept(listener)) if listener else None
        after = stack.enter_context(connect(*parsed(options.next_stage))) if options.next_stage else None
        prefill = PrefillEngine(engine, before=before, after=after)
        for prompt in list(read_prompts()):  # read all at once, so that the router does not block on writing
            prefill.prefill(prompt)
        prefill.finish()


if __name__ == "__main__":
    main()
