"""The peer of the round trips: a bare ROUTER on uvloop that drains its descriptor and sends back what it got.

No decoding, no checks, no fairness: what pyzmq alone costs. Run as a script with the address to bind; it says
``ready`` on stdout and echoes until SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import uvloop
import zmq


async def serve(address: str) -> None:
    """Echo at this address until SIGTERM."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)

        def drain() -> None:
            with contextlib.suppress(zmq.Again):
                while True:
                    router.send_multipart(router.recv_multipart(zmq.NOBLOCK), zmq.NOBLOCK)

        loop.add_reader(router.FD, drain)
        loop.call_soon(drain)
        print("ready", flush=True)
        await ended.wait()
        loop.remove_reader(router.FD)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
