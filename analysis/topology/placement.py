"""How jobs use the machines: what NCCL fell back to, which interface the bytes take, and where ranks and groups lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from diagnosd.analysis.model.machine import GDR_OFF
from diagnosd.analysis.model.workload import ORDER, Layout, ModelError, TooLittleKnownError, read
from diagnosd.analysis.topology.finding import Effect, Finding, listed, usual
from diagnosd.analysis.topology.nodes import is_geforce
from diagnosd.analysis.topology.ports import RDMA_KINDS, training_ports
from diagnosd.analysis.topology.site import JobSeen, Nccl, Site
from diagnosd.documents import NodeInventory, Software

# Of a NIC's rate, what goes by way of the CPU's memory: 20 to 60 % (notes/model.md 2.10).
GDR_OFF_EFFECT = Effect("transport", GDR_OFF, 0.6, 0.2)
# A node's sockets carry 10 GB/s at best, 100GbE's 12.5 included (notes/model.md 2.4): of 8 x 400 Gbit/s a fortieth.
SOCKETS_GBPS = 80.0


# -- transports --------------------------------------------------------------------------------------------------------


def sockets(site: Site) -> Iterator[Finding]:
    """NCCL over TCP between hosts whose fabric is RDMA."""
    for job in site.ordered_jobs():
        for host in job.hosts if len(job.hosts) > 1 else ():
            ranks = job.on(host)
            fell = [fact for rank in ranks for fact in rank.nccl if fact.network == "Socket"]
            asked = _asks_for_sockets([rank.env or {} for rank in ranks])
            if (not fell and not asked) or not _has_rdma(site, host, asked=bool(asked)):
                continue
            if asked and any(fact.network not in (None, "Socket") for rank in ranks for fact in rank.nccl):
                continue  # another plugin ignores the setting, as some cloud's do
            yield Finding(
                subtype="socket_fallback",
                loci=(f"host:{host}",),
                seen="NCCL communicates over TCP sockets" if fell else f"{asked} makes NCCL use TCP sockets",
                should="RDMA",
                basis="observed" if fell else "rule",
                because=f"{_who_says_rdma(site)}{f', and {asked} is set' if fell and asked else ''}",
                hosts=(host,),
                jobs=(job.name,),
                effect=_as_sockets(site, host),
                remedy=f"Unset {asked.partition('=')[0]}." if asked else "",
            )


def _asks_for_sockets(environments: Sequence[Mapping[str, str]]) -> str:
    for env in environments:
        if env.get("NCCL_IB_DISABLE", "0").strip() not in ("", "0"):
            return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
        if env.get("NCCL_NET", "").lower() == "socket":
            return f"NCCL_NET={env['NCCL_NET']}"
    return ""


def _has_rdma(site: Site, host: str, *, asked: bool) -> bool:
    """Whether the declared fabric is RDMA's, or a port of the host that is up.

    Adapters for Ethernet have RDMA where nobody has made the network fit for it: who asks for sockets may be right.
    """
    fabric = site.cluster.fabric if site.cluster else None
    if fabric and fabric.kind:
        return fabric.kind in RDMA_KINDS
    ports = training_ports(site, host) if host in site.inventories else []
    able = [port.nic for port in ports if port.active and port.nic.device]
    return any(nic.link_layer != "Ethernet" or not asked for nic in able)


def _who_says_rdma(site: Site) -> str:
    fabric = site.cluster.fabric if site.cluster else None
    return f"the declared fabric is {fabric.kind}" if fabric and fabric.kind else "the host has RDMA ports that are up"


def _as_sockets(site: Site, host: str) -> Effect | None:
    ports = [port for port in training_ports(site, host) if port.rate] if host in site.inventories else []
    whole = sum(port.rate or 0.0 for port in ports)
    if not whole:
        return None
    part = min(1.0, SOCKETS_GBPS / whole)
    return Effect("transport", part, min(1.0, 1.25 * part), part / 2)


def gdr(site: Site) -> Iterator[Finding]:
    """NICs that do not reach the GPUs' memory: NCCL's log says so, or neither of its two ways is there."""
    told: set[str] = set()
    for job in site.ordered_jobs():
        if len(job.hosts) > 1 and (found := _no_gdr(site, job)):
            told.update(found.hosts)
            yield found
    for host, inventory in site.nodes():
        software = inventory.software
        may = inventory.gpus and not is_geforce(inventory)
        if host not in told and may and software and _needs_peermem(site, host):
            yield from _no_way(site, host, software)


def _is_without(fact: Nccl) -> bool:
    return fact.network in ("IB", "RoCE") and (fact.gdr is False or (fact.gdr_share is not None and fact.gdr_share < 1))


def _forbids_gdr(environments: Sequence[Mapping[str, str]]) -> str:
    """NCCL_NET_GDR_LEVEL may be a word or its number: LOC, 0, is never."""
    for env in environments:
        level = env.get("NCCL_NET_GDR_LEVEL", "")
        if level.upper() in ("LOC", "0"):
            return f"NCCL_NET_GDR_LEVEL={level}"
    return ""


def _no_gdr(site: Site, job: JobSeen) -> Finding | None:
    """On which hosts of a job NCCL's log or a setting says so; what may be the reason is told with it."""
    able = [host for host in job.hosts if not is_geforce(site.inventories.get(host, NodeInventory()))]
    logged = {host for host in able for rank in job.on(host) for fact in rank.nccl if _is_without(fact)}
    asked = {host: how for host in able if (how := _forbids_gdr([rank.env or {} for rank in job.on(host)]))}
    hosts = tuple(sorted(logged or asked))
    if not hosts:
        return None
    software = {host: (site.inventories.get(host) or NodeInventory()).software or Software() for host in hosts}
    bare = [host for host, each in software.items() if each.peermem is False and each.dmabuf is not True]
    how = next(iter(asked.values()), "")
    far = [host for host in hosts if _is_far(site, host)]
    reasons = [
        f"{how} is set" if how else "",
        f"no peer memory module on {listed(bare)}" if bare else "",
        f"no NIC behind a GPU's own PCIe switch on {listed(far)}: NCCL then leaves it off" if far else "",
    ]
    return Finding(
        subtype="gdr_off",
        loci=tuple(f"host:{host}" for host in hosts),
        seen="NCCL's log has network channels without GDRDMA" if logged else f"{how} forbids GPUDirect RDMA",
        should="GPUDirect RDMA on all of them",
        basis="observed" if logged else "rule",
        because=listed(filter(None, reasons)) or "NCCL's log names the way of each channel",
        hosts=hosts,
        jobs=(job.name,),
        effect=GDR_OFF_EFFECT,
        remedy=f"Unset {how.partition('=')[0]}." if how else _TRY_FURTHER if far and not bare else "",
    )


