"""A process on the simulator that does what a test says, line by line.

A test module starts one child and uses it for all its tests; what may end the process gets a child of its own. Every
answer has a time limit: a failed operator can block torch_npu for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import textwrap
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.cann_simulator.simulator import NPU_PYTHON, Simulator
from tests.kit.forked import Forked

REPOSITORY: Final = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S: Final = 60.0
START_TIMEOUT_S: Final = 240.0  # importing torch_npu, on a busy machine

LOOP: Final = Path(__file__).with_name("child_loop.py")

_PREPARE: Final = """
import ctypes
import torch, torch_npu
torch.npu.set_device({device})
torch.npu.current_stream()
acl = ctypes.CDLL("libascendcl.so")
"""


class ChildError(Exception):
    """The code of a request has raised: ``kind`` is the exception's class name."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind: Final = kind
        self.text: Final = text


class Child:
    """One process with ``torch``, ``torch_npu``, ``acl`` (libascendcl.so) and ``ctypes`` in its namespace."""

    def __init__(self, simulator: Simulator, *, device: int = 0, **environment: str) -> None:
        everything = {**os.environ, **simulator.environment(), **environment}
        everything.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        self.process: Final[subprocess.Popen[str] | Forked] = (
            Forked([os.fspath(LOOP)], everything, pipes=True)
            if not environment
            else subprocess.Popen(  # libraries read it when they are loaded
                [NPU_PYTHON, LOOP],
                env=everything,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader: Final = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.do(_PREPARE.format(device=device), START_TIMEOUT_S)

    def __enter__(self) -> Self:
        """Return the child; it ends with the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        self.close()

    def __repr__(self) -> str:
        """Show the process and whether it lives."""
        return f"Child(process={self.process.pid}, exit_status={self.process.poll()})"

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    def do(self, code: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:  # noqa: ANN401 - what the code says
        """Run code and return what it has assigned to ``result``, as JSON carries it.

        Raises:
            ChildError: the code raised.
            EOFError: the process is gone.
            TimeoutError: there is no answer in time; the process is killed.
        """
        self.send(code)
        return self.receive(timeout_s)

    def send(self, code: str) -> None:
        """Start code without waiting for its end; receive() does."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError(repr(self)) from None

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:  # noqa: ANN401 - what the code says
        """Return the result of what was sent; raises as do()."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.process.kill()
            raise TimeoutError(f"no answer within {timeout_s} s; killed {self!r}") from None
        if not line:
            self.process.wait(timeout=10)
            raise EOFError(repr(self))
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"], answer["text"], answer["trace"])
        return answer["result"]

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it is gone."""
        self.process.kill()
        self.process.wait(timeout=20)

    def close(self) -> None:
        """End the process; what it has not done is not done."""
        self.kill()
        self._reader.join(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was said last nobody has read
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")
