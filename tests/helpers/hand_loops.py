"""EP written by hand with autograd, as a user would without the library: the naive twin of models from functions.

A Hopfield net of three layers, in the three forms a model may be given in. Nothing here comes from eqprop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import grad

Theta = Mapping[str, Tensor]
Layers = Sequence[Tensor]
EPS = 0.2


def clip(v: Tensor) -> Tensor:
    return v.clamp(0.0, 1.0)


def energy(x: Tensor, s: Layers, theta: Theta) -> Tensor:
    r0, r1, r2 = s
    leak = 0.5 * (r0 * r0).sum(-1) + 0.5 * (r1 * r1).sum(-1) + 0.5 * (r2 * r2).sum(-1)
    return leak - coupling(x, s, theta)


def coupling(x: Tensor, s: Layers, theta: Theta) -> Tensor:
    """Also a primitive function: its slope, squashed, is the next state of a prototypical net."""
    r0, r1, r2 = s
    pairs = (r0 * (r1 @ theta["W01"].T)).sum(-1) + (r1 * (r2 @ theta["W12"].T)).sum(-1)
    return pairs + (r2 * (x @ theta["W23"].T)).sum(-1) + (r2 * theta["b2"]).sum(-1)


def transition(x: Tensor, s: Layers, theta: Theta) -> tuple[Tensor, ...]:
    r0, r1, r2 = s
    return (
        torch.tanh(r1 @ theta["W01"].T),
        torch.tanh(r2 @ theta["W12"].T + r0 @ theta["W01"]),
        torch.tanh(x @ theta["W23"].T + r1 @ theta["W12"] + theta["b2"]),
    )


class Given(NamedTuple):
    """A net's weights and a mini-batch, with how long to relax."""

    theta: Theta
    x: Tensor
    y: Tensor
    T: int
    K: int
    beta: float

    @property
    def zeros(self) -> list[Tensor]:
        sizes = (len(self.theta["W01"]), len(self.theta["W12"]), len(self.theta["W23"]))
        return [torch.zeros(len(self.x), n, dtype=self.x.dtype) for n in sizes]

    def cost(self, s: Layers) -> Tensor:
        return 0.5 * ((s[0] - self.y) ** 2).sum(-1)


def given(sizes: tuple[int, int, int, int], T: int, K: int, dtype: torch.dtype, batch: int = 20) -> Given:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=source, dtype=torch.float64) - 0.5).to(dtype)

    shapes = {"W01": sizes[:2], "W12": sizes[1:3], "W23": sizes[2:]}
    theta = {name: draw(*shape) * 2 * (6 / sum(shape)) ** 0.5 for name, shape in shapes.items()} | {
        "b2": draw(sizes[2])
    }
    learned = {name: p.requires_grad_() for name, p in theta.items()}
    return Given(learned, draw(batch, sizes[3]) + 0.5, draw(batch, sizes[0]) + 0.5, T, K, 0.5)


def by_energy(g: Given) -> dict[str, Tensor]:
    def settle(s: Layers, steps: int, beta: float) -> Layers:
        for _ in range(steps):
            s = [v.detach().requires_grad_() for v in s]
            total = energy(g.x, s, g.theta)
            if beta:
                total = total + beta * g.cost(s)
            slope = grad(total.sum(), s)
            s = [clip(v - EPS * d).detach() for v, d in zip(s, slope, strict=True)]
        return s

    free = settle(g.zeros, g.T, 0.0)
    nudged = settle(free, g.K, g.beta)
    change = energy(g.x, nudged, g.theta) - energy(g.x, free, g.theta)
    return by_name(g, grad(change.mean() / g.beta, list(g.theta.values())))


def by_primitive(g: Given) -> dict[str, Tensor]:
    def settle(s: Layers, steps: int, beta: float) -> Layers:
        for _ in range(steps):
            s = [v.detach().requires_grad_() for v in s]
            new = [torch.tanh(d) for d in grad(coupling(g.x, s, g.theta).sum(), s)]
            if beta:
                (pull,) = grad(g.cost(s).sum(), s[:1])
                new[0] = new[0] - beta * pull
            s = [v.detach() for v in new]
        return s

    free = settle(g.zeros, g.T, 0.0)
    nudged = settle(free, g.K, g.beta)
    change = coupling(g.x, free, g.theta) - coupling(g.x, nudged, g.theta)
    return by_name(g, grad(change.mean() / g.beta, list(g.theta.values())))


def by_transition(g: Given) -> dict[str, Tensor]:
    """The updates of every step, (1/beta) (dF/dtheta)^T (s_{t+1} - s_t), summed."""
    s: Layers = g.zeros
    with torch.no_grad():
        for _ in range(g.T):
            s = transition(g.x, s, g.theta)
    total = [torch.zeros_like(p) for p in g.theta.values()]
    for _ in range(g.K):
        out = transition(g.x, s, g.theta)
        leaf = s[0].detach().requires_grad_()
        (pull,) = grad(g.cost((leaf,)).sum(), (leaf,))
        new = [out[0].detach() - g.beta * pull, *(v.detach() for v in out[1:])]
        moved = [b - a for a, b in zip(s, new, strict=True)]
        found = grad(out, list(g.theta.values()), moved)
        total = [t - u / (g.beta * len(g.x)) for t, u in zip(total, found, strict=True)]
        s = new
    return by_name(g, total)


def by_name(g: Given, found: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(g.theta, found, strict=True))


LOOPS: dict[str, Callable[[Given], dict[str, Tensor]]] = {
    "energy": by_energy,
    "primitive": by_primitive,
    "transition": by_transition,
}
