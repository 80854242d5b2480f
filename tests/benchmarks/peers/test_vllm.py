"""vLLM's engines are driven, and their connectors timed, in processes of their own.

The vLLM here only stands in for it: same classes and methods, and a connector that says what it is told to.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import psutil
import pytest

from benchmarks import vllm as benchmark
from benchmarks.measure import Effort, MissingPeerError, Row
from benchmarks.peers.vllm import Engine, EngineError, Reply, Request, running_engine
from benchmarks.peers.vllm_hooks import (
    LOOK_MS,
    SPIN_S,
    Clock,
    External,
    Failed,
    Note,
    Said,
    Step,
    does_something,
    spin_within_steps_only,
)
from benchmarks.vllm import BLOCK_SIZE, TOKEN_BYTES, Baseline, Contender, Engines, Prompts, Steps

MODULES: Final = {
    "vllm/__init__.py": """
import time
from importlib.metadata import entry_points
from types import SimpleNamespace


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **arguments):
        print("a log line, which is no answer")
        if arguments["model"].endswith("none"):
            raise OSError("no such model")
        [hooks] = [one for one in entry_points(group="vllm.general_plugins") if one.name == "kvferry_bench"]
        hooks.load()()
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.engine.core import EngineCore

        self.llm_engine = self
        self.core = EngineCore()
        extra = arguments["kv_transfer_config"].kv_connector_extra_config
        self.worker = KVConnectorFactory.create_connector(extra, role=KVConnectorRole.WORKER)
        self.core.connector = KVConnectorFactory.create_connector(extra, role=KVConnectorRole.SCHEDULER)
        self.added = []

    def add_request(self, name, prompt, params):
        self.added.append((name, prompt["prompt_token_ids"], params))

    def step(self):
        done = []
        for name, prompt, params in self.added:
            self.core.connector.update_state_after_alloc(SimpleNamespace(request_id=name), None, len(prompt))
            self.core.scheduler.running = [name]
            self.core.step()
            self.worker.wait_for_layer_load("one")
            self.worker.wait_for_save()
            self.worker.get_block_ids_with_load_errors()
            self.worker.get_kv_connector_stats()
            self.worker.clear_connector_metadata()
            assert params.temperature == 0 and params.ignore_eos
            times = SimpleNamespace(scheduled_ts=time.monotonic(), first_token_ts=time.monotonic())
            told = (params.extra_args or {}).get("kv_transfer_params")
            text = SimpleNamespace(token_ids=[sum(prompt)] * params.max_tokens, finish_reason="length")
            done.append(
                SimpleNamespace(request_id=name, finished=True, metrics=times, outputs=[text], kv_transfer_params=told)
            )
        self.added = []
        return done[::-1]

    def reset_prefix_cache(self):
        return True

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text: [ord(one) for one in text])
""",
    "vllm/config.py": """
from types import SimpleNamespace as KVTransferConfig
""",
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": """
from enum import Enum

KVConnectorRole = Enum("KVConnectorRole", "SCHEDULER WORKER")


class KVConnectorBase_V1:
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def get_kv_connector_stats(self):
        return None

    def get_block_ids_with_load_errors(self):
        return set()

    def clear_connector_metadata(self):
        self.metadata = None
""",
    "vllm/distributed/kv_transfer/kv_connector/factory.py": '''
import time
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class Connector(KVConnectorBase_V1):
    def __init__(self, extra, role):
        self.extra, self.role = extra, role

    def build_connector_meta(self, step):
        self.nap()

    def nap(self):
        time.sleep(self.extra["nap_s"])

    def wait_for_layer_load(self, name):
        """Nothing."""

    def wait_for_save(self):
        time.sleep(2 * self.extra["nap_s"])

    def get_block_ids_with_load_errors(self):
        return set(range(self.extra["failed"]))

    def get_kv_connector_stats(self):
        return SimpleNamespace(data={"bytes": 7}, is_empty=lambda: False)


class KVConnectorFactory:
    @classmethod
    def create_connector(cls, extra, role):
        return Connector(extra, role)
''',
    "vllm/distributed/device_communicators/shm_broadcast.py": """
class SpinCondition:
    def wait(self, timeout_ms=None):
        pass
""",
    "vllm/v1/executor/multiproc_executor.py": """
class MultiprocExecutor:
    def execute_model(self, step):
        pass
""",
    "vllm/v1/worker/worker_base.py": """
