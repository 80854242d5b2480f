"""vLLM's engines, each driven in a process of its own, with any connector: what they answer, and what hooks note.

An engine runs as operators run it, core and worker in processes of their own; requests are greedy, token ids in and
token ids out. Knows nothing of kvferry.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from benchmarks.peers.vllm_hooks import NOTES, Note

ROOT: Final = Path(__file__).resolve().parents[2]
DRIVER: Final = "benchmarks.peers.vllm_driver"
STOP_S: Final = 30.0
LOG_TAIL: Final = 1500

ARGUMENTS: Final = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,  # one chunk: a part of the peers stores whole prompts only
    "max_num_seqs": 64,
    "disable_log_stats": False,
}
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "",  # each start would compile vLLM anew
}


class EngineError(RuntimeError):
    """An engine does not start, or has ended, or cannot do what it should: says how its log ends."""


class Request(NamedTuple):
    """What an engine is asked: a prompt's token ids, how many new ones, and what its connector gets, if anything."""

    prompt: Sequence[int]
    new: int
    params: dict[str, Any] | None = None


class Reply(msgspec.Struct, frozen=True):
    """What an engine answers; times are in seconds by the system's monotonic clock.

    Attributes:
        asked_at: when vLLM was.
        scheduled_at: when it was to be computed first: what its connector brings meanwhile has come.
        first_token_at: when the engine's core had it.
        tokens: the new ones.
        ended_by: as vLLM calls it: ``length``, or ``error``.
        params: what the connector says to the other engine.
    """

    asked_at: float
    scheduled_at: float
    first_token_at: float
    tokens: list[int]
    ended_by: str
    params: dict[str, Any] | None


class _Answer(msgspec.Struct):
    ready: bool = False
    error: str = ""
    replies: list[Reply] = []
    tokens: list[int] = []


class Engine:
    """One engine, whose driver leads a process group."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Take the process; ``folder`` has its log and its notes."""
        self.name = name
        self._process = process
        self._folder = folder

    def wait_until_ready(self) -> None:
        """Return once the engine serves.

        Raises:
            EngineError: it has ended.
        """
        self._answer()

    def ask(self, *requests: Request) -> list[Reply]:
        """Have requests computed at once.

        Raises:
            EngineError: the engine has ended.
        """
        return self._do("generate", requests=[one._asdict() for one in requests]).replies

    def reset(self) -> None:
        """Empty the engine's own prefix cache.

        Raises:
            EngineError: its connector still holds blocks after a minute.
        """
        self._do("reset")

    def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids."""
        return self._do("tokenize", text=text).tokens

    def last_error(self) -> str:
        """Return the last line of its log that is an error, or nothing."""
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if "ERROR" in line), "")

    def notes(self) -> list[Note]:
        """Return what the hooks have noted since the last time."""
        file = self._folder / "notes"
        lines = file.read_bytes().splitlines()
        os.truncate(file, 0)
        return [msgspec.json.decode(line, type=Note) for line in lines]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop all of its processes meanwhile: an idle engine may take the cores from others."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _do(self, what: str, **arguments: object) -> _Answer:
        with suppress(BrokenPipeError):  # it has ended, and the answer says why
            _pipe(self._process.stdin).write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        return self._answer()

    def _answer(self) -> _Answer:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise EngineError(f"{self.name} has ended: {_cause(self._folder / 'log')}")
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            raise EngineError(f"{self.name}: {answer.error}")
        return answer


@contextmanager
def running_engine(
    name: str,
    python: Path,
    folder: Path,
    model: Path,
    blocks: int,
    connector: Mapping[str, object] | None,
    environment: Mapping[str, str],
) -> Iterator[Engine]:
    """Start an engine, not waiting for it; on leaving it is ended, with all of its processes.

    Args:
        name: says which, in errors.
        python: of the environment.
        folder: for its log and its notes; made.
        model: a folder.
        blocks: of its KV memory.
        connector: vLLM's ``kv_transfer_config``; None: none.
        environment: more variables.
    """
    folder.mkdir(parents=True)
    (folder / "notes").touch()
    arguments = ARGUMENTS | {"model": os.fspath(model), "num_gpu_blocks_override": blocks}
    if connector is not None:
        arguments |= {"kv_transfer_config": dict(connector)}
    path = [os.fspath(one) for one in (ROOT / "src", ROOT, _plugin(folder))]
    variables = {"PYTHONPATH": os.pathsep.join(path), NOTES: os.fspath(folder / "notes")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  our own module
            [os.fspath(python), "-m", DRIVER, json.dumps(arguments)],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **variables, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    with process:
        try:
            yield Engine(name, process, folder)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a driver by the end of its input, and whatever is left of its group by force."""
    _pipe(process.stdin).close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _plugin(folder: Path) -> Path:
    """Make a distribution that has nothing but the entry point by which vLLM finds the hooks."""
    made = folder / "plugin"
    info = made / "kvferry_bench-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvferry_bench = benchmarks.peers.vllm_hooks:register\n"
    )
    return made


def _cause(log: Path) -> str:
    """Return the first error that a log names, else its end."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((number for number, line in enumerate(lines) if "Error: " in line), None)
    return "\n".join(lines)[-LOG_TAIL:] if first is None else " ".join(lines[first : first + 3])[:LOG_TAIL]


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
