"""Which functions of the daemon one transfer enters, and which one offload: the second of each, when all is warm."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.clients import AttachedPool, Client, MhaSpec, ModelIdentity, pages
from kvferry.protocol.ids import new_request_id
from tests.kit.daemons import END_S, start_and_wait_until_ready

SPEC: Final = MhaSpec(layers=2, tokens=256, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
CONFIG: Final = '[tiers]\nhost_bytes = "4MiB"\n'
PAGES: Final = 4


class Entered(NamedTuple):
    """The functions of the product that a daemon's threads entered, as (module's file, qualified name)."""

    functions: frozenset[tuple[str, str]]

    @property
    def modules(self) -> int:
        """Return how many modules they are of."""
        return len({file for file, _ in self.functions})


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


def entered(root: Path, prepare: Callable[[Client, AttachedPool], Callable[[], None]]) -> Entered:
    """Return what the second one of such requests enters in a daemon of its own."""
    with tempfile.TemporaryDirectory(prefix="kvferry-census-") as name:
        folder = Path(name)
        switch, config, run = folder / "on", folder / "daemon.toml", folder / "run"
        switch.write_bytes(b"\0")
        config.write_text(CONFIG)
        command = ["-m", "tests.census.traced_daemon", str(folder), "--config", str(config), "--runtime-dir", str(run)]
        process = start_and_wait_until_ready(command, folder / "notify", folder / "log", {})
        try:
            with Client.connect(run) as client:
                pool = client.create_pool("census", SPEC, model=ModelIdentity(name="census"))
                prepare(client, pool)()
                request = prepare(client, pool)
                with switch.open("r+b") as flag:
                    os.pwrite(flag.fileno(), b"\1", 0)
                    request()
                    client.ping()  # so that what came before it has been done
                    os.pwrite(flag.fileno(), b"\0", 0)
        finally:
            process.terminate()
            process.wait(END_S)
        found = json.loads((folder / "entered.json").read_text())
    inside = [(str(Path(file).relative_to(root)), function) for file, function in found if file.startswith(f"{root}/")]
    return Entered(frozenset(one for one in inside if not one[0].startswith(("tests/", ".venv"))))
