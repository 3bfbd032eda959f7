"""Where it is that a line of the kernel log names by a PCI address, an interface or a server: loci of the contract."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from pathlib import Path

from diagnosd.collectors.kernel import text_of
from diagnosd.collectors.kernellog.lines import Told, gpu_address
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.mounts import mounts

UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-f-]{36})")  # of a GPU that did not start: GPU-????????-...
PATIENCE_S = 0.5
AGAIN_S = 60.0  # between two looks for the uuid of a GPU that has none, and for what else may have changed
KNOWN = 1024


class Places:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._host = machine.host
        self._uuids: dict[str, str] = {}
        self._known: dict[tuple[object, ...], str] = {}  # a flood names the same place again and again
        self._known_since = 0.0  # monotonic
        self._asked = -AGAIN_S  # monotonic
        self._asking: threading.Thread | None = None

    def learn(self, uuids: dict[str, str]) -> None:
        if not uuids.items() <= self._uuids.items():
            self._uuids.update(uuids)
            self._known.clear()

    def of(self, told: Told) -> str:
        now = time.monotonic()
        if now - self._known_since >= AGAIN_S or len(self._known) >= KNOWN:
            self._known.clear()
            self._known_since = now
        where = told[-5:]
        locus = self._known.get(where)
        if locus is None:
            locus = self._known[where] = self._look(told)
        return locus

    def _look(self, told: Told) -> str:
        if told.gpu:
            return self._gpu(told.gpu)
        if told.driver == "nvidia":
            return self._gpu(gpu_address(told.pci))
        if told.server:
            return self._storage(told.server)
        if told.pci or told.netdev:
            return self._nic(told.pci, told.netdev)
        return f"host:{self._host}"

    def _gpu(self, address: str) -> str:
        if address not in self._uuids:
            self.ask()
        return f"gpu:{self._host}/{self._uuids.get(address, f'PCI:{address}')}"

    def ask(self) -> None:
        """For the uuids: at the start, while all is well, and again where one is not known.

        The driver takes a lock to answer, and one that is stuck with a GPU may keep it: nobody waits for it for long.
        """
        now = time.monotonic()
        if now - self._asked < AGAIN_S or (self._asking and self._asking.is_alive()):
            return
        self._asked = now
        self._asking = threading.Thread(target=self._read_uuids, name="kernellog uuids", daemon=True)
        self._asking.start()
        self._asking.join(PATIENCE_S)

    def _read_uuids(self) -> None:
        """PCI addresses and uuids, from /proc/driver/nvidia/gpus/0000:9b:00.0/information, which anybody may read."""
        with suppress(OSError):
            for folder in (self._machine.proc / "driver/nvidia/gpus").iterdir():
                if not self._machine.excludes(folder.name) and (found := UUID.search(text_of(folder / "information"))):
                    self._uuids[gpu_address(folder.name)] = found[1]

    def _nic(self, pci: str, netdev: str) -> str:
        """By RDMA device and port where it has one, as everything that counts on it; a function of mlx5 has one port.

        What is at a PCI address and is no NIC (a bridge, a disk) is the host's.
        """
        if self._machine.excludes(pci, netdev):
            return f"nic:{self._host}/{netdev}" if netdev else f"host:{self._host}"
        folder = self._machine.sys / (f"bus/pci/devices/{pci}" if pci else f"class/net/{netdev}/device")
        netdev = netdev or _only(folder / "net")
        device = _only(folder / "infiniband")
        if self._machine.excludes(device, netdev):
            device = ""
        port = _only(folder / "infiniband" / device / "ports") if device else ""
        if port:
            return f"nic:{self._host}/{device}/{port}"
        return f"nic:{self._host}/{netdev}" if netdev else f"host:{self._host}"

    def _storage(self, server: str) -> str:
        """The first mount of a file server: `server:/export` of NFS, or Lustre's `mgs@tcp:/name`."""
        for mount in mounts(text_of(self._machine.proc / "self/mountinfo")):
            of_it = mount.device.startswith(f"{server}:") or mount.device.endswith(f":/{server.partition('-')[0]}")
            if of_it and mount.path.isprintable() and not mount.path.endswith("\\"):  # what a tag can say
                return f"storage:{mount.path}"
        return f"host:{self._host}"


def _only(folder: Path) -> str:
    """The name in a folder that has one; "" where there is none, or more."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return ""
    return names[0] if len(names) == 1 else ""
