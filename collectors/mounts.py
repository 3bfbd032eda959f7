"""What is mounted where: /proc/self/mountinfo, which tells one file system at several places from several."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    device: str  # /dev/sda1, server:/export
    path: str
    fstype: str
    number: str  # major:minor of the file system: the same wherever it is mounted
    whole: bool  # its root is what is mounted, not a folder or file of it


def mounts(text: str) -> list[Mount]:
    """Of several mounted over each other, the one on top: what a path leads to. A line that is odd is left out."""
    seen: dict[str, Mount] = {}
    for line in text.split("\n"):  # of what else may end a line, the kernel writes a name as it is
        where, separator, what = line.partition(" - ")
        columns, source = where.split(" "), what.split(" ")
        if separator and len(columns) >= 5 and len(source) >= 2:
            mount = Mount(unescape(source[1]), unescape(columns[4]), source[0], columns[2], columns[3] == "/")
            seen.pop(mount.path, None)
            seen[mount.path] = mount
    return list(seen.values())


def once(many: Iterable[Mount]) -> list[Mount]:
    """One place a file system: where its root is, else the shortest path. Containers mount the same many times."""
    best: dict[str, Mount] = {}
    for mount in many:
        have = best.get(mount.number)
        if have is None or _rank(mount) < _rank(have):
            best[mount.number] = mount
    return list(best.values())


def _rank(mount: Mount) -> tuple[bool, int, str]:
    return not mount.whole, len(mount.path), mount.path


def unescape(name: str) -> str:
    r"""The kernel writes a blank as \040, and tabs, newlines, backslashes and # alike."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), name) if "\\" in name else name
