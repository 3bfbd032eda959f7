"""Published step times and nccl-tests curves, as rows of `validation/steps.csv` and `nccl_curves.csv` have them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import TypeVar

from diagnosd import documents as doc
from diagnosd.analysis.model.collectives import Group, Op
from diagnosd.analysis.model.hardware import FABRICS, UnknownHardwareError, gpu
from diagnosd.analysis.model.machine import Machine, check_dtype, declared
from diagnosd.analysis.model.workload import ModelError, Workload, read

Row = Mapping[str, str]
STEP_COLUMNS = (
    *("id", "gpu", "n", "gpn", "nics", "gbps", "model", "L", "h", "ffn", "heads", "kv", "V", "glu", "seq"),
    *("GBS", "MBS", "TP", "PP", "VP", "CP", "DP", "shard", "prec", "rec", "sp", "step_time_s", "src"),
)
CURVE_COLUMNS = ("system", "ranks", "bytes", "time_us")
BYTE_ORDER_MARK = "\ufeff"  # spreadsheets put it in front
LARGEST = 1e15  # of any figure in a table: products of several stay within what a float holds
ZERO = {"ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 3, "hsdp": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """One published step time. `series` differ in scale alone; a `grid` is one cluster with many layouts."""

    name: str
    source: str
    series: tuple[str, ...]
    grid: tuple[str, ...]
    work: Workload
    machine: Machine
    ranks: int
    seconds: float
    doubt: float  # sigma in ln of what was not published


@dataclass(frozen=True, slots=True)
class Point:
    """Of a curve: seconds of a collective of `size` bytes."""

    system: str
    machine: Machine
    group: Group
    size: float
    seconds: float
    switch: bool  # whether the curve says that NVLink's switch added up
    ring: bool  # or that it was a ring
    op: Op = "all_reduce"


class PublishedError(ValueError):
    """A file of published figures that cannot be read: which row, which column, what is allowed."""


_T = TypeVar("_T")


def rows(text: str) -> list[Row]:
    """Of a table with a line of headings; a row that is too short lacks its last columns."""
    table = csv.DictReader(text.removeprefix(BYTE_ORDER_MARK).splitlines())
    try:
        headings = list(table.fieldnames or ())
        if twice := sorted({name for name in headings if headings.count(name) > 1}):
            raise PublishedError(f"columns that stand there twice: {', '.join(twice):.80}")
        return [{key: value or "" for key, value in row.items() if key} for row in table]
    except csv.Error as error:
        raise PublishedError(f"no table: {error}") from error


def are_curves(table: Sequence[Row]) -> bool:
    return bool(table) and "system" in table[0]


def step_cases(table: Sequence[Row]) -> tuple[list[Case], list[str]]:
    """And which rows are left out, and why."""
    return _read(table, STEP_COLUMNS, _case)


def curve_points(table: Sequence[Row]) -> tuple[list[Point], list[str]]:
    """As for step_cases."""
    return _read(table, CURVE_COLUMNS, _point)


def _read(table: Sequence[Row], wanted: Iterable[str], one: Callable[[Row], _T]) -> tuple[list[_T], list[str]]:
    if not table:
        raise PublishedError("there is no row")
    if missing := [column for column in wanted if column not in table[0]]:
        raise PublishedError(f"no such columns: {', '.join(missing)}; a table of step times or of a curve is wanted")
    found: list[_T] = []
    left_out: list[str] = []
    for line, row in enumerate(table, 2):
        try:
            found.append(one(row))
        except ValueError as error:
            left_out.append(f"line {line}: {error}")
    if not found:
        raise PublishedError(left_out[0])
    return found, left_out


def _case(row: Row) -> Case:
    job, cluster, nodes = documents_of(row)
    ranks = _count(row, "n")
    machine = declared(cluster, nodes)
    assert machine is not None  # every row names its GPU
    work, assumed = read(job, ranks, newer=machine.gpu.newer, exact=False)
    check_dtype(machine.gpu, work.dtype)
    seconds = _number(row, "step_time_s")
    layout = tuple(row[column] for column in ("TP", "PP", "VP", "CP", "shard", "rec", "MBS"))
    return Case(
        name=row["id"],
        source=publication(row["src"]),
        series=(row["src"], row["gpu"], row["model"], row["seq"], row["prec"], row["gbps"], *layout),
        grid=(row["src"], row["gpu"], row["n"], row["prec"]),
        work=work,
        machine=machine,
        ranks=ranks,
        seconds=seconds,
        doubt=hypot(*(each.spread for each in assumed)),
    )


def publication(source: str) -> str:
    """What is left out together: tables, versions and frameworks of one publication are no sources of their own.

    `arXiv:2407.21783v3 Tab.4`, `NVIDIA/dgxc-benchmarking v25.04.02 (MaxText)`: what stands before the first blank.
    """
    first, _, _ = source.strip().partition(" ")
    return re.sub(r"(?<=\d)v\d+$", "", first)


def documents_of(row: Row) -> tuple[doc.JobSpec, doc.ClusterSpec, dict[str, doc.NodeInventory]]:
    """The row as the documents of a job and its cluster."""
    note = row.get("note") or ""
    job = doc.JobSpec(
        model=_model_of(row),
        parallel=_parallel_of(row, note),
        batch=doc.Batch(global_=_count(row, "GBS"), micro=_count(row, "MBS")),
        dtype=row["prec"],
        recompute=row["rec"],
    )
    kind = next((kind for word, kind in _FABRICS if re.search(word, note, re.IGNORECASE)), "infiniband")
    node = doc.Node(
        gpu=row["gpu"], gpus=_count(row, "gpn"), nics=_count(row, "nics"), nic_rate_gbps=_number(row, "gbps")
    )
    return job, doc.ClusterSpec(fabric=doc.Fabric(kind=kind), node=node), _capped(note, row["gpu"])


def _model_of(row: Row) -> doc.Model:
    return doc.Model(
        layers=_count(row, "L"),
        hidden=_count(row, "h"),
        ffn=_count(row, "ffn"),
        gated=row["glu"] == "1",
        heads=_count(row, "heads"),
        kv_heads=_count(row, "kv"),
        vocab=_count(row, "V"),
        seq=_count(row, "seq"),
    )


def _parallel_of(row: Row, note: str) -> doc.Parallel:
    if row["shard"] not in ZERO:
        raise ModelError("shard", row["shard"], ", ".join(ZERO))
    return doc.Parallel(
        tp=_count(row, "TP"),
        pp=_count(row, "PP"),
        vpp=_count(row, "VP"),
        cp=_count(row, "CP"),
        dp=_count(row, "DP"),
        zero=ZERO[row["shard"]],
        shard=_count(row, "gpn") if row["shard"] == "hsdp" else None,  # sharded inside a node, copied across
        sequence_parallel=row["sp"] == "1",
        overlap_tp="TP overlap on" in note,
    )


# What a note or a system's name says of the network; the first that is found decides.
_FABRICS = (
    (r"Omni-?Path", "omnipath"),
    (r"\bEFA\b|p4d|p5", "efa"),
    (r"TCPXO|FasTrak|a3-mega", "fastrak"),
    (r"\bRoCE", "roce"),
    (r"\bTCP\b|sockets?\b|Ethernet", "ethernet"),
    (r"\bIB\b|InfiniBand|NDR|HDR", "infiniband"),
)


def _capped(note: str, name: str) -> dict[str, doc.NodeInventory]:
    """`500 W cap`: a machine whose GPUs run below their power limit."""
    said = re.search(r"(\d+) ?W cap", note)
    if not said:
        return {}
    card = doc.Gpu(power_limit_w=float(said[1]), power_limit_default_w=gpu(name).watts)
    return {"n01": doc.NodeInventory(gpus=(card,))}


# `2x p4de (16xA100, EFA 4x100)`, `DGX-H100 1x8 (NVLS)`, `H100 8x400 IB, 4 nodes`
_PLATFORMS = (
    # pattern, GPU, network, NICs, Gbit/s
    (r"p4de?n?\b", "A100", "efa", 4, 100),
    (r"p5en?\b", "H200", "efa", 16, 200),
    (r"p5\b", "H100", "efa", 32, 100),
    (r"a3-?mega", "H100", "fastrak", 8, 200),
    (r"a3-?ultra", "H200", "roce", 8, 400),
    (r"ND.*H100|DGX-?H100|H100", "H100", "infiniband", 8, 400),
    (r"H200", "H200", "infiniband", 8, 400),
    (r"ND.*A100|DGX-?A100|A100", "A100", "infiniband", 8, 200),
    (r"B200", "B200", "infiniband", 8, 400),
    (r"MI300X", "MI300X", "roce", 8, 400),
    (r"L40S", "L40S", "ethernet", 1, 100),
    (r"4090", "RTX-4090", "ethernet", 1, 100),
    (r"V100", "V100", "infiniband", 4, 100),
)
PER_NODE = 8


def _point(row: Row) -> Point:
    system, ranks = row["system"], _count(row, "ranks")
    machine = machine_of(system)
    nodes = max(1, -(-ranks // machine.gpus))
    said = re.search(r"(?<![\w.])(\d+) ?(?:x(?! ?\d+ ?(?:G|x))|nodes)", system)
    if said and 1 < int(said[1]) <= ranks and ranks % int(said[1]) == 0 and int(said[1]) > nodes:
        nodes = int(said[1])
    return Point(
        system=system,
        machine=machine,
        group=Group(ranks, nodes, ranks // nodes),
        size=_number(row, "bytes"),
        seconds=_number(row, "time_us") * 1e-6,
        switch="NVLS" in system.upper(),
        ring="RING" in system.upper(),
        op=_op(row),
    )


def _op(row: Row) -> Op:
    """As a column says, or the system's name; all-reduce where neither does."""
    said = " ".join((row.get("op", ""), row.get("collective", ""), row["system"])).lower()
    names: tuple[Op, ...] = ("all_gather", "reduce_scatter", "all_to_all")
    return next((name for name in names if re.search(name.replace("_", "[ _-]?"), said)), "all_reduce")


