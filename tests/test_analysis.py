"""Points in, verdicts out, on jobs whose truth is known (tests/jobs.py)."""

from __future__ import annotations

import json
import random
from datetime import datetime
from typing import Any

import pytest

from diagnosd.analysis import Analysis, report
from diagnosd.point import Point, point
from jobs import GBIT, T0, Fault, Layout, Truth, by_time, job

LATENESS = 3  # s, by which what is detected in the stream is told later
TELL_WITHIN = 15  # s after the onset

HEAVY: dict[str, Any] = {"forward": 0.042, "backward": 0.07}  # a step that waits for its processor, not for the wire
DECLARED = {"fabric": {"kind": "ethernet", "rate_gbps": 1, "interface": "eth0"}}

Documents = list[dict[str, Any]]


def judge(points: list[Point], batches: float = 1.0) -> tuple[Documents, Analysis]:
    """The last revision of every document that says more than information, and the analysis."""
    analysis = Analysis("lab")
    latest: dict[str, dict[str, Any]] = {}
    for batch in by_time(points, batches):
        latest.update({document["id"]: document for document in analysis.feed(batch)})
    latest.update({document["id"]: document for document in analysis.finish()})
    return [document for document in latest.values() if document["state"] != "latent"], analysis


def seconds(document: dict[str, Any], key: str) -> float:
    return datetime.fromisoformat(document[key]).timestamp() - T0 / 1e9


def one(documents: Documents) -> dict[str, Any]:
    (document,) = documents
    return document


