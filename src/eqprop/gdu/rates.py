"""Learning rates: do a few steps of the optimizer at them lower the loss on the batch, and which would?"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, cast

import torch
from torch import nn

from eqprop.cost import Problem
from eqprop.estimators.base import trainable
from eqprop.gdu.examination import Examination, Rates
from eqprop.gdu.verdict import Finding
from eqprop.messages import shown, unknown
from eqprop.relax import Phase, relax

TRIAL_STEPS, MORE_STEPS = 5, 20
"""Steps of the optimizer that are tried on the batch, and those by which a better rate is chosen."""
TOO_LITTLE, WORTHWHILE = 1e-4, 1e-2
"""A rate is too small where the trial lowers the loss by less than the first share of it, and a larger rate by more
than the second."""
TOO_MUCH = 0.1
"""A rate is too large where the trial raises the loss by more than this share of it, and the longer one does not bring
it back: a net that is nearly trained goes up and down at any constant rate."""


def check_rates(p: Examination) -> None:
    rates = p.rates
    if isinstance(rates, torch.optim.LBFGS):
        raise ValueError("LBFGS steps by a closure, which the doctor does not have. Omit rates, or give another one.")
    if rates is None or isinstance(rates, torch.optim.Optimizer):
        return
    names = [name for part in (p.problem.model, p.problem.cost) for name, _ in part.named_parameters()]
    given: Mapping[str, object] = rates if isinstance(rates, Mapping) else {"*": rates}
    for name, rate in given.items():
        if name not in (*names, "*"):
            raise ValueError(unknown("parameter", name, [*names, "*"]))
        if not isinstance(rate, Real) or not 0.0 <= float(rate) < math.inf:
            what = f"rates[{name!r}]" if isinstance(rates, Mapping) else "rates"
            raise ValueError(f"{what} is {shown(rate)}; expected a learning rate, a number from 0 on.")


def rates_at_work(p: Examination) -> Finding | str:
    if p.rates is None:
        return "no learning rates given"
    if not any(group["lr"] for group in _optimizer(p, p.problem.model, 1.0).param_groups):
        return Finding("rate-small", "every learning rate is 0", advice="Give a rate above 0, such as 0.1.")
    before, after = trial(p, 1.0)
    fallen = (before - after) / abs(before) if before else 0.0
    shown = f"{TRIAL_STEPS} steps on this batch take the loss from {before:.3g} to {after:.3g}"
    if not fallen > -TOO_MUCH:
        later = trial(p, 1.0, MORE_STEPS)[1]
        if later <= before + TOO_MUCH * abs(before):
            return f"{shown}, and {MORE_STEPS} of them to {later:.3g}"
        found = _better(p, "rate-large", shown, (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5), TOO_LITTLE)
        return found or f"no rate lowers the loss of {before:.3g} on this batch"
    if fallen < TOO_LITTLE:
        gone = f"{TRIAL_STEPS} steps on this batch lower the loss of {before:.3g} by {fallen:.1e} of it"
        found = _better(p, "rate-small", gone, [10.0**n for n in range(1, 13)], WORTHWHILE)
        return found or shown
    return shown


def _better(p: Examination, cause: str, shown: str, factors: Sequence[float], worthwhile: float) -> Finding | None:
    """The rates times the factor that leads farthest down over more steps, if that is worth the change."""
    best, at, start = math.inf, 1.0, math.inf
    for factor in factors:
        start, after = trial(p, factor, MORE_STEPS)
        if after < best:
            best, at = after, factor
        elif best < start:  # past the lowest
            break
    if not best < start - worthwhile * abs(start):
        return None
    did = f"{MORE_STEPS} steps then take the loss from {start:.3g} to {best:.3g}"
    return Finding(cause, shown, _rates_times(p.rates, at), tried=did, verified=True)


def _rates_times(rates: Rates, factor: float) -> dict[str, float]:
    if isinstance(rates, torch.optim.Optimizer):
        rates = {str(n): float(group["lr"]) for n, group in enumerate(rates.param_groups)}
    single = rates if isinstance(rates, float | int) else None
    if isinstance(rates, Mapping) and len(set(rates.values())) == 1:
        single = next(iter(rates.values()))
    if single is not None:
        return {"lr": float(f"{single * factor:.3g}")}
    return {"lr_factor": factor}


def trial(p: Examination, factor: float, steps: int = TRIAL_STEPS) -> tuple[float, float]:
    """The loss on the batch before and after some steps of a copy at rates times a factor; infinite if it bursts."""
    model, cost = copy.deepcopy(p.problem.model), copy.deepcopy(p.problem.cost)
    problem = Problem(model, cost, p.problem.x, p.problem.y)
    optimizer = _optimizer(p, model, factor)
    before, ep = _loss(problem, p), replace(p.ep, stop="settled")
    for _ in range(steps):
        optimizer.zero_grad()
        try:
            ep.backward(model, cost, p.problem.x, p.problem.y, p.state)
        except (ArithmeticError, ValueError):  # it has gone where the state bursts, or where no nudge can be taken
            return before, math.inf
        optimizer.step()
        model.constrain()
    after = _loss(problem, p)
    return before, after if math.isfinite(after) else math.inf


def _loss(problem: Problem, p: Examination) -> float:
    phase = Phase(p.ep.T, p.ep.schedule, stop="settled", checked=False)
    free = relax(problem.model, p.problem.x, phase, p.state)
    return float(problem.cost.values(free.state, p.problem.y, problem.theta).detach().mean())


def _optimizer(p: Examination, model: nn.Module, factor: float) -> torch.optim.Optimizer:
    """The one given, for a copy of the model and without its history; SGD where only rates are given."""
    copies = trainable(model)
    rates = p.rates
    if isinstance(rates, torch.optim.Optimizer):
        names = {id(v): name for name, v in trainable(p.problem.model).items()}
        groups: list[dict[str, Any]] = []
        for group in rates.param_groups:
            held = [copies[names[id(v)]] for v in group["params"] if id(v) in names]
            groups.append({**group, "params": held, "lr": group["lr"] * factor})
        made: type[Any] = type(rates)
        return cast(torch.optim.Optimizer, made([g for g in groups if g["params"]]))
    by_name = rates if isinstance(rates, Mapping) else {"*": float(rates or 0.0)}
    groups = [{"params": [v], "lr": factor * by_name.get(name, by_name.get("*", 0.0))} for name, v in copies.items()]
    return torch.optim.SGD(groups)
