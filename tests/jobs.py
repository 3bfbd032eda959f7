"""Data-parallel jobs with a known truth, made of simple physics: `job(...)` gives the points and what is wrong.

Each rank fetches a batch from a prefetching loader, computes, and meets the others in an all-reduce over a ring of
links, whose slowest sets the time of the transfer. Counters and connections follow from what was sent. Nothing here is
taken from the analysis, so that a test compares two independent descriptions of the same machines. The figures of a
healthy step and of what a fault shows are those measured on real ranks in network namespaces (1 Gbit/s, 16.8 MB of
gradients); all noise is drawn from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from diagnosd.point import Point, point

T0 = 1_796_032_800_000_000_000  # 2026-11-30T10:00:00Z
GBIT = 125e6  # bytes/s
QUEUE = 400e3  # bytes that a switch port holds


@dataclass(frozen=True)
class Fault:
    """From `start` to `end` (s after T0). `size` is how strong: a rate left, a time added, a factor; see _Job."""

    kind: str
    start: float
    end: float
    rank: int | None = None  # None: all
    size: float = 0.0


@dataclass(frozen=True)
class Truth:
    cause: str
    start: float
    end: float
    locus: tuple[str, ...]
    extra: float = 0.0  # rank-seconds that the steps took longer, by simulating the same job without its faults


@dataclass(frozen=True)
class Layout:
    ranks: int = 2
    ranks_a_host: int = 1
    seconds: float = 60.0
    forward: float = 0.007
    backward: float = 0.012
    optimizer: float = 0.003
    fetch: float = 0.04  # seconds a batch takes the loader
    workers: int = 1
    batch: int = 64
    size: float = 16.8e6  # bytes of gradients
    rate: float = GBIT  # of every port
    noise: float = 0.02  # relative scatter of compute and transfer
    memory: float = 0.2  # of the noise, from step to step
    checkpoint_every: int = 0
    checkpoint: float = 0.06
    eval_every: int = 0
    eval: float = 0.4
    gc_every: int = 0
    gc: float = 0.15
    batch_change: tuple[float, int] | None = None  # at, to
    interface: str = "eth0"
    declared: dict[str, Any] | None = None  # cluster.toml as JSON
    offsets: tuple[float, ...] = ()  # s, of the hosts' clocks
    varying: float = 0.0  # relative scatter of the samples a step
    sync: bool = True  # the collectives are timed
    comm: bool = True
    timed_every: int = 1  # of so many steps two in a row are timed; of the others no backward, comm and other is told
    device: bool = (
        False  # phases by the clock of a device, whose backward pass contains the all-reduce that nobody timed
    )
    without: frozenset[str] = frozenset()  # measurements that nobody sends
    dropped: frozenset[str] = frozenset()  # fields of diagnosd_step that nobody sends
    name: str = "train"
    ends: bool = True  # the ranks say that they exit


_CAUSES = {
    "bandwidth": "network_congestion",
    "neighbour": "network_congestion",
    "loss": "network_congestion",
    "loader": "data_starvation",
    "loader_cpu": "data_starvation",
    "storage": "data_starvation",
    "cpu_quota": "straggler",
    "slow_rank": "straggler",
    "checkpoint": "checkpoint_stall",
    "busy_host": "host_stall",
    "hang": "hang",
}


def job(layout: Layout | None = None, *faults: Fault, seed: int = 0, **changes: Any) -> tuple[list[Point], list[Truth]]:
    """The points in order of time, and the truth. `changes` replace fields of the layout."""
    layout = replace(layout or Layout(), **changes)
    made = _Job(layout, faults, seed)
    made.run()
    well = _Job(layout, (), seed)
    well.run()
    lost = (made.mean_step() - well.mean_step()) * len(made.ends) * layout.ranks if faults else 0.0
    truth = [Truth(_CAUSES[f.kind], f.start, f.end, made.locus(f), max(lost, 0.0)) for f in faults]
    points = [p for p in made.points if p.series.measurement not in layout.without]
    return sorted(points, key=lambda p: (p.time, p.series.key)), truth


@dataclass
class _Link:
    sent: float = 0.0
    again: float = 0.0
    until: float = 0.0


@dataclass
class _Rank:
    rank: int
    host: str
    ready: list[float] = field(default_factory=list)  # when each batch was made
    taken: list[float] = field(default_factory=list)
    end: float = 0.0
    noise: float = 0.0
    gc: float = 0.0
    busy_loader: float = 0.0
    cpu: float = 0.0


class _Job:
    def __init__(self, layout: Layout, faults: tuple[Fault, ...], seed: int) -> None:
        self.plan, self.faults = layout, faults
        self.rng = np.random.default_rng(seed)
        self.hosts = [f"h{i}" for i in range(-(-layout.ranks // layout.ranks_a_host))]
        self.ranks = [_Rank(r, self.hosts[r // layout.ranks_a_host]) for r in range(layout.ranks)]
        self.links = {host: _Link() for host in self.hosts}  # host -> the next one down the ring
        self.points: list[Point] = []
        self.ends: list[float] = []
        self.wire = 0.0
        self.sampled = 0
        self.net: dict[str, list[float]] = {host: [0.0, 0.0] for host in self.hosts}  # sent, received
        self.pressure: dict[tuple[str, str], float] = {}
        self.disk: dict[str, list[float]] = {host: [0.0, 0.0] for host in self.hosts}  # requests, ms

    def mean_step(self) -> float:
        return float(np.mean(np.diff(self.ends))) if len(self.ends) > 1 else 0.0

    def locus(self, fault: Fault) -> tuple[str, ...]:
        if fault.rank is None:
            return ("job",)
        host = self.ranks[fault.rank].host
        return (f"rank:{fault.rank}", f"host:{host}", f"nic:{host}/{self.plan.interface}")

    def next(self, host: str) -> str:
        """The ring of gloo sends from each to the one before it."""
        return self.hosts[self.hosts.index(host) - 1]

    def active(self, kind: str, at: float, rank: int | None = None, host: str | None = None) -> Fault | None:
        for fault in self.faults:
            of = fault.rank
            mine = of is None or rank is None or of == rank
            there = of is None or host is None or self.ranks[of].host == host
            if fault.kind == kind and fault.start <= at < fault.end and mine and there:
                return fault
        return None

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.describe(0.0)
        for rank in self.ranks:
            rank.end = 1.0 + 0.001 * rank.rank
        step, leave = 0, 1.0
        while leave < self.plan.seconds:
            hang = self.active("hang", leave)
            if hang:
                self.sample(hang.end)
                break
            leave = self.step(step)
            self.sample(leave)
            step += 1
        self.sample(self.plan.seconds + 2)
        if self.plan.ends and not self.active("hang", self.plan.seconds):
            for rank in self.ranks:
                self.emit("diagnosd_rank", leave + 0.3, {"state": "exited", "exit_code": 0, "attempt": 0}, rank=rank)

    def step(self, number: int) -> float:
        plan, rng = self.plan, self.rng
        begin = max(rank.end for rank in self.ranks)
        batch = plan.batch_change[1] if plan.batch_change and begin >= plan.batch_change[0] else plan.batch
        batch = max(1, round(batch * (1 + plan.varying * rng.standard_normal())))
        common = plan.noise * rng.standard_normal()
        enters, reports = [], []
        for rank in self.ranks:
            rank.noise = plan.memory * rank.noise + plan.noise * float(rng.standard_t(4)) / 1.41
            at = rank.end
            queue, wait = self.fetch(rank, at)
            scale = self.compute_scale(rank, at) * batch / plan.batch * max(0.3, 1 + rank.noise + common)
            scale *= 4 if number == 0 else 1
            forward, backward = plan.forward * scale, plan.backward * scale
            rank.cpu += forward + backward
            pause = 0.0
            if plan.gc_every and (number + 7 * rank.rank) % plan.gc_every == 0:
                pause = plan.gc
                rank.gc += pause
            enter = at + wait + forward + backward + pause
            enters.append(enter)
            reports.append((at, queue, wait, forward, backward))
        arrive = max(enters)
        took = self.transfer(arrive, enters)
        self.wire += took
        leave = arrive + took
        for rank, enter, report in zip(self.ranks, enters, reports, strict=True):
            self.finish(rank, number, batch, enter, leave + 2e-4 * float(rng.standard_normal()), report)
        self.ends.append(leave)
        return leave

    def fetch(self, rank: _Rank, at: float) -> tuple[int, float]:
        """Batches ready and seconds waited. A worker begins a batch when the queue of two per worker has room."""
        plan = self.plan
        room = 2 * plan.workers
        k = len(rank.taken)
        while len(rank.ready) <= k + room:
            n = len(rank.ready)
            begins = max(
                rank.ready[n - plan.workers] if n >= plan.workers else 0.2,
                rank.taken[n - room] if n >= room and n - room < k else 0.2,
            )
            if n - room >= k:
                break
            cost = plan.fetch * (1 + 0.1 * abs(float(self.rng.standard_normal())))
            for kind in ("loader", "loader_cpu", "storage"):
                fault = self.active(kind, begins, rank.rank)
                if fault:
                    cost += fault.size
                    if kind == "loader_cpu":
                        rank.busy_loader += fault.size
            rank.ready.append(begins + cost)
        queue = sum(ready <= at for ready in rank.ready[k:])
        wait = max(0.0, rank.ready[k] - at) + 5e-4
        rank.taken.append(at + wait)
        return queue, wait

    def compute_scale(self, rank: _Rank, at: float) -> float:
        scale = 1.0
        for kind in ("cpu_quota", "slow_rank"):
            fault = self.active(kind, at, rank.rank)
            scale *= fault.size if fault else 1.0
        busy = self.active("busy_host", at)
        return scale * (busy.size if busy else 1.0)

    def transfer(self, at: float, enters: list[float]) -> float:
        plan = self.plan
        n = len(self.ranks)
        if n < 2:
            return 0.0
        moved = 2 * (n - 1) / n * plan.size
        slowest = min(self.rate(host, at) for host in self.hosts)
        took = 1.18 * moved / slowest if len(self.hosts) > 1 else moved / 2e9
        quota = self.active("cpu_quota", at)
        busy = self.active("busy_host", at)
        took *= 1 + 0.4 * (quota.size - 1) if quota else 1.0
        took *= 1 + 0.3 * (busy.size - 1) if busy else 1.0
        took *= max(0.5, 1 + plan.noise * float(self.rng.standard_normal()))
        if len(self.hosts) > 1:
            for host in self.hosts:
                self.links[host].sent += moved
                self.links[host].again += moved / 1448 * self.lossy(host, at)
                self.net[host][0] += moved * 1.05
                self.net[self.next(host)][1] += moved * 1.05
        return took

    def rate(self, host: str, at: float) -> float:
        """What a host's port carries into it for this job, bytes/s."""
        plan = self.plan
        rate = plan.rate
        fault = self.active("bandwidth", at, host=host)
        if fault:
            rate *= fault.size
        if self.active("neighbour", at, host=host):
            rate *= 0.22
        if self.active("loss", at, host=host):
            rate *= 0.74
        return rate

    def lossy(self, sender: str, at: float) -> float:
        """Share of the segments sent twice on the link out of a host."""
        receiver = self.next(sender)
        if self.active("neighbour", at, host=receiver):
            return 0.0153
        if self.active("loss", at, host=receiver):
            return 0.0102
        return 0.0024 if not self.active("bandwidth", at, host=receiver) else 0.0008

    def finish(
        self,
        rank: _Rank,
        number: int,
        batch: int,
        enter: float,
        leave: float,
        report: tuple[float, int, float, float, float],
    ) -> None:
        plan = self.plan
        at, queue, wait, forward, backward = report
        fields: dict[str, Any] = {"step": number, "attempt": 0, "clock": "host", "kind": "train"}
        fields |= {
            "data_wait": wait,
            "forward": forward,
            "backward": backward,
            "optimizer": plan.optimizer,
            "samples": batch,
        }
        fields |= {"queue": queue, "queue_size": 2 * plan.workers, "workers": plan.workers}
        after = plan.optimizer + 5e-4
        if plan.checkpoint_every and (number + 1) % plan.checkpoint_every == 0 and rank.rank == 0:
            slow = self.active("checkpoint", leave)
            fields["checkpoint"] = plan.checkpoint * (1 + 0.1 * abs(float(self.rng.standard_normal()))) + (
                slow.size if slow else 0.0
            )
            after += fields["checkpoint"]
        if plan.eval_every and (number + 1) % plan.eval_every == 0:
            fields["eval"] = plan.eval
            after += plan.eval
        rank.end = leave + after
        fields["duration"] = rank.end - at
        timed = number % plan.timed_every < 2
        if len(self.ranks) > 1 and plan.comm and timed:
            fields["comm"] = leave - enter
        known = sum(
            fields.get(name, 0.0)
            for name in ("data_wait", "forward", "backward", "optimizer", "comm", "checkpoint", "eval")
        )
        fields["other"] = max(fields["duration"] - known, 0.0)
        if plan.device:
            fields |= {
                "clock": "device",
                "device_gap": wait,
                "backward": leave - at - wait - forward,
                "blocked": leave - at,
            }
            fields["other"] = fields["duration"] - (leave - at) - plan.optimizer
            del fields["comm"]
        elif len(self.ranks) > 1 and plan.sync and timed:
            fields |= {
                "sync_enter": self.ns(enter, rank.host),
                "sync_exit": self.ns(leave, rank.host),
                "sync_bytes": int(plan.size),
            }
        for name in plan.dropped if timed else {*plan.dropped, "backward", "other"}:
            fields.pop(name, None)
        self.emit("diagnosd_step", rank.end, fields, rank=rank, source="probe")

    # -- what the machines show --------------------------------------------------------------------------------------

    def ns(self, at: float, host: str) -> int:
        offset = self.plan.offsets[self.hosts.index(host)] if self.plan.offsets else 0.0
        return T0 + round((at + offset) * 1e9)

    def emit(
        self,
        measurement: str,
        at: float,
        fields: dict[str, Any],
        rank: _Rank | None = None,
        host: str | None = None,
        **tags: str,
    ) -> None:
        tags = {**tags, "host": rank.host if rank else host or ""}
        if rank:
            tags |= {"job": self.plan.name, "rank": str(rank.rank)}
        self.points.append(point(measurement, tags, fields, self.ns(at, tags["host"])))

    def address(self, host: str) -> str:
        return f"10.77.0.{10 + self.hosts.index(host)}"

    def describe(self, at: float) -> None:
        for rank in self.ranks:
            fields = {
                "attempt": 0,
                "world": len(self.ranks),
                "local_rank": rank.rank % self.plan.ranks_a_host,
                "state": "running",
            }
            fields |= {"loader": "torch", "addresses": self.address(rank.host), "versions": "torch=2.13"}
            self.emit("diagnosd_rank", at, fields, rank=rank)
        for host in self.hosts:
            nics = [{"netdev": name, "rate_gbps": 10.0, "state": "ACTIVE"} for name in ("eth0", "eth1")]
            self.emit("diagnosd_node", at, {"inventory": json.dumps({"nics": nics, "cpu": {"cores": 2}})}, host=host)
        if self.plan.declared:
            self.points.append(
                point("diagnosd_cluster", {"cluster": "lab"}, {"spec": json.dumps(self.plan.declared)}, T0)
            )

    def sample(self, until: float) -> None:
        while self.sampled + 1 <= until:
            self.sampled += 1
            at = self.sampled + 0.1
            for host in self.hosts:
                self.of_host(host, at)
            for rank in self.ranks:
                if self.sampled % 2 == rank.rank % 2:
                    self.of_process(rank, at + 0.01)
                    if len(self.hosts) > 1:
                        self.of_socket(rank, at + 0.02)

    def of_host(self, host: str, at: float) -> None:
        rng = self.rng
        if self.active("neighbour", at, host=host):
            self.net[host][1] += 100e6 * (1 + 0.05 * float(rng.standard_normal()))
        sent, received = self.net[host]
        other = "eth1" if self.plan.interface == "eth0" else "eth0"
        for name, tx, rx in (
            (self.plan.interface, sent, received),
            (other, at * 200, at * 300),
            ("lo", at * 5e4, at * 5e4),
        ):
            fields = {"bytes_sent": int(tx), "bytes_recv": int(rx), "drop_in": 0, "drop_out": 0, "err_in": 0}
            self.emit("net", at, fields, host=host, interface=name)
        cpu = 0.08 + 0.05 * float(rng.random())
        if self.active("cpu_quota", at) or self.active("busy_host", at):
            cpu += 0.6
        io = 0.01 * float(rng.random())
        reads, wait = 10.0, 1.0
        if self.active("storage", at, host=host):
            io, wait = 0.9, 60.0
        for resource, share in (("cpu", cpu), ("io", io)):
            key = (host, resource)
            self.pressure[key] = self.pressure.get(key, 0.0) + share * 1e6
            self.emit(
                "pressure",
                at,
                {"avg10": 100 * share, "total": int(self.pressure[key])},
                host=host,
                resource=resource,
                type="some",
            )
        self.disk[host][0] += reads
        self.disk[host][1] += reads * wait
        fields = {"reads": int(self.disk[host][0]), "read_time": int(self.disk[host][1]), "writes": 0, "write_time": 0}
        self.emit("diskio", at, fields, host=host, name="sda")
        self.emit("cpu", at, {"usage_user": 40.0, "usage_steal": 0.0, "usage_idle": 60.0}, host=host, cpu="cpu-total")
        self.emit(
            "diagnosd_agent", at, {"up": 1, "seconds": 0.01, "errors": 0, "dropped": 0}, host=host, collector="net"
        )

    def of_process(self, rank: _Rank, at: float) -> None:
        quota = self.active("cpu_quota", at, rank.rank)
        fields: dict[str, Any] = {
            "cpu_main": 0.3,
            "throttled": 0.9 if quota else 0.0,
            "gc_seconds": rank.gc,
            "state": "S",
        }
        fields["cpu_workers"] = 0.97 if self.active("loader_cpu", at, rank.rank) else 0.1
        fields["involuntary_switches"] = int(at * 5)
        if self.active("storage", at, rank.rank):
            fields["state"] = "D"
        stuck = self.active("hang", at)
        fields["phase"] = "forward" if stuck and stuck.rank == rank.rank else "collective"
        self.emit("diagnosd_process", at, fields, rank=rank)

    def of_socket(self, rank: _Rank, at: float) -> None:
        """The ring goes through the ranks of a host, by its own address, and from the first to the next host."""
        rng, host = self.rng, rank.host
        if rank.rank % self.plan.ranks_a_host:
            inside = {"rtt": 5e-5, "cwnd": 230, "send_queue": 1000, "receive_queue": 0, "retransmits": 0}
            inside |= dict.fromkeys(("bytes_sent", "bytes_received"), int(self.links[host].sent))
            self.emit("diagnosd_socket", at, inside, rank=rank, peer=self.address(host))
            return
        receiver = self.next(host)
        rate = self.rate(receiver, at)
        crowded, lossy = (self.active(kind, at, host=receiver) for kind in ("neighbour", "loss"))
        cwnd = 40 if crowded else 93 if lossy else 230
        drain = 0.75 * self.plan.rate if crowded else rate  # what the port's queue empties at

        def wild(spread: float) -> float:
            return float(np.exp(spread * rng.standard_normal()))

        fields = {
            "rtt": (0.0002 + 0.65 * QUEUE / drain) * wild(0.12),
            "cwnd": max(2, int(cwnd * wild(0.1))),
            "send_queue": int(3e5 * (1 + 2 * (1 - rate / self.plan.rate)) * wild(0.3)),
            "receive_queue": int((4e5 if self.active("cpu_quota", at, rank.rank) else 2.8e4) * wild(0.2)),
            "bytes_sent": int(self.links[host].sent),
            "retransmits": int(self.links[host].again),
            "bytes_received": int(self.links[receiver].sent) if len(self.hosts) == 2 else 1000,
        }
        self.emit("diagnosd_socket", at, fields, rank=rank, peer=self.address(receiver))
        if len(self.hosts) > 2:
            back = {
                "rtt": 0.0005,
                "cwnd": 20,
                "send_queue": 0,
                "receive_queue": 0,
                "bytes_sent": 1000,
                "retransmits": 0,
            }
            sender = next(h for h in self.hosts if self.next(h) == host)
            back["bytes_received"] = int(self.links[sender].sent)
            self.emit("diagnosd_socket", at, back, rank=rank, peer=self.address(sender))


def by_time(points: list[Point], seconds: float = 1.0) -> Iterator[list[Point]]:
    """The points in batches, as a source would give them."""
    batch: list[Point] = []
    due = points[0].time + int(seconds * 1e9) if points else 0
    for one in points:
        if one.time >= due:
            yield batch
            batch, due = [], one.time + int(seconds * 1e9)
        batch.append(one)
    yield batch
