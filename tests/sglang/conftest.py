"""These tests are run by ``make test-sglang``, in the environment that has SGLang; elsewhere there are none."""

from __future__ import annotations

import functools
import importlib.util
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.folders import SMOLLM2
from tests.sglang.servers import Expected, RoomWatch, ask_plain_server


def pytest_configure(config: pytest.Config) -> None:
    """Ignore warnings of SGLang and of what it imports, where tests import it."""
    for one in ("ignore", "error:::kvferry", "error:::tests"):
        config.addinivalue_line("filterwarnings", one)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave them out where there is no SGLang."""
    return None if importlib.util.find_spec("sglang") or collection_path.suffix != ".py" else True


@pytest.fixture(scope="session")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Return what a plain server of a model answers, which is run once."""
    long = any(item.get_closest_marker("long") for item in request.session.items)
    return functools.cache(lambda model: ask_plain_server(tmp_path_factory.mktemp(f"plain-{model}"), model, long=long))


@pytest.fixture(scope="session")
def expected(answers: Callable[[str], Expected]) -> Expected:
    """Return what a plain server of SmolLM2 answers."""
    return answers(SMOLLM2)


@pytest.fixture(scope="module")
def kept_daemon() -> Iterator[Daemon]:
    """Return a daemon whose pools outlive it."""
    with kit.daemon(keep=True) as daemon:
        yield daemon


@pytest.fixture
def watch(kept_daemon: Daemon) -> Iterator[RoomWatch]:
    with RoomWatch(kept_daemon.runtime_dir) as one:
        yield one


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name for a server's pools that no other test has, and that shows the test's."""
    shown = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:50]
    return f"{shown}-{zlib.crc32(request.node.name.encode()):08x}"
