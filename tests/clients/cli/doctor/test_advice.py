"""No advice harms a host: shared folders stay as they are, and what is named (commands, options, files) is there."""

# ruff: noqa: S108  temporary folders are named, of hosts that are folders

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.doctor.folders import may_hold
from kvferry.clients.cli.doctor.host import User
from kvferry.clients.cli.doctor.tiers import check_disk_tier
from kvferry.pools.tiers.block_file import LOCK_FILE
from tests.clients.cli.doctor.fake_host import WORKER, make_host, needs_of
from tests.kit.kvferry_command import run_kvferry

ROOT: Final = Path(__file__).parents[4]
MODULES_OF_THE_DOCTOR: Final = sorted((ROOT / "clients/cli/doctor").glob("*.py"))
OWN: Final = "/var/lib/kvferry"
ACCOUNTS: Final = "worker:x:1:1::/srv/worker:/bin/sh\nother:x:2:2::/srv/homes/other:/bin/sh\n"

MAY_RUN: Final = (
    "apt-get install",
    "chmod 0700 {}",  # of folders.py alone, see below
    "chown -R {}",
    "chown {}",
    "docker run --ipc=host",
    "docker run --shm-size",
    "docker run --ulimit",
    "groupadd {}",
    "install -d -m 0700 -o {}",
    "mount -o remount,size={}m /dev/shm",
    "mount -t tmpfs tmpfs /dev/shm",  # where there is no /dev/shm
    "mount it into the container",
    "mount /proc",
    "mount /sys",
    "mount /usr/local/bin/npu-smi",  # into a container
    "mount {} from the host",
    "pip install",
    "pip uninstall",
    "sysctl vm.nr_hugepages={}",
    "systemctl daemon-reload",
    "systemctl restart kvferry@NAME, once",  # and what goes with it
    "systemctl start kvferry@NAME",
    "usermod -aG {}",
)
"""Commands of the texts that change something, each looked at: what it does, and to whom."""

COMMANDS: Final = re.compile(
    r"(?:^|[\s(`'\"])((?:apt-get|chmod|chown|dd|docker|groupadd|install -|kill|mkfs|mount|mv|pip|pkill|rm|rmmod|"
    r"setenforce|sysctl|systemctl|umount|userdel|usermod|yum) ?[-/@.\w{][^;\"]*)"
)


def texts() -> Iterator[str]:
    """Yield every text in the doctor's code that is no docstring, with {} for what is put into it."""
    for module in MODULES_OF_THE_DOCTOR:
        tree = ast.parse(module.read_text())
        plain = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain | inside:
                yield node.value


def test_every_command_that_changes_something_was_looked_at() -> None:
    named = {found.strip() for text in texts() for found in COMMANDS.findall(text)}
    assert len(named) >= len(MAY_RUN)
    assert [one for one in sorted(named) if not one.startswith(MAY_RUN)] == []
    assert [known for known in MAY_RUN if not any(one.startswith(known) for one in named)] == []


def test_our_own_options_and_files_in_the_texts_are_there() -> None:
    options = run_kvferry("doctor", "--help").stdout
    for text in texts():
        for option in re.findall(r"\bkvferry doctor (--[a-z-]+)", text):
            assert option in options
        for file in re.findall(r"\b(systemd/[\w.@]+\.\w+|docs/\w+\.md)", text):
            assert (ROOT / file).is_file()
        for file, title in re.findall(r'(docs/\w+\.md),? "([^"]+)"', text):
            assert f"\n## {title}" in (ROOT / file).read_text()


def me(name: str = "worker") -> User:
    """Return who runs this, under a name that stands in the advice."""
    return User(name, os.geteuid(), frozenset({os.getegid()}))


def advice(root: Path, path: str, mode: int, *, holds: tuple[str, ...] = (), parent_mode: int = 0o755) -> list[str]:
    """Return the commands that are advised for a disk tier in a folder, and the whole text at the end."""
    host = make_host(root, {"/etc/passwd": ACCOUNTS}, user=me())
    folder = host.path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name in holds:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir(exist_ok=True) if name.endswith("/") else (folder / name).touch()
    for parent in folder.parents:
        if parent.is_relative_to(root):
            parent.chmod(parent_mode)
    folder.chmod(mode)
    finding = check_disk_tier(host, needs_of(f'[tiers.disk]\npath = "{path}"'), 0)
    assert finding is not None
    assert finding.state != "ok"
    return [*re.findall(r"(?:chown|chmod|install) [^;,]*", finding.fix), finding.fix]


