"""What this machine is, as far as any Linux tells it: network interfaces, processors, memory, kernel."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diagnosd.collectors.kernel import first_line, text_of
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.net import watched
from diagnosd.point import Point, point

REPEAT_S = 60  # the inventory is told at least so often, and when it changes (telemetry.md 3)
# ARPHRD_* of <linux/if_arp.h> in /sys/class/net/X/type
LINK_LAYERS = {"1": "Ethernet", "32": "InfiniBand"}
STATES = {"up": "ACTIVE", "down": "DOWN", "lowerlayerdown": "DOWN"}  # operstate; `unknown` and the rest say nothing

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s4x4s16x")  # name; family and port; IPv4 address; the rest of the union, on 64 bits


def ipv4_addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of each interface of our network namespace, aliases included."""
    room = array("B", bytes(_IFREQ.size * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    found: dict[str, list[str]] = {}
    for name, address in _IFREQ.iter_unpack(room[:used].tobytes()):
        interface = name.partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        found.setdefault(interface, []).append(socket.inet_ntoa(address))
    return found


class Node:
    name = "node"
    every = 10

    def __init__(self, machine: Machine, ipv4: Callable[[], Mapping[str, list[str]]] = ipv4_addresses) -> None:
        self.errors = 0
        self._host = machine.host
        self._proc = machine.proc
        self._sys = machine.sys
        self._ipv4 = ipv4
        self._told = ""
        self._reads_since = 0

    def read(self, now_ns: int) -> list[Point]:
        """The inventory: at first, when it has changed, and every REPEAT_S."""
        inventory = json.dumps(self.inventory(), separators=(",", ":"))
        self._reads_since += 1
        if inventory == self._told and self._reads_since * self.every < REPEAT_S:
            return []
        self._told, self._reads_since = inventory, 0
        return [point("diagnosd_node", {"host": self._host}, {"inventory": inventory}, now_ns)]

    def inventory(self) -> dict[str, Any]:
        """A NodeInventory of the contract; what is unknown is missing."""
        known = {
            "nics": self._nics(),
            "software": _present({"kernel": first_line(self._proc / "sys/kernel/osrelease")}),
            "boot_id": first_line(self._proc / "sys/kernel/random/boot_id"),
            "cpu": self._cpu(),
            "memory_bytes": self._memory(),
        }
        return {key: value for key, value in known.items() if value}

    def _nics(self) -> list[dict[str, Any]]:
        folder = self._sys / "class/net"
        if not folder.is_dir():
            return []
        try:
            interfaces = sorted(entry.name for entry in folder.iterdir() if watched(entry.name))
            addresses = dict(self._ipv4())
        except OSError:
            self.errors += 1
            return []
        for interface, address in self._ipv6():
            addresses.setdefault(interface, []).append(address)
        return [self._nic(interface, addresses.get(interface, [])) for interface in interfaces]

    def _nic(self, interface: str, addresses: list[str]) -> dict[str, Any]:
        folder = self._sys / "class/net" / interface
        mtu, driver = first_line(folder / "mtu"), folder / "device/driver"
        return _present(
            {
                "netdev": interface,
                "link_layer": LINK_LAYERS.get(first_line(folder / "type") or ""),
                "state": STATES.get(first_line(folder / "operstate") or ""),
                "rate_gbps": self._rate(folder),
                "mtu": int(mtu) if mtu and mtu.isdecimal() else None,
                "driver": driver.resolve().name if driver.exists() else None,
                "addresses": addresses or None,
            }
        )

    @staticmethod
    def _rate(folder: Path) -> float | None:
        """Gbit/s of the link while it is up. What has no device behind it invents one: a veth says 10000, always."""
        speed = first_line(folder / "speed") if (folder / "device").exists() else None
        return int(speed) / 1000 if speed and speed.isdecimal() and speed != "0" else None  # a port that is down: -1

    def _ipv6(self) -> list[tuple[str, str]]:
        """/proc/net/if_inet6: address, index, prefix, scope (20 is link-local), flags, interface."""
        rows = (line.split() for line in text_of(self._proc / "net/if_inet6").splitlines())
        return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] != "20"]

    def _cpu(self) -> dict[str, int] | None:
        """Cores, not hardware threads, where the kernel tells them apart."""
        cores, sockets, threads = set(), set(), 0
        socket_id = ""
        for line in text_of(self._proc / "cpuinfo").splitlines():
            key, _, value = line.partition(":")
            key = key.strip()
            threads += key == "processor"
            if key == "physical id":
                socket_id = value
                sockets.add(value)
            elif key == "core id":
                cores.add((socket_id, value))
        return _present({"cores": len(cores) or threads or None, "sockets": len(sockets) or None}) or None

    def _memory(self) -> int | None:
        """Bytes: MemTotal is the first line of /proc/meminfo, in KiB."""
        name, _, rest = (first_line(self._proc / "meminfo") or "").partition(":")
        return 1024 * int(rest.split()[0]) if name == "MemTotal" else None


def _present(known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in known.items() if value is not None}
