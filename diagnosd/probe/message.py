"""One message of the probe: what it looks like on the socket, and what makes one acceptable.

A rank process holds one connection to an AF_UNIX SOCK_SEQPACKET socket (DIAGNOSD_SOCKET, else `DEFAULT_SOCKET`) and
writes one JSON object a packet, at most `LIMIT` bytes:

    {"v":1,"n":7,"m":"diagnosd_step","tags":{"source":"probe"},"f":{"step":6,"duration":0.05},"t":1700000000000000000}

`m` is a measurement of the telemetry contract, `tags` are those beyond job, host and rank (left out when there are
none), `f` its fields with the contract's names, types and units, `t` the wall clock in ns. A JSON number with a point
or an exponent is a float, one without is an int.

A connection begins with a hello, and another may follow when what it says has changed:

    {"v":1,"n":7,"m":"hello","job":"train","rank":0,"world":2,"local_rank":0,"attempt":0,"pid":412,"f":{"loader":"torch"},"t":..}

Its `f` are the fields of `diagnosd_rank` beyond attempt, world and local_rank, and `addresses`: the local addresses of
the rank's TCP connections, comma-separated. `attempt` and `local_rank` are missing where the environment does not tell.

`n` counts the messages of one process from 0, over reconnections, also those that were given up because nobody read
them. A hello takes no number: it names the one that comes next. `Sequence` turns numbers into losses.

Standard library only, Python 3.8 and later: this file is loaded into the training process. The receiving side takes
`parse` from here, so that the format stands once.
"""

import json
from typing import Any, Dict, Mapping, NamedTuple, Optional, Union

VERSION = 1
LIMIT = 8192  # bytes; a stack is at most 2 KiB, everything else is far below
DEFAULT_SOCKET = "/run/diagnosd/probe.sock"

MEASUREMENTS = frozenset(
    {
        "diagnosd_step",
        "diagnosd_process",
        "diagnosd_socket",
        "diagnosd_collective",
        "diagnosd_group",
        "diagnosd_event",
        "diagnosd_job",
    }
)
_IDENTITY = frozenset({"job", "host", "rank"})  # tags that the hello and the agent decide, never a message
_INT64 = 2**63
RANKS = 2**20  # of a job: the largest have some hundred thousand
ATTEMPTS = 2**20  # a job that starts anew every minute needs two years for as many
PIDS = 2**22  # PID_MAX_LIMIT of Linux
_INFINITE = (float("inf"), float("-inf"))  # 1e999 is valid JSON

Value = Union[int, float, str, bool]


class Hello(NamedTuple):
    """A rank introduces itself. `attempt` and `local_rank` are None where its environment did not tell."""

    number: int
    job: str
    rank: int
    world: int
    local_rank: Optional[int]
    attempt: Optional[int]
    pid: int
    fields: Dict[str, Value]
    time: int


class Message(NamedTuple):
    """One point of a rank, still without job, host and rank. `time` is the wall clock in ns."""

    number: int
    measurement: str
    tags: Dict[str, str]
    fields: Dict[str, Value]
    time: int


class Sequence:
    """What was lost of one sender, from the numbers that arrived."""

    def __init__(self) -> None:
        self.expected: Optional[int] = None

    def lost(self, packet: Union[Hello, Message]) -> int:
        """How many messages were given up before this one. A sender seen first in mid-stream has lost nothing yet."""
        missing = 0 if self.expected is None else max(0, packet.number - self.expected)
        self.expected = packet.number if isinstance(packet, Hello) else packet.number + 1
        return missing


_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def encode(
    number: int, measurement: str, fields: Mapping[str, Value], time: int, tags: Optional[Mapping[str, str]] = None
) -> bytes:
    """ValueError where a float is not finite or the message is longer than LIMIT."""
    packet: Dict[str, Any] = {"v": VERSION, "n": number, "m": measurement, "f": fields, "t": time}
    if tags:
        packet["tags"] = tags
    return _bounded(packet)


