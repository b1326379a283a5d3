"""A problem under examination, and the gradients that stand between EP's and the exact one.

Between the gradient that EP gives and the exact one stand five others, each differing from the next by one cause:

    as it is        T free steps, K nudged ones at beta, in the model's dtype
    at rest         the same from the state of rest                             T, eps, two-cycle
    wide            the same in float64                                         rounding
    limit           beta -> 0                                                   beta
    complete        K -> infinity                                               K
    exact           recurrent backprop at the state of rest                     asymmetric, outside-phi, nudge-site
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Problem
from eqprop.estimators import EP, RBP
from eqprop.estimators.base import parameter_vjp, pull_back, trainable
from eqprop.gdu.lockstep import Linearised, flat, slope_excess, unflat
from eqprop.gdu.verdict import Voice, settings
from eqprop.relax import SWEEPS, NotFiniteError, Phase, Relaxation, prepare, relax, turn
from eqprop.state import State, detach, distance, scale

Grads = dict[str, Tensor]
Product = Callable[[Tensor], Tensor]
Groups = tuple[tuple[int, ...], ...]
Rates = float | Mapping[str, float] | torch.optim.Optimizer | None
"""Learning rates: one for all, by parameter name ("*" for every other), or the optimizer itself."""

GAP = 0.5
"""Two gradients differ where |a - b|, all parameters together, is above this share of the longer one."""
NEAR = 0.2
"""A setting is proposed where it brings that share below this."""
COSINE_LOST = 1e-3
"""A schedule is as good where the gradient's cosine to the exact one is at most so much lower."""
FAINT = 1e-6
"""A parameter whose gradient is below this share of the largest is not looked at."""
EXPLODED = 1e6
"""A neuron beyond this has left every bound."""
MOST_STEPS, MOST_TERMS, MOST_WORK = 40_000, 4_000, 1e11
"""The longest walk in search of a rest, in steps and in multiplications, and the longest series."""
DENSE = 64
"""Neurons up to which the Jacobian is written out."""


