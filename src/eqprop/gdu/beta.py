"""The best beta: large enough to outweigh drift and rounding, small enough to keep the bias of the update small.

A gradient's error is about a r / beta + c beta^p: r the residual or the rounding of a phase, p = 2 for centered nudging
and 1 for one-sided. The best beta grows as r^(1/3), or r^(1/2). In the difference form the first term is absent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from eqprop.autodiff import in_own_precision
from eqprop.cost import Problem
from eqprop.estimators import EP, Estimator
from eqprop.estimators.base import trainable
from eqprop.relax import NotFiniteError, Relaxation, relax

GRID = tuple(10.0 ** (-n / 2.0) for n in range(10))
"""1, 0.32, 0.1, ..., 3e-5."""
LIMIT = 1e-4
"""The beta that stands for 0, in the difference form."""
BENT = 0.01
"""In the difference form beta may be as large as it bends the gradient by this share."""


@dataclass(frozen=True)
class BetaChoice:
    """A beta, the share by which it is estimated to leave the gradient off, and the same of every beta tried."""

    beta: float
    error: float
    tried: tuple[tuple[float, float], ...]

    def __str__(self) -> str:
        return f"beta = {self.beta:.2g} leaves the gradient off by about {self.error:.1%}"


@in_own_precision
def best_beta(problem: Problem, ep: EP, free: Relaxation | None = None, grid: Sequence[float] = GRID) -> BetaChoice:
    """The beta with the least error on these samples, from the free state that T steps lead to.

    problem     model, cost, x, y: a hundred samples are enough
    ep          its T, K, nudging and form; its beta does not matter
    free        the free phase, where it has been run
    grid        the betas to try, the largest first; then two more beside the best

    Each is held against the limit of small beta from the same state, in the difference form. That the free state is
    not the state of rest itself is no fault of beta's, and is not counted.
    """
    free = relax(problem.model, problem.x, ep.free_phase()) if free is None else free
    ep = replace(ep, checked=False, nudging="one-sided" if ep.nudging == "random-sign" else ep.nudging)
    limit = _flat(problem, replace(ep, beta=LIMIT, form="difference", nudging="symmetric"), free)
    size = float(limit.norm())

    def off(beta: float) -> float:
        found = float((_flat(problem, replace(ep, beta=beta), free) - limit).norm()) / size if size else math.inf
        return found if math.isfinite(found) else math.inf

    tried = {beta: off(beta) for beta in grid}
    if ep.form == "difference":
        beta = next((b for b, error in tried.items() if error <= BENT), min(tried))
    else:
        beta = min(tried, key=tried.__getitem__)
        around = _beside(list(tried), beta)
        tried |= {b: off(b) for b in (float(f"{math.sqrt(p * q):.3g}") for p, q in pairwise(around))}
        beta = min(tried, key=tried.__getitem__)
    return BetaChoice(float(f"{beta:.3g}"), tried[beta], tuple(sorted(tried.items(), reverse=True)))


def _beside(betas: Sequence[float], beta: float) -> Sequence[float]:
    n = betas.index(beta)
    return betas[max(n - 1, 0) : n + 2]


def _flat(problem: Problem, estimator: Estimator, free: Relaxation) -> torch.Tensor:
    try:
        found = estimator.estimate(problem, free)[1]
    except (NotFiniteError, ArithmeticError):
        return torch.tensor([math.inf])
    return torch.cat([found[n].detach().double().flatten() for n in trainable(problem.model) if n in found])
