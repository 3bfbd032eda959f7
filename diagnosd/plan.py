"""`diagnosd model`: what a job should take on machines that it may get, and how well published jobs were told."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from diagnosd.analysis.figures import digits, percent, scaled, seconds
from diagnosd.analysis.model import scoring, upkeep
from diagnosd.analysis.model.expectation import Estimate, Expectation, expected, overview
from diagnosd.analysis.model.machine import declared
from diagnosd.analysis.model.published import are_curves, curve_points, rows, step_cases
from diagnosd.analysis.model.workload import ModelError, TooLittleKnownError, read
from diagnosd.documents import (
    Batch,
    ClusterSpec,
    DocumentError,
    Fabric,
    JobSpec,
    Node,
    Parallel,
    Plan,
    plainly,
    plan_from_toml,
)

BAR = 30  # columns of the longest
NOTHING = 1e-5  # of a step: not worth a line

NAMES: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "experts": "experts",
    "sends": "pipeline sends",
    "bubble": "pipeline bubble",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "fixed": "fixed",
}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What the command line changes in the file's job and machines; None: as it stands there."""

    nodes: int | None = None
    gpu: str | None = None
    nics: int | None = None
    rate: float | None = None  # Gbit/s
    fabric: str | None = None
    gdr: bool | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    micro: int | None = None
    batch: int | None = None
    write_rate: float | None = None  # GB/s

    @property
    def changes(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None and name != "write_rate"}
        return " ".join(f"--{name} {_spelled(value)}" for name, value in given.items())


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def model(path: Path, what_if: WhatIf, output: str) -> int:
    """The expectation for a JOB.toml, printed. Errors name the file, the key, and what is allowed."""
    plan = plan_from_toml(path.read_bytes(), str(path))
    as_is, asked = _expectation(path, plan, WhatIf()), None
    if what_if.changes:
        asked = _expectation(path, _changed(plan, what_if), what_if)
    shown = asked or as_is
    if output == "json":
        print(msgspec.json.encode(_document(shown, plan, what_if)).decode())
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for line in _page(shown, plan, what_if):
        console.print(line, markup=False)
    if asked:
        by = asked.step.value / as_is.step.value
        console.print(
            f"\n{what_if.changes}: {seconds(asked.step.value)} instead of {seconds(as_is.step.value)}, {by:.2f} x",
            markup=False,
        )
    return 0


def _changed(plan: Plan, by: WhatIf) -> Plan:
    """The plan with what the command line says; the data-parallel size follows from the others."""
    job, cluster = plan.job or JobSpec(), plan.cluster or ClusterSpec()
    node, fabric = cluster.node or Node(), cluster.fabric or Fabric()
    node = _over(node, gpu=by.gpu, nics=by.nics, nic_rate_gbps=by.rate)
    fabric = _over(fabric, kind=by.fabric, rate_gbps=by.rate)
    parallel = _over(job.parallel or Parallel(), tp=by.tp, pp=by.pp, cp=by.cp)
    if any(value is not None for value in (by.tp, by.pp, by.cp, by.nodes)):
        parallel = msgspec.structs.replace(parallel, dp=None)
    batch = _over(job.batch or Batch(), micro=by.micro, global_=by.batch)
    return Plan(
        job=msgspec.structs.replace(job, parallel=parallel, batch=batch),
        cluster=msgspec.structs.replace(cluster, node=node, fabric=fabric),
        nodes=by.nodes or plan.nodes,
    )


def _over(document: Any, **changes: object) -> Any:
    return msgspec.structs.replace(document, **{key: value for key, value in changes.items() if value is not None})


