"""What the gradient estimators share: one sign, one way to fill `.grad`, one form of their per-step processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.relax import Phase, Relaxation, Schedule, Stop, prepare
from eqprop.state import State, subtract


class Step(NamedTuple):
    """One time step of a process: per sample for the neurons, batch mean for the synapses."""

    neurons: State
    synapses: dict[str, Tensor]


@dataclass(frozen=True)
class Processes:
    """An estimator's processes over t = 0, ..., K-1: (K, B, ...) a layer, (K, ...) a parameter.

    EP gives its updates Delta, BPTT and RBP their gradients nabla; Delta stands against -nabla. `direct` is the
    term dl/dtheta of a cost that depends on the parameters  [sec:index-shift], in the sign of the process.
    """

    neurons: State
    synapses: dict[str, Tensor]
    direct: dict[str, Tensor]


@dataclass(frozen=True)
class Estimator(ABC):
    """A way to compute dL/dtheta: T free steps, then K more of its own kind.

    Frozen, printable, comparable. `schedule`, `stop` and `tolerance` are those of the free phase (see
    `eqprop.relax.Phase`). `checked=False` leaves out the checks that read results back from the device; the
    caller then looks for NaN itself.
    """

    T: int
    K: int
    schedule: Schedule = "synchronous"
    stop: Stop = "never"
    tolerance: float | None = None
    checked: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.T, int) or self.T < 0:
            raise ValueError(f"{name} got T={self.T!r}; expected a number of free steps, 0 or more.")
        if not isinstance(self.K, int) or self.K < 1:
            raise ValueError(f"{name} got K={self.K!r}; expected a number of steps, 1 or more.")
        self.free_phase()

    def free_phase(self, T: int | None = None) -> Phase:
        return Phase(self.T if T is None else T, self.schedule, self.stop, self.tolerance, checked=self.checked)

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        """Raise ValueError, in words, if this estimator cannot serve the model or the cost. Most serve every one."""

    @abstractmethod
    def gradient(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None
    ) -> tuple[Relaxation, dict[nn.Parameter, Tensor]]:
        """The free phase and the batch mean of dL/dtheta by parameter, leaving `.grad` alone."""

    @abstractmethod
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """The K steps of the process one at a time, from the end of a free phase that kept its last K states."""

    @property
    @abstractmethod
    def sign(self) -> int:
        """+1 if the process adds up to dL/dtheta, -1 if to its negative."""

    def backward(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None) -> Relaxation:
        """Add the batch-mean dL/dtheta to `.grad`; return the free phase."""
        free, grads = self.gradient(model, cost, x, y, state)
        add_to_grad(grads)
        return free

    def processes(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Processes:
        """All K steps at once, from a free phase run with `keep=K` (memory grows with K)."""
        taken = list(self.steps(model, cost, x, y, free))
        neurons = tuple(torch.stack(layer) for layer in zip(*(step.neurons for step in taken), strict=True))
        synapses = {name: torch.stack([step.synapses[name] for step in taken]) for name in taken[0].synapses}
        names = {p: name for name, p in model.named_parameters()}
        direct = cost.direct_gradient(free.state, y, dict(model.named_parameters()))
        return Processes(neurons, synapses, {names[p]: self.sign * g for p, g in direct.items() if p in names})


def add_to_grad(grads: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, grad in grads.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def difference(a: Step, b: Step) -> Step:
    return Step(subtract(a.neurons, b.neurons), {name: g - b.synapses[name] for name, g in a.synapses.items()})


def begin(model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None) -> State:
    """The state to start from, with x, y and it checked before the first step and not after the last."""
    s = prepare(model, x, state, None)
    cost.check(s, y)
    return s


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def merge(
    model: Dynamics, grads: Mapping[str, Tensor], direct: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Gradients by parameter: those through the dynamics and the cost's direct term."""
    out = {p: grads[name] for name, p in trainable(model).items() if name in grads}
    for p, g in direct.items():
        if p.requires_grad:
            out[p] = out[p] + g if p in out else g
    return out


def transition_vjp(model: Dynamics, x: Tensor, s: State, v: State) -> tuple[State, dict[str, Tensor]]:
    """(dF/ds)^T v per sample, and the batch mean of (dF/dtheta)^T v  [eq:bptt-state, eq:bptt-param]."""
    parameters = trainable(model)
    with torch.enable_grad():
        leaves = tuple(layer.detach().requires_grad_() for layer in s)
        out = model.step(model.drive(x), leaves)
        grads = pull_back(out, (*leaves, *parameters.values()), v)
    synapses = batch_mean(model, x, s, dict(zip(parameters, grads[len(s) :], strict=True)))
    return grads[: len(s)], synapses


def pull_back(out: State, inputs: Sequence[Tensor], v: State, retain_graph: bool = False) -> tuple[Tensor, ...]:
    """(d out / d inputs)^T v, zero where an output does not depend on any input.

    Without conjugation, so that it is analytic where the state is complex and the function is.
    """
    depending = [n for n, layer in enumerate(out) if layer.requires_grad]
    if not depending or not inputs:
        return tuple(torch.zeros_like(w) for w in inputs)
    grads = torch.autograd.grad(
        [out[n] for n in depending],
        inputs,
        [v[n].conj() for n in depending],
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return tuple(g.conj().resolve_conj() for g in grads)


def batch_mean(model: Dynamics, x: Tensor, s: State, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    samples = s[0].shape[model.sample_dims(x) - 1]
    return {name: g / samples for name, g in sums.items()}


def pull_dense(cost: Cost, s: State, y: Tensor, model: Dynamics) -> State:
    """dl/ds per sample with zeros for the layers the cost does not see."""
    pull = cost.pull(s, y, dict(model.named_parameters()))
    return tuple(torch.zeros_like(v) if g is None else g for v, g in zip(s, pull, strict=True))
