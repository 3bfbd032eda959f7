"""Ports: which of them carry training, and whether they run as they should: rate, number, MTU, GIDs, priorities.

No machine knows of itself what a port is for. What the operators declare counts first (`fabric.interface`, a port's
`role`, `leaves` of HOST/DEVICE); then the kind of fabric; then the model of the adapter, by its firmware's family: a
port is measured by others of the same model alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from diagnosd.analysis.topology.finding import ALIKE, Effect, Finding, listed, share, usual
from diagnosd.analysis.topology.site import JobSeen, RankSeen, Site, nic_locus, port_name
from diagnosd.documents import Nic, NodeInventory

NEAR = ("PIX", "PXB")  # behind the same PCIe switch, or one switch further: where a GPU's own NIC sits
OTHER_ROLES = ("storage", "management")
RDMA_KINDS = ("infiniband", "roce", "efa", "omnipath")
LOW = 0.9  # of a rate: a tenth less is a lane or a speed, not rounding
# RoCE packs 4096 bytes a packet where the network interface may carry them with their headers, else 2048 or 1024.
ROCE_MTU = 4200


class Port(NamedTuple):
    host: str
    nic: Nic

    @property
    def name(self) -> str:
        return port_name(self.nic)

    @property
    def locus(self) -> str:
        return nic_locus(self.host, self.nic)

    @property
    def active(self) -> bool:
        return self.nic.state == "ACTIVE" or (self.nic.state is None and bool(self.nic.rate_gbps))

    @property
    def rate(self) -> float | None:
        """While the link is up; of a port that is down it is a leftover."""
        return self.nic.rate_gbps if self.active else None

    @property
    def model(self) -> tuple[str | None, ...]:
        """What tells adapters apart: driver, family of the firmware (28 is ConnectX-7, 22 ConnectX-6 Dx), layer."""
        family = (self.nic.firmware or "").partition(".")[0] or None
        return self.nic.driver, family, self.nic.link_layer, self.nic.role

    def is_near_a_gpu(self, inventory: NodeInventory) -> bool:
        words = [near.get(self.nic.device or "") for near in (inventory.affinity or {}).values()]
        return any(word in NEAR for word in words)


def candidates(host: str, inventory: NodeInventory) -> list[Port]:
    """Ports of RDMA devices that may carry training: not those of other roles, of another namespace, or virtual."""
    return [
        Port(host, nic)
        for nic in inventory.nics or ()
        if nic.device and nic.role not in OTHER_ROLES and nic.netns is None and nic.physfn is None
    ]


def declared_ports(site: Site, host: str, inventory: NodeInventory) -> list[Port]:
    """Those that somebody has said to be of the fabric, RDMA device or not; empty where nobody has."""
    cluster = site.cluster
    interfaces = cluster.fabric.interfaces if cluster and cluster.fabric else ()
    devices = site.rail_devices.get(host, set())
    mine = [Port(host, nic) for nic in inventory.nics or () if nic.role not in OTHER_ROLES and nic.netns is None]
    named = [port for port in mine if {port.nic.netdev, port.nic.device} & {*interfaces, *devices} - {None, ""}]
    return named or [port for port in mine if port.nic.role == "compute"]


def training_ports(site: Site, host: str) -> list[Port]:
    """The ports that training should use, up or down."""
    inventory = site.inventories[host]
    if not site.trains(host):
        return []
    declared = declared_ports(site, host, inventory)
    if declared:
        return declared
    ports = _of_the_fabric(site, candidates(host, inventory))
    near = {port.model for port in ports if port.is_near_a_gpu(inventory)}
    return [port for port in ports if port.model in (near or _fastest(ports))]


def _of_the_fabric(site: Site, ports: Sequence[Port]) -> list[Port]:
    kind = site.cluster.fabric.kind if site.cluster and site.cluster.fabric else None
    layer = {"infiniband": "InfiniBand", "roce": "Ethernet"}.get(kind or "")
    return [port for port in ports if layer is None or port.nic.link_layer in (layer, None)]


def _fastest(ports: Sequence[Port]) -> set[tuple[str | None, ...]]:
    """The models that have the fastest of the ports."""
    most = max((port.rate or 0.0 for port in ports), default=0.0)
    return {port.model for port in ports if (port.rate or 0.0) >= LOW * most}


# -- rate --------------------------------------------------------------------------------------------------------------


def link_rate(site: Site) -> Iterator[Finding]:
    """Ports below the declared rate; of the others, those below their siblings."""
    told: set[str] = set()
    for host, inventory in site.nodes():
        for found in _below_declared(site, host, inventory):
            told.update(found.loci)
            yield found
    yield from (found for found in _below_siblings(site) if told.isdisjoint(found.loci))
    yield from _lost_members(site)


def declared_rate(site: Site) -> float | None:
    """Gbit/s of one port."""
    cluster = site.cluster
    node, fabric = (cluster.node, cluster.fabric) if cluster else (None, None)
    return (node.nic_rate_gbps if node else None) or (fabric.rate_gbps if fabric else None)


def _below_declared(site: Site, host: str, inventory: NodeInventory) -> Iterator[Finding]:
    rate, ports = declared_rate(site), training_ports(site, host)
    if not rate:
        return
    well = [port for port in ports if port.rate and port.rate >= LOW * rate]
    if not declared_ports(site, host, inventory) and _are_enough(site, inventory, len(well)):
        return  # the others are for something else
    for port in ports:
        if port.rate and port.rate < LOW * rate:
            yield _slow(port, rate, "declared", "declared in the cluster.toml")


def _are_enough(site: Site, inventory: NodeInventory, ports: int) -> bool:
    """As many as declared, or one for each GPU: what there is beyond them is for storage or the like."""
    node = site.cluster.node if site.cluster else None
    enough = (node.nics if node else None) or len(inventory.gpus or ())
    return 0 < enough <= ports


def _slow(port: Port, rate: float, basis: str, because: str) -> Finding:
    nic, now = port.nic, port.rate or 0.0
    lanes = f" ({nic.width}X{' ' + nic.speed if nic.speed else ''})" if nic.width else ""
    return Finding(
        subtype="link_rate_low",
        loci=(port.locus,),
        seen=f"{now:g} Gbit/s{lanes}",
        should=f"{rate:g} Gbit/s",
        basis="declared" if basis == "declared" else "siblings",
        because=because,
        hosts=(port.host,),
        effect=share("rail", now / rate),
        observed=now,
        expected=rate,
        unit="Gbit/s",
    )


def _below_siblings(site: Site) -> Iterator[Finding]:
    """A port slower than most of its model on its host, or than the port of the same name on most hosts.

    Several of one host that are equally slow may be there for something else: they count where they sit beside a GPU as
    the fast ones do, or where other hosts' ports of that name are fast.
    """
    for hosts in site.kin():
        yield from _below_kin(site, hosts)


def _below_kin(site: Site, hosts: Mapping[str, NodeInventory]) -> Iterator[Finding]:
    everywhere = {host: [port for port in candidates(host, each) if port.rate] for host, each in hosts.items()}
    named: dict[tuple[object, ...], list[float | None]] = {}
    for port in (each for ports in everywhere.values() for each in ports):
        named.setdefault((port.name, port.model), []).append(port.rate)
    most = {key: usual(rates) for key, rates in named.items()}
    for host, ports in everywhere.items():
        for port in ports:
            alike = [other.rate for other in ports if other.model == port.model]
            here = usual(alike) if _is_known(port, ports) else None
            there = most[port.name, port.model]
            if there and there[0] and (port.rate or 0) < LOW * there[0]:
                yield _slow(port, there[0], "siblings", f"as {port.name} of {there[1]} hosts")
            elif here and here[0] and (port.rate or 0) < LOW * here[0] and _is_odd(site, port, ports, there):
                yield _slow(port, here[0], "siblings", f"as {here[1]} of the {len(alike)} ports of its kind on {host}")


def _is_known(port: Port, ports: Sequence[Port]) -> bool:
    """Whether siblings can be told from others: by the firmware, or because all are InfiniBand."""
    return port.model[1] is not None or all(other.nic.link_layer == "InfiniBand" for other in ports)


def _is_odd(site: Site, port: Port, ports: Sequence[Port], there: tuple[float | None, int] | None) -> bool:
    inventory = site.inventories[port.host]
    as_slow = [other for other in ports if other.model == port.model and other.rate == port.rate]
    fast = [other for other in ports if other.model == port.model and (other.rate or 0) > (port.rate or 0)]
    if port.nic.role == "compute":
        return True
    if _are_enough(site, inventory, len(fast)):
        return False
    if port.is_near_a_gpu(inventory):
        return True
    elsewhere = there is not None or any(other.is_near_a_gpu(inventory) for other in fast)
    return len(as_slow) == 1 and not elsewhere


def _lost_members(site: Site) -> Iterator[Finding]:
    """A bond stays up, at part of its rate, when a member is down."""
    for host, inventory in site.nodes():
        for nic in inventory.nics or ():
            down = [member.netdev or "?" for member in nic.members or () if member.state == "DOWN"]
            all_of = nic.members or ()
            if down and len(down) < len(all_of) and nic.role not in OTHER_ROLES:
                yield Finding(
                    subtype="link_rate_low",
                    loci=(nic_locus(host, nic),),
                    seen=f"{listed(down)} of its bond {'is' if len(down) == 1 else 'are'} down",
                    should=f"{len(all_of)} members that carry",
                    basis="hardware",
                    because="the bond has been given them",
                    hosts=(host,),
                    effect=share("rail", 1 - len(down) / len(all_of)),
                    remedy=f"On {host}: cat /proc/net/bonding/{nic.netdev}; ethtool {down[0]}: is its cable in?",
                )


# -- number ------------------------------------------------------------------------------------------------------------


def too_few(site: Site) -> Iterator[Finding]:
    """Fewer ports that are up than declared, than other hosts have, or fewer in NCCL's use than are up."""
    told: set[str] = set()
    for host, inventory in site.nodes():
        if inventory.nics is not None and (found := _fewer_than_declared(site, host)):
            told.add(host)
            yield found
    yield from _not_configured(site)
    for found in _fewer_than_siblings(site):
        if told.isdisjoint(found.hosts):
            yield found
    for job in site.ordered_jobs():
        for host in job.hosts:
            if len(job.hosts) > 1 and host in site.inventories and (unused := _unused(site, job, host)):
                yield unused


