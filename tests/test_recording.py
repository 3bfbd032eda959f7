"""Recordings: what was flushed is read, what is damaged is counted, and what is none is told."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosd.point import Point, encode, point
from diagnosd.recording import SUFFIXES, Header, Reading, RecordingError, Writer, read

T = 1_792_000_000_000_000_000
SECOND = 1_000_000_000


def net(number: int, host: str = "n01", time: int | None = None) -> Point:
    tags = {"host": host, "interface": "ib0"}
    return point("net", tags, {"bytes_sent": number}, T + number * SECOND if time is None else time)


def record(path: Path, *flushes: list[Point], **header: str) -> Path:
    with Writer(path, **header) as writer:
        for points in flushes:
            writer.write(encode(points))
            writer.flush()
    return path


def points_of(reading: Reading) -> list[Point]:
    return [each for batch in reading for each in batch]


def run(program: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root)


def as_nobody(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Root may read everything."""
    for each in (folder, *list(folder.parents)[:2]):  # pytest's own, closed to others
        each.chmod(0o755)
    return run(f"import os, diagnosd.recording\nos.geteuid() or os.setuid(65534)\n{program}")


def number(each: Point) -> int:
    value = each.fields["bytes_sent"]
    assert isinstance(value, int)
    return value


FIVE = [net(number) for number in range(5)]
each_suffix = pytest.mark.parametrize("suffix", SUFFIXES)
each_compressed = pytest.mark.parametrize("suffix", SUFFIXES[1:])
in_this_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)


