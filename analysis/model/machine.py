"""The machines that a job runs on, as far as they are known: what operators declare, and what the inventories show.

What was declared is what should be; where the inventory shows less, the expectation is still made for what should be,
and the difference is told (`differences`): it is a finding, not an excuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.model.collectives import Group, factor
from diagnosd.analysis.model.hardware import (
    FABRICS,
    OFFLOADED,
    PCIE_RING,
    Fabric,
    Gpu,
    UnknownHardwareError,
    clock_share,
    gpu,
)
from diagnosd.analysis.model.workload import ModelError
from diagnosd.documents import ClusterSpec, Nic, NodeInventory

Quantity = float | npt.NDArray[np.float64]  # of one machine, or of many at once: everything here is broadcast

GDR_OFF = 0.4  # of a NIC's rate, where data goes by way of the CPU's memory: 20 to 60 % (notes/model.md 2.10)


@dataclass(frozen=True, slots=True)
class Machine:
    """One node and its fabric. Shares are of what the hardware could do: 1 is healthy."""

    gpu: Gpu
    gpus: int
    nics: Quantity
    nic_rate: Quantity  # bit/s of a port
    fabric: Fabric
    oversubscription: Quantity = 1.0
    crossing: Quantity = 1.0  # of a group's traffic, what crosses the oversubscribed tier
    sharp: bool = False
    clock: Quantity = 1.0  # of the SM clock
    rail: Quantity = 1.0  # of the slowest rail's rate
    nvlink: Quantity = 1.0  # of NVLink's bandwidth
    gdr: bool = True

    @property
    def injection(self) -> Quantity:
        """Bytes a second that a node can send into the network."""
        tier = np.maximum(1.0, self.oversubscription * np.asarray(self.crossing))
        gdr = 1.0 if self.gdr or self.fabric.kind == "ethernet" else GDR_OFF  # sockets never reach the GPU's memory
        return self.nics * self.nic_rate / 8 * self.fabric.share * self.rail * gdr / tier

    @property
    def joined(self) -> int:
        """GPUs that NVLink joins: those of a node, or of a rack."""
        return max(self.gpus, self.gpu.scale_up if self.gpu.scale_up > 8 else 0)

    @property
    def inside(self) -> Quantity:
        """Busbw of a ring on the node, bytes a second."""
        return self.gpu.ring * self.nvlink

    def share_of(self, group: Group) -> Quantity:
        """Of the node's injection rate, what a group has to itself while its sisters on the node run too."""
        return self.injection * (group.per_node / self.gpus)

    def depth(self, group: Group) -> float:
        return OFFLOADED if group.nodes == 1 else self.fabric.depth

    def all_reduce_rate(self, group: Group) -> Quantity:
        """As ring_rate; where the network's switches add up, a node sends its data once and not twice."""
        if group.nodes == 1 or not self.sharp:
            return self.ring_rate(group)
        return np.minimum(self.gpu.nvls or self.inside, self.share_of(group) * factor("all_reduce", group.ranks))

    def ring_rate(self, group: Group) -> Quantity:
        """Busbw of large messages in this group, with all groups of the node at work."""
        return self.inside if group.nodes == 1 else np.minimum(self.inside, self.share_of(group))


def declared(cluster: ClusterSpec, inventories: Mapping[str, NodeInventory] | None = None) -> Machine | None:
    """From what the operators declare, gaps filled from the inventories; None where not even the GPU is known."""
    node, fabric = cluster.node, cluster.fabric
    nodes = list((inventories or {}).values())
    name = (node.gpu if node else None) or _gpu_seen(nodes)
    if name is None:
        return None
    try:
        kind = gpu(name)
    except UnknownHardwareError as error:
        raise ModelError("node.gpu", name, error.allowed) from error
    ports = [compute_ports(each) for each in nodes]
    rate = (node.nic_rate_gbps if node else None) or (fabric.rate_gbps if fabric else None) or _most(ports)
    nics = (node.nics if node else None) or max((len(each) for each in ports), default=0) or None
    if node is not None and node.gpus == 0:
        raise ModelError("node.gpus", 0, "a number above 0")
    network = (fabric.kind if fabric else None) or "infiniband"
    if network not in FABRICS:
        raise ModelError("fabric.kind", network, ", ".join(FABRICS))
    return Machine(
        gpu=kind,
        gpus=(node.gpus if node else None) or max((len(each.gpus or ()) for each in nodes), default=0) or 8,
        nics=float(nics or 0),
        nic_rate=(rate or 0.0) * 1e9,
        fabric=FABRICS[network],
        oversubscription=(fabric.oversubscription if fabric else None) or 1.0,
        sharp=bool(fabric and fabric.sharp),
        clock=max((_clock(each) for each in nodes), default=1.0),  # a limit that all hosts have is meant
    )


