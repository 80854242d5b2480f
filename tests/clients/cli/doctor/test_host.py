"""A host's files, users and groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.cli.doctor.host import Host, User, values
from kvferry.protocol.errors import InvalidFieldError
from tests.clients.cli.doctor.fake_host import make_host


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/etc/file": " text \n"})
    assert (host.text("/etc/file"), host.text("/etc/none"), host.text("/etc")) == ("text", "", "")
    assert (host.names("/etc"), host.names("/none")) == (["file"], [])


def test_this_host() -> None:
    host = Host.this_one()
    assert host.user.uid == os.geteuid()
    assert os.getegid() in host.user.groups
    assert host.path("/proc/self") == Path("/proc/self")
    assert host.group_id("root") == 0


def test_a_user_by_name() -> None:
    assert Host.this_one("root").user.uid == 0
    with pytest.raises(InvalidFieldError, match="no-such-user"):
        User.named("no-such-user")


def test_groups(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/etc/group": "broken\nroot:x:0:\nnpu:x:1000:a,b\nodd:x:y:\n"})
    assert (host.group_id("npu"), host.group_id("odd"), host.group_id("none")) == (1000, None, None)


@given(mode=st.integers(0, 0o777), owner=st.booleans(), member=st.booleans())
def test_modes_are_read_as_the_kernel_does(mode: int, *, owner: bool, member: bool) -> None:
    """The first class that fits decides: an owner without rights has none, whatever the group may."""
    user = User("worker", 7, frozenset({8} if member else {9}))
    file = os.stat_result((mode, 0, 0, 1, 7 if owner else 70, 8, 0, 0, 0, 0))
    digit = oct(mode | 0o1000)[-3:][0 if owner else 1 if member else 2]
    assert user.may_use(file) is (digit in "67")
    assert User("root", 0, frozenset()).may_use(file)


def test_values() -> None:
    assert values("a = 1\n# b\nVersion=25.5.0\na=2\nempty=\nx=y=z") == {
        "a": "1",
        "Version": "25.5.0",
        "empty": "",
        "x": "y=z",
    }
