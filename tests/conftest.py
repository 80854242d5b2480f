"""What every test may use: the device of the run, the event loops, requirements that CI must meet, hypothesis profiles.

``--device npu:0`` runs the tests marked ``any_device`` and those that are for devices alone: on a simulated one, unless
CANN is installed. The host's run leaves out ``tests/npu``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import structlog
from blockbuster import blockbuster_ctx

import kvferry.clients
import kvferry.daemon
from kvferry.clients import Client
from kvferry.protocol.ids import HOST
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE
from tests.kit.simulated_host import SimulatedHost
from tests.run import PROGRESS_FD

IN_CI: Final = os.environ.get("CI") == "true"
EXIT_S: Final = 30.0

hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if IN_CI else "dev")

UVLOOP: Final = pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")
DEBUG_LOOP: Final = pytest.param(("asyncio", {"use_uvloop": False, "debug": True}), id="asyncio-debug")

LONG: Final = (
    "tests/demo/test_command",
    "tests/benchmarks/test_benchmarks",
    "tests/hosts/",
    "tests/transfer/test_breaking_off",
)
DEVICE_FOLDERS: Final = tuple(
    Path(__file__).parent / name for name in ("npu", "cann_simulator", "sglang/npu", "vllm/npu")
)
simulated_host = pytest.StashKey[SimulatedHost | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device`` and ``--full``."""
    parser.addoption("--device", default=HOST, help="where pools' memory is: host, npu:0, cuda:0")
    parser.addoption("--full", action="store_true", help="run all tests, with four times the examples")


def pytest_configure(config: pytest.Config) -> None:
    """Fix the device and how much is tried, before any test's module is imported."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background; what tests start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    plain_logs()
    DEVICE.name, DEVICE.full = config.getoption("--device"), config.getoption("--full")
    hypothesis.settings.register_profile("run", DEVICE.examples(100))
    hypothesis.settings.load_profile("run")
    fd = os.environ.get(PROGRESS_FD)
    if fd is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(int(fd)))
    config.stash[simulated_host] = SimulatedHost.start() if DEVICE.name.startswith("npu:") else None


class Progress:
    """Says to ``tests.run`` how far this run is, a line each: ``total N``, ``at FILE``, ``done``, ``failed TEST``."""

    def __init__(self, fd: int) -> None:
        self._out = os.fdopen(fd, "w", buffering=1)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say how many tests there are; with xdist, only its processes know."""
        if session.items:
            self._say("total", str(len(session.items)))

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Say how many tests there are."""
        self._say("total", str(len(ids)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say whose turn it is."""
        self._say("at", nodeid.partition("::")[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say what ended, and what failed of which cause."""
        if report.when == "teardown":
            self._say("done")
        if report.failed:
            self._say("failed", f"{report.nodeid}: {report.longreprtext.strip().rpartition(chr(10))[2]}")

    def _say(self, *words: str) -> None:
        self._out.write(" ".join(words) + "\n")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the simulated devices have left; end, also where Python would wait for a failed test's threads."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True)
    host = config.stash.get(simulated_host, None)
    if host is not None:
        host.close()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave modules out that are for devices alone: on the host some cannot even be imported."""
    return True if DEVICE.name == HOST and collection_path in DEVICE_FOLDERS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that are for the device; those of long files come first, since processes share files out."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    left_out = [item for item in items if not _is_for_this_run(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_for_this_run(item: pytest.Item) -> bool:
    if item.get_closest_marker("full") is not None and not DEVICE.full:
        return False
    return not _is_for_devices_only(item) if DEVICE.name == HOST else _is_for_devices(item)


def _is_for_devices(item: pytest.Item) -> bool:
    if item.get_closest_marker("host_only") is not None:
        return False
    return _is_for_devices_only(item) or item.get_closest_marker("any_device") is not None


def _is_for_devices_only(item: pytest.Item) -> bool:
    in_folder = any(folder in item.path.parents for folder in DEVICE_FOLDERS)
    return in_folder or item.get_closest_marker("device_only") is not None


@pytest.fixture(scope="session")
def device() -> str:
    """Return the name of the device that this run is for."""
    return DEVICE.name


@pytest.fixture(scope="session")
def simulator(request: pytest.FixtureRequest) -> Simulator:
    """Return the simulator that this process, and every one that it starts, is on; only on a simulated device."""
    host = request.config.stash[simulated_host]
    if host is None:
        pytest.skip("this device is a real one: its faults cannot be ordered")
    return host.simulator


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Return a daemon that serves a module's tests, with the module's ``CONFIG`` and ``TUNING`` if it has them."""
    config, tuning = getattr(request.module, "CONFIG", ""), getattr(request.module, "TUNING", None)
    with kit.daemon(config, tuning=tuning) as one:
        yield one


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """Return a session of an engine with the module's daemon."""
    with Client.connect(daemon.runtime_dir, name="engine") as one:
        yield one


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Client]:
    """Return another engine's session."""
    with Client.connect(daemon.runtime_dir, name="other") as one:
        yield one


@pytest.fixture(autouse=True)
def _tidy_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give back what a test has left on the device; fail it where its work was in no order, or would never end."""
    yield
    DEVICE.tidy()
    host = request.config.stash[simulated_host]
    if host is not None:
        races = host.new_races()
        assert not races, races
        overdue = host.new_overdue()
        assert not overdue, overdue


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked ``anyio`` on asyncio's loop in debug mode, and those marked ``both_loops`` on uvloop, too."""
    if "anyio_backend" in metafunc.fixturenames:
        both = metafunc.definition.get_closest_marker("both_loops") is not None
        metafunc.parametrize("anyio_backend", [UVLOOP, DEBUG_LOOP] if both else [DEBUG_LOOP], indirect=True)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Return the event loop of a test marked ``anyio``."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


def plain_logs() -> None:
    """Log as structlog does by itself, but tracebacks as Python prints them: drawn by rich, each costs seconds."""
    structlog.reset_defaults()
    *others, _ = structlog.get_config()["processors"]
    structlog.configure([*others, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)])


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Undo what a test that runs the daemon's code in this process has set."""
    yield
    plain_logs()


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a call of the daemon's or the clients' code that blocks a running event loop fail its test."""
    if "anyio_backend" not in request.fixturenames:
        yield
        return
    with blockbuster_ctx(scanned_modules=[kvferry.clients, kvferry.daemon]) as blockbuster:
        blockbuster.functions["os.read"].can_block_in("pools/host/memory.py", "read_file")  # the kernel's own
        yield


@pytest.fixture(scope="session")
def require() -> Callable[[object, str], None]:
    """Return ``require(condition, reason)``: without the condition the test is skipped; in CI it fails."""

    def check(condition: object, reason: str) -> None:
        if condition:
            return
        if IN_CI:
            pytest.fail(f"CI must provide this: {reason}")
        pytest.skip(reason)

    return check
