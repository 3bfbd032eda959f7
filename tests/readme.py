"""What README.md says by itself: `python tests/readme.py [soak.jsonl]` rewrites it, test_readme.py holds it true.

Between `<!-- output: COMMAND -->` and `<!-- end -->` stands what the command prints, between `<!-- table: NAME -->` and
`<!-- end -->` the table of that name. The bed's figures come from the log that `make soak` writes; where none is given,
those that stand there stay.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_type_hints

from bed.scenarios import SCENARIOS, Scenario
from typer.models import OptionInfo

from diagnosd import schema
from diagnosd.analysis.causes import CAUSES
from diagnosd.analysis.figures import percent
from diagnosd.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
REWRITE = ".venv/bin/python tests/readme.py"
UNMEASURED = "not yet measured"

_BLOCK = re.compile(r"<!-- (output|table): (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)


class Block(NamedTuple):
    kind: str
    name: str
    text: str


def blocks(readme: str) -> list[Block]:
    return [Block(*found) for found in _BLOCK.findall(readme)]


def made(block: Block, log: Iterable[str] = ()) -> str:
    """What is to stand in the block."""
    if block.kind == "output":
        return f"```text\n{output(block.name)}```\n"
    tables = {"options": options, "causes": causes, "telemetry": schema.markdown}
    return bed(block.text, log) if block.name == "bed" else tables[block.name]()


def rewritten(readme: str, log: Sequence[str] = ()) -> str:
    def renew(found: re.Match[str]) -> str:
        kind, name, _ = found.groups()
        return f"<!-- {kind}: {name} -->\n{made(Block(*found.groups()), log)}<!-- end -->"

    return _BLOCK.sub(renew, readme)


def output(command: str) -> str:
    """Of one of our own commands, from the root of the tree, as somebody without a terminal sees it."""
    program, *arguments = shlex.split(command)
    assert program == "diagnosd"
    line = [sys.executable, "-m", program, *arguments]
    return subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines]) + "\n"


def options() -> str:
    """Of every verb, each option once."""
    verbs = {each.name or each.callback.__name__: each.callback for each in app.registered_commands if each.callback}
    found: dict[tuple[str, str], set[str]] = {}
    for verb, function in verbs.items():
        for name, hint in get_type_hints(function, include_extras=True).items():
            if name != "return" and isinstance(option := hint.__metadata__[0], OptionInfo):
                kind = hint.__origin__
                value = option.metavar or ("" if kind is bool else "|".join(kind))
                own = isinstance(option.default, str)  # a spelling of its own stands there: --for
                said = option.default if own else f"--{name.replace('_', '-')}"
                found.setdefault((f"{said} {value}".strip(), option.help or ""), set()).add(verb)
    rows = ([f"`{name}`", *("•" if verb in of else "" for verb in verbs), text] for (name, text), of in found.items())
    return table(
        f"option | {' | '.join(verbs)} | meaning", ([cell.replace("|", "\\|") for cell in row] for row in rows)
    )


def causes() -> str:
    return table("cause | it says | whose business | from", _causes())


def _causes() -> Iterator[Sequence[str]]:
    for cause in CAUSES.values():
        yield f"**{cause.code}**", cause.title, cause.owner, percent(cause.least) if cause.least else ""
        for code, subtype in cause.subtypes.items():
            yield f"&emsp;{code}", subtype.title, subtype.owner, ""


def bed(before: str, log: Iterable[str]) -> str:
    """A row for each scenario and number of ranks; figures from the log of a soak, else those that stood there."""
    figures = {row[0]: row[3:] for row in map(_cells, before.splitlines()[2:])} | dict(_figures(log))
    rows = (
        (name, story, said, *figures.get(name, (UNMEASURED, "", "")))
        for scenario in SCENARIOS.values()
        for name, story, said in _runs_of(scenario)
    )
    return table("scenario | what is done | what must be said | runs | passed | told after", rows)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def _runs_of(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    nothing = " or ".join(("nothing", *set(scenario.allowed) - {"communication_bound"}))
    said = " ".join(filter(None, (scenario.cause or nothing, "/".join(scenario.subtypes))))
    for ranks in scenario.ranks:
        link = f", {scenario.link}" if scenario.link and ranks > 2 else ""
        story = scenario.story if ranks == scenario.ranks[0] else f"The same with {ranks} ranks."
        yield f"`{scenario.name}-{ranks}`", story, said + link


def _figures(log: Iterable[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Runs, how many passed, and the median of the seconds from the onset to the confirmation."""
    runs = [json.loads(line) for line in log]
    for name in {run["scenario"] for run in runs}:
        mine = [run for run in runs if run["scenario"] == name]
        delays = [run["delay_s"] for run in mine if run["delay_s"] is not None]
        passed = sum(run["passed"] for run in mine)
        yield f"`{name}`", (str(len(mine)), str(passed), f"{median(delays):.1f} s" if delays else "")


def main() -> None:
    log = Path(sys.argv[1]).read_text().splitlines() if len(sys.argv) > 1 else []
    README.write_text(rewritten(README.read_text(), log))


if __name__ == "__main__":
    main()
