"""What the inventory tells of each RDMA port: from sysfs, and where a container hides it from ibstat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diagnosd.collectors.ibstat import Ibstat
from diagnosd.collectors.kernel import line_of, names
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.pci import driver, where
from diagnosd.collectors.rdma import (
    LINK_UP,
    Device,
    devices,
    guid,
    interface_of,
    lid,
    members,
    missing,
    numbered,
    rate,
)

_GIDS_UNUSED = 16  # entries in a row: the table has up to 256, filled from its start, with holes where one was deleted


class Nics:
    """The ports of all RDMA devices as the contract's inventory has them."""

    def __init__(self, machine: Machine, ibstat: Ibstat | None = None) -> None:
        self.missing: str | None = None  # why there are none: what was looked for, and where
        self._machine = machine
        self._ibstat = ibstat or (Ibstat() if machine.live else None)

    def read(self) -> list[dict[str, Any]]:
        """One a port; what is unknown is missing. From ibstat where sysfs shows no device, as in some containers.

        OSError where nobody can say now which devices there are.
        """
        found = devices(self._machine)
        self.missing = None if found else missing(self._machine)
        if found or not self._ibstat or names(f"{self._machine.sys}/class/infiniband"):
            return [_nic(self._machine, device, port) for device in found for port in device.ports]
        told = self._ibstat.read()
        self.missing = self._ibstat.said or None if told else missing(self._machine, self._ibstat.said)
        return [each.nic() for each in told if not self._machine.excludes(each.device)]


def _nic(machine: Machine, device: Device, port: int) -> dict[str, Any]:
    base = f"{device.folder}/ports/{port}"
    state, phys_state = numbered(line_of(f"{base}/state")), numbered(line_of(f"{base}/phys_state"))
    link_layer, firmware = line_of(f"{base}/link_layer"), line_of(f"{device.folder}/fw_ver")
    speed = rate(line_of(f"{base}/rate")) if phys_state and phys_state[0] == LINK_UP else None
    interface = interface_of(machine, device, port)
    function = Path(device.function)
    physical = function / "physfn"
    mtu = line_of(f"{interface.folder}/mtu") if interface.folder else ""
    known = {
        "device": device.name,
        "port": port,
        "netdev": interface.name,
        "link_layer": link_layer or None,
        "state": state and state[1],
        "phys_state": phys_state and phys_state[1],
        "rate_gbps": speed and speed.gbps,
        "width": speed and speed.width,
        "speed": speed and speed.speed,
        "mtu": int(mtu) if mtu.isdecimal() else None,
        "firmware": firmware if firmware[:1].isdecimal() else None,
        "node_guid": guid(line_of(f"{device.folder}/node_guid")),
        "port_guid": guid(line_of(f"{base}/gids/0")[20:]),  # the lower half of a GID
        "lid": lid(line_of(f"{base}/lid")),
        "sm_lid": lid(line_of(f"{base}/sm_lid")),
        "gids": _gids(base) if link_layer == "Ethernet" else None,
        "netns": "other" if interface.elsewhere else None,
        "members": [
            {"netdev": name, "state": "ACTIVE" if up else "DOWN"} for name, up in members(machine, interface).items()
        ],
        "pci": device.pci,
        "driver": driver(function),
        "physfn": where(physical) if physical.is_dir() else None,
    }
    return {key: value for key, value in known.items() if value not in (None, [])}


def _gids(base: str) -> list[dict[str, Any]]:
    """The entries in use of a RoCE port's GID table: NCCL is told the index of one, and a flap can move it."""
    found, unused = [], 0
    for index in range(256):
        kind = line_of(f"{base}/gid_attrs/types/{index}")
        unused = 0 if kind else unused + 1
        if unused == _GIDS_UNUSED:
            break
        if kind:
            found.append({"index": index, "type": kind})
    return found
