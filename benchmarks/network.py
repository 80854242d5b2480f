"""Transfers between hosts: two daemons, bounce buffers and Mooncake over loopback, against Mooncake's engine by itself.

Ours is the whole way, from ``send`` at prefill to FINISHED at decode with the transfer waiting already: announced,
credited, gathered, written, checked and scattered, between random pages. The engine by itself writes as many bytes from
one process's memory into another's, with nothing before or after it. Each round's bytes are compared at the
destination. Two daemons in one machine share its cores, which two hosts would not: what the copies cost shows here at
its worst.

What keys cost is measured against two daemons without: they encrypt what daemons tell each other, and no page.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq

from benchmarks.bare_copies import TRANSFER_THREADS
from benchmarks.measure import (
    GIGABYTES_A_SECOND,
    MILLISECONDS,
    Effort,
    Limit,
    MissingPeerError,
    Row,
    Target,
    compare,
)
from benchmarks.mooncake_raw import BARE, BIG_BLOCKS, ONE_BLOCK_A_PAGE, RawMooncake, raw_mooncake
from benchmarks.pools import KIB, MIB, ROLES, Pair, spec_of
from benchmarks.processes import free_port, running_daemon
from kvferry.clients import Client
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_keys import ALLOWED, OWN, NodeKey

PAGE_KIB = (16, 128)
ONE_BLOCK_TARGETS = {16: Target(4)}
BIG_BLOCKS_TARGETS = {16: Target(0.75)}
GATHERING_THREADS = sorted({1, TRANSFER_THREADS})
LAYERS = 16
HOSTS = ("127.0.0.1", "127.0.0.2")
KEYS_TARGET = Target(1.05)
HAND_OVERS = 8
CONFIG = """
[peers]
listen = "{address}"
{keys}
[network]
transport = "mooncake"
"""


class _TwoHosts:
    """Two daemons that reach each other by TCP alone, with keys or without, and a client of each."""

    def __init__(self, stack: ExitStack, *, keys: bool = False) -> None:
        self.addresses = [f"tcp://{host}:{free_port(host)}" for host in HOSTS]
        lines = _keys(Path(stack.enter_context(tempfile.TemporaryDirectory())), self.addresses) if keys else ["", ""]
        configs = [CONFIG.format(address=one, keys=line) for one, line in zip(self.addresses, lines, strict=True)]
        self.clients = [
            stack.enter_context(Client.connect(stack.enter_context(running_daemon(one)))) for one in configs
        ]

    def pair(self, kib: int, size_bytes: int) -> Pair:
        return Pair(self.clients, spec_of(kib * KIB, size_bytes // (kib * KIB * LAYERS * len(ROLES)), LAYERS))


def measure(effort: Effort) -> list[Row]:
    """Measure pages of both sizes against one block a page and against big blocks.

    Raises:
        MissingPeerError: Mooncake cannot be loaded; says what to install.
    """
    size_bytes = effort.pick(64, 8) * MIB
    try:
        with raw_mooncake(size_bytes) as raw, ExitStack() as stack:
            two_hosts = _TwoHosts(stack)
            rows = []
            for kib in PAGE_KIB:
                with two_hosts.pair(kib, size_bytes) as pair:
                    rows += _rows(kib, pair, two_hosts.addresses[0], raw, effort)
            with_keys = _TwoHosts(stack, keys=True)
            rows += [_price_of_keys(with_keys, two_hosts, size, effort) for size in (MIB, size_bytes)]
            return rows
    except ConfigError as error:
        raise MissingPeerError(str(error)) from error


def _keys(folder: Path, addresses: list[str]) -> list[str]:
    """Make a key for each address, allowed at all others; return the lines of their daemons' configurations."""
    made = [
        NodeKey(name=f"node-{number}", address=address, made="2026-01-01T00:00:00Z", public=public, secret=secret)
        for number, address in enumerate(addresses)
        for public, secret in [[half.decode() for half in zmq.curve_keypair()]]
    ]
    for one in made:
        (folder / one.name / ALLOWED).mkdir(parents=True)
        hidden = folder / one.name / OWN
        hidden.touch(mode=0o600)
        hidden.write_text(one.secret_certificate)
    for one, other in itertools.permutations(made, 2):
        (folder / one.name / ALLOWED / f"{other.name}.key").write_text(other.certificate)
    return [f'keys = "{folder / one.name}"' for one in made]


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


def _price_of_keys(ours: _TwoHosts, without: _TwoHosts, size_bytes: int, effort: Effort) -> Row:
    with ours.pair(16, size_bytes) as encrypted, without.pair(16, size_bytes) as plain:
        row = compare(
            f"network/keys/16KiB/random/{size_bytes // MIB}MiB",
            MILLISECONDS,
            ours=partial(_milliseconds, encrypted, ours.addresses[0]),
            peer=partial(_milliseconds, plain, without.addresses[0]),
            peer_is="the same between daemons without keys",
            rounds=effort.pick(41, 1),
            target=KEYS_TARGET if size_bytes > MIB else None,
            note=f"each figure is the shortest of {HAND_OVERS} hand-overs"
            + ("" if size_bytes > MIB else "; no target: shows what keys cost whatever the size"),
        )
        encrypted.check()
        plain.check()
    return row


def _milliseconds(pair: Pair, source_daemon: str) -> float:
    """Return the shortest of some hand-overs."""
    return min(pair.transfer_s(source_daemons=[source_daemon]) for _ in range(HAND_OVERS)) * 1e3
