r"""A point, and its encoding: the only file that knows InfluxDB's line protocol.

    measurement,tag=value,... field=value,... time

What InfluxDB's own parser (models/points.go) does is what counts; its manual is stricter than its practice:

- In a measurement, `,` and a space are escaped by a backslash; in a tag or a field's key also `=`, in a field's key
  `"` too. Before anything else a backslash is itself, and it cannot be escaped there: a tag that ends in one cannot be
  said.
- In a string only `"` and a backslash are escaped. InfluxDB takes a raw newline inside of quotes, and `influx_inspect
  export` writes one; so do we read. We write `\n`, `\r`, `\t`, `\f`, as Telegraf does, so that one point is one line
  for every tool: since every writer doubles a literal backslash, `\n` can be nothing else.
- `1i` is an int, `1`, `1.` and `1e+06` are floats, `1u` is an unsigned int (Telegraf, InfluxDB 2): taken modulo 2^63,
  as the contract sends them. Booleans have ten spellings.

Beyond the syntax the contract wants a time on every line, in nanoseconds, and the types of `schema.SCHEMA`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from diagnosd.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Value = int | float | str | bool

INT_MIN, INT_MAX = -(2**63), 2**63 - 1
# 2001 to 2096. Seconds, milliseconds and microseconds of our days, and a time cut short by a torn line, lie outside.
TIME_MIN, TIME_MAX = 10**18, 4 * 10**18

_TYPE_NAMES: Mapping[type, str] = {int: "i", float: "f", str: "s", bool: "b"}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Series:
    """A measurement and its tags. Equal series are one object: they compare and hash by identity, in every thread."""

    measurement: str
    tags: tuple[tuple[str, str], ...]  # sorted by key
    key: str  # as it stands at the head of a line, tags sorted: the order of series

    @staticmethod
    def of(measurement: str, /, **tags: str | None) -> Series:
        """The series with these tags; a tag that is None or empty is absent. ValueError where a name cannot be said."""
        return _series(measurement, tuple(tags.items()))

    def tag(self, name: str) -> str | None:
        for key, value in self.tags:
            if key == name:
                return value
        return None

    def __lt__(self, other: Series) -> bool:
        return self.key < other.key

    def __reduce__(self) -> tuple[object, ...]:
        return _series, (self.measurement, self.tags)


class Point(NamedTuple):
    series: Series
    fields: dict[str, Value]
    time: int  # ns UTC


_interned: WeakValueDictionary[str, Series] = WeakValueDictionary()
_interning = Lock()


@lru_cache(maxsize=65536)
def _series(measurement: str, items: tuple[tuple[str, str | None], ...]) -> Series:
    if not measurement or measurement[0] == "#":
        raise ValueError(f"not a measurement's name: {measurement!r}")
    tags = tuple(sorted((key, value) for key, value in items if value))
    for (one, _), (two, _) in pairwise(tags):
        if one == two:
            raise ValueError(f"{measurement}: tag twice: {one}")
    head = [_escape(measurement, _MEASUREMENT, measurement)]
    head += [f"{_escape(key, _KEY, measurement)}={_escape(value, _KEY, f'{measurement}.{key}')}" for key, value in tags]
    text = ",".join(head)
    with _interning:
        series = _interned.get(text)
        if series is None:
            series = _interned[text] = Series(measurement, tags, text)
        return series


_MEASUREMENT = re.compile(r"[, ]")
_KEY = re.compile(r"[,= ]")
_FIELD_KEY = re.compile(r'[,= "]')


def _escape(name: str, special: re.Pattern[str], where: str) -> str:
    if not name or name[-1] == "\\" or "\n" in name or "\r" in name:
        raise ValueError(
            f"{where}: line protocol has no way to say {name!r} (empty, a newline, or a backslash at the end)"
        )
    return special.sub(r"\\\g<0>", name)


def point(measurement: str, tags: Mapping[str, str | None], fields: Mapping[str, Value | None], time: int) -> Point:
    """A point that keeps the contract: None is dropped, an int in a float field is a float, a counter is modulo 2^63.

    ValueError names what does not fit: a type, a NaN, a missing tag, or no field at all.
    """
    series = _series(measurement, tuple(tags.items()))
    kept = {name: _fitting(series, name, value) for name, value in fields.items() if value is not None}
    made = Point(series, kept, time)
    _line(made)
    return made


def _fitting(series: Series, name: str, value: Value) -> Value:
    known = SCHEMA.get(series.measurement)
    if known is None or type(value) is not int:
        return value
    if known.type_of(name) == "f":
        return float(value)
    if value > INT_MAX and known.kind_of(name) == "counter":
        return value % 2**63
    return value


def encode(points: Iterable[Point]) -> bytes:
    """The points as lines. ValueError names the measurement and field that break the contract."""
    return "".join([_line(each) for each in points]).encode()


def _line(each: Point) -> str:
    series, fields, time = each
    if not fields:
        raise ValueError(f"{series.measurement}: a point without a field")
    known = SCHEMA.get(series.measurement)
    if known is not None:
        have = {key for key, _ in series.tags}
        if missing := [tag for tag in known.tags if tag not in have]:
            raise ValueError(f"{series.measurement}: tag missing: {', '.join(missing)}")
    parts = [_field(series.measurement, name, value) for name, value in fields.items()]
    if type(time) is not int or not INT_MIN <= time <= INT_MAX:
        raise ValueError(f"{series.measurement}: not a time in nanoseconds: {time!r}")
    return f"{series.key} {','.join(parts)} {time}\n"


def _field(measurement: str, name: str, value: Value) -> str:
    where = f"{measurement}.{name}"
    known = SCHEMA.get(measurement)
    want = known.type_of(name) if known else None
    kind = _TYPE_NAMES.get(type(value))
    if kind is None or (want is not None and want != kind and not (want == "f" and kind == "i")):
        raise ValueError(f"{where}: is {type(value).__name__}, must be {want or 'int, float, str or bool'}: {value!r}")
    return f"{_escape(name, _FIELD_KEY, where)}={_value(where, value, want or kind)}"


def _value(where: str, value: Value, kind: str) -> str:
    if isinstance(value, str):
        return '"' + _STRING.sub(_string_escape, value) + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if kind == "i":
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError(f"{where}: beyond 64 bits: {value}")
        return f"{value}i"
    if not isfinite(value):
        raise ValueError(f"{where}: {value} is never sent; absent is absent")
    return repr(float(value))


# A backslash takes the next special character with it; the quantifiers are possessive, so that it is never taken back.
_HEAD = re.compile(r"((?:[^\\, ]|\\[, ]?+)++)((?:,(?:[^\\,= ]|\\[,= ]?+)++=(?:[^\\,= ]|\\[,= ]?+)++)*+) ++")
_TAG = re.compile(r",((?:[^\\,= ]|\\[,= ]?+)++)=((?:[^\\,= ]|\\[,= ]?+)++)")
_PAIR = re.compile(r'((?:[^\\,= "]|\\[,= "]?+)++)=(?:"((?:[^"\\]|\\.)*+)"|([^,= "\\]++))(?:(,)| ++)', re.DOTALL)
_TIME = re.compile(r"(-?[0-9]{1,20})\s*")
_INT = re.compile(r"(-?[0-9]{1,20})([iu])")
_FLOAT = re.compile(r"-?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?")
_SPECIAL = re.compile(r'\\([,= "])')
_OPEN = re.compile(r'(?:[^\\,= "]|\\[,= "]?+)++="(?:[^"\\]|\\.)*+\\?$', re.DOTALL)
_STRING = re.compile(r'[\\"\n\r\t\f]')
_BOOLS: Mapping[str, bool] = {
    **dict.fromkeys(("t", "T", "true", "True", "TRUE"), True),
    **dict.fromkeys(("f", "F", "false", "False", "FALSE"), False),
}
_ESCAPED = re.compile(r'\\([\\"nrtf])')
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "r": "\r", "t": "\t", "f": "\f"}


_LETTERS = {character: letter for letter, character in _ESCAPES.items()}


def _string_escape(found: re.Match[str]) -> str:
    return "\\" + _LETTERS[found[0]]


class OpenStringError(ValueError):
    """A string's closing quote is not on this line."""


