"""Running a benchmark where torch sees a device: in the NPU's environment, on the simulator where there is no device.

``make bench`` runs without torch_npu, which has an environment of its own. So a benchmark of a device is started as
a process of its own with what it needs, and hands its rows back. What was simulated says so in every row: there a ratio
shows what waits for what, never how fast a device is.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.measure import Effort, Row
from benchmarks.network import MissingPeerError
from tests.cann_simulator.build import NPU_PYTHON, CannotBuildError
from tests.cann_simulator.simulator import Simulator

TIMEOUT_S: Final = 300
SIMULATED: Final = "simulated: a missing wait or a shared stream shows, no device's speed does"

# Slow enough that the simulator's own work on a shared machine hardly counts.
KERNEL_US: Final = 4000
COPY_MEGABYTES_A_SECOND: Final = 400


class Device(NamedTuple):
    """Where a benchmark runs: the device's name as torch counts, and whether it is only simulated."""

    device: str
    simulated: bool

    @property
    def note(self) -> str:
        """Return what every row says of it."""
        return SIMULATED if self.simulated else f"on {self.device}"


def measured_on_device(module: str, effort: Effort, *, kernel_us: int = KERNEL_US) -> list[Row]:
    """Return the rows of ``module.measure_on(device, effort)``, run in an environment that has the device.

    Args:
        module: its name in ``benchmarks``.
        effort: how much, and on which device.
        kernel_us: what the simulator adds to each kernel.

    Raises:
        MissingPeerError: neither the device nor what simulates it is there; says what is missing.
    """
    kind = effort.device.partition(":")[0]
    if kind != "npu":
        return _run([sys.executable], Device(effort.device, simulated=False), module, effort, {})
    if not NPU_PYTHON.exists():
        raise MissingPeerError(f"there is no {NPU_PYTHON}: `make test` sets it up")
    if any(Path("/dev").glob("davinci[0-9]*")):
        return _run([str(NPU_PYTHON)], Device(effort.device, simulated=False), module, effort, {})
    with _simulated(kernel_us) as environment:
        return _run([str(NPU_PYTHON)], Device(effort.device, simulated=True), module, effort, environment)


@contextmanager
def _simulated(kernel_us: int) -> Iterator[Mapping[str, str]]:
    """Yield the environment of a simulated host whose devices are slow."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        simulator = Simulator(Path(folder), ordering=False)
        simulator.slow_kernels(kernel_us)
        speed = COPY_MEGABYTES_A_SECOND
        simulator.limit_copies(to_device=speed, to_host=speed, on_device=speed)
        try:
            yield simulator.environment()
        except CannotBuildError as cause:
            raise MissingPeerError(str(cause)) from cause


def _run(
    python: Sequence[str], device: Device, module: str, effort: Effort, environment: Mapping[str, str]
) -> list[Row]:
    command = [*python, "-m", "benchmarks.on_device", module, device.device]
    command += ["--simulated"] * device.simulated + ["--quick"] * effort.quick
    done = subprocess.run(  # noqa: S603  our own module
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise MissingPeerError(f"{module} on {device.device}: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark here and print its rows as JSON, on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_device")
    parser.add_argument("module")
    parser.add_argument("device")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    module = importlib.import_module(f"benchmarks.{options.module}")
    rows = module.measure_on(Device(options.device, options.simulated), Effort(options.quick, options.device))
    print(msgspec.json.encode(rows).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
