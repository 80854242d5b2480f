"""What a daemon needs it has imported when it says that it is ready: later there may be no descriptor to read it by."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from kvferry.clients import BlockTableEntries, Client, MhaSpec, ModelIdentity, new_request_id, pages
from kvferry.protocol.errors import CancelledError, DeadlineError, KvferryError
from tests import kit

SPEC = MhaSpec(layers=2, tokens=256, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
MODEL = ModelIdentity(name="m", revision="1")
CONFIG = """
[tiers]
host_bytes = "1MiB"
[tiers.disk]
path = "{disk}"
max_bytes = "1MiB"
"""


def works(client: Client, other: Client) -> None:
    """Ask two daemons for everything, also for what fails; the pages of one go to the other."""
    for number, one in enumerate((client, other)):
        one.create_pool(f"pool{number}", SPEC, model=MODEL)
    addresses = [client.status().addresses[0]]
    ids, theirs = client.allocate("pool0", 8), other.allocate("pool1", 8)
    ring = client.open_events()
    steps = [ring.step(0, 1), ring.step(1, 1)]
    request_id = new_request_id()
    receiving = other.receive("pool1", request_id, [pages(theirs)], source_daemons=addresses)
    sending = client.send("pool0", request_id, [pages(ids)], steps=steps, first_token=1, payload=b"state")
    for step in steps:
        ring.record(step)
    other.wait_finished(receiving)
    other.wait_settled(receiving)
    client.wait_settled(sending)
    for error, deadline_s in ((CancelledError, 9), (DeadlineError, 0.01)):
        alone = client.receive("pool0", new_request_id(), [pages(ids[:1])], deadline_s=deadline_s)
        if error is CancelledError:
            client.cancel(alone)
        with pytest.raises(error):
            client.wait_finished(alone)
        client.wait_settled(alone)
    with pytest.raises(KvferryError):
        client.free("pool0", [1, 1])
    offload = client.offload("pool0", [pages(ids)])
    client.wait_done(offload)
    client.wait_done(client.restore("pool0", offload.snapshot, lists=[pages(ids)]))
    hashes = [bytes([number]) * 16 for number in range(len(ids))]
    client.wait_done(client.store("pool0", hashes, ids))
    found = client.lookup("pool0", hashes)
    client.wait_done(client.load("pool0", found.lease, ids, unpin=True))
    tables = client.create_tables("tables", "pool0", max_batch=2, max_context_tokens=64)
    client.wait(client.update_tables(tables, [4, 4], entries=BlockTableEntries([0, 1], [0, 0], ids[:2])))
    client.delete_tables(tables)
    client.status()
    client.free("pool0", ids)


def test_nothing_is_imported_once_a_daemon_is_ready(tmp_path: Path) -> None:
    files = [tmp_path / name / "imports" for name in ("one", "other")]
    with contextlib.ExitStack() as stack:
        daemons = []
        path = os.pathsep.join([str(Path(__file__).with_name("importing")), os.environ.get("PYTHONPATH", "")])
        for file in files:
            disk = file.with_name("disk")
            disk.mkdir(parents=True)
            environment = {"PYTHONPATH": path, "KVFERRY_TEST_IMPORTS": str(file)}
            daemons.append(stack.enter_context(kit.daemon(CONFIG.format(disk=disk), environment=environment)))
        ready = [len(file.read_text().split()) for file in files]
        works(*(stack.enter_context(Client.connect(daemon.runtime_dir)) for daemon in daemons))
    assert all(ready), "nobody wrote anything down"
    assert [file.read_text().split()[count:] for file, count in zip(files, ready, strict=True)] == [[], []]
