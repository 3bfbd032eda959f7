"""What `ibstat` and `ibstatus` print: the second source, where a container hides /sys/class/infiniband.

Their output is used as far as it goes: ibstat has printed eight adapters and died of the ninth. That neither is
installed, or that they print nothing, says nothing of the ports.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from diagnosd.collectors.rdma import LINK_UP, guid, lid, numbered, rate

TOOLS = ("ibstat", "ibstatus")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where they are, and an unprivileged user's has neither
DEADLINE_S = 1.0  # for both: they answer in 20 ms, or wait for a firmware that does not
LAST_S = 0.1  # for a process to end once it is shot
AGAIN_S = 60.0
OUTPUT_BYTES = 1 << 20  # hundreds of ports

# words of ibstat -> numbers and words of sysfs
STATES = {"Down": (1, "DOWN"), "Initializing": (2, "INIT"), "Armed": (3, "ARMED"), "Active": (4, "ACTIVE")}
PHYS_STATES = {
    "Sleep": 1,
    "Polling": 2,
    "Disabled": 3,
    "PortConfigurationTraining": 4,
    "LinkUp": 5,
    "LinkErrorRecovery": 6,
    "PhyTest": 7,
}
_NAME = r"'(?P<device>[^'\\\x00-\x1f\x7f]+)'"  # what can be a tag
_CA = re.compile(f"CA {_NAME}")
_PORT = re.compile(r"\s+Port (?P<port>\d{1,3}):")
_STATUS = re.compile(rf"Infiniband device {_NAME} port (?P<port>\d{{1,3}}) status:")
_LINE = re.compile(r"\s+(?P<key>[A-Za-z][A-Za-z _]*?):\s*(?P<value>.*)")
_NONE = re.compile("no devices", re.IGNORECASE)  # ibstatus, which calls that a fatal error
_GBPS = re.compile(r"\d{1,6}(?:\.\d)?")  # all that ibstat tells of a rate


class Port(NamedTuple):
    """One port, as far as the tool told of it."""

    device: str
    port: int
    state: tuple[int, str] | None = None  # 4, "ACTIVE"
    phys_state: tuple[int, str] | None = None  # 5, "LinkUp"
    gbps: float | None = None  # while the link is up
    width: int | None = None
    speed: str | None = None
    link_layer: str | None = None
    lid: int | None = None
    sm_lid: int | None = None
    firmware: str | None = None
    node_guid: str | None = None
    port_guid: str | None = None

    def nic(self) -> dict[str, Any]:
        """As the contract's inventory has it."""
        known = {
            "device": self.device,
            "port": self.port,
            "link_layer": self.link_layer,
            "state": self.state and self.state[1],
            "phys_state": self.phys_state and self.phys_state[1],
            "rate_gbps": self.gbps,
            "width": self.width,
            "speed": self.speed,
            "firmware": self.firmware,
            "node_guid": self.node_guid,
            "port_guid": self.port_guid,
            "lid": self.lid,
            "sm_lid": self.sm_lid,
        }
        return {key: value for key, value in known.items() if value is not None}


def parse(text: str) -> list[Port]:
    """The ports in the output of either tool, whole or cut short; what is not understood is passed over."""
    return [_port(device, port, said) for device, port, said in _blocks(text)]


