"""Where a step's time went, along the rank that the others waited for.

Data-parallel ranks meet once a step, in a collective. Rank r *enters* it when its own work is done and *exits* when the
sum is there. Nobody can exit before the last has entered, so with A = max enter

    wait_r = A - enter_r        what rank r lost to somebody else's work: never the network's
    transfer = exit - A         what the network took

and the time from one exit to the next, a *cycle*, is an exact sum along the last to arrive:

    cycle = (own work of the last to arrive since the previous exit) + transfer + release

`release` is how much later (or earlier) than the others that rank left the previous collective: it keeps the sum exact.
The own work falls into the phases that the rank reported; what they leave is `other`, never hidden, never negative.
(diagnosis.md 2.3, walking back from the last end; with one collective a step the walk is one hop.)

Exits are simultaneous to first order. That aligns the hosts' clocks without trusting any of them: a host's offset is
the median over steps of (its exit - the median exit). It is taken off only where it exceeds its own noise.

Where a collective was not timed but its blocking time `comm` is known, its end is placed before what follows it in the
step. Where not even that is known, waiting for the others and transferring hide somewhere in the phases: a device's
backward pass contains DDP's all-reduce, and a rank that waits in it seems to compute. Then only what no collective can
hide in is a rank's own: waiting for data, copying to the device, saving and evaluating. The step is told along the rank
with most of that, and all the rest of it is `mixed`, which no cause explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.steps import CLOCKS, Steps

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# In the order in which a step runs through them.
OWN = ("data_wait", "h2d", "forward", "backward", "blocked", "optimizer", "checkpoint", "eval", "mixed", "other")
REPORTED = OWN[: OWN.index("mixed")]
PARTS = (*OWN, "transfer", "release")
PART = {name: column for column, name in enumerate(PARTS)}
AFTER = ("optimizer", "checkpoint", "eval", "blocked")  # what may stand behind the collective within its step

COMPUTE = ("forward", "backward", "optimizer")
SURE = ("data_wait", "h2d", "checkpoint", "eval")  # in which no rank waits for another
HOST = ("h2d", "blocked", "other")
NETWORK = ("transfer", "release")

# Below this a host's offset is not worth correcting: it is less than any effect that is judged (5 % of a 50 ms step).
LEAST_OFFSET_S = 1e-3
LEAST_MEETINGS = 5  # that align clocks: two that were disturbed do not move the median


@dataclass(frozen=True, slots=True)
class Phases:
    """What the ranks reported, S steps of R ranks, in s; NaN where absent. Instants are on the host's own clock."""

    end: Floats  # [S,R]
    duration: Floats  # [S,R]
    enter: Floats  # [S,R] of the step's largest blocking collective
    exit: Floats  # [S,R]
    comm: Floats  # [S,R]
    own: Floats  # [S,R,len(OWN)]; `mixed` and `other` are ignored, they are what remains

    @classmethod
    def of(cls, steps: Steps, rows: slice, origin: int) -> Phases:
        end = np.where(steps.end[rows] > 0, (steps.end[rows] - origin) / 1e9, np.nan)
        own = np.full((*end.shape, len(OWN)), np.nan)
        own[..., : len(REPORTED)] = steps.columns(REPORTED, rows)
        # The host is blocked while the device works: on the device's clock that time is in its phases already.
        own[..., OWN.index("blocked")][steps.clock[rows] == CLOCKS.index("device")] = np.nan
        gap = steps.column("device_gap")[rows]
        # An asynchronous device hides the part of a wait during which it was busy (telemetry.md 4).
        own[..., 0] = np.where(np.isnan(gap), own[..., 0], np.fmin(own[..., 0], gap))
        enter, leave = steps.sync_enter[rows], steps.sync_exit[rows]
        return cls(end, steps.column("duration")[rows], enter, leave, steps.column("comm")[rows], own)


