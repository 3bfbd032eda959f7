"""The lint: what each check finds on a machine that is ill in one way, and what it must not say of healthy ones."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosd.analysis.causes import CAUSES
from diagnosd.analysis.topology import CHECKS, check
from diagnosd.analysis.topology.document import document, is_latent, remedy, unchecked
from diagnosd.analysis.topology.finding import Finding
from diagnosd.analysis.topology.site import Gathering, JobSeen, Nccl, RankSeen, Site, ranges
from diagnosd.collectors.ibstat import parse
from diagnosd.collectors.machine import captured
from diagnosd.collectors.node import Node
from diagnosd.documents import (
    ClusterSpec,
    DocumentError,
    Fabric,
    Gid,
    Gpu,
    Nic,
    NodeInventory,
    NvFabric,
    Software,
    decode_cluster,
    decode_job,
    decode_node,
)
from diagnosd.documents import Node as NodeSpec
from diagnosd.point import decode
from hca import write

CORPORA = Path(__file__).parents[2] / "shared/corpora"
needs_corpora = pytest.mark.skipif(not CORPORA.is_dir(), reason=f"{CORPORA} is not there")

# -- a healthy node: eight H100, each with a NIC beside it; two storage ports, and the board's own --------------------


def gpu(index: int, **facts: Any) -> Gpu:
    known: dict[str, Any] = {
        "index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100 80GB HBM3", "numa": index // 4,
        "pci": f"00000000:{index + 16:02X}:00.0", "nvlinks": 18, "nvlinks_active": 18, "nvlink_gbytes_per_s": 26.6,
        "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_gen_slot": 5,
        "pcie_width_slot": 16, "pcie_busy": True, "power_limit_w": 700.0, "power_limit_default_w": 700.0, "mig": False,
    }  # fmt: skip
    return Gpu(**(known | facts))


def port(number: int, **facts: Any) -> Nic:
    known: dict[str, Any] = {
        "device": f"mlx5_{number}", "port": 1, "netdev": f"ib{number}", "link_layer": "InfiniBand", "state": "ACTIVE",
        "phys_state": "LinkUp", "rate_gbps": 400.0, "width": 4, "speed": "NDR", "mtu": 4092, "firmware": "28.39.1002",
        "driver": "mlx5_core", "pci": f"0000:{number + 64:02x}:00.0", "numa": number // 4, "pcie_gen": 5,
        "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "netdev_state": "ACTIVE",
    }  # fmt: skip
    return Nic(**(known | facts))


def near(gpus: int = 8, ports: int = 8) -> dict[str, dict[str, str]]:
    """GPU0 beside mlx5_0, and so on; four a socket."""
    word = {True: "NODE", False: "SYS"}
    return {
        f"GPU{g}": {f"mlx5_{p}": "PIX" if p == g else word[p // 4 == g // 4] for p in range(ports)} for g in range(gpus)
    }


def healthy(**facts: Any) -> NodeInventory:
    storage = [port(8 + n, role="storage", rate_gbps=200.0, width=2, firmware="28.39.1002") for n in range(2)]
    known: dict[str, Any] = {
        "gpus": tuple(gpu(index) for index in range(8)),
        "nics": (*(port(number) for number in range(8)), *storage, Nic(netdev="eno1", state="ACTIVE", rate_gbps=1.0)),
        "affinity": near(),
        "fabric": NvFabric(state="completed", status="success", health="healthy", clique=0),
        "software": Software(
            kernel="6.8.0",
            driver="580.65",
            cuda="13.0",
            peermem=True,
            dmabuf=True,
            acs="off",
            iommu="pt",
            persistence=True,
        ),
    }
    return NodeInventory(**(known | facts))


def with_gpu(at: int, **facts: Any) -> NodeInventory:
    whole = healthy()
    return replaced(whole, gpus=[msgspec.structs.replace(g, **facts) if g.index == at else g for g in whole.gpus or ()])


def with_gpus(**facts: Any) -> NodeInventory:
    return replaced(healthy(), gpus=[msgspec.structs.replace(g, **facts) for g in healthy().gpus or ()])


def with_port(number: int, **facts: Any) -> NodeInventory:
    nics = [msgspec.structs.replace(n, **facts) if n.device == f"mlx5_{number}" else n for n in healthy().nics or ()]
    return replaced(healthy(), nics=nics)


def with_ports(**facts: Any) -> NodeInventory:
    """The eight of training."""
    nics = healthy().nics or ()
    return replaced(healthy(), nics=[*(msgspec.structs.replace(n, **facts) for n in nics[:8]), *nics[8:]])


def with_software(**facts: Any) -> NodeInventory:
    return replaced(healthy(), software=msgspec.structs.replace(healthy().software or Software(), **facts))


def replaced(inventory: NodeInventory, **facts: Any) -> NodeInventory:
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
    return msgspec.structs.replace(inventory, **made)


CLUSTER = ClusterSpec(
    fabric=Fabric(kind="infiniband", rate_gbps=400.0, oversubscription=1.0),
    node=NodeSpec(gpus=8, gpu="H100-SXM", nics=8, nic_rate_gbps=400.0, nvlinks=18, pcie_gen=5),
)
ROCE = ClusterSpec(fabric=Fabric(kind="roce", rate_gbps=400.0, priority=3))
LLAMA = decode_job(
    json.dumps(
        {
            "name": "llama-70b",
            "model": {
                "layers": 80, "hidden": 8192, "ffn": 28672, "gated": True, "heads": 64, "kv_heads": 8,
                "vocab": 128256, "seq": 8192,
            },
            "batch": {"global": 64, "micro": 1}, "parallel": {"tp": 8, "zero": 1, "overlap_grad": False},
            "dtype": "bf16", "recompute": "none", "grad_dtype": "fp32",
        }
    )
)  # fmt: skip


def job(hosts: Sequence[str] = ("n01", "n02"), per_host: int = 8, **about: Any) -> JobSeen:
    """Ranks in the order of their hosts; `env`, `nccl`, `versions` and `addresses` are those of all of them."""
    of_ranks = {key: about.pop(key) for key in ("env", "nccl", "versions", "addresses") if key in about}
    ranks = {
        at * per_host + local: RankSeen(at * per_host + local, host, f"GPU-{local}", **of_ranks)
        for at, host in enumerate(hosts)
        for local in range(per_host)
    }
    return JobSeen("llama-70b", about.pop("spec", LLAMA), ranks, world=len(ranks), **about)


def site(*nodes: NodeInventory, cluster: ClusterSpec | None = None, of: JobSeen | None = None, **more: Any) -> Site:
    return Site({f"n{at:02}": node for at, node in enumerate(nodes, 1)}, cluster, {of.name: of} if of else {}, **more)


def found(*nodes: NodeInventory, **about: Any) -> list[Finding]:
    return check(site(*nodes, **about))


def one(*nodes: NodeInventory, **about: Any) -> Finding:
    findings = found(*nodes, **about)
    assert len(findings) == 1, findings
    return findings[0]


# -- found ------------------------------------------------------------------------------------------------------------


class Ill(NamedTuple):
    """What is wrong, and what must be said of it."""

    subtype: str
    locus: str
    seen: str
    should: str
    basis: str


FAST = Nccl("2.30.7", "IB", tuple(f"mlx5_{n}" for n in range(8)), gdr=True)
TWO = (healthy(), healthy())

CASES: Mapping[str, tuple[Callable[[], Site], Ill]] = {
    "a port below the declared rate": (
        lambda: site(with_port(3, rate_gbps=200.0, width=2), cluster=CLUSTER),
        Ill("link_rate_low", "nic:n01/mlx5_3/1", "200 Gbit/s (2X NDR)", "400 Gbit/s", "declared"),
    ),
    "a port below its siblings, where nobody declares anything": (
        lambda: site(with_port(3, rate_gbps=100.0, speed="EDR")),
        Ill("link_rate_low", "nic:n01/mlx5_3/1", "100 Gbit/s (4X EDR)", "400 Gbit/s", "siblings"),
    ),
    "the only port of a host below that of most hosts": (
        lambda: site(*(NodeInventory(nics=(port(0, rate_gbps=rate),)) for rate in (200.0, 200.0, 200.0, 100.0))),
        Ill("link_rate_low", "nic:n04/mlx5_0/1", "100 Gbit/s (4X NDR)", "200 Gbit/s", "siblings"),
    ),
    "a bond that lost a member (A54)": (
        lambda: site(
            replaced(
                healthy(),
                nics=[
                    *(healthy().nics or ()),
                    msgspec.convert(
                        {
                            "netdev": "bond0",
                            "members": [{"netdev": "eth0", "state": "ACTIVE"}, {"netdev": "eth1", "state": "DOWN"}],
                        },
                        Nic,
                    ),
                ],
            )
        ),
        Ill("link_rate_low", "nic:n01/bond0", "eth1 of its bond is down", "2 members that carry", "hardware"),
    ),
    "a busy GPU whose link is stuck at generation 2 (A24)": (
        lambda: site(with_gpu(2, pcie_gen=2)),
        Ill(
            "pcie_low", "gpu:n01/GPU-2", "its link runs at generation 2, 16 lanes", "generation 5, 16 lanes", "hardware"
        ),
    ),
    "a NIC with half of its lanes": (
        lambda: site(with_port(5, pcie_width=8)),
        Ill(
            "pcie_low",
            "nic:n01/mlx5_5/1",
            "its link runs at generation 5, 8 lanes",
            "generation 5, 16 lanes",
            "hardware",
        ),
    ),
    "an idle GPU that has lost lanes which idle siblings have": (
        lambda: site(
            replaced(
                healthy(), gpus=[gpu(n, pcie_busy=False, pcie_gen=1, pcie_width=8 if n == 6 else 16) for n in range(8)]
            )
        ),
        Ill("pcie_low", "gpu:n01/GPU-6", "its link has 8 lanes", "16 lanes", "siblings"),
    ),
    "a way to a GPU that came up with half its lanes": (
        lambda: site(with_gpu(1, pcie_gen_path=5, pcie_width_path=8)),
        Ill(
            "pcie_low",
            "gpu:n01/GPU-1",
            "the way to it leads over a link at generation 5, 8 lanes",
            "generation 5, 16 lanes",
            "hardware",
        ),
    ),
    "a GPU in a slot of eight lanes beside others of sixteen": (
        lambda: site(with_gpu(1, pcie_width=8, pcie_width_slot=8)),
        Ill(
            "pcie_low",
            "gpu:n01/GPU-1",
            "its slot allows no more than generation 5, 8 lanes",
            "generation 5, 16 lanes",
            "siblings",
        ),
    ),
    "slots of another generation than declared": (
        lambda: site(with_gpus(pcie_gen=4, pcie_gen_slot=4), cluster=CLUSTER),
        Ill("pcie_low", "gpu:n01/GPU-0", "it can do generation 4", "generation 5", "declared"),
    ),
    "a GPU with an NVLink less than its kind has": (
        lambda: site(with_gpu(3, nvlinks_active=17)),
        Ill("nvlink_missing", "gpu:n01/GPU-3", "17 NVLinks are active", "18", "hardware"),
    ),
    "no NVLink on any GPU of a machine that has them": (
        lambda: site(with_gpus(nvlinks_active=0)),
        Ill("nvlink_missing", "gpu:n01/GPU-0", "no NVLink is active", "18", "hardware"),
    ),
    "a GPU of an unknown kind with fewer NVLinks than its siblings": (
        lambda: site(
            NodeInventory(
                gpus=tuple(Gpu(index=n, uuid=f"GPU-{n}", name="X9", nvlinks_active=5 + (n > 0)) for n in range(4))
            )
        ),
        Ill("nvlink_missing", "gpu:n01/GPU-0", "5 NVLinks are active", "6", "siblings"),
    ),
    "an NVLink fabric that is not ready": (
        lambda: site(healthy(fabric=NvFabric(state="in progress"))),
        Ill(
            "nvlink_missing", "host:n01", "the NVLink fabric is in progress", "completed, success, healthy", "observed"
        ),
    ),
    "GPUs whose NICs are all on the other socket": (
        lambda: site(
            healthy(nics=tuple(port(n) for n in range(4)), affinity=near(8, 4)),
        ),
        Ill(
            "nic_affinity",
            "gpu:n01/GPU-4",
            "each NIC is on another socket (SYS)",
            "a NIC on its own socket",
            "siblings",
        ),
    ),
    "a rank that was given the NIC of another socket": (
        lambda: site(*TWO, of=but_rank_0(job(nccl=(FAST,)), nccl=(Nccl(network="IB", nics=("mlx5_7",), gdr=True),))),
        Ill("nic_affinity", "gpu:n01/GPU-0", "uses mlx5_7, SYS from it", "mlx5_0, PIX from it", "hardware"),
    ),
    "neither peer memory nor dma-buf": (
        lambda: site(with_software(peermem=False, dmabuf=False)),
        Ill(
            "gdr_off",
            "host:n01",
            "the peer memory module is not loaded, and there is no dma-buf",
            "nvidia_peermem loaded, or a driver that exports dma-buf",
            "hardware",
        ),
    ),
    "one node of many without the peer memory module (A67)": (
        lambda: site(*[with_software(dmabuf=None)] * 3, with_software(peermem=False, dmabuf=None)),
        Ill(
            "gdr_off",
            "host:n04",
            "the peer memory module is not loaded",
            "nvidia_peermem loaded, or a driver that exports dma-buf",
            "siblings",
        ),
    ),
    "NCCL's log without GDRDMA (C02)": (
        lambda: site(*TWO, of=job(nccl=(dataclasses.replace(FAST, gdr=False),))),
        Ill(
            "gdr_off",
            "host:n01",
            "NCCL's log has network channels without GDRDMA",
            "GPUDirect RDMA on all of them",
            "observed",
        ),
    ),
    "GPUDirect RDMA forbidden by a setting": (
        lambda: site(*TWO, of=job(env={"NCCL_NET_GDR_LEVEL": "LOC"})),
        Ill(
            "gdr_off",
            "host:n01",
            "NCCL_NET_GDR_LEVEL=LOC forbids GPUDirect RDMA",
            "GPUDirect RDMA on all of them",
            "rule",
        ),
    ),
    "NCCL over sockets where there is RDMA (C01, C08)": (
        lambda: site(*TWO, of=job(nccl=(Nccl(network="Socket"),))),
        Ill("socket_fallback", "host:n01", "NCCL communicates over TCP sockets", "RDMA", "observed"),
    ),
    "NCCL_IB_DISABLE on a declared RDMA fabric": (
        lambda: site(*TWO, cluster=CLUSTER, of=job(env={"NCCL_IB_DISABLE": "1"})),
        Ill("socket_fallback", "host:n01", "NCCL_IB_DISABLE=1 makes NCCL use TCP sockets", "RDMA", "rule"),
    ),
    "a declared port that is down": (
        lambda: site(with_port(4, state="DOWN", phys_state="Polling", rate_gbps=None), cluster=CLUSTER),
        Ill("too_few_nics", "nic:n01/mlx5_4/1", "7 ports are up: mlx5_4/1 is down", "8 ports", "declared"),
    ),
    "a port whose link is up and that no subnet manager has configured": (
        lambda: site(with_port(4, state="INIT", rate_gbps=100.0)),
        Ill("too_few_nics", "nic:n01/mlx5_4/1", "its link is up and its state is INIT", "ACTIVE", "hardware"),
    ),
    "a job whose rails lie under two leaves each": (
        lambda: site(
            *TWO,
            cluster=leaves(
                {
                    f"leaf{a}{rail}": (f"n0{a}/mlx5_{rail}", f"n0{a + 2}/mlx5_{rail}")
                    for a in (1, 2)
                    for rail in range(8)
                }
            ),
            of=job(),
        ),
        Ill("oversubscription", "job", "2 hosts lie under 2 leaves", "one leaf", "declared"),
    ),
    "a port that is down here and up on most hosts": (
        lambda: site(healthy(), healthy(), healthy(), with_port(4, state="DOWN", rate_gbps=None)),
        Ill("too_few_nics", "nic:n04/mlx5_4/1", "it is down", "up", "siblings"),
    ),
    "ports that NCCL does not use": (
        lambda: site(*TWO, of=job(nccl=(Nccl(network="IB", nics=("mlx5_0",), gdr=True),))),
        Ill(
            "too_few_nics",
            "nic:n01/mlx5_1/1",
            "1 of 8 ports are used",
            "8 ports: mlx5_1/1, mlx5_2/1, mlx5_3/1 and 4 more can carry too",
            "observed",
        ),
    ),
    "ports that NCCL_IB_HCA leaves out": (
        lambda: site(*TWO, of=job(env={"NCCL_IB_HCA": "^mlx5_7"})),
        Ill("too_few_nics", "nic:n01/mlx5_7/1", "7 of 8 ports are used", "8 ports: mlx5_7/1 can carry too", "observed"),
    ),
    "a job under two leaves that one would hold": (
        lambda: site(*TWO, cluster=leaves({"leaf1": ("n01", "n03"), "leaf2": ("n02", "n04")}), of=job()),
        Ill("oversubscription", "job", "2 hosts lie under 2 leaves", "one leaf", "declared"),
    ),
    "ranks that go to and fro between leaves": (
        lambda: site(
            *TWO,
            *TWO,
            cluster=leaves({"leaf1": ("n01", "n03"), "leaf2": ("n02", "n04")}),
            of=job(("n01", "n02", "n03", "n04")),
        ),
        Ill(
            "oversubscription",
            "job",
            "4 hosts lie under 2 leaves, and its ranks go from leaf to leaf 4 times",
            "2 leaves, each left once",
            "declared",
        ),
    ),
    "tensor-parallel groups wider than a node": (
        lambda: site(*TWO, of=job(spec=msgspec.structs.replace(LLAMA, parallel=parallel(tp=16)))),
        Ill(
            "layout",
            "job",
            "1 of 1 tensor-parallel groups, of 16 ranks, span nodes",
            "at most 8 ranks, as NVLink joins",
            "hardware",
        ),
    ),
    "tensor-parallel groups laid across nodes": (
        lambda: site(*TWO, of=job(groups={f"tp:{n}": (n, n + 8) for n in range(8)})),
        Ill(
            "layout",
            "job",
            "8 of 8 tensor-parallel groups, of 2 ranks, span nodes",
            "each group on one node",
            "hardware",
        ),
    ),
    "a forced algorithm": (
        lambda: site(*TWO, of=job(env={"NCCL_ALGO": "Ring"})),
        Ill("environment", "job", "NCCL_ALGO=Ring", "unset", "rule"),
    ),
    "an NCCL_IB_HCA of other machines": (
        lambda: site(*TWO, of=job(env={"NCCL_IB_HCA": "ibp"})),
        Ill("environment", "job", "NCCL_IB_HCA=ibp", "mlx5_0, mlx5_1, mlx5_2 and 5 more", "rule"),
    ),
    "an interface that is not there": (
        lambda: site(*TWO, of=job(env={"NCCL_SOCKET_IFNAME": "bond1"})),
        Ill("environment", "job", "NCCL_SOCKET_IFNAME=bond1", "eno1, ib0, ib1 and 8 more", "rule"),
    ),
    "ranks with other settings than the rest": (
        lambda: site(*TWO, of=but_rank_0(job(env={}), env={"NCCL_CROSS_NIC": "1"})),
        Ill(
            "environment", "rank:0", "NCCL_CROSS_NIC=1 on rank 0; unset on the others", "the same on all ranks", "rule"
        ),
    ),
    "connections over another interface than the fabric's": (
        lambda: site(*two_interfaces(), cluster=ethernet(), of=job(addresses=("10.78.0.1",), per_host=1)),
        Ill("wrong_interface", "nic:n01/eth1", "its ranks connect over eth1", "eth0", "declared"),
    ),
    "a host with another driver than most": (
        lambda: site(healthy(), healthy(), healthy(), with_software(driver="570.10")),
        Ill("version_skew", "host:n04", "driver 570.10 on n04", "driver 580.65", "siblings"),
    ),
    "ranks with another NCCL": (
        lambda: site(*TWO, of=but_rank_0(job(versions={"nccl": "2.30.7"}), versions={"nccl": "2.18.3"})),
        Ill("version_skew", "rank:0", "nccl 2.18.3 on rank 0", "nccl 2.30.7", "siblings"),
    ),
    "two hosts that differ, of which nobody knows which is right": (
        lambda: site(healthy(), with_software(driver="570.10")),
        Ill(
            "version_skew", "host:n01", "driver 570.10 on n02; driver 580.65 on n01", "the same everywhere", "siblings"
        ),
    ),
    "a port with old firmware": (
        lambda: site(with_port(7, firmware="28.36.1010")),
        Ill("version_skew", "nic:n01/mlx5_7/1", "firmware 28.36.1010", "firmware 28.39.1002", "siblings"),
    ),
    "a port with a smaller MTU than its siblings": (
        lambda: site(with_port(2, mtu=2044)),
        Ill("mtu", "nic:n01/mlx5_2/1", "MTU 2044", "MTU 4092", "siblings"),
    ),
    "RoCE over frames of 1500 bytes": (
        lambda: site(with_ports(link_layer="Ethernet", mtu=1500), cluster=ROCE),
        Ill("mtu", "nic:n01/mlx5_0/1", "MTU 1500", "MTU 9000", "hardware"),
    ),
    "a GID index that a flap has moved": (
        lambda: site(*roce_nodes(), cluster=ROCE, of=job(env={"NCCL_IB_GID_INDEX": "5"})),
        Ill(
            "gid",
            "nic:n01/mlx5_0/1",
            "NCCL_IB_GID_INDEX=5 is no entry of the table",
            "an entry of RoCE v2: 3",
            "hardware",
        ),
    ),
    "a RoCE port without a GID of version 2": (
        lambda: site(*roce_nodes(kinds=("IB/RoCE v1",)), cluster=ROCE),
        Ill("gid", "nic:n01/mlx5_0/1", "no GID of RoCE v2", "a GID of RoCE v2", "rule"),
    ),
    "a traffic class of another priority than declared": (
        lambda: site(*roce_nodes(), cluster=ROCE, of=job(env={"NCCL_IB_TC": "160"})),
        Ill("pfc", "job", "NCCL_IB_TC=160 is priority 5", "priority 3, as NCCL_IB_TC=104", "declared"),
    ),
    "a port that is paused in another priority than declared": (
        lambda: site(*roce_nodes(), cluster=ROCE, pauses={("n01", "ib2"): {0: 17, 3: 0}}),
        Ill("pfc", "nic:n01/mlx5_2/1", "paused in priority 0", "priority 3", "declared"),
    ),
    "access control that redirects": (
        lambda: site(with_software(acs="on")),
        Ill("acs", "host:n01", "ACS of the PCIe switches redirects", "off", "rule"),
    ),
    "an IOMMU that translates (C03)": (
        lambda: site(with_software(iommu="translated")),
        Ill(
            "iommu", "host:n01", "the IOMMU translates the devices' addresses", "pass-through (iommu=pt) or off", "rule"
        ),
    ),
    "a power limit below the default (A21)": (
        lambda: site(with_gpu(6, power_limit_w=500.0)),
        Ill("power_limit", "gpu:n01/GPU-6", "500 W", "700 W", "hardware"),
    ),
    "persistence mode off": (
        lambda: site(with_software(persistence=False)),
        Ill("persistence_off", "host:n01", "persistence mode is off", "on", "rule"),
    ),
    "an interface that is down over a port that is up": (
        lambda: site(with_port(6, netdev_state="DOWN")),
        Ill("netdev_down", "nic:n01/mlx5_6/1", "ib6 is down while its port is ACTIVE", "up", "siblings"),
    ),
    "fewer GPUs than declared": (
        lambda: site(replaced(healthy(), gpus=[gpu(n) for n in range(7)]), cluster=CLUSTER),
        Ill("too_few_gpus", "host:n01", "7 GPUs", "8 GPUs", "declared"),
    ),
    "a GPU that NVML does not know": (
        lambda: site(replaced(healthy(), gpus=[*(gpu(n) for n in range(7)), Gpu(pci="00000000:17:00.0")])),
        Ill("too_few_gpus", "gpu:n01/PCI:00000000:17:00.0", "NVML does not know 1 of 8 GPUs", "8 GPUs", "observed"),
    ),
    "other GPUs than declared": (
        lambda: site(
            with_gpus(name="NVIDIA A100-SXM4-80GB", nvlinks_active=12),
            cluster=ClusterSpec(node=NodeSpec(gpu="H100-SXM")),
        ),
        Ill("other_gpu", "gpu:n01/GPU-0", "NVIDIA A100-SXM4-80GB", "H100-SXM", "declared"),
    ),
}


def parallel(**sizes: int) -> Any:
    return msgspec.structs.replace(LLAMA.parallel, **sizes)


def leaves(members: dict[str, tuple[str, ...]], ratio: float = 4.0) -> ClusterSpec:
    fabric = Fabric(kind="infiniband", rate_gbps=400.0, oversubscription=ratio)
    return ClusterSpec(fabric=fabric, node=NodeSpec(gpu="H100-SXM", gpus=8, nics=8), leaves=members)


def but_rank_0(whole: JobSeen, **facts: Any) -> JobSeen:
    """The same job, but its first rank is otherwise."""
    return dataclasses.replace(whole, ranks={**whole.ranks, 0: dataclasses.replace(whole.ranks[0], **facts)})


def in_containers(whole: JobSeen) -> JobSeen:
    return dataclasses.replace(
        whole, ranks={number: dataclasses.replace(rank, container=True) for number, rank in whole.ranks.items()}
    )


def two_interfaces() -> tuple[NodeInventory, NodeInventory]:
    """As the bed's: a fabric of 1 Gbit/s on eth0, and another interface."""
    nics = tuple(Nic(netdev=f"eth{n}", state="ACTIVE", mtu=1500, addresses=(f"10.7{n + 7}.0.1",)) for n in range(2))
    away = tuple(msgspec.structs.replace(nic, addresses=(f"10.7{n + 7}.0.2",)) for n, nic in enumerate(nics))
    return NodeInventory(nics=nics), NodeInventory(nics=away)