HEALTHY: dict[str, dict[str, Any]] = {
    "steady": {},
    "noisy": {"noise": 0.1},
    "very noisy, with a memory": {"noise": 0.2, "memory": 0.6},
    "checkpoints": {"checkpoint_every": 10},
    "evaluation": {"eval_every": 20},
    "garbage collection": {"gc_every": 20, "noise": 0.05},
    "a larger batch": {"batch_change": (25, 512)},
    "a smaller batch": {"batch_change": (25, 16), **HEAVY},
    "samples of varying length": {"varying": 0.2, **HEAVY},
    "four ranks": {"ranks": 4, "noise": 0.05},
    "two hosts of four ranks": {"ranks": 8, "ranks_a_host": 4},
    "clocks half a second apart": {"offsets": (0.2, -0.3)},
    "one rank": {"ranks": 1, "fetch": 0.015},  # its step is all computing: a loader must be faster than that
    "collectives that nobody timed": {"sync": False},
    "ranks that never tell when they meet": {"sync": False, "comm": False},
    "clocks apart, and collectives that nobody timed": {"sync": False, "offsets": (0.2, -0.3)},
    "devices whose collectives nobody timed": {"device": True, "ranks": 4},
    "a declared fabric": {"declared": DECLARED, "ranks": 4},
    "a loader with little to spare": {"fetch": 0.165, "noise": 0.05},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_is_left_alone(name: str) -> None:
    for seed in range(2):
        documents, analysis = judge(job(None, seed=seed, **HEALTHY[name])[0])
        assert documents == []
        assert "brief" not in analysis.summary()["jobs"]["train"]


NIC, RANK, ALL = ("host:h1", "nic:h1/eth0"), ("rank:1", "host:h1"), ("job",)

FAULTS: dict[str, tuple[Fault, dict[str, Any], str, str | None, tuple[str, ...]]] = {
    "a throttled port": (Fault("bandwidth", 20, 40, 1, 0.2), {}, "network_congestion", "bandwidth", NIC),
    "a port at half": (Fault("bandwidth", 20, 40, 1, 0.5), {}, "network_congestion", None, NIC),
    "a neighbour": (Fault("neighbour", 20, 40, 1), {}, "network_congestion", "neighbour_traffic", NIC),
    "lost packets": (Fault("loss", 20, 40, 1), {}, "network_congestion", "packet_loss", NIC),
    "a throttled port of four": (
        Fault("bandwidth", 20, 40, 1, 0.2), {"ranks": 4}, "network_congestion", "bandwidth", NIC),
    "slow loaders": (Fault("loader", 20, 40, None, 0.4), {}, "data_starvation", "loader_slow", ALL),
    "a slow loader": (Fault("loader", 20, 40, 1, 0.4), {}, "data_starvation", "loader_slow", RANK),
    "a busy loader": (Fault("loader_cpu", 20, 40, 1, 0.4), {}, "data_starvation", "loader_cpu", RANK),
    "slow storage": (Fault("storage", 20, 40, None, 0.5), {}, "data_starvation", "slow_storage", ALL),
    "a slow loader of four": (Fault("loader", 20, 40, 1, 0.6), {"ranks": 4}, "data_starvation", "loader_slow", RANK),
    "a CPU quota": (Fault("cpu_quota", 20, 40, 1, 2.7), HEAVY, "straggler", "cpu_quota", RANK),
    "a slow rank": (Fault("slow_rank", 20, 40, 1, 1.4), HEAVY, "straggler", None, RANK),
    "a slow rank by another clock": (
        Fault("slow_rank", 20, 40, 1, 2.0), {**HEAVY, "offsets": (0.2, -0.3)}, "straggler", None, RANK),
    "a slow rank nobody timed": (Fault("slow_rank", 20, 40, 1, 2.0), {**HEAVY, "sync": False}, "straggler", None, RANK),
    "a slow loader nobody timed, by another clock": (
        Fault("loader", 20, 40, 1, 0.4), {"sync": False, "offsets": (0.2, -0.3)}, "data_starvation", None, RANK),
    "a throttled port nobody timed, by another clock": (
        Fault("bandwidth", 20, 40, 1, 0.2), {"sync": False, "offsets": (0.2, -0.3)}, "network_congestion", None, NIC),
    "a slow loader of eight devices": (
        Fault("loader", 20, 40, 1, 0.6), {"device": True, "ranks": 8}, "data_starvation", "loader_slow", RANK),
    "slow loaders of eight devices": (
        Fault("loader", 20, 40, None, 0.6), {"device": True, "ranks": 8}, "data_starvation", "loader_slow", ALL),
    "a slow checkpoint": (
        Fault("checkpoint", 20, 40, 0, 2.0), {"checkpoint_every": 10}, "checkpoint_stall", None, ("rank:0", "host:h0")),
    "a busy machine": (Fault("busy_host", 20, 40, None, 2.5), HEAVY, "host_stall", None, ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_placed_bounded_and_priced(name: str) -> None:
    fault, changes, cause, subtype, loci = FAULTS[name]
    points, truths = job(Layout(seconds=55), fault, seed=3, **changes)
    documents, _ = judge(points)
    document, truth = one(documents), truths[0]
    assert document["cause"] == cause == truth.cause
    assert subtype is None or document["subtype"] == subtype
    assert set(document["locus"]) & set(loci)
    assert document["state"] == "resolved"
    assert seconds(document, "detected") + LATENESS - fault.start <= TELL_WITHIN
    assert abs(seconds(document, "start") - fault.start) <= 2.5
    assert abs(seconds(document, "end") - fault.end) <= 2.5
    assert document["lost_gpu_seconds"] == pytest.approx(truth.extra, rel=0.15, abs=0.5)
    assert document["baseline"]["from"] == "past"
    assert 0 < document["fix_gain"] < 1


def test_a_verdict_uses_nothing_later_than_its_time_in_the_stream() -> None:
    for seed in range(4):
        points, _ = job(None, Fault("bandwidth", 20, 40, 1, 0.2), seed=seed)
        whole = one(judge(points)[0])
        until = T0 + round(seconds(whole, "detected") * 1e3) * 10**6
        cut = one(judge([point for point in points if point.time <= until])[0])
        for key in ("id", "cause", "start", "detected", "locus"):
            assert cut[key] == whole[key]


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        (Fault("bandwidth", 30, 45, 1, 0.2), {}),
        (Fault("loader", 30, 45, 1, 0.45), {"ranks": 3, "offsets": (0.2, -0.3, 0.1), "noise": 0.05}),
        (Fault("loader", 30, 45, None, 0.06), {"forward": 0.002, "backward": 0.003, "fetch": 0.002, "size": 1.2e6}),
    ],
    ids=["a link", "clocks apart", "short steps"],
)
def test_the_id_is_the_same_whenever_the_analysis_began(fault: Fault, changes: dict[str, Any]) -> None:
    points, _ = job(Layout(seconds=55), fault, seed=5, **changes)
    ids = set()
    for since in (0, 3, 6.5, 12):
        heard = [p for p in points if p.time >= T0 + since * 1e9 or p.series.measurement == "diagnosd_rank"]
        ids.add(one(judge(heard)[0])["id"])
    assert len(ids) == 1


def test_an_interface_beside_the_declared_fabric_is_named_from_the_first_step() -> None:
    points, _ = job(None, seed=1, interface="eth1", rate=0.2 * GBIT, declared=DECLARED)
    document = one(judge(points)[0])
    assert (document["cause"], document["subtype"]) == ("topology_misconfiguration", "wrong_interface")
    assert document["locus"] == ["nic:h0/eth1", "nic:h1/eth1"]
    assert document["baseline"]["from"] == "model"
    assert seconds(document, "detected") <= TELL_WITHIN
    assert document["slowdown"] == pytest.approx(4.9, rel=0.15)


def test_without_a_declared_fabric_nobody_knows_that_the_interface_is_slow() -> None:
    points, _ = job(None, seed=1, interface="eth1", rate=0.2 * GBIT)
    analysis = Analysis("lab")
    documents = [*analysis.feed(points), *analysis.finish()]
    assert [document["cause"] for document in documents] == ["communication_bound"]
    assert documents[0]["severity"] == "info"
    assert documents[0]["state"] == "latent"
    assert "cluster.toml" in documents[0]["next"]
    text = report.plain(report.whole(documents, analysis.summary()))
    assert "No slowdown found in job train" in text
    assert "costs nothing" not in text
    assert "0 GPU-seconds lost" not in text


def with_ports_at(points: list[Point], gbps: float) -> list[Point]:
    """As if eth0 of every host had come up with this rate."""
    inventory = json.dumps({"nics": [{"netdev": "eth0", "rate_gbps": gbps, "state": "ACTIVE"}], "cpu": {"cores": 2}})
    nodes = [p for p in points if p.series.measurement == "diagnosd_node"]
    others = [p for p in points if p.series.measurement != "diagnosd_node"]
    return sorted([*others, *(Point(p.series, {"inventory": inventory}, p.time) for p in nodes)], key=_order)


def test_a_port_below_its_declared_rate_is_found_without_any_past() -> None:
    points, _ = job(None, seed=1, rate=0.2 * GBIT, declared=DECLARED)
    document = one(judge(with_ports_at(points, 0.2))[0])
    assert (document["cause"], document["subtype"]) == ("topology_misconfiguration", "link_rate_low")
    assert document["owner"] == "fabric"


def test_a_low_rate_that_nobody_read_is_not_claimed() -> None:
    """The ports run at what was declared and nothing else is in the way: slower than declared, and no more is known."""
    document = one(judge(job(None, seed=1, rate=0.2 * GBIT, declared=DECLARED)[0])[0])
    assert document["cause"] == "topology_misconfiguration"
    assert "subtype" not in document
    assert document["confidence"] < 0.8
    assert document["owner"] == "config"


def moved_to_rank_1(points: list[Point], times: float) -> list[Point]:
    """From 20 s to 40 s, rank 1 has so many times as many samples, taken from rank 0."""
    made = []
    for p in points:
        fields = dict(p.fields)
        if p.series.measurement == "diagnosd_step" and T0 + 20 * 10**9 < p.time <= T0 + 40 * 10**9:
            share = round(64 * times)
            fields["samples"] = share if p.series.tag("rank") == "1" else 128 - share
        made.append(Point(p.series, fields, p.time))
    return made


def test_work_that_moved_to_a_rank_makes_it_no_straggler() -> None:
    points, _ = job(Layout(seconds=55), Fault("slow_rank", 20, 40, 1, 1.6), seed=3, **HEAVY)
    document = one(judge(moved_to_rank_1(points, 1.6))[0])
    assert document["cause"] == "workload_imbalance"
    assert document["owner"] == "job"
    assert "rank:1" in document["locus"]
    assert "1.6 times as many samples or tokens" in " ".join(row["text"] for row in document["evidence"])


def test_a_rank_that_is_slow_beyond_its_larger_share_of_the_work_is_a_straggler() -> None:
    points, _ = job(Layout(seconds=55), Fault("slow_rank", 20, 40, 1, 2.4), seed=3, **HEAVY)
    assert one(judge(moved_to_rank_1(points, 1.2))[0])["cause"] == "straggler"


def test_what_one_core_can_copy_through_tcp_is_not_held_against_the_fabric() -> None:
    hundred = {"fabric": {"kind": "ethernet", "rate_gbps": 100, "interface": "eth0"}}
    points, _ = job(None, seed=1, rate=25 * GBIT, size=4e8, declared=hundred)
    assert judge(with_ports_at(points, 100.0))[0] == []


def test_a_neighbour_from_the_first_step_is_no_misconfiguration() -> None:
    document = one(judge(job(None, Fault("neighbour", 0, 99, 1), seed=1, declared=DECLARED)[0])[0])
    assert document["cause"] == "unknown"
    assert "not in the connections of its ranks" in document["text"]
    assert document["confidence"] <= 0.98
    assert document["next"]
    assert "{" not in document["next"]


def test_a_slower_transfer_without_a_second_sign_is_not_called_congestion() -> None:
    documents, _ = judge(job(Layout(seconds=55), Fault("bandwidth", 20, 40, 1, 0.9), seed=3)[0])
    assert "network_congestion" not in {document["cause"] for document in documents}


def test_no_rival_is_told_as_surer_than_the_cause_that_is_named() -> None:
    for fault, changes, *_ in FAULTS.values():
        document = one(judge(job(Layout(seconds=45), fault, seed=3, **changes)[0])[0])
        assert all(other["confidence"] <= document["confidence"] for other in document["alternatives"])


def test_bytes_between_ranks_of_one_host_hide_no_neighbour() -> None:
    points, _ = job(Layout(seconds=55, ranks=8, ranks_a_host=4), Fault("neighbour", 20, 40, 4), seed=3)
    document = one(judge(points)[0])
    assert (document["cause"], document["subtype"]) == ("network_congestion", "neighbour_traffic")


def test_bytes_between_ranks_of_one_host_hide_no_wrong_interface() -> None:
    layout = Layout(ranks=8, ranks_a_host=4, interface="eth1", rate=0.2 * GBIT, declared=DECLARED)
    document = one(judge(job(layout, seed=1)[0])[0])
    assert (document["cause"], document["subtype"]) == ("topology_misconfiguration", "wrong_interface")


def test_a_loader_that_never_kept_up_is_held_against_one_that_does() -> None:
    document = one(judge(job(None, seed=1, fetch=0.4)[0])[0])
    assert document["cause"] == "data_starvation"
    assert document["baseline"]["from"] == "model"
    assert document["locus"] == ["job"]
    assert seconds(document, "detected") <= TELL_WITHIN


def test_a_rank_that_was_always_slow_is_held_against_its_peers() -> None:
    document = one(judge(job(None, Fault("slow_rank", 0, 99, 1, 2.0), seed=1, ranks=4, **HEAVY)[0])[0])
    assert document["cause"] == "straggler"
    assert document["baseline"]["from"] == "peers"
    assert document["locus"] == ["rank:1", "host:h1"]


STEPS_100_MS: dict[str, Any] = {"forward": 0.02, "backward": 0.03, "size": 4e6, "fetch": 0.01}
STEPS_2_S: dict[str, Any] = {"forward": 0.3, "backward": 0.5, "size": 1.68e8, "fetch": 0.2}


@pytest.mark.parametrize(
    ("changes", "mild", "onset", "worse"),
    [(STEPS_100_MS, 1.35, 12, 280), (STEPS_100_MS, 1.12, 12, 280), (STEPS_2_S, 1.35, 150, 2400)],
    ids=["told", "too mild to be told", "for longer than counters are kept"],
)
def test_a_fault_that_comes_late_in_a_long_slowdown_is_named(
    changes: dict[str, Any], mild: float, onset: int, worse: int
) -> None:
    slow = Fault("slow_rank", onset, 9999, None, mild)
    points, _ = job(Layout(seconds=worse + 100), slow, Fault("bandwidth", worse, 9999, 1, 0.2), seed=3, **changes)
    *before, document = judge(points)[0]
    assert {earlier["cause"] for earlier in before} <= {"unknown"}
    assert (document["cause"], document["baseline"]["from"]) == ("network_congestion", "past")
    assert set(document["locus"]) & set(NIC)
    assert seconds(document, "start") == pytest.approx(worse, abs=2.5)


@pytest.mark.parametrize("after", [2, 5])
def test_a_fault_soon_after_a_long_slowdown_is_named(after: float) -> None:
    """After some 1,200 slow steps those before them are no longer kept, and few have come since."""
    again = 620 + after
    long, soon = Fault("bandwidth", 12, 620, 1, 0.2), Fault("loader", again, again + 30, None, 0.4)
    first, second = judge(job(Layout(seconds=680), long, soon, seed=3, **STEPS_100_MS)[0])[0]
    assert (first["cause"], second["cause"]) == ("network_congestion", "data_starvation")
    assert seconds(second, "start") == pytest.approx(again, abs=2.5)
    assert second["baseline"]["step_s"] == pytest.approx(first["baseline"]["step_s"], rel=0.02)


@pytest.mark.parametrize(
    ("always", "worse", "changes", "origin"),
    [
        (None, Fault("storage", 60, 80, None, 0.8), {"fetch": 0.25}, "model"),
        (Fault("slow_rank", 0, 999, 1, 1.5), Fault("cpu_quota", 60, 80, 1, 2.7), {"ranks": 4, **HEAVY}, "peers"),
    ],
    ids=["starvation", "straggler"],
)
def test_a_cause_that_was_always_there_and_gets_worse_is_told_again_with_what_that_costs(
    always: Fault | None, worse: Fault, changes: dict[str, Any], origin: str
) -> None:
    points, _ = job(Layout(seconds=90), *filter(None, (always, worse)), seed=3, **changes)
    first, second = judge(points)[0]
    assert first["cause"] == second["cause"]
    assert (first["baseline"]["from"], second["baseline"]["from"]) == (origin, "past")
    assert abs(seconds(second, "start") - 60) <= 2.5
    assert abs(seconds(second, "end") - 80) <= 2.5
    lost = changes.get("ranks", 2) * 20 * (1 - mean_step(points, 30, 60) / mean_step(points, 62, 80))
    assert second["lost_gpu_seconds"] == pytest.approx(lost, rel=0.1)
    assert seconds(first, "end") > 85


def mean_step(points: list[Point], since: float, until: float) -> float:
    """Seconds, of the steps that end in between."""
    ended = [p for p in points if p.series.measurement == "diagnosd_step" and since < (p.time - T0) / 1e9 <= until]
    return sum(float(p.fields["duration"]) for p in ended) / len(ended)


def test_a_hang_is_told_after_a_minute_and_a_killed_job_is_none() -> None:
    layout = Layout(seconds=110)
    document = one(judge(job(layout, Fault("hang", 20, 120, 1), seed=1)[0])[0])
    assert document["cause"] == "hang"
    assert document["locus"] == ["rank:1"]
    assert document["confidence"] == 0.9
    assert [row["metric"] for row in document["evidence"]] == ["standstill", "rank", "rank"]
    assert document["evidence"][1]["text"] == "in forward, state S, its main thread uses 0.3 processors"
    assert 60 <= seconds(document, "detected") - 20 <= 65
    killed = [point for point in job(layout, seed=1, ends=False)[0] if point.time < T0 + 30 * 10**9]
    killed += [point for point in job(layout, seed=1)[0] if point.series.measurement == "diagnosd_agent"]
    assert judge(sorted(set_by_time(killed), key=_order))[0] == []


@pytest.mark.parametrize(
    ("fault", "changes", "seed", "cause"),
    [
        (None, {"fetch": 0.189, "noise": 0.06}, 0, "data_starvation"),
        (None, {"fetch": 0.192, "noise": 0.06}, 1, "data_starvation"),
        (Fault("slow_rank", 0, 999, 1, 1.32), {"ranks": 4, "noise": 0.08, **HEAVY}, 1, "straggler"),
        (None, {"rate": 0.56 * GBIT, "noise": 0.08, "declared": DECLARED}, 0, "unknown"),
    ],
    ids=["a loader", "another loader", "a rank", "a fabric"],
)
def test_what_was_always_so_and_lies_at_a_threshold_is_told_once(
    fault: Fault | None, changes: dict[str, Any], seed: int, cause: str
) -> None:
    points, _ = job(Layout(seconds=200), *filter(None, (fault,)), seed=seed, **changes)
    analysis, told = Analysis("lab"), []
    for batch in by_time(points):
        told += analysis.feed(batch)
    told += analysis.finish()
    states = [(document["cause"], document["state"]) for document in told]
    assert states == [*[(cause, "confirmed")] * (len(told) - 1), (cause, "resolved")]
    assert seconds(told[-1], "end") > 190


def latent(points: list[Point]) -> Documents:
    analysis = Analysis("lab")
    documents = [*analysis.feed(points), *analysis.finish()]
    assert {document["state"] for document in documents} <= {"latent"}
    return documents


def on_sockets(points: list[Point]) -> list[Point]:
    tags = ({"job": "train", "host": f"h{rank}", "rank": str(rank), "group": "world:0"} for rank in (0, 1))
    said = [point("diagnosd_nccl", each, {"network": "Socket", "transport": "NET/Socket"}, T0 + 10**9) for each in tags]
    return sorted([*points, *said], key=_order)


RDMA = {"fabric": {"kind": "infiniband", "rate_gbps": 400}}


def test_sockets_where_there_is_rdma_are_told_also_when_nothing_timed_what_they_cost() -> None:
    document = one(latent(on_sockets(job(None, seed=1, sync=False, declared=RDMA)[0])))
    assert (document["cause"], document["subtype"]) == ("topology_misconfiguration", "socket_fallback")
    assert document["locus"] == ["host:h0", "host:h1"]
    assert "not measured" in document["text"]
    assert document["evidence"][0]["text"] == "NCCL communicates over Socket"


def test_sockets_where_there_is_rdma_are_named_with_what_they_cost() -> None:
    document = one(judge(on_sockets(job(None, seed=1, declared=RDMA)[0]))[0])
    assert (document["cause"], document["subtype"]) == ("topology_misconfiguration", "socket_fallback")
    assert document["state"] == "resolved"
    assert document["slowdown"] > 2


def test_a_slow_port_that_costs_nothing_is_latent() -> None:
    forty = {"fabric": {"kind": "ethernet", "rate_gbps": 40, "interface": "eth0"}}
    points, _ = job(None, seed=1, size=1e4, fetch=0.01, declared=forty)
    document = one(latent(with_ports_at(points, 10.0)))
    assert (document["cause"], document["subtype"]) == ("topology_misconfiguration", "link_rate_low")
    assert document["locus"] == ["nic:h0/eth0", "nic:h1/eth0"]
    assert document["severity"] == "info"


def test_a_port_as_it_was_declared_is_not_told() -> None:
    ten = {"fabric": {"kind": "ethernet", "rate_gbps": 10, "interface": "eth0"}}
    assert latent(with_ports_at(job(None, seed=1, size=1e4, fetch=0.01, declared=ten)[0], 10.0)) == []


def test_one_checkpoint_that_costs_as_much_as_many_steps_is_told_alone() -> None:
    points, _ = job(Layout(seconds=60, checkpoint_every=20), Fault("checkpoint", 30, 33, 0, 8.0), seed=3)
    spec = json.dumps({"data": {"path": "/data"}, "checkpoint": {"path": "/ckpt"}})
    points.append(point("diagnosd_job", {"job": "train"}, {"spec": spec}, T0))
    slow = [p for p in points if float(p.fields.get("checkpoint", 0)) > 1]
    document = one(judge(sorted(points, key=_order))[0])
    assert len(slow) == 1
    assert document["cause"] == "checkpoint_stall"
    assert document["lost_gpu_seconds"] == pytest.approx(2 * 8.0, rel=0.1)
    assert "/ckpt" in document["next"]
    assert "/data" not in document["next"]


def copied_after(points: list[Point], usual: float) -> list[Point]:
    """The same, where all of a checkpoint that takes longer than usual lies after the save, in no phase."""
    return [
        p._replace(fields={**p.fields, "checkpoint": usual, "other": float(p.fields["other"]) + more})
        if (more := float(p.fields.get("checkpoint", 0)) - usual) > 0.1
        else p
        for p in points
    ]


def test_what_a_step_takes_while_it_is_slow_is_known_beside_what_it_usually_takes() -> None:
    points, _ = job(None, Fault("bandwidth", 20, 40, 1, 0.2), seed=3)
    before, slow = (
        judge([p for p in points if p.time < T0 + until * 10**9])[1].status()["train"] for until in (19, 35)
    )
    assert before["now_s"] == pytest.approx(before["step_s"], rel=0.1)
    assert slow["step_s"] == pytest.approx(before["step_s"], rel=0.1)
    assert slow["now_s"] > 2 * slow["step_s"]


def test_what_follows_the_save_in_no_phase_is_part_of_the_checkpoint() -> None:
    points, _ = job(Layout(seconds=60, checkpoint_every=20), Fault("checkpoint", 25, 999, 0, 3.0), seed=3)
    assert "follows the save" not in one(judge(points)[0])["text"]
    points = copied_after(points, 0.06)
    assert max(float(p.fields.get("checkpoint", 0)) for p in points) < 0.1
    document = one(judge(points)[0])
    assert (document["cause"], document["locus"]) == ("checkpoint_stall", ["rank:0", "host:h0"])
    assert "A step with a checkpoint takes 3." in document["text"]
    assert "follows the save" in document["text"]


def test_what_a_checkpoint_cost_is_taken_from_saving_on_one_rank_and_from_waiting_on_the_other() -> None:
    layout = Layout(seconds=60, checkpoint_every=20)
    usual = judge(job(layout, seed=3)[0])[1].summary()["jobs"]["train"]
    documents, analysis = judge(job(layout, Fault("checkpoint", 25, 999, 0, 3.0), seed=3)[0])
    part = analysis.summary()["jobs"]["train"]
    assert part["ledger_ns"]["checkpoint_stall"] == pytest.approx(1e9 * one(documents)["lost_gpu_seconds"], rel=0.01)
    for name in ("communication_by_design", "other_by_design"):
        a_step, usually = part["ledger_ns"][name] / part["steps"], usual["ledger_ns"][name] / usual["steps"]
        assert a_step == pytest.approx(usually, rel=0.1)


BUSY = Fault("busy_host", 20, 33, None, 2.5)
UNSEEN = {"without": frozenset({"pressure", "diagnosd_process"}), **HEAVY}


@pytest.mark.parametrize("until", [33, 60], ids=["the job ends in it", "it passes"])
def test_what_is_too_short_for_a_verdict_without_a_cause_is_no_verdict_and_is_told(until: int) -> None:
    documents, analysis = judge(job(Layout(seconds=until, **UNSEEN), BUSY, seed=3)[0])
    assert documents == []
    summary = analysis.summary()
    part = summary["jobs"]["train"]
    (brief,) = part["brief"]
    assert seconds(brief, "start") == pytest.approx(20, abs=1)
    assert seconds(brief, "end") == pytest.approx(33, abs=1.5)
    assert brief["slowdown"] > 1.2
    assert part["ledger_ns"]["unexplained"] == pytest.approx(1e9 * brief["lost_gpu_seconds"], rel=0.01)
    text = report.plain(report.whole([], summary))
    assert text.startswith("Job train was slower for 1")
    assert "ound in" not in text


def test_one_checkpoint_that_is_a_little_slow_is_a_hiccup() -> None:
    points, _ = job(Layout(seconds=60, checkpoint_every=20), Fault("checkpoint", 30, 33, 0, 0.5), seed=3)
    assert sum(float(p.fields.get("checkpoint", 0)) > 0.5 for p in points) == 1
    assert judge(points)[0] == []


@pytest.mark.parametrize(("every", "slow_from", "until"), [(35, 20, 560), (1100, 250, 580)], ids=["often", "seldom"])
def test_what_slow_checkpoints_cost_is_summed_however_long_it_lasts_and_however_far_they_are_apart(
    every: int, slow_from: float, until: float
) -> None:
    layout = Layout(seconds=until, checkpoint_every=every, checkpoint=0.3, **STEPS_100_MS)
    points, _ = job(layout, Fault("checkpoint", slow_from, 9999, 0, 2.0), seed=3)
    saves = [float(p.fields["checkpoint"]) for p in points if "checkpoint" in p.fields]
    slow = [save for save in saves if save > 2]
    assert len(saves) - len(slow) >= 2
    document = one(judge(points)[0])
    assert document["cause"] == "checkpoint_stall"
    assert seconds(document, "start") == pytest.approx(slow_from, abs=1.3 * every * 0.1)
    assert document["lost_gpu_seconds"] == pytest.approx(2 * 2.0 * len(slow), rel=0.05)


def stuck(of_rank_1: dict[str, Any] | None = None, layout: Layout | None = None, **process: Any) -> Documents:
    """No step ends after 20 s, and so much is known of what the ranks do then; None: it is not."""
    points, _ = job(layout or Layout(seconds=110), Fault("hang", 20, 120, 1), seed=1)
    made = []
    for p in points:
        if p.series.measurement == "diagnosd_process" and p.time > T0 + 20 * 10**9:
            mine = (of_rank_1 or {}) if p.series.tag("rank") == "1" else {}
            fields = {name: value for name, value in {**p.fields, **process, **mine}.items() if value is not None}
            made.append(Point(p.series, fields, p.time))
        else:
            made.append(p)
    return judge(made)[0]


@pytest.mark.parametrize("rest", [{"cpu_main": 1.0, "state": "R"}, {"cpu_main": 0.0, "state": "S"}])
def test_a_program_that_does_something_else_between_steps_does_not_hang(rest: dict[str, Any]) -> None:
    """It computes, or waits: for an upload, for somebody at the keyboard."""
    assert stuck(phase="other", **rest) == []


def test_a_rank_in_no_phase_that_the_others_wait_for_hangs() -> None:
    document = one(stuck({"phase": "other"}, phase="collective", cpu_main=0.0))
    assert (document["cause"], document["locus"]) == ("hang", ["rank:1"])


def test_ranks_that_wait_for_their_next_batch_starve() -> None:
    document = one(stuck(phase="data_wait", cpu_main=0.0))
    assert (document["cause"], document["owner"], document["locus"]) == ("data_starvation", "job", ["job"])
    assert document["text"].endswith("all ranks are in data_wait.")
    assert document["next"] == "On each host: py-spy dump of the loader of each rank: what does it wait for?"


def test_ranks_that_starve_from_the_start_and_then_get_no_batch_at_all_are_told_again() -> None:
    documents = stuck(layout=Layout(seconds=110, fetch=0.4), phase="data_wait", cpu_main=0.0)
    assert {document["cause"] for document in documents} == {"data_starvation"}
    assert ["No step has ended" in document["text"] for document in documents].count(True) == 1
    assert len(documents) == 2


def test_the_rank_that_waits_for_its_next_batch_while_the_others_wait_for_it_starves() -> None:
    document = one(stuck({"phase": "data_wait"}, phase="collective", cpu_main=0.0))
    assert (document["cause"], document["locus"]) == ("data_starvation", ["rank:1"])
    assert document["next"] == "On h1: py-spy dump of the loader of rank 1: what does it wait for?"


def test_of_a_hang_only_what_was_read_is_said() -> None:
    alike, unread = one(stuck(phase="collective")), one(stuck(phase=None, state=None, cpu_main=None))
    assert alike["text"].endswith("all ranks are in collective.")
    assert unread["text"].endswith("what the ranks do was not read.")
    assert unread["confidence"] < alike["confidence"]
    assert "fewest" not in unread["next"] + alike["next"]
    assert [row["metric"] for row in unread["evidence"]] == ["standstill"]


def test_the_rank_that_entered_fewer_collectives_is_the_one_that_is_waited_for() -> None:
    document = one(stuck({"seq": 41}, phase="collective", group="world:0", seq=42))
    assert document["locus"] == ["rank:1"]
    assert document["next"] == "On h1: py-spy dump of rank 1; it entered the fewest collectives."


def set_by_time(points: list[Point]) -> list[Point]:
    return list({(point.series.key, point.time): point for point in points}.values())


def test_how_the_points_are_batched_and_shuffled_within_the_lateness_changes_no_byte() -> None:
    points, _ = job(None, Fault("neighbour", 20, 40, 1), seed=5)

    def said(batches: float, shuffle: int | None) -> str:
        mixed = points
        if shuffle is not None:
            drawn = random.Random(shuffle)
            mixed = sorted(points, key=lambda point: point.time + drawn.uniform(0, 2e9))
        analysis = Analysis("lab")
        documents = [document for batch in by_time(mixed, batches) for document in analysis.feed(batch)]
        return json.dumps([*documents, *analysis.finish(), analysis.summary()])

    first = said(1.0, None)
    assert said(0.1, None) == first
    assert said(7.0, None) == first
    assert said(1.0, 1) == first


def test_the_summary_adds_up_and_prices_the_episode() -> None:
    points, _ = job(None, Fault("bandwidth", 20, 40, 1, 0.2), seed=3)
    documents, analysis = judge(points)
    part = analysis.summary()["jobs"]["train"]
    assert sum(part["ledger_ns"].values()) == part["gpu_ns"]
    assert part["ledger_ns"]["network_congestion"] == pytest.approx(1e9 * documents[0]["lost_gpu_seconds"], rel=0.01)


def switched_off(points: list[Point], after: float, rank: int) -> list[Point]:
    """The probe of a rank says that it is off, and tells no more steps."""
    off = T0 + round(after * 1e9)
    tags = {"job": "train", "host": f"h{rank}", "kind": "telemetry_gap", "subject": f"rank:{rank}"}
    mine = [p for p in points if p.series.measurement == "diagnosd_step" and p.series.tag("rank") == str(rank)]
    silenced = {(p.series, p.time) for p in mine if p.time >= off}
    heard = [p for p in points if (p.series, p.time) not in silenced]
    return sorted([*heard, point("diagnosd_event", tags, {"text": "probe off: too dear"}, off)], key=_order)


@pytest.mark.parametrize(("after", "in_part"), [(15, True), (58, False)])
def test_a_job_of_which_little_was_seen_is_not_called_healthy(after: float, in_part: bool) -> None:
    points, _ = job(Layout(seconds=60), seed=1)
    for rank in (0, 1):
        points = switched_off(points, after, rank)
    documents, analysis = judge(points)
    summary = analysis.summary()
    part = summary["jobs"]["train"]
    assert documents == []
    assert part["observed"] == pytest.approx(1 - part["ledger_ns"]["unobserved"] / part["gpu_ns"], abs=1e-3)
    assert [(gap["subject"], gap["text"]) for gap in part["gaps"]] == [
        ("rank:0", "probe off: too dear"),
        ("rank:1", "probe off: too dear"),
    ]
    text = report.plain(report.whole(documents, summary))
    assert ("Nothing found in what was seen of job train" in text) is in_part
    assert "probe off: too dear" in text


def test_a_job_of_few_steps_is_too_short_to_judge() -> None:
    points = [p for p in job(Layout(seconds=20), seed=1)[0] if p.time < T0 + 22 * 10**8]
    documents, analysis = judge(points)
    summary = analysis.summary()
    assert (summary["jobs"]["train"]["steps"], summary["jobs"]["train"]["judged"]) == (6, 0)
    text = report.plain(report.whole(documents, summary))
    assert "Too little of job train could be judged" in text
    assert "Nothing found" not in text


def test_how_many_steps_were_judged_is_told() -> None:
    _, analysis = judge(job(Layout(seconds=60), seed=1)[0])
    part = analysis.summary()["jobs"]["train"]
    assert 0.85 * part["steps"] < part["judged"] < part["steps"]
    assert part["judged_s"] == pytest.approx(part["judged"] * part["step_s"], rel=0.05)


def test_a_host_that_is_kept_out_for_its_clock_is_named() -> None:
    points, _ = job(Layout(seconds=60, ranks=3, offsets=(0, 0, 7200)), seed=1)
    ahead = 7200 * 10**9
    heard = sorted(points, key=lambda p: p.time - (ahead if p.series.tag("host") == "h2" else 0))
    analysis = Analysis("lab")
    for start in range(0, len(heard), 50):
        analysis.feed(heard[start : start + 50])
    documents = analysis.finish()
    gaps = analysis.summary()["jobs"]["train"]["gaps"]
    assert [gap["subject"] for gap in gaps] == ["host:h2"]
    assert "h2" in report.plain(report.whole(documents, analysis.summary()))


def test_ranks_of_whom_nothing_is_heard_are_part_of_what_was_not_seen() -> None:
    points, _ = job(Layout(ranks=4, seconds=30), seed=1)
    _, analysis = judge([p for p in points if p.series.tag("host") not in ("h1", "h2", "h3")])
    part = analysis.summary()["jobs"]["train"]
    assert (part["ranks"], part["world"]) == (1, 4)
    assert part["observed"] < 0.25


def test_messages_that_are_lost_again_and_again_do_not_hide_what_is_final() -> None:
    points, _ = job(Layout(seconds=30), seed=1)
    tags = {"job": "train", "host": "h0", "kind": "telemetry_gap", "subject": "rank:0"}
    fields: dict[str, Any] = {"text": "3 messages of rank 0 of train were lost", "value": 3.0}
    lost = [point("diagnosd_event", tags, fields, T0 + n * 10**9) for n in range(5, 15)]
    _, analysis = judge(switched_off(sorted([*points, *lost], key=_order), 20, 0))
    gaps = analysis.summary()["jobs"]["train"]["gaps"]
    assert [(gap["text"], gap["count"]) for gap in gaps] == [("probe off: too dear", 1), (fields["text"], 10)]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, ["diagnosd_cluster"]),
        ({"declared": DECLARED}, []),
        ({"ranks_a_host": 2}, ["diagnosd_socket"]),  # nobody needs a fabric on one host
        ({"declared": DECLARED, "without": frozenset({"pressure"})}, ["pressure"]),
    ],
)
def test_what_a_verdict_would_have_needed_and_had_not_is_told(changes: dict[str, Any], missing: list[str]) -> None:
    _, analysis = judge(job(Layout(seconds=20), seed=1, **changes)[0])
    part = analysis.summary()["jobs"]["train"]
    assert part["missing"] == missing
    assert not set(part["sources"]) & set(missing)
    assert "diagnosd_agent" not in part["sources"]


