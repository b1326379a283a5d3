"""Whether a model and a cost are analytic: the Cauchy-Riemann equations, tried at a complex state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eqprop.cost import Cost, Nudge
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import trainable
from eqprop.estimators.stand_in import complex_of, in_complex
from eqprop.relax import stepper
from eqprop.state import State

ADVICE = (
    "Holomorphic EP needs an analytic model and cost: no clip, no hard sigmoid, no max-pooling, no max, abs or "
    "comparison, |s|^2 written as s*s. Use nudging='symmetric' (--estimator symmetric) otherwise."
)
TOLERANCE = {torch.complex128: 1e-6, torch.complex64: 1e-3}
"""By how much the two gradients of an analytic function may differ: rounding; for another they differ by their size."""


def check_analytic(model: Dynamics, cost: Cost, x: Tensor, y: Tensor, s: State) -> None:
    """Raise ValueError unless Phi, a nudged step and so the cost satisfy the Cauchy-Riemann equations near s.

    A function that is analytic piece by piece passes: it is tried at one state.
    """
    names = f"{type(model).__name__} with {type(cost).__name__}"
    try:
        wrong = in_complex((model, cost), lambda: _first_wrong(model, cost, complex_of(x), complex_of(y), _near(s)))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"{names} has no step at complex states: {reason}. {ADVICE}") from error
    if wrong is not None:
        raise ValueError(f"{wrong} of {names} is not analytic. {ADVICE}")


def _near(s: State) -> State:
    """A state a little off s in every direction of the complex plane, always the same."""
    source = torch.Generator().manual_seed(0)

    def offset(layer: Tensor) -> Tensor:
        draw = torch.rand((*layer.shape, 2), generator=source, dtype=torch.float64)
        return torch.view_as_complex(0.1 * draw + 0.05).to(layer.device, layer.dtype.to_complex())

    return tuple(complex_of(layer) + offset(layer) for layer in s)


def _first_wrong(model: Dynamics, cost: Cost, x: Tensor, y: Tensor, s: State) -> str | None:
    """The first of Phi and the step that is not analytic, by name."""
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in s)
        if isinstance(model, PrimitiveDynamics):
            phi = model.primitive(x, leaves)
            if not _is_analytic(phi, (*leaves, *trainable(model).values())):
                return "The primitive"
        new = stepper(model, model.drive(x), Nudge(cost, y, 0.1))(leaves)
        # Each neuron with a weight of its own, so that errors do not cancel.
        total = sum((layer * (1.0 + v.detach())).sum() for layer, v in zip(new, leaves, strict=True))
        assert isinstance(total, Tensor), "there is a layer"
        return None if _is_analytic(total, leaves) else "The nudged step"


def _is_analytic(f: Tensor, inputs: Sequence[Tensor]) -> bool:
    """grad Im f = i grad Re f, in torch's form of a gradient, d/d Re + i d/d Im."""
    if not f.is_complex():
        return False
    real, imag = (
        torch.autograd.grad(part.sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
        for part in (f.real, f.imag)
    )
    size = max(float(g.abs().max()) for g in (*real, *imag) if g.numel())
    gap = max(float((b - 1j * a).abs().max()) for a, b in zip(real, imag, strict=True) if a.numel())
    return gap <= TOLERANCE[f.dtype] * size
