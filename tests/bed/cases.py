"""A case of recordings/ from a run: all hosts' points in one file, and the truth. Its README is written by hand."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

from diagnosd.point import encode
from diagnosd.recording import Writer, read

from .run import BedError, Run

MOST_BYTES = 400_000

# Folders of whoever ran it: a recording that others read tells nothing of them.
OWN_PATH = re.compile(rb"/(?:root|home|work|var/tmp)/[^\s\",\\]*")


def write_case(done: Run, record: Path, case: Path) -> None:
    """Write recording.lp.zst and expected.toml. BedError where it would be too large, or tell paths of this machine."""
    case.mkdir(parents=True, exist_ok=True)
    target = case / "recording.lp.zst"
    target.unlink(missing_ok=True)
    with Writer(target, by="tests.bed", note=done.scenario.story) as writer:
        for points in read(record):
            lines = encode(points)
            if own := OWN_PATH.search(lines):
                raise BedError(f"the recording tells {own[0].decode()}")
            writer.write(lines)
    if (size := target.stat().st_size) > MOST_BYTES:
        raise BedError(f"{target} has {size} bytes, more than {MOST_BYTES}")
    (case / "expected.toml").write_text(truth(done))


def truth(done: Run) -> str:
    """expected.toml (telemetry.md 6)."""
    want = done.scenario
    if want.cause is None:
        return "# Nothing is wrong here: nothing may be reported.\n"
    assert done.onset
    lines = ["[[episode]]", f'job = "{done.job}"', f'cause = "{want.cause}"']
    lines += [f'subtype = "{want.subtypes[0]}"'] if want.subtypes else []
    lines += [f"start = {rfc3339(done.onset)}", f"end = {rfc3339(done.cleared or done.ended)}"]
    lines += [f"locus = {json.dumps(want.loci)}"] if want.loci else []
    lines += [f"lost_gpu_seconds = {done.lost:.1f}"] if done.lost is not None else []
    return "\n".join(lines) + "\n"


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
