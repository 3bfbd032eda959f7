"""What a step of this job takes when nothing is wrong, and whether it now takes more: the job's own past as reference.

A row is one cycle: seconds in each of the CHANNELS (the total, and what it splits into), and the work done in it. Rows
that are checkpoints, evaluations, warm-up or compilation are not judged here and teach nothing.

The reference is the median and the robust scale of the last WINDOW healthy rows of this regime, without the newest few:
a slowdown must not teach the reference that it is normal. A regime begins with the job, with a change of the work per
step (a batch size), and where the job becomes lastingly faster. Where a batch size comes back, as with batches sorted
by length, its sizes are one regime, in which a row is held against what its work should take.

Rules (diagnosis.md 2.2, there measured on 3.6 million healthy steps of each of five noise models):

    D1  4 of the last 5 rows beyond 3.5 scales, and a median excess of 5 % of the step
    D2  one-sided CUSUM of clipped scores, verified by the size of the effect since its onset
    D3  7 of the last 20 rows beyond 3.5 scales, and a mean excess of 5 %: bursts
    D4  4 of the last 40 rows beyond 6 scales and 20 % of the step, and a mean excess of 5 %, of the load channel alone:
        workers that take turns stall every n-th batch, which medians hide (pytorch#19836)

A channel is judged in units of the step. Where it grew and the step did not, nothing was lost and nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHANNELS = ("total", "load", "transfer", "compute", "host")
CHANNEL = {name: column for column, name in enumerate(CHANNELS)}

WINDOW = 200  # rows
LEAST = 8  # rows in a reference: the error of a median of 8 is 0.44 scales, an eighth of what D1 asks for
GUARD = 10  # newest rows outside of the reference, half of them while it is young
YOUNG = 40
FLOOR = 0.005  # of the step: the scatter of the steadiest real jobs (0.48 % and 0.61 % on public traces)
SETTLED = 1.15  # warm-up ends with the first row no slower than this times the median of the eight that follow
LONGEST_WARMUP = 20
ENTER = 0.05  # of the step: what a fault must cost to be suspected
LEAVE = 0.02  # and what it may still cost when it is over
Z_FAR, Z_SPIKE = 3.5, 6.0
H, H_NOISY = 14.0, 16.0  # of D2; diagnosis.md 2.2 gives 0.6 to 4.2 false events per million noisy steps with them
NOISY = 0.04  # above this scatter D2 looks for longer
SAME_WORK = 0.02  # works closer than this are one batch size: a dropped sample is no new regime
RECURS = 2 * WINDOW  # rows within which a size must come back to be one of several that take turns
KEEP = 2048
LOOK_BACK = 100  # rows in which an onset is looked for


@dataclass(frozen=True, slots=True)
class Reference:
    """What each channel takes (s) at the mean work, how it scatters (s), and how it grows with the work."""

    middle: Floats  # [C]
    scale: Floats  # [C]
    slope: Floats  # [C] seconds per unit of work
    work: float  # mean; NaN where unknown
    count: int

    @property
    def step(self) -> float:
        return float(self.middle[0])

    def expect(self, work: Floats) -> Floats:
        """[N,C] seconds at this work [N]."""
        more = np.nan_to_num(work - self.work)
        return np.maximum(self.middle + more[:, None] * self.slope, 0.0)

    def excess(self, rows: Floats, work: Floats) -> Floats:
        """[N,C] how much more than expected, as a share of the expected step."""
        expected = self.expect(work)
        return (rows - expected) / np.maximum(expected[:, :1], 1e-9)


@dataclass(frozen=True, slots=True)
class Alarm:
    """`onset` is the first row of the slowdown; `excess` its median since then, as a share of the step."""

    rule: str
    channel: str
    onset: int
    excess: float


class Baseline:
    """Rows in, references and alarms out. Row numbers count from the first row ever added."""

    def __init__(self) -> None:
        self.count = 0  # rows ever added
        self._first = 0  # number of the oldest row kept
        self._rows: Floats = np.empty((64, len(CHANNELS)))
        self._work: Floats = np.empty(64)
        self._steps: Floats = np.empty(64)
        self._usable: Bools = np.empty(64, dtype=bool)  # may be judged
        self._healthy: Bools = np.empty(64, dtype=bool)  # may teach
        self._regime = 0  # first row of the regime
        self._oldest = 0  # the first that may be in it: before, the same work took another time
        self._settled: int | None = None  # first row after its warm-up
        self._reference: Reference | None = None  # good until there are `_renew` rows
        self._renew = 0
        self._odd: list[float] = []  # the latest works outside of the regime's, in a row

    def add(self, row: Floats, work: float, *, usable: bool, steps: int = 1) -> int:
        """Take one row [C], the mean of so many steps; returns its number. `work` is NaN where unknown."""
        self._make_room()
        place = self.count - self._first
        fits = usable and self._same_regime(work)
        self._rows[place], self._work[place], self._steps[place] = row, work, steps
        self._usable[place] = self._healthy[place] = fits
        self.count += 1
        if len(self._odd) >= 3:
            self._change_of_work()
        return self.count - 1

    def usable(self, since: int = 0, *, healthy: bool = False) -> Ints:
        """Numbers of the rows from `since` on that may be judged, or only of those that may teach."""
        start = max(since - self._first, 0)
        which = self._healthy if healthy else self._usable
        return np.flatnonzero(which[start : self.count - self._first]) + start + self._first

    def rows(self, numbers: Ints) -> Floats:
        return self._rows[numbers - self._first]

    def steps(self, numbers: Ints) -> Floats:
        """[N] how many each row is the mean of."""
        return self._steps[numbers - self._first]

    def seconds(self, numbers: Ints) -> Floats:
        """[N] what the steps of each row took together."""
        return self.rows(numbers)[:, 0] * self.steps(numbers)

    def work(self, numbers: Ints) -> Floats:
        return self._work[numbers - self._first]

    def mark(self, since: int, until: int, *, healthy: bool) -> None:
        """Rows of a slowdown teach nothing; rows of a suspicion that came to nothing do."""
        part = slice(max(since - self._first, 0), max(until - self._first, 0))
        self._healthy[part] = self._usable[part] if healthy else False

    def taught(self) -> Ints:
        """Numbers of the rows that the reference is made of."""
        start = self._start()
        if start is None:
            return np.empty(0, np.int64)
        part = slice(start - self._first, self.count - self._first)
        healthy = np.flatnonzero(self._healthy[part] & self._usable[part]) + start
        guard = GUARD if len(healthy) >= YOUNG else GUARD // 2
        return healthy[healthy < self.count - guard][-WINDOW:]

    def reference(self) -> Reference | None:
        """None while the job warms up, or while too few healthy rows of this regime are known.

        It is made anew when a twentieth of its rows is new: more often changes nothing and takes longest of all.
        """
        if self._reference is None or self.count >= self._renew:
            numbers = self.taught()
            enough = len(numbers) >= LEAST
            self._reference = refer(self.rows(numbers), self.work(numbers)) if enough else None
            self._renew = self.count + len(numbers) // 20
        return self._reference

    def alarm(self, reference: Reference, since: int) -> Alarm | None:
        """The first of the rules that fires on the rows from `since` on, strongest channel first."""
        numbers = self.usable(max(since, self._regime, self.count - 2 * LOOK_BACK))[-LOOK_BACK:]
        if len(numbers) < 4:
            return None
        excess = reference.excess(self.rows(numbers), self.work(numbers))
        scale = reference.scale / max(reference.step, 1e-9)
        found = judge(excess, scale)
        if found is None:
            return None
        rule, channel, onset = found
        size = float(np.median(excess[onset:, channel]))
        return Alarm(rule, CHANNELS[channel], int(numbers[onset]), size)

    def notice_faster(self, reference: Reference) -> bool:
        """Begin a new regime where the last ten rows are all faster than the reference by its noise and by 5 %."""
        numbers = self.usable(self._regime)[-10:]
        if len(numbers) < 10:
            return False
        excess = reference.excess(self.rows(numbers), self.work(numbers))[:, 0]
        scale = reference.scale[0] / max(reference.step, 1e-9)
        if not (excess < -max(ENTER, Z_FAR * scale / 2)).all():
            return False
        self.begin(int(numbers[0]))
        self._settled = self._regime
        return True

    # -- regimes -----------------------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """A new regime, with the warm-up and the reference to come."""
        self._oldest = row
        self._regime, self._settled, self._reference = row, None, None
        self._odd.clear()

    def _start(self) -> int | None:
        """The first row after the regime's warm-up; None while it lasts."""
        if self._settled is None:
            numbers = self.usable(self._regime)[: LONGEST_WARMUP + LEAST + 1]
            total = self.rows(numbers)[:, 0]
            for place in range(len(numbers) - LEAST):
                following = np.median(total[place + 1 : place + 1 + LEAST])
                if total[place] <= SETTLED * following or place >= LONGEST_WARMUP:
                    self._settled = int(numbers[place])
                    break
        return self._settled

    def _same_regime(self, work: float) -> bool:
        """Whether a row's work is of the regime; one far from all before is not judged, three alike begin a regime."""
        known = self.work(self.usable(self._regime))[-WINDOW:]
        if np.isnan(work) or len(known) < 3 or np.isnan(known).any():
            self._odd.clear()
            return True
        low, high = float(known.min()), float(known.max())
        slack = SAME_WORK if high <= (1 + SAME_WORK) * low else 0.5  # works that vary are foreign only far outside
        if low * (1 - slack) <= work <= high * (1 + slack):
            self._odd.clear()
            return True
        self._odd.append(work)
        return False

    def _change_of_work(self) -> None:
        works = np.array(self._odd[-3:])
        if works.max() > (1 + SAME_WORK) * works.min():
            return
        first = self.count - 3
        back = self._before(float(works.mean()))
        self._regime, self._settled, self._reference = first if back is None else back, back, None
        self._odd.clear()
        self._usable[first - self._first : self.count - self._first] = True
        self._healthy[first - self._first : self.count - self._first] = True

    def _before(self, work: float) -> int | None:
        """The first of the latest rows that did this work, before the regime; None where it is new."""
        numbers = self.usable(max(self._oldest, self.count - RECURS))
        numbers = numbers[numbers < self._regime]
        same = np.abs(self.work(numbers) - work) <= SAME_WORK * work
        return int(numbers[same.argmax()]) if same.any() else None

    def _make_room(self) -> None:
        kept = self.count - self._first
        if kept < len(self._work):
            return
        drop = kept - KEEP if kept >= 2 * KEEP else 0
        size = 2 * (kept - drop)
        for name in ("_rows", "_work", "_steps", "_usable", "_healthy"):
            old = getattr(self, name)
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[: kept - drop] = old[drop:kept]
            setattr(self, name, new)
        self._first += drop


