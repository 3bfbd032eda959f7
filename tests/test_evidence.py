"""The table of evidence, and how it is weighed: on comparisons made by hand, with counters where a test needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from diagnosd.analysis.causes import CAUSES, GROWTHS, RIVALS
from diagnosd.analysis.classify import SUREST, Verdict, classify, next_measurement
from diagnosd.analysis.compare import Comparison
from diagnosd.analysis.decompose import OWN, PARTS
from diagnosd.analysis.evidence import ROWS, collect, interfaces, least_transfer
from diagnosd.analysis.localize import where
from diagnosd.analysis.trace import Trace
from diagnosd.point import Point, point
from jobs import T0

QUIET = {"data_wait": 0.002, "forward": 0.02, "backward": 0.04, "optimizer": 0.003, "other": 0.001, "transfer": 0.12}
Times = Mapping[str, float]


def compared(
    now: Times,
    *points: Point,
    of_ranks: tuple[Times, ...] = ({}, {}),
    hosts: tuple[str, ...] = ("a", "b"),
    last: tuple[float, ...] = (0.5, 0.5),
    **changes: Any,
) -> Comparison:
    """A healthy minute beside ten seconds in which the parts of `now` took so long; `of_ranks` for each rank's own."""
    trace = Trace()
    trace.add([point("diagnosd_agent", {"host": "a", "collector": "agent"}, {"up": 1}, T0), *points])
    for rank, host in enumerate(hosts):
        fields = {"attempt": 0, "world": len(hosts), "addresses": f"10.0.0.{rank}", "state": "running"}
        tags = {"job": "train", "host": host, "rank": str(rank)}
        trace.add([point("diagnosd_rank", tags, fields, T0 + rank)])
    usual = np.array([QUIET.get(part, 0.0) for part in PARTS])
    of_one = np.array([QUIET.get(part, 0.0) for part in OWN])
    fields: dict[str, Any] = {
        "trace": trace,
        "job": trace.jobs["train"],
        "against": "past",
        "ranks": tuple(range(len(hosts))),
        "hosts": hosts,
        "before": (0.0, 60.0),
        "during": (60.0, 70.0),
        "expected": usual,
        "observed": np.array([now.get(part, QUIET.get(part, 0.0)) for part in PARTS]),
        "own_expected": np.stack([of_one] * len(hosts)),
        "own_observed": np.array([[own.get(part, QUIET.get(part, 0.0)) for part in OWN] for own in of_ranks]),
        "last": np.array(last),
        "apart": True,
        "timed": True,
        "loads": np.ones(len(hosts), dtype=bool),
        "empty": np.full(len(hosts), np.nan),
        "full": np.full(len(hosts), np.nan),
        "workers": np.full(len(hosts), np.nan),
        "sync_bytes": 16e6,
        "from_start": False,
    }
    return Comparison(**{**fields, **changes})


def counted(measurement: str, field: str, before: float, during: float, kind: type = int, **tags: str) -> list[Point]:
    """A counter that grows by so much a second for a minute, and by so much in the ten seconds that follow."""
    values = np.concatenate([before * np.arange(0, 61), before * 60 + during * np.arange(1, 12)])
    return [point(measurement, tags, {field: kind(v)}, T0 + n * 10**9 + 1) for n, v in enumerate(values)]


def shown(measurement: str, field: str, before: float, during: float, kind: type = float, **tags: str) -> list[Point]:
    """A gauge."""
    values = [before] * 61 + [during] * 11
    return [point(measurement, tags, {field: kind(v)}, T0 + n * 10**9 + 1) for n, v in enumerate(values)]


def strongest(c: Comparison, metric: str) -> float | None:
    return next((one.reading.strength for one in collect(c)[0] if one.row.metric == metric), None)


def test_every_row_weighs_on_causes_of_the_catalogue() -> None:
    for row in ROWS:
        assert row.weights
        assert set(row.weights) <= set(CAUSES)
        assert row.advice


def test_every_cause_that_competes_has_evidence_for_it_in_two_groups() -> None:
    for cause in RIVALS:
        assert len({row.group for row in ROWS if row.weights.get(cause.code, 0) > 0}) >= 2


def test_absence_is_not_a_reading_of_zero() -> None:
    _, missing = collect(compared({"transfer": 0.5}))
    assert {"round-trip time", "retransmits", "CPU pressure", "disk wait"} <= {row.metric for row in missing}


def test_a_slow_transfer_alone_names_nobody_and_says_what_to_measure() -> None:
    (verdict,) = classify(compared({"transfer": 0.5}))
    assert verdict.cause == "unknown"
    assert verdict.alternatives[0].cause == "network_congestion"
    assert "not measured" in verdict.next


