"""What the job was told: stale or forced NCCL_* settings, and software that is not the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from diagnosd.analysis.topology.finding import ALIKE, Finding, by, listed, usual
from diagnosd.analysis.topology.nodes import NVLINKS, is_geforce, known
from diagnosd.analysis.topology.placement import SOCKET_NAMES
from diagnosd.analysis.topology.ports import Port, candidates, is_chosen, training_ports
from diagnosd.analysis.topology.site import JobSeen, RankSeen, Site
from diagnosd.documents import NodeInventory, Software

UNSET = "unset"
CLOUDS = ("efa", "fastrak")
_ON = ("1", "true", "yes")
_OFF = ("0", "false", "no")


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that should not be set, or not so; `between`: it matters only to a job of more than one host."""

    name: str
    ill: Callable[[str], bool]
    should: str
    because: str
    between: bool = False
    inside: bool = False  # only to ranks of one host whose GPUs could reach each other
    tuned: bool = False  # the plugins of EFA and FasTrak come with a value of their own
    nvls: bool = False  # matters only where NVSwitches can add up


def _is_set(value: str) -> bool:
    return bool(value.strip())


def _is_on(value: str) -> bool:
    return value.strip().lower() in _ON


def _is_off(value: str) -> bool:
    return value.strip().lower() in _OFF


def _whole(value: str) -> float:
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else inf


def _is_one(value: str) -> bool:
    """One alone: `^LL128` leaves a choice, and so does `Ring,Tree`."""
    return _is_set(value) and not value.strip().startswith("^") and "," not in value


# What NCCL, its issues and the field say of each (notes/model.md 1.1, 2.10; notes/field.md 5.3).
SETTINGS = (
    Setting("NCCL_P2P_DISABLE", _is_on, UNSET, "GPUs of a node then copy through the CPU's memory", inside=True),
    Setting(
        "NCCL_P2P_LEVEL",
        lambda value: value.upper() in ("LOC", "0"),
        UNSET,
        "GPUs of a node then copy through the CPU's memory",
        inside=True,
    ),
    Setting("NCCL_SHM_DISABLE", _is_on, UNSET, "ranks of a node without P2P then use the network", inside=True),
    Setting("NCCL_NVLS_ENABLE", _is_off, UNSET, "NVSwitches then do not add up: 370 instead of 480 GB/s", nvls=True),
    Setting(
        "NCCL_ALGO",
        _is_one,
        UNSET,
        "a forced algorithm costs 15 to 50 % at the sizes that it is not made for",
        tuned=True,
    ),
    Setting(
        "NCCL_PROTO", _is_one, UNSET, "a forced protocol costs up to half of the rate of some message sizes", tuned=True
    ),
    Setting("NCCL_NTHREADS", _is_set, UNSET, "NCCL chooses it by the GPU; fewer starve the links"),
    Setting("NCCL_MAX_NCHANNELS", _is_set, UNSET, "fewer channels than links leave some of them idle"),
    Setting("NCCL_MAX_CTAS", lambda value: _whole(value) < 16, UNSET, "fewer than 16 do not fill a node's links"),
    Setting("NCCL_BUFFSIZE", lambda value: _whole(value) < 1 << 22, UNSET, "below 4 MiB a transfer waits for buffers"),
    Setting("NCCL_NET_GDR_READ", _is_off, UNSET, "what a GPU sends then goes through the CPU's memory", between=True),
    Setting("NCCL_LAUNCH_MODE", lambda value: value.upper() == "GROUP", UNSET, "kernels then wait for each other"),
    Setting("NCCL_DEBUG", lambda value: value.upper() == "TRACE", "WARN or INFO", "each call then writes a line"),
    Setting("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", UNSET, "it checks each collective"),
    Setting("TORCH_NCCL_BLOCKING_WAIT", _is_on, UNSET, "the host then waits for each collective"),
    Setting("NCCL_BLOCKING_WAIT", _is_on, UNSET, "the host then waits for each collective"),
    Setting("TORCH_NCCL_DESYNC_DEBUG", _is_on, UNSET, "each collective then writes to the store"),
)

# Those that may differ from host to host, or from rank to rank, for they name what is there.
_LOCAL = re.compile(
    r"NCCL_(IB_HCA|SOCKET_IFNAME|IB_GID_INDEX|TOPO_FILE|GRAPH_FILE|DEBUG_FILE|TOPO_DUMP_FILE|GRAPH_DUMP_FILE|HOSTID|"
    r"HOSTNAME|COMM_ID|RAS_ADDR|CONF_FILE|DEBUG.*)"
)


