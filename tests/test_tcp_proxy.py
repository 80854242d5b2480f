"""The proxy that other tests break connections with: it does what it says, and no more."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.tcp_proxy import PATIENCE_S, Proxy, Swapped, doubled


class _Ends:
    """Both ends of a connection through a proxy."""

    def __init__(self, proxy: Proxy, listener: socket.socket, near: socket.socket) -> None:
        self.proxy = proxy
        self.near = near
        self.address = near.getpeername()
        self.far, _ = listener.accept()
        for one in (self.near, self.far):
            one.settimeout(PATIENCE_S)
        near.sendall(b"!")  # the far end may have accepted before the proxy has taken note of it
        assert self.far.recv(1) == b"!"

    def is_silent(self) -> bool:
        """Return whether nothing has come at the far end by now: no byte and no end."""
        self.far.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            self.far.recv(1)
            return False
        self.far.settimeout(PATIENCE_S)
        return True

    def arrives(self, data: bytes) -> bytes:
        """Return as many bytes as these from the far end."""
        return received(self.far, len(data))


def received(one: socket.socket, count: int) -> bytes:
    """Return so many bytes, or those before the end."""
    came = b""
    while len(came) < count and (more := one.recv(count - len(came))):
        came += more
    return came


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Ends]:
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy())
        if request.param == "tcp":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            near = socket.create_connection(("127.0.0.1", proxy.route_tcp(listener.getsockname())))
        else:
            path = tmp_path / "socket"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen()
            proxy.route_unix(path)
            near = stack.enter_context(socket.socket(socket.AF_UNIX))
            near.connect(str(path))
        made = _Ends(proxy, listener, stack.enter_context(near))
        stack.enter_context(made.far)
        yield made


def test_what_is_said_goes_through_both_ways(ends: _Ends) -> None:
    ends.near.sendall(b"there")
    assert ends.arrives(b"there") == b"there"
    ends.far.sendall(b"back")
    assert received(ends.near, 4) == b"back"
    assert ends.proxy.connections == 1
    ends.near.close()
    assert ends.far.recv(1) == b""


def test_a_black_hole_holds_up_everything_and_the_end(ends: _Ends) -> None:
    ends.proxy.black_hole()
    ends.near.sendall(b"late")
    ends.near.close()
    assert ends.proxy.connections == 1
    assert ends.is_silent()
    ends.proxy.heal()
    assert ends.arrives(b"late") == b"late"
    assert ends.far.recv(1) == b""


def test_a_cut_ends_connections_and_new_ones_until_it_is_healed(ends: _Ends) -> None:
    ends.proxy.cut()
    for one in (ends.near, ends.far):
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
    again = socket.socket(ends.near.family)
    with contextlib.closing(again), contextlib.suppress(ConnectionResetError):
        again.settimeout(PATIENCE_S)
        again.connect(ends.address)
        assert again.recv(1) == b""


@pytest.mark.parametrize("passes", [False, True])
def test_it_holds_at_a_mark_that_comes_in_two_pieces(ends: _Ends, *, passes: bool) -> None:
    reached = ends.proxy.hold_at(b"MARK", passes=passes)
    ends.near.sendall(b"before MA")
    assert ends.arrives(b"before MA") == b"before MA"
    ends.near.sendall(b"RK")
    assert reached(PATIENCE_S)
    if passes:
        assert ends.arrives(b"RK") == b"RK"
    ends.near.sendall(b" after")
    assert ends.is_silent()
    ends.proxy.heal()
    rest = b" after" if passes else b"RK after"
    assert ends.arrives(rest) == rest


def test_pieces_are_doubled_swapped_and_lost(ends: _Ends) -> None:
    ends.proxy.alter(doubled)
    ends.near.sendall(b"two")
    assert ends.arrives(b"twotwo") == b"twotwo"
    swapped = Swapped()
    first_came = ends.proxy.hold_at(b"1", passes=True)
    ends.proxy.alter(swapped)
    ends.near.sendall(b"1")
    assert first_came(PATIENCE_S)
    ends.proxy.heal()
    ends.near.sendall(b"2")
    assert ends.arrives(b"21") == b"21"
    ends.proxy.alter(lambda _piece: [])
    lost = ends.proxy.hold_at(b"lost", passes=True)
    ends.near.sendall(b"lost")
    assert lost(PATIENCE_S)
    ends.proxy.alter(None)
    ends.proxy.heal()
    ends.proxy.delay(0.01)
    ends.near.sendall(b"heard")
    assert ends.arrives(b"heard") == b"heard"