@pytest.mark.parametrize(
    ("path", "mode", "holds", "instead"),
    [
        ("/tmp", 0o1777, (), "/tmp/kvferry"),
        ("/var/tmp", 0o1777, (), "/var/tmp/kvferry"),
        ("/tmp", 0o1777, (LOCK_FILE,), "/tmp/kvferry"),
        ("/", 0o755, (), OWN),
        ("/var", 0o755, (), "/var/kvferry"),
        ("/var/lib", 0o755, (), "/var/lib/kvferry"),
        ("/etc", 0o755, (), OWN),
        ("/usr/local", 0o755, (), OWN),
        ("/usr/local/blocks", 0o755, (), OWN),
        ("/run/user/7", 0o755, (), OWN),
        ("/dev/shm", 0o1777, (), OWN),
        ("/srv", 0o755, (), "/srv/kvferry"),
        ("/home/worker", 0o755, (), "/home/worker/kvferry"),
        ("/mnt/nvme", 0o755, ("lost+found",), "/mnt/nvme/kvferry"),
        ("/srv/homes", 0o755, (), "/srv/homes/kvferry"),
        ("/srv/homes/other", 0o755, (), "/srv/homes/other/kvferry"),
        ("/srv/blocks", 0o755, ("somebody's file",), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o1777, (LOCK_FILE,), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "somebody's file"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "somebody's folder/"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "0/", "2024/holidays.jpg"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, (LOCK_FILE, "0"), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o755, ("0/",), "/srv/blocks/kvferry"),
        ("/srv/blocks", 0o777, ("somebody's file",), OWN),
        ("/srv/blocks", 0o775, ("somebody's file",), OWN),
    ],
)
def test_a_folder_of_others_stays_as_it_is(
    tmp_path: Path, path: str, mode: int, holds: tuple[str, ...], instead: str
) -> None:
    *commands, text = advice(tmp_path, path, mode, holds=holds)
    assert commands == [f"install -d -m 0700 -o worker {instead}"]
    assert f'tiers.disk.path = "{instead}"' in text
    assert "leave it as it is" in text


@pytest.mark.parametrize(
    ("path", "mode", "holds"),
    [
        ("/srv/blocks", 0o755, ()),
        ("/srv/blocks", 0o777, ()),
        ("/srv/blocks", 0o755, (LOCK_FILE, "0/")),
        ("/srv/blocks", 0o755, (LOCK_FILE, f"1001/{'0' * 32}-{'1' * 32}/", f"1001/{'0' * 32}/")),
        ("/srv/worker", 0o755, ()),
        ("/mnt/nvme/blocks", 0o770, ()),
        ("/var/lib/kvferry", 0o750, (LOCK_FILE,)),
    ],
)
def test_a_folder_of_its_own_is_closed(tmp_path: Path, path: str, mode: int, holds: tuple[str, ...]) -> None:
    *commands, _ = advice(tmp_path, path, mode, holds=holds)
    assert commands == [f"chmod 0700 {path}"]


def test_a_mount_is_more_than_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("/srv/blocks"))
    *commands, _ = advice(tmp_path, "/srv/blocks", 0o755)
    assert commands == ["install -d -m 0700 -o worker /srv/blocks/kvferry"]


def test_a_link_is_as_shared_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv/blocks").symlink_to(tmp_path / "var")
    *commands, _ = advice(tmp_path, "/srv/blocks", 0o755)
    assert not any(one.startswith(("chown", "chmod")) for one in commands)


def test_names_with_spaces_stay_one_word(tmp_path: Path) -> None:
    command, _ = advice(tmp_path, "/srv/my blocks", 0o755)
    assert shlex.split(command) == ["chmod", "0700", "/srv/my blocks"]
    command, _ = advice(tmp_path, "/srv/your blocks", 0o755, holds=("x",))
    assert shlex.split(command)[-1] == "/srv/your blocks/kvferry"


def test_a_block_folder_of_another_user_is_his(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root alone may give a folder away")
    theirs = make_host(tmp_path, user=WORKER).path("/srv/blocks/7")
    theirs.mkdir(parents=True)
    os.chown(theirs, WORKER.uid + 1, -1)
    *commands, _ = advice(tmp_path, "/srv/blocks", 0o755, holds=(LOCK_FILE,))
    assert commands == ["install -d -m 0700 -o worker /srv/blocks/kvferry"]


def test_a_device_or_a_file_is_not_to_be_removed(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/dev/nvme0n1": ""}, user=me())
    finding = check_disk_tier(host, needs_of('[tiers.disk]\npath = "/dev/nvme0n1"'), 0)
    assert finding is not None
    assert (finding.state, "rm " in finding.fix, OWN in finding.fix) == ("missing", False, True)


def test_where_a_folder_of_ones_own_is_safe(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/srv/a/x": "", "/tmp/x": "", "/usr/lib/x": ""})
    host.path("/tmp").chmod(0o1777)
    assert [may_hold(host, one) for one in ("/", "/srv/a", "/tmp", "/usr/lib")] == [False, True, True, False]
    host.path("/srv").chmod(0o775)
    assert not may_hold(host, "/srv/a")
