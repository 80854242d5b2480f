"""Servers with HiCache and kvferry as its storage: the same tokens as a plain server's, and where they came from.

Most tests share a server, and begin with nothing stored. SGLang copies between its device pool and
its host pool on accelerators only; ``stubs`` has these copies in torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients import Client, MhaSpec, ModelIdentity
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import SMOLLM2, TINY_MLA
from tests.kit.servers import Reply, prompt, running
from tests.sglang.expected import NEW, Expected
from tests.sglang.host_pools import EXTRA, Layout
from tests.sglang.servers import Server, request, server

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


KIND: Final = Kind(SMOLLM2, "layer_first", "daemon")
OTHERS: Final = {
    "page-first-of-the-engine": Kind(SMOLLM2, "page_first", "engine", "kernel"),
    "latents-page-first-direct": Kind(TINY_MLA, "page_first_direct", "daemon"),
}
"""The other layouts, memory and models."""


@contextmanager
def serving(kind: Kind, daemon: Daemon, folder: Path) -> Iterator[Server]:
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


@pytest.fixture(scope="module")
def daemon(expected: Expected) -> Iterator[Daemon]:  # noqa: ARG001  before, so that three servers never run at once
    with kit.daemon(keep=True) as one:
        yield one


@pytest.fixture(scope="module")
def one(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the server that most tests share."""
    with serving(KIND, daemon, tmp_path_factory.mktemp("hicache")) as server:
        yield server


def ask(one: Server, length: int) -> Reply:
    """Ask for the tokens after a prompt."""
    return one.post("/generate", request(prompt(length), NEW))


def from_storage(reply: Reply) -> int:
    """Return how many tokens came from the storage."""
    details = reply.body["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("storage") or 0)


def assert_answers(one: Server, expected: Expected, *, stored: bool) -> None:
    """Check tokens, and that all whole pages of the prompts came from the storage, or nothing did."""
    for length in LENGTHS:
        reply = ask(one, length)
        assert reply.tokens == expected.tokens(length), length
        assert from_storage(reply) == (length // PAGE * PAGE if stored else 0), (length, reply)


def wait_until_all_is_stored(daemon: Daemon, one: Server) -> None:
    """Return once all pages of the prompts and their answers lie in the host tier."""
    assert soon(lambda: stored_blocks(daemon) == STORED), one.log_tail()


def begin(one: Server, daemon: Daemon, expected: Expected) -> None:
    """Have nothing stored; ask, and have all of it stored."""
    one.flush()
    assert one.post("/hicache/storage-backend/clear", {}).status == 200
    assert stored_blocks(daemon) == 0
    assert_answers(one, expected, stored=False)
    wait_until_all_is_stored(daemon, one)


def stored_blocks(daemon: Daemon) -> int:
    """Return how many blocks lie in the host tier."""
    with Client.connect(daemon.runtime_dir) as client:
        return sum("host" in one.tiers for one in client.cached_blocks())


def test_found_after_a_flush_and_by_another_server(
    one: Server, daemon: Daemon, expected: Expected, tmp_path: Path
) -> None:
    begin(one, daemon, expected)
    one.flush()
    assert_answers(one, expected, stored=True)
    with serving(KIND, daemon, tmp_path) as other:
        assert_answers(other, expected, stored=True)


@pytest.mark.parametrize("name", OTHERS)
def test_found_after_a_flush(name: str, answers: Callable[[str], Expected], tmp_path: Path) -> None:
    expected = answers(OTHERS[name].model)
    with kit.daemon(keep=True) as daemon, serving(OTHERS[name], daemon, tmp_path) as one:
        begin(one, daemon, expected)
        one.flush()
        assert_answers(one, expected, stored=True)


def test_other_bytes_give_other_tokens(one: Server, daemon: Daemon, expected: Expected) -> None:
    """The control: with zeros in the place of what was stored, the answer is another one."""
    begin(one, daemon, expected)
    with Client.connect(daemon.runtime_dir) as client:
        blocks = list(client.cached_blocks())
        name, revision = blocks[0].model.rsplit("@", 1)
        hashes = [bytes.fromhex(block.hash) for block in blocks]
        spec = MhaSpec(layers=30, tokens=PAGE * len(blocks), page_size=PAGE, kv_heads=3, head_dim=64, dtype="float32")
        client.create_pool("zeros", spec, model=ModelIdentity(name=name, revision=revision))
        ids = client.allocate("zeros", len(blocks))
        assert client.evict_cached(hashes, pool="zeros").blocks == len(blocks)
        assert client.wait_done(client.store("zeros", hashes, ids)).stored == len(blocks)
    one.flush()
    for length in LENGTHS:
        reply = ask(one, length)
        assert from_storage(reply) == length // PAGE * PAGE
        assert reply.tokens != expected.tokens(length)


def test_a_killed_daemon_is_a_miss_and_stores_again_once_it_is_back(
    one: Server, daemon: Daemon, expected: Expected
) -> None:
    begin(one, daemon, expected)
    since = one.log_size()
    daemon.end()
    one.flush()
    assert_answers(one, expected, stored=False)
    assert "it counts as a miss" in one.logged(since)
    daemon.start()
    one.wait_until_logged("the daemon is back", since)
    begin(one, daemon, expected)
    one.flush()
    assert_answers(one, expected, stored=True)
