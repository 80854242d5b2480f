"""The examples do what they say, as processes: whoever copies one starts from what works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.clients import Client, new_request_id
from tests.kit.daemons import Daemon

EXAMPLES = Path(__file__).parents[1] / "examples"
SOON_S = 120.0
CONFIG = "[tiers]\nhost_bytes = 1048576\n"
REQUESTS = 8  # of three pages each; the pools have sixteen


def started(daemon: Daemon, script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments, "--runtime-dir", str(daemon.runtime_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def lines(example: subprocess.Popen[str]) -> list[str]:
    """Return what an example has printed; it must have ended well."""
    printed, _ = example.communicate(timeout=SOON_S)
    assert example.returncode == 0, printed
    return printed.splitlines()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("scheduler.py", "async_engine.py"), pytest.param("async_engine.py", "scheduler.py", marks=pytest.mark.full)],
)
def test_two_engines_hand_requests_over(daemon: Daemon, prefill: str, decode: str) -> None:
    request_ids = [new_request_id() for _ in range(REQUESTS)]
    engines = [started(daemon, prefill, "prefill", *request_ids), started(daemon, decode, "decode", *request_ids)]
    sent, received = (lines(one) for one in engines)
    assert sorted(sent) == sorted(f"{one} sent" for one in request_ids)
    assert sorted(received) == sorted(f"{one} received token={int(one[:4], 16)} identical=True" for one in request_ids)
    with Client.connect(daemon.runtime_dir) as looker:
        status = looker.status()
        assert {(one.pool, one.free) for one in status.pools} >= {("prefill", 16), ("decode", 16)}


@pytest.mark.full
def test_tiers(daemon: Daemon) -> None:
    resumed, loaded = lines(started(daemon, "tiers.py"))
    assert resumed.endswith("identical=True")
    assert loaded == "loaded 2 of 4 blocks, identical=True"


@pytest.mark.full
def test_what_is_wrong_is_said_with_its_remedy(daemon: Daemon) -> None:
    example = started(daemon, "scheduler.py", "prefill", "abcd")
    printed, _ = example.communicate(timeout=SOON_S)
    assert example.returncode == 1
    assert "InvalidFieldError: INVALID_FIELD [request_id]: Expected 32 hexadecimal digits" in printed
