"""Points on disk: a file NAME.lp, NAME.lp.gz or NAME.lp.zst, or a folder of such files, merged by time.

A compressed recording is a chain of frames, one a flush, each of whole lines and with a checksum. So a crash costs the
flush that was under way and nothing before it, and a bad sector costs one frame: it is left out, counted, and reading
goes on at the next magic number that opens a frame. Whatever its size, no more than a few frames of a file are held.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import gzip
import json
import os
import stat
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import zstandard

from diagnosd.point import Decoder, Point, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

VERSION = 1
SUFFIXES = (".lp", ".lp.gz", ".lp.zst")
_HEADER = "# diagnosd-recording "

_READ = 1024  # compressed bytes taken at a time: text that repeats may grow to 32 MiB out of so few
_TEXT = 64 * 1024  # bytes of text decoded at a time: some 300 points
_FLUSH = 1024 * 1024  # bytes that a writer gathers at most
# Text of one frame that is held back until its checksum is seen. Our own frames are at most _FLUSH; what somebody
# compressed in one piece is longer, and is given out from here on before it is known to be whole.
_HELD = 8 * 1024 * 1024
_BATCH = 512  # points handed out at a time: few enough to stay in the processor's cache
_HOPELESS = 1000  # a file that has shown so many bad lines and not one point is something else, however long it is


class RecordingError(ValueError):
    """What cannot be read or written as a recording: which, why, and what to do."""


def not_made(path: Path, error: OSError) -> str:
    """Why there can be nothing new at `path`: a folder that is missing, by its name, else what the system says."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.isdir(path.parent):  # noqa: PTH112 - never raises
        return f"there is no folder {path.parent}"
    return error.strerror or str(error)


@dataclass(frozen=True, slots=True)
class Header:
    version: int = VERSION
    cluster: str = ""
    created: str = ""  # RFC 3339
    by: str = ""
    note: str = ""


@dataclass(slots=True)
class Faults:
    """What was left out of a reading."""

    bad: int = 0  # lines that do not parse
    mistyped: int = 0  # fields whose type is not the contract's
    torn: int = 0  # frames and lines that end unfinished where their file ends
    lost: int = 0  # frames whose checksum or contents are wrong
    unread: int = 0  # files that cannot be read, or not to their end
    first: str | None = None  # which file, where in it, and why; of one that is unread, if there is one

    def __bool__(self) -> bool:
        return bool(self.bad or self.mistyped or self.torn or self.lost or self.unread)


class _Inflating(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Codec:
    magic: bytes
    inflating: Callable[[], _Inflating]
    deflate: Callable[[bytes], bytes]


_ZSTD = _Codec(
    b"\x28\xb5\x2f\xfd",
    lambda: zstandard.ZstdDecompressor().decompressobj(),
    lambda text: zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text),
)
_GZIP = _Codec(
    b"\x1f\x8b\x08",
    lambda: zlib.decompressobj(wbits=31),
    lambda text: gzip.compress(text, compresslevel=6, mtime=0),
)
_CODEC_ERRORS = (zstandard.ZstdError, zlib.error)


def _codec(path: Path, start: bytes) -> _Codec | None:
    """What a file's first bytes say of it; where they say nothing, what its name says."""
    for codec in (_ZSTD, _GZIP):
        if start.startswith(codec.magic):
            return codec
    return {".zst": _ZSTD, ".gz": _GZIP}.get(path.suffix)


class _Lines:
    """The text of a plain file, whole lines at a time."""

    torn = lost = 0
    first = None

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.end = 0  # of the last whole line; an unfinished one is read again

    def text(self, *, final: bool) -> bytes | None:
        """Some whole lines, or a part of one that is too long; None when there is none now.

        With `final` the last one needs no newline.
        """
        text = b""
        while more := os.pread(self._fd, _TEXT, self.end + len(text)):
            text += more
            whole = text.rfind(b"\n") + 1
            if whole or len(text) > _HELD:
                text = text[: whole or None]
                self.end += len(text)
                return text
        if not final or not text:
            return None
        self.end += len(text)
        return text


