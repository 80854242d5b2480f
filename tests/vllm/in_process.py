"""vLLM's engine in a process of its own, with its scheduler and its worker in that one process; a test says each step.

Processes are forked from one that has imported vLLM, so that an engine of a small model takes a few seconds to start.
``running_pair`` has two of them, and is their router. What functions take ``Served`` are called in an engine's process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import pytest
import torch
from safetensors.torch import save_file

from examples.demo.hosts import Host
from kvferry.clients import Client
from kvferry.protocol.tier_messages import CachedBlockStatus
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import (
    MODELS,
    SMOLLM2,
    TINY_CHUNKS,
    TINY_DEEPSEEK,
    TINY_DELTA,
    TINY_GEMMA,
    TINY_GRANITE,
    TINY_MHA,
    TINY_OSS,
    TINY_SHARED,
)
from tests.vllm.servers import BLOCK, REMOTE_DECODE

BLOCKS: Final = 96
"""Of an engine's KV memory."""
TOKENS: Final = 12
"""That are generated where a test says no number."""
CHUNK: Final = 3 * BLOCK
"""Tokens of a step of prefill in a pair; of SmolLM2 as many bytes as go layer by layer, of the tiny models fewer."""
HOST_TIER: Final = "[tiers]\nhost_bytes = 1073741824\n"
"""A daemon's configuration."""
OTHER_HOST_TIER: Final = HOST_TIER.replace("1073741824", "536870912")
"""That of one that comes back with an empty tier: of another size it cannot go on with the one before."""
NEVER: Final = {"hold_s": 3000.0, "receive_s": 3000.0}
"""No deadline passes in a test."""

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
    **{one: {"num_gpu_blocks_override": 2 * BLOCKS} for one in (TINY_GEMMA, TINY_OSS, TINY_CHUNKS, TINY_SHARED)},
    TINY_GRANITE: {"enable_prefix_caching": False},
    TINY_DELTA: {"enable_prefix_caching": False, "dtype": "bfloat16"},
}
"""Several groups need more blocks, states an engine without a prefix cache, and the delta net is in bfloat16 only. The
other backend for MLA on CPUs has no float32, nor is it everywhere; this one reads blocks of 16 tokens only."""

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


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return a prompt of so many tokens, of which no other seed has the first block."""
    return tuple(random.Random(f"{seed}").choices(range(1000, 20000), k=length))  # noqa: S311


def prompt_of(name: str, blocks: int = 3) -> str:
    """Return a prompt that no other name has: of so many blocks and a bit."""
    return f"{name}: " + STORY * (2 * blocks)


def settings(daemon: Daemon, pool: str = "pool", **more: Any) -> dict[str, Any]:  # noqa: ANN401  of Settings
    """Return the connector's configuration."""
    return {"runtime_dir": str(daemon.runtime_dir), "pool": pool, **more}


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


Prompt = Asked | str | tuple[int, ...]


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
    def core(self) -> Any:  # noqa: ANN401  vLLM's
        """Return vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:  # noqa: ANN401  vLLM's
        return self.core.scheduler

    @property
    def runner(self) -> Any:  # noqa: ANN401  vLLM's
        return self.core.model_executor.driver_worker.worker.model_runner

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

    def request(self, name: str) -> Any:  # noqa: ANN401  vLLM's
        """Return vLLM's request."""
        return next(one for key, one in self.scheduler.requests.items() if key.partition("-")[0] == name)

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

    def begin_all(self, *asked: Prompt, **more: Any) -> Callable[[], list[Answer]]:  # noqa: ANN401  of Asked
        """Add requests; return what waits for their answers."""
        return self.begin(answered, *_told(asked, more))

    def ask(self, *asked: Prompt, **more: Any) -> list[Answer]:  # noqa: ANN401  of Asked
        return self.begin_all(*asked, **more)()

    def add(self, asked: Prompt, **more: Any) -> str:  # noqa: ANN401  of Asked
        """Add a request and return its id."""
        return self.call(Served.add, *_told([asked], more))

    def wait(self, *names: str) -> list[Answer]:
        """Return the answers of requests once they have ended."""
        return self.call(Served.wait, names)

    def drain(self) -> None:
        self.call(drained)

    def ask_anew(self, prompt: Prompt, **more: Any) -> Answer:  # noqa: ANN401  of Asked
        """Ask once it has nothing itself, and return the answer once a server would be idle."""
        self.drain()
        assert self.call(reset)
        (answer,) = self.ask(prompt, **more)
        self.drain()
        return answer

    def has_answered(self, limit_s: float) -> bool:
        """Return whether what was begun has ended, or does so within this time."""
        return self._connection.poll(limit_s)

    def log(self) -> list[str]:
        """Return what kvferry has logged since this was called last, each as "WARNING text"."""
        return self.call(taken_log)

    def kill(self) -> None:
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
    return served.wait([served.add(one) for one in asked])


