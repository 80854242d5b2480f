"""The replies to a request that the daemon does not execute: ERROR and BUSY."""

from __future__ import annotations

from kvferry.protocol.base import Body
from kvferry.protocol.errors import ErrorInfo


class ErrorReply(Body, frozen=True, kw_only=True, tag="ERROR"):
    """The request was refused, or failed."""

    error: ErrorInfo


class Busy(Body, frozen=True, kw_only=True, tag="BUSY"):
    """The request is valid but a bound on requests in flight is reached: retry it after ``retry_after_ms``."""

    retry_after_ms: int
    detail: str
