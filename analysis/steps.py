"""The steps of one attempt of a job as aligned arrays: a row a step, a column a rank.

Ranks send their steps one by one and not at the same time; some join late, some lose a step, some send one twice. The
grid brings the same step of all ranks into one row, by its number. Where a number goes back although the attempt did
not rise (a framework that counts anew each epoch), a new lap begins, and the rows go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from diagnosd.analysis.samples import ABSENT, block
from diagnosd.point import Point, Value

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]

KEEP_STEPS = 2000  # ten times the 200 steps that a job is compared with
CELLS = 1 << 20  # of one column: 8 MiB. Above 524 ranks fewer steps are kept, never less than LEAST_STEPS
LEAST_STEPS = 400
FIRST_ROWS = 64
LAP = 1 << 40  # a step's key is lap * LAP + number

KINDS = ("train", "warmup", "compile", "eval", "checkpoint")
CLOCKS = ("host", "device")
SOURCES = ("inferred", "log", "probe")  # the better one last: a rank's steps come from the best source it has

# The numbers of diagnosd_step that are kept, in SI units; sync_enter and sync_exit as seconds since the origin.
COLUMNS = (
    "duration", "data_wait", "h2d", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "blocked",
    "other", "device", "device_gap", "compute", "tokens", "samples", "tokens_sq", "queue", "queue_size", "workers",
    "sync_bytes",
)  # fmt: skip
INSTANTS = ("sync_enter", "sync_exit")
_SECONDS = COLUMNS.index("tokens")  # the columns before it are times
LONGEST_S = 1e7  # no step lasts four months: a longer or negative time is a broken number, and absent
_PLACE = {name: place for place, name in enumerate((*COLUMNS, *INSTANTS))}
_KIND, _CLOCK = range(2)
_KIND_CODES: dict[Value | None, int] = {word: code for code, word in enumerate(KINDS)}
_CLOCK_CODES: dict[Value | None, int] = {word: code for code, word in enumerate(CLOCKS)}


@dataclass(frozen=True, slots=True)
class Steps:
    """A view of the steps so far, oldest first; S steps, R ranks. It is good until the trace takes more points.

    `kind` and `clock` are codes into KINDS and CLOCKS; -1 where absent.
    """

    attempt: int
    number: Ints  # [S] the framework's step number; falls only where a new lap begins
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    end: Ints  # [S,R] ns; 0 where a rank has not sent this step
    _values: Floats  # [S,R,columns]
    _codes: Codes  # [S,R,2]

    def __len__(self) -> int:
        return len(self.number)

    def of(self, columns: npt.NDArray[np.intp]) -> Steps:
        """The steps of some ranks, by their columns."""
        ranks = tuple(self.ranks[column] for column in columns)
        hosts = tuple(self.hosts[column] for column in columns)
        values, codes = self._values[:, columns], self._codes[:, columns]
        return Steps(self.attempt, self.number, ranks, hosts, self.end[:, columns], values, codes)

    def column(self, name: str) -> Floats:
        """[S,R] in SI units, NaN where absent; sync_enter and sync_exit in seconds since the trace's origin."""
        return self._values[..., _PLACE[name]]

    def columns(self, names: tuple[str, ...], rows: slice) -> Floats:
        """[rows,R,names] several columns at once, a copy."""
        return self._values[rows][..., [_PLACE[name] for name in names]]

    @property
    def sync_enter(self) -> Floats:
        return self.column("sync_enter")

    @property
    def sync_exit(self) -> Floats:
        return self.column("sync_exit")

    @property
    def kind(self) -> Codes:
        return self._codes[..., _KIND]

    @property
    def clock(self) -> Codes:
        return self._codes[..., _CLOCK]


_Arrival = tuple[int, int, str, Point]  # key, rank, host


