"""What this machine is: GPUs, NICs and how near they are to each other, drivers, processors, memory.

GPUs are what NVML told last, and what PCI lists and NVML does not know. Which NIC serves the training, the storage or
the management (`role`), and which rail it is of, no machine knows of itself: the operators declare it.
"""

from __future__ import annotations

import fcntl
import json
import re
import socket
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diagnosd.collectors.every import Every
from diagnosd.collectors.kernel import first_line, line_of, text_of
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.net import watched
from diagnosd.collectors.nics import Nics
from diagnosd.collectors.pci import Function, Pci, address, affinity, as_nvml, driver
from diagnosd.collectors.rdma import network_interfaces
from diagnosd.collectors.software import software
from diagnosd.documents import Gpu, Nic, Software
from diagnosd.point import Point, point

REPEAT_S = 60  # the inventory is told at least so often, and when it changes (telemetry.md 3)
# ARPHRD_* of <linux/if_arp.h> in /sys/class/net/X/type
LINK_LAYERS = {"1": "Ethernet", "32": "InfiniBand"}
STATES = {"up": "ACTIVE", "down": "DOWN", "lowerlayerdown": "DOWN"}  # operstate; `unknown` and the rest say nothing
# An idle GPU lowers its link and raises it again, dozens of times a minute on some nodes: that is no change of machine.
_OF_THE_MOMENT = frozenset({"pcie_gen", "pcie_width", "pcie_busy"})
_OF_NETDEV = ("mtu", "driver", "addresses")  # what an RDMA port has from its network interface, where not from itself

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s4x4s16x")  # name; family and port; IPv4 address; the rest of the union, on 64 bits
# /proc/net/if_inet6: address, index, prefix, scope (20 is link-local), flags, interface
_INET6 = re.compile(r"^([0-9a-f]{32}) [0-9a-f]+ [0-9a-f]+ ([0-9a-f]+) [0-9a-f]+ +(\S+)$", re.MULTILINE)
_WHOLE = re.compile(r"[0-9]{1,9}")
_MEMORY = re.compile(r"MemTotal: +([0-9]{1,15}) kB")
# /proc/driver/nvidia/gpus/ADDRESS/information
_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,6})$", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(\S+)$", re.MULTILINE)


