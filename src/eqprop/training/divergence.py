"""What went wrong in a trial that was stopped: the iteration, the layer or parameter, and what to try."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.estimators import Estimator
from eqprop.relax import NotFiniteError, Relaxation
from eqprop.state import State

EXPLODED = 1e6
"""A residual above this is an exploding state, though still finite: bounded nets have residuals of 1 at most."""

ADVICE = "Lower the learning rates (--lr), beta or eps, or take initial weights that settle (--init default)."


@dataclass(frozen=True)
class Subject:
    """One network and the mini-batch it went wrong on; `begun` is where its free phase began, None for zero."""

    model: Dynamics
    cost: Cost
    x: Tensor
    y: Tensor
    begun: State | None = None


def diagnose(subject: Subject, estimator: Estimator) -> str:
    """Run the iteration again on one network, checked, and say where it first goes wrong.

    The network is frozen with the parameters it had before that iteration, so the same thing happens again.
    """
    model = subject.model
    bad = next((name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())), None)
    if bad is not None:
        return f"The parameter {bad} is not finite. {ADVICE}"
    try:
        free, grads = replace(estimator, checked=True).gradient(
            model, subject.cost, subject.x, subject.y, subject.begun
        )
    except NotFiniteError as error:
        return str(error)
    except ArithmeticError as error:
        return f"{error} {ADVICE}"
    where = _largest_layer(model, free)
    names = {p: name for name, p in model.named_parameters()}
    for p, grad in grads.items():
        if not bool(torch.isfinite(grad).all()):
            return f"The gradient of {names.get(p, 'a parameter of the cost')} is not finite; {where}. {ADVICE}"
    return f"The state explodes: {where}, with a residual of {float(free.residual.max()):.3g}. {ADVICE}"


def _largest_layer(model: Dynamics, free: Relaxation) -> str:
    names = model.layer_names or tuple(f"s{n}" for n in range(len(free.state)))
    largest = [float(layer.abs().max()) for layer in free.state]
    worst = max(range(len(largest)), key=largest.__getitem__)
    return f"layer {names[worst]} reaches {largest[worst]:.3g}"
