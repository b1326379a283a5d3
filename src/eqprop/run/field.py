"""What is measured of a trained row of the field: gradients against the exact one, and the Jacobian's asymmetry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators import RBP, Backprop, Estimator
from eqprop.estimators.homeostasis import relative_asymmetry
from eqprop.relax import Phase, Schedule, relax
from eqprop.run.evaluate import evaluate, load
from eqprop.run.laboratory import find_problem
from eqprop.run.session import bind
from eqprop.run.spec import Spec

EXAMINED, STEPS = 100, 2000
"""Training samples that gradients are compared on, and steps after which a net that settles has settled."""


def examine(spec: Spec, folder: Path) -> dict[str, Any]:
    """Before and after training: the cosine per parameter, the share of unsettled samples, and the asymmetry.

    The asymmetry after each epoch too, of runs that keep their weights.

    Of a run that was tested on training images it held out, the error on the test set, read once.

    The exact gradient is recurrent backprop's at rest, in float64; of a net whose rest is its forward pass,
    backprop's. The estimate is that of training, in its precision.
    """
    session, trained = bind(spec, trains=False), find_problem(str(folder)).problem
    first = session.problem(EXAMINED)
    last = Problem(trained.model, trained.cost, first.x, first.y)
    found: dict[str, Any] = {}
    if spec.data.validation:
        (own,) = evaluate(folder, whole=True).values()
        found["test_error"] = own[0]["test_error"]
    found |= {n: measured(session.estimator, each) for n, each in (("before", first), ("after", last))}
    if spec.run.keep_every and found["after"]:
        kept = range(spec.run.keep_every, spec.optimizer.epochs + 1, spec.run.keep_every)
        found["asymmetry"] = {n: asymmetry(session.estimator, load(folder, at=n).model, first.x) for n in kept}
    return found


def asymmetry(estimator: Estimator, model: Dynamics, x: Tensor) -> float:
    """|J - J^T| / |J| where free phases end."""
    free = relax(model, x, estimator.free_phase())
    return round(relative_asymmetry(model, x, free.state), 4)


def measured(estimator: Estimator, problem: Problem) -> dict[str, Any]:
    """The same of one net."""
    plain = estimator.plain
    if isinstance(plain, Backprop):
        return {}
    free = relax(problem.model, problem.x, plain.free_phase())
    out: dict[str, Any] = {
        "unsettled": 1.0 - float(free.settled.double().mean()),
        "residual": float(f"{float(free.residual.mean()):.3g}"),
    }
    out["asymmetry"] = asymmetry(plain, problem.model, problem.x)
    forward = plain.T == 1 and bool(free.settled.all())
    try:
        wanted = exact_gradient(problem, forward=forward)
    except ArithmeticError as error:  # it does not settle, so there is no gradient at rest
        return out | {"no_gradient": str(error).split(". ")[0]}
    got = plain.gradient(problem.model, problem.cost, problem.x, problem.y)[1]
    out["cosines"] = cosines({name: got[p] for name, p in problem.model.named_parameters() if p in got}, wanted)
    return out


def exact_gradient(problem: Problem, schedule: Schedule = "synchronous", forward: bool = False) -> dict[str, Tensor]:
    """In float64, by name: recurrent backprop's at rest; backprop's, if rest is the net's forward pass."""
    wide = problem.double()
    exact: Estimator = Backprop() if forward else RBP(0, STEPS, stop="settled")
    phase = Phase(STEPS, schedule, stop="settled", still=1e-12)
    at = None if forward else relax(wide.model, wide.x, phase).state
    found = exact.gradient(wide.model, wide.cost, wide.x, wide.y, at)[1]
    return {name: found[p] for name, p in wide.model.named_parameters() if p in found}


def cosines(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """The cosines of gradients of the same name, where the wanted one is not zero."""
    return {
        name: round(float(torch.cosine_similarity(one.double().flatten(), wanted[name].flatten(), dim=0)), 6)
        for name, one in found.items()
        if name in wanted and bool(wanted[name].any())
    }