def _expectation(path: Path, plan: Plan, by: WhatIf) -> Expectation:
    if plan.nodes is None:
        raise DocumentError(f"{path}: nodes: missing; allowed is a whole number from 1")
    job, cluster = plan.job or JobSpec(), plan.cluster or ClusterSpec()
    try:
        machine = declared(cluster)
        if machine is None:
            raise DocumentError(f"{path}: cluster.node.gpu: missing; allowed is the name of a GPU, as H100-SXM")
        if by.gdr is False:
            machine = replace(machine, gdr=False)
        work, assumed = read(job, plan.nodes * machine.gpus, newer=machine.gpu.newer)
        return overview(work, machine, assumed, job.data.bytes_per_sample if job.data else None)
    except ModelError as error:
        table = "cluster" if error.key.startswith(("node", "fabric")) else "job"
        raise DocumentError(f"{path}: {table}.{error}") from error
    except TooLittleKnownError as error:
        raise DocumentError(f"{path}: {error}") from error


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(shown: Expectation, plan: Plan, what_if: WhatIf) -> Iterator[str]:
    yield _title(shown, plan)
    yield ""
    yield f"  {'a step':22}{_interval(shown.step)}, nine of ten times"
    rate = shown.tokens_per_second.value
    unit = "tokens" if shown.workload.model.seq > 1 else "samples"
    yield f"  {unit:22}{digits(rate)} a second, {digits(rate / shown.ranks)} of a GPU"
    full, causal = (percent(shown.mfu[name].value) for name in ("full", "causal"))
    both = f" with all attention scores counted, {causal} with the causal half"
    yield f"  {'MFU':22}{full}{'' if shown.workload.flops else both}"
    yield ""
    yield from _bars(shown)
    yield ""
    yield from _wires(shown)
    yield from _upkeep(shown, what_if)
    yield from _scaling(shown)
    if shown.assumed:
        yield ""
        yield "  taken as, for nobody said:"
        yield from (f"    {each.key:28}{each.value}" for each in shown.assumed)


def _title(shown: Expectation, plan: Plan) -> str:
    machine, layout = shown.machine, shown.workload.layout
    name = plainly((plan.job.name if plan.job else None) or "the job")
    split = {"TP": layout.tp, "CP": layout.cp, "EP": layout.ep, "PP": layout.pp, "DP": layout.dp}
    nics = f"{float(machine.nics):g} x {float(machine.nic_rate) / 1e9:g} Gbit/s {machine.fabric.kind}"
    network = nics if isfinite(float(machine.nic_rate)) else "a network of which nothing is known"
    nodes = f"{machine.gpus} a node with {network}" if shown.ranks > machine.gpus else "one node"
    where = f"{shown.ranks} {machine.gpu.name}, {nodes}"
    return f"{name} on {where}: " + " ".join(f"{key} {size}" for key, size in split.items() if size > 1 or key == "DP")


def _interval(estimate: Estimate) -> str:
    return f"{seconds(estimate.value)}, {seconds(estimate.low)} to {seconds(estimate.high)}"


def _bars(shown: Expectation) -> Iterator[str]:
    most = max(term.value for term in shown.terms.values())
    for name, term in shown.terms.items():
        if term.value < NOTHING * shown.step.value:
            continue
        share = term.value / shown.step.value
        bar = "#" * max(round(BAR * term.value / most), 1 if share >= 0.001 else 0)
        yield f"  {NAMES[name]:22}{seconds(term.value):>9} {percent(share):>7}  {bar}".rstrip()


def _wires(shown: Expectation) -> Iterator[str]:
    if shown.nic_bytes:
        low, high = (scaled(value, "B") for value in (shown.nic_bytes.low, shown.nic_bytes.high))
        yield f"  {'each NIC sends':22}{low} to {high} a step"
    if shown.nvlink_bytes:
        yield f"  {'NVLink of a GPU':22}{scaled(shown.nvlink_bytes.value, 'B')} a step"
    for name, busbw in shown.busbw.items():
        yield f"  {'busbw of ' + name:22}{scaled(busbw.low, 'B/s')} to {scaled(busbw.high, 'B/s')} with large messages"
    if shown.hidden_margin:
        margin = shown.hidden_margin.value
        hides = f"gradients stay hidden on a network up to {margin:.1f} x slower"
        yield f"  {'hidden margin':22}{hides if margin >= 1 else 'none: gradients take longer than what hides them'}"


def _upkeep(shown: Expectation, what_if: WhatIf) -> Iterator[str]:
    reads = _reads(shown)
    yield f"  {'data':22}{scaled(reads, 'B/s')} to read" + ("" if shown.read_rate else ", if the samples are tokens")
    saved = _checkpoint(shown, what_if)
    how = (
        f"written at {what_if.write_rate:g} GB/s"
        if what_if.write_rate
        else "copied to the hosts, then written meanwhile"
    )
    yield f"  {'checkpoint':22}{scaled(saved['bytes'], 'B')}, {seconds(saved['stall_s'])} {how}"
    every = f"every {seconds(saved['best_interval_s'])} wastes least: {percent(saved['waste'])}"
    yield f"  {'':22}{every}, with a fault every {seconds(saved['between_faults_s'])}"


