"""The words for a verdict: what an engineer reads at night, made from the documents of telemetry.md 7 and nothing else.

Lines of at most 80 columns, good without colour: a line is a tuple of spans, and a span names its role (`title`,
`label`, `for`, `against`, `good`, `quiet` or ``), to which whoever prints gives a colour or not. What came from outside
(host names, paths, texts) cannot break a line or reach the terminal as a control sequence.

Of a job's part of the summary, besides `steps`, `gpu_ns` and `ledger_ns`, these keys are told where they are present:
`ranks` (how many), `world` (how many there should be), `hosts` (names), `start`, `end` (RFC 3339), `step_s` and
`step_p95_s` (median and 95th percentile), `sources`, `missing` (names of measurements), `observed` (share of the job's
GPU time of which its ranks told), `gaps` (what is known of the rest: `subject`, `start`, `text`, `count`) and `brief`
(slowdowns too short for a verdict, in the keys of one). Beside the jobs, `earlier` is the sum of those whose parts are
no longer kept.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

from diagnosd.analysis.figures import digits, gpu_time, percent, scaled, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WIDTH = 80
LABEL = 12  # columns of `  evidence  `
STILL_S = 10.0  # without a step: not even a slow one can then be called as usual
BAR = 20
NAME = 24  # columns of a job's name, however much else its line has to say


class Span(NamedTuple):
    text: str
    role: str = ""


Line = tuple[Span, ...]
Document = Mapping[str, Any]

# How a reader names what the contract names by a code; a code that is missing here is told with its underscores off.
_WORDS: Mapping[str, str] = {
    "unknown": "slower, cause unknown",
    "useful": "model FLOPs at peak",
    "other_by_design": "training (no loss found)",
    "communication_by_design": "communication (no loss found)",
    "init": "before the first step",
    "rolled_back": "rolled back",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
}
# Measurements, as a reader knows what they show, in the order in which they are told; others are told by their names.
_SOURCES: Mapping[str, str] = {
    "diagnosd_step": "steps",
    "diagnosd_process": "processes",
    "diagnosd_socket": "connections",
    "net": "network interfaces",
    "cpu": "CPU",
    "pressure": "pressure",
    "diskio": "disks",
    "diagnosd_nccl": "NCCL's log",
    "diagnosd_cluster": "cluster.toml",
}
_REFERENCE = {"past": "before", "peers": "at its peers", "model": "by a bound"}
_BOUND = {
    "data_starvation": "without the wait for data",
    "topology_misconfiguration": "on the declared fabric",
}
_OWNER = {"job": "the job's owner", "config": "whoever configured it", "node": "the node's owner"}
_SEVERITY = {"info": "information"}


# A script ends with work that is no step: half of a short run may be that. Where the telemetry itself says that it lost
# something, a tenth of the job is room enough for a slowdown that nobody saw.
MOST, WHOLE = 0.5, 0.9

# What is found must hold for four steps and five seconds before it is told: in less, nothing could have been found.
JUDGED, JUDGED_S = 4, 5.0


def whole(documents: Sequence[Document], summary: Document) -> list[Line]:
    """Everything, for the end of a run or a replay: verdicts by their cost, jobs without one, then the account."""
    lines: list[Line] = []
    told = [d for d in documents if d.get("state") != "withdrawn"]
    notes = [d for d in told if d.get("cause") == "communication_bound"]
    for document in sorted((d for d in told if d not in notes), key=_by_cost):
        lines += [*verdict(document), ()]
    withdrawn = [d for d in documents if d.get("state") == "withdrawn"]
    if withdrawn:
        lines += [*_field("withdrawn", "; ".join(sentence(d) for d in withdrawn), "quiet"), ()]
    troubled = {_string(d, "job") for d in told if d.get("state") != "latent"}
    jobs = _mapping(summary.get("jobs"))
    for name, job in jobs.items():
        if name not in troubled:
            lines += [*no_finding(name, _mapping(job), noted=any(_string(d, "job") == name for d in notes)), ()]
    for document in sorted(notes, key=_by_cost):
        lines += [*verdict(document), ()]
    for name, job in jobs.items():
        more = (*_brief(_mapping(job), "besides"), *_unseen(_mapping(job))) if name in troubled else ()
        lines += [*account(name, _mapping(job)), *more, ()]
    lines += [*_earlier(_mapping(summary.get("earlier"))), ()] if "earlier" in summary else []
    if not jobs:
        lines += [*_nothing_seen(), ()]
    return lines[:-1]


def verdict(document: Document) -> list[Line]:
    """One diagnosis."""
    lines = _title(_headline(document))
    if _string(document, "text") not in ("", sentence(document)):
        lines += [*((Span(f"  {part}"),) for part in _wrap(_string(document, "text"), WIDTH - 2)), ()]
    lines += _field("job", _job(document))
    lines += _field("slower", _slowdown(document))
    lines += _field("when", _when(document))
    lines += _field("cost", _cost(document))
    lines += _field("state" if document.get("cause") == "unknown" else "certainty", _certainty(document))
    lines += _field("hardware", "; ".join(_asset(_mapping(a)) for a in _sequence(document.get("assets"))))
    lines += _evidence([_mapping(e) for e in _sequence(document.get("evidence"))])
    lines += _unopposed(document)
    lines += _rivals([_mapping(a) for a in _sequence(document.get("alternatives"))])
    return lines + _sources(document) + _next(document)


def sentence(document: Document) -> str:
    """One sentence, for an alert's subject or a live line."""
    slower = _slowdown(document)
    since = _time(document.get("start"))
    parts = [_headline(document), slower, f"since {_clock(since)} UTC" if since else ""]
    return ", ".join(part for part in parts if part)