def _fewer_than_declared(site: Site, host: str) -> Finding | None:
    node, fabric = (site.cluster.node, site.cluster.fabric) if site.cluster else (None, None)
    if node is None or not node.nics or not site.trains(host):
        return None
    ports = training_ports(site, host)
    if not ports and fabric and fabric.kind not in (None, *RDMA_KINDS):
        return None  # its interfaces are not RDMA's, and nobody says which they are
    up = [port for port in ports if port.active]
    if len(up) >= node.nics:
        return None
    down = [port for port in ports if not port.active]
    names = f": {listed(port.name for port in down)} {'is' if len(down) == 1 else 'are'} down" if down else ""
    return Finding(
        subtype="too_few_nics",
        loci=tuple(port.locus for port in down) or (f"host:{host}",),
        seen=f"{len(up)} ports are up{names}" if ports else "no RDMA port is to be seen",
        should=f"{node.nics} ports",
        basis="declared",
        because="declared in the cluster.toml",
        hosts=(host,),
        effect=share("nics", len(up) / node.nics) if up else None,
        observed=len(up),
        expected=node.nics,
        unit="ports",
    )


def _fewer_than_siblings(site: Site) -> Iterator[Finding]:
    """A port that is up on most hosts is not meant to be down on one."""
    for hosts in site.kin():
        yield from _fewer_than_kin(site, hosts)


