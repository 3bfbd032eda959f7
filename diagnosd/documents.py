"""The contract's JSON documents: what a job is, what a machine is, what the operators declare. Bytes in, bytes out.

Every key may be missing, which means unknown, and so does null. Keys that are not known here are ignored, except in a
`cluster.toml`, which a person writes: there a key that nobody reads is a spelling mistake.
"""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Beyond these stands a slip, or infinity: no port has a petabit a second, no node a million of anything.
_Rate = Annotated[float, Meta(gt=0, le=1e6)]  # Gbit/s
_AtLeastOne = Annotated[float, Meta(ge=1, le=1e6)]
_Price = Annotated[float, Meta(ge=0, le=1e9)]  # of an hour, in any currency
_Count = Annotated[int, Meta(ge=0, le=10**6)]


class DocumentError(ValueError):
    """A document that cannot be understood: which key, what was found there, and what is allowed."""


class _Document(Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Model(_Document, frozen=True):
    params: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    gated: bool | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    seq: int | None = None  # tokens
    experts: int | None = None
    experts_active: int | None = None
    flops_per_sample: float | None = None  # overrides the transformer formula


class Batch(_Document, frozen=True):
    global_: int | None = msgspec.field(default=None, name="global")  # samples a step, over all ranks
    micro: int | None = None


class Parallel(_Document, frozen=True):
    order: str | None = None  # dimensions from the fastest-varying to the slowest: tp-cp-ep-dp-pp
    tp: int | None = None
    cp: int | None = None
    dp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    shard: int | None = None
    replicate: int | None = None
    zero: int | None = None  # 0 to 3; 3 is FSDP
    overlap_grad: bool | None = None
    overlap_tp: bool | None = None  # tensor-parallel communication beside the matrix products
    sequence_parallel: bool | None = None
    schedule: str | None = None


class Loading(_Document, frozen=True):
    bytes_per_sample: float | None = None
    path: str | None = None
    workers: int | None = None
    prefetch: int | None = None


class Checkpoint(_Document, frozen=True):
    every_steps: int | None = None
    path: str | None = None


class Rank(_Document, frozen=True):
    rank: int
    host: str | None = None
    local_rank: int | None = None
    gpu: str | None = None  # uuid


class JobSpec(_Document, frozen=True):
    name: str | None = None
    framework: str | None = None
    model: Model | None = None
    batch: Batch | None = None
    parallel: Parallel | None = None
    dtype: str | None = None
    grad_dtype: str | None = None
    recompute: str | None = None
    data: Loading | None = None
    checkpoint: Checkpoint | None = None
    ranks: tuple[Rank, ...] | None = None


class Gpu(_Document, frozen=True):
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    pci: str | None = None
    numa: int | None = None
    nvlinks: int | None = None
    nvlinks_active: int | None = None
    nvlink_gbytes_per_s: float | None = None  # as NVML reports it, raw
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gen_slot: int | None = None  # at most, of the slowest link of its slot and above: a ceiling, not a fault
    pcie_width_slot: int | None = None
    pcie_gen_path: int | None = None  # now, of the slowest link above its own
    pcie_width_path: int | None = None
    pcie_busy: bool | None = None  # was working when the PCIe figures were read: an idle GPU lowers them
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    mig: bool | None = None
    serial: str | None = None
    vbios: str | None = None


class Gid(_Document, frozen=True):
    index: int | None = None
    type: str | None = None


class Peer(_Document, frozen=True):
    switch: str | None = None
    port: str | None = None
    via: str | None = None  # lldp, declared, ...


class Member(_Document, frozen=True):
    netdev: str | None = None
    state: str | None = None  # a bond stays up, and at half its rate, when one of two members is down


class Nic(_Document, frozen=True):
    device: str | None = None  # missing for a NIC without an RDMA device
    port: int | None = None
    netdev: str | None = None
    link_layer: str | None = None
    state: str | None = None
    phys_state: str | None = None
    rate_gbps: float | None = None
    width: int | None = None
    speed: str | None = None
    mtu: int | None = None
    pci: str | None = None
    numa: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gen_slot: int | None = None  # as of a GPU
    pcie_width_slot: int | None = None
    pcie_gen_path: int | None = None
    pcie_width_path: int | None = None
    firmware: str | None = None
    role: str | None = None  # compute, storage, management
    driver: str | None = None
    node_guid: str | None = None
    port_guid: str | None = None
    lid: int | None = None
    sm_lid: int | None = None
    gids: tuple[Gid, ...] | None = None
    rail: int | None = None
    peer: Peer | None = None
    netns: str | None = None  # "other": held by another network namespace
    netdev_state: str | None = None  # of its interface, where it has an RDMA device too: ACTIVE, DOWN
    addresses: tuple[str, ...] | None = None  # of its netdev
    physfn: str | None = None  # PCI address of the physical function that this one is a virtual one of
    members: tuple[Member, ...] | None = None  # of its netdev, where that is a bond


class NvFabric(_Document, frozen=True):
    state: str | None = None
    status: str | None = None
    cluster_uuid: str | None = None
    clique: int | None = None
    health: str | None = None


class Software(_Document, frozen=True):
    kernel: str | None = None
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    ofed: str | None = None
    peermem: bool | None = None
    dmabuf: bool | None = None
    acs: str | None = None
    iommu: str | None = None
    persistence: bool | None = None


class Cpu(_Document, frozen=True):
    cores: int | None = None
    sockets: int | None = None


class NodeInventory(_Document, frozen=True):
    gpus: tuple[Gpu, ...] | None = None
    nics: tuple[Nic, ...] | None = None
    affinity: dict[str, dict[str, str]] | None = None  # words of `nvidia-smi topo -m`
    fabric: NvFabric | None = None
    software: Software | None = None
    boot_id: str | None = None
    cpu: Cpu | None = None
    memory_bytes: int | None = None


class Fabric(_Document, frozen=True):
    kind: str | None = None
    rate_gbps: _Rate | None = None  # of one port
    oversubscription: _AtLeastOne | None = None
    rail_optimized: bool | None = None
    sharp: bool | None = None
    priority: _Count | None = None  # traffic class of the training traffic
    interface: str | tuple[str, ...] | None = None  # the network interfaces that belong to the fabric

    @property
    def interfaces(self) -> tuple[str, ...]:
        return (self.interface,) if isinstance(self.interface, str) else self.interface or ()


class Node(_Document, frozen=True):
    gpus: _Count | None = None
    gpu: str | None = None  # H100-SXM, ...
    nics: _Count | None = None
    nic_rate_gbps: _Rate | None = None
    nvlinks: _Count | None = None
    pcie_gen: _Count | None = None


class ClusterSpec(_Document, frozen=True):
    name: str | None = None
    fabric: Fabric | None = None
    node: Node | None = None
    racks: dict[str, tuple[str, ...]] | None = None
    leaves: dict[str, tuple[str, ...]] | None = None  # hosts, or HOST/DEVICE where each rail has its own leaf
    storage: dict[str, str] | None = None  # path to the name of the system behind it
    price_per_gpu_hour: _Price | None = None
    currency: str | None = None


FABRIC_KINDS = ("infiniband", "roce", "efa", "ethernet", "fastrak", "omnipath")


class Plan(_Document, frozen=True):
    """A job that is not running yet, on machines that it may get: a `JOB.toml`."""

    job: JobSpec | None = None
    cluster: ClusterSpec | None = None
    nodes: Annotated[int, Meta(ge=1, le=10**6)] | None = None


_D = TypeVar("_D", bound=_Document)


def decode_job(text: bytes | str) -> JobSpec:
    return _decode(text, JobSpec)


def decode_node(text: bytes | str) -> NodeInventory:
    return _decode(text, NodeInventory)


def decode_cluster(text: bytes | str) -> ClusterSpec:
    return _decode(text, ClusterSpec)


def encode(document: JobSpec | NodeInventory | ClusterSpec) -> bytes:
    """The document's JSON, unknown keys left out, in the order of the contract."""
    return msgspec.json.encode(document)


def _decode(text: bytes | str, kind: type[_D]) -> _D:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise DocumentError(f"{kind.__name__}: {error}") from error


def unite(parts: Iterable[tuple[int, JobSpec]]) -> JobSpec:
    """One job from the parts that its nodes sent, each with its time: ranks by number, other keys by latest time."""
    whole = JobSpec()
    for _, part in sorted(parts, key=lambda timed: timed[0]):
        whole = _over(whole, part)
    return whole


def _over(old: _D, new: _D) -> _D:
    """What `new` knows, and what only `old` knows."""
    known: dict[str, Any] = {}
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, _Document) and isinstance(after, _Document):
            known[name] = _over(before, after)
        elif name == "ranks":
            known[name] = _by_number((*(before or ()), *(after or ())))
        else:
            known[name] = before if after is None else after
    return type(old)(**known)


