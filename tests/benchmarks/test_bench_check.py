"""The check before the timing lets the reference pass and must be able to fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.bench_experiments import Spoiled, brief, few_images
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.check import Checker
from eqprop import papers
from eqprop.data import Images
from eqprop.dynamics import Dynamics
from eqprop.engines import Job, Runner
from eqprop.engines.base import Batch
from eqprop.engines.eager import Eager, EagerRunner
from eqprop.estimators import BPTT
from eqprop.relax import Phase, Relaxation, relax
from eqprop.state import State


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


@pytest.mark.parametrize(
    ("name", "method", "trials"),
    [
        ("P-2h", "bptt", 3),
        ("EB-1h", "ep", 2),
        ("P-conv", "ep", 1),
    ],
)
def test_the_reference_passes_the_check(images: Images, name: str, method: str, trials: int) -> None:
    case = Case(brief(papers.find(name)), method, trials=trials)
    verdict = Checker(images).check(case, Eager())
    assert verdict.reason is None
    assert 0.0 < verdict.max_error < 1e-3
    assert 0.0 < verdict.naive_max_error < 1e-3


def test_an_alternating_engine_is_held_against_an_alternating_twin(images: Images) -> None:
    case = Case(brief(papers.find("P-2h")), "ep").with_schedule("alternating", "settled")
    checker = Checker(images)
    assert checker.check(case, Eager()).reason is None
    verdict = checker.check(case.with_schedule("synchronous", "settled"), Spoiled("alternating"))
    assert verdict.reason is not None


@pytest.mark.parametrize(
    ("name", "wrong", "trials"),
    [
        *[("P-2h", wrong, 1) for wrong in ("coarse state", "fewer steps", "one bias", "not finite")],
        *[("EB-1h", wrong, 2) for wrong in ("coarse update", "one network", "other batches")],
    ],
)
def test_a_wrong_engine_is_refused(images: Images, name: str, wrong: str, trials: int) -> None:
    verdict = Checker(images).check(Case(brief(papers.find(name)), "ep", trials=trials), Spoiled(wrong))
    assert verdict.reason is not None
    assert "off by" in verdict.reason


def test_a_check_that_could_not_fail_is_refused(images: Images) -> None:
    """With every rate at zero nothing moves, and any engine would agree."""
    still = brief(papers.find("P-1h"), rates={"*": 0.0})
    verdict = Checker(images).check(Case(still, "ep"), Eager())
    assert verdict.reason is not None
    assert "is void" in verdict.reason


def test_twins_are_computed_once_for_all_engines(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker(images)
    case = Case(brief(papers.find("P-1h")), "ep")
    checker.check(case, Eager())
    monkeypatch.setattr("benchmarks.check.train_step", lambda *args: pytest.fail("computed again"))
    checker.check(case.with_schedule("synchronous", "settled"), Eager())


class Kept(Eager):
    """The reference with a runner that tells its states, as the kernels' runners do; `wrong` spoils what it tells."""

    name = "kept"

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def runner(self, job: Job) -> Runner:
        return KeptRunner(job, self.wrong)


class KeptRunner(EagerRunner):
    def __init__(self, job: Job, wrong: bool) -> None:
        super().__init__(job)
        self.wrong = wrong
        self.free: State | None = None

    def iterate(self, batch: Batch, signs: Tensor | None = None) -> None:
        assert self.keeps_states, "asked for before the first run"
        estimator, x = self.estimator, batch.x
        last = estimator.K if isinstance(estimator, BPTT) else 0
        begun = relax(self.job.model, x, estimator.free_phase(estimator.T - last)).state
        free = relax(self.job.model, x, last, begun).state
        self.free = tuple(layer.half().float() if self.wrong else layer for layer in free)
        super().iterate(batch, signs)

    def free_states(self) -> State | None:
        assert self.free is not None
        return self.free if self.job.networks else tuple(layer[None] for layer in self.free)


@pytest.mark.parametrize(
    ("method", "trials", "schedule"), [("ep", 1, "alternating"), ("ep", 2, "synchronous"), ("bptt", 2, "alternating")]
)
def test_states_are_the_runners_own_where_it_tells_them(
    images: Images, method: str, trials: int, schedule: Any
) -> None:
    """At the weights and on the mini-batch of the first iteration; the engine's relaxation is right either way."""
    case = Case(brief(papers.find("P-2h")), method, trials=trials).with_schedule(schedule, "never")
    checker = Checker(images)
    reference, right, wrong = (checker.check(case, engine) for engine in (Eager(), Kept(), Kept(wrong=True)))
    assert right.reason is None
    assert right.state_error == pytest.approx(reference.state_error, rel=0.5)
    assert wrong.reason is not None
    assert "free state" in wrong.reason


def test_an_engine_is_held_against_the_worse_of_torchs_two_ways(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One network at a time or stacked, torch rounds otherwise: what either of them does is as good as float32."""

    class Rounded(Spoiled):
        """Off by more than the naive twin, as batched products may be."""

        def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
            free = super().relaxation(model, x, phase, state)
            return replace(free, state=tuple(layer + 1e-5 for layer in free.state))

    case = Case(brief(papers.find("P-2h")), "ep", trials=2)
    alone = Checker(images).check(case, Rounded("coarse update"))
    assert alone.reason is not None
    monkeypatch.setattr("benchmarks.check.Eager", lambda: Rounded("coarse update"))
    verdict = Checker(images).check(case, Rounded("coarse update"))
    assert verdict.reason is None
    assert verdict.naive_state_error == verdict.state_error == pytest.approx(1e-5, rel=0.2)
    assert verdict.naive_update_error == verdict.update_error
    monkeypatch.setattr("benchmarks.check.Eager", Eager)
    plain = Checker(images).check(case, Eager())
    assert plain.naive_state_error < 0.2 * verdict.naive_state_error
    assert all(error <= plain.naive_update_error[name] for name, error in plain.update_error.items())
