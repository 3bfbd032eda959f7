"""What collectives cost: NCCL's algorithms in the alpha-beta form, and the three constants that published curves need.

Sizes S are as nccl-tests counts them: the whole array for all-gather and reduce-scatter. Rates are bytes a second and
direction. alpha + S/B through a curve's ends is up to four times wrong between 1 and 256 MiB, where gradient buckets
lie; a term in the root of S, the filling of a pipeline of chunks of the best size, mends that (notes/model.md 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import Literal

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Algorithm = Literal["ring", "tree", "double_tree", "collnet", "nvls", "nvlstree", "pat"]
Protocol = Literal["LL", "LL128", "Simple"]


def factor(op: Op, ranks: int) -> float:
    """What algbw is multiplied by to give busbw (nccl-tests, PERFORMANCE.md)."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if op in ("broadcast", "send") else (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Group:
    """`ranks` on `nodes`, at most `per_node` on one: how a communicator lies on the machines."""

    ranks: int
    nodes: int
    per_node: int

    @classmethod
    def spread(cls, ranks: int, stride: int, gpus: int) -> Group:
        """Of ranks that are `stride` apart, on nodes of so many GPUs."""
        per_node = max(1, min(ranks, gpus // stride))
        return cls(ranks, ceil(ranks / per_node), per_node)


# -- latency: NCCL's own estimates -------------------------------------------------------------------------------------

# Microseconds, LL, LL128, Simple (NCCL 2.30, src/graph/tuning.cc).
_COLUMNS: dict[Protocol, int] = {"LL": 0, "LL128": 1, "Simple": 2}
_START = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
_NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "pat": (4.0, 4.0, 4.0)}
_NETWORK = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "pat": (14.0, 14.0, 14.0)}
_POST = 1.0  # what posting a message to a NIC takes at least on Intel hosts; three times as much for Simple
_SWITCH = {"collnet": (3.7, 31.0), "nvls": (25.0, 18.0), "nvlstree": (25.0, 20.9)}  # NVLink, network: Simple only


def latency(
    algorithm: Algorithm,
    group: Group,
    protocol: Protocol = "Simple",
    op: Op = "all_reduce",
    plugin: float = 0.0,
) -> float:
    """Seconds of the smallest message. `plugin`: what a network plugin adds to each hop."""
    if algorithm in _SWITCH:
        inside, network = _SWITCH[algorithm][0], _SWITCH[algorithm][1] + plugin * 1e6
        rounds = 0 if group.nodes == 1 else 1 if algorithm != "nvlstree" else 2 * ceil(log2(group.nodes))
        return (inside + rounds * network) * 1e-6
    column = _COLUMNS[protocol]
    kind = "tree" if algorithm in ("tree", "double_tree") else algorithm
    start, hop, net = _START[kind][column], _NVLINK[kind][column], _NETWORK[kind][column] + plugin * 1e6
    passes = 2 if op == "all_reduce" else 1
    if kind == "ring":
        steps, across = passes * (group.ranks - 1), passes * (group.nodes - 1)
        if group.nodes > 1:
            hop = max(hop, _POST * (3 if protocol == "Simple" else 1))
        return (start + (steps - across) * hop + across * net) * 1e-6
    levels = log2(group.nodes)
    if kind == "tree" and group.nodes > 2:
        levels = ceil(levels)
    return (start + passes * ((group.per_node - 1) * hop + levels * net)) * 1e-6


# -- cost --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """t(S) = alpha + ramp x sqrt(S) + factor x S / rate."""

    alpha: float  # s
    ramp: float  # s / sqrt(byte)
    factor: float
    rate: float  # bytes/s: busbw of very large messages

    def seconds(self, size: float) -> float:
        return self.alpha + self.ramp * sqrt(size) + self.factor * size / self.rate

    def later(self, by: float) -> Cost:
        """With a latency that is so many times as long, and the chunk pipeline's with it."""
        return Cost(self.alpha * by, self.ramp * sqrt(by), self.factor, self.rate)

    def busbw(self, size: float) -> float:
        return self.factor * size / self.seconds(size)


def cost(op: Op, group: Group, alpha: float, depth: float, rate: float) -> Cost:
    """`depth`: latency of the chunk pipeline over alpha. With chunks of the best size, filling it takes
    2 sqrt(depth x alpha x S / rate).
    """
    return Cost(alpha, 2 * sqrt(depth * alpha / rate), factor(op, group.ranks), rate)


