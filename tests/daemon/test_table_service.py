"""Graph tables of a real daemon, on the run's device, as an engine makes, updates and loses them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvferry.attention.host_lengths import HostLengths
from kvferry.clients import BlockTableEntries, Client, HybridSwaSpec, MhaSpec, Tables
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import (
    DeadlineError,
    DuplicatePageError,
    InvalidFieldError,
    KvferryError,
    MisuseError,
    PageOutOfRangeError,
    TableHoleError,
    TableOverflowError,
    TablesBusyError,
    TablesExistError,
    UnknownTablesError,
    WindowMismatchError,
)
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.table_messages import TablesUpdated
from tests.kit.daemons import Daemon, soon

pytestmark = pytest.mark.any_device

PAGE = 4
CONTEXT = 30
DRAFT = 2
COLUMNS = 8  # of 30 + 2 tokens
BATCH = 6
OPENING_S = 120.0  # the first time, a daemon imports what drives its device
SPEC = MhaSpec(layers=1, tokens=255 * PAGE, page_size=PAGE, kv_heads=1, head_dim=2, dtype="float32")
WINDOW = 6
HYBRID = HybridSwaSpec(
    full_layers=(0,), window_layers=(1,), tokens=63 * PAGE, window_tokens=15 * PAGE, window=WINDOW, page_size=PAGE,
    kv_heads=1, head_dim=2, dtype="float32",
)  # fmt: skip
_numbers = itertools.count()


@contextmanager
def made(client: Client, device: str, spec: PoolSpec) -> Iterator[str]:
    """Create a pool for a test, and yield its name."""
    name = f"pool-{next(_numbers)}"
    client.create_pool(name, spec, device=device, deadline_s=OPENING_S)
    yield name
    client.delete_pool(name)


@pytest.fixture
def pool(client: Client, device: str) -> Iterator[str]:
    with made(client, device, SPEC) as name:
        yield name


@pytest.fixture
def hybrid(client: Client, device: str) -> Iterator[str]:
    with made(client, device, HYBRID) as name:
        yield name


def new_tables(client: Client, pool: str, name: str = "decode", **changed: Any) -> Tables:  # noqa: ANN401
    arguments = {"max_batch": BATCH, "max_context_tokens": CONTEXT, "draft_tokens": DRAFT, **changed}
    return client.create_tables(name, pool, **arguments)


@pytest.fixture
def tables(client: Client, pool: str) -> Tables:
    return new_tables(client, pool)


def update(client: Client, tables: Tables, lengths: Sequence[int], **more: Any) -> TablesUpdated:  # noqa: ANN401
    updated = client.wait(client.update_tables(tables, lengths, **more))
    tables.order()
    return updated


def contents(tables: Tables) -> tuple[list[list[int]], list[int]]:
    return tables.block_tables.cpu().tolist(), tables.seq_lens.cpu().tolist()


def expected(rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Return tables that show these pages, and zeros elsewhere."""
    table = [[*row, *[0] * (COLUMNS - len(row))] for row in rows]
    return table + [[0] * COLUMNS] * (BATCH - len(rows)), [*lengths, *[0] * (BATCH - len(lengths))]


def test_they_are_on_the_pools_device_and_empty(client: Client, pool: str, tables: Tables, device: str) -> None:
    assert (tables.device, tables.columns, tables.page_size, tables.block_tables_swa) == (device, COLUMNS, PAGE, None)
    assert new_tables(client, pool, "wide", request_row_tokens=33).columns == COLUMNS + 1
    assert tables.block_tables.dtype == tables.seq_lens.dtype == torch.int32
    where = torch.device("cpu" if device == "host" else device)
    assert tables.block_tables.device == tables.seq_lens.device == where
    assert contents(tables) == expected([], [])
    assert tables.host_lengths() == HostLengths(sequence=0, lengths=[], replayed_rows=0, extra_tokens=0)


@pytest.mark.host_only
def test_arrays_are_the_tensors_memory(client: Client, hybrid: str, tables: Tables) -> None:
    with pytest.raises(InvalidFieldError, match="no 'block_tables_swa'"):
        tables.array("block_tables_swa")
    tables = new_tables(client, hybrid, "of-a-window", window=WINDOW)
    for name in cast("Any", ("block_tables", "block_tables_swa", "seq_lens")):
        array, tensor = tables.array(name), getattr(tables, name)
        assert (array.ctypes.data, array.shape, array.dtype) == (tensor.data_ptr(), tensor.shape, np.dtype(np.int32))
    with pytest.raises(InvalidFieldError, match="no 'lengths'"):
        tables.array(cast("Any", "lengths"))


