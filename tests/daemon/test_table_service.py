"""Graph tables of a real daemon, on the run's device, as an engine makes, updates and loses them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvferry.attention.host_lengths import HostLengths
from kvferry.clients import AsyncClient, BlockTableEntries, Client, HybridSwaSpec, MambaSpec, MhaSpec, Tables
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import (
    DeadlineError,
    DuplicatePageError,
    InvalidFieldError,
    KvferryError,
    PageOutOfRangeError,
    TableHoleError,
    TableOverflowError,
    TablesBusyError,
    TablesExistError,
    TooLargeError,
    UnknownComponentError,
    UnknownPoolError,
    UnknownTablesError,
    WindowMismatchError,
)
from kvferry.protocol.table_messages import TablesUpdated
from tests.daemons import DaemonProcess

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
    full_layers=(0,),
    window_layers=(1,),
    tokens=63 * PAGE,
    window_tokens=15 * PAGE,
    window=WINDOW,
    page_size=PAGE,
    kv_heads=1,
    head_dim=2,
    dtype="float32",
)
Pages = dict[int, Sequence[int]]
_numbers = itertools.count()


@pytest.fixture
def pool(client: Client, device: str) -> Iterator[str]:
    """Return the name of a pool of 255 pages of 4 tokens."""
    name = f"pool-{next(_numbers)}"
    client.create_pool(name, SPEC, device=device, deadline_s=OPENING_S)
    yield name
    client.delete_pool(name)


@pytest.fixture
def hybrid(client: Client, device: str) -> Iterator[str]:
    """Return the name of a pool with 63 full and 15 window pages of 4 tokens, and a window of 6 tokens."""
    name = f"hybrid-{next(_numbers)}"
    client.create_pool(name, HYBRID, device=device, deadline_s=OPENING_S)
    yield name
    client.delete_pool(name)


def new_tables(client: Client, pool: str, name: str = "decode", **changed: Any) -> Tables:  # noqa: ANN401
    arguments = {"max_batch": BATCH, "max_context_tokens": CONTEXT, "draft_tokens": DRAFT, **changed}
    return client.create_tables(name, pool, **arguments)


@pytest.fixture
def tables(client: Client, pool: str) -> Tables:
    """Return tables of 6 rows and 8 columns."""
    return new_tables(client, pool)


def update(client: Client, tables: Tables, lengths: Sequence[int], **more: Any) -> TablesUpdated:  # noqa: ANN401
    updated = client.wait(client.update_tables(tables, lengths, **more))
    tables.order()
    return updated


def contents(tables: Tables) -> tuple[list[list[int]], list[int]]:
    """Return what a replay would read now."""
    return tables.block_tables.cpu().tolist(), tables.seq_lens.cpu().tolist()


def expected(rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Return tables that show these pages, and zeros elsewhere."""
    table = [[*row, *[0] * (COLUMNS - len(row))] for row in rows]
    return table + [[0] * COLUMNS] * (BATCH - len(rows)), [*lengths, *[0] * (BATCH - len(lengths))]


def wait_until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends_at


# -- making them


@pytest.mark.parametrize(
    ("context", "draft", "row_tokens", "columns"),
    [(30, 2, 0, 8), (32, 2, 0, 9), (32, 0, 0, 8), (30, 2, 33, 9), (30, 2, 12, 8), (1, 0, 0, 1)],
)
def test_the_tables_are_as_wide_as_the_formula_says(
    client: Client, pool: str, context: int, draft: int, row_tokens: int, columns: int
) -> None:
    made = new_tables(client, pool, max_context_tokens=context, draft_tokens=draft, request_row_tokens=row_tokens)
    assert made.columns == columns
    assert made.page_size == PAGE
    assert made.block_tables.shape == (BATCH, columns)
    assert made.block_tables.dtype == made.seq_lens.dtype == torch.int32
    assert made.seq_lens.shape == (BATCH,)
    assert made.block_tables_swa is None
    client.delete_tables(made)


def test_they_are_on_the_pools_device_and_empty(tables: Tables, device: str) -> None:
    assert tables.device == device
    where = torch.device("cpu" if device == "host" else device)
    assert tables.block_tables.device == tables.seq_lens.device == where
    assert contents(tables) == expected([], [])
    assert tables.host_lengths() == HostLengths(sequence=0, lengths=[], replayed_rows=0, extra_tokens=0)


