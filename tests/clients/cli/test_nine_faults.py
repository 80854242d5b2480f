"""Nine faults made on purpose: for each one command whose output has the cause, and what or whom it is about.

And the alert or panel of docs/metrics.md that shows it.
"""

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
from kvferry.clients.cli.console import BAD_INPUT, FAILED
from kvferry.clients.cli.main import main
from kvferry.pools.tiers.disk import DiskStore
from kvferry.protocol.config.schema import DiskTierConfig, TiersConfig
from kvferry.protocol.errors import AccessDeniedError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.documents import page
from tests.kit.in_process import CONFIG as PLAIN
from tests.kit.kvferry_command import run_kvferry
from tests.kit.monitoring import Query, as_prometheus
from tests.kit.mooncake import mooncake_works
from tests.kit.pools import MODEL, SPEC
from tests.kit.scraping import Scrape, scrape, scrape_until

TEXT: Final = page("metrics.md")
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


def faults() -> dict[str, str]:
    """Return the alert or panel of each fault, as the page has them."""
    [table] = TEXT.split("nine faults, ")[1:]
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[1].splitlines()[2:]]
    return {fault: shown for fault, shown, _ in rows}


@pytest.fixture
def on_board(request: pytest.FixtureRequest) -> Query:
    """Return the query of the alert or panel that shows this test's fault."""
    return Query.named(faults()[request.node.originalname.removeprefix("test_").replace("_", " ")])


def test_each_fault_of_the_page_is_made_here() -> None:
    its = {name.removeprefix("test_").replace("_", " ") for name in globals() if name.startswith("test_")}
    assert its - {"each fault of the page is made here"} == set(faults())
    assert len(faults()) == 9


def fires(at: Path, alert: Query) -> bool:
    return alert.fires(scrape_until(at, alert.fires))


def grown(at: Path, panel: Query, before: Scrape, **labels: str) -> float:
    """Return by how much what a panel shows has grown, once it has."""
    was = panel.value(before, **labels)
    return panel.value(scrape_until(at, lambda now: panel.value(now, **labels) > was), **labels) - was


def test_decode_never_comes(daemon: Daemon, name: str, say: Say, on_board: Query) -> None:
    before = scrape(daemon.runtime_dir)
    with kit.engine(daemon, "prefill-3") as client:
        client.create_pool(name, SPEC)
        client.send(name, new_request_id(), [pages(client.allocate(name, 2))], deadline_s=600)
        client.ping()
        where = ("--runtime-dir", daemon.runtime_dir)
        sees(say, "transfers", "--stuck", "0.05", *where, cause="no RECEIVE yet", about="prefill-3, pid ")
        assert grown(daemon.runtime_dir, on_board, before, direction="send", state="waiting") > 0


def test_a_leak(daemon: Daemon, name: str, say: Say, on_board: Query) -> None:
    before = scrape(daemon.runtime_dir)
    with kit.engine(daemon, "leaker") as leaker, kit.engine(daemon, "victim") as victim:
        leaker.create_pool(name, SPEC)
        leaker.allocate(name, 14)
        victim.allocate(name, 2)
        where = ("--runtime-dir", daemon.runtime_dir)
        sees(say, "pools", *where, cause=f"{name} {os.getuid()} main 14 0 ", about="'leaker'")
        assert grown(daemon.runtime_dir, on_board, before, pool=name, state="idle") == 16


class SlowWriter:
    """A file's writer on a disk that needs SLOW_S for each block: the fault itself takes this long."""

    def __init__(self, writer: Any) -> None:  # noqa: ANN401  it has no name outside
        self._writer = writer

    def __enter__(self) -> Any:  # noqa: ANN401
        threading.Event().wait(SLOW_S)
        return self._writer.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._writer.__exit__(*raised)


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say, on_board: Query) -> None:
    real = DiskStore.begin_write
    monkeypatch.setattr(DiskStore, "begin_write", lambda *given: SlowWriter(real(*given)))
    tiers = TiersConfig(host_bytes=4 << 20, disk=DiskTierConfig(path=str(tmp_path)))

    async def run() -> None:
        async with (
            kit.serving(msgspec.structs.replace(PLAIN, tiers=tiers)) as (path, _, _),
            await AsyncClient.connect(path) as client,
        ):
            await client.create_pool("pool", SPEC, model=MODEL)
            assert not on_board.fires(await asyncio.to_thread(scrape, path))
            ids = await client.allocate("pool", 4)
            await client.wait_done(client.store("pool", [os.urandom(16) for _ in ids], ids))
            command = ("tiers", "--runtime-dir", path)
            await asyncio.to_thread(sees, say, *command, cause="slow: the last ", about="disk ")
            assert await asyncio.to_thread(fires, path, on_board)

    asyncio.run(run())  # not on anyio's loop, which lets nobody look at files


