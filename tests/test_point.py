"""Points and their line protocol: exact both ways, and never an exception but ValueError."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diagnosd.point import TIME_MAX, TIME_MIN, Decoder, OpenStringError, Point, Series, Value, decode, encode, point

T = 1_792_000_000_000_000_000
STEP = {"job": "j", "host": "n01", "rank": "0", "source": "probe"}


def net(sent: int, time: int = T) -> Point:
    return point("net", {"host": "n01", "interface": "ib0"}, {"bytes_sent": sent}, time)


def fields_of(line: str) -> dict[str, Value]:
    return decode(f"{line} {T}").fields


# What line protocol can say: names without control characters that do not end in a backslash, any text as a string.
characters = st.characters(exclude_categories=["Cs"])
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(lambda n: n[-1] != "\\")
awkward = st.text(st.sampled_from('\\,= "i1.-#a\tü'), min_size=1, max_size=8)
sayable = (names | awkward).filter(lambda n: n[-1] != "\\" and "\t" not in n)
values = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.text(characters, max_size=20)
    | st.text(st.sampled_from('\\,= "\n\r\t\fnrtfi1u'), max_size=20)
)
times = st.integers(TIME_MIN, TIME_MAX - 1)
points = st.builds(
    point,
    sayable.map("x".__add__),
    st.dictionaries(sayable, sayable, max_size=4),
    st.dictionaries(sayable, values, min_size=1, max_size=6),
    times,
)


# The last two are digits of another script, which Python takes for numbers.
NO_VALUES = (
    """
NaN|inf|-|1_0|+1|1.5i|1e5i|i|1i1|9223372036854775808i|18446744073709551616u|-1u|0x10|1e999|1 2|1,|1,,y=2|1=2
tru|yes|null|[]|{}|"a" b|"a"b|\u0661|\u0661i
""".strip()
    .replace("\n", "|")
    .split("|")
)

SKELETON_NAMES = ("a", "b1", "h2d", "avg10", "avg15", "x-1", "a\\ b", 'q"')
SKELETON_VALUES = (
    """
