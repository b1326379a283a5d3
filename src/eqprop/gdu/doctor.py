"""`doctor`: why does this net not learn by EP? The first cause, the number that shows it, and the remedy.

EP's gradient is taken apart link by link (see `eqprop.gdu.patient`): a net whose state is not quite at rest, or whose
Jacobian is not quite symmetric, is not accused of it as long as its gradient does not suffer.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem, SquaredError
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import EP
from eqprop.estimators.base import trainable
from eqprop.functional import FromFunction
from eqprop.gdu.lockstep import asymmetry, flat, flat_product
from eqprop.gdu.patient import (
    EXPLODED,
    FAINT,
    GAP,
    NEAR,
    Patient,
    Rates,
    Symptoms,
    audible,
    least_cosine,
    march,
    nudged,
    size_of,
    whole_cosine,
)
from eqprop.gdu.settling import TIE, settles
from eqprop.gdu.trial import attempt, tried
from eqprop.gdu.verdict import Diagnosis, Finding, Voice, nice, percent
from eqprop.messages import shown, unknown
from eqprop.relax import Phase, prepare, relax
from eqprop.state import State, detach, distance, first_bad_layer, layer_name

TURNED = 0.7
"""The exact gradient is missed where the cosine to it falls below this in some parameter."""
ASTRAY = 0.1
"""The same for all parameters together, and for what the nudge's way around squash does alone: it weighs the outputs'
errors by other positive numbers, and many nets learn with a cosine of a few tenths in some parameter."""
LOST = 0.2
"""K is too short where a parameter's update is below this share of the complete one."""
SILENT, SATURATED = 0.9, 1e-3
"""A layer is silent where sigma' is below the second in more than the first of its neurons, over all samples."""
UNHEARD = 1e-9
"""A gradient below this share of the cost's pull is none, and so is a pull below this share of the state."""
BOUNDED = 1e3
"""Outputs that huge states drive beyond this have no bounds."""
SAME = 1e-6
"""Relative distance up to which two evaluations of one formula, or two states of rest, count as the same."""
TRIAL_STEPS, MORE_STEPS = 5, 20
"""Steps of the optimizer that are tried on the batch, and those by which a better rate is chosen."""
TOO_LITTLE, WORTHWHILE = 1e-4, 1e-2
"""A rate is too small where the trial lowers the loss by less than the first share of it, and a larger rate by more
than the second."""
TOO_MUCH = 0.1
"""A rate is too large where the trial raises the loss by more than this share of it: a net that is nearly trained goes
up and down a little at any constant rate."""


Checks = dict[str, Callable[[Patient], Finding | str]]
"""A check returns what it measured, or the cause it found."""


@in_own_precision
def doctor(
    model: Dynamics,
    cost: Cost,
    x: Tensor,
    y: Tensor,
    ep: EP | None = None,
    *,
    state: State | None = None,
    rates: Rates = None,
    voice: Voice = "python",
) -> Diagnosis:
    """Why EP does not learn on this batch: the first cause found, with its remedy, or none.

        print(eqprop.doctor(model, cost, x, y, EP(T=30, K=10, beta=0.1), rates=optimizer))

    ep          the estimator as it is used; by default EP(T=1000, K=20, beta=0.01)
    state       where its free phase begins, if not at `model.init_state(x)`
    rates       one learning rate, rates by parameter name ("*" for every other), or the optimizer
    voice       "python" or "command line": whose terms remedies are written in

    The model, its `.grad` and the optimizer stay as they are. Stacked networks are examined one at a time.
    """
    if voice not in get_args(Voice):
        raise ValueError(unknown("voice", voice, get_args(Voice)))
    began = time.perf_counter()
    patient = Patient(model, cost, x, y, _one_sign(ep or EP(T=1000, K=20, beta=0.01)), Symptoms(state, rates, voice))
    return replace(examine(patient), seconds=time.perf_counter() - began)


def _one_sign(ep: EP) -> EP:
    if not isinstance(ep, EP):
        raise TypeError(
            f"The doctor examines EP; got {type(ep).__name__}. Give it an EP with the same T, K and beta; of any other "
            "estimator, eqprop.gdu.compare_gradients says how far its gradient is off."
        )
    return ep.with_sign(1) if ep.nudging == "random-sign" else ep