def _reads(shown: Expectation) -> float:
    if shown.read_rate:
        return shown.read_rate.value
    model = shown.workload.model
    return upkeep.read_rate(shown.workload.batch, model.seq * upkeep.token_bytes(model.vocab), shown.step.value)


def _checkpoint(shown: Expectation, what_if: WhatIf) -> dict[str, float]:
    work, layout, ranks = shown.workload, shown.workload.layout, shown.ranks
    params = work.params or work.model.params
    holders = ranks if layout.zero else layout.tp * layout.pp  # unsharded, the replicas hold the same
    rate = what_if.write_rate * 1e9 if what_if.write_rate else holders * shown.machine.gpu.to_host
    stall = upkeep.checkpoint_stall(params, rate)
    interval = upkeep.best_interval(stall, ranks)
    return {
        "bytes": upkeep.checkpoint_bytes(params),
        "stall_s": stall,
        "best_interval_s": interval,
        "waste": upkeep.waste(stall, interval, ranks),
        "between_faults_s": upkeep.between_faults(ranks),
    }


def _scaling(shown: Expectation) -> Iterator[str]:
    grown, same = scaling(shown), dict(scaling(shown, grow=False))
    if len(grown) < 2:
        return
    (fewest, first), *_ = grown
    yield ""
    yield f"  {'nodes':22}" + "".join(f"{nodes:>8}" for nodes, _ in grown)
    yield f"  {'batch grows with them':22}" + "".join(f"{seconds(each.step.value):>8}" for _, each in grown)
    weak = [percent(upkeep.weak_scaling(first.step.value, each.step.value)) for _, each in grown]
    yield f"  {'efficiency':22}" + "".join(f"{share:>8}" for share in weak)
    if fewest in same and len(same) > 1:
        times = [same[nodes].step.value if nodes in same else None for nodes, _ in grown]
        yield f"  {'batch of the job':22}" + "".join(f"{seconds(time) if time else '-':>8}" for time in times)
        strong = [
            percent(upkeep.strong_scaling(fewest, same[fewest].step.value, nodes, time)) if time else "-"
            for (nodes, _), time in zip(grown, times, strict=True)
        ]
        yield f"  {'efficiency':22}" + "".join(f"{share:>8}" for share in strong)


