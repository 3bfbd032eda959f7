"""One thing that should be so and is not: what, where, what it should be instead, and how that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from diagnosd.analysis.model.workload import Layout

# declared: in the cluster.toml. siblings: most devices of its kind are so. hardware: the device itself or the tables of
# the model. observed: software says so. rule: it is known to harm, with the reason beside it.
Basis = Literal["declared", "siblings", "hardware", "observed", "rule"]

Kind = Literal["rail", "nvlink", "transport", "nics", "crossing", "clock", "layout"]
V = TypeVar("V", bound=Hashable)

ALIKE = 3  # fewer that agree are no majority: of two that differ nobody knows which is right


@dataclass(frozen=True, slots=True)
class Effect:
    """What it does to a machine of the model: a share of what is healthy, a count of NICs, a share that crosses.

    `least` and `most` are the best and the worst that it may be.
    """

    kind: Kind
    value: float
    least: float
    most: float
    better: Layout | None = None
    healthy: float = 0.0  # of `crossing`: what need cross anyway


def share(kind: Kind, value: float) -> Effect:
    return Effect(kind, value, value, value)


@dataclass(frozen=True, slots=True)
class Cost:
    """Times as long as a step of this job takes because of it, by the model, with its 90 % interval."""

    job: str
    slowdown: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Finding:
    """`hosts`: which hosts it makes slower; `jobs`: which jobs, where it is about these and not their hosts."""

    subtype: str
    loci: tuple[str, ...]
    seen: str
    should: str
    basis: Basis
    because: str
    hosts: tuple[str, ...]
    jobs: tuple[str, ...] = ()
    effect: Effect | None = None
    remedy: str = ""  # where the catalogue's is not the one
    observed: float | None = None
    expected: float | None = None
    unit: str = ""
    cost: Cost | None = field(default=None, compare=False)


def usual(values: Iterable[V]) -> tuple[V, int] | None:
    """What most of them are, and how many that is; None where too few agree to say so."""
    counted = Counter(values)
    total = counted.total()
    for value, count in counted.most_common(1):
        if count >= ALIKE and 2 * count > total:
            return value, count
    return None


def united(findings: Iterable[Finding]) -> list[Finding]:
    """What is the same on several devices or hosts is one finding; in an order that does not depend on theirs."""
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for each in findings:
        key = (each.subtype, each.seen, each.should, each.basis, each.because, each.jobs, each.remedy, each.effect)
        alike.setdefault(key, []).append(each)
    return sorted((_one(group) for group in alike.values()), key=lambda each: (each.subtype, each.loci, each.seen))


def _one(group: list[Finding]) -> Finding:
    first = group[0]
    return Finding(
        subtype=first.subtype,
        loci=tuple(sorted({locus for each in group for locus in each.loci}, key=_numbered)),
        seen=first.seen,
        should=first.should,
        basis=first.basis,
        because=first.because,
        hosts=tuple(sorted({host for each in group for host in each.hosts})),
        jobs=first.jobs,
        effect=first.effect,
        remedy=first.remedy,
        observed=first.observed,
        expected=first.expected,
        unit=first.unit,
    )


def _numbered(locus: str) -> tuple[int, str]:
    return len(locus), locus


def listed(names: Iterable[object], most: int = 4) -> str:
    """`mlx5_0, mlx5_1`; of many the first, and how many more."""
    told = list(map(str, names))
    return ", ".join(told) if len(told) <= most else f"{', '.join(told[: most - 1])} and {len(told) - most + 1} more"


def by(values: Mapping[Any, V]) -> dict[V, list[Any]]:
    """The keys that have each value, in their order."""
    found: dict[V, list[Any]] = {}
    for name in sorted(values):
        found.setdefault(values[name], []).append(name)
    return found
