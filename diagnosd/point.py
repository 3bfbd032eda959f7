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
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, pairwise
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta

from diagnosd.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Value = int | float | str | bool

INT_MIN, INT_MAX = -(2**63), 2**63 - 1
# 2001 to 2096. Seconds, milliseconds and microseconds of our days, and a time cut short by a torn line, lie outside.
TIME_MIN, TIME_MAX = 10**18, 4 * 10**18

_TYPES: Mapping[type, str] = {int: "i", float: "f", str: "s", bool: "b"}


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
        raise ValueError(f"not a measurement's name: {measurement!r:.60}")
    tags = tuple(sorted((key, value) for key, value in items if value))
    for (one, _), (two, _) in pairwise(tags):
        if one == two:
            raise ValueError(f"{measurement}: tag twice: {one}")
    head = [_escape(measurement, _MEASUREMENT, "measurement")]
    for key, value in tags:
        head.append(f"{_escape(key, _TAG, measurement)}={_escape(value, _TAG, f'{measurement}.{key}')}")
    text = ",".join(head)
    with _interning:
        series = _interned.get(text)
        if series is None:
            series = _interned[text] = Series(measurement, tags, text)
        return series


# What a backslash escapes in each kind of name, and in a string.
_MEASUREMENT, _TAG, _KEY = "[, ]", "[,= ]", '[,= "]'
_STRING = re.compile(r'[\\"\n\r\t\f]')
_LETTERS = {"\\": "\\", '"': '"', "\n": "n", "\r": "r", "\t": "t", "\f": "f"}
_UNSAYABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|\\\Z|\A\Z")


def _escape(name: str, special: str, where: str) -> str:
    if _UNSAYABLE.search(name):
        raise ValueError(
            f"{where}: line protocol cannot say {name!r:.60} (empty, a control character, a backslash at the end)"
        )
    return re.sub(special, r"\\\g<0>", name)


def _quoted(text: str, where: str) -> str:
    if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where}: not text that UTF-8 can say: {text!r:.60}")
    return '"' + _STRING.sub(lambda found: "\\" + _LETTERS[found[0]], text) + '"'


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
    if known.type_of(name) == "f" and INT_MIN <= value <= INT_MAX:
        return float(value)
    return value % 2**63 if value > INT_MAX and known.kind_of(name) == "counter" else value


class _Form(NamedTuple):
    """How points of one series with the same fields, of the types of the contract, are written."""

    types: list[type]  # of the fields' values and the time
    text: str  # for the % operator
    pack: Callable[..., bytes]  # of the numbers: raises where an int has more than 64 bits
    strings: list[bool] | None  # which of the values are strings; None where none is
    numbers: list[bool]
    floats: bool  # whether there are any


# By series and field names, in their order. Bounded: cleared when it is full.
_forms: dict[tuple[object, ...], _Form] = {}
_FORMS = 16384  # of up to 7 KB each: devices that come and go make new ones for as long as the agent runs
_DIRECTIVES: Mapping[type, str] = {int: "%di", float: "%r", str: '"%s"'}


def encode(points: Iterable[Point]) -> bytes:
    """The points as lines. ValueError names the measurement and field that break the contract."""
    return "".join(map(_line, points)).encode()


def _line(each: Point) -> str:
    series, fields, time = each
    form = _forms.get((series, *fields))
    if form is None:
        return _first_line(each)
    types, text, pack, strings, is_number, floats = form
    values = (*fields.values(), time)
    if [*map(type, values)] != types:
        return _strict_line(each)
    numbers: Sequence[Any] = values
    if strings:
        plain = "".join(compress(cast("tuple[str, ...]", values), strings))
        if not plain.isprintable() or '"' in plain or "\\" in plain:
            return _strict_line(each)
        numbers = [*compress(values, is_number)]
    try:
        pack(*numbers)
    except struct.error:
        return _strict_line(each)
    if floats and not isfinite(sum(numbers)):  # a NaN or infinity stays one in any sum
        return _strict_line(each)
    return text % values


