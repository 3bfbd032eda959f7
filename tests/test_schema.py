"""The contract's tables: consistent in themselves, and in keeping with what outside programs check."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from diagnosd.schema import CADENCES, KINDS, SCHEMA, TYPES, Measurement, markdown

# The check that other programs' recordings must pass too. It lies beside the checkout, and not in every copy of it.
OUTSIDE = Path(__file__).parents[2] / "shared" / "checks" / "contract.py"


@pytest.mark.parametrize("measurement", SCHEMA.values(), ids=SCHEMA)
class TestEveryMeasurement:
    def test_a_name_is_a_tag_or_a_field_and_never_both(self, measurement: Measurement) -> None:
        tags = (*measurement.tags, *measurement.optional_tags)
        assert len(set(tags)) == len(tags)
        assert not set(tags) & set(measurement.fields)

    def test_no_tag_is_unbounded(self, measurement: Measurement) -> None:
        assert not {"pid", "step", "message", "text", "time"} & {*measurement.tags, *measurement.optional_tags}

    def test_every_field_is_told_in_full(self, measurement: Measurement) -> None:
        for name, field in measurement.fields.items():
            assert field.name == name
            assert field.type in TYPES
            assert field.kind in KINDS
            assert field.cadence in CADENCES
            assert field.meaning
            assert field.type == "i" or field.kind != "counter" or field.unit in ("s", "J")

    def test_it_has_a_host_unless_it_describes_a_job_a_cluster_a_switch_or_a_verdict(
        self, measurement: Measurement
    ) -> None:
        hostless = {
            "diagnosd_job",
            "diagnosd_group",
            "diagnosd_cluster",
            "diagnosd_switch",
            "diagnosd_diagnosis",
            "diagnosd_ledger",
        }
        assert ("host" in measurement.tags) != (measurement.name in hostless)


def test_a_driver_s_own_counter_has_the_type_of_its_measurement() -> None:
    infiniband = SCHEMA["infiniband"]
    assert infiniband.type_of("some_new_counter") == "i"
    assert infiniband.kind_of("some_new_counter") == "counter"
    assert SCHEMA["cpu"].type_of("usage_guest") == "f"
    assert SCHEMA["diagnosd_step"].type_of("some_new_field") is None


def test_the_table_for_people_has_a_row_for_every_field_and_one_for_those_of_the_eight_priorities() -> None:
    rows = markdown().splitlines()
    one = {m.name: {re.sub("prio[0-7]", "prio", name) for name in m.fields} for m in SCHEMA.values()}
    assert {row.count("|") for row in rows} == {9}
    assert len(rows) == 2 + sum(1 + len(one[m.name]) + bool(m.any_field) for m in SCHEMA.values())
    assert "| | | rx_prio0..7_pause | i |  | counter | fast |" in markdown()
    assert "| | | data_wait | f | s | event | event |" in markdown()


if OUTSIDE.exists():

    def test_the_tables_hold_what_the_outside_check_asks_for() -> None:
        """More may stand in them: the contract lets one add measurements and fields."""
        spec = importlib.util.spec_from_file_location("contract", OUTSIDE)
        assert spec
        assert spec.loader
        contract = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(contract)
        assert set(contract.SCHEMA) <= set(SCHEMA)
        for name, (tags, types) in contract.SCHEMA.items():
            assert (name, set(SCHEMA[name].tags)) == (name, tags)
            for field, kind in types.items():
                assert (name, field, SCHEMA[name].type_of(field)) == (name, field, kind)
