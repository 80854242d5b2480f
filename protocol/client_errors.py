"""What can be wrong with the use of a client, found before anything is sent. Import them from ``errors``."""

from __future__ import annotations

from kvferry.protocol.error_base import CallerError


class ClientClosedError(CallerError):
    """The client was closed, or is being closed while the call waits; or what it has mapped was closed by itself."""

    code = "CLIENT_CLOSED"
    remedy = (
        "connect again: a closed client's pages and transfers were given back; where the client is open, attach "
        "the pool, or make the tables or the ring, again"
    )


class ConcurrentUseError(CallerError):
    """A client is used by two threads at a time, or away from its event loop. Nothing was sent."""

    code = "CONCURRENT_USE"
    remedy = "give each thread or event loop a client of its own, or let one thread at a time call this one"


class ForkedError(CallerError):
    """A client, or memory that it mapped, is used in a process that was forked from the one that it belongs to."""

    code = "FORKED"
    remedy = "connect and attach the pools in this process; the parent's client goes on unharmed"


class MisuseError(CallerError):
    """A call that makes no sense where it stands."""

    code = "MISUSE"
    remedy = "see docs/engines.md and the examples"
