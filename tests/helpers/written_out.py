"""Every estimator as a loop over plain functions, in every schedule: what an estimator's contract is checked against.

A `Net` gives the same model twice: as an eqprop model, and as a step and a Phi written by hand with their derivatives.
The loops know only the latter. They record graphs of a step's own formula and call no derivative of the library.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

from eqprop import BPTT, EP, RBP, ContinualEP, Dynamics, Estimator, HolomorphicEP

Theta = Mapping[str, Tensor]
Layers = tuple[Tensor, ...]
Slope = Callable[[Tensor, Layers, Theta], Layers]
Groups = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Net:
    """A model and the formulas it stands for.

    slope       dPhi/ds, or F itself without a primitive
    phi         one value per sample; None without a primitive
    squash      sigma around the slope       inside      whether the nudge enters sigma's argument
    eps         the nudge's factor           groups      of a sweep, in the order of the free phase
    """

    model: Dynamics
    slope: Slope
    phi: Callable[[Tensor, Layers, Theta], Tensor] | None
    groups: Groups
    squash: Callable[[Tensor], Tensor] | None = None
    inside: bool = False
    eps: float = 1.0

    def step(self, x: Tensor, s: Layers, theta: Theta, push: Tensor | None = None) -> Layers:
        """F(x, s), with a push on the output."""
        new = list(self.slope(x, s, theta))
        if push is not None and self.inside:
            new[0] = new[0] + push
        if self.squash is not None:
            new = [self.squash(v) for v in new]
        if push is not None and not self.inside:
            new[0] = new[0] + push
        return tuple(new)

    @property
    def theta(self) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}


@dataclass(frozen=True)
class Task:
    """What a loop is given: l = 1/2 |s0 - y|^2."""

    net: Net
    x: Tensor
    y: Tensor

    @property
    def zeros(self) -> Layers:
        return tuple(torch.zeros_like(layer) for layer in self.net.model.init_state(self.x))


def some(new: Layers, old: Layers, group: Sequence[int]) -> Layers:
    return tuple(new[n] if n in group else old[n] for n in range(len(old)))


def free_groups(estimator: Estimator, net: Net, layers: int) -> list[Sequence[int]]:
    """What each of the T free updates changes."""
    T = estimator.T
    if estimator.schedule == "alternating":
        return [range((T - 1 - t) % 2, layers, 2) for t in range(T)]
    if estimator.schedule == "synchronous":
        return [range(layers)] * T
    return [net.groups[(t - T) % len(net.groups)] for t in range(T)]


def nudged_groups(estimator: Estimator, net: Net, layers: int) -> list[Sequence[int]]:
    """What each of the K nudged updates changes."""
    if estimator.schedule not in ("sweeps", "sweeps-same"):
        return [range(layers)] * estimator.K
    order = net.groups[::-1] if estimator.schedule == "sweeps" else net.groups
    return [order[t % len(order)] for t in range(estimator.K)]


@torch.no_grad()
def settle(task: Task, theta: Theta, updates: Sequence[Sequence[int]]) -> Layers:
    s = task.zeros
    for group in updates:
        s = some(task.net.step(task.x, s, theta), s, group)
    return s


@torch.no_grad()
def nudged(task: Task, theta: Theta, s: Layers, beta: complex, updates: Sequence[Sequence[int]]) -> Iterator[Layers]:
    """Every state of a nudged phase, the first included."""
    yield s
    for group in updates:
        push = -beta * task.net.eps * (s[0] - task.y)
        s = some(task.net.step(task.x, s, theta, push), s, group)
        yield s


def by_theta(value: Tensor, theta: dict[str, Tensor]) -> dict[str, Tensor]:
    found = grad(value, list(theta.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(theta, found, strict=True))


def update(task: Task, theta: dict[str, Tensor], before: Layers, after: Layers) -> dict[str, Tensor]:
    """dPhi/dtheta after less before, or (dF/dtheta)^T (after - before); the mean over samples."""
    net, x = task.net, task.x
    if net.phi is not None:
        return by_theta((net.phi(x, after, theta) - net.phi(x, before, theta)).mean(), theta)
    moved = net.step(x, before, theta)
    size = sum((f * (b - a)).sum() for f, a, b in zip(moved, before, after, strict=True))
    assert isinstance(size, Tensor)
    return by_theta(size / len(x), theta)


def total(parts: Sequence[Mapping[str, Tensor]], factor: float) -> dict[str, Tensor]:
    return {name: factor * torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def sum_of_updates(task: Task, estimator: Any, beta: float) -> dict[str, Tensor]:
    theta = task.net.theta
    free = settle(task, theta, free_groups(estimator, task.net, len(task.zeros)))
    states = list(nudged(task, theta, free, beta, nudged_groups(estimator, task.net, len(free))))
    moves = [update(task, theta, a, b) for a, b in pairwise(states)]
    return total(moves, -1.0 / (beta * task.net.eps))


def one_sided(task: Task, estimator: Any) -> dict[str, Tensor]:
    return sum_of_updates(task, estimator, estimator.beta)


def symmetric(task: Task, estimator: Any) -> dict[str, Tensor]:
    return total([sum_of_updates(task, estimator, sign * estimator.beta) for sign in (1.0, -1.0)], 0.5)


def continual(task: Task, estimator: Any) -> dict[str, Tensor]:
    net, theta = task.net, task.net.theta
    s = settle(task, theta, free_groups(estimator, net, len(task.zeros)))
    changes = []
    for group in nudged_groups(estimator, net, len(s)):
        *_, new = nudged(task, theta, s, estimator.beta, [group])
        found = update(task, theta, s, new)
        changes.append({name: g / (estimator.beta * net.eps) for name, g in found.items()})
        theta = {n: (p.detach() + estimator.rates * changes[-1][n]).requires_grad_() for n, p in theta.items()}
        s = new
    return total(changes, -1.0)


def holomorphic(task: Task, estimator: Any) -> dict[str, Tensor]:
    """The circle's N points one by one, those below the real axis too."""
    net = task.net
    theta = {name: p.detach().to(torch.complex128).requires_grad_() for name, p in net.theta.items()}
    inside = Task(net, task.x.to(torch.complex128), task.y.to(torch.complex128))
    free = settle(task, net.theta, free_groups(estimator, net, len(task.zeros)))
    s = tuple(layer.to(torch.complex128) for layer in free)
    parts = []
    for k in range(estimator.points):
        beta = estimator.beta * cmath.exp(2j * cmath.pi * k / estimator.points)
        states = list(nudged(inside, theta, s, beta, nudged_groups(estimator, net, len(s))))
        for a, b in pairwise(states):
            # torch conjugates the derivative of an analytic function; and the value must be real, so Re is taken.
            found = complex_update(inside, theta, a, b)
            parts.append({name: (g / (beta * net.eps)).real for name, g in found.items()})
    return total(parts, -1.0 / estimator.points)


