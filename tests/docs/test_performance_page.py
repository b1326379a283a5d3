"""The numbers of docs/performance.md are those of results/bench, and the page is current."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.bench_experiments import rows_of_table1
from helpers.pages import page_maker

from benchmarks.floors import floors
from benchmarks.table1 import project
from eqprop.experiments.paper import PAPER
from eqprop.models import Layered

DOCS = Path(__file__).resolve().parents[2] / "docs"
MACHINE = {
    "processor": "a processor",
    "device": "cpu",
    "torch": "2.0",
    "date": "2026-01-02T00:00:00",
    "commit": "c0ffee" * 6,
}

REST = {
    "name": "P-2h",
    "weights": "printed",
    "schedule": "synchronous",
    "T": 100,
    "samples": 14,
    "at_rest": 5,
    "groups": 2,
    "groups_at_rest": 0,
    "residual_median": 1.5e-3,
    "residual_max": 0.25,
}


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return page_maker("make_performance_page")


def bench_rows(**fields: Any) -> list[dict[str, Any]]:
    errors = {"max_error": 3e-6, "naive_max_error": 2e-6, "spread_us": 1.5, "naive_spread_us": 2.5}
    times = {"us_per_step": 12.0, "naive_us_per_iteration": 98765.0, "iterations_before": 0, "preset": "paper"}
    return [{**row, **errors, **times, **fields} for row in rows_of_table1(us_per_iteration=4321.0, speedup=111.0)]


@pytest.fixture
def results(page: ModuleType, tmp_path: Path) -> Any:
    rows = bench_rows()
    rows[0] = {**rows[0], "speedup": None, "max_error": None}
    skipped = [{"name": "P-1h", "method": "ep", "engine": "fast", "reason": "no compiler."}]
    point = {"batch": 20, "depth": 2, "width": 512, "trials": 1, "engine": "e", "us_per_iteration": 10.0}
    curves = [{**point, "axis": axis} for axis in ("batch", "depth", "width", "trials")]
    base = {axis: point[axis] for axis in ("batch", "depth", "width", "trials")}
    files = {
        "cpu": {"machine": MACHINE, "rows": rows, "skipped": skipped, "table1": project(rows[2:])},
        "machine": {"machine": MACHINE, "peaks": {"float32_flops": 1e11, "exchange_us": 0.5}},
        "curves": {"machine": MACHINE, "T": 100, "K": 20, "base": base, "scaling": curves},
        "still": {"machine": MACHINE, "seed": 3, "group": 7, "rest": [REST]},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return page.Results(tmp_path)


def test_of_a_case_that_was_measured_twice_the_later_one_counts(page: ModuleType, tmp_path: Path) -> None:
    row = bench_rows()[0]
    for name, date, us, speedup in (("a", "2026-01-03", 10.0, 5.0), ("b", "2026-01-02", 9.0, 6.0)):
        found = {"machine": {**MACHINE, "date": date}, "rows": [{**row, "us_per_iteration": us, "speedup": speedup}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    (rows,) = page.Results(tmp_path).by_machine().values()
    assert [r["us_per_iteration"] for r in rows] == [10.0]
    refused = {"machine": {**MACHINE, "date": "2026-01-04"}, "rows": [{**row, "speedup": None}]}
    (tmp_path / "c.json").write_text(json.dumps(refused))
    (rows,) = page.Results(tmp_path).by_machine().values()
    assert rows == [], "the earlier ones are of other code"


def test_the_page_is_current(page: ModuleType) -> None:
    page.main(["--check"])


def test_a_page_that_is_not_current_is_noticed(page: ModuleType, results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "Results", lambda folder: results)
    with pytest.raises(SystemExit, match="not current"):
        page.main(["--check"])


def test_rows_are_told_as_measured(page: ModuleType, results: Any) -> None:
    text = page.results_table(results)
    assert "| P-1h EP | e | 5 | 4,321 ± 1.5 | 12 | 98,765 ± 2.5 | 111 | 3.0e-06 | 2.0e-06 |" in text
    assert "| EB-1h EP | e | 5 | 4,321 ± 1.5 | 12 | 98,765 ± 2.5 | refused | -- | 2.0e-06 |" in text
    assert "- P-1h EP, fast: no compiler." in text
    assert "torch 2.0, 2026-01-02" in text


def test_the_distance_is_to_the_higher_floor(page: ModuleType, results: Any) -> None:
    text = page.floors_table(results)
    least = floors(PAPER["P-2h"], "ep", 5, {"float32_flops": 1e11, "exchange_us": 0.5})
    line = next(line for line in text.splitlines() if line.startswith("| P-2h EP"))
    assert f"| {page.number(least.arithmetic)} | {page.number(60.0)} | 4,321 | {4321.0 / least.higher:.1f} |" in line
    assert "EB-1h EP" not in text, "a refused row has reached nothing"


def test_the_projection_names_an_open_total(page: ModuleType, results: Any) -> None:
    text = page.projection_table(results)
    assert "| **whole table** | -- | -- |" in text
    assert "| EB-1h EP | -- | -- |" in text


def test_rest_is_told_as_measured(page: ModuleType, results: Any) -> None:
    text = page.rest_table(results)
    assert "| P-2h | printed | synchronous | 100 | 5 of 14 | 1.5e-03 | 2.5e-01 |" in text
    assert "seed 3 (`results/bench/still.json`, commit c0ffee" in text


@pytest.mark.parametrize("schedule", ["synchronous", "alternating"])
def test_rest_is_a_state_that_comes_again(schedule: str) -> None:
    """Without weights a state is the same from the first step on; with weights it takes a while."""
    measure = page_maker("measure_rest")
    model = Layered((2, 3, 4), "prototypical", activation="sigmoid", seed=0)
    for p in model.parameters():
        p.data.zero_()
    x = torch.rand(5, 4)
    assert measure.at_rest(model, x, 1, schedule) == [False] * 5
    assert measure.at_rest(model, x, 8, schedule) == [True] * 5
    slow = Layered((2, 3, 4), "prototypical", activation="sigmoid", seed=0)
    assert measure.at_rest(slow, x, 4, schedule) == [False] * 5, "still on its way"


def test_every_block_is_filled_and_the_text_kept(page: ModuleType, results: Any) -> None:
    filled = page_maker("blocks").filled
    before = (DOCS / "performance.md").read_text(encoding="utf-8")
    after = filled(before, page.makers(results))
    assert after.startswith(before[:200])
    assert "performance-curves.svg" in after
    assert filled(after, page.makers(results)) == after


def test_curves_are_drawn(page: ModuleType, results: Any, tmp_path: Path) -> None:
    page.draw(results.scalings["curves"], tmp_path / "a.svg")
    page.draw(results.scalings["curves"], tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "us per iteration" in text
    assert text == (tmp_path / "b.svg").read_text()
