"""`diagnosd check`: its subjects, its exit codes, its page and its documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from diagnosd.cli import app
from hca import hca, hcas, write

RECORDINGS = Path(__file__).parents[1] / "recordings"
CORPORA = Path(__file__).parents[2] / "shared/corpora"
needs_corpora = pytest.mark.skipif(not CORPORA.is_dir(), reason=f"{CORPORA} is not there")

JOB = """
nodes = 2
[job]
name = "llama-70b"
dtype = "bf16"
recompute = "none"
grad_dtype = "fp32"
model = {layers = 80, hidden = 8192, ffn = 28672, gated = true, heads = 64, kv_heads = 8, vocab = 128256, seq = 8192}
batch = {global = 64, micro = 1}
parallel = {tp = 8, zero = 1, overlap_grad = false}
[cluster.fabric]
kind = "infiniband"
rate_gbps = 400
[cluster.node]
gpu = "H100-SXM"
gpus = 8
nics = 8
"""


def checked(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, args)])


def documents(*args: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in checked(*args, "--output", "json").output.splitlines()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A node of eight ports, all well."""
    return hcas(tmp_path / "node")


def slow(tree: Path, rate: str = "200 Gb/sec (2X NDR)") -> Path:
    """One of its ports has come up with fewer lanes."""
    write(hca(tree, 3), {"rate": rate})
    return tree


def test_a_healthy_tree_is_0_and_says_that_nothing_was_found_and_what_was_not_checked(tree: Path) -> None:
    done = checked("--sys-root", tree, "--host", "n01")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{tree}: 1 host checked, nothing found\n")
    assert "Not checked\n  what was declared: no cluster.toml (--cluster FILE)" in done.output


def test_a_port_below_its_siblings_is_3_with_what_is_what_should_be_why_and_what_to_do(tree: Path) -> None:
    done = checked("--sys-root", slow(tree), "--host", "n01")
    assert done.exit_code == 3
    page = done.output.split("\nNot checked")[0].splitlines()
    assert page == [
        f"{tree}: 1 host checked, 1 finding",
        "",
        "A port of the fabric runs below the rate that it should have (link_rate_low)",
        "  where      nic:n01/mlx5_3/1",
        "  is         200 Gbit/s (2X NDR)",
        "  should be  400 Gbit/s (siblings: as 7 of the 8 ports of its kind on n01)",
        "  costs      not known (latent)",
        "  do         On n01: ibstat mlx5_3; mlxlink -d mlx5_3 -m (Ethernet: ethtool",
        "             INTERFACE): rate, lanes, cable.",
    ]


def test_lines_fit_a_terminal(tree: Path) -> None:
    lines = checked("--sys-root", slow(tree), "--host", "n01").output.splitlines()
    assert [line for line in lines if len(line) > 80 and str(tree) not in line] == []


def test_what_is_declared_counts(tree: Path, tmp_path: Path) -> None:
    (declared := tmp_path / "cluster.toml").write_text('[fabric]\nkind = "infiniband"\nrate_gbps = 800\n')
    done = checked("--sys-root", tree, "--host", "n01", "--cluster", declared)
    assert done.exit_code == 3
    assert "should be  800 Gbit/s (declared in the cluster.toml)" in done.output


def test_a_job_that_is_to_run_here_has_its_cost(tree: Path, tmp_path: Path) -> None:
    (job := tmp_path / "JOB.toml").write_text(JOB)
    finding, summary = documents("--sys-root", slow(tree, "100 Gb/sec (1X NDR)"), "--host", "n01", "--job", job)
    assert (finding["job"], finding["state"], finding["baseline"]) == ("llama-70b", "confirmed", {"from": "model"})
    low, high = finding["slowdown_interval"]
    assert 1.02 < low < finding["slowdown"] < high
    assert summary["checked"] == {"hosts": ["n01"], "jobs": ["llama-70b"]}


def test_json_has_a_document_a_finding_and_then_the_summary(tree: Path) -> None:
    finding, summary = documents("--sys-root", slow(tree), "--host", "n01")
    assert (finding["type"], finding["subtype"], finding["state"]) == ("diagnosis", "link_rate_low", "latent")
    assert finding["evidence"][0]["observed"] == 200.0
    assert (summary["type"], summary["found"], summary["latent"]) == ("summary", 1, 1)
    assert {"what", "text"} == set(summary["unchecked"][0])


def test_a_folder_without_a_machine_is_1_and_says_who_tells_what_was_tried(tmp_path: Path) -> None:
    done = checked("--sys-root", tmp_path)
    assert done.exit_code == 1
    assert "`diagnosd inventory` says what was tried" in done.output


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("--sys-root", "/nowhere"), 2, "is no folder"),
        (("--cluster", "/nowhere.toml"), 2, "does not exist"),
        (("rec.lp", "--sys-root", "/"), 2, "not both"),
        (("--output", "yaml"), 2, "yaml"),
    ],
)
def test_a_usage_error_is_2_and_names_what_is_wrong(args: tuple[str, ...], code: int, word: str) -> None:
    done = checked(*args)
    assert done.exit_code == code
    assert word in done.output


