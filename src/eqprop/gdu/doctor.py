"""`doctor`: why does this net not learn by EP? The first cause, the number that shows it, and the remedy.

Between the gradient that EP gives and the exact one stand five others, each differing from the next by one cause:

    as it is        T free steps, K nudged ones at beta, in the model's dtype
    at rest         the same from the state of rest                             T, eps, two-cycle
    wide            the same in float64                                         rounding
    limit           beta -> 0                                                   beta
    complete        K -> infinity                                               K
    exact           recurrent backprop at the state of rest                     asymmetric, outside-phi, nudge-site

so each link is measured by itself. A net whose state is not quite at rest, or whose Jacobian is not quite symmetric, is
not accused of it as long as the gradient does not suffer.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from eqprop.cost import Cost, Nudge, Problem, SquaredError
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import EP, RBP
from eqprop.estimators.base import trainable
from eqprop.gdu.linearised import Linearised, asymmetry, flat, flat_product
from eqprop.gdu.lockstep import slope_excess
from eqprop.gdu.verdict import Diagnosis, Finding, Voice, nice
from eqprop.relax import NotFiniteError, Phase, Relaxation, prepare, relax
from eqprop.state import State, add, detach, distance, first_bad_layer, layer_name, scale

Grads = dict[str, Tensor]
Rates = float | Mapping[str, float] | torch.optim.Optimizer | None
"""Learning rates: one for all, by parameter name ("*" for every other), or the optimizer itself."""

GAP = 0.5
"""Two gradients of a parameter differ where |a - b| is above this share of the longer one."""
CURED = 0.2
"""A remedy is called verified where it brings that share below this."""
TURNED = 0.7
"""The exact gradient is missed where the cosine to it falls below this in some parameter."""
ASTRAY = 0.3
"""The same for what the nudge's way around squash does alone: it scales every output's error by a positive number, so
that a smaller cosine still is a way down."""
LOST = 0.2
"""K is too short where a parameter's update is below this share of the complete one."""
FAINT = 1e-6
"""A parameter whose gradient is below this share of the largest is not looked at."""
EXPLODED = 1e6
"""A neuron beyond this has left every bound."""
LONGER = (4, 16, 64)
"""The free phases that are tried, in units of T."""
SHORTEST = 50
"""What counts as T there, where T is smaller."""
FALLS = 0.7
"""A residual that falls below this share of itself is on its way down."""
SMALLER = (0.5, 0.25, 0.125)
"""The steps that are tried, in units of the model's own."""
MOST_STEPS, MOST_TERMS = 40_000, 4_000
SILENT, SATURATED = 0.9, 1e-3
"""A layer is silent where sigma' is below the second in more than the first of its neurons, over all samples."""
SAME = 1e-6
"""Relative distance up to which two evaluations of one formula, or two states of rest, count as the same."""
TRIAL_STEPS = 10
"""Steps of the optimizer that are tried on the batch."""
TOO_LITTLE, WORTHWHILE = 1e-4, 1e-2
"""A rate is too small where the trial lowers the loss by less than the first share of it, and a larger rate by more
than the second."""


@dataclass(frozen=True)
class Symptoms:
    """What may be known beside the problem.

    state       where the free phase begins; None: the model's own `init_state`
    rates       learning rates, or the optimizer; None: rates are not examined
    voice       in whose terms remedies are written
    """

    state: State | None = None
    rates: Rates = None
    voice: Voice = "python"


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
    began = time.perf_counter()
    patient = Patient(model, cost, x, y, _one_sign(ep or EP(T=1000, K=20, beta=0.01)), Symptoms(state, rates, voice))
    return replace(examine(patient), seconds=time.perf_counter() - began)


def _one_sign(ep: EP) -> EP:
    return ep.with_sign(1) if ep.nudging == "random-sign" else ep