class _Frames:
    """The text of a compressed file, a verified frame at a time."""

    def __init__(self, fd: int, codec: _Codec) -> None:
        self._fd = fd
        self._codec = codec
        self._at = 0  # where the next frame begins, or is looked for
        self._open: _Inflating | None = None  # a long frame of which a part is given out; it goes on at _at
        self._searching = False  # since a frame that could not be read; what begins at _at may be none
        self._tail: bytes | None = None  # text of a frame that the file's end cuts, unless whole ones follow
        self.end = 0  # of the last whole frame
        self.torn = self.lost = 0
        self.first: str | None = None  # what was wrong first

    def text(self, *, final: bool) -> bytes | None:
        """A frame's text, or a part of a long one; None when there is no whole one now."""
        while True:
            try:
                text, ready = self._inflate()
            except _CODEC_ERRORS as error:
                self._lose(str(error))
            else:
                if ready:
                    return text
                if not final:
                    return None
                if self._open is None and not os.pread(self._fd, 1, self._at):
                    return self._finish()
                self._cut(text)
            if not self._search():
                return self._finish()

    def _inflate(self) -> tuple[bytes, bool]:
        """Text, and whether it may be given out: the frame is whole, or too long to wait for."""
        inflating, at = self._open or self._codec.inflating(), self._at
        texts: list[bytes] = []
        held = 0
        while held < _HELD:
            piece = os.pread(self._fd, _READ, at)
            if not piece:
                break
            texts.append(inflating.decompress(piece))
            held += len(texts[-1])
            at += len(piece)
            if inflating.eof:
                self._at = self.end = at - len(inflating.unused_data)
                self._open, self._searching, self._tail = None, False, None
                return b"".join(texts), True
        if held < _HELD and self._open is None:
            return b"".join(texts), False
        self._open, self._at = inflating, at
        return b"".join(texts), held > 0

    def _lose(self, reason: str) -> None:
        self.lost += not self._searching
        self._searching = True
        self.first = self.first or f"frame at byte {self._at}: {reason}"

    def _cut(self, text: bytes) -> None:
        """The file ends inside of this frame; or its length is wrong, and others follow."""
        if not self._searching:
            self._tail = text
        self._lose("unfinished")

    def _search(self) -> bool:
        """Goes to the next place that looks like a frame's beginning."""
        self._open = None
        self._at += 1
        overlap = len(self._codec.magic) - 1
        while window := os.pread(self._fd, _TEXT, self._at):
            found = window.find(self._codec.magic)
            if found >= 0:
                self._at += found
                return True
            self._at += max(len(window) - overlap, 1)
        return False

    def _finish(self) -> bytes | None:
        tail, self._tail = self._tail, None
        if tail is None:
            return None
        self.torn += 1
        self.lost -= 1
        self._searching = False
        return tail[: tail.rfind(b"\n") + 1]


