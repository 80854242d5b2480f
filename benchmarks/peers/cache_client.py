"""A client of one of three caches, driven by lines: run by the interpreter of its environment.

Each line on stdin is ``fill N``, ``store N`` or ``get N``: make the N-th item's bytes, store them, or look them up,
load and compare them. The answer on stdout is one JSON object: whether the item was found, how many of its bytes are
wrong, or the error and its type; ``{}``, once all is imported, and ``ready`` come first. Requests have a deadline of
ten seconds. After an error the next line connects anew, unless the cache's own client does that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import sys
from typing import Any

DEADLINE_S = 10.0
PAGE, BLOCK = 16, 256
"""Tokens; of a block in ours and in LMCache's."""

LAYERS, HEADS, DIM = 8, 8, 128
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 2


@functools.lru_cache(maxsize=1)
def content(number: int, size_bytes: int) -> bytes:
    """Return the bytes of an item, which are noise of its own."""
    return random.Random(number).randbytes(size_bytes)  # noqa: S311  noise


class Cache:
    """What a client of each cache does."""

    reconnects = True
    """Whether it does so by itself."""

    module: str
    """What it imports, which takes seconds."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.size_bytes = tokens, tokens * TOKEN_BYTES

    def do(self, operation: str, number: int) -> int | None:
        """Fill, store or get an item; return how many of its bytes are wrong, or None where it is not found."""
        if operation == "fill":
            self._fill(content(number, self.size_bytes))
        if operation == "store":
            self._store(number)
        if operation != "get":
            return 0
        came, stored = self._load(number), content(number, self.size_bytes)
        if came is None or came == stored:
            return None if came is None else 0
        return sum(one != other for one, other in zip(came, stored, strict=True))

    def _fill(self, data: bytes) -> None:
        """Put the bytes where they are stored from."""
        raise NotImplementedError

    def _store(self, number: int) -> None:
        """Store them."""
        raise NotImplementedError

    def _load(self, number: int) -> bytes | None:
        """Return the item's bytes, or None where it is not found."""
        raise NotImplementedError


