"""A daemon whose pools are of real reserved huge pages: engines map them, and the next daemon adopts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import read_file
from kvferry.pools.host.placement import reserved
from tests import kit
from tests.kit.daemons import soon

RESERVED: Final = Path("/proc/sys/vm/nr_hugepages")
SPEC: Final = MhaSpec(layers=2, tokens=1 << 14, page_size=16, kv_heads=1, head_dim=32, dtype="float16")
"""A pool of 4 MiB and two pages."""

CONFIG: Final = '[memory]\nhuge_pages = "reserved"\n[tiers]\nhost_bytes = 0\n[pools]\npopulate = false\n'
PAGES: Final = 3


@pytest.fixture
def free() -> Iterator[Callable[[], int]]:
    """Reserve as many more pages of 2 MiB as the pool needs; return what says how many are free."""
    before = reserved(read_file)
    if before.page_bytes != 2 << 20:
        pytest.skip("this host's reserved huge pages are not of 2 MiB")
    missing = max(0, PAGES - before.free)
    try:
        with contextlib.suppress(OSError):
            RESERVED.write_text(str(before.total + missing))
        if reserved(read_file).free < PAGES:
            pytest.skip("this host reserves no huge pages for a test")  # its memory may be in pieces, in CI too
        yield lambda: reserved(read_file).free
    finally:
        with contextlib.suppress(OSError):
            RESERVED.write_text(str(before.total))


def test_engines_map_reserved_pages_and_the_next_daemon_adopts_them(free: Callable[[], int]) -> None:
    before = free()
    with kit.daemon(CONFIG, keep=True) as life:
        with Client.connect(life.runtime_dir) as client:
            pool = client.create_pool("pool", SPEC)
            assert before - free() == PAGES, "taken at once, though it is not to be populated"
            assert isinstance(pool.region, HostRegion)
            assert pool.region.is_reserved
            assert pool.region.view().shape == (pool.manifest.region_bytes,)
            pool.region.view()[:] = 7
            pool.close()
        life.restart()
        with Client.connect(life.runtime_dir) as client:
            region = client.attach_pool("pool").region
            assert isinstance(region, HostRegion)
            assert np.all(region.view() == 7)
            del region
            client.delete_pool("pool")
    assert soon(lambda: free() == before), "given back"