def examine(patient: Patient, only: Collection[str] | None = None) -> Diagnosis:
    """Check after check, or only those named, up to the first that fails."""
    _check(patient)
    voice = patient.symptoms.voice
    passed: dict[str, str] = {}

    def first_cause(checks: Checks, patient: Patient) -> Finding | None:
        for name, check in checks.items():
            if only is None or name in only:
                if isinstance(found := check(patient), Finding):
                    return tried(patient, found)
                passed[name] = found
        return None

    if (cause := first_cause(BEFORE, patient)) is not None:
        return Diagnosis(cause, passed, voice=voice)
    if isinstance(rest := settles(patient), Finding):
        return Diagnosis(tried(patient, rest), passed, voice=voice)
    passed["settles"], patient = rest.note, rest.patient
    if (cause := first_cause(AFTER, patient)) is not None:
        return Diagnosis(cause, passed, voice=voice)
    return Diagnosis(None, passed, patient.remarks(), voice=voice, restless=rest.closer)


def _check(patient: Patient) -> None:
    model, x = patient.model, patient.x
    if model.sample_dims(x) != 1:
        raise ValueError(
            f"The input x has shape {tuple(x.shape)}, that of stacked networks. Examine one network at a time: "
            "eqprop.models.unstack(model, r)."
        )
    if not trainable(model):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter; expected at least one. Look for requires_grad_(False)."
        )
    patient.cost.check(prepare(model, x, patient.symptoms.state, None), patient.y)
    _check_rates(patient)


def _check_rates(patient: Patient) -> None:
    rates = patient.symptoms.rates
    if isinstance(rates, torch.optim.LBFGS):
        raise ValueError("LBFGS steps by a closure, which the doctor does not have. Omit rates, or give another one.")
    if rates is None or isinstance(rates, torch.optim.Optimizer):
        return
    names = [name for part in (patient.model, patient.cost) for name, _ in part.named_parameters()]
    given: Mapping[str, object] = rates if isinstance(rates, Mapping) else {"*": rates}
    for name, rate in given.items():
        if name not in (*names, "*"):
            raise ValueError(unknown("parameter", name, [*names, "*"]))
        if not isinstance(rate, Real) or not 0.0 <= float(rate) < math.inf:
            what = f"rates[{name!r}]" if isinstance(rates, Mapping) else "rates"
            raise ValueError(f"{what} is {shown(rate)}; expected a learning rate, a number from 0 on.")


# The checks, in the order in which they are made. Each returns what it measured, or the cause it found.


def _numbers(p: Patient) -> Finding | str:
    named: dict[str, Tensor] = {"x": p.x, "y": p.y, **p.theta}
    bad = next((name for name, v in named.items() if not bool(torch.isfinite(v).all())), None)
    if bad is None:
        return "parameters, inputs and targets are finite"
    count = int((~torch.isfinite(named[bad])).sum())
    return Finding("bad-numbers", f"{count} of {named[bad].numel()} elements of {bad} are not", advice="Look there.")


@torch.no_grad()
def _repeatable(p: Patient) -> Finding | str:
    drive = p.model.drive(p.x)
    s = p.start
    for _ in range(3):
        s = p.model.step(drive, s)
    apart = max(float(distance(p.model.step(drive, s), p.model.step(drive, s), 1).max()) for _ in range(3))
    if apart > 0.0:
        shown = f"the same state gives two next states, {apart:.1e} apart"
        return Finding("random", shown, advice="Look for dropout (model.eval() turns it off), noise or a stored state.")
    return "the transition repeats itself"


@torch.no_grad()
def _separate(p: Patient) -> Finding | str:
    if len(p.x) < 2:
        return "one sample alone"
    s = p.start
    for _ in range(3):
        s = p.model.transition(p.x, s)
    whole = p.model.transition(p.x, s)
    alone = p.model.transition(p.x[:1], tuple(layer[:1] for layer in s))
    apart = float(distance(alone, tuple(layer[:1] for layer in whole), 1).max())
    limit = math.sqrt(torch.finfo(p.x.dtype).eps) * max(1.0, size_of(whole))
    if not apart <= limit:
        return Finding(
            "mixing",
            f"the first sample moves by {apart:.1e} more or less when it is alone",
            advice="Make F a function of each sample: no normalisation over the batch (dimension 0).",
        )
    return "samples do not see each other"


