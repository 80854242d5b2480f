"""Checks of NPUs: device nodes, group and NUMA nodes, which are read from files; the driver; CANN."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import PurePosixPath
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.host import Finding, Host, Outcome, at_least, run_child, values

# -- what is visible without asking the driver: device nodes, PCI functions, NUMA nodes


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
    npus = davinci_nodes(host)
    absent = [one for one in MANAGER_NODES if not host.path(f"/dev/{one}").exists()]
    options = " ".join(f"--device /dev/{one}" for one in (*(npus or ["davinci0"]), *MANAGER_NODES))
    fix = f"in a container: {options}; on the host itself: is the driver installed and loaded (lsmod | grep drv_)?"
    if not npus:
        return Finding("missing", "no /dev/davinci0 or further", fix)
    if absent:
        return Finding("missing", f"{_span(npus)}, but no {', '.join(f'/dev/{one}' for one in absent)}", fix)
    nodes = [*npus, *MANAGER_NODES]
    closed = [one for one in nodes if not host.user.may_use(host.path(f"/dev/{one}").stat())]
    if closed:
        found = f"{host.user.name} may not read and write {', '.join(f'/dev/{one}' for one in closed)}"
        return Finding("missing", found, _join(host))
    return Finding("ok", f"{_span(npus)} and their managers, open to {host.user.name}")


def check_group(host: Host) -> Finding:
    """Check whether the user is in the group that the driver was installed for."""
    group = npu_group(host)
    number = host.group_id(group)
    if number is None:
        fix = f"groupadd {group}, and install the driver with --install-username=… --install-usergroup={group}"
        return Finding("warning", f"this host has no group {group}", fix)
    if number in host.user.groups:
        return Finding("ok", f"{host.user.name} is in {group}")
    if host.user.uid == 0:
        return Finding("ok", "root needs none; give --user NAME to check for the daemon's user")
    return Finding("warning", f"{host.user.name} is not in {group}", _join(host))


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
    cores = {node: host.text(_NODES / node / "cpulist") for node in host.names(_NODES) if re.match(r"node\d+\Z", node)}
    npus = pci_npus(host)
    if not npus:
        said = f"{len(cores)} node{'s' * (len(cores) != 1)}; no NPU is seen on the PCI bus"
        return Finding("unknown", said, "in a container, mount /sys")
    nodes = [f"node {one.numa_node} (cores {cores.get(f'node{one.numa_node}') or '?'})" for one in npus]
    said = "; ".join(
        f"{npu.name}: {node if npu.numa_node >= 0 else 'no node'}" for npu, node in zip(npus, nodes, strict=True)
    )
    if len(cores) > 1 and any(npu.numa_node < 0 for npu in npus):
        fix = "turn NUMA on in the firmware, or pass the topology to the virtual machine"
        return Finding("warning", said, fix)
    return Finding("ok", said)


def _span(nodes: list[str]) -> str:
    return f"/dev/{nodes[0]}" if len(nodes) == 1 else f"/dev/{nodes[0]} to {nodes[-1]} ({len(nodes)})"


# -- the driver: its version, and the device health by ``npu-smi``, which hangs if the driver does


DRIVER_WANTED: Final = "25.5.0"
"""From this version on torch_npu recognises host memory that we registered, and copies to it are asynchronous."""
SMI_TIMEOUT_S: Final = 10.0
_SMI_PLACES: Final = ("/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi")
_SMI_VERSION: Final = re.compile(r"Version:\s*(\S+)")
TAKING: Final = "950"
TAKEN: Final = "within seconds the driver takes memory from all whose owner has ended, a keeper too (docs/npu.md)"
"""Of Ascend 950, as the driver's source says."""

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
    version = values(host.text(driver_folder(host) / "version.info")).get("Version", "")
    if not version and smi and (match := _SMI_VERSION.search(smi.output)):
        version = match[1]
    if not version:
        folder, devices = driver_folder(host), len(pci_npus(host))
        found = f"no {folder}/version.info" + f", though the PCI bus has {devices} NPUs" * bool(devices)
        fix = f"install the NPU driver, {DRIVER_WANTED} or later; in a container mount {folder} from the host"
        return Finding("missing", found, fix)
    return _new_enough("driver", version, DRIVER_WANTED)


def _new_enough(what: str, version: str, wanted: str, where: str = "") -> Finding:
    """Return the finding about a version of the driver or of CANN."""
    new_enough = at_least(version, wanted)
    if new_enough:
        return Finding("ok", f"{version}{where}")
    fix = f"install {what} {wanted} or later: with older versions, copies to registered host memory are slower"
    said = f"{version or 'of unknown version'}{where}, wanted: {wanted} or later"
    return Finding("unknown" if new_enough is None else "warning", said, fix)


