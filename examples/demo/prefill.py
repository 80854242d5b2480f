"""The demo's prefill engine: computes prompts chunk by chunk, and sends each chunk's pages while it computes the next.

Full pages are kept as a prefix cache: a prompt with the same prefix as an earlier one sends the same pages again and
computes only the rest. The engine may be one pipeline stage: stages are connected by torch.distributed, pass hidden
states on, and reuse the same pages. The last one computes the first token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, cast

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp, Store, TCPStore  # type: ignore[attr-defined]

from examples.demo.engine import Engine, Pages, Setup, start
from examples.demo.hosts import UPLINK
from examples.demo.messages import Prefilled, Prompt, Tell, pages_of
from examples.demo.model import compute
from examples.demo.paged_cache import PagedCache
from kvferry.clients import Transfer, pages
from kvferry.protocol.errors import PoolFullError

CHUNK_PAGES: Final = 2
TRANSFER_DEADLINE_S: Final = 1800.0
"""Long enough for decode to have free pages, however many prompts are ahead."""
LOOK_S: Final = 1.0
STAGE_TIMEOUT: Final = timedelta(seconds=600)
"""Longer than any computation of another stage."""


class PrefillEngine:
    """One engine; it processes prompts one by one, all stages in the same order."""

    def __init__(self, engine: Engine, stages: ProcessGroup | None = None) -> None:
        """Compute with an engine that has a whole model, or the stage with its rank in ``stages``."""
        self._engine = engine
        self._pages = Pages(engine, seed=1)
        self._stages = stages
        self._is_last = stages is None or stages.rank() == stages.size() - 1
        self._prefix: dict[tuple[int, ...], int] = {}
        self._in_flight: dict[Transfer, list[int]] = {}

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Send all prompts, wait until every transfer has settled, then free the cached pages."""
        for prompt in prompts:
            self._prefill(prompt)
        while self._in_flight:
            self._collect(LOOK_S)
        self._evict(keep=[])

    def _prefill(self, prompt: Prompt) -> None:
        """Compute a prompt and send it; return when its last chunk is submitted."""
        started, size, length = time.monotonic(), self._pages.size, len(prompt.tokens)
        reused = self._agreed(self._reusable(prompt.tokens))
        ids = reused + self._allocate(pages_of(length, size) - len(reused), keep=reused)
        cache = self._pages.cache(ids, len(reused) * size)
        begins = range(len(reused) * size, length, CHUNK_PAGES * size)
        sent_pages = 0
        for begin in begins:
            self._collect()
            end = min(begin + begins.step, length)
            output = self._compute(prompt.tokens[begin:end], cache)
            is_first_token = self._is_last and end == length
            first_token = int(output[-1].argmax()) if is_first_token else None
            now = time.monotonic()
            transfer = self._send(prompt.request_id, ids, sent_pages, end, last=end == length, first_token=first_token)
            sent_pages = end // size
            if end == length:
                self._in_flight[transfer] = self._keep_full_pages(prompt.tokens, ids)
            if is_first_token:
                self._engine.tell(Prefilled(prompt.request_id, now - started, now, len(begins), len(reused)))

    def _send(
        self, request_id: str, ids: list[int], first_page: int, end: int, *, last: bool, first_token: int | None
    ) -> Transfer:
        """Send the pages from ``first_page`` up to token ``end``."""
        size = self._pages.size
        chunk = ids[first_page : pages_of(end, size)]
        return self._engine.client.send(
            self._pages.pool,
            request_id,
            [pages(chunk, first_page=first_page, tokens=end - first_page * size)],
            last=last,
            first_token=first_token,
            deadline_s=TRANSFER_DEADLINE_S,
        )

    def _agreed(self, reusable: list[int]) -> list[int]:
        """Return the reusable pages that all stages have: if one computes a page, all later ones must."""
        if self._stages is None:
            return reusable
        count = torch.tensor(len(reusable))
        self._stages.allreduce(count, ReduceOp.MIN).wait()
        return reusable[: int(count)]

    def _compute(self, tokens: tuple[int, ...], cache: PagedCache) -> torch.Tensor:
        """Return the last token's logits ``(1, vocabulary)``, or the hidden states sent to the next stage."""
        inputs, stages = torch.tensor(tokens), self._stages
        if stages is not None and stages.rank() > 0:
            inputs = torch.empty(len(tokens), self._engine.model.config.hidden_size)
            stages.recv([inputs], stages.rank() - 1, 0).wait()
        output = compute(self._engine.model, inputs, cache, only_last=self._is_last)
        if stages is not None and not self._is_last:
            stages.send([output], stages.rank() + 1, 0).wait()
        return output

    def _reusable(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the cached pages of the prompt's prefix; leaves at least one token to compute."""
        found: list[int] = []
        for end in range(self._pages.size, len(tokens), self._pages.size):
            page = self._prefix.get(tokens[:end])
            if page is None:
                break
            found.append(page)
        return found

    def _keep_full_pages(self, tokens: tuple[int, ...], ids: list[int]) -> list[int]:
        """Add the prompt's full pages to the prefix cache; return the pages that are not cached, to be freed."""
        spare = []
        for number, page in enumerate(ids):
            end = (number + 1) * self._pages.size
            if end > len(tokens) or self._prefix.setdefault(tokens[:end], page) != page:
                spare.append(page)
        return spare

    def _allocate(self, count: int, *, keep: list[int]) -> list[int]:
        """Return new pages; where there are none, give the prefix cache up but for ``keep``, then wait."""
        while True:
            try:
                return self._pages.allocate(count)
            except PoolFullError:
                if not self._evict(keep):
                    if not self._in_flight:
                        raise
                    self._collect(LOOK_S)

    def _evict(self, keep: list[int]) -> bool:
        """Free the cached pages except ``keep``; return whether there were any."""
        evicted = [page for page in self._prefix.values() if page not in keep]
        self._pages.free(evicted)
        self._prefix = {tokens: page for tokens, page in self._prefix.items() if page in keep}
        return bool(evicted)

    def _collect(self, timeout_s: float = 0.0) -> None:
        """Free the pages of settled transfers; raise the error of a failed one."""
        for transfer in self._engine.client.poll(timeout_s):
            if transfer.error is not None:
                raise transfer.error
        for transfer in [one for one in self._in_flight if one.is_settled]:
            self._pages.free(self._in_flight.pop(transfer))


def connect_stages(store: Store, stage: int, stages: int) -> ProcessGroup:
    """Return the group of all stages, which find each other in ``store``."""
    return cast("ProcessGroup", ProcessGroupGloo(store, stage, stages, STAGE_TIMEOUT))


def run(tell: Tell, setup: Setup, prompts: Sequence[Prompt], first_stage: tuple[str, int]) -> None:
    """Be the prefill engine, or a stage of it; ``first_stage`` is where the first one listens."""
    engine = start(tell, setup)
    stages = None
    if setup.stages > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = UPLINK
        store = TCPStore(*first_stage, setup.stages, is_master=setup.stage == 0, timeout=STAGE_TIMEOUT)
        stages = connect_stages(store, setup.stage, setup.stages)
    with engine.client:
        PrefillEngine(engine, stages).run(prompts)