def decode(line: bytes | str) -> Point:
    """The point of one line. ValueError says what is wrong with it, a field's type against the contract included."""
    text = line.decode() if isinstance(line, bytes) else line
    made, mistyped = _decode(text.strip("\r\n"))
    if mistyped:
        raise ValueError(mistyped[0])
    return made


def _decode(line: str) -> tuple[Point, list[str]]:
    """The point of a line, and why fields were left out of it."""
    head = _HEAD.match(line)
    if not head:
        raise ValueError(f"want 'measurement,tag=value field=value time', have: {line[:60]!r}")
    name = _unescape(head[1])
    tags = tuple((_unescape(key), _unescape(value)) for key, value in _TAG.findall(head[2]))
    series = _series(name, tags)
    fields: dict[str, Value] = {}
    at, more = head.end(), True
    while more:
        pair = _PAIR.match(line, at)
        if not pair:
            raise _no_pair(line, at)
        key = _unescape(pair[1])
        fields[key] = _text(pair[2]) if pair[2] is not None else _number(f"{name}.{key}", pair[3])
        at, more = pair.end(), pair[4] is not None
    time = _time(line[at:])
    return Point(series, fields, time), _mistyped(name, fields)


def _no_pair(line: str, at: int) -> ValueError:
    rest = line[at:]
    if _OPEN.match(rest):
        return OpenStringError(f"a string without its closing quote: {rest[:60]!r}")
    if not rest:
        return ValueError("no time at the end of the line")
    return ValueError(f"want field=value, have: {rest[:60]!r}")


