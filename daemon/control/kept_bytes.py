"""What others make the daemon keep in memory, in bytes: one budget, which follows the memory that the daemon may have.

``Limits.within`` divides it. *Connections*, of unauthenticated clients, engines and other daemons, keep unfinished
messages and replies that are not read; where that is too much, the worst connection ends. *Sessions* keep requests that
wait, lists and payloads of transfers and operations that are not over, what they send ahead of a message, and graph
tables; what does not fit their ``Quota`` is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

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


def outlives_session(key: object) -> bool:
    """Return whether what is kept for a key outlives its session: transfers settle by themselves."""
    return isinstance(key, tuple) and key[0] == TRANSFER
