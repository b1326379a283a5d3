"""The free phase: run it, see whether it comes to rest, and if not, why. Do states return after the nudge?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.gdu.lockstep import Comparison, Linearised, asymmetry, flat, flat_product
from eqprop.gdu.patient import EXPLODED, GAP, Patient, difference, march, size_of
from eqprop.gdu.verdict import Finding, nice, percent
from eqprop.relax import SWEEPS, NotFiniteError, Phase, Relaxation, Schedule, relax, settled_below
from eqprop.state import State, distance, first_bad_layer, layer_name

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


LONGER = (4, 32)
"""Free phases, in units of T: to see whether the residual falls, and the longest that is tried."""
SHORTEST = 50
"""What counts as T there, where T is smaller."""
FALLS = 0.7
"""A residual that falls below this share of itself is on its way down."""
SMALLER = (0.5, 0.25, 0.125)
"""The steps that are tried, in units of the model's own."""
TIE = "Tie the feedback to the forward weights (its transpose), or give the net by a Phi or an energy."


@dataclass(frozen=True)
class Settled:
    """A free phase that is good enough: what was measured, the samples that rest, and what would bring it closer."""

    note: str
    patient: Patient
    closer: Finding | None = None


def settles(p: Patient) -> Finding | Settled:
    """Finite? On its way? Back and forth? And does the gradient suffer?"""
    tolerance = max(p.floor, 1e-9)
    residual = float(p.free.residual.max())
    if not residual < EXPLODED:
        return _explodes(p)
    if residual <= tolerance:
        return Settled(f"settles (residual {residual:.1e})", p)
    found = find_rest(p, tolerance)
    return _restless(p, found) if p.found_rest else _few_restless(p, found)


def _restless(p: Patient, found: Finding) -> Finding | Settled:
    """What it costs the gradient that the state is not yet where it would rest."""
    gap = p.harm(p.as_it_is, p.in_float64)
    if gap <= GAP:
        residual = float(p.free.residual.max())
        note = f"settles well enough (residual {residual:.1e}, the gradient differs by {gap:.1%} from that at rest)"
        return Settled(note, p, found)
    return replace(found, shown_by=f"{found.shown_by}, and the gradient is off by {percent(gap)}")


def _few_restless(p: Patient, found: Finding) -> Finding | Settled:
    """What it costs the gradient that some samples never rest; the others go on by themselves."""
    far = march(p, p.free.state, LONGER[0] * max(p.ep.T, SHORTEST), 0.0).state
    with torch.no_grad():
        rests = distance(p.model.transition(p.x, far), far, 1) < settled_below(p.x.dtype, None)
    if not bool(rests.any()) or bool(rests.all()):
        return found
    others = p.only(rests)
    gap = difference(p.as_it_is, others.as_it_is, {})
    if gap > GAP:
        return found
    rest = settles(others)
    if isinstance(rest, Finding):
        return rest
    note = f"{int((~rests).sum())} of {len(p.x)} samples never settle, which moves the gradient by {gap:.1%}; the rest "
    return Settled(note + rest.note, rest.patient, found)


def find_rest(p: Patient, tolerance: float) -> Finding:
    """Longer, alternating, or with smaller steps: what keeps the state from its rest, whether it matters or not."""
    # A state that is not on its way down is first given other steps, then more of the same.
    falls = not _returns(p) and _falls(p, tolerance)
    longer = _longer(p, tolerance) if falls else None
    found = longer or _alternating(p, tolerance) or _smaller_step(p, tolerance, p.free.state)
    found = found or (None if falls else _longer(p, tolerance)) or _no_rest(p)
    share = float((p.free.residual > tolerance).double().mean())
    moving = (
        f"after T = {p.ep.T} steps {share:.0%} of the samples still move (residual {float(p.free.residual.max()):.1e})"
    )
    return replace(found, shown_by=moving + found.shown_by)


