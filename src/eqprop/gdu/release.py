"""Whether states come back once the nudge is gone: EP takes what it does to them for a shift of one steady state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eqprop.cost import Nudge
from eqprop.gdu.free import FALLEN, STILL
from eqprop.gdu.lockstep import Case
from eqprop.relax import Phase, Schedule, relax, settled_below
from eqprop.state import distance

HALVED = 0.5
"""A sample whose distance falls below this share of itself from one look to the next, twice in a row, comes back."""


@dataclass(frozen=True)
class Release:
    """What becomes of samples that the nudge has moved for K steps and then lets go.

    samples     how many were released: those that had settled, or all if none had
    tipped      those that T steps do not bring back: the nudge has tipped them into another steady state, or into a
                cycle, and their updates are not those of a gradient
    farthest    the largest distance of a neuron of theirs from where it would have been; 0 if there are none
    """

    samples: int
    tipped: int
    farthest: float

    def __str__(self) -> str:
        if not self.tipped:
            return "Released by the nudge, all samples come back."
        return (
            f"Released by the nudge, {self.tipped} of {self.samples} samples do not come back (a neuron is away by up "
            f"to {self.farthest:.1e}): it has tipped them into another state. Lower beta."
        )


def release(case: Case, T: int, tolerance: float | None, schedule: Schedule = "synchronous") -> Release:
    """K nudged steps, then up to T free ones, against as many free ones from where the nudge began."""
    model, x, still = case.model, case.x, case.free.state
    moved = relax(model, x, case.K, still, Nudge(case.cost, case.y, case.beta)).state
    left = before = distance(moved, still, 1)
    halved = torch.zeros_like(left)
    near = settled_below(left.dtype, tolerance)
    done, steps = 0, case.K
    while done < T and bool((undecided := (left > near) & (halved < 2)).any()):
        # Most come back at once. Only the others go on, and the longer it takes, the more rarely they are looked at.
        x, left, halved = x[undecided], left[undecided], halved[undecided]
        phase = Phase(min(steps, T - done), schedule, stop="settled", still=STILL)
        ends = [relax(model, x, phase, tuple(layer[undecided] for layer in s)) for s in (still, moved)]
        still, moved = (end.state for end in ends)
        before, left = left, distance(moved, still, 1)
        halved = torch.where(left <= HALVED * before, halved + 1, 0)
        done, steps = done + phase.T, 2 * steps
        if all(end.steps < phase.T for end in ends):  # both rest, and will stay where they are
            before = left
            break
    away = (left > near) & (left > FALLEN * before)
    return Release(len(case.x), int(away.sum()), float(torch.where(away, left, 0.0).max()))
