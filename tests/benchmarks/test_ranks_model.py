"""The model of several GPUs: its limits, its formulas by hand, and the published predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks.ranks import NETS, Cluster, Iteration, Link, apart, packed, predictions, ring, show, table1_legs

ROOT = Path(__file__).resolve().parents[2]
FREE = Cluster(inside=Link(1e30, 0.0), between=Link(1e30, 0.0))
ONE = Iteration("one", 0.1, 128, 1_000_000, 0.0, "")


def test_one_rank_exchanges_nothing() -> None:
    assert Cluster().exchange(1e9, 1) == 0.0
    assert ONE.weak(1, Cluster()) == ONE.strong(1, Cluster()) == 1.0


def test_a_ring_by_hand() -> None:
    # Each of 4 ranks sends 6 messages of a quarter of 8 MB.
    assert ring(8e6, 4, Link(1e9, 1e-5)) == pytest.approx(6 * (2e6 / 1e9 + 1e-5))


def test_between_machines_each_rank_sends_its_part() -> None:
    cluster = Cluster(per_machine=2, inside=Link(1e9, 0.0), between=Link(1e8, 0.0))
    assert cluster.exchange(8e6, 4) == pytest.approx(8e6 / 1e9 + 4e6 / 1e8)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_free_links_cost_nothing_and_a_floor_limits_strong_scaling(ranks: int) -> None:
    assert ONE.weak(ranks, FREE) == pytest.approx(1.0)
    assert ONE.strong(ranks, FREE) == pytest.approx(1.0)
    floored = replace(ONE, floor=0.1)
    assert floored.strong(ranks, FREE) == pytest.approx(1.0 / (1.0 + 0.1 * (ranks - 1)))


@pytest.mark.parametrize("one", NETS, ids=lambda one: one.name)
def test_efficiency_falls_with_ranks_and_rises_with_bandwidth(one: Iteration) -> None:
    slow = Cluster(inside=Link(1e9, 1e-5), between=Link(1e8, 1e-5))
    for kind in ("weak", "strong"):
        values = [getattr(one, kind)(ranks, Cluster()) for ranks in (1, 2, 8, 16, 64)]
        assert values == sorted(values, reverse=True)
        assert getattr(one, kind)(8, slow) < getattr(one, kind)(8, Cluster())


def test_networks_are_packed_the_longest_first() -> None:
    assert packed([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0  # 6 at best; never more than 4/3 of it
    assert packed([5.0], 4) == 5.0
    assert apart([1.0] * 8, 8) == 1.0
    assert apart([1.0] * 9, 8) == pytest.approx(9 / 16)


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
    assert found["engines"].keys() == {"cpu", "eager"}
    for engine, one in found["engines"].items():
        lower, middle, upper = one["ratio_quartiles"]
        assert middle < 1.02
        assert f"{middle:.3f} ({lower:.3f} to {upper:.3f}) with `{engine}`" in page
