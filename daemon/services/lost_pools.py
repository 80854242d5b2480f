"""Which pools were on devices, so that whoever asks for one that is gone is told so, also by the next daemon.

Kept in a small file of the runtime directory: names and reasons, nothing else. Losing the file loses only the better
word: UNKNOWN_POOL instead of POOL_LOST.
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
    """The pools on devices that live, and those that are lost, with the reason, until they are made anew."""

    def __init__(self, path: Path | None) -> None:
        """Take what the daemon before had for lost; ``path`` is its file, None to remember nothing."""
        self._path = path
        self._live: dict[tuple[int, str], str] = {}
        self._lost: dict[tuple[int, str], str] = {}
        self._before = {(one.tenant, one.name): one.device for one in self._read()}
        for (tenant, name), device in self._before.items():
            self._lost[tenant, name] = f"was on {device} and went with the daemon's last life"

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<LostPools live={len(self._live)} lost={len(self._lost)}>"

    def why(self, tenant: int, name: str) -> str | None:
        """Return why a pool is lost; None where it is not."""
        return self._lost.get((tenant, name))

    def made(self, tenant: int, name: str, device: str) -> None:
        """Note a new pool on a device; it is lost no longer."""
        self._lost.pop((tenant, name), None)
        self._live[tenant, name] = device
        self._write()

    def deleted(self, tenant: int, name: str) -> None:
        """Note that a pool was given up on purpose."""
        known = (tenant, name) in self._live or (tenant, name) in self._lost
        self._live.pop((tenant, name), None)
        self._lost.pop(
            (tenant, name), None
        )  # one of that name was lost before, and then registered or made on the host
        if known:
            self._write()

    def lose(self, tenant: int, name: str, why: str) -> None:
        """Note that a pool's memory is gone."""
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
