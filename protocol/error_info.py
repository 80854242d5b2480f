"""The wire form of an error: in replies, events and the output of commands."""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``field`` is the path of the field at fault (``lists[0].pages``), or empty.

    ``request_id`` is that of the transfer concerned, in full; empty if no transfer is concerned.
    """

    code: str
    detail: str
    retryable: bool = False
    field: str = ""
    remedy: str = ""
    request_id: str = ""
