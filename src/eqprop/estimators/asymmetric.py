"""Estimators for any transition F, whose Jacobian need not be symmetric: vector-field EP and AsymEP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem, check_beta
from eqprop.dynamics import Drive, Dynamics
from eqprop.estimators.base import Estimator, Step, check_resolved, last_of, parameter_vjp, pull_back
from eqprop.estimators.ep import SideBySide
from eqprop.estimators.settings import EstimatorSettings
from eqprop.relax import Relaxation, turns
from eqprop.settings import about
from eqprop.state import State, add, subtract


class AsymmetricSettings(EstimatorSettings, frozen=True, kw_only=True):
    """Of `VectorField` and `AsymEP`."""

    centered: Annotated[bool, about("Whether to take the mean over beta and -beta.")] = True


@dataclass(frozen=True)
class VectorField(Estimator):
    """dL/dtheta = -(dF/dtheta)^T (s^beta - s*) / beta, s* and s^beta at rest without and with the nudge.

    The nudged phase is s_{t+1} = F(x, s_t) - beta dl/ds, the nudge added to F wherever the model's own nudge would
    enter. To first order s^beta - s* = -beta (I - J)^-1 dl/ds with J = dF/ds at s*, where the gradient has J^T: the
    estimate is exact as beta -> 0 if J is symmetric, and its bias grows with |J - J^T|. Symmetric weights do not make
    J symmetric: that of F = tanh(W s) is diag(tanh') W.

    beta        of either sign
    centered    the mean over beta and -beta, both in one batch: a further bias of order beta^2; else of order beta
    """

    follows_theorem: ClassVar[bool] = False
    settings: ClassVar[type[EstimatorSettings]] = AsymmetricSettings

    beta: float = 0.1
    centered: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)

    def check_nudge(self, model: Dynamics, dtype: torch.dtype) -> None:
        check_resolved(self.beta, model, dtype)

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        model, steps = problem.model, self._displacements(problem, free)
        displaced = last_of(steps, model, self.checked, "nudged step", lambda d: add(free.state, d))
        return free, parameter_vjp(model, problem.x, free.state, self._slope(model, displaced))

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """What each step of the nudged phase adds: -(s_{t+1} - s_t) / beta, and (dF/dtheta)^T of it at s*."""
        cost.check(free.state, y)
        for before, after in pairwise(self._displacements(Problem(model, cost, x, y), free)):
            moved = self._slope(model, subtract(after, before))
            yield Step(moved, parameter_vjp(model, x, free.state, moved))

    @torch.no_grad()
    def _displacements(self, problem: Problem, free: Relaxation) -> Iterator[State]:
        """s_t - s*, t = 0, ..., K; of centered nudging half the difference of the two."""
        model = problem.model
        batch = SideBySide(problem, (self.beta, -self.beta) if self.centered else (self.beta,))
        start = batch.repeat(free.state)
        drive, theta, s = model.drive(batch.x), problem.theta, start
        response = self._response(model, batch.x, drive, start)
        yield tuple(torch.zeros_like(v) for v in free.state)
        for group in turns(model, len(s), self.schedule, range(self.K)):
            push = batch.nudge.push(s, theta, model.nudge_scale)
            new = add(add(model.step(drive, s), push), response(subtract(s, start)))
            s = new if group is None else tuple(v if n in group else s[n] for n, v in enumerate(new))
            parts = batch.split(subtract(s, start))
            yield tuple(0.5 * (a - b) for a, b in zip(*parts, strict=True)) if self.centered else parts[0]

    def _response(self, model: Dynamics, x: Tensor, drive: Drive, start: State) -> Response:
        return Response()

    def _slope(self, model: Dynamics, displaced: State) -> State:
        """-d / beta, which at rest is the adjoint (I - J)^-1 dl/ds, or with J^T where the phase corrects it."""
        unit = -1.0 / (self.beta * model.nudge_scale)
        return tuple(unit * v for v in displaced)


class Response:
    """What a nudged step adds for a displacement d = s - s*; nothing here."""

    def __call__(self, d: State) -> list[Tensor | None]:
        return [None] * len(d)


class Transposing(Response):
    """-(J - J^T) d, J = dF/ds at s*: one product forward, one back."""

    def __init__(self, model: Dynamics, drive: Drive, start: State) -> None:
        self.model, self.drive, self.start = model, drive, start
        with torch.enable_grad():
            self.leaves = tuple(v.detach().requires_grad_() for v in start)
            self.out = model.step(drive, self.leaves)

    def __call__(self, d: State) -> list[Tensor | None]:
        back = pull_back(self.out, self.leaves, d, retain_graph=True)
        with forward_ad.dual_level():
            dual = tuple(forward_ad.make_dual(v, u) for v, u in zip(self.start, d, strict=True))
            ahead = [forward_ad.unpack_dual(v).tangent for v in self.model.step(self.drive, dual)]
        return [b if a is None else b - a for a, b in zip(ahead, back, strict=True)]


@dataclass(frozen=True)
class AsymEP(VectorField):
    """dL/dtheta = -(dF/dtheta)^T (s^beta - s*) / beta with s_{t+1} = F(x, s_t) - beta dl/ds - (J - J^T)(s_t - s*).

    J = dF/ds at the free state s*, for any F (2602.03670). Near s* the phase moves by J^T, so at rest the displacement
    is -beta (I - J^T)^-1 dl/ds and the estimate dL*/dtheta, with an error of order beta^2, or beta if not centered.
    A step costs F, one product with J and one with J^T. It settles where F does at s*: J and J^T share eigenvalues.

    With feedback 0, J is nilpotent and the estimate the backprop of the feed-forward net, once K reaches its depth.

    beta, centered    as of `VectorField`
    T, K, schedule, stop, tolerance, checked    as of `Estimator`
    """

    def _response(self, model: Dynamics, x: Tensor, drive: Drive, start: State) -> Response:
        return Transposing(model, drive, start)
