"""Equilibrium propagation for any vector field: no primitive, no energy, only the transition F."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import eqprop
from eqprop.cost import Problem
from eqprop.estimators.base import Step, transition_vjp


@dataclass(frozen=True)
class VectorField(eqprop.Estimator):
    """dL/dtheta = -(dF/dtheta)^T (s^beta - s*) / beta, where s* and s^beta are the free and the nudged steady state.

    Equal to EP's gradient as beta -> 0 where dF/ds is symmetric; defined, and an approximation, where it is not. This
    is one nudged phase of the built-in `eqprop.estimators.asymmetric.VectorField`, written with public parts only;
    beside it stand `AsymEP` and `Dyadic`, which are exact for any F.
    """

    beta: float = 0.1

    def estimate(self, problem: Problem, free: eqprop.Relaxation) -> tuple[eqprop.Relaxation, dict[str, Tensor]]:
        nudge = eqprop.Nudge(problem.cost, problem.y, self.beta)
        nudged = eqprop.relax(problem.model, problem.x, self.nudged_phase(), free.state, nudge)
        return free, self._pulled(problem, free, nudged.state)

    def _pulled(self, problem: Problem, free: eqprop.Relaxation, end: eqprop.State) -> dict[str, Tensor]:
        unit = -1.0 / (self.beta * problem.model.nudge_scale)
        moved = tuple(unit * (after - before) for after, before in zip(end, free.state, strict=True))
        return transition_vjp(problem.model, problem.x, free.state, moved)[1]

    def steps(
        self, model: eqprop.Dynamics, cost: eqprop.Cost, x: Tensor, y: Tensor, free: eqprop.Relaxation
    ) -> Iterator[Step]:
        """What each step of the second phase adds to the gradient."""
        problem, nudge, s = Problem(model, cost, x, y), eqprop.Nudge(cost, y, self.beta), free.state
        for _ in range(self.K):
            new = eqprop.relax(model, x, 1, s, nudge).state
            moved = tuple(after - before for after, before in zip(new, s, strict=True))
            end = tuple(torch.add(a, b) for a, b in zip(free.state, moved, strict=True))
            yield Step(moved, self._pulled(problem, free, end))
            s = new