_TRY_FURTHER = "Measure with NCCL_NET_GDR_LEVEL=PHB (SYS across sockets), or put the NICs behind the GPUs' switches."


def _is_far(site: Site, host: str) -> bool:
    inventory = site.inventories.get(host, NodeInventory())
    ports = training_ports(site, host) if inventory.affinity else []
    return bool(ports) and not any(port.is_near_a_gpu(inventory) for port in ports)


def _needs_peermem(site: Site, host: str) -> bool:
    """InfiniBand's drivers do, and those of a declared RoCE fabric; EFA's and Omni-Path's bring their own way."""
    fabric = site.cluster.fabric if site.cluster else None
    if fabric and fabric.kind:
        return fabric.kind in ("infiniband", "roce")
    return any(port.active and port.nic.link_layer == "InfiniBand" for port in training_ports(site, host))


def _no_way(site: Site, host: str, software: Software) -> Iterator[Finding]:
    kin = next(hosts for hosts in site.kin() if host in hosts)
    told = [each.software.peermem for each in kin.values() if each.software]
    most = usual(peermem for peermem in told if peermem is not None)
    lacks = software.peermem is False and software.dmabuf is not True
    because = ""
    if lacks and software.dmabuf is False:
        because = "a NIC needs one of the two to reach the GPUs' memory"
    elif lacks and most and most[0]:
        because = f"as on {most[1]} other hosts"
    if because:
        yield Finding(
            subtype="gdr_off",
            loci=(f"host:{host}",),
            seen="the peer memory module is not loaded"
            + (", and there is no dma-buf" if software.dmabuf is False else ""),
            should="nvidia_peermem loaded, or a driver that exports dma-buf",
            basis="siblings" if software.dmabuf is None else "hardware",
            because=because,
            hosts=(host,),
            effect=GDR_OFF_EFFECT,
        )


# -- interfaces --------------------------------------------------------------------------------------------------------

