"""A daemon as a process: what it has imported when it is ready, who of its user may look into it, and its garbage."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.clients import BlockTableEntries, Client, MhaSpec, ModelIdentity, new_request_id, pages
from kvferry.daemon.process.garbage import collect_new_only
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
    assert client.status().counters["transfers.layered"] == 1
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
    """Later there may be no descriptor to read it by."""
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


# Runs the daemon as another user: what it imports lies where only root can read, perhaps.
AS_ANOTHER_USER = """
import ctypes, importlib.util, os, sys
import kvferry.daemon.daemon, kvferry.clients, structlog.dev, encodings.idna, shutil, uvloop
program = importlib.util.find_spec("kvferry.daemon.__main__").loader.get_code("kvferry.daemon.__main__")
os.setgroups([]); os.setgid(12345); os.setuid(12345)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process is that this user has started: setuid closes it
if os.fork():
    _, status = os.wait()
    sys.exit(os.waitstatus_to_exitcode(status))
sys.argv[1:] = ["--runtime-dir", sys.argv[1]]
exec(program, {"__name__": "__main__"})
"""
LOOK = """
import os, sys
from kvferry.clients import Client, MhaSpec
os.setgroups([]); os.setgid(12345); os.setuid(12345)
spec = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
with Client.connect(sys.argv[1]) as client:
    array = client.create_pool("pool", spec).array("main", "k")
    array[:] = 7
    pid = client.status().pid
    for file in ("mem", *(f"fd/{number}" for number in range(64))):
        try: os.open(f"/proc/{pid}/{file}", os.O_RDWR)
        except OSError as error: assert isinstance(error, PermissionError), error
        else: print("opened", file)
    open(f"/proc/{pid}/stat").close()
    os.close(os.pidfd_open(pid))
    print("looked", int(array.max()))
"""


def test_the_daemon_is_closed_to_its_own_user(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        os.chown(folder, 12345, 12345)
        run = Path(folder) / "run"
        daemon = subprocess.Popen(
            [sys.executable, "-c", AS_ANOTHER_USER, run], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        with daemon:
            assert daemon.stderr is not None
            try:
                said = ""
                while '"serving"' not in said and (line := daemon.stderr.readline()):
                    said += line
                assert '"serving"' in said, said
                done = subprocess.run(
                    [sys.executable, "-c", LOOK, run], capture_output=True, text=True, check=False, timeout=60
                )
            finally:
                os.killpg(daemon.pid, 15)
    assert (done.stdout, done.stderr) == ("looked 7\n", "")


class Knot:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_outlived_a_full_collection_is_not_looked_at_again() -> None:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    try:
        collect_new_only()
        collect_new_only()
        assert len(gc.callbacks) <= len(callbacks) + 1, "asking twice changes nothing"
        kept, before, knot = [Knot() for _ in range(1000)], gc.get_freeze_count(), weakref.ref(Knot())
        gc.collect()
        assert gc.get_freeze_count() >= before + len(kept)
        assert knot() is None
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)
        gc.unfreeze()