def test_a_stopped_peer(say: Say, on_board: Query) -> None:
    config = "[peers]\ntimeout_ms = 600\n"
    with kit.daemon(config) as here, kit.daemon(config) as there, kit.engine(here) as client:
        with Client.connect(there.runtime_dir, session=False) as other:
            [address] = other.status().addresses
        client.create_pool("pool", SPEC)
        ids = client.allocate("pool", 1)
        client.receive("pool", new_request_id(), [pages(ids)], source_daemons=[address], deadline_s=600)
        where = ("--runtime-dir", here.runtime_dir)
        sees(say, "status", *where, cause=" up ", about=address)
        assert not on_board.fires(scrape(here.runtime_dir))
        with there.stopped():
            sees(say, "status", *where, cause=" silent ", about=address)
            assert fires(here.runtime_dir, on_board)


def unused_address() -> tuple[str, int]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address: tuple[str, int] = unused.getsockname()
        return address


def listening(address: tuple[str, int]) -> str:
    return f'[metrics]\nlisten = "tcp://{address[0]}:{address[1]}"\n'


def test_a_wrong_configuration(tmp_path: Path, say: Say, on_board: Query) -> None:
    file, address = tmp_path / "kvferry.toml", unused_address()
    with kit.daemon(listening(address)):
        assert not on_board.fires(as_prometheus(address))
    file.write_text(f'{listening(address)}[tiers]\nhost_bytes = "8GB"\n')
    sees(say, "config", "check", "--config", file, cause='tiers.host_bytes = "8GB": must be a size', about=str(file))
    assert status_of_daemon(file, tmp_path) == BAD_INPUT
    assert on_board.fires(as_prometheus(address))


def status_of_daemon(file: Path, folder: Path) -> int:
    """Return the exit status of a daemon that does not start."""
    return run_kvferry("daemon", "--config", file, "--runtime-dir", folder / "run").returncode


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


def test_a_missing_permission(say: Say, require: Callable[[object, str], None], on_board: Query) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    assert inspect.__name__ in sys.modules
    with kit.daemon() as daemon:
        daemon.runtime_dir.chmod(0o700)
        daemon.runtime_dir.parent.chmod(0o755)
        with without_rights():
            said = say("ping", "--runtime-dir", daemon.runtime_dir)
            with pytest.raises(AccessDeniedError):
                Client.connect(daemon.runtime_dir)
        daemon.runtime_dir.chmod(0o710)
        refused = scrape(daemon.runtime_dir)
        assert on_board.value(refused, state="connected") == 0
        with kit.engine(daemon):
            assert grown(daemon.runtime_dir, on_board, refused, state="connected") == 1
    assert said.startswith(f"kvferry ping: ACCESS_DENIED: {daemon.runtime_dir}: Permission denied")


def answer(listener: socket.socket) -> None:
    """Be another program that has metrics."""
    channel, _ = listener.accept()
    with channel:
        channel.recv(4096)
        channel.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nother 1\n")


def test_a_taken_port(tmp_path: Path, say: Say, on_board: Query) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address: tuple[str, int] = taken.getsockname()
        listen, file = f"tcp://127.0.0.1:{address[1]}", tmp_path / "kvferry.toml"
        file.write_text(listening(address))
        where = ("--runtime-dir", tmp_path / "none")
        sees(say, "doctor", "--config", file, *where, cause=f"{listen} is held by ", about=f"pid {os.getpid()}")
        assert status_of_daemon(file, tmp_path) == FAILED
        other = threading.Thread(target=answer, args=(taken,))
        other.start()
        scraped = as_prometheus(address)
        other.join()
    assert scraped.value("up") == 1
    assert on_board.fires(scraped)


def test_the_store_is_gone(say: Say, on_board: Query, require: Callable[[object, str], None]) -> None:
    require(mooncake_works(), "mooncake-transfer-engine-non-cuda and libibverbs1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens there
        master = f"127.0.0.1:{unused.getsockname()[1]}"
        config = f'[tiers]\nhost_bytes = 4194304\n[tiers.remote]\ntransport = "mooncake_store"\nmaster = "{master}"\n'
        with kit.daemon(f'{config}address = "127.0.0.1"\n') as daemon:
            where = ("--runtime-dir", daemon.runtime_dir)
            sees(say, "tiers", *where, cause="away: its master at", about=master)
            assert fires(daemon.runtime_dir, on_board)


def test_another_layout(say: Say, on_board: Query) -> None:
    with (
        kit.daemon() as here, kit.daemon() as there,
        kit.engine(here, "decode") as decode, kit.engine(there, "prefill") as prefill,
    ):  # fmt: skip
        before, [address] = scrape(there.runtime_dir), prefill.status().addresses
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
        assert grown(there.runtime_dir, on_board, before, direction="send", outcome="geometry_mismatch") == 1
