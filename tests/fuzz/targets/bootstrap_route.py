"""The route that kvferry adds to SGLang's bootstrap server: ranks that register, and what decode is told of them.

SGLang and its HTTP server are not here: stand-ins take their place, whose requests have what a handler reads of them. A
frame is a request, see ``take_one_input``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import msgspec

from kvferry.protocol.errors import InvalidFieldError
from tests.fuzz.inputs import frames_of, joined

ROUNDS: Final = 3_000
ADDRESSES: Final = ("ipc:///run/kvferry/peer.sock", "tcp://192.0.2.7:7801")
SERVERS: Final = "sglang.srt.disaggregation.common.conn"
LAYERS: Final = (0, 1, 2, 3)


def seeds() -> list[bytes]:
    """Return ranks of a prefill server with two stages, and what decode asks."""
    puts = [
        b"p" + msgspec.json.encode(_rank(rank=f"{group}/{rank}/{stage}", layers=(2 * stage, 2 * stage + 1)))
        for group in range(2)
        for rank in range(2)
        for stage in range(2)
    ]
    return [joined([*puts, b"g0", b"g1", b"g"]), joined([puts[0], b"g0", puts[1]]), b"p{}", b"p\xff", b"g0"]


def take_one_input(data: bytes) -> None:
    """Let ranks register (``p`` and a body) and decode ask (``g`` and a rank), and use what decode is told."""
    module = _module()
    server = module.KvferryKVBootstrapServer("127.0.0.1", 1)
    put, get = server.app.router.put, server.app.router.get
    registered: dict[str, Any] = {}
    for frame in frames_of(data):
        if frame[:1] == b"p":
            answer = _answer(put, _Request(frame[1:], {}))
            assert answer.status in {HTTPStatus.OK, HTTPStatus.BAD_REQUEST}, answer.status
            if answer.status == HTTPStatus.OK:
                rank = msgspec.json.decode(frame[1:], type=module.PrefillRank)
                registered[rank.rank] = rank
            continue
        group = frame[1:].decode(errors="replace")
        answer = _answer(get, _Request(b"", {"dp": group}))
        assert answer.status == HTTPStatus.OK, answer.status
        told = msgspec.json.decode(answer.body, type=module.PrefillRanks)
        assert told.ranks == tuple(one for name, one in registered.items() if name.split("/")[0] == group)
        _use(told.ranks)


def _use(ranks: Any) -> None:  # noqa: ANN401  values of the route's module
    """Ask of the ranks what decode asks."""
    _module().misfit_of(ranks, LAYERS)
    for rank in ranks:
        assert rank.tp_rank >= 0
        assert rank.stage >= 0
        try:
            address = rank.reached_from("192.0.2.8", ("tcp://192.0.2.8:7801",), "f" * 32)
        except InvalidFieldError:
            continue
        assert set(address) <= set(rank.daemons)


def _rank(**changes: object) -> Any:  # noqa: ANN401  a value of the route's module
    known = {"host": "192.0.2.7", "place": "boot/26/3", "daemons": ADDRESSES, "boot_id": "0123456789abcdef" * 2}
    return _module().PrefillRank(**{**known, "handshake": 3, "pool": "prefill", "row": (8, 16), **changes})


def _answer(handler: Callable[[_Request], Coroutine[Any, Any, _Response]], request: _Request) -> _Response:
    """Run a handler, which waits for nothing but a body that is there."""
    running = handler(request)
    try:
        running.send(None)
    except StopIteration as end:
        answer: _Response = end.value
        return answer
    raise AssertionError("it waits")


@cache
def _module() -> Any:  # noqa: ANN401  a module that types do not know here
    names = "sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.common", SERVERS, "aiohttp"
    stand_ins = {name: ModuleType(name) for name in names}
    vars(stand_ins["aiohttp"])["web"] = SimpleNamespace(Request=_Request, Response=_Response)
    vars(stand_ins[SERVERS])["CommonKVBootstrapServer"] = _Server
    sys.modules.update(stand_ins)
    try:
        return import_module("kvferry.clients.sglang.bootstrap")
    finally:
        for name in stand_ins:
            del sys.modules[name]


class _Request:
    def __init__(self, body: bytes, query: dict[str, str]) -> None:
        self._body = body
        self.query = query

    async def read(self) -> bytes:
        return self._body


class _Response:
    def __init__(self, *, text: str = "", body: bytes = b"", status: int = 200, content_type: str = "") -> None:
        self.body = body or text.encode()
        self.status = status
        self.content_type = content_type


class _Router:
    put: Any
    get: Any

    def add_put(self, _path: str, handler: object) -> None:
        self.put = handler

    def add_get(self, _path: str, handler: object) -> None:
        self.get = handler


class _Server:
    """Stands in for SGLang's server."""

    def __init__(self, _host: str, _port: int) -> None:
        self.app = SimpleNamespace(router=_Router())
        self._setup_routes()

    def _setup_routes(self) -> None:
        """Add none of SGLang's own."""
