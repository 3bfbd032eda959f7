"""`python -m tests.bed SCENARIO`: real training with a real fault, and whether diagnosd says what it is.

Exit code 0 where everything passed, 1 where something did not, 2 for usage, 3 where something could not be run here and
now.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from . import quiet
from .cases import write_case
from .judge import Verdict, documents, judge, told_live
from .machine import ROOT
from .run import BedError, Run, folder, missing, remove_stale, run, stop_on_terminate
from .scenarios import SCENARIOS, Scenario

SIZES = (0.5, 0.2, 0.1, 0.05)
CANNOT_RUN = 3


class Pick(NamedTuple):
    scenario: Scenario
    ranks: int
    size: float | None = None

    def __str__(self) -> str:
        return f"{self.scenario.name}-{self.ranks}" + ("" if self.size is None else f" at {self.size:.0%}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bed", description="Train for real, break something, and see what diagnosd says of it."
    )
    add = parser.add_argument
    add("scenario", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    add("--all", action="store_true", help="every scenario, with every number of ranks it has")
    add("--graded", action="store_true", help="the heart causes at 50, 20, 10 and 5 %% of a step: the smallest told")
    add("--ranks", type=int, choices=(2, 4), help="with this many ranks")
    add("--size", type=float, help="how much longer a step is to become, as a share of itself")
    add("--repeat", type=int, default=1, metavar="N", help="the whole list N times")
    add("--record", type=Path, metavar="DIR", help="keep the recordings, a folder a run, each with truth.json")
    add("--case", metavar="NAME", help="make recordings/NAME of the run, if it passed")
    add("--log", type=Path, metavar="FILE", help="append a line of JSON a run")
    add("--keep", action="store_true", help="keep everything the run wrote")
    add("--busy", action="store_true", help="run although the machine is busy")
    add("--bare", action="store_true", help="without diagnosd: only what the script's own clock says")
    args = parser.parse_args()
    if not (args.scenario or args.all or args.graded):
        parser.error("name a scenario, or --all, or --graded")
    if unknown := set(args.scenario) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    return args


def picks(args: argparse.Namespace) -> list[Pick]:
    if args.graded:
        once = [Pick(scenario, 2, size) for scenario in SCENARIOS.values() if scenario.graded for size in SIZES]
    else:
        named = [SCENARIOS[name] for name in (SCENARIOS if args.all else args.scenario)]
        once = [Pick(s, n, args.size) for s in named for n in ranks_of(s, args)]
    return once * int(args.repeat)


def ranks_of(scenario: Scenario, args: argparse.Namespace) -> Sequence[int]:
    if args.ranks:
        return (args.ranks,)
    return scenario.ranks if args.all else scenario.ranks[:1]


def can_run(pick: Pick) -> bool:
    if reason := missing(pick.scenario):
        print(f"{pick} cannot be run: {reason}", file=sys.stderr)
    return not reason


def measure(pick: Pick, path: Path, args: argparse.Namespace) -> tuple[Run, Verdict]:
    """Run one and judge it by its own recording. With `--bare` there is nothing to judge."""
    done = run(pick.scenario, pick.ranks, pick.size, path, bare=args.bare)
    print(table(done), flush=True)
    if any(done.exit_codes):
        raise BedError(f"the job ended with {done.exit_codes}")
    if args.bare:
        return done, Verdict(passed=True, text="nobody watched")
    said = documents(replay(path / "record", "json"))
    print(replay(path / "record", "text"))
    if not told_live(done, said):
        return done, Verdict(passed=False, text=f"the replay confirms what the running agent did not:\n{done.live}")
    return done, judge(done, said)


def replay(record: Path, output: str) -> str:
    command = [sys.executable, "-m", "diagnosd", "replay", str(record), "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"diagnosd replay: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def table(done: Run) -> str:
    head = f"{'':8}{'host':6}{'steps':>6}{'step ms':>10}{'longest':>10}{'data ms':>10}"
    rows = [
        f"{phase:8}{host:6}{steps:>6}{step * 1e3:>10.0f}{longest * 1e3:>10.0f}{data * 1e3:>10.1f}"
        for phase, host, steps, step, longest, data in done.rows
    ]
    return "\n".join([head, *rows])


class Result(NamedTuple):
    """`grew` is by how much of itself a step became longer, as the script's own clock says; None where unknown."""

    pick: Pick
    verdict: Verdict
    grew: float | None = None

    @property
    def size(self) -> str:
        asked = f"{self.pick.size:.0%} of a step"
        return asked if self.grew is None else f"{self.grew:.0%} of a step ({asked} were asked for)"


