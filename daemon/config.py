"""The daemon's configuration: one TOML file, every key optional, every mistake named by its key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.limits import Limits

Positive = Annotated[int, Meta(ge=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are mistakes."""


class LoggingConfig(_Section, frozen=True, kw_only=True):
    """``auto`` writes console lines to a terminal and JSON lines elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class PoolsConfig(_Section, frozen=True, kw_only=True):
    """``max_bytes`` bounds all regions together; by default 80 % of the host's memory."""

    max_bytes: Positive | None = None
    populate: bool = True


class TransfersConfig(_Section, frozen=True, kw_only=True):
    """``threads`` copy, by default one a core and at most 4; ``chunk_bytes`` between two looks at the queue."""

    threads: Annotated[int, Meta(ge=1, le=64)] | None = None
    chunk_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 4 << 20


class ServiceConfig(_Section, frozen=True, kw_only=True):
    """``drain_timeout_s`` is how long SIGTERM lets running hand-offs finish."""

    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class Config(_Section, frozen=True, kw_only=True):
    """The whole file."""

    runtime_dir: str | None = None
    logging: LoggingConfig = LoggingConfig()
    pools: PoolsConfig = PoolsConfig()
    transfers: TransfersConfig = TransfersConfig()
    service: ServiceConfig = ServiceConfig()
    limits: Limits = Limits()

    @property
    def max_pool_bytes(self) -> int:
        """Return the bound on all regions together."""
        if self.pools.max_bytes is not None:
            return self.pools.max_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5

    @property
    def copy_threads(self) -> int:
        """Return how many threads copy."""
        return self.transfers.threads or min(4, len(os.sched_getaffinity(0)))


def load_config(path: Path) -> Config:
    """Return the configuration in a TOML file.

    Raises:
        ConfigError: the file cannot be read or parsed, or a key is unknown or has a wrong value; names the key.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Config)
    except OSError as cause:
        raise ConfigError(f"{path}: {cause.strerror}") from cause
    except msgspec.ValidationError as cause:
        what, _, where = str(cause).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        if "unknown field" in what:
            key = ".".join(part for part in (key, what.split("`")[1]) if part)
        raise ConfigError(f"{path}: {what}", field=key) from cause
    except (msgspec.MsgspecError, ValueError) as cause:
        raise ConfigError(f"{path}: {cause}") from cause
