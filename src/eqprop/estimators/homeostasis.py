"""Jacobian homeostasis: a penalty on the asymmetry of a net, which any estimator's gradient can be given."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

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
    size        weight of a second penalty, |J|^2 / n, J that of the step: a net whose J shrinks settles sooner
    probes      per mini-batch. They are drawn from a seed made of inputs and state: other ones whenever the weights
                have moved, the same in a resumed run.
    """

    T: int = field(default=0, init=False)
    K: int = field(default=1, init=False)
    base: Estimator = field(kw_only=True)
    weight: float = field(default=1.0, kw_only=True)
    size: float = field(default=0.0, kw_only=True)
    probes: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("T", "K", "schedule", "stop", "tolerance", "checked"):
            object.__setattr__(self, name, getattr(self.base, name))
        super().__post_init__()
        for name in ("weight", "size"):
            value = getattr(self, name)
            if not is_number(value) or not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is {value!r}; expected the weight of a penalty, 0 or more.")
        if not isinstance(self.probes, int) or self.probes < 1:
            raise ValueError(f"probes is {self.probes!r}; expected how many to draw, 1 or more.")

    @property
    def plain(self) -> Estimator:
        return self.base.plain

    def with_plain(self, plain: Estimator) -> Estimator:
        return replace(self, base=self.base.with_plain(plain))

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        self.base.check_serves(model, cost, x, y)

    def for_call(self, model: Dynamics) -> Estimator:
        return replace(self, base=self.base.for_call(model))

    def computed(self, problem: Problem, start: State) -> tuple[Relaxation, Grads]:
        free, grads = self.base.computed(problem, start)
        names = dict(problem.model.named_parameters())
        for name, g in self._added(problem, free.state).items():
            p = names[name]
            grads[p] = grads[p] + g if p in grads else g
        return free, grads

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        free, grads = self.base.estimate(problem, free)
        added = self._added(problem, free.state)
        return free, {name: g + added[name] if name in added else g for name, g in grads.items()}

    def _added(self, problem: Problem, s: State) -> dict[str, Tensor]:
        """The gradients of both penalties, times their weights."""
        total: dict[str, Tensor] = {}
        for weight, gradient in ((self.weight, self.penalty_gradient), (self.size, self.size_gradient)):
            for name, g in gradient(problem.model, problem.x, s)[1].items() if weight else ():
                total[name] = total[name] + weight * g if name in total else weight * g
        return total

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Those of the base: the penalty has no process over time."""
        return self.base.steps(model, cost, x, y, free)

    def penalty_gradient(self, model: Dynamics, x: Tensor, s: State) -> tuple[float, dict[str, Tensor]]:
        """The penalty on the asymmetry, as the mean over samples and probes, and its gradient by parameter."""
        return self._probed(model, x, s, lambda e: asymmetric_part(model, x, s, e), 0.5)

    def size_gradient(self, model: Dynamics, x: Tensor, s: State) -> tuple[float, dict[str, Tensor]]:
        """The same of |J|^2 / n, J that of the step."""
        return self._probed(model, x, s, lambda e: step_product(model, x, s, e), 1.0)

    def _probed(
        self, model: Dynamics, x: Tensor, s: State, product: Callable[[State], State], factor: float
    ) -> tuple[float, dict[str, Tensor]]:
        """The mean of factor |product(e)|^2 / n over samples and probes e, and its gradient."""
        learned = trainable(model)
        seen = (v.detach().cpu().contiguous().numpy().tobytes() for v in (x, *s))
        source = torch.Generator().manual_seed(functools.reduce(lambda crc, part: zlib.crc32(part, crc), seen, 0))
        lead = model.sample_dims(x)
        neurons = sum(v[(0,) * lead].numel() for v in s)
        total, grads = 0.0, {name: torch.zeros_like(p) for name, p in learned.items()}
        for _ in range(self.probes):
            probe = tuple(torch.randn(v.shape, generator=source, dtype=torch.float64).to(v) for v in s)
            with torch.enable_grad():
                each = torch.stack([v.square().flatten(lead).sum(-1) for v in product(probe)]).sum(0)
                # stacked networks each have their own
                mean = (factor / neurons) * each.sum() / (each.shape[-1] * self.probes)
                found = torch.autograd.grad(mean, list(learned.values()), allow_unused=True)
            total += float(mean.detach())
            for name, g in zip(learned, found, strict=True):
                grads[name] += 0.0 if g is None else g
        return total, grads


def step_product(model: Dynamics, x: Tensor, s: State, e: State) -> State:
    """J e per sample, J of the step; differentiable by the parameters where gradients are recorded."""
    with forward_ad.dual_level():
        dual = tuple(forward_ad.make_dual(v.detach(), u) for v, u in zip(s, e, strict=True))
        ahead = [forward_ad.unpack_dual(v).tangent for v in model.step(model.drive(x), dual)]
    return tuple(torch.zeros_like(v) if a is None else a for v, a in zip(s, ahead, strict=True))


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
