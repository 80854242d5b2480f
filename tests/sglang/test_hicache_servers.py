"""Servers with HiCache and kvferry as its storage: the same tokens as a plain server's, and where they came from.

SGLang copies between its device pool and its host pool on accelerators only; ``stubs`` has these copies in torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients import Client, MhaSpec, ModelIdentity
from tests.daemons import RestartedDaemon, restarted_daemon, soon
from tests.sglang.expected import NEW, Expected
from tests.sglang.folders import SMOLLM2
from tests.sglang.host_pools import EXTRA, Layout
from tests.sglang.servers import Program, Reply, prompt, request, running, server

pytestmark = pytest.mark.long
LENGTHS: Final = (333, 600, 1000)
PAGE: Final = 64
STORED: Final = sum((length + NEW - 1) // PAGE for length in LENGTHS)
"""Pages that the prompts and what is generated after them fill; the last token's KV is never computed."""


class Kind(NamedTuple):
    """A model, how the host pool lies, who allocates it, and who copies."""

    model: str
    layout: Layout
    memory: str
    io: str = "direct"


KINDS: Final = {
    "mha": Kind(SMOLLM2, "layer_first", "daemon"),
    "mha-page-first": Kind(SMOLLM2, "page_first", "engine", "kernel"),
}


@contextmanager
def serving(kind: Kind, daemon: RestartedDaemon, folder: Path) -> Iterator[Program]:
    """Run a server with HiCache."""
    options: Sequence[str] = (
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", str(PAGE)),
        *("--hicache-mem-layout", kind.layout, "--hicache-io-backend", kind.io),
        *("--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic", "--enable-cache-report"),
        *("--hicache-storage-backend-extra-config", json.dumps({**EXTRA, "prefetch_threshold": PAGE})),
    )
    environment = {"KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir), "KVFERRY_SGLANG_MEMORY": kind.memory}
    one = server(folder, "plain", model=kind.model, options=options, environment=environment)
    with running(one):
        yield one


def ask(one: Program, length: int) -> Reply:
    """Ask for the tokens after a prompt."""
    return one.post("/generate", request(prompt(length), NEW))


def from_storage(reply: Reply) -> int:
    """Return how many tokens came from the storage."""
    details = reply.body["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("storage") or 0)


def flush(one: Program) -> None:
    """Empty SGLang's own caches, once it is idle."""
    assert soon(lambda: one.post("/flush_cache", {}).status == 200)


def assert_answers(one: Program, expected: Expected, *, stored: bool) -> None:
    """Check tokens, and that all whole pages of the prompts came from the storage, or nothing did."""
    for length in LENGTHS:
        reply = ask(one, length)
        assert reply.tokens == expected.tokens(length), length
        assert from_storage(reply) == (length // PAGE * PAGE if stored else 0), (length, reply)


def stored_blocks(daemon: RestartedDaemon, tier: str) -> int:
    """Return how many blocks lie in a tier."""
    with Client.connect(daemon.runtime_dir) as client:
        return sum(tier in one.tiers for one in client.cached_blocks())


def story(kind: Kind, expected: Expected, folder: Path) -> None:
    """Ask a server, ask it again after a flush, and ask another one after its end."""
    with restarted_daemon() as daemon:
        with serving(kind, daemon, folder) as one:
            assert_answers(one, expected, stored=False)
            assert soon(lambda: stored_blocks(daemon, "host") >= STORED), one.log_tail()
            flush(one)
            assert_answers(one, expected, stored=True)
        with serving(kind, daemon, folder) as other:
            assert_answers(other, expected, stored=True)


def test_found_after_a_flush_and_by_another_server(expected: Expected, tmp_path: Path) -> None:
    story(KINDS["mha"], expected, tmp_path)


def test_another_layout_registered_by_the_server(expected: Expected, tmp_path: Path) -> None:
    story(KINDS["mha-page-first"], expected, tmp_path)


def test_other_bytes_give_other_tokens(expected: Expected, tmp_path: Path) -> None:
    """The control: with zeros in the place of what was stored, the answer is another one."""
    with restarted_daemon() as daemon, serving(KINDS["mha"], daemon, tmp_path) as one:
        assert_answers(one, expected, stored=False)
        assert soon(lambda: stored_blocks(daemon, "host") >= STORED)
        with Client.connect(daemon.runtime_dir) as client:
            blocks = list(client.cached_blocks())
            name, revision = blocks[0].model.rsplit("@", 1)
            hashes = [bytes.fromhex(block.hash) for block in blocks]
            spec = MhaSpec(
                layers=30, tokens=PAGE * len(blocks), page_size=PAGE, kv_heads=3, head_dim=64, dtype="float32"
            )
            client.create_pool("zeros", spec, model=ModelIdentity(name=name, revision=revision))
            ids = client.allocate("zeros", len(blocks))
            assert client.evict_cached(hashes).blocks == len(blocks)
            assert client.wait_done(client.store("zeros", hashes, ids)).stored == len(blocks)
        flush(one)
        for length in LENGTHS:
            reply = ask(one, length)
            assert from_storage(reply) == length // PAGE * PAGE
            assert reply.tokens != expected.tokens(length)
