"""A daemon that is stopped: whoever was given a time ends within it, and says that the daemon does not answer."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Final

import pytest

from kvferry.clients import AsyncClient, Client, MhaSpec, new_request_id, pages
from kvferry.clients.cli.cache import cache
from kvferry.clients.cli.main import main
from kvferry.protocol.errors import DaemonLostError, DeadlineError, KvferryError
from tests.kit.daemons import Daemon

TIMEOUT_S: Final = 0.3
MARGIN_S: Final = 5.0
"""For what a loaded machine takes beside; ten seconds were waited for a session, whatever the time given."""
SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
COMMANDS: Final = (("ping",), ("verify",), ("cache", "list"), ("doctor",), ("probe", "SNAPSHOTS"))


def fails_in_time(action: Callable[[], object], expected: type[KvferryError]) -> str:
    started = time.monotonic()
    with pytest.raises(expected) as failed:
        action()
    assert time.monotonic() - started < TIMEOUT_S + MARGIN_S
    return str(failed.value)


@pytest.mark.parametrize("session", [True, False])
def test_connecting_takes_no_longer_than_it_may(daemon: Daemon, *, session: bool) -> None:
    def connect() -> Client:
        return Client.connect(daemon.runtime_dir, session=session, timeout_s=TIMEOUT_S)

    async def connect_later() -> AsyncClient:
        return await AsyncClient.connect(daemon.runtime_dir, session=session, timeout_s=TIMEOUT_S)

    with daemon.stopped():
        heard = [fails_in_time(one, DaemonLostError) for one in (connect, lambda: asyncio.run(connect_later()))]
    for said in heard:
        assert f"does not answer within {TIMEOUT_S:g} s, though its sockets are there" in said
        assert "stopped or hangs" in said


def test_calls_and_the_end_of_a_client_take_no_longer(daemon: Daemon, name: str) -> None:
    client = Client.connect(daemon.runtime_dir)
    client.create_pool(name, SPEC)
    ids = client.allocate(name, 1)
    with daemon.stopped():
        transfer = client.receive(name, new_request_id(), [pages(ids)])
        fails_in_time(lambda: client.wait_finished(transfer, TIMEOUT_S), DeadlineError)
        fails_in_time(lambda: client.wait_settled(transfer, TIMEOUT_S), DeadlineError)
        fails_in_time(lambda: client.verify(timeout_s=TIMEOUT_S), DeadlineError)
        started = time.monotonic()
        for _ in range(100):
            assert client.poll(0) == []
        assert time.monotonic() - started < MARGIN_S
        assert client.poll(TIMEOUT_S) == []
        client.close()
        assert time.monotonic() - started < TIMEOUT_S + MARGIN_S


def test_a_command_of_the_cache_that_has_connected_takes_no_longer(daemon: Daemon) -> None:
    def freeze(client: Client, _: argparse.Namespace) -> int:
        with daemon.stopped():
            return len(list(client.cached_blocks()))

    options = argparse.Namespace(action="list", act=freeze, runtime_dir=daemon.runtime_dir, timeout=1.0)
    assert "did not answer within 1 s" in fails_in_time(lambda: cache(options), DeadlineError)


def test_commands_take_no_longer(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--runtime-dir", str(daemon.runtime_dir), "--timeout", str(TIMEOUT_S))
    for command in COMMANDS:
        with daemon.stopped():
            started = time.monotonic()
            assert main([*command, *options]) == 1, command
            assert time.monotonic() - started < TIMEOUT_S + MARGIN_S, command
        assert "does not answer within 0.3 s" in "".join(capsys.readouterr()), command