def complex_update(task: Task, theta: dict[str, Tensor], before: Layers, after: Layers) -> dict[str, Tensor]:
    net, x = task.net, task.x
    if net.phi is not None:
        value = (net.phi(x, after, theta) - net.phi(x, before, theta)).mean()
    else:
        moved = net.step(x, before, theta)
        value = sum((f * (b - a)).sum() for f, a, b in zip(moved, before, after, strict=True)) / len(x)
    return {name: g.conj() for name, g in by_theta(value.real, theta).items()}


def through_time(task: Task, estimator: Any) -> dict[str, Tensor]:
    net, theta, T, K = task.net, task.net.theta, estimator.T, estimator.K
    layers = len(task.zeros)
    updates = free_groups(estimator, net, layers)
    if estimator.schedule == "alternating":  # the differentiated steps are synchronous
        updates = [range((T - K - 1 - t) % 2, layers, 2) for t in range(T - K)] + [range(layers)] * K
    s = settle(task, theta, updates[: T - K])
    for group in updates[T - K :]:
        s = some(net.step(task.x, s, theta), s, group)
    return by_theta(0.5 * (s[0] - task.y).square().sum() / len(task.x), theta)


def recurrent(task: Task, estimator: Any) -> dict[str, Tensor]:
    net, theta = task.net, task.net.theta
    free = settle(task, theta, free_groups(estimator, net, len(task.zeros)))
    leaves = tuple(layer.clone().requires_grad_() for layer in free)
    out = net.step(task.x, leaves, theta)
    adjoint: Layers = (free[0] - task.y, *(torch.zeros_like(layer) for layer in free[1:]))
    summed = adjoint
    for _ in range(estimator.K - 1):
        adjoint = grad(out, leaves, adjoint, retain_graph=True, allow_unused=True, materialize_grads=True)
        summed = tuple(a + b for a, b in zip(summed, adjoint, strict=True))
    found = grad(out, list(theta.values()), summed, allow_unused=True, materialize_grads=True)
    return {name: g / len(task.x) for name, g in zip(theta, found, strict=True)}


Loop = Callable[[Task, Any], dict[str, Tensor]]
T, K, BETA = 8, 5, 0.3
ESTIMATORS: dict[str, tuple[Callable[..., Estimator], Loop]] = {
    "EP": (lambda **o: EP(T, K, BETA, **o), one_sided),
    "EP, symmetric": (lambda **o: EP(T, K, BETA, nudging="symmetric", **o), symmetric),
    "EP, one phase after the other": (
        lambda **o: EP(T, K, BETA, nudging="symmetric", side_by_side=False, **o),
        symmetric,
    ),
    "EP, negative": (lambda **o: EP(T, K, BETA, nudging="random-sign", **o).with_sign(-1), one_sided),
    "continual EP": (lambda **o: ContinualEP(T, K, BETA, rates=0.05, **o), continual),
    "holomorphic EP": (lambda **o: HolomorphicEP(T, K, BETA, points=3, **o), holomorphic),
    "BPTT": (lambda **o: BPTT(T, K, **o), through_time),
    "RBP": (lambda **o: RBP(T, K, checked=False, **o), recurrent),
}
"""How to make each estimator, and the loop it stands for."""
