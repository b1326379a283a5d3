"""Try a remedy: apply it to a copy of the model and see what EP's gradient on this batch becomes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from eqprop.cost import Problem
from eqprop.dynamics import set_nudge_site
from eqprop.gdu.examination import EXPLODED, Examination, Grads, march, nudged, whole_cosine
from eqprop.gdu.verdict import Finding, nice
from eqprop.state import State, distance

LARGER, LARGEST_EPS = (4.0, 16.0, 64.0, 256.0), 0.5
"""Steps in units of the model's own, where they are too small, and the largest of an energy."""
CURED = 0.99
"""A remedy is verified where it brings the cosine of EP's gradient to the exact one to this."""
NO_WORSE = 1.05
"""Where its error is at most this multiple of what is left in the limit of small beta and large T and K, nothing but
another model or another place of the nudge takes the rest away."""
AT_REST = 1e-6
"""A state that one more step moves by less has come to rest."""


@dataclass(frozen=True)
class Trial:
    """What a change did: whether it cures, and the words that follow "tried on this batch".

    cosine      of EP's gradient to the exact one with the change; None where the state does not rest
    bypassed    whether all that is left is the nudge's way around sigma
    """

    cured: bool
    text: str
    cosine: float | None = None
    bypassed: bool = False


def tried(p: Examination, finding: Finding) -> Finding:
    """The finding with what its change does when applied; where that falls short, with the first that does cure.

    Where none does, with the one that brings the gradient closest to the exact one.
    """
    if not finding.change or finding.tried:
        return finding
    best, closest = finding, -math.inf
    for change in _changes(p, finding):
        trial = attempt(p, change)
        if trial is None:  # this model does not take it
            continue
        if trial.bypassed:
            return _inside(p, finding, change, trial)
        found = replace(finding, change=change, tried=trial.text, verified=trial.cured)
        if trial.cured:
            return found
        value = -2.0 if trial.cosine is None else trial.cosine
        if value > closest:
            best, closest = found, value
    return best


def _inside(p: Examination, finding: Finding, change: dict[str, Any], outside: Trial) -> Finding:
    """The finding where the change leaves nothing but the nudge outside sigma: with the nudge inside, if that cures."""
    both = {**change, "nudge_site": "inside"}
    inside = attempt(p, both)
    if inside is not None and inside.cured:
        text = f"{inside.text}; with the nudge left outside sigma it is {outside.cosine:.3f}"
        return replace(finding, change=both, tried=text, verified=True)
    return replace(finding, change=change, tried=f"{outside.text}; the rest is the nudge outside sigma", verified=False)


def _changes(p: Examination, finding: Finding) -> Iterator[dict[str, Any]]:
    """The change itself, then the same taken further, to where a longer walk must lead or a weaker nudge."""
    change = dict(finding.change)
    yield change
    for factor in (2, 4):
        if change.get("eps", 0.0) > p.problem.model.nudge_scale:  # larger steps need no more of them
            return
        if "eps" in change:  # smaller steps, and as many more of them
            shorter = p.problem.model.nudge_scale / change["eps"] * factor / 2
            yield {**change, "T": int(nice(p.ep.T * shorter)), "K": int(nice(p.ep.K * shorter))}
        elif "beta" in change:
            grows = abs(change["beta"]) > abs(float(p.ep.beta))
            yield {
                **change,
                "beta": nice(change["beta"] * factor) if grows else nice(change["beta"] / factor, up=False),
            }
        elif "T" in change or "K" in change:
            yield {name: int(nice(value * factor)) for name, value in change.items()}
    if "K" in change:  # a push that goes on for longer moves the state farther, and away from where it rests
        weaker = {**change, "beta": float(f"{0.1 * float(p.ep.beta):.3g}")}
        yield from (weaker, {**weaker, "T": int(nice(4 * p.ep.T))})
    if change.get("schedule") == "alternating":
        yield {**change, "schedule": "sweeps"}
    if ("K" in change or "T" in change) and (eps := p.problem.model.nudge_scale) != 1.0:
        yield from ({"eps": float(f"{a * eps:.2g}")} for a in LARGER if a * eps <= LARGEST_EPS)


def attempt(p: Examination, change: Mapping[str, Any]) -> Trial | None:
    """EP's gradient with the change applied to a copy, against the exact one; None where the model refuses it."""
    try:
        treated = applied(p, change)
        treated.ep.check_nudge(treated.problem.model, treated.problem.x.dtype)
        return _judged(treated, p.most_steps)
    except (ValueError, TypeError):
        return None


def _judged(treated: Examination, most_steps: int) -> Trial:
    """What the change did. Raises ValueError where the nudged phase refuses it, as an implicit nudge does beta = 1."""
    if not float(treated.free.residual.max()) < EXPLODED:
        return Trial(False, "the state still grows without bound")
    there = march(treated.wide, tuple(v.double() for v in treated.free.state), most_steps, 1e-12)
    if not there.rests(AT_REST):
        return Trial(False, f"the state still does not rest, residual {there.residual:.1e}")
    treated.take_rest(there.state)
    if treated.series.grows:
        return Trial(False, "at rest a push still grows")
    found = nudged(treated.problem, treated.ep, treated.free.state)
    value = whole_cosine(found, treated.exact)
    text = f"the cosine to the exact gradient is then {value:.3f}"
    left = _error(treated.series.complete, treated.exact)
    bypassed = treated.nudge_bypasses and _error(found, treated.exact) <= NO_WORSE * left
    return Trial(value >= CURED, text, value, bypassed and value < CURED)


def _error(found: Grads, exact: Grads) -> float:
    return sum(float((found[name] - g).square().sum()) for name, g in exact.items()) ** 0.5


def applied(p: Examination, change: Mapping[str, Any]) -> Examination:
    """The same with some settings changed, on a copy of the model. Raises ValueError or TypeError where it refuses."""
    phases = {name: value for name, value in change.items() if name in ("T", "K", "beta", "schedule", "form")}
    problem, state = replace(p.problem, model=copy.deepcopy(p.problem.model)), p.state
    if "dtype" in change:
        problem = problem.double()
        state = None if state is None else tuple(layer.double() for layer in state)
    if "nudge_site" in change:
        set_nudge_site(problem.model, change["nudge_site"])
    if "eps" in change:
        _set_eps(problem, p.start, change["eps"])
    return replace(p, problem=problem, ep=replace(p.ep, **phases), state=state)


@torch.no_grad()
def _set_eps(problem: Problem, s: State, eps: float) -> None:
    """Give an energy's step another size. Raises ValueError where the step does not follow."""
    model = problem.model
    old, drive = model.nudge_scale, model.drive(problem.x)
    before = model.step(drive, s)
    for name in ("eps", "nudge_scale"):
        if getattr(model, name, None) == old:
            setattr(model, name, eps)
    wanted = tuple(v + eps / old * (w - v) for v, w in zip(s, before, strict=True))
    moved = float(distance(before, s, 1).max())
    if float(distance(model.step(model.drive(problem.x), s), wanted, 1).max()) > 1e-3 * moved:
        raise ValueError(f"The step of {model.title} does not follow its eps.")
