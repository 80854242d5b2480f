"""What the daemon answers to any request that it does not execute: ERROR and BUSY."""

from __future__ import annotations

from kvferry.protocol.base import Body
from kvferry.protocol.error_info import ErrorInfo


class ErrorReply(Body, frozen=True, kw_only=True, tag="ERROR"):
    """The request was refused, or failed."""

    error: ErrorInfo


class Busy(Body, frozen=True, kw_only=True, tag="BUSY"):
    """The request is right but a bound on work in flight is reached: try again, unchanged, after a while."""

    retry_after_ms: int
    detail: str
