"""What a job needs besides its steps: data to read, checkpoints to write, and how scale and faults weigh.

Formulas of notes/model.md 2.8 and 2.9.
"""

from __future__ import annotations

from math import erfc, log, sqrt

# Weights in 16 bits; master copy and two moments in 32.
CHECKPOINT_BYTES = 14  # a parameter
# Bytes of a training state in memory a parameter: with gradients in 16 bits or in 32.
STATE_BYTES = (16, 18)
# Llama 3's pre-training: 419 unexpected interruptions in 54 days on 16,384 GPUs.
GPU_HOURS_BETWEEN_FAULTS = 54 * 24 * 16_384 / 419
RESTART_S = 600.0


def read_rate(samples: float, bytes_per_sample: float, step_s: float) -> float:
    """Bytes a second that the job reads, over all ranks."""
    return samples * bytes_per_sample / step_s


def token_bytes(vocab: int) -> int:
    """Of one token on disk: 16 bits no longer hold a larger vocabulary."""
    return 4 if vocab > 65_535 else 2


def loading_stall(load_s: float, busy_s: float, workers: int = 1) -> float:
    """Seconds a step that a loader of so many workers falls behind, each needing `load_s` for a batch, on average."""
    return max(0.0, load_s / max(workers, 1) - busy_s)


def starving(load_s: float, sigma_s: float, busy_s: float, queue: int) -> float:
    """Chance that a prefetch queue of so many batches runs empty: that so many loads in a row take longer than so many
    steps, of times that vary independently by `sigma_s`.
    """
    if sigma_s <= 0:
        return 0.0 if load_s <= busy_s else 1.0
    return 0.5 * erfc((busy_s - load_s) * sqrt(max(queue, 1)) / sigma_s / sqrt(2))


def checkpoint_bytes(params: float) -> float:
    return CHECKPOINT_BYTES * params


def checkpoint_stall(params: float, rate: float) -> float:
    """Seconds that training stops for bytes at this rate: that of the storage, or, where writing goes on beside
    training, that of all ranks' copies to their hosts together.
    """
    return checkpoint_bytes(params) / rate


def between_faults(gpus: int) -> float:
    """Seconds from one interruption to the next."""
    return GPU_HOURS_BETWEEN_FAULTS / gpus * 3600


def best_interval(stall_s: float, gpus: int) -> float:
    """Seconds from checkpoint to checkpoint that waste least (Young 1974)."""
    return sqrt(2 * stall_s * between_faults(gpus))


def waste(stall_s: float, interval_s: float, gpus: int, restart_s: float = RESTART_S) -> float:
    """Share of the time that goes into checkpoints, work done again and restarts."""
    faults = between_faults(gpus)
    return stall_s / interval_s + interval_s / (2 * faults) + restart_s / faults


# -- scale -------------------------------------------------------------------------------------------------------------


def strong_scaling(few: float, few_s: float, many: float, many_s: float) -> float:
    """Efficiency of the same batch on more nodes."""
    return few_s * few / (many_s * many)


def weak_scaling(few_s: float, many_s: float) -> float:
    """Efficiency of a batch that grows with the nodes."""
    return few_s / many_s


def slower_network(share: float, by: float) -> tuple[float, float]:
    """Of a step with this share of exposed communication, share and slowdown once the network is `by` times slower."""
    slowdown = 1 - share + by * share
    return by * share / slowdown, slowdown


def slowest_of(ranks: int, mean: float, sigma: float) -> float:
    """What a step takes whose ranks jitter independently: all wait for the last."""
    return mean + sigma * sqrt(2 * log(ranks)) if ranks > 1 else mean
