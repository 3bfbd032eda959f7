"""What no healthy machine can beat: lower bounds that need no history, from what the operators declared.

They judge a job that was slow from its first step, whose past therefore says nothing.
"""

from __future__ import annotations

from diagnosd.documents import ClusterSpec

# Of a link's bits, what TCP can carry: 1448 bytes of payload in a frame that takes 1538 on the wire (MTU 1500).
TCP_SHARE = 1448 / 1538
# One rank's TCP is copied and checksummed by one core: 20 to 30 Gbit/s on servers, whatever the port could carry. At
# the lower end, for the bound judges jobs of which nothing else is known.
TCP_CORE = 20e9 / 8
# RDMA packets of 4096 bytes lose under 3 % to headers.
RDMA_SHARE = 0.97

# How far above the bound a healthy transfer may lie. Rings reach 0.8 to 0.95 of the line in NCCL's published curves and
# on the bed with two ranks; TCP on hosts that must also compute comes down to half.
HEALTHY = 2.0

# A loader that prefetches costs nothing; where a batch is waited for in this share of the step from the start, it does
# not keep up. TraceML's and the field survey's threshold (notes/field.md 5.4).
STARVED = 0.10


def line_rate(cluster: ClusterSpec | None, ranks: int) -> float | None:
    """Bytes a second that so many ranks of a host can send into the declared fabric; None where none is declared.

    A rank drives the port next to its GPU: a host's ports beyond its ranks carry nothing.
    """
    fabric, node = (cluster.fabric, cluster.node) if cluster else (None, None)
    if fabric is None or not fabric.rate_gbps:
        return None
    ports = (node.nics if node else None) or 1
    share = TCP_SHARE if fabric.kind == "ethernet" else RDMA_SHARE
    rate = fabric.rate_gbps * 1e9 / 8 * min(ports, ranks) * share
    return min(rate, TCP_CORE * ranks) if fabric.kind == "ethernet" else rate


def all_reduce(size: float, hosts: int, rate: float) -> float:
    """Seconds that an all-reduce of `size` bytes over `hosts` takes at least, each sending `rate` bytes a second.

    Each host must send and receive 2 (n - 1) / n of the data, whatever the algorithm (Patarasu and Yuan 2009).
    """
    return all_reduced(size, hosts) / rate


def all_reduced(size: float, hosts: int) -> float:
    """Bytes that each host must send for it."""
    return 2 * (hosts - 1) / hosts * size if hosts > 1 else 0.0
