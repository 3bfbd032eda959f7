"""How well the model tells published figures: the tables of `diagnosd model validate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.model import collectives
from diagnosd.analysis.model.constants import SHIPPED, Constants
from diagnosd.analysis.model.fitting import fit, predicted, sigma
from diagnosd.analysis.model.published import Case, Point
from diagnosd.analysis.model.step import z

Floats = npt.NDArray[np.float64]
LAYOUTS = 6  # as many different ones of one cluster make a grid
COUNTED = 1 << 20  # bytes: below, a collective is latency, which matters to nobody's bandwidth


@dataclass(frozen=True, slots=True)
class Score:
    """Relative errors of a set of figures. `covered` and `width`: of the 90 % intervals; None where there are none."""

    name: str
    count: int
    median: float
    p90: float
    worst: float
    bias: float
    covered: float | None = None
    width: float | None = None
    rank: float | None = None  # Spearman's, of the predicted order


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: seconds measured and expected, and its 90 % interval."""

    name: str
    measured: float
    expected: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.expected / self.measured - 1


def score(name: str, lines: Sequence[Line], *, intervals: bool = True, rank: float | None = None) -> Score:
    errors = np.array([line.error for line in lines])
    size = np.abs(errors)
    inside = [line.low <= line.measured <= line.high for line in lines]
    return Score(
        name,
        len(lines),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(np.median(errors)),
        float(np.mean(inside)) if intervals else None,
        float(np.median([line.high / line.expected - 1 for line in lines])) if intervals else None,
        rank,
    )


def expected(cases: Sequence[Case], constants: Constants = SHIPPED) -> list[Line]:
    """With these constants."""
    values = np.exp(predicted(cases, constants))
    return [_line(case, float(value), sigma(case, constants)) for case, value in zip(cases, values, strict=True)]


def _line(case: Case, value: float, spread: float) -> Line:
    wide = float(np.exp(z() * spread))
    return Line(case.name, case.seconds, value, value / wide, value * wide)


def leave_one_source_out(cases: Sequence[Case]) -> list[Line]:
    """Each source with constants that were fitted without it."""
    lines: dict[int, Line] = {}
    for source in dict.fromkeys(case.source for case in cases):
        others = [case for case in cases if case.source != source]
        constants = fit(others) if others else SHIPPED
        theirs = [case for case in cases if case.source == source]
        lines |= dict(zip([id(case) for case in theirs], expected(theirs, constants), strict=True))
    return [lines[id(case)] for case in cases]


def one_scalar(cases: Sequence[Case], lines: Sequence[Line], key: Callable[[Case], Hashable]) -> list[list[Line]]:
    """Of each series of two or more, all but the smallest run, from which a factor is learned for them."""
    groups: dict[Hashable, list[tuple[Case, Line]]] = defaultdict(list)
    for case, line in zip(cases, lines, strict=True):
        groups[key(case)].append((case, line))
    found = []
    for group in groups.values():
        first, *rest = sorted(group, key=lambda each: (each[0].ranks, each[0].work.batch, each[0].name))
        scalar = first[1].measured / first[1].expected
        found.append([_scaled(line, scalar) for _, line in rest])
    return [group for group in found if group]


def _scaled(line: Line, by: float) -> Line:
    return Line(line.name, line.measured, line.expected * by, line.low * by, line.high * by)


def grids(cases: Sequence[Case], lines: Sequence[Line]) -> list[tuple[str, list[Line], float]]:
    """As one_scalar, of clusters on which many layouts were tried; with Spearman's correlation of all of them."""
    layouts: dict[tuple[str, ...], set[object]] = defaultdict(set)
    for case in cases:
        layouts[case.grid].add((case.work.layout, case.work.micro, case.work.model))
    found = []
    for grid in (grid for grid, those in layouts.items() if len(those) >= LAYOUTS):
        many = [(case, line) for case, line in zip(cases, lines, strict=True) if case.grid == grid]
        (rest,) = one_scalar([case for case, _ in many], [line for _, line in many], lambda case: case.grid)
        found.append(
            (grid[0], rest, spearman([line.expected for _, line in many], [line.measured for _, line in many]))
        )
    return found


def constant_mfu(cases: Sequence[Case], *, apart: bool) -> list[Line]:
    """What one MFU for each GPU and precision would say: the median of these cases, or of the other sources'."""
    shares = [(case, _ideal(case) / case.seconds) for case in cases]
    typical: dict[tuple[str, tuple[str, str]], float] = {}
    lines = []
    for case, share in shares:
        key = case.source, _kind(case)
        if key not in typical:
            peers = [each for each in shares if not apart or each[0].source != case.source]
            same = [mfu for other, mfu in peers if _kind(other) == _kind(case)] or [mfu for _, mfu in peers] or [share]
            typical[key] = float(np.median(same))
        value = _ideal(case) / typical[key]
        lines.append(Line(case.name, case.seconds, value, value, value))
    return lines


def _kind(case: Case) -> tuple[str, str]:
    return case.machine.gpu.name, case.work.dtype


def _ideal(case: Case) -> float:
    """Seconds of the model FLOPs at peak."""
    peak = case.machine.gpu.peak(case.work.dtype) or case.machine.gpu.bf16
    return case.work.training("full") / (case.ranks * peak)


def spearman(one: Iterable[float], other: Iterable[float]) -> float:
    """Correlation of the ranks."""
    ranks = [np.argsort(np.argsort(np.array(list(values)))) for values in (one, other)]
    if len(ranks[0]) < 2:
        return 1.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


# -- collectives -------------------------------------------------------------------------------------------------------

SPREAD_OF_COLLECTIVES = 0.14  # sigma in ln: of published curves against the tables, from 1 MiB on


def curves(points: Sequence[Point], latencies: Mapping[str, float] | None = None) -> dict[str, list[Line]]:
    """Of each system, what its all-reduces of 1 MiB and more should take. `latencies`: how many times as long as in the
    tables they are.
    """
    found: dict[str, list[Line]] = defaultdict(list)
    wide = float(np.exp(z() * SPREAD_OF_COLLECTIVES))
    for point in points:
        if point.size >= COUNTED:
            value = collectives.seconds(_choices(point, (latencies or {}).get(point.system, 1.0)), point.size)
            found[point.system].append(Line(f"{point.size:.0f}", point.seconds, value, value / wide, value * wide))
    return found


def latencies(points: Sequence[Point]) -> dict[str, float]:
    """Of each system, its latency over that of the tables, from its smallest message: that one is nothing else."""
    found: dict[str, float] = {}
    for point in sorted(points, key=lambda each: each.size):
        if point.system not in found:
            found[point.system] = point.seconds / collectives.seconds(_choices(point), point.size)
    return found


def _choices(point: Point, later: float = 1.0) -> tuple[collectives.Cost, ...]:
    machine = point.machine
    switch = None if point.ring else machine.gpu.nvls
    node = float(machine.share_of(point.group))
    if point.op != "all_reduce":
        rate = collectives.bound(point.op, point.group, float(machine.inside), node)
        alpha = collectives.latency("ring", point.group, op=point.op, plugin=machine.fabric.plugin)
        return (collectives.cost(point.op, point.group, alpha, machine.depth(point.group), rate).later(later),)
    choices = collectives.all_reduce(
        point.group, float(machine.inside), switch, node, machine.fabric.plugin, machine.fabric.depth
    )
    return tuple(choice.later(later) for choice in choices)
