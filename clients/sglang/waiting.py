"""A scheduler that has nothing but transfers to wait for waits for the daemon's word, or for its own requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import zmq

from kvferry.clients.sglang import pools

LONGEST_S: Final = 0.002
"""Between two looks at what else a scheduler may wait for: threads of SGLang's that look for the other server, say."""


def on_idle(original: Callable[[Any], None], scheduler: Any) -> None:  # noqa: ANN401  SGLang's object
    """Wait a moment where the scheduler would look again at once.

    SGLang does so for as long as a transfer is under way; where cores are few, they are those that copy its pages.
    """
    original(scheduler)
    pool = pools.current()
    if pool is not None and not scheduler.is_fully_idle():
        channels = getattr(scheduler, "ipc_channels", None)
        requests = (getattr(channels, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc"))
        pool.engine.wait_for_news(LONGEST_S, [one for one in requests if isinstance(one, zmq.Socket)])
