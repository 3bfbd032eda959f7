"""What is known of the machines and of the jobs on them: the inputs of the checks, and how a recording tells them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from diagnosd.documents import (
    ClusterSpec,
    Gpu,
    JobSpec,
    Nic,
    NodeInventory,
    decode_cluster,
    decode_job,
    decode_node,
    unite,
)
from diagnosd.point import Point, Value

_PAUSE = re.compile(r"rx_prio([0-7])_pause")
_LONGEST = 1 << 20  # ranks of a group: a range that claims more is a slip


@dataclass(frozen=True, slots=True)
class Nccl:
    """What NCCL's log says of one rank and group; None is unknown."""

    version: str | None = None
    network: str | None = None  # IB, RoCE, Socket, EFA
    nics: tuple[str, ...] = ()
    gdr: bool | None = None
    gdr_share: float | None = None


@dataclass(frozen=True, slots=True)
class RankSeen:
    rank: int
    host: str
    gpu: str | None = None  # uuid
    env: Mapping[str, str] | None = None  # None: nobody told; empty: none of those that are looked for is set
    versions: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    nccl: tuple[Nccl, ...] = ()  # one a group
    container: bool = False  # its interfaces may then be others than those of its host


@dataclass(frozen=True)
class JobSeen:
    name: str
    spec: JobSpec = field(default_factory=JobSpec)
    ranks: Mapping[int, RankSeen] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # NAME:ID -> global ranks
    world: int | None = None

    @cached_property
    def _by_host(self) -> Mapping[str, list[RankSeen]]:
        found: dict[str, list[RankSeen]] = {}
        for _, rank in sorted(self.ranks.items()):
            found.setdefault(rank.host, []).append(rank)
        return found

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_host))

    def on(self, host: str) -> list[RankSeen]:
        return self._by_host.get(host, [])


@dataclass(frozen=True)
class Site:
    inventories: Mapping[str, NodeInventory]
    cluster: ClusterSpec | None = None
    jobs: Mapping[str, JobSeen] = field(default_factory=dict)
    pauses: Mapping[tuple[str, str], Mapping[int, int]] = field(default_factory=dict)  # host, interface -> by priority

    def nodes(self) -> Iterator[tuple[str, NodeInventory]]:
        """In the order of their names, in whatever order they came."""
        yield from sorted(self.inventories.items())

    def kin(self) -> list[dict[str, NodeInventory]]:
        """Hosts that may be compared, for their GPUs are of the same kind; those without any are one group."""
        kinds: dict[frozenset[str | None], dict[str, NodeInventory]] = {}
        for host, each in self.nodes():
            kinds.setdefault(frozenset(gpu.name for gpu in each.gpus or ()), {})[host] = each
        return list(kinds.values())

    @cached_property
    def _with_gpus(self) -> bool:
        return any(each.gpus for each in self.inventories.values())

    def trains(self, host: str) -> bool:
        """Not one without GPUs among such that have them: it serves logins or storage, unless a job is on it."""
        has_none = self._with_gpus and not self.inventories[host].gpus
        return not has_none or any(job.on(host) for job in self.jobs.values())

    @cached_property
    def rail_devices(self) -> Mapping[str, set[str]]:
        """By host, the devices that `leaves` of HOST/DEVICE name."""
        found: dict[str, set[str]] = {}
        for members in ((self.cluster.leaves if self.cluster else None) or {}).values():
            for host, slash, device in (member.partition("/") for member in members):
                if slash:
                    found.setdefault(host, set()).add(device)
        return found

    def ordered_jobs(self) -> list[JobSeen]:
        return [job for _, job in sorted(self.jobs.items())]


def gpu_locus(host: str, gpu: Gpu) -> str:
    """As the kernel log's events name one whose uuid nobody knows."""
    pci = f"PCI:{gpu.pci}" if gpu.pci else f"GPU{gpu.index}"
    return f"gpu:{host}/{gpu.uuid or pci}"


def nic_locus(host: str, nic: Nic) -> str:
    return f"nic:{host}/{nic.device}/{nic.port}" if nic.device else f"nic:{host}/{nic.netdev}"


def port_name(nic: Nic) -> str:
    return f"{nic.device}/{nic.port}" if nic.device else nic.netdev or nic.pci or "?"