@dataclass(frozen=True, slots=True)
class Cycles:
    """C cycles of R ranks, in seconds."""

    row: Ints  # [C] which step it is, counted from the first of the phases it was made of
    end: Floats  # [C] when the collective ended (the step, where there is none), clocks aligned
    duration: Floats  # [C]
    parts: Floats  # [C,len(PARTS)] along the last to arrive; they sum to the duration
    own: Floats  # [C,R,len(OWN)] each rank's own work
    late: Floats  # [C,R] how much later than the first each rank arrived; NaN where no arrival is known
    last: Ints  # [C] column of the last to arrive; -1 where nobody can say
    timed: Bools  # [C] whether the collective itself was timed, so that waiting and transferring are apart


def align(leave: Floats, hosts: Sequence[str]) -> tuple[Floats, float]:
    """Offset of each rank's clock [R] from the median of all, and the noise that is left, both in seconds.

    `leave` [S,R]: when each rank left the same collectives. The noise is robust (1.4826 MAD); it is infinite while the
    clocks of several hosts cannot be compared: then nobody knows who was last.
    """
    complete = leave[~np.isnan(leave).any(axis=1)]
    none = np.zeros(leave.shape[1])
    if len(set(hosts)) < 2:
        return none, 0.0
    if len(complete) < LEAST_MEETINGS:
        return none, np.inf
    apart = complete - _middle(complete)[:, None]
    offset, names = none, np.array(hosts)
    for host in set(hosts):
        offset[names == host] = _middle(apart[:, names == host].reshape(1, -1))[0]
    noise = 1.4826 * float(np.median(np.abs(apart - offset)))
    known_to = max(LEAST_OFFSET_S, 3 * 1.2533 * noise / np.sqrt(len(complete)))  # 3 standard errors of a median
    return np.where(np.abs(offset) > known_to, offset, 0.0), noise


def decompose(phases: Phases, offset: Floats) -> Cycles:
    """The cycles that end within these steps. The first step only begins one, unless its ranks never met.

    Steps that a rank has not sent are left out, with the cycle that would begin in them. Where the collectives of only
    some steps were timed, the first of those in a row is a step like those before it.
    """
    enter, leave = meeting(phases)
    met, sent = _finite(enter + leave), _finite(phases.end)
    joined = sent & met & _before(met)
    alone = sent & ~joined & (~met | _before(sent)) & _finite(phases.duration)
    together = _joined(phases, enter, leave, offset, np.flatnonzero(joined))
    return _in_order(together, _alone(phases, np.flatnonzero(alone))) if alone.any() else together


def _before(rows: Bools) -> Bools:
    """[S] whether it is so of the step before."""
    return np.concatenate([np.zeros(1, bool), rows[:-1]])


def _finite(values: Floats) -> Bools:
    """[S] whether every rank has a value."""
    finite: Bools = np.logical_and.reduce(np.isfinite(values), axis=1)
    return finite


def _or_zero(values: Floats) -> Floats:
    return np.where(np.isnan(values), 0.0, values)


def _middle(values: Floats) -> Floats:
    """[S] the median over the ranks; numpy's own spends most of its time on a few values with other things."""
    ordered, half = np.sort(values, axis=1), values.shape[1] // 2
    return ordered[:, half] if values.shape[1] % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2


def meeting(phases: Phases) -> tuple[Floats, Floats]:
    """When each rank entered and left the collective [S,R]; from `comm` where it was not timed, else NaN."""
    behind = _or_zero(phases.own[..., [OWN.index(name) for name in AFTER]]).sum(axis=-1)
    timed = _finite(phases.enter + phases.exit)[:, None]
    leave = np.where(timed, phases.exit, phases.end - behind)
    # Blocked in other collectives is no rank's own work: as if all had been waited for in this one.
    elsewhere = np.maximum(_or_zero(phases.comm) - (phases.exit - phases.enter), 0.0)
    enter = np.where(timed, phases.enter - elsewhere, leave - phases.comm)
    return enter, np.where(np.isnan(enter), np.nan, leave)


def untimed(parts: Floats, own: Floats) -> tuple[Floats, Floats]:
    """Cycles [...,len(PARTS)] and [...,R,len(OWN)] as they are where nobody timed their collectives."""
    step = parts.sum(axis=-1)
    return _hidden(parts, step), _hidden(own, step[..., None])


