"""`diagnosd check`: what should be true of these machines and is not, and what that costs the jobs on them.

On this node, on a tree that was captured, or on all nodes of a recording, which it compares. What could not be checked
stands at the end: silence is not health.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diagnosd.analysis.report import clean
from diagnosd.analysis.topology import check
from diagnosd.analysis.topology.document import costs, document, is_latent, remedy, severity, title, unchecked
from diagnosd.analysis.topology.finding import Finding
from diagnosd.analysis.topology.site import Gathering, JobSeen, RankSeen, Site
from diagnosd.collectors.ibstat import parse
from diagnosd.collectors.machine import Machine, captured
from diagnosd.collectors.node import Node
from diagnosd.documents import ClusterSpec, NodeInventory, Plan, cluster_from_toml, decode_node, plan_from_toml
from diagnosd.inventory import Seen, live, missing
from diagnosd.recording import read

WIDTH = 80
LABEL = 11  # columns of `  should be  `
SHOWN = 6  # places of one finding; the JSON has all
FOUND = 3  # exit code
PRINTED = (b"CA '", b"Infiniband device '")  # how the outputs of ibstat and ibstatus begin
UNNAMED = "default"  # the cluster's name where nobody has one


class Subject(NamedTuple):
    """What is checked: its name in the title, and what is known of it beside the site itself."""

    name: str
    site: Site
    cluster: str
    unknown: Sequence[tuple[str, str]] = ()


def machine(
    host: str,
    root: Path | None,
    exclude: Sequence[str],
    socket: Path,
    cluster: Path | None,
    job: Path | None,
    output: str,
) -> int:
    """Checks this node, or the tree captured at `root`; 0 nothing found, 3 something found, 1 nothing could be read."""
    spec, plan = _declared(cluster), _planned(job)
    where = captured(host, root, tuple(exclude)) if root else Machine(host, exclude=tuple(exclude))
    seen = Seen(decode_node(json.dumps(Node(where).inventory()))) if root else live(where, socket)
    if seen.inventory == NodeInventory():
        print(
            f"diagnosd: {root or host}: nothing is known of it: `diagnosd inventory` says what was tried",
            file=sys.stderr,
        )
        return 1
    spec = spec or (plan.cluster if plan else None)
    site = Site({host: seen.inventory}, spec, _jobs(plan, host, seen.inventory))
    rows = [(what, "; ".join(words)) for what, words in missing(where, seen)]
    name = (spec.name if spec else None) or UNNAMED
    return _tell(Subject(str(root or host), site, name, rows), output)


def told(host: str, path: Path, cluster: Path | None, job: Path | None, output: str) -> int:
    """All nodes of a recording, as they were told last, and its jobs; or the ports of which ibstat has told."""
    spec, plan = _declared(cluster), _planned(job)
    if ports := _printed(path):
        if not ports.nics:
            print(f"diagnosd: {path}: it begins as ibstat's output does, and no port is in it", file=sys.stderr)
            return 1
        spec = spec or (plan.cluster if plan else None)
        site = Site({host: ports}, spec, _jobs(plan, host, ports))
        return _tell(Subject(str(path), site, (spec.name if spec else None) or UNNAMED), output)
    gathering = Gathering()
    with read(path) as reading:
        for points in reading:
            gathering.add(points)
        named = reading.header.cluster
    site = gathering.site(spec or (plan.cluster if plan else None))
    if not site.inventories and not site.jobs:
        print(f"diagnosd: {path}: no node and no job in it (diagnosd_node, diagnosd_rank)", file=sys.stderr)
        return 1
    rows = [("documents", f"{gathering.unreadable} could not be read")] if gathering.unreadable else []
    unseen = sorted({host for each in site.jobs.values() for host in each.hosts} - set(site.inventories))
    rows += [("nodes", f"{', '.join(unseen)}: no inventory (run the agent there)")] if unseen else []
    rows += [("the job of JOB.toml", "a recording has jobs of its own")] if plan and plan.job else []
    name = (site.cluster.name if site.cluster else None) or named or UNNAMED
    return _tell(Subject(str(path), site, name, rows), output)


def _printed(path: Path) -> NodeInventory | None:
    """What ibstat or ibstatus printed into a file; None for any other."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if not file.read(32).startswith(PRINTED):
            return None
    ports = [port.nic() for port in parse(path.read_text(errors="replace"))]
    return decode_node(json.dumps({"nics": ports}))


