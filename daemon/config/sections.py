"""The base of all tables of the configuration file and the types of keys; every number is bounded on both sides."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

MIB: Final = 1 << 20
MIN_SIZE_BYTES: Final = 4096
"""The minimum of a size that is not 0: a smaller number probably lacks a unit."""

MAX_SIZE_BYTES: Final = 1 << 50

Bytes = Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)]
"""A size: 0, or at least ``MIN_SIZE_BYTES``: see ``conflicts``."""
Path = Annotated[str, Meta(pattern="^[^\\x00]+\\Z", max_length=4096, description="a path")]
Host = Annotated[
    str,
    Meta(pattern="^[0-9A-Za-z_.:-]+\\Z", max_length=256, description="an address or name of this host, without a port"),
]

Listen = Annotated[
    str,
    Meta(
        pattern="^tcp://[^ ]+:[0-9]+\\Z",
        max_length=256,
        description="tcp://ADDRESS:PORT with a numeric address of this host",
    ),
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are errors."""
