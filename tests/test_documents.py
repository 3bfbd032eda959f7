"""The contract's documents: what is missing is unknown, parts make a whole, and what a person writes wrong is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.documents import (
    ClusterSpec,
    DocumentError,
    JobSpec,
    NodeInventory,
    cluster_from_toml,
    decode_cluster,
    decode_job,
    decode_node,
    encode,
    unite,
)

# As they stand in the contract.
JOB = """
{"name": "llama-70b", "framework": "megatron",
 "model": {"params": 70.6e9, "layers": 80, "hidden": 8192, "ffn": 28672, "gated": true, "heads": 64, "kv_heads": 8,
           "vocab": 128256, "seq": 8192, "experts": 0, "experts_active": 0, "flops_per_sample": null},
 "batch": {"global": 256, "micro": 1},
 "parallel": {"order": "tp-cp-ep-dp-pp", "tp": 8, "cp": 1, "dp": 2, "pp": 4, "vpp": 1, "ep": 1, "etp": 1,
              "shard": null, "replicate": null, "zero": 1, "overlap_grad": true, "schedule": "1f1b"},
 "dtype": "bf16", "grad_dtype": "fp32", "recompute": "none",
 "data": {"bytes_per_sample": 32768, "path": "/data", "workers": 8, "prefetch": 2},
 "checkpoint": {"every_steps": 500, "path": "/ckpt"},
 "ranks": [{"rank": 0, "host": "n01", "local_rank": 0, "gpu": "GPU-8f1c..."}]}
"""
NODE = """
{"gpus": [{"index": 0, "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3", "pci": "00000000:18:00.0", "numa": 0,
           "nvlinks": 18, "nvlinks_active": 18, "nvlink_gbytes_per_s": 26.6,
           "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_busy": true,
           "power_limit_w": 700.0, "power_limit_default_w": 700.0, "mig": false, "serial": "165", "vbios": "96.00"}],
 "nics": [{"device": "mlx5_0", "port": 1, "netdev": "ib0", "link_layer": "InfiniBand", "state": "ACTIVE",
           "phys_state": "LinkUp", "rate_gbps": 400.0, "width": 4, "speed": "NDR", "mtu": 4096, "pci": "0000:19:00.0",
           "numa": 0, "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16,
           "firmware": "28.39.1002", "role": "compute", "driver": "mlx5_core", "node_guid": "a", "port_guid": "b",
           "lid": 12, "sm_lid": 1, "gids": [{"index": 3, "type": "RoCE v2"}], "rail": 0,
           "peer": {"switch": "leaf1", "port": "Ethernet1/1", "via": "declared"}}],
 "affinity": {"GPU0": {"mlx5_0": "PIX", "mlx5_1": "NODE", "GPU1": "NV18"}},
 "fabric": {"state": "completed", "status": "success", "cluster_uuid": "c", "clique": 0, "health": "h"},
 "software": {"kernel": "6.8.0", "driver": "580.65", "cuda": "13.0", "nccl": "2.30.7", "ofed": "24.10",
              "peermem": true, "dmabuf": true, "acs": "off", "iommu": "pt", "persistence": true},
 "boot_id": "d", "cpu": {"cores": 112, "sockets": 2}, "memory_bytes": 2199023255552}
"""
CLUSTER = """
{"fabric": {"kind": "infiniband", "rate_gbps": 400, "oversubscription": 1.0, "rail_optimized": true, "sharp": false,
            "priority": 3},
 "node": {"gpus": 8, "gpu": "H100-SXM", "nics": 8, "nic_rate_gbps": 400, "nvlinks": 18, "pcie_gen": 5},
 "racks": {"r1": ["n01", "n02"]}, "leaves": {"leaf1": ["n01", "n02"]}, "storage": {"/data": "lustre1"},
 "price_per_gpu_hour": 2.5, "currency": "USD"}