def no_finding(name: str, job: Document, *, noted: bool = False) -> list[Line]:
    """A job in which nothing was found, and what was looked at: or why nothing could be said.

    `noted`: there is something to know about it that is no slowdown.
    """
    steps, found = _number(job, "steps") or 0, "No slowdown" if noted else "Nothing"
    if not steps:
        lines = _title(f"No step of job {name} was seen: nothing can be said about its speed")
    elif brief := [_mapping(each) for each in _sequence(job.get("brief"))]:
        lasted = sum(filter(None, map(_lasted, brief)))
        long = f" for {seconds(lasted)}" if lasted else ""
        lines = _title(f"Job {name} was slower{long}, too short a time for a verdict", "against")
    elif _too_short(job):
        lines = _title(f"Too little of job {name} could be judged: nothing can be said about its speed", role="against")
    elif _in_part(job):
        lines = _title(f"{found} found in what was seen of job {name}", role="against")
    else:
        lines = _title(f"{found} found in {'the judged part of ' if _judged(job) else ''}job {name}", role="good")
    lines += _brief(job, "slower")
    lines += _field("watched", _watched(job))
    lines += _field("judged", _judged(job))
    lines += _unseen(job)
    median, high = _number(job, "step_s"), _number(job, "step_p95_s")
    if steps and median is not None:
        tail = f", 95 of 100 within {seconds(high)}" if high is not None else ""
        lines += _field("step time", f"{seconds(median)}{tail}")
    lines += _sources(job)
    if not steps and not _sequence(job.get("gaps")):
        lines += _field(
            "next", "Does the script import torch, and reach its first optimizer step? Does the probe reach it?"
        )
    return lines


def _brief(job: Document, label: str) -> list[Line]:
    """What lasted too short a time for a verdict."""
    lines: list[Line] = []
    for each in map(_mapping, _sequence(job.get("brief"))):
        said = ", ".join(part for part in (_slowdown(each), _when(each), _cost(each)) if part)
        lines += _field(label, f"{said}. {_string(each, 'text')}")
    return lines


def _lasted(document: Document) -> float | None:
    start, end = _time(document.get("start")), _time(document.get("end"))
    return (end - start).total_seconds() if start and end else None