def _held(p: Patient) -> Finding | str:
    rates = p.symptoms.rates
    if not isinstance(rates, torch.optim.Optimizer):
        return "no optimizer given"
    held = {id(v) for group in rates.param_groups for v in group["params"]}
    missing = [name for name, v in trainable(p.model).items() if id(v) not in held]
    if missing:
        return Finding(
            "optimizer",
            f"{len(missing)} of {len(trainable(p.model))} are not in it ({', '.join(missing)})",
            advice="Make the optimizer from model.parameters() after the model is built and moved.",
        )
    return "the optimizer holds every parameter"


def _targets(p: Patient) -> Finding | str:
    if not isinstance(p.cost, SquaredError):
        return "the cost is not the squared error"
    low, high = reach(p)
    if max(abs(low), abs(high)) > BOUNDED:
        return "the outputs have no bounds"
    beyond = float(torch.maximum(p.y.max() - high, low - p.y.min()))
    if beyond > 0.1 * (high - low):
        return Finding(
            "targets",
            f"they go from {float(p.y.min()):.3g} to {float(p.y.max()):.3g}, the outputs from {low:.3g} to {high:.3g}",
            advice="Scale the targets into the range of the outputs, or give the output layer another activation.",
        )
    return f"targets lie within the outputs' reach, {low:.3g} to {high:.3g}"


@torch.no_grad()
def reach(p: Problem) -> tuple[float, float]:
    """The range of the outputs: what squash and projection, or the transition, make of huge states."""
    like = p.model.init_state(p.x)
    source = torch.Generator().manual_seed(0)
    outputs = []
    for _ in range(8):
        signs = [torch.randint(0, 2, v.shape, generator=source).to(v) * 2 - 1 for v in like]
        huge = tuple(EXPLODED * v for v in signs)
        made = p.model.project(p.model.squash(huge)) if isinstance(p.model, PrimitiveDynamics) else None
        outputs.append((made or p.model.transition(p.x, huge))[0])
    found = torch.stack(outputs)
    return float(found.min()), float(found.max())


def _formulas(p: Patient) -> Finding | str:
    """Hand-written dPhi/ds and dPhi/dtheta against automatic differentiation, at random states."""
    model = p.wide.model
    if not isinstance(model, PrimitiveDynamics):
        return "no Phi to check formulas against"
    if not _by_hand(model):
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


def _by_hand(model: PrimitiveDynamics) -> bool:
    """Whether dPhi/ds or dPhi/dtheta has a formula of its own; models made of functions have none."""
    if isinstance(model, FromFunction):
        return False
    return any(getattr(type(model), name) is not getattr(PrimitiveDynamics, name) for name in ("gradient", "contrast"))


def _slope_left_out(model: Dynamics) -> bool:
    """The authors' energy-based nets leave sigma' out of the output's step on purpose."""
    return getattr(model, "output_slope", True) is False


def _apart(a: Tensor, b: Tensor) -> float:
    size = max(float(a.detach().norm()), float(b.detach().norm()))
    return float((a - b).detach().norm()) / size if size else 0.0


def _pulls(p: Patient) -> Finding | str:
    s = p.free.state
    if first_bad_layer(s) is not None:
        return "not measured: the state is not finite"
    with torch.no_grad():
        loss = float(p.cost.values(s, p.y, p.theta).mean())
        pull = size_of(p.pull(s))
    if pull == 0.0 and abs(loss) > 0.0:
        return Finding(
            "no-pull",
            f"the loss is {loss:.3g}, its derivative by every neuron is 0",
            advice="Use a cost that is differentiable in s: no argmax, round or detach in it.",
        )
    return f"the cost pulls by up to {pull:.1e}"


def _start(p: Patient) -> Finding | str:
    """Where the given start leads, against where the model's own does."""
    if p.symptoms.state is None:
        return _saddle(p)
    own = march(p, p.model.init_state(p.x), max(p.ep.T, 1), p.floor)
    if not own.rests(1e-4):
        return "the model's own start does not settle either"
    away, limit = distance(p.free.state, own.state, 1), 0.05 * max(1.0, size_of(own.state))
    if float(away.max()) > limit:
        share = float((away > limit).double().mean())
        return Finding(
            "start",
            f"{share:.0%} of the samples end up to {float(away.max()):.2g} away from where model.init_state(x) leads, "
            "which is where errors are measured",
            advice="Begin with model.init_state(x) (state=None), or with the last states of the same samples.",
        )
    return "the given start leads where the model's own does"


