"""The catalogue of causes, as data: what each is called, who owns it, what it explains, and what to do.

A cause is added here and in evidence.ROWS, nowhere else. `prior` is its log-odds before any evidence, on a cluster
whose fabric is shared; `claims` are the parts of a step it can explain; `least` is what it must cost, as a share of the
step, to be a cause of this slowdown and not a mere presence (diagnosis.md 2.4, vetoes). `{host}`, `{nic}`, `{rank}` and
`{path}` in `next` are filled from the verdict, `{loader}` with who loads, `{gpu}` with how to ask a GPU, if one is
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diagnosd.analysis.decompose import PARTS


@dataclass(frozen=True, slots=True)
class Subtype:
    title: str
    owner: str
    next: str


@dataclass(frozen=True, slots=True)
class Cause:
    code: str
    title: str
    owner: str
    claims: tuple[str, ...]
    prior: float
    least: float
    next: str
    network: bool = False  # needs a network between hosts
    peers: bool = False  # needs other ranks, who wait
    from_start: bool | None = None  # whether it is there from the first step, or begins; None: either
    subtypes: Mapping[str, Subtype] = field(default_factory=dict)

    def can_befall(self, hosts: int, ranks: int) -> bool:
        """Whether a job of so many hosts and ranks has what the cause needs."""
        return (hosts > 1 or not self.network) and (ranks > 1 or not self.peers)


@dataclass(frozen=True, slots=True)
class Growth:
    """Parts of a step that grew for a reason that nobody knows: what they are called, and where to look."""

    title: str
    parts: tuple[str, ...]
    next: str


CAUSES = {
    cause.code: cause
    for cause in (
        Cause(
            "network_congestion",
            "the network takes longer for the same bytes",
            "fabric",
            claims=("transfer", "release"),
            # On shared Ethernet 39 % of the multi-node jobs met it, on dedicated fabrics hardly any (diagnosis.md 1.2).
            prior=-2.5,
            least=0.05,
            next="On {host}: ss -ti; ethtool -S {nic}; then the switch port's rate, queue and drops.",
            network=True,
            from_start=False,
            subtypes={
                "neighbour_traffic": Subtype(
                    "somebody else's traffic fills the link",
                    "fabric",
                    "On {host}: ss -tupi, iftop -i {nic}; whose bytes are these?",
                ),
                "packet_loss": Subtype(
                    "packets are lost on the way",
                    "fabric",
                    "On {host}: ethtool -S {nic} | grep -iE 'err|drop|discard'; then the switch port's.",
                ),
                "bandwidth": Subtype(
                    "the path carries less than before",
                    "fabric",
                    "Look at the rate of the switch port to {host} ({nic}): tc qdisc, shaping, LAG members.",
                ),
            },
        ),
        Cause(
            "data_starvation",
            "the step waits for its next batch",
            "job",
            claims=("data_wait",),
            prior=-2.5,
            least=0.02,  # diagnosis.md 2.4
            next="On {host}: py-spy dump of {loader}: what does it wait for?",
            subtypes={
                "loader_cpu": Subtype(
                    "its loader has no more processor time",
                    "job",
                    "Raise num_workers in the DataLoader of {rank}, or do less per sample.",
                ),
                "slow_storage": Subtype(
                    "its storage answers slowly", "storage", "On {host}: iostat -x 1; then the storage behind {path}."
                ),
                "loader_slow": Subtype(
                    "its loader waits for something that is neither processor nor local disk",
                    "job",
                    "On {host}: py-spy dump of {loader}: what does it wait for?",
                ),
            },
        ),
        Cause(
            "topology_misconfiguration",
            "from the first step, the network carries less than was declared",
            "config",
            claims=("transfer", "release"),
            # 50 static faults in 400 nodes x 348 days (InfiniteHBD trace, diagnosis.md 1.2): rare, and long-lived.
            prior=-3.5,
            least=0.02,
            next="Compare the interfaces in use with the declared fabric: ip -s link; the *_SOCKET_IFNAME of the job.",
            network=True,
            from_start=True,
            subtypes={
                "wrong_interface": Subtype(
                    "its traffic takes another interface than the fabric's",
                    "config",
                    "Set NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME) to the fabric's interface; now it is {nic} on {host}.",
                ),
                "socket_fallback": Subtype(
                    "NCCL fell back to TCP sockets",
                    "config",
                    "NCCL_DEBUG=INFO: why no IB? Is /dev/infiniband in the container, NCCL_IB_DISABLE unset?",
                ),
                "link_rate_low": Subtype(
                    "a port of the fabric runs below the rate that it should have",
                    "fabric",
                    "On {host}: ibstat {nic}; mlxlink -d {nic} -m (Ethernet: ethtool INTERFACE): rate, lanes, cable.",
                ),
                "pcie_low": Subtype(
                    "a PCIe link is slower or narrower than it could be",
                    "node",
                    "On {host}: lspci -vv: LnkSta against LnkCap; dmesg | grep 'available PCIe'. Reseat the card.",
                ),
                "nvlink_missing": Subtype(
                    "NVLinks are missing",
                    "node",
                    "On {host}: nvidia-smi nvlink -s; nvidia-smi topo -m; systemctl status nvidia-fabricmanager.",
                ),
                "nic_affinity": Subtype(
                    "a GPU sends over a NIC that is far from it",
                    "config",
                    "On {host}: nvidia-smi topo -m: give each GPU a NIC behind its own switch, and let NCCL choose.",
                ),
                "gdr_off": Subtype(
                    "its NICs do not reach the GPUs' memory: each byte goes through the CPU's",
                    "config",
                    "On {host}: modprobe nvidia_peermem (or an open driver, for dma-buf); unset NCCL_NET_GDR_LEVEL.",
                ),
                "too_few_nics": Subtype(
                    "it uses fewer NICs than there should be",
                    "config",
                    "On {host}: ibstat; ibv_devices: which ports are down? echo $NCCL_IB_HCA: does it name all?",
                ),
                "oversubscription": Subtype(
                    "it crosses an oversubscribed fabric more often than it need",
                    "config",
                    "Place it under as few leaves as hold it (Slurm: --switches=1), a leaf's ranks one after another.",
                ),
                "layout": Subtype(
                    "its tensor-parallel groups communicate over the network",
                    "job",
                    "Keep tp within what NVLink joins; give pp or dp the rest.",
                ),
                "environment": Subtype(
                    "a setting of its environment slows it down",
                    "job",
                    "Unset it where the job is started, in its image, and in /etc/nccl.conf.",
                ),
                "version_skew": Subtype(
                    "hosts or ranks do not run the same software",
                    "node",
                    "Install the same versions everywhere, and start the job anew.",
                ),
                "mtu": Subtype(
                    "a port's packets are smaller than they should be",
                    "fabric",
                    "On {host}: ip link show; ibv_devinfo | grep mtu; set the MTU there and on the switch port.",
                ),
                "gid": Subtype(
                    "RoCE is not told to use version 2",
                    "config",
                    "On {host}: show_gids (/sys/class/infiniband/{nic}/ports/1/gid_attrs/types): the index of RoCE v2.",
                ),
                "pfc": Subtype(
                    "its traffic is in another priority than the fabric protects",
                    "fabric",
                    "On {host}: mlnx_qos -i INTERFACE; ethtool -S INTERFACE | grep prio; compare with the switch port.",
                ),
                "acs": Subtype(
                    "access control of the PCIe switches sends its traffic through the root",
                    "node",
                    "On {host}, as root: setpci -s BRIDGE ECAP_ACS+0x6.w=0 for each switch port; or in the BIOS.",
                ),
                "iommu": Subtype(
                    "the IOMMU translates each transfer",
                    "node",
                    "On {host}: add iommu=pt (Arm: iommu.passthrough=1) to the kernel's command line.",
                ),
                "power_limit": Subtype(
                    "GPUs may take less power than their default",
                    "node",
                    "On {host}: nvidia-smi -q -d POWER; nvidia-smi -pl.",
                ),
                "persistence_off": Subtype(
                    "the driver does not keep idle GPUs",
                    "node",
                    "On {host}: systemctl enable --now nvidia-persistenced (nvidia-smi -pm 1).",
                ),
                "netdev_down": Subtype(
                    "a network interface is down while its RDMA port is up",
                    "node",
                    "On {host}: ip -br link; ip link set dev INTERFACE up.",
                ),
                "too_few_gpus": Subtype(
                    "a node has fewer GPUs than it should",
                    "node",
                    "On {host}: nvidia-smi -L; lspci -d 10de:; dmesg | grep -i xid: has one fallen off the bus?",
                ),
                "other_gpu": Subtype(
                    "a node has other GPUs than declared",
                    "config",
                    "On {host}: nvidia-smi -L; correct node.gpu in the cluster.toml, or use other nodes.",
                ),
            },
        ),
        Cause(
            "straggler",
            "one rank computes longer than the others, who wait for it",
            "node",
            claims=("forward", "backward", "optimizer", "h2d", "blocked", "other"),
            prior=-2.5,
            least=0.02,
            next="On {host}: top -H{gpu}: does anything else run there, or throttle it? Has {rank} more to compute?",
            peers=True,
            subtypes={
                "cpu_quota": Subtype(
                    "its CPU quota is used up",
                    "node",
                    "On {host}: the cpu.max (cpu.cfs_quota_us) of the cgroup of {rank}, nr_throttled in its cpu.stat.",
                ),
            },
        ),
        Cause(
            "workload_imbalance",
            "one rank has more work than the others, who wait for it",
            "job",
            claims=("forward", "backward", "optimizer"),
            prior=-2.5,
            least=0.02,
            next="Compare the samples and tokens of each rank: give {rank} fewer, or bucket the batches by length.",
            peers=True,
        ),
        Cause(
            "checkpoint_stall",
            "saving a checkpoint takes longer than it did",
            "storage",
            claims=("checkpoint", "other"),
            prior=-2.5,
            least=0.02,
            next="On {host}: iostat -x 1 while {rank} saves; then the storage behind {path}.",
            subtypes={
                "slow_storage": Subtype(
                    "the storage writes slowly", "storage", "On {host}: iostat -x 1; then the storage behind {path}."
                )
            },
        ),
        Cause(
            "host_stall",
            "the host keeps its ranks from running",
            "node",
            claims=("h2d", "blocked", "other", "forward", "backward", "optimizer"),
            prior=-3.0,
            least=0.05,
            next="On {host}: cat /proc/pressure/cpu; pidstat -wu 1: who takes the processors?",
            subtypes={
                "garbage_collection": Subtype(
                    "Python's garbage collector stops it",
                    "job",
                    "gc.freeze() after start-up, and gc.collect() on all ranks at the same step.",
                ),
            },
        ),
        Cause(
            "hang",
            "no rank makes progress",
            "node",
            claims=PARTS,
            prior=0.0,
            least=0.0,
            next="On {host}: py-spy dump of {rank}",
        ),
        Cause(
            "communication_bound",
            "by design, at least a fifth of each step goes into communication",
            "job",
            claims=(),
            prior=0.0,
            least=0.2,
            next="",
        ),
        Cause(
            "unknown",
            "slower, and nothing measured says why",
            "job",
            claims=(),
            prior=0.0,
            least=0.10,  # less than a tenth of the step, without a cause to act on, is no reason to bother anybody
            next="",
        ),
    )
}

# All the parts, each in one.
GROWTHS = (
    Growth("waiting for the next batch", ("data_wait",), "On {host}: py-spy dump of {loader}: what does it wait for?"),
    Growth(
        "computing",
        ("forward", "backward", "optimizer"),
        "On {host}: py-spy record of {rank}: which function takes longer? top -H{gpu}: who else computes there?",
    ),
    Growth(
        "waiting for the device",
        ("h2d", "blocked"),
        "On {host}: py-spy dump of {rank}: which call waits for the device (.item(), .cpu(), a print of a tensor)?",
    ),
    Growth("saving", ("checkpoint",), "On {host}: py-spy dump of {rank}, and iostat -x 1, while it saves."),
    Growth("evaluating", ("eval",), "Does an evaluation come more often than before, or do more?"),
    Growth(
        "computing, moving bytes or waiting for another rank, which nothing here tells apart",
        ("mixed",),
        "py-spy dump of every rank, a few times: which one is not in a collective? The others wait for it.",
    ),
    Growth(
        "time outside of every phase",
        ("other",),
        "On {host}: py-spy dump of {rank}, a few times: what does it do between the phases? A loop of your own names "
        "its phases with diagnosd.probe.",
    ),
    Growth(
        "moving bytes, after the last rank had arrived",
        ("transfer", "release"),
        "On {host}: top -H; ss -ti: has each rank a processor while it communicates, do bytes wait in its queues?",
    ),
)

# Causes that compete for a slowdown against the past or a bound; the others are decided otherwise.
RIVALS = tuple(
    CAUSES[code]
    for code in (
        "network_congestion",
        "data_starvation",
        "topology_misconfiguration",
        "straggler",
        "workload_imbalance",
        "checkpoint_stall",
        "host_stall",
    )
)
