"""Transfers between hosts: two daemons, bounce buffers and Mooncake over loopback, against Mooncake's engine by itself.

Ours is the whole way, from ``send`` at prefill to FINISHED at decode with the transfer waiting already: announced,
granted, gathered, written, checked and scattered, between random pages. The engine by itself writes as many bytes from
one process's memory into another's, with nothing before or after it. Each round's bytes are compared at the
destination. Two daemons in one machine share its cores, which two hosts would not: what the copies cost shows here at
its worst.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.measure import GIGABYTES_A_SECOND, Effort, MissingPeerError, Row, Target, compare
from benchmarks.mooncake_raw import BIG_BLOCKS, ONE_BLOCK_A_PAGE, RawMooncake, raw_mooncake
from benchmarks.processes import free_port, running_daemon
from kvferry.clients import AttachedPool, Client, MhaSpec, new_request_id, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
PAGE_KIB = (16, 128)
ONE_BLOCK_TARGETS = {16: Target(4)}
PAGE_SIZE = 128
LAYERS = 16
ADDRESSES = ("127.0.0.1", "127.0.0.2")
ROLES = ("k", "v")
NOISE = 10_007  # a prime number of 32-bit words: no two pages alike
TIMEOUT_S = 60.0
CONFIG = """
[peers]
listen = "{address}"
[network]
transport = "mooncake"
"""


def measure(effort: Effort) -> list[Row]:
    """Measure pages of both sizes against one block a page and against big blocks.

    Raises:
        MissingPeerError: Mooncake cannot be loaded; says what to install.
    """
    size_bytes = effort.pick(64, 8) * MIB
    try:
        with raw_mooncake(size_bytes) as raw, two_hosts() as (prefill, decode):
            return [
                row
                for kib in PAGE_KIB
                for row in _rows(kib, Transfers(prefill, decode, kib * KIB, size_bytes), raw, effort)
            ]
    except ConfigError as error:
        raise MissingPeerError(str(error)) from error


class Host:
    """One daemon, where others find it, and an engine's client there."""

    def __init__(self, address: str, client: Client) -> None:
        self.address = address
        self.client = client


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Run two daemons that reach each other over TCP only."""
    with ExitStack() as stack:
        hosts = []
        for host in ADDRESSES:
            address = f"tcp://{host}:{free_port(host)}"
            runtime_dir = stack.enter_context(running_daemon(CONFIG.format(address=address)))
            hosts.append(Host(address, stack.enter_context(Client.connect(runtime_dir))))
        yield hosts[0], hosts[1]


class Transfers:
    """Pools of as many random pages as have ``size_bytes``, and transfers between them."""

    def __init__(self, prefill: Host, decode: Host, page_bytes: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.count = size_bytes // page_bytes // (LAYERS * len(ROLES))
        self._name = f"{page_bytes // KIB}KiB"
        self._spec = spec(page_bytes, self.count)
        self._prefill, self._decode = prefill, decode
        self._source, self._source_ids = self._filled(prefill.client, 1)
        self._destination, self._destination_ids = self._filled(decode.client, 2)
        words = self._view(self._source, "k").size
        for seed, role in enumerate(ROLES):
            noise = np.random.default_rng(seed).integers(0, 1 << 32, NOISE, np.uint32)
            view = self._view(self._source, role)
            view[:] = np.resize(noise, words).reshape(view.shape)

    def gigabytes_a_second(self) -> float:
        """Hand the pages over, check every byte that came, and return how fast that was."""
        for role in ROLES:
            self._view(self._destination, role)[:] = 0
        request_id = new_request_id()
        theirs, ours = self._decode.client, self._prefill.client
        received = theirs.receive(
            self._name, request_id, [pages(self._destination_ids)], source_daemons=[self._prefill.address]
        )
        while received.accepted is None:
            assert theirs.poll(TIMEOUT_S), "no reply to RECEIVE"
        started = time.perf_counter()
        sent = ours.send(self._name, request_id, [pages(self._source_ids)])
        moved_bytes = theirs.wait_finished(received, TIMEOUT_S).moved_bytes
        elapsed_s = time.perf_counter() - started
        ours.wait_settled(sent, TIMEOUT_S)
        theirs.wait_settled(received, TIMEOUT_S)
        assert moved_bytes == self.size_bytes, moved_bytes
        self._check()
        return moved_bytes / elapsed_s / 1e9

    def _check(self) -> None:
        for role in ROLES:
            came = self._view(self._destination, role)[:, self._destination_ids]
            assert np.array_equal(came, self._view(self._source, role)[:, self._source_ids]), f"{role} differs"

    def _filled(self, client: Client, seed: int) -> tuple[AttachedPool, PageIds]:
        pool = client.create_pool(self._name, self._spec)
        taken = client.allocate(self._name, self._spec.tokens // PAGE_SIZE)
        return pool, np.random.default_rng(seed).permutation(taken)[: self.count]

    def _view(self, pool: AttachedPool, role: str) -> npt.NDArray[np.uint32]:
        """Return a role's pages: ``(layers, pages, words of a page)``."""
        array = pool.tensor("main", role).numpy().view(np.uint32)
        return array.reshape(*array.shape[:2], -1)


def spec(page_bytes: int, count: int) -> MhaSpec:
    """Return a pool's spec with half as many pages again as are handed over: few of them are neighbours."""
    return MhaSpec(
        layers=LAYERS,
        tokens=(count + count // 2) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=1,
        head_dim=page_bytes // PAGE_SIZE // 4,
        dtype="float32",
    )


def _rows(kib: int, transfers: Transfers, raw: RawMooncake, effort: Effort) -> list[Row]:
    what = f"network/{kib}KiB/random/{transfers.size_bytes // MIB}MiB"
    return [
        compare(
            f"{what}/one_block_a_page",
            GIGABYTES_A_SECOND,
            ours=transfers.gigabytes_a_second,
            peer=partial(raw.one_block_a_page, kib * KIB),
            peer_is=ONE_BLOCK_A_PAGE,
            rounds=effort.pick(11, 1),
            target=ONE_BLOCK_TARGETS.get(kib),
            note="" if kib in ONE_BLOCK_TARGETS else "no target: blocks of this size are not small any more",
        ),
        compare(
            f"{what}/big_blocks",
            GIGABYTES_A_SECOND,
            ours=transfers.gigabytes_a_second,
            peer=raw.big_blocks,
            peer_is=BIG_BLOCKS,
            rounds=effort.pick(31, 1),
            target=Target(0.65),
            note="the engine's own speed varies by a factor of two from round to round",
        ),
    ]
