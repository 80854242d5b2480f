"""The transition table of operations: what each event does in each state. Data, executed by ``operations``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from kvferry.protocol.errors import CancelledError, DeadlineError, InternalError, KvferryError, ShuttingDownError


class State(enum.Enum):
    """The state of an operation."""

    WAITING = "waiting"
    COPYING = "copying"
    STOPPING = "stopping"
    DONE = "done"


class Event(enum.Enum):
    """What can happen to an operation. The value describes it, in docs/architecture.md."""

    BEGIN = "its job begins"
    NOTHING_TO_DO = "there is nothing to copy"
    CANCEL = "CANCEL_OPERATION"
    DEADLINE = "its deadline passes"
    SESSION_ENDED = "its session ends"
    DRAIN = "the daemon ends"
    GIVEN_UP = "what it needs is gone"
    JOB_DONE = "its job is done"
    JOB_FAILED = "its job failed"


class Outcome(enum.Enum):
    """How an operation ends, where that is not an error class of its own."""

    NOTHING = ""
    SUCCESS = "success"
    CAUSE = "the cause"
    STOPPED = "what it was stopped for"


class Transition(NamedTuple):
    """The next state, and how the operation ends, or will end once its job has stopped."""

    state: State
    ends: type[KvferryError] | Outcome = Outcome.NOTHING


STOPS: Final = frozenset({Event.CANCEL, Event.DEADLINE, Event.SESSION_ENDED, Event.DRAIN, Event.GIVEN_UP})
"""The events that end an operation, or will, before its job is done."""

Key: TypeAlias = tuple[State, Event]
Transitions: TypeAlias = Mapping[Key, Transition]

_STOPPED_BY: Final[Mapping[Event, type[KvferryError] | Outcome]] = {
    Event.CANCEL: CancelledError,
    Event.DEADLINE: DeadlineError,
    Event.SESSION_ENDED: CancelledError,
    Event.GIVEN_UP: Outcome.CAUSE,
}

TRANSITIONS: Final[Transitions] = {
    (State.WAITING, Event.BEGIN): Transition(State.COPYING),
    (State.WAITING, Event.NOTHING_TO_DO): Transition(State.DONE, Outcome.SUCCESS),
    (State.WAITING, Event.DRAIN): Transition(State.DONE, ShuttingDownError),
    **{(State.WAITING, event): Transition(State.DONE, error) for event, error in _STOPPED_BY.items()},
    (State.COPYING, Event.JOB_DONE): Transition(State.DONE, Outcome.SUCCESS),
    (State.COPYING, Event.JOB_FAILED): Transition(State.DONE, Outcome.CAUSE),
    (State.COPYING, Event.DRAIN): Transition(State.COPYING),
    **{(State.COPYING, event): Transition(State.STOPPING, error) for event, error in _STOPPED_BY.items()},
    (State.STOPPING, Event.JOB_DONE): Transition(State.DONE, Outcome.SUCCESS),
    (State.STOPPING, Event.JOB_FAILED): Transition(State.DONE, Outcome.STOPPED),
    (State.STOPPING, Event.DRAIN): Transition(State.STOPPING),
    **{(State.STOPPING, event): Transition(State.STOPPING) for event in _STOPPED_BY},
    **{(State.DONE, event): Transition(State.DONE) for event in (Event.BEGIN, Event.NOTHING_TO_DO, Event.GIVEN_UP)},
}


def bug_in(state: State) -> Transition:
    """Return the transition for an event that the table has no row for: end what only waits; a job ends by itself."""
    return Transition(State.DONE, InternalError) if state is State.WAITING else Transition(state)


def as_markdown(transitions: Transitions = TRANSITIONS) -> str:
    """Return the table for docs/architecture.md."""
    rows = [("state", "event", "next state", "ends with"), ("---",) * 4]
    rows += [
        (state.name, event.value, "ignored" if row.state is state else row.state.name, _words(row.ends))
        for (state, event), row in transitions.items()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _words(ends: type[KvferryError] | Outcome) -> str:
    return ends.value if isinstance(ends, Outcome) else ends.code