def refer(rows: Floats, work: Floats) -> Reference:
    """The reference that these healthy rows [N,C] of this work [N] make."""
    mean = float(work.mean())
    varies = not np.isnan(work).any() and mean > 0 and work.std() > 0.5 * SAME_WORK * mean
    slope = _slope(rows, work) if varies else np.zeros(rows.shape[1])
    level = rows - np.nan_to_num(work - mean)[:, None] * slope
    middle = np.median(level, axis=0)
    apart = level - middle
    spread = 1.4826 * np.median(np.abs(apart), axis=0)
    # Few rows know their scatter badly: a MAD of 8 is off by a third as often as not.
    spread *= (1 + 4 / len(rows)) * _memory(apart, spread)
    return Reference(middle, np.maximum(spread, FLOOR * middle[0]), slope, mean, len(rows))


def _slope(rows: Floats, work: Floats) -> Floats:
    """Seconds per unit of work, by least squares without the slowest tenth; no phase shrinks when work grows."""
    keep = rows[:, 0] <= np.quantile(rows[:, 0], 0.9)
    x, y = work[keep] - work[keep].mean(), rows[keep] - rows[keep].mean(axis=0)
    slope: Floats = np.maximum((x @ y) / max(float(x @ x), 1e-12), 0.0)
    return slope


