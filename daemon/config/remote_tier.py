"""The configuration of the remote tier: ``[tiers.remote]``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvferry.daemon.config.sections import Bytes, Host, Section

MasterAddress = Annotated[
    str,
    Meta(
        pattern="^[^ :]+:[0-9]{1,5}\\Z|^\\[[0-9a-f:.]+\\]:[0-9]{1,5}\\Z",
        max_length=256,
        description="HOST:PORT, with an IPv6 address in brackets",
    ),
]


class RemoteTierConfig(Section, frozen=True, kw_only=True):
    """A Mooncake Store that many nodes share, with ``transport = "mooncake_store"``.

    Its ``mooncake_master`` listens at ``master``; other nodes reach this one at ``address``, by default
    ``network.address``. The store keeps blocks in memory that the nodes contribute: ``segment_bytes`` of this node's,
    possibly 0; blocks stored here are lost with this daemon. Tenants, by user number, find only their own blocks,
    unless ``shared`` lets all tenants of all nodes find each other's.

    ``threads`` calls move blocks at a time. A lookup waits for at most ``lookup_timeout_s`` and then finds nothing. A
    peer that moves no byte for ``progress_timeout_s`` fails. The store process is killed when a block is not settled
    after ``timeout_s``, or when it does not answer for ``hung_s``; the blocks that this node holds are lost with it. It
    is restarted after ``retry_s``, twice as long after each failure, up to ``retry_at_most_s``.
    """

    transport: Literal["none", "mooncake_store"] = "none"
    master: MasterAddress = "127.0.0.1:50051"
    protocol: Literal["tcp", "ascend"] = "tcp"
    address: Host | None = None
    segment_bytes: Bytes = 4 << 30
    shared: bool = False
    threads: Annotated[int, Meta(ge=1, le=16)] = 2
    lookup_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 0.5
    progress_timeout_s: Annotated[int, Meta(ge=1, le=600)] = 3
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    hung_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    start_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    retry_s: Annotated[float, Meta(gt=0, le=600)] = 1.0
    retry_at_most_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
