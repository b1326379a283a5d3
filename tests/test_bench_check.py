"""The check before the timing lets the reference pass and must be able to fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench_records import Spoiled, brief, few_images

from eqprop.benchmarks.cases import Case
from eqprop.benchmarks.check import Checker
from eqprop.data import Images
from eqprop.engines.eager import Eager
from eqprop.experiments.training_records import PAPER


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


@pytest.mark.parametrize(
    ("name", "method", "trials"),
    [
        ("P-2h", "ep", 1),
        ("P-2h", "bptt", 3),
        ("EB-1h", "ep", 2),
        ("EB-1h", "bptt", 1),
        ("P-conv", "ep", 1),
        ("P-conv", "bptt", 5),
    ],
)
def test_the_reference_passes_the_check(images: Images, name: str, method: str, trials: int) -> None:
    case = Case(brief(PAPER[name]), method, trials=trials)
    verdict = Checker(images).check(case, Eager())
    assert verdict.reason is None
    assert 0.0 < verdict.max_error < 1e-3
    assert 0.0 < verdict.plain_max_error < 1e-3


@pytest.mark.parametrize("name", ["P-2h", "P-conv"])
@pytest.mark.parametrize("stop", ["never", "settled"])
def test_an_alternating_engine_is_held_against_an_alternating_twin(images: Images, name: str, stop: Any) -> None:
    case = Case(brief(PAPER[name]), "ep").with_schedule("alternating", stop)
    checker = Checker(images)
    assert checker.check(case, Eager()).reason is None
    verdict = checker.check(case.with_schedule("synchronous", stop), Spoiled("alternating"))
    assert verdict.reason is not None


@pytest.mark.parametrize(
    ("name", "wrong", "trials"),
    [
        *[("P-2h", wrong, 1) for wrong in ("coarse state", "coarse update", "fewer steps", "one bias", "not finite")],
        *[("EB-1h", wrong, 1) for wrong in ("coarse update", "fewer steps", "other batches")],
        *[("EB-1h", wrong, 2) for wrong in ("coarse update", "one network", "other batches")],
        *[("P-conv", wrong, 1) for wrong in ("coarse state", "coarse update", "other batches")],
    ],
)
def test_a_wrong_engine_is_refused(images: Images, name: str, wrong: str, trials: int) -> None:
    verdict = Checker(images).check(Case(brief(PAPER[name]), "ep", trials=trials), Spoiled(wrong))
    assert verdict.reason is not None
    assert "off by" in verdict.reason


def test_a_check_that_could_not_fail_is_refused(images: Images) -> None:
    """With every rate at zero nothing moves, and any engine would agree."""
    still = replace(brief(PAPER["P-1h"]), learning_rates={"*": 0.0})
    verdict = Checker(images).check(Case(still, "ep"), Eager())
    assert verdict.reason is not None
    assert "says nothing" in verdict.reason


def test_twins_are_computed_once_for_all_engines(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker(images)
    case = Case(brief(PAPER["P-1h"]), "ep")
    checker.check(case, Eager())
    monkeypatch.setattr("eqprop.benchmarks.check.train_step", lambda *args: pytest.fail("computed again"))
    checker.check(case.with_schedule("synchronous", "settled"), Eager())
