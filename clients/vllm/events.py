"""KV cache events of the prefix cache, for routers: which blocks this engine has stored, and which of them are gone."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvferry.clients import Client, KvferryError
from kvferry.pools.layouts import manifest_of
from kvferry.pools.tiers.cached_block import identity_of
from kvferry.protocol.tier_messages import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvferry.clients.engine import Engine
    from kvferry.clients.vllm.memory import Spec
    from kvferry.protocol.ids import ModelIdentity

logger = logging.getLogger(__name__)

MEDIUM: Final = "KVFERRY"
"""Where the blocks are: any of the daemon's tiers."""

MOST_STORES: Final = 65536
"""That are told of when they are done; of more, the oldest are not."""

LOOK_S: Final = 1.0
EVENTS: Final = 1000


class CacheEventLog:
    """What has been stored, and what is gone, since it was last taken. A thread of its own hears of the latter."""

    def __init__(
        self, engine: Engine, block_size: int, hash_size: int, model: ModelIdentity, specs: Sequence[Spec]
    ) -> None:
        """Begin to listen.

        Args:
            engine: of the scheduler's process.
            block_size: tokens of a block that is stored.
            hash_size: tokens of a block that vLLM hashes.
            model: of the blocks.
            specs: of each rank's pool, all of which have to store a block.
        """
        self._engine = engine
        self._block_size = block_size
        self._hashes = block_size // hash_size
        self._ranks = len(specs)
        self._identity = identity_of(model)
        self._digests = {manifest_of(one).layout_digest for one in specs}
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[BlockStored, list[bytes], int]] = {}
        self._known: dict[bytes, tuple[object, set[str]]] = {}
        """Of each block that was told of: its hash as routers know it, and the tiers it is in."""
        self._events: deque[KVCacheEvent] = deque(maxlen=MOST_STORES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kvferry-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Show how many blocks are known."""
        return f"<CacheEventLog of {len(self._known)} blocks>"

    def stores(self, number: int, request: Request, names: list[bytes], first: int, groups: int) -> None:
        """Take note of a store that begins: of the blocks ``names`` of a request, from block ``first`` on.

        ``groups``: how many of them each rank stores.
        """
        stop = first + len(names)
        hashes = [request.block_hashes[at] for at in range(self._hashes - 1, len(request.block_hashes), self._hashes)]
        adapter = request.lora_request
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes[first:stop]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * self._block_size : stop * self._block_size]),
            block_size=self._block_size,
            lora_id=None if adapter is None else adapter.adapter_id,
            medium=MEDIUM,
            lora_name=None if adapter is None else adapter.name,
        )
        with self._lock:
            self._pending[number] = event, names, self._ranks * groups
            while len(self._pending) > MOST_STORES:
                del self._pending[next(iter(self._pending))]

    def stored(self, numbers: Iterable[int]) -> None:
        """Tell of stores that are done: each rank says so."""
        with self._lock:
            for number in numbers:
                event, names, ranks = self._pending.pop(number, (None, [], 0))
                if event is None:
                    continue
                if ranks > 1:
                    self._pending[number] = event, names, ranks - 1
                    continue
                self._events.append(event)
                for name, known_as in zip(names, event.block_hashes, strict=True):
                    self._known.setdefault(name, (known_as, {"host"}))

    def take(self) -> list[KVCacheEvent]:
        """Return what was not taken yet."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
        return taken

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                with self._engine.connect(f"{self._engine.name}-events") as client:
                    self._follow(client)
            except KvferryError as error:
                logger.debug("kvferry: cache events: %s", error)
                self._closed.wait(LOOK_S)

    def _follow(self, client: Client) -> None:
        cursor, boot_id = client.cache_cursor(), client.boot_id
        while not self._closed.is_set():
            changes = client.cache_events(cursor, limit=EVENTS, timeout_s=LOOK_S)
            if changes.lost or client.boot_id != boot_id:
                self._gone(list(self._known))
                return
            cursor = changes.cursor
            for change in changes.changes:
                if change.identity != self._identity or change.layout_digest not in self._digests:
                    continue  # another model's blocks may have the same hashes
                names = [change.hashes[at : at + HASH_BYTES] for at in range(0, len(change.hashes), HASH_BYTES)]
                with self._lock:
                    tiers = [self._known[one][1] for one in names if one in self._known]
                for one in tiers:
                    (one.add if change.kind == "stored" else one.discard)(change.tier)
                self._gone([name for name in names if name in self._known and not self._known[name][1]])

    def _gone(self, names: list[bytes]) -> None:
        with self._lock:
            hashes = [self._known.pop(one)[0] for one in names if one in self._known]
            if hashes:
                self._events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM))
