"""The words for a verdict: what an engineer reads at night, made from the documents of telemetry.md 7 and nothing else.

Lines of at most 80 columns, good without colour: a line is a tuple of spans, and a span names its role (`title`,
`label`, `for`, `against`, `good`, `quiet` or ``), to which whoever prints gives a colour or not. What came from outside
(host names, paths, texts) cannot break a line or reach the terminal as a control sequence.

Of a job's part of the summary, besides `steps`, `gpu_ns` and `ledger_ns`, these keys are told where they are present:
`ranks` (how many), `hosts` (names), `start`, `end` (RFC 3339), `step_s` and `step_p95_s` (median and 95th percentile),
`sources`, `missing` (names of measurements).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WIDTH = 80
LABEL = 12  # columns of `  evidence  `
BAR = 20


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
_REFERENCE = {"past": "before", "peers": "at its peers", "model": "by the model"}
_OWNER = {"job": "the job's owner", "config": "whoever configured it", "node": "the node's owner"}


def whole(documents: Sequence[Document], summary: Document) -> list[Line]:
    """Everything, for the end of a run or a replay: verdicts by their cost, jobs without one, then the account."""
    lines: list[Line] = []
    told = [d for d in documents if d.get("state") != "withdrawn"]
    for document in sorted(told, key=_by_cost):
        lines += [*verdict(document), ()]
    withdrawn = [d for d in documents if d.get("state") == "withdrawn"]
    if withdrawn:
        lines += [*_field("withdrawn", "; ".join(sentence(d) for d in withdrawn), "quiet"), ()]
    troubled = {
        _string(d, "job") for d in told if d.get("state") != "latent" and d.get("cause") != "communication_bound"
    }
    jobs = _mapping(summary.get("jobs"))
    for name, job in jobs.items():
        if name not in troubled:
            lines += [*no_finding(name, _mapping(job)), ()]
    for name, job in jobs.items():
        lines += [*account(name, _mapping(job)), ()]
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
    lines += _field("certainty", _certainty(document))
    lines += _field("hardware", "; ".join(_asset(_mapping(a)) for a in _sequence(document.get("assets"))))
    lines += _evidence([_mapping(e) for e in _sequence(document.get("evidence"))])
    lines += _rivals([_mapping(a) for a in _sequence(document.get("alternatives"))])
    return lines + _sources(document) + _next(document)


def sentence(document: Document) -> str:
    """One sentence, for an alert's subject or a live line."""
    slower = _slowdown(document)
    since = _time(document.get("start"))
    parts = [_headline(document), slower, f"since {_clock(since)} UTC" if since else ""]
    return ", ".join(part for part in parts if part)


def no_finding(name: str, job: Document) -> list[Line]:
    """A job in which nothing was found, and what was looked at: or why nothing could be said."""
    steps = _number(job, "steps") or 0
    if not steps:
        lines = _title(f"No step of job {name} was seen: nothing can be said about its speed")
    else:
        lines = _title(f"Nothing found in job {name}", role="good")
    lines += _field("watched", _watched(job))
    median, high = _number(job, "step_s"), _number(job, "step_p95_s")
    if steps and median is not None:
        tail = f", 95 of 100 within {seconds(high)}" if high is not None else ""
        lines += _field("step time", f"{seconds(median)}{tail}")
    lines += _sources(job)
    if not steps:
        lines += _field(
            "next", "Does the script import torch, and reach its first optimizer step? Does the probe reach it?"
        )
    return lines


def account(name: str, job: Document) -> list[Line]:
    """Where a job's GPU time went: rows that add up, as printed."""
    total, steps, ledger = _number(job, "gpu_ns"), _number(job, "steps") or 0, _mapping(job.get("ledger_ns"))
    head = f"Job {clean(name)}: {steps:,.0f} steps"
    if not total or not ledger:
        return _cut([Span(head)])
    unit, unit_ns, places = ("GPU-hours", 36 * 10**9, 2) if total >= 1e13 else ("GPU-seconds", 10**8, 1)
    rows = sorted(((ns, code) for code, ns in ledger.items() if isinstance(ns, int) and ns), reverse=True)
    parts = [ns for ns, _ in rows]
    amounts, shares = (_rounded(parts, per / total) for per in (total / unit_ns, 1000))
    lines = [*_cut([Span(f"{head}, and where its time went")]), *_cut([Span(f"{unit:>13}     share", "label")])]
    for amount, share, (ns, code) in zip(amounts, shares, rows, strict=True):
        if not amount and not share:
            continue
        figures = f"{amount / 10**places:>13,.{places}f}  {share / 10:6.1f} %  "
        bar = "█" * round(BAR * min(1.0, max(0, ns) / total)) or "▏"
        lines += _cut([Span(figures), Span(f"{bar:<{BAR}} ", "against" if code in _LOSSES else ""), Span(words(code))])
    in_all = f"{sum(amounts) / 10**places:>13,.{places}f}  {sum(shares) / 10:6.1f} %"
    odd = "" if sum(parts) == total else f"  but {total:.0f} ns were to be accounted for"
    return lines + _cut([Span(in_all, "label"), Span(odd, "against")])


