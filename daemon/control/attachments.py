"""Shares and descriptors that came on the session socket, ahead of their messages on the control socket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvferry.protocol.errors import MalformedError, OverloadedError
from kvferry.protocol.session_stream import MemoryFollows, ShareFollows

MAX_MESSAGES_SHARED: Final = 16
MAX_SHARES_SAID: Final = 16_384


class Attachments:
    """The shares and descriptors of one session, which owns the descriptors until they are taken."""

    def __init__(self) -> None:
        self._shares: dict[int, ShareFollows] = {}
        self._fds: list[int] = []  # received, and not named by a frame yet
        self._memory: dict[int, int] = {}

    def __repr__(self) -> str:
        """Show how many there are; never their contents."""
        return f"<Attachments shares={len(self._shares)} descriptors={len(self._fds) + len(self._memory)}>"

    @property
    def unexplained(self) -> int:
        """Return how many descriptors came that no frame has named yet."""
        return len(self._fds)

    def take_share(self, message_id: int) -> ShareFollows | None:
        """Return the shares for a message, or None."""
        return self._shares.pop(message_id, None)

    def take_memory(self, message_id: int) -> int | None:
        """Return the descriptor for a message, or None; the caller owns it from now on."""
        return self._memory.pop(message_id, None)

    def add_descriptors(self, fds: Sequence[int]) -> None:
        """Add received descriptors."""
        self._fds += fds

    def note(self, said: ShareFollows | MemoryFollows) -> None:
        """Keep the contents of a frame for its message.

        Raises:
            MalformedError: the frame names a descriptor that did not come, or a second one for its message.
            OverloadedError: too much is kept for messages that have not come.
        """
        if isinstance(said, ShareFollows):
            self._note_share(said)
        else:
            self._note_memory(said.message_id)

    def close(self) -> None:
        """Drop everything and close the descriptors."""
        for fd in (*self._fds, *self._memory.values()):
            os.close(fd)
        self._fds.clear()
        self._memory.clear()
        self._shares.clear()

    def _note_share(self, said: ShareFollows) -> None:
        known = self._shares.get(said.message_id)
        if known is not None:
            both = (*known.shares, *said.shares)
            said = ShareFollows(message_id=said.message_id, shares=both, events=said.events or known.events)
        elif len(self._shares) >= MAX_MESSAGES_SHARED:
            raise OverloadedError(f"shares for {MAX_MESSAGES_SHARED} messages that never came")
        self._shares[said.message_id] = said
        if sum(len(one.shares) for one in self._shares.values()) > MAX_SHARES_SAID:
            raise OverloadedError(f"more than {MAX_SHARES_SAID} shares for messages that have not come")

    def _note_memory(self, message_id: int) -> None:
        if not self._fds or message_id in self._memory:
            raise MalformedError("each MEMORY frame needs one descriptor, and a message one such frame")
        if len(self._memory) >= MAX_MESSAGES_SHARED:
            raise OverloadedError(f"descriptors for {MAX_MESSAGES_SHARED} messages that never came")
        self._memory[message_id] = self._fds.pop(0)
