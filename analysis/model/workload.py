"""What a job does in a step: its transformer, how it is divided over the ranks, and what is assumed where nobody said.

Every error names the key of the job's document, what stands there and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

from diagnosd.analysis.model.collectives import Group
from diagnosd.analysis.model.flops import Convention, Recompute, Transformer
from diagnosd.documents import DocumentError, JobSpec, Model, Parallel

Dtype = Literal["bf16", "fp16", "fp8", "fp32", "tf32"]
DTYPES = get_args(Dtype)
RECOMPUTE = get_args(Recompute)
ORDER = "tp-cp-ep-dp-pp"
SCHEDULES = ("1f1b", "interleaved", "gpipe")  # of the bubble that the model knows
GRAD_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOST = 1e24  # of any count that a document gives: products of several stay within what a float holds
UNLIKE = 2.0  # parameters are so many times more or fewer than those of the layers: one of the two is a slip


class ModelError(DocumentError):
    """What the model cannot work with: the key, what stands there, and what is allowed."""

    def __init__(self, key: str, found: object, allowed: str) -> None:
        self.key = key
        super().__init__(f"{key}: found {found!r:.60}; allowed is {allowed}")


class TooLittleKnownError(ValueError):
    """No expectation can be made: the keys that are missing stand in the message."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks are divided. World = tp x cp x dp x pp; `zero` 3 is FSDP, over `shard` of the dp x cp ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    shard: int | None = None
    order: str = ORDER

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same layers and sum up their gradients."""
        return self.dp * self.cp

    @property
    def sharded(self) -> int:
        return self.shard or self.replicas

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts and sum up their gradients."""
        return max(self.world // (self.etp * self.ep * self.pp), 1)

    def stride(self, dimension: str) -> int:
        """Ranks between neighbours of this dimension."""
        inner = self.order.split("-")
        return prod(getattr(self, name) for name in inner[: inner.index(dimension)] if name not in ("ep", "etp"))

    @property
    def replica_stride(self) -> int:
        """Ranks between neighbours that sum up the same gradients."""
        return min((self.stride(name) for name in ("cp", "dp") if getattr(self, name) > 1), default=1)

    def group(self, dimension: str, gpus: int) -> Group:
        """How a group of this dimension lies on nodes of so many GPUs. `gradients`: those that sum up their gradients,
        with FSDP those that share out the parameters, and then `copies` those that hold the same share.
        """
        if dimension == "gradients":
            ranks = self.sharded if self.zero == 3 else self.replicas
            return Group.spread(ranks, self.replica_stride, gpus)
        if dimension == "copies":
            return Group.spread(self.replicas // self.sharded, self.replica_stride * self.sharded, gpus)
        if dimension == "expert_gradients":
            return Group.spread(self.expert_replicas, self.etp * self.ep, gpus)
        if dimension == "ep":
            return Group.spread(self.ep, self.etp, gpus)
        return Group.spread(getattr(self, dimension), self.stride(dimension), gpus)


@dataclass(frozen=True, slots=True)
class Workload:
    model: Transformer
    layout: Layout
    batch: int  # sequences a step, over all ranks
    micro: int  # sequences of a micro-batch
    dtype: str = "bf16"
    grad_bytes: int = 4
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    overlap_tensor: bool = False
    overlap_gradients: bool = False
    params: float = 0.0  # as declared; else the transformer's
    flops: float = 0.0  # of training on one sample, as declared; else the transformer's

    @property
    def micro_batches(self) -> float:
        return self.batch / (self.layout.dp * self.micro)

    def training(self, convention: Convention) -> float:
        """Model FLOPs of a step."""
        return self.batch * (self.flops or self.model.training(convention))

    @property
    def tokens(self) -> int:
        return self.batch * self.model.seq

    @property
    def rank_params(self) -> float:
        """Parameters that one rank works on, before they are sharded."""
        return self.dense_params + self.expert_params

    @property
    def dense_params(self) -> float:
        """Of a rank, those that are not experts'."""
        whole = self.params or self.model.params
        return max(whole - self._experts, 0.0) / (self.layout.tp * self.layout.pp)

    @property
    def expert_params(self) -> float:
        """Of a rank."""
        return self._experts / (self.layout.ep * self.layout.etp * self.layout.pp)

    @property
    def _experts(self) -> float:
        return self.model.layers * self.model.ffn_params * self.model.experts


@dataclass(frozen=True, slots=True)
class Assumed:
    """A key that nobody gave, what is taken for it, and how far the step may be from what it is then (in ln)."""

    key: str
    value: str
    spread: float


def read(
    job: JobSpec, world: int | None = None, *, newer: bool = True, exact: bool = True
) -> tuple[Workload, tuple[Assumed, ...]]:
    """The workload of a job's document, on `world` ranks where they are known. `newer`: Hopper or later, where
    frameworks overlap the gradients' reduction unless told otherwise. Not `exact`: a published batch may be rounded.
    """
    assumed: list[Assumed] = []
    model = _transformer(job.model or Model(), assumed)
    parallel = job.parallel or Parallel()
    layout = _layout(parallel, world, model)
    work = _batched(job, layout, model, assumed, exact=exact)
    grads = _grad_bytes(job, layout, assumed)
    if job.data and job.data.bytes_per_sample is not None:
        _positive("data.bytes_per_sample", job.data.bytes_per_sample)
    overlap = _overlaps(job, layout, assumed, newer=newer)
    sequence = parallel.sequence_parallel
    if sequence is None:
        sequence = newer and layout.tp > 1
        if layout.tp > 1:
            assumed.append(Assumed("parallel.sequence_parallel", str(sequence).lower(), 0.03))
    if layout.pp > 1 and parallel.schedule not in (None, *SCHEDULES):
        assumed.append(Assumed("parallel.schedule", f"{parallel.schedule}, with a bubble as of 1f1b", 0.05))
    if parallel.overlap_tp is None and layout.tp > 1:
        assumed.append(Assumed("parallel.overlap_tp", "false", 0.05))
    return replace(
        work,
        grad_bytes=grads,
        sequence_parallel=sequence,
        overlap_tensor=bool(parallel.overlap_tp),
        overlap_gradients=overlap,
        params=_params(job.model or Model(), model),
        flops=float(job.model.flops_per_sample or 0) if job.model else 0.0,
    ), tuple(assumed)


def _overlaps(job: JobSpec, layout: Layout, assumed: list[Assumed], *, newer: bool) -> bool:
    said = job.parallel.overlap_grad if job.parallel else None
    if said is not None:
        return said
    found = newer or layout.zero >= 2 or not _like_megatron(job)
    if layout.replicas > 1:
        assumed.append(Assumed("parallel.overlap_grad", str(found).lower(), 0.01 if newer else 0.02))
    return found


def _like_megatron(job: JobSpec) -> bool:
    """Whether gradients may come after the backward, as in Megatron of 2021: others' data parallelism overlaps them."""
    transformer = not (job.model and job.model.flops_per_sample)
    return transformer and (job.framework is None or "megatron" in job.framework.lower())


def _params(said: Model, model: Transformer) -> float:
    """As declared; 0 where nobody did. A transformer's must be about those of its layers."""
    if said.params is None:
        return 0.0
    _positive("model.params", said.params)
    if not said.flops_per_sample and not 1 / UNLIKE < said.params / model.params < UNLIKE:
        raise ModelError("model.params", said.params, f"about {model.params:.3g}, as the layers have")
    return float(said.params)


def _transformer(said: Model, assumed: list[Assumed]) -> Transformer:
    if said.flops_per_sample is not None:
        _positive("model.flops_per_sample", said.flops_per_sample)
        if said.layers is None:
            assumed.append(Assumed("model", "matrix products of flops_per_sample, and nothing else", 0.25))
            return Transformer(1, 1, 1, 1, 1, 0, said.seq or 1)
    missing = [f"model.{key}" for key in ("layers", "hidden", "seq") if getattr(said, key) is None]
    if missing:
        raise TooLittleKnownError(f"no step time can be expected without {', '.join(missing)}")
    for key in ("layers", "hidden", "seq", "ffn", "heads", "kv_heads", "vocab"):
        if getattr(said, key) is not None:
            _positive(f"model.{key}", getattr(said, key))
    layers, hidden, seq = int(said.layers or 0), int(said.hidden or 0), int(said.seq or 0)
    heads = said.heads or max(hidden // 128, 1)
    kv_heads = said.kv_heads or heads
    if said.kv_heads is None:
        assumed.append(Assumed("model.kv_heads", f"{kv_heads}, as many as heads", 0.02))
    if heads % kv_heads:
        raise ModelError("model.kv_heads", kv_heads, f"a divisor of heads, which is {heads}")
    gated, ffn = said.gated, said.ffn
    if ffn is None:
        ffn, gated = 4 * hidden, bool(gated)
        assumed.append(Assumed("model.ffn", f"{ffn}, four times hidden", 0.10))
    elif gated is None:
        gated = ffn < 4 * hidden
        assumed.append(Assumed("model.gated", str(gated).lower(), 0.15))
    if said.vocab is None:
        assumed.append(Assumed("model.vocab", "none: the output layer is left out", 0.05))
    if said.experts:
        _positive("model.experts", said.experts)
    experts, active = said.experts or 0, said.experts_active or 0
    if experts and not 0 < active <= experts:
        raise ModelError("model.experts_active", said.experts_active, f"1 to {experts}, the number of experts")
    return Transformer(layers, hidden, ffn, heads, kv_heads, said.vocab or 0, seq, bool(gated), experts, active)


def _layout(said: Parallel, world: int | None, model: Transformer) -> Layout:
    sizes = {name: getattr(said, name) or 1 for name in ("tp", "cp", "pp", "vpp", "ep", "etp")}
    for name in ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "shard", "replicate"):
        if getattr(said, name) is not None:
            _positive(f"parallel.{name}", getattr(said, name))
    fixed = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if world is not None and world % fixed:
        raise ModelError("parallel", f"tp x cp x pp = {fixed}", f"a divisor of the {world} ranks")
    dp = said.dp or (world // fixed if world else 1)
    if world is not None and fixed * dp != world:
        product = f"tp x cp x dp x pp = {fixed * dp}"
        raise ModelError("parallel.dp", said.dp, f"{world // fixed}: {product} must be the {world} ranks")
    zero = said.zero if said.zero is not None else (3 if said.shard else 0)
    if zero not in range(4):
        raise ModelError("parallel.zero", zero, "0 to 3; 3 is FSDP")
    if sizes["pp"] > model.layers:
        raise ModelError("parallel.pp", sizes["pp"], f"at most the model's {model.layers} layers")
    if sizes["vpp"] > 1 and sizes["pp"] * sizes["vpp"] > model.layers + 2:  # the two: embedding and head
        raise ModelError("parallel.vpp", sizes["vpp"], f"with pp at most the model's {model.layers} layers")
    if model.heads % sizes["tp"]:
        raise ModelError("parallel.tp", sizes["tp"], f"a divisor of the model's {model.heads} heads")
    order = said.order or ORDER
    if sorted(order.split("-")) not in (sorted(ORDER.split("-")), ["cp", "dp", "pp", "tp"]):
        raise ModelError("parallel.order", order, f"the dimensions of {ORDER} in some order")
    if said.replicate and (dp * sizes["cp"]) % said.replicate:
        raise ModelError("parallel.replicate", said.replicate, f"a divisor of dp x cp = {dp * sizes['cp']}")
    shard = said.shard or (dp * sizes["cp"] // said.replicate if said.replicate else None)
    if shard and (dp * sizes["cp"]) % shard:
        raise ModelError("parallel.shard", shard, f"a divisor of dp x cp = {dp * sizes['cp']}")
    stage = dp * sizes["cp"] * sizes["tp"]
    if sizes["ep"] > 1 and stage % (sizes["ep"] * sizes["etp"]):
        raise ModelError("parallel.ep", sizes["ep"], f"with etp a divisor of tp x cp x dp = {stage}")
    return Layout(dp=dp, zero=zero, shard=shard, order=order, **sizes)


def _batched(job: JobSpec, layout: Layout, model: Transformer, assumed: list[Assumed], *, exact: bool) -> Workload:
    said = job.batch
    if said is None or said.global_ is None:
        raise TooLittleKnownError("no step time can be expected without batch.global")
    _positive("batch.global", said.global_)
    micro = said.micro
    if micro is None:
        micro = 1
        assumed.append(Assumed("batch.micro", "1", 0.05))
    _positive("batch.micro", micro)
    if exact and said.global_ % (layout.dp * micro):
        raise ModelError("batch.global", said.global_, f"a multiple of dp x micro = {layout.dp} x {micro}")
    if job.dtype is None:
        assumed.append(Assumed("dtype", "bf16", 0.10))
    if job.recompute is None:
        assumed.append(Assumed("recompute", "none", 0.15))
    dtype = _one_of("dtype", job.dtype or "bf16", DTYPES)
    recompute = _one_of("recompute", job.recompute or "none", RECOMPUTE)
    return Workload(model, layout, said.global_, micro, dtype, recompute=recompute)  # type: ignore[arg-type]


def _grad_bytes(job: JobSpec, layout: Layout, assumed: list[Assumed]) -> int:
    if job.grad_dtype is not None:
        return GRAD_BYTES[_one_of("grad_dtype", job.grad_dtype, GRAD_BYTES)]
    size = 2 if layout.zero >= 2 else 4  # FSDP reduces in 16 bits, Megatron in 32
    if layout.replicas > 1:
        assumed.append(Assumed("grad_dtype", "bf16" if size == 2 else "fp32", 0.01))
    return size


def _positive(key: str, value: float) -> None:
    if not 0 < value <= MOST:
        raise ModelError(key, value, "a number above 0" if not value > MOST else f"at most {MOST:g}")


def _one_of(key: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ModelError(key, value, ", ".join(allowed))
    return value
