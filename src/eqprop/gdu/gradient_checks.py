"""What the doctor asks of a net at rest: is there a signal, and does each link of EP's gradient hold?"""

from __future__ import annotations

from dataclasses import replace

import torch

from eqprop.dynamics import PrimitiveDynamics
from eqprop.estimators import Estimator
from eqprop.estimators.base import trainable
from eqprop.gdu.examination import (
    FAINT,
    GAP,
    NEAR,
    Examination,
    audible,
    least_cosine,
    march,
    nudged,
    off_by_layer,
    size_of,
    whole_cosine,
)
from eqprop.gdu.lockstep import SATURATED, asymmetry, flat, saturated, slopes
from eqprop.gdu.problem_checks import SAME, Checks
from eqprop.gdu.rates import rates_at_work
from eqprop.gdu.rest import TIE
from eqprop.gdu.trial import attempt
from eqprop.gdu.verdict import Finding, nice, percent
from eqprop.state import distance, layer_name

TURNED = 0.7
"""The exact gradient is missed where the cosine to it falls below this in some parameter."""
ASTRAY = 0.1
"""The same for all parameters together, and for what the nudge's way around squash does alone: it weighs the outputs'
errors by other positive numbers, and many nets learn with a cosine of a few tenths in some parameter."""
LOST = 0.2
"""K is too short where a parameter's update is below this share of the complete one."""
SILENT = 0.9
"""A layer is silent where more than this share of its neurons is saturated, over all samples."""
UNHEARD = 1e-9
"""A gradient below this share of the cost's pull is none, and so is a pull below this share of the state."""


def _start(p: Examination) -> Finding | str:
    """Where the given start leads, against where the model's own does."""
    if p.state is None:
        return _saddle(p)
    own = march(p.problem, p.problem.model.init_state(p.problem.x), max(p.ep.T, 1), p.floor)
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


def _saddle(p: Examination) -> Finding | str:
    """A state that rests only because nothing has pushed it yet."""
    if not float(p.free.residual.max()) <= p.floor:
        return "the model's own"
    source = torch.Generator().manual_seed(0)
    pushed = tuple(v + 1e-4 * torch.randn(v.shape, generator=source).to(v) for v in p.free.state)
    there = march(p.problem, pushed, max(p.ep.T, 100), 1e-7)
    away = float(distance(there.state, p.free.state, 1).max())
    if there.rests(1e-3) and away > 0.05:
        return Finding(
            "start",
            f"it rests on a saddle: pushed by 1e-4, it ends {away:.2g} away",
            advice="Let init_state return small random values in place of a state where no neuron drives another.",
        )
    return "the state of rest holds against a push"


def _inputs(p: Examination) -> Finding | str:
    if len(p.problem.x) < 2 or float((p.problem.y.double() - p.problem.y[0].double()).abs().max()) == 0.0:
        return "one target alone"
    s = p.rest
    spread = max(float((layer - layer[0]).abs().max()) for layer in s)
    if spread > SAME * max(1.0, size_of(s)):
        return f"samples end up to {spread:.1e} apart"
    alike = float((p.problem.x - p.problem.x[0]).abs().max()) == 0.0
    why = (
        f"all {len(p.problem.x)} inputs are the same"
        if alike
        else f"{len(p.problem.x)} inputs lead to states only {spread:.1e} apart"
    )
    return Finding(
        "inputs", why, advice="Look at how batches are made and whether the model reads x, and at its scale."
    )


def _zero_weights(p: Examination) -> Finding | str:
    weights = {name: v for name, v in trainable(p.problem.model).items() if v.dim() > 1}
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


def _silent(p: Examination) -> Finding | str:
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


def _saturated(p: Examination) -> Finding | str:
    """Whether hardly a neuron of a layer can move: over all samples, by squash or the model's activation."""
    if slopes(p.around) is None:
        return "no activation to look at"
    shares = [float(mask.double().mean()) for mask in saturated(p.around)]
    n = max(range(len(shares)), key=shares.__getitem__)
    if shares[n] <= SILENT:
        return f"at most {shares[n]:.0%} of a layer is saturated"
    name, largest = layer_name(p.problem.model.layer_names, n), float(p.problem.x.abs().max())
    return Finding(
        "silent",
        f"{shares[n]:.0%} of the neurons of {name} have sigma' below {SATURATED:g}, and inputs reach {largest:.3g}",
        advice="Scale the inputs to about 0 ... 1, or lower the weights into that layer.",
    )


