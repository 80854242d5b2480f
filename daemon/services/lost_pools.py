"""Remembers device pools, so that a request for one whose memory is gone fails with POOL_LOST, also after a restart.

Kept in a small file in the runtime directory: names and reasons, nothing else. If the file is lost, such requests fail
with UNKNOWN_POOL instead.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

MAX_REMEMBERED: Final = 1024


class _Pool(msgspec.Struct, frozen=True):
    tenant: int
    name: str
    device: str


class LostPools:
    """The live device pools, and the lost ones with the reason, until a pool of that name is made again."""

    def __init__(self, path: Path | None) -> None:
        """Read the previous daemon's file ``path``: its live pools are lost now. None: remember nothing."""
        self._path = path
        self._live: dict[tuple[int, str], str] = {}
        self._lost: dict[tuple[int, str], str] = {}
        self._before = {(one.tenant, one.name): one.device for one in self._read()}
        for (tenant, name), device in self._before.items():
            self._lost[tenant, name] = f"was on {device} and was lost when the daemon restarted"

    def __repr__(self) -> str:
        """Show how many pools are live and lost."""
        return f"<LostPools live={len(self._live)} lost={len(self._lost)}>"

    def why(self, tenant: int, name: str) -> str | None:
        """Return why a pool is lost, or None."""
        return self._lost.get((tenant, name))

    def made(self, tenant: int, name: str, device: str) -> None:
        """Record a new device pool; a lost one of that name is forgotten."""
        self._lost.pop((tenant, name), None)
        self._live[tenant, name] = device
        self._write()

    def deleted(self, tenant: int, name: str) -> None:
        """Forget a pool that was deleted on purpose."""
        known = (tenant, name) in self._live or (tenant, name) in self._lost
        self._live.pop((tenant, name), None)
        self._lost.pop((tenant, name), None)  # a pool of that name was lost, and then registered or made on the host
        if known:
            self._write()

    def lose(self, tenant: int, name: str, why: str) -> None:
        """Record that a pool's memory is gone, and why."""
        self._live.pop((tenant, name), None)
        while len(self._lost) >= MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]
        self._lost[tenant, name] = why
        self._write()

    def _read(self) -> list[_Pool]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[_Pool]) if self._path else []
        except (OSError, msgspec.MsgspecError):
            return []

    def _write(self) -> None:
        if self._path is None:
            return
        still_lost = {key: device for key, device in self._before.items() if key in self._lost}
        pools = [_Pool(*key, device) for key, device in (still_lost | self._live).items()]
        with contextlib.suppress(OSError):  # see the module's docstring
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(pools))
            new.replace(self._path)