def _fewer_than_kin(site: Site, hosts: Mapping[str, NodeInventory]) -> Iterator[Finding]:
    states = {
        host: {port.name: port.active for port in candidates(host, each)} for host, each in hosts.items() if each.nics
    }
    for name in sorted({name for ports in states.values() for name in ports}):
        up = [host for host, ports in states.items() if ports.get(name)]
        if len(up) < ALIKE or 2 * len(up) <= len(states):
            continue
        for host in sorted(set(states) - set(up)):
            device = name.partition("/")
            locus = f"nic:{host}/{device[0]}/{device[2]}" if device[2] else f"nic:{host}/{name}"
            yield Finding(
                subtype="too_few_nics",
                loci=(locus,),
                seen="it is down" if name in states[host] else "it is not there",
                should="up",
                basis="siblings",
                because=f"as {name} of {len(up)} hosts",
                hosts=(host,),
                effect=_fewer(training_ports(site, host)),
            )


def _not_configured(site: Site) -> Iterator[Finding]:
    """A cable is in and the link is up, but no subnet manager has made it carry: nobody means that."""
    for host, inventory in site.nodes():
        for port in candidates(host, inventory):
            if port.nic.state in ("INIT", "ARMED") and port.nic.phys_state == "LinkUp":
                yield Finding(
                    subtype="too_few_nics",
                    loci=(port.locus,),
                    seen=f"its link is up and its state is {port.nic.state}",
                    should="ACTIVE",
                    basis="hardware",
                    because="a subnet manager makes a port carry whose link is up",
                    hosts=(host,),
                    effect=_fewer(training_ports(site, host)),
                    remedy="Does a subnet manager run? sminfo; systemctl status opensm; the fabric's UFM.",
                )