class WorkerWrapperBase:
    def execute_model(self, step):
        pass
""",
    "vllm/v1/engine/core.py": """
from types import SimpleNamespace


class EngineCore:
    def __init__(self):
        self.scheduler = SimpleNamespace(running=[])

    def step(self):
        self.connector.build_connector_meta(None)
        return {}, True
""",
}
NAP_S: Final = 0.002


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment's interpreter, which finds the stand-in."""
    folder = tmp_path_factory.mktemp("environment")
    for name, source in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    made = folder / "python"
    made.write_text(f'#!/bin/sh\nexec env PYTHONPATH="$PYTHONPATH:{folder}" {sys.executable} "$@"\n')
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


@contextmanager
def engine(python: Path, folder: Path, *, model: str = "model", failed: int = 0) -> Iterator[Engine]:
    connector = {"kv_connector": "One", "kv_connector_extra_config": {"nap_s": NAP_S, "failed": failed}}
    with running_engine("an engine", python, folder / "engine", Path(model), connector, {}) as made:
        yield made


def test_an_engine_answers_in_the_order_it_was_asked(python: Path, tmp_path: Path) -> None:
    with engine(python, tmp_path) as one:
        one.wait_until_ready()
        first, second = one.ask(Request([1, 2, 3], 2, {"do_remote_decode": True}), Request([4, 5], 1))
        assert (first.tokens, first.params) == ([6, 6], {"do_remote_decode": True})
        assert (second.tokens, second.params) == ([9], None)
        assert first.asked_at <= first.scheduled_at <= first.first_token_at
        assert one.tokenize("ab") == [97, 98]
        one.reset()


def test_a_connectors_methods_are_timed_and_what_it_brings_is_noted(python: Path, tmp_path: Path) -> None:
    with engine(python, tmp_path, failed=3) as one:
        one.wait_until_ready()
        assert one.notes() == []
        one.ask(Request([1, 2, 3], 1))
        notes = one.notes()
        assert [note for note in notes if not isinstance(note, Step)] == [
            External("bench-0", 3),
            Failed(3),
            Said({"bytes": 7}),
        ]
        [scheduler, worker] = [note for note in notes if isinstance(note, Step)]
        assert (scheduler.side, scheduler.requests, worker.side) == ("scheduler", 1, "worker")
        # One of its methods calls another: that counts once.
        assert NAP_S * 1e6 <= scheduler.us <= scheduler.whole_us
        assert worker.us >= 2 * NAP_S * 1e6
        assert one.notes() == []


def test_an_engine_that_does_not_start_says_why(python: Path, tmp_path: Path) -> None:
    with (
        engine(python, tmp_path, model="none") as one,
        pytest.raises(EngineError, match="an engine has ended: OSError: no such model"),
    ):
        one.wait_until_ready()


def test_an_engine_stands_still_meanwhile(python: Path, tmp_path: Path) -> None:
    with engine(python, tmp_path) as one:
        one.wait_until_ready()
        [process] = [
            child for child in psutil.Process().children() if "benchmarks.peers.vllm_driver" in child.cmdline()
        ]
        with one.standing_still():
            wait_until_status(process, psutil.STATUS_STOPPED)
        assert one.ask(Request([1], 1))[0].tokens == [1]
    assert not process.is_running()


def wait_until_status(process: psutil.Process, status: str) -> None:
    while process.status() != status:
        os.sched_yield()


class SlowClock:
    """A clock that goes on by 300 ns whenever it is read."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 300
        return self.ns


def test_what_timing_takes_is_not_counted() -> None:
    now = SlowClock()
    clock = Clock(now)

    def work() -> None:
        now.ns += 7_000

    nothing, working = clock.timed(lambda: None), clock.timed(work)
    for _ in range(1000):
        nothing()
    assert clock.take_us() == 0
    for _ in range(10):
        working()
    assert clock.take_us() == 70
    assert clock.take_us() == 0


class Waiting:
    """Stands for vLLM's SpinCondition, and notes how long each wait spins, and for how long it sleeps then."""

    busy_loop_s = 1.0

    def __init__(self) -> None:
        self.waits: list[tuple[float, int | None]] = []

    def wait(self, timeout_ms: int | None = None) -> None:
        self.waits.append((self.busy_loop_s, timeout_ms))