SOCKET_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def interfaces(site: Site) -> Iterator[Finding]:
    """Ranks whose connections, or whose settings, are of an interface that is not of the declared fabric.

    Over an RDMA fabric the interface only introduces the ranks to each other: any will do.
    """
    fabric = site.cluster.fabric if site.cluster else None
    if fabric is None or not fabric.interfaces or fabric.kind in RDMA_KINDS:
        return
    for job in site.ordered_jobs():
        for host in job.hosts if len(job.hosts) > 1 else ():
            used = _used(site, job, host)
            own = site.inventories.get(host, NodeInventory()).nics or ()
            there = {nic.netdev for nic in own if nic.netdev in fabric.interfaces}
            if used and there and used.isdisjoint(fabric.interfaces):
                yield Finding(
                    subtype="wrong_interface",
                    loci=tuple(f"nic:{host}/{name}" for name in sorted(used)),
                    seen=f"its ranks connect over {listed(sorted(used))}",
                    should=listed(sorted(fabric.interfaces)),
                    basis="declared",
                    because="fabric.interface in the cluster.toml",
                    hosts=(host,),
                    jobs=(job.name,),
                    effect=_slower(site, host, used),
                )


def _used(site: Site, job: JobSeen, host: str) -> set[str]:
    """By the addresses of the ranks' connections; where nobody saw these, by what they are told to use."""
    own = site.inventories.get(host, NodeInventory()).nics or ()
    by_address = {address: nic.netdev for nic in own for address in nic.addresses or () if nic.netdev}
    seen = {by_address[each] for rank in job.on(host) for each in rank.addresses if each in by_address}
    if seen:
        return {name for name in seen if name}
    names = {nic.netdev for nic in own if nic.netdev}
    outside = [rank for rank in job.on(host) if not rank.container]
    told = {(rank.env or {}).get(variable, "") for rank in outside for variable in SOCKET_NAMES}
    return {name.lstrip("=") for name in told if name.lstrip("=") in names}


def _slower(site: Site, host: str, used: set[str]) -> Effect | None:
    rates = {nic.netdev or "": nic.rate_gbps for nic in site.inventories[host].nics or ()}
    mine = max((rates.get(name) or 0.0 for name in used), default=0.0)
    fabric = site.cluster.fabric if site.cluster else None
    if not mine or not fabric or not fabric.rate_gbps or mine >= fabric.rate_gbps:
        return None
    part = mine / fabric.rate_gbps
    return Effect("rail", part, part, part)


# -- where ranks and groups lie ----------------------------------------------------------------------------------------


def oversubscription(site: Site) -> Iterator[Finding]:
    """A job that crosses more of an oversubscribed fabric than it need: leaves, or the order of its ranks over them."""
    cluster = site.cluster
    ratio = (cluster.fabric.oversubscription if cluster and cluster.fabric else None) or 1.0
    leaves = (cluster.leaves if cluster else None) or {}
    if ratio <= 1 or not leaves:
        return
    rails: dict[str, dict[str, str]] = {}  # the port, "" where a leaf has all of a host's; then each host's leaf
    for leaf, members in sorted(leaves.items()):
        for host, _, device in (member.partition("/") for member in members):
            rails.setdefault(device, {})[host] = leaf
    for job in site.ordered_jobs():
        found = [_crossing(job, home, ratio) for _, home in sorted(rails.items())]
        yield from sorted(filter(None, found), key=lambda each: -(each.observed or 0))[:1]


def _crossing(job: JobSeen, home: Mapping[str, str], ratio: float) -> Finding | None:
    """What a job crosses in one rail more than it need; None where it is nothing, or a host has no leaf."""
    hosts = [host for host in _in_order(job) if host in home]
    if len(hosts) < 2 or len(hosts) < len(job.hosts):
        return None
    rooms = sorted(Counter(home.values()).values(), reverse=True)
    fewest = next(count for count in range(1, len(rooms) + 1) if sum(rooms[:count]) >= len(hosts))
    over = len({home[host] for host in hosts})
    changes, least = _changes([home[host] for host in hosts]), fewest if fewest > 1 else 0
    if over <= fewest and changes <= least:
        return None
    what = f"{len(hosts)} hosts lie under {over} leaves"
    what = what if over > fewest else f"{what}, and its ranks go from leaf to leaf {changes} times"
    return Finding(
        subtype="oversubscription",
        loci=("job", *(f"leaf:{leaf}" for leaf in sorted({home[host] for host in hosts}))),
        seen=what,
        should="one leaf" if fewest == 1 else f"{fewest} leaves, each left once",
        basis="declared",
        because=f"between leaves the fabric is {ratio:g} times oversubscribed, and the largest has {rooms[0]} hosts",
        hosts=job.hosts,
        jobs=(job.name,),
        effect=Effect("crossing", changes / len(hosts), least / len(hosts), 1.0, healthy=least / len(hosts)),
        observed=over,
        expected=fewest,
        unit="leaves",
    )