def examine(patient: Patient) -> Diagnosis:
    """Check after check, up to the first that fails."""
    _check(patient)
    passed: dict[str, str] = {}
    for name, check in CHECKS.items():
        found = check(patient)
        if isinstance(found, Finding):
            return Diagnosis(found, passed, voice=patient.symptoms.voice)
        passed[name] = found
    return Diagnosis(None, passed, patient.remarks(), voice=patient.symptoms.voice)


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


@dataclass(frozen=True)
class Patient(Problem):
    """A problem under examination: its free phase, its rest and the gradients between EP and the truth, made once."""

    ep: EP
    symptoms: Symptoms

    @cached_property
    def start(self) -> State:
        return prepare(self.model, self.x, self.symptoms.state, None)

    @cached_property
    def free(self) -> Relaxation:
        """The free phase as it is, finite or not."""
        return relax(self.model, self.x, Phase(self.ep.T, self.ep.schedule, checked=False), self.start)

    @property
    def floor(self) -> float:
        """The residual that rounding leaves."""
        size = max([1.0, *(float(layer.abs().max()) for layer in self.free.state)])
        return 64 * torch.finfo(self.free.state[0].dtype).eps * size

    @cached_property
    def wide(self) -> Problem:
        """The same in float64."""
        if self.x.dtype == torch.float64:
            return self
        y = self.y.double() if self.y.is_floating_point() else self.y
        return Problem(copy.deepcopy(self.model).double(), copy.deepcopy(self.cost).double(), self.x.double(), y)

    @cached_property
    def rest(self) -> State:
        """The state of rest in float64. Found by the check of settling, which says how."""
        state = tuple(layer.double() for layer in self.free.state)
        return march(self.wide, state, max(4 * self.ep.T, 200), 1e-12).state

    def take_rest(self, state: State) -> None:
        """Use a state that other means have found."""
        self.__dict__["rest"] = march(self.wide, tuple(layer.double() for layer in state), self.ep.T, 1e-12).state

    @cached_property
    def as_it_is(self) -> Grads:
        return self.gradient_from(self.free.state)

    @cached_property
    def at_rest(self) -> Grads:
        return nudged(self, self.ep, tuple(layer.to(self.x.dtype) for layer in self.rest))

    @cached_property
    def in_float64(self) -> Grads:
        return self.at_rest if self.wide is self else nudged(self.wide, self.ep, self.rest)

    @cached_property
    def around(self) -> Linearised:
        return Linearised(self.wide.model, self.wide.x, self.rest)

    @cached_property
    def series(self) -> Series:
        return Series.of(self.around, scale(detach(self.wide.pull(self.rest)), -1.0), self.ep.K)

    @cached_property
    def inside(self) -> Grads:
        """The complete series with the nudge inside squash; the same where there is none."""
        push = scale(detach(self.wide.pull(self.rest)), -1.0)
        if slope_excess(self.around, push) is None:
            return self.series.complete
        return Series.of(self.around, self.around.squashed(push), 1).complete

    @cached_property
    def exact(self) -> Grads:
        terms = RBP(0, max(2 * self.series.terms, 8), stop="settled", checked=False)
        return terms.estimate(self.wide, at(self.rest))[1]

    def gradient_from(self, state: State) -> Grads:
        """EP's gradient by name if its free phase ends in this state; without its rounding, which has a check."""
        return nudged(self.wide, self.ep, tuple(layer.double() for layer in state))

    def remarks(self) -> tuple[str, ...]:
        """What is not as the theorem has it, yet does no harm."""
        out = []
        residual = float(self.free.residual.max())
        if residual > max(self.floor, 1e-6):
            out.append(
                f"The free phase ends with a residual of {residual:.1e}; the gradient differs by "
                f"{worst(self.as_it_is, self.at_rest)[1]:.1%} from that at rest, which does no harm."
            )
        name, value = least_cosine(self.series.complete, self.exact)
        if value < 0.99:
            out.append(f"EP's gradient of {name} has a cosine of {value:.2f} to the exact one: it still points downhill.")
        return tuple(out)


def at(state: State) -> Relaxation:
    """A free phase that ended there."""
    none = state[0].new_zeros(len(state[0]))
    return Relaxation(state, 0, none, none == 0)