def live(name: str, job: Document, documents: Sequence[Document]) -> str:
    """One line while it runs: where the job is, and the worst that is open."""
    steps, median = _number(job, "steps") or 0, _number(job, "step_s")
    parts = [name, f"{steps:,.0f} steps"]
    if median is not None:
        parts.append(seconds(median))
    open_ones = [d for d in documents if d.get("state") in ("suspected", "confirmed")]
    if open_ones:
        worst = min(open_ones, key=_by_cost)
        parts.append(f"{_headline(worst)} ({_string(worst, 'state')})")
    elif steps:
        parts.append("nothing found so far")
    return clip("  ".join(clean(part) for part in parts), WIDTH - 1)


def plain(lines: Iterable[Line]) -> str:
    """The lines as text, without colour; each ends in a newline."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


_NO_STEP = "Does the script import torch, and reach its first optimizer step? Does the probe reach it?"

# -- figures ----------------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """`1.92 s`, `183 ms`, `45 us`; from 100 s on `4 min 58 s`, `2 h 5 min`, `3 d 4 h`."""
    if value < 0:
        return f"-{seconds(-value)}"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (100, 1, "s")):
        if value < limit:
            return f"{digits(value * scale)} {unit}"
    minutes, hours = round(value / 60), round(value / 3600)
    if round(value) < 3600:
        return _two(round(value), 60, "min", "s")
    return _two(minutes, 60, "h", "min") if minutes < 24 * 60 else _two(hours, 24, "d", "h")


def _two(count: int, base: int, big: str, small: str) -> str:
    whole, rest = divmod(count, base)
    return f"{whole:,} {big} {rest} {small}" if rest else f"{whole:,} {big}"


def gpu_time(value: float) -> str:
    """`1,187 GPU-seconds`, from 10,000 on `16.0 GPU-hours`."""
    return f"{digits(value)} GPU-seconds" if abs(value) < 10_000 else f"{digits(value / 3600)} GPU-hours"


def digits(value: float) -> str:
    """Three significant digits, thousands set apart, no zeros at the end: `0.61`, `1.92`, `24.1`, `610`, `1,187`."""
    if not value or abs(value) < 1e-9:
        return "0"
    places = max(0, 2 - _magnitude(value))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
        return _scaled(value, _SCALED[unit])
    if unit in ("share", "1") and 0 <= value <= 1:
        return f"{digits(100 * value)} %"
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


def _scaled(value: float, unit: str) -> str:
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{digits(value / limit)} {prefix}{unit}"
    return f"{digits(value)} {unit}"


def _magnitude(value: float) -> int:
    """Of 610 it is 2, of 0.061 it is -2."""
    return int(f"{value:e}".split("e")[1])


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
    if slowdown is None or document.get("state") == "latent":
        return ""
    baseline = _mapping(document.get("baseline"))
    step = _number(baseline, "step_s")
    text = f"{digits(slowdown)} x"
    if step is not None:
        text += f": {seconds(step * slowdown)} a step instead of {seconds(step)}"
        source = _REFERENCE.get(_string(baseline, "from"))
        text += f" {source}" if source else ""
    return text


def _when(document: Document) -> str:
    start, end, told = (_time(document.get(key)) for key in ("start", "end", "detected"))
    if start is None:
        return "present, and costs nothing now" if document.get("state") == "latent" else ""
    if end is not None:
        text = f"{_span(start, end)} ({seconds((end - start).total_seconds())})"
    else:
        text = f"since {_date(start)} UTC, still going on"
    if told is not None:
        text += f"; told {seconds((told - start).total_seconds())} after the onset"
    return text


def _cost(document: Document) -> str:
    lost, gain = _number(document, "lost_gpu_seconds"), _number(document, "fix_gain")
    parts = [f"{gpu_time(lost)} lost" if lost is not None else ""]
    if gain is not None and document.get("cause") != "unknown":
        parts.append(f"repairing this alone would save {digits(100 * gain)} % of the step time")
    return "; ".join(part for part in parts if part)


def _certainty(document: Document) -> str:
    confidence = _number(document, "confidence")
    severity, owner = _string(document, "severity"), _string(document, "owner")
    parts = [
        f"{100 * confidence:.0f} %" if confidence is not None else "",
        _string(document, "state"),
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
    """A table: + speaks for the verdict, - against it."""
    if not rows:
        return []
    lines: list[Line] = [(), _row("  evidence", "where", "observed", "expected", role="label")]
    for row in sorted(rows, key=lambda r: r.get("supports") is False):
        unit, against = _string(row, "unit"), row.get("supports") is False
        observed, expected = (figure(row.get(key), unit) for key in ("observed", "expected"))
        mark = f"{'-' if against else '+'} {_string(row, 'metric')}"
        lines.append(
            _row(mark, place(_string(row, "subject")), observed, expected, role="against" if against else "for")
        )
        lines += [(Span(f"    {part}", "quiet"),) for part in _wrap(_string(row, "text"), WIDTH - 4)]
    return lines


def _row(what: str, where: str, observed: str, expected: str, role: str) -> Line:
    """Columns of 2 + 26, 22, 13 and 13, a space between."""
    mark, rest = what[:2], what[2:]
    cells = f"{_pad(rest, 26)} {_pad(where, 22)} {_pad(observed, 13, right=True)} {_pad(expected, 13, right=True)}"
    return (Span(f"{mark}", role), Span(cells, "label" if role == "label" else ""))


def _rivals(rows: Sequence[Document]) -> list[Line]:
    if not rows:
        return []
    lines: list[Line] = [(), (Span("  instead of", "label"),)]
    for row in rows:
        confidence = _number(row, "confidence")
        sure = f", {100 * confidence:.0f} %" if confidence is not None else ""
        head, text = f"{words(_string(row, 'cause'))}{sure}", _string(row, "text")
        wrapped = _wrap(f"{head}: {text}" if text else head, WIDTH - 4)
        lines += [(Span("  " if n == 0 else "    "), Span(part)) for n, part in enumerate(wrapped)]
    return lines


def _sources(document: Document) -> list[Line]:
    seen = ", ".join(str(name) for name in _sequence(document.get("sources")))
    missing = ", ".join(str(name) for name in _sequence(document.get("missing")))
    lines = _field("seen", seen) + _field("not seen", missing)
    return [(), *lines] if lines else []


def _next(document: Document) -> list[Line]:
    text = _string(document, "next")
    label = "measure" if document.get("cause") == "unknown" else "next"
    return [(), *_field(label, text)] if text else []


def _watched(job: Document) -> str:
    ranks, steps, hosts = _number(job, "ranks"), _number(job, "steps") or 0, _sequence(job.get("hosts"))
    start, end = _time(job.get("start")), _time(job.get("end"))
    who = f"{ranks:,.0f} rank{'s' if ranks != 1 else ''}" if ranks else ""
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
    """Words in lines of at most so many columns; a word that is longer is cut through."""
    lines, line = [], ""
    for word in clean(text).split():
        if line and width(line) + 1 + width(word) > columns:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
        while width(line) > columns:
            part = _fitting(line, columns)
            lines.append(part)
            line = line[len(part) :]
    return [*lines, line] if line else lines


def _pad(text: str, columns: int, *, right: bool = False) -> str:
    text = clip(clean(text), columns)
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
    return text if width(text) <= columns else _fitting(text, max(0, columns - 1)) + "…"[: max(0, columns)]


def _fitting(text: str, columns: int) -> str:
    """As much of the text as so many columns hold, and one character at least where one fits at all."""
    used, kept = 0, 0
    for character in text:
        used += _cells(character)
        if used > columns:
            break
        kept += 1
    return text[: max(kept, 1 if columns > 0 else 0)]


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
