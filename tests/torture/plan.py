"""What happens in a run, and when: drawn from a seed, without I/O. A seed always gives the same faults and load.

How far each engine gets until a fault hits it depends on the machine; what is done, in which order, does not.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

GAP_S: Final = (0.05, 0.6)
"""Between one fault and the next."""

STOPPED_S: Final = (0.05, 1.5)
"""For how long something is stopped."""

MOST_PAGES: Final = 12


class Fault(enum.StrEnum):
    """What is done to an engine or a daemon."""

    KILL_ENGINE = "kill an engine"
    STOP_ENGINE = "stop an engine"
    KILL_DAEMON = "kill a daemon"
    END_DAEMON = "end a daemon with SIGTERM"
    STOP_DAEMON = "stop a daemon"
    NO_DESCRIPTORS = "take a daemon's free descriptors away"
    NO_MEMORY = "take a daemon's free address space away"
    SILENCE = "stop a daemon for longer than others wait for it"
    CUT = "cut the links between daemons and refuse new ones"
    HOLE = "let nothing through between daemons"
    DELAY = "delay what daemons say to each other"
    FILL_DISK = "fill a daemon's disk"


WEIGHTS: Final = {
    Fault.KILL_ENGINE: 40,
    Fault.STOP_ENGINE: 14,
    Fault.KILL_DAEMON: 4,
    Fault.END_DAEMON: 3,
    Fault.STOP_DAEMON: 5,
    Fault.NO_DESCRIPTORS: 4,
    Fault.NO_MEMORY: 3,
    Fault.SILENCE: 3,
    Fault.CUT: 5,
    Fault.HOLE: 4,
    Fault.DELAY: 3,
    Fault.FILL_DISK: 3,
}
OF_ENGINES: Final = {Fault.KILL_ENGINE, Fault.STOP_ENGINE}
OF_LIMITS: Final = {Fault.NO_DESCRIPTORS, Fault.NO_MEMORY}
OF_LINKS: Final = {Fault.CUT, Fault.HOLE, Fault.DELAY}
"""Of all links of the daemons at once: their targets say nothing."""

SILENCE_S: Final = 1.2
"""For so long, and as long as planned, a daemon is silent where others are to give it up."""

LATE: Final = 0.2
"""So late is what daemons say where it is delayed: this part of the time that the fault lasts."""


class Planned(NamedTuple):
    """A fault: how long after the one before, on which engine or daemon, and how long it lasts."""

    fault: Fault
    after_s: float
    target: int
    lasts_s: float


class Work(enum.StrEnum):
    """What engines are told to do."""

    TRANSFER = "transfer"
    OFFLOAD = "offload"
    CACHE = "cache"
    TABLES = "tables"
    KEEP = "keep"


WORK_WEIGHTS: Final = {Work.TRANSFER: 60, Work.OFFLOAD: 14, Work.CACHE: 16, Work.TABLES: 4, Work.KEEP: 6}


class Task(NamedTuple):
    """One piece of work."""

    work: Work
    request: str  # a request id; it names the bytes
    pages: int
    chunks: int = 1
    late: str = ""  # which side of a transfer begins later, "send" or "receive"
    cancels: str = ""  # the side that gives up, or ""
    lasts_s: float = 0.0  # for which pages are held, and checked once more, at the end
    into: str = "pages"  # where a transfer goes, or "host"
    source: int = 0
    destination: int = 0


def faults(
    seed: int, *, engines: Sequence[float], daemons: Sequence[float], kinds: Sequence[Fault]
) -> Iterator[Planned]:
    """Yield faults of these kinds without end; ``engines``, ``daemons``: how often each of them is hit."""
    chance = random.Random(f"faults of {seed}")  # noqa: S311  repeatable
    weights = [WEIGHTS[kind] for kind in kinds]
    while True:
        (fault,) = chance.choices(kinds, weights)
        targets = engines if fault in OF_ENGINES else daemons
        (target,) = chance.choices(range(len(targets)), targets)
        yield Planned(fault, chance.uniform(*GAP_S), target, chance.uniform(*STOPPED_S))


def tasks(seed: int, worker: int, *, engines: int) -> Iterator[Task]:
    """Yield the work of one of those that hand it out, without end."""
    chance = random.Random(f"worker {worker} of {seed}")  # noqa: S311  repeatable
    while True:
        (work,) = chance.choices(list(WORK_WEIGHTS), list(WORK_WEIGHTS.values()))
        source = chance.randrange(engines)
        yield Task(
            work=work,
            request=f"{chance.getrandbits(128):032x}",
            pages=chance.randint(1, MOST_PAGES),
            chunks=chance.choice((1, 1, 1, 2, 3)),
            late=chance.choice(("send", "receive")),
            cancels=chance.choice(("",) * 18 + ("send", "receive")),
            lasts_s=chance.choice((0.0, 0.0, 0.05, 0.2)),
            into=chance.choice(("pages",) * 7 + ("host",)),
            source=source,
            destination=chance.randrange(engines),
        )
