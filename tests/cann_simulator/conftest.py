"""A simulator and a process on it, for each module of tests; skipped where torch_npu or g++ is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cann_simulator.build import CannotBuildError, built_simulator
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Race, Simulator


@pytest.fixture(scope="session")
def _libraries(require: Callable[[object, str], None]) -> None:
    reason = ""
    try:
        built_simulator()
    except CannotBuildError as error:
        reason = str(error)
    require(not reason, f"the CANN simulator: {reason}")


@pytest.fixture(scope="module")
def simulator(_libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    """Return the simulated host of the tests of a module: two devices of 1 GiB."""
    return Simulator(tmp_path_factory.mktemp("simulator"), memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def child(simulator: Simulator) -> Iterator[Child]:
    """Return a process on device 0 that all tests of a module use."""
    with Child(simulator) as process:
        yield process


@pytest.fixture
def new_races(simulator: Simulator) -> Callable[[], list[Race]]:
    """Return a function for the races found since the test began."""
    before = len(simulator.races())
    return lambda: simulator.races()[before:]
