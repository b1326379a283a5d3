"""Whether states come back once the nudge is gone: EP takes what it does to them for a shift of one steady state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import Dynamics
from eqprop.gdu.lockstep import Comparison
from eqprop.relax import NotFiniteError, Phase, Relaxation, Schedule, relax, settled_below
from eqprop.state import distance

STILL = 1e-15
"""The free phase ends when no neuron of any sample moves by more than this: rounding, of numbers of order one in
float64, and not one bit of anything above 1e-8 in float32."""

PIECES = 50
"""In how many pieces the free phase is run, so that its progress is seen and a NaN ends it early."""

FALLEN = 0.9
"""A residual that fell below this fraction of itself over the second half of the free phase is on its way down."""


class NeverSettlesError(ArithmeticError):
    """No sample settles: there is no steady state at which EP and BPTT could be compared."""


@dataclass(frozen=True)
class FreePhase:
    """A free phase of T steps.

    end         its end, with the K states before it
    earlier     the residual of each sample half-way, or before the last K steps if those are more than half  (B,)
    looked      the step at which `earlier` was taken
    """

    end: Relaxation
    earlier: Tensor
    looked: int

    def only(self, samples: Tensor) -> FreePhase:
        """The free phase of some samples, by number or mask."""
        end = replace(
            self.end,
            state=tuple(v[samples] for v in self.end.state),
            residual=self.end.residual[samples],
            settled=self.end.settled[samples],
            trail=tuple(tuple(v[samples] for v in s) for s in self.end.trail),
        )
        return FreePhase(end, self.earlier[samples], self.looked)


def settle(
    model: Dynamics,
    x: Tensor,
    T: int,
    K: int,
    tolerance: float | None,
    progress: Callable[[int], None],
    schedule: Schedule = "synchronous",
) -> FreePhase:
    """T steps of s_{t+1} = F(x, s_t), the last K states before the end kept  [eq:1st-phase].

    Run in pieces, each going on from the last: the states are those of one run of T steps. Where nothing moves any
    more (see `STILL`) the rest is left out and the trail filled with the state reached. A free phase that alternates
    takes its last K steps synchronously, as BPTT goes back along them: a state at which the layers rest in turns is
    one at which F rests.
    """
    pieces = _pieces(T, K, span=2 if schedule == "alternating" else 1)
    now = relax(model, x, Phase(0, tolerance=tolerance))
    earlier, looked, done = now.residual, 0, 0
    for number, steps in enumerate(pieces):
        last = number == len(pieces) - 1
        turns = "synchronous" if last else schedule
        phase = Phase(steps, turns, stop="settled", still=STILL, tolerance=tolerance)
        now = _piece(model, x, phase, now, K if last else 0, done)
        done += now.steps
        if done <= T // 2:
            earlier, looked = now.residual, done
        if now.steps < steps:
            now = now if last else replace(now, trail=(now.state,) * K)
            break
        progress(done)
    return FreePhase(replace(now, steps=done), earlier, looked)


def _pieces(T: int, K: int, span: int = 1) -> list[int]:
    """T in about `PIECES` parts, one boundary about T // 2, the last part being the last K steps.

    All but the first and the last are multiples of `span`: a phase that alternates ends with the even layers, and the
    next has to begin with the odd ones.
    """
    before = T - K
    half = min(T // 2, before)
    half -= (before - half) % span
    edges = [0]
    for begin, total in ((0, half), (half, before - half)):
        count = max(1, min(PIECES // 2, total))
        edges += [begin + total - total * (count - i) // count // span * span for i in range(1, count + 1)]
    return [*(b - a for a, b in pairwise(edges) if b > a), K]


def _piece(model: Dynamics, x: Tensor, phase: Phase, start: Relaxation, keep: int, done: int) -> Relaxation:
    try:
        return relax(model, x, phase, start.state, keep=keep)
    except NotFiniteError:
        # Only to say at which step of the whole phase it happened.
        relax(model, x, Phase(done + phase.T, phase.schedule))
        raise


def check_settling(free: FreePhase, T: int, tolerance: float | None) -> None:
    """Raise if no sample has settled and none is on its way."""
    end = free.end
    on_the_way = end.residual < FALLEN * free.earlier
    if bool((end.settled | on_the_way).any()):
        return
    limit = settled_below(end.state[0].dtype, tolerance)
    raise NeverSettlesError(
        f"None of the {end.residual.numel()} samples settles: after T={T} steps |F(s) - s| is "
        f"{float(end.residual.min()):.1e} at best (expected below {limit:.0e}), and it has not fallen since step "
        f"{free.looked} ({float(free.earlier.min()):.1e}). The dynamics cycles, wanders or grows, and there is no "
        "steady state to compare at: lower the weights or the step, or raise T if it settles later."
    )


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


def release(case: Comparison, T: int, tolerance: float | None, schedule: Schedule = "synchronous") -> Release:
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
