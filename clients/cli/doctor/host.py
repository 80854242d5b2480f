"""What the checks have in common: the host as they see it, commands, versions, and the finding that is their result.

A host is its files below a root, the environment, a user, and the daemon's Python. On a real host the root is ``/``;
any folder with the same structure works as well.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final, Literal, NamedTuple

import msgspec

from kvferry.protocol.errors import InvalidFieldError

State = Literal["ok", "warning", "missing", "unknown"]
"""``missing``: needed, but absent or unusable; ``warning``: works, but not well; ``unknown``: could not be checked."""


class Finding(msgspec.Struct, frozen=True):
    """What a check found; the report has a line for each, under the check's name.

    Attributes:
        state: the verdict.
        found: what was found, as text.
        fix: what to do about it; empty if nothing.
    """

    state: State
    found: str
    fix: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if something is missing, else 0: a daemon works despite warnings and unknowns."""
    return int(any(finding.state == "missing" for finding in findings))


def summary(findings: Mapping[str, Finding]) -> str:
    """Return one line that names what is missing, what has warnings, and what is unknown."""
    groups = [
        (state, [name for name, one in findings.items() if one.state == state])
        for state in ("missing", "warning", "unknown")
    ]
    said = [f"{state}: {', '.join(names)}" for state, names in groups if names]
    return "; ".join(said) or "all is well"


class User(msgspec.Struct, frozen=True):
    """The user that will use the devices: name, user id, and the ids of all groups."""

    name: str
    uid: int
    groups: frozenset[int]

    @classmethod
    def of_this_process(cls) -> User:
        """Return the user of this process."""
        uid = os.geteuid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        return cls(name, uid, frozenset((os.getegid(), *os.getgroups())))

    @classmethod
    def named(cls, name: str) -> User:
        """Return a user of this host.

        Raises:
            InvalidFieldError: there is no user of that name.
        """
        try:
            entry = pwd.getpwnam(name)
        except KeyError as cause:
            raise InvalidFieldError(f"this host has no user {name!r}", field="user") from cause
        return cls(name, entry.pw_uid, frozenset(os.getgrouplist(name, entry.pw_gid)))

    def may_use(self, file: os.stat_result) -> bool:
        """Return whether the mode lets this user read and write; root always may, as in the kernel."""
        if self.uid == 0:
            return True
        if file.st_uid == self.uid:
            wanted = stat.S_IRUSR | stat.S_IWUSR
        elif file.st_gid in self.groups:
            wanted = stat.S_IRGRP | stat.S_IWGRP
        else:
            wanted = stat.S_IROTH | stat.S_IWOTH
        return file.st_mode & wanted == wanted


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The host to check.

    Attributes:
        root: the folder that stands for ``/``.
        environ: the environment for child processes.
        user: the user that will use the devices.
        python: the command of the interpreter whose packages are checked.
    """

    root: Path
    environ: dict[str, str]
    user: User
    python: tuple[str, ...]

    @classmethod
    def this_one(cls, user_name: str | None = None) -> Host:
        """Return the host that this runs on, for a user, by default the one of this process."""
        user = User.named(user_name) if user_name else User.of_this_process()
        return cls(root=Path("/"), environ=dict(os.environ), user=user, python=(sys.executable,))

    def path(self, name: str | PurePath) -> Path:
        """Return an absolute path of the host below ``root``."""
        return self.root / str(name).lstrip("/")

    def text(self, name: str | PurePath) -> str:
        """Return a file's text, stripped; empty if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str | PurePath) -> list[str]:
        """Return the names in a folder, sorted; empty if it cannot be read."""
        try:
            return sorted(os.listdir(self.path(folder)))  # noqa: PTH208  names are wanted, not paths
        except OSError:
            return []

    def group_id(self, name: str) -> int | None:
        """Return a group's id; None if the host has no such group."""
        for line in self.text("/etc/group").splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) > 2 and fields[2].isdigit():  # noqa: PLR2004  name:password:id:members
                return int(fields[2])
        if self.root != Path("/"):
            return None
        try:
            return grp.getgrnam(name).gr_gid  # groups may come from a directory service
        except KeyError:
            return None


def values(text: str) -> dict[str, str]:
    """Return the ``NAME=VALUE`` lines of a text; if a name is given twice, the first one counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, is_given, value = line.partition("=")
        if is_given:
            found.setdefault(name.strip(), value.strip())
    return found


# -- commands that may hang, crash or leave children behind, each with a time limit that always holds:
# A hanging driver leaves processes that not even SIGKILL ends; ``subprocess.run`` would wait for them forever.


OUTPUT_BYTES: Final = 1 << 20
_END_S: Final = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """How a command ended. ``status`` is None if it exceeded the time limit, and negative for a signal."""

    status: int | None
    output: str
    errors: str

    @property
    def last_error(self) -> str:
        """Return the last line on standard error that is not empty."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_child(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Outcome:
    """Run a command without input, and return how it ended; one that cannot be started has status 127."""
    # Files, not pipes: a process that inherits a pipe can keep it open forever.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(  # noqa: S603  fixed commands, no shell
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(127, "", f"{command[0]}: {error.strerror}")
        status = _wait(process, timeout_s)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(OUTPUT_BYTES).decode(errors="replace"))
        return Outcome(status, *texts)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return None


# -- versions as Huawei, torch and kernels write them: 25.5.0, 24.1.rc3, 8.2.RC1, 2.13.0+cpu, 5.10.0-136.oe2203.


_PATTERN = re.compile(r"[vV]?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(alpha|beta|rc)\.?(\d*))?", re.IGNORECASE)
_FINAL = "z"


class Version(NamedTuple):
    """A comparable version: a release candidate comes before its release."""

    major: int
    minor: int
    patch: int
    stage: str
    number: int


def parse_version(text: str) -> Version | None:
    """Return the version at the start of a text; None if there is none."""
    match = _PATTERN.match(text.strip())
    if match is None:
        return None
    major, minor, patch, stage, number = match.groups()
    return Version(int(major), int(minor), int(patch or 0), (stage or _FINAL).lower(), int(number or 0))


def at_least(text: str, wanted: str) -> bool | None:
    """Return whether a version is at least ``wanted``; None if one of them is not a version."""
    found, least = parse_version(text), parse_version(wanted)
    return None if found is None or least is None else found >= least


def same_release(one: str, other: str) -> bool:
    """Return whether two versions agree in their first three numbers: 2.13.0 and 2.13.0+cpu and 2.13.0.post2 do."""
    first, second = parse_version(one), parse_version(other)
    return first is not None and second is not None and first[:3] == second[:3]
