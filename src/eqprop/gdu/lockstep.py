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

Below them: `Linearised`, the Jacobian J = dF/ds at a state through products with vectors. Is it symmetric, does it
contract?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eqprop.cost import Problem
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.estimators import BPTT, EP, RBP
from eqprop.estimators.base import Step, trainable, update
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
        return replace(self.double(), free=replace(self.free, state=state, trail=()))

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


Receive = Callable[[State], Sequence[Tensor]]


class Linearised:
    """F linearised at a state s, per sample."""

    def __init__(self, model: Dynamics, x: Tensor, s: State) -> None:
        self.model, self.x, self.s = model, x, s
        with torch.no_grad():
            self.drive = model.drive(x)
        with torch.enable_grad():
            inputs, push = leaves(s), leaves(tuple(torch.zeros_like(v) for v in s))
            self._step = Tangent(model.step(self.drive, inputs, push), (*inputs, *push))
        self._receive: Receive | None = None

    def product(self, v: State, push: State | None = None) -> State:
        """J v, or J v + N p, where p is a nudge and N the derivative of the step by the nudge."""
        return self._step((*v, *(tuple(torch.zeros_like(a) for a in v) if push is None else push)))

    def squashed(self, v: State) -> State:
        """D v, where D is the derivative of squash at dPhi/ds(s): diag(sigma') for a prototypical net."""
        if not isinstance(self.model, PrimitiveDynamics):
            raise TypeError(
                f"{type(self.model).__name__} has no primitive, so no squash to differentiate; expected a "
                "PrimitiveDynamics. Define it with eqprop.from_primitive."
            )
        with torch.no_grad():
            inputs = leaves(self.model.gradient(self.drive, self.s))
        with torch.enable_grad():
            return Tangent(self.model.squash(inputs), inputs)(v)

    def synapses(self, v: State) -> dict[str, Tensor]:
        """The batch mean of d^2Phi/dtheta ds v, the parameters' response to a move v; (dF/dtheta)^T v without Phi."""
        if self._receive is None:
            self._receive = self._record_parameters()
        return dict(zip(trainable(self.model), self._receive(v), strict=True))

    @torch.enable_grad()
    def _record_parameters(self) -> Receive:
        """Differentiate `contrast`, since EP uses it.

        If it is itself computed by automatic differentiation it has no graph; dPhi/ds has one, and its derivative by
        theta is the same.
        """
        model, x, s = self.model, self.x, self.s
        if isinstance(model, PrimitiveDynamics):
            inputs = leaves(s)
            contrast = model.contrast(x, inputs, s)
            received = tuple(contrast[name] for name in trainable(model))
            if any(g.requires_grad for g in received):
                return Tangent(received, inputs)
            out = model.gradient(model.drive(x), s)
        else:
            out = model.step(model.drive(x), s)
        parameters, samples = tuple(trainable(model).values()), len(x)
        return lambda v: [g / samples for g in _pull(out, parameters, v)]


class Tangent:
    """v -> (d outputs / d inputs) v, on the graph that computed `outputs` from `inputs`."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._u = leaves(tuple(torch.zeros_like(o) for o in outputs))
        self._pulled = _pull(outputs, inputs, self._u, create_graph=True)

    def __call__(self, v: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return _pull(self._pulled, self._u, v)


def leaves(s: State) -> State:
    return tuple(v.detach().requires_grad_() for v in s)


def _pull(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], v: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """(d outputs / d inputs)^T v. Outputs without a graph contribute zero."""
    live = [(o, a) for o, a in zip(outputs, v, strict=True) if o.requires_grad]
    if not live:
        return tuple(torch.zeros_like(i) for i in inputs)
    return torch.autograd.grad(
        [o for o, _ in live],
        inputs,
        [a for _, a in live],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )


PROBES = 8
"""Pairs of random vectors per sample used to estimate the asymmetry."""

KRYLOV = 60
"""Steps of Arnoldi's iteration used to estimate the spectral radius."""

SATURATED_BELOW = 0.01
"""A neuron counts as saturated where sigma' is below this."""


def flat(s: State) -> Tensor:
    """All layers of each sample in one row, (B, N)."""
    return torch.cat([layer.flatten(1) for layer in s], 1)