def _by_number(ranks: tuple[Rank, ...]) -> tuple[Rank, ...] | None:
    united: dict[int, Rank] = {}
    for rank in ranks:
        united[rank.rank] = _over(united[rank.rank], rank) if rank.rank in united else rank
    return tuple(united[number] for number in sorted(united)) or None


def cluster_from_toml(text: bytes, name: str) -> ClusterSpec:
    """What the operators declare. DocumentError names the file, the key, what stands there and what is allowed."""
    spec = _from_toml(text, name, ClusterSpec)
    _check_fabric(spec, f"{name}: ")
    return spec


def plan_from_toml(text: bytes, name: str) -> Plan:
    """A job and its machines, as for cluster_from_toml; the ranks' places are not part of a plan."""
    plan = _from_toml(text, name, Plan)
    if plan.cluster:
        _check_fabric(plan.cluster, f"{name}: cluster.")
    return plan


def _check_fabric(spec: ClusterSpec, above: str) -> None:
    if spec.fabric and spec.fabric.kind not in (None, *FABRIC_KINDS):
        raise DocumentError(f"{above}fabric.kind: found {spec.fabric.kind!r}; allowed are {', '.join(FABRIC_KINDS)}")


def _from_toml(text: bytes, name: str, kind: type[_D]) -> _D:
    try:
        table = tomllib.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{name}: not TOML: {error}") from error
    try:
        _check_keys(table, kind, "")
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise DocumentError(f"{name}: {_explained(error, table)}") from error
    except DocumentError as error:
        raise DocumentError(f"{name}: {error}") from error