@pytest.mark.host_only
def test_arrays_are_the_tensors_memory(client: Client, tables: Tables) -> None:
    update(client, tables, [3], rows={0: [7]})
    block_tables, seq_lens = tables.array("block_tables"), tables.array("seq_lens")
    assert (block_tables.tolist(), seq_lens.tolist()) == contents(tables) == expected([[7]], [3])
    assert block_tables.ctypes.data == tables.block_tables.data_ptr()
    assert seq_lens.ctypes.data == tables.seq_lens.data_ptr()
    for missing in ("block_tables_swa", "lengths"):
        with pytest.raises(InvalidFieldError, match=f"no '{missing}'"):
            tables.array(cast("Any", missing))


@pytest.mark.host_only
def test_the_windows_array_is_its_tensors_memory(client: Client, hybrid: str) -> None:
    tables = new_tables(client, hybrid, window=WINDOW)
    update(client, tables, [14], rows={0: [1, 2, 3, 4]}, bound=([3, 4], [5, 6]))
    window = tables.array("block_tables_swa")
    assert window[0].tolist() == [0, 0, 5, 6, 0, 0, 0, 0]
    assert window.shape == (BATCH, COLUMNS)


@pytest.mark.device_only
def test_arrays_of_tables_on_a_device_are_refused(tables: Tables) -> None:
    with pytest.raises(InvalidFieldError, match="use the tensors"):
        tables.array("seq_lens")


def test_a_name_is_taken_until_the_tables_are_deleted(client: Client, pool: str, tables: Tables) -> None:
    with pytest.raises(TablesExistError):
        new_tables(client, pool)
    other = new_tables(client, pool, "draft", max_batch=1)
    client.delete_tables(tables)
    again = new_tables(client, pool)
    update(client, again, [3], rows={0: [7]})
    update(client, other, [3], rows={0: [8]})
    assert contents(again) == expected([[7]], [3])
    assert other.block_tables.cpu().tolist()[0][0] == 8


def test_tables_of_one_name_in_two_sessions_are_two(daemon: DaemonProcess, client: Client, pool: str) -> None:
    mine = new_tables(client, pool)
    with Client.connect(daemon.runtime_dir, name="other") as other:
        theirs = new_tables(other, pool)
        update(client, mine, [1], rows={0: [5]})
        update(other, theirs, [2], rows={0: [6]})
        assert contents(mine) == expected([[5]], [1])
        assert contents(theirs) == expected([[6]], [2])


@pytest.mark.parametrize(
    ("changed", "error", "field"),
    [
        ({"pool": "none-such"}, UnknownPoolError, None),
        ({"window": 6}, UnknownComponentError, "window_component"),
        ({"max_batch": 65_536, "max_context_tokens": 32_000}, TooLargeError, "max_batch"),
        ({"captured": (4, 8)}, InvalidFieldError, "captured"),
        ({"captured": (2, 2)}, InvalidFieldError, "captured"),
        ({"max_context_tokens": (1 << 31) - 2, "draft_tokens": 2}, InvalidFieldError, "max_context_tokens"),
    ],
)
def test_a_request_that_does_not_fit_the_pool_is_refused(
    client: Client, pool: str, changed: dict[str, Any], error: type[KvferryError], field: str | None
) -> None:
    with pytest.raises(error) as raised:
        new_tables(client, **{"pool": pool, **changed})
    assert field is None or raised.value.field == field
    assert client.status().tables == ()
    new_tables(client, pool)  # the name was not taken


def test_a_pool_of_states_only_has_no_tables(client: Client, device: str) -> None:
    states = MambaSpec(state_layers=(0,), slots=3, conv_window=2, conv_channels=4, dtype="float32")
    client.create_pool("states", states, device=device)
    with pytest.raises(UnknownComponentError) as raised:
        new_tables(client, "states")
    assert raised.value.field == "component"
    client.delete_pool("states")


@pytest.mark.parametrize("window", [None, WINDOW - 1, WINDOW + 1])
def test_a_hybrid_pool_wants_its_window(client: Client, hybrid: str, window: int | None) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        new_tables(client, hybrid, window=window)
    assert raised.value.field == "window"


def test_a_session_has_a_bounded_number_of_tables(client: Client, pool: str) -> None:
    for number in range(16):
        new_tables(client, pool, f"tables-{number}")
    with pytest.raises(KvferryError, match="16 tables"):
        new_tables(client, pool, "one-more")