def _depth(p: Examination) -> Finding | str:
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
    if not _faint_layers(p):
        return f"{shown}, though a signal reaches every layer: the state of rest does not depend on {', '.join(lost)}"
    share = f"{len(lost)} of {len(weights)} weights get less than {FAINT:g} of it"
    return Finding("fades", f"{shown}; {share}", advice=LOUDER)


def _faint_layers(p: Examination) -> list[int]:
    """The layers in which samples hardly differ, or where hardly anything of the output's error arrives."""
    arrived = [float(v.norm()) for v in p.adjoint]
    spread = [float((v - v.mean(0)).norm()) for v in p.rest]
    return [n for n in range(len(p.rest)) if min(arrived[n] / max(arrived), spread[n] / max(spread)) <= WHISPER]


WHISPER = 1e-3
"""A layer is faint where it has less than this share of the signal of the loudest one."""

LOUDER = (
    "Raise the gain of the initial weights until samples differ in every layer, use an activation with a slope near 1, "
    "add skips, or fewer layers."
)


OUTPUTS_INSIDE = (
    "Begin with outputs inside the range of the clip: small output weights and a bias within it (output_bias=0.1 and "
    "output_scale=0.1 of an experiment), or a smooth activation."
)


def _attracts(p: Examination) -> Finding | str:
    if p.series.grows:
        return Finding(
            "never-settles",
            f"at the state of rest a push grows, a thousandfold after {p.series.terms} steps",
            advice="Lower the weights, or begin elsewhere: this state does not attract.",
        )
    return f"a push dies out within {p.series.terms} steps"


def _read_by_phi(p: Examination) -> Finding | str:
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
    if not getattr(model, "conservative", True):
        return "no Phi: a connection does not go back as it came, and the update is no gradient of an energy"
    return "Phi reads every parameter that has a gradient"


def _symmetric(p: Examination) -> Finding | str:
    """The limit of EP, its nudge inside squash, against recurrent backprop: what no T, K or beta cures."""
    name, value = least_cosine(p.inside, p.exact)
    if value >= TURNED:
        where = "were the nudge inside sigma, " if p.nudge_bypasses else ""
        return f"{where}the limit of EP would have cosines of at least {value:.3f} to the exact gradient"
    odd = asymmetry(p.around)
    shown = f"in the limit EP's gradient of {name} has a cosine of {value:.2f} to the exact one"
    return Finding("asymmetric", f"{shown}; asymmetry {odd:.2f} (0 symmetric, 1 antisymmetric)", advice=TIE)


def _nudge_site(p: Examination) -> Finding | str:
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


def _rounding(p: Examination) -> Finding | str:
    gap = p.harm(p.at_rest, p.in_float64)
    if float(p.free.residual.max()) <= p.floor:  # at rest but for rounding, the state's own included
        gap = max(gap, p.harm(nudged(p.problem, p.ep, p.free.state), p.in_float64))
    if gap <= GAP and not _refused(p):
        return f"rounding moves the gradient by {gap:.1e}"
    moved = nudged(p.problem, replace(p.ep, form="difference"), tuple(v.to(p.problem.x.dtype) for v in p.rest))
    if p.harm(moved, p.in_float64) < NEAR / 4:
        shown = f"{_off(p, gap)}; {off_by_layer(p.at_rest, p.in_float64)}"
        return Finding("rounding", shown, {"form": "difference"}, "Or use float64.")
    for factor in (10.0, 100.0, 1e3, 1e4, 1e5, 1e6):
        beta = nice(abs(float(p.ep.beta)) * factor)
        ep = replace(p.ep, beta=beta)
        state = tuple(layer.to(p.problem.x.dtype) for layer in p.rest)
        if (
            beta < 1.0
            and not _refused(replace(p, ep=ep))
            and p.harm(nudged(p.problem, ep, state), p.series.short) < NEAR / 4
        ):
            return Finding("rounding", _off(p, gap), {"beta": beta}, "Or use float64.")
    return Finding("rounding", _off(p, gap), {"dtype": "float64"})


def _refused(p: Examination) -> bool:
    """Whether the estimator itself takes the nudge to be lost in rounding."""
    try:
        p.ep.check_nudge(p.problem.model, p.problem.x.dtype)
    except ValueError:
        return True
    return False


