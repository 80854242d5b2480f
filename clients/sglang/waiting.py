"""A scheduler that has nothing but transfers to wait for waits for the daemon's word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvferry.clients.sglang import pools

LONGEST_S: Final = 0.001
"""Between two looks at what else a scheduler may wait for: new requests, say."""


def on_idle(original: Callable[[Any], None], scheduler: Any) -> None:  # noqa: ANN401  SGLang's object
    """Wait a moment for the daemon where the scheduler would look again at once.

    SGLang does so for as long as a transfer is under way; where cores are few, they are those that copy its pages.
    """
    original(scheduler)
    pool = pools.current()
    if pool is not None and not scheduler.is_fully_idle():
        pool.engine.wait_for_news(LONGEST_S)
