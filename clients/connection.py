"""A client's connection: finding the daemon, its control socket, deadlines, what is awaited, and giving it all back."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from inspect import CORO_CREATED, CORO_SUSPENDED, getcoroutinestate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar

import zmq

from kvferry.clients import arguments, daemon_socket
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.errors import MisuseError


class Closable(Protocol):
    """An object that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release all resources."""


P = ParamSpec("P")
ClientT = TypeVar("ClientT", bound=Closable)


class Connection(NamedTuple):
    """What a client is made of once the daemon has let it in."""

    runtime_dir: str
    channel: SessionChannel | None
    devices: Mapping[str, str]


def find_runtime_dir(runtime_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory of the daemon that is there, or at the default place.

    Raises:
        DaemonLostError: no daemon has its sockets there.
        AccessDeniedError: this user may not use them.
        InvalidFieldError: it is no path, or several daemons are there.
    """
    if not isinstance(runtime_dir, str | os.PathLike | None):
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir")
    try:
        return daemon_socket.find_runtime_dir(runtime_dir)
    except (TypeError, ValueError):  # bytes of its own making, a NUL, half a surrogate pair
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir") from None


def given_back_with(
    client: object, channel: SessionChannel | None, sockets: Sequence[Closable], context: zmq.Context[zmq.Socket[bytes]]
) -> weakref.finalize[[int, SessionChannel | None, Sequence[Closable], zmq.Context[zmq.Socket[bytes]]], object]:
    """Return what gives a client's connection back: when it is called, or the client is garbage that nobody closed.

    Left to the collector, a context may be ended before its socket is closed, and that waits for ever.
    """
    finalizer = weakref.finalize(client, _give_back, os.getpid(), channel, sockets, context)
    finalizer.atexit = False  # the process's end does it
    return finalizer


def _give_back(
    pid: int, channel: SessionChannel | None, sockets: Sequence[Closable], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    if channel is not None:
        if os.getpid() == pid:
            channel.end()
        channel.close()
    for socket in sockets:
        socket.close()  # zmq's, and its context's end, do nothing in a forked child
    context.term()


class Connecting(Coroutine[Any, Any, ClientT]):
    """What ``AsyncClient.connect`` returns: ``await`` it, or enter it with ``async with``, once; it is a client then.

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


def connecting(
    connect: Callable[Concatenate[type[ClientT], P], Coroutine[Any, Any, ClientT]],
) -> Callable[Concatenate[type[ClientT], P], Connecting[ClientT]]:
    """Let a class method that connects return a ``Connecting``."""

    @functools.wraps(connect)
    def begin(kind: type[ClientT], /, *args: P.args, **named: P.kwargs) -> Connecting[ClientT]:
        return Connecting(kind, connect(kind, *args, **named))

    return begin