def _memory(apart: Floats, spread: Floats) -> Floats:
    """By how much [C] slow changes inflate the error of a mean: sqrt((1 + phi) / (1 - phi)), phi of lag 1 below 0.6."""
    z = np.clip(apart / np.maximum(spread, 1e-12), -4, 4)
    z -= z.mean(axis=0)
    phi = np.clip((z[1:] * z[:-1]).sum(axis=0) / np.maximum((z * z).sum(axis=0), 1e-12), 0, 0.6)
    inflation: Floats = np.sqrt((1 + phi) / (1 - phi))
    return inflation


def judge(excess: Floats, scale: Floats) -> tuple[str, int, int] | None:
    """Rule, channel and onset (row) of a slowdown that lasts to the end of these rows [N,C]; None where there is none.

    `scale` [C] is the scatter of a healthy row; both are shares of the step. Of several channels, the largest.
    """
    found = []
    for channel, rule in _rules(excess, scale):
        onset = onset_of(excess[:, channel])
        if channel == 0 or _is_felt(excess[onset:, 0], excess[onset:, channel], float(scale[0])):
            found.append((float(excess[onset:, channel].sum()), channel, rule, onset))
    # A channel says more than the total, so the total speaks only where no channel does.
    channels = [entry for entry in found if entry[1] > 0] or found
    if not channels:
        return None
    _, channel, rule, onset = max(channels)
    return rule, channel, onset


