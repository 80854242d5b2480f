"""Graph tables beside plain dictionaries: visible is what lengths, pages and windows say, and nothing else is left."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.attention.graph_tables import GraphTables
from kvferry.attention.state_windows import window_of
from kvferry.attention.table_layout import Int64s, TableShape, TableViews, table_layout, table_shape, views
from kvferry.attention.table_update import TableUpdate
from kvferry.protocol.errors import InvalidFieldError, KvferryError, TableOverflowError, WindowMismatchError
from tests.kit.devices import DEVICE

PAGES, WINDOW_PAGES, WINDOW = 14, 9, 6


def ids(*numbers: int) -> Int64s:
    return np.array(numbers, np.int64)


def small(window: int | None = None, draft_tokens: int = 3) -> TableShape:
    return table_shape(
        max_batch=4, max_context_tokens=20, page_size=4, draft_tokens=draft_tokens, window=window, captured=(1, 2, 4)
    )


def tables(window: int | None = None) -> GraphTables:
    return GraphTables(small(window), PAGES, None if window is None else WINDOW_PAGES)


def whole(*rows: tuple[int, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of rows that get these pages as a whole."""
    return {
        "rows": ids(*(row for row, _ in rows)),
        "row_pages": ids(*(len(pages) for _, pages in rows)),
        "pages": ids(*(page for _, pages in rows for page in pages)),
    }


def entries(*triples: tuple[int, int, int]) -> dict[str, Any]:
    """Return the fields of (row, column, page)."""
    names = ("entry_rows", "entry_columns", "entry_pages")
    return {name: ids(*(triple[at] for triple in triples)) for at, name in enumerate(names)}


PREFIX = whole((0, (1, 2)), (1, (1, 3)))
"""Two rows that share their first page."""


# --- one thing at a time ---


@pytest.mark.parametrize(
    ("lengths", "fields"),
    [
        (ids(8, 9), {**entries((1, 2, 7)), "bound_full": ids(7, 1), "bound_window": ids(8, 7)}),
        (ids(9, 8), {**entries((0, 2, 7)), "bound_full": ids(7, 1), "bound_window": ids(8, 7)}),
        (ids(8, 8), {"bound_full": ids(1), "bound_window": ids(7)}),
    ],
)
def test_another_window_page_needs_the_row_or_the_entry_anew(lengths: Int64s, fields: dict[str, Any]) -> None:
    """Releasing what a row keeps on showing is refused, whether the row changes elsewhere or not."""
    made = tables(WINDOW)
    made.apply(TableUpdate(lengths=ids(8, 8), **PREFIX, bound_full=ids(1, 2, 3), bound_window=ids(4, 5, 6)))
    with pytest.raises(WindowMismatchError, match=r"row [01] column 0: window page 4 is visible and cannot be rel"):
        made.apply(TableUpdate(lengths=lengths, released=ids(1), **fields))
    made.check()
    anew = whole((0, (1, 2))) | entries((1, 0, 1)) | {"released": ids(1), "bound_full": ids(1), "bound_window": ids(7)}
    change = made.apply(TableUpdate(lengths=ids(8, 8), **anew))
    swa = made.visible.block_tables_swa
    assert swa is not None
    assert (swa[:2, :2].tolist(), change.block_tables_swa.tolist()) == ([[7, 5], [7, 6]], [0, 6])
    assert change.block_tables.tolist() == [], "the full pages are the same"
    made.check()


def test_up_to_the_last_token_and_not_one_more() -> None:
    made = tables()
    made.apply(TableUpdate(lengths=ids(21), extra_tokens=3, **whole((0, (1, 2, 3, 4, 5, 6)))))
    assert made.visible.seq_lens[0] == 24
    for length in (22, (1 << 63) - 1):
        with pytest.raises(TableOverflowError, match=rf"row 0: {length} tokens.*W = 6 columns of 4 tokens") as caught:
            made.apply(TableUpdate(lengths=ids(length), extra_tokens=3))
        assert caught.value.field == "lengths"
    made.check()


# --- tables that an earlier daemon has written, or anybody ---


def written(window: int | None = None) -> TableViews:
    """Return memory that shows two rows in use, of 9 and 5 tokens and 2 extra ones, and an idle one between them."""
    made, memory = tables(window), views(small(window), np.zeros(table_layout(small(window)).size_bytes, np.uint8))
    bound = {"bound_full": ids(1, 2, 3, 6, 7), "bound_window": ids(5, 4, 3, 2, 1)} if window else {}
    rows = whole((0, (1, 2, 3)), (2, (6, 7)))
    made.write(made.apply(TableUpdate(lengths=ids(9, 0, 5), extra_tokens=2, **rows, **bound)), memory)
    return memory


