"""Any estimator's gradient of a mini-batch against a reference's, parameter by parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.estimators import BPTT
from eqprop.estimators.base import Estimator


@dataclass(frozen=True)
class Match:
    """How far a gradient agrees with a reference: cosine, ratio of norms, |difference| / |reference|."""

    cosine: float
    norm: float
    distance: float


@dataclass(frozen=True)
class Gradients:
    """What `compare_gradients` found: the two estimators, and how far they agree by parameter; "all" is the whole."""

    estimator: Estimator
    reference: Estimator
    parameters: dict[str, Match]

    def __str__(self) -> str:
        width = max(len(name) for name in self.parameters)
        rows = [
            f"{name:>{width}} {m.cosine:8.4f} {m.norm:8.4f} {m.distance:9.1e}" for name, m in self.parameters.items()
        ]
        head = f"{'':>{width}} {'cosine':>8} {'norm':>8} {'distance':>9}"
        return "\n".join([f"{self.estimator}", f"against {self.reference}", head, *rows])


def compare_gradients(
    estimator: Estimator, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, reference: Estimator | None = None
) -> Gradients:
    """How far an estimator's gradient of this batch, your own's too, agrees with a reference's.

    reference   by default BPTT with the estimator's T and K, the gradient EP's steps correspond to; give
                RBP(T=1000, K=1000) for that at rest
    """
    against = reference or BPTT(T=max(estimator.T, estimator.K), K=estimator.K)
    found, exact = ({p: g.double() for p, g in e.gradient(model, cost, x, y)[1].items()} for e in (estimator, against))
    names = {p: name for name, p in (*model.named_parameters(), *cost.named_parameters(prefix="cost"))}
    missing = next((names[p] for p in exact if p not in found), None)
    if missing is not None:
        raise ValueError(f"{type(estimator).__name__} gave no gradient of {missing}; expected one per parameter.")
    pairs = {names[p]: (found[p].flatten(), g.flatten()) for p, g in exact.items()}
    whole = (torch.cat(parts) for parts in zip(*pairs.values(), strict=True))
    return Gradients(estimator, against, {name: _match(*both) for name, both in {**pairs, "all": (*whole,)}.items()})


def _match(found: Tensor, exact: Tensor) -> Match:
    """A gradient of zero has no direction, so its cosine is nan; two of zero agree."""
    size, other, gap = float(found.norm()), float(exact.norm()), float((found - exact).norm())
    if not other:
        return Match(math.nan, math.inf, math.inf) if size else Match(1.0, 1.0, 0.0)
    return Match(float(found @ exact) / (size * other) if size else math.nan, size / other, gap / other)
