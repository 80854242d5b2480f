"""The simulated devices of a run with ``--device npu:N``: this process is on them, and so is every one that it starts.

The loader reads LD_LIBRARY_PATH when a process begins, so whoever starts the tests has to set it; ``make test`` does.
On a machine with CANN nothing is simulated: the tests are on its devices.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final, Self

import pytest

from tests.cann_simulator.build import CACHE
from tests.cann_simulator.simulator import Race, Simulator

CANN_VARIABLES: Final = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
HOW_TO_START: Final = """\
this process is neither on a machine with CANN nor on the CANN simulator; make test starts it right, or

  export LD_LIBRARY_PATH=$(.venv/bin/python -m tests.cann_simulator.build)
  .venv-npu/bin/python -m pytest --device npu:0"""


class SimulatedHost:
    """Two devices of 4 GiB, for this process and its children."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = 0
        self._seen_overdue = 0
        self.simulator = Simulator(folder)  # what they can be made to do
        os.environ.update(self.simulator.environment())

    def __repr__(self) -> str:
        """Show the simulator."""
        return f"<SimulatedHost {self.simulator!r}>"

    @classmethod
    def start(cls) -> Self | None:
        """Return the simulated host of this process; None where CANN is installed.

        Raises:
            UsageError: this process was started on neither.
        """
        on_path = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        if not any(CACHE in Path(one).absolute().parents for one in on_path if one):
            if any(name in os.environ for name in CANN_VARIABLES):
                return None
            raise pytest.UsageError(HOW_TO_START)
        return cls(Path(tempfile.mkdtemp(prefix="kvferry-cann-")))

    def new_races(self, killed: Collection[int] = ()) -> list[Race]:
        """Return the races that were found since the last call.

        Where this process shows the last update of a ``killed`` daemon in its place, the record has no order of that,
        of the daemon's own late copies, and of what the next daemon reads: the bytes are the same.
        """
        races = self.simulator.races()
        seen, self._seen = self._seen, len(races)
        return [race for race in races[seen:] if not (killed and _is_same_update(race, killed))]

    def new_overdue(self) -> list[str]:
        """Return the waits that would never end on a device and were found since the last call."""
        overdue = self.simulator.overdue()
        seen, self._seen_overdue = self._seen_overdue, len(overdue)
        return overdue[seen:]

    def close(self) -> None:
        """Forget all that processes have left."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_same_update(race: Race, killed: Collection[int]) -> bool:
    both = (race.first, race.second)
    return race.first.process != race.second.process and all(
        one.process in killed or one.process == os.getpid() for one in both if one.writes
    )
