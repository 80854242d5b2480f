"""Checks of Mooncake, the transport between hosts: wheels that share a package name, and the library they need."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.cann import loading_problem
from kvferry.clients.cli.doctor.children import run_child
from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.host import Host
from kvferry.clients.cli.doctor.needs import Needs

VERBS: Final = "libibverbs.so.1"
INSTALL_VERBS: Final = "apt-get install libibverbs1 (openEuler: yum install libibverbs)"
PLAIN_WHEEL: Final = "mooncake-transfer-engine-non-cuda"
NPU_WHEEL: Final = "mooncake-transfer-engine-npu"
CUDA_WHEEL: Final = "mooncake-transfer-engine"
_TIMEOUT_S: Final = 30.0

_INSTALLED: Final = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def check_wheel(host: Host, needs: Needs) -> Finding:
    """Check which wheel is installed, whether it is the right one, and whether it can be imported."""
    name = "mooncake"
    wheels = _installed(host)
    said = ", ".join(f"{wheel} {version}" for wheel, version in wheels.items()) or "not installed"
    if not (needs.mooncake or needs.store):
        return Finding(name, "ok", f'{said}; not needed, network.transport is "{needs.config.network.transport}"')
    npu = needs.ascend
    fitting = [NPU_WHEEL] if npu else [PLAIN_WHEEL, NPU_WHEEL, CUDA_WHEEL]
    install = f"pip install {NPU_WHEEL}" if npu else "pip install 'kvferry[mooncake]'"
    if len(wheels) > 1:
        fix = f"pip uninstall {' '.join(wheels)}, then {install}"
        return Finding(name, "missing", f"{said}: they overwrite each other's files", fix)
    if not any(wheel in wheels for wheel in fitting):
        protocol = "ascend" if npu else "tcp"
        return Finding(name, "missing", f'{said}; the configured protocol is "{protocol}"', install)
    done = run_child([*host.python, "-c", "import mooncake.engine"], host.environ, _TIMEOUT_S)
    if done.status == 0:
        return Finding(name, "ok", said)
    reason = f"the import took longer than {_TIMEOUT_S:g} s" if done.status is None else done.last_error
    if "libibverbs" in reason:
        return Finding(name, "missing", f"{said}, but: {reason}", INSTALL_VERBS)
    fix = f'install what it lacks (docs/operations.md, "Several hosts"), or reinstall the wheel: {install}'
    return Finding(name, "missing", f"{said}, but: {reason}", fix)


def check_verbs(host: Host, needs: Needs) -> Finding | None:
    """Check whether the library that every wheel needs can be loaded; None if Mooncake is not used."""
    if not (needs.mooncake or needs.store):
        return None
    problem = loading_problem(host, VERBS)
    if problem:
        return Finding("libibverbs", "missing", problem, INSTALL_VERBS)
    return Finding("libibverbs", "ok", f"{VERBS} loads")


def _installed(host: Host) -> dict[str, str]:
    wheels = (PLAIN_WHEEL, NPU_WHEEL, CUDA_WHEEL)
    done = run_child([*host.python, "-c", _INSTALLED, *wheels], host.environ, _TIMEOUT_S)
    try:
        return msgspec.convert(json.loads(done.output), dict[str, str])
    except ValueError:  # msgspec's ValidationError is one, too
        return {}
