"""EP in the limit beta -> 0, taken exactly  [lemma:ep]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import Step, trainable, transition_vjp
from eqprop.relax import Relaxation, Schedule, turns
from eqprop.state import State, subtract


def limit_steps(
    model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation, K: int, schedule: Schedule = "synchronous"
) -> Iterator[Step]:
    """Delta_s(t) and Delta_theta(t) in the limit beta -> 0, t = 0, ..., K-1  [lemma:ep].

    The limit is exact, without finite differences: forward-mode differentiation of the second phase along beta at
    beta = 0. The state evolves as in the free phase and carries its tangent d s_t / d beta.
    """
    cost.check(free.state, y)
    s = free.state
    tangent = tuple(torch.zeros_like(layer) for layer in s)
    for group in turns(model, len(s), schedule, range(K)):
        new, new_tangent = _advance(Problem(model, cost, x, y), s, tangent, group)
        moved = subtract(new_tangent, tangent)
        if isinstance(model, PrimitiveDynamics):
            synapses = _contrast_tangent(model, x, (new, new_tangent), (s, tangent))
        else:
            _, synapses = transition_vjp(model, x, s, moved)
        yield Step(moved, synapses)
        s, tangent = new, new_tangent


@torch.no_grad()
def _advance(problem: Problem, s: State, tangent: State, group: tuple[int, ...] | None) -> tuple[State, State]:
    """F(x, s) and its derivative along beta: J tangent - dl/ds, squash and projection included.

    The nudge is passed to the step with value 0 and tangent -dl/ds, so it is differentiated wherever the model
    applies it.
    """
    model, pull = problem.model, problem.pull(s)
    with forward_ad.dual_level():
        dual = tuple(forward_ad.make_dual(v, d) for v, d in zip(s, tangent, strict=True))
        push = tuple(forward_ad.make_dual(torch.zeros_like(p), -p) for p in pull)
        drive, layers = model.drive(problem.x), range(len(s)) if group is None else group
        out = [forward_ad.unpack_dual(v) for v in model.group_step(drive, dual, layers, push)]
        new = tuple(v.primal.detach().clone() for v in out)
        moved = tuple(torch.zeros_like(v.primal) if v.tangent is None else v.tangent.detach().clone() for v in out)
    return new, moved


def _contrast_tangent(
    model: PrimitiveDynamics, x: Tensor, plus: tuple[State, State], minus: tuple[State, State]
) -> dict[str, Tensor]:
    """The derivative along beta of the parameter contrast between two states with their tangents.

    In the energy-based setting the tangents, and so the result, are along beta * eps, like the updates.
    """
    learned = trainable(model)
    with forward_ad.dual_level():
        a, b = (tuple(forward_ad.make_dual(v, d) for v, d in zip(*pair, strict=True)) for pair in (plus, minus))
        contrast = {name: forward_ad.unpack_dual(g) for name, g in model.contrast(x, a, b).items()}
        return {
            name: torch.zeros_like(g.primal) if g.tangent is None else g.tangent.detach().clone()
            for name, g in contrast.items()
            if name in learned
        }
