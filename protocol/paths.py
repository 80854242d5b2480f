"""Where a daemon's sockets are, from the environment alone. Touches no file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CONTROL_SOCKET = "control.sock"
SESSION_SOCKET = "session.sock"
PEER_SOCKET = "peer.sock"


def default_runtime_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$KVFERRY_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/kvferry``, else ``/run/kvferry``."""
    if environ.get("KVFERRY_RUNTIME_DIR"):
        return Path(environ["KVFERRY_RUNTIME_DIR"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "kvferry"
    return Path("/run/kvferry")


def control_address(runtime_dir: Path) -> str:
    """Return the ZeroMQ address of the control socket."""
    return f"ipc://{runtime_dir / CONTROL_SOCKET}"