def test_a_slow_transfer_on_one_host_is_not_the_networks() -> None:
    verdicts = classify(compared({"transfer": 0.5}, hosts=("a", "a")))
    assert [verdict.cause for verdict in verdicts] == ["unknown"]


def socket(host: str, rank: int, peer: int) -> dict[str, str]:
    return {"job": "train", "host": host, "rank": str(rank), "peer": f"10.0.0.{peer}"}


def talk(host: str, rank: int, peer: int, bytes_now: float = 25e6) -> list[Point]:
    return counted("diagnosd_socket", "bytes_sent", 90e6, bytes_now, **socket(host, rank, peer))


def test_a_longer_way_on_one_link_names_its_receiver() -> None:
    points = [
        *talk("a", 0, 1),
        *shown("diagnosd_socket", "rtt", 0.0024, 0.0139, **socket("a", 0, 1)),
        *talk("b", 1, 0),
        *shown("diagnosd_socket", "rtt", 0.0024, 0.0025, **socket("b", 1, 0)),
    ]
    (verdict,) = classify(compared({"transfer": 0.5}, *points))
    assert (verdict.cause, verdict.subtype) == ("network_congestion", "bandwidth")
    assert verdict.loci == ("host:b",)
    assert "a -> b" in verdict.text


def test_two_links_with_a_longer_way_name_the_host_that_both_touch() -> None:
    """A full queue towards b holds the bytes from c, and the acknowledgements of those that b sends to a."""
    points = []
    for host, rank, peer, now in (("c", 2, 1, 0.014), ("b", 1, 0, 0.012), ("a", 0, 2, 0.0024)):
        points += talk(host, rank, peer)
        points += shown("diagnosd_socket", "rtt", 0.0024, now, **socket(host, rank, peer))
    c = compared({"transfer": 0.5}, *points, of_ranks=({}, {}, {}), hosts=("a", "b", "c"), last=(0.3, 0.3, 0.4))
    (verdict,) = classify(c)
    assert verdict.loci == ("host:b",)
    assert "c -> b" in verdict.text


def sending(host: str, rank: int, peer: int, rate: float, closed: float = 0.0) -> list[Point]:
    """A connection that sends 90 MB/s in 0.9 of the time, and then `rate` bytes in each second in which it sends."""
    tags = socket(host, rank, peer)
    return [
        *counted("diagnosd_socket", "bytes_sent", 90e6, 60e6, **tags),
        *counted("diagnosd_socket", "busy", 0.9, 60e6 / rate + closed, float, **tags),
        *counted("diagnosd_socket", "receiver_limited", 0.0, closed, float, **tags),
    ]


def test_a_connection_that_sends_more_slowly_is_congestion_however_long_the_way() -> None:
    points = [*sending("a", 0, 1, 88e6), *shown("diagnosd_socket", "rtt", 0.0024, 0.0025, **socket("a", 0, 1))]
    (verdict,) = classify(compared({"transfer": 0.2}, *points))
    assert (verdict.cause, verdict.subtype, verdict.loci) == ("network_congestion", "bandwidth", ("host:b",))


def test_a_connection_that_loses_sends_more_slowly_too_and_the_loss_is_named() -> None:
    points = [
        *sending("a", 0, 1, 66e6),
        *counted("diagnosd_socket", "segments_sent", 62_000, 41_000, **socket("a", 0, 1)),
        *counted("diagnosd_socket", "retransmits", 124, 287, **socket("a", 0, 1)),
    ]
    (verdict,) = classify(compared({"transfer": 0.5}, *points))
    assert verdict.subtype == "packet_loss"


def test_a_closed_receive_window_is_not_the_path() -> None:
    how = strongest(compared({"transfer": 0.2}, *sending("a", 0, 1, 100e6, closed=0.2)), "sending rate")
    assert how is not None
    assert how < 0


def test_noise_below_the_threshold_of_a_sign_tells_no_direction_from_the_other() -> None:
    points = [*sending("a", 0, 1, 88e6), *sending("b", 1, 0, 89e6)]
    for (host, rank, peer), now in ((("a", 0, 1), 0.0024), (("b", 1, 0), 0.0031)):
        points += shown("diagnosd_socket", "rtt", 0.0024, now, **socket(host, rank, peer))
    (verdict,) = classify(compared({"transfer": 0.2}, *points))
    assert set(verdict.loci) == {"host:a", "host:b"}


