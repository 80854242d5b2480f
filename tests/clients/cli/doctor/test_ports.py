"""Ports that are free, the daemon's, or somebody else's."""

from __future__ import annotations

from kvferry.clients.cli.doctor.ports import Listener, check_listen, check_mooncake
from kvferry.protocol.config.schema import NetworkConfig, PeersConfig
from tests.clients.cli.doctor.fake_host import needs_of

NEEDS = needs_of(peers=PeersConfig(listen="tcp://127.0.0.1:7801"), network=NetworkConfig(transport="mooncake"))
OTHERS = Listener("127.0.0.1", 7801, 9, "nginx")
OWN = Listener("127.0.0.1", 7801, 4711, "kvferry")


def test_not_set() -> None:
    assert check_listen(needs_of(), [OTHERS], None).state == "ok"


def test_on_this_host_only() -> None:
    assert check_listen(needs_of(peers=PeersConfig(listen="ipc:///run/x")), [], None).state == "ok"


def test_free() -> None:
    sockets = [Listener("127.0.0.1", 7802, 9, "nginx"), Listener("10.9.9.9", 7801, 9, "nginx")]
    finding = check_listen(NEEDS, sockets, None)
    assert (finding.state, finding.found) == ("ok", "tcp://127.0.0.1:7801 is free")


def test_taken() -> None:
    for daemon_pid in (None, 4711):
        finding = check_listen(NEEDS, [OTHERS], daemon_pid)
        assert finding.state == "missing"
        assert "held by nginx (pid 9)" in finding.found


def test_taken_by_somebody_unseen() -> None:
    finding = check_listen(NEEDS, [Listener("127.0.0.1", 7801, None)], None)
    assert finding.state == "missing"


def test_the_daemons() -> None:
    assert check_listen(NEEDS, [OWN], 4711).found == "tcp://127.0.0.1:7801, held by the daemon (pid 4711)"
    assert check_listen(NEEDS, [Listener("127.0.0.1", 7801, None)], 4711).state == "ok"


def test_a_daemon_that_cannot_be_seen_from_here() -> None:
    assert check_listen(NEEDS, [Listener("127.0.0.1", 7801, 9, "python")], 0).state == "ok"
    assert check_listen(NEEDS, [Listener("127.0.0.1", 7801, None)], 0).state == "ok"


def test_a_daemon_with_another_configuration() -> None:
    finding = check_listen(NEEDS, [], 4711)
    assert finding.state == "warning"
    assert "restart" in finding.fix


def test_an_address_of_another_host() -> None:
    finding = check_listen(needs_of(peers=PeersConfig(listen="tcp://192.0.2.1:7801")), [], None)
    assert finding.state == "missing"
    assert "not an address of this host" in finding.found


def test_ipv6() -> None:
    assert (
        check_listen(needs_of(peers=PeersConfig(listen="tcp://[::1]:7801")), [], None).found
        == "tcp://[::1]:7801 is free"
    )


def test_mooncakes() -> None:
    assert check_mooncake(needs_of(), [], None) is None
    before = check_mooncake(NEEDS, [], None)
    assert before is not None
    assert (before.state, "hosts.conf" in before.found) == ("ok", True)
    sockets = [OWN, OTHERS, Listener("0.0.0.0", 15002, 4711), Listener("::", 15001, 4711)]  # noqa: S104  shown
    found = check_mooncake(NEEDS, sockets, 4711)
    assert found is not None
    assert found.found.startswith("0.0.0.0:15002, [::]:15001; ")
    hidden = check_mooncake(NEEDS, [OTHERS], 4711)
    assert hidden is not None
    assert hidden.state == "unknown"
