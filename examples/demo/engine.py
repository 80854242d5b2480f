"""What all engines of the demo have: a client with a pool, the model or a stage of it, and requests' pages."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from examples.demo.messages import Done, Prompt, Ready, Tell, Token
from examples.demo.model import compute, cut_stage, load_model, pool_spec
from examples.demo.paged_cache import PagedCache, PagedSequence
from examples.demo.prompts import PAGE_SIZE
from kvferry.clients import AttachedPool, Client, ModelIdentity

THREADS: Final = 1
"""Of torch in each process: tokens are identical only with equal ones everywhere."""


class Setup(NamedTuple):
    """What an engine is told at its start: where its daemon serves, how large its pool is, which stage it is.

    Engines begin ``together``: nobody waits for one that still loads the model.
    """

    model: Path
    runtime_dir: Path
    pool: str
    pool_tokens: int
    together: Barrier | None = None
    stage: int = 0
    stages: int = 1


class Engine(NamedTuple):
    """A client with one pool, a model or one pipeline stage of it, and whom to tell what happens."""

    client: Client
    pool: AttachedPool
    model: Any
    tell: Tell


def start(tell: Tell, setup: Setup) -> Engine:
    """Load the model, open a session, create and map the pool."""
    started = time.monotonic()
    model = load_model(setup.model, THREADS)
    first_layer = cut_stage(model, setup.stage, setup.stages)
    client = Client.connect(setup.runtime_dir, name=setup.pool)
    spec = pool_spec(model.config, setup.pool_tokens, PAGE_SIZE, first_layer)
    pool = client.create_pool(setup.pool, spec, model=ModelIdentity(name=setup.model.resolve().name))
    tell(Ready(load_s=time.monotonic() - started))
    if setup.together is not None:
        setup.together.wait()
    return Engine(client, pool, model, tell)


class Pages:
    """The pool of an engine: pages taken and given back, and caches on them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._client = engine.client
        self._k = engine.pool.tensor("main", "k")
        self._v = engine.pool.tensor("main", "v")
        self._shuffle = random.Random(seed)  # noqa: S311  so that no page order is right by accident
        self.pool = engine.pool.name
        self.size = engine.pool.page_size
        self.count = engine.pool.manifest.pages - 1  # without the padding page

    def allocate(self, count: int) -> list[int]:
        """Return new pages filled with NaN, so that missing data cannot go unnoticed."""
        ids: list[int] = self._client.allocate(self.pool, count).tolist()
        self._shuffle.shuffle(ids)
        self._k[:, ids] = float("nan")
        self._v[:, ids] = float("nan")
        return ids

    def free(self, ids: Sequence[int]) -> None:
        """Give pages back; the daemon frees those that it still reads when it has done so."""
        if ids:
            self._client.free(self.pool, ids)

    def cache(self, ids: Sequence[int], length: int) -> PagedCache:
        """Return the cache of a request whose first ``length`` tokens are in these pages."""
        return PagedCache(self._k, self._v, PagedSequence(list(ids), self.size, length))


class Request:
    """A request that decodes: its prompt, its pages, its tokens so far."""

    def __init__(self, prompt: Prompt, cache: PagedCache) -> None:
        self.prompt = prompt
        self.cache = cache
        self.tokens: list[int] = []
        self.started = 0.0

    @property
    def pages(self) -> list[int]:
        """Return its pages."""
        return self.cache.sequence.page_ids

    @property
    def is_full(self) -> bool:
        """Return whether its next token needs another page."""
        return self.cache.get_seq_length() == self.cache.sequence.capacity

    def next_token(self, model: Any) -> int:  # noqa: ANN401  transformers' types miss half of a model
        """Compute one token from the last one; the page for it is there."""
        return int(compute(model, torch.tensor(self.tokens[-1:]), self.cache)[-1].argmax())

    def add(self, token: int, engine: Engine) -> bool:
        """Add a token and report it; return whether it was the last one."""
        self.tokens.append(token)
        engine.tell(Token(self.prompt.request_id, token))
        if token != engine.model.config.eos_token_id and len(self.tokens) < self.prompt.max_new_tokens:
            return False
        engine.tell(Done(self.prompt.request_id, decode_s=time.monotonic() - self.started))
        return True