# -- updating them


def test_rows_entries_and_lengths_are_shown_up_to_each_length(client: Client, tables: Tables) -> None:
    update(client, tables, [5, 4, 1], rows={0: [11, 12, 13], 1: [21], 2: [31]})
    assert contents(tables) == expected([[11, 12], [21], [31]], [5, 4, 1])
    update(client, tables, [9, 5, 2], entries=BlockTableEntries([1], [1], [22]))
    assert contents(tables) == expected([[11, 12, 13], [21, 22], [31]], [9, 5, 2])


def test_a_shorter_row_leaves_no_page_behind(client: Client, tables: Tables) -> None:
    update(client, tables, [32, 32], rows={0: range(1, 9), 1: range(11, 19)})
    update(client, tables, [32, 5], rows={1: [41, 42]})
    assert contents(tables) == expected([range(1, 9), [41, 42]], [32, 5])
    update(client, tables, [3, 5])
    assert contents(tables) == expected([[1], [41, 42]], [3, 5])


def test_rows_beyond_the_batch_are_emptied(client: Client, tables: Tables) -> None:
    update(client, tables, [4] * BATCH, rows={row: [row + 1] for row in range(BATCH)})
    update(client, tables, [4])
    assert contents(tables) == expected([[1]], [4])
    with pytest.raises(TableHoleError, match="row 1 has no page in column 0"):
        update(client, tables, [4, 4])


def test_an_empty_batch_empties_the_tables(client: Client, tables: Tables) -> None:
    update(client, tables, [4, 4], rows={0: [1], 1: [2]})
    updated = update(client, tables, [])
    assert updated.replayed_rows == 0
    assert contents(tables) == expected([], [])
    assert tables.graph_inputs() == [{"actual_seq_lengths_kv": []}]


def test_a_batch_is_padded_to_the_captured_size(client: Client, pool: str) -> None:
    tables = new_tables(client, pool, captured=(1, 4, 6))
    for batch, replayed in ((0, 1), (1, 1), (2, 4), (4, 4), (5, 6)):
        updated = update(client, tables, [3] * batch, rows={row: [row + 9] for row in range(batch)})
        assert updated.replayed_rows == replayed
        assert tables.graph_inputs() == [{"actual_seq_lengths_kv": [3] * batch + [0] * (replayed - batch)}]
        assert contents(tables) == expected([[row + 9] for row in range(batch)], [3] * batch)


def test_draft_tokens_count_in_the_tables_and_in_the_graphs_lengths(client: Client, tables: Tables) -> None:
    update(client, tables, [3, 0, 7], extra_tokens=2, rows={0: [11, 12], 2: [31, 32, 33]})
    assert contents(tables) == expected([[11, 12], [], [31, 32, 33]], [5, 0, 9])
    assert tables.graph_inputs(operators=2) == [{"actual_seq_lengths_kv": [5, 0, 9]}] * 2
    assert tables.graph_inputs(draft_step=0) == [{"actual_seq_lengths_kv": [4, 0, 8]}]
    assert tables.graph_inputs(draft_step=1) == [{"actual_seq_lengths_kv": [5, 0, 9]}]
    assert tables.host_lengths() == HostLengths(sequence=1, lengths=[3, 0, 7], replayed_rows=3, extra_tokens=2)


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


# -- errors


@pytest.mark.parametrize("extra_tokens", [0, 2])
def test_a_length_beyond_the_columns_names_row_length_and_columns(
    client: Client, tables: Tables, extra_tokens: int
) -> None:
    most = COLUMNS * PAGE - extra_tokens
    rows = {0: [1], 1: range(1, 9)}
    update(client, tables, [1, most], extra_tokens=extra_tokens, rows=rows)
    with pytest.raises(TableOverflowError) as raised:
        update(client, tables, [1, most + 1], extra_tokens=extra_tokens)
    assert raised.value.field == "lengths"
    assert "row 1" in raised.value.detail
    assert str(most + 1) in raised.value.detail
    assert f"W = {COLUMNS}" in raised.value.detail


