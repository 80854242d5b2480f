"""The transition table of endpoints, which the transfer state machine executes. Data, no behaviour.

Endpoints of both directions go through the same states, in order: OPEN until the outcome is known, FINISHED until no
byte can move any more, SETTLED. One whose end raised is QUARANTINED in place of SETTLED: its pages stay held, and no
event reaches it any more. A row that stays in its state ignores the event. An event that has no row for the endpoint's
state is a bug of the daemon: the endpoint fails with INTERNAL, and still settles.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    KvferryError,
    PeerCancelledError,
    PeerLostError,
    ShuttingDownError,
)


class State(enum.Enum):
    """The states of an endpoint, in order."""

    OPEN = "open"
    FINISHED = "finished"
    SETTLED = "settled"
    QUARANTINED = "quarantined"


class Kind(enum.Enum):
    """The kinds of endpoints: of a session here, or of another daemon as this daemon sees it."""

    SEND = "send request"
    RECEIVE = "receive request"
    REMOTE_SEND = "another daemon's send request"
    REMOTE_RECEIVE = "another daemon's receive request"


class Event(enum.Enum):
    """What can happen to an endpoint; the value is its name in docs/architecture.md."""

    CANCEL = "its own CANCEL"
    DEADLINE = "its deadline passes"
    SESSION_ENDED = "its session ends"
    SESSION_ENDED_SENT = "its session ends after all was sent"
    DRAIN = "the daemon ends, and a message is missing"
    PEER_ABANDONED = "the other half is given up before it came"
    PEERS_ENDED_BEFORE = "those it would wait for had ended before it came"
    MATCHED_FAILED = "a matched endpoint failed"
    RECEIVERS_DONE = "every receive request has succeeded"
    RECEIVERS_FAILED = "every receive request has ended, one failed"
    COMPLETE = "all planned cells have arrived, all sources are done"
    CELLS_MISSING = "all copies have ended, and cells are missing"
    COPY_FAILED = "a copy failed"
    REFUSED = "its chunk does not fit"
    WITHDRAWN = "its daemon withdraws it"
    CLOSED = "its daemon says that it succeeded"
    CLOSED_FAILED = "its daemon says that it failed"
    DAEMON_LOST = "its daemon is lost"
    BEGUN_ANEW = "its receiver has begun anew"
    BROKEN_OFF = "what was done for it raised: a bug, or no memory"
    NOTHING_UNDER_WAY = "nothing of it is under way any more"
    END_RAISED = "its end, or that of a receive request of it, raised"


class Outcome(enum.Enum):
    """What an endpoint finishes with, where the table names no error type."""

    NOTHING = ""
    SUCCESS = "success"
    CAUSE = "the cause"


class Notice(enum.Enum):
    """Which message other daemons are sent."""

    NONE = ""
    CLOSE = "RECEIVE_CLOSED"
    WITHDRAW = "SEND_WITHDRAWN"
    REFUSE = "SEND_REFUSED"


Result: TypeAlias = type[KvferryError] | Outcome


class Transition(NamedTuple):
    """One row of the table: what an event does.

    Attributes:
        state: the next state.
        own: what the endpoint finishes with; nothing for another daemon's, whose session is there.
        matched: what its matched endpoints finish with.
        tombstone: whether a tombstone is left for endpoints that have not come.
        notice: which message is sent to other daemons that have, or expect, a half of the request.
    """

    state: State
    own: Result = Outcome.NOTHING
    matched: Result = Outcome.NOTHING
    tombstone: bool = False
    notice: Notice = Notice.NONE


Key: TypeAlias = tuple[Kind, State, Event]
Transitions: TypeAlias = Mapping[Key, Transition]

_CAUSE: Final = Outcome.CAUSE
_STAYS_OPEN: Final = Transition(State.OPEN)
_STAYS_FINISHED: Final = Transition(State.FINISHED)


def _fails(own: Result, matched: Result, notice: Notice = Notice.NONE, *, tombstone: bool = False) -> Transition:
    return Transition(State.FINISHED, own, matched, tombstone, notice)


def _fails_here(matched: Result, notice: Notice = Notice.NONE, *, tombstone: bool = False) -> Transition:
    """Return the row in which another daemon's endpoint fails: the session that gets its event is not of this one."""
    return Transition(State.FINISHED, Outcome.NOTHING, matched, tombstone, notice)


