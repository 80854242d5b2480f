"""What prefill's bootstrap server tells decode: which ranks and stages there are; and whose KV a rank takes."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvferry.clients.places import DaemonPlace
from kvferry.protocol.ids import Hex128, PoolName
from kvferry.protocol.manifests import Count, Index

HANDSHAKE: Final = 3
"""What both servers must have alike: how a transfer's id is made of a room, and what its payload is."""

ROUTE: Final = "/kvferry"
MOST_BUFFERS: Final = 64
"""Of a request's metadata: SGLang has 15."""

MOST_RANKS: Final = 4096
"""Of which a bootstrap server keeps what they say: anybody may say it."""

MOST_LAYERS: Final = 4096


class PrefillRank(DaemonPlace, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank of the prefill server says of itself, and of its daemon, at its bootstrap server.

    ``rank``: data-parallel, tensor-parallel and of the pipeline; ``layers``: the numbers of those that it has KV of;
    ``row``: bytes of each buffer of a request's metadata; ``draft``: what tells its draft model from others, empty
    without one.
    """

    handshake: int
    rank: Annotated[str, msgspec.Meta(pattern=r"^\d{1,5}/\d{1,5}/\d{1,5}$")]
    pool: PoolName
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]
    row: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_BUFFERS)]
    draft: Annotated[str, msgspec.Meta(max_length=256)] = ""

    @property
    def tp_rank(self) -> int:
        """Return its tensor-parallel rank."""
        return int(self.rank.split("/")[1])

    @property
    def stage(self) -> int:
        """Return its stage of the pipeline."""
        return int(self.rank.split("/")[2])


class PrefillRanks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a bootstrap server says of itself, and what ranks have said there: those of one data-parallel rank."""

    server: Hex128
    ranks: tuple[PrefillRank, ...] = ()


class Sources(NamedTuple):
    """Whose KV a rank of decode takes.

    Attributes:
        server: the number of their bootstrap server.
        ranks: those of prefill that have its heads, of all stages; the first one gives the payload.
        destinations: how many ranks of decode each of them fills.
        misfit: which layers they lack or have twice; empty where they fit.
    """

    server: str
    ranks: tuple[PrefillRank, ...]
    destinations: int
    misfit: str = ""


def misfit_of(stages: Sequence[PrefillRank], wanted: Sequence[int]) -> str:
    """Return which of a decode rank's layers not one stage of one of prefill's ranks has, in words; else empty."""
    times = Counter(itertools.chain.from_iterable(one.layers for one in stages))
    for what, wrong in (
        ("no stage has", [layer for layer in wanted if not times[layer]]),
        ("more than one stage has", [layer for layer in wanted if times[layer] > 1]),
    ):
        if wrong:
            ranges = ((one.stage, min(one.layers), max(one.layers)) for one in stages)
            said = ", ".join(f"stage {stage}: {first} to {last}" for stage, first, last in sorted(ranges))
            return f"layers {', '.join(map(str, wrong))} of decode: {what} them at prefill ({said})"
    return ""


def request_id(server: str, dp_rank: int, room: int) -> str:
    """Return the id of a request's transfer: its room, and which prefill server has it.

    Rooms are a router's: other requests may have the same one, at another server, of the same daemon or not. Both sides
    know a server by the number that its bootstrap server made up.
    """
    whose = hashlib.blake2b(f"{server}/{dp_rank}".encode(), digest_size=8).hexdigest()
    return f"{room & (1 << 64) - 1:016x}{whose}"


class KvferryKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own, at which decode also learns where prefill's daemons are."""

    def __init__(self, host: str, port: int) -> None:
        """Serve."""
        self._server = secrets.token_hex(16)
        self._ranks: dict[str, PrefillRank] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_put(ROUTE, self._put_rank)
        self.app.router.add_get(ROUTE, self._get_ranks)

    async def _put_rank(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            rank = msgspec.json.decode(body, type=PrefillRank)
        except (msgspec.MsgspecError, ValueError) as error:
            return web.Response(text=str(error), status=400)
        if rank.rank not in self._ranks and len(self._ranks) >= MOST_RANKS:
            return web.Response(text=f"{MOST_RANKS} ranks have registered", status=HTTPStatus.INSUFFICIENT_STORAGE)
        self._ranks[rank.rank] = rank
        return self._said()

    async def _get_ranks(self, request: web.Request) -> web.Response:
        mine = f"{request.query.get('dp', '')}/"
        return self._said(*(one for name, one in self._ranks.items() if name.startswith(mine)))

    def _said(self, *ranks: PrefillRank) -> web.Response:
        body = msgspec.json.encode(PrefillRanks(server=self._server, ranks=ranks))
        return web.Response(body=body, content_type="application/json")