def keep_recording(pick: Pick, done: Run, record: Path, into: Path) -> None:
    size = "" if pick.size is None else f"-{pick.size:.0%}".rstrip("%")
    target = into / f"{pick.scenario.name}-{pick.ranks}{size}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(record, target)
    truth = {"scenario": pick.scenario.name, "onset": done.onset, "cleared": done.cleared}
    (target / "truth.json").write_text(json.dumps(truth) + "\n")


def append(log: Path, result: Result, load: quiet.Load, others: float) -> None:
    pick, verdict, grew = result
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "scenario": str(pick),
        "passed": verdict.passed,
        "result": verdict.text,
        "delay_s": verdict.delay,
        "grew": grew and round(grew, 3),
        "commit": commit(),
        "load": load.average,
        "cpu_used": round(load.used, 3),  # before the run
        "cpu_others": round(others, 3),  # during the run
    }
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def one(pick: Pick, args: argparse.Namespace) -> Result:
    load = quiet.load() if args.busy else quiet.settled()
    if load.used > quiet.BUSY and not args.busy:
        print(f"the machine is busy: {load}, at most {quiet.BUSY:.0%} may be (--busy: all the same)", file=sys.stderr)
        raise SystemExit(CANNOT_RUN)
    print(f"== {pick}: {pick.scenario.story} ({load})", flush=True)
    others = quiet.Others()
    with folder(keep=args.keep) as path:
        try:
            done, verdict = measure(pick, path, args)
            if args.record:
                keep_recording(pick, done, path / "record", args.record)
            if args.case and verdict.passed:
                write_case(done, path / "record", ROOT / "recordings" / args.case)
        except BedError as error:
            done, verdict = None, Verdict(passed=False, text=f"the bed failed: {error}")
    result, taken = Result(pick, verdict, done.grew if done else None), others.share()
    print(f"{'passed' if verdict.passed else 'FAILED'}: {pick}: {verdict.text}; others took {taken:.0%} of the CPUs")
    if args.log:
        append(args.log, result, load, taken)
    return result


def account(results: Sequence[Result]) -> Iterator[str]:
    """One line a scenario: how often it passed, and how soon it was told."""
    for name in dict.fromkeys(str(result.pick) for result in results):
        verdicts = [result.verdict for result in results if str(result.pick) == name]
        delays = [f"{verdict.delay:.1f}" for verdict in verdicts if verdict.delay is not None]
        passed = sum(verdict.passed for verdict in verdicts)
        yield f"{name:32}{passed} of {len(verdicts)}" + (f"   told after {', '.join(delays)} s" if delays else "")


def smallest(results: Sequence[Result]) -> Iterator[str]:
    """Of each graded scenario the smallest size that passed, all larger ones having passed too."""
    for name in dict.fromkeys(result.pick.scenario.name for result in results):
        told = [result for result in results if result.pick.scenario.name == name and result.pick.size]
        passed = list(takewhile(lambda result: result.verdict.passed, told))
        yield f"{name:32}smallest told: {passed[-1].size if passed else 'none'}"


def main() -> int:
    args = arguments()
    stop_on_terminate()
    remove_stale()
    wanted = picks(args)
    chosen = [pick for pick in wanted if can_run(pick)]
    if not chosen:
        return CANNOT_RUN
    try:
        results = [one(pick, args) for pick in chosen]
    except KeyboardInterrupt:
        return 130
    if len(results) > 1:
        print("\n".join(["", *account(results), *(smallest(results) if args.graded else ())]))
    if not all(result.verdict.passed for result in results):
        return 1
    return 0 if chosen == wanted else CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())
