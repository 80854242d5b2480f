"""A daemon that is killed again and again under a mixed load: what was answered holds; the rest is one or the other.

The engines send requests without waiting for all of their answers; then the daemon is killed. An answer that has come
is held against the next daemon: pages are their owner's with the bytes that it wrote, freed ones are not, pools are
there or gone. A request without an answer may have been carried out, in part or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvferry.clients import Client, MhaSpec, calls, new_request_id, pages
from kvferry.clients.core.client_core import ReplyArrived
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.base import RequestBody
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, NoSessionError, NotOwnerError
from kvferry.protocol.pool_messages import Allocate, CreatePool, DeletePool, Free
from kvferry.protocol.session_stream import SessionOpened
from kvferry.protocol.transfer_messages import Receive, Send
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE
from tests.kit.raw_engine import raw_engine, resumed

SPEC = MhaSpec(layers=1, tokens=64, page_size=1, kv_heads=1, head_dim=8, dtype="float16")
ALL = 64
POOL = "shared"
KILLS = 10 if DEVICE.full else 4
REPLY_MS = 20_000
LATE_MS = 20
"""How long an answer that a killed daemon has sent may take to be seen."""

GRACE = "[service]\nresume_grace_s = 600.0\n"


class Engine:
    """An engine of many boots, and what it knows: its pages with what it wrote into them.

    Attributes:
        written: the value in each page that is its own; None where a transfer may have changed it.
        freeing: its own pages of which FREE has not been answered.
        pools: names of its pools; True where they are there for certain, False where not.
        asked: requests under way, and what the answer to each means for what it knows.
    """

    def __init__(self, runtime_dir: Path, name: str, random: Random) -> None:
        self.runtime_dir = runtime_dir
        self.random = random
        self.name = name
        self.written: dict[int, int | None] = {}
        self.freeing: set[int] = set()
        self.pools: dict[str, bool | None] = {}
        self.asked: dict[int, Callable[[PageIds | None], None]] = {}
        self._stack = contextlib.ExitStack()
        self.close = self._stack.close
        self.raw = self._stack.enter_context(raw_engine(runtime_dir, name, calls.session_open(name, keep=True)))

    @property
    def opened(self) -> SessionOpened:
        return self.raw.channel.opened

    def resume(self) -> None:
        """Go on with the next daemon: nothing is under way any more."""
        opened = self.opened
        self.close()
        self.asked.clear()
        self.raw = self._stack.enter_context(resumed(self.runtime_dir, opened, keep=True))

    # -- requests

    def begin(self) -> None:
        self.random.choice((self._allocate, self._allocate, self._free, self._transfer, self._create_or_delete))()

    def read(self, timeout_ms: int) -> bool:
        """Take the next answer, if one comes in time."""
        if not self.asked or not self.raw.control.poll(timeout_ms):
            return False
        news = self.raw.core.feed(self.raw.control.recv_multipart())
        if isinstance(news, ReplyArrived) and (answered := self.asked.pop(news.message_id, None)) and not news.error:
            answered(news.ids[0] if news.ids else None)
        return True

    def _ask(self, body: RequestBody, answered: Callable[[PageIds | None], None], *ids: bytes) -> None:
        outgoing = self.raw.core.request(body, ids, deadline_ms=REPLY_MS)
        self.asked[outgoing.message_id] = answered
        self.raw.control.send_multipart(self.raw.core.frames(outgoing))

    def _some(self, most: int) -> PageIds:
        free = sorted(self.written.keys() - self.freeing)
        return np.array(sorted(self.random.sample(free, min(most, len(free)))), np.int64)

    def _allocate(self) -> None:
        self._ask(Allocate(pool=POOL, count=self.random.randint(1, 6)), self._allocated)

    def _allocated(self, ids: PageIds | None) -> None:
        assert ids is not None
        assert not self.written.keys() & set(ids.tolist()), "a page that it has already"
        self.written |= dict.fromkeys(ids.tolist())

    def _free(self) -> None:
        ids = self._some(4)
        if len(ids):
            self.freeing |= set(ids.tolist())
            self._ask(Free(pool=POOL, pages=len(ids)), lambda _ids: self._freed(ids), ids.tobytes())

    def _freed(self, ids: PageIds) -> None:
        self.freeing -= set(ids.tolist())
        for page in ids.tolist():
            del self.written[page]

    def _transfer(self) -> None:
        ids = self._some(4)
        half = len(ids) // 2
        if half:
            self.written |= dict.fromkeys(ids[half:].tolist())
            request_id = new_request_id()
            for kind, one in ((Receive, ids[half : 2 * half]), (Send, ids[:half])):
                heads, lists = calls.page_lists([pages(one)])
                self._ask(kind(request_id=request_id, pool=POOL, lists=heads), lambda _ids: None, *lists)

    def _create_or_delete(self) -> None:
        name = f"{self.name}-{self.random.randrange(4)}"
        there = self.pools.get(name, False)
        if there is not None:
            self.pools[name] = None
            body = DeletePool(pool=name) if there else CreatePool(pool=name, spec=SPEC)
            self._ask(body, lambda _ids: self.pools.update({name: not there}))

    # -- after a restart

    def owned(self, client: Client) -> int:
        return next(one.pages for one in client.status().sessions if one.session == self.opened.session)

    def take_stock(self, client: Client) -> None:
        """Learn which of the pages under way are its own."""
        for page in sorted(self.freeing):
            with contextlib.suppress(NotOwnerError):
                self.raw.call(calls.free(POOL, [page], "main", None))
            del self.written[page]
        self.freeing.clear()
        for page in range(1, ALL + 1):
            if self.owned(client) == len(self.written):
                return
            if page not in self.written:
                with contextlib.suppress(NotOwnerError):
                    self.raw.call(calls.free(POOL, [page], "main", None))

    def write(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float16]]) -> None:
        for page in self.written.keys() - self.freeing:
            value = self.random.randrange(2048)
            array[page] = value
            self.written[page] = value


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_what_was_answered_holds(seed: int) -> None:
    random = Random(seed)  # noqa: S311  a test repeats what it did
    with kit.daemon(GRACE, keep=True) as life, contextlib.ExitStack() as stack:
        every = [Engine(life.runtime_dir, name, random) for name in ("one", "two", "three")]
        for one in every:
            stack.callback(one.close)
        with Client.connect(life.runtime_dir) as client:
            client.create_pool(POOL, SPEC)
        for _ in range(KILLS):
            work_and_kill(life, every, random)
            come_and_go(life, random)
            check(life, every)


def work_and_kill(life: Daemon, every: list[Engine], random: Random) -> None:
    """Let the engines work for a while, and kill the daemon in the midst of it."""
    for _ in range(random.randrange(30)):
        one = random.choice(every)
        one.begin()
        while random.random() < 0.7 and one.read(REPLY_MS):
            pass
    life.kill()
    for one in every:
        while one.read(LATE_MS):
            pass


def come_and_go(life: Daemon, random: Random) -> None:
    """Start a daemon for a session that comes and goes, is idle or not, and kill it, or do not."""
    life.start()
    if random.random() < 0.3:
        with contextlib.suppress(KvferryError), Client.connect(life.runtime_dir) as client:
            client.allocate(POOL, 1)
            secret = client.secret
            life.restart()
            opening = calls.session_open("", resume=secret)
            with contextlib.suppress(NoSessionError):
                SessionChannel.open(life.runtime_dir, opening).close()


def check(life: Daemon, every: list[Engine]) -> None:
    """Hold what the engines know against the daemon."""
    for one in every:
        one.resume()
    with Client.connect(life.runtime_dir) as client:
        pool = client.attach_pool(POOL)
        array = pool.entry_array(pool.manifest.entries[0])
        sure = [one.written.keys() - one.freeing for one in every]
        assert sum(map(len, sure)) == len(set().union(*sure))
        for one, its in zip(every, sure, strict=True):
            assert one.owned(client) >= len(its)
            for page in its:
                value = one.written[page]
                assert value is None or set(np.unique(array[page])) == {value}
        for one in every:
            one.take_stock(client)
            assert one.owned(client) == len(one.written), "pages that nobody can name"
        free = next(each.free for each in client.status().pools if each.pool == POOL)
        assert free + sum(len(one.written) for one in every) == ALL, "pages that nobody owns"
        if free:
            ids = client.allocate(POOL, free)
            assert not set(ids.tolist()).intersection(*[one.written for one in every])
            client.free(POOL, ids)
        there = {each.pool for each in client.status().pools}
        for one in every:
            for name, is_there in one.pools.items():
                assert is_there is None or (name in there) == is_there
            one.pools = {name: name in there for name in one.pools}
            one.write(array)