def nudged(problem: Problem, ep: EP, state: State) -> Grads:
    """EP's gradient by name from the end of a free phase; infinite where the second phase explodes."""
    try:
        found = ep.estimate(problem, at(state))[1]
    except NotFiniteError:
        found = {name: torch.full_like(p, math.inf) for name, p in trainable(problem.model).items()}
    return {name: found[name].detach().double() for name in trainable(problem.model)}


@dataclass(frozen=True)
class March:
    """Where a walk of s + a (F(s) - s) ended, how far F would move it, and after how many steps."""

    state: State
    residual: float
    steps: int

    def rests(self, below: float) -> bool:
        return self.residual < below


@torch.no_grad()
def march(problem: Problem, s: State, steps: int, below: float, a: float = 1.0) -> March:
    """Up to so many steps of s + a (F(s) - s), fewer if the residual falls below the limit."""
    model = problem.model
    drive = model.drive(problem.x)
    residual, done = math.inf, 0
    for done in range(min(steps, MOST_STEPS) + 1):  # noqa: B007
        new = model.step(drive, s)
        if done % 16 == 0 or done == steps:
            residual = float(distance(new, s, 1).max())
            if residual < below or not residual < EXPLODED:
                break
        s = new if a == 1.0 else tuple(v + a * (w - v) for v, w in zip(s, new, strict=True))
    return March(s, residual, done)


@dataclass(frozen=True)
class Series:
    """EP's gradient at rest as beta -> 0: after K terms of sum_t J^t m, and with all of them.

    terms       how many it takes until they no longer count
    grows       whether they grow: the state of rest does not attract
    """

    short: Grads
    complete: Grads
    terms: int
    grows: bool

    @classmethod
    def of(cls, around: Linearised, push: State, K: int) -> Series:
        zero = tuple(torch.zeros_like(v) for v in push)
        move = around.product(zero, push)
        first, total, short, n = _size(move), move, move, 1
        while n < MOST_TERMS and (n < K or _size(move) > 1e-7 * _size(total)):
            move = around.product(move)
            if not _size(move) < 1e3 * max(first, 1e-300):
                return cls({}, {}, n, grows=True)
            total = add(total, move)
            n += 1
            if n == K:
                short = total
        return cls(_learned(around, short), _learned(around, total), n, grows=False)


def _size(s: State) -> float:
    return max(float(layer.abs().max()) for layer in s)


def _learned(around: Linearised, moved: State) -> Grads:
    return {name: -g.detach() for name, g in around.synapses(moved).items()}


def gaps(a: Grads, b: Grads) -> dict[str, float]:
    """|a - b| / max(|a|, |b|) by name, where a gradient is not too faint to matter."""
    sizes = {name: max(float(a[name].norm()), float(b[name].norm())) for name in a}
    whole = max(sizes.values())
    if not math.isfinite(whole):
        return {name: math.inf for name in a}
    return {n: float((a[n] - b[n]).norm()) / size for n, size in sizes.items() if size > FAINT * whole and size > 0.0}


def worst(a: Grads, b: Grads) -> tuple[str, float]:
    return max(gaps(a, b).items(), key=lambda item: item[1], default=("", 0.0))


def cosine(a: Tensor, b: Tensor) -> float:
    lengths = float(a.norm() * b.norm())
    return float((a * b).sum()) / lengths if lengths else 0.0


