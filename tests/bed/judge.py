"""What diagnosd said of a run, held against what was done to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from .run import Run

# An engineer who is told within a quarter of a minute still sees what is going on.
PROMPT_S = 15.0

# The clock of the driver is the clock of the agents: what is told before the onset is told of something else.
EARLY_S = 0.5

Document = dict[str, Any]


class Verdict(NamedTuple):
    passed: bool
    text: str
    delay: float | None = None  # s from the onset to the confirmation


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
    confirmed = [
        document for document in said if "detected" in document and document["cause"] not in run.scenario.allowed
    ]
    if run.scenario.cause is None:
        return Verdict(
            not confirmed, "; ".join(f"told of {told(document)}" for document in confirmed) or "nothing told, rightly"
        )
    right = [document for document in confirmed if expected(run, document)]
    if wrong := [told(document) for document in confirmed if document not in right]:
        return Verdict(False, f"told of {'; '.join(wrong)}" + (f" beside {told(right[0])}" if right else ""))
    if not right:
        suspected = [f"{told(document)} was {document['state']}" for document in said]
        return Verdict(False, f"{run.scenario.cause} was not told; {'; '.join(suspected) or 'nothing was'}")
    if len(right) > 1:
        return Verdict(False, f"told {len(right)} times of {told(right[0])}")
    return in_time(run, right[0])


def expected(run: Run, document: Document) -> bool:
    want = run.scenario
    if document["cause"] != want.cause or (want.subtypes and document.get("subtype") not in want.subtypes):
        return False
    if want.loci and not set(want.loci) & set(document.get("locus", [])):
        return False
    return run.ranks == 2 or all(end in json.dumps(document["evidence"]) for end in want.ends)


def in_time(run: Run, document: Document) -> Verdict:
    assert run.onset
    delay = seconds(document["detected"]) - run.onset
    text = f"{told(document)} after {delay:.1f} s"
    if not -EARLY_S <= delay <= PROMPT_S:
        return Verdict(False, text, delay)
    if run.cleared and (document["state"] != "resolved" or "end" not in document):
        return Verdict(False, f"{text}, but {document['state']} after the fault was gone", delay)
    if run.cleared:
        text += f", its end {seconds(document['end']) - run.cleared:+.1f} s from the fault's"
    return Verdict(True, text, delay)
