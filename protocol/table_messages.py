"""Graph tables: CREATE_TABLES, UPDATE_TABLES, DELETE_TABLES; ``kvferry.attention`` interprets them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.base import AnsweredBy, DeviceEvent, PageCount, ReplyBody
from kvferry.protocol.ids import MAIN, ComponentName, PoolName

Rows = Annotated[int, Meta(ge=1, le=65_536)]
Tokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
NoTokens = Annotated[int, Meta(ge=0, lt=1 << 31)]
UpdateNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
ReplayNumber = Annotated[int, Meta(ge=1, lt=1 << 62)]


class TablesShown(msgspec.Struct, frozen=True, kw_only=True):
    """What tables on a device show, or are about to, that the daemon before has written: its last whole update."""

    sequence: UpdateNumber
    batch: Annotated[int, Meta(ge=0, le=65_536)]
    """Rows in use."""
    extra_tokens: NoTokens = 0
    overwritten: bool = False
    """The engine has written the tables itself since: they are not read, and all rows are taken for empty."""


class TablesCreated(ReplyBody, frozen=True, kw_only=True, tag="TABLES_CREATED"):
    """CREATE_TABLES's reply: byte offsets of the int32 tables ``(max_batch, columns)`` and lengths ``(max_batch,)``."""

    tables: str
    device: str
    columns: int
    page_size: int
    block_tables: int
    block_tables_swa: int | None = None
    seq_lens: int
    region_bytes: int
    host_bytes: int
    """Size of the separate memory of the host lengths, and on a device of the tables' mirror."""
    adopted: bool = False
    """Whether the daemon goes on with ``shown``; else all rows are empty, and the next update writes all tables."""


class CreateTables(AnsweredBy[TablesCreated], frozen=True, kw_only=True, tag="CREATE_TABLES"):
    """Create the tables that captured graphs of this session read, for one pool, on the pool's device.

    Their width is in docs/architecture.md, "Formulas"; their addresses are fixed until DELETE_TABLES or the session's
    end. On a device their memory is the engine's: its share goes over the session socket before this message. What the
    daemon has made for them is sent there before the reply.
    """

    in_batch = False
    after_restart = "again"

    tables: PoolName
    pool: PoolName
    max_batch: Rows
    max_context_tokens: Tokens
    draft_tokens: NoTokens = 0
    request_row_tokens: NoTokens = 0
    """The width of the engine's own token map, in practice wider than the context."""
    captured: Annotated[tuple[Rows, ...], Meta(max_length=1024)] = ()
    """The captured batch sizes; if empty, every batch is replayed with its own size."""
    component: ComponentName = MAIN
    """The component whose pages the tables list."""
    window: Tokens | None = None
    """The pool's sliding window in tokens, for hybrid models: adds window tables."""
    window_component: ComponentName = "swa"
    shown: TablesShown | None = None
    """The memory has tables of the daemon before, to go on with; None: it is zeros."""


class TablesUpdated(ReplyBody, frozen=True, kw_only=True, tag="TABLES_UPDATED"):
    """UPDATE_TABLES's reply. Tables on the host are up to date.

    On a device the copies may still be in progress: a replay waits until the tables' ``shown`` is ``sequence``, which
    is also the number of the host lengths. ``replayed_rows`` is the captured batch size.
    """

    sequence: int
    replayed_rows: int


class UpdateTables(AnsweredBy[TablesUpdated], frozen=True, kw_only=True, tag="UPDATE_TABLES"):
    """Change the tables for the next replay, atomically. At most one update of the tables may wait.

    One frame holds, one after another: ``batch`` lengths; row, column and page of each of ``entries`` entries; number
    and page count of each of ``rows`` rows, and their ``pages`` pages; ``released`` full pages; ``bound`` full pages
    and as many window pages.
    """

    after_restart = "absent"

    one_frame = True

    tables: PoolName
    batch: PageCount
    extra_tokens: NoTokens = 0
    """Added to every length of this step: the draft tokens to verify."""
    entries: PageCount = 0
    rows: PageCount = 0
    pages: PageCount = 0
    released: PageCount = 0
    bound: PageCount = 0
    after: DeviceEvent | None = None
    """On the host: the event of the end of the replay that still reads the tables."""
    replayed: ReplayNumber | None = None
    """On a device: the number that the engine's stream writes behind that replay."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the length of the one frame."""
        return (self.batch + 3 * self.entries + 2 * self.rows + self.pages + self.released + 2 * self.bound,)


class TablesDeleted(ReplyBody, frozen=True, kw_only=True, tag="TABLES_DELETED"):
    """DELETE_TABLES's reply."""

    tables: str


class DeleteTables(AnsweredBy[TablesDeleted], frozen=True, kw_only=True, tag="DELETE_TABLES"):
    """Delete tables; graphs that were captured with them must not be replayed any more."""

    after_restart = "done"

    tables: PoolName