def least_cosine(a: Grads, b: Grads) -> tuple[str, float]:
    found = {name: cosine(a[name], b[name]) for name in gaps(a, b)}
    return min(found.items(), key=lambda item: item[1], default=("", 1.0))


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
    limit = math.sqrt(torch.finfo(p.x.dtype).eps) * max(1.0, _size(whole))
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
    if high - low > EXPLODED / 2:
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
    source = torch.Generator().manual_seed(0)
    draw = [tuple(torch.rand(v.shape, generator=source).to(v.double()) for v in p.start) for _ in range(2)]
    with torch.no_grad():
        by_hand = model.gradient(model.drive(p.wide.x), draw[0])
    theirs = detach(model.autodiff_gradient(p.wide.x, draw[0]))
    layers = {layer_name(model.layer_names, n): pair for n, pair in enumerate(zip(by_hand, theirs, strict=True))}
    name, apart = max(((n, _apart(*pair)) for n, pair in layers.items()), key=lambda item: item[1])
    if apart > SAME and not _slope_left_out(model):
        shown = f"gradient() of layer {name} is off by {apart:.1%} of the derivative that autodiff finds"
        return Finding("formula", shown, advice="Correct gradient(), or leave it out: autodiff_gradient stands in for it.")
    mine, oracle = model.contrast(p.wide.x, *draw), model.autodiff_contrast(p.wide.x, *draw)
    name, apart = max(((n, _apart(mine[n], oracle[n])) for n in oracle if n in mine), key=lambda item: item[1])
    if apart > SAME:
        shown = f"contrast() of {name} is off by {apart:.1%} of the derivative that autodiff finds"
        return Finding("formula", shown, advice="Correct contrast(), or leave it out: autodiff_contrast stands in for it.")
    return "hand-written formulas are the derivatives of Phi"


def _slope_left_out(model: Dynamics) -> bool:
    """The authors' energy-based nets leave sigma' out of the output's step on purpose."""
    return getattr(model, "output_slope", True) is False


def _apart(a: Tensor, b: Tensor) -> float:
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size else 0.0


