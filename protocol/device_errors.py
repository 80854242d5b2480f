"""What can be wrong with devices and graph tables. Import them from ``errors``, which has the tree of all."""

from __future__ import annotations

from kvferry.protocol.error_base import BusyError, CallerError, DaemonError


class UnknownTablesError(CallerError):
    """No graph tables of that name in this session."""

    code = "UNKNOWN_TABLES"
    remedy = "create them first: tables live as long as their session"


class TablesExistError(CallerError):
    """The session has graph tables of that name already."""

    code = "TABLES_EXIST"
    remedy = "take another name, or delete the old tables; captured graphs keep the addresses they were captured with"


class TablesBusyError(BusyError):
    """An update of these tables waits already."""

    code = "TABLES_BUSY"
    remedy = "let the update before it end: record its replay event, then send the next one"


class TorchMissingError(CallerError):
    """A tensor was asked for where torch is not installed, or is older than its dtype; the client's own, never sent."""

    code = "TORCH_MISSING"
    remedy = "on the host use array(), which needs numpy alone; or install torch, or a newer one"


class DeviceUnavailableError(DaemonError):
    """No such device on this host, or what drives it is missing."""

    code = "DEVICE_UNAVAILABLE"
    remedy = "run kvferry doctor: it says what is missing and how to get it"


class DeviceLostError(DaemonError):
    """A device failed, or a call to it never came back: nothing on it can be trusted any more."""

    code = "DEVICE_LOST"
    remedy = "the daemon ends and is started anew; create the pools again and capture graphs again"


class PoolLostError(DaemonError):
    """The pool's memory is gone: with its device, the daemon's last life, or the engine that registered it."""

    code = "POOL_LOST"
    remedy = "create or register it again, compute its contents again, and capture graphs again"
