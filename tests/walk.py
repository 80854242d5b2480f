"""``docs/walk.md``: a new operator's first hour, each command with what it printed: ``python -m tests.walk``."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.clients import Client, pages
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry
from tests.kit.pools import MODEL, SPEC
from tests.kit.terminal import on_terminal

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "walk.md"
HEAD: Final = """\
# A walk

What a new operator sees, on a terminal of 80 columns: a daemon that is not there, wrongly configured, at work, drained
and stopped. `python -m tests.walk` makes this page, and a test runs each command again. [operations.md](operations.md)
has the rest. `KVFERRY_RUNTIME_DIR` names the daemon's directory here.
"""
CONFIG: Final = '[tiers]\nhost_bytes = "64MiB"\n'
WAITS: Final = "5eed" * 8
DONE: Final = "cafe" * 8


class Step(NamedTuple):
    """A command, what is said of it before, and what it printed."""

    why: str
    command: str
    said: str
    status: int


class Walker:
    """Runs commands at one daemon's directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = {str(folder / "run"): "/run/kvferry/a", str(folder): "/etc/kvferry"}
        self._environ = {**os.environ, "KVFERRY_RUNTIME_DIR": str(folder / "run")}

    def step(self, why: str, command: str) -> Step:
        """Run a command; ``DIR`` in it is the folder."""
        done = on_terminal(*command.replace("DIR", str(self.folder)).split(), environ=self._environ)
        return Step(why, f"kvferry {command.replace('DIR', '/etc/kvferry')}", self._named(done.text), done.status)

    def _named(self, text: str) -> str:
        """Return what a terminal shows in the end, with an installed daemon's paths."""
        shown = re.sub(r"[^\n]*\r\x1b\[K", "", text)
        for given, name in self._names.items():
            shown = shown.replace(given, name)
        return shown.rstrip("\n")


def walk() -> Iterator[Step]:
    """Walk; yield each step."""
    with tempfile.TemporaryDirectory(prefix="kvferry-walk-") as folder:
        alone = Walker(Path(folder))
        yield alone.step("No daemon is there.", "ping")
        Path(folder, "a.toml").write_text('[tiers]\nhosts_bytes = "64MiB"\n')
        yield alone.step("The configuration has a key that does not exist.", "config check --config DIR/a.toml")
        Path(folder, "a.toml").write_text(CONFIG)
        yield alone.step("Now it has not.", "config check --config DIR/a.toml")
    with kit.daemon(CONFIG) as daemon:
        yield from _at_work(daemon, Walker(daemon.runtime_dir.parent))


def _at_work(daemon: Daemon, walker: Walker) -> Iterator[Step]:
    yield walker.step("The daemon runs, and no engine is there yet.", "ping")
    listed = run_kvferry("events", "--json", "--runtime-dir", daemon.runtime_dir).stdout
    cursor = json.loads(listed.splitlines()[-1])["cursor"]
    with kit.engine(daemon, "prefill-0") as prefill, kit.engine(daemon, "decode-0") as decode:
        _exchange(prefill, decode)
        yield walker.step(
            "Two engines have come. One request has gone from prefill to decode, of another decode waits.", "status"
        )
        yield walker.step("What does it wait for, and whose is it?", "transfers")
        yield walker.step("And one request, also at other daemons of this host:", f"transfers --request {DONE}")
        yield walker.step("Who has the pages?", "pools")
        yield walker.step("The tiers:", "tiers")
        yield walker.step("What has happened since a line that was read before?", f"events --from {cursor}")
        yield walker.step("Is every page in exactly one state?", "verify")
        yield walker.step("Nothing new shall begin here, before a repair, say.", "drain")
        yield walker.step("So the exit status is 1:", "ping")
        yield walker.step("The repair is over.", "undrain")
    with daemon.stopped():
        yield walker.step("The daemon's process is stopped (SIGSTOP).", "status")


def _exchange(prefill: Client, decode: Client) -> None:
    for client, name in ((prefill, "prefill"), (decode, "decode")):
        client.create_pool(name, SPEC, model=MODEL)
    ids = decode.allocate("decode", 4)
    receiving = decode.receive("decode", DONE, [pages(ids[:2])])
    prefill.wait_settled(prefill.send("prefill", DONE, [pages(prefill.allocate("prefill", 2))]))
    decode.wait_settled(receiving)
    decode.receive("decode", WAITS, [pages(ids[2:])], deadline_s=600)
    for client in (decode, prefill):
        client.ping()


def page(steps: Iterator[Step]) -> str:
    """Return the page."""
    return HEAD + "".join(
        f"\n{one.why}\n\n```console\n$ {one.command}\n{one.said}\n```\n\nExit status {one.status}.\n" for one in steps
    )


def shape(text: str) -> list[str]:
    """Return the words of a page, without what differs from run to run: numbers, times and boot ids."""
    return re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\d+(\.\d+)?( m?s\b)?", "#", text).replace("# us", "#").split()


if __name__ == "__main__":
    PAGE.write_text(page(walk()))
