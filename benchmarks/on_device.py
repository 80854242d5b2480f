"""Running a benchmark where torch sees a device: in the NPU's environment, on the simulator where there is no device.

``make bench`` runs without torch_npu, which has an environment of its own. So a benchmark of a device is started as
a process of its own with what it needs, and hands its rows back. What was simulated says so in every row: there a ratio
shows what waits for what, never how fast a device is.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.measure import Effort, MissingPeerError, Row
from tests.cann_simulator.build import NPU_PYTHON, CannotBuildError
from tests.cann_simulator.simulator import Simulator

TIMEOUT_S: Final = 300
SIMULATED: Final = "simulated: a missing wait or a shared stream shows, no device's speed does"
COPY_MEGABYTES_A_SECOND: Final = 400
"""Slow enough that the simulator's own work on a shared machine hardly counts."""


class Device(NamedTuple):
    """Where a benchmark runs: the device's name as torch counts, and whether it is only simulated."""

    name: str
    simulated: bool

    @property
    def note(self) -> str:
        """Return what every row says of it."""
        return SIMULATED if self.simulated else f"on {self.name}"


def measured_on_device(module: str, effort: Effort, *, kernel_us: int) -> list[Row]:
    """Return the rows of ``module.measure_on(device, effort)``, run in an environment that has the device.

    The simulator, where there is no device, adds ``kernel_us`` to each kernel.

    Raises:
        MissingPeerError: neither the device nor what simulates it is there; says what is missing.
    """
    if not effort.device.startswith("npu:"):
        return _run(sys.executable, module, effort, simulated=False)
    if not NPU_PYTHON.exists():
        raise MissingPeerError(f"there is no {NPU_PYTHON}: `make test` sets it up")
    if any(Path("/dev").glob("davinci[0-9]*")):
        return _run(str(NPU_PYTHON), module, effort, simulated=False)
    with _simulator(kernel_us) as environment:
        return _run(str(NPU_PYTHON), module, effort, environment, simulated=True)


@contextmanager
def _simulator(kernel_us: int) -> Iterator[Mapping[str, str]]:
    """Yield the environment of a simulated host whose devices are slow."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        simulator = Simulator(Path(folder), ordering=False)
        simulator.slow_kernels(kernel_us)
        speed = COPY_MEGABYTES_A_SECOND
        simulator.limit_copies(to_device=speed, to_host=speed, on_device=speed)
        try:
            environment = simulator.environment()
        except CannotBuildError as cause:
            raise MissingPeerError(str(cause)) from cause
        yield environment


def _run(
    python: str, module: str, effort: Effort, environment: Mapping[str, str] | None = None, *, simulated: bool
) -> list[Row]:
    given = [msgspec.json.encode(one).decode() for one in (effort, simulated)]
    command = [python, "-m", "benchmarks.on_device", module, *given]
    done = subprocess.run(  # noqa: S603  our own module
        command, env=os.environ | (environment or {}), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise MissingPeerError(f"{module} on {effort.device}: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])


def main(module: str, given: str, simulated: str) -> None:
    """Run one benchmark here and print its rows as JSON, on the last line."""
    effort = msgspec.json.decode(given, type=Effort)
    device = Device(effort.device, msgspec.json.decode(simulated, type=bool))
    rows = importlib.import_module(f"benchmarks.{module}").measure_on(device, effort)
    print(msgspec.json.encode(rows).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
