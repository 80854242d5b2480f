"""What every table of the configuration file is, and what its keys may be; every number is bounded on both sides."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

MIB: Final = 1 << 20
LEAST_BYTES: Final = 4096
"""Of a size that is not 0: a smaller one is a number of something else."""

MOST_BYTES: Final = 1 << 50

Bytes = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
"""A size that may be 0; one that is not has ``LEAST_BYTES`` at least: see ``conflicts``."""
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
        description="tcp://ADDRESS:PORT with an address of this host in numbers",
    ),
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are mistakes."""
