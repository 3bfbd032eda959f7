"""`diagnosd inventory`: what this machine is, for somebody who has to find out what is wrong with it.

What cannot be known is not left out in silence: the last part says what is missing, and which path was tried for it.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from diagnosd.child import once
from diagnosd.collectors import hardware
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.node import Node
from diagnosd.collectors.pci import address
from diagnosd.documents import Gpu, Nic, NodeInventory, Software, decode_node, encode
from diagnosd.wording import printable

WIDTH = 80
GAP = "  "
PATIENCE_S = 40.0  # a driver without persistence mode wakes each GPU up first, which takes 1 to 3 s
NEEDED = ("nvml", "node")  # the collectors that the inventory is made of
_LAYERS = {"InfiniBand": "IB", "Ethernet": "Eth"}


class Seen(NamedTuple):
    """What was read of a machine, and what its collectors said in words."""

    inventory: NodeInventory
    words: Sequence[str] = ()


def inventory(host: str, root: Path | None, exclude: Sequence[str], socket: Path, output: str) -> int:
    """Prints it; the exit code."""
    machine = Machine.of(host, root, exclude)
    seen = Seen(decode_node(json.dumps(Node(machine).inventory()))) if root else live(machine, socket)
    if output == "json":
        print(encode(seen.inventory).decode())
        for each in seen.words:
            print(f"diagnosd: {each}", file=sys.stderr)
    else:
        print(text(str(root or host), machine, seen), end="")
    return 0 if seen.inventory != NodeInventory() else 1


def live(machine: Machine, socket: Path, patience: float = PATIENCE_S) -> Seen:
    """By a child that reads, since a GPU may not answer: after half of `patience` the rest is read without it."""
    others = [each.name for each in hardware(machine) if each.name not in NEEDED]
    points, words = once(machine.host, machine.exclude, socket, patience, others)
    told = [str(each.fields["inventory"]) for each in points if each.series.measurement == "diagnosd_node"]
    events = [str(each.fields["text"]) for each in points if each.series.measurement == "diagnosd_event"]
    return Seen(decode_node(told[-1]) if told else NodeInventory(), [*words, *events])


def text(title: str, machine: Machine, seen: Seen) -> str:
    """The table: 80 columns, unless what it has to name is longer."""
    inventory = seen.inventory
    parts = (
        [printable(f"{title}: {_summary(inventory)}")],
        _section("GPUs", _gpus(inventory.gpus or ())),
        _section("Ports", _ports(inventory.nics or ())),
        _section("Nearness, in the words of nvidia-smi topo -m", _matrix(inventory)),
        _section("Software", _software(inventory)),
        _section("Not known", _lines(missing(machine, seen))),
    )
    return "\n".join("\n".join(part) + "\n" for part in parts if part)


def _section(head: str, lines: Iterable[str]) -> list[str]:
    lines = [f"{GAP}{printable(line)}".rstrip() for line in lines]
    return [head, *lines] if lines else []


def _summary(inventory: NodeInventory) -> str:
    cpu, ports = inventory.cpu, [nic for nic in inventory.nics or () if nic.device]
    names = Counter(gpu.name or "GPU without a name" for gpu in inventory.gpus or ())
    known = [
        *(f"{count} x {name}" for name, count in names.items()),
        _count(len(ports), "RDMA port") if ports else "",
        _count(cpu.cores, "core") if cpu and cpu.cores else "",
        _count(cpu.sockets, "socket") if cpu and cpu.sockets else "",
        f"{inventory.memory_bytes / 2**30:.0f} GiB" if inventory.memory_bytes else "",
    ]
    return ", ".join(filter(None, known)) or "nothing is known of it"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as what stands in them; one that is empty in every row is left out."""
    kept = [at for at in range(len(head)) if any(row[at] for row in rows)]
    table = [[row[at] or "-" for at in kept] for row in rows]
    wide = [max(_columns(row[at]) for row in ([head[k] for k in kept], *table)) for at in range(len(kept))]
    return [GAP.join(map(_padded, row, wide)).rstrip() for row in ([head[k] for k in kept], *table) if kept]