def check_dtype(gpu: Gpu, dtype: str) -> None:
    """ModelError where the GPU does not compute in it."""
    if gpu.peak(dtype) is None:
        raise ModelError("dtype", dtype, f"bf16: an {gpu.name} has no FP8")


def compute_ports(inventory: NodeInventory) -> list[Nic]:
    """Ports that training may use: RDMA devices that are up, and not for storage or management."""
    return [
        nic
        for nic in inventory.nics or ()
        if nic.device and nic.role not in ("storage", "management") and nic.rate_gbps and nic.netns != "other"
    ]


def _gpu_seen(nodes: Sequence[NodeInventory]) -> str | None:
    return next((card.name for node in nodes for card in node.gpus or () if card.name), None)


def _most(ports: Sequence[Sequence[Nic]]) -> float | None:
    return max((nic.rate_gbps or 0.0 for each in ports for nic in each), default=None)


def _clock(node: NodeInventory) -> float:
    shares = [clock_share(card.power_limit_w, card.power_limit_default_w) for card in node.gpus or ()]
    return min(shares, default=1.0)


@dataclass(frozen=True, slots=True)
class Difference:
    """Between what should be on a host, as was declared or as its siblings have it, and what its inventory shows."""

    host: str
    key: str
    should: str
    shown: str
    because: str = "as declared"

    @property
    def text(self) -> str:
        return f"{self.host}: {self.key} should be {self.should} {self.because}, the machine shows {self.shown}"


def differences(cluster: ClusterSpec, inventories: Mapping[str, NodeInventory]) -> tuple[Difference, ...]:
    best = max((_clock(each) for each in inventories.values()), default=1.0)
    found: list[Difference] = []
    for host in sorted(inventories):
        found.extend(_differences(cluster, host, inventories[host]))
        found.extend(_capped(host, inventories[host], best))
    return tuple(found)


def _capped(host: str, inventory: NodeInventory, best: float) -> Iterator[Difference]:
    """A power limit that the other hosts do not have."""
    if _clock(inventory) < best:
        worst = min(inventory.gpus or (), key=lambda card: clock_share(card.power_limit_w, card.power_limit_default_w))
        should = f"{worst.power_limit_default_w:g} W" if best == 1.0 else "higher"
        yield Difference(host, "power limit", should, f"{worst.power_limit_w:g} W", "as on other hosts")


def _differences(cluster: ClusterSpec, host: str, inventory: NodeInventory) -> Iterator[Difference]:
    node = cluster.node
    if node is None:
        return
    cards = inventory.gpus or ()
    if node.gpus and cards and len(cards) != node.gpus:
        yield Difference(host, "node.gpus", str(node.gpus), str(len(cards)))
    if node.gpu:
        for name in sorted({card.name for card in cards if card.name}):
            if _known(name) != _known(node.gpu):
                yield Difference(host, "node.gpu", node.gpu, name)
    ports = compute_ports(inventory)
    if node.nics and inventory.nics is not None and len(ports) < node.nics:
        yield Difference(host, "node.nics", str(node.nics), f"{len(ports)} that are up")
    rate = node.nic_rate_gbps or (cluster.fabric.rate_gbps if cluster.fabric else None)
    slow = sorted({nic.rate_gbps for nic in ports if rate and nic.rate_gbps and nic.rate_gbps < rate})
    for shown in slow:
        yield Difference(host, "node.nic_rate_gbps", f"{rate:g}", f"{shown:g}")
    links = [card.nvlinks_active for card in cards if card.nvlinks_active is not None]
    if node.nvlinks and links and min(links) < node.nvlinks:
        yield Difference(host, "node.nvlinks", str(node.nvlinks), f"{min(links)} active")
    lanes = [card.pcie_gen for card in cards if card.pcie_gen and card.pcie_busy]
    if node.pcie_gen and lanes and min(lanes) < node.pcie_gen:
        yield Difference(host, "node.pcie_gen", str(node.pcie_gen), str(min(lanes)))


def _known(name: str) -> str:
    try:
        return gpu(name).name.removesuffix("-40GB")
    except UnknownHardwareError:
        return name


def over_pcie(machine: Machine) -> float:
    """Busbw of a ring on the node where NVLink is not used, as a share of what it is with NVLink."""
    return PCIE_RING[machine.gpu.pcie_gen] / machine.gpu.ring