@pytest.mark.device_only
def test_arrays_of_tables_on_a_device_are_refused(tables: Tables) -> None:
    with pytest.raises(InvalidFieldError, match="use the tensors"):
        tables.array("seq_lens")


def test_a_name_is_taken_in_its_session_until_the_tables_are_deleted(
    client: Client, other: Client, pool: str, tables: Tables
) -> None:
    with pytest.raises(TablesExistError):
        new_tables(client, pool)
    other.attach_pool(pool)
    draft, theirs = new_tables(client, pool, "draft", max_batch=1), new_tables(other, pool)
    client.delete_tables(tables)
    with pytest.raises(UnknownTablesError):
        client.wait(client.update_tables(tables, []))
    again = new_tables(client, pool)
    for page, (session, one) in enumerate(((client, again), (client, draft), (other, theirs)), 7):
        update(session, one, [3], rows={0: [page]})
    assert [contents(one)[0][0][0] for one in (again, draft, theirs)] == [7, 8, 9]


def test_a_session_has_a_bounded_number_of_tables(client: Client, pool: str) -> None:
    for number in range(16):
        new_tables(client, pool, f"tables-{number}")
    with pytest.raises(KvferryError, match="16 tables"):
        new_tables(client, pool, "one-more")


def test_the_window_table_shows_what_the_window_sees(client: Client, hybrid: str) -> None:
    tables = new_tables(client, hybrid, window=WINDOW)
    window = tables.block_tables_swa
    assert window is not None
    update(client, tables, [14], rows={0: [1, 2, 3, 4]}, bound=([3, 4], [5, 6]))  # tokens 8 to 13
    assert contents(tables) == expected([[1, 2, 3, 4]], [14])
    assert window.cpu().tolist()[0] == [0, 0, 5, 6, 0, 0, 0, 0]
    update(client, tables, [18], entries=BlockTableEntries([0], [4], [9]), released=[3], bound=([9], [7]))
    assert window.cpu().tolist()[0] == [0, 0, 0, 6, 7, 0, 0, 0]
    before = window.cpu().tolist()
    with pytest.raises(WindowMismatchError, match="row 0 column 4"):
        update(client, tables, [18], released=[9])
    assert window.cpu().tolist() == before


def test_an_update_that_is_wrong_changes_nothing(client: Client, tables: Tables) -> None:
    """One of each check; all that an update can say wrongly has its rows in claims.txt and in tests/attention."""
    with pytest.raises(MisuseError, match="update_tables comes before the first replay"):
        tables.graph_inputs()
    update(client, tables, [5, 5], rows={0: [11, 12], 1: [21, 22]})
    before, host_before = contents(tables), tables.host_lengths()
    wrongs: list[tuple[Sequence[int], dict[str, Any], type[KvferryError], str]] = [
        ([5, 33], {}, TableOverflowError, "row 1: 33 tokens.*W = 8 columns"),
        ([5, 9], {}, TableHoleError, "row 1 has no page in column 2"),
        ([5, 5], {"rows": {0: [1, 256]}}, PageOutOfRangeError, "256"),
        ([5, 9], {"entries": entry(1, 2, 21)}, DuplicatePageError, "row 1 has page 21"),
        ([5, 5], {"after": DeviceEvent(event=3, value=1)}, InvalidFieldError, "ring"),
        ([5, 5], {"after": 0}, InvalidFieldError, "after"),
    ]
    for lengths, wrong, error, says in wrongs:
        with pytest.raises(error, match=says):
            update(client, tables, lengths, **wrong)
        assert contents(tables) == before
        assert tables.host_lengths() == host_before
    addresses = [tables.block_tables.data_ptr(), tables.seq_lens.data_ptr()]
    update(client, tables, [6, 5], extra_tokens=2)
    assert contents(tables) == expected([[11, 12], [21, 22]], [8, 7])
    assert tables.graph_inputs(draft_step=0, operators=3) == [{"actual_seq_lengths_kv": [7, 6]}] * 3
    assert [tables.block_tables.data_ptr(), tables.seq_lens.data_ptr()] == addresses


def entry(row: int, column: int, page: int) -> BlockTableEntries:
    return BlockTableEntries([row], [column], [page])


