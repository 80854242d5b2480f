"""The states of an operation, and what each event does to it: what the runner of coroutines is compared with.

docs/architecture.md shows the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from kvferry.protocol.errors import CancelledError, DeadlineError, KvferryError, ShuttingDownError


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


Key: TypeAlias = tuple[State, Event]

_STOPPED_BY: Final[Mapping[Event, type[KvferryError]]] = {
    Event.CANCEL: CancelledError,
    Event.DEADLINE: DeadlineError,
    Event.SESSION_ENDED: CancelledError,
}

TRANSITIONS: Final[Mapping[Key, Transition]] = {
    (State.WAITING, Event.BEGIN): Transition(State.COPYING),
    (State.WAITING, Event.NOTHING_TO_DO): Transition(State.DONE, Outcome.SUCCESS),
    (State.WAITING, Event.DRAIN): Transition(State.DONE, ShuttingDownError),
    **{(State.WAITING, event): Transition(State.DONE, error) for event, error in _STOPPED_BY.items()},
    (State.WAITING, Event.GIVEN_UP): Transition(State.DONE, Outcome.CAUSE),
    (State.COPYING, Event.JOB_DONE): Transition(State.DONE, Outcome.SUCCESS),
    (State.COPYING, Event.JOB_FAILED): Transition(State.DONE, Outcome.CAUSE),
    (State.COPYING, Event.DRAIN): Transition(State.COPYING),
    **{(State.COPYING, event): Transition(State.STOPPING, error) for event, error in _STOPPED_BY.items()},
    (State.STOPPING, Event.JOB_DONE): Transition(State.DONE, Outcome.SUCCESS),
    (State.STOPPING, Event.JOB_FAILED): Transition(State.DONE, Outcome.STOPPED),
    (State.STOPPING, Event.DRAIN): Transition(State.STOPPING),
    **{(State.STOPPING, event): Transition(State.STOPPING) for event in _STOPPED_BY},
}
