"""The blocks made from rows of Table 1 and from benchmarks: what is shown, and what is not."""

from __future__ import annotations

from typing import Any

from helpers.bench_experiments import rows_of_table1
from helpers.pages import table1_row

from docs.build import table1


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


def bench(**fields: Any) -> list[dict[str, Any]]:
    common = {"max_error": 3e-6, "naive_max_error": 2e-6, "spread_us": 1.5, "us_per_step": 12.0, "preset": "paper"}
    return [{**row, **common, **fields} for row in rows_of_table1(us_per_iteration=4321.0, speedup=111.0)]
