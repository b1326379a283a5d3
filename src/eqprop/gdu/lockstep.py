"""Run EP forward and BPTT backward in time together, and split their difference into causes.

Both count t from the end of the free phase, so they advance in lockstep: time grows with K, memory does not.

Between EP's update f and minus BPTT's gradient g lie four intermediate processes, each differing from the next by one
cause:

    f                   the second phase at finite beta
    f - drift           without the remaining movement of the free phase
    limit               beta -> 0, exactly
    frozen              the same with the Jacobian J held at the state reached: J^t N (-dl/ds)
    adjoint             J^T instead of J, at the state reached: recurrent backprop
    g                   J^T along the states of the free phase: BPTT

so that f - g is the sum of

    residual        drift + (limit - frozen) + (adjoint - g): everything that vanishes at a steady state
    rounding        (f - drift) minus the same in float64: zero if the model is float64
    finite_beta     (f - drift) - limit, minus rounding
    output_slope    the excess in frozen's synapses because the nudge bypasses squash: J^t N (1 - D) (-dl/ds)
    asymmetry       frozen - output_slope - adjoint: J against its transpose

On a prototypical net J = D W with a symmetric W and D = diag(sigma'). Its synapses get (D W)^t dl/ds from EP and
(D W)^t D dl/ds from BPTT: they differ by output_slope only, and their asymmetry is zero. Its neurons get
(D W)^t dl/ds and (W D)^t dl/ds: they differ by asymmetry, without an output_slope part.

With the nudge inside sigma, N = D: both give the synapses (D W)^t D dl/ds, and output_slope is zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import PrimitiveDynamics
from eqprop.estimators import BPTT, EP, RBP
from eqprop.estimators.base import Step, update
from eqprop.gdu.linearised import Linearised
from eqprop.relax import SWEEPS, Relaxation, Schedule, Stepper, turns
from eqprop.state import State, detach, scale, subtract

Turn = tuple[int, ...] | None
"""The layers that one update changes; None for all."""


@dataclass(frozen=True)
class Comparison(Problem):
    """A problem with its free phase and the K and beta of the second phase."""

    free: Relaxation
    K: int
    beta: float
    schedule: Schedule = "synchronous"

    @property
    def swept(self) -> bool:
        return self.schedule in SWEEPS

    @property
    def order(self) -> list[Turn]:
        """The layers that each update of the second phase changes; None for all."""
        return turns(self.model, len(self.free.state), self.schedule, range(self.K))

    def wide(self) -> Comparison | None:
        """The same in float64, from the same state; None if it is float64 already."""
        if self.x.dtype == torch.float64:
            return None
        state = tuple(layer.double() for layer in self.free.state)
        return replace(
            self,
            model=copy.deepcopy(self.model).double(),
            cost=copy.deepcopy(self.cost).double(),
            x=self.x.double(),
            y=self.y.double() if self.y.is_floating_point() else self.y,
            free=replace(self.free, state=state, trail=()),
        )

    def estimators(self) -> tuple[EP, BPTT, RBP]:
        steps = max(self.free.steps, self.K)
        schedule = self.schedule if self.swept else "synchronous"
        return (
            EP(steps, self.K, self.beta, schedule=schedule),
            BPTT(steps, self.K, schedule=schedule),
            RBP(steps, self.K),
        )

    def adjoint_steps(self) -> Iterator[Step]:
        """nabla with the Jacobian held at the state reached: recurrent backprop, or BPTT through sweeps at rest."""
        _, bptt, rbp = self.estimators()
        if not self.swept:
            return rbp.steps(self.model, self.cost, self.x, self.y, self.free)
        rest = replace(self.free, trail=(self.free.state,) * self.K)
        return bptt.steps(self.model, self.cost, self.x, self.y, rest)


class Moment(NamedTuple):
    """Time t: EP's update, minus BPTT's gradient, and the parts of their difference if requested.

    Parts that are zero by construction are absent; a part of the synapses only has no neurons.
    """

    ep: Step
    bptt: Step
    parts: dict[str, Step]


def pair(case: Comparison) -> Iterator[Moment]:
    """EP and BPTT without the parts of their difference; in sweeps of the same order only their totals."""
    return _total(_pair(case)) if case.schedule == "sweeps-same" else _pair(case)


def dissect(case: Comparison) -> Iterator[Moment]:
    """EP and BPTT with the parts of their difference; in sweeps of the same order only their totals."""
    return _total(_dissect(case)) if case.schedule == "sweeps-same" else _dissect(case)


def _total(moments: Iterator[Moment]) -> Iterator[Moment]:
    """The sums over all t, as a single moment."""
    ep, bptt, parts = next(moments)
    for moment in moments:
        ep, bptt = combine((1, ep), (1, moment.ep)), combine((1, bptt), (1, moment.bptt))
        parts = {name: combine((1, part), (1, moment.parts[name])) for name, part in parts.items()}
    yield Moment(ep, bptt, parts)


def _pair(case: Comparison) -> Iterator[Moment]:
    ep, bptt, _ = case.estimators()
    arguments = (case.model, case.cost, case.x, case.y, case.free)
    for f, nabla in zip(ep.steps(*arguments), bptt.steps(*arguments), strict=True):
        yield Moment(f, negative(nabla), {})


def _dissect(case: Comparison) -> Iterator[Moment]:
    around = Linearised(case.model, case.x, case.free.state)
    push = first_push(case)
    others = zip(
        drift_steps(case),
        limit_steps(case, around),
        frozen_steps(around, around.product(_zeros(push), push), case.order),
        _slope_steps(around, push, case.order),
        case.adjoint_steps(),
        _wide_steps(case),
        strict=True,
    )
    for (f, g, _), (drift, limit, frozen, slope, nabla, wide) in zip(_pair(case), others, strict=True):
        adjoint = negative(nabla)
        response = combine((1, f), (-1, drift))
        parts = {
            "residual": combine((1, drift), (1, limit), (-1, frozen), (1, adjoint), (-1, g)),
            "finite_beta": combine((1, response if wide is None else wide), (-1, limit)),
        }
        if wide is not None:
            parts["rounding"] = combine((1, response), (-1, wide))
        asymmetry = combine((1, frozen), (-1, adjoint))
        if slope is not None:
            parts["output_slope"] = Step((), slope.synapses)
            asymmetry = Step(asymmetry.neurons, combine((1, asymmetry), (-1, slope)).synapses)
        yield Moment(f, g, {**parts, "asymmetry": asymmetry})


def drift_steps(case: Comparison) -> Iterator[Step]:
    """EP's formula without a nudge: the remaining movement of the free phase, divided by beta."""
    model, x = case.model, case.x
    unit = 1.0 / (case.beta * model.nudge_scale)
    with torch.no_grad():
        step = Stepper(model, model.drive(x), None)
    s = case.free.state
    for group in case.order:
        with torch.no_grad():
            new = step(s, group)
        yield update(model, x, s, new, unit)
        s = new


