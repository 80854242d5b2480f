"""The base class of errors, and its four kinds by who is at fault. The errors themselves are in ``errors``."""

from __future__ import annotations

from typing import ClassVar

from kvferry.protocol.error_info import ErrorInfo


class KvferryError(Exception):
    """The base of every kvferry error. ``detail`` describes what happened, with the values involved.

    ``request_id`` is that of the transfer concerned, for correlating logs; empty if no transfer is concerned.
    """

    by_code: ClassVar[dict[str, type[KvferryError]]] = {}
    code: str = "INTERNAL"
    retryable: bool = False
    remedy: str = ""

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls):
            cls.by_code[cls.code] = cls

    def __init__(self, detail: str, *, field: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.request_id = ""

    def __str__(self) -> str:
        where = f"{self.field and f' [{self.field}]'}{self.request_id and f' request {self.request_id}'}"
        return f"{self.code}{where}: {self.detail}{self.remedy and f' ({self.remedy})'}"

    def info(self) -> ErrorInfo:
        """Return the error in its wire form."""
        return ErrorInfo(
            code=self.code,
            detail=self.detail,
            retryable=self.retryable,
            field=self.field,
            remedy=self.remedy,
            request_id=self.request_id,
        )


class CallerError(KvferryError):
    """The message or its sender is wrong; sending it again unchanged does not help."""


class PeerError(KvferryError):
    """The other side of a transfer failed it."""


class BusyError(KvferryError):
    """The message is valid and may succeed later, unchanged."""

    retryable = True


class DaemonError(KvferryError):
    """The daemon or its host failed."""
