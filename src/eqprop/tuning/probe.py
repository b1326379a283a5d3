"""Probe a network: how it settles, when its gradients die out, and which beta EP's gradient tolerates.

The network runs in its training precision. The exact gradient is computed by BPTT in float64 from the same weights,
with a longer free phase.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.estimators import BPTT
from eqprop.estimators.base import trainable
from eqprop.estimators.named import CONTINUAL
from eqprop.relax import SWEEPS, Phase, Schedule, prepare, relax, turns
from eqprop.run.session import make_estimator
from eqprop.run.spec import Spec
from eqprop.state import distance


@dataclass(frozen=True)
class Residuals:
    """|F(x, s_t) - s_t| over the samples, t = 0, 1, ...: median, 90th percentile, maximum."""

    median: tuple[float, ...]
    most: tuple[float, ...]
    worst: tuple[float, ...]


@dataclass(frozen=True)
class Sizes:
    """|nabla_W(t)|, t = 0, 1, ..., per weight: root mean square over mini-batches of its Frobenius norm."""

    norms: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class BetaAgreement:
    """EP's gradient compared with the exact one at each beta, per weight, averaged over mini-batches.

    sign        share of the synapses with a nonzero exact gradient where EP's gradient has the same sign
    cosine      cosine of the angle between the two
    """

    betas: tuple[float, ...]
    sign: dict[str, tuple[float, ...]]
    cosine: dict[str, tuple[float, ...]]

    def mean_sign(self) -> tuple[float, ...]:
        """Mean over the weights, each with equal weight whatever its number of synapses."""
        return tuple(sum(column) / len(column) for column in zip(*self.sign.values(), strict=True))


@dataclass(frozen=True)
class Scales:
    """Per parameter: norm of its value, and root mean square over mini-batches of its gradient's norm."""

    value: dict[str, float]
    gradient: dict[str, float]


@dataclass(frozen=True)
class Measurements:
    """All measurements at one set of weights."""

    weights: str
    residuals: Residuals
    sizes: Sizes
    agreement: BetaAgreement
    scales: Scales


MOST = 0.9
"""Share of the samples that must have settled; a few may never settle, for example in a 2-cycle."""

LOOK_EVERY = 20
"""Steps between checks whether anything still moves."""