def moved(points: list[Point], seconds: int) -> list[Point]:
    """The same, so much later by every clock."""
    by = seconds * 10**9

    def later(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value + by if name in ("sync_enter", "sync_exit") else value for name, value in fields.items()}

    return [Point(p.series, later(p.fields), p.time + by) for p in points]


def test_steps_of_an_attempt_that_another_host_is_past_are_counted_and_told() -> None:
    points, _ = job(Layout(seconds=40, ranks=4, ranks_a_host=2), seed=3)
    at = T0 + 20 * 10**9
    mixed = [
        Point(p.series, {**p.fields, "attempt": 1}, p.time)
        if p.time > at and "attempt" in p.fields and p.series.tag("host") == "h1"
        else p
        for p in points
    ]
    dropped = [p for p in mixed if p.time > at and p.series.measurement == "diagnosd_step" and not p.fields["attempt"]]
    documents, analysis = judge(mixed)
    (gap,) = analysis.summary()["jobs"]["train"]["gaps"]
    assert gap["subject"] == "host:h0"
    assert gap["count"] == pytest.approx(len(dropped), abs=2)
    assert "attempt" in report.plain(report.whole(documents, analysis.summary()))


def test_a_restart_begins_anew_and_ends_what_was_open() -> None:
    first, _ = job(Layout(seconds=40, ends=False), Fault("bandwidth", 20, 99, 1, 0.2), seed=3)
    again, _ = job(Layout(seconds=40), seed=4)
    later = [
        Point(point.series, {**point.fields, **({"attempt": 1} if "attempt" in point.fields else {})}, point.time)
        for point in moved(again, 60)
    ]
    document = one(judge([*first, *later])[0])
    assert document["attempt"] == 0
    assert document["state"] == "resolved"
    assert seconds(document, "end") <= 61


