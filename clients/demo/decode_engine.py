"""The demo's decode engine: makes rooms for all prompts, and decodes each from its pages alone once they are there."""

from __future__ import annotations

import random
import time
from collections import deque

import torch

from kvferry.clients.demo.engine import Engine, arguments, start
from kvferry.clients.demo.messages import Arrived, Done, Prompt, Token, read_prompts, tell
from kvferry.clients.demo.paged_cache import PagedCache, PagedSequence
from kvferry.clients.operations import pages
from kvferry.protocol.client_core import HandOff
from kvferry.protocol.errors import InternalError, PoolFullError

DEADLINE_S = 120.0


class _Request:
    """One prompt: its pages, then its tokens."""

    def __init__(self, prompt: Prompt, ids: list[int]) -> None:
        self.prompt = prompt
        self.ids = ids
        self.tokens: list[int] = []
        self.cache: PagedCache | None = None
        self.started = 0.0


class DecodeEngine:
    """One engine; requests in turn, one token each, so that every one is computed as if alone."""

    def __init__(self, engine: Engine) -> None:
        self._client = engine.client
        self._model = engine.model
        self._pool = engine.pool.name
        self._page_size = engine.pool.page_size
        self._k = engine.pool.tensor("main", "k")
        self._v = engine.pool.tensor("main", "v")
        self._eos = engine.model.config.eos_token_id
        self._backlog: deque[Prompt] = deque()
        self._rooms: dict[HandOff, _Request] = {}
        self._decoding: deque[_Request] = deque()
        self._shuffle = random.Random(2)  # noqa: S311  an order that nothing can be right by accident in

    def add(self, prompt: Prompt) -> None:
        """Take a prompt and make a room for it as soon as there are pages."""
        self._backlog.append(prompt)
        self._make_rooms()

    def run(self) -> None:
        """Decode until every prompt is done."""
        while self._backlog or self._rooms or self._decoding:
            self._take_arrivals(0.0 if self._decoding else DEADLINE_S)
            for _ in range(len(self._decoding)):
                self._step(self._decoding.popleft())
            self._make_rooms()

    def _make_rooms(self) -> None:
        while self._backlog:
            prompt = self._backlog[0]
            needed = -(-(len(prompt.tokens) + prompt.max_new_tokens) // self._page_size)
            try:
                ids: list[int] = self._client.allocate(self._pool, needed).tolist()
            except PoolFullError:
                if not self._rooms and not self._decoding:
                    raise
                return
            self._backlog.popleft()
            self._shuffle.shuffle(ids)
            filled = -(-len(prompt.tokens) // self._page_size)
            room = self._client.receive(
                self._pool,
                prompt.request_id,
                [pages(ids[:filled], tokens=len(prompt.tokens))],
                deadline_s=DEADLINE_S,
            )
            self._rooms[room] = _Request(prompt, ids)

    def _take_arrivals(self, timeout_s: float) -> None:
        changed = self._client.poll(timeout_s)
        if not changed and timeout_s:
            raise InternalError(f"no hand-off moved within {timeout_s:g} s")
        for hand_off in changed:
            if hand_off.error is not None:
                raise hand_off.error
            if hand_off.finished is not None and (request := self._rooms.pop(hand_off, None)):
                self._begin(request, hand_off)

    def _begin(self, request: _Request, hand_off: HandOff) -> None:
        finished = hand_off.outcome()
        if finished.first_token is None:
            raise InternalError(f"request {finished.request_id} came without its first token")
        request.started = time.monotonic()
        tell(
            Arrived(
                request_id=finished.request_id,
                arrived_at=request.started,
                first_token=finished.first_token,
                moved_bytes=finished.moved_bytes,
            )
        )
        sequence = PagedSequence(torch.tensor(request.ids), self._page_size, len(request.prompt.tokens))
        request.cache = PagedCache(self._k, self._v, sequence)
        request.tokens.append(finished.first_token)
        self._go_on(request)

    def _step(self, request: _Request) -> None:
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([[request.tokens[-1]]]), past_key_values=request.cache, use_cache=True
            ).logits
        request.tokens.append(int(logits[0, -1].argmax()))
        self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        """Report the newest token; queue the request for the next one, or end it."""
        request_id = request.prompt.request_id
        tell(Token(request_id=request_id, token=request.tokens[-1]))
        if request.tokens[-1] != self._eos and len(request.tokens) < request.prompt.max_new_tokens:
            self._decoding.append(request)
            return
        tell(Done(request_id=request_id, decode_s=time.monotonic() - request.started))
        self._client.free(self._pool, request.ids)


def main() -> None:
    """Serve the router's prompts until there are no more."""
    engine = start(arguments())
    with engine.client:
        decode = DecodeEngine(engine)
        for prompt in read_prompts():
            decode.add(prompt)
        decode.run()


if __name__ == "__main__":
    main()
