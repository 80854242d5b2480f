"""A process with a Mooncake engine of its own, driven line by line.

Started with the descriptor of a memory file and its size, it maps and registers that memory and says
``{"session_name", "address"}``. ``{"write": [SESSION, REMOTE_ADDRESS, SIZE]}`` writes the first bytes of its memory and
says ``{"done": ERROR_OR_NULL, "may_still_land"}`` at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kvferry.daemon.transports.mooncake import MooncakeEngine
from kvferry.daemon.transports.mooncake_native import MooncakeSettings
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import KvferryError

WRITE_TIMEOUT_S = 60.0


def send(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def say_done(error: KvferryError | None) -> None:
    send(done=None if error is None else str(error), may_still_land=getattr(error, "may_still_land", None))


def obey(engine: MooncakeEngine, address: int, order: dict[str, Any]) -> None:
    session_name, remote_address, size_bytes = order["write"]
    engine.write(session_name, address, remote_address, size_bytes, say_done, timeout_s=WRITE_TIMEOUT_S)


async def main(fd: int, size_bytes: int, progress_timeout_s: int) -> None:
    settings = MooncakeSettings(address="127.0.0.1", progress_timeout_s=progress_timeout_s)
    with HostRegion(fd, size_bytes) as region:
        async with MooncakeEngine(settings) as engine:
            await engine.register(region.address, size_bytes)
            send(session_name=engine.session_name, address=region.address)
            while line := await asyncio.to_thread(sys.stdin.readline):
                obey(engine, region.address, json.loads(line))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
