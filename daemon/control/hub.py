"""The hub of events inside the daemon: publishers need not know subscribers, nor be built after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kvferry.daemon.control.sessions import Session
from kvferry.pools.pool import Pool
from kvferry.protocol.events import SingleEvent


class SessionBegan(NamedTuple):
    """A session was opened and has sent no request yet."""

    session: Session


class SessionResumed(NamedTuple):
    """A session that had lost its socket was taken over by a peer, which may be another process."""

    session: Session


class SessionEnded(NamedTuple):
    """A session's socket was closed, or its process ended. It has been removed from the registry."""

    session: Session


class InstanceEnded(NamedTuple):
    """The last session of an instance has ended; published after that session's ``SessionEnded``."""

    owner_id: int


class EventAcknowledged(NamedTuple):
    """An engine has acknowledged an event of its session."""

    session: Session
    body: SingleEvent


class PoolRemoved(NamedTuple):
    """A pool was removed; its memory is freed after all handlers have returned."""

    pool: Pool


class DeviceEventsReached(NamedTuple):
    """The values of a session's event ring may have changed; ``values`` has them by slot."""

    session_id: int
    values: list[int]


class EndpointsChanged(NamedTuple):
    """The transfer state machine was called, and may have effects to be executed."""


EventT = TypeVar("EventT", bound=NamedTuple)


class EventHub:
    """Passes each event to the handlers of its type, synchronously and in the order in which they subscribed."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], list[Callable[[Any], None]]] = {}

    def __repr__(self) -> str:
        """Show how many handlers each event type has."""
        return f"<EventHub { ({kind.__name__: len(its) for kind, its in self._handlers.items()}) }>"

    def subscribe(self, kind: type[EventT], handler: Callable[[EventT], None]) -> None:
        """Call ``handler`` with every event of this type from now on."""
        self._handlers.setdefault(kind, []).append(handler)

    def publish(self, event: NamedTuple) -> None:
        """Call the handlers of the event's type; an exception of one skips the later ones and is raised here."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)
