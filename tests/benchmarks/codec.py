"""Field values a second that codec and reader manage on one core: `python -m tests.benchmarks.codec`."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import TYPE_CHECKING

from diagnosd import recording
from diagnosd.point import Decoder, encode

from . import table
from .mix import mix

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
TICK = 200  # points encoded at a time: what an agent on a busy node gathers in a second


def rate(values: int, work: Callable[[], object]) -> float:
    """Values a second, the median of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        begin = process_time()
        work()
        seconds.append(process_time() - begin)
    return values / median(seconds)


def main() -> None:
    points = list(mix())
    values = sum(len(each.fields) for each in points)
    ticks = [points[at : at + TICK] for at in range(0, len(points), TICK)]
    lines = [encode(tick) for tick in ticks]
    gc.freeze()  # what was prepared is no part of the work

    def decode() -> None:
        decoder = Decoder()
        for chunk in lines:
            decoder.feed(chunk)

    table.row("encode", table.rate(rate(values, lambda: [*map(encode, ticks)])))
    table.row("decode", table.rate(rate(values, decode)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mix.lp.zst"
        with recording.Writer(path) as writer:
            for chunk in lines:
                writer.write(chunk)
                writer.flush()
        read = rate(values, lambda: [len(batch) for batch in recording.read(path)])
        table.row(f"read {path.stat().st_size / 1e6:.1f} MB of zstd with {len(points):,} lines", table.rate(read))


if __name__ == "__main__":
    main()
