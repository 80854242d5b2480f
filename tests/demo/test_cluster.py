"""Where the demo's parts run: what each daemon is configured with, and what each engine is told of the others."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from examples.demo.cluster import Cluster, Node, check_possible, daemon_config
from examples.demo.errors import DemoError
from examples.demo.hosts import Hosts

ADDRESSES = ["10.213.0.1", "10.213.0.2", "10.213.0.3"]


def cluster_of(count: int) -> Cluster:
    """Return a cluster of hosts that are not there, or of this one."""
    daemon: Any = object()
    nodes = [Node(Path(f"/run/{host.number}"), daemon, host if count > 1 else None) for host in Hosts(count)]
    return Cluster(tuple(nodes[:-1]) or (nodes[0],), nodes[-1])


def test_one_daemon_is_for_both_engines() -> None:
    cluster = cluster_of(1)
    assert len(cluster.nodes) == len(cluster.daemons) == 1
    assert cluster.prefill_arguments(0) == ["--stage", "0", "--stages", "1"]
    assert cluster.decode_arguments() == ["--sources", "1"]
    assert cluster.decode.called("decode engine") == "decode engine"


def test_two_hosts_prefill_on_one() -> None:
    cluster = cluster_of(2)
    assert cluster.prefill_arguments(0) == ["--stage", "0", "--stages", "1"]
    assert cluster.decode_arguments() == ["--sources", "1", "--source-daemon", f"tcp://{ADDRESSES[0]}:7801"]
    assert cluster.decode.called("decode engine") == "decode engine of host 2"


def test_three_hosts_prefill_in_two_stages() -> None:
    cluster = cluster_of(3)
    assert len(cluster.nodes) == 3
    first, last = cluster.prefill_arguments(0), cluster.prefill_arguments(1)
    assert first == ["--stage", "0", "--stages", "2", "--next-stage", f"{ADDRESSES[1]}:7802"]
    assert last == ["--stage", "1", "--stages", "2", "--listen", f"{ADDRESSES[1]}:7802"]
    sources = [word for address in ADDRESSES[:2] for word in ("--source-daemon", f"tcp://{address}:7801")]
    assert cluster.decode_arguments() == ["--sources", "2", *sources]


def test_a_daemons_configuration_is_toml() -> None:
    host = Hosts(3)[1]
    config = tomllib.loads(daemon_config(host))
    assert config == {"peers": {"listen": f"tcp://{ADDRESSES[1]}:7801"}, "network": {"transport": "mooncake"}}


def test_what_several_hosts_need_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: "/sbin/ip")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check_possible(1)
    with pytest.raises(DemoError, match=r"mooncake-transfer-engine-non-cuda.*libibverbs1"):
        check_possible(2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check_possible(1)
    with pytest.raises(DemoError, match="root"):
        check_possible(2)
