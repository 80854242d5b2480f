"""LOG: what the daemon's log says of late, by a cursor."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import AnsweredBy, ReplyBody

MAX_LINES = 256
"""Lines of one reply."""

Level = Literal["info", "warning", "error", "critical"]


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the daemon's log. ``cursor``: where to go on after it. ``at``: its time, ISO 8601, UTC."""

    cursor: int
    at: str
    level: Level
    event: str
    fields: dict[str, Any]


class Logged(ReplyBody, frozen=True, kw_only=True, tag="LOGGED"):
    """LOG's reply: lines in their order; fewer than were asked for where there are no more.

    ``cursor``: where to go on. ``lost``: lines between the given cursor and the first of these are gone, or the cursor
    is of another daemon: a restart begins a new log.
    """

    lines: tuple[LogLine, ...]
    cursor: int
    lost: bool = False


class Log(AnsweredBy[Logged], frozen=True, kw_only=True, tag="LOG"):
    """Ask for lines of the daemon's log from a cursor on; 0: the oldest one that the daemon remembers.

    The daemon remembers lines from level ``info`` on, whatever its log shows. For its own user and root.
    """

    in_batch = False
    after_restart = "again"

    cursor: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_LINES)] = MAX_LINES
