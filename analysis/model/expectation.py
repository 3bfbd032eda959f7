"""What is expected of a job on its machines, from the documents that say what both are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import hypot, inf

import numpy as np

from diagnosd.analysis.model import traffic
from diagnosd.analysis.model.collectives import Group, Op, bound
from diagnosd.analysis.model.constants import SHIPPED, Constants
from diagnosd.analysis.model.flops import Convention
from diagnosd.analysis.model.machine import Difference, Machine, check_dtype, declared, differences
from diagnosd.analysis.model.step import SPREADS, Step, step, usable, variance, z
from diagnosd.analysis.model.upkeep import read_rate
from diagnosd.analysis.model.workload import Assumed, TooLittleKnownError, Workload, read
from diagnosd.documents import ClusterSpec, JobSpec, NodeInventory

# Of the bound that the topology sets, what large messages of a healthy network reach (notes/model.md 1.1, 0-26).
HEALTHY_BUSBW = (0.80, 0.90, 1.0)
CONVENTIONS: tuple[Convention, ...] = ("full", "causal")
UNKNOWN_NETWORK = 0.15  # sigma in ln of a step whose network nobody declared: it is left out


@dataclass(frozen=True, slots=True)
class Estimate:
    """With its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, sigma: float) -> Estimate:
        wide = float(np.exp(z() * sigma))
        return cls(value, value / wide, value * wide)

    def into(self, amount: float) -> Estimate:
        """A rate: this amount over these seconds."""
        return Estimate(amount / self.value, amount / self.high, amount / self.low)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Seconds, bytes and bytes a second. What cannot be known from what was given is None, or not in a mapping."""

    workload: Workload
    machine: Machine
    ranks: int
    step: Estimate
    terms: Mapping[str, Estimate]
    nic_bytes: Estimate | None  # a step and port, sent
    nvlink_bytes: Estimate | None  # a step and GPU, sent
    busbw: Mapping[str, Estimate]  # of large messages in each kind of group
    read_rate: Estimate | None
    hidden_margin: Estimate | None  # how many times slower the network may be before it is no longer hidden
    mfu: Mapping[str, Estimate]  # by convention
    assumed: tuple[Assumed, ...]
    differences: tuple[Difference, ...] = ()  # between what was declared and what the inventories show

    @property
    def tokens_per_second(self) -> Estimate:
        return self.step.into(self.workload.tokens)


def expect(
    job: JobSpec,
    cluster: ClusterSpec,
    inventories: Mapping[str, NodeInventory] | None = None,
    ranks: int | None = None,
    constants: Constants = SHIPPED,
) -> Expectation:
    """ModelError where what was given cannot be, TooLittleKnownError where it does not suffice."""
    machine = declared(cluster, inventories)
    if machine is None:
        raise TooLittleKnownError("no step time can be expected without node.gpu, the name of the GPU")
    world = ranks or (len(job.ranks) if job.ranks else None)
    work, assumed = read(job, world, newer=machine.gpu.newer)
    spec = job.data.bytes_per_sample if job.data else None
    found = overview(work, machine, assumed, spec, constants)
    return replace(found, differences=differences(cluster, inventories or {}))


def overview(
    work: Workload,
    machine: Machine,
    assumed: tuple[Assumed, ...] = (),
    bytes_per_sample: float | None = None,
    constants: Constants = SHIPPED,
) -> Expectation:
    """As expected(), of machines of whose network maybe nothing is known."""
    check_dtype(machine.gpu, work.dtype)
    machine, gaps = _with_network(machine, work)
    return expected(work, machine, constants, (*assumed, *gaps), bytes_per_sample)


def expected(
    work: Workload,
    machine: Machine,
    constants: Constants = SHIPPED,
    assumed: tuple[Assumed, ...] = (),
    bytes_per_sample: float | None = None,
) -> Expectation:
    one = step(work, machine, constants)
    seconds = float(one.total)
    sigma = step_sigma(one, constants, assumed)
    whole = Estimate.within(seconds, sigma)
    ranks = work.layout.world
    terms = {
        name: Estimate.within(float(value), hypot(SPREADS[name] * constants.spread, _doubt(assumed)))
        for name, value in one.terms.items()
    }
    flops = {name: work.training(name) for name in CONVENTIONS}
    peak = ranks * (machine.gpu.peak(work.dtype) or machine.gpu.bf16)
    into_network, inside = _bytes(work, machine)
    return Expectation(
        workload=work,
        machine=machine,
        ranks=ranks,
        step=whole,
        terms=terms,
        nic_bytes=into_network,
        nvlink_bytes=inside,
        busbw=_busbw(work, machine),
        read_rate=whole.into(read_rate(work.batch, bytes_per_sample, 1.0)) if bytes_per_sample else None,
        hidden_margin=_margin(one, constants, work),
        mfu={name: whole.into(amount / peak) for name, amount in flops.items()},
        assumed=assumed,
    )


def step_sigma(one: Step, constants: Constants, assumed: tuple[Assumed, ...] = ()) -> float:
    parts = {name: float(np.max(value)) for name, value in one.terms.items()}
    return hypot(variance(parts, constants.spread) ** 0.5, _doubt(assumed))


def _doubt(assumed: tuple[Assumed, ...]) -> float:
    return hypot(*(each.spread for each in assumed))


def _with_network(machine: Machine, work: Workload) -> tuple[Machine, tuple[Assumed, ...]]:
    """A network of which nobody said how fast it is, is taken as infinitely fast: what crosses it is left out."""
    if machine.nics and machine.nic_rate:
        return machine, ()
    key = "node.nics" if machine.nic_rate else "node.nic_rate_gbps"
    crosses = work.layout.world > machine.joined
    gap = Assumed(key, "unknown: what crosses the network is left out", UNKNOWN_NETWORK)
    return replace(machine, nics=1.0, nic_rate=inf), (gap,) if crosses else ()


def _groups(work: Workload, machine: Machine) -> dict[str, Group]:
    layout = work.layout
    names = [name for name in ("tp", "cp", "ep") if getattr(layout, name) > 1]
    return {name: layout.group(name, machine.joined) for name in (*names, *traffic.sums(work))}


def _busbw(work: Workload, machine: Machine) -> dict[str, Estimate]:
    found = {}
    for name, group in _groups(work, machine).items():
        sums = name in ("tp", "copies") or (name.endswith("gradients") and work.layout.zero == 0)
        op: Op = "all_to_all" if name == "ep" else "all_reduce" if sums else "all_gather"
        switch = machine.gpu.nvls if sums and name != "tp" and group.per_node >= 6 else None
        inside, node = float(switch or machine.inside), float(machine.share_of(group))
        if group.nodes == 1 or np.isfinite(node):
            most = bound(op, group, inside, node, sharp=machine.sharp)
            low, value, high = (most * share for share in HEALTHY_BUSBW)
            found[name] = Estimate(value, low, high)
    return found


def _bytes(work: Workload, machine: Machine) -> tuple[Estimate | None, Estimate | None]:
    """Per NIC and per GPU's NVLink. The most is what rings send; the least what trees inside and across nodes leave."""
    layout, groups = work.layout, _groups(work, machine)
    across, inside, least = 0.0, 0.0, 0.0
    for name, sent in _sent(work).items():
        group = groups.get(name)
        crosses = name == "sends" and layout.stride("pp") >= machine.joined
        if crosses:
            across, least = across + sent, least + sent
        elif group is None or group.nodes == 1:
            inside += sent
        elif name == "ep":
            out = traffic.all_to_all_into_network(sent, group)
            across, least, inside = across + out, least + out, inside + sent - out
        else:
            out = traffic.into_network(sent, group)
            across += out
            least += out * (1 - 1 / group.nodes) / (1 - 1 / group.ranks)
            inside += sent * (1 - 1 / group.per_node)
    ports = float(machine.nics) / machine.gpus
    known = across and bool(np.isfinite(machine.nic_rate).all())
    nic = Estimate(across / ports, least / ports, across / ports * 1.05) if known else None
    return nic, Estimate.within(inside, 0.05) if inside and machine.gpu.nvlink else None


def _sent(work: Workload) -> dict[str, float]:
    """Bytes a step and GPU."""
    layout = work.layout
    sent = {
        "tp": traffic.tensor(work) if layout.tp > 1 else 0.0,
        "cp": traffic.context(work) if layout.cp > 1 else 0.0,
        "ep": traffic.experts(work),
        "sends": traffic.pipeline(work),
        **traffic.sums(work),
    }
    return {name: amount for name, amount in sent.items() if amount > 0}


def _margin(one: Step, constants: Constants, work: Workload) -> Estimate | None:
    moved, hides = float(np.max(one.moving)), float(np.max(one.hides)) * usable(work)
    if not moved or not (work.overlap_gradients or work.layout.zero == 3):
        return None
    return Estimate.within(hides / moved, SPREADS["gradients"] * constants.spread)