def _padded(cell: str, columns: int) -> str:
    return cell + " " * (columns - _columns(cell))


def _columns(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in printable(cell))


def _gpus(gpus: Sequence[Gpu]) -> Iterator[str]:
    names = {gpu.name for gpu in gpus}
    head = ("GPU", "uuid", "PCI", "NUMA", "NVLinks", "PCIe", "limit W", "name")
    short = _shortener(gpu.pci for gpu in gpus)
    rows = [
        (
            _number(gpu.index),
            (gpu.uuid or "")[:12],  # GPU- and eight digits; all of it is in the JSON
            short(gpu.pci),
            _number(gpu.numa),
            _of(gpu.nvlinks_active, gpu.nvlinks),
            _pcie(gpu),
            _watts(gpu),
            (gpu.name or "") if len(names) > 1 else "",
        )
        for gpu in gpus
    ]
    yield from _table(head, rows)
    if any(gpu.mig for gpu in gpus):
        yield f"MIG is on: {_named(f'GPU{gpu.index}' for gpu in gpus if gpu.mig)}"
    yield from _ceilings((f"GPU{gpu.index}" if gpu.index is not None else short(gpu.pci), gpu) for gpu in gpus)


def _ports(nics: Sequence[Nic]) -> Iterator[str]:
    """A virtual function is counted with the physical one that it is of."""
    listed = {address(nic.pci) for nic in nics}
    own = [nic for nic in nics if not nic.physfn or address(nic.physfn) not in listed]
    head = ("port", "netdev", "layer", "state", "Gbit/s", "PCI", "NUMA", "PCIe")
    short = _shortener(nic.pci for nic in own)
    rows = [
        (
            _port(nic),
            (nic.netdev or "") if nic.device else "",
            _LAYERS.get(nic.link_layer or "", nic.link_layer or ""),
            _state(nic),
            _rate(nic),
            short(nic.pci),
            _number(nic.numa),
            _pcie(nic),
        )
        for nic in own
    ]
    yield from _table(head, rows)
    yield from _firmware(own)
    for function, virtual in groupby((nic for nic in nics if nic not in own), lambda nic: nic.physfn):
        states = [nic.state for nic in virtual]
        yield f"{short(function)}: {_count(len(states), 'virtual function')}, {states.count('ACTIVE')} of them active"
    for nic in own:
        down = [member.netdev or "?" for member in nic.members or () if member.state != "ACTIVE"]
        if down:
            yield f"{nic.netdev} has lost {_named(down)}"
    yield from _ceilings((_port(nic), nic) for nic in own)


def _firmware(nics: Sequence[Nic]) -> Iterator[str]:
    """A line: what is odd stands out among many that are equal."""
    by_version: dict[str, list[str]] = {}
    for nic in nics:
        if nic.firmware:
            by_version.setdefault(nic.firmware, []).append(nic.device or "")
    if by_version:
        most = max(by_version.values(), key=len)
        places = {version: _count(len(on), "port") if on is most else _named(on) for version, on in by_version.items()}
        told = (f"{version} on {where}" for version, where in places.items())
        yield f"firmware {', '.join(told)}"


def _ceilings(devices: Iterable[tuple[str, Gpu | Nic]]) -> Iterator[str]:
    """What a device is limited to that its own link does not show: by its slot, or by a port on the way to it."""
    slots: dict[str, list[str]] = {}
    paths: dict[str, list[str]] = {}
    for name, each in devices:
        most, slot = (each.pcie_gen_max, each.pcie_width_max), (each.pcie_gen_slot, each.pcie_width_slot)
        path = each.pcie_gen_path, each.pcie_width_path
        if _less(slot, most):
            what = f"could do {_link(*most)}, the slot or a switch above it {_link(*slot)}"
            slots.setdefault(what, []).append(name)
        if _less(path, _best(each)):
            paths.setdefault(f"the way to it leads over a link that runs at {_link(*path)}", []).append(name)
    for what, names in (*slots.items(), *paths.items()):
        yield f"{_named(names)}: {what}"


