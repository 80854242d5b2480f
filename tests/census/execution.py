"""Which functions of the daemon one transfer enters, and which one offload: the second of each, when all is warm."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import msgspec

from kvferry.clients import AttachedPool, Client, MhaSpec, ModelIdentity, pages
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.config.schema import TiersConfig
from kvferry.protocol.ids import new_request_id
from tests.kit.in_process import CONFIG, serving

SPEC: Final = MhaSpec(layers=2, tokens=256, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
PAGES: Final = 4


class Recorder:
    """A profile function of all threads but the engine's. Sets are all that it touches: it runs at every call."""

    def __init__(self) -> None:
        self.on = False
        self.engine = 0
        self.entered: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if self.on and event == "call" and threading.get_ident() != self.engine:
            self.entered.add(frame.f_code)


def transfer(client: Client, pool: AttachedPool) -> Callable[[], None]:
    """Prepare a RECEIVE; return the SEND, until both sides have settled. One connection is both engines."""
    request_id = new_request_id()
    source, destination = client.allocate(pool.name, PAGES), client.allocate(pool.name, PAGES)
    received = client.receive(pool.name, request_id, [pages(destination)])
    client.ping()  # the RECEIVE has been taken

    def send() -> None:
        sent = client.send(pool.name, request_id, [pages(source)], first_token=1)
        for one in (received, sent):
            client.wait_finished(one)
            client.wait_settled(one)

    return send


def offload(client: Client, pool: AttachedPool) -> Callable[[], None]:
    """Prepare pages; return their OFFLOAD, to its end."""
    ids = client.allocate(pool.name, PAGES)

    def store() -> None:
        client.wait_done(client.offload(pool.name, [pages(ids)]))

    return store


def entered(root: Path, prepare: Callable[[Client, AttachedPool], Callable[[], None]]) -> set[tuple[str, str]]:
    """Return (module's file, function) of what the second one of such requests enters in a daemon of its own."""
    recorder = Recorder()

    def ask(path: Path) -> None:
        recorder.engine = threading.get_ident()
        with Client.connect(path) as client:
            pool = client.create_pool("census", SPEC, model=ModelIdentity(name="census"))
            prepare(client, pool)()
            request = prepare(client, pool)
            recorder.on = True
            request()
            client.ping()  # so that what came before it has been done
            recorder.on = False
            pool.close()

    async def run() -> None:
        config = msgspec.structs.replace(CONFIG, tiers=TiersConfig(host_bytes=4 << 20))
        async with serving(config, tuning=Tuning()) as one:
            await asyncio.to_thread(ask, one.path)

    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(run())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = ((os.path.relpath(os.path.realpath(one.co_filename), root), one.co_qualname) for one in recorder.entered)
    made = (".", "<", "tests")  # outside of the checkout or in an environment, by Python itself, by the tests
    return {(file, name) for file, name in files if not file.startswith(made) and not name.endswith(">")}
