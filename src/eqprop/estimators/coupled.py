"""Coupled learning: the output is clamped instead of nudged, as laboratories with physical networks do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem, SquaredError, check_beta
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import Estimator, Rule, Step, last_of, trainable, update
from eqprop.relax import Relaxation, turns
from eqprop.state import State


def clamped(T: int, K: int, beta: float) -> Estimator:
    """The output held at (1 - beta) s0* + beta y: coupled learning, which at no beta is the gradient of the loss.

    As beta -> 0 it is the gradient of another loss, 1/2 (y - s0)^T H (y - s0) with H fixed: see `CoupledLearning`.
    """
    return CoupledLearning(T, K, beta=beta)


def contrastive(T: int, K: int, beta: float) -> Estimator:
    """The output held at y: contrastive learning, coupled learning at beta = 1, whatever beta is given."""
    return CoupledLearning(T, K, beta=1.0)


@dataclass(frozen=True)
class CoupledLearning(Estimator):
    """-(1/beta) (dPhi/dtheta(s^c) - dPhi/dtheta(s*)), s^c at rest with its output held at (1 - beta) s0* + beta y.

    beta = 1 is contrastive learning. For the squared error and models with a primitive.

    This is not the gradient of the squared error at any beta. To hold the output takes the force H (y - s0*) to first
    order in beta, H being the stiffness that the output has with the other layers free to follow: the Schur complement
    of d2E/ds2. EP pulls with the force y - s0* instead. So as beta -> 0 this is EP's gradient with H (y - s0*) in
    place of the error: the gradient of 1/2 (y - s0*)^T H (y - s0*) with H held fixed. Both vanish together where the
    output is right; they agree up to a factor where H is a multiple of the identity.

    beta    the share of the way to y on which the output is held, of either sign
    T, K, schedule, stop, tolerance, checked    as of `Estimator`
    """

    orientation: ClassVar[int] = -1
    follows_theorem: ClassVar[bool] = False
    rules: ClassVar[Mapping[str, Rule]] = {"clamped": clamped, "contrastive": contrastive}

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        super().check_serves(model, cost, x, y)
        _check(model, cost)

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        model = _check(problem.model, problem.cost)
        end = last_of(self._clamped(problem, free.state), model, self.checked, "clamped step", lambda s: s)
        unit, learned = -1.0 / (self.beta * model.nudge_scale), trainable(model)
        contrast = model.contrast(problem.x, end, free.state)
        return free, {name: unit * g.detach() for name, g in contrast.items() if name in learned}

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """The update of each clamped step; the jump of the output belongs to the first."""
        cost.check(free.state, y)
        unit = 1.0 / (self.beta * _check(model, cost).nudge_scale)
        for before, after in pairwise(self._clamped(Problem(model, cost, x, y), free.state)):
            yield update(model, x, before, after, unit)

    @torch.no_grad()
    def _clamped(self, problem: Problem, s: State) -> Iterator[State]:
        """s*, then K states with the output held."""
        model, held = problem.model, s[0] + self.beta * (problem.y - s[0])
        drive = model.drive(problem.x)
        yield s
        for group in turns(model, len(s), self.schedule, range(self.K)):
            # The output jumps at once, and every step sees it there.
            s = (held, *s[1:])
            s = (held, *model.group_step(drive, s, range(len(s)) if group is None else group)[1:])
            yield s


def _check(model: Dynamics, cost: Cost) -> PrimitiveDynamics:
    if not isinstance(model, PrimitiveDynamics):
        raise ValueError(
            f"Coupled learning needs a primitive or an energy; {model.title} has neither. Use VectorField."
        )
    if not isinstance(cost, SquaredError):
        raise ValueError(
            f"Coupled learning moves the output towards y, which suits the squared error alone; got {cost.title}."
        )
    return model
