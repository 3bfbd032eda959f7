"""Event time: releases points in the order (time, series), once no host can be expected to send an earlier one.

The watermark is the second-largest of the hosts' latest times (the largest with one host) minus the lateness, and never
runs back. Second-largest, so that one host whose clock runs ahead does not make everybody else late. Points wait in
buckets of 100 ms and are sorted when their bucket is due, so the effective lateness is 3.0 to 3.1 s.

What is released does not depend on the order of arrival, as long as no point is later than the lateness and no host is
kept out for its clock. How the points fall into the lists that `feed` returns does depend on it: whoever reads them
must look at their times, not at the lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diagnosd.analysis.steps import LONGEST_S
from diagnosd.point import Point, Series

SECOND = 10**9
LATENESS = 3 * SECOND  # an agent flushes every second; the bus and a busy machine take the rest (design.md 3)
WIDTH = SECOND // 10  # a bucket: short against the lateness, long enough to hold a tick's points
CLOCK = 60 * SECOND  # NTP keeps hosts within milliseconds; a minute is no jitter but a wrong clock
SILENT = 30 * SECOND  # 30 missed heartbeats
# An advance counts for no more than this towards silence: when all hosts pause and one comes back first, or one leaps
# ahead alone, the others are not silent yet.
STRIDE = 10 * SECOND
MOVES_PER_LOOK = 8
SERIES = 1 << 17  # whose hosts are remembered; containers come and go, and their names with them
FORGET = 3600 * SECOND  # hosts that left the cluster
MISSED = 4096  # jobs on a host of whose losses is known; anybody may send late points of a job that he made up


@dataclass(slots=True)
class Missed:
    """What one host told of one job and what could not be used."""

    since: int  # ns of event time when the first of it came
    late: int = 0  # points whose time had been released
    step_ns: int = 0  # of the steps among them, and among those with a wrong clock


class _Host:
    __slots__ = ("behind", "bucket", "fits", "gaps", "latest", "leap", "moved", "name", "off", "out", "quiet", "told")

    def __init__(self, name: str, time: int) -> None:
        self.name = name
        self.latest = time
        self.moved = time  # latest at the previous advance
        self.bucket = -1
        self.leap = 0  # a time far ahead that a second point must confirm
        self.gaps: list[int] = []  # last times before a silence, to be told
        self.told = 0  # the silence last told
        self.quiet = 0  # ns that the others went on without it
        self.off = 0  # ns that the median went on while this host was CLOCK away from it
        self.fits = False  # has been near the median: its clock is right
        self.out = False  # kept out for its clock
        self.behind = False  # left behind, silent

    def enters(self, bucket: int, time: int) -> bool:
        """Whether `latest` may move on to this time, which lies in a bucket that this host reaches first.

        A lone time far ahead is a broken timestamp; two of them are a pause that ended.
        """
        if time - self.latest > CLOCK and not self.leap:
            self.leap = time
            return False
        if time - self.latest > SILENT:
            self.gaps.append(self.latest)
        self.bucket, self.leap = bucket, 0
        return True


class Order:
    """Feed it points in any order; it gives them back in order of event time, united where two are the same."""

    def __init__(self, lateness: int = LATENESS) -> None:
        self.watermark = 0  # ns
        self.late = 0  # points that came after their time was released: dropped
        self.strays = 0  # points of hosts kept out, or with a time nobody else reached: dropped
        self.missed: dict[tuple[str, str], Missed] = {}  # by job and host, of both
        self._lateness = lateness
        self._floor = 0  # every bucket below it has been released
        self._moves = 0  # hosts that reached a new bucket since the last advance
        self._top = self._median = 0  # at the last advance
        self._hosts: dict[str, _Host] = {}
        self._host_of: dict[Series, _Host | None] = {}
        self._buckets: dict[int, dict[tuple[int, str], Point]] = {}

    @property
    def kept_out(self) -> list[str]:
        """Hosts whose clock is more than a minute from the median."""
        return sorted(host.name for host in self._hosts.values() if host.out)

    @property
    def behind(self) -> list[str]:
        """Hosts that have been silent for half a minute."""
        return sorted(host.name for host in self._hosts.values() if host.behind)

    def feed(self, points: Iterable[Point]) -> list[Point]:
        """Take points as they come; the ones that are due, in order."""
        host_of, buckets, floor = self._host_of, self._buckets, self._floor
        for point in points:
            series, _, time = point
            number = time // WIDTH
            try:
                host = host_of[series]
            except KeyError:
                host = self._meet(series, time)
            if host is not None:
                if host.out:
                    host.latest = time
                    self._miss(point, late=False)
                    continue
                if time > host.latest or number > host.bucket:
                    if number <= host.bucket:
                        host.latest = time
                    elif host.enters(number, time):
                        host.latest = time
                        self._moves += 1
            if number < floor:
                self._miss(point, late=True)
                continue
            bucket = buckets.get(number)
            if bucket is None:
                bucket = buckets[number] = {}
            at = (time, series.key)
            first = bucket.setdefault(at, point)
            if first is not point:
                bucket[at] = Point(point.series, {**first.fields, **point.fields}, time)  # the later value wins
        # With many hosts, looking at all of them for each one's message would cost more than the points.
        if self._moves * MOVES_PER_LOOK < len(self._hosts) or not self._moves:
            return []
        self._moves = 0
        return self._advance()

    def finish(self) -> list[Point]:
        """Whatever still waits, at the end of the stream."""
        last = max((host.latest for host in self._hosts.values() if not host.out), default=None)
        if last is None:  # no host ever spoke: a recording of jobs or diagnoses alone
            return self._release(max(self._buckets, default=0) + 1)
        self.watermark = max(self.watermark, last)
        self._tell_silence()
        released = self._release(self.watermark // WIDTH + 1)
        self.strays += sum(len(bucket) for bucket in self._buckets.values())
        self._buckets.clear()
        return released

    def _miss(self, point: Point, *, late: bool) -> None:
        self.late += late
        self.strays += not late
        job, host = point.series.tag("job"), point.series.tag("host")
        if job is None or host is None:
            return
        if len(self.missed) >= MISSED:
            self.missed.clear()
        missed = self.missed.setdefault((job, host), Missed(self.watermark))
        missed.late += late
        duration = point.fields.get("duration") if point.series.measurement == "diagnosd_step" else None
        if isinstance(duration, float) and 0 <= duration <= LONGEST_S:
            missed.step_ns += int(duration * 1e9)

    def _meet(self, series: Series, time: int) -> _Host | None:
        name = series.tag("host")
        host = None
        if name is not None:
            host = self._hosts.get(name) or self._hosts.setdefault(name, _Host(name, time))
        if len(self._host_of) >= SERIES:
            self._host_of.clear()
        self._host_of[series] = host
        return host

    def _advance(self) -> list[Point]:
        self._watch_silence()
        self._watch_clocks()
        latest = sorted((h.latest for h in self._hosts.values() if not h.out and not h.behind), reverse=True)
        if latest:
            self.watermark = max(self.watermark, latest[min(1, len(latest) - 1)] - self._lateness)
        self._tell_silence()
        return self._release(self.watermark // WIDTH)

    def _watch_silence(self) -> None:
        """Leave behind who stood still while the others went on for SILENT; take back who moves again."""
        top = max((host.latest for host in self._hosts.values() if not host.out), default=self._top)
        stride = max(0, min(top - self._top, STRIDE))
        self._top = top
        for host in self._hosts.values():
            if host.latest > host.moved:
                host.moved, host.quiet, host.behind = host.latest, 0, False
            else:
                host.quiet += stride
                host.behind = host.behind or host.quiet > SILENT

    def _watch_clocks(self) -> None:
        """Keep out who stays a minute from the median while the median goes on."""
        heard = [host for host in self._hosts.values() if not host.behind]
        trusted = sorted(host.latest for host in heard if not host.out)
        if not trusted:
            return
        # The lower middle: of two hosts the one behind is believed, for it holds the watermark anyway.
        median = trusted[(len(trusted) - 1) // 2]
        stride = max(0, min(median - self._median, STRIDE))
        self._median = median
        for host in heard:
            if abs(host.latest - median) <= CLOCK:
                host.off, host.fits, host.out = 0, True, False
                continue
            host.off += stride
            if host.off > self._lateness and not host.out:
                self._judge(host, median)

    def _judge(self, host: _Host, median: int) -> None:
        if host.latest < median and host.fits:
            host.behind = True  # its clock was right before: it sends what an outage kept back
            return
        host.out = True
        off = (host.latest - median) / SECOND
        self._drop_waiting(host)
        where = "ahead of" if off > 0 else "behind"
        text = f"the clock is {abs(off):.0f} s {where} the other hosts: its points are not used"
        self._tell("clock", host, self.watermark, text, off)

    def _drop_waiting(self, host: _Host) -> None:
        for bucket in self._buckets.values():
            for at in [at for at, point in bucket.items() if self._host_of.get(point.series) is host]:
                self._miss(bucket.pop(at), late=False)

    def _tell_silence(self) -> None:
        """An event half a minute after the last point of each host that the watermark has left so far behind."""
        for host in self._hosts.values():
            gaps, host.gaps = host.gaps, []
            for last in (*gaps, host.latest):
                if last + SILENT < self.watermark and last > host.told and not host.out:
                    host.told = last
                    self._tell("telemetry_gap", host, last + SILENT, "silent for 30 s", SILENT / SECOND)
        for name in [h.name for h in self._hosts.values() if h.latest + FORGET < self.watermark]:
            del self._hosts[name]
            self._host_of = {key: host for key, host in self._host_of.items() if host is None or host.name != name}

    def _tell(self, kind: str, host: _Host, time: int, text: str, value: float) -> None:
        time = max(time, self._floor * WIDTH)
        series = Series.of("diagnosd_event", host=host.name, kind=kind, subject=f"host:{host.name}")
        bucket = self._buckets.setdefault(time // WIDTH, {})
        bucket[time, series.key] = Point(series, {"text": text, "value": value}, time)

    def _release(self, floor: int) -> list[Point]:
        """The points of all buckets below `floor`, sorted."""
        released: list[Point] = []
        for number in sorted(number for number in self._buckets if number < floor):
            bucket = self._buckets.pop(number)
            released.extend([bucket[at] for at in sorted(bucket)])
        self._floor = max(self._floor, floor)
        return released