class Executing:
    """Stands for vLLM's executor; a step is how many tokens it computes."""

    def execute_model(self, step: SimpleNamespace, *, non_block: bool) -> int:
        assert non_block
        return int(step.total_num_scheduled_tokens)


def test_engines_spin_within_steps_that_compute() -> None:
    spin_within_steps_only(Waiting, Executing)
    waiting, executing = Waiting(), Executing()
    for tokens in (3, 0, 2):
        assert executing.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens), non_block=True) == tokens
        waiting.wait()
        waiting.wait(5000)
    assert waiting.waits == [(SPIN_S, LOOK_MS)] * 2 + [(-1.0, LOOK_MS)] * 2 + [(SPIN_S, LOOK_MS)] * 2


class Methods:
    """One of each."""

    def nothing(self) -> None:
        """Do nothing."""

    def something(self) -> bool:
        return self is not None


def test_methods_that_do_nothing_are_known() -> None:
    assert not does_something(Methods().nothing)
    assert does_something(Methods().something)
    assert not does_something(3)


class Scripted:
    """An engine whose connector brings what it is asked for; it is asked while ``others`` stand still."""

    def __init__(
        self,
        *,
        seconds: float,
        wrong: int = 0,
        failed: int = 0,
        missing: int = 0,
    ) -> None:
        self.others: Sequence[Scripted] = ()
        self._now_s = 0.0
        self._seconds, self._wrong, self._failed, self._missing = seconds, wrong, failed, missing
        self._notes: list[Note] = []
        self.is_still = False

    def ask(self, *requests: Request) -> list[Reply]:
        assert not self.is_still
        assert all(one.is_still for one in self.others)
        replies = []
        for one in requests:
            self._now_s += self._seconds
            self._notes.append(External("one", len(one.prompt) - self._missing))
            self._notes.append(Said({"receive_bytes": TOKEN_BYTES * len(one.prompt)}))
            if self._failed:
                self._notes.append(Failed(self._failed))
            tokens = [sum(one.prompt) + self._wrong] * one.new
            at = self._now_s
            replies.append(Reply(at, at + self._seconds / 2, at + self._seconds, tokens, "length", one.params))
        return replies

    def reset(self) -> None:
        assert not self.is_still

    def last_error(self) -> str:
        return ""

    def tokenize(self, text: str) -> list[int]:
        return list(range(len(text)))

    def notes(self) -> list[Note]:
        taken, self._notes = self._notes, []
        return taken

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        self.is_still = True
        yield
        self.is_still = False


def engines(name: str, prompts: Prompts, *, decode: Scripted, prefill: bool = True, **told: Any) -> Engines:  # noqa: ANN401  of a contender
    config = {"kv_connector": name} if prefill else None
    contender = Contender(name, f"the connector {name}", Path("python"), config, config, **told)
    before = cast("Engine", Scripted(seconds=0.25)) if prefill else None
    return Engines(contender, before, cast("Engine", decode), prompts)


@pytest.fixture
def prompts() -> Prompts:
    filled = Prompts()
    engines("none", filled, decode=Scripted(seconds=1.0), prefill=False).fill_prompts(benchmark.LENGTHS)
    return filled


def test_rows_of_hand_overs_and_hits(prompts: Prompts) -> None:
    mine, theirs = Scripted(seconds=0.5), Scripted(seconds=1.0)
    ours = engines("ours", prompts, decode=mine, moved=lambda data: int(data["receive_bytes"]))
    peer = engines("peer", prompts, decode=theirs)
    mine.others = [theirs]
    rows = {row.name: row for row in benchmark.hand_overs(ours, peer, Effort(quick=True))}
    assert list(rows) == [
        "vllm/handover/128_tokens/against_peer",
        "vllm/handover/128_tokens/arrived/against_peer",
        "vllm/bytes_a_token/128_tokens/against_peer",
    ]
    assert rows["vllm/bytes_a_token/128_tokens/against_peer"].ours == TOKEN_BYTES
    assert rows["vllm/bytes_a_token/128_tokens/against_peer"].peer == TOKEN_BYTES * BLOCK_SIZE / (BLOCK_SIZE + 2)
    mine.others = []  # both store it at first
    [hit] = benchmark.hits(ours, peer, Effort(quick=True))
    assert (hit.name, hit.ours, hit.peer) == ("vllm/hit/128_tokens/against_peer", 500.0, 1000.0)
    assert (hit.ratio, hit.met) == (0.5, True)