def _pulls(p: Patient) -> Finding | str:
    s = p.free.state
    if first_bad_layer(s) is not None:
        return "not measured: the state is not finite"
    loss = float(p.cost.values(s, p.y, p.theta).mean())
    with torch.no_grad():
        pull = _size(p.pull(s))
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
    away = float(distance(p.free.state, own.state, 1).max())
    if away > 0.05 * max(1.0, _size(own.state)):
        share = float((distance(p.free.state, own.state, 1) > 0.05).double().mean())
        return Finding(
            "start",
            f"{share:.0%} of the samples end up to {away:.2g} away from where model.init_state(x) leads, which is where "
            "errors are measured",
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


def _settles(p: Patient) -> Finding | str:
    """Finite? On its way? Back and forth? And does the gradient suffer?"""
    free, tolerance = p.free, max(p.floor, 1e-9)
    residual = float(free.residual.max())
    if not residual < EXPLODED:
        return _explodes(p)
    if residual <= tolerance:
        return f"settles (residual {residual:.1e})"
    found = _find_rest(p, tolerance)
    name, gap = worst(p.as_it_is, p.in_float64) if found.cause in CURABLE else ("", math.inf)
    if gap <= GAP:
        return f"settles well enough (residual {residual:.1e}, the gradient differs by {gap:.1%} from that at rest)"
    share = float((free.residual > tolerance).double().mean())
    shown = f"after T = {p.ep.T} steps {share:.0%} of the samples still move (residual {residual:.1e}){found.shown_by}"
    if name:
        shown += f", and the gradient of {name} is off by {_percent(gap)}"
    change = {"T": _enough(p)} if found.cause == "T" else found.change
    return replace(found, shown_by=shown, change=change)


CURABLE = ("T", "two-cycle", "eps")
"""Where a state of rest was found, so that the harm of not being there can be measured."""


def _find_rest(p: Patient, tolerance: float) -> Finding:
    """Longer, alternating, or with smaller steps: the cause if the gradient suffers."""
    falls = not _returns(p) and _longer(p, tolerance, LONGER[:1])
    found = _longer(p, tolerance, LONGER[1:]) if falls is True else falls
    found = found or _alternating(p, tolerance) or _smaller_step(p, tolerance, p.free.state)
    found = found or (_longer(p, tolerance, LONGER) if falls is not True else None)
    if isinstance(found, Finding):
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


def _longer(p: Patient, tolerance: float, factors: tuple[int, ...]) -> Finding | bool:
    """The finding if a longer free phase settles; else whether the residual falls at all."""
    state, done = p.free.state, p.ep.T
    residual = math.inf
    for factor in factors:
        there = march(p, state, factor * max(p.ep.T, SHORTEST) - done, tolerance)
        state, done, residual = there.state, done + there.steps, there.residual
        if residual < max(tolerance, 1e-7):
            p.take_rest(state)
            return Finding("T", "", verified=True)
    return residual < FALLS * float(p.free.residual.max())


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
    begun = state if first_bad_layer(state) is None and _size(state) < EXPLODED else p.start
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


def _inputs(p: Patient) -> Finding | str:
    if len(p.x) < 2 or float((p.y.double() - p.y[0].double()).abs().max()) == 0.0:
        return "one target alone"
    s = p.rest
    spread = max(float((layer - layer[0]).abs().max()) for layer in s)
    if spread > SAME * max(1.0, _size(s)):
        return f"samples end up to {spread:.1e} apart"
    alike = float((p.x - p.x[0]).abs().max()) == 0.0
    why = f"all {len(p.x)} inputs are the same" if alike else f"{len(p.x)} inputs lead to states only {spread:.1e} apart"
    return Finding("inputs", why, advice="Look at how batches are made and whether the model reads x, and at its scale.")


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
    scale_of = max(_size(p.wide.pull(p.rest)), 1e-300)
    size = max(float(g.abs().max()) for g in p.in_float64.values())
    if not size > 1e-9 * scale_of:
        return Finding(
            "silent",
            f"the cost pulls by {scale_of:.1e}, yet no parameter gets an update above {size:.1e}",
            advice=OUTPUTS_INSIDE,
        )
    shares = saturation(p)
    name, share = max(shares.items(), key=lambda item: item[1], default=("", 0.0))
    if share > SILENT:
        largest = float(p.x.abs().max())
        return Finding(
            "silent",
            f"{share:.0%} of the neurons of {name} are saturated (sigma' below {SATURATED:g}); inputs reach {largest:.3g}",
            advice="Scale the inputs to about 0 ... 1, or lower the weights into that layer.",
        )
    return f"at most {share:.0%} of a layer is saturated"


OUTPUTS_INSIDE = (
    "Begin with outputs inside the range of the clip: small output weights and a bias within it (output_bias=0.1 and "
    "output_scale=0.1 of an experiment), or a smooth activation."
)
TIE = "Tie the feedback to the forward weights (its transpose), or give the net by a Phi or an energy."


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
    names = unread(p.wide)
    learned = [name for name in names if bool(p.exact[name].any())]
    if learned:
        size = max(float(p.exact[name].norm()) for name in learned)
        return Finding(
            "outside-phi",
            f"EP gives {', '.join(learned)} the gradient 0, the exact one is {size:.1e}",
            advice="Move it into Phi (a gain inside squash becomes a factor of the weights), train it by BPTT or RBP, or "
            "freeze it with requires_grad_(False).",
        )
    return "Phi reads every parameter" if not names else f"no one else reads {', '.join(names)} either"


def unread(problem: Problem) -> list[str]:
    """Parameters that Phi does not depend on; none for a model without Phi."""
    model = problem.model
    if not isinstance(model, PrimitiveDynamics):
        return []
    learned = trainable(model)
    with torch.enable_grad():
        phi = model.primitive(problem.x, model.init_state(problem.x)).sum()
    if not phi.requires_grad:
        return list(learned)
    grads = torch.autograd.grad(phi, tuple(learned.values()), allow_unused=True)
    return [name for name, g in zip(learned, grads, strict=True) if g is None]


def _symmetric(p: Patient) -> Finding | str:
    """The limit of EP, its nudge inside squash, against recurrent backprop: what no T, K or beta cures."""
    name, value = least_cosine(p.inside, p.exact)
    if value >= TURNED:
        return f"in the limit EP's gradients have cosines of {value:.3f} and more to the exact ones"
    odd = asymmetry(flat_product(p.around), flat(p.rest), 0)
    shown = f"in the limit EP's gradient of {name} has a cosine of {value:.2f} to the exact one"
    return Finding("asymmetric", f"{shown}; asymmetry {odd:.2f} (0 symmetric, 1 antisymmetric)", advice=TIE)


def _nudge_site(p: Patient) -> Finding | str:
    """What the nudge's way around squash does to the limit."""
    name, value = least_cosine(p.series.complete, p.exact)
    if value >= ASTRAY:
        return f"the nudge turns no gradient by more than a cosine of {value:.2f}"
    shown = f"in the limit EP's gradient of {name} has a cosine of {value:.2f} to the exact one"
    inside = least_cosine(p.inside, p.exact)[1]
    return Finding("nudge-site", f"{shown}, {inside:.2f} with the nudge inside", {"nudge_site": "inside"}, verified=True)


def _rounding(p: Patient) -> Finding | str:
    name, gap = worst(p.at_rest, p.in_float64)
    if gap <= GAP:
        return f"rounding moves the gradient by {gap:.1e}"
    for factor in (10.0, 100.0, 1e3, 1e4, 1e5, 1e6):
        beta = nice(abs(float(p.ep.beta)) * factor)
        ep = replace(p.ep, beta=beta)
        state = tuple(layer.to(p.x.dtype) for layer in p.rest)
        if beta < 1.0 and worst(nudged(p, ep, state), p.series.short)[1] < CURED / 4:
            return Finding("rounding", _off(p, name, gap), {"beta": beta}, "Or use float64.", verified=True)
    return Finding("rounding", _off(p, name, gap), {"dtype": "float64"})


def _percent(gap: float) -> str:
    return f"{gap:.0%}" if math.isfinite(gap) else "an infinity"


def _off(p: Patient, name: str, gap: float) -> str:
    dtype = str(p.x.dtype).removeprefix("torch.")
    return f"at beta = {float(p.ep.beta):g} in {dtype} the gradient of {name} is off by {_percent(gap)}"


def _linear(p: Patient) -> Finding | str:
    name, gap = worst(p.in_float64, p.series.short)
    if gap <= GAP:
        return f"beta = {float(p.ep.beta):g} is within {gap:.1%} of the limit of small beta"
    shown = f"at beta = {float(p.ep.beta):g} the gradient of {name} is off by {_percent(gap)} from that of a small beta"
    for factor in (2, 4, 10, 30, 100, 1000, 10_000):
        beta = nice(abs(float(p.ep.beta)) / factor, up=False)
        if worst(nudged(p.wide, replace(p.ep, beta=beta), p.rest), p.series.short)[1] < CURED:
            return Finding("beta", shown, {"beta": beta}, verified=True)
    return Finding("beta", shown, advice="Lower it by a factor of ten, and again.")


def _reaches(p: Patient) -> Finding | str:
    short, whole = p.series.short, p.series.complete
    shares = {n: float(short[n].norm() / whole[n].norm()) for n in gaps(whole, whole) if float(whole[n].norm()) > 0.0}
    name, share = min(shares.items(), key=lambda item: item[1], default=("", 1.0))
    if share >= LOST:
        return f"K = {p.ep.K} steps give every parameter {share:.0%} of its update or more"
    push, K = scale(detach(p.wide.pull(p.rest)), -1.0), p.ep.K
    while K < p.series.terms:
        K *= 2
        found = Series.of(p.around, push, K).short
        if all(float(found[n].norm()) > 0.8 * float(whole[n].norm()) for n in shares):
            break
    shown = f"within K = {p.ep.K} steps {name} gets {share:.0%} of its update"
    return Finding("K", shown, {"K": int(nice(K))}, verified=True)


def _gradient(p: Patient) -> Finding | str:
    """All together, with the estimator as it is."""
    found = p.gradient_from(p.free.state)
    name, value = least_cosine(found, p.exact)
    agree = sum(int((found[n] * g > 0).sum()) for n, g in p.exact.items())
    signs = agree / max(sum(int((g != 0).sum()) for g in p.exact.values()), 1)
    if value < 0.3:
        return Finding("gradient", f"the gradient of {name} has a cosine of {value:.2f} to the exact one", advice=ALL)
    return f"EP's gradient has a cosine of {value:.3f} or more to the exact one, {signs:.1%} of the signs agree"


ALL = "No single cause explains it: raise T and K, lower beta, and look at the free phase with eqprop.gdu.compare."


def _rates(p: Patient) -> Finding | str:
    if p.symptoms.rates is None:
        return "no learning rates given"
    before, after = trial(p, 1.0)
    fallen = (before - after) / before if before > 0.0 else 0.0
    if not after < before:
        for factor in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4):
            better = trial(p, factor)[1]
            if better < before * (1 - TOO_LITTLE):
                shown = f"{TRIAL_STEPS} steps on this batch take the loss from {before:.3g} to {after:.3g}"
                return _rate_finding(p, "rate-large", shown, factor)
        return f"no rate lowers the loss of {before:.3g} on this batch"
    if fallen < TOO_LITTLE:
        for factor in (10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9):
            if trial(p, factor)[1] < before * (1 - WORTHWHILE):
                shown = f"{TRIAL_STEPS} steps on this batch lower the loss of {before:.3g} by {fallen:.1e} of it"
                return _rate_finding(p, "rate-small", shown, factor)
    return f"{TRIAL_STEPS} steps on this batch take the loss from {before:.3g} to {after:.3g}"