def _saddle(p: Patient) -> Finding | str:
    """A state that rests only because nothing has pushed it yet."""
    if not float(p.free.residual.max()) <= p.floor:
        return "the model's own"
    source = torch.Generator().manual_seed(0)
    pushed = tuple(v + 1e-4 * torch.randn(v.shape, generator=source).to(v) for v in p.free.state)
    there = march(p, pushed, max(p.ep.T, 100), 1e-7)
    away = float(distance(there.state, p.free.state, 1).max())
    if there.rests(1e-3) and away > 0.05:
        return Finding(
            "start",
            f"it rests on a saddle: pushed by 1e-4, it ends {away:.2g} away",
            advice="Let init_state return small random values in place of a state where no neuron drives another.",
        )
    return "the state of rest holds against a push"


def _inputs(p: Patient) -> Finding | str:
    if len(p.x) < 2 or float((p.y.double() - p.y[0].double()).abs().max()) == 0.0:
        return "one target alone"
    s = p.rest
    spread = max(float((layer - layer[0]).abs().max()) for layer in s)
    if spread > SAME * max(1.0, size_of(s)):
        return f"samples end up to {spread:.1e} apart"
    alike = float((p.x - p.x[0]).abs().max()) == 0.0
    why = (
        f"all {len(p.x)} inputs are the same" if alike else f"{len(p.x)} inputs lead to states only {spread:.1e} apart"
    )
    return Finding(
        "inputs", why, advice="Look at how batches are made and whether the model reads x, and at its scale."
    )


def _zero_weights(p: Patient) -> Finding | str:
    weights = {name: v for name, v in trainable(p.model).items() if v.dim() > 1}
    zero = [name for name, v in weights.items() if not bool(v.any())]
    still = [name for name in weights if not bool(p.in_float64[name].any())]
    if zero and still:
        return Finding(
            "zero-weights",
            f"{', '.join(zero)} {'are' if len(zero) > 1 else 'is'} all zero, and {', '.join(still)} "
            f"{'get' if len(still) > 1 else 'gets'} no update",
            advice="Draw the initial weights at random, such as uniformly within 1 / sqrt(inputs of the neuron).",
        )
    return "weights are not zero"


def _silent(p: Patient) -> Finding | str:
    """Whether the cost's pull reaches the parameters, by EP and by the exact gradient."""
    pull = size_of(p.push)
    if not pull > UNHEARD * max(1.0, size_of(p.rest)):
        return "the targets are met: nothing pulls"
    ep, exact = (max(float(g.abs().max()) for g in grads.values()) for grads in (p.in_float64, p.exact))
    if min(ep, exact) > UNHEARD * pull:
        return f"the cost pulls by {pull:.1e}, and updates reach {ep:.1e}"
    shown = f"the cost pulls by {pull:.1e}, yet "
    if ep <= UNHEARD * pull:
        shown += f"no parameter gets an update above {ep:.1e}"
    else:
        shown += f"the exact gradient is {exact:.1e} everywhere, and EP's update of {ep:.1e} follows none"
    moved = flat(p.around.product(tuple(torch.zeros_like(v) for v in p.push), p.push))
    held = "" if bool(moved.any()) else "; the nudge moves no neuron"
    return Finding("silent", shown + held, advice=OUTPUTS_INSIDE)


def _saturated(p: Patient) -> Finding | str:
    shares = saturation(p)
    name, share = max(shares.items(), key=lambda item: item[1], default=("", 0.0))
    if share > SILENT:
        largest = float(p.x.abs().max())
        return Finding(
            "silent",
            f"{share:.0%} of the neurons of {name} have sigma' below {SATURATED:g}, and inputs reach {largest:.3g}",
            advice="Scale the inputs to about 0 ... 1, or lower the weights into that layer.",
        )
    return f"at most {share:.0%} of a layer is saturated"


def _depth(p: Patient) -> Finding | str:
    """How much of the signal is left in the weights: it fades on its way in, or on its way back."""
    sizes = {name: size for name, g in p.exact.items() if (size := float(g.norm())) > 0.0}
    weights = [name for name in sizes if p.exact[name].dim() > 1]
    if not weights:
        return "no weight gets an update"
    loud, faint = max(sizes, key=sizes.__getitem__), min(weights, key=sizes.__getitem__)
    shown = f"the gradient of {faint} is {sizes[faint] / sizes[loud]:.1e} of that of {loud}"
    lost = [name for name in weights if sizes[name] <= FAINT * sizes[loud]]
    if not lost:
        return shown
    share = f"{len(lost)} of {len(weights)} weights get less than {FAINT:g} of it"
    return Finding("fades", f"{shown}; {share}", advice=LOUDER)


