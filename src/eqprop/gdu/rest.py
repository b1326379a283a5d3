"""Why a free phase does not come to rest: too few steps, too large ones, a cycle of two, or no rest at all."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from eqprop.cost import Nudge
from eqprop.dynamics import PrimitiveDynamics
from eqprop.gdu.linearised import Linearised, asymmetry, flat, flat_product
from eqprop.gdu.patient import EXPLODED, GAP, MOST_STEPS, Patient, march, size_of
from eqprop.gdu.verdict import Finding, nice, percent
from eqprop.relax import Phase, relax
from eqprop.state import State, distance, first_bad_layer, layer_name

LONGER = (4, 64)
"""Free phases, in units of T: to see whether the residual falls, and the longest that is tried."""
SHORTEST = 50
"""What counts as T there, where T is smaller."""
FALLS = 0.7
"""A residual that falls below this share of itself is on its way down."""
SMALLER = (0.5, 0.25, 0.125)
"""The steps that are tried, in units of the model's own."""
TIE = "Tie the feedback to the forward weights (its transpose), or give the net by a Phi or an energy."


def settles(p: Patient) -> Finding | str:
    """Finite? On its way? Back and forth? And does the gradient suffer?"""
    free, tolerance = p.free, max(p.floor, 1e-9)
    residual = float(free.residual.max())
    if not residual < EXPLODED:
        return _explodes(p)
    if residual <= tolerance:
        return f"settles (residual {residual:.1e})"
    found = _find_rest(p, tolerance)
    name, gap = p.harm(p.as_it_is, p.in_float64) if found.cause in CURABLE else ("", math.inf)
    if gap <= GAP:
        return f"settles well enough (residual {residual:.1e}, the gradient differs by {gap:.1%} from that at rest)"
    share = float((free.residual > tolerance).double().mean())
    shown = f"after T = {p.ep.T} steps {share:.0%} of the samples still move (residual {residual:.1e}){found.shown_by}"
    if name:
        shown += f", and the gradient of {name} is off by {percent(gap)}"
    change = {"T": _enough(p)} if found.cause == "T" else found.change
    return replace(found, shown_by=shown, change=change)


CURABLE = ("T", "two-cycle", "eps")
"""Where a state of rest was found, so that the harm of not being there can be measured."""


def _find_rest(p: Patient, tolerance: float) -> Finding:
    """Longer, alternating, or with smaller steps: the cause if the gradient suffers."""
    # A state that is not on its way down is first given other steps, then more of the same.
    falls = not _returns(p) and _falls(p, tolerance)
    longer = _longer(p, tolerance) if falls else None
    found = longer or _alternating(p, tolerance) or _smaller_step(p, tolerance, p.free.state)
    found = found or (None if falls else _longer(p, tolerance))
    if found is not None:
        return found
    shown = f" and after {LONGER[-1]} times as many, with smaller steps too"
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
    return Finding("T", "", verified=True)


def _enough(p: Patient) -> int:
    """A round number of steps after which the state is at rest, measured by how far the nudge moves it."""
    nudge = Nudge(p.cost, p.y, p.ep.beta)
    rest = tuple(layer.to(p.x.dtype) for layer in p.rest)
    moved = relax(p.model, p.x, Phase(p.ep.K, checked=False), rest, nudge).state
    near = 0.05 * float(distance(moved, rest, 1).max())
    state, done = p.free.state, p.ep.T
    while done < MOST_STEPS and not float(distance(state, rest, 1).max()) < near:
        steps = max(done // 4, 1)
        state, done = march(p, state, steps, 0.0).state, done + steps
    return int(nice(done))


def _alternating(p: Patient, tolerance: float) -> Finding | None:
    if not p.model.bipartite or p.ep.schedule == "alternating":
        return None
    there = relax(p.model, p.x, Phase(4 * p.ep.T, "alternating", stop="settled", still=1e-12, checked=False), p.start)
    if not float(there.residual.max()) <= max(tolerance, 1e-7):
        return None
    p.take_rest(there.state)
    return Finding("two-cycle", BACK, {"schedule": "alternating"}, verified=True)


def _smaller_step(p: Patient, tolerance: float, state: State) -> Finding | None:
    """s + a (F(s) - s) rests where F does; for an energy it is the step a eps."""
    begun = state if first_bad_layer(state) is None and size_of(state) < EXPLODED else p.start
    for a in SMALLER:
        there = march(p, begun, int(4 * p.ep.T / a), tolerance, a)
        if there.rests(max(tolerance, 1e-7)):
            break
    else:
        return None
    p.take_rest(there.state)
    eps = p.model.nudge_scale
    if eps != 1.0:
        shown = f", eps = {eps:g} oversteps the energy's minimum"
        return Finding("eps", shown, {"eps": float(f"{a * eps:.2g}")}, verified=True)
    advice = f"Take smaller steps, s + {a:g} (F(s) - s), which rest where F does (tried), or lower the weights."
    return Finding("two-cycle", BACK, advice=advice)


BACK = ", two steps bringing back what one step moves"


def _explodes(p: Patient) -> Finding:
    found = _smaller_step(p, max(1e-9, 64 * torch.finfo(p.x.dtype).eps), p.start)
    layers = [layer_name(p.model.layer_names, n) for n in range(len(p.start))]
    large = [float(v.abs().max()) for v in p.free.state]
    worst_layer = max(range(len(large)), key=lambda n: math.inf if math.isnan(large[n]) else large[n])
    shown = f"after T = {p.ep.T} steps layer {layers[worst_layer]} is at {large[worst_layer]:.1e}"
    if found is not None:
        return replace(found, shown_by=shown + found.shown_by)
    return Finding(
        "diverges",
        f"{shown}, and with smaller steps too",
        advice="Lower the weights, or bound the states: sigma(s) in the energy, squash, or a clip in project.",
    )
