"""Transfers between hosts: two daemons, bounce buffers and Mooncake over loopback, against Mooncake's engine by itself.

Ours is the whole way, from ``send`` at prefill to FINISHED at decode with the transfer waiting already: announced,
credited, gathered, written, checked and scattered, between random pages. The engine by itself writes as many bytes from
one process's memory into another's, with nothing before or after it. Each round's bytes are compared at the
destination. Two daemons in one machine share its cores, which two hosts would not: what the copies cost shows here at
its worst.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from benchmarks.bare_copies import TRANSFER_THREADS
from benchmarks.measure import GIGABYTES_A_SECOND, Effort, Limit, MissingPeerError, Row, Target, compare
from benchmarks.mooncake_raw import BARE, BIG_BLOCKS, ONE_BLOCK_A_PAGE, RawMooncake, raw_mooncake
from benchmarks.pools import KIB, MIB, ROLES, Pair, spec_of
from benchmarks.processes import free_port, running_daemon
from kvferry.clients import Client
from kvferry.protocol.errors import ConfigError

PAGE_KIB = (16, 128)
ONE_BLOCK_TARGETS = {16: Target(4)}
BIG_BLOCKS_TARGETS = {16: Target(0.75)}
GATHERING_THREADS = sorted({1, TRANSFER_THREADS})
LAYERS = 16
HOSTS = ("127.0.0.1", "127.0.0.2")
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
        with raw_mooncake(size_bytes) as raw, ExitStack() as stack:
            addresses = [f"tcp://{host}:{free_port(host)}" for host in HOSTS]
            runtime_dirs = [stack.enter_context(running_daemon(CONFIG.format(address=one))) for one in addresses]
            clients = [stack.enter_context(Client.connect(one)) for one in runtime_dirs]
            rows = []
            for kib in PAGE_KIB:
                with Pair(clients, spec_of(kib * KIB, size_bytes // (kib * KIB * LAYERS * len(ROLES)), LAYERS)) as pair:
                    rows += _rows(kib, pair, addresses[0], raw, effort)
            return rows
    except ConfigError as error:
        raise MissingPeerError(str(error)) from error


def _gigabytes_a_second(pair: Pair, source_daemon: str) -> float:
    """Hand the pages over, check every byte that came, and return how fast that was."""
    pair.clear()
    elapsed_s = pair.transfer_s(source_daemons=[source_daemon])
    pair.check()
    return pair.size_bytes / elapsed_s / 1e9


def _rows(kib: int, pair: Pair, source_daemon: str, raw: RawMooncake, effort: Effort) -> list[Row]:
    what = f"network/{kib}KiB/random/{pair.size_bytes // MIB}MiB"
    raw.bare_pages(kib * KIB)
    raw.check_pages(kib * KIB)
    row = partial(
        compare,
        unit=GIGABYTES_A_SECOND,
        ours=partial(_gigabytes_a_second, pair, source_daemon),
        limit=Limit(tuple([partial(raw.bare_pages, kib * KIB, threads) for threads in GATHERING_THREADS]), BARE),
    )
    return [
        row(
            f"{what}/one_block_a_page",
            peer=partial(raw.one_block_a_page, kib * KIB),
            peer_is=ONE_BLOCK_A_PAGE,
            rounds=effort.pick(11, 1),
            target=ONE_BLOCK_TARGETS.get(kib),
            note="" if kib in ONE_BLOCK_TARGETS else "no target: blocks of this size are not small any more",
        ),
        row(
            f"{what}/big_blocks",
            peer=raw.big_blocks,
            peer_is=BIG_BLOCKS,
            rounds=effort.pick(31, 1),
            target=BIG_BLOCKS_TARGETS.get(kib),
            note="the engine's own speed varies by a factor of two from round to round",
        ),
    ]
