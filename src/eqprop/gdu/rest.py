"""Why a free phase does not come to rest, and whether EP's gradient suffers from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import PrimitiveDynamics
from eqprop.gdu.examination import (
    EXPLODED,
    GAP,
    NEAR,
    Examination,
    difference,
    march,
    nudged,
    off_by_layer,
    size_of,
)
from eqprop.gdu.lockstep import Linearised, asymmetry
from eqprop.gdu.stability import stability
from eqprop.gdu.trial import LARGER, LARGEST_EPS
from eqprop.gdu.verdict import Finding, nice, percent
from eqprop.relax import Phase, relax, settled_below
from eqprop.state import State, distance, first_bad_layer, layer_name

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
    examination: Examination
    closer: Finding | None = None


def settles(p: Examination) -> Finding | Settled:
    """Finite? On its way? Back and forth? And does the gradient suffer?"""
    tolerance = max(p.floor, 1e-9)
    residual = float(p.free.residual.max())
    if not residual < EXPLODED:
        return _explodes(p)
    if residual <= tolerance:
        return Settled(f"settles (residual {residual:.1e})", p)
    found = find_rest(p, tolerance)
    return _restless(p, found) if p.found_rest else _few_restless(p, found)


def _restless(p: Examination, found: Finding) -> Finding | Settled:
    """What it costs the gradient that the state is not yet where it would rest."""
    gap = p.harm(p.as_it_is, p.in_float64)
    if gap <= GAP:
        residual = float(p.free.residual.max())
        note = f"settles well enough (residual {residual:.1e}, the gradient differs by {gap:.1%} from that at rest)"
        return Settled(note, p, found)
    if (drift := _drift(p, found)) is not None:
        return drift
    return replace(found, shown_by=f"{found.shown_by}, and the gradient is off by {percent(gap)}")


def _drift(p: Examination, found: Finding) -> Finding | None:
    """Whether all that is wrong is what the state still moves by itself; `found` is what would bring it to rest."""
    if p.ep.form != "plain":
        return None
    moved = nudged(p.problem, replace(p.ep, form="difference"), p.free.state)
    if not p.harm(moved, p.in_float64) < NEAR:
        return None
    shown = (
        f"the free phase ends with a residual of {float(p.free.residual.max()):.1e}, and what still moves enters the "
        f"update; {off_by_layer(p.as_it_is, moved)}"
    )
    longer = f"to {found.change['T']}" if "T" in found.change else "until the state is at rest"
    return Finding("drift", shown, {"form": "difference"}, f"Or raise T {longer}.")


def _few_restless(p: Examination, found: Finding) -> Finding | Settled:
    """What it costs the gradient that some samples never rest; the others keep moving."""
    far = march(p.problem, p.free.state, LONGER[0] * max(p.ep.T, SHORTEST), 0.0).state
    with torch.no_grad():
        rests = distance(p.problem.model.transition(p.problem.x, far), far, 1) < settled_below(p.problem.x.dtype, None)
    if not bool(rests.any()) or bool(rests.all()):
        return found
    others = p.only(rests)
    gap = difference(p.as_it_is, others.as_it_is, {})
    if gap > GAP:
        return found
    rest = settles(others)
    if isinstance(rest, Finding):
        return rest
    few = f"{int((~rests).sum())} of {len(p.problem.x)} samples never settle, which moves the gradient by {gap:.1%}"
    return Settled(f"{few}; the rest {rest.note}", rest.examination, found)


def find_rest(p: Examination, tolerance: float) -> Finding:
    """Longer, alternating, or with smaller steps: what keeps the state from its rest, whether it matters or not."""
    # A state that is not on its way down is first given other steps, then more of the same.
    falls = not _returns(p) and _falls(p, tolerance)
    longer = _longer(p, tolerance) if falls else None
    found = longer or _alternating(p, tolerance) or _smaller_step(p, tolerance, p.free.state)
    found = found or (None if falls else _longer(p, tolerance)) or _slow(p, tolerance) or _no_rest(p)
    share = float((p.free.residual > tolerance).double().mean())
    moving = (
        f"after T = {p.ep.T} steps {share:.0%} of the samples still move (residual {float(p.free.residual.max()):.1e})"
    )
    return replace(found, shown_by=moving + found.shown_by)


def _slow(p: Examination, tolerance: float) -> Finding | None:
    """Whether the state still moves towards its rest after the longest walk: larger steps of the energy, or more."""
    steps = min(LONGER[-1] * max(p.ep.T, SHORTEST), p.most_steps)
    half = march(p.problem, p.free.state, steps // 2, tolerance)
    end = march(p.problem, half.state, steps - steps // 2, tolerance)
    if not tolerance < end.residual < FALLS * half.residual:
        return None
    shown = f" and, though less and less, after {steps} (residual {end.residual:.1e})"
    eps = p.problem.model.nudge_scale
    for a in (a for a in LARGER if eps != 1.0 and a * eps <= LARGEST_EPS):
        there = march(p.problem, end.state, steps, tolerance, a)
        if there.rests(max(tolerance, 1e-7)):
            p.take_rest(there.state)
            return Finding("slow", f"{shown}; in steps of {a * eps:.2g} it rests", {"eps": float(f"{a * eps:.2g}")})
    more = steps / 2 * math.log(end.residual / tolerance) / math.log(half.residual / end.residual)
    return Finding("slow", shown, {"T": int(nice(p.ep.T + steps + more))})


def _no_rest(p: Examination) -> Finding:
    if (found := _bottomless(p)) is not None:
        return replace(found, shown_by=f"; {found.shown_by}")
    shown = f" and after {min(LONGER[-1] * p.ep.T, p.most_steps)}, with smaller steps too"
    around = Linearised(p.problem.model, p.problem.x, p.free.state)
    odd = asymmetry(around)
    if (turns := _oscillates(p)) is not None:
        return replace(turns, shown_by=f"{shown}; {turns.shown_by}")
    if not isinstance(p.problem.model, PrimitiveDynamics) and odd > 0.05:
        return Finding("asymmetric", f"{shown}; asymmetry {odd:.2f} (0 symmetric, 1 antisymmetric)", advice=TIE)
    return Finding("never-settles", shown, advice="Lower the weights (a smaller initial scale).")


def _oscillates(p: Examination) -> Finding | None:
    """Whether the state turns round a state of rest that no step of the flow would reach."""
    if p.problem.model.nudge_scale == 1.0 and isinstance(p.problem.model, PrimitiveDynamics):
        return None  # a symmetric Jacobian has no complex eigenvalues
    found = stability(p.problem.model, p.problem.x, max(p.ep.T, SHORTEST), p.free.state)
    if found.verdict != "oscillates":
        return None
    a, b = found.worst.real, abs(found.worst.imag)
    shown = f"the flow has the eigenvalue {a:+.2g} ± {b:.2g}i, above 0"
    return Finding("oscillates", shown, advice=f"Lower the weights, or their asymmetry. {TIE}")


def _returns(p: Examination) -> bool:
    """Whether two steps bring back what one step moves: a cycle of two."""
    with torch.no_grad():
        once = p.problem.model.transition(p.problem.x, p.free.state)
        twice = p.problem.model.transition(p.problem.x, once)
    moved, left = distance(once, p.free.state, 1), distance(twice, p.free.state, 1)
    far = moved > 1e-3
    return bool(far.any()) and bool((left[far] < 0.1 * moved[far]).all())


def _falls(p: Examination, tolerance: float) -> bool:
    there = march(p.problem, p.free.state, LONGER[0] * max(p.ep.T, SHORTEST) - p.ep.T, tolerance)
    return there.residual < FALLS * float(p.free.residual.max())


def _longer(p: Examination, tolerance: float) -> Finding | None:
    there = march(p.problem, p.free.state, LONGER[-1] * max(p.ep.T, SHORTEST) - p.ep.T, tolerance)
    if not there.rests(max(tolerance, 1e-7)):
        return None
    p.take_rest(there.state)
    return Finding("T", "", {"T": _enough(p)})


def _enough(p: Examination) -> int:
    """A round number of steps after which the state is at rest, measured by how far the nudge moves it."""
    nudge = Nudge(p.problem.cost, p.problem.y, p.ep.beta)
    rest = tuple(layer.to(p.problem.x.dtype) for layer in p.rest)
    moved = relax(p.problem.model, p.problem.x, Phase(p.ep.K, checked=False), rest, nudge).state
    near = 0.05 * float(distance(moved, rest, 1).max())
    state, done, away = p.free.state, p.ep.T, math.inf
    while done < p.most_steps and not away < near:
        steps = max(done // 4, 1)
        state, done = march(p.problem, state, steps, 0.0).state, done + steps
        away = float(distance(state, rest, 1).max())
    return int(nice(done))


def _alternating(p: Examination, tolerance: float) -> Finding | None:
    if not p.problem.model.bipartite or p.ep.schedule == "alternating":
        return None
    steps = min(LONGER[-1] * max(p.ep.T, SHORTEST), p.most_steps)
    phase = Phase(steps, "alternating", stop="settled", still=tolerance / 10, checked=False)
    there = relax(p.problem.model, p.problem.x, phase, p.start)
    if not float(there.residual.max()) <= max(tolerance, 1e-7):
        return None
    p.take_rest(there.state)
    return Finding("two-cycle", BACK, {"schedule": "alternating"})


def _smaller_step(p: Examination, tolerance: float, state: State) -> Finding | None:
    """s + a (F(s) - s) rests where F does; for an energy it is the step a eps."""
    begun = state if first_bad_layer(state) is None and size_of(state) < EXPLODED else p.start
    for a in SMALLER:
        there = march(p.problem, begun, int(4 * max(p.ep.T, 4 * SHORTEST) / a), tolerance, a)
        if there.rests(max(tolerance, 1e-7)):
            break
    else:
        return None
    eps = p.problem.model.nudge_scale
    if eps != 1.0:
        shown = f", eps = {eps:g} oversteps the energy's minimum"
        return Finding("eps", shown, {"eps": float(f"{a * eps:.2g}")})
    shown = f"{BACK}; smaller ones, s + {a:g} (F(s) - s), come to rest on this batch"
    return Finding("two-cycle", shown, advice="Write F with such steps, or lower the weights.")


BACK = ", two steps bringing back what one step moves"


def _explodes(p: Examination) -> Finding:
    shown = f"after T = {p.ep.T} steps layer {_name(p, _largest(p.free.state))} is at {size_of(p.free.state):.1e}"
    found = _smaller_step(p, max(1e-9, 64 * torch.finfo(p.problem.x.dtype).eps), p.start)
    if found is not None:
        return replace(found, shown_by=shown + found.shown_by)
    return _bottomless(p) or Finding(
        "diverges", f"{shown}, and with smaller steps too", advice=f"Lower the weights{OR}"
    )


OR = ", or bound the states: sigma(s) in the energy, squash, or a clip in project."
FAR = 1e3
"""A neuron beyond this, or this multiple of where it began, is on its way out of every bound."""


def _name(p: Examination, n: int) -> str:
    return layer_name(p.problem.model.layer_names, n)


def _largest(s: State) -> int:
    large = [float(v.abs().max()) for v in s]
    return max(range(len(s)), key=lambda n: math.inf if math.isnan(large[n]) else large[n])


@torch.no_grad()
def _bottomless(p: Examination) -> Finding | None:
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


def _energy(p: Examination, s: State) -> Tensor:
    """E = (1/2 |s|^2 - Phi) / eps per sample, (B,)."""
    model = p.wide.model
    assert isinstance(model, PrimitiveDynamics), "asked for nets with a primitive only"
    squares = torch.stack([layer.square().flatten(1).sum(1) for layer in s]).sum(0)
    return (0.5 * squares - model.primitive(p.wide.x, s)) / model.nudge_scale


def _falls_alone(p: Examination, n: int) -> bool:
    """Whether E falls without bound in every direction of layer n, all others at 0."""
    source = torch.Generator().manual_seed(0)
    rest = [torch.zeros_like(layer, dtype=torch.float64) for layer in p.start]
    for _ in range(4):
        way = torch.randn(rest[n].shape, generator=source, dtype=torch.float64).to(rest[n])
        values = [_energy(p, (*rest[:n], c * way, *rest[n + 1 :])) for c in (0.0, 1e2, 1e3)]
        if not bool(((values[2] < values[1]) & (values[1] < values[0])).all()):
            return False
    return True