def mirrored(slow: Fault, **changes: Any) -> tuple[str, float]:
    document = one(judge(job(Layout(seconds=50), slow, seed=6, **changes)[0])[0])
    return document["cause"], document["slowdown"]


def test_causes_with_the_same_step_time_curve_are_told_apart_by_where_the_time_goes() -> None:
    """All make a step of 0.28 s one of about 0.44 s, at the same second."""
    causes = {
        "network_congestion": Fault("bandwidth", 20, 40, 1, 0.49),
        "data_starvation": Fault("loader", 20, 40, 1, 0.4),
        "straggler": Fault("slow_rank", 20, 40, 1, 2.45),
    }
    found = {cause: mirrored(fault, **HEAVY) for cause, fault in causes.items()}
    assert {cause: named for cause, (named, _) in found.items()} == {cause: cause for cause in causes}
    slowdowns = [slowdown for _, slowdown in found.values()]
    assert max(slowdowns) < 1.12 * min(slowdowns)


@pytest.mark.parametrize(
    ("fault", "dropped", "without"),
    [
        (Fault("loader", 20, 48, 1, 0.4), {"data_wait", "queue"}, set()),
        (Fault("bandwidth", 20, 48, 1, 0.2), {"comm", "sync_enter", "sync_exit"}, set()),
        (Fault("bandwidth", 20, 48, 1, 0.2), set(), {"diagnosd_socket", "net"}),
        (Fault("slow_rank", 20, 48, 1, 2.0), {"forward", "backward"}, set()),
        (Fault("busy_host", 20, 48, None, 2.5), set(), {"pressure", "diagnosd_process"}),
    ],
)
def test_without_the_decisive_sensors_the_answer_is_unknown_and_what_to_measure(
    fault: Fault, dropped: set[str], without: set[str]
) -> None:
    points, _ = job(None, fault, seed=3, dropped=frozenset(dropped), without=frozenset(without), **HEAVY)
    document = one(judge(points)[0])
    assert document["cause"] == "unknown"
    assert len(document["alternatives"]) >= 2
    assert document["next"]


