"""The free phase of a comparison: run it, see whether it comes to rest, and whether states return after the nudge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.cost import Nudge, Problem
from eqprop.dynamics import Dynamics
from eqprop.estimators import EP
from eqprop.relax import SWEEPS, NotFiniteError, Phase, Relaxation, relax, settled_below
from eqprop.state import State, distance

STILL = 1e-15
"""The free phase stops when no neuron of any sample moves by more than this: rounding of numbers of order one in
float64, and a bitwise fixed point above 1e-8 in float32."""

PIECES = 50
"""Number of pieces the free phase is run in, to report progress and stop early on NaN."""

FALLEN = 0.9
"""A residual that fell below this fraction of itself over the second half of the free phase is still falling."""


class NeverSettlesError(ArithmeticError):
    """No sample settles, so there is no steady state at which to compare EP and BPTT."""


def settle(
    problem: Problem, ep: EP, tolerance: float | None = None, progress: Callable[[int], None] | None = None
) -> Relaxation:
    """T steps of s_{t+1} = F(x, s_t), keeping the last K states before the end  [eq:1st-phase].

    Runs in pieces, each continuing from the last; the states equal those of a single run of T steps. When nothing
    moves any more (see `STILL`) the remaining steps are skipped and the trail is filled with the state reached. An
    alternating free phase takes its last K steps synchronously, because BPTT goes back along them: a fixed point of
    the alternating schedule is one of F. In sweeps BPTT goes back along the sweeps.

    Raises NeverSettlesError if no sample has settled and no residual is still falling.
    """
    T, schedule = ep.T, ep.schedule
    pieces = _pieces(T, ep.K, span=2 if schedule == "alternating" else 1)
    now = relax(problem.model, problem.x, Phase(0, tolerance=tolerance))
    earlier, looked, done = now.residual, 0, 0
    for number, steps in enumerate(pieces):
        last = number == len(pieces) - 1
        turns = "synchronous" if last and schedule == "alternating" else schedule
        then = T - done - steps if schedule in SWEEPS else 0
        phase = Phase(steps, turns, stop="settled", still=STILL, tolerance=tolerance, then=then)
        now = _piece(problem, phase, now, ep.K if last else 0, done)
        done += now.steps
        if done <= T // 2:
            earlier, looked = now.residual, done
        if now.steps < steps:
            now = now if last else replace(now, trail=(now.state,) * ep.K)
            break
        if progress is not None:
            progress(done)
    if not bool((now.settled | (now.residual < FALLEN * earlier)).any()):
        limit = settled_below(now.state[0].dtype, tolerance)
        raise NeverSettlesError(
            f"None of the {now.residual.numel()} samples settles: after T={T} steps |F(s) - s| is "
            f"{float(now.residual.min()):.1e} at best (expected below {limit:.0e}), and it has not fallen since step "
            f"{looked} ({float(earlier.min()):.1e}). The dynamics cycles, wanders or grows, so there is no "
            "steady state to compare at. Lower the weights or the step, or raise T if it settles later."
        )
    return replace(now, steps=done)


def part(problem: Problem, free: Relaxation, samples: Tensor) -> tuple[Problem, Relaxation]:
    """The problem and its free phase on some of the samples, by mask."""
    if bool(samples.all()):
        return problem, free
    end = replace(
        free,
        state=tuple([layer[samples] for layer in free.state]),
        residual=free.residual[samples],
        settled=free.settled[samples],
        trail=tuple([tuple([layer[samples] for layer in s]) for s in free.trail]),
    )
    return replace(problem, x=problem.x[samples], y=problem.y[samples]), end


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


def _piece(problem: Problem, phase: Phase, start: Relaxation, keep: int, done: int) -> Relaxation:
    try:
        return relax(problem.model, problem.x, phase, start.state, keep=keep)
    except NotFiniteError:
        # Rerun only to report the step, counted from the start of the whole phase.
        relax(problem.model, problem.x, Phase(done + phase.T, phase.schedule))
        raise


def audit(model: Dynamics, x: Tensor, s: State, tolerance: float | None = None) -> dict[str, dict[str, float]]:
    """Who is not at rest: per layer the share of samples that one more step moves, and how far it moves them.

        |F(x, s) - s|, the largest element of a layer: {"s0": {"unsettled": 0.05, "median": 1e-7, "max": 3e-3}, ...}

    tolerance   what counts as moved (see `eqprop.relax.settled_below`); None: that of the precision
    """
    with torch.no_grad():
        new = model.step(model.drive(x), s)
    names = model.layer_names or tuple(f"s{n}" for n in range(len(s)))
    dims, found = model.sample_dims(x), {}
    for name, after, before in zip(names, new, s, strict=True):
        moved = distance((after,), (before,), dims).double()
        near = settled_below(before.dtype, tolerance)
        shares = {"unsettled": (moved >= near).double().mean(), "median": moved.median(), "max": moved.max()}
        found[name] = {key: float(f"{float(value):.3g}") for key, value in shares.items()}
    return found


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


def release(problem: Problem, free: Relaxation, ep: EP, tolerance: float | None = None) -> Release:
    """Run K nudged steps, then up to T free ones; compare with as many free steps without the nudge."""
    model, x, still, T = problem.model, problem.x, free.state, ep.T
    moved = relax(model, x, ep.nudged_phase(), still, Nudge(problem.cost, problem.y, ep.beta)).state
    left = before = distance(moved, still, 1)
    halved = torch.zeros_like(left)
    near = settled_below(left.dtype, tolerance)
    done, steps = 0, ep.K
    while done < T and bool((undecided := (left > near) & (halved < 2)).any()):
        # Most return at once. Only the others continue, checked at growing intervals.
        x, left, halved = x[undecided], left[undecided], halved[undecided]
        phase = Phase(min(steps, T - done), ep.schedule, stop="settled", still=STILL)
        ends = [relax(model, x, phase, tuple(layer[undecided] for layer in s)) for s in (still, moved)]
        still, moved = (end.state for end in ends)
        before, left = left, distance(moved, still, 1)
        halved = torch.where(left <= HALVED * before, halved + 1, 0)
        done, steps = done + phase.T, 2 * steps
        if all(end.steps < phase.T for end in ends):  # both are at rest and will not move again
            before = left
            break
    away = (left > near) & (left > FALLEN * before)
    return Release(len(problem.x), int(away.sum()), float(torch.where(away, left, 0.0).max()))
