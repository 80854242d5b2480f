"""An engine that has a pool of 256 MiB and pings: ``patient_engine.py RUNTIME_DIR COMMAND …``.

It runs the command, which ends its daemon in some way, resumes its session, and prints as JSON how long that took from
the end to the first reply, and whether the pool is as it was, seen by itself and by another client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np

from kvferry.clients import Client, MhaSpec
from kvferry.protocol.errors import DaemonLostError

SPEC = MhaSpec(layers=4, tokens=65536, page_size=128, kv_heads=4, head_dim=64, dtype="float16")
PATIENCE_S = 60.0


def main(runtime_dir: str, command: list[str]) -> None:
    """Run the command, and print what it was like."""
    noise = np.random.default_rng(7)
    client = Client.connect(runtime_dir, name="patient", reconnect=False, keep=True)
    pool = client.create_pool("patient", SPEC)
    arrays = [pool.array("main", role) for role in ("k", "v")]
    for array in arrays:
        array.view(np.uint8)[:] = noise.integers(0, 256, array.view(np.uint8).shape, np.uint8)
    before = [array.tobytes() for array in arrays]
    pages = client.allocate("patient", 5)
    secret, boot_id = client.secret, client.boot_id
    client.ping()
    with subprocess.Popen(command):
        lost_at = wait_for_the_end(client)
        client = Client.connect(runtime_dir, name="patient", resume=secret, timeout_s=PATIENCE_S)
        client.ping()
        answered_at = time.perf_counter()
    with Client.connect(runtime_dir, name="other") as other:
        again = other.attach_pool("patient")
        seen = [again.array("main", role).tobytes() for role in ("k", "v")]
    client.free("patient", pages)  # they are its own still
    report = {
        "size_bytes": pool.manifest.region_bytes,
        "answered_after_ms": round((answered_at - lost_at) * 1000),
        "restarted": client.boot_id != boot_id,
        "same": [array.tobytes() for array in arrays] == before,
        "same_for_others": seen == before,
    }
    client.close()
    print(json.dumps(report))  # noqa: T201  for the test


def wait_for_the_end(client: Client) -> float:
    """Ping until the daemon is lost; return when it was."""
    ends_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_at:
        try:
            client.ping()
        except DaemonLostError:
            return time.perf_counter()
    raise AssertionError("the daemon did not end")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