def _off(p: Examination, gap: float) -> str:
    dtype = str(p.problem.x.dtype).removeprefix("torch.")
    return f"at beta = {float(p.ep.beta):g} in {dtype} the gradient is off by {percent(gap)}"


def _linear(p: Examination) -> Finding | str:
    gap = p.harm(p.in_float64, p.series.short)
    if gap <= GAP:
        return f"beta = {float(p.ep.beta):g} is within {gap:.1%} of the limit of small beta"
    shown = f"at beta = {float(p.ep.beta):g} the gradient is off by {percent(gap)} from that of a small beta"
    for factor in (2, 4, 10, 30, 100, 1000, 10_000):
        beta = nice(abs(float(p.ep.beta)) / factor, up=False)
        if p.harm(nudged(p.wide, replace(p.ep, beta=beta), p.rest), p.series.short) < NEAR:
            return Finding("beta", shown, {"beta": beta})
    return Finding("beta", shown, advice="Lower it by a factor of ten, and again.")


def _reaches(p: Examination) -> Finding | str:
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


def _epsilon(p: Examination) -> Finding | str:
    """Adam and its kin divide an update by its size plus epsilon: where epsilon is the larger, they hardly move it."""
    if not isinstance(p.rates, torch.optim.Optimizer):
        return "no optimizer given"
    names = {id(v): name for name, v in p.problem.theta.items()}
    sizes = {name: float(g.square().mean().sqrt()) for name, g in p.as_it_is.items()}
    found = {
        names[id(v)]: (float(group["eps"]), sizes[names[id(v)]])
        for group in p.rates.param_groups
        for v in group["params"]
        if group.get("eps") and names.get(id(v)) in sizes and sizes[names[id(v)]] > 0.0
    }
    drowned = sorted((size, name, eps) for name, (eps, size) in found.items() if eps > SHARE_OF_EPSILON * size)
    if not found:
        return "the optimizer has no epsilon"
    if not drowned:
        return "the optimizer's epsilon is far below every update"
    size, _name, eps = drowned[0]
    layers = ", ".join(f"{name} {size:.1e}" for size, name, _ in drowned[:6])
    return Finding(
        "epsilon",
        f"epsilon is {eps:.0e}, above a tenth of the gradients' size in {len(drowned)} of {len(found)} parameters: "
        f"{layers}{', ...' if len(drowned) > 6 else ''}",
        advice=f"Give it eps={nice(0.01 * size, up=False):.0e}, scale the cost, or use an optimizer of signs "
        "(eqprop.Lion).",
    )


SHARE_OF_EPSILON = 0.1
"""An epsilon above this share of the root mean square of a gradient holds its parameter back."""


def _gradient(p: Examination) -> Finding | str:
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


def of_estimator(p: Examination, estimator: Estimator) -> Finding | str:
    """An estimator that Theorem 1 does not speak of, as it is, from the end of the free phase."""
    name, of = type(estimator).__name__, p.problem
    try:
        grads = estimator.gradient(of.model, of.cost, of.x, of.y, p.free.state)[1]
    except ArithmeticError as error:
        shown = f"{name} gives no gradient: {str(error).split('. ')[0]}"
        return Finding("gradient", shown, advice="Lower beta, raise T, or lower the weights.")
    named = dict(of.model.named_parameters())
    found = {n: grads.get(named[n], torch.zeros_like(g)).double() for n, g in p.exact.items()}
    value, (least, lowest) = whole_cosine(found, p.exact), least_cosine(found, p.exact)
    shown = f"{name}'s gradient has a cosine of {value:.3f} to the exact one, in {least} of {lowest:.3f}"
    if lowest >= TURNED or (estimator.orientation < 0 and value >= ASTRAY):
        return shown
    odd = asymmetry(p.around)
    if estimator.orientation > 0 and odd > 0.05:
        return Finding("asymmetric", f"{shown}; asymmetry {odd:.2f} (0 symmetric, 1 antisymmetric)", advice=OTHERS)
    return Finding("gradient", shown, advice=ALL)


OTHERS = "Use AsymEP or Dyadic, tie the feedback, or add the penalty on |J - J^T| (homeostasis)."
ALL = "No single cause explains it: raise T and K, lower beta, and look at the free phase with eqprop.gdu.compare."


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
    "epsilon": _epsilon,
    "rates": rates_at_work,
}
"""In turn, once the free phase is known to settle; the first that fails is the cause."""
