"""An engine that registers host memory, sends from it and dies: ``python registering_victim.py RUNTIME_DIR POOL``."""

from __future__ import annotations

import signal
import sys

from kvferry.clients import Client, MhaSpec, SharedMemory, new_request_id, pages

SPEC = MhaSpec(layers=2, first_layer=4, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")


def main() -> None:
    """Register a pool, send a first chunk of its pages, say under which request, and wait to be killed."""
    runtime_dir, name = sys.argv[1:]
    client = Client.connect(runtime_dir, name="victim")
    memory = SharedMemory(1 << 20)
    arrays = {("main", role): memory.array((2, 17, 4, 2, 4), "float32") for role in ("k", "v")}
    client.register_pool(name, SPEC, arrays, device="host")
    request_id = new_request_id()
    sent = client.send(name, request_id, [pages([1, 2])], last=False)
    while sent.accepted is None:
        client.poll(10.0)
    print(request_id, flush=True)  # noqa: T201  the test waits for it
    signal.pause()


if __name__ == "__main__":
    main()