def _first_line(each: Point) -> str:
    """Keeps the form of points like this one, if it is as the contract wants it."""
    series, fields, time = each
    line = _strict_line(each)
    values = (*fields.values(), time)
    measured = SCHEMA.get(series.measurement)
    fixed = [measured.type_of(name) if measured else None for name in fields]
    if bool in map(type, values) or any(
        want not in (None, _TYPES[type(v)]) for want, v in zip(fixed, values, strict=False)
    ):
        return line
    pairs = [
        _escape(name, _KEY, series.measurement).replace("%", "%%") + "=" + _DIRECTIVES[type(v)]
        for name, v in fields.items()
    ]
    text = f"{series.key.replace('%', '%%')} {','.join(pairs)} %d\n"
    types = [*map(type, values)]
    strings = [kind is str for kind in types]
    layout = "".join({int: "q", float: "d", str: ""}[kind] for kind in types)
    if len(_forms) >= _FORMS:
        _forms.clear()
    _forms[series, *fields] = _Form(
        types,
        text,
        struct.Struct(layout).pack,
        strings if any(strings) else None,
        [not is_string for is_string in strings],
        float in types,
    )
    return line


def _strict_line(each: Point) -> str:
    series, fields, time = each
    if not fields:
        raise ValueError(f"{series.measurement}: a point without a field")
    measured = SCHEMA.get(series.measurement)
    if measured is not None:
        have = {key for key, _ in series.tags}
        if missing := [tag for tag in measured.tags if tag not in have]:
            raise ValueError(f"{series.measurement}: tag missing: {', '.join(missing)}")
    pairs = [_pair(series.measurement, name, value) for name, value in fields.items()]
    if type(time) is not int or not INT_MIN <= time <= INT_MAX:
        raise ValueError(f"{series.measurement}: not a time in nanoseconds: {time!r}")
    return f"{series.key} {','.join(pairs)} {time}\n"


def _pair(measurement: str, name: str, value: Value) -> str:
    where = f"{measurement}.{name}"
    measured = SCHEMA.get(measurement)
    want, have = measured.type_of(name) if measured else None, _TYPES.get(type(value))
    if have is None or (want not in (None, have) and (want, have) != ("f", "i")):
        raise ValueError(
            f"{where}: is {type(value).__name__}, must be {want or 'int, float, str or bool'}: {value!r:.60}"
        )
    return f"{_escape(name, _KEY, where)}={_value(where, value, want or have)}"


def _value(where: str, value: Value, kind: str) -> str:
    if isinstance(value, str):
        return _quoted(value, where)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        raise ValueError(f"{where}: beyond 64 bits: {value}")
    if kind == "i":
        return f"{value}i"
    if not isfinite(value):
        raise ValueError(f"{where}: {value} is never sent; absent is absent")
    return repr(float(value))


# A backslash takes the next special character with it; the quantifiers are possessive, so that it is never taken back.
_HEAD = re.compile(r"((?:[^\\, ]|\\[, ]?+)++)((?:,(?:[^\\,= ]|\\[,= ]?+)++=(?:[^\\,= ]|\\[,= ]?+)++)*+) ++")
_ONE_TAG = re.compile(r",((?:[^\\,= ]|\\[,= ]?+)++)=((?:[^\\,= ]|\\[,= ]?+)++)")
_PAIR = re.compile(r'((?:[^\\,= "]|\\[,= "]?+)++)=(?:"((?:[^"\\]|\\.)*+)"|([^,= "\\]++))(?:(,)| ++|\Z)', re.DOTALL)
_OPEN = re.compile(r'(?:[^\\,= "]|\\[,= "]?+)++="(?:[^"\\]|\\.)*+\\?\Z', re.DOTALL)
_INT = re.compile(r"(-?[0-9]{1,20})([iu])")
_FLOAT = re.compile(r"-?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?")
_TIME = re.compile(r"-?[0-9]{1,20}")
_BOOLS: Mapping[str, bool] = {
    **dict.fromkeys(("t", "T", "true", "True", "TRUE"), True),
    **dict.fromkeys(("f", "F", "false", "False", "FALSE"), False),
}
_ESCAPED = re.compile(r'\\([\\"nrtf])')
_CHARACTERS = {letter: character for character, letter in _LETTERS.items()}


