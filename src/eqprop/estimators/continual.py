"""Equilibrium propagation with continual weight updates (Ernoult et al., 2020): parameters move with the neurons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision, with_values
from eqprop.cost import Cost, Nudge, Problem, check_beta
from eqprop.dynamics import Dynamics
from eqprop.estimators.base import Estimator, Step, check_resolved, check_site, minus_sum, trainable, update
from eqprop.messages import did_you_mean
from eqprop.relax import Relaxation, check_finite, trajectory, turns
from eqprop.state import State, is_number


@final
@dataclass(frozen=True)
class ContinualEP(Estimator):
    """theta_{t+1} = theta_t + eta Delta_theta(t), s_{t+1} = F(x, s_t, theta_t) - beta dl/ds, at each step of phase two.

    Delta_theta(t) = (1/beta) (dPhi/dtheta(s_{t+1}, theta_t) - dPhi/dtheta(s_t, theta_t)) is EP's update at the
    current parameters. The gradient is minus the sum of all Delta_theta, so a step of SGD with the same rates ends
    at theta_K; until then the model's own parameters do not change. As eta -> 0 the gradient tends to EP's, with a
    difference of order eta. Any other optimizer uses it as an ordinary gradient and does not end at theta_K.

    T           free steps
    K           nudged steps, each of which updates
    beta        strength of the nudge
    schedule, stop, tolerance, checked    of the free phase, as in `Estimator`
    rates       eta: one for all parameters, or one per parameter by name
    """

    orientation: ClassVar[int] = -1

    beta: float = 0.1
    rates: float | Mapping[str, float] = field(default=0.0, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        given = self.rates.values() if isinstance(self.rates, Mapping) else (self.rates,)
        for rate in given:
            if not is_number(rate) or not math.isfinite(rate) or rate < 0:
                raise ValueError(f"ContinualEP got rate {rate!r}; expected a learning rate, 0 or more.")

    def rates_of(self, model: Dynamics) -> dict[str, float]:
        """The rate of each trainable parameter."""
        names = trainable(model)
        if not isinstance(self.rates, Mapping):
            return dict.fromkeys(names, self.rates)
        missing = [name for name in names if name not in self.rates]
        if missing:
            raise ValueError(
                f"ContinualEP has no rate for {', '.join(missing)}; got rates for {', '.join(self.rates) or 'none'}. "
                "Give every trainable parameter its optimizer's rate, or one rate for all."
            )
        known = [name for name, _ in model.named_parameters()]
        strange = next((name for name in self.rates if name not in known), None)
        if strange is not None:
            raise ValueError(
                f"ContinualEP has a rate for {strange!r}, which is no parameter of {model.title}; expected rates for "
                f"{', '.join(names)}.{did_you_mean(strange, names)}"
            )
        return {name: self.rates[name] for name in names}

    def check_serves(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor) -> None:
        super().check_serves(model, cost, x, y)
        check_site(model, cost, y)
        self.rates_of(model)

    def check_nudge(self, model: Dynamics, dtype: torch.dtype) -> None:
        check_resolved(self.beta, model, dtype)

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        return free, minus_sum(self.steps(problem.model, problem.cost, problem.x, problem.y, free))

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """Delta_s(t) and Delta_theta(t) while the parameters move, t = 0, ..., K-1."""
        cost.check(free.state, y)
        rates, nudge = self.rates_of(model), Nudge(cost, y, self.beta)
        moving = {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
        s = free.state
        visited = [s]
        for group in turns(model, len(s), self.schedule, range(self.K)):
            s, step = with_values((model,), (moving,), partial(self._advance, model, x, s, nudge, group))
            visited += [s] if self.checked else []
            with torch.no_grad():
                for name, change in step.synapses.items():
                    moving[name].add_(rates[name] * change)
            yield step
        if self.checked:
            check_finite(model, s, lambda: iter(visited), kind="nudged step")

    def _advance(
        self, model: Dynamics, x: Tensor, s: State, nudge: Nudge, group: tuple[int, ...] | None
    ) -> tuple[State, Step]:
        """A nudged step at the current parameters, and EP's update there."""
        _, new = trajectory(model, x, s, [group], nudge)
        return new, update(model, x, s, new, 1.0 / (self.beta * model.nudge_scale))
