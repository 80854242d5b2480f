"""Commands that read JSON: what is none, files that are not there, and that any JSON gets an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvferry.clients.cli.main import main
from tests.clients.cli.json_commands import SPEC, JsonCommands
from tests.clients.cli.test_planning import PLAN
from tests.kit.devices import DEVICE

BROKEN: Final = ("", "{", "[]", "null", "3", '"mha"', '{"kind":"mha",}', "{}x", "\x00", "[" * 100_000, "{'kind':'mha'}")


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_what_is_no_json_object(commands: JsonCommands, command: str) -> None:
    assert {commands.refused(command, text)[0] for text in BROKEN} == {"INVALID_FIELD"}
    error = commands.made(command, "[]")["error"]
    assert (error["detail"], "field" in error) == ("Expected `object`, got `array`", False)


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    assert main([command, str(tmp_path / "nothing.json"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "FILE"


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_standard_input_that_is_closed_is_an_empty_one(command: str) -> None:
    program = [sys.executable, "-P", "-m", "kvferry.clients.cli.main", command, "-"]
    shell = ["/bin/sh", "-c", 'exec "$@" <&-', "sh"]
    ended = subprocess.run([*shell, *program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "INVALID_FIELD" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


JSON_VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@DEVICE.examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from([*SPEC, "kv"]), JSON_VALUES),
    st.sampled_from(["layout", "plan"]),
    st.sampled_from([SPEC, PLAN]),
)
def test_any_json_gets_an_answer(
    commands: JsonCommands, changes: dict[str, Any], command: str, base: dict[str, Any]
) -> None:
    commands.made(command, {**base, **changes})
