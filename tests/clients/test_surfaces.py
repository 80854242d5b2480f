"""The two clients have one surface: the synchronous one's requests are made from the asynchronous one's."""

from __future__ import annotations

import inspect

from kvferry.clients import AsyncClient, Client
from tests.clients.unasync import MADE, SOURCE, made

SURFACE = sorted(name for name in dir(Client) if not name.startswith("_"))


def test_the_synchronous_client_is_up_to_date() -> None:
    assert made(SOURCE.read_text()) == MADE.read_text(), "run `make sync-client`"


def test_both_have_the_same_calls_with_the_same_words() -> None:
    assert [name for name in dir(AsyncClient) if not name.startswith("_")] == SURFACE
    assert {"wait_finished", "wait_settled", "boot_id", "poll", "wait", "is_ready", "connect"} <= set(SURFACE)
    for name in SURFACE:
        assert inspect.getdoc(getattr(Client, name)) == inspect.getdoc(getattr(AsyncClient, name)), name
