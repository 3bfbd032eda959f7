"""What a step would take with any one thing, or any set of them, put right: for attribution and for what repair gains.

The worst rank of each parameter is found once, so that all 2^n sets of repairs over a thousand ranks fit in a tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from math import factorial

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.model.constants import SHIPPED, Constants
from diagnosd.analysis.model.machine import Machine
from diagnosd.analysis.model.step import Step, step
from diagnosd.analysis.model.workload import Layout, Workload

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# What can be put right, in the order of the columns of a set.
REPAIRS = ("clock", "loader", "rate", "nics", "transport", "layout")


@dataclass(frozen=True)
class Seen:
    """What the machines do instead of what they should. Arrays are by rank [R], shares of what is healthy.

    `nics` is a count a node; `transport` a share of the injection rate (GDR off, sockets); `layout` the one that should
    be used.
    """

    clock: Floats = field(default_factory=lambda: np.ones(1))
    load: Floats = field(default_factory=lambda: np.zeros(1))  # s a step that the loader is late by
    rate: Floats = field(default_factory=lambda: np.ones(1))  # of the rank's rail
    nics: float | None = None
    transport: float = 1.0
    layout: Layout | None = None


def sets(count: int = len(REPAIRS)) -> Bools:
    """All sets of repairs, [2^n, n]: row b has repair k where bit k of b is set."""
    found: Bools = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1 == 1
    return found


def step_times(
    work: Workload, machine: Machine, seen: Seen, repaired: Bools | None = None, constants: Constants = SHIPPED
) -> Floats:
    """[S] seconds of a step, for sets of repairs [S, len(REPAIRS)]; all of them where none are given."""
    chosen = sets() if repaired is None else repaired
    column = {name: chosen[:, number] for number, name in enumerate(REPAIRS)}
    rail, transport = np.where(column["rate"], 1.0, seen.rate.min()), np.where(column["transport"], 1.0, seen.transport)
    nics = np.where(column["nics"], machine.nics, machine.nics if seen.nics is None else seen.nics)
    network = replace(machine, rail=machine.rail * rail * transport, nics=nics)
    ways = [step(work, network, constants)]
    if seen.layout is not None:
        ways.append(step(replace(work, layout=seen.layout), network, constants))
    times = [_waiting(way, seen, column) for way in ways]
    return np.where(column["layout"], times[-1], times[0])


def _waiting(one: Step, seen: Seen, column: dict[str, Bools]) -> Floats:
    """With what each rank computes and waits for its data, all waiting for the slowest: [S].

    A slow clock slows products and attention; that it lengthens a pipeline's bubble by as much is left out.
    """
    scaled = np.asarray(
        sum((one.terms[name] for name in ("products", "attention") if name in one.terms), np.float64(0))
    )
    rest = one.total - scaled
    times = np.empty(len(column["clock"]))
    busy = np.broadcast_to(scaled, times.shape)
    for clock, loader in product((False, True), repeat=2):  # only these two differ from rank to rank
        rows = (column["clock"] == clock) & (column["loader"] == loader)
        slower = np.ones(1) if clock else 1 / seen.clock
        late = np.zeros(1) if loader else seen.load
        times[rows] = _slowest(busy[rows], slower, late)
    found: Floats = times + rest
    return found


def _slowest(busy: Floats, slower: Floats, late: Floats) -> Floats:
    """Maximum over ranks of busy x slower + late, for each `busy`."""
    if slower.size == 1 or late.size == 1:
        alone: Floats = busy * slower.max() + late.max()
        return alone
    values, place = np.unique(busy, return_inverse=True)
    found: Floats = (values[:, None] * slower + late).max(axis=1)
    return found[place]


def shapley(times: Floats) -> Floats:
    """[n] seconds of the loss that each cause accounts for, from the times of all sets: they sum to the loss."""
    count = int(times.size).bit_length() - 1
    members = sets(count)
    size = members.sum(axis=1)
    weights = np.array([factorial(k) * factorial(count - k - 1) for k in range(count)]) / factorial(count)
    found = np.empty(count)
    for one in range(count):
        without = np.flatnonzero(~members[:, one])
        gains = times[without] - times[without | (1 << one)]
        found[one] = (weights[size[without]] * gains).sum()
    return found


def fix_gains(times: Floats) -> Floats:
    """[n] seconds that putting right one thing alone saves now, the others staying as they are."""
    count = int(times.size).bit_length() - 1
    found: Floats = times[0] - times[1 << np.arange(count)]
    return found
