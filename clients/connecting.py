"""What ``AsyncClient.connect`` returns: awaiting it gives a client, and ``async with`` accepts it directly."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from inspect import CORO_CREATED, CORO_SUSPENDED, getcoroutinestate
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from kvferry.protocol.errors import MisuseError


class Closable(Protocol):
    """An object that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release all resources."""


ClientT = TypeVar("ClientT", bound=Closable)


class Connecting(Coroutine[Any, Any, ClientT]):
    """A connection being made: ``await`` it, or enter it with ``async with``, once.

    It is a coroutine, so that ``asyncio.run`` and ``create_task`` accept it, too.
    """

    def __init__(self, kind: type[ClientT], coroutine: Coroutine[Any, Any, ClientT]) -> None:
        self._kind = kind
        self._coroutine = coroutine
        self._client: ClientT | None = None

    if not TYPE_CHECKING:  # type checkers find the mistake themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that tells to await first, if the client has the attribute."""
            if not name.startswith("_") and hasattr(self._kind, name):
                raise _not_awaited(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __await__(self) -> Generator[Any, Any, ClientT]:
        """Return the client."""
        self._check(CORO_CREATED)
        return self._coroutine.__await__()

    async def __aenter__(self) -> ClientT:
        """Return the client."""
        self._client = await self
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> NoReturn:
        """Refuse, and tell what to write instead."""
        self.close()
        raise MisuseError("enter an AsyncClient with `async with AsyncClient.connect(...) as client`")

    def __exit__(self, *_: object) -> None:
        """Do nothing: it cannot be entered."""

    def send(self, *value: Any, **named: Any) -> Any:  # noqa: ANN401  as the generator protocol has it
        """See ``Coroutine``; more arguments are meant for the client's ``send``."""
        if len(value) != 1 or named:
            raise _not_awaited("send")
        self._check(CORO_CREATED, CORO_SUSPENDED)
        return self._coroutine.send(*value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401  as the generator protocol has it
        """See ``Coroutine``."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Abandon the connection."""
        self._coroutine.close()

    def _check(self, *states: str) -> None:
        if getcoroutinestate(self._coroutine) not in states:
            raise MisuseError("this connection was already awaited: keep the client that the first await returned")


def _not_awaited(name: str) -> MisuseError:
    return MisuseError(
        f"{name!r} is used on a connection that was not awaited yet: await it first, as in "
        "client = await AsyncClient.connect(...)"
    )
