"""Jacobian homeostasis: a penalty on the asymmetry of a net, which any estimator's gradient can be given."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import Estimator, Grads, Step, trainable
from eqprop.relax import Relaxation
from eqprop.state import State, is_number, subtract


@dataclass(frozen=True)
class Homeostasis(Estimator):
    """Another estimator's gradient plus weight times that of the penalty |J - J^T|^2 / (2 n), n neurons, at s*.

    J is the Jacobian of what each neuron gets before its activation, so that symmetric weights have no penalty (of a
    transition without a known activation, of F itself). It is estimated per sample by Hutchinson's probes,
    |J e - J^T e|^2 / (2 n) with e ~ N(0, I): one product forward and one back per probe, and their derivative along
    theta. Its mean is that of (|J e|^2 - e^T J^2 e) / n (2309.02214), and unlike that it is never negative.

    base        the estimator; its T, K and schedule are these
    weight      lambda of the penalty
    probes      per mini-batch. They are drawn from a seed made of inputs and state: other ones whenever the weights
                have moved, the same in a resumed run.
    """

    T: int = field(default=0, init=False)
    K: int = field(default=1, init=False)
    base: Estimator = field(kw_only=True)
    weight: float = field(default=1.0, kw_only=True)
    probes: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("T", "K", "schedule", "stop", "tolerance", "checked"):
            object.__setattr__(self, name, getattr(self.base, name))
        super().__post_init__()
        if not is_number(self.weight) or not 0.0 <= self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight!r}; expected lambda, 0 or more, of the penalty.")
        if not isinstance(self.probes, int) or self.probes < 1:
            raise ValueError(f"probes is {self.probes!r}; expected how many to draw, 1 or more.")

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        self.base.check_serves(model, cost, x, y)

    def for_call(self, model: Dynamics) -> Estimator:
        return Homeostasis(base=self.base.for_call(model), weight=self.weight, probes=self.probes)

    def computed(self, problem: Problem, start: State) -> tuple[Relaxation, Grads]:
        free, grads = self.base.computed(problem, start)
        names = dict(problem.model.named_parameters())
        for name, g in self.penalty_gradient(problem.model, problem.x, free.state)[1].items():
            p = names[name]
            grads[p] = grads[p] + self.weight * g if p in grads else self.weight * g
        return free, grads

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        free, grads = self.base.estimate(problem, free)
        added = self.penalty_gradient(problem.model, problem.x, free.state)[1]
        return free, {name: g + self.weight * added[name] for name, g in grads.items()}

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Those of the base: the penalty has no process over time."""
        return self.base.steps(model, cost, x, y, free)

    def penalty_gradient(self, model: Dynamics, x: Tensor, s: State) -> tuple[float, dict[str, Tensor]]:
        """The penalty, as the mean over samples and probes, and its gradient by parameter."""
        learned = trainable(model)
        seen = (v.detach().cpu().contiguous().numpy().tobytes() for v in (x, *s))
        source = torch.Generator().manual_seed(functools.reduce(lambda crc, part: zlib.crc32(part, crc), seen, 0))
        lead = model.sample_dims(x)
        neurons = sum(v[(0,) * lead].numel() for v in s)
        total, grads = 0.0, {name: torch.zeros_like(p) for name, p in learned.items()}
        for _ in range(self.probes):
            probe = tuple(torch.randn(v.shape, generator=source, dtype=torch.float64).to(v) for v in s)
            with torch.enable_grad():
                odd = asymmetric_part(model, x, s, probe)
                each = torch.stack([v.square().flatten(lead).sum(-1) for v in odd]).sum(0) / (2.0 * neurons)
                mean = each.sum() / (each.shape[-1] * self.probes)  # stacked networks each have their own
                found = torch.autograd.grad(mean, list(learned.values()), allow_unused=True)
            total += float(mean.detach())
            for name, g in zip(learned, found, strict=True):
                grads[name] += 0.0 if g is None else g
        return total, grads


def asymmetric_part(model: Dynamics, x: Tensor, s: State, e: State) -> State:
    """(J - J^T) e per sample, J as of `Homeostasis`; differentiable by the parameters where gradients are recorded."""
    return subtract(*products(model, x, s, e))


def products(model: Dynamics, x: Tensor, s: State, e: State) -> tuple[State, State]:
    """J e and J^T e per sample."""
    drive = model.drive(x)
    leaves = tuple(v.detach().requires_grad_() for v in s)

    def received(at: State) -> State:
        squashes = isinstance(model, PrimitiveDynamics) and model.squashes
        return model.gradient(drive, at) if squashes else model.step(drive, at)  # type: ignore[operator]

    out = received(leaves)
    depending = [n for n, v in enumerate(out) if v.requires_grad]
    back = torch.autograd.grad(
        [out[n] for n in depending],
        leaves,
        [e[n] for n in depending],
        create_graph=torch.is_grad_enabled(),
        materialize_grads=True,
    )
    with forward_ad.dual_level():
        dual = tuple(forward_ad.make_dual(v.detach(), u) for v, u in zip(s, e, strict=True))
        ahead = [forward_ad.unpack_dual(v).tangent for v in received(dual)]
    return tuple(torch.zeros_like(b) if a is None else a for a, b in zip(ahead, back, strict=True)), back


@torch.no_grad()
def relative_asymmetry(model: Dynamics, x: Tensor, s: State, probes: int = 20) -> float:
    """|J - J^T| / |J| in Frobenius norm at s, J as of `Homeostasis`, estimated by random probes; 0 is symmetric."""
    source, odd, whole = torch.Generator().manual_seed(0), 0.0, 0.0
    for _ in range(probes):
        e = tuple(torch.randn(v.shape, generator=source, dtype=torch.float64).to(v) for v in s)
        with torch.enable_grad():
            ahead, back = products(model, x, s, e)
        odd += sum(float((a - b).detach().square().sum()) for a, b in zip(ahead, back, strict=True))
        whole += sum(float(a.detach().square().sum()) for a in ahead)
    return (odd / whole) ** 0.5 if whole else 0.0
