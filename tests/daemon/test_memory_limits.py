"""A daemon in a control group that allows it less memory than the machine has: a real one, which the test makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.protocol.errors import OutOfMemoryError
from tests.daemons import running_daemon, soon

MIB: Final = 1 << 20
LIMIT_BYTES: Final = 320 * MIB
CONFIG: Final = '[pools]\nmax_bytes = "8GiB"\n[tiers]\nhost_bytes = "4MiB"\n'


class ControlGroup(NamedTuple):
    """A group with a limit on memory; ``prefix`` runs a command in it."""

    folder: Path
    limit_file: str

    @property
    def prefix(self) -> list[str]:
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]


@pytest.fixture
def group(require: Callable[[object, str], None]) -> Iterator[ControlGroup]:
    """Return a new group below the root of the hierarchy that has the memory controller."""
    first = Path("/sys/fs/cgroup/memory").is_dir()
    root, file = ("memory", "memory.limit_in_bytes") if first else ("", "memory.max")
    folder = Path("/sys/fs/cgroup", root, f"kvferry-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as cause:
        require(False, f"a control group: {cause}")  # noqa: FBT003
    one = ControlGroup(folder, f"{folder}/{file}")
    try:
        if not (folder / file).exists():
            require(False, "the memory controller is not there for new control groups")  # noqa: FBT003
        (folder / file).write_text(str(LIMIT_BYTES))
        yield one
    finally:
        assert soon(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def spec(size_bytes: int) -> MhaSpec:
    """Return a pool of about so many bytes: one page has 1 MiB."""
    pages = size_bytes // MIB - 1
    return MhaSpec(layers=1, tokens=pages * 512, page_size=512, kv_heads=8, head_dim=64, dtype="float16")


def test_a_pool_that_the_control_group_does_not_allow_is_refused_and_the_daemon_lives(
    group: ControlGroup, tmp_path: Path
) -> None:
    with (
        running_daemon(tmp_path, CONFIG, prefix=group.prefix) as daemon,
        Client.connect(daemon.runtime_dir) as client,
    ):
        with pytest.raises(OutOfMemoryError) as refused:
            client.create_pool("large", spec(LIMIT_BYTES - 16 * MIB))  # fits the machine, and pools.max_bytes
        assert group.limit_file in refused.value.detail
        client.create_pool("small", spec(64 * MIB))
        with pytest.raises(OutOfMemoryError):
            client.create_pool("another", spec(LIMIT_BYTES - 96 * MIB))  # it would have fitted before
        client.delete_pool("small")
        assert client.ping() > 0
