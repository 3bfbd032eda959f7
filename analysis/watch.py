"""One job under observation: each tick takes its new cycles, holds them against references, and says what changed.

- past: the baseline's alarms, from the onset on
- model: bounds that no healthy job breaks, for a job that was slow from its first step and whose past says nothing
- peers: a rank that always computed longer than the others
and beside them checkpoints against earlier checkpoints, and a clock that runs while no step ends.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnosd.analysis import bounds
from diagnosd.analysis.baseline import LEAST, LEAVE, WINDOW, Baseline, Reference
from diagnosd.analysis.classify import Verdict, by_design, classify, hanging
from diagnosd.analysis.compare import COMPUTE, Comparison
from diagnosd.analysis.compare import Window as Span
from diagnosd.analysis.decompose import OWN, PART
from diagnosd.analysis.episodes import Episode, Episodes, Found
from diagnosd.analysis.evidence import least_transfer
from diagnosd.analysis.history import History
from diagnosd.analysis.slowdown import ACCEPT_CYCLES, ACCEPT_S, Slowdown
from diagnosd.analysis.trace import Job, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ASSEMBLE_S = 10.0  # ranks join within seconds of each other; afterwards the job is watched with those that came
PAST_S = 60.0  # counters before the onset: enough for a dozen samples at 5 s, near enough to be the same conditions
SETTLE_S = 0.5  # smoothed values (rtt) take a few round trips to follow
LEAST_S = 3.0  # of a past: a shorter one holds no two samples of what is read every second or two
RECENT = 60  # cycles of a long slowdown that evidence is computed from
FIRST_LOOK, FIRST_LOOK_S = 6, 5.0  # cycles after the warm-up, and their seconds, before a bound or peers are consulted
SKIP = 2  # the first cycles: buffers grow, connections open, caches fill
PEERS, PEERS_S = 20, 10.0
EARLY = 100  # cycles within which what was so from the start has shown; later the job's past judges
APART = 1.25  # by how much a rank's compute must exceed its peers'; alike machines differ by 1 % (diagnosis.md 1.2)
COSTLY = 0.10  # and what that must cost, of the step
SLOW_SAVE = 1.5  # times the usual checkpoint (diagnosis.md 3)
HANG_SUSPECT_S, HANG_S = 10.0, 60.0  # diagnosis.md 2.2, D4
ALIVE_S = 15.0  # a rank that hangs is still told of by the probe's thread, every 5 s at least


class Watch:
    """The job's episodes and the state they are found with."""

    def __init__(self, cluster: str, trace: Trace, job: Job) -> None:
        self.trace, self.job = trace, job
        self.episodes = Episodes(cluster, job.name)
        self.attempt = job.attempt
        self.closed = False
        self._restart()

    def _restart(self) -> None:
        self.history: History | None = None
        self.baseline = Baseline()
        self.slowdown: Slowdown | None = None
        self.cleared = 0  # cycles before this one are judged
        self.saves: list[tuple[int, float]] = []  # cycle and cost of each checkpoint
        self.slow_saves: list[int] = []
        self.judged_save = -1  # the newest healthy checkpoint: before it nothing is judged

    def tick(self, now: int) -> list[dict[str, Any]]:
        """The documents that this second changed; `now` in ns of event time."""
        if self.job.attempt != self.attempt:
            self._end(self.history.newest if self.history else now)
            self.attempt, self.closed = self.job.attempt, False
            self._restart()
        self.closed &= self.job.ended(now)  # a job that was silent for a minute may come back
        if self.closed:
            return []
        if self._take(now) and self.history is not None:
            self._against_past(now)
            self._against_bounds(now)
            self._against_peers(now)
            self._against_saves(now)
        self._progress(now)
        return self.finish(now) if self.job.ended(now) else self.episodes.changes(now)

    def finish(self, now: int) -> list[dict[str, Any]]:
        """The job ended, or nothing more will come; a slowdown ends with the job, and not with the recording."""
        exited = bool(self.job.ranks) and all(info.state != "running" for info in self.job.ranks.values())
        self._by_design()
        if (exited or self.job.ended(now)) and self.history is not None:
            self._end(self.history.newest)
            self.closed = True
        return self.episodes.changes(now, final=True)

    @property
    def suspects(self) -> bool:
        """Whether something is open, so that each second counts."""
        return self.slowdown is not None or any(episode.is_open for episode in self.episodes.all)

    def status(self) -> dict[str, Any]:
        """For a live line: steps so far, the usual step, and what is suspected."""
        reference = self.baseline.reference()
        suspects = [e.verdict.cause for e in self.episodes.all if e.is_open]
        return {
            "steps": self.history.count if self.history else 0,
            "step_s": reference and reference.step,
            "open": suspects,
        }

    def claims(self) -> dict[str, int]:
        """GPU-nanoseconds that each confirmed cause has cost, for the ledger."""
        claims: dict[str, int] = {}
        for episode in self.episodes.all:
            if episode.state in ("confirmed", "resolved"):
                cause = episode.verdict.cause
                claims[cause] = claims.get(cause, 0) + max(0, round(episode.lost * 1e9))
        return claims

    def _end(self, at: int) -> None:
        for origin in ("past", "model", "peers", "checkpoint", "hang"):
            self.episodes.gone(origin, at)

    # -- taking steps ------------------------------------------------------------------------------------------------

    def _take(self, now: int) -> bool:
        steps = self.job.steps()
        if not len(steps):
            return False
        if self.history is None or self.history.ranks != steps.ranks:
            waited = now - self.job.first >= ASSEMBLE_S * 1e9
            if len(steps.ranks) < self.job.world and not waited:
                return False
            self._end(now)
            self._restart()
            self.history = History(steps.ranks, steps.hosts, self.trace.origin)
        before = self.history.count
        self.history.take(steps, now, self._row)
        return self.history.count > before

    def _row(self, number: int, channels: Floats, work: float, usable: bool) -> None:
        self.baseline.add(channels, work, usable=usable)
        if self.slowdown is not None:
            self.baseline.mark(number, number + 1, healthy=False)
        history = self.history
        assert history is not None
        one = np.array([number])
        saved = history.floats("own", one)[0, :, OWN.index("checkpoint")].max()
        if saved > 0:
            parts = history.floats("parts", one)[0]
            self.saves.append((number, float(max(parts[PART["checkpoint"]] + parts[PART["other"]], 0))))
            del self.saves[:-WINDOW]

    # -- the job's own past ------------------------------------------------------------------------------------------

    def _against_past(self, now: int) -> None:
        told = any(episode.state == "confirmed" for episode in self.episodes.open("past"))
        if self.slowdown is not None and self._is_over(told):
            return
        if not told:
            self._look_for_alarm()
        if self.slowdown is None:
            reference = self.baseline.reference()
            if reference is not None:
                self.baseline.notice_faster(reference)
            return
        numbers = self._usable(self.slowdown.onset)
        comparison = self._compare("past", self.slowdown.healthy, numbers)
        if comparison is None:
            return
        found = [self._since(verdict, self.slowdown) for verdict in classify(comparison)]
        touched = self.episodes.observe("past", found, self.attempt)
        self._account(touched, comparison, self.slowdown.reference, numbers, now)

    def _look_for_alarm(self) -> None:
        """Begin a suspicion, or move it: what first looked like noise in one channel may become a fault in another."""
        reference = self.slowdown.reference if self.slowdown else self.baseline.reference()
        alarm = self.baseline.alarm(reference, self.cleared) if reference else None
        if alarm is None or reference is None or (self.slowdown and alarm.onset == self.slowdown.onset):
            return
        taught = self.slowdown.healthy if self.slowdown else self.baseline.taught()
        healthy = taught[taught < alarm.onset]
        if len(healthy) < LEAST or self.baseline.rows(healthy)[:, 0].sum() < LEAST_S:
            self.baseline.begin(alarm.onset)  # so little of it was as before that it was still warming up
            self.slowdown = None
            return
        self.baseline.mark(self.cleared, self.baseline.count, healthy=True)
        self.baseline.mark(alarm.onset, self.baseline.count, healthy=False)
        self.slowdown = Slowdown(alarm.onset, alarm.excess, healthy, reference)

    def _since(self, verdict: Verdict, slowdown: Slowdown) -> Found:
        """The verdict with its own onset."""
        row = slowdown.onset_of(verdict.cause, self.baseline, self.cleared)
        return Found(verdict, self._instant(row), row)

    def _is_over(self, told: bool) -> bool:
        """Whether the job is as it was; of several causes, each ends by itself."""
        assert self.slowdown is not None
        last = self.slowdown.ended("unknown", self.baseline)
        if last is not None:
            self.episodes.gone("past", self._ended(last))
            self.baseline.mark(last + 1 if told else self.slowdown.onset, self.baseline.count, healthy=True)
            self.cleared, self.slowdown = last + 1, None
            return True
        for episode in self.episodes.open("past"):
            row = self.slowdown.ended(episode.verdict.cause, self.baseline)
            if episode.state == "confirmed" and row is not None and row >= episode.row:
                self.episodes.close(episode, self._ended(row))
        numbers = self._usable(self.slowdown.onset)
        if told or len(numbers) < ACCEPT_CYCLES or self.baseline.rows(numbers)[:, 0].sum() < ACCEPT_S:
            return False
        self.episodes.gone("past", 0)
        self.baseline.begin(self.slowdown.onset)
        self.cleared, self.slowdown = self.slowdown.onset, None
        return True

    def _ended(self, number: int) -> int:
        """When a cycle ended, ns."""
        assert self.history is not None
        kept = np.array([max(number, self.history.first)])
        return round(float(self.history.floats("end", kept)[0]) * 1e9) + self.trace.origin

    def _usable(self, since: int) -> Ints:
        assert self.history is not None
        numbers = self.baseline.usable(since)
        return numbers[numbers >= self.history.first]

    def _instant(self, number: int) -> int:
        """When a cycle began, ns."""
        assert self.history is not None
        return round(self.history.start_of(max(number, self.history.first)) * 1e9) + self.trace.origin

    # -- bounds, for what was slow from the start --------------------------------------------------------------------

    def _early(self, origin: str, least: int, least_s: float) -> Ints | None:
        """The newest healthy cycles, once there are enough.

        None where it is too late for a finding to have been there from the start, and while the job is slower than its
        own past.
        """
        started = self.baseline.count <= EARLY or self.episodes.open(origin)
        numbers = self.baseline.usable(SKIP, healthy=True)[-RECENT:]
        if not started or self.slowdown is not None or len(numbers) < least:
            return None
        spent = float(self.baseline.rows(numbers)[:, 0].sum())
        return numbers if spent >= least_s else None

    def _against_bounds(self, now: int) -> None:
        numbers = self._early("model", FIRST_LOOK, FIRST_LOOK_S)
        if numbers is None:
            return
        seen = self._compare("model", np.empty(0, np.int64), numbers)
        if seen is None:
            return
        expected, own = seen.observed.copy(), seen.own_observed.copy()
        if self._starves(seen, numbers):
            expected[PART["data_wait"]] = 0.0
            own[:, OWN.index("data_wait")] = 0.0
        expected[PART["transfer"]] = min(least_transfer(seen) or np.inf, expected[PART["transfer"]])
        comparison = replace(seen, expected=expected, own_expected=own)
        if comparison.lost < LEAVE * comparison.step:
            self.episodes.gone("model", now)
            return
        verdicts = [v for v in classify(comparison) if v.cause in ("data_starvation", "topology_misconfiguration")]
        if not verdicts:
            self.episodes.gone("model", now)
            return
        found = [Found(verdict, self._instant(0), 0) for verdict in verdicts]
        touched = self.episodes.observe("model", found, self.attempt)
        self._account(touched, comparison, None, numbers, now)

    def _starves(self, c: Comparison, numbers: Ints) -> bool:
        """Whether batches were waited for all along: in both halves, and with an empty queue where that is known."""
        if not c.loads.any():
            return False
        rows = self.baseline.rows(numbers)
        halves = np.array_split(rows, 2)
        empty = c.empty[c.loads & ~np.isnan(c.empty)]
        waits = all(np.median(half[:, 1] / half[:, 0]) >= bounds.STARVED for half in halves)
        return waits and (not empty.size or empty.max() >= 0.5)

    # -- peers -------------------------------------------------------------------------------------------------------

    def _against_peers(self, now: int) -> None:
        numbers = self._early("peers", PEERS, PEERS_S)
        history = self.history
        if numbers is None or history is None or len(history.ranks) < 2:
            return
        seen = self._compare("peers", np.empty(0, np.int64), numbers)
        slow = self._slow_peer(numbers)
        if seen is None or slow is None or not seen.apart:
            self.episodes.gone("peers", now)
            return
        own, columns = seen.own_observed.copy(), [OWN.index(name) for name in COMPUTE]
        own[slow, columns] = np.median(np.delete(own, slow, axis=0)[:, columns], axis=0)
        expected = seen.observed.copy()
        shift = seen.own_observed[slow, columns] - own[slow, columns]
        expected[[PART[name] for name in COMPUTE]] -= np.maximum(shift, 0)
        comparison = replace(seen, expected=np.maximum(expected, 0), own_expected=own)
        verdicts = [v for v in classify(comparison) if v.cause == "straggler"]
        if comparison.lost < COSTLY * comparison.step or not verdicts:
            self.episodes.gone("peers", now)
            return
        found = [Found(verdict, self._instant(0), 0) for verdict in verdicts]
        touched = self.episodes.observe("peers", found, self.attempt)
        self._account(touched, comparison, None, numbers, now)

    def _slow_peer(self, numbers: Ints) -> int | None:
        """Column of the rank that computes longer than its peers for the same work, in both halves of these cycles."""
        assert self.history is not None
        history = self.history
        compute = history.floats("own", numbers)[..., [OWN.index(name) for name in COMPUTE]].sum(axis=-1)
        per_work = history.floats("compute_per_work", numbers)
        found = set()
        for each in (compute, per_work if not np.isnan(per_work).any() else compute):
            for half in np.array_split(each, 2):
                middle = np.median(half, axis=0)
                column = int(middle.argmax())
                others = float(np.median(np.delete(middle, column)))
                found.add(column if middle[column] > APART * others > 0 else -1)
        slow = found.pop()
        last = history.get("last", numbers) == slow
        return slow if not found and slow >= 0 and last.mean() >= 0.8 else None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _against_saves(self, now: int) -> None:
        """Each checkpoint against the healthy ones before it."""
        judged = max(self.slow_saves[-1] if self.slow_saves else -1, self.judged_save)
        fresh = [(number, cost) for number, cost in self.saves if number > judged]
        reference = self.baseline.reference()
        if reference is None or not fresh:
            return
        for number, cost in fresh:
            usual = [c for n, c in self.saves if n < number and n not in self.slow_saves]
            if len(usual) < 2:
                self.judged_save = number
                continue
            middle = float(np.median(usual))
            spread = 1.4826 * float(np.median(np.abs(np.array(usual) - middle)))
            if cost > max(SLOW_SAVE * middle, middle + 0.25 * reference.step, middle + 6 * spread):
                self.slow_saves.append(number)
            else:
                self._saved_well(number)
        self._tell_saves(reference, now)

    def _saved_well(self, number: int) -> None:
        self.judged_save = number
        if self.episodes.open("checkpoint") and self.slow_saves:
            self.episodes.gone("checkpoint", self._ended(self.slow_saves[-1]))

    def _tell_saves(self, reference: Reference, now: int) -> None:
        history = self.history
        assert history is not None
        run = [number for number in self.slow_saves if number > self.judged_save and number >= history.first]
        usual = np.array([n for n, _ in self.saves if n not in self.slow_saves and n >= history.first], np.int64)
        if not run or not len(usual):
            return
        comparison = self._compare("past", usual, np.array(run))
        if comparison is None:
            return
        verdicts = [v for v in classify(comparison) if v.cause == "checkpoint_stall"]
        found = [Found(verdict, self._instant(run[0]), run[0]) for verdict in verdicts]
        touched = self.episodes.observe("checkpoint", found, self.attempt)
        for episode in touched:
            episode.agreed = max(episode.agreed, 2)
            every = history.numbers(run[0])
            lost = comparison.lost * len(run)
            episode.observed = float(history.floats("duration", every).sum())
            episode.expected = max(episode.observed - lost, 1e-9)
            episode.lost, episode.ranks = lost * len(history.ranks), self.job.world
            episode.step, episode.gain = reference.step, lost / max(episode.observed, 1e-9)
            large = lost >= max(10 * reference.step, 5.0)
            self.episodes.confirm(episode, now, len(run), at_once=len(run) >= 2 or large)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def _compare(self, against: str, healthy: Ints, numbers: Ints) -> Comparison | None:
        """These cycles beside healthy ones; without those, what was observed is expected, until a bound changes it."""
        history = self.history
        assert history is not None
        recent = numbers[-RECENT:]
        healthy = healthy[healthy >= history.first]
        if not len(recent) or (against == "past" and not len(healthy)):
            return None
        observed, own = history.floats("parts", recent).mean(axis=0), history.floats("own", recent).mean(axis=0)
        usual, own_usual = observed, own
        before: Span | None = None
        start = history.start_of(int(recent[0]))
        if len(healthy):
            usual, own_usual = _typical(history, healthy)
            began, onset = history.start_of(int(healthy[0])), history.start_of(int(numbers[0]))
            before = (max(began, onset - PAST_S), min(onset, float(history.floats("end", healthy[-1:])[0]) + 60))
        now_s = (self.trace.now - self.trace.origin) / 1e9
        last = history.get("last", recent)
        late = history.floats("late", recent)
        return Comparison(
            trace=self.trace,
            job=self.job,
            against=against,
            ranks=history.ranks,
            hosts=history.hosts,
            before=before,
            during=(start + SETTLE_S, max(now_s, start + SETTLE_S + 1.0)),
            expected=usual,
            observed=observed,
            own_expected=own_usual,
            own_observed=own,
            last=np.array([float((last == column).mean()) for column in range(len(history.ranks))]),
            apart=self._are_apart(late),
            timed=bool(history.get("timed", recent).all()),
            loads=self._loads(own),
            empty=_share(history.floats("queue", recent) <= 0, history.floats("queue", recent)),
            full=_share(
                history.floats("queue", recent) >= history.floats("queue_size", recent), history.floats("queue", recent)
            ),
            workers=_latest(history.floats("workers", recent)),
            cycles=len(recent),
            cycles_before=len(healthy),
            sync_bytes=float(np.median(history.floats("sync_bytes", recent))) or nan,
            from_start=against == "model",
        )

    def _are_apart(self, late: Floats) -> bool:
        """Whether the last to arrive was last by more than the clocks' noise."""
        assert self.history is not None
        if late.shape[1] < 2 or np.isnan(late).any():
            return False
        lead = np.diff(np.sort(late, axis=1)[:, -2:], axis=1)
        return float(np.median(lead)) > self.history.noise

    def _loads(self, own: Floats) -> npt.NDArray[np.bool_]:
        """Which ranks load data: they say so, or they wait for it."""
        assert self.history is not None
        waits = own[:, OWN.index("data_wait")] > 0
        told = [self.job.ranks[rank].loader if rank in self.job.ranks else None for rank in self.history.ranks]
        return np.array([loader != "none" and bool(wait) for loader, wait in zip(told, waits, strict=True)])

    # -- costs -------------------------------------------------------------------------------------------------------

    def _account(
        self, touched: list[Episode], c: Comparison, reference: Reference | None, numbers: Ints, now: int
    ) -> None:
        """What each episode has cost: the excess of its cycles, shared by what each explains."""
        named = [e for e in touched if e.state in ("suspected", "confirmed")]
        shares = {id(e): c.share(*e.verdict.claims) if e.verdict.claims else 1.0 for e in named}
        whole = sum(shares.values())
        for episode in named:
            if episode.state == "suspected":
                episode.lost = episode.observed = episode.expected = 0.0
                episode.counted = episode.row
            fresh = numbers[numbers >= episode.counted]
            observed = self.baseline.rows(fresh)[:, 0]
            expected = (
                np.full(len(fresh), c.step) if reference is None else reference.expect(self.baseline.work(fresh))[:, 0]
            )
            part = shares[id(episode)] / whole if len(named) > 1 and whole > 0 else 1.0
            episode.lost += part * float((observed - expected).sum()) * self.job.world
            episode.observed += float(observed.sum())
            episode.expected += float(expected.sum())
            episode.counted = int(numbers[-1]) + 1 if len(numbers) else episode.counted
            episode.step = c.step if reference is None else reference.step
            episode.scatter = 0.0 if reference is None else float(reference.scale[0]) / reference.step
            episode.gain, episode.ranks = self._gain(episode.verdict, c, numbers), self.job.world
            self.episodes.confirm(episode, now, int((numbers >= episode.row).sum()))

    def _gain(self, verdict: Verdict, c: Comparison, numbers: Ints) -> float:
        """Share of the step that repairing this alone would save: the next to arrive sets the pace then."""
        assert self.history is not None
        outside = [part for part in verdict.claims if part not in OWN]
        inside = [OWN.index(part) for part in verdict.claims if part in OWN]
        saved = max(c.excess(*outside), 0.0) if outside else 0.0
        recent = numbers[-RECENT:]
        late = self.history.floats("late", recent)
        if inside:
            own = self.history.floats("own", recent)[..., inside].sum(axis=-1)
            grown = _only(np.maximum(own - c.own_expected[:, inside].sum(axis=1), 0), verdict.columns)
            if np.isnan(late).any():
                saved += float(grown.max(axis=1).mean())
            else:
                saved += float((late.max(axis=1) - (late - grown).max(axis=1)).mean())
        return float(np.clip(saved / max(c.step * c.slowdown, 1e-9), 0.0, 1.0))

    # -- information, and no progress --------------------------------------------------------------------------------

    def _by_design(self) -> None:
        """Communication that takes much of each step without being anybody's fault: told once, at the end."""
        numbers = self.baseline.taught()
        if self.history is None or len(numbers) < PEERS or any(e.state != "suspected" for e in self.episodes.all):
            return
        seen = self._compare("model", np.empty(0, np.int64), numbers)
        if seen is not None:
            verdict = by_design(seen)
            if verdict is not None:
                self.episodes.latent("model", verdict, self.attempt)

    def _progress(self, now: int) -> None:
        history = self.history
        if history is None or history.count < PEERS:
            return
        still = (now - history.newest) / 1e9
        if still < HANG_SUSPECT_S and not self.episodes.open("hang"):
            return
        durations = history.floats("duration", history.numbers(history.count - WINDOW))
        median, high = float(np.median(durations)), float(np.quantile(durations, 0.95))
        if still < max(5 * high, HANG_SUSPECT_S):
            self.episodes.gone("hang", history.newest)
            return
        running = [info for info in self.job.ranks.values() if info.state == "running"]
        heard = [info for info in running if now - info.last <= ALIVE_S * 1e9]
        if len(running) < len(self.job.ranks) or not heard:
            return  # ranks that exited do not hang, and ranks of whom nothing is heard may have been killed
        verdict = hanging(self.trace, self.job, still, median)
        if verdict is None:
            return
        found = [Found(verdict, history.newest, history.count)]
        for episode in self.episodes.observe("hang", found, self.attempt):
            episode.lost, episode.ranks = still * self.job.world, self.job.world
            episode.observed, episode.expected, episode.step, episode.gain = still, median, median, 1.0
            if still >= max(10 * median, HANG_S):
                self.episodes.confirm(episode, now, 0, at_once=True)


def _typical(history: History, numbers: Ints) -> tuple[Floats, Floats]:
    """Mean parts and own work of healthy cycles, without the tenth that took longest: pauses are not the usual."""
    duration = history.floats("duration", numbers)
    kept = numbers[duration <= np.quantile(duration, 0.9)] if len(numbers) >= 10 else numbers
    return history.floats("parts", kept).mean(axis=0), history.floats("own", kept).mean(axis=0)


def _only(grown: Floats, columns: tuple[int, ...]) -> Floats:
    """The growth [C,R] of these columns; of all where none is named."""
    if not columns:
        return grown
    kept = np.zeros_like(grown)
    kept[:, columns] = grown[:, columns]
    return kept


def _share(those: npt.NDArray[np.bool_], values: Floats) -> Floats:
    """[R] share of the cycles in which it is so, of those with a value; NaN where there is none."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    return np.where(count > 0, (those & known).sum(axis=0) / np.maximum(count, 1), nan)


def _latest(values: Floats) -> Floats:
    latest: Floats = values[-1]
    return latest
