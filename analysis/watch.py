"""One job under observation: each tick takes its new cycles, holds them against references, and says what changed.

- past: the baseline's alarms, from the onset on
- model: bounds that no healthy job breaks, for a job that was slow from its first step and whose past says nothing
- peers: a rank that always computed longer than the others
and beside them checkpoints against earlier checkpoints, and a clock that runs while no step ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnosd.analysis import bounds, hang
from diagnosd.analysis.baseline import LEAST, LEAVE, Alarm, Baseline, Reference
from diagnosd.analysis.checkpoints import LARGE_S, LARGE_STEPS, Checkpoints, Save
from diagnosd.analysis.classify import Verdict, by_design, classify, present
from diagnosd.analysis.compare import RECENT, Comparison, Past, compare, past
from diagnosd.analysis.cost import mends, price, price_saves, price_until, waited
from diagnosd.analysis.decompose import COMPUTE, OWN, PART
from diagnosd.analysis.episodes import Episode, Episodes, Found
from diagnosd.analysis.evidence import is_beyond_bound, least_transfer
from diagnosd.analysis.figures import seconds
from diagnosd.analysis.history import History, of_those_heard
from diagnosd.analysis.ledger import NOTHING, Claim
from diagnosd.analysis.slowdown import ACCEPT_CYCLES, ACCEPT_S, CALM, Slowdown
from diagnosd.analysis.trace import Job, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ASSEMBLE_S = 10.0  # ranks join within seconds of each other; afterwards the job is watched with those that came
LEAST_S = 3.0  # of a past: a shorter one holds no two samples of what is read every second or two
FIRST_LOOK, FIRST_LOOK_S = 6, 5.0  # cycles after the warm-up, and their seconds, before a bound or peers are consulted
SKIP = 2  # the first cycles: buffers grow, connections open, caches fill
PEERS, PEERS_S = 20, 10.0
REJUDGE_S = 5.0  # what is told and agreed upon is weighed anew with each sample of the slowest connection counters
# Rows, and seconds since the job began, within which what was so from the start has shown; later the job's past judges.
# Peers are asked after 10 s, what they say must hold for 5 s, and a third of what is read comes every 10 s.
EARLY, EARLY_S = 100, 30.0
APART = 1.25  # by how much a rank's compute must exceed its peers'; alike machines differ by 1 % (diagnosis.md 1.2)
COSTLY = 0.10  # and what that must cost, of the step
ALWAYS_LAST = 0.8  # and in what share of the steps the others must wait for it
FOLLOWS = "Most of it follows the save itself, in no phase: copying, flushing, uploading."
# Medians of 30 rows scatter by a tenth of a threshold and more: what is told stays so down to this share of it.
STAYS = 0.8


class Watch:
    """The job's episodes and the state they are found with."""

    def __init__(self, cluster: str, trace: Trace, job: Job) -> None:
        self.trace, self.job = trace, job
        self.episodes = Episodes(cluster, job.name)
        self.attempt = job.attempt
        self.closed = False
        self.judged, self.judged_s = 0, 0.0  # steps, and their seconds, that were held against the job's past
        self._restart()

    def _restart(self) -> None:
        self.history: History | None = None
        self.baseline = Baseline()
        self.slowdown: Slowdown | None = None
        self.past: Past | None = None  # that of the slowdown, or of the last one
        self.weighed = 0  # ns: when the evidence of the slowdown was last weighed
        self.cleared = 0  # cycles before this one are judged
        self._spent = 0.0  # seconds of this attempt, without its first steps
        self.checkpoints = Checkpoints()

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
            self._against_checkpoints(now)
        self._against_standstill(now)
        return self.finish(now) if self.job.ended(now) else self.episodes.changes(now)

    def finish(self, now: int) -> list[dict[str, Any]]:
        """The job ended, or nothing more will come; a slowdown ends with the job, and not with the recording."""
        exited = bool(self.job.ranks) and all(info.state != "running" for info in self.job.ranks.values())
        self._information()
        if (exited or self.job.ended(now)) and self.history is not None:
            self._end(self.history.newest)
            self.closed = True
        return self.episodes.changes(now, final=True)

    @property
    def suspects(self) -> bool:
        """Whether something is open, so that each second counts."""
        return self.slowdown is not None or any(episode.is_open for episode in self.episodes.all)

    def status(self) -> dict[str, Any]:
        """For a live line: steps so far, the usual step and the present one (s), and seconds since the last one."""
        reference, job = self.baseline.reference(), self.job
        newest = self.baseline.usable()[-CALM:]
        return {
            "steps": job.taken // max(1, len(job.ranks)),
            "step_s": reference and reference.step,
            "now_s": float(np.median(self.baseline.rows(newest)[:, 0])) if len(newest) else None,
            "still_s": (self.trace.now - job.stepped) / 1e9 if job.stepped else None,
        }

    def claims(self) -> dict[str, Claim]:
        """What each confirmed cause has cost, for the ledger, and what was too short to have one."""
        claims: dict[str, Claim] = {}
        for episode in self.episodes.all:
            if episode.state in ("confirmed", "resolved"):
                cause = episode.verdict.cause
                claims[cause] = claims.get(cause, NOTHING).plus(_claim(episode))
        for episode in self.episodes.brief():
            claims["unknown"] = claims.get("unknown", NOTHING).plus(_claim(episode))
        return claims

    def _end(self, at: int) -> None:
        for origin in ("past", "model", "peers", "checkpoint", "hang"):
            self.episodes.gone(origin, at)

    # -- taking steps ------------------------------------------------------------------------------------------------

    def _take(self, now: int) -> bool:
        steps = self.job.steps()
        if not len(steps):
            return False
        steps = of_those_heard(steps)
        if self.history is None:
            waited = now - self.job.first >= ASSEMBLE_S * 1e9
            if len(steps.ranks) < self.job.world and not waited:
                return False
            self.history = History(steps.ranks, steps.hosts, self.trace.origin)
        if self.history.ranks != steps.ranks:
            self.history.go_on_with(steps.ranks, steps.hosts)
        before = self.history.count
        self.history.take(steps, now, self._row)
        if self.baseline.reference() is not None:
            numbers = self.baseline.usable(before)
            self.judged += int(self.baseline.steps(numbers).sum())
            self.judged_s += float(self.baseline.seconds(numbers).sum())
        return self.history.count > before

    def _row(self, number: int, channels: Floats, work: float, usable: bool, steps: int) -> None:
        self.baseline.add(channels, work, usable=usable, steps=steps)
        self._spent += float(channels[0]) * steps if number >= SKIP else 0.0
        if self.slowdown is not None:
            self.baseline.mark(number, number + 1, healthy=False)
        history = self.history
        assert history is not None
        one = np.array([number])
        if history.floats("own", one)[0, :, OWN.index("checkpoint")].max() > 0:
            took = past(history, one, number)
            cost = float(took.parts[PART["checkpoint"]] + took.parts[PART["other"]])
            start, end = self._instant(number), self._ended(number)
            self.checkpoints.add(Save(number, self._step(number), start, end, cost, took))

    # -- the job's own past ------------------------------------------------------------------------------------------

    def _against_past(self, now: int) -> None:
        told = any(episode.state == "confirmed" for episode in self.episodes.open("past"))
        if self.slowdown is not None and self._is_over(told):
            return
        if not told:
            self._look_for_alarm(now)
        if self.slowdown is None:
            reference = self.baseline.reference()
            if reference is not None:
                self.baseline.notice_faster(reference)
            return
        numbers = self._usable(self.slowdown.onset)
        settled = told and all(episode.missed == 0 for episode in self.episodes.open("past"))
        if settled and now - self.weighed < REJUDGE_S * 1e9:
            for episode in self.episodes.open("past"):
                price(episode, self.baseline, numbers, self.slowdown.reference)
            return
        self.weighed = now
        comparison = self._compare("past", self.past, numbers)
        if comparison is None:
            return
        found = [self._since(verdict, self.slowdown) for verdict in classify(comparison)]
        touched = self.episodes.observe("past", found, self.attempt)
        self._account(touched, comparison, self.slowdown.reference, numbers, now)

    def _look_for_alarm(self, now: int) -> None:
        """Begin a suspicion, or move it: what first looked like noise in one channel may become a fault in another."""
        reference = self.slowdown.reference if self.slowdown else self.baseline.reference()
        alarm = self.baseline.alarm(reference, self.cleared) if reference else None
        if alarm is None or reference is None or (self.slowdown and self._goes_on(self.slowdown, alarm)):
            return
        self.past = self._past(alarm.onset)
        if self.past is None:
            self.baseline.begin(alarm.onset)
            self.episodes.gone("past", now)
            self.slowdown = None
            return
        self.baseline.mark(self.cleared, self.baseline.count, healthy=True)
        self.baseline.mark(alarm.onset, self.baseline.count, healthy=False)
        self.slowdown = Slowdown(alarm.onset, alarm.excess, reference)

    def _goes_on(self, slowdown: Slowdown, alarm: Alarm) -> bool:
        """Whether an alarm is of the same slowdown: all since its onset was slow. Alarms look back over 100 rows."""
        numbers = self._usable(slowdown.onset)
        between = numbers[numbers < alarm.onset]
        if not len(between):
            return alarm.onset == slowdown.onset
        return float(np.median(slowdown.excess(self.baseline, between)[:, 0])) > 0.5 * alarm.excess

    def _past(self, onset: int) -> Past | None:
        """What it was like; None where so little of it was as before that it was still warming up.

        After a long slowdown the rows before it are no longer kept, and those since may be few.
        """
        history = self.history
        assert history is not None
        taught = self.past.rows if self.slowdown and self.past else self.baseline.taught()
        healthy = taught[taught < onset]
        kept = self._kept(healthy)
        if len(kept) >= LEAST and history.seconds(kept).sum() >= LEAST_S:
            return past(history, kept, onset)
        return self.past if len(kept) < len(healthy) else None

    def _since(self, verdict: Verdict, slowdown: Slowdown) -> Found:
        """The verdict with its own onset."""
        row = slowdown.onset_of(verdict.cause, self.baseline, self.cleared)
        return Found(verdict, self._instant(row), row, self._step(row))

    def _is_over(self, told: bool) -> bool:
        """Whether the job is as it was; of several causes, each ends by itself."""
        assert self.slowdown is not None
        last = self.slowdown.ended("unknown", self.baseline)
        if last is not None:
            for episode in self.episodes.open("past"):
                price_until(episode, self.baseline, last, self.slowdown.reference)
            self.episodes.gone("past", self._ended(last))
            self.baseline.mark(last + 1 if told else self.slowdown.onset, self.baseline.count, healthy=True)
            self.cleared, self.slowdown = last + 1, None
            return True
        for episode in self.episodes.open("past"):
            row = self.slowdown.ended(episode.verdict.cause, self.baseline)
            if episode.state == "confirmed" and row is not None and row >= episode.row:
                price_until(episode, self.baseline, row, self.slowdown.reference)
                self.episodes.close(episode, self._ended(row))
        numbers = self._usable(self.slowdown.onset)
        if told or len(numbers) < ACCEPT_CYCLES or self.baseline.seconds(numbers).sum() < ACCEPT_S:
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
        return self._kept(self.baseline.usable(since))

    def _kept(self, numbers: Ints) -> Ints:
        """Those whose rows the history still holds."""
        return numbers[numbers >= self.history.first] if self.history is not None else numbers[:0]

    def _instant(self, number: int) -> int:
        """When a cycle began, ns."""
        assert self.history is not None
        return round(self.history.start_of(max(number, self.history.first)) * 1e9) + self.trace.origin

    def _step(self, number: int) -> int:
        """The framework's number of the step that a row begins with."""
        assert self.history is not None
        return int(self.history.floats("number", np.array([max(number, self.history.first)]))[0])

    # -- bounds, for what was slow from the start --------------------------------------------------------------------

    def _early(self, origin: str, least: int, least_s: float) -> Ints | None:
        """The newest healthy cycles, once there are enough.

        None where it is too late for a finding to have been there from the start, and while the job is slower than its
        own past.
        """
        early = self.baseline.count <= EARLY or self._spent <= EARLY_S
        if self.slowdown is not None or not (early or self.episodes.open(origin)):
            return None
        numbers = self._kept(self.baseline.usable(SKIP, healthy=True))[-RECENT:]
        return numbers if len(numbers) >= least and self._spent >= least_s else None

    def _against_bounds(self, now: int) -> None:
        numbers = self._early("model", FIRST_LOOK, FIRST_LOOK_S)
        seen = self._compare("model", None, numbers) if numbers is not None else None
        if numbers is None or seen is None:
            return
        expected, own = seen.observed.copy(), seen.own_observed.copy()
        if self._starves(seen, numbers):
            expected[PART["data_wait"]] = 0.0
            own[:, OWN.index("data_wait")] = 0.0
        expected[PART["transfer"]] = min(least_transfer(seen) or np.inf, expected[PART["transfer"]])
        comparison = replace(seen, expected=expected, own_expected=own)
        slow = bounds.HEALTHY * self._eased("model", "topology_misconfiguration", "unknown")
        told = ["data_starvation", "topology_misconfiguration", *(["unknown"] if is_beyond_bound(seen, slow) else [])]
        verdicts = classify(comparison) if comparison.lost >= LEAVE * comparison.step else []
        self._always([verdict for verdict in verdicts if verdict.cause in told], comparison, numbers, now)

    def _starves(self, c: Comparison, numbers: Ints) -> bool:
        """Whether batches were waited for all along: in both halves, and with an empty queue where that is known."""
        if not c.loads.any():
            return False
        rows, eased = self.baseline.rows(numbers), self._eased("model", "data_starvation")
        halves = np.array_split(rows, 2)
        empty = c.empty[c.loads & ~np.isnan(c.empty)]
        waits = all(np.median(half[:, 1] / half[:, 0]) >= eased * bounds.STARVED for half in halves)
        return waits and (not empty.size or empty.max() >= eased * 0.5)

    def _eased(self, origin: str, *causes: str) -> float:
        """What of a threshold is enough: all of it, or STAYS where it is told that it was passed."""
        told = {episode.verdict.cause for episode in self.episodes.open(origin) if episode.state == "confirmed"}
        return 1.0 if told.isdisjoint(causes) else STAYS

    def _always(self, verdicts: list[Verdict], c: Comparison, numbers: Ints, now: int) -> None:
        """What a bound or peers show at this look: so since the first step."""
        found = [Found(verdict, self._instant(0), 0, None) for verdict in verdicts]
        self._account(self.episodes.look(c.against, found, self.attempt, now), c, c.step, numbers, now)

    # -- peers -------------------------------------------------------------------------------------------------------

    def _against_peers(self, now: int) -> None:
        numbers = self._early("peers", PEERS, PEERS_S)
        seen = self._compare("peers", None, numbers) if numbers is not None else None
        if numbers is None or seen is None or len(seen.ranks) < 2:
            return
        eased = self._eased("peers", "straggler")
        slow = self._slow_peer(numbers, eased) if seen.apart else None
        comparison = _beside_peers(seen, slow) if slow is not None else seen
        verdicts = classify(comparison) if comparison.lost >= eased * COSTLY * comparison.step else []
        self._always([verdict for verdict in verdicts if verdict.cause == "straggler"], comparison, numbers, now)

    def _slow_peer(self, numbers: Ints, eased: float) -> int | None:
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
                found.add(column if middle[column] > (1 + eased * (APART - 1)) * others > 0 else -1)
        slow = found.pop()
        last = history.get("last", numbers) == slow
        return slow if not found and slow >= 0 and last.mean() >= eased * ALWAYS_LAST else None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _against_checkpoints(self, now: int) -> None:
        saves, reference = self.checkpoints, self.baseline.reference()
        if reference is None or not saves.judge(reference.step):
            return
        if not saves.run:
            if saves.slow is not None:
                self.episodes.gone("checkpoint", saves.slow.end)
            return
        numbers, first, before = np.array([save.number for save in saves.run]), saves.first, saves.past
        comparison = self._compare("past", before, self._kept(numbers))
        if comparison is None or first is None or before is None:
            return
        whole = comparison if self.slowdown else _with_what_follows(comparison)
        verdicts = [verdict for verdict in classify(whole) if verdict.cause == "checkpoint_stall"]
        said = [replace(verdict, text=f"{verdict.text} {_of_saving(comparison, whole)}") for verdict in verdicts]
        found = [Found(verdict, first.start, first.number, first.step) for verdict in said]
        for episode in self.episodes.observe("checkpoint", found, self.attempt):
            episode.step, episode.ranks, episode.waited = reference.step, self.job.world, waited(whole)
            price_saves(episode, saves.run, float(before.parts.sum()))
            lost = episode.observed - episode.expected
            if len(saves.run) > 1 or lost >= max(LARGE_STEPS * reference.step, LARGE_S):
                self.episodes.confirm(episode, now, len(saves.run), at_once=True)

    # -- what all references share -----------------------------------------------------------------------------------

    def _compare(self, against: str, before: Past | None, numbers: Ints) -> Comparison | None:
        assert self.history is not None
        return compare(self.trace, self.job, self.history, against, before, numbers)

    def _account(
        self, touched: list[Episode], c: Comparison, reference: Reference | float, numbers: Ints, now: int
    ) -> None:
        """Price the episodes of this tick, the loss shared by what each explains, and tell those that have held."""
        assert self.history is not None
        named = [episode for episode in touched if episode.is_open]
        shares = [c.share(*episode.verdict.claims) if episode.verdict.claims else 1.0 for episode in named]
        for episode, share in zip(named, shares, strict=True):
            episode.ranks = self.job.world
            episode.share = share / sum(shares) if len(named) > 1 else 1.0
            price(episode, self.baseline, numbers, reference)
            episode.mends, episode.waited = mends(episode.verdict, c, self.history, numbers), waited(c)
            self.episodes.confirm(episode, now, int((numbers >= episode.row).sum()))

    # -- information, and no progress --------------------------------------------------------------------------------

    def _information(self) -> None:
        """Told once, at the end: faults that are there, whatever they cost; communication that is nobody's fault."""
        numbers = self._kept(self.baseline.taught())
        seen = self._compare("model", None, numbers) if self.history is not None else None
        if seen is None:
            return
        verdict = present(seen)
        if verdict is not None:
            self.episodes.latent("model", verdict, self.attempt)
        told = any(episode.state != "suspected" for episode in self.episodes.all)
        verdict = by_design(seen) if len(numbers) >= PEERS and not told else None
        if verdict is not None:
            self.episodes.latent("model", verdict, self.attempt)

    def _against_standstill(self, now: int) -> None:
        history = self.history
        if history is None or not hang.is_suspect(history, now):
            self.episodes.gone("hang", history.newest if history else now)
            return
        still, usual, _ = hang.progress(history, now)
        verdict = hang.verdict(self.trace, self.job, still, usual) if hang.is_alive(self.job, now) else None
        if verdict is None:
            return
        found = [Found(verdict, history.newest, history.count, history.number)]
        for episode in self.episodes.observe("hang", found, self.attempt):
            episode.lost, episode.ranks = still * self.job.world, self.job.world
            episode.observed, episode.expected, episode.step, episode.mends = still, usual, usual, 1.0
            if hang.is_certain(history, now):
                self.episodes.confirm(episode, now, 0, at_once=True)


