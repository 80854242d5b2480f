"""The two clients have one surface: the same calls with the same arguments and words; what waits is awaited."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import pytest

from kvferry.clients import AsyncClient, Client

AT_ONCE: Final = {
    "batched", "begin", "boot_id", "close", "is_ready", "load", "offload", "receive", "restore", "send", "store",
    "update_tables", "welcome",
}  # fmt: skip
"""What neither waits nor is awaited."""


def surface(client: type[Any]) -> dict[str, Any]:
    """Return what a client send requests."""
    return {name: inspect.getattr_static(client, name) for name in dir(client) if not name.startswith("_")}


SYNC, ASYNC = surface(Client), surface(AsyncClient)
CALLS = sorted(name for name in SYNC if callable(getattr(Client, name)))


def test_the_same_names() -> None:
    assert set(SYNC) == set(ASYNC)
    assert {"wait_finished", "wait_settled", "boot_id", "poll", "wait", "is_ready", "connect"} <= set(ASYNC)


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name: str) -> None:
    one, other = getattr(Client, name), getattr(AsyncClient, name)
    ours, theirs = inspect.signature(one), inspect.signature(other)
    as_async = str(theirs.return_annotation)
    assert list(ours.parameters.values()) == list(theirs.parameters.values())
    as_sync = re.sub(r"\bAsync(Client|Iterator)\b", r"\1", as_async)
    assert re.sub(r"^Connecting\[(.*)\]$", r"\1", as_sync) == str(ours.return_annotation)
    assert inspect.getdoc(one) == inspect.getdoc(other)
    assert inspect.getdoc(one)
    waits = inspect.iscoroutinefunction(other) or inspect.isasyncgenfunction(other) or "Connecting[" in as_async
    assert waits == (name not in AT_ONCE)


def test_properties_have_the_same_words() -> None:
    for name in sorted(set(SYNC) - set(CALLS)):
        assert inspect.getdoc(getattr(Client, name)) == inspect.getdoc(getattr(AsyncClient, name))