def ideal(algorithm: Algorithm, op: Op, group: Group, size: float, rate: float) -> float:
    """Seconds for the bytes alone, all links of one rate (notes/model.md 2.2)."""
    n, k = group.ranks, group.nodes
    if algorithm == "tree":  # an inner node sends up once and down twice
        return 3 * size / rate
    if algorithm == "double_tree":  # each node is inner in one half and leaf in the other; of two, each is a root
        return (1 if k == 2 else 2) * size / rate
    if algorithm == "collnet":
        return size / rate
    if algorithm == "nvls":
        return size * (n + 1) / n / rate
    if algorithm == "pat":
        return factor(op, n) * size / (0.75 * rate)
    return factor(op, n) * size / rate


def nic_bytes(algorithm: Algorithm, op: Op, group: Group, size: float) -> float:
    """Bytes that each node sends into the network: over S and the groups of a node it tells which algorithm ran."""
    n, k, g = group.ranks, group.nodes, group.per_node
    if k == 1:
        return 0.0
    if op == "all_to_all":
        return g * size * (n - g) / n
    if algorithm == "collnet":
        return size
    if algorithm in ("tree", "double_tree", "nvlstree"):
        return (1 if k == 2 else 2) * size
    return factor(op, n) * size


def crossover(slow_start: tuple[float, float], quick_start: tuple[float, float]) -> float:
    """Bytes from which the first of two (latency, rate) wins, the one that starts later and has the higher rate."""
    (ring_s, ring_rate), (tree_s, tree_rate) = slow_start, quick_start
    return (ring_s - tree_s) / (1 / tree_rate - 1 / ring_rate)


# -- what the machines allow -------------------------------------------------------------------------------------------


def topology_factor(group: Group, *, tree: bool) -> float:
    """Busbw over the node's injection rate: of two nodes a tree carries S where a ring carries 2 (n-1)/n S.

    That is why tests of two nodes look too good: 1.875 with 16 ranks.
    """
    return factor("all_reduce", group.ranks) if tree and group.nodes == 2 else 1.0


def bound(op: Op, group: Group, inside: float, node: float, *, tree: bool = True, sharp: bool = False) -> float:
    """Busbw that no large message exceeds. `inside`: of a node's links; `node`: what its NICs inject, for the group."""
    if group.nodes == 1:
        return inside
    if op == "all_to_all":  # each of the node's ranks has its share of the NICs, and keeps what stays on the node
        return min(inside, node / group.per_node * (group.ranks - 1) / (group.ranks - group.per_node))
    across = 1.0
    if op == "all_reduce":
        across = factor(op, group.ranks) if sharp else topology_factor(group, tree=tree)
    return min(inside, node * across)


TREE_SHARE = 0.92  # of a ring's rate, from three nodes on (NCCL's tuner)


def all_reduce(
    group: Group, ring: float, switch: float | None, node: float, plugin: float = 0.0, depth: float = 0.3
) -> tuple[Cost, ...]:
    """What NCCL can choose from. `ring`, `switch`: busbw inside a node without and with NVLink's switch adding up, None
    where it does not; `node`: bytes a second that the group's NICs inject on each node.
    """
    inner = 0.3 if group.nodes == 1 else depth

    def priced(algorithm: Algorithm, rate: float) -> Cost:
        return cost("all_reduce", group, latency(algorithm, group, plugin=plugin), inner, rate)

    inside = switch or ring
    found = [priced("ring", bound("all_reduce", group, ring, node, tree=False))]
    if group.nodes == 1:
        return (priced("nvls", switch), *found) if switch else tuple(found)
    share = 1.0 if group.nodes == 2 else TREE_SHARE
    found.append(priced("tree", share * bound("all_reduce", group, inside, node)))
    if switch and not plugin:
        found.append(priced("nvlstree", bound("all_reduce", group, switch, node)))
    return tuple(found)


def seconds(choices: tuple[Cost, ...], size: float) -> float:
    """With the best choice for this size."""
    return min(choice.seconds(size) for choice in choices)


def slowest_rail(shares: tuple[float, ...]) -> float:
    """NCCL cuts S evenly over channels, each bound to a NIC: one of eight rails at 0.25 makes it all 0.25."""
    return min(shares)