def _no_rest(p: Patient) -> Finding:
    if (found := _bottomless(p)) is not None:
        return replace(found, shown_by=f"; {found.shown_by}")
    shown = f" and after {min(LONGER[-1] * p.ep.T, p.most_steps)}, with smaller steps too"
    around = Linearised(p.model, p.x, p.free.state)
    odd = asymmetry(flat_product(around), flat(p.free.state), 0)
    if not isinstance(p.model, PrimitiveDynamics) and odd > 0.05:
        return Finding("asymmetric", f"{shown}; asymmetry {odd:.2f} (0 symmetric, 1 antisymmetric)", advice=TIE)
    return Finding("never-settles", shown, advice="Lower the weights (a smaller initial scale).")


def _returns(p: Patient) -> bool:
    """Whether two steps bring back what one step moves: a cycle of two."""
    with torch.no_grad():
        once = p.model.transition(p.x, p.free.state)
        twice = p.model.transition(p.x, once)
    moved, left = distance(once, p.free.state, 1), distance(twice, p.free.state, 1)
    far = moved > 1e-3
    return bool(far.any()) and bool((left[far] < 0.1 * moved[far]).all())


def _falls(p: Patient, tolerance: float) -> bool:
    there = march(p, p.free.state, LONGER[0] * max(p.ep.T, SHORTEST) - p.ep.T, tolerance)
    return there.residual < FALLS * float(p.free.residual.max())


def _longer(p: Patient, tolerance: float) -> Finding | None:
    there = march(p, p.free.state, LONGER[-1] * max(p.ep.T, SHORTEST) - p.ep.T, tolerance)
    if not there.rests(max(tolerance, 1e-7)):
        return None
    p.take_rest(there.state)
    return Finding("T", "", {"T": _enough(p)})


