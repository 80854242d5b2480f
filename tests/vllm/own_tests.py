"""vLLM's own tests of connectors, from its source distribution: ``pytest tests/vllm/test_commands.py -rA`` prints them.

Nothing of them is changed. Each file is run three times: without kvferry, with its plugin registered, and, where it
fits, with kvferry's connector in place of the one that the test asks for (over_kvferry.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree as ET

from tests.kit.folders import MODELS, REPOSITORY, TINY_GQA

FOLDER: Final = Path(sys.prefix) / "source"
"""Of vLLM's source distribution, which the Makefile fetches."""
MODEL: Final = MODELS / TINY_GQA
NAMES: Final = (
    "Qwen/Qwen1.5-7B",
    "Qwen/Qwen3-0.6B",
    "facebook/opt-125m",
    "facebook/opt-350m",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B-Instruct",
)
"""Models that the tests name; a tiny one stands for each in a hub of their own, so that no test need be changed."""
UNIT: Final = "tests/v1/kv_connector/unit"
CORE: Final = "tests/v1/core"
OTHERS: Final = ("flexkv", "hf3fs", "hisparse", "lmcache", "mooncake", "moriio", "nixl", "offload")
"""In the names of files that test another connector."""
OVER_KVFERRY: Final = (
    f"{UNIT}/test_remote_decode_lifecycle.py",
    f"{UNIT}/test_remote_prefill_lifecycle.py",
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{CORE}/test_async_scheduler.py",
    f"{CORE}/test_deferred_block_free.py",
    f"{CORE}/test_scheduler.py",
    f"{CORE}/test_swa_inflight_window_free.py",
)
"""Those that ask for a connector and mean any."""
THEIR_PLUGIN: Final = "dummy_kv_connector_plugin"
"""The only one that a test of theirs has."""
REASONS: Final = {
    r"Invalid repository ID or local directory": "a multimodal model that is not here",
    r"No common block size for 16": "an engine with blocks of 16 tokens, which a CPU has not",
    r"No module named 'ray'": "ray is not here",
    r"fixture 'caplog_vllm' not found": "a fixture of all of vLLM's tests",
    r"KeyError: 'remote_block_ids'": "looks for NIXL's own parameters",
    r"a draft model beside several KV cache groups": "a draft model beside several groups, refused by name",
    r"groups with blocks of \[": "groups whose blocks have unlike sizes, refused by name",
    r"a KV cache whose num_speculative_blocks": "states with blocks for drafts, refused by name",
    r"states with vLLM's prefix cache": "states with vLLM's prefix cache, refused by name",
}
"""Why a test cannot pass here, by what it says; anything else is a finding."""
UNKNOWN: Final = "**not known**: "
WAYS: Final = ("without", "plugin", "kvferry")
LIMIT_S: Final = 280


class Outcome(NamedTuple):
    """What a file's tests came to; ``why`` says of each that did not pass what it said."""

    passed: int
    skipped: int
    failed: int
    why: dict[str, str]


def make_hub(hub: Path) -> None:
    """Make a hub of models in which :data:`MODEL` has all of :data:`NAMES`."""
    for name in NAMES:
        model = hub / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / "main").write_text("local")
        (model / "snapshots").mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (model / "snapshots" / "local").symlink_to(MODEL.resolve())


def files() -> list[str]:
    """Return the files whose tests concern connectors, but not one other connector alone."""
    unit = sorted((FOLDER / UNIT).glob("test_*.py"))
    core = [one for one in sorted((FOLDER / CORE).rglob("test_*.py")) if "kv_connector" in one.read_text()]
    return [
        os.fspath(one.relative_to(FOLDER)) for one in (*unit, *core) if not any(other in one.name for other in OTHERS)
    ]


def run(file: str, way: str, hub: Path, runtime_dir: Path) -> Outcome:
    """Run a file's tests one of the three :data:`WAYS`, in a process of their own."""
    environment = {
        **os.environ,
        "HF_HOME": os.fspath(hub),
        "HF_HUB_OFFLINE": "1",
        "KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((os.fspath(REPOSITORY / "src"), os.environ.get("PYTHONPATH", ""))),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if way == "without":
        environment["VLLM_PLUGINS"] = THEIR_PLUGIN
    over = ["-p", "over_kvferry"] if way == "kvferry" else []
    if over:  # the folder, and not the repository: that has a package `tests` too
        environment["PYTHONPATH"] += os.pathsep + os.fspath(Path(__file__).parent / "over")
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *over]
        command += ["-c", os.devnull]  # not this project's: vLLM's tests may lie below it
        command += ["--confcutdir", Path(file).parent, "--rootdir", FOLDER, "--junitxml", report.name]
        command += ["--timeout", "120", "-o", "junit_logging=all", file]
        try:
            done = subprocess.run(
                command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Outcome(0, 0, 1, {"all": f"not over after {LIMIT_S} s"})
        if not Path(report.name).stat().st_size:
            return Outcome(0, 0, 1, {"all": done.stdout.strip().splitlines()[-1]})
        return _read(ET.parse(report.name))  # noqa: S314  pytest's own


def _read(report: ET.ElementTree[ET.Element[str]]) -> Outcome:
    passed = skipped = 0
    why = {}
    for case in report.iter("testcase"):
        if case.find("skipped") is not None:
            skipped += 1
        elif (said := case.find("failure")) is not None or (said := case.find("error")) is not None:
            printed = (case.findtext(one, "") for one in ("system-out", "system-err"))
            text = "\n".join((said.get("message", ""), said.text or "", *printed))
            known = (reason for pattern, reason in REASONS.items() if re.search(pattern, text))
            why[case.get("name", "")] = next(known, f"{UNKNOWN}{text.strip().splitlines()[0][:160]}")
        else:
            passed += 1
    return Outcome(passed, skipped, len(why), why)


def findings(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return what must not be: a test that the plugin lets fail, and one that fails for a reason that is not known."""
    plain, plugin = outcomes.get("without"), outcomes.get("plugin")
    found = [
        f"{way}: {name}: {why}" for way, one in outcomes.items() for name, why in one.why.items() if UNKNOWN in why
    ]
    if plain is not None and plugin is not None:
        found += [f"plugin alone: {name}" for name in plugin.why.keys() ^ plain.why.keys()]
    return found