@pytest.mark.parametrize("missing", ["diagnosd_socket", "net", "pressure", "diagnosd_process", "diskio"])
def test_a_missing_source_makes_no_verdict_surer_and_none_wrong(missing: str) -> None:
    for fault, changes in ((Fault("bandwidth", 20, 40, 1, 0.2), {}), (Fault("cpu_quota", 20, 40, 1, 2.7), HEAVY)):
        whole = one(judge(job(Layout(seconds=50), fault, seed=3, **changes)[0])[0])
        part = judge(job(Layout(seconds=50), fault, seed=3, without=frozenset({missing}), **changes)[0])[0]
        assert {document["cause"] for document in part} <= {whole["cause"], "unknown"}
        assert all(
            document["confidence"] <= whole["confidence"] for document in part if document["cause"] == whole["cause"]
        )


@pytest.mark.parametrize(
    "fault",
    [
        Fault("bandwidth", 20, 80, 4, 0.2),
        Fault("slow_rank", 20, 80, 1, 2.5),
        Fault("busy_host", 20, 80, None, 2.5),
    ],
    ids=lambda fault: fault.kind,
)
def test_of_devices_that_wait_in_their_backward_pass_nobody_is_said_to_compute_longer(fault: Fault) -> None:
    points, _ = job(Layout(seconds=100, device=True, ranks=8, ranks_a_host=4, **HEAVY), fault, seed=3)
    document = one(judge(points)[0])
    assert document["cause"] == "unknown"
    assert document["next"]
    assert "comput" not in " ".join(evidence["text"] for evidence in document["evidence"])


