"""Follow a remedy as the user of the net would, and say what it is worth.

What is applied belongs to the remedy that was named, by its cause, its settings and its words: a wrong name mends
nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eqprop import RBP, Dynamics, PrimitiveDynamics, SquaredError, relax
from eqprop.cost import Problem
from eqprop.dynamics import set_nudge_site
from eqprop.estimators import Estimator
from eqprop.gdu.doctor import doctor
from eqprop.gdu.gradient_checks import OUTPUTS_INSIDE
from eqprop.gdu.problem_checks import reach
from eqprop.gdu.verdict import Diagnosis, Finding
from eqprop.relax import Phase
from helpers.ailing_nets import Case

CURED = 0.99
"""The cosine of EP's gradient with the exact one from which a net counts as cured."""
STEPS, RATE = 50, 0.1
"""Steps of SGD, and their rate where a net has none, after which the errors of a net and of its twin are compared."""
EXACT = 4_000
"""The most terms of the exact gradient."""
LEARNT = 0.9
"""The loss that a twin may have left to count as one that learns."""
AS_GOOD = 0.05
"""How much more of its first loss a cured net may have left than its twin by the exact gradient."""


def ask(case: Case) -> Diagnosis:
    return doctor(case.model, case.cost, case.x, case.y, case.ep, state=case.state, rates=case.rates)


def mended(case: Case, finding: Finding) -> Case | None:
    """The net after the remedy, on a copy; None where this net has nothing that could be done so."""
    case = case.but(model=copy.deepcopy(case.model), rewritten=case.rewritten)
    if finding.change:
        return _with_settings(case, dict(finding.change))
    follow = IN_WORDS.get(finding.cause)
    found = follow(case, finding) if follow else None
    if found is None and finding.cause in case.rewritten:
        return case.rewritten[finding.cause]()
    return found


def _with_settings(case: Case, change: dict[str, Any]) -> Case:
    if change.pop("dtype", None):
        case = replace(case, model=case.model.double(), cost=case.cost.double(), x=case.x.double(), y=case.y.double())
    if "nudge_site" in change:
        set_nudge_site(case.model, change.pop("nudge_site"))
    if "eps" in change:
        case.model.eps = case.model.nudge_scale = change.pop("eps")  # type: ignore[assignment]
    rates = {name: change.pop(name) for name in ("lr", "lr_factor") if name in change}
    if rates:
        case = replace(case, rates=rates.get("lr", rates.get("lr_factor", 1.0) * (case.rates or 0.0)))
    return replace(case, ep=replace(case.ep, **change))


@torch.no_grad()
def _lower_weights(case: Case, finding: Finding) -> Case | None:
    if "Lower the weights" not in finding.advice:
        return None
    for p in _weights(case.model):
        p.mul_(0.5)
    return case


def _evaluated(case: Case, finding: Finding) -> Case | None:
    if not finding.advice.startswith("Call model.eval()"):
        return None
    case.model.eval()
    return case


def _new_optimizer(case: Case, finding: Finding) -> Case:
    (group,) = case.rates.param_groups
    return replace(case, rates=group["lr"])


def _scaled_targets(case: Case, finding: Finding) -> Case:
    low, high = reach(Problem(case.model, case.cost, case.x, case.y))
    first, last = float(case.y.min()), float(case.y.max())
    middle, half = 0.5 * (low + high), 0.25 * (high - low)
    return replace(case, y=middle + half * (2.0 * (case.y - first) / (last - first) - 1.0))


def _without_formula(case: Case, finding: Finding) -> Case | None:
    """Without the method that the remedy says to leave out."""
    name = next((n for n in ("gradient", "contrast") if finding.advice.startswith(f"Correct {n}()")), None)
    if name is None:
        return None
    own = type(case.model)
    case.model.__class__ = type(own.__name__, (own,), {name: getattr(PrimitiveDynamics, name)})
    return case


@torch.no_grad()
def _random_weights(case: Case, finding: Finding) -> Case:
    source = torch.Generator().manual_seed(0)
    for p in _weights(case.model):
        if not bool(p.any()):
            p.copy_((2 * torch.rand(p.shape, generator=source, dtype=p.dtype) - 1) / math.sqrt(p.shape[1]))
    return case