@dataclass
class Examination:
    """A problem with its free phase, its rest and the gradients between EP's and the exact one, each made once.

    state       where the free phase begins; None: the model's own `init_state`
    rates       learning rates, or the optimizer; None: rates are not examined
    voice       in whose terms remedies are written
    """

    problem: Problem
    ep: EP
    state: State | None = None
    rates: Rates = None
    voice: Voice = "python"

    @cached_property
    def start(self) -> State:
        return prepare(self.problem.model, self.problem.x, self.state, None)

    @cached_property
    def free(self) -> Relaxation:
        """The free phase as it is, finite or not."""
        return relax(
            self.problem.model,
            self.problem.x,
            Phase(self.ep.T, self.ep.schedule, stop="settled", checked=False),
            self.start,
        )

    @property
    def floor(self) -> float:
        """The residual that rounding leaves."""
        size = max([1.0, *(float(layer.abs().max()) for layer in self.free.state)])
        return 64 * torch.finfo(self.free.state[0].dtype).eps * size

    @cached_property
    def wide(self) -> Problem:
        """The same in float64."""
        return self.problem if self.problem.x.dtype == torch.float64 else self.problem.double()

    @cached_property
    def rest(self) -> State:
        """The state of rest in float64. Found by the check of settling, which says how."""
        state = tuple(layer.double() for layer in self.free.state)
        return march(self.wide, state, max(4 * self.ep.T, 200), 1e-12, groups=self.sweep).state

    @property
    def found_rest(self) -> bool:
        """Whether the check of settling found a state of rest that F itself holds."""
        return "rest" in self.__dict__

    def take_rest(self, state: State) -> None:
        """Use a state that more steps, or alternating ones, have led to."""
        state = tuple(layer.double() for layer in state)
        self.rest = march(self.wide, state, self.ep.T, 1e-12, groups=self.sweep).state

    @cached_property
    def as_it_is(self) -> Grads:
        return self.gradient_from(self.free.state)

    @cached_property
    def at_rest(self) -> Grads:
        return nudged(self.problem, self.ep, tuple(layer.to(self.problem.x.dtype) for layer in self.rest))

    @cached_property
    def in_float64(self) -> Grads:
        return nudged(self.wide, replace(self.ep, form="difference"), self.rest)  # 1e-16 of a state drowns updates too

    @cached_property
    def around(self) -> Linearised:
        return Linearised(self.wide.model, self.wide.x, self.rest)

    @cached_property
    def jacobian(self) -> Tensor | None:
        """J of each sample at rest, (B, N, N); None where N is large and products with vectors are cheaper."""
        rows = flat(self.rest)
        if rows.shape[1] > DENSE:
            return None
        product = self.around.on_rows
        unit = torch.eye(rows.shape[1]).to(rows)
        return torch.stack([product(e.expand_as(rows)) for e in unit], -1)

    @property
    def product(self) -> Product:
        """v -> J v on rows (B, N)."""
        J = self.jacobian
        return self.around.on_rows if J is None else lambda rows: torch.einsum("bij,bj->bi", J, rows)

    @cached_property
    def push(self) -> State:
        """-dl/ds at rest."""
        return scale(detach(self.wide.pull(self.rest)), -1.0)

    @cached_property
    def series(self) -> NeumannSeries:
        return self.series_of(self.push, self.ep.K)

    def series_of(self, push: State, K: int) -> NeumannSeries:
        move, most = (
            self.around.product(tuple(torch.zeros_like(v) for v in push), push),
            min(MOST_TERMS, self.most_steps),
        )
        if (groups := self.mirrored) is None:
            sums = neumann(self.product, flat(move), K, most)
        else:
            sums = sweeps(self.around.product, move, groups, K, most)
        if sums.grows:
            return NeumannSeries({}, {}, sums.terms, grows=True)
        short, complete = (_learned(self.around, unflat(rows, self.rest)) for rows in (sums.short, sums.complete))
        return NeumannSeries(short, complete, sums.terms, grows=False)

    @property
    def sweep(self) -> Groups | None:
        """The layers that a free phase updates in turn; None where all are at once."""
        return self.wide.model.sweep(len(self.start)) if self.ep.schedule in SWEEPS else None

    @property
    def mirrored(self) -> Groups | None:
        """Those that a nudged phase does."""
        groups = self.sweep
        if groups is None:
            return None
        return tuple(turn(groups, t, self.ep.schedule) or () for t in range(len(groups)))

    def harm(self, a: Grads, b: Grads) -> float:
        """By which share of what the parameters should get two gradients differ."""
        return difference(a, b, {} if self.series.grows else self.series.complete)

    @property
    def nudge_bypasses(self) -> bool:
        """Whether squash would turn what the nudge does at rest."""
        return slope_excess(self.around, self.push) is not None

    @cached_property
    def inside(self) -> Grads:
        """The complete series with the nudge inside squash; the same where there is none."""
        if not self.nudge_bypasses:
            return self.series.complete
        return self.series_of(self.around.squashed(self.push), 1).complete

    @cached_property
    def adjoint(self) -> State:
        """(I - J^T)^-1 dl/ds at rest: how the loss there depends on a push of each neuron."""
        model = self.wide.model
        with torch.enable_grad():
            leaves = tuple(v.detach().requires_grad_() for v in self.rest)
            out = model.step(model.drive(self.wide.x), leaves)

        def product(rows: Tensor) -> Tensor:
            return flat(pull_back(out, leaves, unflat(rows, self.rest), retain_graph=True))

        return unflat(neumann(product, -flat(self.push), 1).complete, self.rest)

    @cached_property
    def exact(self) -> Grads:
        J, model, x = self.jacobian, self.wide.model, self.wide.x
        if (groups := self.mirrored) is not None:
            with torch.enable_grad():
                leaves = tuple(v.detach().requires_grad_() for v in self.rest)
                out = model.step(model.drive(x), leaves)
            found = sweeps(
                lambda v: pull_back(out, leaves, v, retain_graph=True),
                scale(self.push, -1.0),
                groups,
                1,
                self.most_steps,
            )
            return parameter_vjp(model, x, self.rest, unflat(found.complete, self.rest))
        if J is None:
            terms = RBP(0, max(2 * self.series.terms, 8), stop="settled", checked=False)
            return terms.estimate(self.wide, at(self.rest))[1]
        pulled = neumann(lambda rows: torch.einsum("bij,bi->bj", J, rows), -flat(self.push), 1).complete
        return parameter_vjp(model, x, self.rest, unflat(pulled, self.rest))

    def gradient_from(self, state: State) -> Grads:
        """EP's gradient by name if its free phase ends in this state; without its rounding, which has a check."""
        return nudged(self.wide, self.ep, tuple(layer.double() for layer in state))

    @property
    def most_steps(self) -> int:
        return most_steps(self.problem)

    def only(self, samples: Tensor) -> Examination:
        """Some of the samples, by mask; the same if they are all."""
        if bool(samples.all()):
            return self
        problem = replace(self.problem, x=self.problem.x[samples], y=self.problem.y[samples])
        state = None if self.state is None else tuple(layer[samples] for layer in self.state)
        return replace(self, problem=problem, state=state)

    def remarks(self) -> tuple[str, ...]:
        """What is not as the theorem has it, yet does no harm."""
        out = []
        if not getattr(self.problem.model, "conservative", True):
            out.append(
                "No Phi stands behind this net, as a connection does not go back as it came: the update is no gradient "
                "of an energy."
            )
        residual = float(self.free.residual.max())
        if residual > max(self.floor, 1e-6):
            out.append(
                f"The free phase ends with a residual of {residual:.1e}; the gradient differs by "
                f"{self.harm(self.as_it_is, self.in_float64):.1%} from that at rest, which does no harm."
            )
        name, value = least_cosine(self.series.complete, self.exact)
        if value < 0.99:
            out.append(
                f"EP's gradient of {name} has a cosine of {value:.2f} to the exact one: it still points downhill."
            )
        if self.problem.model.bipartite and self.ep.schedule == "synchronous" and self.alternates_as_well():
            change = settings({"schedule": "alternating"}, self.voice)
            out.append(
                f"The layers form two halves that depend on each other alone: {change} does half the arithmetic of the "
                "free phase, and on this batch the gradient is as near the exact one."
            )
        return tuple(out)

    def alternates_as_well(self) -> bool:
        """Whether updating even and odd layers in turn, in as many steps, leaves the gradient as near the exact one."""
        turns = replace(self.ep, schedule="alternating")
        phase = Phase(turns.T, turns.schedule, stop="settled", checked=False)
        end = relax(self.problem.model, self.problem.x, phase, self.start).state
        found = nudged(self.problem, turns, end)
        return whole_cosine(found, self.exact) >= whole_cosine(self.as_it_is, self.exact) - COSINE_LOST


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