def _fewer(ports: Sequence[Port]) -> Effect | None:
    up = sum(port.active for port in ports)
    return share("nics", up / (up + 1)) if up else None


def _unused(site: Site, job: JobSeen, host: str) -> Finding | None:
    """Ports that are up and that NCCL does not use, whether its log says so or NCCL_IB_HCA makes it so."""
    ports = [port for port in training_ports(site, host) if port.active and port.nic.device]
    ranks = job.on(host)
    used, because = _in_use(ports, ranks)
    left = [port for port in ports if port.nic.device not in used]
    carry = len(ports) - len(left)
    if not left or not carry or _suffice(site, host, ranks, carry):
        return None
    return Finding(
        subtype="too_few_nics",
        loci=tuple(port.locus for port in left),
        seen=f"{carry} of {len(ports)} ports are used",
        should=f"{len(ports)} ports: {listed(port.name for port in left)} can carry too",
        basis="observed",
        because=because,
        hosts=(host,),
        jobs=(job.name,),
        effect=share("nics", 1 - len(left) / len(ports)),
        remedy=f"Unset NCCL_IB_HCA, or let it name all: {','.join(port.nic.device or '' for port in ports)}",
        observed=carry,
        expected=len(ports),
        unit="ports",
    )


def _in_use(ports: Sequence[Port], ranks: Sequence[RankSeen]) -> tuple[set[str], str]:
    """Devices that ranks of a host use, and who says so; none where nobody does, or a rank may use all."""
    facts = [fact for rank in ranks for fact in rank.nccl if fact.nics and fact.network != "Socket"]
    if facts:
        return {name for fact in facts for name in fact.nics}, "NCCL's log names the ports that it uses"
    filters = {(rank.env or {}).get("NCCL_IB_HCA") or "" for rank in ranks if rank.env is not None}
    if "" in filters:
        return set(), ""
    used = {port.nic.device or "" for port in ports if any(is_chosen(port, each) for each in filters)}
    return used, f"NCCL_IB_HCA={listed(sorted(filters))}"


def _suffice(site: Site, host: str, ranks: Sequence[RankSeen], used: int) -> bool:
    """A port for each GPU, the others being for storage; or for each rank of a job that has a part of the node."""
    inventory = site.inventories[host]
    has_a_part = len(ranks) < len(inventory.gpus or ())
    return _are_enough(site, inventory, used) or (has_a_part and used >= len(ranks))


def is_chosen(port: Port, text: str) -> bool:
    """Whether NCCL_IB_HCA lets a port in: `mlx5` are beginnings of names, `=mlx5_0:1` names, `^` all but these."""
    without, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    names = [name.strip() for name in text.lstrip("^=").split(",") if name.strip()]
    return any(_matches(port.nic, name, exact=exact) for name in names) != without


