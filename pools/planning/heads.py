"""Which KV heads a tensor-parallel rank holds, and which heads two ranks have in common."""

from __future__ import annotations

import msgspec

from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError


class Heads(msgspec.Struct, frozen=True):
    """Consecutive KV heads, numbered in the model or within an entry, as each user states."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        """Return the head after the last one."""
        return self.start + self.count


class RankHeads(msgspec.Struct, frozen=True):
    """The model's heads that one rank holds, and how many ranks hold the same heads (1: only this one)."""

    start: int
    count: int
    replicas: int

    @property
    def heads(self) -> Heads:
        """Return the heads without the replica count."""
        return Heads(self.start, self.count)


def rank_heads(total_heads: int, tp_size: int, rank: int) -> RankHeads:
    """Return the heads of rank ``rank`` of ``tp_size``, by the formula in docs/architecture.md, "Formulas".

    Raises:
        InvalidFieldError: a count is below 1, or the rank does not exist.
        HeadsIndivisibleError: neither of ``total_heads`` and ``tp_size`` divides the other.
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
    """Return the heads in both, or None if there are none."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Heads(start, stop - start) if start < stop else None