def _beside_peers(c: Comparison, slow: int) -> Comparison:
    """The same, where the rank in this column is expected to compute as long as the others."""
    own, columns = c.own_observed.copy(), [OWN.index(name) for name in COMPUTE]
    own[slow, columns] = np.median(np.delete(own, slow, axis=0)[:, columns], axis=0)
    expected = c.observed.copy()
    expected[[PART[name] for name in COMPUTE]] -= np.maximum(c.own_observed[slow, columns] - own[slow, columns], 0)
    return replace(c, expected=np.maximum(expected, 0), own_expected=own)


def _claim(episode: Episode) -> Claim:
    lost = max(0, round(episode.lost * 1e9))
    if episode.origin == "hang":
        return Claim(still=lost)
    waited = round(episode.waited * lost)
    return Claim(lost - waited, waited)


def _of_saving(c: Comparison, whole: Comparison) -> str:
    """What a step with a checkpoint takes, for the episode's figures are of all steps; `whole`: with what follows."""
    saving, in_all = ((each.own_observed - each.own_expected)[:, OWN.index("checkpoint")].max() for each in (c, whole))
    takes = f"A step with a checkpoint takes {seconds(c.step + c.lost)} instead of {seconds(c.step)}."
    return f"{takes} {FOLLOWS}" if saving < 0.5 * in_all else takes


def _with_what_follows(c: Comparison) -> Comparison:
    """The same of steps with a checkpoint, where what the rank that saves does in no phase is saving too.

    It copies, flushes or uploads what it wrote; a rank that saves nothing is in no phase because it waits for that, as
    at a barrier. Not while plain steps take longer than they did: then what follows is theirs.
    """
    saving, other = OWN.index("checkpoint"), OWN.index("other")
    saves = c.own_observed[:, saving] > 0
    own, observed = c.own_observed.copy(), c.observed.copy()
    more = np.maximum(own[:, other] - c.own_expected[:, other], 0)
    own[:, other] -= more
    own[saves, saving] += more[saves]
    grown = max(observed[PART["other"]] - c.expected[PART["other"]], 0.0)
    observed[PART["other"]] -= grown
    observed[PART["checkpoint"]] += grown
    return replace(c, observed=observed, own_observed=own)
