"""Whether Mooncake's own pair of clients takes memory of the daemon's: as long as it does not, nothing else matters."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

from kvferry.pools.devices.host import HostRegion
from tests.kit.stores import WAIT_S, free_port, running_master

MIB = 1 << 20


def takes_our_memory(store: MooncakeDistributedStore) -> bool:
    """Return whether it registers, or puts from, a sealed region of the daemon's."""
    with HostRegion.create("arena", MIB) as region, mmap.mmap(region.fd, MIB) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        taken = store.register_buffer(address, MIB) == 0
        put = store.batch_put_from_multi_buffers(["ours"], [[address]], [[mmap.PAGESIZE]]) == [0]
        del view
        return bool(taken or put)


def main(binary: Path, log: Path) -> None:
    """Start Mooncake's "real client", join as its "dummy client", and print what was found."""
    port, store, until_s = free_port(), MooncakeDistributedStore(), time.monotonic() + WAIT_S
    with running_master(binary, log) as master:
        command = [str(binary.with_name("mooncake_client")), "--host=127.0.0.1", f"--port={port}", "--threads=4"]
        command += ["--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{master.port}"]
        with subprocess.Popen([*command, "--global_segment_size=64MB"], stdout=subprocess.DEVNULL) as real:
            while store.setup_dummy(64 * MIB, 0, f"127.0.0.1:{port}"):
                assert time.monotonic() < until_s, "the real client does not answer"
            sys.stdout.write(str(takes_our_memory(store)))
            sys.stdout.flush()
            real.kill()
    os._exit(0)  # its destructors wait for the real client


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