def settings(site: Site) -> Iterator[Finding]:
    for job in site.ordered_jobs():
        told = {number: rank for number, rank in sorted(job.ranks.items()) if rank.env}
        for each in SETTINGS:
            yield from _ill(site, job, told, each)
        yield from _stale(site, job, told)
        yield from _differing(job)


def _ill(site: Site, job: JobSeen, told: Mapping[int, RankSeen], each: Setting) -> Iterator[Finding]:
    if (each.between and len(job.hosts) < 2) or (each.nvls and not _has_nvls(site, job)):
        return
    if (each.inside and not _has_neighbours(site, job)) or (each.tuned and _has_cloud_plugin(site, job)):
        return
    values: dict[str, list[str]] = {}
    for rank in told.values():
        value = (rank.env or {}).get(each.name)
        if value is not None and each.ill(value):
            values.setdefault(value, []).append(rank.host)
    for value, hosts in sorted(values.items()):
        yield _environment(job, hosts, f"{each.name}={value}", each.should, each.because)


def _environment(job: JobSeen, hosts: list[str], seen: str, should: str, because: str, remedy: str = "") -> Finding:
    name = seen.partition("=")[0]
    unset = f"Unset {name} where the job is started, in its image, and in /etc/nccl.conf."
    return Finding(
        subtype="environment",
        loci=("job",),
        seen=seen,
        should=should,
        basis="rule",
        because=because,
        hosts=tuple(sorted(set(hosts))),
        jobs=(job.name,),
        remedy=remedy or (unset if should == UNSET else f"Set {name} to {should}."),
    )


def _has_cloud_plugin(site: Site, job: JobSeen) -> bool:
    fabric = site.cluster.fabric if site.cluster else None
    seen = {(fact.network or "").lower() for rank in job.ranks.values() for fact in rank.nccl}
    return not seen.isdisjoint(CLOUDS) or (fabric is not None and fabric.kind in CLOUDS)


def _has_neighbours(site: Site, job: JobSeen) -> bool:
    """Whether ranks share a host whose GPUs may be peers: the driver of GeForce cards forbids it."""
    shared = [host for host in job.hosts if len(job.on(host)) > 1]
    return any(not is_geforce(site.inventories.get(host, NodeInventory())) for host in shared)


def _has_nvls(site: Site, job: JobSeen) -> bool:
    cards = [gpu for host in job.hosts for gpu in (site.inventories.get(host, NodeInventory()).gpus or ())]
    kinds = [known(gpu.name) for gpu in cards]
    return any(kind is not None and kind.name in NVLINKS and kind.nvls is not None for kind in kinds)


def _stale(site: Site, job: JobSeen, told: Mapping[int, RankSeen]) -> Iterator[Finding]:
    """Names of devices that are not on the host: what was right on other machines, or before a flap."""
    for host in sorted({rank.host for rank in told.values()} & set(site.inventories)):
        inventory = site.inventories[host]
        names = sorted({nic.netdev for nic in inventory.nics or () if nic.netdev})
        ports = [Port(host, nic) for nic in inventory.nics or () if nic.device]
        contained = any(rank.container for rank in job.on(host))
        for env in _unlike(rank.env or {} for rank in job.on(host)):
            for variable in SOCKET_NAMES if names and not contained else ():
                yield from _no_interface(job, host, variable, env.get(variable, ""), names)
            chosen = env.get("NCCL_IB_HCA", "")
            if chosen.strip() and ports and not any(is_chosen(port, chosen) for port in ports):
                there = _devices(training_ports(site, host) or ports)
                because, remedy = "no RDMA device there has such a name", "Unset it, or name what ibv_devices lists."
                yield _environment(job, [host], f"NCCL_IB_HCA={chosen}", there, because, remedy)


def _unlike(environments: Iterator[Mapping[str, str]]) -> list[Mapping[str, str]]:
    found: list[Mapping[str, str]] = []
    for env in environments:
        if env not in found:
            found.append(env)
    return found


def _no_interface(job: JobSeen, host: str, variable: str, value: str, names: list[str]) -> Iterator[Finding]:
    """`eth,ib` are beginnings of names, `=eth0` names, `^docker` all but these; `lo` is always there."""
    if not value.strip() or value.startswith("^"):
        return
    exact = value.startswith("=") or variable.startswith("GLOO")
    wanted = [name.strip() for name in value.lstrip("=").split(",") if name.strip()]
    there = [*names, "lo"]
    if not any(one == name if exact else one.startswith(name) for one in there for name in wanted):
        because = "no interface there has such a name"
        remedy = f"Set {variable} to one that `ip -br link` lists."
        yield _environment(job, [host], f"{variable}={value}", listed(names), because, remedy)


