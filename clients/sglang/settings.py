"""What the environment says to a SGLang server, and its end where it cannot go on."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping
from typing import NamedTuple, NoReturn, cast, get_args

import msgspec

from kvferry.clients.engine_pool import Memory
from kvferry.protocol.errors import InvalidFieldError, PoolLostError
from kvferry.protocol.ids import PoolName

logger = logging.getLogger(__name__)


class Settings(NamedTuple):
    """What the environment says.

    Attributes:
        runtime_dir: KVFERRY_RUNTIME_DIR, the daemon's; None: where a client looks by itself.
        pool: KVFERRY_SGLANG_POOL, the name of this server's pools without ranks; empty: of its mode and port.
        memory: KVFERRY_SGLANG_MEMORY; docs/sglang.md: what each survives.
    """

    runtime_dir: str | None
    pool: str
    memory: Memory


def settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return what the environment says.

    Raises:
        InvalidFieldError: a variable has a value that it cannot have; ``field`` is its name.
    """
    memory = environment.get("KVFERRY_SGLANG_MEMORY", "daemon")
    if memory not in get_args(Memory):
        raise InvalidFieldError(
            f"KVFERRY_SGLANG_MEMORY is {memory!r}: say daemon or engine", field="KVFERRY_SGLANG_MEMORY"
        )
    pool = environment.get("KVFERRY_SGLANG_POOL", "")
    try:
        if pool:
            msgspec.convert(pool, PoolName)
    except msgspec.ValidationError as error:
        raise InvalidFieldError(
            f"KVFERRY_SGLANG_POOL is {pool!r}: up to 128 letters, digits, dots, dashes and underscores, the first a "
            "letter or digit",
            field="KVFERRY_SGLANG_POOL",
        ) from error
    return Settings(environment.get("KVFERRY_RUNTIME_DIR") or None, pool, cast("Memory", memory))


def end_server(reason: PoolLostError) -> NoReturn:
    """End this scheduler process, which cannot go on, and tell the server of it as SGLang's schedulers do.

    The process must not stay: for one that lives SGLang waits a minute for core dumps of a CUDA device, and answers
    nobody meanwhile.
    """
    logger.critical("kvferry: %s; this engine ends", reason)
    server = multiprocessing.parent_process()
    if server is not None and server.pid is not None:  # else something other than SGLang started this process
        os.kill(server.pid, signal.SIGQUIT)
    os._exit(1)
