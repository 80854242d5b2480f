"""What others make the daemon keep in memory, in bytes: one budget, which follows the memory that the daemon may have.

``Limits.within`` divides it. *Connections*, of unauthenticated clients, engines and other daemons, keep unfinished
messages and replies that are not read; where that is too much, the worst connection ends. *Sessions* keep requests that
wait, lists and payloads of transfers and operations that are not over, what they send ahead of a message, and graph
tables: there is a bound for each session, a share for each user, and a bound for all, and what does not fit is refused.
Does not know what it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Protocol

from kvferry.daemon.process.shares import share
from kvferry.protocol.errors import OverloadedError
from kvferry.protocol.limits import Limits

SMALL_BYTES = 16 << 10
"""For messages of up to this size there is a quarter more, and no bound of the session: one may end what waits."""

REQUEST_BYTES: Final = 3072
"""What a request that waits takes besides its message, and a transfer besides its lists."""

MAX_CONNECTIONS_BYTES: Final = 1 << 30
"""What connections keep where nothing else is said."""

TRANSFER: Final = "transfer"
OPERATION: Final = "operation"
TABLES: Final = "tables"
SHARES: Final = "shares"
"""The first part of the keys of what outlives its request."""


class KeptBytes:
    """What sessions keep: counts by session and key. Keys are chosen by who keeps something."""

    def __init__(self, limits: Limits, user_of: Callable[[int], int] = lambda _session_id: 0) -> None:
        """``user_of`` returns the user of a live session."""
        self._limits = limits
        self._user_of = user_of
        self._users: dict[int, int] = {}
        self._charged: dict[int, int] = {}
        self._sizes: dict[int, dict[Hashable, int]] = {}
        self._of_session: dict[int, int] = {}
        self._of_user: Counter[int] = Counter()
        self.total = 0

    def __repr__(self) -> str:
        """Show how many bytes are kept."""
        return f"<KeptBytes {self.total} of {self._limits.max_kept_request_bytes}>"

    def of(self, session_id: int) -> int:
        """Return how many bytes are kept for a session, but for payloads."""
        return self._of_session.get(session_id, 0)

    def check(self, session_id: int, size_bytes: int) -> None:
        """Check that so many bytes more may be kept for a session.

        Raises:
            OverloadedError: they exceed a bound; the error says which.
        """
        most = self._limits.max_kept_request_bytes
        if size_bytes <= SMALL_BYTES:
            self.check_all(session_id, size_bytes, most + most // 4)
            return
        kept, bound = self.of(session_id), self._limits.max_kept_session_request_bytes
        if kept + size_bytes > bound:
            raise _overloaded(kept, size_bytes, bound, "the session", "limits.max_kept_session_request_bytes")
        self.check_all(session_id, size_bytes, most)

    def check_all(self, session_id: int, size_bytes: int, most: int | None = None) -> None:
        """Check that so many bytes more may be kept, whatever for: by the share of the session's user in all.

        Raises:
            OverloadedError: they exceed it.
        """
        most = self._limits.max_kept_request_bytes if most is None else most
        if 2 * (self.total + size_bytes) <= most:  # within every share
            return
        user = self._user(session_id)
        kept = self._of_user[user]
        if kept + size_bytes > share(user, most, self.total - kept):
            raise _overloaded(
                self.total,
                size_bytes,
                most,
                "all sessions",
                f"limits.max_kept_request_bytes, or the share of user {user}, who has {kept}",
            )

    def fits(self, session_id: int, size_bytes: int) -> bool:
        """Return whether ``check`` would pass."""
        try:
            self.check(session_id, size_bytes)
        except OverloadedError:
            return False
        return True

    def keep(self, session_id: int, key: Hashable, size_bytes: int) -> None:
        """Count bytes, beside those that the key has already."""
        if size_bytes:
            sizes = self._sizes.setdefault(session_id, {})
            sizes[key] = sizes.get(key, 0) + size_bytes
            self._of_session[session_id] = self.of(session_id) + size_bytes
            self.charge(session_id, size_bytes)

    def charge(self, session_id: int, size_bytes: int) -> None:
        """Count bytes for a session's user and for all, or stop counting them (below 0)."""
        user = self._user(session_id)
        charged = self._charged.get(session_id, 0) + size_bytes
        if charged:
            self._charged[session_id], self._users[session_id] = charged, user
        else:  # its user is known as long as anything is counted: it may have ended before
            self._charged.pop(session_id, None)
            self._users.pop(session_id, None)
        self._of_user[user] += size_bytes
        if not self._of_user[user]:
            del self._of_user[user]
        self.total += size_bytes

    def session_lost(self, session_id: int) -> None:
        """Stop counting what a session kept that has ended; its transfers settle by themselves."""
        for key in [one for one in self._sizes.get(session_id, ()) if not _is_transfer(one)]:
            self.drop(session_id, key)

    def drop(self, session_id: int, key: Hashable) -> None:
        """Stop counting what was counted for a key, if anything was."""
        sizes = self._sizes.get(session_id)
        size_bytes = sizes.pop(key, 0) if sizes else 0
        if not size_bytes:
            return
        self.charge(session_id, -size_bytes)
        self._of_session[session_id] -= size_bytes
        if not sizes:
            del self._sizes[session_id], self._of_session[session_id]

    def _user(self, session_id: int) -> int:
        user = self._users.get(session_id)
        return self._user_of(session_id) if user is None else user


class Connection(Protocol):
    """One connection, as far as its bytes are concerned.

    Attributes:
        origin: whose it is: a user, or a host.
        kept_bytes: what is kept of it and for it.
    """

    origin: object

    @property
    def kept_bytes(self) -> int:
        """Return the bytes."""

    def close_for_others(self) -> None:
        """Close it: it keeps too much."""


class ConnectionBytes:
    """What connections keep, of all sockets that are listened on: where it is too much, the worst of them is closed."""

    def __init__(self, most: int = MAX_CONNECTIONS_BYTES) -> None:
        self.most = most
        self.total = 0
        self._sockets: list[Callable[[], Iterable[Connection]]] = []

    def __repr__(self) -> str:
        """Show how many bytes are kept."""
        return f"<ConnectionBytes {self.total} of {self.most}>"

    def watch(self, connections: Callable[[], Iterable[Connection]]) -> None:
        """Choose from these connections as well, when one has to be closed."""
        self._sockets.append(connections)

    def changed(self, by_bytes: int) -> None:
        """Count what a connection keeps more, or less; where that is too much, close one.

        That is the largest connection of the user, or host, that keeps most bytes in all.
        """
        self.total += by_bytes
        if self.total <= self.most or by_bytes <= 0:
            return
        every = [one for connections in self._sockets for one in connections()]
        whole: Counter[object] = Counter()
        for one in every:
            whole[one.origin] += one.kept_bytes
        max(every, key=lambda one: (whole[one.origin], one.kept_bytes)).close_for_others()


def _overloaded(kept: int, more: int, most: int, whose: str, bound: str) -> OverloadedError:
    return OverloadedError(
        f"{kept} bytes of {whose} are kept, in requests that wait, transfers and operations that are not over, or "
        f"events that are not acknowledged; {more} more exceed {most} ({bound})"
    )


def _is_transfer(key: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] == TRANSFER
