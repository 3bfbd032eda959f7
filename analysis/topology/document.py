"""A finding as a diagnosis of the contract (telemetry.md 7), and what could not be checked, in words."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from diagnosd.analysis.causes import CAUSES
from diagnosd.analysis.figures import percent
from diagnosd.analysis.topology.cost import Model
from diagnosd.analysis.topology.finding import Cost, Finding, listed
from diagnosd.analysis.topology.ports import candidates, declared_ports
from diagnosd.analysis.topology.site import JobSeen, Site, gpu_locus, nic_locus
from diagnosd.documents import NodeInventory, Software

CAUSE = CAUSES["topology_misconfiguration"]
IMPACT = 0.02  # of a step: what costs less is present, and no cause of a slowdown (notes/diagnosis.md 2.4)
# How sure one may be that it should be otherwise, by how that is known. Set by hand: no labelled misconfigurations are
# published that these could be measured on.
CONFIDENCE = {"declared": 0.95, "observed": 0.95, "hardware": 0.9, "siblings": 0.85, "rule": 0.8}
# Such as cost a step nothing by themselves.
HOUSEKEEPING = ("persistence_off", "power_limit", "version_skew", "environment", "mtu")


def is_latent(finding: Finding) -> bool:
    """Whether nobody knows what it costs, or that it costs less than what counts."""
    return finding.cost is None or finding.cost.slowdown < 1 + IMPACT


def severity(finding: Finding) -> str:
    """A fault that costs, or of which nobody knows what it costs, is somebody's work; the rest is information."""
    if finding.cost is not None:
        return "info" if is_latent(finding) else "ticket"
    return "info" if finding.subtype in HOUSEKEEPING else "ticket"


def title(finding: Finding) -> str:
    return CAUSE.subtypes[finding.subtype].title


def remedy(finding: Finding) -> str:
    """What to type, for the first place where it was found."""
    if finding.remedy:
        return finding.remedy
    first = finding.loci[0]
    place = first.partition(":")[2]
    host = (
        place.partition("/")[0] if first.startswith(("host:", "nic:", "gpu:")) else next(iter(finding.hosts), "a host")
    )
    nic = place.partition("/")[2].partition("/")[0] if first.startswith("nic:") else "the port"
    return CAUSE.subtypes[finding.subtype].next.replace("{host}", host).replace("{nic}", nic)


def costs(finding: Finding) -> str:
    """In words, with the interval."""
    cost = finding.cost
    if cost is None:
        return "not known (latent)"
    if is_latent(finding):
        return f"{cost.job}: {percent(cost.slowdown - 1)} of a step, by the model (latent)"
    return f"{cost.job}: {cost.slowdown:.2f} x the step ({cost.low:.2f} to {cost.high:.2f}), by the model"


def document(finding: Finding, site: Site, cluster: str) -> dict[str, Any]:
    """Without times: it is so, whenever it became so. Keys that do not apply are missing."""
    cost, latent = finding.cost, is_latent(finding)
    job = cost.job if cost else next(iter(finding.jobs), None)
    about = (cluster, job, CAUSE.code, finding.subtype, finding.loci, finding.seen)  # a job has many settings
    victims = sorted({each.name for each in site.ordered_jobs() if _touches(finding, each)})
    told: dict[str, Any] = {
        "type": "diagnosis",
        "id": sha256(repr(about).encode()).hexdigest()[:12],
        "revision": 1,
        "cluster": cluster,
        "job": job,
        "cause": CAUSE.code,
        "subtype": finding.subtype,
        "state": "latent" if latent else "confirmed",
        "severity": severity(finding),
        "owner": CAUSE.subtypes[finding.subtype].owner,
        "confidence": CONFIDENCE[finding.basis],
        "lost_gpu_seconds": 0.0 if latent else None,
        **(_of_cost(cost) if cost else {}),
        "basis": finding.basis,
        "locus": list(finding.loci),
    }
    told = {key: value for key, value in told.items() if value is not None}
    told["assets"] = [asset for locus in finding.loci if (asset := _asset(site, locus))]
    told["parent"] = None
    told["victims"] = {"ranks": sum(len(site.jobs[name].ranks) for name in victims), "jobs": victims}
    told["sources"], told["missing"] = list(_sources(site)), []
    told["evidence"] = [_evidence(finding)]
    told["alternatives"] = []
    sentence = f"{title(finding)}: {finding.seen}; it should be {finding.should} ({finding.because})"
    return {**told, "next": remedy(finding), "text": f"{sentence[0].upper()}{sentence[1:]}."}


def _of_cost(cost: Cost) -> dict[str, Any]:
    return {
        "slowdown": round(cost.slowdown, 3),
        "slowdown_interval": [round(cost.low, 3), round(cost.high, 3)],
        "fix_gain": round(1 - 1 / cost.slowdown, 3),
        "baseline": {"from": "model"},
    }


def _evidence(finding: Finding) -> dict[str, Any]:
    known = {
        "metric": title(finding),
        "subject": finding.loci[0],
        "observed": finding.observed,
        "expected": finding.expected,
        "unit": finding.unit,
        "supports": True,
        "text": f"{finding.seen}; should be {finding.should}: {finding.because}",
    }
    return {key: value for key, value in known.items() if value is not None}


