"""RDMA devices as sysfs shows them, /sys/class/infiniband/DEVICE/ports/N, and the network interfaces of their ports.

A device that is excluded is not opened, nor listed: names, PCI address and network interface come from links outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from diagnosd.collectors.kernel import GONE, line_of, names
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.pci import where
from diagnosd.point import Series

ACTIVE, LINK_UP = 4, 5  # enum ib_port_state and enum ib_port_phys_state of <rdma/ib_verbs.h>
# A driver whose file fails each time says so in the kernel log each time: after so many attempts it is left alone.
ATTEMPTS = 3
REST_S = 3600  # at most; then it is tried once more

_NUMBERED = re.compile(r"(\d+): *(.*)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec(?: \((\d+)X ?(\w*)\))?")
_GUID = re.compile(r"(?:0x)?([0-9a-f]{4}:?[0-9a-f]{4}:?[0-9a-f]{4}:?[0-9a-f]{4})")


class Tally:
    """What the attributes of one collector have met."""

    def __init__(self) -> None:
        self.errors = 0
        self.gone = False  # one that could be read is no longer there


class Attribute:
    """One file of a device that is read again and again: a driver answers, and each in its own way.

    What fails three times in a row is left alone, so that our reading does not fill the kernel's log: for an hour if it
    never worked, else for twice as long each time, since a device comes back from a reset within seconds.
    """

    __slots__ = ("_descriptor", "_kept", "_period", "_rest", "_tally", "_worked", "failures", "path")

    def __init__(self, path: str, tally: Tally, *, kept: bool, period: int) -> None:
        """It is read every `period` seconds; `kept` is whether its descriptor stays open between two reads."""
        self.path = path
        self._tally = tally
        self._kept = kept
        self._period = period
        self._descriptor = -1
        self._worked = False
        self.failures = self._rest = 0

    def read(self) -> bytes | None:
        """The text, its end stripped; None where it cannot be read now, or is left alone. Then `worked` or `failed`."""
        if self._rest:
            self._rest -= 1
            return None
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            text = os.pread(self._descriptor, 128, 0).rstrip()
        except OSError as error:
            self._tally.errors += 1
            self._tally.gone |= self._worked and error.errno in GONE
            self.close()
            self.failed()
            return None
        if not self._kept:
            self.close()
        return text

    def number(self) -> int | None:
        """A cumulative counter as the contract sends it, modulo 2^63. `N/A (no PMA)`, -1 or 0x1f are none."""
        text = self.read()
        if text is None:
            return None
        if text.isdigit() and len(text) <= 20:
            self.worked()
            return int(text) % 2**63
        self.failed()
        return None

    def worked(self) -> None:
        self._worked, self.failures = True, 0

    def failed(self) -> None:
        """It gave nothing that can be used."""
        self.failures += 1
        if self.failures >= ATTEMPTS:
            longest = REST_S // self._period
            self._rest = min(2 ** (self.failures - ATTEMPTS), longest) if self._worked else longest

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class Device(NamedTuple):
    name: str
    folder: str
    ports: tuple[int, ...]
    function: str  # the folder of the function it belongs to
    pci: str | None  # its address, or that of the nearest one above
    interfaces: Mapping[str, str]  # folder by name: those of the same function, in our network namespace


class Interface(NamedTuple):
    """The network interface of a port; without a folder it is in another network namespace, or there is none."""

    name: str | None
    folder: str | None
    elsewhere: bool = False


def devices(machine: Machine) -> list[Device]:
    """The devices that are there and not excluded. A captured tree without classes has them at their functions."""
    found = dict(_folders(machine, "infiniband"))
    interfaces = _interfaces(machine) if found else {}
    kept = []
    for name, folder in found.items():
        function = _function(folder)
        address, own = where(function), interfaces.get(function, {})
        if _sayable(name) and not machine.excludes(name, address, *own):
            ports = tuple(sorted(int(port) for port in names(f"{folder}/ports") if port.isdecimal()))
            kept.append(Device(name, folder, ports, function, address, own))
    return kept


def network_interfaces(machine: Machine) -> dict[str, str]:
    """The folder of each network interface that is not excluded; one without a device behind it is in it too.

    Whoever excludes an RDMA device excludes the interface of the same function. Links are followed, nothing is opened.
    """
    owners: dict[str | None, list[str]] = {}
    for name, folder in _folders(machine, "infiniband") if machine.exclude else ():
        owners.setdefault(where(_function(folder)), []).append(name)
    kept = {}
    for name, folder in _folders(machine, "net"):
        address = where(f"{folder}/device") if machine.exclude else None
        if not machine.excludes(name, address, *(owners.get(address, ()) if address else ())):
            kept[name] = folder
    return kept


def _sayable(name: str) -> bool:
    try:
        Series.of("infiniband", device=name)
    except ValueError:
        return False
    return True


def _folders(machine: Machine, kind: str) -> Iterator[tuple[str, str]]:
    """Name and folder of each device of a class, `infiniband` or `net`."""
    folder = f"{machine.sys}/class/{kind}"
    yield from ((name, f"{folder}/{name}") for name in names(folder))
    if not machine.live and not os.path.isdir(folder):  # noqa: PTH112
        functions = f"{machine.sys}/bus/pci/devices"
        for address in names(functions):
            if not machine.excludes(address):
                inside = f"{functions}/{address}/{kind}"
                yield from ((name, f"{inside}/{name}") for name in names(inside))


def _interfaces(machine: Machine) -> Mapping[str, dict[str, str]]:
    """The network interfaces of each function, by its folder: links are followed, nothing of a device is opened."""
    found: dict[str, dict[str, str]] = {}
    for name, folder in _folders(machine, "net"):
        found.setdefault(_function(folder), {})[name] = folder
    return found


def _function(folder: str) -> str:
    """The folder of the function that a device belongs to: .../0000:19:00.0 of .../0000:19:00.0/infiniband/mlx5_0."""
    linked = f"{folder}/device"
    return os.path.realpath(linked if os.path.islink(linked) else f"{folder}/../..")  # noqa: PTH114


def interface_of(machine: Machine, device: Device, port: int) -> Interface:
    """The network interface of a port.

    The GID table names it, whose ever namespace it is in; without one it is the interface of the same function whose
    `dev_port` is the port's. An Ethernet port always has one: where none is to be seen, another namespace holds it.
    """
    net, base = f"{machine.sys}/class/net", f"{device.folder}/ports/{port}"
    seen = os.path.isdir(net)  # noqa: PTH112
    if named := line_of(f"{base}/gid_attrs/ndevs/0"):
        folder = device.interfaces.get(named, f"{net}/{named}")
        return Interface(named, folder) if os.path.isdir(folder) else Interface(named, None, seen)  # noqa: PTH112
    own = {name for name, at in device.interfaces.items() if line_of(f"{at}/dev_port") in ("", str(port - 1))}
    if own:
        name = min(own, key=lambda name: ("." in name, name))  # not ib0.8001
        return _bond(net, device, Interface(name, device.interfaces[name]))
    hidden = line_of(f"{base}/link_layer") == "Ethernet" and device.pci is not None and seen
    return Interface(None, None, hidden)


def _bond(net: str, device: Device, interface: Interface) -> Interface:
    """mlx5_bond_0 carries for the bond; any other device for its own interface, though that may be a bond's member."""
    master = os.path.realpath(f"{interface.folder}/master")
    if "bond" not in device.name or not os.path.isdir(f"{master}/bonding"):  # noqa: PTH112
        return interface
    name = os.path.basename(master)  # noqa: PTH119
    return Interface(name, f"{net}/{name}")


