"""The PCI tree of /sys: where a device sits, how fast its link may run and runs, how near it is to another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from diagnosd.collectors.kernel import first_line, line_of, names, text_of
from diagnosd.collectors.machine import Machine

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_SLOT_NAME = re.compile(r"^PCI_SLOT_NAME=(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,4}")
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s")

# GT/s -> generation. The kernel says "16.0 GT/s PCIe", before Linux 5.8 "16 GT/s". Where the files are missing, a check
# has taken a width for a speed ("56 GT/s"): what does not stand here is unknown.
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
WIDTHS = frozenset({"1", "2", "4", "8", "12", "16", "32"})  # unknown is 0 or 255, in a VM nothing
_LANE = {
    1: 2.0,
    2: 4.0,
    3: 7.9,
    4: 15.8,
    5: 31.5,
    6: 60.5,
}  # Gbit/s of a lane without its coding: to tell the slower link

_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")  # VGA, 3D; an NVSwitch is a bridge, 0x0680

# PCI Express base specification: extended capabilities begin at 0x100; ACS is 0x000d, its control register is at +6.
_EXTENDED, _ACS = 0x100, 0x000D
_REDIRECTS = 0b1100  # P2P request and completion redirect: what goes from peer to peer must go by way of the root


class Function(NamedTuple):
    """One function of a PCI device.

    `path` leads to it as the folders of /sys/devices do, its own address last: pci0000:15 (the host bridge),
    0000:15:01.0 (a port of the root), 0000:16:00.0, 0000:17:00.0 (a switch), 0000:18:00.0. Where the tree does not
    tell, it is the address alone.
    """

    address: str
    path: tuple[str, ...]
    numa: int | None = None
    folder: Path | None = None


class Link(NamedTuple):
    """A PCI Express link; None is unknown."""

    gen: int | None = None
    width: int | None = None

    @property
    def rate(self) -> float:
        """Gbit/s; infinite where unknown, so that it is never the slowest."""
        return _LANE[self.gen] * self.width if self.gen and self.width else float("inf")


def address(text: str | None) -> str | None:
    """As Linux writes it, domain included: NVML has 00000000:18:00.0 for 0000:18:00.0."""
    found = _ADDRESS.fullmatch(text or "")
    if not found:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def as_nvml(address: str) -> str:
    """0000:18:00.0 as NVML writes it, and the contract's inventory for GPUs."""
    return address.zfill(16).upper()


def where(device: str | Path) -> str | None:
    """The address of the function that a folder or a link of /sys leads to; nothing of it is opened."""
    parts = reversed(os.path.realpath(device).split("/"))
    return next((part for part in parts if _ADDRESS.fullmatch(part)), None)


def nvidia_gpus(machine: Machine) -> list[str]:
    """The addresses of NVIDIA's GPUs that its driver has, or none; NVML may not know them all.

    What another driver has is not opened: it may be a NIC that is to be left alone, by a name of that driver's.
    """
    devices = machine.sys / "bus/pci/devices"
    shown = (at for at in names(devices) if not machine.excludes(at, as_nvml(at)))
    return [at for at in shown if driver(devices / at) in ("nvidia", None) and _is_gpu(devices / at)]


def _is_gpu(folder: Path) -> bool:
    return line_of(folder / "vendor") == _NVIDIA and line_of(folder / "class").startswith(_DISPLAYS)


def generation(text: str | None) -> int | None:
    found = _SPEED.match(text or "")
    return GENERATIONS.get(float(found[1])) if found else None


def width(text: str | None) -> int | None:
    return int(text) if text in WIDTHS else None


