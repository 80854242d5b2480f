"""What the daemon says of the transfers of requests, from outside of the engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import pytest

from kvferry.clients import Client
from kvferry.protocol.session_messages import StatusReport, TransferStatus

WITHIN_S: Final = 30.0

Direction = Literal["send", "receive"]


class Watch:
    """A session of a daemon, which asks what is under way."""

    def __init__(self, runtime_dir: Path) -> None:
        self._client = Client.connect(runtime_dir, name="watch")

    def __repr__(self) -> str:
        """Show what is under way."""
        return f"<{type(self).__name__} {self.transfers()}>"

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session."""
        self._client.close()

    def status(self) -> StatusReport:
        """Return all that the daemon says."""
        return self._client.status()

    def transfers(self, request_id: str = "") -> list[TransferStatus]:
        """Return what is under way, of all requests or of those whose id begins so."""
        return [one for one in self.status().transfers if one.request_id.startswith(request_id)]

    def wait_until_open(self, direction: Direction, request_id: str = "") -> None:
        """Return once a transfer of this direction is under way."""
        self.wait_until(
            lambda: any(one.direction == direction for one in self.transfers(request_id)), f"a {direction} is under way"
        )

    def wait_until_some_arrived(self, request_id: str = "") -> None:
        """Return once pages of a request are at decode, but not all."""
        self.wait_until(lambda: any(one.arrived for one in self.transfers(request_id)), "pages arrive")

    def wait_until_idle(self, within_s: float = WITHIN_S) -> None:
        """Return once nothing is under way."""
        self.wait_until(lambda: not self.transfers(), "nothing is under way", within_s)

    def wait_until(self, condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
        """Return once a condition is true; fails the test where it is not in time."""
        ends_at = time.monotonic() + within_s
        while not condition():  # each look is a round trip
            if time.monotonic() > ends_at:
                pytest.fail(f"not within {within_s} s: {what}; transfers are {self.transfers()}")
            self._client.poll(0.05)
