"""The model of several GPUs: its limits, its formulas by hand, and the published predictions."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks.ranks import Link, predictions, ring, show, table1_legs

ROOT = Path(__file__).resolve().parents[2]


def test_a_ring_by_hand() -> None:
    # Each of 4 ranks sends 6 messages of a quarter of 8 MB.
    assert ring(8e6, 4, Link(1e9, 1e-5)) == pytest.approx(6 * (2e6 / 1e9 + 1e-5))


def test_the_trainings_of_table_1_are_those_measured() -> None:
    legs = table1_legs()
    assert len(legs) == 12
    assert sum(legs) == pytest.approx(1777.24, abs=0.01)


def test_the_page_shows_some_of_the_predictions() -> None:
    page = (ROOT / "docs" / "howto" / "several-gpus.md").read_text()
    found = show(predictions()).splitlines()
    assert "\n".join(found[:2]) in page
    shown = [*takewhile(lambda line: line.startswith("|"), page[page.index(found[0]) :].splitlines()[2:])]
    assert len(shown) >= 4
    assert {*shown} < {*found}


def test_the_page_shows_what_gloo_measured() -> None:
    found = json.loads((ROOT / "results" / "bench" / "ranks-cpu.json").read_text())
    page = (ROOT / "docs" / "howto" / "several-gpus.md").read_text()
    for row in found["ranks"]:
        assert f"| {row['ranks']} | {row['ms_per_iteration']:.1f} | {row['ms_per_exchange']:.1f} |" in page


def test_one_rank_pays_less_than_two_percent() -> None:
    found = json.loads((ROOT / "results" / "bench" / "ranks-cpu.json").read_text())["one_rank"]
    page = (ROOT / "docs" / "howto" / "several-gpus.md").read_text()
    assert found["engines"].keys() == {"xla", "eager"}
    for engine, one in found["engines"].items():
        lower, middle, upper = one["ratio_quartiles"]
        assert middle < 1.02
        assert f"{middle:.3f} ({lower:.3f} to {upper:.3f}) with `{engine}`" in page