def check_health(smi: Outcome | None) -> Finding:
    """Report the health that ``npu-smi`` shows for each device."""
    if smi is None:
        return Finding("unknown", "no npu-smi here", "in a container mount /usr/local/bin/npu-smi from the host")
    if smi.status is None:
        fix = "the driver hangs: check dmesg; when nobody uses the NPUs any more, reset the device or reboot"
        return Finding("missing", f"npu-smi did not answer within {SMI_TIMEOUT_S:g} s", fix)
    devices = _SMI_HEALTH.findall(smi.output)
    if smi.status or not devices:
        reason = smi.last_error or next((line for line in reversed(smi.output.splitlines()) if line.strip()), "nothing")
        fix = "run npu-smi info by hand; in a container, are the device nodes and the driver's lib64 there?"
        return Finding("missing" if smi.status else "unknown", f"npu-smi says: {reason.strip()}", fix)
    ill = [f"NPU {number}: {health}" for number, _, health in devices if health != "OK"]
    if ill:
        return Finding("warning", "; ".join(ill), "npu-smi info -t health -i N names the fault; dmesg has more")
    takes = f": {TAKEN}" if any(TAKING in name for _, name, _ in devices) else ""
    return Finding("ok", f"{len(devices)} x {devices[0][1]}{takes}")


# -- CANN: its location and version, and whether the loader finds its libraries, in a child process only


CANN_WANTED: Final = "8.5.0"
VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
LIBRARY: Final = "libascendcl.so"
PLACES: Final = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
_LOAD: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_LOADING_S: Final = 20.0


def check_cann(host: Host) -> Finding:
    """Look for CANN by its environment variables, else in the default locations."""
    home = next((PurePosixPath(host.environ[one]) for one in VARIABLES if host.environ.get(one)), None)
    if home is None:
        return _not_in_the_environment(host)
    if not host.path(home).is_dir():
        fix = "source the set_env.sh of the installed CANN, or mount it into the container"
        return Finding("missing", f"the environment names {home}, which does not exist", fix)
    version = _cann_version(host, home)
    return _new_enough("CANN", version, CANN_WANTED, f" in {home}")


def check_library(host: Host) -> Finding:
    """Check whether a new process can load CANN's runtime."""
    problem = loading_problem(host, LIBRARY)
    if not problem:
        return Finding("ok", f"{LIBRARY} loads")
    return Finding("missing", problem, loader_fix(problem))


def loading_problem(host: Host, library: str) -> str:
    """Return why a new process cannot load a library; empty if it can."""
    done = run_child([*host.python, "-S", "-c", _LOAD, library], host.environ, _LOADING_S)
    if done.status is None:
        return f"loading {library} took longer than {_LOADING_S:g} s"
    if done.status < 0:
        return f"loading {library} terminates the process with signal {-done.status}"
    return done.last_error.removeprefix("OSError: ") if done.status else ""


def loader_fix(problem: str) -> str:
    """Return what to do if a library of CANN or the driver does not load."""
    if "undefined symbol" in problem:
        return "the versions of driver, CANN and torch_npu are incompatible: see torch_npu's version table"
    if any(library in problem for library in ("libascend_hal", "libdrv", "libdcmi")):
        return "put the driver's lib64/driver and lib64/common on LD_LIBRARY_PATH: CANN's set_env.sh does it"
    return "source CANN's set_env.sh before starting; a systemd unit needs LD_LIBRARY_PATH in Environment="


def _not_in_the_environment(host: Host) -> Finding:
    for place in PLACES:
        if host.path(place).is_dir():
            found = f"installed in {place}, but neither {' nor '.join(VARIABLES)} is set"
            scripts = (f"{place}/set_env.sh", str(PurePosixPath(place).parent / "set_env.sh"))
            script = next((one for one in scripts if host.path(one).exists()), scripts[0])
            return Finding("missing", found, f"source {script}")
    fix = f"install CANN {CANN_WANTED} or later and source its set_env.sh"
    return Finding("missing", f"neither {' nor '.join(VARIABLES)} is set, and {PLACES[0]} does not exist", fix)


def _cann_version(host: Host, home: PurePosixPath) -> str:
    """Return the version that the toolkit's installer recorded, else empty."""
    for folder in (home, *(home / name for name in host.names(home) if name.endswith("-linux"))):
        for name in host.names(folder):
            if name.startswith("ascend_") and name.endswith("_install.info"):
                version = values(host.text(folder / name)).get("version", "")
                if version:
                    return version
    return ""
