"""What diagnosd said of a run, held against what was done to it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from .run import Run

# An engineer who is told within a quarter of a minute still sees what is going on.
PROMPT_S = 15.0

# What was found and since when: these stay while its place becomes clearer, and when it goes on after it seemed over.
CONFIRMED = re.compile(r"^diagnosd: confirmed: (.+?)(?: at |,).*(since .+)$", re.MULTILINE)

Document = dict[str, Any]


class Verdict(NamedTuple):
    """Whether a run passed, why, and the seconds from the onset to the confirmation."""

    passed: bool
    text: str
    delay: float | None = None


def documents(lines: str) -> list[Document]:
    """Diagnoses of the output of `diagnosd replay --output json`."""
    found = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    return [document for document in found if document["type"] == "diagnosis"]


def seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def told(document: Document) -> str:
    words = [document["cause"], document.get("subtype"), " ".join(document.get("locus", []))]
    return " ".join(word for word in words if word)


def judge(run: Run, said: Sequence[Document]) -> Verdict:
    """Passed where the cause was confirmed in time, was over after its end, and nothing else was ever confirmed."""
    confirmed = [one for one in said if "detected" in one and one["cause"] not in run.scenario.allowed]
    right = [one for one in confirmed if expected(run, one)]
    if wrong := [told(one) for one in confirmed if one not in right]:
        return Verdict(passed=False, text=f"told of {'; '.join(wrong)}")
    if run.scenario.cause is None:
        return Verdict(passed=True, text="nothing told, rightly")
    if not right:
        others = "; ".join(f"{told(one)} was {one['state']}" for one in said) or "nothing was"
        return Verdict(passed=False, text=f"{run.scenario.cause} was not told; {others}")
    if len(right) > 1:
        return Verdict(passed=False, text=f"told {len(right)} times of {told(right[0])}")
    return in_time(run, right[0])


def told_live(run: Run, said: Sequence[Document]) -> bool:
    """Whether the agent that analyzed while the job ran confirmed what the replay of its recording does."""
    confirmed = [document for document in said if "detected" in document]
    return len(confirmed) == len(set(CONFIRMED.findall(run.live)))


def expected(run: Run, document: Document) -> bool:
    want = run.scenario
    if document["cause"] != want.cause or (want.subtypes and document.get("subtype") not in want.subtypes):
        return False
    if want.loci and not set(want.loci) & set(document.get("locus", [])):
        return False
    return run.ranks == 2 or want.link in document["text"]


def in_time(run: Run, document: Document) -> Verdict:
    assert run.onset
    delay = seconds(document["detected"]) - run.onset
    text = f"{told(document)} after {delay:.1f} s"
    if not 0 <= delay <= PROMPT_S:
        return Verdict(passed=False, text=text, delay=delay)
    if run.cleared is None:
        return Verdict(passed=True, text=text, delay=delay)
    if document["state"] != "resolved" or "end" not in document:
        return Verdict(passed=False, text=f"{text}, but {document['state']} after the fault was gone", delay=delay)
    late = seconds(document["end"]) - run.cleared
    return Verdict(passed=True, text=f"{text}, its end {late:+.1f} s from the fault's", delay=delay)