def _too_short(job: Document) -> bool:
    judged, lasted = _number(job, "judged"), _number(job, "judged_s")
    return judged is not None and lasted is not None and (judged < JUDGED or lasted < JUDGED_S)


def _judged(job: Document) -> str:
    """How many steps were held against others; nothing where nearly all were."""
    judged, lasted, steps = _number(job, "judged"), _number(job, "judged_s"), _number(job, "steps") or 0
    if judged is None or lasted is None or not steps or (judged >= MOST * steps and not _too_short(job)):
        return ""
    why = "a step is judged when a dozen before it did the same work, and what is found must last five seconds"
    much = f"{judged:,.0f} of {steps:,.0f} steps, {seconds(lasted)} in all" if judged else f"none of {steps:,.0f} steps"
    return f"{much}: {why}"


def _in_part(job: Document) -> bool:
    """Whether what was not seen could hide what one wants to know."""
    observed = _number(job, "observed")
    return observed is not None and observed < (WHOLE if _sequence(job.get("gaps")) else MOST)


def _unseen(job: Document) -> list[Line]:
    """How much of the job was not seen, and what is known of the reason; nothing where it is little."""
    observed, why = _number(job, "observed"), [_gap(_mapping(gap)) for gap in _sequence(job.get("gaps"))]
    part = _in_part(job)
    if observed is None or not (why or part):
        return []
    missing = (_number(job, "world") or 0) - (_number(job, "ranks") or 0)
    if missing > 0:
        why.append(f"nothing was heard of {missing:,.0f} rank{'s' if missing != 1 else ''}")
    reasons = "; ".join(why) or "its ranks ran, and told no steps"
    much = f"{percent(1 - observed)} of the job: " if _number(job, "steps") else ""
    return _field("unseen", f"{much}{reasons}", "against" if part else "")


def _gap(gap: Document) -> str:
    since, count = _time(gap.get("start")), _number(gap, "count") or 1
    when = f" at {_clock(since)} UTC" if since else ""
    times = f" ({count:,.0f} times)" if count > 1 else ""
    return f"{place(_string(gap, 'subject'))}{when}: {_string(gap, 'text')}{times}"


def account(name: str, job: Document) -> list[Line]:
    """Where a job's GPU time went: rows that add up, as printed."""
    total, steps, ledger = _number(job, "gpu_ns"), _number(job, "steps") or 0, _mapping(job.get("ledger_ns"))
    if not total or not ledger:
        return _account_of(name, f"{steps:,.0f} steps")
    unit, unit_ns, places = ("GPU-hours", 36 * 10**9, 2) if total >= 1e13 else ("GPU-seconds", 10**8, 1)
    rows = sorted(((ns, code) for code, ns in ledger.items() if isinstance(ns, int) and ns), reverse=True)
    parts = [ns for ns, _ in rows]
    amounts, shares = (_rounded(parts, per / total) for per in (total / unit_ns, 1000))
    lines = _account_of(name, f"{steps:,.0f} steps, and where its time went")
    lines += _cut([Span(f"{unit:>13}     share", "label")])
    for amount, share, (ns, code) in zip(amounts, shares, rows, strict=True):
        if not amount and not share:
            continue
        figures = f"{amount / 10**places:>13,.{places}f}  {share / 10:6.1f} %  "
        bar = "█" * round(BAR * min(1.0, max(0, ns) / total)) or "▏"
        lines += _cut([Span(figures), Span(f"{bar:<{BAR}} ", "against" if code in _LOSSES else ""), Span(words(code))])
    in_all = f"{sum(amounts) / 10**places:>13,.{places}f}  {sum(shares) / 10:6.1f} %"
    odd = "" if sum(parts) == total else f"  but {total:.0f} ns were to be accounted for"
    return lines + _cut([Span(in_all, "label"), Span(odd, "against")])


