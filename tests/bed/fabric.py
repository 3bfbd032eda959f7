"""Network namespaces as machines: one a rank, a neighbour that is in nobody's job, and a switch between them.

Every machine has one interface a fabric (eth0, eth1, ...), a veth whose other end is a port of that fabric's bridge in
the switch's namespace. The rate of a port is a token bucket on its way out of the switch, as a real port's is: what is
sent *to* a machine queues there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

PREFIX = "dgbed"  # then the driver's pid: one whose pid is gone left its machines behind
NEIGHBOUR = "nb"
LINE_RATE = "1gbit"

# A burst of 64 kB is half a millisecond at 1 Gbit/s; a queue of 400 kB (3 ms) is what a cheap switch has for one port.
BURST, QUEUE = "64kb", "400kb"

# The kernel's default may be bbr, which on a shallow queue retransmits 1 to 3 % in health; Ethernet clusters run cubic.
CONGESTION_CONTROL = "cubic"


def call(*command: str, stdin: str | None = None) -> str:
    """Standard output of a command; RuntimeError with what it said where it fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def owner(name: str) -> int | None:
    """The pid of the driver that made this namespace, control group or folder; None where it is none of ours."""
    match = re.match(rf"{PREFIX}(\d+)\b", name)
    return int(match[1]) if match else None


def stale(name: str) -> bool:
    pid = owner(name)
    return pid is not None and not Path(f"/proc/{pid}").exists()


def namespaces() -> list[str]:
    return [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip()]


def remove(namespace: str) -> None:
    """Remove a namespace with the processes in it."""
    for pid in call("ip", "netns", "pids", namespace).split():
        os.kill(int(pid), signal.SIGKILL)
    call("ip", "netns", "del", namespace)


def remove_stale() -> None:
    for name in namespaces():
        if stale(name):
            remove(name)


class Fabric:
    """Machines n0, n1, ... for the ranks, and the neighbour, joined by as many fabrics as there are rates (for tc)."""

    def __init__(self, ranks: int, rates: Sequence[str] = (LINE_RATE,)) -> None:
        self.hosts = tuple(f"n{rank}" for rank in range(ranks))
        self.rates = tuple(rates)

    def namespace(self, host: str) -> str:
        return f"{PREFIX}{os.getpid()}-{host}"

    def address(self, host: str, fabric: int = 0) -> str:
        number = 109 if host == NEIGHBOUR else 10 + self.hosts.index(host)
        return f"10.{77 + fabric}.0.{number}"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in namespaces():
            if owner(name) == os.getpid():
                remove(name)

    def _build(self) -> None:
        for host in ("sw", *self.hosts, NEIGHBOUR):
            call("ip", "netns", "add", self.namespace(host))
            call("ip", "-n", self.namespace(host), "link", "set", "lo", "up")
        for fabric in range(len(self.rates)):
            call("ip", "-n", self.namespace("sw"), "link", "add", f"fabric{fabric}", "type", "bridge")
            call("ip", "-n", self.namespace("sw"), "link", "set", f"fabric{fabric}", "up")
            for host in (*self.hosts, NEIGHBOUR):
                self._connect(host, fabric)

    def _connect(self, host: str, fabric: int) -> None:
        switch, machine, device, port = self.namespace("sw"), self.namespace(host), f"eth{fabric}", f"f{fabric}{host}"
        call("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", device, "netns", machine)
        call("ip", "-n", switch, "link", "set", port, "master", f"fabric{fabric}", "up")
        call("ip", "-n", machine, "addr", "add", f"{self.address(host, fabric)}/24", "dev", device)
        call("ip", "-n", machine, "link", "set", device, "up")
        # By route, because the sysctl of a namespace may not be set to an algorithm outside of the host's allowed list.
        net = f"10.{77 + fabric}.0.0/24"
        call("ip", "-n", machine, "route", "change", net, "dev", device, "congctl", CONGESTION_CONTROL)
        self.limit(host, self.rates[fabric], fabric)

    def limit(self, host: str, rate: str, fabric: int = 0) -> None:
        """The rate of the switch's port towards a host, from now on."""
        port = ("dev", f"f{fabric}{host}", "root", "handle", "1:")
        bucket = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
        call("tc", "-n", self.namespace("sw"), "qdisc", "replace", *port, *bucket)

    def lose(self, host: str, per_mille: int) -> None:
        """The share of what leaves the switch towards a host that is dropped, from now on."""
        rules = "table bridge loss {}\ndelete table bridge loss\n"
        if per_mille:
            rule = f'oifname "f0{host}" numgen random mod 1000 < {per_mille} drop'
            rules += f"table bridge loss {{\n chain out {{\n  type filter hook forward priority 0\n  {rule}\n }}\n}}\n"
        call("ip", "netns", "exec", self.namespace("sw"), "nft", "-f", "-", stdin=rules)