@pytest.mark.parametrize("window", [None, WINDOW])
def test_what_an_update_has_written_is_adopted(window: int | None) -> None:
    made = tables(window)
    made.adopt(written(window), 3, 2)
    made.check()
    change = made.apply(TableUpdate(lengths=ids(10, 0, 5), extra_tokens=2))
    assert (made.visible.seq_lens.tolist(), change.block_tables.tolist()) == ([12, 0, 7, 0], [])


FORGED: list[tuple[str, tuple[int, ...], int, int, int, str]] = [
    ("block_tables", (0, 1), PAGES, 3, 2, "page 14"),
    ("block_tables", (0, 1), -1, 3, 2, "page -1"),
    ("block_tables", (0, 1), 0, 3, 2, "row 0 column 1 has 0"),
    ("block_tables", (0, 1), 1, 3, 2, "row 0 has page 1"),
    ("block_tables", (0, 3), 9, 3, 2, "row 0 column 3 has 9"),
    ("block_tables", (1, 0), 9, 3, 2, "row 1 column 0 has 9"),
    ("block_tables_swa", (0, 2), WINDOW_PAGES, 3, 2, "page 9"),
    ("block_tables_swa", (0, 2), 0, 3, 2, "block_tables_swa: row 0 column 2"),
    ("block_tables_swa", (0, 2), 4, 3, 2, "page 4"),
    ("block_tables_swa", (2, 3), 8, 3, 2, "row 2 column 3 has 8"),
    ("seq_lens", (0,), 25, 3, 2, "lengths"),
    ("seq_lens", (0,), -1, 3, 2, "lengths"),
    ("seq_lens", (0,), 2, 3, 2, "lengths"),
    ("seq_lens", (3,), 1, 3, 2, "lengths"),
    ("seq_lens", (0,), 13, 3, 2, "row 0 column 3 has 0"),
    ("seq_lens", (0,), 11, 2, 2, "lengths"),
    ("seq_lens", (0,), 11, 5, 2, "5 rows"),
    ("seq_lens", (0,), 11, -1, 2, "-1 rows"),
    ("seq_lens", (0,), 11, 3, 4, "4 extra"),
]


@pytest.mark.parametrize(("name", "at", "value", "batch", "extra", "says"), FORGED)
def test_what_no_update_could_have_written_is_not(
    name: str, at: tuple[int, ...], value: int, batch: int, extra: int, says: str
) -> None:
    memory, made = written(WINDOW), tables(WINDOW)
    getattr(memory, name)[at] = value
    with pytest.raises(InvalidFieldError, match=says) as refused:
        made.adopt(memory, batch, extra)
    assert refused.value.field == "shown"
    assert not any(table.any() for table in made.visible if table is not None)
    made.check()
    made.adopt(written(WINDOW), 3, 2)


# --- against a plain model ---


class Model(NamedTuple):
    """What tables hold, without any cleverness."""

    rows: list[dict[int, int]]
    lengths: list[int]
    extra: int
    swa: dict[int, int]


class Refused(Exception):  # noqa: N818  # an outcome, not an error
    """The model refuses an update."""


def need(condition: object) -> None:
    if not condition:
        raise Refused


def after(model: Model, update: TableUpdate, shape: TableShape) -> Model:
    """Return the model after an update.

    Raises:
        Refused: the update is wrong.
    """
    need(update.batch <= shape.max_batch and 0 <= update.extra_tokens <= shape.draft_tokens)
    rows = rows_after(model.rows, update, shape.columns)
    swa = model.swa if shape.window is None else swa_after(model.swa, update)
    made = Model(rows, update.lengths.tolist(), update.extra_tokens, swa)
    for row, length in enumerate(made.lengths):
        need(length >= 0)
        need(length == 0 or length + made.extra <= shape.columns * shape.page_size)
        full, window = shown(made, row, shape)
        need(all(column in rows[row] for column in full))
        need(len({rows[row][column] for column in full}) == len(full))
        need(shape.window is None or all(rows[row][column] in swa for column in window))
    return made


