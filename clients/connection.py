"""A client's connection: finding the daemon, its control socket, deadlines, what is awaited, and giving it all back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping
from inspect import CORO_CREATED, CORO_SUSPENDED, getcoroutinestate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar

import zmq

from kvferry.clients import arguments, daemon_socket
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.clients.daemon_socket import open_control_socket
from kvferry.clients.session_channel import SessionChannel, SessionOpening
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, MisuseError
from kvferry.protocol.session_stream import SessionOpen

NOBLOCK, EVENTS, POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)  # enums are slow
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_watches = itertools.count()


class Closable(Protocol):
    """An object that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release all resources."""


P = ParamSpec("P")
ClientT = TypeVar("ClientT", bound=Closable)


class Reconnected(NamedTuple):
    """A client lost its daemon and has it again, or the next one, which has adopted the session.

    Attributes:
        old_boot_id: of the daemon before.
        boot_id: of the daemon now. The same one: nothing was lost, and the rest is empty.
        transfers: those that were under way: each has ended with STALE_BOOT, and has settled.
        operations: OFFLOAD, RESTORE, STORE and LOAD that were under way: each has ended with STALE_BOOT.
        tables: the names of graph tables that are no more: create them again, and capture graphs over them again.
        emptied: the names of graph tables that stay, but of which the daemon does not believe what they show: give each
            row anew by the next update, which writes all of them.
        rings: whether there were event rings: open them again.
        pools: the names of pools whose memory this client knows and the daemon does not: their calls are POOL_LOST.
        pages: pages that this session had and has no longer, by pool and page space: nobody may use them.
    """

    old_boot_id: str
    boot_id: str
    transfers: tuple[Transfer, ...] = ()
    operations: tuple[TierOperation, ...] = ()
    tables: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()
    rings: bool = False
    pools: tuple[str, ...] = ()
    pages: Mapping[tuple[str, str], PageIds] = {}


class Connection(NamedTuple):
    """What a client is made of once the daemon has let it in.

    Attributes:
        runtime_dir: where the daemon's sockets are.
        channel: the session, if there is one.
        devices: what this process calls the daemon's devices.
        opening: how the session was opened.
        reconnect: whether it is resumed where it is lost.
        on_reconnect: told of it.
    """

    runtime_dir: str
    channel: SessionChannel | None
    devices: Mapping[str, str]
    opening: SessionOpen
    reconnect: bool = False
    on_reconnect: Callable[[Reconnected], object] | None = None


class Link:
    """A client's sockets. Those that are lost are replaced.

    Attributes:
        runtime_dir: where the daemon's sockets are.
        context: of all ZeroMQ sockets.
        control: the control socket.
        channel: the session's socket, if there is a session.
        watch: tells that the control socket's connection was lost; None without a session.
        opening: the session's next socket, while it is being opened.
        resumption: how the session is resumed; None: it is not.
    """

    def __init__(self, runtime_dir: str, channel: SessionChannel | None, resumption: SessionOpen | None) -> None:
        self.resumption = resumption
        self.runtime_dir = runtime_dir
        self.channel = channel
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.opening: SessionOpening | None = None
        self.bells: tuple[socket.socket, ...] = ()
        self.closes: list[Closable] = []
        self._pid = os.getpid()
        self._open()

    def __repr__(self) -> str:
        """Show where it leads."""
        return f"<Link {self.runtime_dir}>"

    def _open(self) -> None:
        self.control = open_control_socket(self.context, self.runtime_dir)
        self.watch: zmq.Socket[bytes] | None = None
        if self.channel is not None:
            self.watch = self.control.get_monitor_socket(DISCONNECTED, f"inproc://watch-{next(_watches)}")
            self.is_cut()  # its descriptor tells of changes only

    def is_cut(self) -> bool:
        """Return whether the control socket's connection was lost since the last call."""
        cut = False
        while self.watch is not None and int(self.watch.getsockopt(EVENTS)) & POLLIN:
            self.watch.recv_multipart(NOBLOCK)
            cut = True
        return cut

    def renew(self, channel: SessionChannel | None = None) -> None:
        """Open the control socket anew; ``channel``: the session's, in place of the one that was lost."""
        self.drop()
        self.channel = channel or self.channel
        self._open()

    def drop(self) -> None:
        """Close the control socket."""
        if self.watch is not None and not self.watch.closed:
            if os.getpid() == self._pid:
                self.control.disable_monitor()
            self.watch.close()
        self.control.close()

    def give_up_opening(self) -> None:
        """Close the session's next socket, if there is one."""
        if self.opening is not None:
            self.opening.close()
            self.opening = None

    def close(self) -> None:
        """End the session, and close everything; in a forked child only its copies."""
        self.give_up_opening()
        if self.channel is not None:
            if os.getpid() == self._pid and not self.channel.end() and self.resumption is not None:
                self._end_lost(self.resumption)
            self.channel.close()
        for one in (*self.bells, *self.closes):
            one.close()
        self.drop()  # zmq's closing, and its context's end, do nothing in a forked child
        self.context.term()

    def _end_lost(self, resumption: SessionOpen) -> None:
        """End a session that has lost its socket, if the daemon is there: it would keep it for a while."""
        with contextlib.suppress(KvferryError):
            SessionOpening(self.runtime_dir, resumption).end()


def find_runtime_dir(runtime_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory of the daemon that is there, or at the default place.

    Raises:
        DaemonLostError: no daemon has its sockets there.
        AccessDeniedError: this user may not use them.
        InvalidFieldError: it is no path, or has several daemons.
    """
    if not isinstance(runtime_dir, str | os.PathLike | None):
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir")
    try:
        return daemon_socket.find_runtime_dir(runtime_dir)
    except (TypeError, ValueError):  # bytes of its own making, a NUL, half a surrogate pair
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir") from None


def given_back_with(client: object, link: Link) -> weakref.finalize[[], object]:
    """Return what gives a client's connection back: when it is called, or the client is garbage that nobody closed.

    Left to the collector, a context may be ended before its socket is closed, and that waits for ever.
    """
    finalizer = weakref.finalize(client, link.close)
    finalizer.atexit = False  # the process's end does it
    return finalizer


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
