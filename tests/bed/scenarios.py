"""What the bed can do to a training job, and what diagnosd must say of it: one row a scenario.

A fault is a context manager: entering applies it, leaving undoes it. `size` is by how much of itself a healthy step is
to become longer; without one, the size at which the fault is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .fabric import LINE_RATE, Fabric
from .limits import Limit, Resource

# Of a healthy step of two ranks (185 ms), what the transfer takes, and what its bytes take of 1 Gbit/s: measured.
TRANSFER_SHARE, BYTES_SHARE = 0.80, 0.73

# Two ranks wait for the CPU instead of the wire with this batch: 40 ms of forward where 64 samples take 7.
HEAVY_BATCH = 512


@dataclass(frozen=True)
class Site:
    """What a fault may touch, and the median healthy step in seconds."""

    fabric: Fabric
    control: Path
    limit: Limit | None
    step: float
    traffic: Callable[[str], AbstractContextManager[None]]  # somebody else's, into a host


Fault = Callable[[Site, float | None], AbstractContextManager[None]]


def slower(size: float | None) -> str:
    """The rate of a port, as tc writes it, with which a step that waits for the wire is longer by `size` of itself."""
    return "200mbit" if size is None else f"{1000 * BYTES_SHARE / (TRANSFER_SHARE + size):.0f}mbit"


@contextmanager
def throttled_port(site: Site, size: float | None) -> Iterator[None]:
    site.fabric.limit("n1", slower(size))
    yield
    site.fabric.limit("n1", LINE_RATE)


def neighbour(site: Site, _size: float | None) -> AbstractContextManager[None]:
    return site.traffic("n1")


@contextmanager
def packet_loss(site: Site, _size: float | None) -> Iterator[None]:
    site.fabric.lose("n1", per_mille=10)
    yield
    site.fabric.lose("n1", per_mille=0)


@contextmanager
def told(path: Path, value: float) -> Iterator[None]:
    path.write_text(f"{value:.4f}")
    yield
    path.unlink()


def loader_slow(site: Site, size: float | None) -> AbstractContextManager[None]:
    """Every batch takes longer to make than a step: once the prefetched ones are used, the step is as long as that."""
    return told(site.control / "load_seconds", (1 + (1.5 if size is None else size)) * site.step)


def loader_slow_one(site: Site, size: float | None) -> AbstractContextManager[None]:
    return told(site.control / "load_seconds.1", (1 + (1.5 if size is None else size)) * site.step)


@contextmanager
def limited(site: Site, value: int) -> Iterator[None]:
    assert site.limit
    site.limit.set(value)
    yield
    site.limit.set(None)


def slow_storage(site: Site, _size: float | None) -> AbstractContextManager[None]:
    """A file of 4 MiB a batch at 8 MB/s: half a second, where the wire takes 0.18."""
    return limited(site, 8_000_000)


def cpu_quota(site: Site, _size: float | None) -> AbstractContextManager[None]:
    """30 % of a core for a rank that wants more than half of one."""
    return limited(site, 30)


def checkpoint_stall(site: Site, _size: float | None) -> AbstractContextManager[None]:
    return told(site.control / "save_seconds", 2.0)


def batch_change(site: Site, _size: float | None) -> AbstractContextManager[None]:
    return told(site.control / "batch", HEAVY_BATCH)


@dataclass(frozen=True)
class Scenario:
    name: str
    story: str
    fault: Fault | None = None
    cause: str | None = None  # what must be confirmed; None: nothing may be
    subtypes: tuple[str, ...] = ()  # any of these, where one matters
    loci: tuple[str, ...] = ()  # any of these
    link: str = ""  # with more than two ranks, the one link of the ring that must be named
    allowed: tuple[str, ...] = (
        "communication_bound",
    )  # causes that may be reported beside it: information, never an alert
    ranks: tuple[int, ...] = (2,)
    train: tuple[str, ...] = ()
    reads: bool = False
    limit: tuple[Resource, tuple[str, ...]] | None = None  # what is limited, on which hosts
    slow_fabric: bool = False  # the job uses a second, slower fabric (eth1) from its first step
    declared: str | None = None  # cluster.toml
    graded: bool = False


DECLARED_FABRIC = """\
[fabric]
kind = "ethernet"
rate_gbps = 1
interface = "eth0"
"""

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "throttled_port",
            "The switch port of n1 falls from 1 Gbit/s to 200 Mbit/s.",
            throttled_port,
            cause="network_congestion",
            subtypes=("bandwidth",),
            loci=("host:n1", "nic:n1/eth0"),
            link="n2 -> n1",  # gloo's ring sends from rank r to r - 1
            ranks=(2, 4),
            graded=True,
        ),
        Scenario(
            "neighbour",
            "A machine outside the job sends to n1 over four TCP streams as fast as it can.",
            neighbour,
            cause="network_congestion",
            subtypes=("neighbour_traffic",),
            loci=("host:n1", "nic:n1/eth0"),
            link="n2 -> n1",
            ranks=(2, 4),
        ),
        Scenario(
            "packet_loss",
            "The switch drops 1 % of what it sends to n1.",
            packet_loss,
            cause="network_congestion",
            subtypes=("packet_loss",),
            loci=("host:n1", "nic:n1/eth0"),
        ),
        Scenario(
            "loader_slow",
            "On every rank a batch takes 2.5 steps to load.",
            loader_slow,
            cause="data_starvation",
            subtypes=("loader_slow",),
            graded=True,
        ),
        Scenario(
            "loader_slow_one",
            "On rank 1 a batch takes 2.5 steps to load.",
            loader_slow_one,
            cause="data_starvation",
            subtypes=("loader_slow",),
            loci=("rank:1", "host:n1"),
        ),
        Scenario(
            "slow_storage",
            "Both ranks may read their batches from disk at 8 MB/s and no faster.",
            slow_storage,
            cause="data_starvation",
            subtypes=("slow_storage",),
            reads=True,
            limit=("reads", ("n0", "n1")),
        ),
        Scenario(
            "cpu_quota",
            "Rank 1 may use 30 % of a core.",
            cpu_quota,
            cause="straggler",
            subtypes=("cpu_quota",),
            loci=("rank:1", "host:n1"),
            train=("--batch", str(HEAVY_BATCH)),
            limit=("cpu", ("n1",)),
        ),
        Scenario(
            "wrong_interface",
            "The job was started on eth1 (200 Mbit/s) where the fabric is declared to be eth0 (1 Gbit/s).",
            cause="topology_misconfiguration",
            subtypes=("wrong_interface",),
            slow_fabric=True,
            declared=DECLARED_FABRIC,
            graded=True,
        ),
        Scenario(
            "undeclared_interface",
            "The same, but nobody declared a fabric: there is nothing to hold the slow interface against.",
            allowed=("communication_bound", "unknown"),
            slow_fabric=True,
        ),
        Scenario(
            "checkpoint_stall",
            "The storage of the checkpoints, one every five steps, takes two seconds longer.",
            checkpoint_stall,
            cause="checkpoint_stall",
            train=("--checkpoint-every", "5"),
        ),
        Scenario("healthy_checkpoint", "A checkpoint every ten steps, as ever.", train=("--checkpoint-every", "10")),
        Scenario("healthy_eval", "An evaluation every twenty steps.", train=("--eval-every", "20")),
        Scenario(
            "healthy_gc",
            "A full garbage collection every twenty steps, on each rank at a step of its own.",
            train=("--gc-every", "20"),
        ),
        Scenario("healthy_batch_change", "Halfway the script goes from 64 to 512 samples a batch.", batch_change),
    )
}