WRONG: list[tuple[dict[str, Any], type[KvferryError], str]] = [
    ({"lengths": [5, 40]}, TableOverflowError, "row 1"),
    ({"lengths": [5, 9]}, TableHoleError, "row 1 has no page in column 2"),
    ({"lengths": [5] * 7}, TooLargeError, "7 rows"),
    ({"lengths": [5, -1]}, InvalidFieldError, "row 1"),
    ({"lengths": [5, 5], "rows": {0: [1, 256]}}, PageOutOfRangeError, "256"),
    ({"lengths": [5, 5], "rows": {0: [1, 0]}}, PageOutOfRangeError, "page 0"),
    ({"lengths": [5, 5], "rows": {2: [1, 2]}}, InvalidFieldError, "2"),
    ({"lengths": [5, 9], "entries": BlockTableEntries([1], [2], [21])}, DuplicatePageError, "row 1 has page 21"),
    ({"lengths": [5, 5], "rows": {0: [1] * 9}}, InvalidFieldError, "9"),
    ({"lengths": [5, 5], "entries": BlockTableEntries([0, 0], [3, 3], [1, 2])}, InvalidFieldError, "row 0 column 3"),
    ({"lengths": [5, 5], "entries": BlockTableEntries([0], [8], [1])}, InvalidFieldError, "8"),
    ({"lengths": [5, 5], "entries": BlockTableEntries([1], [1], [9]), "rows": {1: [3]}}, InvalidFieldError, "row 1"),
    ({"lengths": [5, 5], "released": [1]}, InvalidFieldError, "window"),
    ({"lengths": [5, 5], "after": DeviceEvent(event=3, value=1)}, InvalidFieldError, "ring"),
]


@pytest.mark.parametrize(("wrong", "error", "says"), WRONG)
def test_an_update_that_is_wrong_changes_nothing(
    client: Client, tables: Tables, wrong: dict[str, Any], error: type[KvferryError], says: str
) -> None:
    update(client, tables, [5, 5], rows={0: [11, 12], 1: [21, 22]})
    before, host_before = contents(tables), tables.host_lengths()
    with pytest.raises(error, match=says):
        update(client, tables, **{"lengths": [], **wrong})
    assert contents(tables) == before
    assert tables.host_lengths() == host_before
    update(client, tables, [6, 6])
    assert contents(tables) == expected([[11, 12], [21, 22]], [6, 6])


def test_tables_that_are_deleted_are_unknown(client: Client, tables: Tables) -> None:
    client.delete_tables(tables)
    with pytest.raises(UnknownTablesError):
        client.wait(client.update_tables(tables, []))
    assert client.status().tables == ()


# -- the order with replays


def test_an_update_waits_for_its_replay_and_a_second_one_is_refused(
    client: Client, tables: Tables, device: str
) -> None:
    ring = client.open_events(device)
    update(client, tables, [4], rows={0: [1]})
    replayed = ring.event()
    waiting = client.update_tables(tables, [5], entries=BlockTableEntries([0], [1], [2]), after=replayed)
    with pytest.raises(TablesBusyError) as raised:
        update(client, tables, [6], entries=BlockTableEntries([0], [1], [3]))
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


def test_an_update_whose_deadline_passes_while_it_waits_does_nothing(
    client: Client, tables: Tables, device: str
) -> None:
    ring = client.open_events(device)
    update(client, tables, [4], rows={0: [1]})
    replayed = ring.event()
    with pytest.raises(DeadlineError):
        client.wait(
            client.update_tables(tables, [5], entries=BlockTableEntries([0], [1], [2]), after=replayed, deadline_s=0.05)
        )
    update(client, tables, [7], entries=BlockTableEntries([0], [1], [3]))  # not BUSY
    ring.record(replayed)
    update(client, tables, [8], after=ring.record_event())
    assert contents(tables) == expected([[1, 3]], [8])
    assert tables.host_lengths().sequence == 3


