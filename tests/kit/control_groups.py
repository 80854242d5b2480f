"""Control groups that bound the memory of a process: real ones, which only root can make."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """A group with a limit on memory; ``prefix`` runs a command in it."""

    folder: Path
    limit_file: Path

    @classmethod
    def make(cls, name: str, size_bytes: int) -> ControlGroup:
        """Make a group below the root of the hierarchy that has the memory controller, or raise OSError."""
        first = (ROOT / "memory").is_dir()
        folder = ROOT / ("memory" if first else "") / name
        folder.mkdir()
        group = cls(folder, folder / ("memory.limit_in_bytes" if first else "memory.max"))
        try:
            group.limit(size_bytes)
        except OSError:
            group.remove()
            raise
        return group

    @property
    def prefix(self) -> list[str]:
        """Return the command before another that puts it into the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    @property
    def is_empty(self) -> bool:
        return not (self.folder / "cgroup.procs").read_text()

    def limit(self, size_bytes: int) -> None:
        with self.limit_file.open("r+") as file:  # the kernel makes the file; none is made here
            file.write(str(size_bytes))

    def remove(self) -> None:
        self.folder.rmdir()