class Grid:
    """Collects the diagnosd_step points of one attempt; `origin` (ns) is the zero of sync_enter and sync_exit."""

    def __init__(self, attempt: int, origin: int) -> None:
        self.attempt = attempt
        self.taken = 0  # steps of single ranks
        self._origin = origin
        self._ranks: tuple[int, ...] = ()
        self._hosts: dict[int, str] = {}
        self._column: dict[int, int] = {}  # of each rank
        self._row: dict[int, int] = {}  # of each key, those before _low included
        self._low = self._high = 0
        self._keys: Ints = np.empty(0, np.int64)
        self._end: Ints = np.empty((0, 0), np.int64)
        self._values: Floats = np.empty((0, 0, len(_PLACE)))
        self._codes: Codes = np.empty((0, 0, 2), np.int8)
        self._newest: dict[int, int] = {}  # rank -> key of its newest step
        self._source: dict[int, int] = {}
        self._pending: list[_Arrival] = []

    @property
    def keep(self) -> int:
        return max(LEAST_STEPS, min(KEEP_STEPS, CELLS // max(1, len(self._ranks))))

    def add(self, rank: int, host: str, quality: int, number: int, point: Point) -> None:
        """`quality` is the place of the step's source in SOURCES."""
        if quality < self._source.get(rank, 0) or not 0 <= number < LAP:
            return
        self._source[rank] = quality
        newest = self._newest.get(rank)
        if newest is None:
            key = max(self._newest.values(), default=0) // LAP * LAP + number
        else:
            key = newest - newest % LAP + number
            key += LAP * (key < newest)
        self._newest[rank] = key
        self.taken += 1
        self._pending.append((key, rank, host, point))

    def steps(self) -> Steps:
        self.settle()
        rows = slice(self._low, self._high)
        hosts = tuple(self._hosts[rank] for rank in self._ranks)
        number = self._keys[rows] % LAP
        return Steps(
            self.attempt,
            number,
            self._ranks,
            hosts,
            self._end[rows],
            self._values[rows],
            self._codes[rows],
        )

    def settle(self) -> None:
        """Bring what arrived into the rows."""
        if not self._pending:
            return
        arrivals, self._pending = self._pending, []
        if self._high - self._low >= self.keep:  # older ones would only be laid out and dropped
            arrivals = [arrival for arrival in arrivals if arrival[0] >= self._keys[self._low]]
        self._make_room(arrivals)
        oldest, rows, columns, points = int(self._keys[self._low]), [], [], []
        for key, rank, _, point in arrivals:
            if key >= oldest:
                rows.append(self._row[key])
                columns.append(self._column[rank])
                points.append(point)
        if points:
            self._put((np.array(rows), np.array(columns)), points)

    def _put(self, cells: tuple[Ints, Ints], points: list[Point]) -> None:
        fields = [point.fields for point in points]
        self._end[cells] = [point.time for point in points]
        codes = chain.from_iterable(map(_coded, fields))
        self._codes[cells] = np.fromiter(codes, np.int8, 2 * len(fields)).reshape(-1, 2)
        instants = block(fields, INSTANTS, np.dtype(np.int64), ABSENT)
        values = self._values[cells]
        values[:, : len(COLUMNS)] = block(fields, COLUMNS, np.dtype(np.float64), np.nan)
        times = values[:, :_SECONDS]
        times[~((times >= 0) & (times <= LONGEST_S))] = np.nan
        away = np.abs(instants.astype(np.float64) - self._end[cells][:, None]) > LONGEST_S * 1e9  # ABSENT is far away
        values[:, len(COLUMNS) :] = np.where(away, np.nan, (instants - self._origin) / 1e9)
        self._values[cells] = values

    def _make_room(self, arrivals: list[_Arrival]) -> None:
        """A row for each key and a column for each rank. Nearly always the new keys follow the old ones."""
        fresh = sorted({key for key, _, _, _ in arrivals if key not in self._row})
        strangers = {rank: host for _, rank, host, _ in arrivals if rank not in self._column}
        in_order = self._high and fresh and fresh[0] > self._keys[self._high - 1]
        if strangers or self._high + len(fresh) > len(self._keys) or (fresh and not in_order):
            self._hosts.update(strangers)
            self._rebuild(sorted({*self._keys[self._low : self._high].tolist(), *fresh}), tuple(sorted(self._hosts)))
        elif fresh:
            rows = slice(self._high, self._high + len(fresh))
            self._keys[rows] = fresh
            self._row.update(zip(fresh, range(rows.start, rows.stop), strict=True))
            self._high = rows.stop
        self._low = max(self._low, self._high - self.keep)

    def _rebuild(self, keys: list[int], ranks: tuple[int, ...]) -> None:
        """Lay the grid out anew for these rows and columns; what stood there keeps its place by key and rank."""
        old_row, old_end, old_values, old_codes = self._row, self._end, self._values, self._codes
        old_columns = [ranks.index(rank) for rank in self._ranks]
        self._ranks, self._column = ranks, {rank: column for column, rank in enumerate(ranks)}
        keys = keys[-self.keep :]
        size = max(FIRST_ROWS, min(2 * self.keep, 2 * len(keys)))
        self._row = {key: row for row, key in enumerate(keys)}
        self._low, self._high = 0, len(keys)
        self._keys = np.zeros(size, np.int64)
        self._keys[: len(keys)] = keys
        self._end = np.zeros((size, len(ranks)), np.int64)
        self._values = np.full((size, len(ranks), len(_PLACE)), np.nan)
        self._codes = np.full((size, len(ranks), 2), -1, np.int8)
        stay = [key for key in keys if key in old_row]
        old, new = [old_row[key] for key in stay], np.ix_([self._row[key] for key in stay], old_columns)
        self._end[new], self._values[new], self._codes[new] = old_end[old], old_values[old], old_codes[old]


def _coded(fields: dict[str, Value]) -> tuple[int, int]:
    return _KIND_CODES.get(fields.get("kind"), -1), _CLOCK_CODES.get(fields.get("clock"), -1)
