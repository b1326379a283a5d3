"""Recurrent backpropagation (Almeida, Pineda): the adjoint iterated at the steady state  [cor:bptt-steady-state]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators.base import (
    Estimator,
    Step,
    batch_mean,
    pull_back,
    trainable,
    transition_vjp,
)
from eqprop.relax import CHECK_EVERY, Relaxation
from eqprop.state import State, add, distance

LOOK = 64
"""Further steps by which an adjoint that has grown must be falling."""


class GrowingAdjointError(ArithmeticError):
    """The adjoint does not decay: the steady state is not attracting, or does not exist."""


@final
@dataclass(frozen=True)
class RBP(Estimator):
    """dL*/dtheta = (dF/dtheta)^T sum_k lambda_k, lambda_0 = dl/ds, lambda_{k+1} = (dF/ds)^T lambda_k, all at s_T.

    K terms, or fewer with stop="settled", which stops when a term no longer changes the sum. At a fixed point, K
    terms equal K-step BPTT. The returned relaxation carries `adjoint_residual`, the largest element of the first
    omitted term, per sample. Raises GrowingAdjointError if the adjoint has grown.

    T           free steps
    K           most terms of the sum
    schedule, stop, tolerance, checked    of the free phase, as in `Estimator`
    """

    def estimate(self, problem: Problem, free: Relaxation) -> tuple[Relaxation, dict[str, Tensor]]:
        model, x, parameters = problem.model, problem.x, trainable(problem.model)
        with torch.no_grad():
            first = problem.pull(free.state)
        with torch.enable_grad():
            leaves = tuple(layer.detach().requires_grad_() for layer in free.state)
            out = model.step(model.drive(x), leaves)
            total, left = self._sum_adjoint(out, leaves, first)
            dims = model.sample_dims(x)
            residual = _size(left, dims)
            if self.checked:
                self._check_decay(out, leaves, left, _size(first, dims), residual)
            found = pull_back(out, tuple(parameters.values()), total)
        sums = dict(zip(parameters, found, strict=True))
        return replace(free, adjoint_residual=residual), batch_mean(model, x, free.state, sums)

    def _sum_adjoint(self, out: State, leaves: State, first: State) -> tuple[State, State]:
        """The sum of the first K terms, and the next term."""
        adjoint, total = first, first
        for k in range(1, self.K + 1):
            adjoint = pull_back(out, leaves, adjoint, retain_graph=True)
            if k == self.K:
                break
            new = add(total, adjoint)
            look = self.stop == "settled" and k % CHECK_EVERY == 0
            if look and all(torch.equal(a, b) for a, b in zip(new, total, strict=True)):
                break
            total = new
        return total, adjoint

    def _check_decay(self, out: State, leaves: State, left: State, start: Tensor, residual: Tensor) -> None:
        """Raise GrowingAdjointError if the adjoint of a sample has grown and still grows.

        At an attracting fixed point too it may grow at first, as it spreads from the output: it is then followed
        until it has come back, or for LOOK further steps, by which it must be falling.
        """
        grown, sizes = ~(residual <= start), [residual]
        while bool(grown.any()) and len(sizes) <= LOOK:
            left = pull_back(out, leaves, left, retain_graph=True)
            sizes.append(_size(left, start.dim()))
            grown &= ~(sizes[-1] <= start)
        grown &= ~(sizes[-1] < sizes[len(sizes) // 2])
        if bool(grown.any()):
            worst = int(torch.where(grown, residual, torch.zeros_like(residual)).argmax())
            raise GrowingAdjointError(
                f"The adjoint of {int(grown.sum())} of {grown.numel()} samples has grown over K={self.K} steps (sample "
                f"{worst}: {float(start.flatten()[worst]):.2e} -> {float(residual.flatten()[worst]):.2e}) and does not "
                "come back; expected it to decay, as at an attracting fixed point. Raise T, use "
                "schedule='alternating', or lower eps or the weights."
            )

    @in_own_precision
    def steps(self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, free: Relaxation) -> Iterator[Step]:
        """lambda_t and (dF/dtheta)^T lambda_t at the end of the free phase, t = 0, ..., K-1."""
        cost.check(free.state, y)
        with torch.no_grad():
            adjoint = Problem(model, cost, x, y).pull(free.state)
        for _ in range(self.K):
            following, synapses = transition_vjp(model, x, free.state, adjoint)
            yield Step(adjoint, synapses)
            adjoint = following


def _size(adjoint: State, dims: int) -> Tensor:
    """The largest element of each sample."""
    return distance(adjoint, tuple(torch.zeros_like(v) for v in adjoint), dims)
