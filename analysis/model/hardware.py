"""What the machines can do, per direction and dense, with where each figure comes from.

Sources, by letter: D the vendor's data sheet; M stas00/ml-engineering, accelerator and MAMF tables; N measured with
nccl-tests on 8 GPUs (NVIDIA GTC 24/25 slides, azurehpc-health-checks); K general knowledge, not read again.
Missing figures are None: what depends on them is left out of the expectation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import sqrt

GB, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Gpu:
    """FLOP/s dense, bytes/s per direction, watts. `mamf_*`: what the best-shaped matrix product reaches of the peak."""

    name: str
    generation: str  # volta, ampere, ada, hopper, blackwell, cdna3
    bf16: float
    fp8: float | None
    hbm: float  # bytes/s
    memory: float  # bytes
    nvlink: float | None  # bytes/s a direction; None: PCIe only
    ring: float  # bytes/s: busbw of a ring of 8 of them on one node
    nvls: float | None  # the same where the switch adds up (all-reduce only)
    pcie_gen: int
    watts: float
    mamf_bf16: float
    mamf_fp8: float | None = None
    scale_up: int = 8  # GPUs that NVLink joins

    @property
    def newer(self) -> bool:
        """Hopper or later: frameworks of its time overlap the reduction of gradients unless told otherwise."""
        return self.generation not in ("volta", "ampere")

    def peak(self, dtype: str) -> float | None:
        return self.fp8 if dtype.startswith("fp8") else self.bf16

    @property
    def to_host(self) -> float:
        """Bytes a second of copies into its host's memory."""
        return PCIE[self.pcie_gen] * PCIE_COPIES

    def reachable(self, dtype: str) -> float | None:
        """FLOP/s of the best-shaped matrix product."""
        if not dtype.startswith("fp8"):
            return self.bf16 * self.mamf_bf16
        return self.fp8 * (self.mamf_fp8 or self.mamf_bf16) if self.fp8 else None


def _gpu(
    name: str,
    generation: str,
    tflops: tuple[float, float | None],
    hbm_tb: float,
    memory_gb: float,
    nvlink_gb: float | None,
    busbw_gb: tuple[float, float | None],
    pcie_gen: int,
    watts: float,
    mamf: tuple[float, float | None],
    scale_up: int = 8,
) -> Gpu:
    bf16, fp8 = tflops
    ring, nvls = busbw_gb
    return Gpu(
        name,
        generation,
        bf16 * TERA,
        fp8 * TERA if fp8 else None,
        hbm_tb * TERA,
        memory_gb * GB,
        nvlink_gb * GB if nvlink_gb else None,
        ring * GB,
        nvls * GB if nvls else None,
        pcie_gen,
        watts,
        *mamf,
        scale_up,
    )


# Busbw of PCIe alone: 24 GB/s for generation 4, 48 for 5, 11 for 3 (N).
GPUS = (
    # name, generation, TFLOP/s bf16 and fp8, HBM TB/s, GB, NVLink GB/s, busbw ring and NVLS, PCIe, W, MAMF bf16 and fp8
    _gpu("V100-SXM", "volta", (125, None), 0.9, 32, 150, (122, None), 3, 300, (0.80, None)),  # fp16; K
    _gpu("A100-SXM", "ampere", (312, None), 2.04, 80, 300, (232, None), 4, 400, (0.87, None)),  # D M N
    _gpu("A100-SXM-40GB", "ampere", (312, None), 1.555, 40, 300, (232, None), 4, 400, (0.87, None)),  # D M N
    _gpu("A100-PCIe", "ampere", (312, None), 1.94, 80, None, (24, None), 4, 300, (0.87, None)),  # D M N
    _gpu("A800-SXM", "ampere", (312, None), 2.04, 80, 200, (155, None), 4, 400, (0.87, None)),  # K: A100, 8 of 12 links
    _gpu("H100-SXM", "hopper", (989, 1979), 3.35, 80, 450, (370, 480), 5, 700, (0.80, 0.72)),  # D M N
    _gpu("H100-PCIe", "hopper", (756, 1513), 2.0, 80, None, (48, None), 5, 350, (0.80, 0.72)),  # D M N
    _gpu("H800-SXM", "hopper", (989, 1979), 3.35, 80, 200, (160, None), 5, 700, (0.80, 0.72)),  # M; DeepSeek: 160
    _gpu("H200-SXM", "hopper", (989, 1979), 4.8, 141, 450, (370, 480), 5, 700, (0.80, 0.72)),  # D M N
    _gpu("B200-SXM", "blackwell", (2250, 4500), 8.0, 180, 900, (700, 850), 5, 1000, (0.78, 0.76)),  # D M N
    _gpu("GB200", "blackwell", (2500, 5000), 8.0, 186, 900, (700, 850), 5, 1200, (0.73, 0.73), 72),  # D M
    _gpu("L40S", "ada", (362, 733), 0.86, 48, None, (24, None), 4, 350, (0.80, 0.72)),  # D; MAMF as H100
    _gpu("RTX-4090", "ada", (165, 330), 1.01, 24, None, (24, None), 4, 450, (0.80, 0.72)),  # D, sums in fp32
    _gpu("MI300X", "cdna3", (1307, 2610), 5.3, 192, 448, (310, None), 5, 750, (0.51, None)),  # D M; busbw: K
)
BY_NAME = {gpu.name: gpu for gpu in GPUS}

