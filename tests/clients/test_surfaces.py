"""The two clients have one surface: the synchronous one's requests are made from the asynchronous one's."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from kvferry.clients import AsyncClient, Client
from tests.clients.unasync import MADE, SOURCE, made

SURFACE = sorted(name for name in dir(Client) if not name.startswith("_"))
NO_SUCH_WORDS = re.compile(r"\b(await|async|coroutine|task)", re.IGNORECASE)


def test_the_synchronous_client_is_up_to_date() -> None:
    assert made(SOURCE.read_text()) == MADE.read_text(), "run `make sync-client`"


def test_both_have_the_same_calls_with_the_same_words() -> None:
    assert [name for name in dir(AsyncClient) if not name.startswith("_")] == SURFACE
    assert {"wait_finished", "wait_settled", "boot_id", "poll", "wait", "is_ready", "connect"} <= set(SURFACE)
    for name in SURFACE:
        assert inspect.getdoc(getattr(Client, name)) == inspect.getdoc(getattr(AsyncClient, name)), name


@pytest.mark.parametrize("one", [Client, *(getattr(Client, name) for name in SURFACE)])
def test_the_synchronous_client_speaks_of_nothing_asynchronous(one: Any) -> None:  # noqa: ANN401  a class, a call, a property
    assert not NO_SUCH_WORDS.search(inspect.getdoc(one) or "")


def test_what_is_made_waits_where_the_source_awaits() -> None:
    source = '''"""A module about asyncio."""

import asyncio
from collections.abc import AsyncIterator


class AsyncRequests:
    @connecting  # async only
    async def connect(self, path: str) -> str:
        """Say await."""
        found = await asyncio.to_thread(find, path) if path else await asyncio.to_thread(default)
        async with found as one:
            return await one.read("await")

    async def each(self) -> AsyncIterator[int]:
        for one in await self.all():
            yield one
'''
    assert (
        made(source).partition("\n")[2]
        == '''"""A module about asyncio."""

from collections.abc import Iterator


class SyncRequests:
    def connect(self, path: str) -> str:
        """Say await."""
        found = find(path) if path else default()
        with found as one:
            return one.read("await")

    def each(self) -> Iterator[int]:
        yield from self.all()
'''
    )