def scaling(shown: Expectation, *, grow: bool = True) -> list[tuple[int, Expectation]]:
    """From the fewest nodes that hold one replica to those of the job, with a batch that grows with them or is that of
    the job; a number of nodes over which it cannot be divided is left out.
    """
    work, machine = shown.workload, shown.machine
    most = -(-shown.ranks // machine.gpus)
    found = []
    for nodes in [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]:
        dp, left = divmod(nodes * machine.gpus, work.layout.tp * work.layout.cp * work.layout.pp)
        batch = work.batch // work.layout.dp * dp if grow else work.batch
        expert = work.layout.ep * work.layout.etp
        if left or not dp or batch % (dp * work.micro) or expert > dp * work.layout.tp * work.layout.cp:
            continue
        shard = work.layout.shard if work.layout.shard and dp * work.layout.cp % work.layout.shard == 0 else None
        layout = replace(work.layout, dp=dp, shard=shard)
        found.append((nodes, expected(replace(work, layout=layout, batch=batch), machine)))
    return found


def _document(shown: Expectation, plan: Plan, what_if: WhatIf) -> dict[str, Any]:
    return {
        "type": "expectation",
        "job": plan.job.name if plan.job else None,
        "what_if": what_if.changes or None,
        "ranks": shown.ranks,
        "step_s": asdict(shown.step),
        "terms_s": {name: asdict(term) for name, term in shown.terms.items()},
        "tokens_per_s": asdict(shown.tokens_per_second),
        "mfu": {name: asdict(share) for name, share in shown.mfu.items()},
        "nic_bytes": asdict(shown.nic_bytes) if shown.nic_bytes else None,
        "nvlink_bytes": asdict(shown.nvlink_bytes) if shown.nvlink_bytes else None,
        "busbw": {name: asdict(rate) for name, rate in shown.busbw.items()},
        "read_rate": _reads(shown),
        "hidden_margin": asdict(shown.hidden_margin) if shown.hidden_margin else None,
        "checkpoint": _checkpoint(shown, what_if),
        "scaling": [{"nodes": nodes, "step_s": each.step.value} for nodes, each in scaling(shown)],
        "strong_scaling": [{"nodes": nodes, "step_s": each.step.value} for nodes, each in scaling(shown, grow=False)],
        "assumed": [{"key": each.key, "value": each.value} for each in shown.assumed],
    }


# -- how well ----------------------------------------------------------------------------------------------------------

SHIPPED_TABLE = "shipped constants (nothing is fitted on this file)"
REFIT_TABLE = "constants refitted without each source in turn"
SCALAR_TABLE = "one scalar per series, learned on its smallest run"


def validate(path: Path, output: str, *, refit: bool) -> int:
    """The tables of errors over a file of published figures; 1 where a row had to be left out."""
    try:
        table = rows(path.read_text(encoding="utf-8"))
        tables, left_out = _curves(table) if are_curves(table) else _steps(table, refit=refit)
    except (UnicodeDecodeError, ValueError) as error:
        raise DocumentError(f"{path}: {error}") from error
    for number, (title, scores) in enumerate(tables.items()):
        if output == "json":
            document = {"type": "scores", "table": title, "scores": [asdict(each) for each in scores]}
            print(msgspec.json.encode(document).decode())
        else:
            print(("\n" if number else "") + "\n".join(_table(title, scores)))
    if output != "json":
        print("\ncovered: of the measured, what lies in the 90 % intervals; +-: half of their width, in the median")
    for row in left_out:
        print(f"diagnosd: {path}: {row}; the row is left out", file=sys.stderr)
    return 1 if left_out else 0


Tables = dict[str, list[scoring.Score]]


def _steps(table: Sequence[Mapping[str, str]], *, refit: bool) -> tuple[Tables, list[str]]:
    cases, left_out = step_cases(table)
    tables = {SHIPPED_TABLE: scoring.expected(cases)}
    if refit:
        tables[REFIT_TABLE] = scoring.leave_one_source_out(cases)
    found = {title: _by_source(cases, lines, apart=title == REFIT_TABLE) for title, lines in tables.items()}
    lines = list(tables.values())[-1]
    series = [line for group in scoring.one_scalar(cases, lines, lambda case: case.series) for line in group]
    scores = [scoring.score("runs that differ in scale alone", series)] if series else []
    for name, grid, rank in scoring.grids(cases, lines):
        scores.append(scoring.score(f"layouts of {name}", grid, rank=rank))
    return found | {SCALAR_TABLE: scores}, left_out


def _by_source(cases: Sequence[Any], lines: Sequence[scoring.Line], *, apart: bool) -> list[scoring.Score]:
    whole = [scoring.score("all step times", lines)]
    for others, said in ((True, "of other sources"), *(() if apart else ((False, "fitted on it"),))):
        mfu = scoring.constant_mfu(cases, apart=others)
        whole.append(scoring.score(f"one MFU a GPU and precision, {said}", mfu, intervals=False))
    for source in dict.fromkeys(case.source for case in cases):
        theirs = [line for case, line in zip(cases, lines, strict=True) if case.source == source]
        whole.append(scoring.score(source, theirs))
    return whole


def _curves(table: Sequence[Mapping[str, str]]) -> tuple[Tables, list[str]]:
    points, left_out = curve_points(table)
    tables = {
        SHIPPED_TABLE: _by_system(scoring.curves(points)),
        SCALAR_TABLE + ": its smallest message tells the latency": _by_system(
            scoring.curves(points, scoring.latencies(points))
        ),
    }
    return tables, left_out


def _by_system(curves: Mapping[str, list[scoring.Line]]) -> list[scoring.Score]:
    everything = [line for lines in curves.values() for line in lines]
    if not everything:
        return []
    systems = [scoring.score(system, lines) for system, lines in curves.items()]
    return [scoring.score("all messages from 1 MiB on", everything), *systems]


def _table(title: str, scores: Sequence[scoring.Score]) -> Iterator[str]:
    yield title
    yield f"  {'':44}{'n':>4}{'median':>9}{'p90':>9}{'worst':>9}{'bias':>9}{'covered':>9}{'+-':>7}"
    for each in scores:
        errors = (each.median, each.p90, each.worst)
        line = f"  {plainly(each.name):44.44}{each.count:>4}" + "".join(f"{percent(error):>9}" for error in errors)
        line += f"{each.bias:>+9.1%}".replace("%", " %")
        if each.covered is not None and each.width is not None:
            line += f"{percent(each.covered):>9}{percent(each.width):>7}"
        yield line + (f"  Spearman {each.rank:.2f}" if each.rank is not None else "")
    if not scores:
        yield "  nothing in the file is a series"
