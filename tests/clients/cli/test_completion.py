"""``kvferry completion``: a shell that has read the script completes commands, options, choices and files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.main import MODULES, main
from tests.man_page import PAGE, page

PRESS_TAB: Final = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
compopt() { :; }
_shtab_kvferry
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    file = tmp_path / "kvferry"
    file.write_text(capsys.readouterr().out)
    return file


def completed(script: Path, *words: str) -> set[str]:
    """Return what bash offers for the last word."""
    command = ["bash", "-c", PRESS_TAB, "bash", str(script), "kvferry", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent, timeout=60)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_what_there_is(script: Path) -> None:
    (script.parent / "kvferry.toml").touch()
    assert completed(script, "") >= set(MODULES)
    assert completed(script, "und") == {"undrain"}
    assert completed(script, "transfers", "--s") == {"--slow", "--stuck"}
    assert completed(script, "config", "") == {"show", "check"}
    assert completed(script, "config", "check", "--config", "kvferry.t") == {"kvferry.toml"}
    assert completed(script, "completion", "") >= {"bash", "zsh"}
    assert completed(script, "daemon", "--k") == {"--keep"}
    assert completed(script, "keeper", "--config", "kvferry.t") == {"kvferry.toml"}


def test_zsh_has_a_script_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef kvferry\n")


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'kvferry[completion]'" in capsys.readouterr().err


def test_the_man_page_is_of_these_commands() -> None:
    assert PAGE.read_text() == page(), "python -m tests.man_page"
