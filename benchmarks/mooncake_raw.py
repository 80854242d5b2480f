"""Mooncake's engine by itself, over loopback into another process: what transfers between hosts are compared with.

The same bytes go in two ways: one block a page, as engines write today, with many under way (all in one submission is
no faster, and blocks its thread); and in big blocks, which is the most this engine does. Other benchmarks take
``raw_mooncake`` and compare with its contenders in their own run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.pools import MIB, regions
from benchmarks.processes import running
from kvferry.daemon.transports import mooncake_native
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, NativeEngine
from kvferry.pools.devices.host import HostRegion

ADDRESS = "127.0.0.1"
BIG_BLOCK_BYTES = 4 * MIB
BLOCKS_UNDER_WAY = 4
PAGES_UNDER_WAY = 256  # below Mooncake's own limits a peer
POLL_S = 0.0001
ONE_BLOCK_A_PAGE = f"Mooncake's engine by itself, one block a page, {PAGES_UNDER_WAY} under way"
BIG_BLOCKS = (
    f"Mooncake's engine by itself, blocks of {BIG_BLOCK_BYTES // MIB} MiB in order, {BLOCKS_UNDER_WAY} under way"
)
_DONE, _FAILED = 1, -1


class RawMooncake:
    """Writes all of ``source`` into the peer's region, which is as large. Each contender returns GB/s."""

    def __init__(self, engine: list[NativeEngine], session_name: str, source: HostRegion, peer_address: int) -> None:
        self._engine = engine  # the only reference stays in the list: see destroy
        self._session_name = session_name
        self._source = source
        self._peer_address = peer_address

    def one_block_a_page(self, page_bytes: int) -> float:
        """Write each page from a random place to a random place, with many under way."""
        count = self._source.size_bytes // page_bytes
        source, destination = (np.random.default_rng(seed).permutation(count) for seed in (1, 2))
        return self._write(source.tolist(), destination.tolist(), page_bytes, PAGES_UNDER_WAY)

    def big_blocks(self) -> float:
        """Write all in order, in blocks of ``BIG_BLOCK_BYTES``."""
        places = range(self._source.size_bytes // BIG_BLOCK_BYTES)
        return self._write(places, places, BIG_BLOCK_BYTES, BLOCKS_UNDER_WAY)

    def _write(self, source: Sequence[int], destination: Sequence[int], block_bytes: int, most: int) -> float:
        waiting = zip(source, destination, strict=True)
        under_way: list[int] = []
        ended = 0
        started = time.perf_counter()
        while ended < len(source):
            for here, there in waiting:
                under_way.append(self._submit(here * block_bytes, there * block_bytes, block_bytes))
                if len(under_way) >= most:
                    break
            left = [batch_id for batch_id in under_way if not self._has_ended(batch_id)]
            ended += len(under_way) - len(left)
            if len(left) == len(under_way):
                time.sleep(POLL_S)
            under_way = left
        return len(source) * block_bytes / (time.perf_counter() - started) / 1e9

    def _submit(self, source: int, destination: int, block_bytes: int) -> int:
        batch_id = self._engine[0].batch_transfer_async_write(
            self._session_name, [self._source.address + source], [self._peer_address + destination], [block_bytes]
        )
        assert batch_id, "Mooncake did not begin"
        return batch_id

    def _has_ended(self, batch_id: int) -> bool:
        status = self._engine[0].transfer_check_status(batch_id)
        assert status != _FAILED, "a write failed"
        return status == _DONE


@contextmanager
def raw_mooncake(size_bytes: int) -> Iterator[RawMooncake]:
    """Run an engine here and one in another process, with so many bytes registered there and noise to write here."""
    with regions(size_bytes, size_bytes) as (source, network):
        holder = [mooncake_native.create(MooncakeSettings(address=ADDRESS))]
        try:
            with _running_peer(network) as (port, address):
                raw = RawMooncake(holder, f"{ADDRESS}:{port}", source, address)
                raw.big_blocks()
                assert np.array_equal(source.view(), network.view())
                yield raw
        finally:
            mooncake_native.destroy(holder)


@contextmanager
def _running_peer(network: HostRegion) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "benchmarks.mooncake_raw", str(network.fd), str(network.size_bytes)]
    root = Path(__file__).parents[1]
    pipe = subprocess.PIPE
    with running(command, cwd=root, stdin=pipe, stdout=pipe, pass_fds=[network.fd]) as process:
        assert process.stdout is not None
        port, address = map(int, process.stdout.readline().split())
        yield port, address


def be_peer(fd: int, size_bytes: int) -> None:
    """Be the process that writes go to: register this memory, say ``PORT ADDRESS``, and wait for the input's end."""
    engine = mooncake_native.create(MooncakeSettings(address=ADDRESS))
    with HostRegion(fd, size_bytes) as region:
        assert engine.register_memory(region.address, size_bytes) == 0
        print(engine.get_rpc_port(), region.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    be_peer(*map(int, sys.argv[1:]))
