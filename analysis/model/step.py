"""Seconds of a step, term by term: computing, what communication adds to it, the bubble, and what is fixed.

t_micro = layers x (products + attention + elementwise + exposed tensor-parallel) + head + sends
t_step  = t_micro x (m + (p - 1) / v) + exposed gradients + optimizer + fixed            (notes/model.md 2.8)

Everything is a float, or an array over many machines: rank-wise clocks and rates broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diagnosd.analysis.model import traffic
from diagnosd.analysis.model.collectives import latency
from diagnosd.analysis.model.constants import SHIPPED, Constants
from diagnosd.analysis.model.flops import activation_bytes, cast_bytes
from diagnosd.analysis.model.machine import Machine, Quantity
from diagnosd.analysis.model.workload import Workload

# Of the bf16 peak, what fused attention reaches, forward and backward, on the half that is not masked: FlashAttention-2
# 0.3 to 0.4 of an H100 and 0.5 of an A100, cuDNN and FlashAttention-3 up to 0.5 of an H100, first kernels 0.3. With
# 0.25 to 0.55, sources that were left out have a median of 4 to 5 % and a 90th percentile of 10 to 19 %.
ATTENTION = 0.35
# Matrix products of attention: two forward; five backward, for the scores are computed again.
ATTENTION_PASSES = 3.5
# Each byte that is stored for the backward is written and read, and so is its gradient. 3 or 5 changes little.
ELEMENTWISE_PASSES = 4
# Of a pipeline's sends, what is not hidden (notes/model.md 2.8; 0 or 1 changes published step times by 1 %); of the
# backward that gradients overlap, what they can use: the first bucket must fill (0.6 to 1 changes nothing published).
SENDS_EXPOSED, BACKWARD_USED = 0.5, 0.9
# Bytes a parameter that the optimizer reads and writes: gradient, master, two moments, and the copy in 16 bits.
OPTIMIZER_BYTES = 30
BACKWARD = 2 / 3  # of a micro-batch

# How uncertain a term is beside computing: the priors of notes/model.md 5.4, as multiples of that of computing. Of
# `fixed` no more is known than 10 to 200 ms (2.6): steps of a second and less have wide intervals.
SPREADS: Mapping[str, float] = {
    "products": 1.0,
    "attention": 1.5,
    "elementwise": 1.5,
    "tensor": 1.7,
    "context": 3.3,
    "experts": 3.3,
    "sends": 3.3,
    "bubble": 0.33,
    "gradients": 3.3,
    "optimizer": 1.7,
    "fixed": 6.0,
}
COMPUTING = ("products", "attention", "elementwise")  # their errors have one cause: they add up, the others are apart


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds a step of each term that is not zero."""

    terms: Mapping[str, Quantity]
    moving: Quantity  # s that gradients and parameters are on the wire, hidden or not
    hides: Quantity  # s of computing behind which they can hide

    @property
    def total(self) -> Quantity:
        return sum(self.terms.values(), np.float64(0.0))


def step(work: Workload, machine: Machine, constants: Constants = SHIPPED) -> Step:
    layout, m = work.layout, work.micro_batches
    micro = _micro_batch(work, machine, constants)
    seconds = sum(micro.values(), np.float64(0.0))
    bubble = seconds * (layout.pp - 1) / layout.vpp
    moving, hides = _gradients(work, machine), _window(work, seconds, seconds * m + bubble)
    terms: dict[str, Quantity] = {name: value * m for name, value in micro.items()}
    terms["bubble"] = bubble
    terms["gradients"] = _exposed(work, moving, hides, constants)
    terms["optimizer"] = OPTIMIZER_BYTES * _optimized(work) / machine.gpu.hbm
    terms["fixed"] = np.float64(0.0 if work.flops else constants.fixed)  # it was fitted on transformers alone
    return Step({name: value for name, value in terms.items() if np.any(value)}, moving, hides)


