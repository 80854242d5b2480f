"""SGLang's functions are found where ``make peers`` puts them, called as theirs are, and compared with ours.

The sources here only stand in for the wheel's: same files, names and signatures, other bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from benchmarks import coalescing, page_ids, planning
from benchmarks.coalescing import PageLists
from benchmarks.measure import Effort, Row
from benchmarks.peers.lifting import LiftError
from benchmarks.peers.sglang import ASCEND, MOONCAKE, UTILITIES, Buffers, SGLang, address_lists, find, plan_blocks
from kvferry.protocol.envelope import Request
from kvferry.protocol.ids import new_boot_id, new_secret
from kvferry.protocol.pool_messages import Free

SOURCES: Final = {
    UTILITIES: """
import sglang.not_there

def pack_list_of_buffers(buffers):
    return b"|".join(buffers)

def unpack_list_of_buffers(packed):
    return packed.split(b"|")

def pack_int_lists(lists, fmt: str) -> bytes:
    assert fmt == "i"
    return pack_list_of_buffers([",".join(str(int(n)) for n in one).encode() for one in lists])

def unpack_int_lists(packed, fmt: str):
    assert struct.calcsize(fmt) == 4
    return [[int(n) for n in one.split(b",")] for one in unpack_list_of_buffers(packed)]

def group_concurrent_contiguous(one: not_there.Array, other: not_there.Array):
    assert one.dtype == other.dtype == np.int32
    groups = [], []
    for pair in zip(one.tolist(), other.tolist()):
        goes_on = all(group and group[-1][-1] + 1 == number for group, number in zip(groups, pair))
        for group, number in zip(groups, pair):
            group[-1].append(number) if goes_on else group.append([number])
    return groups
""",
    ASCEND: """
from sglang.not_there import MooncakeKVManager

class AscendKVManager(MooncakeKVManager):
    def send_kvcache(self, session, sources: not_there.Array, pointers, destinations, executor, ids=None):
        self._validate_envelope_kv_layout(pointers, None, None)
        assert self.pp_size == 1 and not self.enable_custom_mem_pool and not self.is_hybrid_mla_backend
        runs = list(zip(*group_concurrent_contiguous(sources, destinations)))
        entries = zip(self.kv_args.kv_data_ptrs, pointers, self.kv_args.kv_item_lens)
        return self._transfer_data(
            session, [(s + a[0] * n, d + b[0] * n, len(a) * n) for s, d, n in entries for a, b in runs]
        )
""",
    MOONCAKE: """
class MooncakeKVManager:
    def _transfer_data(self, session, blocks):
        return self.engine.batch_transfer_sync(session, *([block[i] for block in blocks] for i in range(3)))
""",
}
QUICK: Final = Effort(quick=True)
VERSION: Final = "9.8.7"


def write_environment(folder: Path) -> Path:
    """Write an environment as ``make peers`` leaves it, and return its folder of packages."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / f"sglang-{VERSION}.dist-info").mkdir(parents=True)
    for path, text in SOURCES.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(text)
    return packages


@pytest.fixture
def peer(tmp_path: Path) -> SGLang:
    write_environment(tmp_path)
    found = find(tmp_path)
    assert found is not None
    return found


def test_without_the_environment_a_line_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(tmp_path / "none") is None
    assert capsys.readouterr().out == "rows against SGLang left out: run `make peers` first\n"


def test_an_environment_that_is_there_says_nothing(peer: SGLang, capsys: pytest.CaptureFixture[str]) -> None:
    assert peer.version == VERSION
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_wheel_without_a_file_is_an_error(tmp_path: Path, path: Path) -> None:
    (write_environment(tmp_path) / path).unlink()
    with pytest.raises(LiftError, match=path.name):
        find(tmp_path)


def test_an_unfinished_installation_is_an_error(tmp_path: Path) -> None:
    (write_environment(tmp_path) / f"sglang-{VERSION}.dist-info").rmdir()
    with pytest.raises(LiftError, match="make peers"):
        find(tmp_path)


def test_blocks_and_address_lists_are_what_the_peer_planned(peer: SGLang) -> None:
    buffers = Buffers([1000, 2000], [5000, 7000], [10, 1])
    source, destination = np.array([3, 4, 9], np.int32), np.array([1, 2, 3], np.int32)
    assert plan_blocks(peer, buffers, source, destination) == [
        (1030, 5010, 20),
        (1090, 5030, 10),
        (2003, 7001, 2),
        (2009, 7003, 1),
    ]
    assert address_lists(peer, buffers, source, destination) == (
        [1030, 1090, 2003, 2009],
        [5010, 5030, 7001, 7003],
        [20, 10, 2, 1],
    )


LISTS: Final = PageLists(np.array([3, 4, 9, 10]), np.array([1, 2, 3, 4]))


def coalesce(peer: SGLang) -> list[Row]:
    return [coalescing.against_sglang(peer, LISTS, QUICK)]


def plan(peer: SGLang) -> list[Row]:
    return planning.against_sglang(peer, planning.manifest_entries(), *LISTS, QUICK)


def pack(peer: SGLang) -> list[Row]:
    ids = LISTS.source
    request = Request(1, new_boot_id(), new_secret(), 1000, 0, Free(pool="prefill", pages=len(ids)))
    return page_ids.against_sglang(peer, request, ids, QUICK)


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (coalesce, ["coalesce/against_sglang"]),
        (plan, ["plan/against_sglang", "plan/for_the_transport_against_sglang"]),
        (pack, ["page_ids/build_against_sglang", "page_ids/parse_against_sglang"]),
    ],
)
def test_what_both_do_alike_is_compared(
    peer: SGLang, measure: Callable[[SGLang], list[Row]], names: Sequence[str]
) -> None:
    rows = measure(peer)
    assert [row.name for row in rows] == names
    assert all(row.peer_is.startswith(f"SGLang {VERSION}: ") for row in rows)


@pytest.mark.parametrize(
    ("measure", "function", "other"),
    [
        (coalesce, "group", lambda _, one, other: ([one.tolist()], [other.tolist()])),
        (plan, "send", lambda send, manager, session, source, *rest: send(manager, session, source + 1, *rest)),
        (plan, "transfer", lambda transfer, this, session, blocks: transfer(this, session, blocks[:-1])),
        (pack, "unpack", lambda unpack, packed, fmt: [*unpack(packed, fmt), [1]]),
    ],
)
def test_nothing_is_compared_where_they_differ(
    peer: SGLang, measure: Callable[[SGLang], list[Row]], function: str, other: Callable[..., object]
) -> None:
    changed: dict[str, Any] = {function: partial(other, getattr(peer, function))}
    with pytest.raises(AssertionError):
        measure(peer._replace(**changed))
