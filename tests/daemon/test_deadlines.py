"""A daemon whose longest deadline is short: clients take its word, and only what a caller asks for is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvferry.clients import AsyncClient, Client, MhaSpec, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.errors import DeadlineError, InvalidFieldError
from kvferry.protocol.limits import Limits
from tests.daemons import DaemonProcess
from tests.kvferry_command import run_kvferry

SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
TUNING = Tuning(limits=Limits(max_deadline_ms=10_000, default_deadline_ms=500))
TOO_LONG_S = 10.1


def test_a_client_that_names_no_deadline_is_served(daemon: DaemonProcess) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        client.create_pool("sync", SPEC)
        held = client.allocate("sync", 2)
        operation = client.offload("sync", [pages(held)])
        client.wait_done(operation)
        alone = client.receive("sync", new_request_id(), [pages(held)])
        with pytest.raises(DeadlineError, match="no SEND yet"):  # the daemon's default
            client.wait_finished(alone)
        client.wait_settled(alone)
        with pytest.raises(InvalidFieldError, match="at most 10,") as refused:
            client.receive("sync", new_request_id(), [pages(held)], deadline_s=TOO_LONG_S)
        assert refused.value.field == "deadline_s"
        assert client.receive("sync", new_request_id(), [pages(held)], deadline_s=10).refused is None
        client.free("sync", held)


def test_an_asynchronous_client_too(daemon: DaemonProcess) -> None:
    async def talk() -> None:
        async with await AsyncClient.connect(daemon.runtime_dir) as client:
            pool = await client.create_pool("async", SPEC)
            held = await client.allocate("async", 2)
            alone = client.receive("async", new_request_id(), [pages(held)])
            with pytest.raises(DeadlineError, match="no SEND yet"):
                await client.wait_finished(alone)
            await client.wait_settled(alone)
            with pytest.raises(InvalidFieldError, match="at most 10,") as refused:
                await client.lookup("async", [b"h" * 16], deadline_s=TOO_LONG_S)
            assert refused.value.field == "deadline_s"
            await client.free("async", held)
            pool.close()

    asyncio.run(talk())


def test_commands_too(daemon: DaemonProcess) -> None:
    fields = json.dumps({"pool": "nowhere", "count": 1, "space": "main"})
    done = run_kvferry("probe", "--runtime-dir", daemon.runtime_dir, "ALLOCATE", fields)
    assert "UNKNOWN_POOL" in done.stdout + done.stderr
    done = run_kvferry("probe", "--runtime-dir", daemon.runtime_dir, "--timeout", "11", "ALLOCATE", fields)
    assert "at most 10 s" in done.stdout + done.stderr