def _earlier(part: Document) -> list[Line]:
    """The jobs of which only a sum is left."""
    jobs, total, ledger = _number(part, "jobs") or 0, _number(part, "gpu_ns") or 0, _mapping(part.get("ledger_ns"))
    lost = sum(ns for code, ns in ledger.items() if code in _LOSSES and isinstance(ns, int))
    took = f"{gpu_time(total / 1e9)}, of which {gpu_time(lost / 1e9)} lost"
    return _field("earlier", f"{jobs:,.0f} jobs before these, of which only the sum is kept: {took}")


def _account_of(name: str, what: str) -> list[Line]:
    left = WIDTH - width(f"Job : {what}")
    return _cut([Span(f"Job {shortened(clean(name), max(left, NAME))}: {what}")])


def live(name: str, job: Document, documents: Sequence[Document], columns: int = WIDTH - 1) -> str:
    """One line while it runs: where the job is, and the worst that is open, or else that was. "" is no name."""
    steps, median = _number(job, "steps") or 0, _number(job, "step_s")
    parts = [f"{steps:,.0f} steps"]
    open_ones = [d for d in documents if d.get("state") in ("suspected", "confirmed")]
    found = open_ones or [d for d in documents if d.get("state") == "resolved"]
    if median is not None:
        parts.append(_pace(median, _number(job, "now_s") if open_ones else None))
    if open_ones:
        parts.append(_worst(found))
    elif (still := _number(job, "still_s") or 0) > max(STILL_S, 5 * (median or 0)):
        parts.append(f"no step for {seconds(still)}")
    elif found:
        parts.append(_worst(found))
    elif steps:
        parts.append("nothing found so far")
    rest = "  ".join(clean(part) for part in parts)
    head = f"{shortened(clean(name), max(columns - 2 - width(rest), NAME))}  " if name else ""
    return clip(head + rest, columns)


def _pace(usual: float, now: float | None) -> str:
    if now is None or not usual:
        return seconds(usual)
    return f"{seconds(now)} ({digits(now / usual)} x)"


def _worst(documents: Sequence[Document]) -> str:
    worst = min(documents, key=_by_cost)
    more = f", and {len(documents) - 1} more" if len(documents) > 1 else ""
    where = ", job" if [*_sequence(worst.get("locus"))] == ["job"] else ""
    return f"{_string(worst, 'state')}: {_headline(worst)}{where}{more}"


def plain(lines: Iterable[Line]) -> str:
    """The lines as text, without colour; each ends in a newline."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


# -- figures ----------------------------------------------------------------------------------------------------------


def figure(value: object, unit: str) -> str:
    """A value with its unit, as people say it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return "" if value is None else clean(str(value))
    if not abs(value) < 1e18:  # NaN and infinities too
        return "unknown"
    if unit == "s":
        return seconds(value)
    if unit in _SCALED:
        return scaled(value, _SCALED[unit])
    if unit in ("share", "1") and 0 <= value <= 1:
        return percent(value)
    return f"{digits(value)} {clean(unit)}".rstrip()


_SCALED = {
    "bytes/s": "B/s",
    "B/s": "B/s",
    "bytes": "B",
    "B": "B",
    "bit/s": "bit/s",
    "bits/s": "bit/s",
    "Hz": "Hz",
    "hertz": "Hz",
}


def _rounded(parts: Sequence[int], scale: float) -> list[int]:
    """Each part times `scale`, rounded so that they add up to their sum, rounded (largest remainder)."""
    exact = [part * scale for part in parts]
    whole = [floor(value) for value in exact]
    missing = round(sum(exact)) - sum(whole)
    for n in sorted(range(len(parts)), key=lambda n: (whole[n] - exact[n], n))[:missing]:
        whole[n] += 1
    return whole


# -- the pieces of a verdict ------------------------------------------------------------------------------------------

_LOSSES = {
    "network_congestion", "data_starvation", "topology_misconfiguration", "link_fault", "straggler", "throttling",
    "workload_imbalance", "checkpoint_stall", "host_stall", "hang", "restart", "rolled_back",
}  # fmt: skip


