"""Where the daemon of another engine is reached: by a socket of this host, or over the network."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import Hex128, PeerAddress, PlainText

MOST_CHARACTERS: Final = 256
MOST_ADDRESSES: Final = 8
KERNEL: Final = Path("/proc/sys/kernel/random/boot_id")


class DaemonPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine says to another one of where its daemon is.

    ``host``: the engine's own address; ``place``: where the daemon listens, see ``place_of``; ``daemons``: the
    addresses at which other daemons reach it; ``boot_id``: its incarnation.
    """

    host: Annotated[PlainText, msgspec.Meta(max_length=MOST_CHARACTERS)]
    place: Annotated[PlainText, msgspec.Meta(max_length=MOST_CHARACTERS)]
    daemons: Annotated[tuple[PeerAddress, ...], msgspec.Meta(max_length=MOST_ADDRESSES)]
    boot_id: Hex128

    def reached_from(self, host: str, daemons: Sequence[str], boot_id: str) -> tuple[str, ...]:
        """Return its address, for RECEIVE, as seen by an engine at ``host`` with a daemon of its own.

        None where both have the same daemon, also after that has restarted.

        Raises:
            InvalidFieldError: it has none that reaches there.
        """
        same_place = bool(self.place) and self.place == place_of(self.daemons)
        if self.boot_id == boot_id or (same_place and self.daemons == tuple(daemons)):
            return ()
        kind = "ipc://" if same_place and self.host == host else "tcp://"
        found = [one for one in self.daemons if one.startswith(kind) and one not in daemons]
        if not found:
            raise InvalidFieldError(
                f"the daemon of the engine at {self.host} has no address {kind} of its own for other daemons: set its "
                "peers.listen",
                field="peers.listen",
            )
        return (found[0],)


def place_of(daemons: Sequence[str]) -> str:
    """Return what tells where a daemon's ipc address is: another host or container may have it for another daemon.

    It is the kernel's boot and the folder's device and inode; empty where that cannot be seen from here.
    """
    with contextlib.suppress(OSError, ValueError):  # a path may have a character that no path can
        for one in daemons:
            if one.startswith("ipc://"):
                folder = Path(one.removeprefix("ipc://")).parent.stat()
                return f"{KERNEL.read_text('ascii').strip()}/{folder.st_dev}/{folder.st_ino}"
    return ""
