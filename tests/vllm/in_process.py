"""vLLM's engine in a process of its own, with its scheduler and its worker in that one process; a test says each step.

Processes are forked from one that has imported vLLM, so that an engine of a small model takes a few seconds to start.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import pytest

from examples.demo.hosts import Host
from tests.kit.daemons import soon
from tests.kit.folders import MODELS, SMOLLM2, TINY_DEEPSEEK

BLOCK: Final = 32
BLOCKS: Final = 96
"""Of an engine's KV memory."""
TOKENS: Final = 12
"""That are generated where a test says no number."""

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
IMPORTED: Final = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "kvferry.clients.vllm.connector")
"""Before processes are forked."""

OPTIONS: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "seed": 0,
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
}

OF_MODEL: Final[Mapping[str | Path, Mapping[str, Any]]] = {
    TINY_DEEPSEEK: {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16},
}
"""The other backend for MLA on CPUs has no float32, nor is it everywhere; this one reads blocks of 16 tokens only."""

START_S: Final = 150.0
CALL_S: Final = 120.0
END_S: Final = 30.0
LOG_BYTES: Final = 6000
"""Of the end of an engine's output, where it fails."""

STORY: Final = "Once upon a time, in a small village by the sea, there lived a fisherman who "
PROMPTS: Final = (
    STORY * 8 + "went out one night and",
    STORY * 8 + "never told anybody that",
    "The capital of France is",
    "List ten facts about the ocean, one a line. " * 12 + "\n1.",
)
"""Two with a common prefix of several blocks, one shorter than a block, and another."""

T = TypeVar("T")


class Asked(NamedTuple):
    """A request: greedy.

    Attributes:
        prompt: text, or token ids.
        tokens: to be generated.
        params: its ``kv_transfer_params``.
        salt: its ``cache_salt``.
        adapter: folder of a LoRA.
        number: vLLM's of that LoRA; 0: a new one with each request.
        in_place: whether it is loaded again, under its number.
        skips_cache: whether it reads nothing that is cached.
    """

    prompt: str | tuple[int, ...]
    tokens: int = TOKENS
    params: dict[str, Any] | None = None
    salt: str | None = None
    adapter: str = ""
    number: int = 0
    in_place: bool = False
    skips_cache: bool = False


class Answer(NamedTuple):
    """What became of a request.

    Attributes:
        tokens: that were generated.
        cached: tokens of the prompt that were not computed.
        ended: vLLM's ``finish_reason``; None: it has not ended.
        params: ``kv_transfer_params`` of the answer.
        prompt: token ids.
    """

    tokens: list[int]
    cached: int
    ended: str | None
    params: dict[str, Any] | None
    prompt: list[int]


class Served:
    """An engine, in its own process. Between what it is told it steps by itself while it has anything to do.

    Attributes:
        llm: vLLM's.
        steps_alone: whether it does that.
        answers: what requests have been answered so far.
            log: what kvferry has logged, each as "WARNING text".
        events: of KV, where a test has them collected.
    """

    def __init__(self, log: list[str]) -> None:
        self.llm: Any = None
        self.log = log
        self.steps_alone = True
        self.answers: dict[str, Answer] = {}
        self.events: list[Any] = []
        self._count = 0

    @property
    def scheduler(self) -> Any:  # noqa: ANN401  vLLM's
        """Return vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:  # noqa: ANN401  vLLM's
        """Return vLLM's model runner."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def is_busy(self) -> bool:
        """Return whether a server would step now."""
        return bool(self.scheduler.has_requests())

    def add(self, asked: Asked) -> str:
        """Add a request and return its id."""
        from vllm import SamplingParams  # noqa: PLC0415  only here there is a vLLM
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        self._count += 1
        name = f"r{self._count}"
        key = "prompt" if isinstance(asked.prompt, str) else "prompt_token_ids"
        prompt = {key: asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)}
        if asked.salt is not None:
            prompt["cache_salt"] = asked.salt
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked.tokens,
            ignore_eos=True,
            skip_reading_prefix_cache=asked.skips_cache,
            extra_args=None if asked.params is None else {"kv_transfer_params": asked.params},
        )
        adapter = None
        if asked.adapter:
            number = asked.number or self._count
            adapter = LoRARequest("adapter", number, asked.adapter, load_inplace=asked.in_place)
        self.llm.llm_engine.add_request(name, prompt, sampling, lora_request=adapter)
        return name

    def step(self) -> None:
        """Do one step."""
        for one in self.llm.llm_engine.step():
            (output,) = one.outputs
            self.answers[one.request_id] = Answer(
                list(output.token_ids),
                one.num_cached_tokens or 0,
                output.finish_reason,
                one.kv_transfer_params,
                list(one.prompt_token_ids),
            )

    def wait(self, names: Sequence[str]) -> list[Answer]:
        """Step until these requests have ended; return their answers.

        Raises:
            TimeoutError: they do not end.
        """
        self.step_until(lambda: all(one in self.answers and self.answers[one].ended for one in names))
        return [self.answers.pop(one) for one in names]

    def step_until(self, is_true: Callable[[], bool], limit_s: float = CALL_S - 20) -> None:
        """Step until something is true.

        Raises:
            TimeoutError: it does not become true.
        """
        ends_at = time.monotonic() + limit_s
        while not is_true():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"after {limit_s} s of steps, {self.states()}: {self.log}")
            self.step()

    def states(self) -> dict[str, str]:
        """Return vLLM's state of each request that it has."""
        return {name.partition("-")[0]: one.status.name for name, one in self.scheduler.requests.items()}


