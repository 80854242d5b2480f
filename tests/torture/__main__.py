"""``python -m tests.torture``: kill, stop and starve daemons and engines at work, and check every byte and page.

The last line is ``torture: ok …``; otherwise what was found, with the seed and the folder of the logs, and status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.cann_simulator.build import NPU_PYTHON
from tests.torture.run import Run, Size
from tests.torture.sabotage import KINDS


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults are done (2)")
    parser.add_argument("--seed", type=int, help="repeat the faults and the load of a run")
    parser.add_argument(
        "--sabotage", choices=KINDS, default="", help="a daemon with a fault of its own: it must be found"
    )
    parser.add_argument("--engines", type=int, default=Size().engines)
    parser.add_argument("--daemons", type=int, default=Size().daemons)
    parser.add_argument("--workers", type=int, default=Size().workers, help="pieces of work at the same time")
    parser.add_argument("--pace", type=float, default=Size().pace, help="how much faster faults come")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    npu = NPU_PYTHON.exists() and not options.sabotage
    size = Size(60 * options.minutes, options.daemons, options.engines, options.workers, pace=options.pace, npu=npu)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-torture-"))
    again = f"python -m tests.torture --seed {seed} --minutes {options.minutes:g}"
    print(f"torture: seed={seed} (again: {again}), {'with' if npu else 'without'} an NPU, logs in {folder}", flush=True)
    run = Run(seed, size, folder, options.sabotage)
    asyncio.run(run.run())
    print("\n".join(run.report.lines()))
    if run.report.findings:
        for finding in run.report.findings[:20]:
            print(f"torture: FOUND {finding}")
        print(f"torture: FAILED seed={seed} logs={folder}")
        return 1
    shutil.rmtree(folder)
    print(run.report.closing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