def test_steps_in_a_row_keep_their_order_and_their_addresses(client: Client, pool: str, device: str) -> None:
    tables = new_tables(client, pool, captured=(2, 4, 6))
    ring = client.open_events(device)
    addresses = [tables.block_tables.data_ptr(), tables.seq_lens.data_ptr()]
    random, every = np.random.default_rng(3), np.arange(1, 256)
    lengths: list[int] = []
    rows: list[list[int]] = []
    for step in range(40):
        given: Pages = {}
        if len(rows) < BATCH and step % 3 == 0:
            lengths.append(int(random.integers(1, 20)))
            rows.append([])
            given[len(rows) - 1] = rows[-1] = random.choice(every, -(-lengths[-1] // PAGE), replace=False).tolist()
        if step % 11 == 10:
            lengths.pop()
            rows.pop()
            given.pop(len(rows), None)
        entries: list[tuple[int, int, int]] = []
        for row in range(len(rows)):
            if row in given:
                continue
            lengths[row] += 1
            if lengths[row] > CONTEXT:
                lengths[row], given[row] = 2, [row + 1]
                rows[row] = [row + 1]
            elif -(-lengths[row] // PAGE) > len(rows[row]):
                entries.append((row, len(rows[row]), int(random.choice(np.setdiff1d(every, rows[row])))))
                rows[row].append(entries[-1][2])
        three = zip(*entries, strict=True) if entries else ((), (), ())
        update(
            client, tables, lengths, rows=given, entries=BlockTableEntries(*map(list, three)), after=ring.record_event()
        )
        assert contents(tables) == expected(rows, lengths)
    assert [tables.block_tables.data_ptr(), tables.seq_lens.data_ptr()] == addresses


def test_the_host_lengths_are_never_torn(client: Client, tables: Tables) -> None:
    """Every record that another thread finds, while updates go on, is one update's, and they come in order."""
    seen: list[HostLengths] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.append(tables.host_lengths())

    update(client, tables, [1] * BATCH, rows={row: range(1, 9) for row in range(BATCH)})
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(300):
            update(client, tables, [step % CONTEXT + 1] * BATCH, extra_tokens=step % 2)
    finally:
        ended.set()
        reader.join()
    assert len({one.sequence for one in seen}) > 10
    for one in seen:
        assert one.sequence == 1 or set(one.lengths) == {(one.sequence - 2) % CONTEXT + 1}
        assert one.extra_tokens == (0 if one.sequence == 1 else one.sequence % 2)
    assert [one.sequence for one in seen] == sorted(one.sequence for one in seen)


# -- their end


def test_the_tables_of_a_session_end_with_it(daemon: DaemonProcess, client: Client, pool: str) -> None:
    with Client.connect(daemon.runtime_dir, name="short") as other:
        tables = new_tables(other, pool)
        update(other, tables, [3], rows={0: [1]})
        assert [one.tables for one in client.status().tables] == ["decode"]
        tables.close()
    wait_until(lambda: client.status().tables == ())


def test_tables_outlive_their_session_where_they_are_mapped(daemon: DaemonProcess, client: Client, pool: str) -> None:
    with Client.connect(daemon.runtime_dir, name="short") as other:
        tables = new_tables(other, pool)
        update(other, tables, [3], rows={0: [1]})
    wait_until(lambda: client.status().tables == ())
    assert contents(tables) == expected([[1]], [3])
    tables.close()


# -- the asynchronous client


@pytest.mark.anyio
@pytest.mark.both_loops
async def test_the_asynchronous_client_does_the_same(daemon: DaemonProcess, pool: str, device: str) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir, name="async") as client:
        tables = await client.create_tables("decode", pool, max_batch=BATCH, max_context_tokens=32, captured=(2, 6))
        ring = await client.open_events(device)
        sent = client.update_tables(tables, [5, 4], rows={0: [11, 12], 1: [21]}, after=ring.record_event())
        updated = await client.wait(sent)
        assert updated == TablesUpdated(sequence=1, replayed_rows=2)
        tables.order()
        replayed = ring.event()
        waiting = asyncio.ensure_future(
            client.wait(
                client.update_tables(
                    tables, [9, 4, 1], entries=BlockTableEntries([0, 2], [2, 0], [13, 31]), after=replayed
                )
            )
        )
        while not [one for one in (await client.status()).tables if one.waiting]:
            pass
        with pytest.raises(TablesBusyError):
            await client.wait(client.update_tables(tables, []))
        assert await asyncio.to_thread(contents, tables) == expected([[11, 12], [21]], [5, 4])
        ring.record(replayed)
        assert await waiting == TablesUpdated(sequence=2, replayed_rows=6)
        tables.order()
        assert await asyncio.to_thread(contents, tables) == expected([[11, 12, 13], [21], [31]], [9, 4, 1])
        with pytest.raises(TableOverflowError, match="row 0"):
            await client.wait(client.update_tables(tables, [33]))
        await client.delete_tables(tables)
        with pytest.raises(UnknownTablesError):
            await client.wait(client.update_tables(tables, []))