def _matches(nic: Nic, name: str, *, exact: bool) -> bool:
    device, _, port = name.partition(":")
    same = nic.device == device if exact else (nic.device or "").startswith(device)
    return same and (not port or port == str(nic.port))


# -- how they are set up -----------------------------------------------------------------------------------------------


def mtu(site: Site) -> Iterator[Finding]:
    """Fewer bytes a packet than most of its kind; on a declared RoCE fabric, than RDMA's packets need."""
    roce = site.cluster is not None and site.cluster.fabric is not None and site.cluster.fabric.kind == "roce"
    for hosts in site.kin():
        yield from _small_of(site, hosts, roce=roce)


def _small_of(site: Site, hosts: Iterable[str], *, roce: bool) -> Iterator[Finding]:
    ports = [port for host in hosts for port in training_ports(site, host) if port.active and port.nic.mtu]
    models = {port.model for port in ports}
    usually = {model: usual(port.nic.mtu for port in ports if port.model == model) for model in models}
    for port in ports:
        now, most = port.nic.mtu or 0, usually[port.model]
        if most and most[0] and now < most[0]:
            yield _small(port, now, most[0], "siblings", f"as {most[1]} ports of its kind")
        elif roce and port.nic.link_layer == "Ethernet" and now < ROCE_MTU:
            yield _small(port, now, 9000, "hardware", "RoCE's packets of 4096 bytes need 4200, smaller ones cost 5 %")


def _small(port: Port, now: int, should: int, basis: str, because: str) -> Finding:
    return Finding(
        subtype="mtu",
        loci=(port.locus,),
        seen=f"MTU {now}",
        should=f"MTU {should}",
        basis="siblings" if basis == "siblings" else "hardware",
        because=because,
        hosts=(port.host,),
        # Headers take 2 % of packets of 4096 bytes and 7 % of those of 1024 (notes: 0.98 and 0.93). That of an IPoIB
        # interface is no limit of RDMA's packets.
        effect=Effect("rail", 0.95, 1.0, 0.93) if port.nic.link_layer == "Ethernet" else None,
        observed=now,
        expected=should,
        unit="bytes",
    )


def gids(site: Site) -> Iterator[Finding]:
    """RoCE v1 cannot be routed and is not marked: NCCL is to use an entry of version 2."""
    for host, _ in site.nodes():
        for port in training_ports(site, host):
            known = port.nic.gids if port.active and port.nic.link_layer == "Ethernet" else None
            if known and not any(_is_v2(gid.type) for gid in known):
                yield Finding(
                    subtype="gid",
                    loci=(port.locus,),
                    seen="no GID of RoCE v2",
                    should="a GID of RoCE v2",
                    basis="rule",
                    because="RoCE v1 is neither routed nor marked by switches; has the interface an address?",
                    hosts=(host,),
                )
    for job in site.ordered_jobs():
        asked = {(rank.host, (rank.env or {}).get("NCCL_IB_GID_INDEX", "")) for rank in job.ranks.values()}
        for host, index in sorted(asked):
            if host in site.inventories and index.isascii() and index.isdecimal() and len(index) < 4:
                yield from _chosen_gid(site, job, host, int(index))


def _chosen_gid(site: Site, job: JobSeen, host: str, index: int) -> Iterator[Finding]:
    for port in training_ports(site, host):
        known = {gid.index: gid.type for gid in port.nic.gids or ()}
        if port.active and port.nic.link_layer == "Ethernet" and known and not _is_v2(known.get(index)):
            right = [str(each) for each, kind in known.items() if _is_v2(kind)]
            yield Finding(
                subtype="gid",
                loci=(port.locus,),
                seen=f"NCCL_IB_GID_INDEX={index} is {known.get(index) or 'no entry of the table'}",
                should=f"an entry of RoCE v2: {listed(right)}" if right else "an entry of RoCE v2",
                basis="hardware",
                because="the port's GID table, which a flap or an address can renumber",
                hosts=(host,),
                jobs=(job.name,),
                remedy="Unset NCCL_IB_GID_INDEX: NCCL 2.21 and later find the entry by themselves.",
            )


