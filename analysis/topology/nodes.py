"""What is inside of a node: PCIe, NVLink, how near a GPU is to a NIC, what stands in the way, power, persistence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from diagnosd.analysis.model import hardware
from diagnosd.analysis.model.hardware import PCIE, PCIE_COPIES, UnknownHardwareError, clock_share
from diagnosd.analysis.topology.finding import ALIKE, Effect, Finding, share, usual
from diagnosd.analysis.topology.ports import NEAR, candidates, training_ports
from diagnosd.analysis.topology.site import JobSeen, Site, gpu_locus
from diagnosd.documents import Gpu, Nic, NodeInventory

# NVLinks of a GPU, by the model's name for it (data sheets; an H800's and an A800's are 8 of those of the chip). Of a
# V100's six, its board decides how many are joined, and a part of a board may be rented: siblings tell.
NVLINKS: Mapping[str, int] = {
    "A100-SXM": 12,
    "A100-SXM-40GB": 12,
    "A800-SXM": 8,
    "H100-SXM": 18,
    "H800-SXM": 8,
    "H200-SXM": 18,
    "B200-SXM": 18,
    "GB200": 18,
}
# Words of `nvidia-smi topo -m`, the nearest first: beyond PHB, data leaves the bridge of its own root, and beyond NODE
# the socket.
NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")
FAR = ("SYS",)
# Of a NIC's rate, what is left across the sockets: 20 to 50 % are lost (notes/diagnosis.md 3).
ACROSS = Effect("rail", 0.65, 0.8, 0.5)

Lanes = tuple[int | None, int | None]  # generation and width


def known(name: str | None) -> hardware.Gpu | None:
    try:
        return hardware.gpu(name) if name else None
    except UnknownHardwareError:
        return None


def is_geforce(inventory: NodeInventory) -> bool:
    """Whether all its GPUs are of those whose driver has neither GPUDirect RDMA nor copies from peer to peer."""
    gpus = inventory.gpus or ()
    return bool(gpus) and all("GeForce" in (gpu.name or "") for gpu in gpus)


# -- PCIe --------------------------------------------------------------------------------------------------------------


def pcie(site: Site) -> Iterator[Finding]:
    """Links that run below what device and slot allow. An idle GPU lowers its own: of that only its width is told."""
    for host, inventory in site.nodes():
        gpus = inventory.gpus or ()
        feeds = max((port.rate or 0.0 for port in training_ports(site, host)), default=0.0)  # what a GPU's link feeds
        for gpu in gpus:
            yield from _link(host, gpu_locus(host, gpu), gpu, gpus, feeds)
        ports = [port for port in candidates(host, inventory) if port.active]
        for port in ports:
            alike = [other.nic for other in ports if other.model == port.model]
            yield from _link(host, port.locus, port.nic, alike, port.rate)
        yield from _below_declared(site, host, gpus)


def _link(host: str, locus: str, each: Gpu | Nic, alike: Sequence[Gpu | Nic], rate: float | None) -> Iterator[Finding]:
    now, best = (each.pcie_gen, each.pcie_width), _best(each)
    idles = isinstance(each, Gpu) and not each.pcie_busy
    most = usual(other.pcie_width for other in alike)
    lost = now[1] is not None and most is not None and (most[0] or 0) > now[1] and (best[1] or 0) > now[1]
    slots = usual((other.pcie_gen_slot, other.pcie_width_slot) for other in alike)
    slot, path = (each.pcie_gen_slot, each.pcie_width_slot), (each.pcie_gen_path, each.pcie_width_path)
    if _less(now, best) and not idles:
        because = "what both the device and its slot can do"
        yield _low(host, locus, "its link runs at", now, best, "hardware", because, rate)
    elif idles and lost and most:
        because = f"as {most[1]} of its kind on {host}, idle or not"
        yield _low(host, locus, "its link has", (None, now[1]), (None, most[0]), "siblings", because, rate)
    if _less((None, path[1]) if idles else path, best):  # a bridge of its board may lower with it
        because = "what the device and the slots above it can do"
        yield _low(host, locus, "the way to it leads over a link at", path, best, "hardware", because, rate)
    if slots and _less(slot, slots[0]) and _less(slot, (each.pcie_gen_max, each.pcie_width_max)):
        because = f"as {slots[1]} of its kind on {host}"
        yield _low(host, locus, "its slot allows no more than", slot, slots[0], "siblings", because, rate)


def _below_declared(site: Site, host: str, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The generation that GPUs should have, against what their slots allow at most, or what they run at under load."""
    wanted = site.cluster.node.pcie_gen if site.cluster and site.cluster.node else None
    for gpu in gpus:
        best = _best(gpu)
        if wanted and best[0] and best[0] < wanted:
            because = "declared in the cluster.toml"
            yield _low(
                host, gpu_locus(host, gpu), "it can do", (best[0], None), (wanted, None), "declared", because, None
            )


