"""Checks of the NPU driver: its version, and the device health by ``npu-smi``, which hangs if the driver does."""

from __future__ import annotations

import re
import shutil
from typing import Final

from kvferry.clients.cli.doctor.children import Outcome, run_child
from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.host import Host, values
from kvferry.clients.cli.doctor.npus import driver_folder, pci_npus
from kvferry.clients.cli.doctor.versions import at_least

WANTED: Final = "25.5.0"
"""From this version on torch_npu recognises host memory that we registered, and copies to it are asynchronous."""
SMI_TIMEOUT_S: Final = 10.0
_SMI_PLACES: Final = ("/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi")
_SMI_VERSION: Final = re.compile(r"Version:\s*(\S+)")
# | 0     910B3               | OK            | 93.1 …: number, name, health. The line below has no word in column two.
_SMI_HEALTH: Final = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|", re.MULTILINE)


def read_npu_smi(host: Host) -> Outcome | None:
    """Return the outcome of ``npu-smi info``; None if there is no such command."""
    found = shutil.which("npu-smi", path=host.environ.get("PATH", ""))
    places = [*([found] if found else []), *(str(host.path(place)) for place in _SMI_PLACES)]
    command = next((place for place in places if shutil.which(place)), None)
    return run_child([command, "info"], host.environ, SMI_TIMEOUT_S) if command else None


def check_driver(host: Host, smi: Outcome | None) -> Finding:
    """Check whether the driver is installed and new enough."""
    name = "driver"
    version = values(host.text(driver_folder(host) / "version.info")).get("Version", "")
    if not version and smi and (match := _SMI_VERSION.search(smi.output)):
        version = match[1]
    if not version:
        devices = len(pci_npus(host))
        found = f"no {driver_folder(host)}/version.info" + (
            f", though the PCI bus has {devices} NPUs" if devices else ""
        )
        fix = f"install the NPU driver, {WANTED} or later; in a container mount {driver_folder(host)} from the host"
        return Finding(name, "missing", found, fix)
    new_enough = at_least(version, WANTED)
    if new_enough:
        return Finding(name, "ok", version)
    fix = f"install driver {WANTED} or later: with older versions, copies to registered host memory are slower"
    return Finding(name, "unknown" if new_enough is None else "warning", f"{version}, wanted: {WANTED} or later", fix)


def check_health(smi: Outcome | None) -> Finding:
    """Report the health that ``npu-smi`` shows for each device."""
    name = "npu health"
    if smi is None:
        return Finding(name, "unknown", "no npu-smi here", "in a container mount /usr/local/bin/npu-smi from the host")
    if smi.status is None:
        fix = "the driver hangs: check dmesg; when nobody uses the NPUs any more, reset the device or reboot"
        return Finding(name, "missing", f"npu-smi did not answer within {SMI_TIMEOUT_S:g} s", fix)
    devices = _SMI_HEALTH.findall(smi.output)
    if smi.status or not devices:
        reason = smi.last_error or next((line for line in reversed(smi.output.splitlines()) if line.strip()), "nothing")
        fix = "run npu-smi info by hand; in a container, are the device nodes and the driver's lib64 there?"
        return Finding(name, "missing" if smi.status else "unknown", f"npu-smi says: {reason.strip()}", fix)
    ill = [f"NPU {number}: {health}" for number, _, health in devices if health != "OK"]
    if ill:
        return Finding(name, "warning", "; ".join(ill), "npu-smi info -t health -i N names the fault; dmesg has more")
    return Finding(name, "ok", f"{len(devices)} x {devices[0][1]}")
