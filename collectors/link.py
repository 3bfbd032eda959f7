"""The state of each RDMA port, and the links that went: /sys/class/infiniband/DEVICE/ports/N."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from diagnosd.collectors.every import Every
from diagnosd.collectors.ibstat import Ibstat
from diagnosd.collectors.kernel import line_of, names
from diagnosd.collectors.machine import Machine
from diagnosd.collectors.rdma import (
    ACTIVE,
    LINK_UP,
    Attribute,
    Device,
    Interface,
    Tally,
    devices,
    interface_of,
    members,
    missing,
    numbered,
    rate,
)
from diagnosd.point import Point, Series, Value, point

REPEAT_S = 60  # the state is told at least so often, and when it changes (telemetry.md 5)
CLOSE_S = 10  # between two looks at what seldom changes by itself: rate, mtu, members, devices
LINK_DOWNED_MAX = 255  # link_downed has 8 bits, and stays there


class Event(NamedTuple):
    kind: str
    subject: str
    text: str
    value: float | None = None


class _Told:
    """What has been told of one port: its state, and whether its link went."""

    def __init__(self, host: str, device: str, port: int) -> None:
        self.label = f"{device} port {port}"
        self.subject = f"nic:{host}/{device}/{port}"
        self.was_active = False  # since our start: one that never was may be meant to be down
        self.is_down = False  # and that has been told
        self._series = Series.of("diagnosd_link", host=host, device=device, port=str(port))
        self._fields: dict[str, Value] = {}
        self._due = Every(REPEAT_S)

    def turned(self, state: int, word: str) -> Iterator[Event]:
        """Once when it goes, once when it is back."""
        if state == ACTIVE:
            if self.is_down:
                yield Event("link_up", self.subject, f"{self.label} is ACTIVE again")
            self.was_active, self.is_down = True, False
        elif self.was_active and not self.is_down:
            self.is_down = True
            yield Event("link_down", self.subject, f"{self.label} is {word}")

    def flapped(self, times: int, source: str) -> Iterator[Event]:
        """It went and came between two looks: a job waits for its retransmission timeout all the same."""
        often = "once" if times == 1 else f"{times} times"
        words = f"{self.label} went down {often} between two looks, by {source}"
        yield Event("link_down", self.subject, words, float(times))
        yield Event("link_up", self.subject, f"{self.label} is ACTIVE again")

    def take(self, known: Mapping[str, Value | None]) -> None:
        fields = {key: value for key, value in known.items() if value is not None}
        if fields != self._fields:
            self._fields, self._due = fields, Every(REPEAT_S)

    def point(self, now_ns: int, tick: int) -> Iterator[Point]:
        if self._fields and self._due.is_due(now_ns, tick):
            yield Point(self._series, dict(self._fields), now_ns)

    def gone(self) -> Event:
        was_up, self.is_down = self.was_active and not self.is_down, self.was_active
        self._fields = {}
        return Event("link_down" if was_up else "config_change", self.subject, f"{self.label} is gone")


class _Downs:
    """Downs that looking at the state every second misses, from what the kernel and the port count."""

    def __init__(self) -> None:
        self.seen = 0  # downs that were told since the last look at link_downed
        self._left = 0  # told before that, and not yet in link_downed: it is read a moment earlier or later
        self._changes: int | None = None
        self._downed: int | None = None

    def by_carrier(self, changes: int | None, *, steady: bool) -> int:
        """Two changes are one flap where the port was ACTIVE at both looks; a single one is no link's."""
        before, self._changes = self._changes, changes
        missed = (changes - before) // 2 if steady and changes is not None and before is not None else 0
        self.seen += max(0, missed)
        return max(0, missed)

    def by_count(self, downed: int | None, *, steady: bool) -> int:
        """The port's own count rises for the downs that were seen, too. At its maximum it says nothing."""
        before, self._downed = self._downed, downed
        if downed is None or before is None or not before <= downed < LINK_DOWNED_MAX:
            return 0
        unseen = downed - before - self._left - self.seen
        self._left, self.seen = max(0, self.seen - (downed - before)), 0
        return unseen if steady and unseen > 0 else 0


