"""Errors in the use of a client, found before anything is sent. Import them from ``errors``."""

from __future__ import annotations

from kvferry.protocol.error_base import CallerError


class ClientClosedError(CallerError):
    """The client was closed, possibly while the call was waiting; or an object that it mapped was closed separately."""

    code = "CLIENT_CLOSED"
    remedy = (
        "connect again: a closed client's pages and transfers were released; if the client is open, attach the pool, "
        "or create the tables or the ring, again"
    )


class ConcurrentUseError(CallerError):
    """A client is used by two threads at a time, or outside its event loop. Nothing was sent."""

    code = "CONCURRENT_USE"
    remedy = "give each thread or event loop its own client, or let one thread at a time call this one"


class ForkedError(CallerError):
    """A client, or memory that it mapped, is used in a process forked from its owner."""

    code = "FORKED"
    remedy = "connect and attach the pools in this process; the parent's client is not affected"


class MisuseError(CallerError):
    """A call that is not valid in the current state."""

    code = "MISUSE"
    remedy = "see docs/engines.md and the examples"
