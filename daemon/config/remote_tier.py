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

    Its ``mooncake_master`` listens at ``master``; other nodes reach this one at ``address``, by default that of
    ``network``. The store keeps its blocks in what the nodes give: ``segment_bytes`` of this one's memory, which may be
    0, and blocks that lie here are lost with this daemon. Tenants find their own blocks only, by their user's number,
    unless ``shared`` lets all of them, and those of all other nodes, find each other's.

    ``threads`` blocks are written or read at a time. The store is asked what it has for ``lookup_timeout_s`` at most:
    after that it has nothing. Whoever moves no byte for ``progress_timeout_s`` is given up; a block that is neither
    there nor given up after ``timeout_s``, or a store process that says nothing for ``hung_s``, costs that process its
    life, and with it the blocks that this node holds for all. It is started again after ``retry_s``, and twice as
    long after each failure, up to ``retry_at_most_s``.
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