def ethernet() -> ClusterSpec:
    return ClusterSpec(fabric=Fabric(kind="ethernet", rate_gbps=1.0, interface="eth0"))


def ten_ports(rate: float = 200.0, beside: str = "NODE") -> NodeInventory:
    """Two more ports than GPUs, of the same model, for storage; nobody says so."""
    nics = tuple(port(n, rate_gbps=rate if n > 7 else 400.0) for n in range(10))
    return healthy(nics=nics, affinity={one: {**words, "mlx5_8": beside} for one, words in near().items()})


WIDE = {"tp:0": tuple(range(8))}


def tray() -> NodeInventory:
    """Four of the GPUs of a rack that NVLink joins."""
    cards = tuple(gpu(n, name="NVIDIA GB200") for n in range(4))
    fabric = NvFabric(state="completed", status="success", cluster_uuid="5f3a", clique=1)
    return NodeInventory(gpus=cards, fabric=fabric)


def roce_nodes(kinds: Sequence[str] = ("IB/RoCE v1", "RoCE v2")) -> tuple[NodeInventory, NodeInventory]:
    gids = tuple(Gid(index=2 + n, type=kind) for n, kind in enumerate(kinds))
    made = with_ports(link_layer="Ethernet", mtu=9000, gids=gids)
    return made, made


