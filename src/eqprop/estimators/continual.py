"""Equilibrium propagation with continual weight updates (Ernoult et al., 2020): parameters move with the neurons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from eqprop.autodiff import with_values
from eqprop.cost import Cost, Nudge, check_beta
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import Estimator, Step, begin, merge, trainable, transition_vjp
from eqprop.relax import Relaxation, check_finite, relax, trajectory
from eqprop.state import State, scale, subtract


@final
@dataclass(frozen=True)
class ContinualEP(Estimator):
    """theta_{t+1} = theta_t + eta Delta_theta(t), s_{t+1} = F(x, s_t, theta_t) - beta dl/ds, at each step of phase two.

    Delta_theta(t) = (1/beta) (dPhi/dtheta(s_{t+1}, theta_t) - dPhi/dtheta(s_t, theta_t)) is EP's update at the
    parameters of the moment. The gradient is minus the sum of all Delta_theta, so that a step of plain SGD with the
    same rates ends at theta_K; the model's own parameters do not move before. As eta -> 0 it is EP's, with a
    difference of order eta. An optimizer that is not plain SGD takes it as the gradient it is, and ends elsewhere.

    rates       eta: one for all parameters, or one a parameter by name
    """

    beta: float = 0.1
    rates: float | Mapping[str, float] = field(default=0.0, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        given = self.rates.values() if isinstance(self.rates, Mapping) else (self.rates,)
        for rate in given:
            if not math.isfinite(rate) or rate < 0:
                raise ValueError(f"ContinualEP got the rate {rate!r}; expected a learning rate, 0 or more.")

    @property
    def sign(self) -> int:
        return -1

    def rates_of(self, model: Dynamics) -> dict[str, float]:
        """The rate of each parameter that learns."""
        names = trainable(model)
        if not isinstance(self.rates, Mapping):
            return dict.fromkeys(names, self.rates)
        missing = [name for name in names if name not in self.rates]
        if missing:
            raise ValueError(
                f"ContinualEP has no rate for {', '.join(missing)}; it has one for {', '.join(self.rates) or 'none'}. "
                "Give every parameter that learns its optimizer's rate, or one rate for all."
            )
        return {name: self.rates[name] for name in names}

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        self.rates_of(model)

    def gradient(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, state: State | None = None
    ) -> tuple[Relaxation, dict[nn.Parameter, Tensor]]:
        free = relax(model, x, self.free_phase(), begin(model, cost, x, y, state))
        grads: dict[str, Tensor] = {}
        for step in self.steps(model, cost, x, y, free):
            for name, update in step.synapses.items():
                grads[name] = grads[name] - update if name in grads else -update
        direct = cost.direct_gradient(free.state, y, dict(model.named_parameters()))
        return free, merge(model, grads, direct)

    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Delta_s(t) and Delta_theta(t) along the moving parameters, t = 0, ..., K-1."""
        cost.check(free.state, y)
        rates, nudge = self.rates_of(model), Nudge(cost, y, self.beta)
        moving = {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
        s = free.state
        visited = [s]
        for _ in range(self.K):
            s, step = with_values((model,), (moving,), partial(self._advance, model, x, s, nudge))
            visited += [s] if self.checked else []
            with torch.no_grad():
                for name, update in step.synapses.items():
                    moving[name].add_(rates[name] * update)
            yield step
        if self.checked:
            check_finite(model, s, lambda: iter(visited), kind="nudged step")

    def _advance(self, model: Dynamics, x: Tensor, s: State, nudge: Nudge) -> tuple[State, Step]:
        """A nudged step at the parameters of the moment, and EP's update there."""
        _, new = trajectory(model, x, s, 1, nudge)
        unit = 1.0 / (self.beta * model.nudge_scale)
        moved = scale(subtract(new, s), unit)
        if isinstance(model, PrimitiveDynamics):
            contrast = model.contrast(x, new, s)
            return new, Step(moved, {name: unit * contrast[name].detach() for name in trainable(model)})
        return new, Step(moved, transition_vjp(model, x, s, moved)[1])
