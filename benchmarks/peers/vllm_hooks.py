"""What ``benchmarks.vllm`` has in vLLM's processes, as a plugin of vLLM's: how long its connector takes, and what for.

Any connector's public methods are timed that it has itself and that do something: those of each layer often do not. In
the scheduler's process they are summed up to a step of the engine core, in the worker's to the last call of a step, by
which its metadata is cleared. What timing itself takes is measured at the start, and not counted. Besides: how many
tokens of a request come from elsewhere, how many blocks failed to, and what the connector says of itself. And engines
that wait spin less than vLLM has them. Knows nothing of kvferry.
"""

from __future__ import annotations

import dis
import functools
import os
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

NOTES: Final = "VLLM_BENCH_NOTES"
"""The environment variable that names the file of notes: a JSON object a line."""

CALIBRATION: Final = 2000
LOOK_MS: Final = 1
SPIN_S: Final = 0.05
NOTHING: Final = ["RESUME", "LOAD_CONST", "RETURN_VALUE"]
Side = Literal["scheduler", "worker"]


class Step(msgspec.Struct, frozen=True, tag=True):
    """A step of one side.

    Attributes:
        side: whose.
        us: in the connector's methods.
        whole_us: all of a step that computes; 0 at the worker's side, whose steps may compute nothing.
        requests: that go on; 0 at the worker's side.
        at_s: when it ended, in seconds by the system's monotonic clock.
    """

    side: Side
    us: float
    whole_us: float
    requests: int
    at_s: float


class External(msgspec.Struct, frozen=True, tag=True):
    """How many tokens of a request's prompt its connector is to bring."""

    request: str
    tokens: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """How many blocks a connector could not bring."""

    blocks: int


class Said(msgspec.Struct, frozen=True, tag=True):
    """What a connector says of itself: its ``KVConnectorStats``."""

    data: dict[str, Any]


Note = Step | External | Failed | Said


class Clock:
    """Sums up the time within calls; one within another counts once."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """Measure what timing takes."""
        self._now_ns = now_ns
        self._spent_ns = self._calls = self._depth = 0
        self._cost_ns = 0.0
        nothing = self.timed(lambda: None)
        for _ in range(2):  # the first time it is slower
            self._spent_ns = self._calls = 0
            for _ in range(CALIBRATION):
                nothing()
        self._cost_ns = self._spent_ns / CALIBRATION
        self.take_us()

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method, timed."""

        @functools.wraps(method)
        def run(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            if self._depth:
                return method(*arguments, **named)
            self._depth = 1
            started = self._now_ns()
            try:
                return method(*arguments, **named)
            finally:
                self._spent_ns += self._now_ns() - started
                self._calls += 1
                self._depth = 0

        return run

    def take_us(self) -> float:
        """Return what was summed up since the last time, in microseconds."""
        taken = max(self._spent_ns - self._calls * self._cost_ns, 0.0) / 1e3
        self._spent_ns = self._calls = 0
        return taken


def does_something(method: object) -> bool:
    """Return whether it is a function whose body is more than ``pass``."""
    function = getattr(method, "__func__", None)
    return function is not None and [one.opname for one in dis.get_instructions(function)] != NOTHING


def register() -> None:
    """Hook this process; vLLM calls it."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    clock = Clock()
    create: Any = KVConnectorFactory.create_connector
    step: Any = EngineCore.step

    def note(one: Note) -> None:
        os.write(file, msgspec.json.encode(one) + b"\n")

    def create_connector(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        made = create(*arguments, **named)
        for name in dir(type(made)):
            method = getattr(made, name)
            is_own = getattr(type(made), name) is not getattr(KVConnectorBase_V1, name, None)
            if not name.startswith("_") and is_own and does_something(method):
                setattr(made, name, clock.timed(method))
        _listen(made, note)
        if made.role == KVConnectorRole.WORKER:
            _end_steps(made, clock, note)
        return made

    def timed_step(core: Any) -> Any:  # noqa: ANN401
        started = time.perf_counter_ns()
        outputs, is_computed = step(core)
        whole_us = (time.perf_counter_ns() - started) / 1e3
        us = clock.take_us()
        if is_computed:
            note(Step("scheduler", us, whole_us, len(core.scheduler.running), time.monotonic()))
        return outputs, is_computed

    KVConnectorFactory.create_connector = create_connector
    EngineCore.step = timed_step
    spin_within_steps_only(SpinCondition, MultiprocExecutor, WorkerWrapperBase)


def spin_within_steps_only(condition: Any, *executors: Any) -> None:  # noqa: ANN401  vLLM's classes
    """Have vLLM's processes wait for one another without spinning, but for a moment within and after computed steps.

    They spin for a second after each message: two engines take both cores of a small machine for hundreds of
    milliseconds from all else that a hand-over needs. Without spinning one may miss being notified, so it looks again
    each millisecond.

    Args:
        condition: the class of what they wait for.
        executors: classes that are told each step, and whether it computes.
    """
    spin_s = SPIN_S
    wait = condition.wait

    def noting(execute: Any) -> Any:  # noqa: ANN401  methods of both classes
        @functools.wraps(execute)
        def run(self: Any, step: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            nonlocal spin_s
            spin_s = SPIN_S if step.total_num_scheduled_tokens else -1.0
            return execute(self, step, *arguments, **named)

        return run

    def wait_shortly(self: Any, timeout_ms: int | None = None) -> None:  # noqa: ANN401, ARG001
        self.busy_loop_s = spin_s
        wait(self, LOOK_MS)

    for one in executors:
        one.execute_model = noting(one.execute_model)
    condition.wait = wait_shortly


def _end_steps(connector: Any, clock: Clock, note: Callable[[Note], None]) -> None:  # noqa: ANN401
    clear = connector.clear_connector_metadata

    def end() -> None:
        clear()
        note(Step("worker", clock.take_us(), 0, 0, time.monotonic()))

    connector.clear_connector_metadata = end


def _listen(connector: Any, note: Callable[[Note], None]) -> None:  # noqa: ANN401
    """Note what a connector's methods are told, and what they return."""
    allocated = connector.update_state_after_alloc
    failed = connector.get_block_ids_with_load_errors
    said = connector.get_kv_connector_stats

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:  # noqa: ANN401
        if num_external_tokens:
            note(External(request.request_id, num_external_tokens))
        return allocated(request, blocks, num_external_tokens)

    def get_block_ids_with_load_errors() -> Any:  # noqa: ANN401
        blocks = failed()
        if blocks:
            note(Failed(len(blocks)))
        return blocks

    def get_kv_connector_stats() -> Any:  # noqa: ANN401
        stats = said()
        if stats is not None and not stats.is_empty():
            note(Said(stats.data))
        return stats

    connector.update_state_after_alloc = update_state_after_alloc
    connector.get_block_ids_with_load_errors = get_block_ids_with_load_errors
    connector.get_kv_connector_stats = get_kv_connector_stats
