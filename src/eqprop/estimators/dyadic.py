"""Dyadic EP: a state and an error side by side, for any transition F."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators.base import Estimator, Step, advance, last_of, parameter_vjp, pull_back
from eqprop.relax import Relaxation, check_finite, turns
from eqprop.state import State, add, detach, subtract


@dataclass(frozen=True)
class Dyadic(Estimator):
    """dL/dtheta = (dF/dtheta)^T d_K with m_{t+1} = F(x, m_t), d_{t+1} = J(m_t)^T d_t + dl/ds(m_t), d_0 = 0.

    A state m and an error d side by side, for any F (2602.03670); the nudge -beta dl/ds with d' = -beta d gives the
    same at any beta, as the error is linear in it. Only products with J^T are needed.

    From a state at rest, K steps are the first K terms of recurrent backprop (`RBP`), exactly. The two differ while m
    still moves: RBP keeps J and dl/ds of the free state, here both follow m, so errors begun too early are forgotten.

    T, K, schedule, stop, tolerance, checked    as of `Estimator`
    """

    follows_theorem: ClassVar[bool] = False

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        end = last_of(self._pairs(problem, free), problem.model, self.checked, "step", lambda pair: pair[0])
        if self.checked:
            check_finite(problem.model, end[1], lambda: iter([end[1]]), kind="error")
        return free, parameter_vjp(problem.model, problem.x, *end)

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """d_{t+1} - d_t, and the change of (dF/dtheta)^T d."""
        cost.check(free.state, y)
        known = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        for (_, d), (m, new) in pairwise(self._pairs(Problem(model, cost, x, y), free)):
            total = parameter_vjp(model, x, m, new)
            yield Step(subtract(new, d), {name: g - known[name] for name, g in total.items()})
            known = total

    def _pairs(self, problem: Problem, free: Relaxation) -> Iterator[tuple[State, State]]:
        """(m_t, d_t), t = 0, ..., K."""
        model, m = problem.model, free.state
        with torch.no_grad():
            drive = model.drive(problem.x)
        d = tuple(torch.zeros_like(v) for v in m)
        yield m, d
        for group in turns(model, len(m), self.schedule, range(self.K)):
            with torch.no_grad():
                pull = problem.pull(m)
            with torch.enable_grad():
                leaves = tuple(v.detach().requires_grad_() for v in m)
                out = advance(model, drive, leaves, None)
            new = add(pull_back(out, leaves, d), pull)
            d = new if group is None else tuple(v if n in group else d[n] for n, v in enumerate(new))
            m = detach(out) if group is None else tuple(v if n in group else m[n] for n, v in enumerate(detach(out)))
            yield m, d