def test_a_peer_that_loads_within_a_step_or_finds_nothing_has_fewer_rows(prompts: Prompts) -> None:
    ours = engines("ours", prompts, decode=Scripted(seconds=0.5))
    peer = engines("peer", prompts, decode=Scripted(seconds=1.0), finds=False, loads_meanwhile=False)
    names = [row.name for row in benchmark.hand_overs(ours, peer, Effort(quick=True))]
    assert names == ["vllm/handover/128_tokens/against_peer", "vllm/bytes_a_token/128_tokens/against_peer"]
    assert benchmark.hits(ours, peer, Effort(quick=True)) == []


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"wrong": 1}, r"peer: after 130 tokens came \[\d+, .*\] \(length\), not \["),
        ({"failed": 2}, "peer: 130 of 130 tokens came from elsewhere, 2 blocks failed"),
        ({"missing": 3}, "peer: 127 of 130 tokens came from elsewhere, 0 blocks failed"),
    ],
)
def test_a_wrong_result_is_no_figure(prompts: Prompts, faults: dict[str, int], said: str) -> None:
    ours = engines("ours", prompts, decode=Scripted(seconds=0.5))
    peer = engines("peer", prompts, decode=Scripted(seconds=1.0, **faults))
    with pytest.raises(benchmark.WrongResultError, match=said):
        benchmark.hand_overs(ours, peer, Effort(quick=True))


def measured(monkeypatch: pytest.MonkeyPatch, *, lost: Sequence[str] = (), wrong: Sequence[str] = ()) -> list[Row]:
    """Measure all contenders, scripted; ``lost`` do not start, ``wrong`` compute other tokens."""

    @contextmanager
    def running(make: Any, _folder: Path, filled: Prompts) -> Iterator[Engines]:  # noqa: ANN401  a partial has no name
        name = make.__name__
        if name in lost:
            raise MissingPeerError(f"there is no {name}")
        decode = Scripted(seconds=1.0, wrong=int(name in wrong))
        made = engines(name, filled, decode=decode, prefill=name != "plain")
        monkeypatch.setattr(made, "wait_until_ready", lambda: None)
        steps = Steps([20.0, 30.0, 40.0], [10.0] * 3, [50_000.0] * 3)
        monkeypatch.setattr(made, "idle_steps", lambda _steps: steps)
        monkeypatch.setattr(made, "busy_steps", lambda _requests, _steps: steps)
        yield made

    monkeypatch.setattr(benchmark, "running_engines", running)
    monkeypatch.setattr(benchmark, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(benchmark, "MODEL", Path(sys.executable))
    return benchmark.measure(Effort(quick=True))


def test_what_does_not_run_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured(monkeypatch, lost=["nixl"], wrong=["example"])
    said = capsys.readouterr().err
    assert "not measured: nixl: there is no nixl" in said
    assert said.count("not measured: example: after 130 tokens came") == 2
    assert {row.name.rpartition("/")[2] for row in rows} == {
        "against_recompute",
        "nothing_to_do",
        "in_flight",
        "against_example",  # of its steps
        "against_lmcache",
    }
    assert {row.name.split("/")[1] for row in rows if row.name.endswith("against_example")} == {"step"}
    [idle] = [row for row in rows if row.name == "vllm/step/nothing_to_do"]
    assert (idle.ours, idle.ratio, idle.met) == (30.0, 30 / 50_000, True)


def test_kvferrys_own_wrong_result_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingPeerError, match="kvferry: after 130 tokens came"):
        measured(monkeypatch, wrong=["kvferry"])


def test_a_step_has_the_workers_part_within_it(monkeypatch: pytest.MonkeyPatch, prompts: Prompts) -> None:
    decode = Scripted(seconds=1.0)
    noted: list[Note] = [
        note
        for number in range(6)
        for note in (Step("worker", 5.0, 0, 0, number + 0.9), Step("scheduler", 2.0, 500_000, 1, number + 1.0))
    ]
    noted.insert(7, Step("worker", 99.0, 0, 0, 3.2))  # between two steps
    made = engines("one", prompts, decode=decode)
    monkeypatch.setattr(decode, "notes", lambda: noted)
    assert made.idle_steps(6) == Steps([7.0] * 3, [2.0] * 3, [500_000.0] * 3)
    assert Baseline(made.idle_steps(6), made.idle_steps(6)).idle.connector == [7.0] * 3
