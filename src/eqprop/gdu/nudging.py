"""Every nudging rule beside the exact gradient of the loss at rest, and the order of its bias in beta."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators import EP, Estimator
from eqprop.estimators.base import parameter_vjp, pull_back
from eqprop.estimators.nudging import RULES
from eqprop.messages import unknown
from eqprop.relax import SWEEPS, Phase, Schedule, relax, turns
from eqprop.state import State, add

BETAS = (0.5, 0.1, 0.01, 0.001)
ROUNDING = 1e-10
"""Relative distances below this say nothing about an order in beta."""


@dataclass(frozen=True)
class RuleResult:
    """A rule's estimate at each beta: the cosine with the exact gradient, and |estimate - exact| / |exact|.

    order       of the distance in beta, from the two smallest betas: log of its ratio over log of theirs; None where
                it is rounding, or the rule has no beta
    refused     why it does not serve this model; the lists are then empty
    """

    rule: str
    cosines: tuple[float, ...] = ()
    distances: tuple[float, ...] = ()
    order: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class NudgingTable:
    """What `compare_nudging` measured; print it.

    residual    of the free phase, in float64
    """

    betas: tuple[float, ...]
    rows: tuple[RuleResult, ...]
    residual: float

    def __str__(self) -> str:
        head = ["nudging", *(f"beta {beta:g}" for beta in self.betas), "order"]
        lines = [head]
        for row in self.rows:
            if row.refused is not None:
                lines.append([row.rule, row.refused])
                continue
            cells = [f"{c:.4f} ({d:.1e})" for c, d in zip(row.cosines, row.distances, strict=True)]
            lines.append([row.rule, *cells, "-" if row.order is None else f"{row.order:.2f}"])
        widths = [max(len(line[n]) for line in lines if len(line) == len(head)) for n in range(len(head))]
        shown = [
            "  ".join(cell.ljust(widths[n]) for n, cell in enumerate(line)).rstrip()
            if len(line) == len(head)
            else f"{line[0].ljust(widths[0])}  {line[1]}"
            for line in lines
        ]
        title = f"Cosine with the exact gradient at rest (relative distance), float64, residual {self.residual:.1e}:"
        return "\n".join([title, *shown])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        rows = [{name: getattr(row, name) for name in RuleResult.__dataclass_fields__} for row in self.rows]
        return {"betas": list(self.betas), "residual": self.residual, "rows": rows}


def compare_nudging(
    model: Dynamics,
    cost: Cost,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 600,
    betas: Sequence[float] = BETAS,
    rules: str | Sequence[str] = "all",
    schedule: Schedule = "synchronous",
) -> NudgingTable:
    """Compare nudging rules with recurrent backprop at the steady state, in float64.

    model, cost, x, y   as for any estimator; copies in float64 are used
    steps               at most so many in each phase; the free one ends once nothing moves
    betas               largest first
    rules               names of `eqprop.estimators.nudging.RULES`, or "all"
    schedule            of all phases; in sweeps `steps` counts whole sweeps
    """
    names = list(RULES) if rules == "all" else [rules] if isinstance(rules, str) else list(rules)
    strange = next((name for name in names if name not in RULES), None)
    if strange is not None:
        raise ValueError(unknown("nudging rule", strange, RULES, other="or all"))
    problem = Problem(model, cost, x, y).double()
    groups = problem.model.sweep(len(problem.model.init_state(problem.x[:1]))) if schedule in SWEEPS else ()
    steps *= len(groups) or 1
    free = relax(problem.model, problem.x, Phase(20 * steps, schedule, stop="settled", still=1e-15))
    exact = _exact(problem, free.state, steps, schedule)
    rows = tuple(_measured(problem, name, free.state, exact, steps, betas, schedule) for name in names)
    return NudgingTable(tuple(betas), rows, float(free.residual.max()))


def _exact(problem: Problem, s: State, steps: int, schedule: Schedule) -> Tensor:
    """(dF/dtheta)^T a at rest, a <- J^T a + dl/ds: recurrent backprop, in sweeps where the phases are.

    There the layers of a are updated in turn, as the series of synchronous updates need not converge.
    """
    model, pull = problem.model, problem.pull(s)
    with torch.enable_grad():
        leaves = tuple(v.detach().requires_grad_() for v in s)
        out = model.step(model.drive(problem.x), leaves)
    a = tuple(torch.zeros_like(v) for v in s)
    for group in turns(model, len(s), schedule, range(steps)):
        new = add(pull_back(out, leaves, a, retain_graph=True), pull)
        before, a = a, new if group is None else tuple(v if n in group else a[n] for n, v in enumerate(new))
        if group is None and all(torch.equal(u, v) for u, v in zip(before, a, strict=True)):
            break
    found = parameter_vjp(model, problem.x, s, a)
    return torch.cat([found[name].flatten() for name, _ in model.named_parameters() if name in found])


def _measured(
    problem: Problem, name: str, s: State, exact: Tensor, steps: int, betas: Sequence[float], schedule: Schedule
) -> RuleResult:
    cosines: list[float] = []
    distances: list[float] = []
    for beta in betas:
        estimator = replace(RULES[name](0, steps, beta), schedule=schedule)
        try:
            estimator.check_serves(problem.model, problem.cost, problem.x, problem.y)
            draws = [_flat(problem, each, s) for each in _draws(estimator)]
        except (ValueError, TypeError, ArithmeticError) as error:
            if not cosines and not isinstance(error, ArithmeticError):
                return RuleResult(name, refused=str(error).split(". ")[0])
            draws = [torch.full_like(exact, math.nan)]
        cosines.append(sum(float(torch.cosine_similarity(g, exact, dim=0)) for g in draws) / len(draws))
        distances.append(sum(float((g - exact).norm() / exact.norm()) for g in draws) / len(draws))
    return RuleResult(name, tuple(cosines), tuple(distances), _order(betas, distances))


def _draws(estimator: Estimator) -> list[Estimator]:
    """The estimators it stands for: two, for one that draws a sign, whose errors are averaged."""
    if isinstance(estimator, EP) and estimator.nudging == "random-sign":
        return [estimator.with_sign(1), estimator.with_sign(-1)]
    return [estimator]


def _order(betas: Sequence[float], distances: Sequence[float]) -> float | None:
    """From the two smallest betas whose distances are above rounding and not the same."""
    usable = [(b, d) for b, d in zip(betas, distances, strict=True) if math.isfinite(d) and d > ROUNDING]
    if len(usable) < 2 or usable[-1][1] == usable[-2][1]:
        return None
    (large, far), (small, near) = usable[-2:]
    return math.log(far / near) / math.log(large / small)


def _flat(problem: Problem, estimator: Estimator, s: State) -> Tensor:
    """The gradient of the model's parameters, in one vector."""
    grads: Mapping[Any, Tensor] = estimator.gradient(problem.model, problem.cost, problem.x, problem.y, s)[1]
    return torch.cat([grads[p].flatten() for p in problem.model.parameters() if p in grads])
