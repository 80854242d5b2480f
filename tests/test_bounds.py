"""The bounds in docs/engines.md: each follows from what is there, and has a test that reaches it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.protocol.errors import KvferryError, OutOfMemoryError
from tests import kit
from tests.kit.documents import page, section

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NAMED = re.compile(r"`([^`]+)`")
DEFINED = re.compile(r"^ *(\w+)(?:: .*| = .*)$", re.MULTILINE)


def rows() -> list[list[str]]:
    lines = [line for line in section(page("engines.md"), "Bounds").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_each_bound_follows_from_what_is_there_and_is_reached_by_a_test() -> None:
    files = [path for folder in ("daemon", "protocol") for path in (ROOT / folder).rglob("*.py")]
    defined = {name for path in files for name in DEFINED.findall(path.read_text())} | {"LimitNOFILE"}
    assert len(rows()) > 30
    for what, _, source, reaching, tests in rows():
        names = [name.rpartition(".")[2] for name in NAMED.findall(source)]
        assert names, what
        assert [name for name in names if name not in defined] == [], what
        codes = [code for code in NAMED.findall(reaching) if code not in KvferryError.by_code]
        assert codes == [], what
        named = [name.split("::") for name in NAMED.findall(tests)]
        assert named, what
        assert [name for file, name in named if f"def {name}(" not in (TESTS / file).read_text()] == [], what


def test_pools_have_a_bound_in_bytes() -> None:
    spec = MhaSpec(layers=1, tokens=1 << 14, page_size=16, kv_heads=1, head_dim=8, dtype="float16")  # 512 KiB
    with kit.daemon(f"[pools]\nmax_bytes = {1 << 20}\n") as daemon, Client.connect(daemon.runtime_dir) as client:
        client.create_pool("first", spec)
        with pytest.raises(OutOfMemoryError, match=r"of 1048576 are taken \(pools.max_bytes\)") as refused:
            client.create_pool("second", spec)
        assert refused.value.field == "spec"
        client.delete_pool("first")
        client.create_pool("second", spec)
