"""What the daemon says of the transfers of SGLang's requests, which it knows by their rooms."""

from __future__ import annotations

from typing import Final

from tests.kit.watch import Direction, Watch
from tests.sglang.servers import Pair, Side

DIRECTIONS: Final[dict[Side, Direction]] = {"prefill": "send", "decode": "receive"}


class RoomWatch(Watch):
    """A session of a daemon, which asks what is under way."""

    def wait_until_opened(self, room: int, side: Side) -> None:
        """Return once a server has opened a request's transfer."""
        self.wait_until_open(DIRECTIONS[side], _request_id(room))

    def wait_until_room_arrives(self, room: int) -> None:
        """Return once pages of a request are at decode, but not all."""
        self.wait_until_some_arrived(_request_id(room))

    def assert_all_is_free(self, pair: Pair) -> None:
        """Check that neither SGLang, which looks by itself when it is idle, nor the daemon keeps pages of requests."""
        self.wait_until_idle()
        self.wait_until(lambda: not any(one.snapshots for one in self.status().tiers), "no snapshot is left")
        pair.assert_healthy()
        for program in (pair.prefill, pair.decode):
            program.flush()
            assert "leak detected" not in program.logged()


def _request_id(room: int) -> str:
    return f"{room:016x}"
