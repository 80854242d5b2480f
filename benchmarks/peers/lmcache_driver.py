"""LMCache's own client for its server, driven by lines: run by the interpreter of LMCache's environment.

Each line on stdin is ``store N``, ``lookup N`` or ``retrieve N``, about the N-th request's tokens; the answer on stdout
is one JSON object: how long LMCache's client says that it took, in ms, and what failed. ``ready`` comes first. Before a
retrieve the pages are zeroed, after it they are compared with what was stored. Knows nothing of kvferry.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from typing import Any

BENCH = "lmcache.cli.commands.bench.server_bench"


class Driver:
    """One engine of LMCache's, whose requests all lie in the same pages."""

    def __init__(self, rpc_url: str, http_url: str, tokens: int, shape: str) -> None:
        config = importlib.import_module(f"{BENCH}.config").BenchConfig(
            rpc_url=rpc_url,
            http_url=http_url,
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=tokens,
            kvcache_shape_spec=shape,
            num_blocks=0,
            block_size=0,
        )
        self._client: Any = importlib.import_module(f"{BENCH}.client").ServerBenchClient(config, log=_ignore)
        self._client.start()
        self._numbers = itertools.count()
        (worker,) = self._client._workers  # noqa: SLF001  pinned to one version; it offers no other way to the pages
        self._tensors = list(worker.kv_caches.values())
        self._stored = [one.clone() for one in self._tensors]

    def store(self, number: int) -> float:
        """Store a request that is not there yet; return the milliseconds."""
        request = self._request(number)
        self._found(request, 0)
        stored = self._client.store(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        return _milliseconds(stored)

    def lookup(self, number: int) -> float:
        """Look a stored request up; return the milliseconds until its hit count is known."""
        request = self._request(number)
        latency_ms = self._found(request, request.total_chunks)
        self._client.retrieve(request, 0, request.num_full_tokens)  # which gives back what the lookup has locked
        self._client.end_session(request)
        return latency_ms

    def retrieve(self, number: int) -> float:
        """Retrieve a stored request, and compare every byte; return the milliseconds of the retrieve alone."""
        request = self._request(number)
        self._found(request, request.total_chunks)
        for tensor in self._tensors:
            tensor.zero_()
        retrieved = self._client.retrieve(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        pages = slice(request.block_offset, request.block_offset + request.num_blocks)
        for came, stored in zip(self._tensors, self._stored, strict=True):
            if not bool((came[:, pages] == stored[:, pages]).all()):
                raise RuntimeError("a retrieved page is not what was stored")
            came.copy_(stored)
        return _milliseconds(retrieved)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _request(self, number: int) -> Any:  # noqa: ANN401  its classes are not there to be named
        return self._client.create_request(number, f"request-{next(self._numbers)}", "bench")

    def _found(self, request: Any, chunks: int) -> float:  # noqa: ANN401  as above
        found = self._client.lookup(request)
        if not found.succeeded or found.hit_chunks != chunks:
            raise RuntimeError(f"{found.hit_chunks} chunks were found, not {chunks}: {found.error}")
        return float(found.latency_ms)


def _milliseconds(transfer: Any) -> float:  # noqa: ANN401  as above
    if not transfer.succeeded:
        raise RuntimeError(f"{transfer.operation} failed")
    return float(transfer.latency_ms)


def _ignore(_message: str) -> None:
    """Keep stdout for answers."""


def main(rpc_url: str, http_url: str, tokens: str, shape: str) -> None:
    """Serve lines until there is no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # LMCache logs to it
    driver = Driver(rpc_url, http_url, int(tokens), shape)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        operation, number = line.split()
        try:
            answer = {"ms": getattr(driver, operation)(int(number))}
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
