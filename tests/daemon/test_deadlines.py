"""A daemon whose longest deadline is short: clients take its word, and only what a caller asks for is refused."""

from __future__ import annotations

import json

import pytest

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.errors import DeadlineError, InvalidFieldError
from kvferry.protocol.limits import Limits
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry

SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
TUNING = Tuning(limits=Limits(max_deadline_ms=10_000, default_deadline_ms=500))


def test_a_client_that_names_no_deadline_is_served(client: Client) -> None:
    client.create_pool("pool", SPEC)
    held = client.allocate("pool", 2)
    client.wait_done(client.offload("pool", [pages(held)]))
    alone = client.receive("pool", new_request_id(), [pages(held)])
    with pytest.raises(DeadlineError, match="no SEND yet"):  # the daemon's default
        client.wait_finished(alone)
    client.wait_settled(alone)
    for refuse in (
        lambda: client.receive("pool", new_request_id(), [pages(held)], deadline_s=10.1),
        lambda: client.lookup("pool", [b"h" * 16], deadline_s=10.1),
    ):
        with pytest.raises(InvalidFieldError, match="at most 10,") as refused:
            refuse()
        assert refused.value.field == "deadline_s"
    assert client.receive("pool", new_request_id(), [pages(held)], deadline_s=10).refused is None
    client.free("pool", held)


@pytest.mark.parametrize(("options", "said"), [((), "UNKNOWN_POOL"), (("--timeout", "11"), "at most 10 s")])
def test_commands_too(daemon: Daemon, options: tuple[str, ...], said: str) -> None:
    fields = json.dumps({"pool": "nowhere", "count": 1, "space": "main"})
    assert said in run_kvferry("probe", "--runtime-dir", daemon.runtime_dir, *options, "ALLOCATE", fields).stdout
