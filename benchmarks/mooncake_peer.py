"""The process that raw Mooncake writes go to: registers as much memory as it is told, and waits until it is ended."""

from __future__ import annotations

import sys

from kvferry.daemon.transports import mooncake_native
from kvferry.daemon.transports.mooncake_native import MooncakeSettings
from kvferry.pools.devices.host import HostRegion

ADDRESS = "127.0.0.1"


def main(fd: int, size_bytes: int) -> None:
    """Listen, say ``PORT ADDRESS``, and wait for the end of the input."""
    engine = mooncake_native.create(MooncakeSettings(address=ADDRESS))
    with HostRegion(fd, size_bytes) as region:
        assert engine.register_memory(region.address, size_bytes) == 0
        print(engine.get_rpc_port(), region.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
