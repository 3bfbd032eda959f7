"""Questions put to one GPU together, and what its answers teach about how it can be asked.

NVML differs from GPU to GPU and from driver to driver, also within one machine. A way of asking that is not supported
is not tried again, and the next one of its row is; what has answered once is supported, and when it does not answer it
is unreadable now. Where no way is left the value is absent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from diagnosd.collectors.nvml.fields import LIMITS, Answer, Call, Limit, Question, Value, Way

# NVML_ERROR_*
UNINITIALIZED, NOT_LOADED, NO_FUNCTION, LOST, MISMATCH, UNKNOWN = 1, 9, 13, 15, 18, 999
DOWN = frozenset({UNINITIALIZED, NOT_LOADED, MISMATCH})  # of the whole driver, whatever GPU was asked
# Invalid argument (a field that an old driver does not know), not supported, no permission, function not found, version
# of a struct not known, deprecated.
NOT_SUPPORTED = frozenset({2, 3, 4, NO_FUNCTION, 25, 26})

# c_nvmlFieldValue_t: field, scope, time, latency, type, code, value. Reading its attributes costs five times as much.
ELEMENT = struct.Struct("=IIqqIIQ")
_DOUBLE = struct.Struct("=d")


class LostError(Exception):
    """The GPU is no longer there."""


class DownError(Exception):
    """The driver no longer is, or is another one."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def unsupported(code: int) -> bool:
    """Whether an error means that there is no such thing here, and not that it is unreadable now."""
    if code == LOST:
        raise LostError
    if code in DOWN:
        raise DownError(code)
    return code in NOT_SUPPORTED


def said(text: str) -> str | None:
    """What a driver says in words, or None where it says that it does not know, as nvidia-smi prints it."""
    shown = "".join(character for character in text if " " <= character <= "~").strip(" \\")
    return None if shown in ("", "N/A", "[N/A]", "0", "Unknown Error", "[Unknown Error]") else shown


def _double(bits: int) -> float:
    (number,) = _DOUBLE.unpack(bits.to_bytes(8, "little"))
    return float(number)


def _signed(bits: int, width: int) -> int:
    bits &= (1 << width) - 1
    return bits - (bits >> width - 1 << width)


def _unsigned(bits: int, width: int) -> int:
    """All bits set is NVML's way of saying "not available" (NVML_VALUE_NOT_AVAILABLE, -1)."""
    bits &= (1 << width) - 1
    return -1 if bits == (1 << width) - 1 else bits


# nvmlValueType_t. No 64-bit counter of a GPU gets to 2^63: at 1 TB/s that takes 292 years.
NUMBERS: Mapping[int, Callable[[int], int | float]] = {
    0: _double,
    1: lambda bits: _unsigned(bits, 32),
    2: lambda bits: _signed(bits, 64),
    3: lambda bits: _signed(bits, 64),
    4: lambda bits: _signed(bits, 64),
    5: lambda bits: _signed(bits, 32),
    6: lambda bits: _unsigned(bits, 16),
}


class _Asked:
    """One question: the way in which it is asked now, in as many entries as are summed, and the ways that are left."""

    def __init__(self, question: Question, part: int, ways: list[Way], links: Sequence[int]) -> None:
        self.part = part
        self.limits = [(name, LIMITS.get(name)) for name in question.names]
        self.entries: list[_Entry] = []
        self._ways = ways
        self._links = links
        self.try_next()

    def try_next(self) -> None:
        while self._ways and not self.entries:
            way = self._ways.pop(0)
            self.entries = [_Entry(self, way, scope) for scope in _scopes(way, self._links)]


def _scopes(way: Way, links: Sequence[int]) -> Sequence[int]:
    if isinstance(way, Call):
        return (0,)
    return links if way.each_link else (way.scope,)


class _Entry:
    """One thing that is asked: an element of the field values' array, or a call."""

    __slots__ = ("answered", "asked", "numbers", "scope", "way")

    def __init__(self, asked: _Asked, way: Way, scope: int) -> None:
        self.asked = asked
        self.way = way
        self.scope = scope
        self.answered = False  # ever
        self.numbers: tuple[Answer, ...] | None = None  # of this round