def test_the_recording_of_a_wrong_interface_names_it_on_both_hosts() -> None:
    finding, summary = documents(RECORDINGS / "wrong_interface")
    assert finding["subtype"] == "wrong_interface"
    assert finding["locus"] == ["nic:n0/eth1", "nic:n1/eth1"]
    assert finding["victims"] == {"ranks": 2, "jobs": ["bed-wrong_interface"]}
    assert summary["checked"]["hosts"] == ["n0", "n1"]


@pytest.mark.parametrize(
    "name",
    sorted(folder.name for folder in RECORDINGS.iterdir() if folder.is_dir() and folder.name != "wrong_interface"),
)
def test_on_other_recordings_nothing_of_the_machines_is_wrong(name: str) -> None:
    done = checked(RECORDINGS / name)
    assert done.exit_code == 0, done.output


def test_all_nodes_of_a_recording_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "nodes.lp"
    rates = dict.fromkeys(("n01", "n02", "n03"), 200.0) | {"n04": 100.0}
    with path.open("w") as lines:
        for host, rate in rates.items():
            port = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate_gbps": rate, "link_layer": "InfiniBand"}
            text = json.dumps({"nics": [port]}).replace('"', '\\"')
            lines.write(f'diagnosd_node,host={host} inventory="{text}" 1700000000000000000\n')
    finding, _ = documents(path)
    assert finding["locus"] == ["nic:n04/mlx5_0/1"]
    assert checked(path).exit_code == 3


def test_a_recording_that_tells_of_no_node_is_1(tmp_path: Path) -> None:
    path = tmp_path / "net.lp"
    path.write_text("net,host=n01,interface=eth0 bytes_sent=1i 1700000000000000000\n")
    done = checked(path)
    assert done.exit_code == 1
    assert "no node and no job in it" in done.output


def test_names_from_a_recording_cannot_reach_the_terminal_as_a_control_sequence(tmp_path: Path) -> None:
    path = tmp_path / "odd.lp"
    nics = [{"device": f"mlx5_{n}\x1b[31m", "port": 1, "state": "ACTIVE", "rate_gbps": 400.0 - 300 * (n == 3),
             "link_layer": "InfiniBand"} for n in range(5)]  # fmt: skip
    text = json.dumps({"nics": nics}).replace("\\", "\\\\").replace('"', '\\"')
    path.write_text(f'diagnosd_node,host=n01 inventory="{text}" 1700000000000000000\n')
    done = checked(path)
    assert done.exit_code == 3
    assert "\x1b" not in done.output


SNAPSHOTS = {"learn_good.json": (0, ""), "learn_ib_intf_operstate_down.json": (3, "netdev_down")}


@needs_corpora
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_captured_tree_of_the_corpora_is_healthy_or_has_its_fault_named(name: str, tmp_path: Path) -> None:
    for path, text in json.loads((CORPORA / "sysfs" / name).read_text()).items():
        write(tmp_path, {path.lstrip("/"): text.removesuffix("\n")})
    code, subtype = SNAPSHOTS[name]
    done = checked("--sys-root", tmp_path, "--host", "n01")
    assert done.exit_code == code, done.output
    assert subtype in done.output


PRINTED = (
    "ibstat.47.0.a100.all.active.0",
    "ibstat.47.0.h100.all.active.1",
    "ibstat.47.0.h100.some.down.0",
    "ibstatus.39.0.a100.all.active.0",
)


@needs_corpora
@pytest.mark.parametrize("name", PRINTED)
def test_what_ibstat_printed_of_a_healthy_node_has_nothing_wrong(name: str) -> None:
    done = checked(CORPORA / "ib_tools" / name, "--host", "n01")
    assert done.exit_code == 0, done.output


@needs_corpora
def test_what_ibstat_printed_of_a_slow_port_names_it(tmp_path: Path) -> None:
    whole = (CORPORA / "ib_tools" / PRINTED[0]).read_text()
    (told := tmp_path / "ibstat.txt").write_text(whole[::-1].replace("002 :etaR", "001 :etaR", 1)[::-1])
    finding, _ = documents(told, "--host", "n01")
    assert (finding["subtype"], finding["locus"]) == ("link_rate_low", ["nic:n01/mlx5_8/1"])


@pytest.mark.parametrize("text", ["CA 'mlx5_0'\n", "CA '\x80\xff"])
def test_a_torn_output_of_ibstat_without_a_port_is_1_and_no_health(text: str, tmp_path: Path) -> None:
    (told := tmp_path / "ibstat.txt").write_bytes(text.encode("latin-1"))
    done = checked(told)
    assert done.exit_code == 1
    assert "no port is in it" in done.output


def test_this_machine_can_be_checked(tmp_path: Path) -> None:
    done = checked("--socket", tmp_path / "probe.sock")
    assert done.exit_code in (0, 3), done.output
    assert " checked, " in done.output.splitlines()[0]
