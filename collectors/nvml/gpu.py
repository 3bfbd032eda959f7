"""One GPU: what it is asked when, and the points and the inventory's entry that come of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from diagnosd.collectors.nvml.fabric import fabric
from diagnosd.collectors.nvml.fields import (
    FACTS,
    FAST,
    LINK_ERRORS,
    LINK_UP,
    MEGA,
    REMOTE_SWITCH,
    SLOW,
    SMI,
    WIDE,
    WRAPPING,
    of_link,
    remote_of,
)
from diagnosd.collectors.nvml.gpm import Activity
from diagnosd.collectors.nvml.sheet import Sheet
from diagnosd.point import Point, Series

SLOW_S, STATE_S, FACTS_S = 10, 50, 60
"""Links are looked at with the slow fields, every ten seconds: after 50 s the next look keeps the contract's 60 s."""


class Every:
    """Whether something is due that comes every so many seconds: at once, and the second time `early` seconds sooner.

    So many ticks, of about a second, are as good: half a second sooner is in time, and a clock may be set.
    """

    def __init__(self, seconds: float, early: float = 0.0) -> None:
        self._seconds = seconds
        self._early = early
        self._last: tuple[float, float] | None = None  # seconds, ticks

    def is_due(self, now_ns: int, tick: int) -> bool:
        now = now_ns / 1e9
        if self._last is None:
            self._last = now - self._early, tick - self._early
            return True
        seconds, ticks = now - self._last[0], tick - self._last[1]
        if 0 <= seconds < self._seconds - 0.5 and ticks < self._seconds:
            return False
        self._last = now, tick
        return True


@dataclass(frozen=True, slots=True)
class Identity:
    index: int
    uuid: str
    name: str
    pci: str | None  # as NVML spells it: 00000000:18:00.0
    numa: int | None


