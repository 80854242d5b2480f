"""What a run has done and found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from tests.torture.actors import NEVER_ENDED, WRONG, Ended
from tests.torture.plan import OF_LINKS, Fault

BUGS: Final = frozenset(
    {
        NEVER_ENDED,
        WRONG,
        "INTERNAL",
        "MALFORMED",
        "INVALID_FIELD",
        "ACCESS_DENIED",
        "NOT_OWNER",
        "PAGE_GAP",
        "FIRST_TOKEN_TWICE",
        "SNAPSHOT_DAMAGED",
    }
)
"""Outcomes that no fault excuses."""

KILLS: Final = (Fault.KILL_ENGINE, Fault.KILL_DAEMON)
STOPS: Final = (Fault.STOP_ENGINE, Fault.STOP_DAEMON, Fault.SILENCE)
RESTARTS: Final = (Fault.KILL_DAEMON, Fault.END_DAEMON)


class Report:
    """Counts of faults, outcomes and checks, and what was found."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.faults: Counter[Fault] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.broken = 0
        self.transfers = 0
        self.verified = 0
        self.checked_bytes = 0
        self.findings: list[str] = []

    def ended(self, part: str, ended: Ended) -> None:
        self.outcomes[f"{part}: {ended.outcome}"] += 1
        if ended.outcome in BUGS:
            self.findings.append(f"{part}: {ended.outcome}: {ended.detail}")

    def heard(self, ended: Ended) -> None:
        """Record the bytes that an engine has found right, and what it says unasked."""
        if not ended.number and ended.outcome in BUGS:
            self.findings.append(ended.detail)
        self.checked_bytes += ended.checked_bytes

    def lines(self) -> Iterable[str]:
        for fault, count in sorted(self.faults.items()):
            yield f"  {count:6} x {fault.value}"
        for outcome, count in sorted(self.outcomes.items()):
            yield f"  {count:6} x {outcome}"
        yield f"  {self.broken:6} x a connection between daemons broken"
        yield f"  {self.verified:6} x verified"

    def closing(self) -> str:
        kills, stops, cuts, restarts = (
            sum(self.faults[one] for one in some) for some in (KILLS, STOPS, OF_LINKS, RESTARTS)
        )
        return (
            f"torture: ok seed={self.seed} kills={kills} stops={stops} cuts={cuts} "
            f"restarts={restarts} transfers={self.transfers} bytes={self.checked_bytes}"
        )
