"""LOG: the last lines of the daemon's log, which show what other users do: for operators only."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.process.access import check_operator
from kvferry.daemon.process.log_lines import LogLines
from kvferry.protocol.log_messages import Log, Logged


class LogReader:
    """Answers LOG."""

    def __init__(self, dispatcher: Dispatcher, tenant_of: Callable[[bytes], int | None], lines: LogLines) -> None:
        """``tenant_of`` returns the tenant who made a connection."""
        self._tenant_of = tenant_of
        self._lines = lines
        dispatcher.handle_open("LOG", self._log)

    def __repr__(self) -> str:
        """Show what it reads."""
        return f"<LogReader {self._lines!r}>"

    def _log(self, call: OpenCall) -> Logged:
        body, tenant = call.body, self._tenant_of(call.identity)
        assert isinstance(body, Log), body
        check_operator(tenant, "LOG says what others do")
        latest = self._lines.since(body.cursor, body.limit)
        return Logged(lines=latest.lines, cursor=latest.cursor, lost=latest.lost)
