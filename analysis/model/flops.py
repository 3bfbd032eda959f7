"""Arithmetic of a transformer: parameters, FLOPs and the bytes that its elementwise operations move.

FLOPs count a multiplication and an addition as two. Two conventions of MFU are in use, and a figure means nothing
without its own: `full` counts all s x s scores (PaLM, NVIDIA's recipes), `causal` the half that a kernel computes
(MaxText since July 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Convention = Literal["full", "causal"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Transformer:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int  # tokens
    gated: bool = False
    experts: int = 0  # 0: a dense model
    experts_active: int = 0

    @property
    def kv_hidden(self) -> float:
        return self.hidden * self.kv_heads / self.heads

    @property
    def attention_params(self) -> float:
        """Of a layer: query, key, value and output."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_hidden)

    @property
    def ffn_params(self) -> float:
        """Of a layer's feed-forward network, of one expert where there are several."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def layer_params(self) -> float:
        router = self.hidden * self.experts
        return self.attention_params + self.ffn_params * max(self.experts, 1) + router

    @property
    def active_params(self) -> float:
        """Of a layer, those that a token meets."""
        router = self.hidden * self.experts
        return self.attention_params + self.ffn_params * max(self.experts_active, 1) + router

    @property
    def params(self) -> float:
        """With embedding and head apart; a model that ties them has hidden x vocab fewer."""
        return self.layers * self.layer_params + 2 * self.hidden * self.vocab

    def scores(self, convention: Convention = "full") -> float:
        """FLOPs of a layer's attention scores and their product with the values, forward, of one sequence."""
        return 4.0 * self.seq**2 * self.hidden * (0.5 if convention == "causal" else 1.0)

    @property
    def head(self) -> float:
        """FLOPs of the output layer, forward, of one sequence."""
        return 2.0 * self.seq * self.hidden * self.vocab

    def forward(self, convention: Convention = "full") -> float:
        """FLOPs of one sequence."""
        return self.layers * (2.0 * self.seq * self.active_params + self.scores(convention)) + self.head

    def training(self, convention: Convention = "full") -> float:
        """Model FLOPs of one sequence, forward and backward: what MFU counts, whatever is computed again."""
        return 3 * self.forward(convention)

    def computed(self, recompute: Recompute = "none", convention: Convention = "full") -> float:
        """FLOPs of one sequence that the hardware does (HFU): with recomputation each layer's forward comes again."""
        again = {
            "none": 0.0,
            "selective": self.layers * self.scores(convention),
            "full": self.forward(convention) - self.head,
        }[recompute]
        return self.training(convention) + again


def megatron(model: Transformer, sequences: int) -> float:
    """FLOPs of a step with full recomputation as Narayanan et al. 2021 count them, for plain GPT models."""
    h, s, layers, vocab = model.hidden, model.seq, model.layers, model.vocab
    return 96.0 * sequences * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def activation_bytes(model: Transformer, tp: int, *, sequence_parallel: bool) -> float:
    """Bytes per token that a layer stores for its backward, in 16 bits, without scores (Korthikanti et al. 2022).

    34 per hidden unit for a plain layer with ffn = 4 hidden. Without sequence parallelism norms, dropout and the inputs
    of the two blocks are kept whole on each rank.
    """
    h, per_token = model.hidden, max(model.experts_active, 1)
    whole = 4 * h + 2 * h + 2 * h + 2 * h  # norms, the inputs of both blocks, the masks of both dropouts
    attention = 2 * (h + model.kv_hidden) + 2 * model.kv_hidden + 2 * h
    ffn = 2 * model.ffn * (3 if model.gated else 2) * per_token
    split = attention + ffn
    return (whole + split) / tp if sequence_parallel else whole + split / tp


def cast_bytes(model: Transformer) -> float:
    """Bytes per token that FP8 adds to a layer: each input of a product, and its gradient, is read in 16 bits and
    written twice in 8, once of them transposed.
    """
    return 2 * 4.0 * (3 * model.hidden + model.ffn * max(model.experts_active, 1))