class Kvferry(Cache):
    """Ours: an engine with a pool that has room for one item, and goes with the engine."""

    module = "kvferry.clients.sync_client"

    def __init__(self, runtime_dir: str, tokens: int) -> None:
        super().__init__(tokens)
        self._clients: Any = importlib.import_module("kvferry.clients")
        self._client = self._clients.Client.connect(runtime_dir, name="bench", timeout_s=DEADLINE_S)
        spec = self._clients.MhaSpec(
            layers=LAYERS, tokens=tokens, page_size=PAGE, kv_heads=HEADS, head_dim=DIM, dtype="float16"
        )
        self._name, model = f"pool-{os.getpid()}", self._clients.ModelIdentity(name="bench")
        pool = self._client.create_pool(self._name, spec, model=model, lifetime="instance")
        self._ids = self._client.allocate(self._name, tokens // PAGE)
        arrays = [pool.array("main", role) for role in ("k", "v")]
        self._parts = [array.reshape(*array.shape[:2], -1).view("uint8") for array in arrays]

    def _fill(self, data: bytes) -> None:
        flat = importlib.import_module("numpy").frombuffer(data, "uint8")
        for part, half in zip(self._parts, flat.reshape(2, LAYERS, len(self._ids), -1), strict=True):
            part[:, self._ids] = half

    def _store(self, number: int) -> None:
        operation = self._client.store(self._name, self._hashes(number), self._ids, block_pages=BLOCK // PAGE)
        self._client.wait_done(operation, DEADLINE_S)

    def _load(self, number: int) -> bytes | None:
        hashes, groups = self._hashes(number), [self._clients.CacheGroup(block_pages=BLOCK // PAGE)]
        found = self._client.lookup(self._name, hashes, groups=groups)
        if found.blocks < len(hashes):
            if found.blocks:
                self._client.unpin(found.lease)
            return None
        for part in self._parts:
            part[:] = 0
        self._client.wait_done(self._client.load(self._name, found.lease, self._ids), DEADLINE_S)
        self._client.unpin(found.lease)
        return b"".join(part[:, self._ids].tobytes() for part in self._parts)

    def _hashes(self, number: int) -> list[bytes]:
        blocks = range(self.tokens // BLOCK)
        return [hashlib.sha256(f"{number} {block}".encode()).digest()[:16] for block in blocks]


class LMCache(Cache):
    """LMCache's own client, that of its server benchmark, with pages of one item in shared memory."""

    reconnects = False
    module = "lmcache.cli.commands.bench.server_bench.helpers"
    numbers = itertools.count()

    def __init__(self, urls: str, tokens: int) -> None:
        super().__init__(tokens)
        bench, (rpc_url, http_url) = self.module.removesuffix(".helpers"), urls.split(",")
        number = next(LMCache.numbers) << 22 | os.getpid()  # of its own for each connection
        vars(importlib.import_module(self.module))["_INSTANCE_ID_BASE"] = number
        config = importlib.import_module(f"{bench}.config").BenchConfig(
            rpc_url=rpc_url,
            http_url=http_url,
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=tokens,
            kvcache_shape_spec=f"(2,{tokens // PAGE},{PAGE},{HEADS},{DIM}):float16:{LAYERS}",
            num_blocks=0,
            block_size=0,
        )
        self._client: Any = importlib.import_module(f"{bench}.client").ServerBenchClient(config, log=lambda _: None)
        self._client.start()
        (worker,) = self._client._workers  # noqa: SLF001  pinned to one version; it offers no other way to the pages
        self._parts = [tensor.view(-1).numpy().view("uint8") for tensor in worker.kv_caches.values()]
        self._requests = 0

    def _fill(self, data: bytes) -> None:
        size_bytes = len(self._parts[0])
        for index, part in enumerate(self._parts):
            part[:] = memoryview(data)[index * size_bytes : (index + 1) * size_bytes]

    def _store(self, number: int) -> None:
        request = self._request(number)
        stored = self._client.store(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        if not stored.succeeded:
            raise RuntimeError("STORE failed, or had no answer")

    def _load(self, number: int) -> bytes | None:
        request = self._request(number)
        found = self._client.lookup(request)
        if found.error:
            raise RuntimeError(f"LOOKUP: {found.error}")
        for part in self._parts:
            part[:] = 0
        came = self._client.retrieve(request, 0, found.hit_chunks * BLOCK)  # which gives back what LOOKUP locked
        self._client.end_session(request)
        if found.hit_chunks < found.total_chunks:
            return None
        if not came.succeeded:
            raise RuntimeError("RETRIEVE failed, or had no answer")
        return b"".join(part.tobytes() for part in self._parts)

    def _request(self, number: int) -> Any:  # noqa: ANN401  its classes are not there to be named
        self._requests += 1
        return self._client.create_request(number, f"{os.getpid()}-{id(self)}-{self._requests}", "bench")


class Datasystem(Cache):
    """The datasystem's key-value client; an item is one value, which may be evicted."""

    module = "yr.datasystem.kv_client"

    def __init__(self, address: str, tokens: int) -> None:
        super().__init__(tokens)
        module, (host, port) = importlib.import_module("yr.datasystem.kv_client"), address.split(":")
        self._client, self._mode = module.KVClient(host, int(port), int(DEADLINE_S * 1000)), module.WriteMode
        self._client.init()
        self._data = b""

    def _fill(self, data: bytes) -> None:
        self._data = data

    def _store(self, number: int) -> None:
        self._client.set(f"item-{number}", self._data, self._mode.NONE_L2_CACHE_EVICT)

    def _load(self, number: int) -> bytes | None:
        try:
            return bytes(self._client.get([f"item-{number}"])[0])
        except RuntimeError as error:
            if "Key not found" in str(error):
                return None
            raise


def main(kind: str, address: str, tokens: str) -> None:
    """Serve lines until there is no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # some libraries log to it
    kinds: dict[str, Any] = {one.__name__: one for one in Cache.__subclasses__()}
    connect = functools.partial(kinds[kind], address, int(tokens))
    importlib.import_module(kinds[kind].module)
    print("{}", file=answers, flush=True)
    cache: Cache | None = connect()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        operation, number = line.split()
        try:
            cache = cache or connect()
            wrong = cache.do(operation, int(number))
            answer = {"found": wrong is not None, "wrong": wrong or 0}
        except Exception as error:  # noqa: BLE001  whatever it is, the other side is told
            answer = {"error": f"{type(error).__name__}: {error}"}
            cache = cache if cache and cache.reconnects else None
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a server that stands still holds up nobody's end