@pytest.mark.host_only
def test_an_update_waits_for_its_replay_and_a_second_one_is_refused(client: Client, tables: Tables) -> None:
    ring = client.open_events()
    update(client, tables, [4], rows={0: [1]})
    replayed = ring.event()
    waiting = client.update_tables(tables, [5], entries=entry(0, 1, 2), after=replayed)
    with pytest.raises(TablesBusyError) as raised:
        update(client, tables, [6], entries=entry(0, 1, 3))
    assert raised.value.retryable
    assert [one.waiting for one in client.status().tables] == [1]
    with pytest.raises(TablesBusyError):
        client.delete_tables(tables)
    assert contents(tables) == expected([[1]], [4])
    assert not client.is_ready(waiting)
    ring.record(replayed)
    assert client.wait(waiting).sequence == 2
    tables.order()
    assert contents(tables) == expected([[1, 2]], [5])
    assert [(one.updates, one.waiting) for one in client.status().tables] == [(2, 0)]


@pytest.mark.host_only
def test_an_update_whose_deadline_passes_while_it_waits_does_nothing(client: Client, tables: Tables) -> None:
    ring = client.open_events()
    update(client, tables, [4], rows={0: [1]})
    replayed = ring.event()
    with pytest.raises(DeadlineError):
        client.wait(client.update_tables(tables, [5], entries=entry(0, 1, 2), after=replayed, deadline_s=0.05))
    update(client, tables, [7], entries=entry(0, 1, 3))  # not BUSY
    ring.record(replayed)
    update(client, tables, [8], after=ring.record_event())
    assert contents(tables) == expected([[1, 3]], [8])
    assert tables.host_lengths().sequence == 3


@pytest.mark.device_only
def test_updates_wait_on_the_device_for_the_replays_that_they_name(client: Client, tables: Tables) -> None:
    """One is answered before its replay has ended, the next one waits for its copies, and a third one is refused."""
    update(client, tables, [4], rows={0: [1]})
    client.wait(client.update_tables(tables, [5], entries=entry(0, 1, 2), after=1))
    waiting = client.update_tables(tables, [9], entries=entry(0, 2, 3), after=2)
    with pytest.raises(TablesBusyError) as raised:
        update(client, tables, [6])
    assert raised.value.retryable
    with pytest.raises(TablesBusyError):
        client.delete_tables(tables)
    assert contents(tables) == expected([[1]], [4])
    assert not client.is_ready(waiting)
    assert tables.replayed() == 1
    assert client.wait(waiting).sequence == 3
    assert contents(tables) == expected([[1, 2]], [5])
    assert tables.replayed() == 2
    tables.order()
    assert contents(tables) == expected([[1, 2, 3]], [9])


@pytest.mark.device_only
def test_an_update_whose_deadline_passes_before_the_one_before_it_is_shown_does_nothing(
    client: Client, tables: Tables
) -> None:
    client.wait(client.update_tables(tables, [4], rows={0: [1]}, after=1))
    with pytest.raises(DeadlineError):
        client.wait(client.update_tables(tables, [5], entries=entry(0, 1, 2), deadline_s=0.05))
    tables.replayed()

    def updated() -> bool:
        try:
            update(client, tables, [7], entries=entry(0, 1, 3))
        except TablesBusyError:  # what has got its answer may still look whether the device is idle
            return False
        return True

    assert soon(updated)
    assert contents(tables) == expected([[1, 3]], [7])
    assert tables.host_lengths().sequence == 2


@pytest.mark.host_only
def test_a_replays_number_is_for_tables_on_a_device(client: Client, tables: Tables) -> None:
    with pytest.raises(InvalidFieldError, match="on a device"):
        update(client, tables, [4], rows={0: [1]}, after=1)
    with pytest.raises(InvalidFieldError, match="on the host"):
        tables.replayed()
    assert contents(tables) == expected([], [])


@pytest.mark.device_only
def test_tables_of_a_pool_that_their_client_does_not_know_are_refused(other: Client, pool: str) -> None:
    with pytest.raises(InvalidFieldError, match="attach or register the pool"):
        new_tables(other, pool)


def test_tables_end_with_their_session_and_outlive_it_where_they_are_mapped(
    daemon: Daemon, client: Client, pool: str
) -> None:
    with Client.connect(daemon.runtime_dir, name="short") as other:
        other.attach_pool(pool)
        mapped, unmapped = new_tables(other, pool), new_tables(other, pool, "unmapped")
        update(other, mapped, [3], rows={0: [1]})
        assert {one.tables for one in client.status().tables} == {"decode", "unmapped"}
        unmapped.close()
    while client.status().tables:
        pass  # each look is a round trip
    assert contents(mapped) == expected([[1]], [3])
    mapped.close()
