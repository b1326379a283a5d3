"""How much of what EP would change comes from how few samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import PrimitiveDynamics
from eqprop.gdu.lockstep import Case
from eqprop.relax import relax

FEW = 0.01
"""The part of the samples that is called few; one at the least."""


@dataclass(frozen=True)
class Shares:
    """Parts of the sum, over samples and the network's parameters, of EP's squared updates.

    unsettled   that of the samples which have not settled
    few         that of the samples with the largest updates, a hundredth of them and one at the least
    counted     how many those few are
    """

    unsettled: float
    few: float
    counted: int

    def __str__(self) -> str:
        last = f"{self.counted} samples make" if self.counted > 1 else "sample makes"
        few = f"the largest {last} {100 * self.few:.0f} %"
        if self.unsettled == 0.0:
            return f"Of the sum of the squared updates {few}."
        return f"Of the sum of the squared updates the unsettled samples make {100 * self.unsettled:.0f} %, {few}."


def shares(case: Case) -> Shares | None:
    """None where nothing is updated, and without a primitive, as the updates then have no two ends  [eq:ep-grad]."""
    if not isinstance(case.model, PrimitiveDynamics):
        return None
    squares = squared_updates(case.model, case)
    if not bool(squares.any()):
        return None
    parts, counted = squares / squares.sum(), math.ceil(FEW * len(squares))
    return Shares(float(parts[~case.free.settled].sum()), float(parts.topk(counted).values.sum()), counted)


def squared_updates(model: PrimitiveDynamics, case: Case) -> Tensor:
    """|dPhi/dtheta(s_K^beta) - dPhi/dtheta(s_*)|^2 of every sample, all parameters together, (B,)."""
    x, start = case.x, case.free.state
    end = relax(model, x, case.K, start, Nudge(case.cost, case.y, case.beta)).state
    found = []
    for n in range(len(x)):
        one = slice(n, n + 1)
        late, early = (tuple(layer[one] for layer in s) for s in (end, start))
        moved = model.contrast(x[one], late, early).values()
        found.append(torch.stack([g.detach().double().square().sum() for g in moved]).sum())
    return torch.stack(found)
