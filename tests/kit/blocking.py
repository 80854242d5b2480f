"""The asynchronous client as tests call the synchronous one, so that one test is of both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import pytest

from kvferry.clients import AsyncClient, Client
from kvferry.clients.batch import Batch


class Blocking:
    """An asynchronous client, ``itself``, whose event loop runs as long as a call does; or a batch of one."""

    def __init__(self, runner: asyncio.Runner, itself: Any) -> None:  # noqa: ANN401  a client or a batch
        self._runner = runner
        self.itself = itself

    def __repr__(self) -> str:
        return repr(self.itself)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the client has
        """Return what the client has of that name; a call is awaited."""
        found = getattr(self.itself, name)
        return (lambda *arguments, **named: self._call(found, *arguments, **named)) if callable(found) else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self.itself.__exit__, kind, error, at)

    def _call(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        async def awaited() -> Any:  # noqa: ANN401  whatever it returns
            result = call(*arguments, **named)
            if inspect.isasyncgen(result):
                return [one async for one in result]
            return await result if inspect.isawaitable(result) else result

        result = self._runner.run(awaited())
        return Blocking(self._runner, result) if isinstance(result, Batch) else result


def kinds(quick: type[Client | AsyncClient]) -> list[Any]:
    """Return both kinds of clients as a test's parameters, of which a quick run takes this one."""
    other = AsyncClient if quick is Client else Client
    return [quick, pytest.param(other, marks=pytest.mark.full)]


@contextmanager
def connected(kind: type[Client | AsyncClient], *arguments: Any, **named: Any) -> Iterator[Client]:  # noqa: ANN401
    """Connect a client of a kind, with the arguments of ``connect``, and close it at the end."""
    if kind is Client:
        with Client.connect(*arguments, **named) as client:
            yield client
        return

    async def connect() -> AsyncClient:
        return await AsyncClient.connect(*arguments, **named)

    with asyncio.Runner() as runner:
        blocking = Blocking(runner, runner.run(connect()))
        try:
            yield cast("Client", blocking)
        finally:
            blocking.close()
