"""Messages of each step between the scheduler's side and the workers' side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvferry.clients.places import DaemonPlace
from kvferry.clients.vllm.configuration import pool_of
from kvferry.pools.planning.geometry import ranks_with_heads
from kvferry.protocol.ids import PeerAddress, PoolName
from kvferry.protocol.tier_messages import ChainStart

HANDSHAKE = 3
"""Of what prefill says to decode; another number is refused."""

MOST_RANKS = 1024

MOST_JOINED = 1024
"""Blocks that are stored as one, which are all stored or none; a single request may have more."""

TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ``kv_transfer_params`` say of a prompt that travels; keys of others are ignored.

    Attributes:
        do_remote_decode: this request is to be prefilled here, and handed on.
        do_remote_prefill: its prompt was, or is, prefilled elsewhere.
        transfer_id: by which both sides know the request; prefill makes one where the router gives none.
        remote_place: where prefill's daemon is; absent: the same daemon as here, or one of ``remote_daemons``.
        remote_daemons: addresses of prefill's daemon, from a router that asks both sides at once.
        remote_pool: the name of prefill's pools, without ranks; absent where the router gave the ``transfer_id``: then
            each rank of decode takes the part of its like.
        remote_tp_size: prefill's ranks.
        remote_engine_id: for logs.
        handshake: the version of what prefill says.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: TransferId | None = None
    remote_place: DaemonPlace | None = None
    remote_daemons: Annotated[tuple[PeerAddress, ...], msgspec.Meta(max_length=8)] | None = None
    remote_pool: PoolName | None = None
    remote_tp_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | None = None
    remote_engine_id: str | None = None
    handshake: int = HANDSHAKE

    def parts(self, ranks: int) -> tuple[Part, ...]:
        """Return what each of so many ranks of decode takes."""
        ids = request_ids(self.transfer_id or "", ranks, together=self.remote_pool is not None)
        if self.remote_pool is None or self.remote_tp_size is None:
            return tuple(map(Part, ids))
        parts = []
        for rank, one in enumerate(ids):
            theirs, each = ranks_with_heads(rank, ranks, self.remote_tp_size)
            parts.append(Part(one, tuple(pool_of(self.remote_pool, self.remote_tp_size, its) for its in theirs), each))
        return tuple(parts)


class Part(NamedTuple):
    """What a rank of decode takes of a prompt.

    Attributes:
        request_id: the daemon's.
        pools: prefill's that have its heads; none: one pool sends under this id.
        destinations: how many ranks of decode each of them fills.
    """

    request_id: str
    pools: tuple[str, ...] = ()
    destinations: int = 1


class Blocks(NamedTuple):
    """Blocks of a request in a KV cache group: their ids, which of its prompt the first one is, and their tokens."""

    ids: list[int]
    first: int
    group: int = 0
    tokens: int | None = None


class Load(NamedTuple):
    """Load blocks of a group from the prefix cache; ``leases``: one of each rank, which has them from ``skipped`` on.

    ``is_last``: no other group's follow, and the lease ends with it.
    """

    request: str
    blocks: Blocks
    leases: tuple[int, ...]
    skipped: int
    is_last: bool


class Receive(NamedTuple):
    """Receive a prompt's blocks; ``parts``: of each rank; ``refused``: it is not begun, and why."""

    request: str
    blocks: tuple[Blocks, ...]
    parts: tuple[Part, ...]
    sources: tuple[str, ...]
    prompt: bytes
    refused: str = ""


class Store(NamedTuple):
    """Store a request's blocks of a group in the prefix cache.

    Those of one step and request have one number; ``parent`` is the name of the block before them.
    """

    number: int
    request: str
    blocks: Blocks
    names: list[bytes]
    parent: bytes | None


class Send(NamedTuple):
    """Send blocks of a prompt; ``ids`` are the daemon's of each rank's part."""

    request: str
    blocks: tuple[Blocks, ...]
    ids: tuple[str, ...]
    is_last: bool
    prompt: bytes


@dataclass
class StepWork(KVConnectorMetadata):
    """A step's work.

    ``preempted``: requests whose blocks are about to be others'. ``ended``: requests that have finished while blocks
    of them were being read, which each rank answers once nothing reads them. ``aborted``: of those and of requests that
    still receive, the ones whose transfers are to be given up. ``look``: the number of a look at the weights that each
    rank is to take before all of it; 0: none.
    """

    loads: list[Load] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    look: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to do, as in most steps."""
        begun = self.loads or self.receives or self.stores or self.sends
        return not (begun or self.preempted or self.ended or self.aborted or self.look)


def joined_chunks(first: Send, second: Send) -> Send:
    """Return two chunks of a prompt, of which the second one continues the first, as one."""
    blocks = {one.group: one for one in first.blocks}
    for one in second.blocks:
        before = blocks.get(one.group, one._replace(ids=[], tokens=one.tokens and 0))
        tokens = None if one.tokens is None or before.tokens is None else before.tokens + one.tokens
        blocks[one.group] = before._replace(ids=before.ids + one.ids, tokens=tokens)
    return second._replace(blocks=tuple(blocks.values()))


def request_ids(transfer: str, ranks: int, *, together: bool) -> tuple[str, ...]:
    """Return the daemon's ids of each rank's part of a transfer, as both sides make them.

    ``together``: all parts have one, since decode knows prefill's pools by their names.
    """
    return tuple(
        hashlib.blake2b(f"{transfer}/{'all' if together else rank}".encode(), digest_size=16).hexdigest()
        for rank in range(ranks)
    )


class Stores:
    """Blocks of several requests in a KV cache group that go to the prefix cache as one.

    Attributes:
        group: its number.
        each: how many blocks of vLLM's have a name.
        ids: theirs; of blocks that have one name, the first one's.
        names: theirs.
        parent: the name of the block before the first one.
        chains: where those of further requests begin.
    """

    def __init__(self, group: int, each: int) -> None:
        """Begin without any."""
        self.group = group
        self.each = each
        self.ids: list[int] = []
        self.names: list[bytes] = []
        self.parent: bytes | None = None
        self.chains: list[ChainStart] = []
        self._seen: set[bytes] = set()

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Stores: {len(self.ids)} blocks>"

    def add(self, one: Store) -> None:
        """Take the blocks of a request."""
        if self._seen.isdisjoint(one.names):
            self._add(one.blocks.ids, one.names, one.parent)
            return
        parent = one.parent
        for number, name in enumerate(one.names):
            if name not in self._seen:
                self._add(one.blocks.ids[number * self.each : (number + 1) * self.each], [name], parent)
            parent = name

    def _add(self, ids: list[int], names: list[bytes], parent: bytes | None) -> None:
        if not self.names:
            self.parent = parent
        elif parent != self.names[-1]:
            self.chains.append(ChainStart(first=len(self.names), parent=parent or b""))
        self.ids += ids
        self.names += names
        self._seen.update(names)


def joined_stores(stores: Iterable[Store]) -> list[tuple[Stores, list[Store]]]:
    """Return the stores of a step as few, each with those that it consists of."""
    joined: list[tuple[Stores, list[Store]]] = []
    latest: dict[int, tuple[Stores, list[Store]]] = {}
    for one in stores:
        group = one.blocks.group
        if group not in latest or len(latest[group][0].ids) + len(one.blocks.ids) > MOST_JOINED:
            latest[group] = Stores(group, len(one.blocks.ids) // len(one.names)), []
            joined.append(latest[group])
        whole, parts = latest[group]
        whole.add(one)
        parts.append(one)
    return joined