class _Port:
    """One port in sysfs. Of a state a driver makes a query to its firmware: each second there is one, not three."""

    def __init__(self, told: _Told, machine: Machine, device: Device, number: int, tally: Tally, early: int) -> None:
        self.told = told
        self._machine = machine
        self._device = device
        self._number = number
        self._tally = tally
        self._close_due = Every(CLOSE_S, early)
        folder = f"{device.folder}/ports/{number}"
        self._state = Attribute(f"{folder}/state", tally, kept=True, period=1)
        self._phys_state = Attribute(f"{folder}/phys_state", tally, kept=False, period=CLOSE_S)
        self._rate = Attribute(f"{folder}/rate", tally, kept=False, period=CLOSE_S)
        self._link_downed = Attribute(f"{folder}/counters/link_downed", tally, kept=False, period=CLOSE_S)
        self._interface = Interface(None, None)
        self._carrier_changes: Attribute | None = None
        self._seen: tuple[bytes | None, bytes | None] | None = None
        self._members: Mapping[str, bool] = {}
        self._downs = _Downs()

    def read(self, now_ns: int, tick: int) -> Iterator[Event]:
        state = self._state.read()
        regular = self._close_due.is_due(now_ns, tick)
        if regular:
            self._find_interface()
        seen = state, self._carrier_changes.read() if self._carrier_changes else None
        if regular or seen != self._seen:
            self._seen = seen
            yield from self._look(state, seen[1], regular=regular)

    def close(self) -> None:
        self._state.close()
        if self._carrier_changes:
            self._carrier_changes.close()

    def _find_interface(self) -> None:
        interface = interface_of(self._machine, self._device, self._number)
        if interface != self._interface:
            if self._carrier_changes:
                self._carrier_changes.close()
            path = f"{interface.folder}/carrier_changes"
            self._carrier_changes = Attribute(path, self._tally, kept=True, period=1) if interface.folder else None
            self._interface, self._downs = interface, _Downs()

    def _look(self, words: bytes | None, changed: bytes | None, *, regular: bool) -> Iterator[Event]:
        now = _numbered(self._state, words)
        changes = int(changed) if changed and changed.isdigit() and len(changed) < 10 else None
        if self._carrier_changes and changes is not None:
            self._carrier_changes.worked()
        steady = self.told.was_active and not self.told.is_down and now is not None and now[0] == ACTIVE
        if missed := self._downs.by_carrier(changes, steady=steady):
            yield from self.told.flapped(missed, f"carrier_changes of {self._interface.name}")
        if regular and (missed := self._downs.by_count(self._link_downed.number(), steady=steady)):
            yield from self.told.flapped(missed, "link_downed")
        if now:
            was_down = self.told.is_down
            yield from self.told.turned(*now)
            self._downs.seen += self.told.is_down and not was_down
        yield from self._members_turned()
        self.told.take({"state": now and now[0], "carrier_changes": changes, **self._shape()})

    def _members_turned(self) -> Iterator[Event]:
        """A bond stays up with one dead member, and carries half."""
        before, self._members = self._members, members(self._machine, self._interface)
        for name, up in self._members.items():
            if before.get(name, up) != up:
                carrying = f"{sum(self._members.values())} of {len(self._members)} carry"
                bond = f"{self._interface.name} ({self.told.label})"
                words = f"{name} of {bond} is {'up again' if up else 'down'}: {carrying}"
                yield Event("link_up" if up else "link_down", f"nic:{self._machine.host}/{name}", words)

    def _shape(self) -> dict[str, Value | None]:
        """Of a port that is down the rate is a leftover or a default: 10 or 40 Gbit/s have been seen."""
        phys_state = _numbered(self._phys_state, self._phys_state.read())
        words = self._rate.read() if phys_state and phys_state[0] == LINK_UP else None
        speed = rate(words.decode("ascii", "replace")) if words else None
        if speed:
            self._rate.worked()
        mtu = line_of(f"{self._interface.folder}/mtu") if self._interface.folder else ""
        return {
            "phys_state": phys_state and phys_state[0],
            "rate": round(speed.gbps * 1e9) if speed else None,
            "width": speed.width if speed else None,
            "mtu": int(mtu) if mtu.isdecimal() and len(mtu) < 10 else None,
            "members": len(self._members) or None,
            "members_up": sum(self._members.values()) if self._members else None,
        }