def rows_after(rows: list[dict[int, int]], update: TableUpdate, columns: int) -> list[dict[int, int]]:
    """Return the rows with the update's rows and entries; rows beyond the batch are empty."""
    need(all(0 < page < PAGES for page in [*update.pages.tolist(), *update.entry_pages.tolist()]))
    made = [dict(row) if at < update.batch else {} for at, row in enumerate(rows)]
    names, start = update.rows.tolist(), 0
    for row, count in zip(names, update.row_pages.tolist(), strict=True):
        need(0 <= row < update.batch and 0 <= count <= columns and names.count(row) == 1)
        made[row] = dict(enumerate(update.pages[start : start + count].tolist()))
        start += count
    entries_named = list(zip(update.entry_rows.tolist(), update.entry_columns.tolist(), strict=True))
    for (row, column), page in zip(entries_named, update.entry_pages.tolist(), strict=True):
        need(0 <= row < update.batch and 0 <= column < columns and row not in names)
        need(entries_named.count((row, column)) == 1)
        made[row][column] = page
    return made


def swa_after(swa: dict[int, int], update: TableUpdate) -> dict[int, int]:
    made = dict(swa)
    for page in update.released.tolist():
        need(page in made)
        del made[page]
    for full, window in zip(update.bound_full.tolist(), update.bound_window.tolist(), strict=True):
        need(0 < full < PAGES and 0 < window < WINDOW_PAGES and full not in made and window not in made.values())
        made[full] = window
    return made


