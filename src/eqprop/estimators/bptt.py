"""Backpropagation through time, truncated to the last K steps  [sec:background-bptt]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from eqprop.cost import Cost
from eqprop.dynamics import Dynamics
from eqprop.estimators.base import (
    Estimator,
    Step,
    batch_mean,
    begin,
    merge,
    pull_back,
    pull_dense,
    trainable,
    transition_vjp,
)
from eqprop.relax import Phase, Relaxation, check_finite, relax, trajectory
from eqprop.state import State


@final
@dataclass(frozen=True)
class BPTT(Estimator):
    """dL/dtheta of L = l(s_T, y), through exactly the last K of the T steps  [eq:total-gradient].

    With schedule="alternating" the first T - K steps alternate and the K that are differentiated are synchronous.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.K > self.T:
            raise ValueError(
                f"BPTT cannot unroll K={self.K} steps: the free phase has only T={self.T}. Lower K or raise T."
            )

    @property
    def sign(self) -> int:
        return 1

    def gradient(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None
    ) -> tuple[Relaxation, dict[nn.Parameter, Tensor]]:
        start = relax(model, x, self.free_phase(self.T - self.K), begin(model, cost, x, y, state))
        parameters = trainable(model)
        with torch.enable_grad():
            drive = model.drive(x)
            s = start.state
            for _ in range(self.K):
                s = model.step(drive, s)
        end = relax(model, x, Phase(0, tolerance=self.tolerance, checked=False), s)
        if self.checked:
            check_finite(model, end.state, lambda: trajectory(model, x, start.state, self.K), start.steps)
        with torch.no_grad():
            nabla = pull_dense(cost, end.state, y, model)
        sums = dict(zip(parameters, pull_back(s, tuple(parameters.values()), nabla), strict=True))
        free = Relaxation(end.state, start.steps + self.K, end.residual, end.settled)
        direct = cost.direct_gradient(free.state, y, dict(model.named_parameters()))
        return free, merge(model, batch_mean(model, x, end.state, sums), direct)

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """nabla_s(t) = dL/ds_{T-t} and nabla_theta(t) = dL/dtheta_{T-t}, t = 0, ..., K-1  [eq:bptt-state]."""
        if len(free.trail) < self.K:
            raise ValueError(
                f"BPTT's process needs the last K={self.K} states before the end; the free phase kept "
                f"{len(free.trail)}. Run it with relax(..., keep={self.K})."
            )
        cost.check(free.state, y)
        with torch.no_grad():
            nabla = pull_dense(cost, free.state, y, model)
        for t in range(self.K):
            earlier, synapses = transition_vjp(model, x, free.trail[-1 - t], nabla)
            yield Step(nabla, synapses)
            nabla = earlier