@torch.no_grad()
def _heard(case: Case, finding: Finding) -> Case:
    if finding.advice != OUTPUTS_INSIDE:
        return replace(case, x=case.x / float(case.x.abs().max()))
    parameters = dict(case.model.named_parameters())
    parameters["b0"].fill_(0.1)
    parameters["W01"].mul_(0.1)
    return case


@torch.no_grad()
def _louder(case: Case, finding: Finding) -> Case:
    """Larger weights until they are no longer said to fade."""
    for _ in range(8):
        for p in _weights(case.model):
            p.mul_(1.5)
        if ask(case).cause != finding.cause:
            break
    return case


def _weights(model: Dynamics) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


IN_WORDS: dict[str, Callable[[Case, Finding], Case | None]] = {
    "random": _evaluated,
    "optimizer": _new_optimizer,
    "targets": _scaled_targets,
    "formula": _without_formula,
    "start": lambda case, finding: replace(case, state=None),
    "unbounded": _lower_weights,
    "diverges": _lower_weights,
    "never-settles": _lower_weights,
    "oscillates": _lower_weights,
    "no-pull": lambda case, finding: replace(case, cost=SquaredError()),
    "zero-weights": _random_weights,
    "silent": _heard,
    "fades": _louder,
}
"""What a user does who reads a remedy in words, by its cause; what takes other code is with the net."""


def cosine(case: Case) -> float:
    """Of EP's whole gradient with the exact one at the rest where its free phase leads; nan where there is none."""
    try:
        _, found = case.ep.gradient(case.model, case.cost, case.x, case.y, case.state)
        model, cost = copy.deepcopy(case.model).double(), copy.deepcopy(case.cost).double()
        exact = RBP(T=10_000, K=EXACT, schedule=case.ep.schedule, stop="settled", checked=False)
        state = None if case.state is None else tuple(layer.double() for layer in case.state)
        _, wanted = exact.gradient(model, cost, case.x.double(), case.y.double(), state)
    except (ValueError, ArithmeticError, RuntimeError):
        return math.nan
    wide = {name: wanted[p] for name, p in model.named_parameters() if p in wanted}
    pairs = [(found[p].double().flatten(), wide[n].flatten()) for n, p in case.model.named_parameters() if p in found]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))


def loss_left(case: Case, exact: bool = False) -> float:
    """The loss on the batch after `STEPS` steps by EP, or by the exact gradient, as a share of the first."""
    model, cost = copy.deepcopy(case.model), copy.deepcopy(case.cost)
    rates = RATE if case.rates is None else case.rates
    if isinstance(rates, torch.optim.Optimizer):
        rates = rates.param_groups[0]["lr"]
    optimizer = torch.optim.SGD(model.parameters(), lr=rates)
    ep: Estimator = replace(case.ep, stop="settled", checked=False)
    if exact:
        ep = RBP(case.ep.T, EXACT, schedule=case.ep.schedule, stop="settled", checked=False)
    first = _loss(model, cost, case, ep)
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            ep.backward(model, cost, case.x, case.y, case.state)
            optimizer.step()
        left = _loss(model, cost, case, ep) / first
    except ArithmeticError:
        return math.inf
    return left if math.isfinite(left) else math.inf


def _loss(model: Dynamics, cost: Any, case: Case, ep: Estimator) -> float:
    free = relax(model, case.x, Phase(ep.T, ep.schedule, stop="settled", checked=False), case.state)
    return float(cost.values(free.state, case.y, dict(model.named_parameters())).detach().mean())


def worth(case: Case, finding: Finding) -> dict[str, Any]:
    """What following the remedy brings: the cosine, and where that stays below `CURED` the error beside the twin's."""
    after = mended(case, finding)
    if after is None:
        return {"followed": False, "cured": False}
    value = cosine(after)
    found: dict[str, Any] = {"followed": True, "cosine": value, "cured": value >= CURED}
    if not found["cured"] or finding.cause in ("optimizer", "rate-large", "rate-small"):
        found["loss_left"], found["cured"] = loss_left(after), False
        if case.twin is not None:
            found["loss_left_of_twin"] = twin = loss_left(case.twin(), exact=True)
            found["cured"] = twin < LEARNT and found["loss_left"] <= twin + AS_GOOD
    return found
