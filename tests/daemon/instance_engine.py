"""A process of an engine instance, which tests kill: ``instance_engine.py PART RUNTIME_DIR INSTANCE REQUEST_ID …``.

It says on a line what it has, and waits to be killed.
"""

from __future__ import annotations

import signal
import sys

from kvferry.clients import Client, pages
from tests.kit.pools import MODEL, SPEC, hashes

PREFILL, DECODE = "prefill", "decode"
PAGES = 6
BLOCKS = 2


def main() -> None:
    """Be a scheduler, which owns pages and a lease, or a worker, which is named them and moves bytes."""
    part, runtime_dir, instance, request_id, *given = sys.argv[1:]
    client = Client.connect(runtime_dir, name=part, instance=instance)
    if part == "scheduler":
        client.create_pool(PREFILL, SPEC, model=MODEL)
        client.create_pool(DECODE, SPEC, model=MODEL, lifetime="instance")
        ids = [int(one) for one in client.allocate(PREFILL, PAGES)]
        client.wait_done(client.store(PREFILL, hashes(BLOCKS), ids[:BLOCKS]))
        said = [client.lookup(PREFILL, hashes(BLOCKS)).lease, *ids]
    else:
        lease, *ids = [int(one) for one in given]
        client.wait_done(client.load(PREFILL, lease, ids[:BLOCKS]))
        sent = client.send(PREFILL, request_id, [pages(ids[:BLOCKS])])
        client.wait_settled(sent)
        client.wait_done(client.offload(PREFILL, [pages(ids[:BLOCKS])]))
        said = [client.free(PREFILL, ids[-1:]).freed]
    print(*said, flush=True)  # noqa: T201  the test waits for it
    signal.pause()


if __name__ == "__main__":
    main()