def _in_order(job: JobSeen) -> list[str]:
    """Its hosts, as its ranks come to them."""
    return list(dict.fromkeys(rank.host for _, rank in sorted(job.ranks.items())))


def _changes(leaves: Sequence[str]) -> int:
    """Times that a ring over these leaves, in this order, goes from one to another."""
    return sum(one != other for one, other in zip(leaves, [*leaves[1:], leaves[0]], strict=True))


def layout(site: Site) -> Iterator[Finding]:
    """Tensor-parallel groups that NVLink does not join: each layer waits for the network."""
    for job in site.ordered_jobs():
        groups = _tensor_groups(job)
        known = {name: ranks for name, ranks in groups.items() if all(_is_placed(site, job, rank) for rank in ranks)}
        torn = {name: ranks for name, ranks in known.items() if len(_domains(site, job, ranks)) > 1}
        if not torn:
            continue
        size = max(len(ranks) for ranks in torn.values())
        room = max(_room(site, job).values())
        narrow = size > room
        yield Finding(
            subtype="layout",
            loci=("job",),
            seen=f"{len(torn)} of {len(known)} tensor-parallel groups, of {size} ranks, span nodes",
            should=f"at most {room} ranks, as NVLink joins" if narrow else "each group on one node",
            basis="hardware",
            because="NVLink joins the GPUs of a node, or of a rack with one fabric; the network is 8 to 9 times slower",
            hosts=job.hosts,
            jobs=(job.name,),
            effect=_better(job, room),
            remedy=(
                f"Make tp at most {room}, and pp larger." if narrow
                else "Number the ranks so that tp varies fastest: each group then lies on one node."
            ),
            observed=size,
            expected=room if narrow else size,
            unit="ranks",
        )  # fmt: skip


def _tensor_groups(job: JobSeen) -> dict[str, tuple[int, ...]]:
    """As they were observed; else as the declared layout makes them."""
    seen = {name: ranks for name, ranks in job.groups.items() if name.partition(":")[0] == "tp" and len(ranks) > 1}
    said = job.spec.parallel
    world = job.world or len(job.ranks)
    if seen or said is None or not said.tp or said.tp < 2 or world % said.tp:
        return seen
    sizes = {name: getattr(said, name) or 1 for name in ("tp", "cp", "pp")}
    sizes["dp"] = said.dp or max(world // (sizes["tp"] * sizes["cp"] * sizes["pp"]), 1)
    stride = 1
    for name in (said.order or ORDER).split("-"):
        if name == "tp":
            break
        stride *= sizes.get(name, 1)
    block = stride * said.tp
    return {
        f"tp:{first}": tuple(range(first, first + block, stride))
        for start in range(0, world - block + 1, block)
        for first in range(start, start + stride)
    }


def _is_placed(site: Site, job: JobSeen, rank: int) -> bool:
    """Only the inventory of its host tells what NVLink joins there: it may be a tray of a rack."""
    return rank in job.ranks and job.ranks[rank].host in site.inventories


def _domains(site: Site, job: JobSeen, ranks: Sequence[int]) -> set[object]:
    return {_domain(site, job.ranks[rank].host) for rank in ranks}


def _domain(site: Site, host: str) -> object:
    """What NVLink joins: a host, or all hosts with one fabric and clique."""
    fabric = site.inventories.get(host, NodeInventory()).fabric
    joined = fabric and fabric.cluster_uuid and fabric.cluster_uuid.strip("0-")  # all zeros where it ends with the node
    return (fabric.cluster_uuid, fabric.clique) if fabric and joined else host


def _room(site: Site, job: JobSeen) -> dict[object, int]:
    """How many of the job's ranks each domain holds."""
    found: dict[object, int] = {}
    for rank in job.ranks.values():
        domain = _domain(site, rank.host)
        found[domain] = found.get(domain, 0) + 1
    return found


def _better(job: JobSeen, room: int) -> Effect | None:
    """The layout with tp no larger than NVLink joins, in the default order; pp takes what tp leaves."""
    try:
        work, _ = read(job.spec, job.world)
    except (ModelError, TooLittleKnownError):
        return None
    now: Layout = work.layout
    tp = max((size for size in range(1, room + 1) if now.tp % size == 0), default=1)
    better = replace(now, tp=tp, pp=now.pp * (now.tp // tp), order=ORDER)
    return None if better == now else Effect("layout", 1.0, 1.0, 1.0, better=better)
