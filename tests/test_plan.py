"""`diagnosd model`: a job that is not running yet, what if, and how well published figures are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diagnosd import fit
from diagnosd.cli import app
from diagnosd.documents import DocumentError, plan_from_toml
from diagnosd.plan import WhatIf, model, validate

JOB = """
nodes = 8
[job]
name = "llama-70b"
dtype = "bf16"
recompute = "none"
[job.model]
params = 70.6e9
layers = 80
hidden = 8192
ffn = 28672
gated = true
heads = 64
kv_heads = 8
vocab = 128256
seq = 8192
[job.batch]
global = 128
micro = 1
[job.parallel]
tp = 4
pp = 4
vpp = 5
cp = 2
zero = 1
[cluster.node]
gpu = "H100-SXM"
gpus = 8
nics = 8
nic_rate_gbps = 400
"""
HEAD = (
    "id,gpu,n,gpn,nics,gbps,model,L,h,ffn,heads,kv,V,glu,seq,GBS,MBS,TP,PP,VP,CP,DP,shard,prec,rec,sp,step_time_s,src"
)
ROW = "x,H100,{n},8,8,400,llama3-8b,32,4096,14336,32,8,128256,1,8192,{b},1,1,1,1,2,{d},zero1,bf16,none,0,{s},one"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "JOB.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "steps.csv"
    runs = [ROW.format(n=8 * k, b=128 * k, d=4 * k, s=12.3) for k in (1, 2, 4)]
    path.write_text("\n".join([HEAD, *runs]) + "\n")
    return path


def test_a_job_s_step_is_told_with_its_terms_its_wires_and_its_scaling(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model(job, WhatIf(), "text") == 0
    said = capsys.readouterr().out
    assert "llama-70b on 64 H100-SXM, 8 a node with 8 x 400 Gbit/s infiniband: TP 4 CP 2 PP 4 DP 2" in said
    for part in ("a step", "MFU", "matrix products", "pipeline bubble", "each NIC sends", "checkpoint", "efficiency"):
        assert part in said
    assert "taken as, for nobody said:" in said


def test_what_if_is_held_against_the_file(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(job, WhatIf(nics=1, rate=100.0, gdr=False), "text")
    said = capsys.readouterr().out
    assert "1 x 100 Gbit/s" in said
    assert "--nics 1 --rate 100 --gdr off: " in said
    model(job, WhatIf(tp=8), "json")
    assert json.loads(capsys.readouterr().out)["ranks"] == 64


def test_a_program_gets_the_same_in_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(job, WhatIf(), "json")
    said = json.loads(capsys.readouterr().out)
    step = said["step_s"]
    assert step["low"] < step["value"] < step["high"]
    assert sum(term["value"] for term in said["terms_s"].values()) == pytest.approx(step["value"])
    assert [each["nodes"] for each in said["scaling"]] == [4, 8]


@pytest.mark.parametrize(
    ("was", "wrong", "says"),
    [
        ("layers = 80", "layers = 0", "job.model.layers: found 0; allowed is a number above 0"),
        ("tp = 4", "tp = 3", "job.parallel: found 'tp x cp x pp = 24'; allowed is a divisor of the 64 ranks"),
        ("H100-SXM", "H1000", "cluster.node.gpu: found 'H1000'; allowed is V100-SXM, "),
        ("params = 70.6e9", "params = 70.6e6", "job.model.params: found 70600000.0; allowed is about 7.06e+10"),
        ("hidden =", "hiden =", "job.model.hiden: no such key (do you mean hidden?); allowed are params, "),
        ("global = 128", 'global = "x"', "job.batch.global: found 'x'; allowed is a whole number"),
        ("nodes = 8", "", "nodes: missing; allowed is a whole number from 1"),
        ("nodes = 8", "nodes = 0", "nodes: found 0; allowed is a whole number from 1"),
        ('gpu = "H100-SXM"', "", "cluster.node.gpu: missing; allowed is the name of a GPU"),
        ("[job.batch]\nglobal = 128", "[job.batch]", "no step time can be expected without batch.global"),
        ("[job]", "[[job]]", "job: found [{"),
        ("[job]", "ranks = 1\n[job]", "ranks: no such key"),
    ],
)
def test_a_bad_plan_names_the_file_the_key_and_what_is_allowed(job: Path, was: str, wrong: str, says: str) -> None:
    job.write_text(JOB.replace(was, wrong))
    with pytest.raises(DocumentError) as told:
        model(job, WhatIf(), "text")
    assert f"JOB.toml: {says}" in str(told.value)


def test_a_plan_may_begin_with_a_byte_order_mark_and_its_name_moves_no_cursor(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB.replace('"llama-70b"', '"\\u001b[31mred"'), encoding="utf-8-sig")
    assert model(job, WhatIf(), "text") == 0
    assert "'\\x1b[31mred' on 64 H100-SXM" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--rate", "nan"], ["--write-rate", "inf"], ["--nics", "0"], ["--nodes", "9" * 400]])
def test_a_what_if_that_is_no_number_of_anything_is_a_mistake_of_usage(job: Path, wrong: list[str]) -> None:
    said = CliRunner().invoke(app, ["model", str(job), *wrong])
    assert said.exit_code == 2
    assert f"Invalid value for '{wrong[0]}'" in said.output


def test_replicas_that_are_not_sharded_copy_the_same_checkpoint(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stall(zero: int) -> float:
        job.write_text(JOB.replace("zero = 1", f"zero = {zero}"))
        model(job, WhatIf(), "json")
        return float(json.loads(capsys.readouterr().out)["checkpoint"]["stall_s"])

    assert stall(0) == pytest.approx(4 * stall(1))  # DP 2 x CP 2


def test_ranks_are_no_part_of_a_plan() -> None:
    with pytest.raises(DocumentError, match=r"job\.ranks: no such key"):
        plan_from_toml(b"[job]\nranks = []", "JOB.toml")


def test_a_table_of_step_times_gives_two_tables_of_scores(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(published, "text", refit=False) == 0
    shipped, scalar, legend = capsys.readouterr().out.split("\n\n")
    assert shipped.startswith("shipped constants (nothing is fitted on this file)\n")
    assert "all step times                                 3" in shipped
    assert scalar.startswith("one scalar per series, learned on its smallest run\n")
    assert "runs that differ in scale alone                2" in scalar
    assert legend.startswith("covered: ")


def test_a_single_source_cannot_be_left_out_but_is_told(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(published, "json", refit=True)
    tables = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [table["scores"][0]["count"] for table in tables] == [3, 3, 2]


def test_a_curve_is_recognised_by_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(
        "system,ranks,bytes,time_us,busbw_GBps\nA100 1x8 (Ring),8,8,40,0\nA100 1x8 (Ring),8,1073741824,8203.9,229\n"
    )
    validate(path, "text", refit=False)
    assert "A100 1x8 (Ring)                                1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("was", "wrong", "says"),
    [
        (",12.3,", ",fast,", "line 2: step_time_s: found 'fast'; allowed is a number"),
        (",zero1,", ",zero9,", "line 2: shard: found 'zero9'; allowed is ddp, zero0"),
        (",H100,", ",K80,", "line 2: node.gpu: found 'K80'; allowed is V100-SXM"),
        ("step_time_s", "seconds", "no such columns: step_time_s"),
        (",12.3,", ",1e-320,", "line 2: step_time_s: found '1e-320'; allowed is a number above 0, at most 1e+15"),
        (",8192,", f",{'9' * 400},", "line 2: seq: found '9999"),
        ("one", '"' + "o" * 200_000, "no table: field larger than field limit"),
        (",seq,", ",L,", "columns that stand there twice: L"),
        (",1,1,2,", ",1,1,3,", "line 2: parallel: found 'tp x cp x pp = 3'; allowed is a divisor of the 8 ranks"),
    ],
)
def test_a_bad_table_names_the_file_the_line_and_the_column(published: Path, was: str, wrong: str, says: str) -> None:
    published.write_text(published.read_text().replace(was, wrong))
    with pytest.raises(DocumentError) as told:
        validate(published, "text", refit=False)
    assert f"steps.csv: {says}" in str(told.value)


def test_a_row_of_a_gpu_without_its_precision_is_left_out(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, rest = published.read_text().replace(",bf16,", ",fp8,").split(",H100,", 1)
    published.write_text(f"{first},A100,{rest}")
    assert validate(published, "text", refit=False) == 1
    assert "line 2: dtype: found 'fp8'; allowed is bf16: an A100-SXM has no FP8" in capsys.readouterr().err


def test_a_bad_row_among_good_ones_is_told_and_left_out(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published.write_text(published.read_text().replace(",12.3,", ",fast,", 1))
    assert validate(published, "text", refit=False) == 1
    said = capsys.readouterr()
    assert "all step times                                 2" in said.out
    assert "line 2: step_time_s: found 'fast'; allowed is a number; the row is left out" in said.err


def test_a_table_from_a_spreadsheet_is_read_too(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a byte order mark, lines that end as on Windows, and counts written as 128.0."""
    table = published.read_text().replace(",128,", ",128.0,").replace("\n", "\r\n")
    published.write_text(table, encoding="utf-8-sig", newline="")
    assert validate(published, "json", refit=False) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["scores"][0]["count"] == 3


def test_the_constants_are_remade_as_a_file_that_runs(published: Path) -> None:
    made: dict[str, object] = {}
    exec(fit.written(published), made)
    assert 0.3 < made["SHIPPED"].products < 1.3  # type: ignore[attr-defined]