def _hidden(values: Floats, step: Floats) -> Floats:
    kept, sure = np.zeros_like(values), [PART[name] for name in SURE]
    kept[..., sure] = values[..., sure]
    kept[..., PART["mixed"]] = np.maximum(step - kept.sum(axis=-1), 0.0)
    return kept


def _joined(phases: Phases, enter: Floats, leave: Floats, offset: Floats, rows: Ints) -> Cycles:
    own = _own(phases, leave, rows, np.maximum(enter[rows] - leave[rows - 1], 0.0))
    arrived, ended = enter[rows] - offset, _middle(leave - offset)
    duration = ended[rows] - ended[rows - 1]
    last = arrived.argmax(axis=1)
    each = np.arange(len(rows))
    parts = np.zeros((len(rows), len(PARTS)))
    parts[:, : len(OWN)] = own[each, last]
    parts[:, PART["transfer"]] = np.maximum(ended[rows] - arrived[each, last], 0.0)
    parts[:, PART["release"]] = duration - parts.sum(axis=1)
    late = arrived - arrived.min(axis=1, keepdims=True)
    timed = _finite(phases.enter[rows] + phases.exit[rows])
    return Cycles(rows, ended[rows], duration, parts, own, late, last, timed)


def _own(phases: Phases, leave: Floats, rows: Ints, between: Floats) -> Floats:
    """[C,R,len(OWN)] what each rank did `between` leaving one collective and entering the next, on its own clock.

    Phases that stand behind the collective belong to the cycle that follows. Phases that overlap are scaled to fit.
    """
    named = _or_zero(phases.own)
    named[..., len(REPORTED) :] = 0.0
    room = np.maximum(phases.end - leave, 0.0)
    behind = np.zeros_like(named)
    for name in AFTER:
        column = OWN.index(name)
        fits = named[..., column] <= 1.1 * room + 1e-4  # a phase and its room are timed by different clocks
        behind[..., column] = np.where(fits, named[..., column], 0.0)
        room = np.maximum(room - behind[..., column], 0.0)
    own: Floats = (named - behind)[rows] + behind[rows - 1]
    total = own.sum(axis=-1)
    own *= np.divide(between, total, out=np.ones_like(total), where=total > between)[..., None]
    own[..., OWN.index("other")] = between - own.sum(axis=-1)
    return own


def _alone(phases: Phases, rows: Ints) -> Cycles:
    """Steps of one rank, or of ranks of whom nobody knows when they meet."""
    duration, own = phases.duration[rows], _or_zero(phases.own[rows])
    own[..., len(REPORTED) :] = 0.0
    several = duration.shape[1] > 1
    if several:
        own[..., [OWN.index(name) for name in REPORTED if name not in SURE]] = 0.0
    total = own.sum(axis=-1)
    own *= np.divide(duration, total, out=np.ones_like(total), where=total > duration)[..., None]
    rest = np.maximum(duration - own.sum(axis=-1), 0.0)
    own[..., OWN.index("mixed" if several else "other")] = rest
    whose, each = (duration - rest).argmax(axis=1), np.arange(len(rows))
    parts = np.zeros((len(rows), len(PARTS)))
    parts[:, : len(OWN)] = own[each, whose]
    unknown, last = np.full(duration.shape, np.nan), np.full(len(rows), -1 if several else 0)
    ended = phases.end[rows][each, whose]
    return Cycles(rows, ended, duration[each, whose], parts, own, unknown, last, np.zeros(len(rows), dtype=bool))


def _in_order(a: Cycles, b: Cycles) -> Cycles:
    order = np.argsort(np.concatenate([a.row, b.row]), kind="stable")

    def merged(name: str) -> npt.NDArray[np.generic]:
        both: npt.NDArray[np.generic] = np.concatenate([getattr(a, name), getattr(b, name)])[order]
        return both

    return Cycles(**{name: merged(name) for name in Cycles.__slots__})  # type: ignore[arg-type]