1i|-12i|1|-0|1.5|1.|.5|1e5|1e-07|007i|00|-|1-2i|1.5i|1i1|9223372036854775808i|99999999999999999999|5u|1e999|1ii
true|null|"x1"|"x 2"|"a,b"|"a=1"|"\\\\1"|"\\"|"\\u0041"|"\\n2"|"\t"|"x"1
""".strip()
    .replace("\n", "|")
    .split("|")
)


REAL = [
    *encode(
        [
            point(
                "diagnosd_step",
                STEP,
                {"step": 7, "duration": 0.25, "clock": "host", "sync_enter": T, "kind": "train"},
                T,
            ),
            point(
                "infiniband",
                {"host": "n01", "device": "mlx5_0", "port": "1"},
                {"VL15_dropped": 0, "symbol_error": 3},
                T,
            ),
            point(
                "nvidia_smi", {"host": "a", "index": "0", "uuid": "G", "name": "NVIDIA H100"}, {"power_draw": 70.5}, T
            ),
            point(
                "pressure", {"host": "a", "resource": "io", "type": "some"}, {"avg10": 1.5, "avg60": 0.0, "total": 5}, T
            ),
            point(
                "diagnosd_event",
                {"host": "a", "kind": "xid", "subject": "job"},
                {"text": 'a "b", c=\\\n', "code": 1},
                T,
            ),
        ]
    ).splitlines(),
    b"cpu,cpu=cpu-total,host=a usage_user=4,usage_idle=96,usage_steal=0 %d" % T,  # as Telegraf writes floats
]


class TestSeries:
    def test_equal_series_are_one_object_whatever_the_order_of_their_tags(self) -> None:
        assert Series.of("net", host="n01", interface="ib0") is Series.of("net", interface="ib0", host="n01")

    def test_the_key_is_the_head_of_the_line_with_sorted_tags(self) -> None:
        assert Series.of("a b", z="1", c="x,y=z w").key == r"a\ b,c=x\,y\=z\ w,z=1"

    def test_a_tag_without_a_value_is_absent(self) -> None:
        series = Series.of("net", host="n01", interface=None, driver="")
        assert series is Series.of("net", host="n01")
        assert series.tag("host") == "n01"
        assert series.tag("interface") is None

    def test_a_series_that_travelled_to_another_process_is_the_same_object(self) -> None:
        series = Series.of("net", host="n01")
        assert pickle.loads(pickle.dumps(series)) is series

    @pytest.mark.parametrize("value", ["a\\", "a\nb", "\x00", "\udc80"])
    def test_what_line_protocol_cannot_say_is_refused_by_the_name_of_its_tag(self, value: str) -> None:
        with pytest.raises(ValueError, match=r"net\.host"):
            Series.of("net", host=value)


class TestPoint:
    def test_what_is_none_is_absent(self) -> None:
        assert point("mem", {"host": "n01"}, {"total": 5, "used": None}, T).fields == {"total": 5}

    def test_a_point_without_a_field_is_refused(self) -> None:
        with pytest.raises(ValueError, match="mem: a point without a field"):
            point("mem", {"host": "n01"}, {"used": None}, T)

    def test_an_int_in_a_float_field_is_a_float(self) -> None:
        duration = point("diagnosd_step", STEP, {"duration": 2}, T).fields["duration"]
        assert type(duration) is float

    def test_a_counter_of_64_unsigned_bits_is_taken_modulo_2_to_the_63(self) -> None:
        assert net(2**64 - 1).fields == {"bytes_sent": 2**63 - 1}

    @pytest.mark.parametrize(
        ("measurement", "tags", "fields", "complaint"),
        [
            ("diagnosd_step", STEP, {"step": 1.0}, "diagnosd_step.step: is float, must be i"),
            ("diagnosd_step", STEP, {"kind": 1}, "diagnosd_step.kind: is int, must be s"),
            ("diagnosd_step", STEP, {"step": True}, "diagnosd_step.step: is bool, must be i"),
            ("diagnosd_clock", {"host": "a"}, {"synced": 1}, "diagnosd_clock.synced: is int, must be b"),
            (
                "infiniband",
                {"host": "a", "device": "d", "port": "1"},
                {"anything": 1.5},
                "infiniband.anything: is float",
            ),
            ("diagnosd_step", STEP, {"loss": math.nan}, "diagnosd_step.loss: nan is never sent"),
            ("diagnosd_step", STEP, {"duration": math.inf}, "diagnosd_step.duration: inf is never sent"),
            ("mem", {"host": "a"}, {"total": 2**63}, "mem.total: beyond 64 bits"),
            ("diagnosd_step", STEP, {"duration": 10**400}, "diagnosd_step.duration: beyond 64 bits"),
            ("mem", {}, {"total": 1}, "mem: tag missing: host"),
            ("new", {}, {"x": [1]}, "new.x: is list"),
            ("new", {}, {"x": "\ud800"}, "new.x: not text that UTF-8 can say"),
            ("new", {}, {"": 1}, "new.: line protocol cannot say ''"),
        ],
    )
    def test_what_breaks_the_contract_is_refused_by_its_name(
        self, measurement: str, tags: dict[str, str], fields: dict[str, Value], complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint.replace(".", r"\.")):
            point(measurement, tags, fields, T)
        series = Series.of(measurement, **tags)
        with pytest.raises(ValueError, match=complaint.replace(".", r"\.")):
            encode([Point(series, fields, T)])

    @pytest.mark.parametrize("later", [math.nan, math.inf, 1, True, "x"])
    def test_a_form_that_was_written_before_is_still_checked(self, later: Value) -> None:
        good = point("new", {"host": "a"}, {"x": 1.5, "y": 2}, T)
        assert encode([good, good]) == 2 * f"new,host=a x=1.5,y=2i {T}\n".encode()
        changed = good._replace(fields={"x": later, "y": 2})
        if isinstance(later, float):
            with pytest.raises(ValueError, match=r"new\.x"):
                encode([changed])
        else:
            assert decode(encode([changed])) == changed

    def test_an_int_beyond_64_bits_is_refused_also_in_a_form_that_was_written_before(self) -> None:
        encode([net(1)])
        with pytest.raises(ValueError, match=r"net\.bytes_sent: beyond 64 bits"):
            encode([net(1)._replace(fields={"bytes_sent": 2**63})])


class TestEncode:
    def test_a_line_is_what_influxdb_documents(self) -> None:
        made = point("my m,=", {"tag k": "v=1"}, {"f,k": 'say "hi" \\', "n": -3, "x": 1e-7, "ok": True}, T)
        assert encode([made]).decode() == (
            r'my\ m\,=,tag\ k=v\=1 f\,k="say \"hi\" \\",n=-3i,x=1e-07,ok=true' + f" {T}\n"
        )

    def test_a_point_is_one_line_whatever_its_text_holds(self) -> None:
        made = point("new", {}, {"stack": "a\nb\r\nc\td\f"}, T)
        assert encode([made]).decode() == rf'new stack="a\nb\r\nc\td\f" {T}' + "\n"

    @given(st.lists(points, max_size=5))
    @settings(max_examples=300)
    def test_every_point_comes_back(self, given_points: list[Point]) -> None:
        decoder = Decoder()
        text = encode(given_points)
        for _ in range(2):  # the second time the shapes are known
            assert _exact(decoder.feed(text)) == _exact(given_points)
        assert decoder.counts.bad == decoder.counts.mistyped == 0
        assert [decode(line) for line in text.split(b"\n")[:-1]] == given_points


def _exact(some: list[Point]) -> list[tuple[Series, list[tuple[str, type, Value, str]], int]]:
    """With types and the sign of zero, which equality does not see."""
    return [(s, [(n, type(v), v, repr(v)) for n, v in f.items()], t) for s, f, t in some]


class TestDecode:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            *((word, True) for word in ("t", "T", "true", "True", "TRUE")),
            *((word, False) for word in ("f", "F", "false", "False", "FALSE")),
            ("1", 1.0),
            ("5.", 5.0),
            (".5", 0.5),
            ("-0", -0.0),
            ("1e+06", 1e6),
            ("1E-3", 1e-3),
            ("1234567890123456789012345", 1234567890123456789012345.0),
            ("-7i", -7),
            ("007i", 7),
            ("-9223372036854775808i", -(2**63)),
            ("18446744073709551615u", 2**63 - 1),  # Telegraf's unsigned, modulo 2^63 as the contract sends it
            ('""', ""),
            (r'"a \"b\", c=\\"', 'a "b", c=\\'),
            (r'"C:\dir"', r"C:\dir"),  # a backslash before anything else is itself
            (r'"a\nb"', "a\nb"),
            ('"a\nb"', "a\nb"),  # influx_inspect export
        ],
    )
    def test_every_spelling_of_a_value_is_read(self, text: str, value: Value) -> None:
        (found,) = fields_of(f"new x={text}").values()
        assert (type(found), found, repr(found)) == (type(value), value, repr(value))

    @pytest.mark.parametrize("text", NO_VALUES)
    def test_what_is_no_value_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"."):
            decode(f"new x={text} {T}")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("new x=1", "no time"),
            ("new x=1 ", "no time"),
            ("new x=1 1792000000", "not in nanoseconds"),
            (f"new x=1 {T // 10**6}", "not in nanoseconds"),
            (f"new x=1 {T} more", "not a time"),
            (f"new x=1 {T}i", "not a time"),
            (f"new {T}", "want field=value"),
            ("new", "want 'measurement"),
            (f"new,t x=1 {T}", "want 'measurement"),
            (f"new,t= x=1 {T}", "want 'measurement"),
            (f",t=1 x=1 {T}", "want 'measurement"),
            (f"new,t=1,t=2 x=1 {T}", "tag twice: t"),
            (f'new x="abc {T}', "without its closing quote"),
            (f"mem,host=a total=1 {T}", "mem.total: is f, must be i"),
        ],
    )
    def test_what_is_wrong_with_a_line_is_said(self, line: str, reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            decode(line)

    def test_names_are_unescaped_as_influxdb_does(self) -> None:
        made = decode(rf"a\,b\ c\d,k\=\ ey=va\\l\,ue,z=\" f\,i\"e=1i {T}")
        assert made.series.measurement == r"a,b c\d"
        assert made.series.tags == (("k= ey", r"va\\l,ue"), ("z", r"\""))
        assert made.fields == {'f,i"e': 1}

    def test_tags_are_sorted_so_that_a_series_is_one_in_whatever_order_it_was_written(self) -> None:
        assert decode(f"net,interface=a,host=b x=1i {T}").series is Series.of("net", host="b", interface="a")

    def test_the_last_of_two_equal_fields_counts(self) -> None:
        assert fields_of("new x=1i,x=2i") == {"x": 2}

    @given(st.binary(max_size=60) | st.text(st.sampled_from('m,=t "\\1i.\n#'), max_size=40).map(str.encode))
    @settings(max_examples=500)
    def test_nothing_but_a_value_error_is_raised_on_arbitrary_bytes(self, line: bytes) -> None:
        try:
            made = decode(line)
        except ValueError:
            return
        assert decode(encode([made])) == made


class TestDecoder:
    def test_comments_and_blank_lines_are_no_points_and_no_faults(self) -> None:
        decoder = Decoder()
        assert decoder.feed(b"# a comment\n\n   \n\r\n" + encode([net(1)])) == [net(1)]
        assert (decoder.counts.lines, decoder.counts.points, decoder.counts.bad) == (5, 1, 0)

    def test_a_bad_line_is_counted_with_its_number_and_the_others_are_read(self) -> None:
        decoder = Decoder()
        decoder.feed(encode([net(1)]))
        assert decoder.feed(encode([net(2)]) + b"net,host=a bytes_sent=\n" + encode([net(3)])) == [net(2), net(3)]
        assert decoder.counts.bad == 1
        assert decoder.counts.first_bad is not None
        assert decoder.counts.first_bad[0] == 3

    def test_a_field_of_the_wrong_type_is_left_out_and_counted_and_its_point_kept(self) -> None:
        decoder = Decoder()
        (made,) = decoder.feed(f"mem,host=a total=1,used=2i {T}\n".encode())
        assert made.fields == {"used": 2}
        assert decoder.feed(f"mem,host=a total=1 {T}\n".encode()) == []
        assert decoder.counts.mistyped == 2
        assert decoder.counts.first_bad == (1, "mem.total: is f, must be i: 1.0")

    def test_a_number_without_a_point_is_a_float_where_one_is_due_also_in_a_known_shape(self) -> None:
        decoder = Decoder()
        for number in (70, 80, 90):
            (made,) = decoder.feed(f"cpu,host=a,cpu=cpu-total usage_idle={number},usage_user=0.5 {T}\n".encode())
            assert made.fields == {"usage_idle": float(number), "usage_user": 0.5}
            assert type(made.fields["usage_idle"]) is float

    def test_a_name_that_differs_in_digits_only_is_not_taken_for_its_neighbour(self) -> None:
        decoder = Decoder()
        decoder.feed(f"pressure,host=a,resource=io,type=some avg15=3i {T}\n".encode())
        assert decoder.feed(f"pressure,host=a,resource=io,type=some avg10=3i {T}\n".encode()) == []
        assert decoder.counts.mistyped == 1

    def test_a_string_over_several_lines_is_one_point(self) -> None:
        decoder = Decoder()
        text = f'new x="one\ntwo,host=a y=1i {T}\nthree" {T}\n'.encode() + encode([net(1)])
        stack, after = decoder.feed(text)
        assert stack.fields == {"x": f"one\ntwo,host=a y=1i {T}\nthree"}
        assert after == net(1)
        assert decoder.counts.bad == 0

    def test_a_string_over_several_lines_may_be_cut_anywhere(self) -> None:
        text = encode([net(1)]) + f'new x="one\ntwo\nthree" {T}\n'.encode() + encode([net(2)])
        for cut in range(len(text)):
            decoder = Decoder()
            made = decoder.feed(text[:cut]) + decoder.feed(text[cut:]) + decoder.finish()
            assert [each.fields for each in made] == [net(1).fields, {"x": "one\ntwo\nthree"}, net(2).fields]
            assert (decoder.counts.bad, decoder.counts.lines) == (0, 5)

    def test_a_string_that_never_ends_costs_its_own_line_only(self) -> None:
        decoder = Decoder()
        rest = [net(number) for number in range(100)]
        made = decoder.feed(f'new x="torn {T}\n'.encode() + encode(rest)) + decoder.finish()
        assert made == rest
        assert decoder.counts.bad == 1

    def test_a_last_line_without_a_newline_is_read_when_it_is_finished(self) -> None:
        decoder = Decoder()
        assert decoder.feed(encode([net(1)])[:-1]) == []
        assert decoder.finish() == [net(1)]

    def test_carriage_returns_at_the_ends_of_lines_are_no_part_of_them(self) -> None:
        assert Decoder().feed(encode([net(1), net(2)]).replace(b"\n", b"\r\n")) == [net(1), net(2)]

    def test_a_line_that_is_too_long_is_one_bad_line_whatever_its_rest_looks_like(self) -> None:
        decoder = Decoder()
        for _ in range(30):
            decoder.feed(b"x" * 1024 * 1024)
        assert decoder.feed(encode([net(0)]) + encode([net(1)]) + b"nonsense\n") == [net(1)]
        assert (decoder.counts.bad, decoder.counts.lines) == (2, 3)
        assert decoder.counts.first_bad == (1, "a line longer than 8 MiB")

    def test_an_open_string_does_not_gather_a_line_that_is_too_long(self) -> None:
        decoder = Decoder()
        decoder.feed(b'new x="one\n')
        for _ in range(30):
            decoder.feed(b"x" * 1024 * 1024)
        assert decoder.feed(b"\n" + encode([net(1)])) == [net(1)]
        assert (decoder.counts.bad, decoder.counts.lines) == (2, 3)

    @given(st.lists(points, min_size=1, max_size=6), st.data())
    @settings(max_examples=100)
    def test_where_the_chunks_are_cut_makes_no_difference(self, given_points: list[Point], data: st.DataObject) -> None:
        text = encode(given_points)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        decoder = Decoder()
        made = [each for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for each in decoder.feed(text[a:b])]
        assert made == given_points

    # Lines that are alike up to their digits are read another way than the first of them: both must say the same.
    skeletons = st.lists(
        st.tuples(st.sampled_from(SKELETON_NAMES), st.sampled_from(SKELETON_VALUES)), min_size=1, max_size=4
    )

    @given(
        st.sampled_from(["new", "pressure", "cpu"]),
        skeletons,
        st.lists(st.integers(0, 200), min_size=1, max_size=4),
        st.data(),
    )
    @example("new", [("a", "1i")], [0], None)
    @settings(max_examples=500)
    def test_a_known_shape_is_read_as_if_it_were_new(
        self, measurement: str, pairs: list[tuple[str, str]], seeds: list[int], data: st.DataObject | None
    ) -> None:
        line = f"{measurement},host=h " + ",".join(f"{name}={value}" for name, value in pairs) + f" {T}"
        lines = [line, *(_other_digits(line, seed, data) for seed in seeds if data), line]
        warm = Decoder()
        for text in (line, *lines):
            cold = Decoder()
            assert _exact(warm.feed(text.encode() + b"\n")) == _exact(cold.feed(text.encode() + b"\n"))
        block, cold = "\n".join(lines).encode() + b"\n", Decoder()
        assert _exact(warm.feed(block)) == _exact([each for text in lines for each in cold.feed(text.encode() + b"\n")])

    @given(
        st.lists(
            st.tuples(st.sampled_from(REAL), st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3)), max_size=5
        )
    )
    @settings(max_examples=500)
    def test_a_damaged_line_is_read_as_if_nothing_had_been_before(
        self, damages: list[tuple[bytes, int, bytes, int]]
    ) -> None:
        block = b"".join(line[:at] + put + line[at + gone :] + b"\n" for line, at, put, gone in damages)
        warm, cold = Decoder(), Decoder()
        for _ in range(2):
            warm.feed(b"\n".join(REAL) + b"\n")
        before = warm.counts
        warm.counts = type(before)()
        assert _exact(warm.feed(block) + warm.finish()) == _exact(cold.feed(block) + cold.finish())
        assert warm.counts == cold.counts


def _other_digits(line: str, seed: int, data: st.DataObject | None) -> str:
    """The line with digits and minus signs put in, taken out or changed behind its head."""
    at = line.index(" ") + 1 + seed % max(len(line) - line.index(" ") - 1, 1)
    digit = data.draw(st.sampled_from("0123456789-")) if data else "1"
    if line[at] in "-0123456789" and seed % 2:
        return line[:at] + line[at + 1 :]
    return line[:at] + digit + line[at:]


def test_an_open_string_is_told_from_other_faults() -> None:
    with pytest.raises(OpenStringError):
        decode('new x="a')