def machine_of(system: str) -> Machine:
    """What a system's name says of its machines."""
    found = next((each for each in _PLATFORMS if re.search(each[0], system, re.IGNORECASE)), None)
    if found is None:
        raise UnknownHardwareError(
            f"no GPU is named by {system!r:.60}", "a platform or GPU, as in `H100 8x400G, 4 nodes`"
        )
    _, name, kind, nics, rate = found
    try:
        card = gpu(re.sub(r"\d+ ?x", " ", system))
    except UnknownHardwareError:  # the platform implies it
        card = gpu(name)
    kind = next((kind for word, kind in _FABRICS if re.search(word, system, re.IGNORECASE)), kind)
    ports = re.search(r"(\d+) ?x ?(\d{2,3})(?: ?G)?(?!\d*x)", system)
    if ports and int(ports[1]) and int(ports[2]) >= 25:
        nics, rate = int(ports[1]), int(ports[2])
    return Machine(card, PER_NODE, float(nics), rate * 1e9, FABRICS[kind])


def _count(row: Row, column: str) -> int:
    value = _number(row, column)
    if value != int(value):
        raise ModelError(column, row[column], "a whole number from 1")
    return int(value)


def _number(row: Row, column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise ModelError(column, row[column], "a number") from None
    if not 1 / LARGEST <= value <= LARGEST:
        raise ModelError(column, row[column], f"a number above 0, at most {LARGEST:g}")
    return value
