"""Whether Mooncake's own pair of clients could stand in for our store process, when something hangs or dies too.

``python -m tests.daemon.tiers.mooncake_pair`` tries everything and says what happened, in two minutes. The test of it
only asks whether the pair takes the memory that the daemon has: as long as it does not, nothing else matters.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvferry.pools.devices.host import HostRegion
from tests.daemon.tiers.store_harness import WAIT_S, Master, free_port, master_binary, running_master

MIB: Final = 1 << 20
Findings = dict[str, object]


def real_client(master: Master, binary: Path, port: int) -> subprocess.Popen[bytes]:
    """Start Mooncake's "real client": the process that joins the store."""
    command = [str(binary.with_name("mooncake_client")), "--host=127.0.0.1", f"--port={port}"]
    command += ["--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{master.port}"]
    command += ["--global_segment_size=64MB", "--threads=4"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def dummy_client(port: int) -> Any:  # noqa: ANN401  Mooncake has no types
    """Return Mooncake's "dummy client" in this process, once the real one answers."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415  it starts threads

    store, until_s = MooncakeDistributedStore(), time.monotonic() + WAIT_S
    while store.setup_dummy(64 * MIB, 0, f"127.0.0.1:{port}"):
        assert time.monotonic() < until_s, "the real client does not answer"
    return store


def takes_our_memory(store: Any) -> bool:  # noqa: ANN401
    """Return whether it registers, or puts from, a sealed region of the daemon's."""
    with HostRegion.create("arena", MIB) as region, mmap.mmap(region.fd, MIB) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        taken = store.register_buffer(address, MIB) == 0
        put = store.batch_put_from_multi_buffers(["ours"], [[address]], [[mmap.PAGESIZE]]) == [0]
        del view
        return bool(taken or put)


def hangs_and_deaths(store: Any, process: subprocess.Popen[bytes], again: Callable[[], Any]) -> Findings:  # noqa: ANN401
    """Return what calls do once the real client has died and is there again, and while it is stopped."""
    address = store.alloc_from_mem_pool(4 * MIB)
    store.register_buffer(address, 4 * MIB)

    def put(name: str) -> tuple[int, float]:
        began_s = time.monotonic()
        status = store.batch_put_from_multi_buffers([name], [[address]], [[MIB]])[0]
        return status, round(time.monotonic() - began_s, 1)

    found: Findings = {"put": put("a")}
    process.kill()
    process.wait()
    process = again()
    until_s = time.monotonic() + WAIT_S
    while (last := put("b"))[0] and time.monotonic() < until_s:
        pass
    found[f"put, up to {WAIT_S:g} s after it was killed and started again"] = last
    process.send_signal(signal.SIGSTOP)
    found["put while it hangs"] = put("c")
    found["health while it hangs"] = store.health_check()
    return found


def main(*, everything: bool) -> None:
    """Print what was found, as JSON."""
    binary = master_binary()
    assert binary is not None, "Mooncake is not installed"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, running_master(binary, Path(folder, "log")) as master:
        processes: list[subprocess.Popen[bytes]] = []

        def begin() -> subprocess.Popen[bytes]:
            processes.append(real_client(master, binary, port))
            return processes[-1]

        first = begin()
        store = dummy_client(port)
        found: Findings = {"takes our memory": takes_our_memory(store)}
        if everything:
            found |= hangs_and_deaths(store, first, begin)
        for one in processes:
            one.kill()
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        master.kill()
    os._exit(0)  # its destructors wait for the real client


if __name__ == "__main__":
    main(everything="--memory" not in sys.argv)
