"""What ``kvferry doctor`` has the daemon's own code try."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.daemon.trial import tried
from tests.kit.mooncake import mooncake_works


def configured(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "daemon.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        (
            '[peers]\nlisten = "tcp://198.51.100.1:7801"\ninsecure = true\n',
            "peers.listen",
            "cannot listen on tcp://198.51.100.1:7801",
        ),
        ('[peers]\nlisten = "tcp://node:7801"\n', "peers.listen", "numeric"),
        ('[metrics]\nlisten = "tcp://198.51.100.1:7801"\n', "metrics.listen", "tcp://198.51.100.1:7801"),
        ('[devices]\nopen = ["cuda:99"]\n', "devices.open", "CUDA"),
        *(("", key, "") for key in ("peers.listen", "network.address", "tiers.remote.address", "devices.open")),
    ],
)
def test_what_cannot_be_had_is_a_problem_if_it_is_configured(tmp_path: Path, text: str, key: str, problem: str) -> None:
    found = tried(configured(tmp_path, text), key).problem
    assert problem in found
    assert bool(found) is bool(problem)


NETWORK = '[network]\ntransport = "mooncake"\naddress = "::1"\n'
STORE = '[network]\naddress = "127.0.0.1"\n[tiers.remote]\ntransport = "mooncake_store"\naddress = "::1"\n'


@pytest.mark.full
@pytest.mark.parametrize(("text", "key"), [(NETWORK, "network.address"), (STORE, "tiers.remote.address")])
def test_bytes_go_through_the_configured_address(
    tmp_path: Path, require: Callable[[object, str], None], text: str, key: str
) -> None:
    require(mooncake_works(), "mooncake-transfer-engine-non-cuda and libibverbs1")
    command = [sys.executable, "-P", "-m", "kvferry.daemon.trial", str(configured(tmp_path, text)), key]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == {"problem": "", "remedy": ""}