def drained(served: Served) -> None:
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


def used_blocks(served: Served) -> int:
    """Return how many blocks requests have; the null block is free."""
    pool = served.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def preempted(served: Served) -> int:
    """Have vLLM preempt all requests that it computes; return how many."""
    before = len(served.scheduler.running)
    served.llm.reset_prefix_cache(reset_running_requests=True)
    return before - len(served.scheduler.running)


def stepped(served: Served, count: int = 1) -> None:
    """Do so many steps."""
    for _ in range(count):
        served.step()


def stepped_until(served: Served, state: str, name: str = "") -> None:
    """Step until a request, or any, is in a state of vLLM's."""
    served.step_until(lambda: state in [is_in for one, is_in in served.states().items() if name in {"", one}])


def stepped_until_running(served: Served, count: int) -> None:
    """Step until so many requests are running."""
    served.step_until(lambda: len(served.scheduler.running) >= count)


def aborted(served: Served, *names: str) -> None:
    """Abort requests, as a server does whose client has gone."""
    served.llm.llm_engine.abort_request(list(names))


def aborted_before_it_began(served: Served, name: str) -> None:
    """Abort a request that vLLM has given blocks to be filled, in a step that its worker has not done yet.

    vLLM does so where it schedules a step while the one before it is computed.
    """
    core = served.core
    begins = False
    while not begins:
        step = core.scheduler.schedule()
        begins = served.states().get(name) == "WAITING_FOR_REMOTE_KVS"
        if begins:
            aborted(served, name)
        output = core.model_executor.execute_model(step)
        output = core.model_executor.sample_tokens(None) if output is None else output
        core.scheduler.update_from_output(step, output)


def received(served: Served, name: str) -> None:
    """Step until a request's blocks are there, and before it is computed."""
    whole = served.request(name).request_id
    served.step_until(lambda: whole in served.scheduler.finished_recving_kv_req_ids)


def blocks_of(served: Served, name: str) -> list[list[int]]:
    """Return the blocks that a request has, of each group."""
    return [list(ids) for ids in served.scheduler.kv_cache_manager.get_block_ids(served.request(name).request_id)]


def zeroed(served: Served, name: str, group: int = 0) -> None:
    """Write zeros to the blocks that a request has in a group."""
    for layer in served.runner.kv_caches:  # those of other groups are in the same memory, in other blocks
        layer[blocks_of(served, name)[group]] = 0


def layers_told(served: Served, kill: int | None = None) -> tuple[int, int]:
    """Do one step; return of how many groups of layers the daemon was told meanwhile, and of how many at its end.

    ``kill``: a process that is killed when the second one is told.
    """
    from kvferry.clients.events import EventRing  # noqa: PLC0415  only here there is a torch
    from kvferry.clients.vllm.layers import NamedLayers  # noqa: PLC0415

    record, end = EventRing.record, NamedLayers.end
    told, left = [], [0]

    def recorded(ring: EventRing, step: LayerStep, stream: None) -> None:
        told.append(step)
        if kill is not None and len(told) == 2:
            os.kill(kill, signal.SIGKILL)
        record(ring, step, stream)

    def ended(signals: NamedLayers) -> None:
        left.append(len(signals.pending))
        end(signals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventRing, "record", recorded)
        patch.setattr(NamedLayers, "end", ended)
        served.step()
    return len(told) - sum(left), sum(left)


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

    def tokens(self, *asked: Prompt, model: str | Path = SMOLLM2, **more: Any) -> list[list[int]]:  # noqa: ANN401
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


