"""What should be true of these machines and is not: a lint over inventories, the cluster.toml, jobs and their settings.

    findings = check(Site({"n01": inventory}, cluster))

A check is a row of CHECKS. What is should be said somewhere: it was declared, most siblings have it, or the hardware's
own figures and the model's tables tell it. Where none of these speaks, nothing is found: it is unknown, not guessed.
What costs a job less than 2 % of its step, or what nobody can price, is latent: present, and no cause of a slowdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from diagnosd.analysis.topology import nodes, placement, ports, settings
from diagnosd.analysis.topology.cost import priced
from diagnosd.analysis.topology.finding import Finding, united
from diagnosd.analysis.topology.site import Site


class Check(NamedTuple):
    """`needs`: what it looks at, in the words in which it is told that this is not there."""

    subtypes: tuple[str, ...]
    find: Callable[[Site], Iterator[Finding]]
    needs: str


CHECKS = (
    Check(("link_rate_low",), ports.link_rate, "ports"),
    Check(("too_few_nics",), ports.too_few, "ports"),
    Check(("mtu",), ports.mtu, "ports"),
    Check(("gid",), ports.gids, "ports"),
    Check(("pfc",), ports.priorities, "pauses"),
    Check(("netdev_down",), ports.netdevs, "ports"),
    Check(("pcie_low",), nodes.pcie, "PCIe"),
    Check(("nvlink_missing",), nodes.nvlink, "NVLinks"),
    Check(("nic_affinity",), nodes.affinity, "nearness"),
    Check(("acs", "iommu"), nodes.peer_paths, "software"),
    Check(("power_limit",), nodes.power, "power"),
    Check(("persistence_off",), nodes.persistence, "software"),
    Check(("too_few_gpus", "other_gpu"), nodes.cards, "GPUs"),
    Check(("socket_fallback",), placement.sockets, "NCCL"),
    Check(("gdr_off",), placement.gdr, "NCCL"),
    Check(("wrong_interface",), placement.interfaces, "jobs"),
    Check(("oversubscription",), placement.oversubscription, "leaves"),
    Check(("layout",), placement.layout, "jobs"),
    Check(("environment",), settings.settings, "environment"),
    Check(("version_skew",), settings.skew, "software"),
)


def check(site: Site) -> list[Finding]:
    """What is wrong, each thing once, in an order that does not depend on that of hosts, ports or points."""
    found = [each for row in CHECKS for each in row.find(site)]
    return priced(site, united(found))
