"""What tests build their worlds from: daemons, engines, pools, and a daemon on the test's own loop."""

from tests.kit.daemons import daemon, engine
from tests.kit.in_process import serving
from tests.kit.pools import pool

__all__ = ["daemon", "engine", "pool", "serving"]