def shown(model: Model, row: int, shape: TableShape) -> tuple[range, range]:
    """Return the columns that a row shows, in the full table and in the window table."""
    length = model.lengths[row] if row < len(model.lengths) else 0
    if not length:
        return range(0), range(0)
    end = -(-(length + model.extra) // shape.page_size)
    return range(end), range(window_of(0, length, shape.window or 1, shape.page_size).first_page, end)


class Steps(RuleBasedStateMachine):
    """Steps right and wrong, in tables that a shell keeps up to date by elements and by bytes."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.shape = small(self.window)
        self.made = tables(self.window)
        self.model = Model([{} for _ in range(self.shape.max_batch)], [], 0, {})
        self.address = self.made.visible.block_tables.ctypes.data
        self.layout = table_layout(self.shape)
        self.staging = np.zeros(self.layout.size_bytes, np.uint8)
        self.device = np.zeros(self.layout.size_bytes, np.uint8)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Most steps are right."""
        self.take(self.right_step(data))

    @rule(data=st.data())
    def broken_step(self, data: st.DataObject) -> None:
        """One thing of a right step is changed."""
        update = self.right_step(data)
        names = [
            name for name, value in msgspec.structs.asdict(update).items() if not isinstance(value, int) and len(value)
        ]
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        broken = getattr(update, name).copy()
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] = data.draw(
            st.sampled_from([*broken.tolist(), broken[at] + 1, -1, 0, 4, 6, 9, 14, 24, 1 << 40, (1 << 63) - 1])
        )
        if name == "row_pages" and broken.sum() != len(update.pages):
            return
        self.take(msgspec.structs.replace(update, **{name: broken}))

    @rule(data=st.data())
    def forgetful_step(self, data: st.DataObject) -> None:
        """An entry is left out, or a window page."""
        update = self.right_step(data)
        groups = [("entry_rows", "entry_columns", "entry_pages"), ("bound_full", "bound_window")]
        groups = [names for names in groups if len(getattr(update, names[0]))]
        if groups:
            names = data.draw(st.sampled_from(groups))
            self.take(msgspec.structs.replace(update, **{name: getattr(update, name)[1:] for name in names}))

    @invariant()
    def is_what_the_model_says(self) -> None:
        """Look at all tables, and at the device's memory."""
        self.made.check()
        expected = views(self.shape, np.zeros(self.layout.size_bytes, np.uint8))
        for row in range(len(self.model.lengths)):
            full, window = shown(self.model, row, self.shape)
            for column in full:
                expected.block_tables[row, column] = self.model.rows[row][column]
            if expected.block_tables_swa is not None:
                for column in window:
                    expected.block_tables_swa[row, column] = self.model.swa[self.model.rows[row][column]]
            if full:
                expected.seq_lens[row] = self.model.lengths[row] + self.model.extra
        device = views(self.shape, self.device)
        for name, table in expected._asdict().items():
            if table is not None:
                assert getattr(self.made.visible, name).tolist() == table.tolist(), name
                assert getattr(device, name).tolist() == table.tolist(), f"{name} on the device"

    @invariant()
    def an_earlier_daemons_tables_are_adopted(self) -> None:
        """Tables that begin with what the device shows go on from there; with another byte, they may be refused."""
        batch, extra = len(self.model.lengths), self.model.extra
        adopted, shows = tables(self.window), views(self.shape, self.device)
        adopted.adopt(shows, batch, extra)
        adopted.check()
        assert adopted.batch == batch
        for name, table in adopted.visible._asdict().items():
            assert np.array_equal(table, getattr(shows, name)), name
        if batch:
            same = {name: getattr(self.made.visible, name).copy() for name in ("block_tables", "seq_lens")}
            lengths = ids(*self.model.lengths)
            change = adopted.apply(TableUpdate(lengths=lengths, extra_tokens=extra))
            assert not len(change.block_tables), "what was shown stays"
            assert all(np.array_equal(getattr(adopted.visible, name), table) for name, table in same.items())

    def take(self, update: TableUpdate) -> None:
        """Apply an update, copy what changed; or see it refused."""
        try:
            expected = after(self.model, update, self.shape)
        except Refused:
            with pytest.raises(KvferryError):
                self.made.apply(update)
            return
        before = self.made.visible.block_tables.copy()
        change = self.made.apply(update)
        assert self.made.visible.block_tables.ctypes.data == self.address
        self.model = expected
        changed = np.flatnonzero(before != self.made.visible.block_tables)
        assert change.block_tables.tolist() == changed.tolist(), "nothing else needs to be copied"
        assert change.replayed_rows == min(size for size in self.shape.captured if size >= change.batch)
        self.made.write(change, views(self.shape, self.staging))
        for start, end in change.byte_spans(self.layout).pairs():
            self.device[start:end] = self.staging[start:end]

    def right_step(self, data: st.DataObject) -> TableUpdate:
        """Return a step that gives each row what its length needs, if window pages suffice."""
        batch = data.draw(st.integers(0, self.shape.max_batch))
        extra = data.draw(st.sampled_from([self.model.extra, 0, 3]))
        lengths = [data.draw(self.lengths_of(row)) for row in range(batch)]
        fresh = {row for row in range(batch) if data.draw(st.integers(0, 5)) == 0}
        given = {
            row: data.draw(
                st.lists(st.integers(1, PAGES - 1), min_size=self.need(lengths[row], extra), max_size=6, unique=True)
            )
            for row in fresh
        }
        added: list[tuple[int, int, int]] = []
        for row in set(range(batch)) - fresh:
            held = self.model.rows[row]
            wanted = range(self.need(lengths[row], extra))
            # What a broken step gave ahead may be a page that the row has already: nobody could show that.
            twice = {column for column in wanted if held.get(column, 0) in {held.get(one, -1) for one in range(column)}}
            missing = [column for column in wanted if column not in held or column in twice]
            again = data.draw(st.lists(st.integers(0, 5), max_size=1))
            others = sorted({*range(1, PAGES)} - {*held.values()})
            news = data.draw(st.permutations(others)) if missing or again else ()
            added += [(row, column, page) for column, page in zip({*missing, *again}, news, strict=False)]
        update = TableUpdate(
            lengths=ids(*lengths),
            extra_tokens=extra,
            **whole(*((row, tuple(pages)) for row, pages in given.items())),
            **entries(*data.draw(st.permutations(added))),
        )
        return self.with_window_pages(update, data) if self.window is not None else update

    def need(self, length: int, extra: int) -> int:
        return -(-(length + extra) // self.shape.page_size) if length else 0

    def lengths_of(self, row: int) -> st.SearchStrategy[int]:
        """Return the next token above all, else any length."""
        now = self.model.lengths[row] if row < len(self.model.lengths) else 0
        return st.one_of(st.just(min(now + 1, 20)), st.just(max(now - 1, 0)), st.integers(0, 20))

    def with_window_pages(self, update: TableUpdate, data: st.DataObject) -> TableUpdate:
        """Return the update with window pages for what it shows, and without some that it does not show."""
        then = after(self.model, update, msgspec.structs.replace(self.shape, window=None))
        seen = {then.rows[row][column] for row in range(update.batch) for column in shown(then, row, self.shape)[1]}
        idle = sorted(self.model.swa.keys() - seen)
        released = [page for page in idle if data.draw(st.booleans())]
        kept = {full: window for full, window in self.model.swa.items() if full not in released}
        free = data.draw(st.permutations(sorted(set(range(1, WINDOW_PAGES)) - set(kept.values()))))
        bound = list(zip(sorted(seen - kept.keys()), free, strict=False))
        return msgspec.structs.replace(
            update,
            released=ids(*released),
            bound_full=ids(*(full for full, _ in bound)),
            bound_window=ids(*(window for _, window in bound)),
        )


class WindowSteps(Steps):
    """The same with windows."""

    window = WINDOW


ENOUGH = DEVICE.examples(60, stateful_step_count=15)
TestSteps = Steps.TestCase
TestSteps.settings = ENOUGH
TestWindowSteps = WindowSteps.TestCase
TestWindowSteps.settings = ENOUGH
