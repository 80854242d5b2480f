"""What tests build their worlds from: daemons, peers, engines, pools, and a daemon on the test's own loop."""

from tests.kit.daemons import daemon, engine, peers
from tests.kit.in_process import serving
from tests.kit.pools import pool

__all__ = ["daemon", "engine", "peers", "pool", "serving"]
