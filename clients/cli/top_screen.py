"""The screen of ``kvferry top``, from two reports: pure, and the one module that needs rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.clients.cli.pools import spaces_of
from kvferry.clients.cli.tiers import hit_rates
from kvferry.protocol.printable import printable
from kvferry.protocol.session_messages import EndedTransfer, StatusReport, TransferStatus

__all__ = ["Console", "Live", "frame"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30
FEWEST: Final = 2
"""Rows of a table, however low the screen is."""

FIXED_LINES: Final = 12
"""Of a frame: everything but rows of tables."""

STAGES: Final = ("other half", "more chunks", "layers", "copies", "settling", "quarantined")


def frame(now: StatusReport, before: StatusReport | None, height: int, lost: str = "") -> Group:
    """Return one screen.

    Args:
        now: what the daemon reports.
        before: what it reported one look earlier, for rates.
        height: lines that the terminal has.
        lost: why it does not answer any more; "": it does.
    """
    rates = Rates(now, before)
    rows = max(FEWEST, (height - FIXED_LINES - len(now.tiers)) // 3)
    parts: list[Any] = [_head(now, lost), _rates(rates), _transfers(now.transfers), _stages(now.recent)]
    parts.append(_grid(("pool", "device", "pages", "free", "busy", "used"), _pools(now), rows))
    if now.tiers:
        parts.append(_grid(("tier", "used GiB", "hits", "write", "read", "state"), _tiers(now), len(now.tiers), wide=5))
    if now.peers:
        parts.append(_grid(("peer", "state", "round trip", "waiting", "why"), _peers(now), rows, wide=4))
    parts.append(_grid(("error", "in all", "a second"), _errors(rates), rows))
    return Group(*parts)


class Rates:
    """How fast the daemon's counters grow between two reports of one daemon."""

    def __init__(self, now: StatusReport, before: StatusReport | None) -> None:
        self.counters: Mapping[str, int] = now.counters
        is_same = before is not None and before.pid == now.pid and before.uptime_ms < now.uptime_ms
        self._before: Mapping[str, int] = before.counters if is_same and before else {}
        self._elapsed_s = (now.uptime_ms - before.uptime_ms) / 1000 if is_same and before else None

    def of(self, *names: str) -> float | None:
        """Return how much counters of these names grow in a second, together; None: it is not known yet."""
        if self._elapsed_s is None:
            return None
        grown = sum(self.counters.get(name, 0) - self._before.get(name, 0) for name in names)
        return grown / self._elapsed_s

    def matching(self, *starts: str) -> list[str]:
        """Return the names of counters that start so."""
        return [name for name in self.counters if name.startswith(starts)]


def _head(now: StatusReport, lost: str) -> Text:
    state = "draining" if now.draining else "drained" if now.drained else "serving"
    said = f"kvferry {now.daemon_version}  {state}  pid {now.pid}  up {_span(now.uptime_ms)}"
    said += f"  {len(now.sessions)} sessions"
    if now.others is not None:
        said += f"  and those of {now.others.users} other users"
    return _line(f"{said}  NO ANSWER: {lost}" if lost else said, "bold red" if lost else "bold")


def _rates(rates: Rates) -> Text:
    failed = [name for name in rates.matching("transfers.receive.") if not name.endswith(".ok")]
    moved = rates.of("transfers.moved_bytes")
    return _line(
        f"a second: {_number(rates.of('messages.received'))} requests, "
        f"{_number(rates.of(*rates.matching('requests.refused.')))} refused, "
        f"{_number(rates.of('transfers.receive.ok'))} transfers, {_number(rates.of(*failed))} failed, "
        f"{_number(None if moved is None else moved / MIB)} MiB moved"
    )


def stage_of(one: TransferStatus) -> str:
    """Return what a live side of a transfer waits for, in a word or two of STAGES."""
    if one.state != "open":
        return "quarantined" if one.state == "quarantined" else "settling"
    if " yet" in one.waits_for:
        return "other half"
    if "last SEND" in one.waits_for:
        return "more chunks"
    return "layers" if "layer steps" in one.waits_for else "copies"