LOUDER = (
    "Raise the gain of the initial weights until samples differ in every layer, use an activation with a slope near 1, "
    "add skips, or fewer layers."
)


OUTPUTS_INSIDE = (
    "Begin with outputs inside the range of the clip: small output weights and a bias within it (output_bias=0.1 and "
    "output_scale=0.1 of an experiment), or a smooth activation."
)


@torch.no_grad()
def saturation(p: Patient) -> dict[str, float]:
    """The share of saturated neurons per layer, over all samples, by squash or the model's activation."""
    model, s = p.wide.model, p.rest
    if not isinstance(model, PrimitiveDynamics):
        return {}
    slopes = p.around.squashed(tuple(torch.ones_like(layer) for layer in s))
    own = getattr(getattr(model, "activation", None), "slope", None)
    if all(bool((v == 1.0).all()) for v in slopes) and own is not None:
        slopes = tuple(own(layer) for layer in s)
    return {
        layer_name(model.layer_names, n): float((v.abs() < SATURATED).double().mean()) for n, v in enumerate(slopes)
    }


def _attracts(p: Patient) -> Finding | str:
    if p.series.grows:
        return Finding(
            "never-settles",
            f"at the state of rest a push grows, a thousandfold after {p.series.terms} steps",
            advice="Lower the weights, or begin elsewhere: this state does not attract.",
        )
    return f"a push dies out within {p.series.terms} steps"


def _read_by_phi(p: Patient) -> Finding | str:
    model = p.wide.model
    names = model.outside_phi(p.wide.x) if isinstance(model, PrimitiveDynamics) else []
    learned = [name for name in names if bool(p.exact[name].any())]
    if learned:
        size = max(float(p.exact[name].norm()) for name in learned)
        return Finding(
            "outside-phi",
            f"EP gives {', '.join(learned)} the gradient 0, the exact one is {size:.1e}",
            advice="Move it into Phi (a gain inside squash becomes a factor of the weights), train it by BPTT or RBP, "
            "or freeze it with requires_grad_(False).",
        )
    return "Phi reads every parameter that has a gradient"


def _symmetric(p: Patient) -> Finding | str:
    """The limit of EP, its nudge inside squash, against recurrent backprop: what no T, K or beta cures."""
    name, value = least_cosine(p.inside, p.exact)
    if value >= TURNED:
        where = "were the nudge inside sigma, " if p.nudge_bypasses else ""
        return f"{where}the limit of EP would have cosines of at least {value:.3f} to the exact gradient"
    odd = asymmetry(flat_product(p.around), flat(p.rest), 0)
    shown = f"in the limit EP's gradient of {name} has a cosine of {value:.2f} to the exact one"
    return Finding("asymmetric", f"{shown}; asymmetry {odd:.2f} (0 symmetric, 1 antisymmetric)", advice=TIE)


def _nudge_site(p: Patient) -> Finding | str:
    """What the nudge's way around squash does to the limit."""
    value = whole_cosine(p.series.complete, p.exact)
    if value >= ASTRAY:
        if not p.nudge_bypasses:
            return "the nudge does not bypass sigma"
        return (
            f"the nudge bypasses sigma, which leaves the limit of EP a cosine of {value:.3f}: a step still leads down"
        )
    shown = f"in the limit EP's gradient has a cosine of {value:.2f} to the exact one"
    if attempt(p, {"nudge_site": "inside"}) is None:
        return Finding("nudge-site", shown, advice="Add the nudge to the argument of sigma where the step is written.")
    return Finding("nudge-site", shown, {"nudge_site": "inside"})


def _rounding(p: Patient) -> Finding | str:
    gap = p.harm(p.at_rest, p.in_float64)
    if float(p.free.residual.max()) <= p.floor:  # at rest but for rounding, the state's own included
        gap = max(gap, p.harm(nudged(p, p.ep, p.free.state), p.in_float64))
    if gap <= GAP and not _refused(p):
        return f"rounding moves the gradient by {gap:.1e}"
    for factor in (10.0, 100.0, 1e3, 1e4, 1e5, 1e6):
        beta = nice(abs(float(p.ep.beta)) * factor)
        ep = replace(p.ep, beta=beta)
        state = tuple(layer.to(p.x.dtype) for layer in p.rest)
        if beta < 1.0 and not _refused(replace(p, ep=ep)) and p.harm(nudged(p, ep, state), p.series.short) < NEAR / 4:
            return Finding("rounding", _off(p, gap), {"beta": beta}, "Or use float64.")
    return Finding("rounding", _off(p, gap), {"dtype": "float64"})


