"""A daemon that notes which functions of the product it enters, while a byte of a shared file is 1.

``python -m tests.census.traced_daemon FOLDER ARGUMENT …``: FOLDER/on is looked at, FOLDER/entered.json is written at
the end; the arguments are the daemon's.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

from kvferry.daemon.process.signals import hold_back


class Recorder:
    """A profile function. Sets and bytes are all that it touches: it runs at every call."""

    def __init__(self, switch: Path) -> None:
        with switch.open("r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)
        self.entered: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a function that is entered."""
        del argument
        if event == "call" and self._switch[0]:
            self.entered.add(frame.f_code)

    def functions(self) -> list[tuple[str, str]]:
        """Return (module's file, function), without what Python makes: comprehensions, lambdas, frozen modules."""
        files = ((one.co_filename, one.co_qualname) for one in self.entered)
        found = {(os.path.realpath(file), name) for file, name in files if not file.startswith("<")}
        return sorted(one for one in found if not one[1].endswith(">"))


def main(folder: Path, arguments: list[str]) -> int:
    """Run a daemon under the recorder."""
    recorder = Recorder(folder / "on")
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    from kvferry.daemon.daemon import main as run_daemon  # noqa: PLC0415  threads must be born under the recorder

    try:
        return run_daemon(arguments)
    finally:
        sys.setprofile(None)
        (folder / "entered.json").write_text(json.dumps(recorder.functions()))


if __name__ == "__main__":
    hold_back()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