def most_steps(problem: Problem) -> int:
    """Fewer in large nets."""
    work = len(problem.x) * problem.model.operations() // 2
    return max(500, min(MOST_STEPS, int(MOST_WORK / max(work, 1))))


@dataclass(frozen=True)
class March:
    """Where a walk of s + a (F(s) - s) ended, how far F would move it, and after how many steps."""

    state: State
    residual: float
    steps: int

    def rests(self, below: float) -> bool:
        return self.residual < below


@torch.no_grad()
def march(problem: Problem, s: State, steps: int, below: float, a: float = 1.0, groups: Groups | None = None) -> March:
    """Up to so many steps of s + a (F(s) - s), fewer if the residual falls below the limit; of groups in turn."""
    model = problem.model
    drive = model.drive(problem.x)
    residual, done = math.inf, 0
    for done in range(min(steps, most_steps(problem)) + 1):
        new = model.step(drive, s)
        if done % 16 == 0 or done == steps:
            residual = float(distance(new, s, 1).max())
            if residual < below or not residual < EXPLODED:
                break
        if groups is not None:
            s = tuple(w if n in groups[done % len(groups)] else v for n, (v, w) in enumerate(zip(s, new, strict=True)))
        else:
            s = new if a == 1.0 else tuple(v + a * (w - v) for v, w in zip(s, new, strict=True))
    return March(s, residual, done)


@dataclass(frozen=True)
class NeumannSeries:
    """EP's gradient at rest as beta -> 0: after K terms of sum_t J^t m, and with all of them.

    terms       how many it takes until they no longer count
    grows       whether they grow: the state of rest does not attract
    """

    short: Grads
    complete: Grads
    terms: int
    grows: bool


