"""The free phase of a comparison: long, watched on the way, its last K states kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.relax import NotFiniteError, Phase, Relaxation, relax, settled_below

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
) -> FreePhase:
    """T steps of s_{t+1} = F(x, s_t), the last K states before the end kept  [eq:1st-phase].

    Run in pieces, each going on from the last: the states are those of one run of T steps. Where nothing moves any
    more (see `STILL`) the rest is left out and the trail filled with the state reached.
    """
    pieces = _pieces(T, K)
    now = relax(model, x, Phase(0, tolerance=tolerance))
    earlier, looked, done = now.residual, 0, 0
    for number, steps in enumerate(pieces):
        keep = K if number == len(pieces) - 1 else 0
        now = _piece(model, x, Phase(steps, stop="settled", still=STILL, tolerance=tolerance), now, keep, done)
        done += now.steps
        if done <= T // 2:
            earlier, looked = now.residual, done
        if now.steps < steps:
            now = now if keep else replace(now, trail=(now.state,) * K)
            break
        progress(done)
    return FreePhase(replace(now, steps=done), earlier, looked)


def _pieces(T: int, K: int) -> list[int]:
    """T in about `PIECES` parts, one boundary at T // 2, the last part holding at least the last K steps."""
    before = T - K
    half = min(T // 2, before)
    parts = []
    for total in (half, before - half):
        count = max(1, min(PIECES // 2, total))
        edges = [total * i // count for i in range(count + 1)]
        parts += [b - a for a, b in pairwise(edges) if b > a]
    return [*parts, K]


def _piece(model: Dynamics, x: Tensor, phase: Phase, start: Relaxation, keep: int, done: int) -> Relaxation:
    try:
        return relax(model, x, phase, start.state, keep=keep)
    except NotFiniteError:
        # Only to say at which step of the whole phase it happened.
        relax(model, x, done + phase.T)
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