"""


def known(document: object) -> object:
    """Without nulls, which say the same as absence."""
    if isinstance(document, dict):
        return {key: known(value) for key, value in document.items() if value is not None}
    return [known(value) for value in document] if isinstance(document, list) else document


@pytest.mark.parametrize(("text", "decode"), [(JOB, decode_job), (NODE, decode_node), (CLUSTER, decode_cluster)])
class TestEveryDocument:
    def test_every_key_of_the_contract_is_kept(self, text: str, decode: type) -> None:
        assert json.loads(encode(decode(text))) == known(json.loads(text))

    def test_unknown_keys_are_ignored(self, text: str, decode: type) -> None:
        more = {**json.loads(text), "new": {"key": [1]}}
        assert decode(json.dumps(more)) == decode(text)

    def test_every_key_may_be_missing(self, text: str, decode: type) -> None:
        whole = json.loads(text)
        for key in whole:
            assert getattr(decode(json.dumps({k: v for k, v in whole.items() if k != key})), key) is None
        assert encode(decode("{}")) == b"{}"

    @pytest.mark.parametrize("bad", ["", "[]", "{", "null", b"\xff", '{"fabric": 3, "model": 3}'])
    def test_what_is_no_such_document_is_a_document_error(self, text: str, decode: type, bad: str | bytes) -> None:
        with pytest.raises(DocumentError, match=r"\w+: "):
            decode(bad)


def test_what_our_own_inventory_tells_beside_the_contract_is_kept() -> None:
    nics = decode_node('{"nics": [{"netdev": "eth0", "addresses": ["10.0.0.1", "fd00::1"]}]}').nics
    assert nics
    assert nics[0].addresses == ("10.0.0.1", "fd00::1")


ranks = st.lists(
    st.builds(
        lambda rank, host, gpu: {"rank": rank, **({"host": host} if host else {}), **({"gpu": gpu} if gpu else {})},
        st.integers(0, 4),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from([None, "g1", "g2"]),
    ),
    max_size=4,
    unique_by=lambda rank: int(str(rank["rank"])),
)
specs = st.builds(
    lambda name, model, listed: decode_job(json.dumps({"name": name, "model": model, "ranks": listed})),
    st.sampled_from([None, "x", "y"]),
    st.none() | st.dictionaries(st.sampled_from(["layers", "seq"]), st.integers(1, 9)),
    st.none() | ranks,
)


class TestUnite:
    def test_each_node_knows_its_own_ranks_and_together_they_know_all(self) -> None:
        one = decode_job('{"name": "j", "ranks": [{"rank": 1, "host": "n02"}]}')
        two = decode_job('{"dtype": "bf16", "ranks": [{"rank": 0, "host": "n01"}, {"rank": 1, "gpu": "GPU-1"}]}')
        assert json.loads(encode(unite([(1, one), (2, two)]))) == {
            "name": "j",
            "dtype": "bf16",
            "ranks": [{"rank": 0, "host": "n01"}, {"rank": 1, "host": "n02", "gpu": "GPU-1"}],
        }

    def test_the_latest_value_of_a_key_counts_in_whatever_order_the_parts_arrive(self) -> None:
        old, new = decode_job('{"batch": {"global": 8, "micro": 2}}'), decode_job('{"batch": {"global": 16}}')
        for parts in ([(1, old), (2, new)], [(2, new), (1, old)]):
            assert json.loads(encode(unite(parts))) == {"batch": {"global": 16, "micro": 2}}

    def test_of_nothing_is_a_job_of_which_nothing_is_known(self) -> None:
        assert unite([]) == JobSpec()

    @given(st.lists(specs, max_size=5))
    def test_uniting_what_was_united_changes_nothing(self, parts: list[JobSpec]) -> None:
        timed = list(enumerate(parts))
        whole = unite(timed)
        assert unite([*timed, (99, whole)]) == whole
        assert unite([(0, unite(timed[:2])), *timed[2:]]) == whole


class TestClusterToml:
    def test_what_the_operators_declare_is_what_is_sent(self) -> None:
        text = b"""
            price_per_gpu_hour = 2.5
            currency = "USD"
            racks = { r1 = ["n01", "n02"] }
            leaves = { leaf1 = ["n01", "n02"] }
            storage = { "/data" = "lustre1" }
            [fabric]
            kind = "infiniband"
            rate_gbps = 400
            oversubscription = 1.0
            rail_optimized = true
            sharp = false
            priority = 3
            [node]
            gpus = 8
            gpu = "H100-SXM"
            nics = 8
            nic_rate_gbps = 400
            nvlinks = 18
            pcie_gen = 5
        """
        assert cluster_from_toml(text, "cluster.toml") == decode_cluster(CLUSTER)

    def test_the_fabric_s_interface_may_be_one_or_several(self) -> None:
        for text, interfaces in ((b'"eth0"', ("eth0",)), (b'["ib0", "ib1"]', ("ib0", "ib1"))):
            fabric = cluster_from_toml(b"fabric.interface = " + text, "cluster.toml").fabric
            assert fabric
            assert fabric.interfaces == interfaces
        assert cluster_from_toml(b"[fabric]", "cluster.toml").fabric.interfaces == ()  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ('fabric.rate_gbps = "fast"', "cluster.toml: fabric.rate_gbps: found 'fast'; allowed is a number"),
            ("fabric.rate_gbps = inf", "cluster.toml: fabric.rate_gbps: found inf; allowed is a number <= 1000000.0"),
            ("fabric.rate_gbps = -1", "cluster.toml: fabric.rate_gbps: found -1; allowed is a number > 0.0"),
            (
                "fabric.oversubscription = 0.5",
                "cluster.toml: fabric.oversubscription: found 0.5; allowed is a number >= 1.0",
            ),
            (
                "price_per_gpu_hour = inf",
                "cluster.toml: price_per_gpu_hour: found inf; allowed is a number <= 1000000000.0",
            ),
            ("node.nics = 99999999999999999999", "cluster.toml: node.nics: found 99999999999999999999; allowed is"),
            ('"\\u001b[31mracks" = 1', r"cluster.toml: '\x1b[31mracks': no such key (do you mean racks?)"),
            ("fabric.sharp = 1", "cluster.toml: fabric.sharp: found 1; allowed is true or false"),
            ("fabric.interface = 3", "cluster.toml: fabric.interface: found 3; allowed is text or a list"),
            ("node.gpus = 2.5", "cluster.toml: node.gpus: found 2.5; allowed is a whole number"),
            ("fabric = 3", "cluster.toml: fabric: found 3; allowed is a table: [fabric]"),
            ('racks.r1 = "n01"', "cluster.toml: racks: found {'r1': 'n01'}; allowed is a list of hosts for each rack"),
            ("storage.x = 3", "cluster.toml: storage: found {'x': 3}; allowed is the system behind each path"),
            (
                'fabric.kind = "ib"',
                "cluster.toml: fabric.kind: found 'ib'; allowed are infiniband, roce, efa, ethernet, fastrak, omnipath",
            ),
            ("fabric.x = 3", "cluster.toml: fabric.x: no such key; allowed are kind, rate_gbps"),
            ("nodes.gpus = 8", "cluster.toml: nodes: no such key (do you mean node?); allowed are name, fabric, node"),
            ("fabric", "cluster.toml: not TOML: Expected '=' after a key in a key/value pair"),
        ],
    )
    def test_what_is_wrong_is_told_with_file_key_and_what_is_allowed(self, text: str, complaint: str) -> None:
        with pytest.raises(DocumentError) as told:
            cluster_from_toml(text.encode(), "cluster.toml")
        assert str(told.value).startswith(complaint)

    @given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def test_nothing_but_a_document_error_is_raised_on_arbitrary_bytes(self, text: bytes) -> None:
        try:
            spec = cluster_from_toml(text, "cluster.toml")
        except DocumentError:
            return
        assert decode_cluster(encode(spec)) == spec


def test_nothing_but_a_document_error_is_raised_on_documents_of_other_programs() -> None:
    for kind in (decode_job, decode_node, decode_cluster):
        for key in (*JobSpec.__struct_fields__, *NodeInventory.__struct_fields__, *ClusterSpec.__struct_fields__):
            for value in ("1", '"x"', "[1]", '{"a": 1}', "true"):
                try:
                    kind(f'{{"{key}": {value}}}')
                except DocumentError:
                    continue