def _best(each: Gpu | Nic) -> Lanes:
    """What its link can do where it is plugged in."""
    gens = [gen for gen in (each.pcie_gen_max, each.pcie_gen_slot) if gen is not None]
    widths = [width for width in (each.pcie_width_max, each.pcie_width_slot) if width is not None]
    return min(gens, default=None), min(widths, default=None)


def _less(one: Lanes, other: Lanes) -> bool:
    return any(a is not None and b is not None and 0 < a < b for a, b in zip(one, other, strict=True))


def _low(
    host: str, locus: str, what: str, now: Lanes, should: Lanes, basis: str, because: str, rate: float | None
) -> Finding:
    """`rate`: Gbit/s of the port that the link feeds, which may be slower than even the lowered link."""
    ratio, carries = _ratio(now, should), _carries(now)
    effect = share("rail", min(1.0, carries / (rate / 8 * 1e9))) if rate and carries else None
    return Finding(
        subtype="pcie_low",
        loci=(locus,),
        seen=f"{what} {_words(now)}",
        should=_words(should),
        basis="declared" if basis == "declared" else "siblings" if basis == "siblings" else "hardware",
        because=because,
        hosts=(host,),
        effect=effect,
        observed=ratio,
        expected=1.0,
        unit="of its rate",
    )


def _words(lanes: Lanes) -> str:
    gen, width = lanes
    return ", ".join(filter(None, (f"generation {gen}" if gen else "", f"{width} lanes" if width else "")))


def _carries(lanes: Lanes) -> float | None:
    """Bytes a second of copies; generations 1 and 2 carry 250 and 500 MB/s a lane."""
    gen, width = lanes
    if not gen or not width:
        return None
    whole = PCIE.get(gen) or {1: 4e9, 2: 8e9}.get(gen)
    return whole * width / 16 * PCIE_COPIES if whole else None


def _ratio(now: Lanes, should: Lanes) -> float:
    speeds = 2.0 ** ((now[0] or 0) - (should[0] or 0)) if now[0] and should[0] else 1.0
    return speeds * (now[1] / should[1] if now[1] and should[1] else 1.0)


# -- NVLink ------------------------------------------------------------------------------------------------------------


def nvlink(site: Site) -> Iterator[Finding]:
    """Fewer NVLinks that are up, or slower ones, than declared, than the table of GPUs has, or than most siblings."""
    declared = site.cluster.node.nvlinks if site.cluster and site.cluster.node else None
    for host, inventory in site.nodes():
        gpus = inventory.gpus or ()
        for gpu in gpus:
            yield from _links(host, gpu, gpus, declared)
            speeds = usual(other.nvlink_gbytes_per_s for other in gpus if other.name == gpu.name)
            now, most = gpu.nvlink_gbytes_per_s, (speeds[0] if speeds else None)
            if now and most and speeds and 0 < now < 0.9 * most:
                yield _missing(
                    host, gpu, f"{now:g} GB/s a link", f"{most:g} GB/s", "siblings",
                    f"as {speeds[1]} of the GPUs of {host}", now / most,
                )  # fmt: skip
        yield from _fabric(host, inventory)


def _links(host: str, gpu: Gpu, gpus: Sequence[Gpu], declared: int | None) -> Iterator[Finding]:
    if gpu.nvlinks_active is None or gpu.nvlinks_active < 0 or gpu.mig or (len(gpus) == 1 and not gpu.nvlinks_active):
        return  # a single GPU, as clouds rent them, has nobody to be joined to
    kind = known(gpu.name)
    should, basis, because = _should(gpu, gpus, declared, kind)
    if should and gpu.nvlinks_active < should:
        seen = f"{gpu.nvlinks_active} NVLinks are active" if gpu.nvlinks_active else "no NVLink is active"
        part = gpu.nvlinks_active / should
        if not part and kind and kind.pcie_gen in PCIE:  # what is left then is PCIe
            part = PCIE[kind.pcie_gen] * PCIE_COPIES / kind.nvlink if kind.nvlink else 0.0
        yield _missing(host, gpu, seen, f"{should}", basis, because, part)


def _should(
    gpu: Gpu, gpus: Sequence[Gpu], declared: int | None, kind: hardware.Gpu | None
) -> tuple[int | None, str, str]:
    if declared:
        return declared, "declared", "declared in the cluster.toml"
    if kind and kind.name in NVLINKS and not _is_bridged(gpu):
        return NVLINKS[kind.name], "hardware", f"an {kind.name} has so many"
    most = usual(other.nvlinks_active for other in gpus if other.name == gpu.name)
    if most:
        return most[0], "siblings", f"as {most[1]} of the {len(gpus)} GPUs"
    return (gpu.nvlinks if gpu.nvlinks_active else None), "hardware", "as many as NVML says that it has"