@pytest.mark.parametrize("case", CASES)
def test_one_thing_that_is_wrong_is_one_finding_with_what_is_what_should_be_and_why(case: str) -> None:
    made, ill = CASES[case]
    findings = check(made())
    assert [each.subtype for each in findings] == [ill.subtype]
    (each,) = findings
    assert (each.loci[0], each.seen, each.should, each.basis) == (ill.locus, ill.seen, ill.should, ill.basis)
    assert each.because
    assert remedy(each)


def test_every_subtype_of_the_checks_is_in_the_catalogue_and_has_a_case() -> None:
    checked = {subtype for row in CHECKS for subtype in row.subtypes}
    assert checked == set(CAUSES["topology_misconfiguration"].subtypes)
    assert checked == {ill.subtype for _, ill in CASES.values()}


# -- silent -----------------------------------------------------------------------------------------------------------

CONNECTX6 = {"firmware": "22.39.1002", "rate_gbps": 100.0, "link_layer": "Ethernet", "pcie_gen": 4, "pcie_gen_max": 4}

SILENT: Mapping[str, Callable[[], Site]] = {
    "a healthy node, nothing declared": lambda: site(healthy()),
    "a healthy node, as declared": lambda: site(healthy(), cluster=CLUSTER),
    "healthy nodes with a job": lambda: site(*TWO, cluster=CLUSTER, of=job(nccl=(FAST,), env={})),
    "ports that are meant to be down (A55)": lambda: site(
        replaced(
            healthy(),
            nics=[
                *(healthy().nics or ()),
                *(
                    Nic(
                        device=f"mlx5_{10 + n}",
                        port=1,
                        state="DOWN",
                        phys_state="Disabled",
                        link_layer="Ethernet",
                        firmware="22.39.1002",
                    )
                    for n in range(3)
                ),
            ],
        )
    ),
    "a port that is not cabled": lambda: site(with_port(1, state="DOWN", phys_state="Polling", rate_gbps=None)),
    "a down port with a leftover rate (A56)": lambda: site(
        with_port(1, state="DOWN", phys_state="Polling", rate_gbps=10.0)
    ),
    "storage ports of half the rate": lambda: site(healthy(), cluster=CLUSTER),
    "ports of another model at another rate": lambda: site(
        replaced(healthy(), nics=[*(healthy().nics or ()), *(port(20 + n, **CONNECTX6) for n in range(4))])
    ),
    "two ports of one model that are alike and slower, of which nobody says what they are for": lambda: site(
        NodeInventory(nics=tuple(port(n, rate_gbps=200.0 if n > 7 else 400.0) for n in range(10)))
    ),
    "more ports than declared, the others slower": lambda: site(
        NodeInventory(nics=tuple(port(n, rate_gbps=200.0 if n > 7 else 400.0) for n in range(10))),
        cluster=ClusterSpec(fabric=Fabric(kind="infiniband", rate_gbps=400.0), node=NodeSpec(nics=8)),
    ),
    "two ports that differ: no majority": lambda: site(NodeInventory(nics=(port(0), port(1, rate_gbps=200.0)))),
    "three ports of which two agree: no majority": lambda: site(
        NodeInventory(nics=(port(0), port(1), port(2, rate_gbps=200.0)))
    ),
    "ports held by another network namespace": lambda: site(with_port(3, rate_gbps=100.0, netns="other")),
    "virtual functions that are down by design": lambda: site(
        replaced(
            healthy(),
            nics=[
                *(healthy().nics or ()),
                *(port(30 + n, state="DOWN", rate_gbps=None, physfn="0000:40:00.0") for n in range(4)),
            ],
        )
    ),
    "an idle GPU at generation 1 (A23)": lambda: site(with_gpus(pcie_gen=1, pcie_busy=False)),
    "a GPU of which nobody knows whether it works, at generation 1": lambda: site(
        replaced(healthy(), gpus=[gpu(n, pcie_gen=1, pcie_busy=None) for n in range(8)])
    ),
    "devices whose slot is older than they are": lambda: site(with_gpus(pcie_gen=4, pcie_gen_slot=4)),
    "links of which nothing is known (A64)": lambda: site(
        replaced(healthy(), gpus=[gpu(n, pcie_gen=None, pcie_width=None, pcie_gen_max=None) for n in range(8)])
    ),
    "PCIe cards without NVLink bridges": lambda: site(
        NodeInventory(
            gpus=tuple(
                Gpu(index=n, uuid=f"GPU-{n}", name="NVIDIA H100 PCIe", nvlinks=18, nvlinks_active=0) for n in range(4)
            )
        )
    ),
    "a part with fewer links by design": lambda: site(with_gpus(name="NVIDIA H800", nvlinks=18, nvlinks_active=8)),
    "MIG": lambda: site(with_gpus(mig=True, nvlinks_active=0)),
    "no NVLink fabric (A40)": lambda: site(healthy(fabric=None)),
    "an NVLink fabric that names its health": lambda: site(
        healthy(fabric=NvFabric(state="completed", status="success"))
    ),
    "GeForce cards, whose driver has no GPUDirect RDMA": lambda: site(
        NodeInventory(
            gpus=tuple(Gpu(index=n, uuid=f"GPU-{n}", name="NVIDIA GeForce RTX 3090") for n in range(8)),
            nics=(port(0),),
            software=Software(peermem=False, dmabuf=False),
        )
    ),
    "dma-buf without the peer memory module": lambda: site(with_software(peermem=False, dmabuf=True)),
    "no peer memory module, dma-buf unknown, no other host": lambda: site(with_software(peermem=False, dmabuf=None)),
    "sockets where a fabric of Ethernet is declared": lambda: site(
        *two_interfaces(), cluster=ethernet(), of=job(nccl=(Nccl(network="Socket"),), per_host=1)
    ),
    "sockets of a job on one host": lambda: site(healthy(), of=job(("n01",), nccl=(Nccl(network="Socket"),))),
    "NCCL_IB_DISABLE where a plugin carries RDMA all the same": lambda: site(
        *TWO, of=job(env={"NCCL_IB_DISABLE": "1"}, nccl=(dataclasses.replace(FAST, network="EFA", nics=()),))
    ),
    "bootstrap over another interface than an RDMA fabric's": lambda: site(
        *TWO,
        cluster=msgspec.structs.replace(
            CLUSTER, fabric=Fabric(kind="infiniband", rate_gbps=400.0, interface=tuple(f"ib{n}" for n in range(8)))
        ),
        of=job(env={"NCCL_SOCKET_IFNAME": "eno1"}),
    ),
    "the fabric's interface": lambda: site(
        *two_interfaces(), cluster=ethernet(), of=job(addresses=("10.77.0.1", "10.77.0.2"), per_host=1)
    ),
    "NCCL_IB_HCA that names all training ports and no others": lambda: site(
        *TWO, of=job(env={"NCCL_IB_HCA": "=" + ",".join(f"mlx5_{n}:1" for n in range(8))})
    ),
    "a topology file, as clouds ship them": lambda: site(*TWO, of=job(env={"NCCL_TOPO_FILE": "/opt/ndv5-topo.xml"})),
    "settings that name devices and so differ from host to host": lambda: site(
        *TWO,
        of=but_rank_0(
            job(env={"NCCL_IB_HCA": "mlx5"}), env={"NCCL_IB_HCA": "=" + ",".join(f"mlx5_{n}" for n in range(8))}
        ),
    ),
    "an interface of a container": lambda: site(*TWO, of=in_containers(job(env={"NCCL_SOCKET_IFNAME": "net1"}))),
    "NCCL_IB_HCA that names virtual functions": lambda: site(
        *[replaced(healthy(), nics=[*(healthy().nics or ()), port(30, physfn="0000:40:00.0")])] * 2,
        of=job(env={"NCCL_IB_HCA": "=mlx5_30"}),
    ),
    "a storage server with another kernel than the GPU nodes": lambda: site(
        *TWO, healthy(), NodeInventory(software=Software(kernel="5.14.0"))
    ),
    "an exclusion of interfaces": lambda: site(*TWO, of=job(env={"NCCL_SOCKET_IFNAME": "^docker0,lo"})),
    "leaves without oversubscription": lambda: site(
        *TWO, cluster=leaves({"leaf1": ("n01",), "leaf2": ("n02",)}, ratio=1.0), of=job()
    ),
    "a job that needs two leaves, each left once": lambda: site(
        *TWO,
        *TWO,
        cluster=leaves({"leaf1": ("n01", "n02"), "leaf2": ("n03", "n04")}),
        of=job(("n01", "n02", "n03", "n04")),
    ),
    "a job each of whose rails has a leaf of its own": lambda: site(
        *TWO, cluster=leaves({f"leaf{rail}": (f"n01/mlx5_{rail}", f"n02/mlx5_{rail}") for rail in range(8)}), of=job()
    ),
    "a job on one leaf": lambda: site(*TWO, cluster=leaves({"leaf1": ("n01", "n02")}), of=job()),
    "tensor parallelism over the nodes of one NVLink rack": lambda: site(
        *[healthy(fabric=NvFabric(state="completed", cluster_uuid="c0ffee", clique=1))] * 2,
        of=job(spec=msgspec.structs.replace(LLAMA, parallel=parallel(tp=16))),
    ),
    "tensor-parallel groups each on one node": lambda: site(
        *TWO, of=job(groups={"tp:0": tuple(range(8)), "tp:8": tuple(range(8, 16)), "dp:0": (0, 8)})
    ),
    "RoCE in the declared priority": lambda: site(
        *roce_nodes(),
        cluster=ROCE,
        of=job(env={"NCCL_IB_TC": "106", "NCCL_IB_GID_INDEX": "3"}),
        pauses={("n01", "ib0"): {3: 1000}, ("n02", "ib0"): {0: 0}},
    ),
    "hosts without GPUs": lambda: site(NodeInventory(software=Software(iommu="translated", persistence=False))),
    "storage ports of half the rate behind a GPU's switch": lambda: site(ten_ports(beside="PXB")),
    "storage ports of half the rate, of which only the training's is declared": lambda: site(
        ten_ports(), cluster=ClusterSpec(fabric=Fabric(kind="infiniband", rate_gbps=400.0))
    ),
    "NCCL_IB_HCA that leaves the storage ports out": lambda: site(
        *[ten_ports(rate=400.0)] * 2, of=job(env={"NCCL_IB_HCA": "=" + ",".join(f"mlx5_{n}" for n in range(8))})
    ),
    "a job of one rank a host, with one NIC": lambda: site(*TWO, of=job(per_host=1, env={"NCCL_IB_HCA": "=mlx5_0"})),
    "a login node beside GPU nodes": lambda: site(
        *[healthy()] * 4, NodeInventory(nics=(port(0, rate_gbps=200.0, mtu=2044),), software=Software(peermem=False))
    ),
    "a login node beside GPU nodes as declared": lambda: site(
        healthy(), NodeInventory(nics=(port(0, rate_gbps=200.0),)), cluster=CLUSTER
    ),
    "NICs of a declared Ethernet, of which nobody says which": lambda: site(
        healthy(nics=(Nic(netdev="eth0", state="ACTIVE", rate_gbps=100.0),)),
        cluster=ClusterSpec(fabric=Fabric(kind="ethernet", rate_gbps=100.0), node=NodeSpec(nics=2)),
    ),
    "a single GPU of a board, as clouds rent it": lambda: site(NodeInventory(gpus=(gpu(0, nvlinks_active=0),))),
    "half a board of V100": lambda: site(
        NodeInventory(gpus=tuple(Gpu(index=n, name="Tesla V100-SXM2-16GB", nvlinks_active=4) for n in range(4)))
    ),
    "PCIe cards that could be bridged": lambda: site(with_gpus(name="NVIDIA H200 NVL", nvlinks_active=0)),
    "tensor-parallel groups over the trays of a rack": lambda: site(*[tray()] * 2, of=job(per_host=4, groups=WIDE)),
    "a tray of which no inventory tells": lambda: site(tray(), of=job(per_host=4, groups=WIDE)),
    "GeForce cards without GPUDirect RDMA, peers forbidden": lambda: site(
        *[NodeInventory(gpus=(Gpu(index=0, name="NVIDIA GeForce RTX 4090"),), nics=(port(0),))] * 2,
        of=job(per_host=1, env={"NCCL_P2P_DISABLE": "1"}, nccl=(Nccl(network="IB", nics=("mlx5_0",), gdr=False),)),
    ),
    "sockets that were asked for over Ethernet of which nobody says that it can RDMA": lambda: site(
        *[healthy(nics=(port(0, link_layer="Ethernet", rate_gbps=25.0, mtu=1500),), affinity=None)] * 2,
        of=job(env={"NCCL_IB_DISABLE": "1"}, nccl=(Nccl(network="Socket"),)),
    ),
    "settings that leave NCCL a choice": lambda: site(
        *TWO, of=job(env={"NCCL_ALGO": "Ring,Tree", "NCCL_PROTO": "^LL128"})
    ),
    "a protocol that the plugin of EFA prescribes": lambda: site(
        *TWO, of=job(env={"NCCL_PROTO": "simple"}, nccl=(Nccl(network="EFA"),))
    ),
    "settings of five thousand digits": lambda: site(
        *roce_nodes(), cluster=ROCE, of=job(env=dict.fromkeys(("NCCL_IB_TC", "NCCL_MAX_CTAS"), "9" * 5000))
    ),
    "rails that share a leaf": lambda: site(
        *TWO,
        *TWO,
        cluster=leaves(
            {f"leaf{a}": tuple(f"n0{2 * a - b}/mlx5_{r}" for b in (1, 0) for r in range(8)) for a in (1, 2)}
        ),
        of=job(("n01", "n02", "n03", "n04")),
    ),
    "leaves of unequal size, all of them needed": lambda: site(
        *TWO,
        *TWO,
        cluster=leaves({"leaf1": ("n01", "n02"), "leaf2": ("n03",), "leaf3": ("n04",)}),
        of=job(("n01", "n02", "n03", "n04")),
    ),
    "storage that is paused in a priority of its own": lambda: site(
        *roce_nodes(), cluster=ROCE, pauses={("n01", "ib8"): {5: 9}}
    ),
    "figures that cannot be": lambda: site(
        with_gpus(name="X9", nvlinks_active=-3, pcie_gen=-4, pcie_width=0, power_limit_w=-1.0)
    ),
    "an idle GPU behind a bridge that idles with it": lambda: site(
        with_gpu(1, pcie_busy=False, pcie_gen=1, pcie_gen_path=1, pcie_width_path=16)
    ),
    "IPoIB that nobody uses": lambda: site(with_ports(netdev_state="DOWN")),
    "an empty machine": lambda: site(NodeInventory()),
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_of(case: str) -> None:
    assert check(SILENT[case]()) == []


# -- cost -------------------------------------------------------------------------------------------------------------


def test_a_port_of_half_the_rate_costs_a_job_over_it_what_the_model_says_with_an_interval() -> None:
    each = one(with_port(3, rate_gbps=100.0), healthy(), cluster=CLUSTER, of=job(env={}, nccl=(FAST,)))
    assert each.cost is not None
    assert each.cost.job == "llama-70b"
    assert 1.02 < each.cost.low < each.cost.slowdown < each.cost.high < 4
    assert not is_latent(each)


def test_the_same_port_is_latent_where_no_job_uses_it_or_the_job_has_one_host() -> None:
    assert is_latent(one(with_port(3, rate_gbps=100.0), healthy(), cluster=CLUSTER))
    alone = one(with_port(3, rate_gbps=100.0), healthy(), cluster=CLUSTER, of=job(("n01",)))
    assert is_latent(alone)
    elsewhere = one(with_port(3, rate_gbps=100.0), healthy(), healthy(), cluster=CLUSTER, of=job(("n02", "n03")))
    assert elsewhere.cost is None


def test_the_more_is_lost_the_more_it_costs() -> None:
    def costs(rate: float) -> float:
        cost = one(with_port(3, rate_gbps=rate), healthy(), cluster=CLUSTER, of=job()).cost
        assert cost is not None
        return cost.slowdown

    assert 1 <= costs(300.0) < costs(200.0) < costs(100.0) < costs(25.0)


@pytest.mark.parametrize(
    ("case", "least"),
    [
        ("NCCL over sockets where there is RDMA (C01, C08)", 1.5),
        ("NCCL's log without GDRDMA (C02)", 1.02),
        ("a rank that was given the NIC of another socket", 1.001),
        ("tensor-parallel groups wider than a node", 1.2),
        ("ports that NCCL does not use", 1.05),
        ("a job under two leaves that one would hold", 1.02),
    ],
)
def test_what_slows_a_job_is_priced(case: str, least: float) -> None:
    (each,) = check(CASES[case][0]())
    assert each.cost is not None
    assert each.cost.slowdown > least
    assert each.cost.low <= each.cost.slowdown <= each.cost.high


def test_a_busy_gpu_on_a_slow_link_holds_up_the_nic_that_it_feeds() -> None:
    each = one(with_gpu(2, pcie_gen=2), healthy(), of=job(env={}, nccl=(FAST,)), cluster=CLUSTER)
    assert each.subtype == "pcie_low"
    assert each.cost is not None
    assert each.cost.slowdown > 1.02


def test_a_power_limit_costs_a_job_what_its_clock_loses() -> None:
    each = one(with_gpu(6, power_limit_w=500.0), healthy(), of=job(env={}, nccl=(FAST,)))
    assert each.cost is not None
    assert 1.05 < each.cost.slowdown < 1.3  # 500 of 700 W leave 0.82 of the clock


def test_hosts_of_a_job_without_gpudirect_are_one_finding_that_names_what_is_missing_where() -> None:
    bare = with_software(peermem=False, dmabuf=False)
    each = one(healthy(), bare, of=job(nccl=(dataclasses.replace(FAST, gdr=False),)))
    assert (each.subtype, each.loci) == ("gdr_off", ("host:n01", "host:n02"))
    assert each.because == "no peer memory module on n02"


def test_a_job_whose_model_nobody_declared_leaves_the_cost_unknown_and_says_what_is_missing() -> None:
    seen = site(with_port(3, rate_gbps=100.0), healthy(), cluster=CLUSTER, of=job(spec=decode_job("{}")))
    (each,) = check(seen)
    assert each.cost is None
    assert dict(unchecked(seen))["costs for llama-70b"].startswith("no step time can be expected without model.layers")


# -- properties -------------------------------------------------------------------------------------------------------

INVENTORIES = st.sampled_from(
    [healthy(), with_port(3, rate_gbps=100.0), with_gpu(2, pcie_gen=2), with_software(driver="570.10"),
     with_gpu(3, nvlinks_active=17), with_port(4, state="DOWN", rate_gbps=None), with_gpus(pcie_busy=False, pcie_gen=1)]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), INVENTORIES, min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_hosts_ports_and_gpus_changes_nothing(nodes: dict[str, NodeInventory], chance: Any) -> None:
    def shuffled(inventory: NodeInventory) -> NodeInventory:
        gpus, nics = list(inventory.gpus or ()), list(inventory.nics or ())
        chance.shuffle(gpus)
        chance.shuffle(nics)
        return replaced(inventory, gpus=gpus, nics=nics)

    names = sorted(nodes)
    chance.shuffle(names)
    assert check(Site({name: shuffled(nodes[name]) for name in names})) == check(Site(nodes))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.sampled_from([None, CLUSTER]))
