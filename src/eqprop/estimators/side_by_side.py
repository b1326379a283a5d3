"""The second phase at several strengths of the nudge at once: the mini-batch repeated, each copy with its own beta."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eqprop.cost import Cost, Nudge
from eqprop.dynamics import Dynamics
from eqprop.state import State


class SideBySide:
    """A mini-batch (B, ...) repeated once a beta, copy after copy: (P B, ...), or (R, P B, ...) when stacked.

    x       the inputs, repeated            nudge   towards the targets, repeated, each copy with its own beta

    A single beta leaves the batch as it is; it may then be a tensor with one value a network, (R,).
    """

    def __init__(
        self, model: Dynamics, cost: Cost, x: Tensor, y: Tensor, betas: Sequence[float | complex | Tensor]
    ) -> None:
        self.copies = len(betas)
        self.dim = model.sample_dims(x) - 1
        self.x = self._repeat(x)
        if len(betas) == 1:
            (beta,) = betas
            self.nudge = Nudge(cost, y, beta.unsqueeze(-1) if isinstance(beta, Tensor) and beta.dim() else beta)
        else:
            lead = x.shape[: self.dim + 1]
            each = [x.new_ones(lead) * beta for beta in betas]
            self.nudge = Nudge(cost, self._repeat(y), torch.cat(each, self.dim))

    def repeat(self, s: State) -> State:
        return tuple(self._repeat(layer) for layer in s)

    def split(self, s: State) -> list[State]:
        """The state of each copy, in the order of the betas."""
        if self.copies == 1:
            return [s]
        layers = [layer.chunk(self.copies, self.dim) for layer in s]
        return [tuple(layer[k] for layer in layers) for k in range(self.copies)]

    def _repeat(self, v: Tensor) -> Tensor:
        return v if self.copies == 1 else torch.cat([v] * self.copies, self.dim)
