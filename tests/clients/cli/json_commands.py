"""Commands that take and print JSON, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.clients.cli.main import main

SPEC: Final[dict[str, Any]] = {
    "kind": "mha",
    "layers": 3,
    "first_layer": 0,
    "tokens": 256,
    "page_size": 128,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "dtype": "float16",
    "view": "paged",
}


def run_main(capsys: pytest.CaptureFixture[str], command: str, text: str, folder: Path) -> tuple[int, Any]:
    """Run a command in this process on a file with this text; return its status and what it printed, parsed."""
    file = folder / "input.json"
    file.write_text(text)
    status = main([command, str(file), "--json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, json.loads(printed.out)


def refusal(capsys: pytest.CaptureFixture[str], command: str, given_: object, folder: Path) -> dict[str, str]:
    """Return the error that a command prints; its status must be 2."""
    status, printed = run_main(capsys, command, given_ if isinstance(given_, str) else json.dumps(given_), folder)
    assert status == 2, printed
    assert set(printed) == {"error"}
    error: dict[str, str] = printed["error"]
    assert error["code"]
    assert error["detail"]
    return error