class Sums(NamedTuple):
    """sum_t J^t m after K terms and after all that count, (B, N), and how many those were."""

    short: Tensor
    complete: Tensor
    terms: int
    grows: bool


def neumann(product: Product, move: Tensor, K: int, most: int = MOST_TERMS) -> Sums:
    first, total, short, n = float(move.abs().max()), move, move, 1
    while n < max(most, K) and (n < K or float(move.abs().max()) > 1e-7 * float(total.abs().max())):
        move = product(move)
        if not float(move.abs().max()) < 1e3 * max(first, 1e-300):
            return Sums(short, total, n, grows=True)
        total = total + move
        n += 1
        if n == K:
            short = total
    return Sums(short, total, n, grows=False)


def sweeps(product: Callable[[State], State], move: State, groups: Groups, K: int, most: int = MOST_TERMS) -> Sums:
    """d_n <- (product(d) + move)_n, group after group: after K updates, and once a sweep no longer changes it.

    Where it ends is the sum over t of product^t(move), though that sum may not exist.
    """
    d, short, n = tuple(torch.zeros_like(v) for v in move), None, 0
    first = max(size_of(move), 1e-300)
    while True:
        before = d
        for group in groups:
            new = product(d)
            d = tuple(new[i] + move[i] if i in group else v for i, v in enumerate(d))
            n += 1
            short = flat(d) if n == K else short
        change = size_of(tuple(a - b for a, b in zip(d, before, strict=True)))
        if not change < 1e3 * first:
            return Sums(flat(before), flat(d), n, grows=True)
        if n >= max(most, K) or (n >= K and change <= 1e-7 * max(size_of(d), 1e-300)):
            assert short is not None, "K updates have been made"
            return Sums(short, flat(d), n, grows=False)


def size_of(s: State) -> float:
    return max(float(layer.abs().max()) for layer in s)


def _learned(around: Linearised, moved: State) -> Grads:
    return {name: -g.detach() for name, g in around.synapses(moved).items()}


def difference(a: Grads, b: Grads, beside: Grads) -> float:
    """|a - b| / max(|a|, |b|, |beside|), all parameters together; infinite where one of them is."""
    size = max(_norm(g.values()) for g in (a, b, beside))
    if not math.isfinite(size):
        return math.inf
    return _norm(a[name] - b[name] for name in a) / size if size else 0.0


def off_by_layer(found: Grads, exact: Grads) -> str:
    """By which share each weight's gradient is off, the worst first, in words."""
    shares = {n: float((found[n] - g).norm() / g.norm()) for n, g in exact.items() if g.dim() > 1 and float(g.norm())}
    worst = sorted(shares, key=lambda n: -shares[n])
    many = [n for n in worst if not shares[n] <= GAP]
    text = ", ".join(f"{n} by {_times(shares[n])}" for n in worst[:4])
    return (
        f"{len(many)} of {len(worst)} weights are off by more than {GAP:.0%}: {text}{', ...' if len(worst) > 4 else ''}"
    )


def _times(share: float) -> str:
    return f"{share:.0%}" if share < 10.0 else f"{share:.1e} times itself"


def _norm(values: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(v.square().sum()) for v in values))


def audible(grads: Grads) -> list[str]:
    """The parameters whose gradient is not too faint to matter."""
    sizes = {name: float(g.norm()) for name, g in grads.items()}
    return [name for name, size in sizes.items() if size > FAINT * max(sizes.values())]


def whole_cosine(a: Grads, b: Grads) -> float:
    """Of all parameters together: above 0, a small step against a lowers the loss that b is the gradient of."""
    return cosine(*(torch.cat([g[name].flatten() for name in b]) for g in (a, b)))


def cosine(a: Tensor, b: Tensor) -> float:
    lengths = float(a.norm() * b.norm())
    return float((a * b).sum()) / lengths if lengths else 0.0


def least_cosine(a: Grads, b: Grads) -> tuple[str, float]:
    found = {name: cosine(a[name], b[name]) for name in audible(b)}
    return min(found.items(), key=lambda item: item[1], default=("", 1.0))