def _micro_batch(work: Workload, machine: Machine, constants: Constants) -> dict[str, Quantity]:
    """Seconds of one micro-batch, forward and backward, on the stage for which all others wait."""
    layer = {**_layer(work, machine, constants), **_between(work, machine)}
    layer["tensor"] = _tensor(work, machine) * (constants.tensor_exposed if work.overlap_tensor else 1.0)
    layers, head = work.model.layers / work.layout.pp, _head(work, machine, constants)
    if _is_balanced(work):  # it has a layer more than the first and the last stage, or it is the last, with the head
        layers = (work.model.layers + 2) / work.layout.pp
        head = np.maximum(head - sum(layer.values(), np.float64(0.0)), 0.0)
    micro = {name: value * layers for name, value in layer.items()}
    micro["products"] = micro["products"] + head
    if work.flops:  # declared: whatever the model is, these are its products
        ranks = work.layout.tp * work.layout.cp * work.layout.pp
        micro["products"] = work.flops * work.micro / ranks / _product_rate(work.dtype, machine, constants)
        micro["attention"] = np.float64(0.0)
    micro["sends"] = _sends(work, machine) * SENDS_EXPOSED
    return micro


def _is_balanced(work: Workload) -> bool:
    """Whether embedding and head count as a layer each where the pipeline is cut, as Llama 3's authors cut theirs: a
    layer fewer on the first and the last stage. Elsewhere a stage has the mean, for frameworks that cut by weight give
    the one with the head fewer layers (BLOOM's 78 over 12).
    """
    layers, stages = work.model.layers, work.layout.pp
    return layers % stages > 0 and (layers + 2) % (stages * work.layout.vpp) == 0


def variance(parts: Mapping[str, float], spread: float) -> float:
    """Of ln(step), from its terms: computing errs as one, the rest independently."""
    total = sum(parts.values())
    together = sum(SPREADS[name] * parts.get(name, 0.0) for name in COMPUTING)
    apart = [SPREADS[name] * value for name, value in parts.items() if name not in COMPUTING]
    return spread**2 * (together**2 + sum(value**2 for value in apart)) / total**2


# -- computing ---------------------------------------------------------------------------------------------------------


def _tokens(work: Workload) -> float:
    """Of a micro-batch, on one rank of a context-parallel group."""
    return work.micro * work.model.seq / work.layout.cp


def _product_rate(dtype: str, machine: Machine, constants: Constants) -> Quantity:
    reachable = machine.gpu.reachable(dtype) or machine.gpu.reachable("bf16") or 0.0
    slower = {"fp32": 1 / 16, "tf32": 1 / 2}.get(dtype, 1.0)
    return reachable * slower * constants.products * machine.clock


def _layer(work: Workload, machine: Machine, constants: Constants) -> dict[str, Quantity]:
    """Seconds of one layer and micro-batch, forward and backward, on one rank."""
    model, tp, tokens = work.model, work.layout.tp, _tokens(work)
    again = 4 / 3 if work.recompute == "full" else 1.0
    products = 3 * again * 2 * tokens * model.active_params / tp
    passes = ATTENTION_PASSES + (work.recompute != "none")
    scores = passes * model.scores("causal") * tokens / model.seq / tp
    stored = tokens * activation_bytes(model, tp, sequence_parallel=work.sequence_parallel or tp == 1)
    moved = ELEMENTWISE_PASSES * again * stored
    if work.dtype == "fp8":
        moved += tokens * cast_bytes(model) / tp
    return {
        "products": products / _product_rate(work.dtype, machine, constants),
        "attention": scores / (machine.gpu.bf16 * ATTENTION * machine.clock),
        "elementwise": np.float64(moved / machine.gpu.hbm),
    }


def _head(work: Workload, machine: Machine, constants: Constants) -> Quantity:
    """The output layer stays in 16 bits."""
    per_token = 3 * work.model.head / work.model.seq / work.layout.tp
    dtype = "bf16" if work.dtype == "fp8" else work.dtype
    return per_token * _tokens(work) / _product_rate(dtype, machine, constants)


def _optimized(work: Workload) -> float:
    layout = work.layout
    if not layout.zero:
        return work.rank_params
    return work.dense_params / layout.sharded + work.expert_params / min(layout.sharded, layout.expert_replicas)


# -- communication -----------------------------------------------------------------------------------------------------


