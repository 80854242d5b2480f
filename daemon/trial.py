"""``python -m kvferry.daemon.trial FILE KEY``: try what a start of the daemon needs for one key of its configuration.

For ``kvferry doctor``, by the code that the daemon itself runs, and in a process of its own, as a driver may hang and
Mooncake reads its settings once. Prints ``{"problem", "remedy"}`` as JSON; no problem is an empty text. Gives back what
it takes, but must not be asked for what a running daemon holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvferry.daemon.control.control_socket import listening_on
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, check_delivery
from kvferry.daemon.transports.network_memory import network_settings
from kvferry.pools.host.placement import offer
from kvferry.protocol.config.load import load_config
from kvferry.protocol.config.schema import Config
from kvferry.protocol.errors import KvferryError


def _listen(config: Config) -> None:
    if config.peers.listen is not None:
        listening_on(config.peers.listen, "peers.listen").close()


def _metrics(config: Config) -> None:
    if config.metrics.listen is not None:
        listening_on(config.metrics.listen, "metrics.listen").close()


def _network(config: Config) -> None:
    if config.network.transport != "none":
        check_delivery(network_settings(config))


def _store(config: Config) -> None:
    remote = config.tiers.remote
    if remote.transport != "none" and config.store_address:
        settings = MooncakeSettings(section="tiers.remote", address=config.store_address, protocol=remote.protocol)
        check_delivery(settings)


def _devices(config: Config) -> None:
    devices = Devices(config.devices, lambda _name, _error: None)
    for name in config.devices.open:
        devices.open(name)


TRIALS: Final[dict[str, Callable[[Config], None]]] = {
    "peers.listen": _listen,
    "metrics.listen": _metrics,
    "network.address": _network,
    "tiers.remote.address": _store,
    "devices.open": _devices,
}


class Outcome(msgspec.Struct, frozen=True):
    """What is printed."""

    problem: str = ""
    remedy: str = ""


def tried(path: Path, key: str) -> Outcome:
    """Try one key of a configuration file."""
    try:
        TRIALS[key](load_config(path, offer()))
    except KvferryError as error:
        return Outcome(error.detail, error.remedy)
    return Outcome()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # as the daemon does
    sys.stdout.buffer.write(msgspec.json.encode(tried(Path(sys.argv[1]), sys.argv[2])) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # a driver's threads may hang
