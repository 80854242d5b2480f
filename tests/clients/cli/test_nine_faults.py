"""Nine faults made on purpose: for each one command whose output has the cause, and what or whom it is about."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvferry.clients import AsyncClient, Client, new_request_id, pages
from kvferry.clients.cli import inspect  # a user without rights cannot import it later
from kvferry.clients.cli.main import main
from kvferry.pools.tiers.disk import DiskStore
from kvferry.protocol.config.schema import DiskTierConfig, TiersConfig
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.in_process import CONFIG as PLAIN
from tests.kit.pools import MODEL, SPEC

SLOW_S: Final = 0.4
NOBODY: Final = 12345
Say = Callable[..., str]


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Say:
    """Return what runs a command, and returns all that it prints, with single spaces."""

    def run(*words: object) -> str:
        main([str(one) for one in words])
        printed = capfd.readouterr()
        return "\n".join(" ".join(line.split()) for line in (printed.out + printed.err).splitlines())

    return run


def sees(say: Say, *command: object, cause: str, about: str) -> None:
    """Wait until one line of a command's output has the cause, and what it is about."""
    said = [""]

    def is_there() -> bool:
        said[0] = say(*command)
        return any(cause in line and about in line for line in said[0].splitlines())

    assert soon(is_there), said[0]


def test_decode_never_comes(daemon: Daemon, name: str, say: Say) -> None:
    with kit.engine(daemon, "prefill-3") as client:
        client.create_pool(name, SPEC)
        client.send(name, new_request_id(), [pages(client.allocate(name, 2))], deadline_s=600)
        client.ping()
        where = ("--runtime-dir", daemon.runtime_dir)
        sees(say, "transfers", "--stuck", "0.05", *where, cause="no RECEIVE yet", about="prefill-3, pid ")


def test_a_leak(daemon: Daemon, name: str, say: Say) -> None:
    with kit.engine(daemon, "leaker") as leaker, kit.engine(daemon, "victim") as victim:
        leaker.create_pool(name, SPEC)
        leaker.allocate(name, 14)
        victim.allocate(name, 2)
        where = ("--runtime-dir", daemon.runtime_dir)
        sees(say, "pools", *where, cause=f"{name} {os.getuid()} main 14 0 ", about="'leaker'")


class SlowWriter:
    """A file's writer on a disk that needs SLOW_S for each block: the fault itself takes this long."""

    def __init__(self, writer: Any) -> None:  # noqa: ANN401  it has no name outside
        self._writer = writer

    def __enter__(self) -> Any:  # noqa: ANN401
        threading.Event().wait(SLOW_S)
        return self._writer.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._writer.__exit__(*raised)


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    real = DiskStore.begin_write
    monkeypatch.setattr(DiskStore, "begin_write", lambda *given: SlowWriter(real(*given)))
    tiers = TiersConfig(host_bytes=4 << 20, disk=DiskTierConfig(path=str(tmp_path)))

    async def run() -> None:
        async with (
            kit.serving(msgspec.structs.replace(PLAIN, tiers=tiers)) as (path, _, _),
            await AsyncClient.connect(path) as client,
        ):
            await client.create_pool("pool", SPEC, model=MODEL)
            ids = await client.allocate("pool", 4)
            await client.wait_done(client.store("pool", [os.urandom(16) for _ in ids], ids))
            command = ("tiers", "--runtime-dir", path)
            await asyncio.to_thread(sees, say, *command, cause="slow: the last ", about="disk ")

    asyncio.run(run())  # not on anyio's loop, which lets nobody look at files


def test_a_stopped_peer(say: Say) -> None:
    config = "[peers]\ntimeout_ms = 600\n"
    with kit.daemon(config) as here, kit.daemon(config) as there, kit.engine(here) as client:
        with Client.connect(there.runtime_dir, session=False) as other:
            [address] = other.status().addresses
        client.create_pool("pool", SPEC)
        ids = client.allocate("pool", 1)
        client.receive("pool", new_request_id(), [pages(ids)], source_daemons=[address], deadline_s=600)
        where = ("--runtime-dir", here.runtime_dir)
        sees(say, "status", *where, cause=" up ", about=address)
        with there.stopped():
            sees(say, "status", *where, cause=" silent ", about=address)


def test_a_wrong_configuration(tmp_path: Path, say: Say) -> None:
    file = tmp_path / "kvferry.toml"
    file.write_text('[tiers]\nhost_bytes = "8GB"\n')
    sees(say, "config", "check", "--config", file, cause='tiers.host_bytes = "8GB": must be a size', about=str(file))


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Be another user meanwhile."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_a_missing_permission(say: Say, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    assert inspect.__name__ in sys.modules
    with kit.daemon() as daemon:
        daemon.runtime_dir.chmod(0o700)
        daemon.runtime_dir.parent.chmod(0o755)
        with without_rights():
            said = say("ping", "--runtime-dir", daemon.runtime_dir)
        daemon.runtime_dir.chmod(0o710)
    assert said.startswith(f"kvferry ping: ACCESS_DENIED: {daemon.runtime_dir}: Permission denied")


def test_a_taken_port(tmp_path: Path, say: Say) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        file = tmp_path / "kvferry.toml"
        file.write_text(f'[metrics]\nlisten = "{listen}"\n')
        where = ("--runtime-dir", tmp_path / "none")
        sees(say, "doctor", "--config", file, *where, cause=f"{listen} is held by ", about=f"pid {os.getpid()}")


def test_the_store_is_gone(say: Say) -> None:
    pytest.importorskip("mooncake", reason="the extra `mooncake`")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens there
        master = f"127.0.0.1:{unused.getsockname()[1]}"
        config = f'[tiers]\nhost_bytes = 4194304\n[tiers.remote]\ntransport = "mooncake_store"\nmaster = "{master}"\n'
        with kit.daemon(f'{config}address = "127.0.0.1"\n') as daemon:
            where = ("--runtime-dir", daemon.runtime_dir)
            sees(say, "tiers", *where, cause="away: its master at", about=master)


def test_another_layout(say: Say) -> None:
    with (
        kit.daemon() as here, kit.daemon() as there,
        kit.engine(here, "decode") as decode, kit.engine(there, "prefill") as prefill,
    ):  # fmt: skip
        [address] = prefill.status().addresses
        decode.create_pool("decode", SPEC)
        prefill.create_pool("prefill", msgspec.structs.replace(SPEC, head_dim=8))
        request_id = new_request_id()
        decode.receive("decode", request_id, [pages(decode.allocate("decode", 2))], source_daemons=[address])
        prefill.send("prefill", request_id, [pages(prefill.allocate("prefill", 2))], deadline_s=600)
        prefill.ping()
        where = ("--runtime-dir", here.runtime_dir)
        sees(
            say,
            "transfers",
            "--request",
            request_id,
            *where,
            cause="refused: GEOMETRY_MISMATCH",
            about="main/k/3: page_bytes is 256 at the source",
        )
