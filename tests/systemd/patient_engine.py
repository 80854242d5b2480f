"""An engine that has a pool of 256 MiB and pings: ``patient_engine.py RUNTIME_DIR COMMAND …``.

It runs the command, which ends its daemon in some way, pings on as if nothing was, and prints as JSON how long the
longest ping took, and whether the pool is as it was, seen by itself and by another client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np

from kvferry.clients import Client, MhaSpec

SPEC = MhaSpec(layers=4, tokens=65536, page_size=128, kv_heads=4, head_dim=64, dtype="float16")
PATIENCE_S = 60.0


def main(runtime_dir: str, command: list[str]) -> None:
    noise = np.random.default_rng(7)
    with Client.connect(runtime_dir, name="patient") as client:
        pool = client.create_pool("patient", SPEC)
        arrays = [pool.array("main", role) for role in ("k", "v")]
        for array in arrays:
            array.view(np.uint8)[:] = noise.integers(0, 256, array.view(np.uint8).shape, np.uint8)
        before = [array.tobytes() for array in arrays]
        pages = client.allocate("patient", 5)
        with subprocess.Popen(command):
            waited_s = ping_through(client)
        with Client.connect(runtime_dir, name="other") as other:
            again = other.attach_pool("patient")
            seen = [again.array("main", role).tobytes() for role in ("k", "v")]
        client.free("patient", pages)  # they are its own still
        report = {
            "size_bytes": pool.manifest.region_bytes,
            "longest_ping_ms": round(waited_s * 1000),
            "same": [array.tobytes() for array in arrays] == before,
            "same_for_others": seen == before,
        }
    print(json.dumps(report))  # noqa: T201  for the test


def ping_through(client: Client) -> float:
    """Ping until another daemon answers; return how long the longest ping took, in seconds."""
    before, longest_s = client.boot_id, 0.0
    ends_at = time.monotonic() + PATIENCE_S
    while client.boot_id == before:
        assert time.monotonic() < ends_at, "the daemon did not end"
        asked = time.perf_counter()
        client.ping()
        longest_s = max(longest_s, time.perf_counter() - asked)
    return longest_s


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