def affinity(one: Function, other: Function) -> str | None:
    """How near two functions are, in the words of `nvidia-smi topo -m`; None where the tree does not tell.

    A switch is two bridges deep: the port that leads up, and one that leads down to each device. So where two functions
    have at most one bridge of their own, there is one switch between them: PIX. On a DGX A100 each is behind a further
    switch of its own: PXB (both matrices stand in NVIDIA/nccl#1505 and NVIDIA/nccl-tests#78).
    """
    shared = 0
    for here, there in zip(one.path, other.path, strict=False):
        if here != there:
            break
        shared += 1
    if shared == 0:
        if one.numa is None or other.numa is None:
            return None
        known = _HOST_BRIDGE.fullmatch(one.path[0]) and _HOST_BRIDGE.fullmatch(other.path[0])
        return "SYS" if one.numa != other.numa else "NODE" if known else None
    if shared == 1 and one.address != other.address:
        return "PHB"
    return "PIX" if max(len(one.path), len(other.path)) - shared - 1 <= 1 else "PXB"


class Pci:
    """What stays as long as a device is plugged in is read once, and anew when the list of devices has changed."""

    def __init__(self, machine: Machine) -> None:
        self.devices = machine.sys / "bus/pci/devices"
        self._machine = machine
        self._sys = machine.sys
        self._root: Path | None = None
        self._listed: list[str] = []
        self._only_node: int | None = None
        self._functions: dict[str, Function | None] = {}
        self._gpus: list[Function] | None = None
        self._physical: dict[Function, Function] = {}
        self._most: dict[Path, Link] = {}  # of a folder's link
        self._now: dict[Path, Link] = {}

    def refresh(self) -> None:
        """Before each round of questions."""
        self._now.clear()
        listed = names(self.devices)
        if self._root is not None and listed == self._listed:
            return
        self._listed, self._root = listed, Path(os.path.realpath(self._sys))
        self._only_node, self._gpus = self._the_only_node(), None
        self._functions.clear()
        self._physical.clear()
        self._most.clear()

    def _the_only_node(self) -> int | None:
        """The NUMA node of a machine that has no second one: its kernel tells -1 of every device."""
        nodes = [name for name in names(self._sys / "devices/system/node") if re.fullmatch(r"node[0-9]{1,4}", name)]
        return int(nodes[0].removeprefix("node")) if len(nodes) == 1 else None

    def function(self, device: Path) -> Function | None:
        """What a `device` of /sys leads to: by a link, or in a captured tree a folder."""
        try:
            way = f"{device} {os.readlink(device)}"  # noqa: PTH115 - tells at a tenth of the cost whether it leads elsewhere
        except OSError:
            way = str(device)
        if way not in self._functions:
            self._functions[way] = self._found(Path(os.path.realpath(device)))
        return self._functions[way]

    def at(self, text: str | None) -> Function | None:
        """The function at an address, though the tree may not tell where that is."""
        known = address(text)
        return None if known is None else self.function(self.devices / known) or Function(known, (known,))

    def _found(self, real: Path) -> Function | None:
        if self._root is None or not real.is_relative_to(self._root) or not real.is_dir():
            return None  # a captured tree's link may lead out of it
        parts = real.relative_to(self._root).parts
        while parts and not _ADDRESS.fullmatch(parts[-1]):  # a virtio device lies below its function
            parts = parts[:-1]
        if parts:
            folder = self._root.joinpath(*parts)
            path = tuple(part for part in parts if _ADDRESS.fullmatch(part) or _HOST_BRIDGE.fullmatch(part))
            return Function(parts[-1].lower(), path, self._numa(folder), folder)
        slot = _SLOT_NAME.search(text_of(real / "uevent"))
        own = address(slot[1].strip()) if slot else None
        return Function(own, (own,), self._numa(real), real) if own else None

    def _numa(self, folder: Path) -> int | None:
        node = line_of(folder / "numa_node")
        return int(node) if _NUMBER.fullmatch(node) else self._only_node

    def gpus(self) -> list[Function]:
        """NVIDIA's, as PCI lists them."""
        if self._gpus is None:
            found = (self.function(self.devices / at) for at in nvidia_gpus(self._machine))
            self._gpus = [each for each in found if each]
        return self._gpus

    def physical(self, function: Function) -> Function:
        """The physical function of a virtual one, whose link registers are all zero; else itself."""
        if function not in self._physical:
            link = function.folder / "physfn" if function.folder else None
            self._physical[function] = (self.function(link) if link and link.exists() else None) or function
        return self._physical[function]

    def link(self, function: Function) -> dict[str, int]:
        """`pcie_*` of an inventory: the link now and at most; at most in its slot; and now the slowest above it.

        A device that can do generation 5 behind a switch of generation 4 is not degraded (`_slot`), and one whose own
        link is as it should be may be behind a port that came up with half its lanes (`_path`).
        """
        own = self.physical(function)
        above = list(_bridges(own))
        now, most = self._link(own, "current"), self._link(own, "max")
        slot = min((self._of_bridge(folder, "max", self._most) for folder in above), key=_rate, default=Link())
        path = min((self._of_bridge(folder, "current", self._now) for folder in above[1:]), key=_rate, default=Link())
        known = {"": now, "_max": most, "_slot": slot, "_path": path}
        return {
            f"pcie_{name}{end}": value
            for name in Link._fields
            for end, link in known.items()
            if (value := getattr(link, name)) is not None
        }

    def _link(self, function: Function, which: str) -> Link:
        if function.folder is None:
            return Link()
        if which == "max" and function.folder in self._most:
            return self._most[function.folder]
        link = _link_of(function.folder, which)
        if link == Link():  # a captured tree may have it only below its bus
            link = _link_of(self._sys / "class/pci_bus" / function.address[:-5] / "device" / function.address, which)
        if which == "max":
            self._most[function.folder] = link
        return link

    @staticmethod
    def _of_bridge(folder: Path, which: str, known: dict[Path, Link]) -> Link:
        if folder not in known:
            known[folder] = _link_of(folder, which)
        return known[folder]

    def acs(self, functions: Iterable[Function]) -> str | None:
        """Whether a switch above these sends what goes from peer to peer up to the root: `on`, `off`.

        The capability lies beyond the 64 bytes of configuration space that others than root may read: None. So is it
        where there is no switch.
        """
        switches = {folder for function in functions for folder in list(_bridges(function))[:-1]}
        redirects = {_redirects(folder / "config") for folder in switches}
        return "on" if True in redirects else "off" if redirects == {False} else None

    def iommu(self, functions: Iterable[Function], cmdline: str) -> str | None:
        """`off`, `pt` (addresses pass through), `translated` (of one of these at least), in the words of the kernel."""
        groups = self._sys / "kernel/iommu_groups"
        if not groups.is_dir():
            return None
        if not names(groups):
            return "off"
        types = {first_line(each.folder / "iommu_group/type") for each in functions if each.folder} - {None}
        if any(kind and kind.startswith("DMA") for kind in types):
            return "translated"
        if types == {"identity"}:
            return "pt"
        return "pt" if not types and {"iommu=pt", "iommu.passthrough=1"} & set(cmdline.split()) else None


