"""A remote store that is a dictionary: a test decides when it answers, and whether it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.daemon.tiers.remote_store import StoredHeader
from kvferry.pools.devices.host import HostRegion

Range = tuple[int, int]


class _Stored(NamedTuple):
    header: StoredHeader
    pages: list[bytes]


class ScriptedStore:
    """See ``RemoteStore``. While ``holds`` is True every call waits for ``let_go``.

    Attributes:
        available: whether it is there.
        state: what STATUS is to say.
        values: what it has, by name.
        waiting: calls that wait, oldest first.
        holds: whether calls wait.
    """

    def __init__(self, arena: HostRegion) -> None:
        self.available = True
        self.state = "ready"
        self.values: dict[str, _Stored] = {}
        self.waiting: list[asyncio.Future[None]] = []
        self.holds = False
        self._arena = arena

    def __repr__(self) -> str:
        """Show what it has and who waits."""
        return f"<ScriptedStore values={len(self.values)} waiting={len(self.waiting)}>"

    async def start(self) -> None:
        """See ``RemoteStore.start``."""

    async def close(self) -> None:
        """See ``RemoteStore.close``."""

    def let_go(self) -> bool:
        """Let the call that waits longest go on; return whether there was one."""
        while self.waiting:
            waiting = self.waiting.pop(0)
            if not waiting.done():  # else its caller was cancelled
                waiting.set_result(None)
                return True
        return False

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """See ``RemoteStore.exists``."""
        await self._turn()
        return [self.available and name in self.values for name in names]

    async def put(self, name: str, ranges: Sequence[Range], *, parent: bytes | None, digests: Sequence[int]) -> bool:
        """See ``RemoteStore.put``."""
        await self._turn()
        if not self.available:
            return False
        memory = memoryview(self._arena.buffer)
        pages = [bytes(memory[at : at + size]) for at, size in ranges]
        self.values.setdefault(name, _Stored(StoredHeader(parent=parent, digests=tuple(digests)), pages))
        return True

    async def get(self, name: str, ranges: Sequence[Range], *, pages: int) -> StoredHeader | None:
        """See ``RemoteStore.get``."""
        await self._turn()
        found = self.values.get(name) if self.available else None
        if found is None or len(found.pages) != pages:
            return None
        for (at, size), content in zip(ranges, found.pages, strict=True):
            self._arena.buffer[at : at + size] = content
        return found.header

    async def remove(self, names: Sequence[str]) -> bool:
        """See ``RemoteStore.remove``."""
        await self._turn()
        for name in names:
            self.values.pop(name, None)
        return True

    async def _turn(self) -> None:
        if self.holds:
            waiting = asyncio.get_running_loop().create_future()
            self.waiting.append(waiting)
            await waiting
