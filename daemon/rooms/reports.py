"""What the daemon's log and counters say of hand-offs."""

from __future__ import annotations

import structlog

from kvferry.daemon.metrics import Counters
from kvferry.daemon.rooms.effects import WarnTrimmed
from kvferry.protocol.events import Finished

log = structlog.get_logger(__name__)


def record_finished(event: Finished, counters: Counters) -> None:
    """Count and log the outcome of one side of a hand-off."""
    outcome = event.error.code if event.error else "OK"
    counters.add(f"rooms.{event.side}.{outcome.lower()}")
    if event.side == "receive" and not event.error:
        counters.add("transfers.moved_bytes", event.moved_bytes)
    log.info(
        "hand-off finished",
        request_id=event.request_id,
        side=event.side,
        pool=event.pool,
        outcome=outcome,
        detail=event.error.detail if event.error else "",
        pages=event.pages,
        moved_bytes=event.moved_bytes,
        waited_us=event.waited_us,
        moved_us=event.moved_us,
    )


def warn_trimmed(effect: WarnTrimmed, counters: Counters) -> None:
    """Count and log that lists were cut to one length."""
    offer, room, trim = effect
    counters.add("rooms.trimmed")
    log.warning(
        "lists of unequal length were cut to the shorter one; give first_page on both sides",
        request_id=room.request_id,
        component=trim.component,
        source=offer.pool.name,
        source_daemon=offer.origin.peer.address if offer.origin else "",
        source_pages=trim.source_length,
        destination=room.pool.name,
        destination_pages=trim.destination_length,
        dropped_pages=trim.pages,
    )