# What a person or the driver may call them. The first that is found in the name decides.
_PATTERNS = (
    (r"GB200(?!\d)", "GB200"),
    (r"B200(?!\d)", "B200-SXM"),
    (r"H200(?!\d)", "H200-SXM"),
    (r"H800(?!\d)", "H800-SXM"),
    (r"H100(?!\d).*(PCI-?E|NVL(?![A-Z0-9]))", "H100-PCIe"),
    (r"H100(?!\d)", "H100-SXM"),
    (r"A800(?!\d)", "A800-SXM"),
    (r"A100(?!\d).*PCI-?E", "A100-PCIe"),
    (r"A100(?!\d).*40 ?GB?", "A100-SXM-40GB"),
    (r"A100(?!\d)", "A100-SXM"),
    (r"V100(?!\d)", "V100-SXM"),
    (r"L40S", "L40S"),
    (r"4090", "RTX-4090"),
    (r"MI300X", "MI300X"),
)


class UnknownHardwareError(ValueError):
    """A name that is in no table: what is, stands in the message, and in `allowed`."""

    def __init__(self, message: str, allowed: str) -> None:
        self.allowed = allowed
        super().__init__(f"{message}; allowed is {allowed}")


def gpu(name: str) -> Gpu:
    """`H100-SXM` as operators write it, `NVIDIA H100 80GB HBM3` as the driver does."""
    for pattern, known in _PATTERNS:
        if re.search(rf"(?<![A-Z0-9]){pattern}", name.upper()):
            return BY_NAME[known]
    near = get_close_matches(name.upper(), BY_NAME, n=1, cutoff=0.5)
    hint = f" (do you mean {near[0]}?)" if near else ""
    raise UnknownHardwareError(f"no such GPU is known: {name!r:.60}", f"{', '.join(BY_NAME)}{hint}")


@dataclass(frozen=True, slots=True)
class Fabric:
    """A kind of network."""

    kind: str
    share: float  # of a port's bits, what large messages carry
    plugin: float  # s: what a hop takes longer than NCCL reckons for InfiniBand
    depth: float  # of the chunk pipeline, see collectives.cost


# A NIC that does the work keeps a shallow pipeline; software between NCCL and the wire makes it deep. Where a curve was
# fitted with alpha, c and B (notes/model.md 2.3), the depth is c^2 B / 4 alpha: 0.3 for 4 to 1,024 nodes of H100 on
# InfiniBand (the chart of GTC 24), 0.7 within a node, 2.7 for EFA. 2.0 was chosen on the curves of two p4de and two
# a3-mega; with 0.3 everywhere these are 24 and 31 % off in the median instead of 6 and 12, and step times as they are.
OFFLOADED, BY_SOFTWARE = 0.3, 2.0

# Shares: InfiniBand 380 of 400 and 48 of 50 (Azure acceptance, NVIDIA slides); RoCE loses 2 % more to headers of MTU
# 4096 (K); EFA and FasTrak as all-reduces of two nodes imply; sockets 10 of 12.5 GB/s. Omni-Path, whose hosts do the
# protocol: the middle of the 2.1 to 4.2 s that the gradients of BLOOM's runs took (notes/model.md 2.8). It serves that
# source alone, so the exposed gradients of BLOOM are not unseen: with the 0.80 of sockets its step times are 4 % off in
# the median instead of 2, and Spearman's correlation of these ten, four of which lie within 3 %, is 0.66, not 0.93.
# Plugins: what the smallest messages of two p4de and two a3-mega took beyond NCCL's estimate of a tree; sockets as EFA
# (K).
FABRICS = {
    kind: Fabric(kind, share, plugin, depth)
    for kind, share, plugin, depth in (
        ("infiniband", 0.96, 0.0, OFFLOADED),
        ("roce", 0.94, 0.0, OFFLOADED),
        ("omnipath", 0.55, 10e-6, BY_SOFTWARE),
        ("efa", 0.93, 37e-6, BY_SOFTWARE),
        ("fastrak", 0.93, 15e-6, BY_SOFTWARE),
        ("ethernet", 0.80, 37e-6, BY_SOFTWARE),
    )
}

# Gbit/s of a port of four lanes, by the name of the generation.
RATES = {"QDR": 32, "FDR": 54, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}

# Bytes/s a direction of 16 lanes: what is left after coding, and what copies reach (ml-engineering: 55.4 of 63).
PCIE = {3: 15.75 * GB, 4: 31.5 * GB, 5: 63 * GB, 6: 126 * GB}
PCIE_COPIES = 0.88
PCIE_RING = {3: 11 * GB, 4: 24 * GB, 5: 48 * GB, 6: 96 * GB}  # busbw of a ring over PCIe (N; 6: as 5, twice)


def rate(text: str) -> float:
    """Bits a second of `400G`, `400 Gb/s`, `NDR`, `HDR200`. A rate in Mbit/s is a slip: no fabric is that slow."""
    said = re.fullmatch(r"\s*([A-Za-z]{3})?\s*(\d+(?:\.\d+)?)?\s*(G|Gb/s|Gbps|Gbit/s)?\s*", text)
    if not said or not (said[1] or said[2]):
        raise UnknownHardwareError(f"no rate of a port: {text!r:.40}", "400, 400G, 400 Gb/s or NDR")
    generation = RATES.get((said[1] or "").upper())
    if said[1] and generation is None:
        raise UnknownHardwareError(f"no generation of InfiniBand: {said[1]!r}", ", ".join(RATES))
    return float(said[2] or generation or 0) * 1e9


def clock_share(limit_w: float | None, default_w: float | None) -> float:
    """Of the full clock, what a GPU keeps under a power limit below its default: 0.82 at 500 of 700 W.

    Some 15 % of the power is spent whatever the clock; the rest grows with its square, for voltage grows with it.
    """
    if not limit_w or not default_w or limit_w >= default_w:
        return 1.0
    idle = 0.15 * default_w
    return sqrt(max((limit_w - idle) / (default_w - idle), 0.05))