class Gpu:
    def __init__(self, nvml: ModuleType, handle: object, host: str, identity: Identity) -> None:
        self.identity = identity
        self.unreadable = 0  # values, in the last read
        self.known: dict[str, Any] = {}  # its entry in the inventory
        self.fabric: dict[str, Any] = {}
        self.persistent: bool | None = None
        self._nvml = nvml
        self._handle = handle
        tags = {"host": host, "index": str(identity.index), "uuid": identity.uuid}
        self._tags = tags
        self._smi = Series.of("nvidia_smi", name=identity.name, **tags)
        self._gpu = Series.of("diagnosd_gpu", **tags)
        early = identity.index % SLOW_S  # so that of several GPUs one is asked the slow questions at a time
        self._slow_due, self._state_due = Every(SLOW_S, early), Every(STATE_S)
        self._facts_due = Every(FACTS_S, early + SLOW_S / 2)
        self._facts = Sheet(nvml, handle, [FACTS])
        self._fabric_due = True
        self._mig = False
        self._tick = 0
        self._pcie: dict[str, int] = {}  # the most that was seen while it was busy, since the last facts
        self._links: dict[int, Series] = {}
        self._link_said: dict[int, dict[str, Any]] = {}
        self._remotes: dict[str, int] = {}
        self._wide: set[str] = set()
        self._count = 0
        self._activity = Activity(nvml, handle)
        self._ask_anew(0)

    def read(self, now_ns: int) -> list[Point]:
        """At first everything. LostError, DownError."""
        self.unreadable = 0
        self._tick += 1
        facts = self._learn() if self._facts_due.is_due(now_ns, self._tick) else None
        fields = self._answered(self._fast)[0]
        if not self._mig:
            fields |= self._activity.read(now_ns)
            self.unreadable += self._activity.unreadable
        self._drop_wrapping(fields)
        if fields.get("utilization_gpu"):
            self._pcie = {name: max(fields.get(name, 0), self._pcie.get(name, 0)) for name in _PCIE}
        points: list[Point] = []
        if self._slow_due.is_due(now_ns, self._tick):
            fields |= self._answered(self._slow)[0]
            points = self._read_links(fields, now_ns)
        if facts is not None:
            self._describe(facts, fields)
        return self._points(fields, now_ns) + points

    def close(self) -> None:
        self._activity.close()

    def _ask_anew(self, links: int) -> None:
        """Forgets what is not supported: MIG was switched on or off, or a link that said nothing has come up."""
        handle, nvml = self._handle, self._nvml
        self._activity.close()
        self._count = links
        questions = [question for question in FAST if question.mig or not self._mig]
        self._fast = Sheet(nvml, handle, [questions], range(links))
        self._slow = Sheet(nvml, handle, [SLOW])
        self._link = Sheet(nvml, handle, [of_link(link) for link in range(links)])
        self._activity = Activity(nvml, handle)

    def _answered(self, sheet: Sheet) -> list[dict[str, Any]]:
        answers = sheet.answers()
        self.unreadable += sheet.unreadable
        return answers

    def _learn(self) -> dict[str, Any]:
        """What rarely changes: whether it is cut into slices, and how many NVLinks it has, decide what is asked."""
        facts = self._answered(self._facts)[0]
        untold = self._nvml.NVML_NVLINK_MAX_LINKS if "links" in self._facts.lacking() else self._count
        links, mig = facts.get("links", untold), facts.get("mig", self._mig) == 1
        if (links, mig) != (self._count, self._mig):
            self._mig = mig
            self._ask_anew(links)
        if self._fabric_due:
            self._read_fabric()
        return facts

    def _read_fabric(self) -> None:
        try:
            self.fabric = fabric(self._nvml, self._handle)
            self._fabric_due = bool(self.fabric)
        except self._nvml.NVMLError:
            self.unreadable += 1

    def _drop_wrapping(self, fields: dict[str, Any]) -> None:
        for name in WRAPPING:
            if fields.get(name, 0) >= WIDE:
                self._wide.add(name)
            elif name not in self._wide:
                fields.pop(name, None)

    def _points(self, fields: dict[str, Any], now_ns: int) -> list[Point]:
        smi = {name: value for name, value in fields.items() if name in SMI}
        gpu = {name: value for name, value in fields.items() if name not in SMI}
        return [Point(series, each, now_ns) for series, each in ((self._smi, smi), (self._gpu, gpu)) if each]

    def _read_links(self, fields: dict[str, Any], now_ns: int) -> list[Point]:
        """Points of the links that have changed, or of all when they are due; the sum of their errors into `fields`."""
        before = self._link_said
        said = {link: _of_link(answer) for link, answer in enumerate(self._answered(self._link)) if "state" in answer}
        self._link_said = said
        complete = not self._link.unreadable
        errors = [each[name] for each in said.values() for name in LINK_ERRORS if name in each]
        if errors and complete:  # a sum without one of them would run back
            fields["nvlink_errors"] = sum(errors) % 2**63
        if _active(said) != _active(before):
            self._find_remotes(_active(said))
            if before and set(_active(said)) - set(_active(before)):
                self._ask_anew(self._count)
        told = (
            said
            if self._state_due.is_due(now_ns, self._tick)
            else {n: each for n, each in said.items() if each != before.get(n)}
        )
        return [Point(self._series(link), each, now_ns) for link, each in told.items()]

    def _series(self, link: int) -> Series:
        if link not in self._links:
            self._links[link] = Series.of("diagnosd_nvlink", link=str(link), **self._tags)
        return self._links[link]

    def _find_remotes(self, links: list[int]) -> None:
        """How many active links lead to each other GPU, by its PCI address, and to switches."""
        self._remotes = {}
        for answer in self._answered(Sheet(self._nvml, self._handle, [remote_of(link) for link in links])):
            remote = "switch" if answer.get("type") == REMOTE_SWITCH else answer.get("pci")
            if remote:
                self._remotes[remote] = self._remotes.get(remote, 0) + 1

    def _describe(self, facts: dict[str, Any], fields: dict[str, Any]) -> None:
        active = _active(self._link_said)
        speeds = [self._link_said[link]["speed"] for link in active if "speed" in self._link_said[link]]
        pcie, self._pcie = self._pcie or fields, {}
        known = {
            **asdict(self.identity),
            "nvlinks": len(self._link_said) or None,
            "nvlinks_active": len(active) if self._link_said else None,
            "nvlink_gbytes_per_s": min(speeds) / (1000 * MEGA) if speeds else None,
            **{key: pcie.get(name) or None for name, key in _PCIE.items()},
            "pcie_busy": pcie is not fields if "utilization_gpu" in fields else None,
            "mig": self._mig if "mig" in facts else None,
            **{key: facts.get(key) for key in _AS_SAID},
            "nvlink_to": self._remotes or None,
            "unsupported": self._unsupported() or None,
        }
        self.known = {key: value for key, value in known.items() if value is not None}
        self.persistent = None if "persistence" not in facts else facts["persistence"] == 1

    def _unsupported(self) -> list[str]:
        lacking = {*self._fast.lacking(), *self._slow.lacking(), *self._activity.lacking()}
        return sorted(lacking)


# An idle GPU slows its link down: of a busy one the most of a minute counts.
_PCIE = {"pcie_link_gen_current": "pcie_gen", "pcie_link_width_current": "pcie_width"}
_AS_SAID = ("pcie_gen_max", "pcie_width_max", "power_limit_w", "power_limit_default_w", "serial", "vbios")


def _of_link(answer: dict[str, Any]) -> dict[str, Any]:
    fields = {**answer, "state": LINK_UP[answer["state"]]}
    if not fields["state"] or not fields.get("speed"):
        fields.pop("speed", None)
    return fields


def _active(said: dict[int, dict[str, Any]]) -> list[int]:
    return [link for link, each in said.items() if each["state"]]
