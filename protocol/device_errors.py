"""Errors of devices and graph tables. Import them from ``errors``, which lists all."""

from __future__ import annotations

from kvferry.protocol.error_base import BusyError, CallerError, DaemonError


class UnknownTablesError(CallerError):
    """No graph tables of that name in this session."""

    code = "UNKNOWN_TABLES"
    remedy = "create them first: tables live as long as their session"


class TablesExistError(CallerError):
    """The session already has graph tables of that name."""

    code = "TABLES_EXIST"
    remedy = "use another name, or delete the old tables; captured graphs keep the addresses they were captured with"


class TablesBusyError(BusyError):
    """An update of these tables is already waiting."""

    code = "TABLES_BUSY"
    remedy = "let the waiting update complete: record the replay event it waits for, then send the next one"


class TorchMissingError(CallerError):
    """A tensor was requested, but torch is missing or too old for its dtype; raised by the client, never sent."""

    code = "TORCH_MISSING"
    remedy = "on the host use array(), which needs only numpy; or install torch, or a newer version"


class DeviceUnavailableError(DaemonError):
    """No such device on this host, or its driver or software is missing."""

    code = "DEVICE_UNAVAILABLE"
    remedy = "run kvferry doctor: it reports what is missing and how to get it"


class DeviceLostError(DaemonError):
    """A device failed, or a call to it never returned: its contents can no longer be trusted."""

    code = "DEVICE_LOST"
    remedy = "the daemon exits and is restarted; create the pools again and capture graphs again"


class PoolLostError(DaemonError):
    """The pool's memory was lost with its device, the previous daemon, or the engine that registered it."""

    code = "POOL_LOST"
    remedy = "create or register it again, recompute its contents, and capture graphs again"
