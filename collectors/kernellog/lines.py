r"""Which lines of a kernel log tell of a fault, and of what: one row a form.

A line comes without its head (time, host, `kernel:`). A row has a few characters that its lines hold, so that a chunk
of a log can be searched for all of them before anything is decoded, and a pattern whose groups say what it is about:
`gpu` (PCI address without function), `pci` (with it), `netdev`, `server` (of a mount), `code`; `severity`, `pid` and
`switch` tell apart what else would be one fault.

Everything is told under a kind of the contract. `driver` is what a driver, or the kernel itself, says of something that
does not answer: a GPU's or NIC's software, a disk, a file server, a processor that is stuck. There is no kind for
machine checks and for file systems' errors: they are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from diagnosd.wording import plain
from diagnosd.xid import XIDS, severity

LINE = 1000  # characters of a line that are looked at
# A driver's name at most stands before what a row looks for. Further behind are names that users choose: a cgroup that
# is called `NVRM: Xid (PCI:0000:3b:00): 79` and runs out of memory, an option of a mount in a namespace of their own.
LEAD = 24
HALF = 4  # lines of the driver within which a message over several lines ends

_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?"
_SHORT = r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]"  # without a domain
_DEVICE = rf"(?:(?P<driver>[\w-]+) (?P<pci>{_PCI})[: ]+)"
_NETDEV = r"(?<!\S)(?P<netdev>[\w.@-]+)"


class Told(NamedTuple):
    """What a line says. The last five fields say of what; they are empty where it is about the host."""

    kind: str
    text: str
    code: int | None
    fault: str  # equal for lines that tell of one fault, as far as kind and subject leave that open
    gpu: str = ""
    pci: str = ""
    netdev: str = ""
    server: str = ""
    driver: str = ""


class Row(NamedTuple):
    kind: str
    fault: str
    needle: str
    pattern: re.Pattern[str]
    tell: Callable[[Recogniser, Row, str, re.Match[str]], Told | None]


class Recogniser:
    """Lines in the order of the log to what they tell; remembers the beginning of what goes on in the next line."""

    def __init__(self) -> None:
        self.uuids: dict[str, str] = {}  # of GPUs, by PCI address, as the driver's messages give them
        self.half = ""  # the GPU whose message is not complete
        self.half_left = 0  # lines until it is forgotten
        self.victim = ("", "")  # pid and cgroup of the process that is about to be killed

    def told(self, line: str) -> Told | None:
        line = line[:LINE]
        for row in ROWS:
            if row.needle in line and (found := row.pattern.search(line)) and found.start() <= LEAD:
                return row.tell(self, row, line, found)
        return None


def gpu_address(text: str) -> str:
    """0000:9b:00 of PCI:0000:9b:00, 00000000:9b:00.0 or 9b:00: domain, bus and device, as Xid messages write it."""
    *domain, bus, device = text.partition(".")[0].split(":")
    return f"{int(''.join(domain) or '0', 16):04x}:{bus:0>2}:{device:0>2}"


def _tell(text: str | None, _: Recogniser, row: Row, line: str, found: re.Match[str]) -> Told:
    """`text` may name the groups; else it is the line itself."""
    groups = {name: value for name, value in found.groupdict().items() if value}
    code = groups.get("code")
    apart = [groups[name] for name in ("severity", "pid", "switch") if name in groups]
    return Told(
        row.kind,
        plain(text.format(**groups) if text else line.strip()),
        int(code) if code else None,
        " ".join([row.fault, *apart, *([code] if code else [])]),
        gpu_address(groups["gpu"]) if "gpu" in groups else "",
        *(groups.get(name, "") for name in ("pci", "netdev", "server", "driver")),
    )


def _tell_xid(_: Recogniser, row: Row, line: str, found: re.Match[str]) -> Told:
    code, gpu = int(found["code"]), gpu_address(found["gpu"])
    known, how = XIDS.get(code), severity(code, line)
    meaning = f": {known.meaning} ({how})".replace("_", "-") if known else ""
    raw = found["tail"].replace("pid='<unknown>', name=<unknown>, ", "")
    text = f"Xid {code} on GPU {gpu}{found['mig']}{meaning}: {raw}"
    return Told(row.kind, plain(text), code, "gone" if code == GONE else f"xid {code}", gpu)


def _tell_gone(recogniser: Recogniser, row: Row, line: str, found: re.Match[str]) -> Told:  # noqa: ARG001
    """The address is in this line, or in one before."""
    address = re.search(rf"GPU (?P<gpu>{_PCI}|{_SHORT})", line)
    gpu = gpu_address(address["gpu"]) if address else recogniser.half
    recogniser.half = ""
    text = f"GPU {gpu}: fallen off the bus" if gpu else line.strip()
    return Told(row.kind, plain(text), None, row.fault, gpu)


def _remember_half(recogniser: Recogniser, row: Row, line: str, found: re.Match[str]) -> None:  # noqa: ARG001
    recogniser.half, recogniser.half_left = gpu_address(found["gpu"]), HALF


def _forget_half(recogniser: Recogniser, row: Row, line: str, found: re.Match[str]) -> None:  # noqa: ARG001
    recogniser.half_left -= 1
    if recogniser.half_left <= 0:
        recogniser.half = ""


def _learn_uuid(recogniser: Recogniser, row: Row, line: str, found: re.Match[str]) -> None:  # noqa: ARG001
    if len(recogniser.uuids) < 1024:
        recogniser.uuids[gpu_address(found["gpu"])] = found["uuid"]


def _remember_victim(recogniser: Recogniser, row: Row, line: str, found: re.Match[str]) -> None:  # noqa: ARG001
    recogniser.victim = (found["pid"], found["cgroup"])


def _tell_killed(recogniser: Recogniser, row: Row, line: str, found: re.Match[str]) -> Told:
    pid, cgroup = recogniser.victim
    where = f" in cgroup {cgroup}" if pid == found["pid"] and cgroup not in ("", "/") else ""
    resident = re.search(r"anon-rss:(\d+)kB", line)
    size = f", {int(resident[1]) / 2**20:.1f} GiB resident" if resident else ""
    text = f"out of memory{where}: killed process {found['pid']} ({found['name']}){size}"
    return Told(row.kind, plain(text), None, f"{row.fault} {found['pid']}")


_Tell = Callable[[Recogniser, Row, str, re.Match[str]], Told | None]


def _row(kind: str, fault: str, needle: str, pattern: str, tell: _Tell | str | None = None) -> Row:
    return Row(kind, fault, needle, re.compile(pattern), tell if callable(tell) else partial(_tell, tell))


GONE = 79  # the Xid of a GPU that has fallen off the bus: one fault with the message that says so in words
_XID = (
    r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-f]{1,8}(?::[0-9a-f]{1,2}){1,2})(?P<mig>[^)]{0,40})\): "
    r"(?P<code>\d{1,9})\b,? ?(?P<tail>.*)"
)
_LINK = rf"{_DEVICE}?{_NETDEV}(?:: (?:NIC )?| NIC )[Ll]ink (?:is )?"
_BOND, _SLAVE = r"(?<!\S)[\w.-]+: ", r"\(slave (?P<netdev>[\w.@-]+)\): "
_SXID = rf"(?P<switch>nvidia-nvswitch\d+): SXid \(PCI:{_PCI}\): (?P<code>\d{{1,9}}), (?!Severity|Data )"
_MANAGER = r"detected NVSwitch (?:non-)?fatal error (?P<code>\d{1,9}) on .*bus id (?P<switch>\S+)"
_MLX5 = (  # fault, and the words for it
    ("health", "health compromised"),
    ("health", "Fatal error "),
    ("health", "handling bad device"),
    ("health", "FW is unable"),
    ("health", "health recovery failed"),
    ("health", "synd 0x"),
    ("command", ") failed, status"),
    ("command", "timeout. Will cause a leak"),
)

_SEVERITY = r"severity=(?P<severity>\w+(?: \([\w-]+\))?)"
_BLOCKED = r"INFO: task (?P<severity>.{1,40}):\d+ blocked for more than \d+ seconds"
_HEAT = r"CPU\d+: (?P<severity>Package|Core) temperature (?:is )?above threshold"
_KILLED = r"(?:Memory cgroup out of memory[^:]{0,40}: )?Killed process (?P<pid>\d+),? \((?P<name>[^)]*)\)"
_LUSTRE = r"Lustre: .*Connection to (?P<server>[\w.]+)-\w+ \(at \S+\) was lost"

ROWS: tuple[Row, ...] = (
    # The driver of NVIDIA's GPUs. The first matching row counts: what is more particular stands before.
    _row("xid", "", "NVRM: Xid", _XID, _tell_xid),
    _row("", "", "NVRM: GPU at", rf"GPU at (?:PCI:)?(?P<gpu>{_PCI}): (?P<uuid>GPU-[0-9a-f-]{{36}})", _learn_uuid),
    _row("gpu_lost", "gone", "fallen off the bus", "NVRM: .*fallen off the bus", _tell_gone),
    _row("", "", "NVRM: The NVIDIA GPU", rf"The NVIDIA GPU (?P<gpu>{_PCI})", _remember_half),
    _row("driver", "versions", "NVRM: API mismatch", "NVRM: API mismatch"),
    _row("driver", "init", "RmInitAdapter failed", rf"NVRM: (?:GPU (?P<gpu>{_PCI}): )?RmInitAdapter failed"),
    _row("driver", "init", "nvidia: probe of", rf"nvidia: probe of (?P<gpu>{_PCI}) failed with error"),
    _row("driver", "init", "probe with driver nvidia", rf"nvidia (?P<gpu>{_PCI}): probe with driver nvidia failed"),
    _row("config_change", "loaded", "NVRM: loading NVIDIA", "NVRM: loading NVIDIA"),
    _row("", "", "NVRM: ", "NVRM: ", _forget_half),
    _row("driver", "peermem", "peermem", r"^nvidia[-_]peermem.{0,200}?(?:ERROR|[Ee]rror|failed|Unknown symbol)"),
    _row("nccl_warn", "segfault", "in libnccl", r"(?P<pid>\d+)\]: segfault at .* in libnccl"),
    # NVSwitches: each error is three lines, and the fabric manager tells of it too
    _row("sxid", "sxid", "SXid", _SXID),
    _row("sxid", "sxid", "detected NVSwitch", _MANAGER),
    # Network interfaces and their links
    _row("link_down", "link", "ink ", rf"{_LINK}(?:[Dd]own|DOWN)\b"),
    _row("link_up", "link", "ink ", rf"{_LINK}(?:[Uu]p|UP)\b"),
    _row("link_down", "bond", "link status definitely down", rf"{_BOND}{_SLAVE}link status def"),
    _row("link_down", "bond", "link status definitely down", rf"{_BOND}link .* interface (?P<netdev>[\w.-]+)"),
    _row("link_up", "bond", "link status definitely up", rf"{_BOND}{_SLAVE}link status def"),
    _row("link_up", "bond", "link status definitely up", rf"{_BOND}link .* interface (?P<netdev>[\w.-]+)"),
    _row("link_down", "bond", "without any active interface", rf"{_NETDEV}: now running without any active interface"),
    _row("link_down", "link", "ost carrier", rf"{_NETDEV}: [Ll]ost carrier"),  # systemd-networkd
    _row("link_up", "link", "ained carrier", rf"{_NETDEV}: [Gg]ained carrier"),
    _row("link_down", "cable", "Cable unplugged", rf"{_DEVICE}Port module event: .*Cable unplugged"),
    _row("thermal", "module", "Port module event[error]", rf"{_DEVICE}Port module event.*High [Tt]emp"),
    _row("driver", "module", "Port module event[error]", rf"{_DEVICE}Port module event\[error\]"),
    _row("thermal", "nic", "High temperature", rf"{_DEVICE}.*High temperature"),
    _row("driver", "transmit", "TX timeout", rf"{_DEVICE}?{_NETDEV}: TX timeout"),
    _row("driver", "transmit", "NETDEV WATCHDOG", rf"{_DEVICE}{_NETDEV}: NETDEV WATCHDOG"),
    _row("driver", "transmit", "NETDEV WATCHDOG", r"NETDEV WATCHDOG: (?P<netdev>[\w.@-]+) \(\S+\): transmit queue"),
    *(_row("driver", fault, words, rf"{_DEVICE}.*{re.escape(words)}(?!0+:)") for fault, words in _MLX5),
    # PCI Express. Each error is some lines: this is the one with the address and the severity.
    _row("aer", "aer", "PCIe Bus Error", rf"{_DEVICE}(?:AER: )?PCIe Bus Error: {_SEVERITY}"),
    _row("aer", "aer", "aer_status: 0x", rf"{_DEVICE}(?:AER: )?aer_status: 0x"),  # from the firmware
    _row("aer", "recovery", "device recovery failed", rf"{_DEVICE}(?:AER: )?.*device recovery failed"),
    _row("aer", "containment", "DPC: containment", rf"{_DEVICE}DPC: containment event"),
    _row("aer", "slot", "pciehp: Slot", rf"{_DEVICE}pciehp: Slot\([^)]*\): (?:Link Down|Card not present)"),
    # systemd itself: the devices that a container was given beside its unit are gone after a reload
    _row("config_change", "reload", "Reload", r"^Reload(?:ing)?(?: requested|\.)", "systemd has reloaded its units"),
    # Memory
    _row("", "", "oom-kill:", r"oom-kill:.*task_memcg=(?P<cgroup>[^,]*),task=.*,pid=(?P<pid>\d+)", _remember_victim),
    _row("oom", "oom", "Killed process", _KILLED, _tell_killed),
    # Heat, clocks, and what does not answer
    _row("thermal", "processor", "temperature", _HEAT),
    _row("thermal", "zone", "critical temperature", "critical temperature reached"),
    _row("clock", "unstable", "as unstable", r"clocksource: .*Marking clocksource .* as unstable"),
    _row("driver", "stuck", "soft lockup", r"soft lockup - (?P<severity>CPU#\d+) stuck"),
    _row("driver", "stuck", "hard LOCKUP", r"hard LOCKUP on (?P<severity>cpu \d+)"),
    _row("driver", "waits", "blocked for more than", _BLOCKED),
    _row("driver", "disk", "timeout, ", r"nvme (?P<severity>nvme\d+): I/O .*timeout, "),
    _row("driver", "disk", "controller is down", r"nvme (?P<severity>nvme\d+): controller is down"),
    _row("driver", "server", "not responding", r"nfs: server (?P<server>\S+) not responding"),
    _row("driver", "server", "was lost; in progress", _LUSTRE),
)  # fmt: skip
NEEDLES = tuple(dict.fromkeys(row.needle.encode() for row in ROWS))


def candidates(chunk: bytes) -> list[bytes]:
    """The lines of a chunk that hold what some row looks for, in their order."""
    found: dict[int, int] = {}
    for needle in NEEDLES:
        at = chunk.find(needle)
        while at >= 0:
            end = chunk.find(b"\n", at)
            end = len(chunk) if end < 0 else end
            found[chunk.rfind(b"\n", 0, at) + 1] = end
            at = chunk.find(needle, end)
    return [chunk[start:end] for start, end in sorted(found.items())]