class Gathering:
    """Takes the points of a recording, whatever their order within a second; the newest word of each subject counts."""

    def __init__(self) -> None:
        self.unreadable = 0  # documents that did not parse
        self._cluster: ClusterSpec | None = None
        self._inventories: dict[str, NodeInventory] = {}
        self._specs: dict[str, JobSpec] = {}
        self._attempts: dict[str, int] = {}
        self._ranks: dict[str, dict[int, RankSeen]] = {}
        self._worlds: dict[str, int] = {}
        self._groups: dict[str, dict[str, tuple[int, ...]]] = {}
        self._nccl: dict[tuple[str, int], dict[str, dict[str, Value]]] = {}
        self._pauses: dict[tuple[str, str], dict[int, int]] = {}
        self._told: dict[str, str] = {}  # series -> its document as last parsed
        self._takes = {
            "diagnosd_node": self._node,
            "diagnosd_cluster": self._declared,
            "diagnosd_job": self._job,
            "diagnosd_rank": self._rank,
            "diagnosd_group": self._group,
            "diagnosd_nccl": self._facts,
            "ethtool": self._ethtool,
        }

    def add(self, points: Iterable[Point]) -> None:
        takes = self._takes
        for point in points:
            take = takes.get(point.series.measurement)
            if take is not None:
                take(point)

    def site(self, cluster: ClusterSpec | None = None) -> Site:
        """`cluster` counts before what the recording declares."""
        names = sorted({*self._specs, *self._ranks})
        return Site(
            self._inventories, cluster or self._cluster, {name: self._seen(name) for name in names}, self._pauses
        )

    def _seen(self, name: str) -> JobSeen:
        spec, ranks = self._specs.get(name, JobSpec()), dict(self._ranks.get(name, {}))
        for each in spec.ranks or ():  # recordings without diagnosd_rank
            if each.host and each.rank not in ranks:
                ranks[each.rank] = RankSeen(each.rank, each.host, each.gpu)
        told = {number: replace(rank, nccl=self._facts_of(name, number)) for number, rank in ranks.items()}
        return JobSeen(name, spec, told, self._groups.get(name, {}), self._worlds.get(name) or len(told) or None)

    def _facts_of(self, job: str, rank: int) -> tuple[Nccl, ...]:
        groups = self._nccl.get((job, rank), {})
        return tuple(_nccl(fields) for _, fields in sorted(groups.items()))

    # -- one measurement each ------------------------------------------------------------------------------------------

    def _node(self, point: Point) -> None:
        host, inventory = point.series.tag("host"), self._document(point, "inventory", decode_node)
        if host and inventory is not None:
            self._inventories[host] = inventory

    def _declared(self, point: Point) -> None:
        self._cluster = self._document(point, "spec", decode_cluster) or self._cluster

    def _job(self, point: Point) -> None:
        name = point.series.tag("job")
        if name and self._is_newest(name, point):
            spec = self._document(point, "spec", decode_job)
            self._specs[name] = unite([(0, self._specs.get(name, JobSpec())), (1, spec or JobSpec())])

    def _rank(self, point: Point) -> None:
        name, host, number = (point.series.tag(tag) for tag in ("job", "host", "rank"))
        if not name or not host or not number or not _is_rank(number) or not self._is_newest(name, point):
            return
        ranks, fields = self._ranks.setdefault(name, {}), point.fields
        before = ranks.get(int(number))
        if before is None or before.host != host:
            before = RankSeen(int(number), host)
        world = fields.get("world")
        if isinstance(world, int) and world > 0:
            self._worlds[name] = world
        env, versions, addresses = (_text(fields, key) for key in ("env", "versions", "addresses"))
        ranks[before.rank] = RankSeen(
            before.rank,
            host,
            _text(fields, "gpu") or before.gpu,
            before.env if env is None else self._environment(env),
            dict(_pairs(versions)) if versions else before.versions,
            tuple(addresses.split(",")) if addresses else before.addresses,
            container=bool(fields.get("container", before.container)),
        )

    def _environment(self, text: str) -> Mapping[str, str] | None:
        try:
            told = json.loads(text)
        except ValueError:
            self.unreadable += 1
            return None
        return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else None

    def _group(self, point: Point) -> None:
        name, group, members = point.series.tag("job"), point.series.tag("group"), _text(point.fields, "members")
        if name and group and members and self._is_newest(name, point):
            self._groups.setdefault(name, {})[group] = ranges(members)

    def _facts(self, point: Point) -> None:
        name, rank, group = (point.series.tag(tag) for tag in ("job", "rank", "group"))
        if name and rank and _is_rank(rank):
            self._nccl.setdefault((name, int(rank)), {}).setdefault(group or "", {}).update(point.fields)

    def _ethtool(self, point: Point) -> None:
        host, interface = point.series.tag("host"), point.series.tag("interface")
        for key, value in point.fields.items():
            found = _PAUSE.fullmatch(key)
            if found and host and interface and isinstance(value, int):
                self._pauses.setdefault((host, interface), {})[int(found[1])] = value

    def _is_newest(self, name: str, point: Point) -> bool:
        """Ranks, layout and groups hold within one attempt."""
        attempt = point.fields.get("attempt")
        if not isinstance(attempt, int):
            return True
        newest = self._attempts.get(name, attempt)
        if attempt > newest:
            for kept in (self._ranks, self._groups, self._worlds):
                kept.pop(name, None)
            self._nccl = {where: groups for where, groups in self._nccl.items() if where[0] != name}
        self._attempts[name] = max(attempt, newest)
        return attempt >= newest

    def _document(self, point: Point, key: str, decode: Any) -> Any:
        """None where there is none, it says nothing new, or it does not parse."""
        text = point.fields.get(key)
        if not isinstance(text, str) or self._told.get(point.series.key) == text:
            return None
        self._told[point.series.key] = text
        try:
            return decode(text)
        except ValueError:
            self.unreadable += 1
            return None


def ranges(text: str) -> tuple[int, ...]:
    """`0-7,64-71` as numbers; what is none is left out."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if _is_rank(first) and _is_rank(last or first) and int(last or first) - int(first) < _LONGEST:
            found.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(set(found)))


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _nccl(fields: Mapping[str, Value]) -> Nccl:
    gdr, share, nics = fields.get("gdr"), fields.get("gdr_share"), _text(fields, "nics")
    return Nccl(
        _text(fields, "version"),
        _text(fields, "network"),
        tuple(_devices(nics)) if nics else (),
        gdr if isinstance(gdr, bool) else None,
        float(share) if isinstance(share, float) else None,
    )


def _devices(nics: str) -> Iterator[str]:
    """`mlx5_0:1,mlx5_1`; two that NCCL has made one are `mlx5_2+mlx5_3`."""
    for name in nics.replace("+", ",").split(","):
        if device := name.strip().partition(":")[0]:
            yield device


def _text(fields: Mapping[str, Value], key: str) -> str | None:
    value = fields.get(key)
    return value if isinstance(value, str) else None


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            yield key, value