def _rate_finding(p: Patient, cause: str, shown: str, factor: float) -> Finding:
    rates = p.symptoms.rates
    if isinstance(rates, torch.optim.Optimizer):
        rates = {str(n): float(group["lr"]) for n, group in enumerate(rates.param_groups)}
    single = rates if isinstance(rates, float | int) else None
    if isinstance(rates, Mapping) and len(set(rates.values())) == 1:
        single = next(iter(rates.values()))
    if single is not None:
        return Finding(cause, shown, {"lr": float(f"{single * factor:.2g}")}, verified=True)
    return Finding(cause, shown, advice=f"Multiply the rates by {factor:g} (tried on this batch: it cures it).")


def trial(p: Patient, factor: float) -> tuple[float, float]:
    """The loss on the batch before and after a few steps of a copy, with rates times a factor; infinite if it bursts."""
    model, cost = copy.deepcopy(p.model), copy.deepcopy(p.cost)
    problem = Problem(model, cost, p.x, p.y)
    optimizer = _optimizer(p, model, factor)
    before = _loss(problem, p)
    for _ in range(TRIAL_STEPS):
        optimizer.zero_grad()
        try:
            p.ep.backward(model, cost, p.x, p.y, p.symptoms.state)
        except ArithmeticError:
            return before, math.inf
        optimizer.step()
    after = _loss(problem, p)
    return before, after if math.isfinite(after) else math.inf


def _loss(problem: Problem, p: Patient) -> float:
    phase = Phase(p.ep.T, p.ep.schedule, checked=False)
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
        return type(rates)([g for g in groups if g["params"]])
    by_name = rates if isinstance(rates, Mapping) else {"*": float(rates or 0.0)}
    groups = [{"params": [v], "lr": factor * by_name.get(name, by_name.get("*", 0.0))} for name, v in copies.items()]
    return torch.optim.SGD(groups)


CHECKS: dict[str, Callable[[Patient], Finding | str]] = {
    "numbers": _numbers,
    "repeatable": _repeatable,
    "samples": _separate,
    "optimizer": _held,
    "targets": _targets,
    "formulas": _formulas,
    "cost": _pulls,
    "settles": _settles,
    "start": _start,
    "attracts": _attracts,
    "weights": _zero_weights,
    "input": _inputs,
    "silence": _silent,
    "phi": _read_by_phi,
    "symmetric": _symmetric,
    "rounding": _rounding,
    "beta": _linear,
    "K": _reaches,
    "nudge": _nudge_site,
    "gradient": _gradient,
    "rates": _rates,
}
"""In turn; the first that fails is the cause."""