def _told(asked: Sequence[Prompt], more: Mapping[str, Any]) -> list[Asked]:
    return [one._replace(**more) if isinstance(one, Asked) else Asked(one, **more) for one in asked]


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


# -- two engines, and their router


class Pair(NamedTuple):
    """Two engines, and a client of the daemon of either."""

    prefill: Engine
    decode: Engine
    client: Client
    other: Client
    """Of decode's daemon; mostly the same one."""
    ranks: int
    """Of decode."""

    def prefilled(self, *prompts: tuple[int, ...]) -> list[dict[str, Any]]:
        """Have prompts prefilled, and return what the answers say to decode."""
        answers = self.prefill.ask(*(Asked(one, 1, dict(REMOTE_DECODE)) for one in prompts))
        assert [one.ended for one in answers] == ["length"] * len(prompts)
        return [through_router(one) for one in answers]

    def handed_on(self, *prompts: tuple[int, ...]) -> list[list[int]]:
        """Have prompts prefilled first, and then decoded; return the tokens. Each must arrive, at each rank."""
        params = self.prefilled(*prompts)
        with self.counts("transfers.receive.ok", self.ranks * len(prompts)):
            answers = self.decode.ask(*(Asked(one, params=said) for one, said in zip(prompts, params, strict=True)))
        return [one.tokens for one in answers]

    def awaited(self, *prompts: tuple[int, ...], receives: int | None = None) -> tuple[list[str], list[dict[str, Any]]]:
        """Have decode wait for prompts; return their names there, and what a router that asks both says to prefill.

        ``receives``: for how many it is seen to wait.
        """
        given = [both_given() for _ in prompts]
        names = [self.decode.add(Asked(one, params=to)) for one, (_, to) in zip(prompts, given, strict=True)]
        assert soon(lambda: self.receives() == (len(prompts) if receives is None else receives))
        return names, [to for to, _ in given]

    def half_prefilled(self, one: tuple[int, ...], to_prefill: dict[str, Any], chunks: int = 2) -> str:
        """Have some chunks of a prompt computed by hand, and at decode; return its name at prefill."""
        name = self.prefill.add(Asked(one, 1, to_prefill))
        self.prefill.call(stepped, chunks)
        assert soon(lambda: sum(each.arrived for each in self.other.status().transfers) >= chunks * CHUNK // BLOCK)
        return name

    def counted(self, name: str) -> int:
        """Return one of decode's daemon's counters."""
        return self.other.status().counters.get(name, 0)

    @contextlib.contextmanager
    def counts(self, name: str, count: int) -> Iterator[None]:
        """Assert by how much one of the counters grows."""
        before = self.counted(name)
        yield
        assert self.counted(name) - before == count, name

    def receives(self) -> int:
        """Return for how many prompts decode waits."""
        return sum(one.direction == "receive" for one in self.other.status().transfers)

    def assert_nothing_left(self) -> None:
        """Assert that a server would be idle at either side, has all its blocks, and the daemon nothing under way."""
        for one in (self.prefill, self.decode):
            one.drain()
            assert one.call(used_blocks) == 0
        for client in (self.client, self.other):
            assert soon(partial(_is_idle, client)), client.status().transfers

    def assert_abort_is_heard(self, one: tuple[int, ...]) -> None:
        """Assert that prefill gets its blocks back where decode gives a prompt up that it has been told of."""
        (params,) = self.prefilled(one)
        with by_hand(self.decode):
            self.decode.call(aborted, self.decode.add(Asked(one, params=params)))
        self.assert_nothing_left()


def _is_idle(client: Client) -> bool:
    return not client.status().transfers


@contextlib.contextmanager
def running_pair(
    folder: Path,
    runtime_dir: Path | Sequence[Path],
    *,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    prefill_options: Mapping[str, Any] | None = None,
    decode_options: Mapping[str, Any] | None = None,
    **both: Any,  # noqa: ANN401  of engine
) -> Iterator[Pair]:
    """Run both engines.

    Args:
        folder: for their output.
        runtime_dir: the daemon's; or prefill's and decode's.
        prefill: settings of the connector at prefill.
        decode: settings of the connector at decode.
        prefill_options: of the engine.
        decode_options: of the engine.
        **both: options of both engines.
    """
    name = uuid.uuid4().hex[:8]  # of this pair's pools, beside others of the same daemon
    here, there = (runtime_dir, runtime_dir) if isinstance(runtime_dir, Path) else runtime_dir
    common: dict[str, Any] = {"role": "kv_producer", "max_num_batched_tokens": CHUNK, **both, **(prefill_options or {})}
    with contextlib.ExitStack() as stack:
        first = {"runtime_dir": str(here), "pool": f"{name}-prefill", "cache": False, **(prefill or {})}
        one = stack.enter_context(engine(folder, first, **common))
        second = {"runtime_dir": str(there), "pool": f"{name}-decode", "cache": False, **(decode or {})}
        told: dict[str, Any] = {"role": "kv_consumer", **both, **(decode_options or {})}
        other = stack.enter_context(engine(folder, second, **told))
        client, far = (stack.enter_context(contextlib.closing(Client.connect(path))) for path in (here, there))
        yield Pair(one, other, client, far, told.get("tensor_parallel_size", 1))


def through_router(answer: Answer) -> dict[str, Any]:
    """Return an answer's parameters as they come through a router: as JSON."""
    assert answer.params is not None
    said: dict[str, Any] = json.loads(json.dumps(answer.params))
    return said


def full_group(block_size: int) -> Any:  # noqa: ANN401  only where there is a vLLM
    """Return the only KV cache group of a model of full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    from kvferry.clients.vllm.groups import Group  # noqa: PLC0415

    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return Group("main", spec, ("layers.0",))


def both_given() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a router that asks both sides at once says to prefill and to decode."""
    name = uuid.uuid4().hex
    return {"do_remote_decode": True, "transfer_id": name}, {"do_remote_prefill": True, "transfer_id": name}


# -- what the daemon has of engines' prefix caches


class Left(NamedTuple):
    """What is still held or under way in a daemon."""

    pinned_bytes: int
    operations: int
    transfers: int


NOTHING: Final = Left(0, 0, 0)


def left(daemon: Daemon) -> Left:
    """Return it, once it is nothing, or has been something else for long."""
    with Client.connect(daemon.runtime_dir) as client:

        def now() -> Left:
            status = client.status()
            pinned = sum(one.pinned_bytes for one in status.tiers)
            return Left(pinned, len(status.operations), len(status.transfers))

        soon(lambda: now() == NOTHING)
        return now()


def is_pinned(daemon: Daemon) -> bool:
    """Return whether leases or operations keep cached blocks."""
    with Client.connect(daemon.runtime_dir) as client:
        return any(one.pinned_bytes for one in client.status().tiers)


def cached_blocks(daemon: Daemon) -> list[CachedBlockStatus]:
    with Client.connect(daemon.runtime_dir) as client:
        return list(client.cached_blocks())


def assert_all_is_free(daemon: Daemon, one: Engine) -> None:
    """Check that neither an engine nor the daemon holds anything once all is over."""
    one.drain()
    assert left(daemon) == NOTHING
    assert one.call(used_blocks) == 0


def assert_caches(one: Engine, plain: Plain, name: str, model: str | Path = TINY_MHA) -> None:
    """Check that an engine stores a prompt and finds it again."""
    want = plain.tokens(prompt_of(name), model=model)
    (first,) = one.ask(prompt_of(name))
    again = one.ask_anew(prompt_of(name))
    assert [first.tokens, again.tokens] == want * 2
    assert (first.cached, again.cached > 0) == (0, True)


@contextlib.contextmanager
def instance_client(daemon: Daemon, pool: str) -> Iterator[Client]:
    """Return a client of the instance of the engine that has a pool."""
    with Client.connect(daemon.runtime_dir) as client:
        instance = next(one.instance for one in client.status().sessions if one.name == f"{pool}-scheduler")
    with Client.connect(daemon.runtime_dir, instance=instance) as same:
        yield same


def make_adapter(folder: Path, seed: int, **more: Any) -> None:  # noqa: ANN401  of its configuration
    """Make a LoRA of the small model, or another one in its place."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 64, **more}
    config["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_"
            weights[f"{prefix}A.weight"] = torch.randn(8, 128, generator=chance)
            weights[f"{prefix}B.weight"] = torch.randn(rows, 8, generator=chance)
    save_file(weights, folder / "adapter_model.safetensors")
