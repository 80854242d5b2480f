"""Checks of Python packages in child processes, since an import may fail, hang in the driver, or crash.

With torch_npu installed but CANN not found, ``import torch`` itself fails unless automatic loading of backends is
disabled; the child disables it and imports torch_npu explicitly. It reports step by step, one JSON object per line, so
that the last line tells where it hung or died.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

import msgspec

from kvferry.clients.cli.doctor.host import Finding, Host, run_child, same_release
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.npus import loader_fix, loading_problem

TIMEOUT_S: Final = 60.0
"""Opening eight devices takes half a minute if the driver has just been loaded."""

PROBE: Final = """
import json
from importlib import metadata

def print_line(**found):
    print(json.dumps(found), flush=True)

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

npu = version("torch-npu")
print_line(torch=version("torch"), torch_npu=npu, step="importing torch" if npu else "")
if npu:
    try:
        import torch
        print_line(step="importing torch_npu")
        import torch_npu
        print_line(step="counting devices")
        print_line(devices=torch.accelerator.device_count() if torch.accelerator.is_available() else 0, step="")
    except BaseException as error:
        print_line(reason=f"{type(error).__name__}: {error}")
"""


class TorchFound(msgspec.Struct, frozen=True):
    """The child's report. ``step`` is where it stopped and ``reason`` why; both are empty if it succeeded."""

    torch: str = ""
    torch_npu: str = ""
    step: str = ""
    reason: str = ""
    devices: int = 0