class OpenStringError(ValueError):
    """A string's closing quote is not on this line."""


def decode(line: bytes | str) -> Point:
    """The point of one line. ValueError says what is wrong with it, a field's type against the contract included."""
    text = line.decode() if isinstance(line, bytes) else line
    made, mistyped = _decode(text.strip(_BLANK))
    if mistyped:
        raise ValueError(mistyped[0])
    return made


_BLANK = " \t\r\n\x00"  # what InfluxDB passes over before a line, and a crash leaves behind the last one


def _decode(line: str) -> tuple[Point, list[str]]:
    """The point of a line, and why fields were left out of it: their type is not the contract's."""
    head = _HEAD.match(line)
    if not head:
        raise ValueError(f"want 'measurement,tag=value field=value time', have: {line[:60]!r}")
    name = _unescape(head[1], _MEASUREMENT)
    tags = tuple((_unescape(key, _TAG), _unescape(value, _TAG)) for key, value in _ONE_TAG.findall(head[2]))
    series = _series(name, tags)
    fields: dict[str, Value] = {}
    at, more = head.end(), True
    while more:
        pair = _PAIR.match(line, at)
        if not pair:
            raise _no_pair(line[at:])
        key = _unescape(pair[1], _KEY)
        fields[key] = _number(f"{name}.{key}", pair[3]) if pair[2] is None else _text(pair[2])
        at, more = pair.end(), pair[4] is not None
    time = _time(line[at:])
    mistyped = _take_mistyped(name, fields)
    return Point(series, fields, time), mistyped


def _no_pair(rest: str) -> ValueError:
    if _OPEN.match(rest):
        return OpenStringError(f"a string without its closing quote: {rest[:60]!r}")
    return ValueError(f"want field=value, have: {rest[:60]!r}")


def _unescape(name: str, special: str) -> str:
    return re.sub(rf"\\({special})", r"\1", name) if "\\" in name else name


def _text(raw: str) -> str:
    return _ESCAPED.sub(lambda found: _CHARACTERS[found[1]], raw) if "\\" in raw else raw


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
    if not raw:
        raise ValueError("no time at the end of the line")
    if not _TIME.fullmatch(raw):
        raise ValueError(f"not a time: {raw[:40]!r}")
    time = int(raw)
    if not TIME_MIN <= time < TIME_MAX:
        raise ValueError(f"the time is not in nanoseconds since 1970: {time}")
    return time


def _take_mistyped(measurement: str, fields: dict[str, Value]) -> list[str]:
    measured = SCHEMA.get(measurement)
    if measured is None:
        return []
    reasons = []
    for name, value in list(fields.items()):
        want, have = measured.type_of(name), _TYPES[type(value)]
        if want not in (None, have):
            reasons.append(f"{measurement}.{name}: is {have}, must be {want}: {value!r:.40}")
            del fields[name]
    return reasons


@dataclass(slots=True)
class Counts:
    lines: int = 0  # comments and blank lines included, so that it is the number of the last line read
    points: int = 0
    bad: int = 0  # lines that did not parse, and were skipped
    mistyped: int = 0  # fields left out because their type is not the contract's
    first_bad: tuple[int, str] | None = None  # line number and reason


class _Shape(NamedTuple):
    """What is known of a line's fields from all but the digits in them."""

    names: tuple[str, ...] | None  # to be compared, where fields whose names differ in digits may differ in type
    bare: tuple[str, ...]  # floats that look like ints


class _Head(NamedTuple):
    series: Series
    shapes: dict[bytes, _Shape]  # of the measurement, by the fields' text without its digits


_DIGITS = b"0123456789"
_I, _BACKSLASH = b"i\\"
_Int64 = Annotated[int, Meta(ge=INT_MIN, le=INT_MAX)]
_JSON = msgspec.json.Decoder(list[dict[str, _Int64 | float | str]])
_HEADS = 65536  # remembered by a decoder; then it learns anew
_SHAPES = 4096
_SHAPE_BYTES = 1024
_BLANK_BYTES = _BLANK.encode()
_LINE_BYTES = 8 * 1024 * 1024  # longer than any document: what goes on without a newline is no line
_STRING_LINES = 64  # a raw newline in a string: a stack has fewer, and a string that was torn swallows no more


