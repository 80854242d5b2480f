"""Whether a transfer's destination pages hold what the source has: where a SEND or RECEIVE asks for checksums.

Both sides' segments are gathered in the same order, so that one checksum of each compares them; only where these differ
the bytes are looked at, to name the page. Between host regions, checksums are compared before anything is gathered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.pools.planning.sides import PlanSide
from kvferry.protocol.errors import TransferFailedError
from kvferry.protocol.manifests import Manifest


def check_arrived(
    expected: npt.NDArray[np.uint8], found: npt.NDArray[np.uint8], side: PlanSide, first: int, manifest: Manifest
) -> None:
    """Compare the bytes of segments from ``first`` on, as both sides have them.

    Args:
        expected: the source's, ``(n,)``.
        found: the destination's, ``(n,)``.
        side: the plan's destination.
        first: the number of the first segment.
        manifest: the destination pool's.

    Raises:
        TransferFailedError: they differ; names entry and page of the first byte that does, and both checksums.
    """
    ours, theirs = xxhash.xxh3_64_intdigest(found.data), xxhash.xxh3_64_intdigest(expected.data)
    if ours == theirs:
        return
    at = int(np.flatnonzero(found != expected)[0])
    pages, sizes = len(side.ids), side.segment_bytes.tolist()
    segment = first
    while at >= sizes[segment // pages]:
        at -= sizes[segment // pages]
        segment += 1
    entry, page = divmod(segment, pages)
    base = int(side.base[entry])
    name = next((one.name for one in manifest.entries if one.base == base), f"entry {entry}")
    raise TransferFailedError(
        f"page {side.ids[page]} of {name} has other bytes than the source sent, from byte {at} on: checksum "
        f"{ours:016x}, the source's {theirs:016x}",
        field=f"{name}[{side.ids[page]}]",
    )
