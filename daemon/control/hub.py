"""The hub of events inside the daemon: publishers need not know subscribers, nor be built after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar


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
