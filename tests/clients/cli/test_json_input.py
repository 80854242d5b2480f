"""Commands that read JSON: what is none, and files that are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.main import main
from tests.clients.cli.json_commands import refusal

BROKEN: Final = ("", "{", "[]", "null", "3", '"mha"', '{"kind":"mha",}', "{}x", "\x00", "[" * 100_000, "{'kind':'mha'}")


@pytest.mark.parametrize("command", ["layout", "plan"])
@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:8]))
def test_what_is_no_json_object(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str) -> None:
    assert refusal(capsys, command, text, tmp_path)["code"] == "INVALID_FIELD"


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_a_list_where_an_object_is_expected_is_no_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    error = refusal(capsys, command, "[]", tmp_path)
    assert error["detail"] == "Expected `object`, got `array`"
    assert "field" not in error


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    assert main([command, str(tmp_path / "nothing.json"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "FILE"


@pytest.mark.parametrize("line", ["layout -", "plan -"])
def test_standard_input_that_is_closed_is_an_empty_one(line: str) -> None:
    command = [sys.executable, "-P", "-m", "kvferry.clients.cli.main", *line.split()]
    shell = ["/bin/sh", "-c", 'exec "$@" <&-', "sh"]
    ended = subprocess.run([*shell, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "INVALID_FIELD" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