def _touches(finding: Finding, job: JobSeen) -> bool:
    return job.name in finding.jobs if finding.jobs else not set(finding.hosts).isdisjoint(job.hosts)


def _sources(site: Site) -> Iterator[str]:
    if site.cluster is not None:
        yield "diagnosd_cluster"
    yield "diagnosd_node"
    if site.jobs:
        yield from ("diagnosd_job", "diagnosd_rank")
    if any(rank.nccl for job in site.jobs.values() for rank in job.ranks.values()):
        yield "diagnosd_nccl"


def _asset(site: Site, locus: str) -> dict[str, Any]:
    """Hardware as a ticket needs it."""
    kind, _, place = locus.partition(":")
    host = place.partition("/")[0]
    inventory = site.inventories.get(host, NodeInventory())
    for nic in inventory.nics or () if kind == "nic" else ():
        if nic_locus(host, nic) == locus:
            peer = nic.peer
            known = {
                "host": host, "nic": nic.device or nic.netdev, "port": nic.port, "pci": nic.pci,
                "port_guid": nic.port_guid, "peer_switch": peer and peer.switch, "peer_port": peer and peer.port,
            }  # fmt: skip
            return {key: value for key, value in known.items() if value is not None}
    for gpu in inventory.gpus or () if kind == "gpu" else ():
        if gpu_locus(host, gpu) == locus:
            known = {"host": host, "gpu": gpu.uuid, "index": gpu.index, "serial": gpu.serial, "pci": gpu.pci}
            return {key: value for key, value in known.items() if value is not None}
    return {"host": host} if kind == "host" else {}


# -- what could not be checked -----------------------------------------------------------------------------------------


def unchecked(site: Site) -> Iterator[tuple[str, str]]:
    """What was not looked at, and what it would take."""
    if site.cluster is None:
        yield "what was declared", "no cluster.toml (--cluster FILE): only siblings and hardware can be compared"
    if not site.jobs:
        yield "jobs", "none seen: no layout, no NCCL_* settings and no costs; a recording (PATH) has them"
    if len(site.inventories) < 3:
        count = len(site.inventories)
        yield "other hosts", f"{count} {'host' if count == 1 else 'hosts'}: too few to say what most of them have"
    yield from _of_nodes(site)
    yield from _of_jobs(site)


def _of_nodes(site: Site) -> Iterator[tuple[str, str]]:
    nodes = dict(site.nodes())
    with_gpus = {host: each for host, each in nodes.items() if each.gpus}
    idle = [host for host, each in with_gpus.items() if not any(gpu.pcie_busy for gpu in each.gpus or ())]
    if idle:
        yield "PCIe of GPUs under load", f"no GPU of {listed(idle)} was seen at work: idle ones lower their links"
    dark = [host for host, each in with_gpus.items() if all(gpu.nvlinks_active is None for gpu in each.gpus or ())]
    if dark:
        yield "NVLinks", f"{listed(dark)}: NVML tells them, and did not"
    blind = [
        host for host, each in with_gpus.items() if any(nic.device for nic in each.nics or ()) and not each.affinity
    ]
    if blind:
        yield "nearness of GPUs and NICs", f"{listed(blind)}: the PCI tree does not tell it"
    software = {host: each.software or Software() for host, each in with_gpus.items()}
    if unseen := [host for host, each in software.items() if each.acs is None]:
        yield "ACS", f"{listed(unseen)}: switches show it to root alone, or there is no switch"
    if unseen := [host for host, each in software.items() if each.iommu is None]:
        yield "IOMMU", f"{listed(unseen)}: /sys/kernel/iommu_groups does not tell it"
    bare = [host for host, each in nodes.items() if not any(nic.device for nic in each.nics or ())]
    if bare:
        yield "RDMA ports", f"{listed(bare)}: none is to be seen"
    mixed = [host for host, each in nodes.items() if _is_mixed(site, host, each)]
    if mixed:
        yield "roles of ports", f"{listed(mixed)}: nobody declares which ports carry training (fabric.interface)"


def _is_mixed(site: Site, host: str, inventory: NodeInventory) -> bool:
    """Whether its RDMA ports are of several models, and nobody says what each is for."""
    models = {port.model for port in candidates(host, inventory)}
    return len(models) > 1 and not declared_ports(site, host, inventory)


def _may_use_nccl(job: JobSeen) -> bool:
    return any(rank.gpu or "nccl" in rank.versions for rank in job.ranks.values())


def _told_by_nccl(job: JobSeen) -> bool:
    return any(rank.nccl for rank in job.ranks.values())


def _of_jobs(site: Site) -> Iterator[tuple[str, str]]:
    jobs = site.ordered_jobs()
    mute = [job.name for job in jobs if all(rank.env is None for rank in job.ranks.values())]
    if mute:
        yield "NCCL_* settings", f"{listed(mute)}: its ranks did not tell their environment (diagnosd run)"
    silent = [job.name for job in jobs if len(job.hosts) > 1 and _may_use_nccl(job) and not _told_by_nccl(job)]
    if silent:
        yield "transports", f"{listed(silent)}: no facts from NCCL's log (NCCL_DEBUG=INFO)"
    for job in jobs:
        if why_not := Model(site, job).why_not:
            yield f"costs for {job.name}", why_not
