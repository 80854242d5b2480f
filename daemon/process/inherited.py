"""The descriptors that a service manager passes at start: its listening sockets, and what an earlier life stored.

See sd_listen_fds(3). They are taken once, before anything else is opened or started. Each has a name by which it is
taken, and what nobody takes is closed: a stored descriptor that nobody knows would hold its memory for ever. Knows
nothing of what they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import structlog

FIRST: Final = 3
MAX_DIGITS: Final = 5
"""Of the number of descriptors: systemd stores fewer than 65536."""

VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
UNNAMED: Final = "unknown"
"""What systemd calls a descriptor without a name."""

log = structlog.get_logger(__name__)


class Inherited:
    """Owns the descriptors until they are taken, or closed with ``close_rest``."""

    def __init__(self, descriptors: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """Own these descriptors, by their names."""
        self._descriptors = {name: list(fds) for name, fds in descriptors.items()}

    def __repr__(self) -> str:
        """Show the names of what nobody has taken."""
        return f"<Inherited {', '.join(self.names) or 'nothing'}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of what nobody has taken."""
        return tuple(self._descriptors)

    def take(self, name: str) -> list[int]:
        """Return all descriptors of this name, in the order in which they were passed; the caller owns them."""
        return self._descriptors.pop(name, [])

    def close_rest(self) -> None:
        """Close what nobody has taken, and say so."""
        while self._descriptors:
            name, descriptors = self._descriptors.popitem()
            for fd in descriptors:
                os.close(fd)
            log.warning(
                "inherited descriptors closed", name=name, count=len(descriptors), cause="nothing uses that name"
            )


def take_inherited() -> Inherited:
    """Return what the service manager has passed to this very process, and remove its variables.

    From now on no program that this process starts inherits any of it. What is meant for another process is left alone,
    and a number of descriptors that cannot be is none.
    """
    pid, count, names = (os.environ.pop(name, "") for name in VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal() or len(count) > MAX_DIGITS:
        return Inherited()
    named = names.split(":") if names else []
    found: dict[str, list[int]] = {}
    for place in range(int(count)):
        fd = FIRST + place
        try:
            os.set_inheritable(fd, False)  # noqa: FBT003  os's own signature
        except OSError:  # not open: the manager has passed fewer than it says
            continue
        name = named[place] if place < len(named) and named[place] else UNNAMED
        found.setdefault(name, []).append(fd)
    return Inherited(found)
