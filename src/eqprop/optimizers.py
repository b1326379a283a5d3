"""Optimizers that torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """w <- (1 - lr weight_decay) w - lr sign(b1 m + (1 - b1) g), m <- b2 m + (1 - b2) g  (2302.06675).

    It takes the signs of gradients alone: how far a layer's update has shrunk on its way back does not matter, and
    there is no epsilon that could drown it. Rates are about a tenth of Adam's.

    params          parameters, or groups of them
    lr              learning rate
    betas           b1 and b2
    weight_decay    share of the weights that a step takes away, per learning rate
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas is {betas}; expected two numbers from 0 to below 1, such as (0.9, 0.99).")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure does."""
        loss = _called(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                kept: Tensor = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_((first * kept + (1.0 - first) * p.grad).sign_(), alpha=-group["lr"])
                kept.lerp_(p.grad, 1.0 - second)
        return loss


class Bop(torch.optim.Optimizer):
    """Weights of two values: m <- (1 - lr) m + lr g, and w <- -w where m has the sign of w and |m| > threshold.

    A weight is -a or a, with a the mean size of the first weights of its kind: it turns once its low-passed gradient
    asks for it (1906.02107; with EP in 2103.08953). No weight is kept in full beside it. Parameters with one dimension,
    biases, are moved by -lr g.

    params      parameters, or groups of them
    lr          of weights how fast the low-pass follows; of biases the learning rate
    threshold   that a low-passed gradient must exceed
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-4, threshold: float = 1e-6) -> None:
        if not 0.0 <= threshold < float("inf"):
            raise ValueError(f"threshold is {threshold!r}; expected a number from 0 on, such as 1e-6.")
        super().__init__(params, {"lr": lr, "threshold": threshold})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the first makes weights binary. Returns what the closure does."""
        loss = _called(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() < 2:
                    p.add_(p.grad, alpha=-group["lr"])
                    continue
                state = self.state[p]
                if not state:
                    state["low_pass"] = torch.zeros_like(p)
                    p.copy_(torch.where(p < 0.0, -p.abs().mean(), p.abs().mean()))
                kept: Tensor = state["low_pass"].lerp_(p.grad, group["lr"])
                p.mul_(torch.where(kept * p.sign() > group["threshold"], -1.0, 1.0))
        return loss


def _called(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step returns, with gradients recorded; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "Bop": Bop,
    "Lion": Lion,
}
"""By name, beside those of torch.optim."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """An optimizer by name, of torch or of here."""
    found: type[torch.optim.Optimizer] = OPTIMIZERS.get(name) or getattr(torch.optim, name)
    return found


def drowned(optimizer: torch.optim.Optimizer, names: dict[int, str], share: float = 0.1) -> list[tuple[str, float]]:
    """The parameters whose gradients the optimizer's epsilon holds back, with their sizes, the smallest first.

    Adam and its kin divide by the root of a mean square that they keep; where their epsilon is above `share` of its
    own root mean square, the parameter moves less than its rate says. `names` are by id of the parameter.
    """
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = optimizer.state.get(p, {})
            squares, steps = kept.get("exp_avg_sq"), float(kept.get("step", 0.0))
            if squares is None or not steps or not group.get("eps"):
                continue
            size = float((squares.double().mean() / (1.0 - group["betas"][1] ** steps)).sqrt())
            if 0.0 < size < group["eps"] / share:
                found.append((names.get(id(p), "a parameter"), size))
    return sorted(found, key=lambda each: each[1])
