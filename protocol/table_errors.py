"""Errors in updates of graph tables. Import them from ``errors``, which lists all."""

from __future__ import annotations

from kvferry.protocol.error_base import CallerError


class TableOverflowError(CallerError):
    """A row needs more pages than the graph tables have columns."""

    code = "TABLE_OVERFLOW"
    remedy = "create the tables for the longest request, all draft tokens and the width of the engine's own token map"


class TableHoleError(CallerError):
    """A row's length needs a page that the row was never given."""

    code = "TABLE_HOLE"
    remedy = "send the page as an entry, or the row as a whole, at the latest with the length that needs it"