def _is_bridged(gpu: Gpu) -> bool:
    """PCIe cards, which have NVLink where somebody bought the bridges: H100 NVL, H200 NVL."""
    return (gpu.name or "").upper().endswith(" NVL")


def _missing(host: str, gpu: Gpu, seen: str, should: str, basis: str, because: str, part: float) -> Finding:
    return Finding(
        subtype="nvlink_missing",
        loci=(gpu_locus(host, gpu),),
        seen=seen,
        should=should,
        basis="declared" if basis == "declared" else "siblings" if basis == "siblings" else "hardware",
        because=because,
        hosts=(host,),
        effect=share("nvlink", part) if part else None,
        observed=part,
        expected=1.0,
        unit="of NVLink",
    )


def _fabric(host: str, inventory: NodeInventory) -> Iterator[Finding]:
    """What the driver says of the NVLink fabric; parts without NVSwitch have none, and say nothing."""
    fabric = inventory.fabric
    if fabric is None:
        return
    ill = [word for word, good in ((fabric.state, "completed"), (fabric.status, "success"), (fabric.health, "healthy"))
           if word and word.lower() != good]  # fmt: skip
    if ill:
        yield Finding(
            subtype="nvlink_missing",
            loci=(f"host:{host}",),
            seen=f"the NVLink fabric is {', '.join(ill)}",
            should="completed, success, healthy",
            basis="observed",
            because="the driver says so",
            hosts=(host,),
            remedy=f"On {host}: systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A4 Fabric",
        )


# -- GPUs and NICs -----------------------------------------------------------------------------------------------------


def affinity(site: Site) -> Iterator[Finding]:
    """A GPU all of whose NICs are across the sockets, while other GPUs of its node have one beside them."""
    for host, inventory in site.nodes():
        near, gpus = inventory.affinity or {}, inventory.gpus or ()
        nics = {port.nic.device or "" for port in training_ports(site, host) if port.active}
        best = {name: _nearest(words, nics) for name, words in near.items()}
        if not any(word in (*NEAR, "PHB") for word in best.values()):
            continue
        far = [gpu for gpu in gpus if best.get(_name(gpu)) in FAR]
        others = sum(word in (*NEAR, "PHB") for word in best.values())
        if far:
            yield Finding(
                subtype="nic_affinity",
                loci=tuple(gpu_locus(host, gpu) for gpu in far),
                seen="each NIC is on another socket (SYS)",
                should="a NIC on its own socket",
                basis="siblings",
                because=f"as {others} of the {len(gpus)} GPUs of {host}",
                hosts=(host,),
                effect=ACROSS,
            )
    yield from _bound(site)


def _name(gpu: Gpu) -> str:
    return f"GPU{gpu.index}"


def _nearest(words: Mapping[str, str], nics: set[str]) -> str | None:
    told = [word for name, word in words.items() if name in nics and word in NEARNESS]
    return min(told, key=NEARNESS.index, default=None)


def _bound(site: Site) -> Iterator[Finding]:
    """Ranks that were given NICs, all of them further from their GPU than one that they were not given."""
    for job in site.ordered_jobs():
        for _, rank in sorted(job.ranks.items()):
            inventory = site.inventories.get(rank.host)
            gpu = next((each for each in (inventory.gpus if inventory else None) or () if each.uuid == rank.gpu), None)
            used = {name for fact in rank.nccl for name in fact.nics}
            if inventory is None or gpu is None or not used or len(job.hosts) < 2:
                continue
            words = (inventory.affinity or {}).get(_name(gpu), {})
            there = {port.nic.device or "" for port in training_ports(site, rank.host) if port.active}
            mine, best = _nearest(words, used), _nearest(words, there)
            right = sorted(name for name in there if words.get(name) == best)
            far = mine and best and NEARNESS.index(mine) >= NEARNESS.index("NODE") and best in (*NEAR, "PHB")
            if far and not _used_on(job, rank.host).isdisjoint(right):
                yield Finding(
                    subtype="nic_affinity",
                    loci=(gpu_locus(rank.host, gpu),),
                    seen=f"uses {', '.join(sorted(used))}, {mine} from it",
                    should=f"{', '.join(right)}, {best} from it",
                    basis="hardware",
                    because="the PCI tree",
                    hosts=(rank.host,),
                    jobs=(job.name,),
                    effect=ACROSS,
                    remedy=f"Let NCCL choose: unset NCCL_IB_HCA of rank {rank.rank} (nvidia-smi topo -m).",
                )


