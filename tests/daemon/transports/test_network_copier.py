"""The copies of transfers between hosts: by copy threads and by threads, with digests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
from kvferry.protocol.errors import CancelledError

WAIT_S = 60.0
pytestmark = pytest.mark.anyio
Bytes = npt.NDArray[np.uint8]


class Ends:
    """The ends of copies: what each has come to, once."""

    def __init__(self, count: int) -> None:
        self.all: list[asyncio.Future[tuple[int, Exception | None]]] = [asyncio.Future() for _ in range(count)]

    def of(self, number: int) -> Callable[[int, Exception | None], None]:
        return lambda digest, error: self.all[number].set_result((digest, error))

    async def wait(self) -> list[tuple[int, Exception | None]]:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*self.all)


@pytest.fixture(params=["copy threads", "threads"])
async def copier(
    request: pytest.FixtureRequest, require: Callable[[object, str], None]
) -> AsyncIterator[NetworkCopier]:
    copy_threads = copy_kernel.new_copy_threads(2, b"") if request.param == "copy threads" else None
    require(copy_threads is not None or request.param == "threads", "the native copy kernel")
    made = NetworkCopier(ThreadPoolExecutor(2), copy_threads)
    yield made
    with ThreadPoolExecutor(1) as waiter:
        await made.close(waiter)


def listed(source: Bytes, target: Bytes, rng: np.random.Generator, most: int) -> tuple[Copies, Bytes]:
    sizes = rng.integers(1, most, len(source) // (2 * most))
    starts = rng.integers(0, len(source) - most, len(sizes))
    ends = np.cumsum(sizes)
    copies = np.empty((len(sizes), 3), np.uint64)
    copies[:, 0], copies[:, 1], copies[:, 2] = starts, ends - sizes, sizes
    copies[:, 0] += np.uint64(source.ctypes.data)
    copies[:, 1] += np.uint64(target.ctypes.data)
    return copies, np.concatenate([source[start : start + n] for start, n in zip(starts, sizes, strict=True)])


@pytest.mark.parametrize("most", [7, 300, 70_000])
async def test_what_is_copied_is_there_and_has_its_digest(copier: NetworkCopier, most: int) -> None:
    rng, ends = np.random.default_rng(most), Ends(20)
    source = rng.integers(0, 256, 50 * most, np.uint8)
    targets = [np.zeros(source.nbytes, np.uint8) for _ in range(20)]
    made = [listed(source, target, rng, most) for target in targets]
    for number, (copies, _) in enumerate(made):
        copier.copy(len(copies), partial(np.copy, copies), ends.of(number))
    for end, target, (_, expected) in zip(await ends.wait(), targets, made, strict=True):
        assert end == (xxhash.xxh3_64_intdigest(expected.tobytes()), None)
        assert target[: len(expected)].tobytes() == expected.tobytes()


async def test_what_fails_on_a_thread_is_reported(copier: NetworkCopier) -> None:
    ends = Ends(2)

    def fails() -> int:
        raise MemoryError

    copier.run(fails, ends.of(0))
    copier.run(lambda: 7, ends.of(1))
    (_, error), end = await ends.wait()
    assert isinstance(error, MemoryError)
    assert end == (7, None)


async def test_nothing_moves_and_nothing_is_reported_once_it_is_closed(copier: NetworkCopier) -> None:
    ends, rng = Ends(8), np.random.default_rng(0)
    source, target = rng.integers(0, 256, 8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    copies = np.array([[source.ctypes.data, target.ctypes.data, source.nbytes]], np.uint64)
    for number in range(8):
        copier.copy(1, lambda: copies, ends.of(number))
    with ThreadPoolExecutor(1) as waiter:
        async with asyncio.timeout(WAIT_S):
            await copier.close(waiter)
    target[:] = 0
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(one.done() for one in ends.all)
    assert not target.any()
    with pytest.raises(CancelledError):
        copier.run(lambda: 1, ends.of(0))
    with pytest.raises(CancelledError):
        copier.copy(1, lambda: copies, ends.of(0))
