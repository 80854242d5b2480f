"""What the daemon says of the transfers of requests, from outside of the servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from kvferry.clients import Client
from kvferry.protocol.session_messages import TransferStatus
from tests.sglang.servers import Pair, Side

WITHIN_S = 30.0
DIRECTIONS: dict[Side, str] = {"prefill": "send", "decode": "receive"}


class Watch:
    """A session of a daemon, which asks what is under way."""

    def __init__(self, runtime_dir: Path) -> None:
        self._client = Client.connect(runtime_dir, name="watch")

    def __repr__(self) -> str:
        """Show what is under way."""
        return f"<Watch {self.transfers()}>"

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session."""
        self._client.close()

    def transfers(self, room: int | None = None) -> list[TransferStatus]:
        """Return what is under way, of all requests or one."""
        every = self._client.status().transfers
        return [one for one in every if room is None or one.request_id.startswith(f"{room:016x}")]

    def wait_until_opened(self, room: int, side: Side) -> None:
        """Return once a server has opened a request's transfer."""
        self._wait(lambda: any(one.direction == DIRECTIONS[side] for one in self.transfers(room)), f"{side} opens")

    def wait_until_some_arrived(self, room: int) -> None:
        """Return once pages of a request are at decode, but not all."""
        self._wait(lambda: any(one.arrived for one in self.transfers(room)), "pages arrive")

    def wait_until_idle(self) -> None:
        """Return once nothing is under way."""
        self._wait(lambda: not self.transfers(), "nothing is under way")

    def assert_all_is_free(self, pair: Pair) -> None:
        """Check that neither SGLang, which looks by itself when it is idle, nor the daemon keeps pages of requests."""
        self.wait_until_idle()
        self._wait(lambda: not any(one.snapshots for one in self._client.status().tiers), "no snapshot is left")
        pair.assert_healthy()
        for program in (pair.prefill, pair.decode):
            program.flush()
            assert "leak detected" not in program.logged()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + WITHIN_S
        while not condition():  # each look is a round trip
            if time.monotonic() > ends_at:
                pytest.fail(f"not within {WITHIN_S} s: {what}; transfers are {self.transfers()}")
            self._client.poll(0.05)
