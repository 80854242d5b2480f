"""Servers with HiCache and kvferry as its storage: the same tokens as a plain server's, and where they came from.

Each test begins with nothing stored. SGLang copies between its device pool and its host pool on accelerators only;
``stubs`` has these copies in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvferry.clients import Client, MhaSpec, ModelIdentity
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.folders import SMOLLM2, TINY_DELTA, TINY_MLA, TINY_WINDOWS
from tests.kit.servers import Reply, prompt, running
from tests.sglang.servers import HICACHE_PAGE as PAGE
from tests.sglang.servers import NEW_TOKENS, Expected, Server, hicache, request, server

pytestmark = pytest.mark.long
LENGTHS: Final = (333, 600, 1000)
STORED: Final = sum((length + NEW_TOKENS - 1) // PAGE for length in LENGTHS)
"""Pages that the prompts and what is generated after them fill; the last token's KV is never computed."""


class Kind(NamedTuple):
    """A model, how the host pool lies, who allocates it, and who copies."""

    model: str
    layout: str
    memory: str
    io: str = "direct"
    page_size: int = PAGE


KINDS: Final = {
    "layer-first": Kind(SMOLLM2, "layer_first", "daemon"),
    "page-first-of-the-engine": Kind(SMOLLM2, "page_first", "engine", "kernel"),
    "latents-page-first-direct": Kind(TINY_MLA, "page_first_direct", "daemon"),
}
WINDOWS: Final = Kind(TINY_WINDOWS, "layer_first", "daemon")
STATES: Final = Kind(TINY_DELTA, "page_first_direct", "daemon", page_size=1)


@contextmanager
def serving(kind: Kind, daemon: Daemon, folder: Path) -> Iterator[Server]:
    """Run a server with HiCache."""
    environment = {"KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir), "KVFERRY_SGLANG_MEMORY": kind.memory}
    one = server(
        folder,
        "plain",
        model=kind.model,
        options=hicache(kind.layout, kind.io, kind.page_size),
        environment=environment,
    )
    with running(one):
        yield one


def from_storage(reply: Reply) -> int:
    """Return how many tokens came from the storage."""
    details = reply.body["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("storage") or 0)


def assert_answers(one: Server, expected: Expected, *, stored: bool, same: bool = True) -> None:
    """Check tokens after a flush, and that all whole pages of prompts came from the storage, or nothing did."""
    one.flush()
    for length in LENGTHS:
        reply = one.post("/generate", request(prompt(length)))
        assert (reply.tokens == expected.tokens(length)) is same, length
        assert from_storage(reply) == (length // PAGE * PAGE if stored else 0), (length, reply)


def begin(one: Server, daemon: Daemon, expected: Expected) -> None:
    """Have nothing stored; ask, and have all of it stored."""
    one.flush()
    assert one.post("/hicache/storage-backend/clear", {}).status == 200
    assert stored_blocks(daemon) == 0
    assert_answers(one, expected, stored=False)
    assert soon(lambda: stored_blocks(daemon) == STORED), one.log_tail()


def stored_blocks(daemon: Daemon) -> int:
    """Return how many blocks lie in the host tier."""
    with Client.connect(daemon.runtime_dir) as client:
        return sum("host" in one.tiers for one in client.cached_blocks())


@pytest.mark.parametrize("name", KINDS)
def test_found_after_a_flush(name: str, answers: Callable[[str], Expected], tmp_path: Path) -> None:
    expected = answers(KINDS[name].model)
    with kit.daemon(keep=True) as daemon, serving(KINDS[name], daemon, tmp_path) as one:
        begin(one, daemon, expected)
        assert_answers(one, expected, stored=True)
        if name != "layer-first":
            return
        (tmp_path / "other").mkdir()
        with serving(KINDS[name], daemon, tmp_path / "other") as other:
            assert_answers(other, expected, stored=True)


def test_windows_are_found_after_a_flush_and_full_attention_alone_is_not(
    answers: Callable[[str], Expected], tmp_path: Path
) -> None:
    expected = answers(TINY_WINDOWS)
    with kit.daemon(keep=True) as daemon, serving(WINDOWS, daemon, tmp_path) as one:
        assert_answers(one, expected, stored=False)
        with Client.connect(daemon.runtime_dir) as client:
            [windows] = [pool.pool for pool in client.status().pools if pool.pool.endswith("-swa")]

            def is_stored() -> bool:
                """Return whether full attention is: SGLang stores the windows before it."""
                found = Counter(block.identity for block in client.cached_blocks())
                return len(found) == 2 and max(found.values()) == STORED

            assert soon(is_stored), one.log_tail()
            assert_answers(one, expected, stored=True)
            assert client.evict_cached(pool=windows).blocks > 0
        assert_answers(one, expected, stored=False)


def test_states_are_found_where_a_request_has_ended_and_full_attention_alone_is_not(
    answers: Callable[[str], Expected], tmp_path: Path
) -> None:
    expected = answers(TINY_DELTA)
    begun = {length: length // 2 for length in LENGTHS}

    def assert_found(*, stored: bool) -> None:
        one.flush()
        for length, start in begun.items():
            reply = one.post("/generate", request(prompt(length)))
            assert reply.tokens == expected.tokens(length)
            assert from_storage(reply) == (start if stored else 0), (length, reply)

    with (
        kit.daemon(keep=True) as daemon,
        serving(STATES, daemon, tmp_path) as one,
        Client.connect(daemon.runtime_dir) as client,
    ):
        [states] = [pool.pool for pool in client.status().pools if pool.pool.endswith("-mamba")]
        for length, start in begun.items():
            assert len(one.post("/generate", request(prompt(length)[:start], 1)).tokens) == 1
        assert soon(lambda: stored_blocks(daemon) == sum(begun.values()) + len(begun)), one.log_tail()
        assert_found(stored=True)
        assert client.evict_cached(pool=states).blocks > 0
        assert_found(stored=False)


def test_other_bytes_give_other_tokens_and_a_killed_daemon_is_a_miss(expected: Expected, tmp_path: Path) -> None:
    """The control: with zeros in the place of what was stored, the answer is another one."""
    with kit.daemon(keep=True) as daemon, serving(KINDS["layer-first"], daemon, tmp_path) as one:
        begin(one, daemon, expected)
        with Client.connect(daemon.runtime_dir) as client:
            blocks = list(client.cached_blocks())
            name, revision = blocks[0].model.rsplit("@", 1)
            hashes = [bytes.fromhex(block.hash) for block in blocks]
            spec = MhaSpec(
                layers=30, tokens=PAGE * len(blocks), page_size=PAGE, kv_heads=3, head_dim=64, dtype="float32"
            )
            client.create_pool("zeros", spec, model=ModelIdentity(name=name, revision=revision))
            ids = client.allocate("zeros", len(blocks))
            assert client.evict_cached(hashes, pool="zeros").blocks == len(blocks)
            assert client.wait_done(client.store("zeros", hashes, ids)).stored == len(blocks)
        assert_answers(one, expected, stored=True, same=False)
        since = one.log_size()
        daemon.kill()
        assert_answers(one, expected, stored=False)
        assert "it counts as a miss" in one.logged(since)
        daemon.start()
        one.wait_until_logged("the daemon is back", since)
        begin(one, daemon, expected)
        assert_answers(one, expected, stored=True)