def encode_hello(hello: Hello) -> bytes:
    """ValueError as for `encode`."""
    packet = {"v": VERSION, "n": hello.number, "m": "hello", "job": hello.job, "rank": hello.rank, "world": hello.world}
    packet.update(pid=hello.pid, f=hello.fields, t=hello.time)
    if hello.local_rank is not None:
        packet["local_rank"] = hello.local_rank
    if hello.attempt is not None:
        packet["attempt"] = hello.attempt
    return _bounded(packet)


def _bounded(packet: Mapping[str, Any]) -> bytes:
    raw = _dumps(packet).encode()
    if len(raw) > LIMIT:
        raise ValueError(f"a message of {len(raw)} bytes; {LIMIT} are allowed")
    return raw


def parse(raw: bytes) -> Union[Hello, Message]:
    """Anybody on the node may write to the socket: ValueError, saying what is wrong, for whatever is not a message."""
    if len(raw) > LIMIT:
        raise ValueError(f"{len(raw)} bytes; {LIMIT} are allowed")
    try:
        packet = json.loads(raw.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    packet = _object(packet, "the message")
    if packet.get("v") != VERSION:
        raise ValueError(f"version {packet.get('v')!r:.40}; this side speaks {VERSION}")
    name = packet.get("m")
    fields = _fields(packet.get("f"))
    number, time = _count(packet, "n"), _count(packet, "t")
    if name == "hello":
        return _hello(packet, number, fields, time)
    if not isinstance(name, str) or name not in MEASUREMENTS:
        raise ValueError(f"m is {str(name)[:40]!r}: no measurement of the probe")
    if not fields:
        raise ValueError("no field")
    return Message(number, name, _tags(packet.get("tags", {})), fields, time)


def _hello(packet: Mapping[str, Any], number: int, fields: Dict[str, Value], time: int) -> Hello:
    rank, world, pid = _count(packet, "rank"), _count(packet, "world", RANKS), _count(packet, "pid", PIDS)
    if rank >= world:
        raise ValueError(f"rank {rank} in a world of {world}")
    local_rank, attempt = (
        None if packet.get(key) is None else _count(packet, key, most)
        for key, most in (("local_rank", RANKS), ("attempt", ATTEMPTS))
    )
    return Hello(number, _name(packet, "job"), rank, world, local_rank, attempt, pid, fields, time)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a value")


def _count(packet: Mapping[str, Any], key: str, most: int = _INT64 - 1) -> int:
    value = packet.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{key} is {str(value)[:40]!r}; an integer from 0 to {most} is wanted")
    return value


def _name(packet: Mapping[str, Any], key: str) -> str:
    value = packet.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable() or value != value.strip():
        raise ValueError(f"{key} is {str(value)[:40]!r}; 1 to 256 printable characters are wanted")
    return value


def _key(key: str) -> None:
    if len(key) > 64 or not (key.isascii() and key.replace("_", "a").isalnum()):
        raise ValueError(f"{key[:40]!r} is no name of a field or tag")


def _tags(tags: Any) -> Dict[str, str]:
    for key in _object(tags, "tags"):
        _key(key)
        _name(tags, key)
        if key in _IDENTITY:
            raise ValueError(f"tag {key} is not the sender's to set")
    return dict(tags)


def _fields(fields: Any) -> Dict[str, Value]:
    for key, value in _object(fields, "f").items():
        _key(key)
        if isinstance(value, str):
            _text(key, value)
        elif isinstance(value, int):
            if not -_INT64 <= value < _INT64:
                raise ValueError(f"{key} is out of the range of 64 bits")
        elif not isinstance(value, float) or value in _INFINITE:
            raise ValueError(f"{key} is neither a finite number, a string nor a boolean")
    return dict(fields)


def _text(key: str, value: str) -> None:
    """A line of the recording holds it: no line breaks, and nothing that UTF-8 cannot say."""
    if value.isprintable():
        return
    if any(c in "\n\r\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{key} holds a line break or half a character")


def _object(value: Any, name: str) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")  # noqa: TRY004 - of the sender's making, not of the caller's
    return value
