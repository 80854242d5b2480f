"""An error as it travels: in a reply, in an event, in the output of a command."""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``field`` names the message's field at fault, dotted (``lists[0].pages``), or is empty.

    ``request_id``: of the transfer that it is about, whole; empty where it is about none.
    """

    code: str
    detail: str
    retryable: bool = False
    field: str = ""
    remedy: str = ""
    request_id: str = ""