def words(code: str) -> str:
    """A code of the contract as words."""
    return _WORDS.get(code) or clean(code.replace("_", " "))


def place(locus: str) -> str:
    """`host:n03` as `host n03`, `nic:n03/mlx5_2/1` as `nic n03/mlx5_2/1`, `job` as `the whole job`."""
    kind, colon, name = locus.partition(":")
    return clean(f"{kind} {name}") if colon else {"job": "the whole job"}.get(locus, clean(locus))


def _headline(document: Document) -> str:
    cause = words(_string(document, "cause") or "no cause given")
    subtype = _string(document, "subtype")
    loci = [place(locus) for locus in _sequence(document.get("locus")) if isinstance(locus, str)]
    more = f" and {len(loci) - 3} more" if len(loci) > 3 else ""
    where = f" at {', '.join(loci[:3])}{more}" if loci and loci != [place("job")] else ""
    head = f"{cause}{f' ({words(subtype)})' if subtype else ''}{where}"
    return head[:1].upper() + head[1:]


def _job(document: Document) -> str:
    victims, attempt = _mapping(document.get("victims")), _number(document, "attempt")
    ranks = _number(victims, "ranks")
    parts = [
        _string(document, "job"),
        f"attempt {attempt:.0f}" if attempt else "",
        f"slows {ranks:,.0f} rank{'s' if ranks != 1 else ''}" if ranks else "",
    ]
    return ", ".join(part for part in parts if part)


def _slowdown(document: Document) -> str:
    slowdown = _number(document, "slowdown")
    if slowdown is None or _costs_nothing(document):
        return ""
    baseline = _mapping(document.get("baseline"))
    step = _number(baseline, "step_s")
    text = f"{digits(slowdown)} x"
    if step is not None:
        text += f": {seconds(step * slowdown)} a step instead of {seconds(step)}"
        source = _REFERENCE.get(_string(baseline, "from"))
        source = _BOUND.get(_string(document, "cause"), source) if source == _REFERENCE["model"] else source
        text += f" {source}" if source else ""
    return text


def _when(document: Document) -> str:
    start, end, told = (_time(document.get(key)) for key in ("start", "end", "detected"))
    if _is_by_design(document):
        return ""
    if start is None:
        return "present, and costs nothing now" if _costs_nothing(document) else ""
    if end is not None:
        text = f"{_span(start, end)} ({seconds((end - start).total_seconds())})"
    else:
        text = f"since {_date(start)} UTC, still going on"
    if told is not None:
        text += f"; told {seconds((told - start).total_seconds())} after the onset"
    return text


def _costs_nothing(document: Document) -> bool:
    return document.get("state") == "latent"


def _is_by_design(document: Document) -> bool:
    """Information about a job that runs as it was made: neither a fault nor a loss."""
    return document.get("cause") == "communication_bound"


def _cost(document: Document) -> str:
    if _costs_nothing(document):
        return ""
    lost, gain = _number(document, "lost_gpu_seconds"), _number(document, "fix_gain")
    parts = [f"{gpu_time(lost)} lost" if lost is not None else ""]
    if gain is not None and document.get("cause") != "unknown":
        parts.append(f"repairing this alone would save {percent(gain)} of the step time")
    return "; ".join(part for part in parts if part)


def _certainty(document: Document) -> str:
    confidence = _number(document, "confidence") if document.get("cause") != "unknown" else None
    severity, owner = _string(document, "severity"), _string(document, "owner")
    severity = _SEVERITY.get(severity, severity)
    parts = [
        percent(round(confidence, 2)) if confidence is not None else "",
        "" if _is_by_design(document) else _string(document, "state"),
        f"{severity} for {_OWNER.get(owner, f'the owners of the {owner}')}" if severity and owner else severity,
    ]
    return ", ".join(part for part in parts if part)


