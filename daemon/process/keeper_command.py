"""``kvferry keeper``: a keeper that stays, for a service manager that ends what a daemon of its own has started."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

from kvferry.daemon.process import detached, keeper
from kvferry.daemon.process.access import DIRECTORY_MODE, KEEPER_SOCKET
from kvferry.daemon.process.host import ServiceManager
from kvferry.pools.host.placement import offer
from kvferry.pools.tiers.own_folder import OwnFolder
from kvferry.protocol import programs
from kvferry.protocol.config.load import load_config
from kvferry.protocol.errors import AccessDeniedError, ConfigError, KvferryError
from kvferry.protocol.settings import runtime_dirs

_FIELD: Final = "runtime_dir"
_LOOK_S: Final = 5.0
EXIT_BAD_INPUT: Final = 2


def main(arguments: list[str] | None = None) -> NoReturn:
    """Become the keeper of a runtime directory; exit where that fails, with the status of ``kvferry daemon``."""
    parser = argparse.ArgumentParser(
        prog="kvferry keeper", description="Keep the NPU memory of this node's pools from one daemon to the next."
    )
    programs.add_keeper(parser)
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, offer(), os.environ)
        folder = Path(options.runtime_dir or config.runtime_dir or runtime_dirs(os.environ)[0]).absolute()
        descriptor = _listening(folder)
    except KvferryError as error:
        sys.stderr.write(f"kvferry keeper: {error}\n")
        sys.exit(EXIT_BAD_INPUT if isinstance(error, ConfigError) and not error.retryable else 1)
    ServiceManager().ready("keeping")
    command = [sys.executable, "-I", "-S", keeper.__file__, str(descriptor), str(config.keeper.grace_s), keeper.STAYS]
    os.execv(sys.executable, command)  # noqa: S606  ourselves, no shell


def _listening(folder: Path) -> int:
    """Return the descriptor of a socket that listens in a runtime directory, for a program that is executed.

    Raises:
        ConfigError: it is not this user's alone, or there is a keeper already.
        AccessDeniedError: it cannot be written.
    """
    try:
        folder.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        OwnFolder(folder, _FIELD).close()
        there = detached.connected(folder / KEEPER_SOCKET, _LOOK_S)
        if there is not None:
            there.close()
            raise ConfigError(f"{folder} has a keeper already", field=_FIELD, retryable=True)
        listener = detached.bound(folder / KEEPER_SOCKET)
    except OSError as cause:
        raise AccessDeniedError(f"{folder}: {cause.strerror}", field=_FIELD) from cause
    listener.listen()
    listener.set_inheritable(True)
    return listener.detach()


if __name__ == "__main__":
    main()
