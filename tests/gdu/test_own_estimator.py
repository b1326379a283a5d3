"""An estimator from outside beside BPTT, and what is said of parts that do not fit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from helpers.nets import batch, toy
from helpers.tolerances import SAME_FORMULA
from torch import Tensor

import eqprop
from eqprop import BPTT, EP, RBP, SquaredError
from eqprop.cost import Problem

COST = SquaredError()


@dataclass(frozen=True)
class Scaled(eqprop.Estimator):
    """BPTT's gradient times a number, without a process; `drop` leaves a parameter out."""

    factor: float = 2.0
    drop: str = ""

    def estimate(self, problem: Problem, free: eqprop.Relaxation) -> tuple[eqprop.Relaxation, dict[str, Tensor]]:
        relaxed = eqprop.relax(problem.model, problem.x, self.T, keep=self.K)
        found = BPTT(self.T, self.K).estimate(problem, relaxed)[1]
        return free, {name: self.factor * g for name, g in found.items() if name != self.drop}


def test_agreement_is_that_of_the_two_gradients() -> None:
    model = toy()
    x, y = batch(model)
    same = eqprop.gdu.compare_gradients(Scaled(50, 5, factor=1.0), model, COST, x, y)
    assert same.reference == BPTT(50, 5)
    assert set(same.parameters) == {name for name, _ in model.named_parameters()} | {"all"}
    for found in same.parameters.values():
        assert found.distance <= SAME_FORMULA
    turned = eqprop.gdu.compare_gradients(Scaled(50, 5, factor=-3.0), model, COST, x, y).parameters["all"]
    assert (turned.cosine, turned.norm, turned.distance) == pytest.approx((-1.0, 3.0, 4.0))


def test_eps_gradient_comes_nearer_with_beta_and_another_reference_may_be_given() -> None:
    model = toy()
    x, y = batch(model)
    far, near = (
        eqprop.gdu.compare_gradients(EP(2000, 800, beta=b), model, COST, x, y, RBP(2000, 2000)).parameters["all"]
        for b in (0.02, 0.01)
    )
    assert 1.8 < far.distance / near.distance < 2.2
    assert "against RBP(" in str(eqprop.gdu.compare_gradients(EP(50, 5), model, COST, x, y, RBP(50, 50)))


def test_a_gradient_that_is_missing_or_zero_is_named() -> None:
    model = toy()
    x, y = batch(model)
    first = next(name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match=f"Scaled gave no gradient of {first}"):
        eqprop.gdu.compare_gradients(Scaled(50, 5, drop=first), model, COST, x, y)
    zero = eqprop.gdu.compare_gradients(Scaled(50, 5, factor=0.0), model, COST, x, y).parameters["all"]
    assert (zero.norm, zero.distance) == (0.0, 1.0)
    with pytest.raises(NotImplementedError, match=r"Scaled has a gradient but no process.*compare_gradients"):
        Scaled(50, 5).processes(model, COST, x, y, eqprop.relax(model, x, 50, keep=5))
    with pytest.raises(TypeError, match=r"The doctor examines EP; got Scaled.*compare_gradients"):
        eqprop.doctor(model, COST, x, y, Scaled(50, 5))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a tuple for T.*model.transition\(x, s\)"):
        model(x, model.init_state(x))