def _rules(e: Floats, scale: Floats) -> list[tuple[int, str]]:
    """The channels in which a rule fires, each with the first of its rules."""
    z = e / scale
    far = z[-20:] > Z_FAR
    fast = far[-5:].sum(axis=0) >= 4
    bursts = far.sum(axis=0) >= 7
    drifts = _drifts(z, scale)
    spikes = ((z[-40:, CHANNEL["load"]] > Z_SPIKE) & (e[-40:, CHANNEL["load"]] > 0.2)).sum() >= 4
    found = []
    for channel in np.flatnonzero(fast | bursts | drifts | (spikes & (np.arange(len(scale)) == CHANNEL["load"]))):
        one = e[:, channel]
        if fast[channel] and np.median(one[-5:]) >= ENTER:
            found.append((int(channel), "D1"))
        elif drifts[channel] and _is_shift(one, z[:, channel], float(scale[channel])):
            found.append((int(channel), "D2"))
        elif bursts[channel] and np.maximum(one[-20:], 0).mean() >= ENTER:
            found.append((int(channel), "D3"))
        elif spikes and channel == CHANNEL["load"] and one[-40:].mean() >= ENTER:
            found.append((int(channel), "D4"))
    return found


def _paths(z: Floats, scale: Floats) -> Floats:
    """[N+1,C] the sums of CUSUM, before their minimum is taken off."""
    slack = np.where(scale > NOISY, 0.5, np.clip(0.5 * ENTER / scale, 0.75, 1.5))
    paths = np.zeros((len(z) + 1, len(scale)))
    np.cumsum(np.clip(z, -4, 4) - slack, axis=0, out=paths[1:])
    return paths


def _drifts(z: Floats, scale: Floats) -> Bools:
    paths = _paths(z, scale)
    drifts: Bools = paths[-1] - paths.min(axis=0) > np.where(scale > NOISY, H_NOISY, H)
    return drifts


def _is_shift(e: Floats, z: Floats, scale: float) -> bool:
    """Whether what CUSUM found since its onset is a shift of a size that matters."""
    path = _paths(z[:, None], np.array([scale]))[:, 0]
    since = e[max(len(path) - 1 - int(path[::-1].argmin()), len(e) - 30) :]
    shift = float(np.median(since)) if len(since) >= 4 else 0.0
    return shift > 0.03 and shift - 2 * 1.2533 * scale / np.sqrt(len(since)) > LEAVE  # 1.2533: error of a median


def _is_felt(total: Floats, channel: Floats, scale: float) -> bool:
    """Whether the step grew with the channel, as far as the step's own noise lets that be said."""
    grown = float(total.mean())
    return grown > 0 and grown + 2 * scale / np.sqrt(len(total)) >= 0.5 * float(channel.mean())


def onset_of(e: Floats) -> int:
    """The row from which on the excess is nearer to its latest level than to nothing (largest suffix sum)."""
    level = max(float(np.median(e[-5:])), float(e[-20:].mean()), 1e-6)
    score = np.clip(e / level, -1, 2) - 0.5
    return int(len(e) - 1 - np.cumsum(score[::-1]).argmax())
