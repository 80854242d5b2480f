"""Protocol versions and how two sides agree on one.

The version increases when a message's meaning changes; a new field or type only adds a feature.
"""

from __future__ import annotations

from kvferry.protocol.errors import VersionMismatchError

PROTOCOL_MIN = 2
PROTOCOL_MAX = 2

FEATURES = (
    "pools.host",
    "layout.mha",
    "layout.mla",
    "layout.hybrid_swa",
    "layout.mamba",
    "transfers.local",
    "transfers.chunks",
    "transfers.layers",
    "transfers.heads",
    "transfers.windows",
    "transfers.peers",
    "pools.npu",
    "pools.cuda",
    "pools.registered",
    "transfers.after",
    "tables",
    "tiers",
    "tiers.cache",
    "transfers.into",
    "instances",
    "batch",
    "sessions.resume",
)
"""The features of this version of kvferry, by stable names; clients ignore unknown names."""


def agree(protocol_min: int, protocol_max: int) -> int:
    """Return the highest version both sides speak.

    Raises:
        VersionMismatchError: the ranges do not overlap.
    """
    highest = min(protocol_max, PROTOCOL_MAX)
    if highest < max(protocol_min, PROTOCOL_MIN):
        raise VersionMismatchError(
            f"the client speaks {protocol_min}..{protocol_max}, this side {PROTOCOL_MIN}..{PROTOCOL_MAX}",
            field="protocol_min",
        )
    return highest
