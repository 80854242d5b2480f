"""Events inside the daemon: whoever publishes one need not know who takes it, nor be built after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kvferry.daemon.control.sessions import Session
from kvferry.pools.pool import Pool
from kvferry.protocol.requests import EventBody


class SessionBegan(NamedTuple):
    """A session was opened; nothing was asked in it yet."""

    session: Session


class SessionEnded(NamedTuple):
    """A session's socket was closed, or its process ended. It is in no registry any more."""

    session: Session


class InstanceEnded(NamedTuple):
    """The last session of an instance has ended; published after that session's ``SessionEnded``."""

    owner_id: int


class EventAcknowledged(NamedTuple):
    """An engine has seen an event that was sent to its session."""

    session: Session
    body: EventBody


class PoolRemoved(NamedTuple):
    """A pool can be used no longer; its memory is given back when all handlers have returned."""

    pool: Pool


class DeviceEventsReached(NamedTuple):
    """The counters of a session's event ring have changed; ``values`` by slot."""

    session_id: int
    values: list[int]


class EndpointsChanged(NamedTuple):
    """The transfer state machine was told something, and may have effects to be executed."""


EventT = TypeVar("EventT", bound=NamedTuple)


class EventHub:
    """Passes each event to the handlers of its type, at once and in the order in which they subscribed."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], list[Callable[[Any], None]]] = {}

    def __repr__(self) -> str:
        """Show who listens to what."""
        return f"<EventHub { ({kind.__name__: len(its) for kind, its in self._handlers.items()}) }>"

    def subscribe(self, kind: type[EventT], handler: Callable[[EventT], None]) -> None:
        """Call ``handler`` with every event of this type from now on."""
        self._handlers.setdefault(kind, []).append(handler)

    def publish(self, event: NamedTuple) -> None:
        """Call the handlers of the event's type. What one raises keeps the later ones from it, and is raised here."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)
