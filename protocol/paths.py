"""Paths of a daemon's sockets, from the environment alone, without file access.

Paths are strings here: importing pathlib takes a tenth of the run time of commands that must start fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

CONTROL_SOCKET = "control.sock"
SESSION_SOCKET = "session.sock"
PEER_SOCKET = "peer.sock"


def default_runtime_dir(environ: Mapping[str, str]) -> str:
    """Return ``$KVFERRY_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/kvferry``, else ``/run/kvferry``."""
    if environ.get("KVFERRY_RUNTIME_DIR"):
        return environ["KVFERRY_RUNTIME_DIR"]
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "kvferry")  # noqa: PTH118  see above
    return "/run/kvferry"


def control_address(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the ZeroMQ address of the control socket."""
    return f"ipc://{os.path.join(runtime_dir, CONTROL_SOCKET)}"  # noqa: PTH118  see above
