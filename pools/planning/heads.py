"""Which KV heads a rank of tensor parallelism holds, and what two ranks have in common.

Knows nothing of entries or pages: a page's geometry is ``pairing``'s business.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError


class Heads(msgspec.Struct, frozen=True):
    """Consecutive KV heads: the first one and how many. Of the model, or of an entry, as the owner says."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        """Return the head after the last one."""
        return self.start + self.count


class RankHeads(msgspec.Struct, frozen=True):
    """The model's heads that one rank holds, and how many ranks hold these very heads (1: no other)."""

    start: int
    count: int
    replicas: int

    @property
    def heads(self) -> Heads:
        """Return the heads alone."""
        return Heads(self.start, self.count)


def rank_heads(total_heads: int, tp_size: int, rank: int) -> RankHeads:
    """Return what rank ``rank`` of ``tp_size`` holds of ``total_heads`` KV heads.

    ``[r * N / T, (r + 1) * N / T)`` where T ranks divide N heads; head ``r // (T / N)`` where N heads divide T ranks.

    Raises:
        InvalidFieldError: a count below 1, or no such rank.
        HeadsIndivisibleError: neither divides the other.
    """
    if total_heads < 1 or tp_size < 1:
        field = "total_heads" if total_heads < 1 else "tp_size"
        raise InvalidFieldError(f"{total_heads} KV heads over {tp_size} ranks", field=field)
    if not 0 <= rank < tp_size:
        raise InvalidFieldError(f"rank {rank} of {tp_size}", field="rank")
    if total_heads % tp_size == 0:
        count = total_heads // tp_size
        return RankHeads(rank * count, count, 1)
    if tp_size % total_heads == 0:
        replicas = tp_size // total_heads
        return RankHeads(rank // replicas, 1, replicas)
    raise HeadsIndivisibleError(
        f"{total_heads} KV heads over {tp_size} ranks: neither is a multiple of the other", field="tp_size"
    )


def intersect(one: Heads, other: Heads) -> Heads | None:
    """Return the heads that both have, or None."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Heads(start, stop - start) if start < stop else None