def unflat(rows: Tensor, like: State) -> State:
    parts = rows.split([layer[0].numel() for layer in like], 1)
    return tuple(part.view_as(layer) for part, layer in zip(parts, like, strict=True))


def flat_product(around: Linearised) -> Callable[[Tensor], Tensor]:
    """v -> J v on rows (B, N), with J per sample at its state."""
    return lambda rows: flat(around.product(unflat(rows, around.s)))


def asymmetry(product: Callable[[Tensor], Tensor], rows: Tensor, seed: int) -> float:
    """|J - J^T| / (2 |J - c|) in Frobenius norm, estimated by random probes of u.Jv - v.Ju; 0 ... 1.

    c is the multiple of the identity nearest to J: the leak of an energy-based net is always symmetric and would
    mask the weights. 0 is symmetric, 1 antisymmetric; independent weights give 0.7.
    """
    source = torch.Generator().manual_seed(seed)
    odd, even, trace, size, samples = [], [], 0.0, 0.0, []
    for _ in range(PROBES):
        u, v = (torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows) for _ in range(2))
        ju, jv = product(u), product(v)
        uv, vu, dot = (u * jv).sum(1), (v * ju).sum(1), (u * v).sum(1)
        odd.append(uv - vu)
        samples.append((uv, vu, dot))
        trace += float((u * ju).sum() + (v * jv).sum())
        size += float((u * u).sum() + (v * v).sum())
    c = trace / size
    for uv, vu, dot in samples:
        even.append(0.5 * ((uv - c * dot).square() + (vu - c * dot).square()))
    whole = float(torch.stack(even).double().mean())
    return 0.5 * (float(torch.stack(odd).double().square().mean()) / whole) ** 0.5 if whole > 0.0 else 0.0


def spectral_radius(product: Callable[[Tensor], Tensor], rows: Tensor, seed: int) -> float:
    """max |lambda(J)| over the samples, by Arnoldi's iteration from a random vector.

    Below 1 the steady state attracts; the closer to 1, the slower.
    """
    source = torch.Generator().manual_seed(seed)
    size = min(KRYLOV, rows.shape[1])
    q = torch.randn(rows.shape, generator=source, dtype=torch.float64).to(rows)
    basis = [q / q.norm(dim=1, keepdim=True)]
    hessenberg = torch.zeros(rows.shape[0], size, size, dtype=torch.float64)
    for k in range(size):
        w = product(basis[k])
        # Two passes are enough: the second removes the rounding error of the first.
        for _ in range(2):
            for j, q in enumerate(basis):
                h = (q * w).sum(1, keepdim=True)
                w = w - h * q
                hessenberg[:, j, k] += h[:, 0].double().cpu()
        norm = w.norm(dim=1, keepdim=True)
        if k + 1 == size or not bool((norm > 0).any()):
            break
        hessenberg[:, k + 1, k] = norm[:, 0].double().cpu()
        basis.append(w / norm.clamp_min(torch.finfo(w.dtype).tiny))
    return float(torch.linalg.eigvals(hessenberg).abs().max())


@torch.no_grad()
def saturated(around: Linearised, seed: int) -> float:
    """The fraction of neurons over all samples that cannot carry a signal: sigma' below `SATURATED_BELOW`.

    sigma' is that of squash for a prototypical net, and of the model's `activation` at s for an energy-based one.
    For a model with neither, a neuron counts if it does not respond at all: a zero row of J.
    """
    s = around.s
    if isinstance(around.model, PrimitiveDynamics):
        slope = flat(around.squashed(tuple(torch.ones_like(layer) for layer in s)))
        own = getattr(getattr(around.model, "activation", None), "slope", None)
        if bool((slope == 1.0).all()) and own is not None:
            slope = flat(tuple(own(layer) for layer in s))
        if not bool((slope == 1.0).all()):
            return _fraction(slope.abs() < SATURATED_BELOW)
    source = torch.Generator().manual_seed(seed)
    product = flat_product(around)
    silent = torch.ones_like(flat(s), dtype=torch.bool)
    for _ in range(2):
        v = torch.randn(silent.shape, generator=source, dtype=torch.float64).to(s[0])
        silent &= product(v) == 0.0
    return _fraction(silent)


def _fraction(mask: Tensor) -> float:
    return float(mask.double().mean())