def _tensor(work: Workload, machine: Machine) -> Quantity:
    """All-reduces of one layer and micro-batch, or as many reduce-scatters and all-gathers."""
    if work.layout.tp == 1:
        return np.float64(0.0)
    group = work.layout.group("tp", machine.joined)
    size, rate = traffic.boundary(work), machine.ring_rate(group)
    alpha = latency("ring", group, plugin=machine.fabric.plugin)
    ramp = 2 * np.sqrt(machine.depth(group) * alpha * size / rate)
    passes = 6 if work.recompute == "full" else 4
    return passes * (alpha + ramp + 2 * (group.ranks - 1) / group.ranks * size / rate)


def _between(work: Workload, machine: Machine) -> dict[str, Quantity]:
    """What context and expert parallelism add to a layer and micro-batch."""
    calls = work.model.layers / work.layout.pp * work.micro_batches
    found: dict[str, Quantity] = {"context": np.float64(0.0), "experts": np.float64(0.0)}
    if work.layout.ep > 1 and work.model.experts:
        group = work.layout.group("ep", machine.joined)
        sent = traffic.experts(work) / calls
        outside = traffic.all_to_all_into_network(sent, group)
        found["experts"] = np.maximum((sent - outside) / machine.inside, _over(outside, machine))
    if work.layout.cp > 1:  # a ring beside the attention that uses what came last: seen where it takes longer
        group = work.layout.group("cp", machine.joined)
        ring = traffic.context(work) / calls / machine.ring_rate(group)
        passes = ATTENTION_PASSES * work.model.scores("causal") * _tokens(work) / work.model.seq / work.layout.tp
        found["context"] = np.maximum(ring - passes / (machine.gpu.bf16 * ATTENTION * machine.clock), 0.0)
    return found


def _over(sent: float, machine: Machine) -> Quantity:
    """Seconds that a GPU's share of the NICs takes for so many bytes."""
    return sent / (machine.injection / machine.gpus) if sent else np.float64(0.0)


def _sends(work: Workload, machine: Machine) -> Quantity:
    layout = work.layout
    if layout.pp == 1:
        return np.float64(0.0)
    sent = traffic.pipeline(work) / work.micro_batches
    between_nodes = layout.stride("pp") >= machine.joined
    return sent / (machine.injection / machine.gpus if between_nodes else machine.inside)


def _gradients(work: Workload, machine: Machine) -> Quantity:
    """Seconds a step that gradients and parameters take on the wire, hidden or not."""
    layout = work.layout
    seconds: Quantity = np.float64(0.0)
    for dimension, sent in traffic.sums(work).items():
        group = layout.group(dimension, machine.joined)
        rate = machine.all_reduce_rate(group) if layout.zero == 0 else machine.ring_rate(group)
        seconds = seconds + sent / rate
    if layout.zero == 3 and layout.replicas > 1:
        shard = layout.group("gradients", machine.joined)
        calls = 3 * work.model.layers / layout.pp * traffic.gathers(work)
        seconds = seconds + calls * latency("ring", shard, op="all_gather", plugin=machine.fabric.plugin)
    return seconds


def _window(work: Workload, per_micro: Quantity, busy: Quantity) -> Quantity:
    """Computing behind which gradients can be reduced: the backward of the last micro-batch; of an interleaved
    pipeline all chunks but the last, over its last p micro-batches; with ZeRO-2, which reduces in each, every backward;
    with FSDP all of it.
    """
    layout = work.layout
    if layout.zero == 3:
        return busy
    chunks = max(1.0, layout.pp * (layout.vpp - 1) / layout.vpp)
    times = traffic.gathers(work) if layout.zero == 2 else 1.0
    return per_micro * BACKWARD * chunks * times


def usable(work: Workload) -> float:
    """Of the computing beside which gradients move, the share that can hide them."""
    return 1.0 if work.layout.zero == 3 else BACKWARD_USED


def _exposed(work: Workload, moved: Quantity, hides: Quantity, constants: Constants) -> Quantity:
    """What the step grows by: what does not fit, and what the hidden part slows computing by."""
    if work.layout.zero < 3 and not work.overlap_gradients:
        return moved
    return np.maximum(moved - usable(work) * hides, 0.0) + constants.interference * np.minimum(moved, hides)


def z() -> float:
    """Half-width of a normal interval that holds 90 %, in standard deviations."""
    return 1.6449
