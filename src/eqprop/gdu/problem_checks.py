"""What the doctor asks of a problem before it runs it for long: numbers, samples, targets, formulas, the cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from eqprop.cost import Problem, SquaredError
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators.base import trainable
from eqprop.gdu.examination import EXPLODED, Examination, size_of
from eqprop.gdu.lockstep import Linearised
from eqprop.gdu.verdict import Finding
from eqprop.state import State, detach, distance, first_bad_layer, layer_name

BOUNDED = 1e3
"""Outputs that huge states drive beyond this have no bounds."""
SAME = 1e-6
"""Relative distance up to which two evaluations of one formula, or two states of rest, count as the same."""

Checks = dict[str, Callable[[Examination], Finding | str]]
"""A check returns what it measured, or the cause it found."""


def _numbers(p: Examination) -> Finding | str:
    named: dict[str, Tensor] = {"x": p.problem.x, "y": p.problem.y, **p.problem.theta}
    bad = next((name for name, v in named.items() if not bool(torch.isfinite(v).all())), None)
    if bad is None:
        return "parameters, inputs and targets are finite"
    count = int((~torch.isfinite(named[bad])).sum())
    return Finding("bad-numbers", f"{count} of {named[bad].numel()} elements of {bad} are not", advice="Look there.")


@torch.no_grad()
def _repeatable(p: Examination) -> Finding | str:
    s, drive = p.start, p.problem.model.drive(p.problem.x)
    for _ in range(3):
        s = p.problem.model.step(drive, s)
    apart = _scatter(p.problem.model, p.problem.x, s)
    if apart == 0.0:
        return "the transition repeats itself"
    still = copy.deepcopy(p.problem.model).eval()
    repeats = p.problem.model.training and _scatter(still, p.problem.x, s) == 0.0
    advice = "Call model.eval(): the transition then repeats itself." if repeats else HIDDEN
    return Finding("random", f"the same state gives two next states, {apart:.1e} apart", advice=advice)


HIDDEN = (
    "Look for noise, a stored state, or dropout in a module that F holds without being a part of the model: "
    "model.eval() does not reach it, its own eval() does."
)


def _scatter(model: Dynamics, x: Tensor, s: State) -> float:
    """How far apart steps from one state end."""
    drive = model.drive(x)
    return max(float(distance(model.step(drive, s), model.step(drive, s), 1).max()) for _ in range(3))


@torch.no_grad()
def _separate(p: Examination) -> Finding | str:
    if len(p.problem.x) < 2:
        return "one sample alone"
    s = p.start
    for _ in range(3):
        s = p.problem.model.transition(p.problem.x, s)
    whole = p.problem.model.transition(p.problem.x, s)
    alone = p.problem.model.transition(p.problem.x[:1], tuple(layer[:1] for layer in s))
    apart = float(distance(alone, tuple(layer[:1] for layer in whole), 1).max())
    limit = math.sqrt(torch.finfo(p.problem.x.dtype).eps) * max(1.0, size_of(whole))
    if not apart <= limit:
        return Finding(
            "mixing",
            f"the first sample moves by {apart:.1e} more or less when it is alone",
            advice="Make F a function of each sample: no normalisation over the batch (dimension 0).",
        )
    return "samples do not see each other"


def _held(p: Examination) -> Finding | str:
    rates = p.rates
    if not isinstance(rates, torch.optim.Optimizer):
        return "no optimizer given"
    held = {id(v) for group in rates.param_groups for v in group["params"]}
    missing = [name for name, v in trainable(p.problem.model).items() if id(v) not in held]
    if missing:
        return Finding(
            "optimizer",
            f"{len(missing)} of {len(trainable(p.problem.model))} are not in it ({', '.join(missing)})",
            advice="Make the optimizer from model.parameters() after the model is built and moved.",
        )
    return "the optimizer holds every parameter"


def _targets(p: Examination) -> Finding | str:
    if not isinstance(p.problem.cost, SquaredError):
        return "the cost is not the squared error"
    y, (low, high) = p.problem.y, reach(p.problem)
    if max(abs(low), abs(high)) > BOUNDED:
        return "the outputs have no bounds"
    beyond = float(torch.maximum(y.max() - high, low - y.min()))
    if beyond > 0.1 * (high - low):
        return Finding(
            "targets",
            f"they go from {float(y.min()):.3g} to {float(y.max()):.3g}, the outputs from {low:.3g} to {high:.3g}",
            advice="Scale the targets into the range of the outputs, or give the output layer another activation.",
        )
    return f"targets lie within the outputs' reach, {low:.3g} to {high:.3g}"


@torch.no_grad()
def reach(problem: Problem) -> tuple[float, float]:
    """The range of the outputs: what squash and projection, or the transition, make of huge states."""
    like = problem.model.init_state(problem.x)
    source = torch.Generator().manual_seed(0)
    outputs = []
    for _ in range(8):
        signs = [torch.randint(0, 2, v.shape, generator=source).to(v) * 2 - 1 for v in like]
        huge = tuple(EXPLODED * v for v in signs)
        made = (
            problem.model.project(problem.model.squash(huge)) if isinstance(problem.model, PrimitiveDynamics) else None
        )
        outputs.append((made or problem.model.transition(problem.x, huge))[0])
    found = torch.stack(outputs)
    return float(found.min()), float(found.max())


def _formulas(p: Examination) -> Finding | str:
    """Hand-written dPhi/ds and dPhi/dtheta against automatic differentiation, at random states."""
    model = p.wide.model
    if not isinstance(model, PrimitiveDynamics):
        return "no Phi to check formulas against"
    if not model.conservative:
        return "its ways back are its own, so F is the gradient of no Phi: updates are one-sided"
    if not model.by_hand:
        return "Phi is differentiated automatically"
    source = torch.Generator().manual_seed(0)
    draw = [tuple(torch.rand(v.shape, generator=source).to(v.double()) for v in p.start) for _ in range(2)]
    with torch.no_grad():
        by_hand = model.gradient(model.drive(p.wide.x), draw[0])
    theirs = detach(model.autodiff_gradient(p.wide.x, draw[0]))
    layers = {layer_name(model.layer_names, n): pair for n, pair in enumerate(zip(by_hand, theirs, strict=True))}
    name, apart = max(((n, _apart(*pair)) for n, pair in layers.items()), key=lambda item: item[1])
    part, off = max(model.parts_apart(p.wide.x, draw[0]).items(), key=lambda item: item[1], default=("", 0.0))
    if off > SAME:
        shown = f"{part} is off by {off:.1%} of the derivative of its forward map"
        return Finding("formula", shown, advice="Correct it, or leave it out: autodiff stands in for it.")
    if apart > SAME and not _slope_left_out(model):
        shown = f"gradient() of layer {name} is off by {apart:.1%} of the derivative that autodiff finds"
        return Finding(
            "formula", shown, advice="Correct gradient(), or leave it out: autodiff_gradient stands in for it."
        )
    mine, oracle = model.contrast(p.wide.x, *draw), model.autodiff_contrast(p.wide.x, *draw)
    name, apart = max(((n, _apart(mine[n], oracle[n])) for n in oracle if n in mine), key=lambda item: item[1])
    if apart > SAME:
        shown = f"contrast() of {name} is off by {apart:.1%} of the derivative that autodiff finds"
        return Finding(
            "formula", shown, advice="Correct contrast(), or leave it out: autodiff_contrast stands in for it."
        )
    return "hand-written formulas are the derivatives of Phi"


def _derivatives(p: Examination) -> Finding | str:
    """Automatic derivatives of a step against finite differences, at a random state: a detach cuts them off in silence.

    Differences count where those of two lengths agree, so that a kink between them is not taken for a cut.
    """
    model, x = p.wide.model, p.wide.x
    source = torch.Generator().manual_seed(1)
    s = tuple(torch.rand(v.shape, generator=source).to(v.double()) for v in p.start)
    ways = [torch.randn(v.shape, generator=source).to(v) for v in s]
    around = Linearised(model, x, s)
    worst = 0.0
    for n, way in enumerate(ways):
        along = tuple(way if m == n else torch.zeros_like(v) for m, v in enumerate(s))
        found, (long, short) = around.product(along), (_difference(model, x, s, along, h) for h in DIFFERENCES)
        for m, (mine, a, b) in enumerate(zip(found, long, short, strict=True)):
            size = max(float(mine.norm()), float(b.norm()))
            if not float((a - b).norm()) <= 1e-3 * size or size <= 1e-6 * float(way.norm()):
                continue
            off = float((mine - b).norm()) / size
            if off > 0.1:
                names = [layer_name(model.layer_names, k) for k in (m, n)]
                shown = (
                    f"the derivative of the step of {names[0]} by {names[1]} is off by {off:.0%} of what finite "
                    "differences measure"
                )
                return Finding("cut", shown, advice="Look for detach(), .data, .item() or no_grad() on its way.")
            worst = max(worst, off)
    return f"automatic derivatives are those of finite differences, to {worst:.0e}"


DIFFERENCES = (1e-4, 1e-5)


@torch.no_grad()
def _difference(model: Dynamics, x: Tensor, s: State, way: State, h: float) -> State:
    """(F(s + h way) - F(s - h way)) / 2h."""
    drive = model.drive(x)
    there, back = (model.step(drive, tuple(v + c * w for v, w in zip(s, way, strict=True))) for c in (h, -h))
    return tuple((a - b) / (2 * h) for a, b in zip(there, back, strict=True))


def _slope_left_out(model: Dynamics) -> bool:
    """The authors' energy-based nets leave sigma' out of the output's step on purpose."""
    return getattr(model, "output_slope", True) is False


def _apart(a: Tensor, b: Tensor) -> float:
    size = max(float(a.detach().norm()), float(b.detach().norm()))
    return float((a - b).detach().norm()) / size if size else 0.0


def _pulls(p: Examination) -> Finding | str:
    s = p.free.state
    if first_bad_layer(s) is not None:
        return "not measured: the state is not finite"
    with torch.no_grad():
        loss = float(p.problem.cost.values(s, p.problem.y, p.problem.theta).mean())
        pull = size_of(p.problem.pull(s))
    if pull == 0.0 and abs(loss) > 0.0:
        return Finding(
            "no-pull",
            f"the loss is {loss:.3g}, its derivative by every neuron is 0",
            advice="Use a cost that is differentiable in s: no argmax, round or detach in it.",
        )
    return f"the cost pulls by up to {pull:.1e}"


BEFORE: Checks = {
    "numbers": _numbers,
    "repeatable": _repeatable,
    "samples": _separate,
    "optimizer": _held,
    "targets": _targets,
    "formulas": _formulas,
    "derivatives": _derivatives,
    "cost": _pulls,
}
"""In turn, before anything is run for long; the first that fails is the cause."""
