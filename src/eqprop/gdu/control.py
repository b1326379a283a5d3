"""Keeping a net at rest while it learns: how near it is to no longer settling, and a cap on its weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.dynamics import Dynamics
from eqprop.estimators.base import trainable
from eqprop.gdu.lockstep import Linearised, flat, unflat
from eqprop.relax import Phase, Relaxation, relax
from eqprop.state import State, is_number

PRODUCTS = 16
"""Products with the Jacobian that a look takes."""
MOVING, FALLS = 1e-3, 0.7
"""A state with a larger residual moves, and does not settle unless as many steps more bring it below this share."""
SMALL = 1e-4
"""The length of a move by which a product is taken."""
LEAST = 0.5
"""A cap shrinks weights to no less than this share at once."""

Settle = Callable[..., Relaxation]
"""(model, x, phase) or (model, x, phase, state) -> a free phase, as `relax`."""

_RECURRENT: weakref.WeakKeyDictionary[Dynamics, tuple[str, ...]] = weakref.WeakKeyDictionary()


@in_own_precision
def radius(model: Dynamics, x: Tensor, s: State, products: int = PRODUCTS) -> float:
    """About the largest |l| over the samples, l the eigenvalues of the step's Jacobian at s: at rest if below 1.

    By the growth of a random vector over the second half of so many products, in the model's own precision: it takes
    milliseconds, where `stability` says more. An even number of products, as eigenvalues may come as pairs +-l.
    """
    product, like = _product(model, x, s), flat(s)
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(like.shape, generator=source, dtype=torch.float64).to(like)
    grown = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for n in range(products):
        rows = product(rows)
        size = rows.norm(dim=1, keepdim=True)
        rows = rows / size.clamp(min=torch.finfo(rows.dtype).tiny)
        if n >= products // 2:
            grown += size[:, 0].double().clamp(min=1e-300).log()
    return float((grown / (products - products // 2)).exp().max())


def _product(model: Dynamics, x: Tensor, s: State) -> Callable[[Tensor], Tensor]:
    """J v, rows of unit length: the difference of two steps, which nets of connections give without cancellation."""
    with torch.no_grad():
        around = model.departure(model.drive(x), s)
    if around is None:
        return Linearised(model, x, s).on_rows
    none = [None] * len(s)

    @torch.no_grad()
    def product(rows: Tensor) -> Tensor:
        return flat(around(unflat(SMALL * rows, s), none)) / SMALL

    return product


def recurrent(model: Dynamics, x: Tensor) -> tuple[str, ...]:
    """The weights that neurons hear each other by: trained matrices that act on a step where the input is zero."""
    found = _RECURRENT.get(model)
    if found is not None:
        return found
    weights = {name: p for name, p in trainable(model).items() if p.dim() > 1}
    source = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        zero = torch.zeros_like(x[:1])
        s = tuple([torch.rand(v.shape, generator=source, dtype=torch.float64).to(v) for v in model.init_state(zero)])
        total = torch.stack([layer.sum() for layer in model.step(model.drive(zero), s)]).sum()
        grads = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    names = tuple([n for n, g in zip(weights, grads, strict=True) if g is not None and bool(g.any())])
    _RECURRENT[model] = names
    return names


def keep_at_rest(model: Dynamics, x: Tensor, radius_below: float = 0.95, T: int = 100) -> float:
    """Cap a net's weights where its free phase would soon cease to settle; call it every some steps of training.

        for n, (x, y) in enumerate(batches):
            ...
            if n % 50 == 0:
                eqprop.keep_at_rest(model, x[:8])

    model           any model whose step can be differentiated
    x               a few samples
    radius_below    the largest |l| allowed of the step's Jacobian at the free state; above it the weights between
                    neurons are scaled down, those of the input are not. A net below it stays as it is, bit for bit.
    T               free steps to the state where it is measured

    Returns the radius measured, before the cap. `train` does it by itself with --keep-at-rest radius=0.95.
    """
    if not is_number(radius_below) or not radius_below > 0.0:
        raise ValueError(f"radius_below is {radius_below!r}; expected a number above 0, such as 0.95.")
    return capped(model, x, Phase(T, checked=False), radius_below)


def capped(
    model: Dynamics,
    x: Tensor,
    phase: Phase,
    most: float | None,
    settle: Settle = relax,
) -> float:
    """The radius where a free phase ends; where it is above `most`, weights between neurons are scaled down.

    A state that goes round is linearised at the middle of its way, as saturated neurons hide what drives it; at least
    1 is said of one that does not settle. `settle` runs the free phase.
    """
    free = settle(model, x, phase)
    found, moving = radius(model, x, free.state), float(free.residual.max())
    if moving > MOVING:
        longer = replace(phase, T=max(phase.T, 2 * PRODUCTS))
        if not float(settle(model, x, longer, free.state).residual.max()) < FALLS * moving:
            on = relax(model, x, longer, free.state, keep=2 * PRODUCTS)
            middle = tuple([torch.stack(layer).mean(0) for layer in zip(*on.trail, strict=True)])
            found = max(found, radius(model, x, middle), 1.0)
    if most is not None and not found <= most:
        # Of a step (1 - eps) s + eps f(s) only f shrinks with the weights.
        leak = 1.0 - model.nudge_scale
        factor = (most - leak) / (found - leak) if most > leak else most / found
        with torch.no_grad():
            for name in recurrent(model, x):
                model.get_parameter(name).mul_(max(factor, LEAST) if factor == factor else LEAST)
    return found
