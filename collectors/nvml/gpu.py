"""One GPU: what it is asked when, and the points and the inventory's entry that come of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from diagnosd.collectors.every import Every
from diagnosd.collectors.nvml.fabric import fabric
from diagnosd.collectors.nvml.fields import FACTS, FAST, MAX_LINKS, SLOW, SMI, WIDE, WRAPPING
from diagnosd.collectors.nvml.gpm import Activity
from diagnosd.collectors.nvml.links import Links
from diagnosd.collectors.nvml.sheet import Sheet
from diagnosd.point import Point, Series

SLOW_S, FACTS_S = 10, 60

# An idle GPU slows its PCIe link down: of a busy one the most of a minute counts. Field -> key of the inventory.
PCIE = {"pcie_link_gen_current": "pcie_gen", "pcie_link_width_current": "pcie_width"}
FACTS_TOLD = ("pcie_gen_max", "pcie_width_max", "power_limit_w", "power_limit_default_w", "serial", "vbios")


@dataclass(frozen=True, slots=True)
class Identity:
    index: int
    uuid: str
    name: str
    pci: str | None  # as NVML spells it: 00000000:18:00.0


class Gpu:
    def __init__(self, nvml: ModuleType, handle: object, host: str, identity: Identity) -> None:
        self.identity = identity
        self.unreadable = 0  # values, in the last read
        self.known: dict[str, Any] = {}  # its entry in the inventory
        self.fabric: dict[str, Any] = {}
        self.persistent: bool | None = None
        self._nvml = nvml
        self._handle = handle
        self._tags = {"host": host, "index": str(identity.index), "uuid": identity.uuid}
        self._smi = Series.of("nvidia_smi", name=identity.name, **self._tags)
        self._gpu = Series.of("diagnosd_gpu", **self._tags)
        self._tick = 0
        early = identity.index % SLOW_S  # so that of several GPUs one is asked the slow questions at a time
        self._slow_due, self._facts_due = Every(SLOW_S, early), Every(FACTS_S, early + SLOW_S / 2)
        self._facts = Sheet(nvml, handle, [FACTS])
        self._fabric_due = True
        self._mig = False
        self._link_count = 0
        self._activity = Activity(nvml, handle)
        self._links = Links(nvml, handle, self._tags, 0)
        self._ask_anew()
        self._busy_pcie: dict[str, int] = {}  # the most that was seen while it was busy, since the last facts
        self._wide: set[str] = set()

    def read(self, now_ns: int) -> list[Point]:
        """At first everything. LostError, DownError."""
        self.unreadable = 0
        self._tick += 1
        facts = self._learn() if self._facts_due.is_due(now_ns, self._tick) else None
        fields = self._read_fast(now_ns)
        links: list[Point] = []
        if self._slow_due.is_due(now_ns, self._tick):
            fields |= self._answered(self._slow)
            links = self._read_links(fields, now_ns)
        if facts is not None:
            self._describe(facts, fields)
        smi = {name: value for name, value in fields.items() if name in SMI}
        gpu = {name: value for name, value in fields.items() if name not in SMI}
        return [Point(series, each, now_ns) for series, each in ((self._smi, smi), (self._gpu, gpu)) if each] + links

    def close(self) -> None:
        self._activity.close()

    def _ask_anew(self) -> None:
        """Forgets what is not supported: MIG was switched on or off, or a link that said nothing has come up."""
        self._activity.close()
        self._activity = Activity(self._nvml, self._handle)
        questions = [question for question in FAST if question.mig or not self._mig]
        self._fast = Sheet(self._nvml, self._handle, [questions], range(self._link_count))
        self._slow = Sheet(self._nvml, self._handle, [SLOW])

    def _answered(self, sheet: Sheet) -> dict[str, Any]:
        (answer,) = sheet.answers()
        self.unreadable += sheet.unreadable
        return answer

    def _learn(self) -> dict[str, Any]:
        """What rarely changes: whether it is cut into slices, and how many NVLinks it has, decide what is asked."""
        facts = self._answered(self._facts)
        untold = MAX_LINKS if "links" in self._facts.lacking() else self._link_count
        links, mig = facts.get("links", untold), facts.get("mig", self._mig) == 1
        if links != self._link_count:
            self._links = Links(self._nvml, self._handle, self._tags, links)
        if (links, mig) != (self._link_count, self._mig):
            self._link_count, self._mig = links, mig
            self._ask_anew()
        if self._fabric_due:
            self._read_fabric()
        return facts

    def _read_fabric(self) -> None:
        try:
            self.fabric = fabric(self._nvml, self._handle)
            self._fabric_due = bool(self.fabric)
        except (self._nvml.NVMLError, UnicodeDecodeError):
            self.unreadable += 1

    def _read_fast(self, now_ns: int) -> dict[str, Any]:
        fields = self._answered(self._fast)
        if not self._mig:
            fields |= self._activity.read(now_ns)
            self.unreadable += self._activity.unreadable
        for name in WRAPPING:
            if fields.get(name, 0) >= WIDE:
                self._wide.add(name)
            elif name not in self._wide:
                fields.pop(name, None)
        if fields.get("utilization_gpu"):
            self._busy_pcie = {name: max(fields.get(name, 0), self._busy_pcie.get(name, 0)) for name in PCIE}
        return fields

    def _read_links(self, fields: dict[str, Any], now_ns: int) -> list[Point]:
        points = self._links.read(now_ns, self._tick)
        self.unreadable += self._links.unreadable
        if self._links.errors is not None:
            fields["nvlink_errors"] = self._links.errors
        if self._links.has_risen:
            self._links.ask_anew()
            self._ask_anew()
        return points

    def _describe(self, facts: dict[str, Any], fields: dict[str, Any]) -> None:
        busy, self._busy_pcie = self._busy_pcie, {}
        pcie = busy or fields
        lacking = {*self._fast.lacking(), *self._slow.lacking(), *self._activity.lacking()}
        known = {
            **asdict(self.identity),
            **self._links.inventory(),
            **{key: pcie.get(name) or None for name, key in PCIE.items()},
            "pcie_busy": bool(busy) if "utilization_gpu" in fields else None,
            "mig": self._mig if "mig" in facts else None,
            **{key: facts.get(key) for key in FACTS_TOLD},
            "unsupported": sorted(lacking) or None,
        }
        self.known = {key: value for key, value in known.items() if value is not None}
        self.persistent = None if "persistence" not in facts else facts["persistence"] == 1
