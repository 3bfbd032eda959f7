"""What no healthy machine can beat: lower bounds that need no history, from what the operators declared.

They judge a job that was slow from its first step, whose past therefore says nothing.
"""

from __future__ import annotations

from diagnosd.documents import ClusterSpec

# Of a link's bits, what TCP can carry: 1448 bytes of payload in a frame that takes 1538 on the wire (MTU 1500).
TCP_SHARE = 1448 / 1538
# RDMA packets of 4096 bytes lose under 3 % to headers.
RDMA_SHARE = 0.97

# How far above the bound a healthy transfer may lie. Rings reach 0.8 to 0.95 of the line in NCCL's published curves and
# on the bed with two ranks; TCP on hosts that must also compute comes down to half.
HEALTHY = 2.0

# A loader that prefetches costs nothing; where a batch is waited for in this share of the step from the start, it does
# not keep up. TraceML's and the field survey's threshold (notes/field.md 5.4).
STARVED = 0.10


def line_rate(cluster: ClusterSpec | None) -> float | None:
    """Bytes a second that a host can send into the declared fabric, by all its ports; None where none is declared."""
    fabric, node = (cluster.fabric, cluster.node) if cluster else (None, None)
    if fabric is None or not fabric.rate_gbps:
        return None
    ports = (node.nics if node else None) or 1
    share = TCP_SHARE if fabric.kind == "ethernet" else RDMA_SHARE
    return fabric.rate_gbps * 1e9 / 8 * ports * share


def all_reduce(size: float, hosts: int, rate: float) -> float:
    """Seconds that an all-reduce of `size` bytes over `hosts` takes at least, each sending `rate` bytes a second.

    Each host must send and receive 2 (n - 1) / n of the data, whatever the algorithm (Patarasu and Yuan 2009).
    """
    return 2 * (hosts - 1) / hosts * size / rate if hosts > 1 else 0.0