def _refused(p: Patient) -> bool:
    """Whether the estimator itself takes the nudge to be lost in rounding."""
    try:
        p.ep.check_nudge(p.model, p.x.dtype)
    except ValueError:
        return True
    return False


def _off(p: Patient, gap: float) -> str:
    dtype = str(p.x.dtype).removeprefix("torch.")
    return f"at beta = {float(p.ep.beta):g} in {dtype} the gradient is off by {percent(gap)}"


def _linear(p: Patient) -> Finding | str:
    gap = p.harm(p.in_float64, p.series.short)
    if gap <= GAP:
        return f"beta = {float(p.ep.beta):g} is within {gap:.1%} of the limit of small beta"
    shown = f"at beta = {float(p.ep.beta):g} the gradient is off by {percent(gap)} from that of a small beta"
    for factor in (2, 4, 10, 30, 100, 1000, 10_000):
        beta = nice(abs(float(p.ep.beta)) / factor, up=False)
        if p.harm(nudged(p.wide, replace(p.ep, beta=beta), p.rest), p.series.short) < NEAR:
            return Finding("beta", shown, {"beta": beta})
    return Finding("beta", shown, advice="Lower it by a factor of ten, and again.")


def _reaches(p: Patient) -> Finding | str:
    short, whole = p.series.short, p.series.complete
    shares = {n: float(short[n].norm() / whole[n].norm()) for n in audible(whole)}
    name, share = min(shares.items(), key=lambda item: item[1], default=("", 1.0))
    if share >= LOST:
        return f"K = {p.ep.K} steps give every parameter at least {share:.0%} of its update"
    K = p.ep.K
    while p.series.terms > K:
        K *= 2
        found = p.series_of(p.push, K).short
        if all(float(found[n].norm()) > 0.8 * float(whole[n].norm()) for n in shares):
            break
    shown = f"within K = {p.ep.K} steps {name} gets {share:.0%} of its update"
    return Finding("K", shown, {"K": int(nice(K))})


def _gradient(p: Patient) -> Finding | str:
    """All together, with the estimator as it is."""
    value = whole_cosine(p.as_it_is, p.exact)
    agree = sum(int((p.as_it_is[n] * g > 0).sum()) for n, g in p.exact.items())
    signs = agree / max(sum(int((g != 0).sum()) for g in p.exact.values()), 1)
    if value < ASTRAY:
        return Finding(
            "gradient", f"its cosine to the exact one is {value:.2f}, {signs:.0%} of signs agree", advice=ALL
        )
    found = f"EP's gradient has a cosine of {value:.3f} to the exact one, {signs:.1%} of the signs agree"
    limit = whole_cosine(p.series.complete, p.exact)
    because = p.nudge_bypasses and value < 0.99 and abs(limit - value) < 0.5 * (1.0 - value)
    return f"{found} (the nudge bypasses sigma: {limit:.3f} is the limit)" if because else found


ALL = "No single cause explains it: raise T and K, lower beta, and look at the free phase with eqprop.gdu.compare."


def _rates(p: Patient) -> Finding | str:
    if p.symptoms.rates is None:
        return "no learning rates given"
    if not any(group["lr"] for group in _optimizer(p, p.model, 1.0).param_groups):
        return Finding("rate-small", "every learning rate is 0", advice="Give a rate above 0, such as 0.1.")
    before, after = trial(p, 1.0)
    fallen = (before - after) / before if before > 0.0 else 0.0
    shown = f"{TRIAL_STEPS} steps on this batch take the loss from {before:.3g} to {after:.3g}"
    if not fallen > -TOO_MUCH:
        found = _better(p, "rate-large", shown, (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5), TOO_LITTLE)
        return found or f"no rate lowers the loss of {before:.3g} on this batch"
    if fallen < TOO_LITTLE:
        gone = f"{TRIAL_STEPS} steps on this batch lower the loss of {before:.3g} by {fallen:.1e} of it"
        found = _better(p, "rate-small", gone, [10.0**n for n in range(1, 13)], WORTHWHILE)
        return found or shown
    return shown


