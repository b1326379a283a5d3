"""Holomorphic equilibrium propagation: the derivative along beta as a Cauchy integral (Laborieux and Zenke, 2022)."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from eqprop.autodiff import complex_of, in_complex, in_own_precision
from eqprop.cost import Cost, Nudge, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import Estimator, Rule, Step, check_resolved, minus_sum, trainable, update
from eqprop.estimators.ep import SideBySide
from eqprop.estimators.settings import EstimatorSettings
from eqprop.relax import NotFiniteError, Phase, Relaxation, Stepper, relax, trajectory, turns
from eqprop.settings import about
from eqprop.state import State, is_number

ADVICE = (
    "Holomorphic EP needs an analytic model and cost: no clip, no hard sigmoid, no max-pooling, no max, abs or "
    "comparison, |s|^2 written as s*s. Otherwise use nudging='symmetric' (--estimator ep-symmetric)."
)
TOLERANCE = {torch.complex128: 1e-6, torch.complex64: 1e-3}
"""Relative difference allowed between the two gradients of an analytic function, for rounding; it is of order 1 for
functions that are not analytic."""


def check_analytic(model: Dynamics, cost: Cost, x: Tensor, y: Tensor, s: State) -> None:
    """Raise ValueError unless Phi and a nudged step, and so the cost, satisfy the Cauchy-Riemann equations near s.

    Raise NotFiniteError if they cannot be checked there, as the numbers overflow.

    Piecewise analytic functions pass, since only one state is tried.
    """
    names = f"{model.title} with {cost.title}"
    try:
        wrong = in_complex((model, cost), lambda: _first_wrong(model, cost, complex_of(x), complex_of(y), _near(s)))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"{names} cannot step at complex states: {reason}. {ADVICE}") from error
    if wrong is not None:
        raise ValueError(f"{wrong} of {names} is not analytic. {ADVICE}")


def _near(s: State) -> State:
    """A state slightly off s in both the real and the imaginary direction, the same at every call."""
    source = torch.Generator().manual_seed(0)

    def offset(layer: Tensor) -> Tensor:
        draw = torch.rand((*layer.shape, 2), generator=source, dtype=torch.float64)
        return torch.view_as_complex(0.1 * draw + 0.05).to(layer.device, layer.dtype.to_complex())

    return tuple(complex_of(layer) + offset(layer) for layer in s)


def _first_wrong(model: Dynamics, cost: Cost, x: Tensor, y: Tensor, s: State) -> str | None:
    """The name of the first that is not analytic, Phi or the step; None if both are."""
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in s)
        if isinstance(model, PrimitiveDynamics):
            phi = model.primitive(x, leaves)
            if not _is_analytic(phi, (*leaves, *trainable(model).values())):
                return "The primitive"
        new = Stepper(model, model.drive(x), Nudge(cost, y, 0.1))(leaves)
        # A different weight per neuron, so that errors do not cancel.
        total = sum((layer * (1.0 + v.detach())).sum() for layer, v in zip(new, leaves, strict=True))
        assert isinstance(total, Tensor), "there is at least one layer"
        return None if _is_analytic(total, leaves) else "The nudged step"


def _is_analytic(f: Tensor, inputs: Sequence[Tensor]) -> bool:
    """grad Im f = i grad Re f, with gradients as torch defines them, d/d Re + i d/d Im."""
    if not f.is_complex():
        return False
    real, imag = (
        torch.autograd.grad(part.sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        for part in (f.real, f.imag)
    )
    size = max(float(g.abs().max()) for g in (*real, *imag) if g.numel())
    gap = max(float((b - 1j * a).abs().max()) for a, b in zip(real, imag, strict=True) if a.numel())
    if not (math.isfinite(size) and math.isfinite(gap)):
        raise NotFiniteError(
            "The derivative of a step at complex states near the free state is not finite: the weights are too large, "
            "and the states come near a pole of the activation. Lower the learning rates or beta."
        )
    return gap <= TOLERANCE[f.dtype] * size


class HolomorphicSettings(EstimatorSettings, frozen=True, kw_only=True):
    """Of `HolomorphicEP`."""

    points: Annotated[int, about("Points on the circle of ep-holomorphic.", ge=2, le=10_000)] = 4


def holomorphic(T: int, K: int, beta: float) -> Estimator:
    """At four points on a circle in the complex plane: biased by order beta^4; the model must be analytic."""
    return HolomorphicEP(T, K, beta=beta, points=4)


@final
@dataclass(frozen=True)
class HolomorphicEP(Estimator):
    """dL/dtheta = -(1/N beta) sum_k e^(-i phi_k) dPhi/dtheta(s_K^(beta e^(i phi_k))), phi_k = 2 pi k / N.

    The second phase runs in one batch with N nudge strengths on a circle of radius beta in the complex plane; the sum
    is the derivative along beta at 0 up to terms of order beta^N. Two points give symmetric EP. States, parameters and
    inputs are complex during the phase. Points below the real axis mirror those above it, so only N/2 + 1 phases run.

    Phi, the activation and the cost must be analytic: no clip, no hard sigmoid, no max-pooling, |s|^2 written as s*s.
    Anything else raises.

    T           free steps
    K           steps of the second phase
    beta        radius of the circle
    points      nudge strengths on it, N
    schedule, stop, tolerance, checked    of the free phase, as in `Estimator`
    """

    orientation: ClassVar[int] = -1
    settings: ClassVar[type[EstimatorSettings]] = HolomorphicSettings
    rules: ClassVar[Mapping[str, Rule]] = {"holomorphic": holomorphic}

    beta: float = 0.1
    points: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.beta) or not 0.0 < self.beta < float("inf"):
            raise ValueError(f"beta is {self.beta!r}; expected the circle's radius, a positive number such as 0.1.")
        if not isinstance(self.points, int) or self.points < 2:
            raise ValueError(f"points is {self.points!r}; expected the number of points on the circle, 2 or more.")

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        """Try a step at complex states, after one free step; raise ValueError if it is not analytic."""
        super().check_serves(model, cost, x, y)
        check_analytic(model, cost, x, y, relax(model, x, Phase(1, checked=False)).state)

    def circle(self) -> list[tuple[complex, complex]]:
        """(beta_k, weight) of the points in the upper half plane; the weights include the mirrored points."""
        out = []
        for k in range(self.points // 2 + 1):
            turn = cmath.exp(2j * cmath.pi * k / self.points)
            mirrored = 1 if k == 0 or 2 * k == self.points else 2
            out.append((self.beta * turn, mirrored / (self.points * self.beta * turn)))
        return out

    def check_nudge(self, model: Dynamics, dtype: torch.dtype) -> None:
        check_resolved(self.beta, model, dtype)

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        model, cost, x, y = problem.model, problem.cost, problem.x, problem.y
        if self.checked:
            check_analytic(model, cost, x, y, free.state)
        if isinstance(model, PrimitiveDynamics):
            return free, in_complex((model, cost), lambda: self._telescoped(model, cost, x, y, free.state))
        return free, minus_sum(self.steps(model, cost, x, y, free))

    def _telescoped(self, model: PrimitiveDynamics, cost: Cost, x: Tensor, y: Tensor, s: State) -> dict[str, Tensor]:
        """The gradient, called with complex parameters. Subtracting the free state changes only the rounding."""
        x, s = complex_of(x), tuple(map(complex_of, s))
        betas, weights = zip(*self.circle(), strict=True)
        batch = SideBySide(Problem(model, cost, x, complex_of(y)), betas)
        nudged = relax(model, batch.x, self.nudged_phase(), batch.repeat(s), batch.nudge)
        contrasts = [model.contrast(x, end, s) for end in batch.split(nudged.state)]
        units = [-weight / model.nudge_scale for weight in weights]
        return {name: _real_sum(units, [c[name].detach() for c in contrasts]) for name in contrasts[0]}

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Delta_s(t) and Delta_theta(t), t = 0, ..., K-1, each the weighted sum over the circle."""
        cost.check(free.state, y)
        betas, weights = zip(*self.circle(), strict=True)
        units = [weight / model.nudge_scale for weight in weights]
        batch = SideBySide(Problem(model, cost, complex_of(x), complex_of(y)), betas)
        s = batch.repeat(tuple(map(complex_of, free.state)))
        for group in turns(model, len(s), self.schedule, range(self.K)):
            s, parts = in_complex((model, cost), partial(_advance, model, complex_of(x), batch, s, group))
            neurons = tuple(_real_sum(units, layer) for layer in zip(*(p.neurons for p in parts), strict=True))
            names = parts[0].synapses
            yield Step(neurons, {name: _real_sum(units, [p.synapses[name] for p in parts]) for name in names})


def _advance(
    model: Dynamics, x: Tensor, batch: SideBySide, s: State, group: tuple[int, ...] | None
) -> tuple[State, list[Step]]:
    """A nudged step of every copy, and each copy's update before division by its beta."""
    _, new = trajectory(model, batch.x, s, [group], batch.nudge)
    pairs = zip(batch.split(s), batch.split(new), strict=True)
    return new, [update(model, x, before, after, 1.0) for before, after in pairs]


def _real_sum(weights: Sequence[complex], values: Sequence[Tensor]) -> Tensor:
    """Re sum_k w_k v_k."""
    return sum((weight * v).real for weight, v in zip(weights, values, strict=True))  # type: ignore[return-value]