@pytest.mark.parametrize(("back", "loci"), [(72e6, ("host:b",)), (67e6, ("host:a", "host:b"))])
def test_between_two_hosts_the_direction_that_sends_more_slowly_is_named_or_either(
    back: float, loci: tuple[str, ...]
) -> None:
    (verdict,) = classify(compared({"transfer": 0.5}, *sending("a", 0, 1, 66e6), *sending("b", 1, 0, back)))
    assert tuple(sorted(verdict.loci)) == loci


def test_a_look_that_began_before_the_slowdown_does_not_tell_which_direction_is_slow() -> None:
    """Its mean is half of the old rate: the slower direction would pass for the faster one."""
    seldom = [each for each in sending("a", 0, 1, 66e6) if (each.time - T0) // 10**9 not in (58, 59, 60, 61, 62, 63)]
    (verdict,) = classify(compared({"transfer": 0.5}, *seldom, *sending("b", 1, 0, 70e6)))
    assert verdict.loci == ("host:b",)


def test_retransmits_count_against_their_own_past_whatever_the_congestion_control() -> None:
    def measured(before: float, during: float) -> float | None:
        sent = talk("a", 0, 1)
        again = counted(
            "diagnosd_socket", "retransmits", before * 90e6 / 1448, during * 25e6 / 1448, **socket("a", 0, 1)
        )
        return strongest(compared({"transfer": 0.5}, *sent, *again), "retransmits")

    usual_of_bbr, more_of_cubic = measured(0.025, 0.028), measured(0.002, 0.0102)
    assert usual_of_bbr is not None
    assert usual_of_bbr < 0
    assert more_of_cubic is not None
    assert more_of_cubic > 0


def test_loss_where_there_was_none_finds_its_link() -> None:
    """On a clean fabric nothing is sent twice, and with bbr a loss takes nothing from the window or the way."""
    points = []
    for host, rank, peer, before, now in (("c", 2, 1, 0.0, 0.02), ("b", 1, 0, 0.0005, 0.002), ("a", 0, 2, 0.0, 0.0)):
        points += talk(host, rank, peer)
        again = (before * 90e6 / 1448, now * 25e6 / 1448)
        points += counted("diagnosd_socket", "retransmits", *again, **socket(host, rank, peer))
    c = compared({"transfer": 0.5}, *points, of_ranks=({}, {}, {}), hosts=("a", "b", "c"), last=(0.3, 0.3, 0.4))
    assert where(c, "network_congestion", collect(c)[0]).way == ("c", "b")


def test_the_connection_that_is_shown_is_the_one_that_is_named() -> None:
    """In a ring of three the acknowledgements of b -> a are late too, and its way looks longer still."""
    points = []
    for host, rank, peer, now in (("c", 2, 1, 0.013), ("b", 1, 0, 0.014), ("a", 0, 2, 0.0024)):
        points += talk(host, rank, peer)
        points += shown("diagnosd_socket", "rtt", 0.0024, now, **socket(host, rank, peer))
    c = compared({"transfer": 0.5}, *points, of_ranks=({}, {}, {}), hosts=("a", "b", "c"), last=(0.3, 0.3, 0.4))
    (verdict,) = classify(c)
    assert "c -> b" in verdict.text
    (way,) = [one.reading for one in verdict.evidence if one.row.metric == "round-trip time"]
    assert (way.subject, way.receiver) == ("host:c", "b")


def rivals_of(verdict: Verdict) -> dict[str, str]:
    return {other.cause: other.text for other in verdict.alternatives}


def test_a_rival_lost_for_what_it_would_have_shown_and_did_not() -> None:
    points = [
        *talk("a", 0, 1, 90e6),
        *shown("diagnosd_socket", "rtt", 0.0024, 0.0024, **socket("a", 0, 1)),
        *shown("diagnosd_socket", "cwnd", 230, 230, int, **socket("a", 0, 1)),
        *counted("pressure", "total", 400_000, 950_000, host="b", resource="cpu", type="some"),
        *shown("diagnosd_process", "throttled", 0.0, 0.9, job="train", host="b", rank="1"),
    ]
    now = {**SLOW, "transfer": 0.22}
    (verdict,) = classify(compared(now, *points, of_ranks=({}, SLOW), last=(0, 1)))
    assert verdict.cause == "straggler"
    assert "every rank" in rivals_of(verdict)["host_stall"] or "every phase" in rivals_of(verdict)["host_stall"]
    shown_for_it = {one.reading.text for one in verdict.evidence if one.reading.strength > 0}
    assert not shown_for_it & set(rivals_of(verdict).values())


def test_what_was_not_measured_is_no_reason_for_a_rival_to_lose() -> None:
    (verdict,) = classify(compared({"transfer": 0.5}))
    assert rivals_of(verdict)["network_congestion"].startswith("only transfer speaks for it; ")
    assert rivals_of(verdict)["network_congestion"].endswith(" are not measured")


@pytest.mark.parametrize("seed_of_hosts", [("a", "a"), ("a",)])
def test_no_rival_is_named_that_could_not_befall_the_job(seed_of_hosts: tuple[str, ...]) -> None:
    ranks = len(seed_of_hosts)
    now = {"data_wait": 0.3, "transfer": 0.4}
    c = compared(now, of_ranks=(now,) * ranks, hosts=seed_of_hosts, last=(1 / ranks,) * ranks)
    for verdict in classify(c):
        assert not {"network_congestion", "topology_misconfiguration"} & rivals_of(verdict).keys()
        assert ranks > 1 or "straggler" not in rivals_of(verdict)


def test_evidence_tells_what_a_rival_would_have_raised_and_is_as_it_was() -> None:
    points = [
        *talk("a", 0, 1),
        *shown("diagnosd_socket", "rtt", 0.0024, 0.0139, **socket("a", 0, 1)),
        *counted("net", "bytes_sent", 90e6, 32e6, host="a", interface="eth0"),
        *counted("net", "bytes_recv", 90e6, 32e6, host="a", interface="eth0"),
        *counted("pressure", "total", 900_000, 900_000, host="b", resource="cpu", type="some"),
    ]
    (verdict,) = classify(compared({"transfer": 0.5}, *points))
    metrics = [one.row.metric for one in verdict.evidence]
    assert {"data wait", "bytes a step", "short of CPU"} <= set(metrics)
    assert any(metric.startswith("compute of") for metric in metrics)
    assert len(metrics) == len(set(metrics)) <= 7
    assert metrics[-1] == "short of CPU"  # what speaks against it comes last


def test_what_is_expected_as_it_is_observed_rules_nothing_out() -> None:
    """Against a bound only the bounded parts are compared."""
    now = np.array([{**QUIET, "transfer": 0.7}.get(part, 0.0) for part in PARTS])
    bounded = np.where(np.array(PARTS) == "transfer", 0.14, now)
    points = [point("diagnosd_cluster", {"cluster": "lab"}, {"spec": DECLARED}, T0 + 9), *slow_port("eth0", 0.2)]
    c = compared({}, *points, expected=bounded, observed=now, from_start=True, against="model", before=None)
    (verdict,) = classify(c)
    assert (verdict.cause, verdict.subtype) == ("topology_misconfiguration", "link_rate_low")
    told = {one.row.metric for one in verdict.evidence}
    assert told == {"transfer", "from the first step", "declared fabric", "port rate"}
    assert (
        rivals_of(verdict).get("network_congestion", "it was so from the first step") == "it was so from the first step"
    )


def slow_port(name: str, gbps: float) -> list[Point]:
    inventory = f'{{"nics": [{{"netdev": "{name}", "rate_gbps": {gbps}, "state": "ACTIVE"}}]}}'
    return [point("diagnosd_node", {"host": "b"}, {"inventory": inventory}, T0)]


DECLARED = '{"fabric": {"kind": "ethernet", "rate_gbps": 1, "interface": "eth0"}}'


def test_a_fact_without_a_number_shows_none() -> None:
    for reading in (one.reading for one in collect(compared({"transfer": 0.5}))[0] if one.row.unit == ""):
        assert np.isnan(reading.observed)


def test_others_bytes_on_the_interface_are_somebody_elses_traffic() -> None:
    points = [
        *counted("net", "bytes_recv", 95e6, 119e6, host="b", interface="eth0"),
        *counted("diagnosd_socket", "bytes_received", 90e6, 19e6, **socket("b", 1, 0)),
        *talk("a", 0, 1, 19e6),
    ]
    (verdict,) = classify(compared({"transfer": 0.5}, *points))
    assert (verdict.cause, verdict.subtype) == ("network_congestion", "neighbour_traffic")
    assert verdict.loci == ("nic:b/eth0", "host:b")


def holding(host: str, **addresses: str) -> list[Point]:
    """What the inventory tells of a host's interfaces: `eth0="10.0.0.1"`; one that holds no address: `eth0=""`."""
    nics = [
        {"netdev": name.replace("_", "."), "addresses": [held] if held else None} for name, held in addresses.items()
    ]
    return [point("diagnosd_node", {"host": host}, {"inventory": json.dumps({"nics": nics})}, T0)]


def test_loopback_and_what_joins_containers_are_no_interfaces_of_the_job() -> None:
    points = [
        *holding("b", eth0="10.0.0.1"),
        *counted("net", "bytes_recv", 1e6, 900e6, host="b", interface="lo"),
        *counted("net", "bytes_recv", 1e6, 900e6, host="b", interface="docker0"),
        *counted("net", "bytes_recv", 95e6, 20e6, host="b", interface="eth0"),
        *counted("diagnosd_socket", "bytes_received", 90e6, 19e6, **socket("b", 1, 0)),
    ]
    assert (strongest(compared({"transfer": 0.5}, *points), "others' bytes") or 0) < 0


@pytest.mark.parametrize(
    ("held", "nic"),
    [
        ({"bond0": "10.0.0.1", "eth0": "", "eth1": ""}, "bond0"),
        ({"eth0_7": "10.0.0.1", "eth0": ""}, "eth0.7"),
        ({"eth0_7": "10.0.0.1", "eth0": "10.9.0.1"}, "eth0"),
        ({"br0": "10.0.0.1", "eth0": ""}, "br0"),
    ],
    ids=["a bond and its members", "a VLAN", "a VLAN beside an address of its parent's", "a bridge and its port"],
)
def test_a_byte_that_passes_several_interfaces_counts_once(held: dict[str, str], nic: str) -> None:
    """From the first step on, so that nothing is known of before: no neighbour who explains a slow transfer."""
    points = holding("b", **held)
    for name in held:
        for way in ("bytes_recv", "bytes_sent"):
            points += counted("net", way, 95e6, 20e6, host="b", interface=name.replace("_", "."))
    points += counted("diagnosd_socket", "bytes_received", 90e6, 19e6, **socket("b", 1, 0))
    early = {"before": None, "against": "model", "from_start": True, "sync_bytes": np.nan}
    points += counted("diagnosd_socket", "bytes_sent", 90e6, 19e6, **socket("b", 1, 0))
    c = compared({"transfer": 0.5}, *points, **early)
    assert [series.tag("interface") for series in interfaces(c, "b")] == [nic]
    assert (strongest(c, "others' bytes") or 0) < 0


def test_a_declared_interface_that_holds_no_address_is_not_the_one_in_use() -> None:
    points = [
        point("diagnosd_cluster", {"cluster": "lab"}, {"spec": DECLARED}, T0 + 9),
        *holding("b", eth0="", eth1="10.0.0.1"),
        *counted("net", "bytes_sent", 95e6, 20e6, host="b", interface="eth1"),
        *counted("net", "bytes_sent", 0, 0, host="b", interface="eth0"),
        *counted("diagnosd_socket", "bytes_sent", 90e6, 19e6, **socket("b", 1, 0)),
    ]
    assert strongest(compared({"transfer": 0.5}, *points, from_start=True), "interface") == 3


SLOW = {"forward": 0.08, "backward": 0.2}


def test_a_rank_that_computes_longer_while_the_others_wait_is_the_straggler() -> None:
    (verdict,) = classify(compared(SLOW, of_ranks=({}, SLOW), last=(0, 1)))
    assert verdict.cause == "straggler"
    assert verdict.loci == ("rank:1", "host:b")
    assert verdict.columns == (1,)


def test_all_ranks_that_compute_longer_are_no_stragglers() -> None:
    causes = [verdict.cause for verdict in classify(compared(SLOW, of_ranks=(SLOW, SLOW)))]
    assert causes == ["unknown"]


def test_a_rank_without_processor_cannot_move_its_bytes_either() -> None:
    tags = {"job": "train", "host": "b", "rank": "1"}
    points = shown("diagnosd_process", "throttled", 0.0, 0.9, **tags)
    now = {**SLOW, "transfer": 0.25}
    (verdict,) = classify(compared(now, *points, of_ranks=({}, SLOW), last=(0, 1)))
    assert (verdict.cause, verdict.subtype) == ("straggler", "cpu_quota")
    assert "transfer" in verdict.claims


COUNTERS = ("total", "gc_seconds")
UNKNOWN_BEFORE = {
    "CPU quota": ("diagnosd_process", {"throttled": 0.4}, {"job": "train", "host": "b", "rank": "1"}),
    "stolen CPU": ("cpu", {"usage_steal": 30.0}, {"host": "b", "cpu": "cpu-total"}),
    "CPU pressure": ("pressure", {"total": 900_000}, {"host": "b", "resource": "cpu", "type": "some"}),
    "garbage collection": ("diagnosd_process", {"gc_seconds": 0.9}, {"job": "train", "host": "b", "rank": "1"}),
}


@pytest.mark.parametrize("metric", UNKNOWN_BEFORE)
def test_what_was_not_looked_at_before_is_not_taken_for_zero(metric: str) -> None:
    """It may always be so: then it is no sign, however much it is. Without a past, a healthy machine is the measure."""
    measurement, fields, tags = UNKNOWN_BEFORE[metric]
    points = [
        point(measurement, tags, {name: value * (n if name in COUNTERS else 1) for name, value in fields.items()}, at)
        for n, at in enumerate(range(T0 + 60 * 10**9, T0 + 71 * 10**9, 10**9))
    ]
    now = {**SLOW, "transfer": 0.25}
    assert strongest(compared(now, *points, of_ranks=({}, SLOW), last=(0, 1)), metric) is None
    assert (strongest(compared(now, *points, of_ranks=({}, SLOW), last=(0, 1), before=None), metric) or 0) > 0


def test_a_quota_that_was_not_there_before_held_nobody_back() -> None:
    tags = {"job": "train", "host": "b", "rank": "1"}
    looks = shown("diagnosd_process", "cpu_main", 0.9, 0.3, **tags)
    quota = [each for each in shown("diagnosd_process", "throttled", 0.0, 0.9, **tags) if each.time > T0 + 61 * 10**9]
    c = compared({**SLOW, "transfer": 0.25}, *looks, *quota, of_ranks=({}, SLOW), last=(0, 1))
    (reading,) = [one.reading for one in collect(c)[0] if one.row.metric == "CPU quota"]
    assert (reading.decisive, reading.expected) == (True, 0.0)


def test_a_full_prefetch_queue_speaks_against_starvation() -> None:
    starved = {"data_wait": 0.3}
    empty, full = (compared(starved, of_ranks=(starved, starved), empty=np.full(2, share)) for share in (0.9, 0.0))
    (first,), (second,) = classify(empty), classify(full)
    assert first.cause == "data_starvation"
    assert first.confidence > second.confidence


def test_who_waits_for_storage_is_told_from_who_has_no_processor() -> None:
    starved = {"data_wait": 0.3}
    tags = {"job": "train", "host": "b", "rank": "1"}

    def subtype(*points: Point, workers: float = np.nan) -> str | None:
        c = compared(starved, *points, of_ranks=({}, starved), last=(0, 1), workers=np.array([1, workers]))
        (verdict,) = classify(c)
        return verdict.subtype

    io = counted("pressure", "total", 10_000, 900_000, host="b", resource="io", type="some")
    idle = counted("pressure", "total", 10_000, 10_000, host="b", resource="io", type="some")
    assert subtype(*io) == "slow_storage"
    assert subtype(*idle, *shown("diagnosd_process", "cpu_workers", 0.3, 3.9, **tags), workers=4.0) == "loader_cpu"
    resting = shown("diagnosd_process", "cpu_workers", 0.3, 0.4, **tags)
    assert subtype(*idle, *resting, workers=4.0) == "loader_slow"
    assert subtype(*idle, workers=4.0) is None  # nobody looked at the processor
    assert subtype(*resting, workers=4.0) is None  # nor here at the disk


def inline(busy: float) -> Verdict:
    """A single process whose data loading, in that process, takes 200 ms where it took 2."""
    tags = {"job": "train", "host": "a", "rank": "0"}
    starved = {"data_wait": 0.2}
    before = 0.9
    during = (before * 0.068 + busy * 0.198) / 0.266  # of its steps of 68 ms, and of those of 266 ms
    points = [
        *shown("diagnosd_process", "cpu_main", before, during, **tags),
        *counted("pressure", "total", 10_000, 10_000, host="a", resource="io", type="some"),
    ]
    alone = {"hosts": ("a",), "of_ranks": (starved,), "last": (1.0,), "workers": np.zeros(1)}
    quiet = {**QUIET, "transfer": 0.0}
    usual, now = (np.array([parts.get(part, 0.0) for part in PARTS]) for parts in (quiet, {**quiet, **starved}))
    (verdict,) = classify(compared({}, *points, expected=usual, observed=now, **alone))
    return verdict


def test_a_main_process_that_loads_starves_itself_and_nothing_is_said_of_workers() -> None:
    waits, computes = inline(busy=0.02), inline(busy=0.99)
    assert (waits.cause, waits.subtype) == ("data_starvation", "loader_slow")
    assert (computes.cause, computes.subtype) == ("data_starvation", "loader_cpu")
    assert min(waits.confidence, computes.confidence) > 0.9
    assert "whose main process loads (num_workers=0)" in waits.next
    assert "worker" not in waits.next.replace("num_workers", "")
    assert "worker" not in computes.text


def test_congestion_begins_and_a_misconfiguration_was_there() -> None:
    points = [*talk("a", 0, 1), *shown("diagnosd_socket", "rtt", 0.0024, 0.0139, **socket("a", 0, 1))]
    causes = [
        verdict.cause for verdict in classify(compared({"transfer": 0.5}, *points, from_start=True, against="model"))
    ]
    assert "network_congestion" not in causes
    causes = [verdict.cause for verdict in classify(compared({"transfer": 0.5}, *points))]
    assert causes == ["network_congestion"]


def test_five_counters_of_one_interface_do_not_outvote_everything_else() -> None:
    """Congestion counters are evidence, never a trigger: without a slower transfer nothing is congested."""
    points = [
        *talk("a", 0, 1),
        *shown("diagnosd_socket", "rtt", 0.0024, 0.03, **socket("a", 0, 1)),
        *shown("diagnosd_socket", "cwnd", 230, 10, int, **socket("a", 0, 1)),
        *counted("diagnosd_socket", "retransmits", 10, 5000, **socket("a", 0, 1)),
        *counted("net", "drop_in", 0, 900, host="b", interface="eth0"),
    ]
    verdicts = classify(compared(SLOW, *points, of_ranks=({}, SLOW), last=(0, 1)))
    assert [verdict.cause for verdict in verdicts] == ["straggler"]


def test_as_many_bytes_a_step_as_ever_support_nothing() -> None:
    """That is so in every healthy job, and no second sign of a slow network."""
    points = [
        *counted("net", "bytes_sent", 90e6, 32e6, host="a", interface="eth0"),
        *counted("net", "bytes_recv", 90e6, 32e6, host="a", interface="eth0"),
    ]
    c = compared({"transfer": 0.5}, *points)
    assert (strongest(c, "bytes a step") or 0) < 0
    assert [verdict.cause for verdict in classify(c)] == ["unknown"]


def test_other_traffic_on_an_interface_that_does_not_carry_the_collectives_is_no_neighbour() -> None:
    """RDMA: the job's sockets are for control only, and eth0 carries files."""
    points = [
        *counted("net", "bytes_recv", 2e6, 300e6, host="b", interface="eth0"),
        *counted("net", "bytes_sent", 2e6, 9e6, host="b", interface="eth0"),
        *counted("net", "drop_in", 0, 900, host="b", interface="eth0"),
        *counted("diagnosd_socket", "bytes_received", 1e3, 1e3, **socket("b", 1, 0)),
        *counted("diagnosd_socket", "bytes_sent", 1e3, 1e3, **socket("b", 1, 0)),
    ]
    c = compared({"transfer": 0.5}, *points)
    assert [strongest(c, metric) for metric in ("others' bytes", "bytes a step", "dropped packets")] == [None] * 3
    (verdict,) = classify(c)
    assert verdict.cause == "unknown"
    assert not any(locus.startswith("nic:") for locus in verdict.loci)


def test_the_bound_counts_no_ports_beyond_the_ranks_of_a_host() -> None:
    spec = '{"fabric": {"kind": "infiniband", "rate_gbps": 400}, "node": {"nics": 8}}'
    declared = point("diagnosd_cluster", {"cluster": "lab"}, {"spec": spec}, T0 + 9)
    one_each = least_transfer(compared({}, declared))
    two_each = least_transfer(compared({}, declared, hosts=("a", "a", "b", "b"), of_ranks=({},) * 4, last=(0.25,) * 4))
    assert one_each == pytest.approx(16e6 / (400e9 / 8 * 0.97))
    assert two_each == pytest.approx(16e6 / (2 * 400e9 / 8 * 0.97))


def test_who_waits_for_the_rank_that_saves_hides_no_slow_checkpoint() -> None:
    """At a barrier: the last to leave it is another rank, whose time is in no phase."""
    saving, waiting = {"checkpoint": 2.0}, {"other": 2.0}
    c = compared(waiting, of_ranks=(saving, waiting), last=(0, 1))
    c.own_expected[0, OWN.index("checkpoint")] = 0.01
    (verdict,) = classify(c)
    assert verdict.cause == "checkpoint_stall"
    assert verdict.loci == ("rank:0", "host:a")


def test_unknown_says_what_each_of_the_nearest_lacks() -> None:
    (lonely,) = classify(compared({"transfer": 0.5}))
    assert "(one sign, of two that it needs)" in lonely.text
    tiny = {"transfer": 0.16, "eval": 0.5}
    points = [*talk("a", 0, 1), *shown("diagnosd_socket", "rtt", 0.0024, 0.0139, **socket("a", 0, 1))]
    (short,) = classify(compared(tiny, *points))
    assert short.cause == "unknown"
    assert "% of the loss)" in short.text


def test_every_part_of_a_step_has_one_name_by_which_unknown_tells_that_it_grew() -> None:
    assert sorted(part for growth in GROWTHS for part in growth.parts) == sorted(PARTS)


IDLE = {"other": 0.3}


@pytest.mark.parametrize(
    ("of_ranks", "loci", "who"),
    [(({}, IDLE), ("rank:1", "host:b"), "on rank 1."), ((IDLE, IDLE), ("job",), "on every rank.")],
)
def test_unknown_says_which_part_of_the_step_grew_and_on_which_ranks(
    of_ranks: tuple[Times, ...], loci: tuple[str, ...], who: str
) -> None:
    (verdict,) = classify(compared(IDLE, of_ranks=of_ranks))
    assert (verdict.cause, verdict.loci) == ("unknown", loci)
    assert verdict.text.startswith(f"Of what a step takes longer, 100 % is time outside of every phase, {who}")
    assert "py-spy dump" in verdict.next


def test_unknown_says_that_no_network_lies_between_ranks_of_one_host() -> None:
    (verdict,) = classify(compared({"transfer": 0.5}, hosts=("a", "a")))
    assert "no network lies between them" in verdict.text


def test_a_cause_that_explains_nothing_of_the_loss_is_not_near() -> None:
    (verdict,) = classify(compared({"transfer": 0.5}, hosts=("a", "a"), empty=np.full(2, 1.0)))
    assert any(one.row.metric == "prefetch queue empty" and one.reading.strength > 0 for one in verdict.evidence)
    assert verdict.text.endswith("No cause that is known here explains it.")


def test_what_was_seen_and_has_nothing_to_read_is_not_asked_for() -> None:
    """A machine without a quota tells none, however often one measures."""
    tags = {"job": "train", "host": "a", "rank": "0"}
    seen = point("diagnosd_process", tags, {"rss": 10**9}, T0 + 61 * 10**9)
    rows = {row.metric: row.needs for row in collect(compared({"transfer": 0.5}, seen))[1]}
    assert "CPU quota" not in rows
    assert "diagnosd_process" not in rows.values()
    assert "CPU pressure" in rows


def test_a_fabric_that_was_declared_is_not_asked_for() -> None:
    declared = point("diagnosd_cluster", {"cluster": "lab"}, {"spec": DECLARED}, T0 + 9)
    _, missing = collect(compared({"transfer": 0.5}, declared))
    assert "diagnosd_cluster" not in {row.needs for row in missing}


def test_a_job_without_a_gpu_is_not_asked_what_its_gpu_does() -> None:
    quota = shown("diagnosd_process", "throttled", 0.0, 0.01, job="train", host="b", rank="1")
    (verdict,) = classify(compared(SLOW, *quota, of_ranks=({}, SLOW), last=(0, 1)))
    assert verdict.cause == "straggler"
    assert "nvidia" not in verdict.next


def test_two_causes_of_different_parts_are_both_named() -> None:
    starved = {"data_wait": 0.3}
    points = [*talk("a", 0, 1), *shown("diagnosd_socket", "rtt", 0.0024, 0.0139, **socket("a", 0, 1))]
    points += counted("net", "bytes_sent", 90e6, 32e6, host="a", interface="eth0")
    c = compared({**starved, "transfer": 0.4}, *points, of_ranks=(starved, starved), empty=np.full(2, 1.0))
    assert {verdict.cause for verdict in classify(c)} == {"data_starvation", "network_congestion"}


def test_the_next_measurement_is_the_one_that_separates_the_two_best() -> None:
    rows = [row for row in ROWS if row.metric in ("CPU quota", "disk wait")]
    text = next_measurement([CAUSES["straggler"], CAUSES["host_stall"]], rows)
    assert text is not None
    assert "CPU quota" in text
    assert "disk" not in text


def test_no_verdict_is_surer_than_what_was_never_fitted_can_be() -> None:
    tags = {"job": "train", "host": "b", "rank": "1"}
    starved = {"data_wait": 0.9}
    io = counted("pressure", "total", 10_000, 900_000, host="b", resource="io", type="some")
    busy = shown("diagnosd_process", "cpu_workers", 0.3, 1.0, **tags)
    c = compared(starved, *io, *busy, of_ranks=({}, starved), last=(0, 1), empty=np.full(2, 1.0), workers=np.ones(2))
    (verdict,) = classify(c)
    assert (verdict.cause, verdict.confidence) == ("data_starvation", SUREST)
