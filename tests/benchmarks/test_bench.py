"""What `python -m benchmarks` times, what it tells, and what it says to bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.bench_experiments import Spoiled, brief, few_images, rows_of_table1

from benchmarks import run as bench
from benchmarks.__main__ import Request, device_named, exit_code, main, words
from benchmarks.cases import Case, batch_order, network_order
from benchmarks.scaling import ConvCurves, Curves, measure_scaling
from benchmarks.table1 import ITERATIONS, project
from benchmarks.timing import Contestant, take_turns
from eqprop import papers
from eqprop.data import Images
from eqprop.engines import Engine, Job, Runner
from eqprop.engines.eager import Eager

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def test_a_contestant_counts_and_chooses_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: clock[0])
    first = [True]

    def run(n: int) -> None:
        clock[0] += 0.004 * n + (2.0 if first[0] else 0.0)
        first[0] = False

    contestant = Contestant(run, CPU)
    contestant.prepare(0.3)
    assert contestant.chunk == 50
    assert contestant.setup == pytest.approx(2.0)
    for _ in range(3):
        contestant.time_chunk()
    assert contestant.us == pytest.approx(4000.0)
    assert contestant.spread_us == pytest.approx(0.0, abs=1e-6)
    assert contestant.done == 1 + 1 + 10 + 3 * 50


def test_the_spread_is_the_interquartile_range() -> None:
    contestant = Contestant(lambda n: None, CPU)
    contestant.times = [1e-6 * v for v in (1.0, 2.0, 3.0, 4.0, 100.0)]
    assert contestant.us == pytest.approx(3.0)
    assert contestant.spread_us == pytest.approx(2.0)


def test_the_slow_one_joins_evenly() -> None:
    log: list[str] = []
    fast, slow = (Contestant(lambda n, w=word: log.append(w), CPU) for word in ("f", "s"))
    take_turns([fast], 6, slow, 2)
    assert "".join(log) == "ffsfffsf"


def test_batches_of_stacked_networks_are_their_own() -> None:
    case = Case(papers.find("P-1h"), "ep", trials=3)
    order = batch_order(case, 4, 500, seed=0)
    assert order.shape == (4, 3, 20)
    assert not torch.equal(network_order(order, 0), network_order(order, 1))
    assert torch.equal(order, batch_order(case, 4, 500, seed=0))
    few = batch_order(replace(case, trials=1), 4, 500, seed=0, distinct=2)
    assert few.shape == (4, 20)
    assert {len(row.unique()) for row in few} == {2}


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


def test_an_engine_asked_for_twice_is_timed_once(quick: bench.Plan) -> None:
    plan = replace(quick, engines=("eager", "eager"))
    assert len(bench.choose_engines(plan)[0]) == 1


def test_table1_adds_up() -> None:
    total = project(rows_of_table1())["all_steps"]
    epochs = sum(experiment.optimizer.epochs for experiment in papers.paper_rows().values())
    expected = 2 * (epochs * (ITERATIONS * 1e-4 + 0.5) + 6 * (3.0 + 6 * 0.5))
    assert total["seconds"] == pytest.approx(expected)
    assert total["missing"] == []
    one_by_one = project(rows_of_table1(trials=1))["all_steps"]
    assert one_by_one["seconds"] == pytest.approx(5 * expected)


def test_table1_takes_exact_means_only_where_they_were_timed_on_trained_weights() -> None:
    rows = rows_of_table1()
    early = rows_of_table1(stop="settled", us_per_iteration=1.0)
    late = rows_of_table1(stop="settled", us_per_iteration=50.0, weights="trained")
    result = project(rows + early + late)
    assert {part["stop"] for part in result["all_steps"]["rows"]} == {"never"}
    assert {part["weights"] for part in result["all_exact_means"]["rows"]} == {"trained"}
    assert project(rows + early)["all_exact_means"] == result["all_steps"]


def test_table1_stays_open_without_a_row_or_with_a_refused_one() -> None:
    rows = rows_of_table1()
    rows[3] = {**rows[3], "speedup": None}
    total = project(rows[1:])["all_steps"]
    assert total["seconds"] is None
    assert total["missing"] == ["EB-1h ep", "EB-2h bptt"]


def test_table1_times_the_evaluation(quick: bench.Plan) -> None:
    result = bench.measure(replace(quick, table1=True))
    (row,) = result["rows"]
    assert row["evaluation_s"] > 0.0
    assert len(result["table1"]["all_steps"]["rows"]) == 1
    assert result["table1"]["all_steps"]["seconds"] is None


def test_scaling_varies_one_axis_at_a_time(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.scaling.mnist", lambda device: images)
    base = {"batch": 2, "depth": 1, "width": 8, "trials": 1}
    values = {"batch": (1, 3), "depth": (1, 2), "width": (4, 8), "trials": (1, 2)}
    result = measure_scaling(Curves(("eager",), CPU, base, values, T=3, K=2, effort=QUICK))
    assert len(result["scaling"]) == 8
    for point in result["scaling"]:
        others = {axis: point[axis] for axis in base if axis != point["axis"]}
        assert others == {axis: base[axis] for axis in others}
        assert point["us_per_step"] == pytest.approx(point["us_per_iteration"] / 5)
    json.dumps(result, allow_nan=False)


def test_chains_of_convolutions_have_curves_too(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.scaling.mnist", lambda device: images)
    base, values = {"batch": 2, "depth": 1, "width": 3}, {"batch": (4,), "depth": (2,), "width": (5,)}
    result = measure_scaling(ConvCurves(("eager",), CPU, base, values, T=4, K=2, effort=QUICK))
    assert [(p["batch"], p["depth"], p["width"]) for p in result["scaling"]] == [(4, 1, 3), (2, 2, 3), (2, 1, 5)]
    assert (result["net"], result["skipped"]) == ("conv", [])
    deep = ConvCurves(base=base).case("depth", 2, "eager").build(CPU)
    assert [tuple(v.shape[1:]) for v in deep.init_state(torch.zeros(1, 1, 28, 28))] == [(10,), (3, 14, 14), (3, 14, 14)]


@pytest.mark.parametrize(
    ("arguments", "words_of_error"),
    [
        (["P-1"], "Did you mean 'P-1h'?"),
        (["P-1h", "--engine", "eagre"], "Did you mean 'eager'?"),
        (["P-1h", "--method", "ep,rbp"], "Unknown method 'rbp'"),
        (["P-1h", "--schedule", "alternate"], "Did you mean 'alternating'?"),
        (["P-1h", "--stop", "early"], "expected one of never, settled"),
        (["P-1h", "--preset", "papers"], "Did you mean 'paper'?"),
        (["P-1h", "--trials", "0"], "--trials is 0"),
        (["P-1h", "--rounds", "0"], "rounds is 0"),
        (["P-1h", "--device", "gpu"], "--device got 'gpu'"),
        (["P-1h", "--device", "meta"], "expected 'cpu' or 'cuda'"),
        (["EB-1h", "--schedule", "alternating"], "cannot alternate"),
        (["P-1h", "--engine", ","], "expected one word"),
        (["P-1h", "--json", "no/such/folder/out.json"], "expected a file in a folder that exists"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], words_of_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert words_of_error in text
    assert text.startswith("eqprop: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["P-1h", "--device", "cuda"])
    assert ended.value.code == 2
    assert "There is no CUDA device" in capsys.readouterr().err


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


def test_words_and_devices() -> None:
    assert words("ep, bptt,ep") == ("ep", "bptt")
    assert device_named("cpu") == CPU
    assert Request(("p-1h",)).plan().experiments[0].name == "P-1h"


def test_a_record_the_obvious_code_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="initialised-ep begins its free phases initialised and nudges ep-random-sign"):
        bench.experiments_named(["P-1h", "initialised-ep"])
    assert [experiment.name for experiment in bench.experiments_named([])] == list(papers.of_paper())


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_chunk_takes_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="chunk_seconds is .*; expected a number of seconds above 0"):
        bench.Effort(chunk_seconds=seconds)
