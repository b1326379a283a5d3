"""Backpropagation through time, truncated to the last K steps  [sec:background-bptt]; and through one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators.base import (
    Estimator,
    Grads,
    Step,
    advance,
    batch_mean,
    merge,
    pull_back,
    trainable,
    transition_vjp,
)
from eqprop.relax import Phase, Relaxation, check_finite, relax, trajectory, turns
from eqprop.state import State, detach


@final
@dataclass(frozen=True)
class BPTT(Estimator):
    """dL/dtheta of L = l(s_T, y), through exactly the last K of the T steps  [eq:total-gradient].

    With schedule="alternating" the first T - K steps alternate; the K differentiated steps are synchronous.
    With "sweeps" all T updates are in turn and the last K of them are differentiated.

    T           free steps
    K           how many of them, the last, are differentiated
    schedule, stop, tolerance, checked    of the free phase, as in `Estimator`
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.K > self.T:
            raise ValueError(
                f"BPTT cannot unroll K={self.K} steps: the free phase has only T={self.T}. Lower K or raise T."
            )

    @property
    def free_steps(self) -> int:
        return self.T - self.K

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        model, x, parameters = problem.model, problem.x, trainable(problem.model)
        order = turns(model, len(free.state), self.schedule, range(-self.K, 0))
        with torch.enable_grad():
            drive = model.drive(x)
            s = free.state
            for group in order:
                s = advance(model, drive, s, group)
        end = relax(model, x, Phase(0, tolerance=self.tolerance, checked=False), s)
        if self.checked:
            check_finite(model, end.state, lambda: trajectory(model, x, free.state, order), free.steps)
        with torch.no_grad():
            nabla = problem.pull(end.state)
        sums = dict(zip(parameters, pull_back(s, tuple(parameters.values()), nabla), strict=True))
        whole = Relaxation(end.state, free.steps + self.K, end.residual, end.settled)
        return whole, batch_mean(model, x, end.state, sums)

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """nabla_s(t) = dL/ds_{T-t} and nabla_theta(t) = dL/dtheta_{T-t}, t = 0, ..., K-1  [eq:bptt-state].

        In sweeps nabla_s(t) is that of the layers which update T - t changed, and zero for the others.
        """
        if len(free.trail) < self.K:
            raise ValueError(
                f"The free phase kept {len(free.trail)} states; BPTT's process needs the last K={self.K} before the "
                f"end. Run it with relax(..., keep={self.K})."
            )
        cost.check(free.state, y)
        with torch.no_grad():
            nabla = Problem(model, cost, x, y).pull(free.state)
        order = turns(model, len(free.state), self.schedule, range(-1, -1 - self.K, -1))
        for t, group in enumerate(order):
            earlier, synapses = transition_vjp(model, x, free.trail[-1 - t], nabla, group)
            yield Step(_of(nabla, group), synapses)
            nabla = earlier


@final
@dataclass(frozen=True)
class Backprop(Estimator):
    """dL/dtheta of the feed-forward net with the same weights, L = l(s, y), s = `Dynamics.feedforward`.

    The yardstick beside a net that settles: the same connections, activations and pooling, passed once. There is no
    time in it: T and K are 1, and every sample counts as settled.
    """

    T: int = 1
    K: int = 1

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            model.feedforward(x)

    def begin(self, problem: Problem, state: State | None = None) -> State:
        """A pass begins nowhere: the given state is not used."""
        return super().begin(problem)

    @in_own_precision
    def computed(self, problem: Problem, start: State) -> tuple[Relaxation, Grads]:
        with torch.enable_grad():
            passed = problem.model.feedforward(problem.x)
        free = _at_rest(problem.model, problem.x, detach(passed))
        if self.checked:
            self._check_values(problem, free.state)
        grads = self._through(problem, passed, free)
        return free, merge(problem.model, grads, problem.direct_gradient(free.state))

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        with torch.enable_grad():
            passed = problem.model.feedforward(problem.x)
        free = _at_rest(problem.model, problem.x, detach(passed))
        return free, self._through(problem, passed, free)

    def _through(self, problem: Problem, passed: State, free: Relaxation) -> dict[str, Tensor]:
        parameters = trainable(problem.model)
        with torch.no_grad():
            nabla = problem.pull(free.state)
        sums = dict(zip(parameters, pull_back(passed, tuple(parameters.values()), nabla), strict=True))
        return batch_mean(problem.model, problem.x, free.state, sums)

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        raise ValueError("Backprop passes the net once and has no process over time. Compare with BPTT.")


def _at_rest(model: Dynamics, x: Tensor, s: State) -> Relaxation:
    samples = x.shape[: model.sample_dims(x)]
    return Relaxation(s, 1, s[0].new_zeros(samples), torch.ones(samples, dtype=torch.bool, device=x.device))


def _of(nabla: State, group: tuple[int, ...] | None) -> State:
    if group is None:
        return nabla
    return tuple(v if n in group else torch.zeros_like(v) for n, v in enumerate(nabla))
