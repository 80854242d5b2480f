"""Run programs on the CANN simulator, watch them, and make things go wrong while they run.

::

    simulator = Simulator(tmp_path)
    subprocess.run([NPU_PYTHON, "program.py"], env=os.environ | simulator.environment(), timeout=60)
    assert simulator.races() == []

A simulator is a folder: all processes that are started with one environment are on one simulated host, share its
devices and their memory, and take part in one ordering record. Everything but the versions may be changed while they
run. What the simulator does and cannot tell is in README.md.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.cann_simulator.build import NPU_PYTHON, built_simulator

__all__ = ["LOST_HEARTBEAT", "NPU_PYTHON", "Access", "Race", "Simulator"]

GIB: Final = 1 << 30

# What calls on a lost device return. torch_npu has no class for it: it raises RuntimeError with "error code is 507010".
# 107022, 507053 and 507056 it words as FORCE STOP, UCE ERROR and HCCS LINK ERROR.
LOST_HEARTBEAT: Final = 507010

WAIT_LIMIT_MS: Final = 15_000  # so that what waits for a dead process is seen as such, before a test's own limit

ALL: Final = (1 << 64) - 1  # faults until they are cleared

# The fields of Control in shared_state.h, 8 bytes each, with how many there are of a name.
_MAX_DEVICES: Final = 16
_MAX_RULES: Final = 16
_MAX_PROCESSES: Final = 64
FIELDS: Final = {
    "magic": 1,
    "devices": 1,
    "memory_bytes": _MAX_DEVICES,
    "lost_code": _MAX_DEVICES,
    "failing_allocations": 1,
    "failing_copies": 1,
    "failing_kernels": 1,
    "copy_us": 3,
    "kernel_us": 1,
    "megabytes_per_s": 3,
    "wait_limit_ms": 1,
    "allocations_offset": 1,
    "allocation_bytes": 1,
    "allocations": 1,
    "copied_bytes": 3,
    "no_peers": 1,
    "synchronized": 1,
    "rules": _MAX_RULES * 4,
    "tasks": _MAX_PROCESSES * 3,
    "teardown_ms": 1,
    "teardowns": _MAX_PROCESSES * 4,
}
_MAGIC: Final = 0x314D49534E4E4143
_WORD: Final = struct.Struct("<Q")
_RULE: Final = struct.Struct("<4Q")  # process, stream, delay_us, held
_TASKS: Final = struct.Struct("<3Q")  # process, submitted, completed
_ALLOCATION: Final = struct.Struct("<QQII")  # id, size, device, holder_count
_HOLDER: Final = struct.Struct("<iiQ")  # process, descriptor, started
_TEARDOWN: Final = struct.Struct("<4Q")  # process, started, undertaker, undertaker_started


_QUIET: Final = {"ASCEND_GLOBAL_LOG_LEVEL": "3", "ASCEND_SLOG_PRINT_TO_STDOUT": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Access(NamedTuple):
    """One side of a race: bytes ``begin`` to ``end`` of the memory, and who touched them."""

    operation: str  # as "aclrtMemcpyAsync" or "aclnnIndexSelect"
    process: int
    stream: int  # the value of torch.npu.Stream().npu_stream in that process; 0: the host itself
    writes: bool
    begin: int
    end: int


class Race(NamedTuple):
    """Two accesses to the same bytes, at least one a write, that nothing puts in an order."""

    memory: str  # "device" or "host"
    device: int  # -1 for host memory
    allocation: int
    first: Access
    second: Access


class Simulator:
    """One simulated host with its NPUs; ``folder`` is made if need be and should be new.

    Args:
        folder: where the processes find their shared state.
        devices: number of devices, 1 to 16.
        memory_bytes: of each device.
        driver, cann, soc: what torch_npu is told; a driver below 25.5.0 does not know registered memory.
        ordering: record accesses and report races; off for measurements.
    """

    def __init__(
        self,
        folder: Path,
        *,
        devices: int = 2,
        memory_bytes: int = 4 * GIB,
        driver: str = "25.5.0",
        cann: str = "9.0.0",
        soc: str = "Ascend910B3",
        ordering: bool = True,
    ) -> None:
        if not 1 <= devices <= _MAX_DEVICES:
            raise ValueError(f"devices: 1 to {_MAX_DEVICES}, not {devices}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder: Final = folder
        self._strings = {"DRIVER": driver, "CANN": cann, "SOC": soc, "ORDERING": str(int(ordering))}
        self._offsets: dict[str, int] = {}
        size_bytes = 0
        for name, count in FIELDS.items():
            self._offsets[name] = size_bytes
            size_bytes += 8 * count
        with (folder / "control").open("w+b") as file:
            file.truncate(size_bytes)
            self._control = mmap.mmap(file.fileno(), size_bytes)
        self._set("devices", devices)
        self._set("wait_limit_ms", WAIT_LIMIT_MS)
        for device in range(_MAX_DEVICES):
            self._set("memory_bytes", memory_bytes, device)
        self._set("magic", _MAGIC)

    def __repr__(self) -> str:
        """Show the folder and what is going on."""
        return f"Simulator({str(self.folder)!r}, pending={self.pending()})"

    def environment(self) -> dict[str, str]:
        """Return what a process needs in its environment, besides what it has; builds the libraries if need be.

        Raises:
            CannotBuildError: a compiler or a wheel is missing; see build.py.
        """
        libraries = os.pathsep.join(filter(None, [str(built_simulator()), os.environ.get("LD_LIBRARY_PATH")]))
        own = {f"CANN_SIMULATOR_{name}": value for name, value in self._strings.items()}
        return {**_QUIET, **own, "CANN_SIMULATOR_DIR": str(self.folder), "LD_LIBRARY_PATH": libraries}

    # --- what happened

    def races(self) -> list[Race]:
        """Return the races found so far, one for each pair of operations on a pair of streams."""
        try:
            lines = (self.folder / "races.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [_race(json.loads(line)) for line in lines]

    def overdue(self) -> list[str]:
        """Return the waits so far that have ended at the limit, a line each: on a device they never end."""
        try:
            return (self.folder / "overdue").read_text().splitlines()
        except FileNotFoundError:
            return []

    @contextmanager
    def without_peers(self) -> Iterator[None]:
        """Let no device copy from another one meanwhile; processes ask once."""
        self._set("no_peers", 1)
        try:
            yield
        finally:
            self._set("no_peers", 0)

    def copied_bytes(self, kind: Literal["to device", "to host", "on devices"]) -> int:
        """Return how many bytes processes have copied, within a device and between two counted alike."""
        return self._get("copied_bytes", ("to device", "to host", "on devices").index(kind))

    def synchronized(self) -> int:
        """Return how often processes have waited for all of a stream or a device."""
        return self._get("synchronized")

    def memory_used(self, device: int) -> int:
        """Return the bytes in use on a device by processes that live or are not taken apart yet."""
        undertakers = dict(self._undertakers())
        present = lambda holder: _alive(holder) or _alive(undertakers.get(holder, (0, 0)))  # noqa: E731
        return sum(
            size for owner, size, holders in self._allocations() if owner == device and any(map(present, holders))
        )

    def submitted(self, process: int = 0) -> int:
        """Return how many tasks a process has submitted so far; 0: all processes together.

        torch_npu submits on a thread of its own, so a call's tasks come a little after the call.
        """
        return sum(submitted for owner, submitted, _ in self._tasks() if process in {0, owner})

    def pending(self, process: int = 0) -> int:
        """Return how many tasks are submitted and not complete, of a process or of all that live."""
        return sum(
            submitted - completed
            for owner, submitted, completed in self._tasks()
            if process in {0, owner} and Path(f"/proc/{owner}").exists()
        )

    def wait_until_pending(self, count: int, process: int = 0, timeout_s: float = 20.0) -> None:
        """Return when at least so many tasks are queued; for programs whose tasks are held.

        Raises:
            TimeoutError: that did not come.
        """
        _wait(lambda: self.pending(process) >= count, f"{count} tasks pending", timeout_s)

    def wait_until_done(self, count: int, process: int = 0, timeout_s: float = 20.0) -> None:
        """Return when so many tasks have been submitted (as submitted() counts) and none is pending.

        Raises:
            TimeoutError: that did not come.
        """
        done = lambda: self.submitted(process) >= count and not self.pending(process)  # noqa: E731
        _wait(done, f"{count} tasks done", timeout_s)

    # --- faults

    def out_of_memory(self, count: int = ALL) -> None:
        """Let the next ``count`` allocations of device memory fail, or with 0 no more.

        torch_npu's allocator tries again twice before it raises torch.OutOfMemoryError.
        """
        self._set("failing_allocations", count)

    def fail_copies(self, count: int = ALL) -> None:
        """Let the next ``count`` asynchronous copies fail when they run: the stream's next synchronisation raises."""
        self._set("failing_copies", count)

    def fail_kernels(self, count: int = ALL) -> None:
        """Let the next ``count`` operators fail when they run."""
        self._set("failing_kernels", count)

    def lose_device(self, device: int = 0, code: int = LOST_HEARTBEAT) -> None:
        """Let every call on a device return ``code``; its tasks fail, held ones too. ``code`` 0 brings it back."""
        self._set("lost_code", code, device)

    # --- time

    def slow_copies(self, *, to_device_us: int = 0, to_host_us: int = 0, on_device_us: int = 0) -> None:
        """Add microseconds to each asynchronous copy, by direction."""
        for index, delay_us in enumerate((to_device_us, to_host_us, on_device_us)):
            self._set("copy_us", delay_us, index)

    def slow_kernels(self, delay_us: int) -> None:
        """Add microseconds to each operator."""
        self._set("kernel_us", delay_us)

    def limit_copies(self, *, to_device: int = 0, to_host: int = 0, on_device: int = 0) -> None:
        """Let copies run at no more than so many MB/s (10**6 bytes), by direction; 0: no limit."""
        for index, megabytes_per_s in enumerate((to_device, to_host, on_device)):
            self._set("megabytes_per_s", megabytes_per_s, index)

    def slow_stream(self, process: int, stream: int, delay_us: int) -> None:
        """Add microseconds to each task of a stream, given by its ``npu_stream``; 0 for all streams, or processes."""
        self._set_rule(process, stream, delay_us, held=False)

    def hold(self, process: int = 0, stream: int = 0) -> None:
        """Keep tasks queued from now on, all of them or those of a process or a stream, until release()."""
        self._set_rule(process, stream, 0, held=True)

    def release(self) -> None:
        """Let all held and slowed streams run on."""
        for index in range(_MAX_RULES):
            self._write_rule(index, (0, 0, 0, 0))

    @contextmanager
    def held(self, process: int = 0, stream: int = 0) -> Iterator[None]:
        """Hold tasks within the block."""
        self.hold(process, stream)
        try:
            yield
        finally:
            self.release()

    def limit_waits(self, limit_ms: int = WAIT_LIMIT_MS) -> None:
        """Let a task fail that waits longer for an event or a word; a device would let it wait for ever.

        While a test holds tasks of a process that lives, all may wait.
        """
        self._set("wait_limit_ms", limit_ms)

    def late_teardown(self, late_ms: int) -> None:
        """Let processes be taken apart so long after their end; 0, as at first: at once.

        Until then their device memory counts as used, their handles and keys can be imported, and copies that they had
        queued are still to land: at the end of that time, up to the first that waits for what does not come, or a
        kernel. For processes that open a device from now on; the time is read when one ends.
        """
        self._set("teardown_ms", late_ms)

    # --- the two files

    def _get(self, name: str, index: int = 0) -> int:
        value: int = _WORD.unpack_from(self._control, self._offsets[name] + 8 * index)[0]
        return value

    def _set(self, name: str, value: int, index: int = 0) -> None:
        if not 0 <= index < FIELDS[name]:
            raise ValueError(f"{name}: there is no number {index}")
        _WORD.pack_into(self._control, self._offsets[name] + 8 * index, value)

    def _tasks(self) -> Iterator[tuple[int, int, int]]:
        for slot in range(_MAX_PROCESSES):
            process, submitted, completed = _TASKS.unpack_from(
                self._control, self._offsets["tasks"] + _TASKS.size * slot
            )
            if process:
                yield process, submitted, completed

    def _undertakers(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for slot in range(_MAX_PROCESSES):
            at = self._offsets["teardowns"] + _TEARDOWN.size * slot
            process, started, undertaker, undertaker_started = _TEARDOWN.unpack_from(self._control, at)
            if process:
                yield (process, started), (undertaker, undertaker_started)

    def _set_rule(self, process: int, stream: int, delay_us: int, *, held: bool) -> None:
        rules = [_RULE.unpack_from(self._control, self._offsets["rules"] + _RULE.size * i) for i in range(_MAX_RULES)]
        same = [i for i, rule in enumerate(rules) if rule[:2] == (process, stream) and any(rule[2:])]
        free = [i for i, rule in enumerate(rules) if not any(rule)]
        if not same and not free:
            raise ValueError(f"there are {_MAX_RULES} rules for streams already: call release()")
        index = (same or free)[0]
        before = rules[index]
        self._write_rule(index, (process, stream, delay_us or before[2], int(held) or before[3]))

    def _write_rule(self, index: int, rule: tuple[int, int, int, int]) -> None:
        _RULE.pack_into(self._control, self._offsets["rules"] + _RULE.size * index, *rule)

    def _allocations(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Yield device, size and the holders' process ids and start times of each allocation."""
        try:
            with (self.folder / "state").open("rb") as file:
                file.seek(self._get("allocations_offset"))
                table = file.read(self._get("allocation_bytes") * self._get("allocations"))
        except FileNotFoundError:
            return
        for start in range(0, len(table), self._get("allocation_bytes") or 1):
            number, size, device, holder_count = _ALLOCATION.unpack_from(table, start)
            if number == 0:
                continue
            first = start + _ALLOCATION.size
            holders = [_HOLDER.unpack_from(table, first + _HOLDER.size * i) for i in range(holder_count)]
            yield device, size, [(process, started) for process, _, started in holders]


def _wait(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.001)


def _alive(holder: tuple[int, int]) -> bool:
    process, started = holder
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and int(fields[19]) == started


def _race(record: dict[str, object]) -> Race:
    def side(name: str) -> Access:
        fields = record[name]
        assert isinstance(fields, dict)
        return Access(**fields)

    device, allocation = record["device"], record["allocation"]
    assert isinstance(device, int)
    assert isinstance(allocation, int)
    return Race(str(record["memory"]), device, allocation, side("first"), side("second"))