def ipv4_addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of each interface of our network namespace, aliases included."""
    room = array("B", bytes(_IFREQ.size * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    found: dict[str, list[str]] = {}
    for name, at in _IFREQ.iter_unpack(room[:used].tobytes()):
        interface = name.partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        found.setdefault(interface, []).append(socket.inet_ntoa(at))
    return found


class Placed(NamedTuple):
    """A GPU, a port or an interface: the name that `affinity` has for it, what is known, and where it is plugged in."""

    name: str
    facts: Mapping[str, Any]
    function: Function | None


class Node:
    name = "node"
    every = 10

    def __init__(
        self,
        machine: Machine,
        nvml: Callable[[], Mapping[str, Any]] = dict,
        ipv4: Callable[[], Mapping[str, list[str]]] = ipv4_addresses,
    ) -> None:
        """`nvml` gives `Nvml.inventory()`: what was told there last, without a call to the library."""
        self._machine = machine
        self._nvml = nvml
        self._ipv4 = ipv4
        self._pci = Pci(machine)
        self._rdma = Nics(machine)
        self.errors = 0
        self._told = ""
        self._told_due = Every(REPEAT_S)
        self._seconds = 0  # by the number of reads
        self._online: str | None = None
        self._cores: dict[str, int] | None = None

    def read(self, now_ns: int) -> list[Point]:
        """The inventory: at first, when it has changed, and every REPEAT_S."""
        try:
            inventory = self.inventory()
        except OSError:  # no descriptor left, or the like: nobody knows what is there
            self.errors += 1
            return []
        settled = json.dumps({**inventory, "gpus": [_settled(gpu) for gpu in inventory.get("gpus", ())]})
        if settled != self._told:
            self._told, self._told_due = settled, Every(REPEAT_S)
        self._seconds += self.every
        if not self._told_due.is_due(now_ns, self._seconds):
            return []
        text = json.dumps(inventory, separators=(",", ":"))
        return [point("diagnosd_node", {"host": self._machine.host}, {"inventory": text}, now_ns)]

    def inventory(self) -> dict[str, Any]:
        """A NodeInventory of the contract; what is unknown is missing. OSError where nobody can say what is there."""
        told = self._nvml()
        self._pci.refresh()
        gpus, nics = self._gpus(told), self._nics()
        functions = [each.function for each in (*gpus, *nics) if each.function]
        known = {
            "gpus": [_only(Gpu, each.facts) for each in gpus],
            "nics": [_only(Nic, each.facts) for each in nics],
            "affinity": _affinity(gpus, nics),
            "fabric": dict(told.get("fabric") or {}),
            "software": _only(Software, self._software(told, functions)),
            "boot_id": first_line(self._machine.proc / "sys/kernel/random/boot_id"),
            "cpu": self._cpu(),
            "memory_bytes": self._memory(),
        }
        return {key: value for key, value in known.items() if value}

    # -- GPUs ----------------------------------------------------------------------------------------------------------

    def _gpus(self, told: Mapping[str, Any]) -> list[Placed]:
        """Those of NVML, each with its place, then those that it should know and does not, by their address alone.

        That one is lost is told by who asks NVML.
        """
        known = [Placed(_gpu_name(facts), facts, self._pci.at(facts.get("pci"))) for facts in told.get("gpus", ())]
        answering = {each.function.address for each in known if each.function}
        bare = [
            Placed(each.address, {"pci": as_nvml(each.address)}, each)
            for each in self._pci.gpus()
            if each.address not in answering and self._should_answer(each, bool(answering))
        ]
        return [self._with_link(each) for each in (*known, *bare)]

    def _should_answer(self, function: Function, others_do: bool) -> bool:
        """Not where a container hides it from us, or it is excluded.

        A GPU that fell off the bus before its driver came is bound to none. One that is driven has a device node,
        unless our container was not given it.
        """
        if driver(function.folder) is None:
            return True
        told = text_of(self._machine.proc / "driver/nvidia/gpus" / function.address / "information")
        minor, uuid = _MINOR.search(told), _UUID.search(told)
        if uuid and self._machine.excludes(uuid[1]):
            return False
        return not others_do or (minor is not None and (self._machine.dev / f"nvidia{minor[1]}").exists())

    # -- NICs ----------------------------------------------------------------------------------------------------------

    def _nics(self) -> list[Placed]:
        """A port of an RDMA device each, with its network interface, then the interfaces that belong to none."""
        addresses = dict(self._ipv4()) if self._machine.live else {}
        for interface, each in self._ipv6():
            addresses.setdefault(interface, []).append(each)
        interfaces = self._interfaces()
        placed = []
        for port in self._rdma.read():
            own = interfaces.pop(port.get("netdev", ""), None)
            of_netdev = self._nic(port["netdev"], own, addresses) if own else {}
            place = self._pci.function(self._machine.sys / "class/infiniband" / port["device"] / "device")
            shared = {key: of_netdev[key] for key in _OF_NETDEV if key in of_netdev}
            facts = {**shared, "netdev_state": of_netdev.get("state"), **port}
            placed.append(Placed(port["device"], facts, place or self._pci.at(port.get("pci"))))
        placed += [
            Placed(name, self._nic(name, folder, addresses), self._pci.function(folder / "device"))
            for name, folder in interfaces.items()
        ]
        return [self._with_link(each) for each in placed]

    def _interfaces(self) -> dict[str, Path]:
        found = {name: Path(folder) for name, folder in network_interfaces(self._machine).items()}
        return {name: path for name, path in found.items() if watched(name) and name.isprintable() and path.is_dir()}

    def _nic(self, interface: str, folder: Path, addresses: Mapping[str, list[str]]) -> dict[str, Any]:
        return {
            "netdev": interface,
            "link_layer": LINK_LAYERS.get(line_of(folder / "type")),
            "state": STATES.get(line_of(folder / "operstate")),
            "rate_gbps": self._rate(folder),
            "mtu": _whole(line_of(folder / "mtu")),
            "driver": driver(folder / "device"),
            "addresses": addresses.get(interface),
        }

    @staticmethod
    def _rate(folder: Path) -> float | None:
        """Gbit/s of the link while it is up. What has no device behind it invents one: a veth says 10000, always."""
        speed = _whole(line_of(folder / "speed")) if (folder / "device").exists() else None
        return speed / 1000 if speed else None  # a port that is down: -1

    def _ipv6(self) -> list[tuple[str, str]]:
        rows = _INET6.findall(text_of(self._machine.proc / "net/if_inet6"))
        return [
            (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(at))) for at, scope, name in rows if scope != "20"
        ]

    # -- both ----------------------------------------------------------------------------------------------------------

    def _with_link(self, placed: Placed) -> Placed:
        """What PCI tells beside what its own driver told."""
        function = placed.function
        if function is None:
            return placed
        place = {"pci": function.address, "numa": function.numa, **self._pci.link(function)}
        known = {key: value for key, value in placed.facts.items() if value is not None}
        return placed._replace(facts={**place, **known})

    def _software(self, told: Mapping[str, Any], functions: list[Function]) -> dict[str, Any]:
        """NVML's word for the driver's version counts before that of the file: it is that of the library in use."""
        cmdline = text_of(self._machine.proc / "cmdline")
        paths = {"acs": self._pci.acs(functions), "iommu": self._pci.iommu(functions, cmdline)}
        return {**software(self._machine), **told.get("software", {}), **paths}

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _cpu(self) -> dict[str, int] | None:
        """Cores, not hardware threads, where the kernel tells them apart.

        Read anew when a processor goes on or off line: some kernels ask each of hundreds for its clock, to write this.
        """
        online = first_line(self._machine.sys / "devices/system/cpu/online")
        if self._cores is None or online != self._online:
            self._online, self._cores = online, _cores(text_of(self._machine.proc / "cpuinfo"))
        return self._cores

    def _memory(self) -> int | None:
        """Bytes: MemTotal is the first line of /proc/meminfo, in KiB."""
        found = _MEMORY.match(line_of(self._machine.proc / "meminfo"))
        return 1024 * int(found[1]) if found else None


def _cores(cpuinfo: str) -> dict[str, int]:
    cores, sockets, threads = set(), set(), 0
    socket_id = ""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        threads += key == "processor"
        if key == "physical id":
            socket_id = value
            sockets.add(value)
        elif key == "core id":
            cores.add((socket_id, value))
    known = {"cores": len(cores) or threads, "sockets": len(sockets)}
    return {key: count for key, count in known.items() if count}


def _affinity(gpus: Sequence[Placed], nics: Sequence[Placed]) -> dict[str, dict[str, str]]:
    """From each GPU to the others and to the NICs. A virtual function is as near as the one it is of."""
    there = {each.function.address for each in nics if each.function}
    own = [each for each in nics if each.facts.get("physfn") not in there]
    found = {}
    for gpu in gpus:
        words = {other.name: _nearness(gpu, other) for other in (*own, *gpus) if other is not gpu}
        found[gpu.name] = {name: word for name, word in words.items() if word}
    return {name: words for name, words in found.items() if words}


def _nearness(gpu: Placed, other: Placed) -> str | None:
    links = _nvlinks(gpu, other)
    if links:
        return f"NV{links}"
    return affinity(gpu.function, other.function) if gpu.function and other.function else None


def _nvlinks(gpu: Placed, other: Placed) -> int:
    """NVLinks that are up between two GPUs, or from each to the switches that join them."""
    here: Mapping[str, int] = gpu.facts.get("nvlink_to") or {}
    there: Mapping[str, int] = other.facts.get("nvlink_to") or {}
    at = other.function.address if other.function else ""
    direct = sum(count for remote, count in here.items() if address(remote) == at)
    return direct or min(here.get("switch", 0), there.get("switch", 0))


def _gpu_name(facts: Mapping[str, Any]) -> str:
    """GPU0 as nvidia-smi numbers them; one without a number goes by its address."""
    return f"GPU{facts['index']}" if "index" in facts else address(facts.get("pci")) or ""


def _settled(gpu: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in gpu.items() if key not in _OF_THE_MOMENT}


def _only(kind: type[Gpu | Nic | Software], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the document, in its order."""
    return {key: facts[key] for key in kind.__struct_fields__ if facts.get(key) is not None}


def _whole(text: str) -> int | None:
    return int(text) if _WHOLE.fullmatch(text) else None