def _declared(path: Path | None) -> ClusterSpec | None:
    return None if path is None else cluster_from_toml(path.read_bytes(), str(path))


def _planned(path: Path | None) -> Plan | None:
    return None if path is None else plan_from_toml(path.read_bytes(), str(path))


def _jobs(plan: Plan | None, host: str, inventory: NodeInventory) -> dict[str, JobSeen]:
    """The job that would run here, on as many nodes of this kind as the plan has: what is wrong here then costs it."""
    if plan is None or plan.job is None:
        return {}
    gpus = len(inventory.gpus or ()) or (plan.cluster.node.gpus if plan.cluster and plan.cluster.node else 0) or 1
    ranks = {number: RankSeen(number, host) for number in range(gpus)}
    name = plan.job.name or "the job"
    return {name: JobSeen(name, plan.job, ranks, world=gpus * (plan.nodes or 1))}


def _tell(subject: Subject, output: str) -> int:
    found = check(subject.site)
    if output == "json":
        for each in _documents(subject, found):
            print(json.dumps(each))
    else:
        print("\n".join(_page(subject, found)))
    return FOUND if found else 0


def _documents(subject: Subject, found: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    yield from (document(each, subject.site, subject.cluster) for each in found)
    yield {
        "type": "summary",
        "checked": {"hosts": sorted(subject.site.inventories), "jobs": sorted(subject.site.jobs)},
        "found": len(found),
        "latent": sum(map(is_latent, found)),
        "unchecked": [{"what": what, "text": why} for what, why in _unchecked(subject)],
    }


def _unchecked(subject: Subject) -> list[tuple[str, str]]:
    return [*dict([*unchecked(subject.site), *subject.unknown]).items()]


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(subject: Subject, found: Sequence[Finding]) -> Iterator[str]:
    site = subject.site
    parts = [_count(len(site.inventories), "host"), _count(len(site.jobs), "job")]
    what = ", ".join(part for part in parts if part)
    count = {0: "nothing found", 1: "1 finding"}.get(len(found), f"{len(found)} findings")
    yield clean(f"{subject.name}: {what or 'nothing'} checked, {count}")
    for each in sorted(found, key=_by_weight):
        yield ""
        yield from _finding(each)
    rows = _unchecked(subject)
    if rows:
        yield ""
        yield "Not checked"
        for what, why in rows:
            yield from _wrapped(f"{clean(what)}: {clean(why)}", "  ", "    ")


def _count(number: int, thing: str) -> str:
    return "" if not number else f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _by_weight(finding: Finding) -> tuple[float, bool, str, tuple[str, ...]]:
    """The dearest first, then what somebody has to repair."""
    slowdown = finding.cost.slowdown if finding.cost else 1.0
    return -slowdown, severity(finding) == "info", finding.subtype, finding.loci


def _finding(finding: Finding) -> Iterator[str]:
    name = title(finding)
    yield from _wrapped(f"{name[0].upper()}{name[1:]} ({finding.subtype})", "", "  ")
    where = [*finding.loci[:SHOWN], *([f"and {len(finding.loci) - SHOWN} more"] if len(finding.loci) > SHOWN else [])]
    rows = (
        ("where", ", ".join(where)),
        ("is", finding.seen),
        ("should be", f"{finding.should} ({_why(finding)})"),
        ("costs", costs(finding)),
        ("do", remedy(finding)),
    )
    for label, text in rows:
        yield from _wrapped(clean(text), f"  {label:{LABEL}}", " " * (LABEL + 2))


def _why(finding: Finding) -> str:
    because, basis = finding.because, finding.basis
    return because if because.startswith(basis) else f"{basis}: {because}"


def _wrapped(text: str, first: str, then: str) -> Iterable[str]:
    """Lines of a terminal's width; a name that is longer stays whole, for it is there to be copied."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
