"""Engines that die, daemons that end, pools that are full: everybody concerned hears of it, and pages come back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.clients import Client, new_request_id, pages
from kvferry.daemon.control.later import AT_ONCE
from kvferry.daemon.daemon import EXIT_BAD_INPUT, main
from kvferry.protocol import errors
from kvferry.protocol.ids import HOST
from tests import kit
from tests.daemon.victims import ALL, PAGES, SENT, SPEC, VALUE
from tests.kit.daemons import END_S, TUNED_COMMAND, Daemon
from tests.kit.devices import DEVICE
from tests.kit.started import Started, started

pytestmark = pytest.mark.any_device

SOON_S = 120.0
VICTIMS = Path(__file__).with_name("victims.py")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with surviving(daemon) as one:
        yield one


@contextlib.contextmanager
def surviving(daemon: Daemon) -> Iterator[Client]:
    """Connect a client, once all pages that tests before have left are free again."""
    with Client.connect(daemon.runtime_dir, name="survivor", reconnect=False) as one:
        for name in ("send", "receive"):
            one.create_pool(name, SPEC, device=DEVICE.name)
        wait_until_gone(one, 1)
        assert all(has_free(one, name, ALL) for name in ("send", "receive"))
        yield one


@contextlib.contextmanager
def victim(daemon: Daemon, side: str, request_id: str, *flags: str) -> Iterator[Started]:
    """Run an engine up to where it waits to be killed; its children go too."""
    program = [str(VICTIMS), DEVICE.name, side, str(daemon.runtime_dir), request_id, *flags]
    with started(program, new_session=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == str(process.pid) for line in process.stdout), "torch_npu may say more"
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def has_free(client: Client, pool: str, count: int) -> bool:
    """Return whether a pool has so many free pages: at once on the host, on a device once it works for nobody dead."""
    ends_at = time.monotonic() + (0 if DEVICE.name == HOST else SOON_S)
    while True:  # each look is a round trip
        (found,) = (one.free for one in client.status().pools if one.pool == pool)
        if found == count or time.monotonic() >= ends_at:
            return found == count


def wait_until_gone(client: Client, sessions: int) -> None:
    """Return once the daemon has at most so many sessions: it has noticed the death. Each look is a round trip."""
    while len(client.status().sessions) > sessions:
        pass


@pytest.mark.parametrize("flags", [(), ("fork",)], ids=["alone", "with a child"])
def test_prefill_dies_before_its_last_send(daemon: Daemon, client: Client, flags: tuple[str, ...]) -> None:
    request_id, ids = new_request_id(), client.allocate("receive", SENT)
    transfer = client.receive("receive", request_id, [pages(ids)])
    with victim(daemon, "send", request_id, *flags) as engine:
        assert has_free(client, "send", ALL - PAGES)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(errors.PeerLostError):
            client.wait_finished(transfer, timeout_s=SOON_S)
        client.wait_settled(transfer)
        assert has_free(client, "send", ALL)
    again = client.receive("receive", request_id, [pages(ids)])
    sent = client.send("send", request_id, [pages(client.allocate("send", SENT))])
    assert client.wait_finished(again).generation == 2
    client.wait_settled(sent)


@pytest.mark.parametrize("flags", [(), ("fork",)], ids=["alone", "with a child"])
def test_prefill_dies_after_its_last_send(daemon: Daemon, client: Client, flags: tuple[str, ...]) -> None:
    request_id = new_request_id()
    with victim(daemon, "send", request_id, "last", *flags) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        wait_until_gone(client, 1)
        assert has_free(client, "send", ALL - SENT), "idle pages are back at once, the offered ones are held"
        ids = client.allocate("receive", SENT)
        pool = client.attach_pool("receive")
        transfer = client.receive("receive", request_id, [pages(ids)])
        assert client.wait_finished(transfer).pages == SENT
        client.wait_settled(transfer)
        assert (pool.tensor("main", "k")[:, torch.from_numpy(ids)] == VALUE).all()
        assert has_free(client, "send", ALL)


@pytest.mark.parametrize("flags", [(), ("fork",), ("crowd",)], ids=["alone", "with a child", "with a crowd"])
def test_decode_dies(daemon: Daemon, client: Client, flags: tuple[str, ...]) -> None:
    assert ALL > AT_ONCE, "a crowd is of more transfers than are logged in a turn of the loop"
    request_id = new_request_id()
    with victim(daemon, "receive", request_id, *flags) as engine:
        ids = client.allocate("send", SENT)
        sent = client.send("send", request_id, [pages(ids[:1])], last=False)
        assert has_free(client, "receive", 0 if flags == ("crowd",) else ALL - PAGES)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(errors.PeerLostError):
            client.wait_finished(sent, timeout_s=SOON_S)
        client.wait_settled(sent)
        assert client.free("send", ids).deferred == 0
        wait_until_gone(client, 1)
        assert has_free(client, "receive", ALL)
    assert not [one for one in client.status().transfers if one.direction == "receive"]


@pytest.mark.host_only
def test_sigterm_fails_what_waits_and_ends_with_0() -> None:
    with kit.daemon() as mortal, surviving(mortal) as client:
        transfer = client.receive("receive", new_request_id(), [pages(client.allocate("receive", 1))])
        while transfer.accepted is None:
            client.poll(1.0)
        mortal.process.terminate()
        with pytest.raises(errors.ShuttingDownError):
            client.wait_finished(transfer)
        assert mortal.process.wait(30) == 0
        with pytest.raises(errors.DaemonLostError):
            client.ping()


@pytest.mark.host_only
def test_memory_of_pools_is_left_out_of_core_files(daemon: Daemon, client: Client) -> None:
    assert client.status().pools
    _, *regions = Path(f"/proc/{daemon.process.pid}/smaps").read_text().split("memfd:kvferry")
    flags = [next(line for line in region.splitlines() if line.startswith("VmFlags")) for region in regions]
    assert flags
    assert all(" dd" in one for one in flags)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("[pools\n", "broken.toml"),
        ("[peers]\nlisten = 'tcp://999.1.1.1:80'\n", "peers.listen"),
        ("[tiers]\nhost_bytes = '1023TiB'\n", "tiers.host_bytes"),
        (None, "No such file or directory (name a readable file"),
        (f"runtime_dir = '/{'x' * 120}'\n", "runtime_dir"),  # too long for a socket
    ],
)
@pytest.mark.host_only
def test_a_wrong_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None, named: str
) -> None:
    file = tmp_path / "broken.toml"
    if config is not None:
        file.write_text(config)
    assert main(["--config", str(file)]) == EXIT_BAD_INPUT, "no restart mends it: RestartPreventExitStatus"
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("config", "status", "named"),
    [
        ("[tiers.disk]\npath = '{folder}/daemon.toml'\n", EXIT_BAD_INPUT, "[tiers.disk.path]"),
        # What is in the way now may be gone later, so the unit restarts what ends with 1.
        ("[tiers.disk]\npath = '{folder}/later'\n", 1, "[tiers.disk.path]"),
        ("[peers]\nlisten = 'tcp://127.0.0.1:{port}'\n", 1, "CONFIG [peers.listen]"),
        ("[metrics]\nlisten = 'tcp://127.0.0.1:{port}'\n", 1, "CONFIG [metrics.listen]"),
        ("runtime_dir = '{running}'\n", 1, "another daemon (pid {pid} on"),
    ],
)
@pytest.mark.host_only
def test_what_is_in_a_daemons_way_is_one_line(
    tmp_path: Path, daemon: Daemon, config: str, status: int, named: str
) -> None:
    file, log = tmp_path / "daemon.toml", tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as server, log.open("wb") as output:
        values = {"folder": tmp_path, "port": server.getsockname()[1], "running": daemon.runtime_dir}
        values["pid"] = daemon.process.pid
        own_dir = "" if "running" in config else f"runtime_dir = '{tmp_path / 'run'}'\n"
        file.write_text(own_dir + "[tiers]\nhost_bytes = 4096\n" * ("disk" in config) + config.format(**values))
        command = [TUNED_COMMAND, "{}", "--config", str(file)]
        assert started(command, stderr=output.fileno(), pipes=False).wait(END_S) == status
    *logged, line = log.read_text().splitlines()
    assert all(one.startswith("{") for one in logged)
    assert named.format(**values) in line
