"""Mooncake's engine by itself, over loopback into another process: what transfers between hosts are compared with.

The same bytes go in two ways: one block a page, as engines write today, with many under way (all in one submission is
no faster, and blocks its thread); and in big blocks, which is the most this engine does. A third way is the limit of
ours: pages are gathered and hashed, written in big blocks, verified and scattered, as ours are, by threads that know
what to do from the start. Other benchmarks take ``raw_mooncake`` and compare with its contenders in their own run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.bare_copies import TRANSFER_THREADS
from benchmarks.pools import MIB, regions
from benchmarks.processes import running
from kvferry.daemon.transports import mooncake_native
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, NativeEngine
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.config.schema import STAGING_BUFFERS, NetworkConfig

ADDRESS = "127.0.0.1"
BIG_BLOCK_BYTES = 4 * MIB
BLOCKS_UNDER_WAY = 4
PAGES_UNDER_WAY = 256  # below Mooncake's own limits a peer
POLL_S = 0.0001
ONE_BLOCK_A_PAGE = f"Mooncake's engine by itself, one block a page, {PAGES_UNDER_WAY} under way"
BIG_BLOCKS = (
    f"Mooncake's engine by itself, blocks of {BIG_BLOCK_BYTES // MIB} MiB in order, {BLOCKS_UNDER_WAY} under way"
)
BARE = (
    "Mooncake's engine, and threads that gather and hash pages before it, and verify and scatter them behind it; "
    "nothing is announced, credited or planned; by one thread that gathers or more, whichever is faster"
)
CHUNK_BYTES = NetworkConfig().bounce_buffer_bytes
_DONE, _FAILED = 1, -1


class Chunk(NamedTuple):
    """Some pages that travel together: pages ``[first, stop)`` in the order of the source's and the peer's list."""

    page_bytes: int
    first: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all its pages."""
        return (self.stop - self.first) * self.page_bytes

    @property
    def offset_bytes(self) -> int:
        """Return its place among all bytes that travel."""
        return self.first * self.page_bytes

    def copies(self, pages_at: int, gathered_at: int, seed: int, total_bytes: int) -> Copies:
        """Return the copies from its pages, at random places, to gathered bytes: ``(pages, 3)``."""
        copies = np.empty((self.stop - self.first, 3), np.uint64)
        pages = places(seed, total_bytes // self.page_bytes)[self.first : self.stop]
        copies[:, 0] = pages_at + pages * self.page_bytes
        copies[:, 1] = gathered_at + np.arange(len(pages)) * self.page_bytes
        copies[:, 2] = self.page_bytes
        return copies


@cache
def places(seed: int, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of all pages at random, the source's with seed 1, the destination's with seed 2."""
    return np.random.default_rng(seed).permutation(count)


class RawMooncake:
    """Writes all of ``source`` into the peer's region, which is as large. Each contender returns GB/s."""

    def __init__(
        self, engine: list[NativeEngine], peer: Peer, source: HostRegion, staging: HostRegion, pages: HostRegion
    ) -> None:
        self._engine = engine  # the only reference stays in the list: see destroy
        self._peer = peer
        self._source = source
        self._staging = staging
        self._pages = pages

    def one_block_a_page(self, page_bytes: int) -> float:
        """Write each page from a random place to a random place, with many under way."""
        count = self._source.size_bytes // page_bytes
        source, destination = places(1, count), places(2, count)
        return self._write(source.tolist(), destination.tolist(), page_bytes, PAGES_UNDER_WAY)

    def big_blocks(self) -> float:
        """Write all in order, in blocks of ``BIG_BLOCK_BYTES``."""
        blocks = range(self._source.size_bytes // BIG_BLOCK_BYTES)
        return self._write(blocks, blocks, BIG_BLOCK_BYTES, BLOCKS_UNDER_WAY)

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
        return self._begin(self._source.address + source, destination, block_bytes)

    def _begin(self, address: int, destination: int, size_bytes: int) -> int:
        batch_id = self._engine[0].batch_transfer_async_write(
            self._peer.session_name, [address], [self._peer.address + destination], [size_bytes]
        )
        assert batch_id, "Mooncake did not begin"
        return batch_id

    def _has_ended(self, batch_id: int) -> bool:
        status = self._engine[0].transfer_check_status(batch_id)
        assert status != _FAILED, "a write failed"
        return status == _DONE

    def bare_pages(self, page_bytes: int, gathering_threads: int = 1) -> float:
        """Write pages from random places to random places as ours go, and have them verified and scattered there."""
        chunks = self._chunks(page_bytes)
        waiting, free = iter(chunks), [self._staging.address + at * CHUNK_BYTES for at in range(STAGING_BUFFERS)]
        gathering: list[tuple[Future[int], Chunk, int]] = []
        writing: list[tuple[int, Chunk, int, int]] = []
        missing = len(chunks)
        with ThreadPoolExecutor(gathering_threads) as threads:
            started = time.perf_counter()
            while missing:
                while free and (chunk := next(waiting, None)) is not None:
                    buffer = free.pop()
                    gathering.append((threads.submit(self._gather, chunk, buffer), chunk, buffer))
                before = len(gathering), len(writing)
                for gathered, chunk, buffer in [one for one in gathering if one[0].done()]:
                    gathering.remove((gathered, chunk, buffer))
                    batch_id = self._begin(buffer, chunk.offset_bytes, chunk.size_bytes)
                    writing.append((batch_id, chunk, buffer, gathered.result()))
                for write in [one for one in writing if self._has_ended(one[0])]:
                    writing.remove(write)
                    free.append(write[2])
                    self._peer.tell(write[1], write[3])
                missing -= self._peer.done()
                if (len(gathering), len(writing)) == before:
                    time.sleep(POLL_S)
            return self._source.size_bytes / (time.perf_counter() - started) / 1e9

    def check_pages(self, page_bytes: int) -> None:
        """See that ``bare_pages`` has brought every byte."""
        count = self._source.size_bytes // page_bytes
        source, pages = (one.view().reshape(count, page_bytes) for one in (self._source, self._pages))
        assert np.array_equal(source[places(1, count)], pages[places(2, count)])

    def _chunks(self, page_bytes: int) -> list[Chunk]:
        count, of_chunk = self._source.size_bytes // page_bytes, CHUNK_BYTES // page_bytes
        return [Chunk(page_bytes, first, min(first + of_chunk, count)) for first in range(0, count, of_chunk)]

    def _gather(self, chunk: Chunk, buffer: int) -> int:
        copies = chunk.copies(self._source.address, buffer, 1, self._source.size_bytes)
        return copy_kernel.copy_with_digest(copies)


class Peer:
    """The other process, as it is seen here."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._tell, self._says = process.stdin, process.stdout
        port, address = map(int, self._says.readline().split())
        self.session_name = f"{ADDRESS}:{port}"
        self.address = address
        self._done: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._says:
            self._done.put(line)
        self._done.put(b"")  # it has died, or is being ended

    def tell(self, chunk: Chunk, checksum: int) -> None:
        """Have a chunk verified and scattered that has arrived."""
        self._tell.write(" ".join(map(str, (*chunk, checksum))).encode() + b"\n")
        self._tell.flush()

    def done(self) -> int:
        """Return how many chunks were scattered since the last call."""
        count = self._done.qsize()
        for _ in range(count):
            assert self._done.get() == b"scattered\n"
        return count


@contextmanager
def raw_mooncake(size_bytes: int) -> Iterator[RawMooncake]:
    """Run an engine here and one in another process, with so many bytes registered there and noise to write here."""
    staging_bytes = STAGING_BUFFERS * CHUNK_BYTES
    with (
        regions(size_bytes, size_bytes) as (source, network),
        regions(staging_bytes, size_bytes) as (staging, pages),
        ExitStack() as stack,
    ):
        holder = [mooncake_native.create(MooncakeSettings(address=ADDRESS))]
        stack.callback(mooncake_native.destroy, holder)
        with _running_peer(network, pages) as peer:
            raw = RawMooncake(holder, peer, source, staging, pages)
            raw.big_blocks()
            assert np.array_equal(source.view(), network.view())
            yield raw


@contextmanager
def _running_peer(network: HostRegion, pages: HostRegion) -> Iterator[Peer]:
    numbers = map(str, (network.fd, pages.fd, network.size_bytes))
    command = [sys.executable, "-m", "benchmarks.mooncake_raw", *numbers]
    root = Path(__file__).parents[1]
    pipe = subprocess.PIPE
    with running(command, cwd=root, stdin=pipe, stdout=pipe, pass_fds=[network.fd, pages.fd]) as process:
        yield Peer(process)


def be_peer(network_fd: int, pages_fd: int, size_bytes: int) -> None:
    """Be the process that writes go to: register memory, say ``PORT ADDRESS``, and scatter until the input's end."""
    engine = mooncake_native.create(MooncakeSettings(address=ADDRESS))
    with (
        HostRegion(network_fd, size_bytes) as network,
        HostRegion(pages_fd, size_bytes) as pages,
        ThreadPoolExecutor(TRANSFER_THREADS) as threads,
    ):
        assert engine.register_memory(network.address, size_bytes) == 0
        print(engine.get_rpc_port(), network.address, flush=True)
        for line in sys.stdin:
            *numbers, checksum = map(int, line.split())
            threads.submit(scatter, Chunk(*numbers), checksum, network, pages)


def scatter(chunk: Chunk, checksum: int, network: HostRegion, pages: HostRegion) -> None:
    """Verify a chunk that has arrived while it is brought to its pages, and say so."""
    arrived, said = network.address + chunk.offset_bytes, b"damaged\n"
    try:
        copies = chunk.copies(pages.address, arrived, 2, network.size_bytes)[:, [1, 0, 2]]
        if copy_kernel.copy_with_digest(copies) == checksum:
            said = b"scattered\n"
    finally:
        os.write(sys.stdout.fileno(), said)  # at once: there are several threads


if __name__ == "__main__":
    be_peer(*map(int, sys.argv[1:]))
