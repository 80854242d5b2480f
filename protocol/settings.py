"""What the daemon and the commands read alike: paths of a daemon's sockets, and sizes as people write them.

Without file access. Paths are strings here: importing pathlib takes a tenth of the run time of commands that must start
fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

CONTROL_SOCKET = "control.sock"
SESSION_SOCKET = "session.sock"
PEER_SOCKET = "peer.sock"
METRICS_SOCKET = "metrics.sock"


SYSTEM_DIR = "/run/kvferry"
"""Of the node's daemons: the folder of one, or of several, each in a folder of its configuration's name."""


def runtime_dirs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return where daemons may be: ``$KVFERRY_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/kvferry`` and ``/run/kvferry``.

    The first is where one is started that is told nothing else.
    """
    if environ.get("KVFERRY_RUNTIME_DIR"):
        return (environ["KVFERRY_RUNTIME_DIR"],)
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "kvferry"), SYSTEM_DIR  # noqa: PTH118  see above
    return (SYSTEM_DIR,)


def control_address(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the ZeroMQ address of the control socket."""
    return f"ipc://{os.path.join(runtime_dir, CONTROL_SOCKET)}"  # noqa: PTH118  see above


UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE_FORM: Final = 'bytes as a number, or as text with a unit: KiB, MiB, GiB or TiB, as "8GiB", "512 MiB" or "1.5GiB"'
"""The accepted forms of a size, for error texts."""


def size_bytes(text: str) -> int:
    """Return the bytes of a number with a unit.

    Raises:
        ValueError: the text is not a size, or not a whole number of bytes; describes the accepted forms.
    """
    found = re.match(r"([0-9]{1,20})(?:\.([0-9]{1,20}))? ?(KiB|MiB|GiB|TiB)\Z", text, re.ASCII)
    if found is None:
        raise ValueError(SIZE_FORM)
    whole, fraction, unit = found[1], found[2] or "", UNITS[found[3]]
    scale: int = 10 ** len(fraction)
    size, rest = divmod(int(whole + fraction) * unit, scale)
    if rest:
        raise ValueError(SIZE_FORM)
    return size


def size_text(size: int) -> str:
    """Return a size in the largest unit of which it is a multiple; plain bytes if there is none."""
    for unit, unit_bytes in reversed(UNITS.items()):
        if size and size % unit_bytes == 0:
            return f"{size // unit_bytes}{unit}"
    return str(size)