def _matrix(inventory: NodeInventory) -> Iterator[str]:
    """From each GPU and NIC to each GPU; as many of these beside each other as there is room for."""
    near = inventory.affinity or {}
    nics = dict.fromkeys(name for each in near.values() for name in each if name not in near)
    rows, gpus = [*near, *nics], list(near)
    if not rows:
        return
    column = max(len("NODE"), *map(len, gpus)) + len(GAP)
    fit = max(1, (WIDTH - len(GAP) - max(map(len, rows))) // column)
    for first in range(0, len(gpus), fit):
        shown = gpus[first : first + fit]
        cells = [(row, *("X" if row == gpu else near[gpu].get(row, "") for gpu in shown)) for row in rows]
        yield from _table(("", *shown), cells)


# -- cells ------------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _of(part: float | None, whole: float | None) -> str:
    return f"{_number(part) or '?'}/{_number(whole)}" if whole is not None else _number(part)


def _watts(gpu: Gpu) -> str:
    now, usual = _number(gpu.power_limit_w), _number(gpu.power_limit_default_w)
    return f"{now} of {usual}" if now and usual and now != usual else now


def _port(nic: Nic) -> str:
    return f"{nic.device}/{nic.port}" if nic.device else nic.netdev or nic.pci or "?"


def _state(nic: Nic) -> str:
    words = [nic.state or "", (nic.phys_state or "") if nic.phys_state != "LinkUp" else ""]
    return " ".join(filter(None, [*words, "(other netns)" if nic.netns else ""]))


def _rate(nic: Nic) -> str:
    lanes = f"{nic.width}X" if nic.width else ""
    return " ".join(filter(None, (_number(nic.rate_gbps), lanes, nic.speed or "")))


def _link(gen: int | None, width: int | None) -> str:
    """5x16: the generation and the lanes."""
    return f"{_number(gen) or '?'}x{_number(width) or '?'}" if gen or width else ""


def _less(one: tuple[int | None, int | None], other: tuple[int | None, int | None]) -> bool:
    return any(a is not None and b is not None and a < b for a, b in zip(one, other, strict=True))


def _best(each: Gpu | Nic) -> tuple[int | None, int | None]:
    """What its link can do where it is plugged in."""
    gens = [gen for gen in (each.pcie_gen_max, each.pcie_gen_slot) if gen is not None]
    widths = [width for width in (each.pcie_width_max, each.pcie_width_slot) if width is not None]
    return min(gens, default=None), min(widths, default=None)


def _pcie(each: Gpu | Nic) -> str:
    """Now, and what it could be where it is less. An idle GPU lowers its link: that is said."""
    now, best = (each.pcie_gen, each.pcie_width), _best(each)
    if not _less(now, best):
        return _link(*now)
    idle = " idle" if isinstance(each, Gpu) and each.pcie_busy is False else ""
    return f"{_link(*now)} of {_link(*best)}{idle}"


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 4 else f"{listed[0]} and {len(listed) - 1} others"


def _shortener(addresses: Iterable[str | None]) -> Callable[[str | None], str]:
    """18:00.0, where all of them are of domain 0."""
    plain = all((address(each) or "0000:").startswith("0000:") for each in addresses)
    return lambda each: (address(each) or "")[5 if plain else 0 :]


def _software(inventory: NodeInventory) -> Iterator[str]:
    software = inventory.software or Software()
    loaded: Mapping[bool | None, str] = {True: "loaded", False: "not loaded"}
    ready: Mapping[bool | None, str] = {True: "yes", False: "no"}
    switch: Mapping[bool | None, str] = {True: "on", False: "off"}
    fabric = inventory.fabric
    lines = (
        (("kernel", software.kernel), ("boot", inventory.boot_id)),
        (("driver", software.driver), ("CUDA", software.cuda), ("NCCL", software.nccl), ("OFED", software.ofed)),
        (("persistence mode", switch.get(software.persistence)),),
        (("NVLink fabric", fabric and " ".join(filter(None, (fabric.state, fabric.status, fabric.health)))),),
        (
            ("GPUDirect: peer memory module", loaded.get(software.peermem)),
            ("dma-buf", ready.get(software.dmabuf)),
        ),
        (("IOMMU", software.iommu), ("ACS of the switches", software.acs)),
    )
    for line in lines:
        known = [f"{name} {value}" for name, value in line if value]
        if known:
            yield ", ".join(known)


# -- what is missing --------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a part of the inventory is looked for."""

    what: str
    known: Callable[[NodeInventory], object]
    root: str  # of a Machine
    path: str


GPUS = "GPUs"
PLACES = (
    Place(GPUS, lambda found: found.gpus, "sys", "bus/pci/devices"),
    Place("RDMA ports", lambda found: any(nic.device for nic in found.nics or ()), "sys", "class/infiniband"),
    Place("network interfaces", lambda found: any(nic.netdev for nic in found.nics or ()), "sys", "class/net"),
    Place("kernel", lambda found: found.software and found.software.kernel, "proc", "sys/kernel/osrelease"),
    Place("boot", lambda found: found.boot_id, "proc", "sys/kernel/random/boot_id"),
    Place("processors", lambda found: found.cpu, "proc", "cpuinfo"),
    Place("memory", lambda found: found.memory_bytes, "proc", "meminfo"),
)


def missing(machine: Machine, seen: Seen) -> Iterator[tuple[str, Sequence[str]]]:
    """What is not known, and where it was looked for or why it cannot be."""
    found = seen.inventory
    of_gpus = [each for each in seen.words if _is_of_gpus(each)]
    for place in PLACES:
        if not place.known(found):
            tried = [f"{path}: {_state_of(path)}" for path in _tried(machine, place)]
            yield place.what, [*tried, *(of_gpus if place.what == GPUS else ())]
    if found.gpus and of_gpus:
        yield GPUS, of_gpus
    gpus, nics = found.gpus or (), found.nics or ()
    devices: list[Gpu | Nic] = [*gpus, *(nic for nic in nics if nic.device)]
    unnamed = [gpu.pci or "?" for gpu in gpus if not gpu.uuid]
    if unnamed and not machine.live:
        yield "names, NVLinks, power", ["NVML tells them, and a captured tree has none"]
    elif unnamed:
        yield "names, NVLinks, power", [f"NVML does not know {_named(unnamed)}"]
    silent = [each.pci for each in devices if each.pci and not each.pcie_gen]
    if silent:
        yield "PCIe links", [f"{_named(silent)}: current_link_speed is missing, empty or unknown"]
    if gpus and any(nic.device for nic in nics) and not found.affinity:
        yield "nearness", [f"{machine.sys}/bus/pci/devices: no links into the PCI tree"]
    if gpus and not (found.software and found.software.acs):
        root = machine.live and os.geteuid() != 0
        yield "ACS", ["switches show it to root alone" if root else "no switch above a GPU or NIC that shows it"]
    if others := [each for each in seen.words if not _is_of_gpus(each)]:
        yield "also", others


def _is_of_gpus(sentence: str) -> bool:
    return "nvml" in sentence.lower() or "NVIDIA" in sentence


def _lines(rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Each line of a row whole, though it may be longer than a terminal's: a path is there to be copied."""
    listed = list(rows)
    wide = max((_columns(what) for what, _ in listed), default=0)
    for what, words in listed:
        for label, line in zip((what, *[""] * len(words)), words, strict=False):
            yield GAP.join((_padded(label, wide), line))


def _tried(machine: Machine, place: Place) -> list[Path]:
    """One path, or for a captured tree both in which it may lie."""
    root: Path = getattr(machine, place.root)
    paths = [root / place.path]
    if place.root == "sys" and not machine.live and root.name != "sys":
        paths.append(root / "sys" / place.path)
    return paths


def _state_of(path: Path) -> str:
    try:
        if path.is_dir():
            return "none in it" if any(path.iterdir()) else "empty"
        return "of no use" if path.read_bytes() else "empty"
    except FileNotFoundError:
        return "not there"
    except OSError as error:
        return (error.strerror or str(error)).lower()
