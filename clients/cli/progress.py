"""What a command waits for: on standard error, if that is a terminal, each second; wiped in the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import threading

INTERVAL_S: Final = 1.0
WIPE: Final = "\r\x1b[K"


class Progress:
    """Shows a wait. As a context manager it looks at the time in a thread of its own; else somebody calls ``look``."""

    def __init__(self, command: str, doing: str) -> None:
        """Begin a wait of ``kvferry COMMAND``."""
        self._command = command
        self.doing = doing
        self._began_s = self._shown_s = time.monotonic()
        self._shown = False
        self._thread: threading.Thread | None = None
        self._over: threading.Event | None = None

    def __repr__(self) -> str:
        """Show what it waits for."""
        return f"<Progress {self._command}: {self.doing}>"

    def look(self) -> None:
        """Show the wait, if it is time."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= INTERVAL_S and sys.stderr.isatty():
            self._shown_s, self._shown = now_s, True
            said = f"kvferry {self._command}: {self.doing}, {now_s - self._began_s:.0f} s"
            print(f"{WIPE}{said}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Wipe what is shown."""
        if self._shown:
            print(WIPE, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        """Look at the time from now on."""
        import threading  # noqa: PLC0415  the quick commands do not need it

        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe what is shown."""
        assert self._over is not None
        assert self._thread is not None
        self._over.set()
        self._thread.join()
        self.end()

    def _watch(self) -> None:
        assert self._over is not None
        while not self._over.wait(INTERVAL_S / 4):
            self.look()
