"""The free phase of a comparison, and whether states return after the nudge, as EP assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import Dynamics
from eqprop.gdu.lockstep import Comparison
from eqprop.relax import SWEEPS, NotFiniteError, Phase, Relaxation, Schedule, relax, settled_below
from eqprop.state import distance

STILL = 1e-15
"""The free phase stops when no neuron of any sample moves by more than this: rounding of numbers of order one in
float64, and a bitwise fixed point above 1e-8 in float32."""

PIECES = 50
"""Number of pieces the free phase is run in, to report progress and stop early on NaN."""

FALLEN = 0.9
"""A residual that fell below this fraction of itself over the second half of the free phase is still falling."""


class NeverSettlesError(ArithmeticError):
    """No sample settles, so there is no steady state at which to compare EP and BPTT."""


@dataclass(frozen=True)
class FreePhase:
    """A free phase of T steps.

    end         its result, with the K states before the last
    earlier     the residual of each sample halfway, or before the last K steps if those are more than half  (B,)
    looked      the step at which `earlier` was measured
    """

    end: Relaxation
    earlier: Tensor
    looked: int

    def only(self, samples: Tensor) -> FreePhase:
        """The free phase of a subset of samples, by index or mask."""
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
    """T steps of s_{t+1} = F(x, s_t), keeping the last K states before the end  [eq:1st-phase].

    Runs in pieces, each continuing from the last; the states equal those of a single run of T steps. When nothing
    moves any more (see `STILL`) the remaining steps are skipped and the trail is filled with the state reached. An
    alternating free phase takes its last K steps synchronously, because BPTT goes back along them: a fixed point of
    the alternating schedule is one of F. In sweeps BPTT goes back along the sweeps.
    """
    pieces = _pieces(T, K, span=2 if schedule == "alternating" else 1)
    now = relax(model, x, Phase(0, tolerance=tolerance))
    earlier, looked, done = now.residual, 0, 0
    for number, steps in enumerate(pieces):
        last = number == len(pieces) - 1
        turns = "synchronous" if last and schedule == "alternating" else schedule
        then = T - done - steps if schedule in SWEEPS else 0
        phase = Phase(steps, turns, stop="settled", still=STILL, tolerance=tolerance, then=then)
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
    """Split T into about `PIECES` parts with a boundary near T // 2; the last part is the last K steps.

    All but the first and the last are multiples of `span`: an alternating phase ends with the even layers, so the
    next must begin with the odd ones.
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
        # Rerun only to report the step, counted from the start of the whole phase.
        relax(model, x, Phase(done + phase.T, phase.schedule))
        raise


def check_settling(free: FreePhase, T: int, tolerance: float | None) -> None:
    """Raise if no sample has settled and no residual is still falling."""
    end = free.end
    on_the_way = end.residual < FALLEN * free.earlier
    if bool((end.settled | on_the_way).any()):
        return
    limit = settled_below(end.state[0].dtype, tolerance)
    raise NeverSettlesError(
        f"None of the {end.residual.numel()} samples settles: after T={T} steps |F(s) - s| is "
        f"{float(end.residual.min()):.1e} at best (expected below {limit:.0e}), and it has not fallen since step "
        f"{free.looked} ({float(free.earlier.min()):.1e}). The dynamics cycles, wanders or grows, so there is no "
        "steady state to compare at. Lower the weights or the step, or raise T if it settles later."
    )


HALVED = 0.5
"""A sample whose distance falls below this fraction of itself at two checks in a row counts as returning."""


@dataclass(frozen=True)
class Release:
    """Whether samples return to their steady state after K nudged steps.

    samples     how many were released: those that had settled, or all if none had
    tipped      how many do not return within T steps: the nudge tipped them into another steady state or a cycle, so
                their updates do not follow a gradient
    farthest    the largest distance of a neuron of theirs from where it would have been; 0 if there are none
    """

    samples: int
    tipped: int
    farthest: float

    def __str__(self) -> str:
        if not self.tipped:
            return "After the nudge all samples return to their steady states."
        return (
            f"After the nudge {self.tipped} of {self.samples} samples do not return (neurons are off by up to "
            f"{self.farthest:.1e}): it has tipped them into another state. Lower beta."
        )


def release(case: Comparison, T: int, tolerance: float | None, schedule: Schedule = "synchronous") -> Release:
    """Run K nudged steps, then up to T free ones; compare with as many free steps without the nudge."""
    model, x, still = case.model, case.x, case.free.state
    nudged = Phase(case.K, case.schedule if case.schedule in SWEEPS else "synchronous")
    moved = relax(model, x, nudged, still, Nudge(case.cost, case.y, case.beta)).state
    left = before = distance(moved, still, 1)
    halved = torch.zeros_like(left)
    near = settled_below(left.dtype, tolerance)
    done, steps = 0, case.K
    while done < T and bool((undecided := (left > near) & (halved < 2)).any()):
        # Most return at once. Only the others continue, checked at growing intervals.
        x, left, halved = x[undecided], left[undecided], halved[undecided]
        phase = Phase(min(steps, T - done), schedule, stop="settled", still=STILL)
        ends = [relax(model, x, phase, tuple(layer[undecided] for layer in s)) for s in (still, moved)]
        still, moved = (end.state for end in ends)
        before, left = left, distance(moved, still, 1)
        halved = torch.where(left <= HALVED * before, halved + 1, 0)
        done, steps = done + phase.T, 2 * steps
        if all(end.steps < phase.T for end in ends):  # both are at rest and will not move again
            before = left
            break
    away = (left > near) & (left > FALLEN * before)
    return Release(len(case.x), int(away.sum()), float(torch.where(away, left, 0.0).max()))
