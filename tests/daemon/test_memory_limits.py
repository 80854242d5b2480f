"""A daemon in a control group that allows it less memory than the machine has: a real one, which the test makes.

The kernel must not end it, whatever unauthenticated clients and sessions make it keep.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvferry.clients import MhaSpec, SharedMemory, new_request_id, pages
from kvferry.protocol.errors import OutOfMemoryError
from tests import kit
from tests.kit.control_groups import ControlGroup
from tests.kit.daemons import soon

MIB: Final = 1 << 20
SMALL_BYTES: Final = 320 * MIB
GIB: Final = 1 << 30
CONFIG: Final = '[pools]\nmax_bytes = "8GiB"\n[tiers]\nhost_bytes = "4MiB"\n'
LIBC: Final = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE: Final = 3


@pytest.fixture
def group(require: Callable[[object, str], None]) -> Iterator[ControlGroup]:
    try:
        one = ControlGroup.make(f"kvferry-test-{os.getpid()}", SMALL_BYTES)
    except OSError as cause:
        require(False, f"a control group with a limit on memory: {cause}")  # noqa: FBT003
        raise
    try:
        yield one
    finally:
        assert soon(lambda: one.is_empty)
        one.remove()


def spec(size_bytes: int) -> MhaSpec:
    """Return a pool of about so many bytes: one page has 1 MiB."""
    pages = size_bytes // MIB - 1
    return MhaSpec(layers=1, tokens=pages * 512, page_size=512, kv_heads=8, head_dim=64, dtype="float16")


def test_a_pool_that_the_control_group_does_not_allow_is_refused_and_the_daemon_lives(group: ControlGroup) -> None:
    with kit.daemon(CONFIG, prefix=group.prefix) as daemon, kit.engine(daemon) as client:
        with pytest.raises(OutOfMemoryError) as refused:
            client.create_pool("large", spec(SMALL_BYTES - 16 * MIB))  # fits the machine, and pools.max_bytes
        assert str(group.limit_file) in refused.value.detail
        client.create_pool("small", spec(64 * MIB))
        with pytest.raises(OutOfMemoryError):
            client.create_pool("another", spec(SMALL_BYTES - 112 * MIB))  # it would have fitted before
        client.delete_pool("small")
        assert client.ping() > 0


def test_memory_that_its_engine_gives_back_once_it_is_registered(group: ControlGroup) -> None:
    large = spec(224 * MIB)
    count = large.tokens // large.page_size + 1
    memory = SharedMemory(224 * MIB)
    arrays = {("main", role): memory.array((1, count, 512, 8, 64), "float16") for role in ("k", "v")}
    memory.view()[:] = 1
    with kit.daemon(CONFIG, prefix=group.prefix) as daemon, kit.engine(daemon) as client:
        client.create_pool("first", spec(128 * MIB)).close()
        source = client.allocate("first", 120)
        with contextlib.suppress(OutOfMemoryError):
            client.register_pool("holes", large, arrays, device="host")
            size = ctypes.c_long(memory.size_bytes)  # the next process that touches it is charged
            assert not LIBC.fallocate(memory.region.fd, PUNCH_HOLE, ctypes.c_long(0), size), ctypes.get_errno()
            for first in (1, 101):
                request_id = new_request_id()
                receiving = client.receive("holes", request_id, [pages(range(first, first + 120))])
                client.send("first", request_id, [pages(source)])
                client.wait_finished(receiving)
        assert client.ping() > 0


@pytest.mark.full
def test_tables(group: ControlGroup) -> None:
    group.limit(GIB)
    with kit.daemon(prefix=group.prefix) as daemon, kit.engine(daemon) as client:
        client.create_pool("pool", spec(64 * MIB)).close()
        with pytest.raises(OutOfMemoryError) as refused:  # noqa: PT012  once there is no room
            for number in range(15):  # of 64 MiB each
                client.create_tables(f"t{number}", "pool", max_batch=64, max_context_tokens=512 << 18)
        assert refused.value.field == "max_batch"
        assert client.ping() > 0