def _transfers(transfers: Sequence[TransferStatus]) -> Text | Group:
    if not transfers:
        return _line("transfers: none")
    counts = Counter(map(stage_of, transfers))
    said = ", ".join(f"{counts[stage]} {stage}" for stage in STAGES if counts[stage])
    oldest = max(transfers, key=lambda one: one.age_ms)
    return Group(
        _line(f"transfers: {said}"),
        _line(f"the oldest, {_span(oldest.age_ms)}: {oldest.request_id[:8]} of {oldest.pool}: {oldest.waits_for}"),
    )


def _stages(ended: Sequence[EndedTransfer]) -> Text:
    good = [one for one in ended if one.error is None]
    if not good:
        return _line("no transfer has ended well lately")
    stages = ("planned", "waited", "moved", "copied", "settled")
    means = (sum(getattr(one, f"{stage}_us") for one in good) / len(good) / 1000 for stage in stages)
    said = " ".join(f"{stage} {mean:.1f}" for stage, mean in zip(stages, means, strict=True))
    return _line(f"ms of the last {len(good)}: {said}")


Row = tuple[str, ...]


def _pools(now: StatusReport) -> Iterator[Row]:
    fullest = sorted(now.pools, key=lambda one: one.free / max(1, one.pages))
    for pool in fullest:
        for one in spaces_of(pool):
            used = one.pages - one.free
            name = f"{pool.pool} {one.space}" if pool.spaces else pool.pool
            yield (name, pool.device, *map(str, (one.pages, one.free, one.busy)), _bar(used, one.pages))


def _tiers(now: StatusReport) -> Iterator[Row]:
    rates = hit_rates(now.counters)
    for one in now.tiers:
        used = f"{one.used_bytes / GIB:.1f}/{one.total_bytes / GIB:.1f}" if one.total_bytes else "?"
        times = (f"{us / 1000:.0f} ms" if us else "-" for us in (one.write_us, one.read_us))
        yield (one.tier, used, rates.get(one.tier, "-"), *times, one.state)


def _peers(now: StatusReport) -> Iterator[Row]:
    for one in sorted(now.peers, key=lambda peer: peer.state == "up"):
        round_trip = f"{one.round_trip_us / 1000:.1f} ms" if one.round_trip_us else "-"
        yield (one.address, one.state, round_trip, str(one.waiting + one.announced), one.why or "-")


ERRORS: Final = ("requests.refused.", "messages.refused.", "transfers.send.", "transfers.receive.", "operations.")
FAULTS: Final = ("transfers.bugs", "transfers.effects_failed", "tiers.disk.failed", "tiers.disk.full", "peers.lost")


def _errors(rates: Rates) -> Iterator[Row]:
    """Yield what has gone wrong, what grows fastest first."""
    of_outcomes = [one for one in rates.matching(*ERRORS) if not one.endswith((".ok", ".moved_bytes"))]
    named = [*of_outcomes, *(one for one in FAULTS if rates.counters.get(one))]
    for name in sorted(named, key=lambda one: (-(rates.of(one) or 0.0), -rates.counters[one])):
        yield (name, str(rates.counters[name]), _number(rates.of(name)))


# -- text: all that engines and other daemons say is made printable, and nothing of it is markup


def _grid(head: Row, rows: Iterable[Row], most: int, wide: int = 0) -> Table | Text:
    """Return a table of at most so many rows, of which column ``wide`` takes what the others leave."""
    every = list(rows)
    if not every:
        return _line(f"no {head[0]}s")
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="bold")
    for at, name in enumerate(head):
        grid.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if at == wide else None)
    for row in every[:most]:
        grid.add_row(*(Text(printable(cell), overflow="ellipsis", no_wrap=True) for cell in row))
    if len(every) > most:
        grid.add_row(Text(f"and {len(every) - most} more"))
    return grid


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"  # noqa: PLR2004  two digits


def _span(ms: int) -> str:
    total_s = ms / 1000
    for unit, size_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if total_s >= 2 * size_s:
            return f"{total_s / size_s:.0f} {unit}"
    return f"{total_s:.0f} s" if total_s >= 10 else f"{total_s:.1f} s"  # noqa: PLR2004  two digits


def _bar(part: int, whole: int, cells: int = 12) -> str:
    filled = round(cells * part / whole) if whole else 0
    return f"{'#' * filled}{'.' * (cells - filled)} {100 * part // max(1, whole)} %"