class _Source:
    """One file's points, in the file's order, a batch at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self.decoder = Decoder()
        self.batch: list[Point] = []
        self.at = 0  # of the next point in batch
        self.final = True  # the file does not grow any more
        self.torn_lines = 0
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer must not hang
        self.size = os.fstat(self._fd).st_size  # when it was opened
        self._text: _Lines | _Frames | None = None
        self._batches = self._read()

    def close(self) -> None:
        self._batches.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def position(self) -> int:
        return self._text.end if self._text else 0

    @property
    def torn(self) -> int:
        return self.torn_lines + (self._text.torn if self._text else 0)

    @property
    def lost(self) -> int:
        return self._text.lost if self._text else 0

    def gone(self) -> str:
        """What has become of a file that was to grow; "" as long as it may."""
        try:
            ours, there = os.fstat(self._fd), self.path.stat()
        except FileNotFoundError:
            return "removed"
        except OSError as error:  # where it lies cannot be seen now; what is open can be read
            return "removed" if error.errno == errno.ESTALE else ""  # ESTALE: on NFS, by another host
        if not os.path.samestat(ours, there):
            return "replaced by another"
        return "cut short" if ours.st_size < self.position else ""

    def fill(self) -> bool:
        """Whether there is a point to take, now."""
        while self.at >= len(self.batch):
            batch = next(self._batches, None)
            if batch is None:
                if self.final:
                    self.close()
                return False
            self.batch, self.at = batch, 0
        return True

    def _read(self) -> Generator[list[Point] | None]:
        """Batches; None where the file has nothing more now."""
        while not (start := os.pread(self._fd, _READ, 0)):
            if self.final:
                return
            yield None
        codec = _codec(self.path, start)
        self._text = _Frames(self._fd, codec) if codec else _Lines(self._fd)
        lost = 0
        while (text := self._text.text(final=self.final)) is not None or not self.final:
            if text is None:
                yield None
                continue
            if self.header is None:
                text = text.removeprefix(codecs.BOM_UTF8)  # editors on Windows put it there
                self.header = _header(self.path, text)
            if self._text.lost > lost:
                lost = self._text.lost
                yield self.decoder.finish()  # no line goes on behind a hole
            for at in range(0, len(text), _TEXT):
                yield self.decoder.feed(text[at : at + _TEXT])
                if not self.decoder.counts.points and self.decoder.counts.bad > _HOPELESS:
                    return
        yield self._last()

    def _last(self) -> list[Point]:
        """A last line without a newline: a point if it parses, else torn."""
        counts = self.decoder.counts
        bad, first_bad = counts.bad, counts.first_bad
        points = self.decoder.finish()
        if counts.bad > bad:
            counts.bad, counts.first_bad = bad, first_bad
            self.torn_lines += 1
        return points

    @property
    def first(self) -> str | None:
        """What was wrong first, and where."""
        if self._text and self._text.first:
            return f"{self.path}: {self._text.first}"
        line = self.decoder.counts.first_bad
        return f"{self.path}:{line[0]}: {line[1]}" if line else None

    def nothing(self) -> str:
        """Why this file has given no point."""
        line = self.decoder.counts.first_bad
        wrong = self._text.first if self._text and self._text.first else line and f"line {line[0]}: {line[1]}"
        if wrong:
            return f"{self.path} is no recording, or is damaged at its beginning: {wrong}"
        if self.torn:
            return f"{self.path}: not a recording, or cut in its first line"
        return f"{self.path}: the recording is empty: nothing was recorded, or nothing has been flushed yet"


def _header(path: Path, text: bytes) -> Header:
    line = text.partition(b"\n")[0].decode(errors="replace")
    if not line.startswith(_HEADER):
        return Header()
    version, _, rest = line[len(_HEADER) :].partition(" ")
    if version != str(VERSION):
        raise RecordingError(
            f"{path}:1: a recording of version {ascii(version[:20])[1:-1]}; this diagnosd reads version {VERSION}: "
            "replay it with the diagnosd that wrote it, or a newer one"
        )
    try:
        told = json.loads(rest or "{}")
    except (ValueError, RecursionError):
        told = {}
    told = told if isinstance(told, dict) else {}
    return Header(VERSION, *(str(told.get(key, "")) for key in ("cluster", "created", "by", "note")))


def _pause() -> None:
    time.sleep(0.2)


class Reading:
    """A recording being read: iterate over it for batches of points. See `read`."""

    def __init__(self, path: Path, *, follow: bool, stop: Callable[[], bool], wait: Callable[[], object]) -> None:
        self.path = path
        self._follow = follow
        self._stop = stop
        self._wait = wait
        self._sources: dict[Path, _Source] = {}
        self._unread: dict[Path, str] = {}  # what cannot be read, or not to its end, and why
        try:
            self._open()
        except RecordingError:
            self.close()
            raise

    def _open(self) -> None:
        self._discover()
        for source in self._sources.values():
            source.final = not self._follow
        filled = [self._fill(source) for source in self._sources.values()]
        if self._unread and self._sources.keys() <= self._unread.keys():
            raise RecordingError(self.unread[0])
        if not self._follow and not any(filled):
            raise RecordingError(next(iter(self._sources.values())).nothing())

    @property
    def header(self) -> Header:
        """The first header that tells something, in the order of file names."""
        told = [self._sources[path].header for path in sorted(self._sources)]
        return next((header for header in told if header and header != Header()), Header())

    @property
    def clusters(self) -> dict[str, Path]:
        """Each cluster that a header names, with the first of its files."""
        headers = {path: self._sources[path].header for path in sorted(self._sources, reverse=True)}
        return {header.cluster: path for path, header in headers.items() if header and header.cluster}

    @property
    def position(self) -> int:
        """Bytes of file read so far; may be asked from another thread, like `size`."""
        return sum(source.position for source in list(self._sources.values()))

    @property
    def size(self) -> int:
        """Bytes of file there were when they were opened."""
        return sum(source.size for source in list(self._sources.values()))

    @property
    def unread(self) -> list[str]:
        """The files that cannot be read, or not to their end: which, and why, in the order in which it was seen."""
        return list(self._unread.values())

    @property
    def faults(self) -> Faults:
        faults = Faults(unread=len(self._unread), first=next(iter(self._unread.values()), None))
        for path in sorted(self._sources):
            source = self._sources[path]
            counts = source.decoder.counts
            faults.bad += counts.bad
            faults.mistyped += counts.mistyped
            faults.torn += source.torn
            faults.lost += source.lost
            faults.first = faults.first or source.first
        return faults

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[Point]]:
        try:
            yield from self._rounds()
        finally:
            self.close()

    def _rounds(self) -> Iterator[list[Point]]:
        final = not self._follow
        while True:
            if self._follow:
                final = self._stop()
                final |= not self._look()
            for path, source in self._sources.items():
                source.final = final or path in self._unread
            quiet = True
            for batch in self._merged():
                quiet = False
                yield batch
            if final:
                return
            if quiet:
                yield []
                self._wait()

    def _look(self) -> bool:
        """What has gone, and what has come. Whether more may come."""
        for path, source in self._sources.items():
            if path not in self._unread and (end := source.gone()):
                self._unread[path] = f"{path}: {end} while it was followed"
        if self.path in self._unread:
            return False
        try:
            self._discover()
        except RecordingError as error:
            self._unread[self.path] = str(error)
        return self.path not in self._unread

    def _discover(self) -> None:
        try:
            found = _files(self.path, growing=self._follow)
        except OSError as error:
            raise RecordingError(_unreadable(self.path, error)) from error
        for path in found:
            if path in self._sources or path in self._unread:
                continue
            try:
                self._sources[path] = _Source(path)
            except OSError as error:
                self._unread[path] = _unreadable(path, error)

    def _fill(self, source: _Source) -> bool:
        try:
            return source.fill()
        except OSError as error:
            self._unread[source.path] = _unreadable(source.path, error)
        except RecordingError as error:
            self._unread[source.path] = str(error)
        return False

    def _merged(self) -> Iterator[list[Point]]:
        """What the files have now, the earliest next point first; at the same time, by file name."""
        sources = [self._sources[path] for path in sorted(self._sources)]
        heads = [(s.batch[s.at].time, rank) for rank, s in enumerate(sources) if self._fill(s)]
        heapify(heads)
        out: list[Point] = []
        while heads:
            _, rank = heappop(heads)
            source = sources[rank]
            while self._fill(source):
                source.at = _take(source, rank, heads[0] if heads else None, out)
                if len(out) >= _BATCH:
                    yield out
                    out = []
                if source.at < len(source.batch):
                    heappush(heads, (source.batch[source.at].time, rank))
                    break
        if out:
            yield out


def _take(source: _Source, rank: int, other: tuple[int, int] | None, out: list[Point]) -> int:
    """Moves the points that come before `other` (time and rank of another file's next point) from the batch."""
    batch, at = source.batch, source.at
    if other is None:
        out += batch[at:]
        return len(batch)
    limit = other[0] + (rank < other[1])
    end = at
    while end < len(batch) and batch[end].time < limit:
        end += 1
    out += batch[at:end]
    return end


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read: {error.strerror}"


def _files(path: Path, *, growing: bool) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecordingError(f"{path}: no such recording") from error
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise RecordingError(f"{path}: neither a file nor a folder")
    found = sorted(entry for entry in path.iterdir() if entry.name.endswith(SUFFIXES) and entry.is_file())
    if not found and not growing:
        raise RecordingError(f"{path}: no recording in this folder: want files named *.lp, *.lp.gz or *.lp.zst")
    return found


def _never() -> bool:
    return False


def read(
    path: str | Path,
    *,
    follow: bool = False,
    stop: Callable[[], bool] = _never,
    wait: Callable[[], object] = _pause,
) -> Reading:
    """The points of a recording, in batches, merged by time over a folder's files.

    Each file's points are taken as they stand, nearly ordered. With `follow` the files may grow and new ones appear;
    when nothing new is there an empty batch is given out and `wait` is called; when `stop` says so, what is left is
    read and the iteration ends.

    RecordingError where there is nothing to read: no such path, no file of it that may be read or is of this version,
    no recording, or (unless it is followed) not one point. Everything less is counted in `faults`.
    """
    return Reading(Path(path), follow=follow, stop=stop, wait=wait)


class Writer:
    """Appends lines to a recording. One flush is one frame; a crash loses what was not flushed, and nothing else."""

    def __init__(self, path: str | Path, **header: str) -> None:
        """Opens the recording for appending, after its last whole frame or line; `header` is for a new one.

        RecordingError where that cannot be: a name or file of another kind, no permission, another writer.
        """
        self.path = Path(path)
        if not self.path.name.endswith(SUFFIXES):
            raise RecordingError(f"{path}: a recording is named *.lp, *.lp.gz or *.lp.zst")
        self._codec = _codec(self.path, b"")
        self._lines: list[bytes] = []
        self._gathered = 0
        created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self._header = f"{_HEADER}{VERSION} {json.dumps({'created': created, **header})}\n".encode()
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written: {not_made(self.path, error)}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise RecordingError(f"{path}: exists and is no file: record under another name")
            self._claim()
            self._end = _whole(self.path, self._fd, self._codec)
            os.ftruncate(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordingError(f"{self.path}: another program is writing it: record under another name") from error
        except OSError:
            return  # a file system without locks

    def write(self, lines: bytes) -> None:
        """Whole lines, as `encode` makes them."""
        self._lines.append(lines)
        self._gathered += len(lines)
        if self._gathered >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Hands what was gathered to the kernel: from here on only the machine's end can lose it.

        RecordingError where it cannot be written (a full disk): this flush is lost, the file stays whole; or where
        nobody will find it, for the file was removed.
        """
        text = b"".join(self._lines)
        self._lines, self._gathered = [], 0
        if not text:
            return
        if self._is_gone():
            raise RecordingError(f"{self.path}: was removed while it was written")
        if not self._end:
            text = self._header + text
        frame = self._codec.deflate(text) if self._codec else text
        try:
            _write(self._fd, frame, self._end)
        except OSError as error:
            with suppress(OSError):  # a torn end is passed over by whoever reads, and the next flush writes over it
                os.ftruncate(self._fd, self._end)
            raise RecordingError(f"{self.path}: cannot be written: {error.strerror}: {len(text)} bytes lost") from error
        self._end += len(frame)

    def _is_gone(self) -> bool:
        try:
            return not os.fstat(self._fd).st_nlink
        except OSError as error:
            return error.errno == errno.ESTALE  # on NFS, removed by another host

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(fd: int, frame: bytes, at: int) -> None:
    rest = memoryview(frame)
    while rest:
        written = os.pwrite(fd, rest, at)
        at += written
        rest = rest[written:]


def _whole(path: Path, fd: int, codec: _Codec | None) -> int:
    """Where the last whole frame or line of an existing file ends. RecordingError where it is no recording of ours."""
    start = os.pread(fd, _TEXT, 0)
    if not start:
        return 0
    end = _last_frame_end(fd, codec) if codec else _last_line_end(fd)
    if _codec(path, start) is codec and (_is_recording(path) if end else _is_first_flush(start, codec)):
        return end
    raise RecordingError(f"{path}: exists and is not a recording of this kind: record under another name")


def _is_recording(path: Path) -> bool:
    source = _Source(path)
    try:
        return source.fill() or not source.decoder.counts.bad
    finally:
        source.close()


def _is_first_flush(start: bytes, codec: _Codec | None) -> bool:
    """Whether a file without anything whole may be the torn beginning of a recording, which nobody will miss."""
    begin = codec.magic if codec else _HEADER.encode()
    return len(start) < _TEXT and start[: len(begin)] == begin[: len(start)]


def _last_frame_end(fd: int, codec: _Codec) -> int:
    frames = _Frames(fd, codec)
    while frames.text(final=False) is not None:
        pass
    return frames.end


def _last_line_end(fd: int) -> int:
    """Where the last line ends; it is given its newline if that is all it lacks."""
    size = at = os.fstat(fd).st_size
    tail = b""
    while at > 0 and b"\n" not in tail and len(tail) < _HELD:
        begin = max(at - _TEXT, 0)
        tail = os.pread(fd, at - begin, begin) + tail
        at = begin
    line = tail[tail.rfind(b"\n") + 1 :]
    try:
        decode(line)
    except ValueError:
        return size - len(line)
    return size + os.pwrite(fd, b"\n", size)
