"""The asynchronous client as tests call the synchronous one, so that one test is of both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from kvferry.clients import AsyncClient, Client


class Blocking:
    """An asynchronous client whose event loop runs as long as a call does."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient) -> None:
        self._runner = runner
        self._client = client

    def __repr__(self) -> str:
        """Show the client."""
        return repr(self._client)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the client has
        """Return what the client has of that name; a call is awaited."""
        found = getattr(self._client, name)
        return self._awaiting(found) if callable(found) else found

    def _awaiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def awaited(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  whatever it takes and returns
            result = call(*arguments, **named)
            if inspect.isasyncgen(result):
                return [one async for one in result]
            return await result if inspect.isawaitable(result) else result

        return lambda *arguments, **named: self._runner.run(awaited(*arguments, **named))


@contextmanager
def connected(kind: type[Client | AsyncClient], runtime_dir: Path, name: str) -> Iterator[Client]:
    """Connect a client of a kind, and close it at the end."""
    if kind is Client:
        with Client.connect(runtime_dir, name=name) as client:
            yield client
        return

    async def connect() -> AsyncClient:
        return await AsyncClient.connect(runtime_dir, name=name)

    with asyncio.Runner() as runner:
        blocking = Blocking(runner, runner.run(connect()))
        yield cast("Client", blocking)
        blocking.close()