def _wide_steps(case: Comparison) -> Iterator[Step | None]:
    """f - drift in float64; None if the model is float64 already."""
    wide = case.wide()
    if wide is None:
        yield from (None for _ in range(case.K))
        return
    ep, _, _ = wide.estimators()
    updates = ep.steps(wide.model, wide.cost, wide.x, wide.y, wide.free)
    yield from (combine((1, f), (-1, drift)) for f, drift in zip(updates, drift_steps(wide), strict=True))


def limit_steps(case: Comparison, around: Linearised) -> Iterator[Step]:
    """EP's processes in the limit beta -> 0, along the continued free phase  [lemma:ep].

    Like `eqprop.limit_steps`, in reverse mode: d s_{t+1} / d beta = J d s_t / d beta - N dl/ds.
    """
    model, x = case.model, case.x
    tangent = _zeros(case.free.state)
    for group in case.order:
        pull = case.pull(around.s)
        new_tangent = _taken(group, around.product(tangent, scale(detach(pull), -1.0)), tangent)
        moved = subtract(new_tangent, tangent)
        with torch.no_grad():
            new = detach(_taken(group, model.step(around.drive, around.s), around.s))
        still = all(torch.equal(a, b) for a, b in zip(new, around.s, strict=True))
        after = around if still else Linearised(model, x, new)
        if isinstance(model, PrimitiveDynamics) and not still:
            late, early = after.synapses(new_tangent), around.synapses(tangent)
            synapses = {name: late[name] - early[name] for name in late}
        else:
            synapses = around.synapses(moved)
        yield Step(moved, synapses)
        around, tangent = after, new_tangent


def frozen_steps(around: Linearised, first: State, order: Sequence[Turn]) -> Iterator[Step]:
    """J^t m for t = 0, ..., K-1 with J at the state reached, and the synapses' response.

    In sweeps it is d_{t+1} - d_t, where an update takes d to J d + m in the layers of its group.
    """
    moved, tangent = first, _zeros(first)
    for group in order:
        if group is not None:
            new = _taken(group, tuple(a + m for a, m in zip(around.product(tangent), first, strict=True)), tangent)
            moved, tangent = subtract(new, tangent), new
        yield Step(moved, around.synapses(moved))
        moved = moved if group is not None else around.product(moved)


def _taken(group: Turn, new: State, old: State) -> State:
    """The layers of a group from `new`, the others from `old`; all from `new` without a group."""
    return (
        new if group is None else tuple(a if n in group else b for n, (a, b) in enumerate(zip(new, old, strict=True)))
    )


def first_push(case: Comparison) -> State:
    """-dl/ds at the end of the free phase."""
    return scale(detach(case.pull(case.free.state)), -1.0)


def slope_excess(around: Linearised, push: State) -> State | None:
    """N (1 - D) p: the excess of the first move because the nudge bypasses squash; None if it is zero."""
    if not isinstance(around.model, PrimitiveDynamics) or around.model.nudge_site != "outside":
        return None
    excess = subtract(push, around.squashed(push))
    return around.product(_zeros(push), excess) if any(bool(layer.any()) for layer in excess) else None


def _slope_steps(around: Linearised, push: State, order: Sequence[Turn]) -> Iterator[Step | None]:
    first = slope_excess(around, push)
    if first is None:
        yield from (None for _ in order)
    else:
        yield from frozen_steps(around, first, order)


def _zeros(s: State) -> State:
    return tuple(torch.zeros_like(v) for v in s)


def negative(step: Step) -> Step:
    return Step(scale(step.neurons, -1.0), {name: -g for name, g in step.synapses.items()})


def combine(*terms: tuple[int, Step]) -> Step:
    """A signed sum of steps, over the parameters common to all."""
    names = [name for name in terms[0][1].synapses if all(name in step.synapses for _, step in terms)]
    layers = zip(*(step.neurons for _, step in terms), strict=True)
    signs = [sign for sign, _ in terms]
    return Step(
        tuple(_sum(signs, layer) for layer in layers),
        {name: _sum(signs, [step.synapses[name] for _, step in terms]) for name in names},
    )


def _sum(signs: list[int], values: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    wide = torch.float64 if any(v.dtype == torch.float64 for v in values) else values[0].dtype
    total = signs[0] * values[0].to(wide)
    for sign, value in zip(signs[1:], values[1:], strict=True):
        total.add_(value, alpha=sign)
    return total
