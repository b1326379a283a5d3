"""The blocks made from rows of Table 1 and from benchmarks: what is shown, and what is not."""

from __future__ import annotations

from typing import Any

from helpers.bench_experiments import rows_of_table1
from helpers.pages import table1_row

from benchmarks.floors import floors
from benchmarks.table1 import project
from docs.build import performance, table1
from docs.build.text import large
from eqprop import papers

MACHINE = {
    "processor": "a processor",
    "device": "cpu",
    "torch": "2.0",
    "date": "2026-01-02T00:00:00",
    "commit": "c0ffee" * 6,
}


def lines_of(*found: dict[str, Any]) -> list[str]:
    return table1.summary_block(table1.rows(list(found))).splitlines()


def test_rows_are_judged_by_the_papers_spread_and_its_epochs() -> None:
    rows = table1.rows(
        [
            table1_row("paper", "P-1h", test=2.26, epochs=30),
            table1_row("paper", "P-2h", test=2.16, epochs=50),
            table1_row("tuned", "P-2h", test=1.9, epochs=49),
        ]
    )
    assert [(r.experiment.name, r.experiment.preset, r.reproduced("ep")) for r in rows] == [
        ("P-1h", "paper", True),
        ("P-2h", "paper", False),
        ("P-2h", "tuned", None),
    ]
    assert rows[0].reproduced("bptt") is None


def both(preset: str, name: str, epochs: int, ep: float, bptt: float, **more: Any) -> dict[str, Any]:
    row = table1_row(preset, name, test=ep, epochs=epochs, **more)
    row["estimators"]["bptt"] = table1_row(preset, name, test=bptt, epochs=epochs)["estimators"]["ep"]
    return row


def test_a_row_has_one_preset_and_schedule_for_both_estimators() -> None:
    better = both("paper", "P-2h", 50, ep=2.0, bptt=2.0)
    mixed = both("tuned", "P-2h", 50, ep=1.9, bptt=2.4, schedule="alternating")
    head, _, line = lines_of(better, mixed)
    assert head == "| network | preset | steps | T | K | EP | paper | BPTT | paper |"
    assert (
        line
        == "| P-2h | `tuned` | alternating | 100 | 20 | **1.90 ± 0.10** | 1.95 ± 0.10 | 2.40 ± 0.10 | 2.09 ± 0.12 |"
    )
    head, _, line = table1.comparison(table1.matched(table1.rows([better, mixed]))).splitlines()
    assert head == "| network | preset | steps | T | K | EP | paper | BPTT | paper | time |"
    assert line.startswith("| P-2h | `tuned` | alternating | 100 | 20 | **1.90 ± 0.10 (0.50)**")
    assert line.endswith("| 90 s |")


def test_bold_looks_at_both_sides_of_the_interval() -> None:
    for test, bold in ((1.74, True), (1.73, False), (2.26, True), (2.27, False)):
        line = lines_of(both("paper", "P-1h", 30, ep=test, bptt=9.0))[2]
        assert (f"| **{test:.2f} ± 0.10** |" in line) == bold
        assert "| 9.00 ± 0.10 |" in line


def test_a_row_that_stopped_early_says_so_and_is_not_bold() -> None:
    line = lines_of(both("tuned", "EB-2h", 49, ep=2.0, bptt=2.0))[2]
    assert "| 2.00 ± 0.10, epoch 49 of 50 |" in line
    assert "**" not in line


def test_a_train_error_is_named_if_it_differs_by_more_than_three_deviations() -> None:
    row = both("tuned", "P-conv", 40, ep=1.0, bptt=0.9, schedule="alternating")
    for trial, error in zip(row["estimators"]["ep"]["trials"], (0.53, 0.54, 0.55, 0.54, 0.54), strict=True):
        trial["train_error"][-1] = error
    (found,) = table1.rows([row])
    assert "by EP" not in table1.differences({"P-conv": found})
    assert "P-conv by BPTT 0.50 ± 0.00 (paper 0.12)" in table1.differences({"P-conv": found})
    for trial in row["estimators"]["ep"]["trials"]:
        trial["train_error"][-1] += 0.03
    assert "P-conv by EP 0.57 ± 0.01 (paper 0.54)" in table1.differences({"P-conv": found})


def test_alternating_rows_are_no_presets_of_their_own() -> None:
    alternating = table1_row("paper", "P-1h", test=1.0, epochs=30, schedule="alternating")
    plain = table1_row("paper", "P-1h", test=2.26, epochs=30)
    first, second = table1.rows([alternating, plain])
    assert (first.label, second.label) == ("`paper`", "`paper`, alternating")
    assert table1.as_printed([second, first]) == {"P-1h": first}


def bench(**fields: Any) -> list[dict[str, Any]]:
    common = {"max_error": 3e-6, "naive_max_error": 2e-6, "spread_us": 1.5, "us_per_step": 12.0, "preset": "paper"}
    return [{**row, **common, **fields} for row in rows_of_table1(us_per_iteration=4321.0, speedup=111.0)]


def test_of_a_case_measured_twice_the_later_one_counts() -> None:
    row = bench()[0]
    found = [
        {"machine": {**MACHINE, "date": date}, "rows": [{**row, "us_per_iteration": us}]}
        for date, us in (("2026-01-03", 10.0), ("2026-01-02", 9.0))
    ]
    (rows,) = performance.by_machine(found).values()
    assert [r["us_per_iteration"] for r in rows] == [10.0]
    refused = {"machine": {**MACHINE, "date": "2026-01-04"}, "rows": [{**row, "speedup": None}]}
    (rows,) = performance.by_machine([*found, refused]).values()
    assert rows == [], "the earlier ones are of other code"


def test_the_distance_is_to_the_higher_floor() -> None:
    peaks = {"float32_flops": 1e11, "exchange_us": 0.5}
    found = [{"machine": MACHINE, "rows": bench()[1:]}, {"machine": MACHINE, "peaks": peaks}]
    text = performance.floors_block(found)
    least = floors(papers.find("P-2h"), "ep", 5, peaks)
    line = next(line for line in text.splitlines() if line.startswith("| P-2h EP"))
    figures = f"{large(least.arithmetic)} | {large(60.0)} | 4,321 ± 1.5 | {4321.0 / least.higher:.1f} | 3e-06 | 2e-06"
    assert figures in line
    assert "| EB-1h EP" not in text, "not measured"


def test_what_to_expect_and_the_whole_table() -> None:
    rows = bench()
    found = [{"machine": MACHINE, "rows": rows, "table1": project(rows)}]
    assert "| P-1h EP | 4,321 | 5 | 111 |" in performance.expect_block(found)
    open_ended = [{"machine": MACHINE, "rows": rows, "table1": project(rows[2:])}]
    text = performance.projection_block(open_ended)
    assert "| **whole table** | – |" in text
    assert "| EB-1h EP | – |" in text