def _enough(p: Patient) -> int:
    """A round number of steps after which the state is at rest, measured by how far the nudge moves it."""
    nudge = Nudge(p.cost, p.y, p.ep.beta)
    rest = tuple(layer.to(p.x.dtype) for layer in p.rest)
    moved = relax(p.model, p.x, Phase(p.ep.K, checked=False), rest, nudge).state
    near = 0.05 * float(distance(moved, rest, 1).max())
    state, done, away = p.free.state, p.ep.T, math.inf
    while done < p.most_steps and not away < near:
        steps = max(done // 4, 1)
        state, done = march(p, state, steps, 0.0).state, done + steps
        away = float(distance(state, rest, 1).max())
    return int(nice(done))


def _alternating(p: Patient, tolerance: float) -> Finding | None:
    if not p.model.bipartite or p.ep.schedule == "alternating":
        return None
    steps = min(LONGER[-1] * max(p.ep.T, SHORTEST), p.most_steps)
    phase = Phase(steps, "alternating", stop="settled", still=tolerance / 10, checked=False)
    there = relax(p.model, p.x, phase, p.start)
    if not float(there.residual.max()) <= max(tolerance, 1e-7):
        return None
    p.take_rest(there.state)
    return Finding("two-cycle", BACK, {"schedule": "alternating"})


def _smaller_step(p: Patient, tolerance: float, state: State) -> Finding | None:
    """s + a (F(s) - s) rests where F does; for an energy it is the step a eps."""
    begun = state if first_bad_layer(state) is None and size_of(state) < EXPLODED else p.start
    for a in SMALLER:
        there = march(p, begun, int(4 * max(p.ep.T, 4 * SHORTEST) / a), tolerance, a)
        if there.rests(max(tolerance, 1e-7)):
            break
    else:
        return None
    eps = p.model.nudge_scale
    if eps != 1.0:
        shown = f", eps = {eps:g} oversteps the energy's minimum"
        return Finding("eps", shown, {"eps": float(f"{a * eps:.2g}")})
    shown = f"{BACK}; smaller ones, s + {a:g} (F(s) - s), come to rest on this batch"
    return Finding("two-cycle", shown, advice="Write F with such steps, or lower the weights.")


BACK = ", two steps bringing back what one step moves"


def _explodes(p: Patient) -> Finding:
    shown = f"after T = {p.ep.T} steps layer {_name(p, _largest(p.free.state))} is at {size_of(p.free.state):.1e}"
    found = _smaller_step(p, max(1e-9, 64 * torch.finfo(p.x.dtype).eps), p.start)
    if found is not None:
        return replace(found, shown_by=shown + found.shown_by)
    return _bottomless(p) or Finding(
        "diverges", f"{shown}, and with smaller steps too", advice=f"Lower the weights{OR}"
    )


OR = ", or bound the states: sigma(s) in the energy, squash, or a clip in project."
FAR = 1e3
"""A neuron beyond this, or this multiple of where it began, is on its way out of every bound."""


def _name(p: Patient, n: int) -> str:
    return layer_name(p.model.layer_names, n)


def _largest(s: State) -> int:
    large = [float(v.abs().max()) for v in s]
    return max(range(len(s)), key=lambda n: math.inf if math.isnan(large[n]) else large[n])


@torch.no_grad()
def _bottomless(p: Patient) -> Finding | None:
    """Whether small steps downhill lead out of every bound, which layer is the first to go, and by whose terms."""
    model, s = p.wide.model, tuple(layer.double() for layer in p.start)
    if not isinstance(model, PrimitiveDynamics) or model.squashes:
        return None
    drive, bound, steps = model.drive(p.wide.x), FAR * max(1.0, size_of(s)), 0
    first, a = _energy(p, s), SMALLER[-1]
    while steps < p.most_steps and size_of(s) < bound:
        s = tuple(v + a * (w - v) for v, w in zip(s, model.step(drive, s), strict=True))
        steps += 1
    sample, last = int(torch.cat([v.abs().flatten(1) for v in s], 1).amax(1).argmax()), _energy(p, s)
    if not size_of(s) >= bound or not float(last[sample]) < float(first[sample]):
        return None
    alone = [n for n in range(len(s)) if _falls_alone(p, n)]
    sizes = {n: float(s[n].abs().max()) for n in alone or range(len(s))}
    name = _name(p, max(sizes, key=sizes.__getitem__))
    shown = (
        f"with steps of eps/{1 / a:g} the energy of a sample falls from {float(first[sample]):.1e} to "
        f"{float(last[sample]):.1e} in {steps} steps, and layer {name} is the first to blow up"
    )
    if alone:
        return Finding("unbounded", shown, advice=f"Check the sign of the terms of {name} alone, such as {LEAK}")
    return Finding("unbounded", f"{shown}: the weights outweigh the leak", advice=f"Lower the weights{OR}")


LEAK = "its leak: 1/2 |s|^2 belongs in E with a plus, so that E grows with s."


def _energy(p: Patient, s: State) -> Tensor:
    """E = (1/2 |s|^2 - Phi) / eps per sample, (B,)."""
    model = p.wide.model
    assert isinstance(model, PrimitiveDynamics), "asked for nets with a primitive only"
    squares = torch.stack([layer.square().flatten(1).sum(1) for layer in s]).sum(0)
    return (0.5 * squares - model.primitive(p.wide.x, s)) / model.nudge_scale


def _falls_alone(p: Patient, n: int) -> bool:
    """Whether E falls without bound in every direction of layer n, all others at 0."""
    source = torch.Generator().manual_seed(0)
    rest = [torch.zeros_like(layer, dtype=torch.float64) for layer in p.start]
    for _ in range(4):
        way = torch.randn(rest[n].shape, generator=source, dtype=torch.float64).to(rest[n])
        values = [_energy(p, (*rest[:n], c * way, *rest[n + 1 :])) for c in (0.0, 1e2, 1e3)]
        if not bool(((values[2] < values[1]) & (values[1] < values[0])).all()):
            return False
    return True
