"""``python -m benchmarks.flame FILE``: a flame graph of the daemon while one small page after another is handed over.

py-spy looks at the daemon a thousand times a second without stopping it, and draws what its control loop did. What is
wide took long: below ``_handle`` is what messages cost, below ``_flush`` the kernel, which wakes whoever is answered.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pools import Pair
from benchmarks.processes import two_engines
from benchmarks.transfer import spec

SECONDS = 8
SAMPLES_A_SECOND = 1000
WARM_UP = 200
END_TIMEOUT_S = 30
TITLE = "kvferry: the daemon while pages of 16 KiB are handed over, one after another"
DESCRIPTION = "Draw where the daemon's time goes while pages of 16 KiB are handed over, one after another."


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; return the exit status: 1 without py-spy, or py-spy's own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flame", description=DESCRIPTION)
    parser.add_argument("file", type=Path, metavar="FILE", help="where the SVG goes")
    file = parser.parse_args(arguments).file
    profiler = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if profiler is None:
        print("py-spy is missing: pip install py-spy", file=sys.stderr)
        return 1
    with two_engines() as engines, Pair(engines, spec(1, layers=1, kv_heads=1, head_dim=16)) as pair:
        for _ in range(WARM_UP):
            pair.transfer_s()
        options = ("--nonblocking", "--duration", str(SECONDS), "--rate", str(SAMPLES_A_SECOND))
        command = [profiler, "record", *options, "--output", str(file), "--pid", str(engines[0].status().pid)]
        recording = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        count = 0
        while recording.poll() is None:
            pair.transfer_s()
            count += 1
        print(f"{file}: {count} pages while py-spy looked, for {SECONDS} s")
        status = recording.wait(END_TIMEOUT_S)
    if not status:
        file.write_text(cleaned(file.read_text(errors="replace")))
    return status


def cleaned(drawing: str) -> str:
    """Return a flame graph without this machine's paths, and without what py-spy read while it changed."""
    titled = re.sub(r'(<text id="title"[^>]*>)[^<]*', rf"\1{TITLE}", drawing)
    return re.sub(r"[^<>\"( ]*/site-packages/", "", re.sub(r"[\x00-\x08\ufffd]", "", titled))


if __name__ == "__main__":
    sys.exit(main())
