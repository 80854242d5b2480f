"""LOG: the last lines of the daemon's log, which show what other users do: for operators only."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.process.access import may_see_all
from kvferry.daemon.process.log_lines import LogLines
from kvferry.protocol.errors import AccessDeniedError
from kvferry.protocol.log_messages import Log, Logged


class LogReader:
    """Answers LOG."""

    def __init__(self, dispatcher: Dispatcher, user_of: Callable[[bytes], int | None], lines: LogLines) -> None:
        """``user_of`` returns the user who made a connection."""
        self._user_of = user_of
        self._lines = lines
        dispatcher.handle_open("LOG", self._log)

    def __repr__(self) -> str:
        """Show what it reads."""
        return f"<LogReader {self._lines!r}>"

    def _log(self, call: OpenCall) -> Logged:
        body, user = call.body, self._user_of(call.identity)
        assert isinstance(body, Log), body
        if not may_see_all(user):
            raise AccessDeniedError(
                f"LOG says what others do: user {user} is neither root nor the daemon's own user {os.geteuid()}"
            )
        latest = self._lines.since(body.cursor, body.limit)
        return Logged(lines=latest.lines, cursor=latest.cursor, lost=latest.lost)