@each_suffix
class TestEveryKindOfFile:
    def test_what_was_written_is_read(self, tmp_path: Path, suffix: str) -> None:
        reading = read(record(tmp_path / f"a{suffix}", FIVE[:2], FIVE[2:], cluster="east", note="a story"))
        assert points_of(reading) == FIVE
        assert not reading.faults
        assert (reading.header.cluster, reading.header.note) == ("east", "a story")
        assert reading.position == reading.size

    def test_writing_goes_on_where_an_earlier_run_ended(self, tmp_path: Path, suffix: str) -> None:
        record(tmp_path / f"a{suffix}", FIVE[:2], cluster="east")
        reading = read(record(tmp_path / f"a{suffix}", FIVE[2:], cluster="west"))
        assert points_of(reading) == FIVE
        assert reading.header.cluster == "east"

    def test_a_file_cut_at_any_byte_loses_its_end_and_nothing_else(self, tmp_path: Path, suffix: str) -> None:
        path = record(tmp_path / f"a{suffix}", *[[each] for each in FIVE])
        whole = path.read_bytes()
        found = []
        for cut in range(len(whole)):
            path.write_bytes(whole[:cut])
            try:
                reading = read(path)
            except RecordingError:
                found.append(0)
                continue
            points = points_of(reading)
            assert points == FIVE[: len(points)]
            assert reading.faults.bad == reading.faults.lost == 0
            assert reading.faults.torn <= 1
            found.append(len(points))
        assert found == sorted(found)
        assert set(found) >= {0, 1, 2, 3, 4}

    def test_a_writer_cuts_off_what_is_torn_and_loses_nothing_whole(self, tmp_path: Path, suffix: str) -> None:
        path = record(tmp_path / f"a{suffix}", *[[each] for each in FIVE])
        whole = path.read_bytes()
        for cut in range(0, len(whole), 7):
            path.write_bytes(whole[:cut])
            before = points_of(read(path)) if _holds_points(path) else []
            reading = read(record(path, [net(9)]))
            after = points_of(reading)
            assert after == [*before[: len(after) - 1], net(9)]
            assert len(before) - len(after) in (-1, 0)  # a frame that lacks but its checksum was read, and is torn
            assert not reading.faults

    @given(st.data())
    @in_this_folder
    def test_a_changed_byte_costs_one_flush_at_most(self, tmp_path: Path, suffix: str, data: st.DataObject) -> None:
        path = tmp_path / f"a{suffix}"
        path.unlink(missing_ok=True)
        record(path, *[[net(3 * flush + each) for each in range(3)] for flush in range(6)])
        damaged = bytearray(path.read_bytes())
        header_ends = damaged.find(b"\n") if suffix == ".lp" else 0  # a changed version is another's recording
        damaged[data.draw(st.integers(header_ends, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged)
        reading = read(path)
        points = points_of(reading)
        assert len(points) >= 15
        if suffix == ".lp.zst":  # a plain file has no checksum, and gzip's covers not its own header
            assert all(each == net(number(each)) for each in points)
            assert len(points) == 18 or reading.faults.lost == 1

    def test_a_file_that_grows_is_followed_until_it_is_stopped(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"a{suffix}"
        to_come = [[each] for each in FIVE]
        with Writer(path) as writer:

            def wait() -> None:
                if to_come:
                    writer.write(encode(to_come.pop(0)))
                    writer.flush()

            reading = read(path, follow=True, stop=lambda: not to_come, wait=wait)
            batches = list(reading)
        assert [each for batch in batches for each in batch] == FIVE
        assert [] in batches  # the reader of a quiet file is given the word
        assert not reading.faults

    def test_an_unfinished_flush_is_waited_for_when_the_file_is_followed(self, tmp_path: Path, suffix: str) -> None:
        whole = record(tmp_path / f"whole{suffix}", *[[each] for each in FIVE]).read_bytes()
        path = tmp_path / f"a{suffix}"
        path.touch()
        rest = [whole[at : at + 11] for at in range(0, len(whole), 11)]

        def wait() -> None:
            with path.open("ab") as file:
                file.write(rest.pop(0))

        reading = read(path, follow=True, stop=lambda: not rest, wait=wait)
        assert points_of(reading) == FIVE
        assert not reading.faults

    @pytest.mark.parametrize("follow", [False, True])
    def test_a_line_that_is_too_long_is_one_bad_line(self, tmp_path: Path, suffix: str, follow: bool) -> None:
        text = encode(FIVE[:2]) + b'net,interface=ib0 s="' + b"x" * (20 << 20) + encode([net(9)]) + encode(FIVE[2:])
        path = tmp_path / f"a{suffix}"
        path.write_bytes({".lp": bytes, ".lp.gz": gzip.compress, ".lp.zst": zstandard.compress}[suffix](text))
        reading = read(path, follow=follow, stop=lambda: True)
        assert points_of(reading) == FIVE
        assert (reading.faults.bad, reading.faults.torn, reading.faults.lost) == (1, 0, 0)
        assert reading.faults.first == f"{path}:3: a line longer than 8 MiB"

    def test_a_writer_that_comes_back_after_a_torn_flush_is_followed(self, tmp_path: Path, suffix: str) -> None:
        path = record(tmp_path / f"a{suffix}", FIVE[:2])
        whole = path.stat().st_size
        record(path, FIVE[2:3])
        os.truncate(path, (whole + path.stat().st_size) // 2)
        todo = [FIVE[3:]]
        reading = read(path, follow=True, stop=lambda: not todo, wait=lambda: record(path, todo.pop()))
        assert points_of(reading) == FIVE[:2] + FIVE[3:]
        assert not reading.faults


def _holds_points(path: Path) -> bool:
    try:
        read(path).close()
    except RecordingError:
        return False
    return True


class TestDamage:
    @each_compressed
    def test_a_lost_frame_and_a_torn_one_are_counted_and_the_rest_is_read(self, tmp_path: Path, suffix: str) -> None:
        ends = []
        path = tmp_path / f"a{suffix}"
        for each in FIVE:
            record(path, [each])
            ends.append(path.stat().st_size)
        damaged = bytearray(path.read_bytes()[: ends[3] + 8])
        damaged[(ends[1] + ends[2]) // 2] ^= 0xFF
        path.write_bytes(damaged)
        reading = read(path)
        assert points_of(reading) == [FIVE[0], FIVE[1], FIVE[3]]
        assert (reading.faults.lost, reading.faults.torn, reading.faults.bad) == (1, 1, 0)
        assert reading.faults.first is not None
        assert f"a{suffix}: frame at byte {ends[1]}: " in reading.faults.first

    @each_compressed
    def test_bytes_between_frames_are_passed_over(self, tmp_path: Path, suffix: str) -> None:
        path = record(tmp_path / f"a{suffix}", FIVE[:2])
        path.write_bytes(path.read_bytes() + bytes(1000) + record(tmp_path / f"b{suffix}", FIVE[2:]).read_bytes())
        reading = read(path)
        assert points_of(reading) == FIVE
        assert reading.faults.lost == 1

    def test_a_frame_of_zstd_is_told_by_its_checksum(self, tmp_path: Path) -> None:
        path = record(tmp_path / "a.lp.zst", FIVE)
        assert zstandard.get_frame_parameters(path.read_bytes()).has_checksum

    def test_bad_lines_are_counted_and_the_first_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.lp"
        path.write_bytes(
            encode(FIVE[:1]) + b"nonsense\n" + encode(FIVE[1:]) + b"net,host=n01,interface=a bytes_sent=1 5\n"
        )
        reading = read(path)
        assert points_of(reading) == FIVE
        assert reading.faults.bad == 2
        assert reading.faults.first is not None
        assert reading.faults.first.startswith(f"{path}:2: want 'measurement")

    def test_a_header_that_nests_without_end_costs_no_point(self, tmp_path: Path) -> None:
        (tmp_path / "a.lp").write_bytes(b"# diagnosd-recording 1 " + b"[" * 200_000 + b"\n" + encode(FIVE))
        assert points_of(read(tmp_path / "a.lp")) == FIVE
        record(tmp_path / "a.lp", [net(5)])
        assert points_of(read(tmp_path / "a.lp")) == [*FIVE, net(5)]

    @pytest.mark.parametrize("header", [b"", b'# diagnosd-recording 1 {"cluster": "east"}\n'])
    def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(self, tmp_path: Path, header: bytes) -> None:
        path = tmp_path / "a.lp"
        path.write_bytes(b"\xef\xbb\xbf" + header + encode(FIVE[:3]))
        reading = read(record(path, FIVE[3:]))
        assert points_of(reading) == FIVE
        assert not reading.faults
        assert reading.header.cluster == ("east" if header else "")

    def test_a_last_line_without_a_newline_is_read_and_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "a.lp"
        path.write_bytes(encode(FIVE[:3])[:-1])
        assert points_of(read(path)) == FIVE[:3]
        assert points_of(read(record(path, FIVE[3:]))) == FIVE

    def test_the_whole_lines_of_a_recording_compressed_in_one_piece_and_then_cut_are_read(self, tmp_path: Path) -> None:
        many = [net(number) for number in range(20_000)]
        for name, text in (
            ("a.lp.gz", gzip.compress(encode(many))),
            ("a.lp.zst", zstandard.ZstdCompressor(write_checksum=True).compress(encode(many))),
        ):
            (tmp_path / name).write_bytes(text[: len(text) * 3 // 4])
            reading = read(tmp_path / name)
            found = points_of(reading)
            assert len(found) > len(many) // 2
            assert found == many[: len(found)]
            assert (reading.faults.torn, reading.faults.lost, reading.faults.bad) == (1, 0, 0)

    def test_lines_that_another_program_divided_between_frames_are_put_together(self, tmp_path: Path) -> None:
        text, path = encode(FIVE), tmp_path / "a.lp.zst"
        path.write_bytes(b"".join(zstandard.compress(text[at : at + 50]) for at in range(0, len(text), 50)))
        reading = read(path)
        assert points_of(reading) == FIVE
        assert not reading.faults


class TestFolder:
    def test_its_files_are_merged_by_time(self, tmp_path: Path) -> None:
        record(tmp_path / "n01.lp.zst", [net(number, "n01") for number in range(0, 300, 3)])
        record(tmp_path / "n02.lp.gz", [net(number, "n02") for number in range(1, 300, 3)])
        record(tmp_path / "n03.lp", [net(number, "n03") for number in range(2, 300, 3)])
        (tmp_path / "README.md").write_text("not a recording")
        (tmp_path / "expected.toml").write_text("")
        assert [number(each) for each in points_of(read(tmp_path))] == list(range(300))

    @given(st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=4))
    @in_this_folder
    def test_merging_keeps_every_point_and_the_order_of_each_file(self, tmp_path: Path, files: list[list[int]]) -> None:
        for old in tmp_path.iterdir():
            old.unlink()
        written = []
        for rank, steps in enumerate(files):
            points = [net(index, f"n{rank}", time=T + sum(steps[: index + 1])) for index in range(len(steps))]
            written += points
            (tmp_path / f"n{rank}.lp").write_bytes(encode(points))
        if not written:
            return
        merged = points_of(read(tmp_path))
        assert merged == sorted(written, key=lambda each: (each.time, each.series.key))  # sorting is stable

    def test_a_file_that_appears_is_followed_too(self, tmp_path: Path) -> None:
        todo = {"n02.lp.zst": FIVE[3:], "n01.lp.zst": FIVE[:3]}

        def wait() -> None:
            name, points = todo.popitem()
            record(tmp_path / name, points)

        reading = read(tmp_path, follow=True, stop=lambda: not todo, wait=wait)
        assert points_of(reading) == FIVE

    def test_one_file_that_is_no_recording_does_not_hide_the_others(self, tmp_path: Path) -> None:
        record(tmp_path / "n01.lp.zst", FIVE)
        (tmp_path / "n02.lp").write_bytes(os.urandom(100_000))
        (tmp_path / "n03.lp.zst").touch()
        reading = read(tmp_path)
        assert points_of(reading) == FIVE
        assert reading.faults
        assert reading.faults.first is not None
        assert "n02.lp:1: " in reading.faults.first

    def test_one_file_that_may_not_be_read_does_not_hide_the_others(self, tmp_path: Path) -> None:
        record(tmp_path / "n01.lp", FIVE)
        (tmp_path / "n02.lp").write_bytes(encode(FIVE))
        (tmp_path / "n02.lp").chmod(0)
        for follow in (False, True):
            out = as_nobody(
                f"""
from diagnosd.recording import read
reading = read({str(tmp_path)!r}, follow={follow}, stop=lambda: True)
print(sum(map(len, reading)), reading.faults.unread, reading.faults.first)
""",
                tmp_path,
            )
            assert out.stdout == f"5 1 {tmp_path}/n02.lp: cannot be read: Permission denied\n", out.stderr

    def test_one_file_of_another_version_does_not_hide_the_others(self, tmp_path: Path) -> None:
        record(tmp_path / "n02.lp", FIVE)
        (tmp_path / "n01.lp").write_bytes(b"# diagnosd-recording 2 {}\n")
        reading = read(tmp_path)
        assert points_of(reading) == FIVE
        assert reading.faults.unread == 1
        assert (reading.faults.first or "").startswith(f"{tmp_path}/n01.lp:1: a recording of version 2")

    def test_where_no_file_can_be_read_that_is_told(self, tmp_path: Path) -> None:
        for name in ("n01.lp", "n02.lp"):
            (tmp_path / name).write_bytes(b"# diagnosd-recording 2 {}\n")
        for follow in (False, True):
            with pytest.raises(RecordingError, match=r"n01.lp:1: a recording of version 2"):
                read(tmp_path, follow=follow)

    def test_its_header_is_the_first_that_tells_something(self, tmp_path: Path) -> None:
        (tmp_path / "a.lp").write_bytes(encode(FIVE[:1]))
        record(tmp_path / "b.lp", FIVE[1:], cluster="east")
        assert read(tmp_path).header.cluster == "east"
        assert read(tmp_path / "a.lp").header == Header()


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    record(path.parent / "another.lp", FIVE)
    (path.parent / "another.lp").replace(path)


def cut_short(path: Path) -> None:
    os.truncate(path, 20)


class TestWhatIsLostWhileItIsFollowed:
    @each_suffix
    @pytest.mark.parametrize(
        ("lose", "said"), [(removed, "removed"), (replaced, "replaced by another"), (cut_short, "cut short")]
    )
    def test_a_file_was_read_to_its_end_and_what_became_of_it_is_said(
        self, tmp_path: Path, suffix: str, lose: Callable[[Path], None], said: str
    ) -> None:
        path = record(tmp_path / f"a{suffix}", FIVE)
        todo = [path]
        reading = read(path, follow=True, wait=lambda: lose(todo.pop()))
        assert points_of(reading) == FIVE
        assert reading.unread == [f"{path}: {said} while it was followed"]
        assert reading.faults.unread == 1

    def test_the_other_files_of_a_folder_are_followed_on(self, tmp_path: Path) -> None:
        path = record(tmp_path / "n01.lp", FIVE[:2])
        record(tmp_path / "n02.lp", FIVE[2:3])
        todo = [FIVE[3:]]

        def wait() -> None:
            if path.exists():
                path.unlink()
            else:
                record(tmp_path / "n02.lp", todo.pop())

        reading = read(tmp_path, follow=True, stop=lambda: not todo, wait=wait)
        assert points_of(reading) == FIVE
        assert reading.unread == [f"{path}: removed while it was followed"]

    def test_a_folder_was_read_to_its_end_and_what_became_of_it_is_said(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        record(folder / "n01.lp", FIVE)
        reading = read(folder, follow=True, wait=lambda: shutil.rmtree(folder))
        assert points_of(reading) == FIVE
        assert reading.unread == [f"{folder}/n01.lp: removed while it was followed", f"{folder}: no such recording"]


PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)) * 20


NONE = " is no recording, or is damaged at its beginning"


class TestWhatIsNoRecording:
    @pytest.mark.parametrize(
        ("name", "content", "complaint"),
        [
            ("a.lp", b"", "a.lp: the recording is empty"),
            ("a.lp", b"# diagnosd-recording 1 {}\n\n", "a.lp: the recording is empty"),
            ("a.lp.zst", b"", "a.lp.zst: the recording is empty"),
            ("a.lp", PNG, f"a.lp{NONE}: line 1: "),
            ("a.lp.zst", PNG, f"a.lp.zst{NONE}: frame at byte 0: "),
            ("a.lp.gz", PNG, f"a.lp.gz{NONE}: frame at byte 0: "),
            ("a.lp", b"time,value\n1,2\n", f"a.lp{NONE}: line 1: want 'measurement"),
            ("a.lp", b"net,host=a,interface=b bytes_sent=1i 1792000000\n", f"a.lp{NONE}: line 1: the time is not in"),
            ("a.lp", b"\x00" * 100, "a.lp: the recording is empty"),
            ("a.lp", b"x", "a.lp: not a recording, or cut in its first line"),
            ("a.lp", b"# diagnosd-recording 2 {}\n", "a.lp:1: a recording of version 2; this diagnosd reads version 1"),
            ("a.lp", b"# diagnosd-recording \x1b[31m {}\n", "a.lp:1: a recording of version \\x1b[31m; this"),
            ("a.lp.zst", zstandard.compress(b"# diagnosd-recording 22 {}\n"), "a.lp.zst:1: a recording of version 22"),
        ],
    )
    def test_it_is_told_with_file_and_line(self, tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordingError) as told:
            points_of(read(tmp_path / name))
        assert str(told.value).startswith(f"{tmp_path}/{complaint}")

    def test_a_path_without_anything_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RecordingError, match="no such recording"):
            read(tmp_path / "a.lp")
        with pytest.raises(RecordingError, match=r"no recording in this folder: want files named \*\.lp"):
            read(tmp_path)

    def test_what_is_neither_file_nor_folder_is_told(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.lp")
        for path in (tmp_path / "a.lp", Path("/dev/zero")):
            with pytest.raises(RecordingError, match="neither a file nor a folder"):
                read(path)

    def test_a_file_that_may_not_be_read_or_written_is_told(self, tmp_path: Path) -> None:
        path = record(tmp_path / "a.lp", FIVE)
        path.chmod(0)
        program = f"""
from diagnosd.recording import RecordingError, Writer, read
for use in read, Writer:
    try:
        use({str(path)!r})
    except RecordingError as error:
        print(error)
"""
        out = as_nobody(program, tmp_path)
        assert out.stdout.splitlines() == [
            f"{path}: cannot be read: Permission denied",
            f"{path}: cannot be written: Permission denied",
        ], out.stderr

    def test_a_compressed_file_with_a_plain_name_is_read_for_what_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "a.lp").write_bytes(zstandard.compress(encode(FIVE)))
        assert points_of(read(tmp_path / "a.lp")) == FIVE


class TestWriter:
    def test_nothing_is_in_the_file_before_the_flush_and_all_after_it(self, tmp_path: Path) -> None:
        path = tmp_path / "a.lp.zst"
        writer = Writer(path)
        writer.write(encode(FIVE))
        assert path.stat().st_size == 0
        writer.flush()
        assert points_of(read(path)) == FIVE
        writer.close()

    def test_what_is_gathered_is_bounded(self, tmp_path: Path) -> None:
        with Writer(tmp_path / "a.lp") as writer:
            for _ in range(40):
                writer.write(encode(FIVE) * 100)
            assert writer.path.stat().st_size >= 1024 * 1024

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.lp", PNG),
            ("a.lp", b"time,value\n1,2\n"),
            ("a.lp", b"my diary"),
            ("a.lp.zst", b"my diary"),
            ("a.lp.zst", zstandard.compress(b"my diary\n")),
            ("a.lp.zst", gzip.compress(encode(FIVE))),
            ("a.lp", zstandard.compress(encode(FIVE))),
        ],
    )
    def test_a_file_that_is_something_else_is_left_as_it_is(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            RecordingError, match="exists and is not a recording of this kind: record under another name"
        ):
            Writer(tmp_path / name)
        assert (tmp_path / name).read_bytes() == content

    def test_a_recording_of_another_version_is_left_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "a.lp").write_bytes(b"# diagnosd-recording 2 {}\n")
        with pytest.raises(RecordingError, match="version 2"):
            Writer(tmp_path / "a.lp")
        assert (tmp_path / "a.lp").read_bytes() == b"# diagnosd-recording 2 {}\n"

    def test_two_writers_do_not_share_a_file(self, tmp_path: Path) -> None:
        with Writer(tmp_path / "a.lp"), pytest.raises(RecordingError, match="another program is writing it"):
            Writer(tmp_path / "a.lp")

    @pytest.mark.parametrize("name", ["a.txt", "a.zst", "a.lp.xz", "lp"])
    def test_a_name_of_another_kind_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(RecordingError, match=r"a recording is named \*\.lp"):
            Writer(tmp_path / name)

    def test_a_folder_that_does_not_exist_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RecordingError, match=f"cannot be written: there is no folder {tmp_path}/no"):
            Writer(tmp_path / "no" / "a.lp")

    def test_a_full_disk_costs_one_flush_and_leaves_the_file_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "a.lp"
        program = f"""
import resource, signal
from diagnosd.recording import RecordingError, Writer
from tests.test_recording import FIVE, encode
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Writer({str(path)!r}) as writer:
    writer.write(encode(FIVE[:2]))
    writer.flush()
    limit = writer.path.stat().st_size + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    writer.write(encode(FIVE[2:4]))
    try:
        writer.flush()
    except RecordingError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write(encode(FIVE[4:]))
"""
        out = run(program)
        assert "cannot be written: File too large" in out.stdout, out.stderr
        assert points_of(read(path)) == FIVE[:2] + FIVE[4:]

    def test_a_file_that_can_neither_be_written_nor_cut_is_told_like_a_full_disk(self, tmp_path: Path) -> None:
        writer = Writer(tmp_path / "a.lp")
        readable = os.open(tmp_path / "a.lp", os.O_RDONLY)
        os.dup2(readable, writer._fd)
        os.close(readable)
        writer.write(encode(FIVE))
        with pytest.raises(RecordingError, match="cannot be written: Bad file descriptor"):
            writer.flush()
        writer.close()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.lp", "text * times"),
        ("a.lp.zst", "compress(text) * times"),
        ("a.lp.zst", "compress(text * times)"),
        ("a.lp.gz", "gzip.compress(text * times, 1)"),
    ],
)
def test_a_long_recording_takes_no_more_memory_than_a_short_one(tmp_path: Path, name: str, make: str) -> None:
    peaks = []
    for times in (60, 240):
        program = f"""
import gzip, resource
from pathlib import Path
from zstandard import compress
from diagnosd.point import encode
from diagnosd.recording import read
from tests.benchmarks.mix import mix
text, times = encode(mix(seconds=10)), {times}
if not Path({str(tmp_path / name)!r}).exists():
    Path({str(tmp_path / name)!r}).write_bytes({make})
else:
    assert sum(map(len, read({str(tmp_path / name)!r}))) == times * text.count(b"\\n")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
        run(program)
        out = run(program)
        assert out.stdout, out.stderr
        peaks.append(int(out.stdout))
        (tmp_path / name).unlink()
    assert peaks[1] - peaks[0] < 10_000, peaks  # KiB; the texts are 13 and 52 MB long