def _is_v2(kind: str | None) -> bool:
    return kind is not None and "v2" in kind


def priorities(site: Site) -> Iterator[Finding]:
    """Where it can be seen: the class that the job asks for, and the priorities in which ports were paused."""
    fabric = site.cluster.fabric if site.cluster else None
    wanted = fabric.priority if fabric and fabric.kind == "roce" else None
    for job in site.ordered_jobs():
        asked = {(rank.env or {}).get("NCCL_IB_TC", "") for rank in job.ranks.values()}
        for text in sorted(asked):
            # A traffic class is the byte with the DSCP in its upper six bits, of which three are the priority.
            if (
                wanted is not None
                and text.isascii()
                and text.isdecimal()
                and len(text) < 4
                and int(text) < 256
                and int(text) >> 5 != wanted
            ):
                yield Finding(
                    subtype="pfc",
                    loci=("job",),
                    seen=f"NCCL_IB_TC={text} is priority {int(text) >> 5}",
                    should=f"priority {wanted}, as NCCL_IB_TC={(8 * wanted + 2) << 2}",
                    basis="declared",
                    because="declared in the cluster.toml; by the usual map of DSCP to priority, by eights",
                    hosts=job.hosts,
                    jobs=(job.name,),
                    remedy=f"Set NCCL_IB_TC={(8 * wanted + 2) << 2}, or what the switches map to priority {wanted}.",
                )
    yield from _paused(site, wanted)


def _paused(site: Site, wanted: int | None) -> Iterator[Finding]:
    """Flow control at work, in another priority than declared or than on most interfaces."""
    at = {
        where: frozenset(priority for priority, count in counts.items() if count)
        for where, counts in sorted(site.pauses.items())
    }
    at = {where: priorities for where, priorities in at.items() if priorities and _trains(site, *where)}
    most = usual(at.values())
    right = frozenset({wanted}) if wanted is not None else most[0] if most else None
    for (host, interface), seen in at.items():
        if right is not None and not seen & right:
            yield Finding(
                subtype="pfc",
                loci=(_of_interface(site, host, interface),),
                seen=f"paused in priority {_numbers(seen)}",
                should=f"priority {_numbers(right)}",
                basis="declared" if wanted is not None else "siblings",
                because="declared in the cluster.toml"
                if wanted is not None
                else f"as {most[1] if most else 0} interfaces",
                hosts=(host,),
            )


def _trains(site: Site, host: str, interface: str) -> bool:
    """Storage may have a priority of its own."""
    return host not in site.inventories or interface in {port.nic.netdev for port in training_ports(site, host)}


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


def _of_interface(site: Site, host: str, interface: str) -> str:
    inventory = site.inventories.get(host, NodeInventory())
    own = [nic for nic in inventory.nics or () if nic.netdev == interface]
    return nic_locus(host, own[0]) if own else f"nic:{host}/{interface}"


def netdevs(site: Site) -> Iterator[Finding]:
    """An interface that is down while its RDMA port is up, and most of its siblings' are up.

    RDMA itself goes on; what finds its peers by an address of the interface, as NCCL does, fails.
    """
    for host, inventory in site.nodes():
        ports = [port for port in candidates(host, inventory) if port.active and port.nic.netdev_state]
        most = usual(port.nic.netdev_state for port in ports)
        known = Counter(port.nic.netdev_state for port in ports)
        for port in ports:
            if most and most[0] == "ACTIVE" and port.nic.netdev_state == "DOWN":
                yield Finding(
                    subtype="netdev_down",
                    loci=(port.locus,),
                    seen=f"{port.nic.netdev} is down while its port is ACTIVE",
                    should="up",
                    basis="siblings",
                    because=f"as {most[1]} of the {known.total()} interfaces of RDMA ports on {host}",
                    hosts=(host,),
                    remedy=f"On {host}: ip link set {port.nic.netdev} up; dmesg | grep {port.nic.netdev}",
                )