def _used_on(job: JobSeen, host: str) -> set[str]:
    """NICs that any rank uses: one that none does is missing, not given to another."""
    return {name for rank in job.on(host) for fact in rank.nccl for name in fact.nics}


def peer_paths(site: Site) -> Iterator[Finding]:
    """What sends a GPU's traffic with its NIC by way of the root: ACS of switches, and an IOMMU that translates."""
    for host, inventory in site.nodes():
        software, gpus = inventory.software, inventory.gpus
        if software is None or not gpus:
            continue
        if software.acs == "on":
            yield Finding(
                subtype="acs",
                loci=(f"host:{host}",),
                seen="ACS of the PCIe switches redirects",
                should="off",
                basis="rule",
                because="what a GPU sends to its NIC goes up to the root and back; only a VM needs that",
                hosts=(host,),
            )
        if software.iommu == "translated":
            yield Finding(
                subtype="iommu",
                loci=(f"host:{host}",),
                seen="the IOMMU translates the devices' addresses",
                should="pass-through (iommu=pt) or off",
                basis="rule",
                because="each transfer is looked up: 16 GPUs have fallen from 484 to 100 GB/s by it",
                hosts=(host,),
            )


# -- power and drivers -------------------------------------------------------------------------------------------------


def power(site: Site) -> Iterator[Finding]:
    """A limit below the default. Where every GPU has the same one it may be meant: that is said."""
    limited = {
        (host, at): (gpu.power_limit_w, gpu.power_limit_default_w)
        for host, inventory in site.nodes()
        for at, gpu in enumerate(inventory.gpus or ())
    }
    everywhere = len(set(limited.values())) == 1 and len(limited) >= ALIKE
    for host, inventory in site.nodes():
        for gpu in inventory.gpus or ():
            now, default = gpu.power_limit_w, gpu.power_limit_default_w
            if now and default and 0 < now < 0.99 * default:
                meant = "; all GPUs have it, so it may be meant" if everywhere else ""
                yield Finding(
                    subtype="power_limit",
                    loci=(gpu_locus(host, gpu),),
                    seen=f"{now:g} W",
                    should=f"{default:g} W",
                    basis="hardware",
                    because=f"its default, as NVML tells it{meant}",
                    hosts=(host,),
                    effect=share("clock", clock_share(now, default)),
                    remedy=f"nvidia-smi -pl {default:g} on these GPUs, unless power or cooling are short.",
                    observed=now,
                    expected=default,
                    unit="W",
                )


def persistence(site: Site) -> Iterator[Finding]:
    for host, inventory in site.nodes():
        if inventory.gpus and inventory.software and inventory.software.persistence is False:
            yield Finding(
                subtype="persistence_off",
                loci=(f"host:{host}",),
                seen="persistence mode is off",
                should="on",
                basis="rule",
                because="the driver leaves idle GPUs and takes seconds to come back, and settings are lost with it",
                hosts=(host,),
            )


def cards(site: Site) -> Iterator[Finding]:
    """GPUs that are fewer or others than declared, or that PCI lists and NVML does not know."""
    node = site.cluster.node if site.cluster else None
    for host, inventory in site.nodes():
        gpus = inventory.gpus or ()
        answering = [gpu for gpu in gpus if gpu.uuid]
        silent = [gpu for gpu in gpus if not gpu.uuid] if answering else []
        if silent:
            yield _fewer(host, silent, f"NVML does not know {len(silent)} of {len(gpus)} GPUs", f"{len(gpus)} GPUs",
                         "observed", "PCI lists them")  # fmt: skip
        elif node and node.gpus and gpus and len(gpus) < node.gpus:
            seen = f"{len(gpus)} GPUs"
            yield _fewer(host, (), seen, f"{node.gpus} GPUs", "declared", "declared in the cluster.toml")
        wanted = known(node.gpu) if node else None
        others = [gpu for gpu in gpus if gpu.name and wanted and _family(known(gpu.name)) != _family(wanted)]
        if node and others:
            yield Finding(
                subtype="other_gpu",
                loci=tuple(gpu_locus(host, gpu) for gpu in others),
                seen=", ".join(sorted({gpu.name or "" for gpu in others})),
                should=node.gpu or "",
                basis="declared",
                because="declared in the cluster.toml",
                hosts=(host,),
            )


def _family(kind: hardware.Gpu | None) -> str | None:
    return kind.name.removesuffix("-40GB") if kind else None


def _fewer(host: str, gpus: Sequence[Gpu], seen: str, should: str, basis: str, because: str) -> Finding:
    return Finding(
        subtype="too_few_gpus",
        loci=tuple(gpu_locus(host, gpu) for gpu in gpus) or (f"host:{host}",),
        seen=seen,
        should=should,
        basis="declared" if basis == "declared" else "observed",
        because=because,
        hosts=(host,),
    )