_new = tuple.__new__  # a NamedTuple's own __new__ is a Python call: 4 % of decoding


class Decoder:
    """Lines to points, counting what it must skip. It never raises on what it is fed.

    Almost all lines are like one before: the same head, and fields that differ from it in digits only. Of such a line
    the head is looked up, and the fields of a whole block become one JSON text by some replacements, which a parser in
    C reads. Every other line is taken apart by `decode`'s rules, and its shape is learnt if both ways agree on it.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._rest = b""  # the beginning of a line, or of a string that goes on over lines
        self._passing = False  # over the rest of a line that is too long
        self._heads: dict[bytes, _Head] = {}
        self._shapes: dict[str, dict[bytes, _Shape]] = {}

    def feed(self, chunk: bytes) -> list[Point]:
        """The points of the lines that end in this chunk; the beginning of a line waits for the next one."""
        if self._passing:
            _, newline, chunk = chunk.partition(b"\n")
            self._passing = not newline
        whole, newline, rest = (self._rest + chunk).rpartition(b"\n")
        too_long = len(rest) > _LINE_BYTES
        self._rest = b"" if too_long else rest
        points = self._block(whole, final=too_long) if newline else []
        if too_long:
            self.counts.lines += 1
            self._bad(-1, f"a line longer than {_LINE_BYTES >> 20} MiB")
            self._passing = True
        return points

    def finish(self) -> list[Point]:
        """The points of what waited: a last line that ends without a newline."""
        rest, self._rest, self._passing = self._rest, b"", False
        return self._block(rest.removesuffix(b"\n"), final=True) if rest else []

    def _block(self, block: bytes, *, final: bool) -> list[Point]:
        lines = (block.replace(b"\r\n", b"\n") if b"\r" in block else block).split(b"\n")
        slots, others = self._quick(lines)
        used = self._careful(lines, slots, others, final=final) if others else len(lines)
        self.counts.lines += used
        points = [each for each in slots[:used] if each]
        self.counts.points += len(points)
        return points

    def _quick(self, lines: list[bytes]) -> tuple[list[Point | None], list[int]]:
        """A slot for each line, with its point if its shape is known; and the numbers of the other lines."""
        slots: list[Point | None] = [None] * len(lines)
        others, known, texts = [], [], []
        for number, line in enumerate(lines):
            if not line:
                continue
            parts = line.split(b" ")
            begin, text, end = parts if len(parts) == 3 else _parts(line)
            head = self._heads.get(begin)
            if head:
                shape = head.shapes.get(text.translate(None, _DIGITS))
                if shape and end.isdigit() and TIME_MIN <= (time := int(end)) < TIME_MAX:
                    known.append((number, head.series, shape, time))
                    texts.append(text[:-1] if text[-1] == _I else text)
                    continue
            others.append(number)
        for (number, series, (names, bare), time), fields in zip(known, _parsed(texts), strict=True):
            if fields is None or (names and tuple(fields) != names):
                others.append(number)
                continue
            for name in bare:
                fields[name] = float(fields[name])
            slots[number] = _new(Point, (series, fields, time))
        others.sort()
        return slots, others

    def _careful(self, lines: list[bytes], slots: list[Point | None], others: list[int], *, final: bool) -> int:
        """Fills the slots of the other lines, and says how many lines are done with."""
        upto = 0
        for number in others:
            if number < upto:
                continue
            slots[number], upto = self._one(lines, number)
            if upto <= len(lines):
                slots[number + 1 : upto] = [None] * (upto - number - 1)
            elif final or sum(map(len, lines[number:])) > _LINE_BYTES:
                self._bad(number, "a string without its closing quote")
                upto = number + 1
            else:
                self._rest = b"\n".join([*lines[number:], self._rest])
                return number
        return len(lines)

    def _one(self, lines: list[bytes], number: int) -> tuple[Point | None, int]:
        """The point of a line and the number of the next one: after a string with raw newlines, or beyond the block."""
        text, reason = lines[number], ""
        for upto in range(number + 1, number + _STRING_LINES):
            try:
                return self._line(text, number), upto
            except OpenStringError as error:
                reason = reason or str(error)
                if upto == len(lines):
                    return None, upto + 1
                text += b"\n" + lines[upto]
            except ValueError as error:
                reason = reason or str(error)
                break
        self._bad(number, reason)
        return None, number + 1

    def _line(self, line: bytes, number: int) -> Point | None:
        stripped = line.strip(_BLANK_BYTES)
        if not stripped or stripped.startswith(b"#"):
            return None
        made, mistyped = _decode(stripped.decode())
        for reason in mistyped:
            self.counts.mistyped += 1
            self._note(number, reason)
        if stripped == line and not mistyped:
            self._learn(line, made)
        return made if made.fields else None

    def _bad(self, number: int, reason: str) -> None:
        self.counts.bad += 1
        self._note(number, reason)

    def _note(self, number: int, reason: str) -> None:
        self.counts.first_bad = self.counts.first_bad or (self.counts.lines + number + 1, reason)

    def _learn(self, line: bytes, made: Point) -> None:
        name, text, _ = _parts(line)
        shapes = self._shapes.setdefault(made.series.measurement, {})
        if len(self._heads) >= _HEADS:
            self._heads.clear()
        self._heads[name] = _Head(made.series, shapes)
        shape = _shape(text, made) if len(text) <= _SHAPE_BYTES else None
        if shape:
            if len(shapes) >= _SHAPES:
                shapes.clear()
            shapes[text.translate(None, _DIGITS)] = shape


def _parts(line: bytes) -> tuple[bytes, bytes, bytes]:
    """Head, fields and time of a line, divided where no backslash escapes the space; empty where there are none."""
    at = line.find(b" ")
    while at > 0 and line[at - 1] == _BACKSLASH:
        at = line.find(b" ", at + 1)
    text, _, time = line[at + 1 :].rpartition(b" ")
    return line[: max(at, 0)], text, time


def _json(texts: list[bytes]) -> bytes:
    """The fields of lines as a JSON list of objects; the last `i` of each is off already."""
    text = b"\n".join(texts).replace(b"i,", b",").replace(b"=", b'":').replace(b",", b',"').replace(b"\n", b'},{"')
    return b'[{"' + text + b"}]"


def _parsed(texts: list[bytes]) -> Sequence[dict[str, Value] | None]:
    if not texts:
        return []
    try:
        return _JSON.decode(_json(texts))
    except ValueError:
        return [_parsed_alone(text) for text in texts]  # one of them is odd


def _parsed_alone(text: bytes) -> dict[str, Value] | None:
    try:
        (fields,) = _JSON.decode(_json([text]))
    except ValueError:
        return None
    return fields


def _shape(text: bytes, made: Point) -> _Shape | None:
    """What to heed in lines like this one; None where JSON would not read them as they are.

    Deleting the digits leaves everything that decides how a line divides: a value ends in `i`, has a point, an
    exponent, quotes, or nothing. Where JSON and line protocol agree on one line they agree on all that differ from it
    in digits, or JSON refuses: it knows fewer numbers, and no digit after a backslash.
    """
    fields = _parsed_alone(text.removesuffix(b"i"))
    if fields is None or list(fields) != list(made.fields) or text.count(b"=") != len(fields):
        return None
    bare = tuple(name for name, value in made.fields.items() if type(value) is float and type(fields[name]) is int)
    if bare and b"=-" in text:  # a -0 is an int 0 in JSON, and has lost its sign
        return None
    for name in bare:
        fields[name] = float(fields[name])
    if [(type(value), value) for value in fields.values()] != [(type(v), v) for v in made.fields.values()]:
        return None
    measured = SCHEMA.get(made.series.measurement)
    alike = not measured or {measured.any_field} == {field.type for field in measured.fields.values()}
    return _Shape(None if alike and not bare else tuple(fields), bare)
