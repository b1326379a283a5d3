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


def test_one_preset_for_both_estimators_comes_first() -> None:
    def both(preset: str, test: float) -> dict[str, Any]:
        row = table1_row(preset, "P-1h", test=test, epochs=30)
        return {**row, "estimators": {"ep": row["estimators"]["ep"], "bptt": row["estimators"]["ep"]}}

    only_ep = table1_row("paper", "P-1h", test=2.0, epochs=30)
    only_ep["estimators"]["bptt"] = both("paper", 9.0)["estimators"]["bptt"]
    head, _, line, _, counted = lines_of(only_ep, both("authors", 2.1))
    assert head == "| network | EP | paper | BPTT | paper | time |"
    assert line.startswith("| P-1h | **2.10 ± 0.10** `authors` | 2.00 ± 0.13 | **2.10 ± 0.10** `authors` |")
    assert line.endswith("| 90 s |")
    assert counted == "1 of 12 cells come out as printed (`paper`), 2 under some preset."


def test_what_does_not_come_out_is_shown_as_it_is() -> None:
    row = table1_row("paper", "P-conv", test=1.5, epochs=40, seconds_by_estimator={"ep": 30.0, "bptt": 60.0})
    row["estimators"]["bptt"] = row["estimators"]["ep"]
    line = lines_of(row)[2]
    assert line.startswith("| P-conv | 1.50 ± 0.10 `paper` | 1.02 ± 0.04 | 1.50 ± 0.10 `paper` |")


def test_alternating_rows_are_no_presets_of_their_own() -> None:
    alternating = table1_row("paper", "P-1h", test=1.0, epochs=30, schedule="alternating")
    plain = table1_row("paper", "P-1h", test=2.26, epochs=30)
    first, second = table1.rows([alternating, plain])
    assert (first.label, second.label) == ("`paper`", "`paper`, alternating")
    assert (
        table1.chosen([first, second, *table1.rows()], "P-1h")["ep"].found["estimators"]["ep"]["test_error_mean"] != 1.0
    )


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