_OPEN: Final[Mapping[Kind, Mapping[Event, Transition]]] = {
    Kind.SEND: {
        Event.CANCEL: _fails(CancelledError, PeerCancelledError, tombstone=True),
        Event.DEADLINE: _fails(DeadlineError, DeadlineError, tombstone=True),
        Event.SESSION_ENDED: _fails(PeerLostError, PeerLostError, tombstone=True),
        Event.SESSION_ENDED_SENT: _STAYS_OPEN,
        Event.DRAIN: _fails(ShuttingDownError, ShuttingDownError),
        Event.PEER_ABANDONED: _fails(_CAUSE, _CAUSE),
        Event.PEERS_ENDED_BEFORE: _fails(_CAUSE, _CAUSE),
        Event.RECEIVERS_FAILED: _fails(_CAUSE, Outcome.NOTHING),
        Event.RECEIVERS_DONE: Transition(State.FINISHED, Outcome.SUCCESS),
        Event.BROKEN_OFF: _fails(_CAUSE, _CAUSE),
    },
    Kind.RECEIVE: {
        Event.CANCEL: _fails(CancelledError, PeerCancelledError, Notice.CLOSE, tombstone=True),
        Event.DEADLINE: _fails(DeadlineError, DeadlineError, Notice.CLOSE, tombstone=True),
        Event.SESSION_ENDED: _fails(PeerLostError, PeerLostError, Notice.CLOSE, tombstone=True),
        Event.DRAIN: _fails(ShuttingDownError, ShuttingDownError, Notice.CLOSE),
        Event.PEER_ABANDONED: _fails(_CAUSE, _CAUSE, Notice.CLOSE),
        Event.PEERS_ENDED_BEFORE: _fails(_CAUSE, _CAUSE, Notice.CLOSE),
        Event.MATCHED_FAILED: _fails(_CAUSE, _CAUSE, Notice.CLOSE),
        Event.COMPLETE: Transition(State.FINISHED, Outcome.SUCCESS, Outcome.SUCCESS, notice=Notice.CLOSE),
        Event.CELLS_MISSING: _fails(InternalError, InternalError, Notice.CLOSE),
        Event.COPY_FAILED: _fails(_CAUSE, _CAUSE, Notice.CLOSE),
        Event.BROKEN_OFF: _fails(_CAUSE, _CAUSE, Notice.CLOSE),
    },
    Kind.REMOTE_SEND: {
        Event.RECEIVERS_FAILED: Transition(State.FINISHED),
        Event.RECEIVERS_DONE: Transition(State.FINISHED),
        Event.REFUSED: _fails_here(_CAUSE, Notice.REFUSE),
        Event.WITHDRAWN: _fails_here(_CAUSE),
        Event.DAEMON_LOST: _fails_here(PeerLostError),
        Event.BROKEN_OFF: _fails_here(_CAUSE, Notice.REFUSE),
    },
    Kind.REMOTE_RECEIVE: {
        Event.DEADLINE: _fails_here(DeadlineError, tombstone=True),
        Event.MATCHED_FAILED: _fails_here(_CAUSE, Notice.WITHDRAW),
        Event.REFUSED: _fails_here(_CAUSE),
        Event.CLOSED: Transition(State.FINISHED, matched=Outcome.SUCCESS),
        Event.CLOSED_FAILED: _fails_here(_CAUSE, tombstone=True),
        Event.DAEMON_LOST: _fails_here(PeerLostError),
        Event.BEGUN_ANEW: _fails_here(PeerLostError),
        Event.BROKEN_OFF: _fails_here(_CAUSE, Notice.WITHDRAW),
    },
}
_FINISHED_IGNORES: Final[Mapping[Kind, tuple[Event, ...]]] = {
    Kind.SEND: (Event.CANCEL, Event.SESSION_ENDED, Event.SESSION_ENDED_SENT, Event.DRAIN, Event.RECEIVERS_FAILED),
    Kind.RECEIVE: (Event.CANCEL, Event.SESSION_ENDED, Event.DRAIN, Event.COPY_FAILED),
    Kind.REMOTE_SEND: (Event.RECEIVERS_FAILED, Event.WITHDRAWN, Event.DAEMON_LOST),
    Kind.REMOTE_RECEIVE: (Event.REFUSED,),
}

TRANSITIONS: Final[Transitions] = {
    **{(kind, State.OPEN, event): row for kind, rows in _OPEN.items() for event, row in rows.items()},
    **{
        (kind, State.FINISHED, event): _STAYS_FINISHED for kind, events in _FINISHED_IGNORES.items() for event in events
    },
    (Kind.REMOTE_SEND, State.FINISHED, Event.REFUSED): _STAYS_FINISHED._replace(notice=Notice.REFUSE),
    **{(kind, State.FINISHED, Event.NOTHING_UNDER_WAY): Transition(State.SETTLED) for kind in Kind},
    **{(kind, State.FINISHED, Event.END_RAISED): Transition(State.QUARANTINED) for kind in Kind},
}


def bug_in(state: State) -> Transition:
    """Return the row for an event that the table has no row for."""
    if state is State.OPEN:
        return _fails(InternalError, InternalError, Notice.CLOSE)
    return Transition(state)