class Sheet:
    def __init__(
        self, nvml: ModuleType, gpu: object, parts: Iterable[Iterable[Question]], links: Sequence[int] = ()
    ) -> None:
        """Each part of the questions has a dict of its own in the answers. `links` are those that are summed over."""
        self.unreadable = 0  # values that the GPU has and did not give, or that cannot be: of the last answers
        self._nvml = nvml
        self._gpu = gpu
        self._parts = 0
        self._asked: list[_Asked] = []
        for part, questions in enumerate(parts):
            self._parts = part + 1
            self._asked += (_Asked(each, part, self._known_ways(each), links) for each in questions)
        self._learned = False
        self._prepare()

    def answers(self) -> list[dict[str, Any]]:
        """What could be had, and was possible. LostError, DownError."""
        self._round()
        while self._learned:
            self._prepare()
            self._round()
        found: list[dict[str, Any]] = [{} for _ in range(self._parts)]
        for asked in self._asked:
            numbers = _sum(asked.entries)
            if numbers is not None:
                self._put(found[asked.part], asked.limits, numbers)
        return found

    def lacking(self) -> list[str]:
        """The names of what this GPU does not have, as far as it has been asked."""
        return [name for asked in self._asked if not asked.entries for name, _ in asked.limits]

    def _known_ways(self, question: Question) -> list[Way]:
        """Without functions that this version of nvidia-ml-py does not have."""
        return [way for way in question.ways if isinstance(way, Value) or hasattr(self._nvml, way.function)]

    def _prepare(self) -> None:
        entries = [entry for asked in self._asked for entry in asked.entries]
        self._calls = [(entry, entry.way) for entry in entries if isinstance(entry.way, Call)]
        self._values = [(entry, entry.way) for entry in entries if isinstance(entry.way, Value)]
        self._array = (self._nvml.c_nvmlFieldValue_t * len(self._values))()
        for element, (entry, way) in zip(self._array, self._values, strict=True):
            element.fieldId, element.scopeId = way.field, entry.scope

    def _round(self) -> None:
        self.unreadable = 0
        self._learned = False
        if self._values:
            self._ask_values()
        for entry, call in self._calls:
            self._ask_call(entry, call)

    def _ask_values(self) -> None:
        """One call for all of them, into an array that is made once: nvidia-ml-py would make one each time."""
        ask = getattr(self._nvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        code = ask(self._gpu, len(self._array), self._array) if ask else NO_FUNCTION
        for (entry, way), (_, _, _, _, kind, own_code, bits) in zip(
            self._values, ELEMENT.iter_unpack(self._array), strict=True
        ):
            if code or own_code:
                self._refused(entry, code or own_code)
            elif kind not in NUMBERS:
                self._refused(entry, UNKNOWN)
            else:
                number = NUMBERS[kind](bits)
                entry.numbers = (number * way.times if way.per == 1 else number / way.per,)
                entry.answered = True

    def _ask_call(self, entry: _Entry, call: Call) -> None:
        try:
            answer = getattr(self._nvml, call.function)(self._gpu, *call.arguments)
            entry.numbers = call.take(answer)
            entry.answered = True
        except self._nvml.NVMLError as error:
            self._refused(entry, error.value)
        except UnicodeDecodeError:
            self._refused(entry, UNKNOWN)

    def _refused(self, entry: _Entry, code: int) -> None:
        entry.numbers = None
        if not unsupported(code) or entry.answered:
            self.unreadable += 1
            return
        self._learned = True
        entry.asked.entries.remove(entry)
        entry.asked.try_next()

    def _put(
        self, found: dict[str, Any], limits: Sequence[tuple[str, Limit | None]], numbers: Sequence[Answer]
    ) -> None:
        for (name, limit), number in zip(limits, numbers, strict=True):
            value = said(number) if isinstance(number, str) else _possible(limit, number)
            if value is not None:
                found[name] = value
            elif not isinstance(number, str):
                self.unreadable += 1


def _possible(limit: Limit | None, number: float) -> int | float | None:
    return limit.fit(number) if limit and limit.least <= number <= limit.most else None


def _sum(entries: Sequence[_Entry]) -> tuple[Answer, ...] | None:
    """None where one of them is unreadable now, and where there is none; impossible where one of them is."""
    if len(entries) == 1:
        return entries[0].numbers
    numbers = [entry.numbers[0] for entry in entries if entry.numbers]
    known = [number for number in numbers if not isinstance(number, str)]
    if not known or len(known) < len(entries):
        return None
    return (sum(known),) if min(known) >= 0 else (-1,)
