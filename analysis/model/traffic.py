"""Bytes on the wire, per GPU and step, that each kind of parallelism sends (notes/model.md 2.7).

`micro_batches` are those of one replica; `local` the parameters of one rank before sharding.
"""

from __future__ import annotations

from diagnosd.analysis.model.collectives import Group
from diagnosd.analysis.model.workload import Workload

BF16 = 2


def _ring(ranks: int) -> float:
    """Of the data, what each rank sends in one pass around a ring."""
    return (ranks - 1) / ranks


def gradients(zero: int, ranks: int, local: float, grad_bytes: int, micro_batches: float) -> float:
    """Summing up the gradients and, where the optimizer's state is sharded, gathering the new parameters.

    FSDP gathers parameters twice a micro-batch, before forward and before backward, and reduces gradients each time.
    """
    once = _ring(ranks) * local
    if zero == 0:
        return 2 * once * grad_bytes
    if zero == 1:
        return once * (grad_bytes + BF16)
    if zero == 2:
        return once * (micro_batches * grad_bytes + BF16)
    return micro_batches * once * (2 * BF16 + grad_bytes)


def hybrid(shard: int, replicate: int, local: float, grad_bytes: int, micro_batches: float) -> tuple[float, float]:
    """FSDP inside groups of `shard`, all-reduce across `replicate` of them: bytes of the one and of the other."""
    inside = gradients(3, shard, local, grad_bytes, micro_batches)
    return inside, 2 * _ring(replicate) * local / shard * grad_bytes


def gathers(work: Workload) -> float:
    """How many times a step FSDP goes through its layers: with a pipeline, parameters stay gathered for the step."""
    return work.micro_batches if work.layout.pp == 1 else 1.0


def sums(work: Workload) -> dict[str, float]:
    """What gradients and parameters send, by the kind of group (`Layout.group`): experts have replicas of their own."""
    layout, dense, experts = work.layout, work.dense_params, work.expert_params
    m = gathers(work)
    if layout.zero == 3:  # experts are taken as sharded like the rest
        inside, across = hybrid(layout.sharded, layout.replicas // layout.sharded, dense + experts, work.grad_bytes, m)
        found = {"gradients": inside, "copies": across}
    else:
        found = {
            "gradients": gradients(layout.zero, layout.replicas, dense, work.grad_bytes, m),
            "expert_gradients": gradients(layout.zero, layout.expert_replicas, experts, work.grad_bytes, m),
        }
    return {dimension: sent for dimension, sent in found.items() if sent}


def tensor(work: Workload) -> float:
    """Two sums a layer forward and two backward, two more where forward comes again; with sequence parallelism each is
    a reduce-scatter and an all-gather of the same bytes.
    """
    passes = 6 if work.recompute == "full" else 4
    return passes * work.model.layers / work.layout.pp * work.micro_batches * 2 * _ring(work.layout.tp) * boundary(work)


def boundary(work: Workload) -> float:
    """Bytes of one micro-batch's activations between two layers, on one rank of a context-parallel group."""
    return BF16 * work.micro * work.model.seq * work.model.hidden / work.layout.cp


def pipeline(work: Workload) -> float:
    """Activations to the next stage and gradients to the one before, in shares of the tensor-parallel ranks."""
    if work.layout.pp == 1:
        return 0.0
    return 2 * work.layout.vpp * work.micro_batches * boundary(work) / work.layout.tp


def context(work: Workload) -> float:
    """A ring of keys and values forward; keys, values and their gradients backward."""
    model, c = work.model, work.layout.cp
    keys_and_values = 2 * BF16 * work.micro * model.seq / c * model.kv_hidden / work.layout.tp
    return model.layers / work.layout.pp * work.micro_batches * 3 * (c - 1) * keys_and_values


def experts(work: Workload, dispatch_bytes: float = BF16) -> float:
    """Tokens to their experts and back, forward and backward. FP8 dispatch is one byte, combining stays in 16 bits.

    With sequence parallelism each tensor-parallel rank sends its own part of the tokens.
    """
    model, e = work.model, work.layout.ep
    if not model.experts or e == 1:
        return 0.0
    tokens = work.micro * model.seq / work.layout.cp / (work.layout.tp if work.sequence_parallel else 1)
    each = tokens * model.experts_active * model.hidden * (dispatch_bytes + BF16)
    return model.layers / work.layout.pp * work.micro_batches * _ring(e) * each * 2


def all_to_all_into_network(sent: float, group: Group) -> float:
    """Of an all-to-all's bytes per GPU, those for ranks on other nodes."""
    return sent * (group.ranks - group.per_node) / max(group.ranks - 1, 1)


def into_network(sent: float, group: Group) -> float:
    """Of a ring's bytes per GPU, those that leave the node, per GPU: the ring passes each node's border once."""
    return sent / group.per_node if group.nodes > 1 else 0.0