class Engine:
    """A test's side of an engine; see :func:`engine`."""

    def __init__(self, process: Any, connection: Connection, output: Path) -> None:  # noqa: ANN401  of a context
        self._process = process
        self._connection = connection
        self._output = output

    def begin(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Callable[[], T]:  # noqa: ANN401  the function's
        """Have a function called in the engine's process with :class:`Served` first; return what waits for it.

        The function is a module's.
        """
        self._connection.send((function, args, kwargs))
        return lambda: cast("T", self._received(CALL_S))

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401  the function's
        """Return what a function of a module returns in the engine's process, called with :class:`Served` first.

        Raises:
            RuntimeError: what it raised there, with its traceback.
        """
        return self.begin(function, *args, **kwargs)()

    def begin_all(self, *asked: Asked | str, **more: Any) -> Callable[[], list[Answer]]:  # noqa: ANN401  of Asked
        """Add requests; return what waits for their answers."""
        return self.begin(answered, *_told(asked, more))

    def ask(self, *asked: Asked | str, **more: Any) -> list[Answer]:  # noqa: ANN401  of Asked
        """Add requests, and return their answers once all have ended."""
        return self.begin_all(*asked, **more)()

    def add(self, asked: Asked | str, **more: Any) -> str:  # noqa: ANN401  of Asked
        """Add a request and return its id."""
        return self.call(Served.add, *_told([asked], more))

    def wait(self, *names: str) -> list[Answer]:
        """Return the answers of requests once they have ended."""
        return self.call(Served.wait, names)

    def drain(self) -> None:
        """Return once a server would be idle: no request, and no block that is being read."""
        self.call(drained)

    def has_answered(self, limit_s: float) -> bool:
        """Return whether what was begun has ended, or does so within this time."""
        return self._connection.poll(limit_s)

    def log(self) -> list[str]:
        """Return what kvferry has logged since this was called last, each as "WARNING text"."""
        return self.call(taken_log)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.join(END_S)

    def close(self) -> None:
        """End it in order, unless it was killed."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(END_S)
        status = self._process.exitcode
        if status is None:
            self.kill()
        assert status in {0, -9}, f"the engine ended with {status}:\n{self.output()}"

    def output(self) -> str:
        """Return the end of what its process has written."""
        return self._output.read_text(errors="replace")[-LOG_BYTES:] if self._output.exists() else ""

    def _received(self, limit_s: float) -> object:
        try:
            if not self._connection.poll(limit_s):
                self.kill()
                raise TimeoutError(f"the engine does not answer within {limit_s} s:\n{self.output()}")
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the engine's process has ended:\n{self.output()}") from None
        if kind == "error":
            raise EngineFailedError(value)
        return cast("object", value)

    def wait_for_start(self) -> None:
        """Return once it has started.

        Raises:
            EngineFailedError: it does not start.
        """
        self._received(START_S)


def wait_until_back(one: Engine) -> None:
    """Return once scheduler and worker have found the next daemon; what was logged is taken."""
    lines: list[str] = []

    def is_back() -> bool:
        lines.extend(one.log())
        return sum("the daemon is back, boot" in line for line in lines) >= len(("scheduler", "worker"))

    assert soon(is_back), lines


class EngineFailedError(RuntimeError):
    """What was raised in an engine's process, as text with its traceback."""


def answered(served: Served, *asked: Asked) -> list[Answer]:
    """Add requests, and return their answers once all have ended."""
    return served.wait([served.add(one) for one in asked])


def drained(served: Served) -> None:
    """Step until there is nothing to do."""
    served.step_until(lambda: not served.is_busy)


def taken_log(served: Served) -> list[str]:
    """Return what was logged, once."""
    taken = list(served.log)
    served.log.clear()
    return taken


def set_steps_alone(served: Served, *, value: bool) -> None:
    """Have it step by itself while it is told nothing, or not."""
    served.steps_alone = value


def reset(served: Served, *, external: bool = False) -> bool:
    """Forget vLLM's own prefix cache, and with ``external`` the connector's, as vLLM's servers do."""
    return bool(served.llm.reset_prefix_cache(reset_connector=external))


def begin_anew(one: Engine) -> None:
    """Reset its own prefix cache, and let it look at its weights: until then it looks nothing up."""
    assert one.call(reset)
    one.ask("weights")


def metrics(served: Served) -> dict[str, float]:
    """Return Prometheus' counters by name, and of histograms how many and their sum: ``NAME_count``, ``NAME_sum``."""
    found: dict[str, float] = {}
    for one in served.llm.get_metrics():
        for what in ("value", "count", "sum"):
            if hasattr(one, what):
                name = one.name if what == "value" else f"{one.name}_{what}"
                found[name] = found.get(name, 0.0) + getattr(one, what)
    return found


def abort(served: Served, name: str) -> None:
    """Abort a request, as a server does whose client has gone."""
    served.llm.llm_engine.abort_request([name])


def free_blocks(served: Served) -> int:
    """Return how many blocks of vLLM's KV memory no request has."""
    return int(served.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@contextlib.contextmanager
def by_hand(one: Engine) -> Iterator[None]:
    """Have an engine step only where a test says so."""
    one.call(set_steps_alone, value=False)
    try:
        yield
    finally:
        one.call(set_steps_alone, value=True)


@contextlib.contextmanager
def engine(
    folder: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    model: str | Path = SMOLLM2,
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both",
    policy: Literal["recompute", "fail"] = "recompute",
    environment: Mapping[str, str | None] | None = None,
    host: Host | None = None,
    **options: Any,  # noqa: ANN401  vLLM's
) -> Iterator[Engine]:
    """Run an engine; on leaving it must end in order, unless it was killed.

    Args:
        folder: for its output.
        extra: ``kv_connector_extra_config``; None: an engine without a connector.
        model: in the folder of models, or a folder.
        role: the connector's.
        policy: ``kv_load_failure_policy``.
        environment: of its process, beside ENVIRONMENT; None: not set.
        host: where it runs; None: on this machine's network.
        **options: vLLM's.

    Raises:
        EngineFailedError: it does not start.
    """
    told = {**OPTIONS, **OF_MODEL.get(model, {}), **options}
    told["model"] = os.fspath(model if isinstance(model, Path) else MODELS / model)
    if extra is not None:
        told["kv_transfer_config"] = {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.clients.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": dict(extra),
        }
    here, there = multiprocessing.Pipe()
    output = folder / f"engine-{time.monotonic_ns()}.log"
    variables = {**({} if host is None else {"VLLM_HOST_IP": host.address}), **(environment or {})}
    process = _context().Process(  # one of several ranks has children; it ends where this process does
        target=serve, args=(there, os.fspath(output), told, variables, host), daemon="tensor_parallel_size" not in told
    )
    process.start()
    there.close()
    one = Engine(process, here, output)
    try:
        one.wait_for_start()
        yield one
    except BaseException:
        one.kill()
        raise
    finally:
        one.close()


class Plain:
    """What plain engines answer, each of which is started once; each prompt is asked once."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._engines: dict[str | Path, Engine] = {}
        self._known: dict[tuple[str | Path, Asked], list[int]] = {}

    def tokens(self, *asked: Asked | str, model: str | Path = SMOLLM2, **more: Any) -> list[list[int]]:  # noqa: ANN401
        """Return the tokens that vLLM without a connector and without a prefix cache generates."""
        wanted = [one._replace(params=None, salt=None) for one in _told(asked, more)]
        missing = [one for one in dict.fromkeys(wanted) if (model, one) not in self._known]
        if missing:
            if model not in self._engines:
                one = engine(self._folder, model=model, enable_prefix_caching=False)
                self._engines[model] = self._stack.enter_context(one)
            answers = self._engines[model].ask(*missing)
            self._known |= {(model, one): got.tokens for one, got in zip(missing, answers, strict=True)}
        return [self._known[model, one] for one in wanted]


def _told(asked: Sequence[Asked | str], more: Mapping[str, Any]) -> list[Asked]:
    return [Asked(one, **more) if isinstance(one, str) else one._replace(**more) for one in asked]


def _context() -> Any:  # noqa: ANN401  has no public type
    """Return what starts processes; the first time, with a process that imports vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from multiprocessing import forkserver  # noqa: PLC0415

        forkserver.ensure_running()
    return context


def serve(
    connection: Connection,
    output: str,
    options: dict[str, Any],
    environment: dict[str, str | None],
    host: Host | None = None,
) -> None:
    """Run an engine, and do what the other end of the connection says; of a new process."""
    if host is not None:
        host.enter()
    with Path(output).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno() if sys.stdout else 1)
        os.dup2(file.fileno(), 2)
    os.environ |= ENVIRONMENT
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    log: list[str] = []
    logger = logging.getLogger("kvferry")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Collecting(log))
    served = Served(log)
    try:
        from vllm import LLM  # noqa: PLC0415  only here there is a vLLM

        served.llm = LLM(**options)
    except BaseException:  # noqa: BLE001  the test is told
        connection.send(("error", traceback.format_exc() + "\n".join(log)))
        return
    connection.send(("ok", None))
    _serve(connection, served)
    served.llm.llm_engine.engine_core.shutdown()


def _serve(connection: Connection, served: Served) -> None:
    while True:
        try:
            while served.steps_alone and served.is_busy and not connection.poll(0.0):
                served.step()
            told = connection.recv()
            if told is None:
                return
            function, args, kwargs = told
            connection.send(("ok", function(served, *args, **kwargs)))
        except EOFError:
            return
        except Exception:  # noqa: BLE001  the test is told
            connection.send(("error", traceback.format_exc()))


class _Collecting(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")