def _asset(asset: Document) -> str:
    head = " ".join(str(asset[key]) for key in ("host", "nic", "gpu") if asset.get(key) is not None)
    if asset.get("port") is not None:
        head += f" port {asset['port']}"
    named = ("host", "nic", "gpu", "port", "peer_switch", "peer_port")
    rest = [f"{words(key)} {value}" for key, value in asset.items() if key not in named and value is not None]
    if asset.get("peer_switch") is not None:
        rest.append(f"at {asset['peer_switch']} {asset.get('peer_port') or ''}".rstrip())
    return ", ".join(part for part in (head, *rest) if part)


def _evidence(rows: Sequence[Document]) -> list[Line]:
    """A table: + speaks for the verdict, - against it, = is as it was, and so against its rivals."""
    if not rows:
        return []
    lines: list[Line] = [(), _row("  evidence", "where", "observed", "expected", role="label")]
    for row in sorted(rows, key=lambda r: r.get("supports") is False):
        unit, against = _string(row, "unit"), row.get("supports") is False
        observed, expected = (figure(row.get(key), unit) for key in ("observed", "expected"))
        mark, role = ("-", "against") if against else ("=", "quiet") if row.get("usual") is True else ("+", "for")
        what = f"{mark} {_string(row, 'metric')}"
        lines.append(_row(what, place(_string(row, "subject")), observed, expected, role=role))
        lines += [(Span(f"    {part}", "quiet"),) for part in _wrap(_string(row, "text"), WIDTH - 4)]
    return lines


def _unopposed(document: Document) -> list[Line]:
    """That there is no - in the table; of what has no cause, or is none, nobody asks."""
    rows = [_mapping(row) for row in _sequence(document.get("evidence"))]
    if not rows or document.get("cause") == "unknown" or _costs_nothing(document):
        return []
    against = any(row.get("supports") is False for row in rows)
    return [] if against else [(Span("  nothing that was measured speaks against it", "quiet"),)]


def _row(what: str, where: str, observed: str, expected: str, role: str) -> Line:
    """Columns of 2 + 26, 22, 13 and 13, a space between."""
    mark, rest = what[:2], what[2:]
    cells = f"{_pad(rest, 26)} {_pad(where, 22)} {_pad(observed, 13, right=True)} {_pad(expected, 13, right=True)}"
    return (Span(f"{mark}", role), Span(cells, "label" if role == "label" else ""))


def _rivals(rows: Sequence[Document]) -> list[Line]:
    """Why each lost. Its probability is its own, and of several they add up to nothing: only programs are told it."""
    if not rows:
        return []
    lines: list[Line] = [(), (Span("  instead of", "label"),)]
    for row in rows:
        head, text = words(_string(row, "cause")), _string(row, "text")
        wrapped = _wrap(f"{head}: {text}" if text else head, WIDTH - 4)
        lines += [(Span("  " if n == 0 else "    "), Span(part)) for n, part in enumerate(wrapped)]
    return lines


def _sources(document: Document) -> list[Line]:
    seen, missing = (_sequence(document.get(key)) for key in ("sources", "missing"))
    lines = _field("seen", _measured(seen)) + _field("not seen", _measured(missing))
    return [(), *lines] if lines else []


def _measured(names: Sequence[Any]) -> str:
    told = [str(name) for name in names]
    return ", ".join([*(_SOURCES[name] for name in _SOURCES if name in told), *(n for n in told if n not in _SOURCES)])


def _next(document: Document) -> list[Line]:
    text = _string(document, "next")
    label = "measure" if document.get("cause") == "unknown" else "next"
    return [(), *_field(label, text)] if text else []


def _watched(job: Document) -> str:
    ranks, steps, hosts = _number(job, "ranks"), _number(job, "steps") or 0, _sequence(job.get("hosts"))
    start, end = _time(job.get("start")), _time(job.get("end"))
    world = _number(job, "world") or 0
    of = f" of {world:,.0f}" if ranks and world > ranks else ""
    who = f"{ranks:,.0f}{of} rank{'s' if ranks != 1 or of else ''}" if ranks else ""
    on = f" on {len(hosts)} hosts" if len(hosts) > 1 else f" on {hosts[0]}" if hosts else ""
    text = ", ".join(part for part in (f"{who}{on}".strip(), f"{steps:,.0f} steps") if part)
    if start is not None and end is not None:
        text += f" in {seconds((end - start).total_seconds())}, {_span(start, end)}"
    return text