@dataclass(frozen=True)
class Batches:
    """Mini-batches of training samples to probe, each (B, ...) with targets (B, classes)."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]

    def all_x(self) -> Tensor:
        return torch.cat(self.x)

    def double(self) -> Batches:
        return Batches(tuple(x.double() for x in self.x), tuple(y.double() for y in self.y))


@torch.no_grad()
def residuals(model: Dynamics, x: Tensor, schedule: Schedule, longest: int) -> Residuals:
    """|F(x, s_t) - s_t| per sample, t = 0, ..., longest, or until no bit changes  [eq:1st-phase]."""
    s, drive = prepare(model, x, None, None), model.drive(x)
    order = turns(model, len(s), schedule, range(longest + 1))
    columns: list[Tensor] = []
    for t in range(longest + 1):
        new = model.step(drive, s)
        columns.append(distance(new, s, model.sample_dims(x)))
        if t % LOOK_EVERY == 0 and not float(columns[-1].max()) > 0.0:
            break
        group = order[t]
        if schedule == "alternating":
            s = model.half_step(drive, s, (t + 1) % 2)
        else:
            s = new if group is None else model.group_step(drive, s, group)
    table = torch.stack(columns).double()  # (t, B)
    if not bool(torch.isfinite(table).all()):
        raise ArithmeticError(
            f"The free phase of {model.title} is not finite. Lower eps, or use other initial weights (--init default)."
        )
    most = table.sort(1).values[:, min(int(MOST * table.shape[1]), table.shape[1] - 1)]
    return Residuals(_tuple(table.median(1).values), _tuple(most), _tuple(table.max(1).values))


@dataclass(frozen=True)
class ExactGradients:
    """The exact gradients of the mini-batches in float64, and the norms of their terms."""

    sizes: Sizes
    gradients: tuple[dict[str, Tensor], ...]


def exact_gradients(
    model: Dynamics, cost: Cost, batches: Batches, longest: int, steps: int, schedule: Schedule = "synchronous"
) -> ExactGradients:
    """nabla_W(t) for t < steps at the end of a free phase of `longest` steps, and their sum  [eq:total-gradient].

    Where the free phase sweeps, steps begin at its state of rest: from zero they may end in another one.
    """
    wide, cost = copy.deepcopy(model).double(), copy.deepcopy(cost).double()
    estimator = BPTT(max(longest, steps), steps)
    squares: dict[str, Tensor] = {}
    gradients = []
    for x, y in zip(batches.double().x, batches.double().y, strict=True):
        at_rest = relax(wide, x, Phase(longest, schedule=schedule)).state if schedule in SWEEPS else None
        free = relax(wide, x, Phase(estimator.T, stop="settled"), at_rest, keep=steps)
        total: dict[str, Tensor] = {}
        norms: dict[str, list[Tensor]] = {}
        for step in estimator.steps(wide, cost, x, y, free):
            for name, g in step.synapses.items():
                total[name] = total[name] + g if name in total else g
                norms.setdefault(name, []).append(g.norm())
        gradients.append(total)
        for name, values in norms.items():
            mean = torch.stack(values).square() / len(batches.x)
            squares[name] = squares[name] + mean if name in squares else mean
    shown = weight_names(model)
    return ExactGradients(Sizes({name: _tuple(squares[name].sqrt()) for name in shown}), tuple(gradients))


def agreement(
    model: Dynamics, cost: Cost, batches: Batches, exact: ExactGradients, spec: Spec, betas: Sequence[float]
) -> BetaAgreement:
    """Compare EP, configured as in the spec, with the exact gradients at each beta."""
    names = weight_names(model)
    sign: dict[str, list[float]] = {name: [] for name in names}
    cosine: dict[str, list[float]] = {name: [] for name in names}
    for beta in betas:
        found = gradients(model, cost, batches, spec.override(beta=beta))
        for name in names:
            pairs = [(f[name].double(), g[name]) for f, g in zip(found, exact.gradients, strict=True)]
            sign[name].append(sum(_same_sign(f, g) for f, g in pairs) / len(pairs))
            cosine[name].append(sum(_cosine(f, g) for f, g in pairs) / len(pairs))
    return BetaAgreement(tuple(betas), {n: tuple(v) for n, v in sign.items()}, {n: tuple(v) for n, v in cosine.items()})


def gradients(model: Dynamics, cost: Cost, batches: Batches, spec: Spec) -> list[dict[str, Tensor]]:
    """EP's gradient per mini-batch by parameter name, including the cost's; model and cost are copied."""
    found = []
    estimator = replace(make_estimator(looked_through(spec)), checked=False)
    for x, y in zip(batches.x, batches.y, strict=True):
        own, own_cost = copy.deepcopy(model), copy.deepcopy(cost)
        _, grads = estimator.gradient(own, own_cost, x, y)
        names = {p: name for name, p in (*own.named_parameters(), *own_cost.named_parameters())}
        found.append({names[p]: g for p, g in grads.items()})
    return found


def looked_through(spec: Spec) -> Spec:
    """Replace the estimator by one that is deterministic and needs no learning rates.

    Random signs average over both signs. Continual EP tends to one-sided EP for small rates, and the rates are not
    known yet.
    """
    changing = spec.estimator.kind in ("ep-random-sign", CONTINUAL)
    return spec.override(estimator="ep") if changing else spec


def scales(model: Dynamics, cost: Cost, batches: Batches, spec: Spec) -> Scales:
    """Measure the size of each parameter and of its gradient over the mini-batches."""
    found = gradients(model, cost, batches, spec)
    mean = {name: sum(float(g[name].double().square().sum()) for g in found) / len(found) for name in found[0]}
    return Scales(
        {name: float(p.detach().double().norm()) for name, p in (trainable(model) | trainable(cost)).items()},
        {name: value**0.5 for name, value in mean.items()},
    )


def weight_names(model: Dynamics, cost: Cost | None = None) -> list[str]:
    """Parameters with two or more dimensions, or all if there are none; includes a readout's if `cost` is given."""
    parameters = trainable(model) | ({} if cost is None else trainable(cost))
    return [name for name, p in parameters.items() if p.dim() > 1] or list(parameters)


def _same_sign(f: Tensor, g: Tensor) -> float:
    alive = g != 0
    return float(((f * g)[alive] > 0).double().mean()) if bool(alive.any()) else 1.0


def _cosine(f: Tensor, g: Tensor) -> float:
    lengths = float(f.norm() * g.norm())
    return float((f * g).sum()) / lengths if 0.0 < lengths < math.inf else 0.0


def _tuple(values: Tensor) -> tuple[float, ...]:
    return tuple(float(v) for v in values.tolist())