_TABLES: Mapping[str, type[_Document]] = {
    "fabric": Fabric,
    "node": Node,
    "job": JobSpec,
    "cluster": ClusterSpec,
    "model": Model,
    "batch": Batch,
    "parallel": Parallel,
    "data": Loading,
    "checkpoint": Checkpoint,
}


def _check_keys(table: dict[str, Any], kind: type[_Document], above: str) -> None:
    allowed = [key for key in kind.__struct_encode_fields__ if key != "ranks"]
    for key, value in table.items():
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            hint = f" (do you mean {near[0]}?)" if near else ""
            raise DocumentError(f"{above}{plainly(key)}: no such key{hint}; allowed are {', '.join(allowed)}")
        if key in _TABLES and isinstance(value, dict):
            _check_keys(value, _TABLES[key], f"{above}{key}.")


def plainly(key: str) -> str:
    return key if key.isprintable() else repr(key)


# msgspec says: Expected `float | null`, got `str` - at `$.fabric.rate_gbps`
_COMPLAINT = re.compile(r"Expected (?P<want>.*?)(?:, got `\w+`)?(?: - at `\$\.?(?P<path>.*)`)?")
_WORDS = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false", "array": "a list"}
_EXAMPLES = {
    "nodes": "a whole number from 1",
    "fabric": "a table: [fabric]",
    "node": "a table: [node]",
    "racks": 'a list of hosts for each rack: r1 = ["n01", "n02"]',
    "leaves": 'a list of hosts, or of HOST/DEVICE, for each leaf switch: leaf1 = ["n01", "n02/mlx5_3"]',
    "job": "a table: [job]",
    "cluster": "a table: [cluster]",
    "storage": 'the system behind each path: "/data" = "lustre1"',
}


def _explained(error: msgspec.ValidationError, table: dict[str, Any]) -> str:
    said = _COMPLAINT.fullmatch(str(error))
    if not said:
        return str(error)
    path = (said["path"] or "").partition("[")[0]
    found: Any = table
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else found
    allowed = _EXAMPLES.get(path.removeprefix("cluster.")) or _plain(said["want"])
    return f"{path}: found {found!r:.60}; allowed is {allowed}"


def _plain(want: str) -> str:
    words = [_WORDS.get(word, word) for word in want.replace("`", "").replace(" | null", "").split()]
    return " ".join(words).replace(" | ", " or ")
