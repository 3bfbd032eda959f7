"""The NVLinks of one GPU: which are up and how fast, what went wrong on them, and where they lead."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from diagnosd.collectors.every import Every
from diagnosd.collectors.nvml.fields import LINK_ERRORS, LINK_UP, MEGA, REMOTE_SWITCH, of_link, remote_of
from diagnosd.collectors.nvml.sheet import Sheet
from diagnosd.point import Point, Series

STATE_S = 50  # looked at every ten seconds: the next look after that keeps the contract's 60 s


class Links:
    def __init__(self, nvml: ModuleType, gpu: object, tags: Mapping[str, str], count: int) -> None:
        """Of links 0 to `count`, those that are there."""
        self.unreadable = 0  # values, in the last read
        self.errors: int | None = None  # over all links, and kinds of error: of the last read
        self.has_risen = False  # in the last read a link was up that was down before
        self._nvml = nvml
        self._gpu = gpu
        self._series = [Series.of("diagnosd_nvlink", link=str(link), **tags) for link in range(count)]
        self.ask_anew()
        self._all_due = Every(STATE_S)
        self._known: dict[int, dict[str, Any]] = {}  # fields of each link that is there, as it last said them
        self._remotes: dict[str, int] = {}

    def ask_anew(self) -> None:
        """Forgets what is not supported: a link that is down may not say what it says when it is up."""
        self._sheet = Sheet(self._nvml, self._gpu, [of_link(link) for link in range(len(self._series))])

    def read(self, now_ns: int, tick: int) -> list[Point]:
        """Of links that have changed; of all when they are due. LostError, DownError."""
        answers = self._sheet.answers()
        self.unreadable = self._sheet.unreadable
        fresh = {link: _fields(answer) for link, answer in enumerate(answers) if "state" in answer}
        self.errors = self._summed(fresh)
        before, self._known = self._known, self._known | fresh
        was_up, now_up = _up(before), _up(self._known)
        self.has_risen = bool(before) and not set(now_up) <= set(was_up)
        if was_up != now_up:
            self._find_remotes(now_up)
        told = fresh if self._all_due.is_due(now_ns, tick) else _changed(before, fresh)
        return [Point(self._series[link], fields, now_ns) for link, fields in told.items()]

    def inventory(self) -> dict[str, Any]:
        """What the inventory has of them, without those that nobody knows."""
        if not self._known:
            return {}
        up = _up(self._known)
        speeds = [fields["speed"] for fields in self._known.values() if "speed" in fields]
        known = {
            "nvlinks": len(self._known),
            "nvlinks_active": len(up),
            "nvlink_gbytes_per_s": min(speeds) / (1000 * MEGA) if speeds else None,
            "nvlink_to": self._remotes or None,
        }
        return {key: value for key, value in known.items() if value is not None}

    def _summed(self, fresh: Mapping[int, Mapping[str, Any]]) -> int | None:
        """None where one is unreadable now: a sum without it would run back."""
        errors = [fields[name] for fields in fresh.values() for name in LINK_ERRORS if name in fields]
        return sum(errors) % 2**63 if errors and not self.unreadable else None

    def _find_remotes(self, links: list[int]) -> None:
        """How many links that are up lead to each other GPU, by its PCI address, and to switches."""
        sheet = Sheet(self._nvml, self._gpu, [remote_of(link) for link in links])
        self._remotes = {}
        for answer in sheet.answers():
            remote = "switch" if answer.get("type") == REMOTE_SWITCH else answer.get("pci")
            if remote:
                self._remotes[remote] = self._remotes.get(remote, 0) + 1
        self.unreadable += sheet.unreadable


def _fields(answer: Mapping[str, Any]) -> dict[str, Any]:
    fields = {**answer, "state": LINK_UP[answer["state"]]}
    if not fields["state"] or not fields.get("speed"):
        fields.pop("speed", None)
    return fields


def _up(known: Mapping[int, Mapping[str, Any]]) -> list[int]:
    return [link for link, fields in sorted(known.items()) if fields["state"]]


def _changed(before: Mapping[int, Any], fresh: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {link: fields for link, fields in fresh.items() if fields != before.get(link)}