def _better(p: Patient, cause: str, shown: str, factors: Sequence[float], worthwhile: float) -> Finding | None:
    """The rates times the factor that leads farthest down over more steps, if that is worth the change."""
    best, at, start = math.inf, 1.0, math.inf
    for factor in factors:
        start, after = trial(p, factor, MORE_STEPS)
        if after < best:
            best, at = after, factor
        elif best < start:  # past the lowest
            break
    if not best < start * (1 - worthwhile):
        return None
    did = f"{MORE_STEPS} steps then take the loss from {start:.3g} to {best:.3g}"
    return Finding(cause, shown, _rates_times(p.symptoms.rates, at), tried=did, verified=True)


def _rates_times(rates: Rates, factor: float) -> dict[str, float]:
    if isinstance(rates, torch.optim.Optimizer):
        rates = {str(n): float(group["lr"]) for n, group in enumerate(rates.param_groups)}
    single = rates if isinstance(rates, float | int) else None
    if isinstance(rates, Mapping) and len(set(rates.values())) == 1:
        single = next(iter(rates.values()))
    if single is not None:
        return {"lr": float(f"{single * factor:.3g}")}
    return {"lr_factor": factor}


def trial(p: Patient, factor: float, steps: int = TRIAL_STEPS) -> tuple[float, float]:
    """The loss on the batch before and after some steps of a copy at rates times a factor; infinite if it bursts."""
    model, cost = copy.deepcopy(p.model), copy.deepcopy(p.cost)
    problem = Problem(model, cost, p.x, p.y)
    optimizer = _optimizer(p, model, factor)
    before, ep = _loss(problem, p), replace(p.ep, stop="settled")
    for _ in range(steps):
        optimizer.zero_grad()
        try:
            ep.backward(model, cost, p.x, p.y, p.symptoms.state)
        except ArithmeticError:
            return before, math.inf
        optimizer.step()
    after = _loss(problem, p)
    return before, after if math.isfinite(after) else math.inf


def _loss(problem: Problem, p: Patient) -> float:
    phase = Phase(p.ep.T, p.ep.schedule, stop="settled", checked=False)
    free = relax(problem.model, p.x, phase, p.symptoms.state)
    return float(problem.cost.values(free.state, p.y, problem.theta).detach().mean())


def _optimizer(p: Patient, model: nn.Module, factor: float) -> torch.optim.Optimizer:
    """The one given, for a copy of the model and without its history; SGD where only rates are given."""
    copies = trainable(model)
    rates = p.symptoms.rates
    if isinstance(rates, torch.optim.Optimizer):
        names = {id(v): name for name, v in trainable(p.model).items()}
        groups: list[dict[str, Any]] = []
        for group in rates.param_groups:
            held = [copies[names[id(v)]] for v in group["params"] if id(v) in names]
            groups.append({**group, "params": held, "lr": group["lr"] * factor})
        made: type[Any] = type(rates)
        return cast(torch.optim.Optimizer, made([g for g in groups if g["params"]]))
    by_name = rates if isinstance(rates, Mapping) else {"*": float(rates or 0.0)}
    groups = [{"params": [v], "lr": factor * by_name.get(name, by_name.get("*", 0.0))} for name, v in copies.items()]
    return torch.optim.SGD(groups)


BEFORE: Checks = {
    "numbers": _numbers,
    "repeatable": _repeatable,
    "samples": _separate,
    "optimizer": _held,
    "targets": _targets,
    "formulas": _formulas,
    "cost": _pulls,
}
AFTER: Checks = {
    "start": _start,
    "attracts": _attracts,
    "weights": _zero_weights,
    "input": _inputs,
    "silence": _silent,
    "saturation": _saturated,
    "depth": _depth,
    "phi": _read_by_phi,
    "symmetric": _symmetric,
    "rounding": _rounding,
    "beta": _linear,
    "K": _reaches,
    "nudge": _nudge_site,
    "gradient": _gradient,
    "rates": _rates,
}
"""In turn, before and after the free phase is known to settle; the first that fails is the cause."""
OF_GRADIENT = (
    *("formulas", "cost", "attracts", "weights", "silence", "depth"),
    *("phi", "symmetric", "rounding", "beta", "nudge", "gradient"),
)
"""Those that ask whether EP computes the gradient, as `eqprop.gdu.compare` does; that the free phase settles is asked
with them."""
