"""``python -m tests.kit.tuned_daemon TUNING …``: ``kvferry daemon …`` that does not choose for itself."""

from __future__ import annotations

import os
import sys

import msgspec

from kvferry.daemon.daemon import Tuning, main
from kvferry.daemon.process.signals import hold_back

if __name__ == "__main__":
    # As a script it would find tests/kit/mooncake.py for the package.
    sys.path[:] = [one for one in sys.path if one != os.path.dirname(__file__)]  # noqa: PTH120
    hold_back()
    sys.exit(main(sys.argv[2:], msgspec.json.decode(sys.argv[1], type=Tuning)))