# What makes a step of each length, and how many times as long the job runs for it.
LENGTHS: dict[str, tuple[dict[str, Any], float]] = {
    "5 ms": ({"forward": 0.001, "backward": 0.0015, "optimizer": 0.0003, "fetch": 0.002, "size": 1e5}, 1),
    "60 ms": ({"forward": 0.01, "backward": 0.02, "optimizer": 0.004, "fetch": 0.02, "size": 2e6}, 1),
    "200 ms": ({"forward": 0.02, "backward": 0.04, "optimizer": 0.004, "fetch": 0.04, "size": 16.8e6}, 1),
    "40 s": ({"forward": 13.0, "backward": 22.0, "optimizer": 0.5, "fetch": 5.0, "size": 4.5e8, "noise": 0.005}, 40),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_of_any_length_are_held_against_their_past(length: str) -> None:
    changes, times = LENGTHS[length]
    step = changes["forward"] + changes["backward"] + changes["optimizer"] + changes["size"] / GBIT
    fault = Fault("loader", 25 * times, 45 * times, None, changes["fetch"] + 3 * step)
    document = one(judge(job(Layout(seconds=55 * times), fault, seed=3, **changes)[0])[0])
    assert (document["cause"], document["baseline"]["from"]) == ("data_starvation", "past")
    assert document["state"] == "resolved"
    assert document["baseline"]["step_s"] == pytest.approx(step, rel=0.2, abs=2e-3)
    assert seconds(document, "detected") - fault.start <= max(
        TELL_WITHIN, 6 * fault.size
    )  # two are queued, four are slow


SHORT: dict[str, Any] = {"forward": 0.004, "backward": 0.007, "optimizer": 0.001, "fetch": 0.004, "size": 1e6}  # 22 ms


@pytest.mark.parametrize("fault", [Fault("bandwidth", 25, 45, 1, 0.2), Fault("slow_rank", 25, 45, 1, 4.0)])
def test_short_steps_of_which_a_tenth_is_timed_are_told_apart(fault: Fault) -> None:
    documents, _ = judge(job(Layout(seconds=55), fault, seed=3, timed_every=20, **SHORT)[0])
    causes = {"bandwidth": "network_congestion", "slow_rank": "straggler"}
    assert [document["cause"] for document in documents] == [causes[fault.kind]]


def test_a_long_slowdown_of_short_steps_whose_cause_is_unknown_is_told_since_its_beginning() -> None:
    fault = Fault("slow_rank", 25, 55, 1, 4.0)
    document = one(judge(job(Layout(seconds=60), fault, seed=3, timed_every=10**9, **SHORT)[0])[0])
    assert document["cause"] == "unknown"
    assert seconds(document, "start") == pytest.approx(fault.start, abs=1)


def test_steps_that_became_long_enough_to_be_timed_are_not_held_against_untimed_ones_part_by_part() -> None:
    slow = Fault("slow_rank", 25, 55, 1, 4.0)
    untimed, _ = job(Layout(seconds=55), slow, seed=3, timed_every=10**9, **SHORT)
    timed, _ = job(Layout(seconds=55), slow, seed=3, **SHORT)
    longer = [p for p in timed if p.time > T0 + 26e9]
    assert judge(timed)[0][0]["cause"] == "straggler"
    assert {document["cause"] for document in judge([p for p in untimed if p.time <= T0 + 26e9] + longer)[0]} <= {
        "unknown"
    }


@pytest.mark.parametrize("length", ["5 ms", "60 ms", "200 ms"])
def test_steps_of_any_length_are_held_against_bounds_and_peers(length: str) -> None:
    changes, _ = LENGTHS[length]
    starved = one(judge(job(Layout(seconds=30), seed=1, **{**changes, "fetch": 0.3})[0])[0])
    assert (starved["cause"], starved["baseline"]["from"]) == ("data_starvation", "model")
    assert seconds(starved, "detected") <= TELL_WITHIN
    slow, _ = job(Layout(seconds=30, ranks=4), Fault("slow_rank", 0, 99, 1, 2.5), seed=1, **{**changes, "fetch": 0.001})
    document = one(judge(slow)[0])
    assert (document["cause"], document["baseline"]["from"]) == ("straggler", "peers")


def test_two_jobs_on_the_same_hosts_are_judged_apart() -> None:
    slow, _ = job(Layout(seconds=50), Fault("slow_rank", 20, 40, 1, 2.0), seed=3, **HEAVY)
    well, _ = job(Layout(seconds=50, name="other"), seed=4)
    both = sorted([*slow, *(p for p in well if p.series.tag("job"))], key=lambda p: (p.time, p.series.key))
    documents, _ = judge(both)
    assert {document["job"] for document in documents} == {"train"}


def test_truths_of_the_generator_cover_what_they_say() -> None:
    """The generator itself: a fault costs what the same job without it did not."""
    _, (truth,) = job(Layout(seconds=50), Fault("bandwidth", 20, 40, 1, 0.2), seed=3)
    assert isinstance(truth, Truth)
    assert truth.extra == pytest.approx(2 * 20 * (1 - 1 / 4.4), rel=0.1)  # two ranks, 20 s, steps of 4.4 times
    _, none = job(Layout(seconds=20), seed=3)
    assert none == []


def test_the_end_of_a_job_is_told_while_others_go_on() -> None:
    """A job that ends during a fault: its episode is resolved a minute later, without waiting for the last point."""
    points, _ = job(Layout(seconds=40, ends=False), Fault("bandwidth", 20, 99, 1, 0.2), seed=3)
    heartbeats = [p for p in job(Layout(seconds=150), seed=4)[0] if p.series.measurement == "diagnosd_agent"]
    analysis = Analysis("lab")
    told = [
        d for batch in by_time(sorted(set_by_time([*points, *heartbeats]), key=_order)) for d in analysis.feed(batch)
    ]
    assert {document["cause"] for document in told} == {"network_congestion"}
    assert (told[0]["state"], told[-1]["state"]) == ("confirmed", "resolved")
    assert seconds(told[-1], "end") <= 41


def _order(point: Point) -> tuple[int, str]:
    return point.time, point.series.key


def test_steps_that_a_rank_lost_on_the_way_delay_nothing() -> None:
    points, _ = job(None, Fault("bandwidth", 20, 40, 1, 0.2), seed=3)
    holes = [p for p in points if not (p.series.tag("rank") == "1" and p.fields.get("step", 0) % 9 == 8)]
    whole, part = one(judge(points)[0]), one(judge(holes)[0])
    assert len(holes) < len(points)
    assert part["cause"] == whole["cause"]
    assert seconds(part, "detected") <= seconds(whole, "detected") + 2


def test_a_killed_job_that_is_told_lost_again_and_again_has_ended() -> None:
    points, _ = job(Layout(seconds=40, ends=False), Fault("bandwidth", 20, 99, 1, 0.2), seed=3)
    heartbeats = [p for p in job(Layout(seconds=300), seed=4)[0] if p.series.measurement == "diagnosd_agent"]
    lost = [
        point("diagnosd_rank", {"job": "train", "host": f"h{rank}", "rank": str(rank)},
              {"state": "lost", "attempt": 0, "world": 2}, T0 + second * 10**9)
        for rank in (0, 1) for second in range(50, 300, 60)
    ]  # fmt: skip
    heard = [p for p in points if p.time < T0 + 42 * 10**9]
    analysis = Analysis("lab")
    told = [d for batch in by_time(sorted(set_by_time([*heard, *heartbeats, *lost]), key=_order))
            for d in analysis.feed(batch)]  # fmt: skip
    assert told[-1]["state"] == "resolved"
    assert seconds(told[-1], "end") <= 41
    assert analysis.summary()["jobs"]["train"]["end"] < "2026-11-30T10:00:43"


@pytest.mark.parametrize("again", [999, 95])
def test_a_slowdown_goes_on_as_one_while_a_rank_is_silent(again: int) -> None:
    points, (truth,) = job(Layout(ranks=4, seconds=130), Fault("bandwidth", 40, 110, 1, 0.2), seed=3)
    heard = [p for p in points if p.series.tag("rank") != "3" or not 60 < (p.time - T0) / 1e9 < again]
    document = one(judge(heard)[0])
    assert document["state"] == "resolved"
    assert abs(seconds(document, "end") - 110) <= 2.5
    assert document["lost_gpu_seconds"] == pytest.approx(truth.extra, rel=0.15)


def test_steps_longer_than_a_silence_end_nothing() -> None:
    changes = LENGTHS["40 s"][0]
    points, (truth,) = job(Layout(seconds=2400), Fault("loader", 1000, 2000, None, 60.0), seed=1, **changes)
    document = one(judge(points)[0])
    assert document["state"] == "resolved"
    assert document["lost_gpu_seconds"] == pytest.approx(truth.extra, rel=0.15)


def test_a_rank_that_falls_silent_does_not_hide_what_happens_to_the_others() -> None:
    points, _ = job(Layout(ranks=4, seconds=100), Fault("bandwidth", 70, 90, 1, 0.2), seed=3)
    heard = [p for p in points if p.series.tag("rank") != "3" or p.time < T0 + 20 * 10**9]
    document = one(judge(heard)[0])
    assert document["cause"] == "network_congestion"
    assert seconds(document, "detected") + LATENESS - 70 <= TELL_WITHIN
