"""What `python -m benchmarks` times, what it tells, and what it says to bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.bench_experiments import Spoiled, brief, few_images

from benchmarks import run as bench
from benchmarks.__main__ import exit_code, main
from benchmarks.cases import Case
from benchmarks.timing import Contestant, take_turns
from eqprop import papers
from eqprop.data import Images
from eqprop.engines import Engine, Job, Runner
from eqprop.engines.eager import Eager

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def test_the_slow_one_joins_evenly() -> None:
    log: list[str] = []
    fast, slow = (Contestant(lambda n, w=word: log.append(w), CPU) for word in ("f", "s"))
    take_turns([fast], 6, slow, 2)
    assert "".join(log) == "ffsfffsf"


QUICK = bench.Effort(rounds=2, naive_rounds=1, chunk_seconds=0.001, check_iterations=1, trained=5)


@pytest.fixture
def quick(images: Images, monkeypatch: pytest.MonkeyPatch) -> bench.Plan:
    monkeypatch.setattr(bench, "mnist", lambda device: images)
    return bench.Plan((brief(papers.find("P-1h")),), ("ep",), ("eager",), effort=QUICK)


def test_rows_hold_what_is_promised(quick: bench.Plan) -> None:
    plan = replace(quick, methods=("ep", "bptt"), trials=2, stops=("never", "settled"))
    result = json.loads(json.dumps(bench.measure(plan)))
    assert result["machine"]["torch"] == torch.__version__
    seen = [(r["method"], r["stop"], r["weights"]) for r in result["rows"]]
    kinds = [("never", "initial"), ("settled", "initial"), ("settled", "trained")]
    assert seen == [(m, *kind) for m in ("ep", "bptt") for kind in kinds]
    for row in result["rows"]:
        promised = "name method engine schedule stop trials us_per_iteration us_per_step naive_us_per_iteration"
        assert set(promised.split()) | {"speedup", "max_error"} <= set(row)
        assert (row["engine"], row["trials"], row["refused"]) == ("eager", 2, None)
        assert row["speedup"] == pytest.approx(2 * row["naive_us_per_iteration"] / row["us_per_iteration"])
        assert row["us_per_step"] == pytest.approx(row["us_per_iteration"] / (7 + 4))
    assert all(r["iterations_before"] >= 5 for r in result["rows"] if r["weights"] == "trained")


def test_an_engine_that_is_not_right_gets_no_ratio(quick: bench.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "choose", lambda self, model: Spoiled("not finite"))
    said: list[str] = []
    result = bench.measure(quick, said.append)
    (row,) = result["rows"]
    assert row["speedup"] is None
    assert row["max_error"] is None
    assert "off by" in row["refused"]
    assert any("no ratio" in text for text in said)
    json.dumps(result, allow_nan=False)


def test_an_engine_that_fails_is_named_and_the_others_go_on(quick: bench.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Eager):
        name = "failing"

        def runner(self, job: Job) -> Runner:
            raise RuntimeError("out of memory")

    engines: dict[str, Engine] = {"eager": Eager(), "failing": Failing()}
    monkeypatch.setattr(bench, "engine_names", lambda: ("auto", *engines))
    monkeypatch.setattr(Case, "choose", lambda self, model: engines[self.engine])
    result = bench.measure(replace(quick, engines=("failing", "eager")))
    assert [row["engine"] for row in result["rows"]] == ["eager"]
    (skipped,) = result["skipped"]
    assert skipped["engine"] == "failing"
    assert "out of memory" in skipped["reason"]


def test_an_interruption_keeps_what_is_measured(quick: bench.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.Bout.run

    def run(self: bench.Bout, group: Any) -> Any:
        if group[0][0].method == "bptt":
            raise KeyboardInterrupt
        return whole(self, group)

    monkeypatch.setattr(bench.Bout, "run", run)
    result = bench.measure(replace(quick, methods=("ep", "bptt")))
    assert [row["method"] for row in result["rows"]] == ["ep"]
    assert result["interrupted"]
    assert exit_code(result) == 130


def test_what_nobody_serves_is_told_before_anything_is_timed(quick: bench.Plan) -> None:
    eb = brief(papers.find("EB-1h"))
    plan = replace(quick, experiments=(eb,), schedules=("alternating",))
    with pytest.raises(ValueError, match="EB-1h cannot alternate"):
        bench.measure(plan)
    served, skipped = bench.choose_engines(replace(plan, experiments=(eb, *quick.experiments)))
    assert [case.experiment.name for case, _ in served] == ["P-1h"]
    assert [s.case.experiment.name for s in skipped] == ["EB-1h"]


def test_json_stands_alone_on_standard_output(
    quick: bench.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "experiments_named", lambda names, preset: quick.experiments)
    monkeypatch.setattr("benchmarks.__main__.experiments_named", lambda names, preset: quick.experiments)
    short = ["--rounds", "1", "--naive-rounds", "1", "--chunk-seconds", "0.001", "--check-iterations", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["P-1h", "--engine", "eager", "--table1", "--json", "-", *short])
    found = capsys.readouterr()
    assert ended.value.code == 0, found.err
    result = json.loads(found.out)
    assert [(row["name"], row["method"]) for row in result["rows"]] == [("P-1h", "ep"), ("P-1h", "bptt")]
    assert "us/iteration" in found.err
    assert "open, without" in found.err


def test_a_refused_engine_ends_with_code_1(
    quick: bench.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.__main__.experiments_named", lambda names, preset: quick.experiments)
    monkeypatch.setattr(Case, "choose", lambda self, model: Spoiled("coarse update"))
    short = ["--rounds", "1", "--naive-rounds", "1", "--chunk-seconds", "0.001", "--check-iterations", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["P-1h", "--method", "ep", *short])
    assert ended.value.code == 1
    assert "no ratio" in capsys.readouterr().err
