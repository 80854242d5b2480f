"""A folder that is to be one's own, against what another user puts into it or in its place. As root, with that user."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.pools.tiers.own_folder import FILE_MODE, OwnFolder
from kvferry.protocol.errors import ConfigError

NOBODY = 65534
FIELD = "runtime_dir"
LOCK = "the.lock"
SECRET = b"not to be touched"


@pytest.fixture(autouse=True)
def as_root(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be two users")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder that another user can reach, and write: sticky, as /tmp."""
    for one in (tmp_path, *tmp_path.parents):
        if one.stat().st_mode & 0o777 == 0o700:
            one.chmod(0o711)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


@pytest.fixture
def own(place: Path) -> Path:
    path = place / "own"
    path.mkdir(0o700)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    path.chmod(0o644)
    yield path
    assert path.read_bytes() == SECRET
    assert (path.stat().st_mode, path.stat().st_uid) == (0o100644, 0)


def by_nobody(*command: str | Path) -> None:
    subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], check=True, timeout=30)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(path))


PLANTED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "link": (lambda lock, victim: by_nobody("ln", "-s", victim, lock), "no regular file"),
    "dangling": (lambda lock, victim: by_nobody("ln", "-s", victim.with_name("new"), lock), "no regular file"),
    "hard link": (lambda lock, victim: os.link(victim, lock), "linked from 2 places"),
    "foreign": (lambda lock, _: by_nobody("touch", lock), "of user 65534"),
    "fifo": (lambda lock, _: by_nobody("mkfifo", lock), "no regular file"),
    "own fifo": (lambda lock, _: os.mkfifo(lock), "no regular file"),
    "socket": (lambda lock, _: bind(lock), "no regular file"),
    "folder": (lambda lock, _: by_nobody("mkdir", lock), "no regular file"),
    "device": (lambda lock, _: os.mknod(lock, stat.S_IFCHR | 0o666, os.makedev(1, 7)), "no regular file"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_lock_is_refused_and_what_it_leads_to_stays(own: Path, victim: Path, name: str) -> None:
    plant, said = PLANTED[name]
    own.chmod(0o777)  # as it was when the other user was faster
    plant(own / LOCK, victim)
    own.chmod(0o700)
    folder = OwnFolder(own, FIELD)
    with pytest.raises(ConfigError, match=said) as refused:
        folder.lock(LOCK, "runs in")
    folder.close()
    assert (refused.value.field, refused.value.retryable) == (FIELD, False)
    assert not victim.with_name("new").exists()


def test_the_holder_of_a_lock_keeps_its_word_in_it(own: Path) -> None:
    own.chmod(0o755)
    first, second = OwnFolder(own, FIELD), OwnFolder(own, FIELD)
    first.lock(LOCK, "runs in")
    with pytest.raises(ConfigError, match=f"pid {os.getpid()} .*runs in") as refused:
        second.lock(LOCK, "runs in")
    assert refused.value.retryable
    assert (own / LOCK).read_text().startswith(f"pid {os.getpid()} "), "nothing is truncated without the lock"
    assert stat.S_IMODE((own / LOCK).stat().st_mode) == FILE_MODE, "who could read it could lock it"
    assert stat.S_IMODE(own.stat().st_mode) == 0o711, "and so could who may list the folder"
    first.close()
    second.lock(LOCK, "runs in")
    second.close()


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [(0o775, 0, "mode 0775"), (0o757, 0, "mode 0757"), (0o755, NOBODY, "belongs to user 65534"), (0o1777, 0, "")],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_else_may_put_another_in_its_place(place: Path, mode: int, owner: int, said: str, depth: int) -> None:
    parent = place / "parent"
    folder = parent.joinpath(*["sub"] * depth)
    folder.mkdir(parents=True)
    os.chown(parent, owner, owner)
    parent.chmod(mode)
    if not said:
        OwnFolder(folder, FIELD).close()
        return
    with pytest.raises(ConfigError, match=said) as refused:
        OwnFolder(folder, FIELD)
    assert str(parent) in refused.value.remedy


def test_a_link_is_followed_only_where_it_may_be_one_and_is_ones_own(place: Path, own: Path) -> None:
    ours, theirs, loop = place / "ours", place / "theirs", place / "loop"
    ours.symlink_to(own)
    by_nobody("ln", "-s", own, theirs)
    loop.symlink_to(loop)
    for link in (ours, theirs):
        with pytest.raises(ConfigError, match="not a directory"):
            OwnFolder(link, FIELD)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        OwnFolder(theirs, FIELD, may_be_link=True)
    with pytest.raises(OSError, match="symbolic links"):
        OwnFolder(loop, FIELD, may_be_link=True)
    folder = OwnFolder(ours, FIELD, may_be_link=True)
    folder.lock(LOCK, "runs in")
    folder.close()
    assert (own / LOCK).exists()


def test_a_link_on_the_way_leads_nowhere_that_others_write(place: Path, own: Path) -> None:
    loose = place / "loose"
    (loose / "inner").mkdir(parents=True)
    loose.chmod(0o777)
    (own / "way").symlink_to(loose)
    with pytest.raises(ConfigError, match="mode 0777"):
        OwnFolder(own / "way" / "inner", FIELD)


def test_what_takes_its_place_later_gets_nothing(place: Path, own: Path) -> None:
    folder = OwnFolder(own, FIELD)
    own.rename(place / "moved")
    own.mkdir()
    folder.lock(LOCK, "runs in")
    folder.replace("state", b"1")
    assert folder.read("state") == b"1"
    folder.close()
    assert [*own.iterdir()] == []
    assert {one.name for one in (place / "moved").iterdir()} == {LOCK, "state"}


def test_a_file_is_read_and_replaced_without_following_links(own: Path, victim: Path) -> None:
    (own / "state").symlink_to(victim)
    (own / "state.new").symlink_to(victim)
    folder = OwnFolder(own, FIELD)
    with pytest.raises(ConfigError, match="no regular file"):
        folder.read("state")
    os.mkfifo(own / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        folder.read("pipe")
    folder.replace("state", b"2")
    assert folder.read("state") == b"2"
    folder.close()