def driver(folder: Path | None) -> str | None:
    """The name of the driver that is bound to a device."""
    try:
        return (folder / "driver").readlink().name if folder else None
    except OSError:
        return None


def _bridges(function: Function) -> Iterator[Path]:
    """The folders of the bridges above it, the nearest first, the root's port last."""
    if function.folder:
        for name, folder in zip(reversed(function.path[:-1]), function.folder.parents, strict=False):
            if _ADDRESS.fullmatch(name):
                yield folder


def _link_of(folder: Path, which: str) -> Link:
    return Link(
        generation(first_line(folder / f"{which}_link_speed")), width(first_line(folder / f"{which}_link_width"))
    )


def _rate(link: Link) -> float:
    return link.rate


def _redirects(config: Path) -> bool | None:
    """Whether a bridge's access control services redirect; False where it has none; None where we may not see it."""
    try:
        with config.open("rb", buffering=0) as space:
            at, left = _EXTENDED, 48  # capabilities in 4 KiB: a list that is longer runs in a circle
            while at >= _EXTENDED and left:
                space.seek(at)
                head = space.read(8)
                if len(head) < 8:
                    return None
                if int.from_bytes(head[:2], "little") == _ACS:
                    return bool(int.from_bytes(head[6:8], "little") & _REDIRECTS)
                at, left = int.from_bytes(head[2:4], "little") >> 4, left - 1
            return False
    except OSError:
        return None