def probe_torch(host: Host, timeout_s: float = TIMEOUT_S) -> TorchFound:
    """Return what a new process finds when it imports torch and torch_npu."""
    environ = {**host.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run_child([*host.python, "-c", PROBE], environ, timeout_s)
    said: dict[str, Any] = {"step": "starting Python"}
    for line in done.output.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # CANN prints lines of its own
            said |= json.loads(line)
    if said["step"] and not said.get("reason"):
        if done.status is None:
            said["reason"] = f"no answer within {timeout_s:g} s"
        else:
            how = f"signal {-done.status}" if done.status < 0 else f"status {done.status}"
            said["reason"] = f"the process ended with {how}: {done.last_error or 'no message'}"
    return msgspec.convert(said, TorchFound)


def check_torch_npu(found: TorchFound) -> Finding:
    """Check torch_npu on a host that needs NPUs."""
    if not found.torch and found.reason:
        return Finding("unknown", f"{found.step} fails: {found.reason}", "run kvferry with the daemon's Python")
    if not found.torch_npu:
        release = ".".join(found.torch.partition("+")[0].split(".")[:3]) or "…"
        fix = f"pip install --no-deps torch-npu=={release} numpy pyyaml, beside torch {release}"
        return Finding("missing", f"not installed; {_torch(found)}", fix)
    if not same_release(found.torch, found.torch_npu):
        fix = "install the torch-npu with the same first three version numbers as torch"
        return Finding("missing", f"{found.torch_npu} does not match: {_torch(found)}", fix)
    if found.reason:
        said = f"{found.torch_npu} is installed, but {found.step} fails: {found.reason}"
        return Finding("missing", said, _fix(found))
    if not found.devices:
        fix = "npu-smi info: any devices? is ASCEND_RT_VISIBLE_DEVICES empty, or a device node not accessible?"
        return Finding("missing", f"{found.torch_npu} imports, but torch sees no device", fix)
    return Finding("ok", f"{found.torch_npu} beside torch {found.torch}; torch sees {found.devices} devices")


def check_without_npu(found: TorchFound) -> Finding | None:
    """Check torch_npu on a host without NPUs: it should be absent, and one that cannot be imported harms engines."""
    if not found.torch_npu:
        return None
    if not found.reason:
        devices = f"torch sees {found.devices} devices"
        return Finding("ok", f"{found.torch_npu} is installed and imports; {devices}")
    said = f"{found.torch_npu} is installed, but {found.step} fails: {found.reason}; so does a plain `import torch`"
    fix = "pip uninstall torch-npu, or start engines with TORCH_DEVICE_BACKEND_AUTOLOAD=0 (the daemon does)"
    return Finding("warning", said, fix)


def _torch(found: TorchFound) -> str:
    return f"torch is {found.torch}" if found.torch else "torch is not installed either"


def _fix(found: TorchFound) -> str:
    if "no answer within" in found.reason or found.step == "counting devices":
        return "the driver does not answer: npu-smi info, then dmesg; when nobody uses the NPUs, reset one or reboot"
    if found.step == "importing torch":
        return f"torch itself is broken: reinstall the same version ({found.torch})"
    return loader_fix(found.reason)


# -- Mooncake, the transport between hosts: wheels that share a package name, and the library they need


VERBS: Final = "libibverbs.so.1"
INSTALL_VERBS: Final = "apt-get install libibverbs1 (openEuler: yum install libibverbs)"
STORE_LIBRARIES: Final = "apt-get install libcurl4 libibverbs1 libnuma1"
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
    wheels = _installed(host)
    said = ", ".join(f"{wheel} {version}" for wheel, version in wheels.items()) or "not installed"
    if not (needs.mooncake or needs.store):
        return Finding("ok", f'{said}; not needed, network.transport is "{needs.config.network.transport}"')
    npu = needs.ascend
    fitting = [NPU_WHEEL] if npu else [PLAIN_WHEEL, NPU_WHEEL, CUDA_WHEEL]
    install = f"pip install {NPU_WHEEL}" if npu else "pip install 'kvferry[mooncake]'"
    if len(wheels) > 1:
        fix = f"pip uninstall {' '.join(wheels)}, then {install}"
        return Finding("missing", f"{said}: they overwrite each other's files", fix)
    if not any(wheel in wheels for wheel in fitting):
        protocol = "ascend" if npu else "tcp"
        return Finding("missing", f'{said}; the configured protocol is "{protocol}"', install)
    reason = _import_problem(host, "mooncake.engine")
    if not reason:
        return Finding("ok", said)
    if "libibverbs" in reason:
        return Finding("missing", f"{said}, but: {reason}", INSTALL_VERBS)
    fix = f'install what it lacks (docs/operations.md, "Several hosts"), or reinstall the wheel: {install}'
    return Finding("missing", f"{said}, but: {reason}", fix)


def check_store_module(host: Host, needs: Needs) -> Finding | None:
    """Check whether Mooncake's store module can be imported; None if no store is configured."""
    if not needs.store:
        return None
    reason = _import_problem(host, "mooncake.store")
    if reason:
        return Finding("missing", reason, f'{STORE_LIBRARIES}, and the wheel as "mooncake" says')
    return Finding("ok", "mooncake.store can be imported")


def check_verbs(host: Host, needs: Needs) -> Finding | None:
    """Check whether the library that every wheel needs can be loaded; None if Mooncake is not used."""
    if not (needs.mooncake or needs.store):
        return None
    problem = loading_problem(host, VERBS)
    if problem:
        return Finding("missing", problem, INSTALL_VERBS)
    return Finding("ok", f"{VERBS} loads")


def _import_problem(host: Host, module: str) -> str:
    """Return why a new process cannot import a module; empty if it can."""
    done = run_child([*host.python, "-c", f"import {module}"], host.environ, _TIMEOUT_S)
    if done.status == 0:
        return ""
    return f"the import took longer than {_TIMEOUT_S:g} s" if done.status is None else done.last_error


def _installed(host: Host) -> dict[str, str]:
    wheels = (PLAIN_WHEEL, NPU_WHEEL, CUDA_WHEEL)
    done = run_child([*host.python, "-c", _INSTALLED, *wheels], host.environ, _TIMEOUT_S)
    try:
        return msgspec.convert(json.loads(done.output), dict[str, str])
    except ValueError:  # msgspec's ValidationError is one, too
        return {}