def _numbered(attribute: Attribute, words: bytes | None) -> tuple[int, str] | None:
    """What an attribute has just said, as number and word."""
    if words is None:
        return None
    found = numbered(words.decode("ascii", "replace"))
    if found:
        attribute.worked()
    else:
        attribute.failed()
    return found


class Link:
    """State and carrier are looked at every second, the rest every ten and when these change.

    Where sysfs shows no device, as in some containers, ibstat is asked, once a minute.
    """

    name = "link"
    every = 1

    def __init__(self, machine: Machine, ibstat: Ibstat | None = None) -> None:
        self.missing: str | None = None
        self._machine = machine
        self._ibstat = ibstat or (Ibstat() if machine.live else None)
        self._tally = Tally()
        self._ports: dict[tuple[str, int], _Port] = {}
        self._told: dict[tuple[str, int], _Told] = {}  # of every port there ever was
        self._tick = 0
        self._look_due = Every(CLOSE_S)

    @property
    def errors(self) -> int:
        return self._tally.errors

    def read(self, now_ns: int) -> list[Point]:
        self._tick += 1
        events: list[Event] = []
        if self._look_due.is_due(now_ns, self._tick) or self._tally.gone:
            try:
                events += self._find()
            except OSError:  # no descriptor left, or the like: nobody knows who is there, so nobody is gone
                self._tally.errors += 1
        for port in self._ports.values():
            events += port.read(now_ns, self._tick)
        points = [each for told in self._told.values() for each in told.point(now_ns, self._tick)]
        return points + [self._event(event, now_ns + number) for number, event in enumerate(events)]

    def close(self) -> None:
        for port in self._ports.values():
            port.close()
        self._ports.clear()

    def _find(self) -> list[Event]:
        """Takes up the ports that have come, and tells of those that went."""
        there = {(device.name, port): device for device in devices(self._machine) for port in device.ports}
        self._tally.gone = False
        gone = [self._ports.pop(key) for key in list(self._ports) if key not in there]
        for port in gone:
            port.close()
        for (name, number), device in there.items():
            if (name, number) not in self._ports:
                told = self._told.setdefault((name, number), _Told(self._machine.host, name, number))
                early = len(self._ports) % CLOSE_S
                self._ports[name, number] = _Port(told, self._machine, device, number, self._tally, early)
        self.missing = None if there else missing(self._machine)
        events = [port.told.gone() for port in gone]
        if self._ibstat and not there and not names(f"{self._machine.sys}/class/infiniband"):
            events += self._ask(self._ibstat)
        return events

    def _ask(self, ibstat: Ibstat) -> Iterator[Event]:
        """A port of which the tool says nothing this time is unknown, not gone."""
        ports = [each for each in ibstat.read() if not self._machine.excludes(each.device)]
        self.missing = ibstat.said or None if ports else missing(self._machine, ibstat.said)
        for each in ports:
            told = self._told.setdefault((each.device, each.port), _Told(self._machine.host, each.device, each.port))
            if each.state:
                yield from told.turned(*each.state)
            known = {
                "state": each.state and each.state[0],
                "phys_state": each.phys_state and each.phys_state[0],
                "rate": round(each.gbps * 1e9) if each.gbps else None,
                "width": each.width,
            }
            told.take(known)

    def _event(self, event: Event, now_ns: int) -> Point:
        tags = {"host": self._machine.host, "kind": event.kind, "subject": event.subject}
        return point("diagnosd_event", tags, {"text": event.text, "value": event.value}, now_ns)
