"""``kvferry config``: each value and where it comes from, and every mistake of file and environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.clients.cli.main import main
from kvferry.protocol.config.conflicts import HostOffer
from kvferry.protocol.config.load import load_config, read_config
from kvferry.protocol.config.schema import Config
from kvferry.protocol.config.values import changes, keys_of, values_of, variable_of
from kvferry.protocol.errors import ConfigError
from tests import kit

OFFER = HostOffer(64 << 30, "this host", frozenset({0, 1}))
FILE = """
[tiers]
host_bytes = "1GiB"
snapshot_grace_s = 5.0
[peers]
timeout_ms = 2000
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvferry.toml"
    path.write_text(FILE)
    return path


def test_each_value_says_where_it_comes_from(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_TIERS_HOST_BYTES", "2GiB")
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", "/run/elsewhere")
    assert main(["config", "show", "--config", str(file), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["values"]
    assert list(found) == [key for key, _ in keys_of()]
    assert found["tiers.host_bytes"] == {"value": 2 << 30, "source": "$KVFERRY_TIERS_HOST_BYTES"}
    assert found["tiers.snapshot_grace_s"] == {"value": 5.0, "source": str(file)}
    assert found["runtime_dir"] == {"value": "/run/elsewhere", "source": "$KVFERRY_RUNTIME_DIR"}
    assert {one["source"] for key, one in found.items() if key.startswith("network.")} == {"default"}
    assert main(["config", "show", "--config", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tiers.host_bytes", "2GiB", "$KVFERRY_TIERS_HOST_BYTES"] in rows
    assert ["peers.timeout_ms", "2000", str(file)] in rows
    assert ["peers.listen", "-", "default"] in rows


def test_a_running_daemon_says_what_it_has_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as its_own:
        its_own.setenv("KVFERRY_TIERS_POLICY", "lru")
        with kit.daemon(FILE) as daemon:
            its_own.undo()
            where = ("--runtime-dir", str(daemon.runtime_dir))
            assert main(["config", "show", "--running", "--json", *where]) == 0
            found: dict[str, Any] = json.loads(capsys.readouterr().out)["values"]
            assert main(["config", "show", "--running", *where]) == 0
            rows = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert main(["config", "show", "--running", "--config", str(tmp_path), *where]) == 1
            assert "leave out --config" in capsys.readouterr().err
    assert list(found) == [key for key, _ in keys_of()]
    assert found["tiers.policy"] == {"value": "lru", "source": "$KVFERRY_TIERS_POLICY"}
    assert found["tiers.host_bytes"]["value"] == 1 << 30
    assert Path(found["tiers.host_bytes"]["source"]).suffix == ".toml"
    assert found["runtime_dir"]["value"] == str(daemon.runtime_dir)
    assert ["tiers.policy", "lru", "$KVFERRY_TIERS_POLICY"] in rows
    assert main(["config", "show"]) == 0
    said = capsys.readouterr().out
    assert ["tiers.policy", "reuse", "default"] in [line.split() for line in said.splitlines()]
    assert said.rstrip().endswith("--running: the running one's")


def test_check_looks_for_the_members_of_tenants(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('[tenants.a]\ngroups = ["no-such-group"]\n')
    assert main(["config", "check", "--config", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "this host has no such group" in printed.err


def test_check_says_all_that_is_wrong(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: a daemon accepts it\n"
    file.write_text(FILE + "hearbeat_ms = 5\n")
    monkeypatch.setenv("KVFERRY_POOLS_POPULATE", "maybe")
    monkeypatch.setenv("KVFERRY_TIERS_HOSTBYTES", "1")
    assert main(["config", "check", "--config", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 3
    for said in (
        f"{file}: peers.hearbeat_ms: unknown key",
        '$KVFERRY_POOLS_POPULATE: pools.populate = "maybe": must be true or false',
        "$KVFERRY_TIERS_HOSTBYTES: no such key; did you mean KVFERRY_TIERS_HOST_BYTES?",
    ):
        assert [line for line in lines if said in line], said
    assert main(["config", "check", "--config", str(file), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["mistakes"]) == 3


EACH = {
    "tiers.host_bytes": ("8GiB", 8 << 30),
    "peers.listen": ("tcp://127.0.0.3:7801", "tcp://127.0.0.3:7801"),
    "pools.populate": ("false", False),
    "memory.numa_node": ("1", 1),
    "devices.open": ('["npu:0", "npu:1"]', ["npu:0", "npu:1"]),
    "devices.max_fraction": ("0.5", 0.5),
    "tenants": (
        '{a = {users = [7, "ann"], share = 0.5, tier_bytes = "1MiB"}}',
        {"a": {"users": [7, "ann"], "groups": [], "share": 0.5, "tier_bytes": 1 << 20}},
    ),
    "tiers.disk.path": ("/var/lib/kvferry/7", "/var/lib/kvferry/7"),
    "tiers.policy": ("lru", "lru"),
}


@pytest.mark.parametrize("key", EACH)
def test_a_variable_gives_any_kind_of_key(key: str) -> None:
    text, value = EACH[key]
    assert values_of(load_config(None, OFFER, {variable_of(key): text}))[key] == value


def test_variables_of_a_service_beside_the_daemon_are_no_keys() -> None:
    """A Kubernetes service that is called kvferry-metrics gives them to each container."""
    port = "KVFERRY_METRICS_PORT_9464_TCP"
    names = "KVFERRY_METRICS_SERVICE_HOST", "KVFERRY_METRICS_SERVICE_PORT", "KVFERRY_METRICS_SERVICE_PORT_HTTP"
    load_config(None, OFFER, dict.fromkeys((*names, "KVFERRY_METRICS_PORT", port, f"{port}_ADDR"), "10.0.0.3"))
    with pytest.raises(ConfigError, match="KVFERRY_METRICS_HOST: no such key"):
        load_config(None, OFFER, {"KVFERRY_METRICS_HOST": "10.0.0.3"})


def test_no_two_keys_have_one_variable() -> None:
    every = [key for key, _ in keys_of()]
    assert len({variable_of(key) for key in every}) == len(every)


def test_a_conflict_names_the_variable_that_makes_it(file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(file, OFFER, {"KVFERRY_PEERS_LISTEN": "tcp://0.0.0.0:7801"})
    assert refused.value.detail.startswith("$KVFERRY_PEERS_LISTEN: ")
    assert read_config(file, OFFER, {"KVFERRY_COPY_KERNEL": "python", "HOME": "/root"}).mistakes == []


def test_changes_are_by_key_and_with_units() -> None:
    before = values_of(Config())
    after = values_of(msgspec.convert({"tiers": {"host_bytes": 1 << 30, "policy": "lru"}}, Config))
    assert changes(before, after) == {"tiers.host_bytes": "1GiB, was -", "tiers.policy": "lru, was reuse"}
    assert changes({"gone.key": 1}, {"new.key_bytes": 1 << 20}) == {
        "gone.key": "-, was 1",
        "new.key_bytes": "1MiB, was -",
    }
    assert changes(before, before) == {}


def test_a_daemon_reads_variables_and_an_upgrade_logs_what_has_changed() -> None:
    environment = {"KVFERRY_TIERS_HOST_BYTES": "8MiB"}
    with kit.daemon("[peers]\ntimeout_ms = 2000\n", keep=True, environment=environment) as daemon:
        with kit.engine(daemon) as client:
            assert [one.total_bytes for one in client.status().tiers] == [8 << 20]
        daemon.configure('[peers]\ntimeout_ms = 2500\n[logging]\nformat = "json"\n')
        daemon.upgrade()
        [line] = [one for one in daemon.log.read_text().splitlines() if "configuration read anew" in one]
        changed = json.loads(line)["changed"]
        assert changed == {"peers.timeout_ms": "2500, was 2000", "logging.format": "json, was auto"}
