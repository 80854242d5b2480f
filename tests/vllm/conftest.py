"""These tests are run by ``make test-vllm``, in the environment that has vLLM; elsewhere there are none."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import kit
from tests.kit.daemons import Daemon
from tests.vllm.in_process import HOST_TIER, Plain


def pytest_configure(config: pytest.Config) -> None:
    """Ignore warnings of vLLM and of what it imports, where tests import it."""
    for one in ("ignore", "error:::kvferry", "error:::tests"):
        config.addinivalue_line("filterwarnings", one)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave them out where there is no vLLM."""
    return None if importlib.util.find_spec("vllm") or collection_path.suffix != ".py" else True


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """Return what vLLM without a connector answers."""
    with contextlib.ExitStack() as stack:
        yield Plain(tmp_path_factory.mktemp("plain"), stack)


@pytest.fixture(scope="module")
def kept_daemon() -> Iterator[Daemon]:
    """Return a daemon with a host tier, whose pools outlive it."""
    with kit.daemon(HOST_TIER, keep=True) as daemon:
        yield daemon