def _devices(ports: list[Port]) -> str:
    return listed(sorted({port.nic.device or "" for port in ports}))


def _differing(job: JobSeen) -> Iterator[Finding]:
    """What NCCL must have alike on all ranks."""
    environments = {number: rank.env for number, rank in job.ranks.items() if rank.env is not None}
    variables = sorted({name for env in environments.values() for name in env if name.startswith("NCCL_")})
    for name in variables:
        values = by({number: env.get(name, UNSET) for number, env in environments.items()})
        if len(values) < 2 or _LOCAL.fullmatch(name):
            continue
        *few, (most, _) = sorted(values.items(), key=lambda pair: (len(pair[1]), pair[0]))
        odd = sorted(number for _, numbers in few for number in numbers)
        told = "; ".join(f"{name}={value} on {_ranks(numbers)}" for value, numbers in few[:3])
        yield Finding(
            subtype="environment",
            loci=tuple(f"rank:{number}" for number in odd),
            seen=f"{told}; {most} on the others",
            should="the same on all ranks",
            basis="rule",
            because="ranks that choose otherwise wait for each other, or hang",
            hosts=tuple(sorted({job.ranks[number].host for number in odd})),
            jobs=(job.name,),
            remedy=f"Give {name} to all ranks alike, or to none.",
        )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


# -- versions ----------------------------------------------------------------------------------------------------------

OF_HOSTS: tuple[tuple[str, Callable[[Software], str | None]], ...] = (
    ("driver", lambda told: told.driver),
    ("CUDA", lambda told: told.cuda),
    ("NCCL", lambda told: told.nccl),
    ("OFED", lambda told: told.ofed),
    ("kernel", lambda told: told.kernel),
)


def skew(site: Site) -> Iterator[Finding]:
    """Software that is not the same on all hosts with the same GPUs, all ranks of a job, all adapters of one model."""
    for hosts in site.kin():
        software = {host: each.software or Software() for host, each in hosts.items()}
        for name, version in OF_HOSTS:
            yield from _unequal(name, {host: its for host, told in software.items() if (its := version(told))})
    for job in site.ordered_jobs():
        for name in ("nccl", "torch", "cuda"):
            by_rank = {number: rank.versions[name] for number, rank in job.ranks.items() if name in rank.versions}
            if name == "nccl":
                by_rank = _logged(job) or by_rank
            yield from _unequal(name, by_rank, job)
    yield from _firmware(site)


def _logged(job: JobSeen) -> dict[int, str]:
    return {number: fact.version for number, rank in job.ranks.items() for fact in rank.nccl if fact.version}


def _unequal(name: str, told: Mapping[Any, str], job: JobSeen | None = None) -> Iterator[Finding]:
    """`told`: by host, or by the number of a job's rank."""
    values = by(told)
    if len(values) < 2:
        return
    most = usual(told.values())
    odd = sorted(one for one, value in told.items() if most is None or value != most[0])
    order = sorted(values.items(), key=lambda pair: (len(pair[1]), pair[0]))
    few = [(value, places) for value, places in order if most is None or value != most[0]]
    what = "rank" if job else "host"
    yield Finding(
        subtype="version_skew",
        loci=tuple(f"{what}:{one}" for one in odd),
        seen="; ".join(f"{name} {value} on {_ranks(places) if job else listed(places)}" for value, places in few[:3]),
        should=f"{name} {most[0]}" if most else "the same everywhere",
        basis="siblings",
        because=f"as on {most[1]} {what}s" if most else "too few tell which of them is right",
        hosts=job.hosts if job else tuple(odd),
        jobs=(job.name,) if job else (),
        remedy=f"Install the same {name} everywhere, and start the job anew.",
    )


def _firmware(site: Site) -> Iterator[Finding]:
    """Of adapters of one model, those whose firmware is not that of most, on all hosts together."""
    kinds: dict[tuple[str | None, ...], list[Port]] = {}
    for host, inventory in site.nodes():
        for port in candidates(host, inventory):
            if port.nic.firmware:
                kinds.setdefault(port.model[:3], []).append(port)
    for _, ports in sorted(kinds.items(), key=str):
        most = usual(port.nic.firmware for port in ports)
        for port in ports:
            if most and most[1] >= ALIKE and port.nic.firmware != most[0]:
                yield Finding(
                    subtype="version_skew",
                    loci=(port.locus,),
                    seen=f"firmware {port.nic.firmware}",
                    should=f"firmware {most[0]}",
                    basis="siblings",
                    because=f"as {most[1]} ports of its kind",
                    hosts=(port.host,),
                    remedy="Bring it to the same firmware: mlxfwmanager --query, then -u.",
                )