def _blocks(text: str) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Each port with the lines under it, those of its adapter included."""
    device = ""
    of_device: dict[str, str] = {}
    ports: dict[tuple[str, int], dict[str, str]] = {}
    said = of_device
    for line in text.splitlines():
        if found := _CA.match(line):
            device, of_device = found["device"], {}
            said = of_device
        elif device and (found := _PORT.fullmatch(line)):
            said = ports.setdefault((device, int(found["port"])), dict(of_device))
        elif found := _STATUS.match(line):
            said = ports.setdefault((found["device"], int(found["port"])), {})
        elif found := _LINE.fullmatch(line):
            said.setdefault(found["key"].lower().replace("_", " "), found["value"].strip())
        elif line.strip():
            said = {}  # something else, as the words of a tool that dies: no line after it belongs to that port
    yield from ((device, port, lines) for (device, port), lines in ports.items())


def _port(device: str, port: int, said: dict[str, str]) -> Port:
    state, phys_state = _state(said.get("state", "")), _phys(said.get("physical state") or said.get("phys state", ""))
    is_up = phys_state is not None and phys_state[0] == LINK_UP
    gbps, width, speed = _rate(said.get("rate", "")) if is_up else (None, None, None)
    return Port(
        device,
        port,
        state,
        phys_state,
        gbps,
        width,
        speed,
        said.get("link layer") or None,
        lid(said.get("base lid", "")),
        lid(said.get("sm lid", "")),
        said.get("firmware version") or None,
        guid(said.get("node guid", "")),
        guid(said.get("port guid") or said.get("default gid", "")[20:]),  # the lower half of a GID
    )


def _state(word: str) -> tuple[int, str] | None:
    return numbered(word) or STATES.get(word)


def _phys(word: str) -> tuple[int, str] | None:
    return numbered(word) or ((PHYS_STATES[word], word) if word in PHYS_STATES else None)


def _rate(text: str) -> tuple[float | None, int | None, str | None]:
    return rate(f"{text} Gb/sec" if _GBPS.fullmatch(text) else text) or (None, None, None)


class Ibstat:
    """Asks the tools, at most once a minute; between two times the answer is the last one."""

    def __init__(self, path: str = PATH, *, again_s: float = AGAIN_S) -> None:
        self.said = ""  # why the answer is empty or not whole
        self._path = path
        self._again_s = again_s
        self._asked: float | None = None
        self._ports: list[Port] = []
        self._running: subprocess.Popen[bytes] | None = None  # one that outlived its deadline and SIGKILL

    def read(self) -> list[Port]:
        """What the first tool tells that tells of a port."""
        now = time.monotonic()
        if self._asked is None or now - self._asked >= self._again_s:
            self._asked, self._ports = now, self._ask()
        return self._ports

    def _ask(self) -> list[Port]:
        if self._running and self._running.poll() is None:
            self.said = f"process {self._running.pid} still hangs"
            return []
        empty, failed, end = [], [], time.monotonic() + DEADLINE_S
        for tool in TOOLS:
            program = shutil.which(tool, path=self._path)
            if program is None:
                continue
            output, reason = self._run([program], end)
            ports = parse(output)
            self.said = f"{tool}: {reason}" if reason else ""
            if ports:
                return ports
            if reason and not _NONE.search(output):
                failed.append(self.said)
            else:
                empty.append(tool)
        self.said = ", ".join(failed) or _none_either(empty)
        return []

    def _run(self, argv: Sequence[str], end: float) -> tuple[str, str]:
        """What it printed, as far as it came, and what went wrong."""
        try:
            process = subprocess.Popen(  # noqa: S603 - a tool of the system's own folders
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"PATH": self._path},
            )
        except OSError as error:
            return "", f"cannot be started: {error.strerror}"
        output, ended = _drain(process, end)
        if not ended:
            process.kill()
        try:
            code = process.wait(LAST_S)
        except subprocess.TimeoutExpired:  # it closed its output and lives on, or is where no signal reaches it
            process.kill()
            self._running, code = process, 0
        text = output.decode("utf-8", "replace")
        if not ended:
            return text, f"no end after {DEADLINE_S:g} s"
        return text, f"exited with {code}: {text.strip().rpartition(chr(10))[2][:120]}" if code else ""


def _none_either(tools: Sequence[str]) -> str:
    if not tools:
        return f"neither {' nor '.join(TOOLS)} is installed"
    return f"{' and '.join(tools)} {'know' if len(tools) > 1 else 'knows'} none either"


def _drain(process: subprocess.Popen[bytes], end: float) -> tuple[bytes, bool]:
    """Its output until it closes it, or until the time or OUTPUT_BYTES are used up."""
    assert process.stdout is not None
    output = bytearray()
    with process.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(output) < OUTPUT_BYTES and (left := end - time.monotonic()) > 0:
            if not selector.select(left):
                return bytes(output), False
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                return bytes(output), True
            output += chunk
    return bytes(output), False
