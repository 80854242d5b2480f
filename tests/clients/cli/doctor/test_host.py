"""A host's files, users, groups and versions; and children that say something, fail, hang, or leave others behind."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.cli.doctor import npus
from kvferry.clients.cli.doctor.host import Outcome, User, at_least, parse_version, run_child, same_release
from kvferry.clients.cli.doctor.wheels import TorchFound, probe_torch
from tests.clients.cli.doctor.fake_host import WORKER, make_host, npu_files, script


@given(mode=st.integers(0, 0o777), owner=st.booleans(), member=st.booleans())
def test_modes_are_read_as_the_kernel_does(mode: int, *, owner: bool, member: bool) -> None:
    """The first class that fits decides: an owner without rights has none, whatever the group may."""
    user = User("worker", 7, frozenset({8} if member else {9}))
    file = os.stat_result((mode, 0, 0, 1, 7 if owner else 70, 8, 0, 0, 0, 0))
    digit = oct(mode | 0o1000)[-3:][0 if owner else 1 if member else 2]
    assert user.may_use(file) is (digit in "67")
    assert User("root", 0, frozenset()).may_use(file)


PATH = {"PATH": os.environ["PATH"]}
DEAD_WITHIN_S = 30.0


def test_what_it_says() -> None:
    done = run_child(["sh", "-c", "echo out; echo $WORD; echo one >&2; echo two >&2; echo >&2; exit 3"],
                     {**PATH, "WORD": "given"}, 30)  # fmt: skip
    assert done == Outcome(3, "out\ngiven\n", "one\ntwo\n\n")
    assert done.last_error == "two"


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    reader = os.open(pids, os.O_RDONLY | os.O_NONBLOCK)
    done = run_child(["sh", "-c", f"echo before; sleep 600 & echo $! > {pids}; wait"], PATH, 1)
    assert done == Outcome(None, "before\n", "")
    child = int(os.read(reader, 64))
    os.close(reader)
    try:
        watch = os.pidfd_open(child)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([watch], [], [], DEAD_WITHIN_S)
    os.close(watch)
    assert ended


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("8.5.0.alpha001", "8.5.0"),
        ("8.5.RC1", "8.5.0"),
        ("8.2.RC1", "8.2.RC2"),
        ("8.5.0", "8.10.0"),
        ("25.2.0", "25.5.0"),
        ("5.10.0-136.12.0.86.oe2203sp1.aarch64", "5.14.0"),
    ],
)
def test_order(older: str, newer: str) -> None:
    assert at_least(newer, older)
    assert at_least(older, newer) is False


@pytest.mark.parametrize("text", ["", "unknown", "rc1", "N/A", "7"])
def test_no_version(text: str) -> None:
    assert parse_version(text) is None
    assert at_least(text, "1.0.0") is None


def test_torch_and_torch_npu_are_of_one_release() -> None:
    fits = [("2.13.0+cpu", "2.13.0"), ("2.7.1", "2.7.1.post2"), ("2.13.0", "2.13.1"), ("", "2.13.0")]
    assert [same_release(*one) for one in fits] == [True, True, False, False]


@pytest.mark.parametrize(("vendor", "kind"), [("0x19e5", "0x020000"), ("0x10de", "0x120000")])
def test_other_devices_are_none(tmp_path: Path, vendor: str, kind: str) -> None:
    device = "/sys/bus/pci/devices/0000:c1:00.0"
    host = make_host(tmp_path, {f"{device}/vendor": vendor, f"{device}/class": kind, "/dev/davinci_x": ""})
    assert not npus.has_npu_sign(host)


@pytest.mark.parametrize(("mode", "state"), [(0o660, "ok"), (0o600, "missing"), (0o640, "missing"), (0o606, "missing")])
def test_a_member_of_the_nodes_group(tmp_path: Path, mode: int, state: str) -> None:
    host = make_host(tmp_path, npu_files())
    (tmp_path / "dev/davinci1").chmod(mode)
    for name in ("davinci0", "davinci_manager", "devmm_svm", "hisi_hdc"):
        (tmp_path / "dev" / name).chmod(0o660)
    group = (tmp_path / "dev/davinci0").stat().st_gid
    member = make_host(tmp_path, user=User("worker", WORKER.uid, frozenset({group})))
    finding = npus.check_nodes(member)
    assert finding.state == state
    if state == "missing":
        assert finding.found == "worker may not read and write /dev/davinci1"
        assert "usermod -aG HwHiAiUser worker" in finding.fix
    assert npus.check_nodes(host).state == "ok"  # root


BOTH = 'echo \'{"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}\''


def probe(tmp_path: Path, says: str, timeout_s: float = 60) -> TorchFound:
    return probe_torch(make_host(tmp_path, python=[script(tmp_path / "python", says)]), timeout_s)


def test_the_real_child_here(tmp_path: Path) -> None:
    found = probe_torch(make_host(tmp_path, environ={"PATH": os.environ["PATH"]}))
    assert found.torch.startswith("2.")
    assert found.torch_npu or not found.reason


def test_backends_do_not_load_themselves(tmp_path: Path) -> None:
    says = 'echo "{\\"torch\\": \\"$TORCH_DEVICE_BACKEND_AUTOLOAD\\", \\"step\\": \\"\\"}"'
    assert probe(tmp_path, says).torch == "0"


def test_all_is_well(tmp_path: Path) -> None:
    found = probe(tmp_path, f'echo CANN says hello; echo 1; {BOTH}; echo \'{{"step": "", "devices": 8}}\'')
    assert found == TorchFound("2.13.0+cpu", "2.13.0", devices=8)


@pytest.mark.full
def test_a_child_that_hangs_in_the_driver(tmp_path: Path) -> None:
    found = probe(tmp_path, f'{BOTH}; echo \'{{"step": "counting devices"}}\'; sleep 600', timeout_s=2)
    assert (found.step, found.reason) == ("counting devices", "no answer within 2 s")
