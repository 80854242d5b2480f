"""The NPUs that are visible without asking the driver: device nodes, PCI functions, NUMA nodes.

Reads files only, so it cannot hang with the driver.
"""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.host import Host, values

NPU_NODE: Final = re.compile(r"davinci(\d+)\Z")
MANAGER_NODES: Final = ("davinci_manager", "devmm_svm", "hisi_hdc")
INSTALL_INFO: Final = "/etc/ascend_install.info"
_PCI: Final = PurePosixPath("/sys/bus/pci/devices")
_PCI_DRIVER: Final = PurePosixPath("/sys/bus/pci/drivers/devdrv_device_driver")
_HUAWEI: Final = "0x19e5"
_ACCELERATOR: Final = "0x1200"
_NODES: Final = PurePosixPath("/sys/devices/system/node")


class PciNpu(msgspec.Struct, frozen=True):
    """An NPU on the PCI bus. ``number`` is the driver's, as in /dev/davinciN; None if no driver is bound."""

    address: str
    number: int | None
    numa_node: int
    """-1: the firmware does not say."""

    @property
    def name(self) -> str:
        """Return the name to show."""
        return f"NPU at {self.address}" if self.number is None else f"NPU {self.number}"


def davinci_nodes(host: Host) -> list[str]:
    """Return the names of the NPUs' device nodes, in the order of their numbers."""
    found = {int(match[1]): match[0] for name in host.names("/dev") if (match := NPU_NODE.match(name))}
    return [found[number] for number in sorted(found)]


def pci_npus(host: Host) -> list[PciNpu]:
    """Return the NPUs on the PCI bus: processing accelerators by Huawei."""
    found = []
    for address in host.names(_PCI):
        device = _PCI / address
        if host.text(device / "vendor") != _HUAWEI or not host.text(device / "class").startswith(_ACCELERATOR):
            continue
        number = host.text(_PCI_DRIVER / address / "dev_id")
        node = host.text(device / "numa_node")
        found.append(PciNpu(address, int(number) if number.isdigit() else None, int(node or -1)))
    return sorted(found, key=lambda npu: (npu.number is None, npu.number, npu.address))


def driver_folder(host: Host) -> PurePosixPath:
    """Return the driver's folder, which exists only if it is installed."""
    parent = values(host.text(INSTALL_INFO)).get("Driver_Install_Path_Param") or "/usr/local/Ascend"
    return PurePosixPath(parent) / "driver"


def has_npu_sign(host: Host) -> bool:
    """Return whether anything indicates that this host has NPUs: a device, a device node, or the driver."""
    nodes = davinci_nodes(host) or host.path("/dev/davinci_manager").exists()
    return bool(nodes or pci_npus(host) or host.path(driver_folder(host) / "version.info").exists())


def check_nodes(host: Host) -> Finding:
    """Check whether the device nodes exist, and whether the user may use them."""
    name = "device nodes"
    npus = davinci_nodes(host)
    absent = [one for one in MANAGER_NODES if not host.path(f"/dev/{one}").exists()]
    options = " ".join(f"--device /dev/{one}" for one in (*(npus or ["davinci0"]), *MANAGER_NODES))
    fix = f"in a container: {options}; on the host itself: is the driver installed and loaded (lsmod | grep drv_)?"
    if not npus:
        return Finding(name, "missing", "no /dev/davinci0 or further", fix)
    if absent:
        return Finding(name, "missing", f"{_span(npus)}, but no {', '.join(f'/dev/{one}' for one in absent)}", fix)
    nodes = [*npus, *MANAGER_NODES]
    closed = [one for one in nodes if not host.user.may_use(host.path(f"/dev/{one}").stat())]
    if closed:
        found = f"{host.user.name} may not read and write {', '.join(f'/dev/{one}' for one in closed)}"
        return Finding(name, "missing", found, _join(host))
    return Finding(name, "ok", f"{_span(npus)} and their managers, open to {host.user.name}")


def check_group(host: Host) -> Finding:
    """Check whether the user is in the group that the driver was installed for."""
    name, group = "group", npu_group(host)
    number = host.group_id(group)
    if number is None:
        fix = f"groupadd {group}, and install the driver with --install-username=… --install-usergroup={group}"
        return Finding(name, "warning", f"this host has no group {group}", fix)
    if number in host.user.groups:
        return Finding(name, "ok", f"{host.user.name} is in {group}")
    if host.user.uid == 0:
        return Finding(name, "ok", "root needs none; give --user NAME to check for the daemon's user")
    return Finding(name, "warning", f"{host.user.name} is not in {group}", _join(host))


def _join(host: Host) -> str:
    """Return how to get the user into the driver's group; root's group would grant far more than the devices."""
    group, user = npu_group(host), host.user.name
    if host.group_id(group) == 0:
        return "install the driver for a separate group (--install-usergroup=HwHiAiUser): now it is root's"
    return f"usermod -aG {shlex.quote(group)} {shlex.quote(user)}, then a new login, or Group={group} in the unit"


def npu_group(host: Host) -> str:
    """Return the group of the driver's device nodes."""
    return values(host.text(INSTALL_INFO)).get("UserGroup") or "HwHiAiUser"


def check_numa(host: Host) -> Finding:
    """Report the NUMA node of each NPU."""
    name = "numa"
    cores = {node: host.text(_NODES / node / "cpulist") for node in host.names(_NODES) if re.match(r"node\d+\Z", node)}
    npus = pci_npus(host)
    if not npus:
        return Finding(
            name,
            "unknown",
            f"{len(cores)} node{'s' * (len(cores) != 1)}; no NPU is seen on the PCI bus",
            "in a container, mount /sys",
        )
    said = "; ".join(
        f"{npu.name}: "
        + (
            f"node {npu.numa_node} (cores {cores.get(f'node{npu.numa_node}') or '?'})" * (npu.numa_node >= 0)
            or "no node"
        )
        for npu in npus
    )
    if len(cores) > 1 and any(npu.numa_node < 0 for npu in npus):
        return Finding(
            name, "warning", said, "turn NUMA on in the firmware, or pass the topology to the virtual machine"
        )
    return Finding(name, "ok", said)


def _span(nodes: list[str]) -> str:
    return f"/dev/{nodes[0]}" if len(nodes) == 1 else f"/dev/{nodes[0]} to {nodes[-1]} ({len(nodes)})"
