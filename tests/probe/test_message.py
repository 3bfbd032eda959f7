"""The format between probe and agent: what is written is read back, what is none is refused with a reason."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.probe.message import (
    ATTEMPTS,
    LIMIT,
    MEASUREMENTS,
    PIDS,
    RANKS,
    Hello,
    Message,
    Sequence,
    encode,
    encode_hello,
    parse,
)
from diagnosd.schema import SCHEMA

names = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)
words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=40)
counts = st.integers(0, 2**63 - 1)
values = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), words
)
fields = st.dictionaries(names, values, min_size=1, max_size=12)
tags = st.dictionaries(names.filter(lambda name: name not in {"job", "host", "rank"}), words, max_size=3)


@given(st.builds(Message, counts, st.sampled_from(sorted(MEASUREMENTS)), tags, fields, counts))
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    number, measurement, tags, fields, time = message
    read = parse(encode(number, measurement, fields, time, tags))
    assert read == message
    assert [type(value) for value in read.fields.values()] == [type(value) for value in fields.values()]


@given(
    st.builds(
        Hello,
        counts,
        words,
        st.integers(0, 9),
        st.just(10),
        st.none() | st.integers(0, RANKS),
        st.none() | st.integers(0, ATTEMPTS),
        st.integers(0, PIDS),
        fields,
        counts,
    )
)
def test_a_hello_is_read_as_it_was_written(hello: Hello) -> None:
    assert parse(encode_hello(hello)) == hello


@given(st.binary(max_size=200))
def test_bytes_of_anybody_are_a_message_or_a_value_error(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse(raw)


GOOD: dict[str, Any] = {"v": 1, "n": 0, "m": "diagnosd_step", "f": {"step": 1}, "t": 5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 2}, "version 2"),
        ({"n": -1}, "n is"),
        ({"n": True}, "n is"),
        ({"n": 2**63}, "n is"),
        ({"t": 1.5}, "t is"),
        ({"m": "diagnosd_node"}, "no measurement of the probe"),
        ({"m": ["diagnosd_step"]}, "no measurement of the probe"),
        ({"f": {}}, "no field"),
        ({"f": [1]}, "f is not a JSON object"),
        ({"f": {"a": None}}, "neither"),
        ({"f": {"a": [1]}}, "neither"),
        ({"f": {"a": 2**63}}, "64 bits"),
        ({"f": {"a b": 1}}, "no name"),
        ({"f": {"": 1}}, "no name"),
        ({"f": {"a": "two\nlines"}}, "line break"),
        ({"f": {"a": "\ud800"}}, "half a character"),
        ({"tags": {"job": "another"}}, "not the sender's"),
        ({"tags": {"host": "another"}}, "not the sender's"),
        ({"tags": {"peer": ""}}, "printable"),
        ({"tags": {"peer": "a\nb"}}, "printable"),
        ({"tags": {"peer": 1}}, "printable"),
        ({"m": "hello", "job": "j", "rank": 1, "world": 1, "pid": 1}, "rank 1 in a world of 1"),
        ({"m": "hello", "rank": 0, "world": 1, "pid": 1}, "job is"),
        ({"m": "hello", "job": "j" * 257, "rank": 0, "world": 1, "pid": 1}, "job is"),
        ({"m": "hello", "job": "j", "rank": 0, "world": 1, "pid": 1, "attempt": "x"}, "attempt is"),
        ({"m": "hello", "job": "j", "rank": 0, "world": 1, "pid": 1, "attempt": 2**63 - 1}, "attempt is"),
        ({"m": "hello", "job": "j", "rank": 0, "world": 1, "pid": 1, "local_rank": 2**62}, "local_rank is"),
        ({"m": "hello", "job": "j", "rank": 2**61, "world": 2**62, "pid": 1}, "world is"),
        ({"m": "hello", "job": "j", "rank": 0, "world": 1, "pid": 2**40}, "pid is"),
    ],
)
def test_what_is_no_message_is_refused(change: dict[str, Any], reason: str) -> None:
    parse(json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match=reason):
        parse(json.dumps(GOOD | change).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    with pytest.raises(ValueError, match=r"value|finite"):
        parse(b'{"v":1,"n":0,"m":"diagnosd_step","f":{"a":%s},"t":5}' % number.encode())


def test_a_message_that_is_too_long_is_neither_written_nor_read() -> None:
    with pytest.raises(ValueError, match=str(LIMIT)):
        encode(0, "diagnosd_event", {"text": "x" * LIMIT}, 5)
    with pytest.raises(ValueError, match=str(LIMIT)):
        parse(b" " * (LIMIT + 1))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="deep"):
        parse(b"[" * LIMIT)


def test_every_measurement_of_the_probe_is_one_of_the_contract() -> None:
    assert set(SCHEMA) >= MEASUREMENTS


def message(number: int) -> Message:
    return Message(number, "diagnosd_step", {}, {"step": 1}, 5)


def hello(number: int) -> Hello:
    return Hello(number, "j", 0, 1, None, None, 1, {}, 5)


def test_a_gap_in_the_numbers_is_what_was_lost() -> None:
    sequence = Sequence()
    packets = [hello(0), message(0), message(1), message(5), hello(6), message(6), hello(10), message(10)]
    assert [sequence.lost(packet) for packet in packets] == [0, 0, 0, 3, 0, 0, 3, 0]


def test_a_sender_met_in_mid_stream_has_lost_nothing() -> None:
    assert Sequence().lost(hello(1000)) == 0
