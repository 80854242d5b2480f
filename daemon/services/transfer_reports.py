"""What the daemon's log and counters say of transfers."""

from __future__ import annotations

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.effects import WarnTrimmed
from kvferry.protocol.events import Finished

log = structlog.get_logger(__name__)


def record_finished(event: Finished, counters: Counters) -> None:
    """Count and log the outcome of one side of a transfer."""
    outcome = event.error.code if event.error else "OK"
    counters.add(f"transfers.{event.direction}.{outcome.lower()}")
    if event.direction == "receive" and not event.error:
        counters.add("transfers.moved_bytes", event.moved_bytes)
    log.info(
        "transfer finished",
        request_id=event.request_id,
        direction=event.direction,
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
    send_request, receive_request, trim = effect
    counters.add("transfers.trimmed")
    log.warning(
        "lists of unequal length were cut to the shorter one; give first_page on both sides",
        request_id=receive_request.request_id,
        component=trim.component,
        source=send_request.pool.name,
        source_daemon=send_request.origin.peer.address if send_request.origin else "",
        source_pages=trim.source_length,
        destination=receive_request.pool.name,
        destination_pages=trim.destination_length,
        dropped_pages=trim.pages,
    )
