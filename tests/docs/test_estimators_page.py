"""docs/estimators.md says what results/estimators says; the measured orders are those the tests prove."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.pages import page_maker

from eqprop.experiments.experiment import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "estimators.md"
RESULTS = ROOT / "results" / "estimators"
ORDERS = {"one-sided": 1, "random-sign": 1, "symmetric": 2, "holomorphic, 4 points": 4, "holomorphic, 8 points": 8}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return page_maker("make_estimators_page")


def measured(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def test_the_page_is_what_the_results_say(maker: ModuleType) -> None:
    maker.write_or_check(maker.PAGE, maker.BLOCKS, check=True)


def test_every_form_and_every_link_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for form in ESTIMATORS:
        assert f"| `{form}`" in page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page):
        assert (PAGE.parent / target).resolve().is_file(), target
    assert (RESULTS / "cosine.pdf").is_file()


@pytest.mark.parametrize("name", ["P-2h", "P-2h-inside", "EB-2h"])
def test_the_measured_bias_has_the_order_it_should(name: str) -> None:
    d = measured(name)
    assert d["residual_max"] < 1e-12
    for form, order in ORDERS.items():
        points = list(zip(d["betas"], d["forms"][form]["distance"], strict=True))
        (b0, v0), (b1, v1) = [(b, v) for b, v in points if v is not None and v > 1e-10][:2]
        assert math.log(v1 / v0) / math.log(b1 / b0) == pytest.approx(order, rel=0.1), form