def members(machine: Machine, interface: Interface) -> dict[str, bool]:
    """The members of a bond, and whether each carries; empty for what is none."""
    bonded = line_of(f"{interface.folder}/bonding/slaves").split() if interface.folder else []
    return {name: _carries(f"{machine.sys}/class/net/{name}") for name in bonded}


def _carries(member: str) -> bool:
    return (line_of(f"{member}/bonding_slave/mii_status") or line_of(f"{member}/operstate")) == "up"


def numbered(text: str) -> tuple[int, str] | None:
    """`4: ACTIVE` as its number and word."""
    found = _NUMBERED.match(text)
    return (int(found[1]), found[2].strip()) if found and len(found[1]) < 4 else None


class Rate(NamedTuple):
    gbps: float
    width: int | None
    speed: str | None


def rate(text: str) -> Rate | None:
    """`400 Gb/sec (4X NDR)`. Whoever asks knows that the link is up: of a port that is down it is a leftover."""
    found = _RATE.match(text)
    if not found or not 0 < float(found[1]) < 1e6:
        return None
    return Rate(float(found[1]), int(found[2]) if found[2] else None, found[3] or None)


def guid(text: str) -> str | None:
    """As ibstat and a fabric's tools write it, so that they can be searched for it. All zero is none."""
    found = _GUID.fullmatch(text)
    digits = found[1].replace(":", "") if found else ""
    return f"0x{digits}" if digits.strip("0") else None


def lid(text: str) -> int | None:
    """Unicast LIDs, hexadecimal here and decimal in ibstat; 0 is none yet, or an Ethernet port."""
    value = int(text, 0) if re.fullmatch(r"0x[0-9a-f]{1,4}|[1-9][0-9]{0,4}", text) else 0
    return value if 0 < value < 0xC000 else None


def missing(machine: Machine, beside: str = "") -> str:
    """Where a machine without devices was looked at, and what was found there; and what was asked beside that."""
    folder = f"{machine.sys}/class/infiniband"
    if not os.path.isdir(folder):  # noqa: PTH112
        found = "is not there"
    else:
        found = "has none that is not excluded" if names(folder) else "is empty"
    return f"no RDMA device here ({folder} {found}{f'; {beside}' if beside else ''})"