def test_a_healthy_node_more_among_healthy_ones_adds_no_finding(count: int, cluster: ClusterSpec | None) -> None:
    assert check(site(*[healthy()] * count, cluster=cluster)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(INVENTORIES, min_size=1, max_size=5))
def test_a_healthy_node_more_is_not_blamed_for_what_ails_the_others(nodes: list[NodeInventory]) -> None:
    new = f"n{len(nodes) + 1:02}"
    within = {each.subtype for each in found(*nodes)}
    blamed = [each for each in found(*nodes, healthy()) if any(new in locus for locus in each.loci)]
    assert all(each.subtype == "version_skew" for each in blamed)
    assert within <= {each.subtype for each in found(*nodes, healthy())}


ODD = st.sampled_from([None, 0, -1, 1, 10**9, 1e300, "", "x", True, "ACTIVE", []])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_stands_in_an_inventory_no_check_fails(data: st.DataObject) -> None:
    whole = json.loads(msgspec.json.encode(healthy()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from(["gpus", "nics"]))
        device = data.draw(st.sampled_from(whole[at]))
        device[data.draw(st.sampled_from(sorted(Gpu.__struct_fields__ if at == "gpus" else Nic.__struct_fields__)))] = (
            data.draw(ODD)
        )
    try:
        node = decode_node(json.dumps(whole))
    except DocumentError:
        return
    seen = site(node, healthy(), healthy(), cluster=CLUSTER, of=job(env={}, nccl=(FAST,)))
    for each in check(seen):
        assert "nan" not in json.dumps(document(each, seen, "east")).lower()


# -- what a recording tells -------------------------------------------------------------------------------------------


def gathered(*lines: str) -> Site:
    gathering = Gathering()
    gathering.add(decode(f"{line}{at:018}") for at, line in enumerate(lines))
    return gathering.site()


def quoted(document: Any) -> str:
    return json.dumps(document).replace("\\", "\\\\").replace('"', '\\"')


def test_the_newest_word_of_each_subject_counts_and_an_older_attempt_does_not() -> None:
    env = quoted({"NCCL_ALGO": "Ring"})
    seen = gathered(
        f'diagnosd_rank,job=j,host=n01,rank=0 attempt=0i,world=1i,env="{env}",versions="nccl=2.30.7,torch=2.13" 1',
        'diagnosd_rank,job=j,host=n02,rank=0 attempt=1i,world=2i,gpu="GPU-1",addresses="10.0.0.1,10.0.0.2" 1',
        'diagnosd_rank,job=j,host=n02,rank=1 attempt=1i,world=2i,env="not JSON" 1',
        "diagnosd_rank,job=j,host=n01,rank=0 attempt=0i,world=1i 1",
        'diagnosd_group,job=j,group=tp:0 members="0-1,8",attempt=1i 1',
        'diagnosd_nccl,job=j,host=n02,rank=0,group=tp:0 network="IB",nics="mlx5_0:1+mlx5_1",gdr=false 1',
        "ethtool,host=n02,interface=ib0,driver=mlx5_core rx_prio3_pause=5i,rx_prio0_pause=0i 1",
        f'diagnosd_cluster,cluster=c spec="{quoted({"fabric": {"kind": "roce"}})}" 1',
        f'diagnosd_node,host=n02 inventory="{quoted({"gpus": [{"index": 0}]})}" 1',
    )  # fmt: skip
    job = seen.jobs["j"]
    assert job.hosts == ("n02",)
    assert (job.world, job.groups) == (2, {"tp:0": (0, 1, 8)})
    assert job.ranks[0].addresses == ("10.0.0.1", "10.0.0.2")
    assert job.ranks[0].nccl == (Nccl(network="IB", nics=("mlx5_0", "mlx5_1"), gdr=False),)
    assert job.ranks[1].env is None
    assert seen.pauses == {("n02", "ib0"): {3: 5, 0: 0}}
    assert seen.cluster == decode_cluster('{"fabric": {"kind": "roce"}}')
    assert seen.inventories == {"n02": decode_node('{"gpus": [{"index": 0}]}')}


def test_ranks_that_a_jobs_document_alone_names_are_known() -> None:
    spec = quoted({"ranks": [{"rank": 0, "host": "n01"}, {"rank": 1, "host": "n02", "gpu": "GPU-7"}]})
    job = gathered(f'diagnosd_job,job=j spec="{spec}" 1').jobs["j"]
    assert (job.hosts, job.ranks[1].gpu, job.world) == (("n01", "n02"), "GPU-7", 2)


@pytest.mark.parametrize("text", ["", "x", "5-1", "0-99999999999", "-3", "1-2-3", "0-999999999"])
def test_members_that_are_no_ranges_are_none(text: str) -> None:
    assert ranges(text) == ()


def test_what_nccl_said_of_an_earlier_attempt_is_forgotten() -> None:
    seen = gathered(
        "diagnosd_rank,job=j,host=n01,rank=0 attempt=0i 1",
        'diagnosd_nccl,job=j,host=n01,rank=0,group=world:0 network="Socket" 1',
        "diagnosd_rank,job=j,host=n01,rank=0 attempt=1i 1",
    )
    assert seen.jobs["j"].ranks[0].nccl == ()


def test_an_nvlink_fabric_whose_number_is_all_zeros_ends_with_the_node() -> None:
    fabric = NvFabric(state="completed", cluster_uuid="00000000-0000-0000-0000-000000000000", clique=0)
    each = one(*[healthy(fabric=fabric)] * 2, of=job(groups={"tp:0": tuple(range(16))}))
    assert each.subtype == "layout"


def test_two_settings_of_one_job_are_two_diagnoses() -> None:
    seen = site(*TWO, of=job(env={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}))
    assert len({document(each, seen, "east")["id"] for each in check(seen)}) == 2


def test_the_mtu_of_ipoib_is_told_and_has_no_price() -> None:
    assert one(with_port(2, mtu=2044), healthy(), cluster=CLUSTER, of=job(env={})).cost is None


def test_gpudirect_that_is_off_for_no_nic_is_near_says_so() -> None:
    far = healthy(affinity={f"GPU{g}": {f"mlx5_{p}": "NODE" for p in range(8)} for g in range(8)})
    each = one(far, far, of=job(nccl=(dataclasses.replace(FAST, gdr=False),)))
    assert each.because == "no NIC behind a GPU's own PCIe switch on n01, n02: NCCL then leaves it off"
    assert "NCCL_NET_GDR_LEVEL=PHB" in remedy(each)


def test_a_finding_is_a_diagnosis_of_the_contract() -> None:
    seen = site(with_port(3, rate_gbps=100.0), healthy(), cluster=CLUSTER, of=job(env={}, nccl=(FAST,)))
    (each,) = check(seen)
    told = json.loads(json.dumps(document(each, seen, "east")))
    assert (told["type"], told["cause"], told["subtype"]) == ("diagnosis", "topology_misconfiguration", "link_rate_low")
    assert (told["state"], told["severity"], told["owner"]) == ("confirmed", "ticket", "fabric")
    assert told["locus"] == ["nic:n01/mlx5_3/1"]
    assert told["assets"] == [{"host": "n01", "nic": "mlx5_3", "port": 1, "pci": "0000:43:00.0"}]
    assert told["slowdown"] > 1.02
    assert told["fix_gain"] == pytest.approx(1 - 1 / told["slowdown"], abs=1e-3)
    assert told["baseline"] == {"from": "model"}
    assert told["victims"] == {"ranks": 16, "jobs": ["llama-70b"]}
    assert told["evidence"][0]["observed"] == 100.0
    assert told["text"].endswith("it should be 400 Gbit/s (declared in the cluster.toml).")
    latent = site(with_port(3, rate_gbps=100.0), cluster=CLUSTER)
    quiet = document(check(latent)[0], latent, "east")
    assert quiet["state"] == "latent"
    assert {"start", "detected", "end", "slowdown", "job"}.isdisjoint(quiet)


# -- the corpora: healthy ones, and those that are not ----------------------------------------------------------------


def of_ibstat(name: str) -> NodeInventory:
    told = [each.nic() for each in parse((CORPORA / "ib_tools" / name).read_text())]
    assert told
    return decode_node(json.dumps({"nics": told}))


def of_snapshot(name: str, root: Path) -> NodeInventory:
    """A tree that is one JSON object from path to content."""
    for path, text in json.loads((CORPORA / "sysfs" / name).read_text()).items():
        write(root, {path.lstrip("/"): text.removesuffix("\n")})
    return decode_node(json.dumps(Node(captured("n01", root)).inventory()))


def of_nvlink(name: str) -> NodeInventory:
    """What `nvidia-smi nvlink --status` prints."""
    gpus: list[Gpu] = []
    for line in (CORPORA / "nvidia_smi" / name).read_text().splitlines():
        words = line.split()
        if words[:1] == ["GPU"] and len(words) > 2:
            gpus.append(
                Gpu(index=int(words[1][:-1]), uuid=words[-1][:-1], name=" ".join(words[2:-2]), nvlinks_active=0)
            )
        elif words[:1] == ["Link"] and gpus:
            gpus[-1] = msgspec.structs.replace(gpus[-1], nvlinks_active=(gpus[-1].nvlinks_active or 0) + 1)
    assert gpus
    return NodeInventory(gpus=tuple(gpus))


def of_topology(name: str) -> NodeInventory:
    """An NCCL_TOPO_FILE: a switch with what is behind it, on a socket; names as NCCL would count them."""
    gpus, nics, places = [], [], {}
    for cpu in ET.parse(CORPORA / "nccl" / name).getroot():
        for switch in cpu:
            for device in switch:
                where, kind = (switch.get("busid"), cpu.get("numaid")), device.get("class") or ""
                if kind.startswith("0x03"):
                    places[f"GPU{len(gpus)}"] = where
                    gpus.append(Gpu(index=len(gpus), uuid=f"GPU-{len(gpus)}", pci=device.get("busid")))
                elif kind == "0x020700":
                    net = device.find(".//net")
                    rate = float(net.get("speed") or 0) / 1000 if net is not None else 200.0
                    places[f"mlx5_{len(nics)}"] = where
                    nics.append(Nic(device=f"mlx5_{len(nics)}", port=1, state="ACTIVE", rate_gbps=rate,
                                    link_layer="InfiniBand"))  # fmt: skip
    near = {
        one: {
            other: "PIX"
            if places[one][0] == places[other][0]
            else "NODE"
            if places[one][1] == places[other][1]
            else "SYS"
            for other in places
            if other != one
        }
        for one in places
        if one.startswith("GPU")
    }
    assert gpus
    return NodeInventory(gpus=tuple(gpus), nics=tuple(nics), affinity=near)


HEALTHY: Mapping[str, Callable[[Path], NodeInventory]] = {
    "ibstat.47.0.a100.all.active.0": lambda _: of_ibstat("ibstat.47.0.a100.all.active.0"),
    "ibstat.47.0.h100.all.active.1": lambda _: of_ibstat("ibstat.47.0.h100.all.active.1"),
    "ibstat.47.0.h100.some.down.0": lambda _: of_ibstat("ibstat.47.0.h100.some.down.0"),
    "ibstatus.39.0.a100.all.active.0": lambda _: of_ibstat("ibstatus.39.0.a100.all.active.0"),
    "learn_good.json": lambda root: of_snapshot("learn_good.json", root),
    "good_nvlink_status.txt": lambda _: of_nvlink("good_nvlink_status.txt"),
    "nvidia-smi.nvlink.status.a100": lambda _: of_nvlink("nvidia-smi.nvlink.status.a100"),
    "ndv4-topo.xml": lambda _: of_topology("ndv4-topo.xml"),
    "ndv5-topo.xml": lambda _: of_topology("ndv5-topo.xml"),
}


@needs_corpora
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_capture_has_nothing_wrong(name: str, tmp_path: Path) -> None:
    assert found(HEALTHY[name](tmp_path)) == []


@needs_corpora
def test_an_interface_that_is_down_over_a_port_that_is_up_is_named(tmp_path: Path) -> None:
    each = one(of_snapshot("learn_ib_intf_operstate_down.json", tmp_path))
    assert (each.subtype, each.basis) == ("netdev_down", "siblings")


@needs_corpora
def test_four_gpus_across_the_sockets_from_the_only_nic_are_named() -> None:
    each = one(of_topology("nccl-topo-8x3090-pcie-1nic.xml"))
    assert each.subtype == "nic_affinity"
    assert each.loci == tuple(f"gpu:n01/GPU-{index}" for index in range(4))


@needs_corpora
def test_the_captured_h100_tree_can_be_checked(tmp_path: Path) -> None:
    """Its counters are copied from device to device; its ports are as they should be."""
    with tarfile.open(CORPORA / "sysfs/gpud-sys-class-infiniband-h100.tar.gz") as tar:
        tar.extractall(tmp_path / "class/infiniband", filter="data")
    assert found(decode_node(json.dumps(Node(captured("n01", tmp_path)).inventory()))) == []
