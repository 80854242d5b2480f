"""Identifiers and their form on the wire."""

from __future__ import annotations

import os
from typing import Annotated, Literal, NewType

from msgspec import Meta

Hex128 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""128 bits as 32 lower-case hexadecimal digits, on the wire, in JSON and in logs; for example a request id."""

BootId = NewType("BootId", str)
"""One life of a daemon: 32 hexadecimal digits, or empty if any boot id is accepted."""

PoolLifetime = Literal["daemon", "instance"]
"""With what a pool ends that nobody deletes: the daemon, or the instance that created it."""

PoolName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*\\Z", min_length=1, max_length=128)]
PeerAddress = Annotated[str, Meta(pattern="^(tcp://[^ ]+:[0-9]+|ipc:///[^ ]+)\\Z", max_length=256)]
"""Where a daemon listens for other daemons: ``tcp://ADDRESS:PORT``, or ``ipc://PATH`` on the same host."""

ComponentName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*\\Z", min_length=1, max_length=32)]

HOST = "host"
DeviceName = Annotated[str, Meta(pattern="^(host|(npu|cuda):[0-9]{1,3})\\Z", max_length=16)]
"""Where a pool's memory is: ``host``, ``npu:N`` or ``cuda:N``; N is torch's device index in this process."""

PLAIN_TEXT = "^[^\\x00-\\x1f\\x7f]*\\Z"
"""Text without control characters, safe to print."""

PlainText = Annotated[str, Meta(pattern=PLAIN_TEXT)]

ProcessId = Annotated[int, Meta(ge=1, lt=1 << 31)]

PATTERNS = {
    "^(host|(npu|cuda):[0-9]{1,3})\\Z": "host, npu:N or cuda:N",
    "^(tcp://[^ ]+:[0-9]+|ipc:///[^ ]+)\\Z": "tcp://ADDRESS:PORT or ipc:///PATH",
    "^[A-Za-z0-9][A-Za-z0-9._-]*\\Z": "a name of letters, digits, '.', '_' and '-'",
    "^[a-z][a-z0-9_]*\\Z": "a name of small letters, digits and '_'",
    PLAIN_TEXT: "a text without control characters",
    "^[0-9a-f]{32}$": "32 hexadecimal digits in lower case",
}
"""A description of each pattern above, for error texts."""

NO_BOOT = BootId("")

MAIN = "main"
"""The component, and the page space, of a model's own paged attention."""


def new_request_id() -> str:
    """Return a fresh request id: 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def new_boot_id() -> BootId:
    """Return a fresh boot id: 128 random bits as 32 hexadecimal digits."""
    return BootId(os.urandom(16).hex())


def new_secret() -> bytes:
    """Return a fresh session secret: 16 random bytes. Never log it."""
    return os.urandom(16)