def _nothing_seen() -> list[Line]:
    lines = _title("No job was seen: nothing can be said")
    return lines + _field("next", "Was the training process started with the probe on its PYTHONPATH?")


def _by_cost(document: Document) -> tuple[bool, float, str]:
    """Latent last, else by what was lost."""
    return document.get("state") == "latent", -(_number(document, "lost_gpu_seconds") or 0), _string(document, "id")


# -- lines ------------------------------------------------------------------------------------------------------------


def _title(text: str, role: str = "title") -> list[Line]:
    lines: list[Line] = [(Span(part, role),) for part in _wrap(text, WIDTH)]
    return [*lines, (Span("─" * min(WIDTH, max(width(line[0].text) for line in lines)), "quiet"),)] if lines else []


def _field(label: str, text: str, role: str = "") -> list[Line]:
    """A label and its text, wrapped under itself; nothing where there is no text."""
    wrapped = _wrap(text, WIDTH - LABEL)
    heads = [f"  {label:<{LABEL - 2}}"] + [" " * LABEL] * (len(wrapped) - 1)
    return [(Span(head, "label"), Span(part, role)) for head, part in zip(heads, wrapped, strict=False)]


def _wrap(text: str, columns: int) -> list[str]:
    """Words in lines of at most so many columns; a word that is longer is a name, and is shortened."""
    lines, line = [], ""
    for word in (shortened(word, columns) for word in clean(text).split()):
        if line and width(line) + 1 + width(word) > columns:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines


def _pad(text: str, columns: int, *, right: bool = False) -> str:
    text = shortened(clean(text), columns)
    space = " " * (columns - width(text))
    return space + text if right else text + space


def _cut(spans: Sequence[Span]) -> list[Line]:
    """One line, cut at the edge."""
    kept, left = [], WIDTH
    for span in spans:
        text = clip(clean(span.text), left)
        kept.append(Span(text, span.role))
        left -= width(text)
    return [tuple(kept)]


def clip(text: str, columns: int) -> str:
    return text if width(text) <= columns else _fitting(text, columns - 1) + "…"[: max(0, columns)]


def shortened(name: str, columns: int) -> str:
    """A name without its middle: hosts differ at the front, runs of a job at the end, where an interface stands too."""
    if width(name) <= columns:
        return name
    tail = _fitting(name[::-1], (columns - 1) // 2)[::-1]
    return f"{_fitting(name, columns - 1 - width(tail))}…{tail}"


def _fitting(text: str, columns: int) -> str:
    """As much of the text as so many columns hold."""
    used, kept = 0, 0
    for character in text:
        used += _cells(character)
        if used > columns:
            break
        kept += 1
    return text[:kept]


def width(text: str) -> int:
    """Columns on a terminal."""
    return len(text) if text.isascii() else sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clean(text: str) -> str:
    """Without control characters, line breaks, or what turns the direction of writing."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else " " for character in text)


def _is_harmless(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


# -- reading a document that may lack anything ------------------------------------------------------------------------


def _string(document: Document, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _number(document: Document, key: str) -> float | None:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
        return None
    return value


def _mapping(value: object) -> Document:
    return value if isinstance(value, dict) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _time(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    if moment is None or moment.tzinfo is None:
        return moment and moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC)


def _clock(moment: datetime) -> str:
    return f"{moment:%H:%M:%S}"


def _date(moment: datetime) -> str:
    return f"{moment.day} {moment:%b %Y} {_clock(moment)}"


def _span(start: datetime, end: datetime) -> str:
    same = start.date() == end.date()
    return f"{_date(start)} to {_clock(end) if same else _date(end)} UTC"
