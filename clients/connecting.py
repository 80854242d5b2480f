"""What ``AsyncClient.connect`` returns: awaited it is a client, and ``async with`` takes it as it is."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

from kvferry.protocol.errors import MisuseError


class Closable(Protocol):
    """What ends with a ``with`` block."""

    def close(self) -> None:
        """Give everything back."""


ClientT = TypeVar("ClientT", bound=Closable)


class Connecting(Coroutine[Any, Any, ClientT]):
    """A connection that is being made: ``await`` it, or enter it by ``async with``."""

    def __init__(self, coroutine: Coroutine[Any, Any, ClientT]) -> None:
        self._coroutine = coroutine
        self._client: ClientT | None = None

    def __await__(self) -> Generator[Any, Any, ClientT]:
        """Return the client."""
        return self._coroutine.__await__()

    async def __aenter__(self) -> ClientT:
        """Return the client."""
        self._client = await self._coroutine
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> NoReturn:
        """Say what to write instead."""
        self.close()
        raise MisuseError("an AsyncClient is entered by `async with AsyncClient.connect(...) as client`")

    def __exit__(self, *_: object) -> None:
        """Do nothing: it cannot be entered."""

    def send(self, value: Any) -> Any:  # noqa: ANN401  as the generator protocol has it
        """See ``Coroutine``."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401  as the generator protocol has it
        """See ``Coroutine``."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Give it up."""
        self._coroutine.close()