def _unescape(name: str) -> str:
    return _SPECIAL.sub(r"\1", name) if "\\" in name else name


def _text(raw: str) -> str:
    return _ESCAPED.sub(lambda found: _ESCAPES[found[1]], raw) if "\\" in raw else raw


def _number(where: str, raw: str) -> Value:
    """An int, a float or a boolean."""
    if _FLOAT.fullmatch(raw):
        value = float(raw)
        if isfinite(value):
            return value
    elif whole := _INT.fullmatch(raw):
        number = int(whole[1])
        if whole[2] == "i" and INT_MIN <= number <= INT_MAX:
            return number
        if whole[2] == "u" and 0 <= number < 2**64:
            return number % 2**63
    elif raw in _BOOLS:
        return _BOOLS[raw]
    raise ValueError(f"{where}: not a value: {raw[:40]!r}")


def _time(raw: str) -> int:
    found = _TIME.fullmatch(raw)
    if not found:
        raise ValueError(f"not a time: {raw[:40]!r}" if raw else "no time at the end of the line")
    time = int(found[1])
    if not TIME_MIN <= time < TIME_MAX:
        raise ValueError(f"the time is not in nanoseconds since 1970: {time}")
    return time


def _mistyped(measurement: str, fields: dict[str, Value]) -> list[str]:
    """Takes out the fields whose type is not the contract's, and says which."""
    known = SCHEMA.get(measurement)
    if known is None:
        return []
    wrong = []
    for name, value in list(fields.items()):
        want, have = known.type_of(name), _TYPE_NAMES[type(value)]
        if want is not None and want != have:
            wrong.append(f"{measurement}.{name}: is {have}, must be {want}: {value!r:.40}")
            del fields[name]
    return wrong


@dataclass(slots=True)
class Counts:
    lines: int = 0  # comments and blank lines included, so that it is the number of the last line read
    points: int = 0
    bad: int = 0  # lines that did not parse, and were skipped
    mistyped: int = 0  # fields left out because their type is not the contract's
    first_bad: tuple[int, str] | None = None  # line number and reason


class Decoder:
    """Lines to points, counting what it must skip. It never raises on what it is fed."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._rest = b""

    def feed(self, chunk: bytes) -> list[Point]:
        """The points of the lines that end in this chunk; the beginning of a line waits for the next one."""
        whole, newline, self._rest = (self._rest + chunk).rpartition(b"\n")
        return self._lines(whole) if newline else []

    def finish(self) -> list[Point]:
        """The point of a last line that ends without a newline."""
        rest, self._rest = self._rest, b""
        return self._lines(rest) if rest else []

    def _lines(self, block: bytes) -> list[Point]:
        points = []
        counts = self.counts
        for raw in block.split(b"\n"):
            counts.lines += 1
            try:
                line = raw.decode().strip(" \t\r\x00")
                if not line or line[0] == "#":
                    continue
                made, mistyped = _decode(line)
            except ValueError as error:
                self._bad(str(error))
                continue
            for reason in mistyped:
                counts.mistyped += 1
                counts.first_bad = counts.first_bad or (counts.lines, reason)
            if made.fields:
                counts.points += 1
                points.append(made)
        return points

    def _bad(self, reason: str) -> None:
        self.counts.bad += 1
        self.counts.first_bad = self.counts.first_bad or (self.counts.lines, reason)
